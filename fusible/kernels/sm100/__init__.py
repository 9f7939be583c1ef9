"""Blackwell (SM 10.0, 10.3) kernels: grouped products of nvidia-cudnn-frontend, typed, checked.

Rows are in groups of whole 256 rows (``padding`` pads others), ``ends`` (int32 on the device) holds
the end row of each group, and rows past the last are not computed. Operands are BF16, or
MXFP8 (E4M3 elements, E8M0 scales per 32), or NVFP4 (E2M1 in bytes, E4M3 scales per 16, and one FP32
factor per group in ``alpha``), scales packed for the MMA. Weights are one tensor or one per group.
Importing this package imports no cutlass and no cudnn; a kernel is compiled at its first call,
which also reads ``ends`` once for the weight gradient: warm up before capturing a CUDA graph.
"""
