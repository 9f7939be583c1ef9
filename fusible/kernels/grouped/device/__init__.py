"""Device code of the grouped products in Triton."""
