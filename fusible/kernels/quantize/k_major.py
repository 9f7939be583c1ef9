"""Operands of the FP8 products of SM90: quantized, and the column-wise use transposed (K-major).

Eight-bit operands are read with the reduced dimension contiguous. So the row-wise use lies as the
input does, and the column-wise use is transposed; both come from one pass. Where rows are reduced,
groups of them begin at multiples of 128, with zeros between. The op's definition is
``quantization.quantize`` and copies, on any device; the kernel for CUDA gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NotImplementedType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.kernels.quantize.cuda import compiled, is_wide, loadable, sizes_of, takes
from fusible.kernels.quantize.spec import DTYPES, PIECE, QuantizeSpec
from fusible.kernels.runtime.launch import launch
from fusible.kernels.runtime.library import define
from fusible.recipes.blocks import padded_size, place_rows
from fusible.recipes.formats import BLOCKS, FP8_BLOCK, NumberFormat
from fusible.recipes.quantization import check_ends, check_input, quantize


class ScaledMatrix(NamedTuple):
    """FP8 elements and their FP32 scales, as products reduced over the last dimension read them."""

    data: Tensor
    scale: Tensor


class KMajor(NamedTuple):
    """Operands for products that reduce the columns of ``[rows, columns]``, and the rows.

    In blocks of 1x128: ``value[r, k] = data[r, k] * scale[r, k // 128]``, and for the column-wise
    use ``value[p, c] = data[p, c] * scale[p // 128, c]`` of padded rows ``p``.
    """

    row: ScaledMatrix | None
    """Data ``[rows, columns]``; scales ``[rows, ceil(columns / 128)]``, a view of contiguous
    ``[ceil(columns / 128), rows]``. Of 128x128 blocks: data ``[..., rows, columns]``, scales
    ``[..., ceil(rows / 128), ceil(columns / 128)]``."""
    column: ScaledMatrix | None
    """Data ``[padded, columns]``, a view of contiguous ``[columns, padded]``, and scales
    ``[padded / 128, columns]``, where ``padded`` is ``padded_size(rows, groups, 128)``. Rows behind
    a group's end, up to a multiple of 128, are zero; what follows the last group's is not written.
    Of 128x128 blocks: contiguous data ``[..., columns, rows]``, scales transposed as well, a view.
    """
    padded_ends: Tensor | None
    """Int32 ``[groups]``, end rows of the padded groups; None without groups."""


Pieces = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Contiguous ``[rows, columns]``, its scales as they are stored, the same of ``[columns, padded]``,
and the padded ends. Empty where they are not wanted, or are the same."""


def quantize_k_major(
    x: Tensor,
    fmt: NumberFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    ends: Tensor | None = None,
) -> KMajor:
    """Quantize ``x`` for FP8 products, in one launch where the kernel serves.

    Of 1x128 blocks ``x`` is ``[rows, columns]``, and ``ends`` the end rows of its groups. Rows past
    the last group are zeros in the row-wise use. Of 128x128 blocks ``x`` is ``[..., rows,
    columns]``, such as weights ``[E, N, K]``. A block that is NaN may have NaN for the zeros of its
    padding. Raises what ``quantization.quantize`` raises, and ValueError for other formats.
    """
    pieces = _quantize_op(x.detach(), ends, *fmt.as_constants(), rowwise, columnwise)
    row_data, row_scale, column_data, column_scale, padded_ends = pieces
    if fmt.directional:
        row_scale, column_data = row_scale.t(), column_data.t()
    else:
        column_scale = row_scale.mT
    return KMajor(
        ScaledMatrix(row_data, row_scale) if rowwise else None,
        ScaledMatrix(column_data, column_scale) if columnwise else None,
        None if ends is None else padded_ends,
    )


def _check(x: Tensor, ends: Tensor | None, fmt: NumberFormat) -> None:
    check_ends(x, fmt, ends)
    check_input(x, fmt)
    if fmt.element.per_byte > 1 or fmt.block not in BLOCKS or fmt.scale_dtype != torch.float32:
        raise ValueError(
            "operands of FP8 products must be of FP8 elements with an FP32 scale for each 1x128 or "
            f"128x128, got {fmt}; use quantize_matrix"
        )
    if fmt.directional and x.ndim != 2:
        raise ValueError(
            f"rows to quantize in blocks of 1x128 must be 2-D, got shape {tuple(x.shape)}; "
            "use x.flatten(0, -2)"
        )


def _quantize(
    x: Tensor,
    ends: Tensor | None,
    name: str,
    element: str,
    block: Sequence[int],
    scale: str,
    amax_epsilon: float,
    rowwise: bool,
    columnwise: bool,
) -> Pieces:
    """The definition of the op."""
    fmt = NumberFormat.from_constants(name, element, block, scale, amax_epsilon)
    _check(x, ends, fmt)
    row_data, row_scale, column_data, column_scale, padded_ends = _outputs(
        x, ends, name, element, block, scale, amax_epsilon, False, False
    )
    if ends is not None:
        padded_ends, places = place_rows(ends.clamp(max=len(x)), len(x), FP8_BLOCK)
    if rowwise or not fmt.directional:
        row = quantize(x.contiguous(), fmt, ends=ends)
        row_scale = row.scale.t().contiguous() if fmt.directional else row.scale
        row_data = row.data if rowwise else row_data
    if columnwise and fmt.directional:
        size = padded_size(len(x), 1 if ends is None else len(ends), FP8_BLOCK)
        padded = x.new_zeros(size + 1, x.shape[1])  # one row more, for rows of no group
        if ends is None:
            padded[: len(x)] = x
        else:
            padded.index_copy_(0, places, x)
        column = quantize(padded[:size], fmt, columnwise=True)
        column_data, column_scale = _transposed(column.data), column.scale
    elif columnwise:
        column_data = _transposed(row.data)
    return row_data, row_scale, column_data, column_scale, padded_ends


def _transposed(data: Tensor) -> Tensor:
    """A contiguous copy of FP8 ``data`` ``[..., rows, columns]`` as ``[..., columns, rows]``."""
    transposed = data.view(torch.uint8).mT.clone(memory_format=torch.contiguous_format)
    return transposed.view(data.dtype)


def _transposed_like(data: Tensor) -> Tensor:
    *lead, rows, columns = data.shape
    return data.new_empty(*lead, columns, rows)


def _outputs(x: Tensor, ends: Tensor | None, *options: Any) -> Pieces:
    """Allocate what the op returns."""
    *constants, rowwise, columnwise = options
    fmt = NumberFormat.from_constants(*constants)
    *lead, rows, columns = x.shape
    blocks = (columns + FP8_BLOCK - 1) // FP8_BLOCK
    size, column_scale = rows, [0]
    row_scale = [*lead, (rows + FP8_BLOCK - 1) // FP8_BLOCK, blocks]
    if fmt.directional:
        size = padded_size(rows, 1 if ends is None else ends.shape[0], FP8_BLOCK)
        row_scale, column_scale = [blocks, rows], [size // FP8_BLOCK, columns]

    def empty(wanted: bool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return x.new_empty(shape if wanted else (0,), dtype=dtype)

    return (
        empty(rowwise, x.shape, fmt.element.dtype),
        empty(rowwise or not fmt.directional, row_scale, torch.float32),
        empty(columnwise, (*lead, columns, size), fmt.element.dtype),
        empty(columnwise, column_scale, torch.float32),
        empty(ends is not None, () if ends is None else ends.shape, torch.int32),
    )


def _cuda(x: Tensor, ends: Tensor | None, *options: Any) -> Pieces | NotImplementedType:
    *constants, rowwise, columnwise = options
    fmt = NumberFormat.from_constants(*constants)
    _check(x, ends, fmt)
    fills_stores = fmt.directional or x.shape[-2] % PIECE == 0
    if not ((rowwise or columnwise) and fills_stores and takes(x, x.dtype, ends)):
        return NotImplemented
    x = loadable(x)
    pieces = _outputs(x, ends, *options)
    read = DTYPES[x.dtype], ends is not None, is_wide(ends)
    spec = QuantizeSpec(fmt, *read, rowwise, columnwise, k_major=True)
    sizes = *sizes_of(x, ends), pieces[2].shape[-1]
    launch(compiled, ("k_major", spec), x.device, x, ends, *pieces, *sizes)
    return pieces


_quantize_op = define(_quantize, _outputs, [_cuda], name="quantize_k_major")
transposed = define(_transposed, _transposed_like, name="transposed_fp8")
