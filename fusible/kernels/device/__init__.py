"""Device code that kernels of several packages share."""
