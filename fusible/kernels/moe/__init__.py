"""Routing tokens and moving their rows: the contracts with their definitions, and the kernels."""
