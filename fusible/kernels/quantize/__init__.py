"""Quantization on CUDA in one launch: importing this registers the kernels with their ops."""

from fusible.kernels.quantize.cuda import takes

__all__ = ["takes"]
