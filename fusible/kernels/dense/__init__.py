"""Backwards of dense ops in one pass: an activation with a bias, an RMS norm with a residual."""
