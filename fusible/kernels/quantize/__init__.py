"""Quantization on CUDA in one launch: importing this registers the kernels with their ops."""

from fusible.kernels.quantize.cuda import supports_matrix
from fusible.kernels.quantize.glu_backward import GluGradients, quantize_glu_backward
from fusible.kernels.quantize.k_major import (
    KMajorOperands,
    ScaledMatrix,
    elements_and_scale,
    quantize_k_major,
    stored_operand,
    transposed,
)

__all__ = [
    "GluGradients",
    "KMajorOperands",
    "ScaledMatrix",
    "elements_and_scale",
    "quantize_glu_backward",
    "quantize_k_major",
    "stored_operand",
    "supports_matrix",
    "transposed",
]
