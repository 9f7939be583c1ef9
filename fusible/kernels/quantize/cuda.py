"""CUDA implementations of ``fusible::quantize`` and ``fusible::dequantize``.

Importing this module registers them; cutlass is imported at the first launch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusible.kernels.quantize.spec import DequantizeSpec, QuantizeSpec, supports_format
from fusible.kernels.runtime.gpu import PTX_NAMES, runs_kernels
from fusible.kernels.runtime.launch import aligned, launch
from fusible.recipes.formats import NumberFormat
from fusible.recipes.matrix import Operand, QuantizedMatrix, Uses
from fusible.recipes.quantize_ops import (
    Implementation,
    dequantize_by_formulas,
    empty,
    implement_quantizers,
    quantize_by_formulas,
)

_MIN_SM = 89


def supports_matrix(matrix: Tensor, dtype: torch.dtype, ends: Tensor | None) -> bool:
    """Whether the kernels support ``matrix``; otherwise the formulas run, with the same bits.

    ``dtype`` is that of the values in high precision.
    """
    return (
        dtype in PTX_NAMES
        and matrix.shape[-1] % 8 == 0
        and matrix.numel() > 0
        and (ends is None or (ends.is_contiguous() and ends.dtype in (torch.int32, torch.int64)))
        and runs_kernels(matrix.device, _MIN_SM)
    )


def _quantize(
    x: Tensor, ends: Tensor | None, fmt: NumberFormat, uses: Uses, key: Tensor | None
) -> Operand:
    if not (any(uses) and supports_format(fmt) and supports_matrix(x, x.dtype, ends)):
        return quantize_by_formulas(x, ends, fmt, uses, key)
    x = with_aligned_rows(x)
    operand = empty(x, ends, fmt, uses)
    spec = QuantizeSpec(fmt, PTX_NAMES[x.dtype], ends is not None, has_int64_ends(ends), *uses)
    amax = None
    if spec.has_matrix_scales:
        amax = amax_bits(x, ends, fmt, uses.rowwise, uses.columnwise)
    row, column, *values = operand
    tensors = *(row or _NO_TENSORS)[:3], *(column or _NO_TENSORS)[:3], *values
    col_blocks = 0 if column is None else column.scale.numel() // x.shape[-1]
    key = None if key is None or not fmt.stochastic else key.contiguous()
    arguments = x, ends, amax, key, *tensors, *sizes_of(x, ends), col_blocks
    launch("quantize.quantize.quantize", (spec,), x.device, *arguments)
    return operand


_NO_TENSORS = None, None, None


def amax_bits(
    x: Tensor,
    ends: Tensor | None,
    fmt: NumberFormat,
    rowwise: bool = True,
    columnwise: bool = True,
    index: Tensor | None = None,
    pass_chunks: int = 0,
) -> Tensor:
    """The bits of FP32 of the largest magnitude in each matrix or group, int32.

    Of a format with Hadamard transform ``[2, groups]``: for the row-wise use, and after the
    transform for the column-wise one, each where asked for. ``x`` has rows equally far apart, which
    begin at 16 bytes. With ``index`` and ``pass_chunks``, those of `k_major`, it is ``x[index]``.
    One launch, and one that clears.
    """
    uses = (rowwise, columnwise) if fmt.hadamard else (True, True)
    spec = QuantizeSpec(fmt, PTX_NAMES[x.dtype], ends is not None, has_int64_ends(ends), *uses)
    if index is not None:
        spec = spec._replace(k_major=True, gathered=True)
    sizes = sizes_of(x, ends, index)
    amax = x.new_zeros(*(2,) * fmt.hadamard, sizes.groups, dtype=torch.int32)
    arguments = x, ends, index, amax, *sizes, pass_chunks
    launch("quantize.quantize.amax", (spec,), x.device, *arguments)
    return amax


class Sizes(NamedTuple):
    """Sizes of a matrix, or of equal matrices or groups one after another, for kernels."""

    rows: int
    """The rows of all matrices."""
    columns: int
    pitch: int
    groups: int
    matrix_rows: int


def sizes_of(x: Tensor, ends: Tensor | None, index: Tensor | None = None) -> Sizes:
    """The sizes of ``x`` ``[..., rows, columns]``, or of ``x[index]``."""
    *lead, rows, columns = x.shape
    rows = rows if index is None else index.shape[0]
    matrices = math.prod(lead)
    groups = matrices if ends is None else ends.shape[0]
    return Sizes(matrices * rows, columns, x.stride(-2), groups, rows)


def with_aligned_rows(x: Tensor) -> Tensor:
    """``x``, or a copy, whose rows are equally far apart and begin at 16 bytes."""
    *lead, pitch, step = x.stride()
    fits = step == 1 and pitch * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0
    if fits and lead:
        apart = [size * inner for size, inner in zip(x.shape[1:-1], x.stride()[1:-1], strict=True)]
        fits = lead == apart
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def has_int64_ends(ends: Tensor | None) -> bool:
    """Whether there are end rows, of 64 bits."""
    return ends is not None and ends.dtype == torch.int64


def _dequantize(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    matrix.check_sizes()
    data, scale, tensor_scale, fmt, columnwise, ends = matrix
    *lead, rows, columns = matrix.shape
    if columns % 8 or not (supports_format(fmt) and supports_matrix(data, dtype, ends)):
        return dequantize_by_formulas(matrix, dtype)
    data, scale = aligned(data), aligned(scale)
    tensor_scale = None if tensor_scale is None else tensor_scale.contiguous()
    out = data.new_empty(*lead, rows, columns, dtype=dtype)
    groups = data.shape[:-2].numel() if ends is None else ends.shape[0]
    spec = DequantizeSpec(fmt, PTX_NAMES[dtype], ends is not None, has_int64_ends(ends), columnwise)
    arguments = data, scale, tensor_scale, ends, out, out.numel() // columns, columns, groups, rows
    launch("quantize.dequantize.dequantize", (spec,), data.device, *arguments)
    return out


implement_quantizers(Implementation(_quantize, _dequantize))
