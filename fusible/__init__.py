"""An operation fuser for PyTorch."""
