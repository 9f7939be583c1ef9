"""Inputs of activations that are saved for the backward in FP8, in the format `SAVED_INPUT`."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.kernels.quantize.k_major import ScaledMatrix, quantize_k_major
from fusible.recipes.formats import SAVED_INPUT
from fusible.recipes.matrix import QuantizedMatrix
from fusible.recipes.quantize_ops import dequantize_matrix


def quantize_input(x: Tensor) -> ScaledMatrix:
    """``x`` ``[rows, features]`` as it is saved."""
    row = quantize_k_major(x, SAVED_INPUT, rowwise=True, columnwise=False).row
    assert row is not None
    return row


def input_values(x: Tensor | ScaledMatrix, dtype: torch.dtype) -> Tensor:
    """The values of a saved input in ``dtype``; one in high precision as it is.

    A number near the largest of FP16 may have been rounded up to one that FP16 does not have.
    """
    if isinstance(x, Tensor):
        return x
    values = dequantize_matrix(QuantizedMatrix(*x[:2], None, SAVED_INPUT), dtype)
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        values.clamp_(-largest, largest)
    return values
