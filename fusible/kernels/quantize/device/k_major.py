"""Quantization for FP8 products in one pass: row-wise, and column-wise transposed.

A group of threads takes a block of 128x128, whose bytes fill one line of memory in each row and,
transposed, in each column. A thread has 16 rows (32 of FP32), so that it stores 16 bytes of each of
its columns; a warp fills sectors of 32 bytes.

Rows may be read by an index, so that they are gathered while they are quantized. A row is then read
as often as it is named, by blocks of rows that are far apart: only ``pass_chunks`` chunks of
columns of all rows are taken before the next ones, so that these stay in the L2 cache meanwhile.

Where a scale covers a whole group or matrix, its largest magnitude was found in a pass before. The
scale is stored for each row and, column-wise, for each block of 128 rows.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from fusible.kernels.device import bits
from fusible.kernels.quantize.device import numbers
from fusible.kernels.quantize.device.blocks import (
    block_and_chunk,
    grid_of,
    store_padded_ends,
)
from fusible.kernels.quantize.device.magnitudes import (
    largest_of,
    largest_of_columns,
    largest_of_rows,
    magnitude,
)
from fusible.kernels.quantize.device.quantize import (
    SHARED_PERCENT,
    load_input,
    square_factors,
    thread_tile,
)
from fusible.kernels.quantize.spec import PIECE_ROWS, THREADS


class KMajorOut(NamedTuple):
    """Addresses of what is written, and the distance of columns in the transposed elements."""

    row_data: Int64
    row_scale: Int64
    col_data: Int64
    col_scale: Int64
    col_pitch: Int32


def _column_factors(words, tile, columns, out, spec):
    """The factors of a thread's columns; each thread computes that of one, and stores its scale."""
    thread, _, _ = cute.arch.thread_idx()
    largest = largest_of_columns(words, spec.dtype)
    shared, factors = [
        cute.make_tensor(
            cute.arch.alloc_smem(Uint32, spec.lanes * size * parts),
            cute.make_layout((spec.lanes, size, parts)),
        )
        for size, parts in ((len(largest), spec.parts), (spec.vector, 1))
    ]
    for i, word in enumerate(largest):
        shared[thread % spec.lanes, i, tile.part] = word
    cute.arch.sync_threads()
    lane, i = thread // spec.vector, thread % spec.vector
    per_word = spec.vector // len(largest)
    word = largest_of([shared[lane, i // per_word, part] for part in range(spec.parts)], spec.dtype)
    low, high = bits.magnitudes([word], spec.dtype) * (3 - per_word)
    scale, factor = numbers.encode_scale(bits.select(i % per_word, high, low), None, spec.format)
    factors[lane, i, 0] = bits.to_bits(factor)
    column = tile.column - thread % spec.lanes * spec.vector + thread
    offset = Int64(tile.block) * Int64(columns) + Int64(column)
    inside = Int32(Boolean(column < columns) & (tile.block * spec.rows < out.col_pitch))
    bits.store(out.col_scale + offset * 4, [scale], inside)
    cute.arch.sync_threads()
    return [bits.to_float(factors[thread % spec.lanes, j, 0]) for j in range(spec.vector)]


def _matrix_scale(tile, amax, spec):
    """The scale and the factor of a group or matrix, by its largest magnitude."""
    if not spec.has_matrix_scales:
        return None
    (largest,) = bits.load(amax + Int64(tile.group) * 4, tile.live, 1)
    return numbers.encode_scale(largest, None, spec.format)


def _matrix_factors(matrix_scale, tile, out, spec):
    """The factors of a thread's columns in a group or matrix, whose scale is stored.

    That of groups is stored for each row and for each block; of matrices, for each row.
    """
    scale, factor = matrix_scale
    own = cute.arch.lane_idx() % spec.lanes
    first = tile.column < spec.lanes * spec.vector
    if spec.rowwise or not spec.grouped:
        inside = Int32(Boolean(own < tile.count) & first)
        bits.store(out.row_scale + Int64(tile.first + own) * 4, [scale], inside)
    if spec.columnwise and spec.grouped:
        inside = first & (own == 0) & (tile.part == 0) & (tile.block * spec.rows < out.col_pitch)
        bits.store(out.col_scale + Int64(tile.block) * 4, [scale], Int32(inside))
    return [factor] * spec.vector


def _row_factor(words, r, tile, rows, columns, row_scale, spec):
    """The factor of one of a piece of rows from row ``r`` of a thread, in the threads of a block.

    Thread i has that of row i, and stores its scale: those of neighbouring rows are neighbours.
    """
    fmt, along = spec.format, spec.format.block[1]
    own = cute.arch.lane_idx() % spec.lanes
    largest = [largest_of(row, spec.dtype) for row in words]
    largest = largest_of_rows(largest, spec.lanes, spec.dtype)
    scale, factor = numbers.encode_scale(magnitude(largest, spec.dtype), None, fmt)
    block = tile.column // along
    inside = Boolean(own < PIECE_ROWS) & (r + own < tile.count) & (block * along < columns)
    offset = Int64(block) * Int64(rows) + Int64(tile.first + r + own)
    bits.store(row_scale + offset * 4, [scale], Int32(inside))
    return bits.to_bits(factor)


def _of_row(factor, i, spec):
    """The factor of row ``i`` of a piece, for each column of a thread."""
    first = cute.arch.lane_idx() // spec.lanes * spec.lanes
    return [bits.to_float(cute.arch.shuffle_sync(factor, first + i))] * spec.vector


def _store_row(values, factors, r, tile, columns, row_data, spec):
    """Elements of row ``r`` of a thread."""
    scaled = [value * factor for value, factor in zip(values, factors, strict=True)]
    offset = Int64(tile.first + r) * Int64(columns) + Int64(tile.column)
    inside = Int32(Boolean(r < tile.count) & tile.in_columns)
    bits.store(row_data + offset, numbers.pack_elements(scaled, spec.format), inside)


def _store_piece(piece, r, of_rows, of_columns, tile, columns, column, out, spec):
    """Elements of a piece of rows from row ``r`` of a thread, by the factors of both uses."""
    transposed = [[] for _ in range(spec.vector)]
    for i in range(0, PIECE_ROWS, 4):
        four = [bits.unpack(row, spec.dtype) for row in piece[i : i + 4]]
        if spec.rowwise:
            for j, values in enumerate(four, i):
                of_row = of_columns if of_rows is None else _of_row(of_rows, j, spec)
                _store_row(values, of_row, r + j, tile, columns, out.row_data, spec)
        if spec.columnwise:
            for words, factor, *values in zip(transposed, of_columns, *four, strict=True):
                scaled = [value * factor for value in values]
                words.extend(numbers.pack_elements(scaled, spec.format))
    if spec.columnwise:
        inside = Int32(tile.in_columns & (column.row + r < out.col_pitch))
        for i, words in enumerate(transposed):
            offset = column.start + Int64(i) * Int64(out.col_pitch) + r
            bits.store(out.col_data + offset, words, inside)


class Column(NamedTuple):
    """Where a thread's first column is in the transposed elements."""

    row: Int32
    """The thread's first row in its padded matrix."""
    start: Int64
    """The offset of that element."""


def _column_of(tile, columns, matrix_rows, col_pitch, spec):
    row, column = tile.block * spec.rows + tile.part * spec.thread_rows, Int64(tile.column)
    if not spec.grouped:
        row = tile.first - tile.group * matrix_rows
        column = column + Int64(tile.group) * Int64(columns)
    return Column(row, column * Int64(col_pitch) + Int64(row))


def quantize_block(x, index, pitch, tile, rows, columns, matrix_rows, amax, out, spec):
    """Scales and elements of a thread's rows."""
    matrix_scale = _matrix_scale(tile, amax, spec)  # before the input fills the registers
    words = load_input(x, index, pitch, tile, spec)
    store_block(words, tile, rows, columns, matrix_rows, out, spec, matrix_scale)


def computed_anew(tile, columns):
    """The same, of which nothing that the loads have computed is kept: it would fill registers."""
    names = "first", "count", "column"
    anew = {name: bits.opaque(getattr(tile, name)) for name in names}
    return tile._replace(**anew), bits.opaque(columns)


def store_block(words, tile, rows, columns, matrix_rows, out, spec, matrix_scale=None):
    """Scales and elements of a thread's rows, which are in ``words``.

    ``matrix_scale`` are the scale and the factor of all of them, if any.
    """
    of_columns = None
    if spec.has_matrix_scales:
        of_columns = _matrix_factors(matrix_scale, tile, out, spec)
    elif not spec.format.directional:
        of_columns = square_factors(words, tile, columns, out.row_scale, spec).to_element
    elif spec.columnwise:
        of_columns = _column_factors(words, tile, columns, out, spec)
    tile, columns = computed_anew(tile, columns)
    column = _column_of(tile, columns, matrix_rows, out.col_pitch, spec)
    for r in range(0, spec.thread_rows, PIECE_ROWS):
        piece = words[r : r + PIECE_ROWS]
        of_rows = None
        if spec.format.directional and spec.rowwise:
            of_rows = _row_factor(piece, r, tile, rows, columns, out.row_scale, spec)
        _store_piece(piece, r, of_rows, of_columns, tile, columns, column, out, spec)


@cute.kernel
def _quantize(
    x: Int64,
    ends: Int64,
    index: Int64,
    amax: Int64,
    row_data: Int64,
    row_scale: Int64,
    col_data: Int64,
    col_scale: Int64,
    padded_ends: Int64,
    rows: Int32,
    columns: Int32,
    pitch: Int64,
    groups: Int32,
    matrix_rows: Int32,
    col_pitch: Int32,
    pass_chunks: Int32,
    blocks: Int32,
    spec: cutlass.Constexpr,
):
    cta, _, _ = cute.arch.block_idx()
    turn = cta
    if cutlass.const_expr(spec.has_matrix_scales):
        # Backwards: the L2 cache may still hold what the pass for the magnitudes read last.
        turn = cute.arch.grid_dim()[0] - 1 - cta
    block, chunk = block_and_chunk(turn, blocks, pass_chunks, spec)
    tile = thread_tile(block, chunk, rows, columns, groups, matrix_rows, ends, spec)
    out = KMajorOut(row_data, row_scale, col_data, col_scale, col_pitch)
    if cutlass.const_expr(spec.grouped):
        if (cta == 0) & (padded_ends != Int64(0)):
            store_padded_ends(ends, padded_ends, groups, rows, spec.rows, spec.wide_ends)
    if tile.rows > 0:
        quantize_block(x, index, pitch, tile, rows, columns, matrix_rows, amax, out, spec)


@cute.jit
def quantize(
    x: Int64,
    ends: Int64,
    index: Int64,
    amax: Int64,
    row_data: Int64,
    row_scale: Int64,
    col_data: Int64,
    col_scale: Int64,
    padded_ends: Int64,
    rows: Int32,
    columns: Int32,
    pitch: Int64,
    groups: Int32,
    matrix_rows: Int32,
    col_pitch: Int32,
    pass_chunks: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch over ``[rows, columns]`` in ``groups``: addresses, sizes, ``pitch`` in elements.

    ``col_pitch`` is the distance of columns in the transposed elements; ``pass_chunks``, with an
    index, how many chunks of the columns are taken before the next ones, a divisor of their number.
    """
    blocks, chunks = grid_of(rows, columns, groups, matrix_rows, spec)
    if cutlass.const_expr(not spec.gathered):
        pass_chunks = chunks
    _quantize(
        x, ends, index, amax, row_data, row_scale, col_data, col_scale, padded_ends, rows, columns,
        pitch, groups, matrix_rows, col_pitch, pass_chunks, blocks, spec,
    ).launch(
        grid=[blocks * chunks, 1, 1], block=[THREADS, 1, 1], stream=stream,
        min_blocks_per_mp=spec.resident, preferred_smem_carveout=SHARED_PERCENT,
    )  # fmt: skip
