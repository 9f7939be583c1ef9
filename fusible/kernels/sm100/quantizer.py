"""Rows of ragged groups quantized into the layout of the SM100 kernels, in one pass on CUDA.

The op's definition is ``quantize_matrix``, ``packed_rows``, ``packed_columns`` and ``grouped_sum``,
on any device; the kernel for CUDA, which Hopper runs too, gives the same values, and the same bytes
but for elements of padding under a scale that is NaN. Where columns are transformed or elements
rounded stochastically, the definition runs on CUDA too: the kernels of ``fusible.kernels.quantize``
and PyTorch's, which pack. NVFP4 needs a pass before, for the largest magnitude of each group,
unless the kernel that wrote the rows has given it. The sums of the rows need a small launch
afterwards, which reads an eighth of a byte for each value; they are FP32, in an order that the
groups alone decide.
"""

from __future__ import annotations

from types import NotImplementedType
from typing import NamedTuple

import torch
from torch import Tensor

from fusible.kernels.grouped import grouped_sum
from fusible.kernels.quantize.cuda import amax_bits, supports_matrix
from fusible.kernels.runtime.gpu import capability
from fusible.kernels.runtime.launch import launch
from fusible.kernels.sm100.checks import require
from fusible.kernels.sm100.padding import PaddedGroups, packed_columns, packed_rows
from fusible.kernels.sm100.spec import ROWS, PackedQuantizeSpec
from fusible.library import define
from fusible.recipes import quantization
from fusible.recipes.formats import NumberFormat
from fusible.recipes.matrix import QuantizedMatrix, Uses
from fusible.recipes.quantize_ops import quantize_for, random_key

