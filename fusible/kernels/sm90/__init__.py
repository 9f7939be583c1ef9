"""Hopper (SM90) kernels written in the CuTe DSL: grouped matrix products with fused epilogues.

Rows belong to groups (experts); ``ends`` (int32, on the device) holds the end row of each group.
Groups may be empty and of any size; rows past the last end give zeros. Weights are one tensor
``[E, N, K]`` or E tensors ``[N, K]``, in either memory order. `limits` has what the kernels
support. Importing this package imports no cutlass; a kernel is compiled, or read from disk, at its
first launch.
"""
