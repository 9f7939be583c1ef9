"""Quantization on CUDA in one launch: importing this registers the kernels with their ops."""

import fusible.kernels.quantize.cuda  # noqa: F401
