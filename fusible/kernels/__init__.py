"""Kernels: the ``torch.library`` ops, their definitions in PyTorch, and device code."""