PackedPieces = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Row-wise data ``[size, columns / per_byte]`` and packed scales, the same for the column-wise use,
as ``packed_columns`` lays them out, the FP32 factor of each group, the sums of the rows of each
group ``[groups, columns]``, and the factors of transformed columns, if they are. Empty where they
are not wanted."""


class QuantizeOptions(NamedTuple):
    """Options of `quantize_packed`."""

    rowwise: bool
    columnwise: bool
    sums: torch.dtype | None = None
    """Asks for the sums of the rows of each group, in BF16 or FP32."""
    row_scale: Tensor | None = None
    """``[rows]``, by which each row is multiplied before it is summed."""
    amax: Tensor | None = None
    """FP32 ``[groups, 1 or 2]``, the largest magnitudes of the parts of what was rounded to the
    rows, where they are known. They leave out NaN and the values within 32 columns of one, and are
    negative without rows. With them, NaN makes its own blocks NaN, else the whole group."""
    key: Tensor | None = None
    """The key of stochastic rounding; drawn by default."""


def quantize_packed(
    x: Tensor,
    fmt: NumberFormat,
    ends: Tensor,
    padded: PaddedGroups,
    options: QuantizeOptions,
) -> PackedPieces:
    """``x`` ``[rows, columns]`` in groups up to ``ends`` in ``fmt``, padded and packed.

    The columns are a multiple of 32.
    """
    if options.amax is not None:
        _check_amax(options.amax, x, ends, fmt)
    if fmt.stochastic and options.key is None:
        options = options._replace(key=random_key(x))
    return _quantize_op(x, ends, padded, fmt, options)


def _check_amax(amax: Tensor, x: Tensor, ends: Tensor, fmt: NumberFormat) -> None:
    shapes = [(ends.shape[0], parts) for parts in (1, 2)]
    require(
        amax.dtype == torch.float32 and amax.shape in shapes and amax.device == x.device,
        f"amax must be float32 of shape {shapes[0]} or {shapes[1]} on {x.device}",
        f"{amax.dtype} of shape {tuple(amax.shape)} on {amax.device}",
    )
    named = fmt.has_tensor_scale and not fmt.hadamard
    require(named, "amax must be None for a format without group scales or transformed", fmt.name)


def _quantize(
    x: Tensor, ends: Tensor, padded: PaddedGroups, fmt: NumberFormat, options: QuantizeOptions
) -> PackedPieces:
    row, column = _quantized_matrices(x, ends, fmt, options)
    pieces = [*_outputs(x, ends, padded, fmt, QuantizeOptions(False, False))]
    if row is not None:
        pieces[0:2] = packed_rows(row, padded)
    if column is not None:
        pieces[2:4] = packed_columns(column, padded)
    if row is not None and row.tensor_scale is not None:
        pieces[4] = row.tensor_scale
    if column is not None and column.tensor_scale is not None:
        pieces[6 if fmt.hadamard else 4] = column.tensor_scale
    if options.sums is not None:
        sums = grouped_sum(x.to(torch.float32), ends, options.row_scale)
        pieces[5] = sums.to(options.sums)
    return tuple(pieces)  # type: ignore[return-value]


def _quantized_matrices(
    x: Tensor, ends: Tensor, fmt: NumberFormat, options: QuantizeOptions
) -> tuple[QuantizedMatrix | None, QuantizedMatrix | None]:
    rowwise, columnwise, _, _, amax, key = options
    if amax is None:
        return quantize_for(x, fmt, Uses(rowwise, columnwise), ends, key)[:2]
    amax = amax.amax(1).clamp(min=0).to(x.dtype).float()
    row, column = (
        quantization.quantize(x, fmt, columnwise=across, ends=ends, amax=amax, key=key)
        if wanted
        else None
        for across, wanted in ((False, rowwise), (True, columnwise))
    )
    return row, column


def _outputs(
    x: Tensor, ends: Tensor, padded: PaddedGroups, fmt: NumberFormat, options: QuantizeOptions
) -> PackedPieces:
    rowwise, columnwise, sums, *_ = options
    size = padded.size
    assert fmt.block is not None
    columns, along, per_byte = x.shape[1], fmt.block[1], fmt.element.per_byte
    lines, atoms = (columns + 127) // 128, (columns // along + 3) // 4
    scaled = fmt.has_tensor_scale and (rowwise or (columnwise and not fmt.hadamard))
    apart = fmt.hadamard and columnwise

    def data(wanted: bool, *shape: int) -> Tensor:
        return x.new_empty(shape if wanted else 0, dtype=fmt.element.dtype)

    def scales(wanted: bool, *shape: int) -> Tensor:
        # What pads the scales is zero; the kernel writes those that there are.
        make = x.new_empty if columns % 128 == 0 else x.new_zeros
        return make(shape if wanted else 0, dtype=torch.uint8).view(fmt.scale_dtype)

    return (
        data(rowwise, size, columns // per_byte),
        scales(rowwise, size // 128, atoms, 32, 4, 4),
        data(columnwise, *((size, columns) if per_byte == 1 else (columns, size // 2))),
        scales(columnwise, 128 * lines, size // along),
        x.new_empty(ends.shape if scaled else 0, dtype=torch.float32),
        x.new_empty((0,) if sums is None else (*ends.shape, columns), dtype=sums),
        x.new_empty(ends.shape if apart else 0, dtype=torch.float32),
    )


def _takes(x: Tensor, ends: Tensor, sums: torch.dtype | None) -> bool:
    """Whether the kernel supports ``x`` and the dtype of the sums."""
    return (
        x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and ends.dtype == torch.int32
        and sums in (None, torch.bfloat16, torch.float32)
        and supports_matrix(x, x.dtype, ends)
    )


def _cuda(
    x: Tensor, ends: Tensor, padded: PaddedGroups, fmt: NumberFormat, options: QuantizeOptions
) -> PackedPieces | NotImplementedType:
    rowwise, columnwise, sums, row_scale, amax, _ = options
    size, plain = padded.size, not (fmt.hadamard or fmt.stochastic)
    if not (plain and (rowwise or columnwise) and size and _takes(x, ends, sums)):
        return NotImplemented
    columns, groups = x.shape[1], len(ends)
    uses = rowwise, columnwise, sums is not None, row_scale is not None
    spec = PackedQuantizeSpec(fmt, *uses, fp4_instruction=capability(x.device) >= (10, 0))
    pieces = _outputs(x, ends, padded, fmt, options)
    parts = 1 if amax is None else amax.shape[1]
    if fmt.has_tensor_scale:
        amax = amax_bits(x, ends, fmt) if amax is None else amax.contiguous()
    scale = None if row_scale is None else row_scale.to(torch.float32).contiguous()
    partial = x.new_empty((size // ROWS, columns) if spec.sums else 0, dtype=torch.float32)
    sizes = size, columns, x.stride(0), groups, parts
    tensors = x, scale, amax, ends, padded.ends, *pieces[:5], partial
    launch("sm100.quantize.quantize", (spec,), x.device, *tensors, *sizes)
    if spec.sums:
        what = ROWS, sums == torch.float32
        to_sum = partial, ends, padded.ends, pieces[5]
        launch("sm100.quantize.sum_blocks", what, x.device, *to_sum, columns, groups)
    return pieces


_quantize_op = define(_quantize, _outputs, [_cuda], name="sm100_quantize")
