"""Operands of the FP8 products of SM90: quantized, and the column-wise use transposed (K-major).

Eight-bit operands are read with the reduced dimension contiguous. So the row-wise use lies as the
input does, and the column-wise use is transposed; both come from one pass, after another one for
the largest magnitudes where a scale covers a whole group or matrix. Where rows are reduced,
groups of them begin at multiples of 128, with zeros between. The op's definition is
``quantization.quantize`` and copies, on any device; the kernel for CUDA gives the same bits.

An index may say which row of the input each row is: then rows are gathered while they are
quantized, and are not written in high precision.

The results are held by these types::

                      layout                                       read by
    KMajorPieces      as kernels write it: the results of the op   `as_operands`
    ScaledMatrix      as the library ops of products take it,      those ops and their definitions
                      views
    PackedOperand     as kernels write it, in one allocation       unchecked launches
    KMajorOperands    one of these for each use                    fused ops
    GluGradients      these, and other gradients                   fused ops

Unchecked launches (`fused.fp8_fast_path`) take no views, and few allocations: both cost host time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from types import NotImplementedType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.kernels.quantize.cuda import (
    amax_bits,
    sizes_of,
    supports_matrix,
    with_aligned_rows,
)
from fusible.kernels.quantize.spec import PIECE_ROWS, QuantizeSpec
from fusible.kernels.runtime.gpu import PTX_NAMES
from fusible.kernels.runtime.launch import aligned, launch
from fusible.library import define
from fusible.recipes.blocks import (
    gather_rows,
    group_of_row,
    padded_size,
    place_rows,
    with_zero_tail,
)
from fusible.recipes.formats import BLOCKS, FP8_BLOCK, NumberFormat
from fusible.recipes.matrix import QuantizedMatrix
from fusible.recipes.quantization import check_group_ends, check_input, quantize


class ScaledMatrix(NamedTuple):
    """FP8 elements and their FP32 scales, as library ops of products take them.

    For the layouts see `KMajorOperands`.
    """

    data: Tensor
    scale: Tensor
    ends: Tensor | None = None
    """Of a column-wise use of groups: int32 ``[groups]``, end rows of the padded groups."""


def elements_and_scale(operand: Tensor | ScaledMatrix) -> tuple[Tensor, Tensor | None]:
    """The elements of an operand of a product, and the scales that FP8 ones have."""
    return operand[:2] if isinstance(operand, ScaledMatrix) else (operand, None)


class RowsToQuantize(NamedTuple):
    """The rows that are quantized; see `quantize_k_major`."""

    x: Tensor
    ends: Tensor | None = None
    row_index: Tensor | None = None

    @property
    def rows(self) -> int:
        """How many rows each matrix has."""
        return self.x.shape[-2] if self.row_index is None else self.row_index.shape[0]


class KMajorOperands(NamedTuple):
    """Operands for products that reduce the columns of ``[rows, columns]``, and the rows.

    From `launch_quantize` each is a `PackedOperand`; None where it is not wanted.

    In blocks of 1x128: ``value[r, k] = data[r, k] * scale[r, k // 128]``, and for the column-wise
    use ``value[p, c] = data[p, c] * scale[p // 128, c]`` of padded rows ``p``. A scale of a whole
    matrix or group is repeated for these blocks.
    """

    row: Any
    """A `ScaledMatrix`: data ``[rows, columns]``; scales ``[rows, ceil(columns / 128)]``, a view of
    contiguous ``[ceil(columns / 128), rows]``, or of groups an expanded one of ``[rows]``. Of
    128x128 blocks and whole matrices: data ``[..., rows, columns]``, scales ``[...,
    ceil(rows / 128), ceil(columns / 128)]``."""
    column: Any
    """A `ScaledMatrix`: data ``[padded, columns]``, a view of contiguous ``[columns, padded]``, and
    scales ``[padded / 128, columns]``, of groups an expanded view of ``[padded / 128]``;
    ``padded`` is ``padded_size(rows, groups, 128)``. Rows behind a group's end, up to a multiple of
    128, are zero; what follows the last group's is not written. Of 128x128 blocks and whole
    matrices: contiguous data ``[..., columns, rows]``, scales transposed as well, a view."""


_L2_BYTES = 8 << 20
"""Bytes of gathered columns in one pass: what the L2 cache can hold."""

KMajorPieces = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Contiguous ``[rows, columns]``, its scales as they are stored, the same of ``[columns, padded]``,
and the padded ends. Empty where they are not wanted, or are the same. Of a whole matrix or group
scales are stored for each row, and for each 128 padded rows."""


def quantize_k_major(
    x: Tensor,
    fmt: NumberFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    ends: Tensor | None = None,
    index: Tensor | None = None,
) -> KMajorOperands:
    """Quantize ``x`` for FP8 products, in one launch where the kernel supports it.

    Of 1x128 blocks ``x`` is ``[rows, columns]``, and ``ends`` the end rows of its groups. Rows past
    the last group are zeros in the row-wise use. Of 128x128 blocks ``x`` is ``[..., rows,
    columns]``, such as weights ``[E, N, K]``. A format of whole matrices is as that of rows with
    ``ends``, which has one scale for each group, and as that of 128x128 without. A block that is
    NaN may have NaN for the zeros of its padding.

    With ``index``, int32 ``[R]``, of 1x128 blocks or of groups, it is ``x[index]`` that is
    quantized, without a copy; ``ends`` are those of its groups. What ``index`` holds past the last
    group is not read.

    Raises what ``quantization.quantize`` raises, and ValueError for other formats or ``index``.
    """
    pieces = quantize_pieces(RowsToQuantize(x.detach(), ends, index), fmt, rowwise, columnwise)
    return as_operands(pieces, fmt, rowwise, columnwise, ends is not None)


class PackedLayout(NamedTuple):
    """Where elements, scales and ends of a `PackedOperand` lie: offsets in bytes."""

    shape: tuple[int, int]
    """Of the matrix, not of the memory: column-wise ``(padded, columns)``, though the elements are
    ``[columns, padded]``."""
    scale_offset: int
    """A multiple of 16: features are, and padded rows of 128."""
    scale_shape: tuple[int, ...]
    scale_pitch: int
    """Distance, in scales, of those of neighbouring rows; column-wise of columns."""
    scale_block: int
    """Distance, in scales, of those of neighbouring blocks of the reduction."""
    ends_offset: int
    nbytes: int


@lru_cache(maxsize=1024)
def packed_layout(
    rows: int, columns: int, groups: int, fmt: NumberFormat, columnwise: bool
) -> PackedLayout:
    """The layout of an operand of ``[rows, columns]``, in 1x128 blocks or by group."""
    if columnwise:
        rows = padded_size(rows, groups, FP8_BLOCK)
    across, reduced = (columns, rows) if columnwise else (rows, columns)
    shape: tuple[int, ...] = -(-reduced // FP8_BLOCK), across
    pitch, block = 1, across
    if fmt.block is None:
        shape, pitch, block = ((shape[0],), 0, 1) if columnwise else ((across,), 1, 0)
    scales = rows * columns
    ends = scales + 4 * math.prod(shape)
    nbytes = ends + 4 * groups if columnwise else ends
    return PackedLayout((rows, columns), scales, shape, pitch, block, ends, nbytes)


class PackedOperand(NamedTuple):
    """Quantized rows of groups for one of their uses, as kernels write them, in one allocation.

    Elements, contiguous: row-wise ``[rows, columns]``, column-wise ``[columns, padded]``. Then FP32
    scales: row-wise ``[ceil(columns / 128), rows]``, column-wise ``[padded / 128, columns]``; with
    one scale for each group ``[rows]`` and ``[padded / 128]``. Then, column-wise, int32
    ``[groups]``, the end rows of the padded groups. Launches take it as they take a tensor.
    """

    memory: Tensor
    layout: PackedLayout

    @property
    def shape(self) -> tuple[int, int]:
        """See `PackedLayout.shape`."""
        return self.layout.shape

    def data_ptr(self) -> int:
        """The address of the elements."""
        return self.memory.data_ptr()

    def new_empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        """A tensor without values on the same device."""
        return self.memory.new_empty(*size, dtype=dtype)

    def addresses(self) -> tuple[int, int, int]:
        """Those of the elements, the scales and the ends."""
        data = self.memory.data_ptr()
        return data, data + self.layout.scale_offset, data + self.layout.ends_offset

    def column(self, fmt: NumberFormat) -> ScaledMatrix:
        """The column-wise operand, views; see `KMajorOperands.column`."""
        (padded, columns), at, scale_shape, _, _, ends, _ = self.layout
        memory = aligned(self.memory)  # a saved-tensor hook may have put it anywhere
        data = memory[:at].view(fmt.element.dtype).view(columns, padded)
        scale = memory[at:ends].view(torch.float32).view(scale_shape)
        return column_matrix(data, scale, memory[ends:].view(torch.int32), fmt)


def empty_operand(
    like: Tensor, rows: int, columns: int, groups: int, fmt: NumberFormat, *, columnwise: bool
) -> PackedOperand:
    """Memory for an operand of ``[rows, columns]``, on the device of ``like``."""
    layout = packed_layout(rows, columns, groups, fmt, columnwise)
    return PackedOperand(like.new_empty(layout.nbytes, dtype=torch.uint8), layout)


def row_matrix(data: Tensor, scale: Tensor, fmt: NumberFormat) -> ScaledMatrix:
    """`KMajorOperands.row`, of elements and scales of groups as kernels write them."""
    of_blocks = scale.t() if fmt.directional else _for_blocks(scale, data.shape[-1])
    return ScaledMatrix(data, of_blocks)


def column_matrix(
    data: Tensor, scale: Tensor, ends: Tensor | None, fmt: NumberFormat
) -> ScaledMatrix:
    """`KMajorOperands.column`, likewise."""
    if fmt.block is None:
        scale = scale.unsqueeze(-1).expand(-1, data.shape[0])
    return ScaledMatrix(data.t(), scale, ends)


def as_operands(
    pieces: KMajorPieces, fmt: NumberFormat, rowwise: bool, columnwise: bool, grouped: bool
) -> KMajorOperands:
    """The operands from the tensors of the op."""
    row_data, row_scale, column_data, column_scale, padded_ends = pieces
    if _transposes_in_padded_groups(fmt, grouped):
        ends = padded_ends if grouped else None
        return KMajorOperands(
            row_matrix(row_data, row_scale, fmt) if rowwise else None,
            column_matrix(column_data, column_scale, ends, fmt) if columnwise else None,
        )
    if fmt.block is None and (rowwise or columnwise):
        columns = row_data.shape[-1] if rowwise else column_data.shape[-2]
        row_scale = _for_blocks(row_scale[..., ::FP8_BLOCK], columns)
    return KMajorOperands(
        ScaledMatrix(row_data, row_scale) if rowwise else None,
        ScaledMatrix(column_data, row_scale.mT) if columnwise else None,
    )


def _for_blocks(scale: Tensor, columns: int) -> Tensor:
    """``scale`` for each of the 128-blocks of the columns, a view."""
    return scale.unsqueeze(-1).expand(*scale.shape, -(-columns // FP8_BLOCK))


def _transposes_in_padded_groups(fmt: NumberFormat, grouped: bool) -> bool:
    """Whether rows are transposed in padded groups, not matrices as they are."""
    return fmt.directional or grouped


def row_operand(matrix: QuantizedMatrix, rows_per_scale: int = 1) -> ScaledMatrix:
    """The row-wise form, with a scale for each ``rows_per_scale`` rows and 128 columns."""
    data, scale, _, fmt, _, ends = matrix
    if fmt.block is None:
        *lead, rows, columns = data.shape
        if ends is None:
            scale = scale.reshape(*lead, 1).expand(*lead, -(-rows // rows_per_scale))
        else:
            scale = scale[group_of_row(ends, rows)]
        scale = _for_blocks(scale, columns)
    return ScaledMatrix(data, scale)


def check(source: RowsToQuantize, fmt: NumberFormat) -> None:
    """Raise what `quantize_k_major` raises of its arguments."""
    x, ends, index = source
    check_group_ends(x, fmt, ends)
    check_input(x, fmt)
    blocks = *BLOCKS, None
    if fmt.element.per_byte > 1 or fmt.block not in blocks or fmt.scale_dtype != torch.float32:
        raise ValueError(
            "operands of FP8 products must be of FP8 elements with an FP32 scale for each 1x128, "
            f"128x128 or matrix, got {fmt}; use quantize_matrix"
        )
    if fmt.directional and x.ndim != 2:
        raise ValueError(
            f"rows to quantize in blocks of 1x128 must be 2-D, got shape {tuple(x.shape)}; "
            "use x.flatten(0, -2)"
        )
    if index is None:
        return
    fits = (index.dtype, index.ndim, index.device) == (torch.int32, 1, x.device)
    if not (fits and _transposes_in_padded_groups(fmt, ends is not None)):
        raise ValueError(
            f"index must be int32 of shape (R,) on {x.device}, for blocks of 1x128 or groups, got "
            f"{index.dtype} of shape {tuple(index.shape)} on {index.device} for {fmt.name}"
        )


def definition(
    source: RowsToQuantize, fmt: NumberFormat, rowwise: bool, columnwise: bool
) -> KMajorPieces:
    """The definition of the op."""
    check(source, fmt)
    x, ends, index = source
    nothing = outputs(source, fmt, False, False)
    x = gather_rows(x, index, ends)
    row_data, row_scale, column_data, column_scale, padded_ends = nothing
    if ends is not None:
        ends = ends.clamp(max=len(x))
        padded_ends, places = place_rows(ends, len(x), FP8_BLOCK)
    pads = _transposes_in_padded_groups(fmt, ends is not None)
    if rowwise or not pads:
        data, row_scale = _quantized_rows(x.contiguous(), ends, fmt)
        row_data = data if rowwise else row_data
    if columnwise and pads:
        size = padded_size(len(x), 1 if ends is None else len(ends), FP8_BLOCK)
        padded = x.new_zeros(size + 1, x.shape[1])  # one row more, for rows of no group
        if ends is None:
            padded[: len(x)] = x
        else:
            padded.index_copy_(0, places, x)
        column_data, column_scale = _quantized_columns(padded[:size], padded_ends, fmt)
    elif columnwise:
        column_data = _transposed(data)
    return row_data, row_scale, column_data, column_scale, padded_ends


def _quantized_rows(x: Tensor, ends: Tensor | None, fmt: NumberFormat) -> tuple[Tensor, Tensor]:
    """Row-wise elements, and scales as they are stored."""
    if fmt.block is not None:
        data, scale, *_ = quantize(x, fmt, ends=ends)
        return data, scale.t().contiguous() if fmt.directional else scale
    if ends is not None:  # rows of no group are a group of zeros
        x, ends = with_zero_tail(x, ends), torch.cat((ends, ends.new_full((1,), len(x))))
    data, scale, *_ = quantize(x, fmt, ends=ends)
    of_rows = scale.expand(x.shape[:-1]) if ends is None else scale[group_of_row(ends, len(x))]
    return data, of_rows.contiguous()


def _quantized_columns(
    padded: Tensor, padded_ends: Tensor, fmt: NumberFormat
) -> tuple[Tensor, Tensor]:
    """Transposed elements of padded groups, and scales as they are stored."""
    ends = padded_ends if fmt.block is None else None  # blocks end where groups do
    data, scale, *_ = quantize(padded, fmt, columnwise=True, ends=ends)
    if ends is not None:
        scale = scale[group_of_row(ends, len(padded))[::FP8_BLOCK]]
    return _transposed(data), scale


def _transposed(data: Tensor) -> Tensor:
    """A contiguous copy of FP8 ``data`` ``[..., rows, columns]`` as ``[..., columns, rows]``."""
    transposed = data.view(torch.uint8).mT.clone(memory_format=torch.contiguous_format)
    return transposed.view(data.dtype)


def outputs(
    source: RowsToQuantize, fmt: NumberFormat, rowwise: bool, columnwise: bool
) -> KMajorPieces:
    """Allocate what the op returns."""
    x, ends, _ = source
    *lead, _, columns = x.shape
    rows, pads, nothing = source.rows, _transposes_in_padded_groups(fmt, ends is not None), (0,)
    row_scale: Sequence[int] = (*lead, rows)
    if fmt.block is not None:
        blocks = (columns + FP8_BLOCK - 1) // FP8_BLOCK
        of_matrix = (*lead, (rows + FP8_BLOCK - 1) // FP8_BLOCK, blocks)
        row_scale = (blocks, rows) if fmt.directional else of_matrix
    # Sizes one by one: PyTorch parses a tuple more slowly.
    new, element = x.new_empty, fmt.element.dtype
    column: tuple[Tensor, ...]
    if columnwise and pads:
        column = padded_columns(x, columns, rows, 1 if ends is None else ends.shape[0], fmt)
    else:
        size = (*lead, columns, rows) if columnwise else nothing
        column = new(*size, dtype=element), new(0, dtype=torch.float32)
    return (
        new(*((*lead, rows, columns) if rowwise else nothing), dtype=element),
        new(*(nothing if pads and not rowwise else row_scale), dtype=torch.float32),
        *column,
        new(0 if ends is None else ends.shape[0], dtype=torch.int32),
    )


def padded_columns(
    x: Tensor, columns: int, rows: int, groups: int, fmt: NumberFormat
) -> tuple[Tensor, Tensor]:
    """Allocate elements ``[columns, padded]`` of padded groups, and their scales."""
    size = padded_size(rows, groups, FP8_BLOCK)
    scale = (size // FP8_BLOCK, columns)[: 1 if fmt.block is None else 2]
    return (
        x.new_empty(columns, size, dtype=fmt.element.dtype),
        x.new_empty(*scale, dtype=torch.float32),
    )


@lru_cache(maxsize=1024)
def _kernel(
    fmt: NumberFormat,
    dtype: torch.dtype,
    ends_dtype: torch.dtype | None,
    rowwise: bool,
    columnwise: bool,
    gathered: bool,
) -> tuple[QuantizeSpec]:
    """The kernel's constant for inputs of ``dtype``, and end rows and an index if there are."""
    grouped, wide = ends_dtype is not None, ends_dtype == torch.int64
    spec = QuantizeSpec(
        fmt, PTX_NAMES[dtype], grouped, wide, rowwise, columnwise, k_major=True, gathered=gathered
    )
    return (spec,)


def _cuda(
    source: RowsToQuantize, fmt: NumberFormat, rowwise: bool, columnwise: bool
) -> KMajorPieces | NotImplementedType:
    check(source, fmt)
    x, ends, index = source
    fills_stores = (
        _transposes_in_padded_groups(fmt, ends is not None) or x.shape[-2] % PIECE_ROWS == 0
    )
    some = (rowwise or columnwise) and (index is None or index.numel() > 0)
    if not (some and fills_stores and supports_matrix(x, x.dtype, ends)):
        return NotImplemented
    x, index = with_aligned_rows(x), None if index is None else index.contiguous()
    source = RowsToQuantize(x, ends, index)
    pieces = outputs(source, fmt, rowwise, columnwise)
    launch_pieces(source, fmt, rowwise, columnwise, pieces)
    return pieces


def launch_quantize(
    rows: RowsToQuantize, fmt: NumberFormat, *, rowwise: bool, columnwise: bool
) -> KMajorOperands:
    """The op by its kernel, unchecked: of groups, not gathered, of what the kernel supports."""
    operands, addresses = packed_outputs(rows, fmt, rowwise, columnwise)
    launch_pieces(rows, fmt, rowwise, columnwise, addresses)
    return operands


def packed_outputs(
    source: RowsToQuantize, fmt: NumberFormat, rowwise: bool, columnwise: bool
) -> tuple[KMajorOperands, Sequence[int]]:
    """Allocate operands of groups; gives them, and the addresses of `KMajorPieces`."""
    x, ends, _ = source
    assert ends is not None
    sizes = *x.shape, ends.shape[0], fmt
    row = empty_operand(x, *sizes, columnwise=False) if rowwise else None
    column = empty_operand(x, *sizes, columnwise=True) if columnwise else None
    of_row = (0, 0) if row is None else row.addresses()[:2]
    of_column = (0, 0, 0) if column is None else column.addresses()
    return KMajorOperands(row, column), (*of_row, *of_column)


def launch_pieces(
    source: RowsToQuantize,
    fmt: NumberFormat,
    rowwise: bool,
    columnwise: bool,
    pieces: Sequence[Tensor | int],
    amax: Tensor | None = None,
) -> None:
    """Write `KMajorPieces` of tensors, or at addresses; ``amax`` is `amax_bits` if known."""
    x, ends, index = source
    pass_chunks = 0 if index is None else chunks_per_pass(*x.shape, x.itemsize)
    if fmt.block is None and amax is None:
        amax = amax_bits(x, ends, fmt, index=index, pass_chunks=pass_chunks)
    ends_dtype = None if ends is None else ends.dtype
    constants = _kernel(fmt, x.dtype, ends_dtype, rowwise, columnwise, index is not None)
    sizes = sizes_of(x, ends, index)
    padded = sizes.matrix_rows
    if _transposes_in_padded_groups(fmt, ends is not None):
        padded = padded_size(sizes.rows, sizes.groups, FP8_BLOCK)
    more = *sizes, padded, pass_chunks
    launch("quantize.k_major.quantize", constants, x.device, x, ends, index, amax, *pieces, *more)


@lru_cache(maxsize=1024)
def chunks_per_pass(rows: int, columns: int, itemsize: int) -> int:
    """Chunks of 128 columns that one pass gathers from all rows."""
    chunks = (columns + FP8_BLOCK - 1) // FP8_BLOCK
    fit = max(1, _L2_BYTES // (rows * FP8_BLOCK * itemsize))
    return max([n for n in range(1, chunks + 1) if chunks % n == 0 and n <= fit])


quantize_pieces = define(definition, outputs, [_cuda], name="quantize_k_major")
transposed = define(_transposed, lambda data: data.new_empty(data.mT.shape), name="transposed_fp8")
