"""Hopper (SM90) kernels written in the CuTe DSL."""
