# mypy: ignore-errors
"""MXFP8 quantization of ragged groups straight into the layout of the SM100 kernels.

A thread takes 32 rows by 8 columns of the padded matrix, that is one block of rows of one group:
groups begin at multiples of 256. Rows that do not exist are loaded as zeros, which is what is
stored for them (or NaN, for the column-wise use, under a scale that is NaN: the value is NaN in
both cases); so every element is written, and every scale of a column that exists.
"""

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from fusible.kernels import bits
from fusible.kernels.quantize.device import numbers
from fusible.kernels.quantize.device.blocks import _find
from fusible.kernels.quantize.device.encode import (
    _largest,
    _largest_of_columns,
    _largest_of_lanes,
    _magnitude,
)
from fusible.kernels.quantize.spec import THREADS
from fusible.recipes.layout import scale_offset

ROWS = 32  # of a thread: a block along the columns


def _start(ends, group):
    """The first row of a group."""
    (start,) = bits.load(ends + Int64(group - 1) * 4, Int32(group > 0), 1)
    return Int32(start)


def _end(ends, group):
    return bits.load_index(ends + Int64(group) * 4, False)


def _source(ends, placed_ends, groups, size, first):
    """Where the rows of the block from padded row ``first`` come from.

    Returns their first row in x, how many there are, and of the block's group the first and the end
    of the padded rows. The rows past the last group are a group of their own, with no rows of x.
    """
    _, _, live, group = _find(placed_ends, groups, size, first // ROWS, ROWS, False)
    start, end = _start(ends, group), _end(ends, group)
    placed, placed_end = _start(placed_ends, group), _end(placed_ends, group)
    row = first - placed + start
    region = Int32(bits.select(live != 0, placed, placed_end))
    region_end = Int32(bits.select(live != 0, placed_end, size))
    return row, (end - row) * live, region, region_end


@cute.kernel
def _quantize(
    x: Int64,
    ends: Int64,
    placed_ends: Int64,
    row_data: Int64,
    row_scales: Int64,
    col_data: Int64,
    col_scales: Int64,
    size: Int32,
    columns: Int32,
    pitch: Int64,
    groups: Int32,
    chunks: Int32,
    spec: cutlass.Constexpr,
):
    cta, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    column = ((cta % chunks) * THREADS + thread) * spec.vector
    inside = column < columns
    first = (cta // chunks) * ROWS
    row, count, *region = _source(ends, placed_ends, groups, size, first)
    words = _load(x, row, count, column, pitch, inside, spec)
    place = first, column, columns, Int32(inside)
    factors = None
    if cutlass.const_expr(spec.columnwise):
        factors = _column_scales(words, *region, *place, col_scales, spec)
    _store_elements(row_data, row_scales, col_data, words, factors, *place, spec)


# Helpers below are plain functions: their loops are unrolled.


def _load(x, row, count, column, pitch, inside, spec):
    """Words of the rows of a thread, zeros where there is nothing."""
    source = x + (Int64(row) * pitch + Int64(column)) * 2
    return [
        bits.load(source + r * (pitch * 2), Int32(Boolean(r < count) & inside), spec.words)
        for r in range(ROWS)
    ]


def _store_elements(
    row_data, row_scales, col_data, words, col_factors, first, column, columns, inside, spec
):
    """Every element of a thread for each use, and the scales of its rows."""
    for r in range(ROWS):
        values, row = bits.unpack(words[r], spec.dtype), first + r
        offset = Int64(row) * Int64(columns) + Int64(column)
        if spec.rowwise:
            factor = _row_scale(words[r], row, column, columns, row_scales, inside, spec)
            packed = _elements([v * factor for v in values], spec.format)
            bits.store(row_data + offset, packed, inside)
        if spec.columnwise:
            scaled = [v * factor for v, factor in zip(values, col_factors, strict=True)]
            bits.store(col_data + offset, _elements(scaled, spec.format), inside)


def _elements(values, fmt):
    return [numbers.pack_fp8(values[i : i + 4], fmt.element) for i in range(0, len(values), 4)]


def _row_scale(words, row, column, columns, scales, inside, spec):
    """The factor of a row's block; its scale is stored by the block's first thread."""
    largest = _largest_of_lanes(_largest(words, spec.dtype), spec.lanes, spec.dtype)
    scale, factor = numbers.encode_scale(_magnitude(largest, spec.dtype), None, spec.format)
    along = spec.format.block[1]
    offset = scale_offset(row, column // along, columns // along)
    mine = Int32(Boolean(inside != 0) & (column % along == 0))
    bits.store_byte(scales + Int64(offset), scale, mine)
    return factor


def _column_scales(words, region, region_end, first, column, columns, inside, scales, spec):
    """The factor of each column of a thread; the scales are stored in the group's own region."""
    largest = _largest_of_columns(words, spec.dtype)
    encoded = [
        numbers.encode_scale(amax, None, spec.format)
        for amax in bits.magnitudes(largest, spec.dtype)
    ]
    lines = (columns + 127) // 128 * 128
    base = Int64(region // ROWS) * Int64(lines)
    blocks = (region_end - region) // ROWS
    for i, (scale, _) in enumerate(encoded):
        offset = scale_offset(column + i, (first - region) // ROWS, blocks)
        bits.store_byte(scales + base + Int64(offset), scale, inside)
    return [factor for _, factor in encoded]


@cute.jit
def quantize(
    x: Int64,
    ends: Int64,
    placed_ends: Int64,
    row_data: Int64,
    row_scales: Int64,
    col_data: Int64,
    col_scales: Int64,
    size: Int32,
    columns: Int32,
    pitch: Int64,
    groups: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch over ``size`` padded rows: addresses, sizes, ``pitch`` of x in elements."""
    width = THREADS * spec.vector
    chunks = (columns + width - 1) // width
    _quantize(
        x, ends, placed_ends, row_data, row_scales, col_data, col_scales, size, columns, pitch,
        groups, chunks, spec,
    ).launch(
        grid=[size // ROWS * chunks, 1, 1], block=[THREADS, 1, 1], stream=stream,
        min_blocks_per_mp=spec.resident, preferred_smem_carveout=0,
    )  # fmt: skip
