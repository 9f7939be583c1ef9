"""Quantization for row-wise and column-wise use in one pass over the input.

See ``spec`` for what a thread owns. The largest magnitude of a column is then its own, that of a
row's block needs a few shuffles; only blocks of more rows than a thread takes go through shared
memory. All loads of a thread are in flight at once. Formats with a scale for the whole matrix read
its largest magnitude, which ``amax`` finds in a pass before.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from fusible.kernels.device import bits
from fusible.kernels.quantize.device import numbers
from fusible.kernels.quantize.device.blocks import block_coord, blocks_of, grid_of
from fusible.kernels.quantize.device.magnitudes import (
    largest_of,
    largest_of_columns,
    largest_of_lanes,
    magnitude,
)
from fusible.kernels.quantize.spec import THREADS, VALUES

SHARED_PERCENT = 8  # of the memory that shared memory and the L1 cache divide: 2 KiB a block


class Out(NamedTuple):
    """Addresses of what is written."""

    row_data: Int64
    row_scale: Int64
    row_tensor_scale: Int64
    col_data: Int64
    col_scale: Int64
    col_tensor_scale: Int64
    row_values: Int64
    col_values: Int64


class ThreadTile(NamedTuple):
    """Where a thread's part of the input lies."""

    block: Int32
    group: Int32
    part: Int32
    """Which of the parts of the block's rows it is."""
    first: Int32
    count: Int32
    """Its rows that exist, which may be none or negative."""
    rows: Int32
    """Rows of the whole block, none in a spare one."""
    live: Int32
    column: Int32
    in_columns: Boolean


def thread_tile(block, chunk, all_rows, columns, groups, matrix_rows, ends, spec):
    """Where the rows of this thread are, for a group of threads of a block and a chunk of it."""
    thread, _, _ = cute.arch.thread_idx()
    width = THREADS // spec.parts
    part = thread // width
    column = (chunk * width + thread % width) * spec.vector
    coord = block_coord(block, all_rows, groups, matrix_rows, ends, spec)
    first = coord.first + part * spec.thread_rows
    count = coord.end - first
    rows = coord.end - coord.first
    return ThreadTile(
        block, coord.group, part, first, count, rows, coord.live, column, column < columns
    )


def load_rows(x, pitch, tile, spec):
    """Words of the rows of a thread, zeros where there is nothing."""
    size = spec.words * 4 // spec.vector
    source = x + (Int64(tile.first) * pitch + Int64(tile.column)) * size
    rows = []
    for r in range(spec.thread_rows):
        inside = Int32(Boolean(r < tile.count) & tile.in_columns & (tile.live != 0))
        rows.append(bits.load(source + r * (pitch * size), inside, spec.words))
    return rows


def _largest_of_parts(words, spec):
    """The largest magnitudes of the words of the threads below one another."""
    if spec.parts == 1:
        return words
    thread, _, _ = cute.arch.thread_idx()
    width = THREADS // spec.parts
    shared = cute.make_tensor(
        cute.arch.alloc_smem(Uint32, THREADS * len(words)),
        cute.make_layout((THREADS, len(words))),
    )
    for i, word in enumerate(words):
        shared[thread, i] = word
    cute.arch.sync_threads()
    parts = [
        [shared[part * width + thread % width, i] for i in range(len(words))]
        for part in range(spec.parts)
    ]
    return largest_of_columns(parts, spec.dtype)


def _store_scales(address, scales, fmt, inside):
    """Neighbouring scales, bytes packed into words."""
    if numbers.scale_bytes(fmt) == 1:
        quads = [scales[i : i + 4] for i in range(0, len(scales), 4)]
        scales = [a | (b << 8) | (c << 16) | (d << 24) for a, b, c, d in quads]
    bits.store(address, scales, inside)


def _store_scale(address, scale, fmt, inside):
    if numbers.scale_bytes(fmt) == 1:
        bits.store_byte(address, scale, inside)
    else:
        bits.store(address, [scale], inside)


class Factors(NamedTuple):
    """FP32 factors of neighbouring columns."""

    to_element: list
    """From value to element."""
    to_value: list
    """From element to value."""


def _factors(scaling, outer, tile, spec):
    """Factors by what `numbers.encode_scale` gave of each column, or of all of them.

    Zero for rows of no group, whatever the last group's scale.
    """
    to_value = [numbers.decode_scale(scale, spec.format) for scale, _ in scaling]
    if outer is not None:
        to_value = [factor * outer for factor in to_value]
    factors = [[factor for _, factor in scaling], to_value]
    if spec.grouped and spec.has_matrix_scales:
        live = tile.live != 0
        factors = [
            [bits.to_float(bits.select(live, bits.to_bits(one), 0)) for one in each]
            for each in factors
        ]
    return Factors(*[each * (spec.vector // len(each)) for each in factors])


def _column_factors(rows, tile, outer, columns, col_scale, col_blocks, spec):
    """The factors of a thread's columns; their scales are stored."""
    fmt = spec.format
    largest = _largest_of_parts(largest_of_columns(rows, spec.dtype), spec)
    scaling = [
        numbers.encode_scale(amax, outer, fmt) for amax in bits.magnitudes(largest, spec.dtype)
    ]
    if spec.columnwise:
        offset = Int64(tile.block) * Int64(columns) + Int64(tile.column)
        inside = Int32(tile.in_columns & (tile.part == 0) & (tile.block < col_blocks))
        scales = [scale for scale, _ in scaling]
        _store_scales(col_scale + offset * numbers.scale_bytes(fmt), scales, fmt, inside)
    return _factors(scaling, outer, tile, spec)


def _row_factors(words, r, tile, outer, columns, row_scale, spec):
    """The factors of row ``r`` of a thread; its scale is stored by the first thread of a block."""
    fmt, along = spec.format, spec.format.block[1]
    largest = largest_of_lanes(largest_of(words, spec.dtype), spec.lanes, spec.dtype)
    scaling = numbers.encode_scale(magnitude(largest, spec.dtype), outer, fmt)
    if spec.rowwise:
        row_blocks = Int64(tile.first + r) * Int64(blocks_of(columns, along))
        offset = row_blocks + Int64(tile.column // along)
        inside = Boolean(r < tile.count) & tile.in_columns & (tile.column % along == 0)
        address = row_scale + offset * numbers.scale_bytes(fmt)
        _store_scale(address, scaling[0], fmt, Int32(inside))
    return _factors([scaling], outer, tile, spec)


def square_factors(rows, tile, columns, row_scale, spec):
    """The factors of a square block; its scale is stored by one thread."""
    fmt, along = spec.format, spec.format.block[1]
    largest = largest_of(largest_of_columns(rows, spec.dtype), spec.dtype)
    largest = largest_of_lanes(largest, spec.lanes, spec.dtype)
    (largest,) = _largest_of_parts([largest], spec)
    scaling = numbers.encode_scale(magnitude(largest, spec.dtype), None, fmt)
    if spec.rowwise or spec.columnwise:
        offset = Int64(tile.block) * Int64(blocks_of(columns, along)) + Int64(tile.column // along)
        inside = tile.in_columns & (tile.part == 0) & (tile.column % along == 0)
        address = row_scale + offset * numbers.scale_bytes(fmt)
        _store_scale(address, scaling[0], fmt, Int32(inside))
    return _factors([scaling], None, tile, spec)


def _store_row(targets, wanted, values, factors, r, tile, columns, spec):
    """Elements of row ``r`` of a thread, and their values, to those ``targets`` that are wanted."""
    fmt = spec.format
    scaled = [value * factor for value, factor in zip(values, factors.to_element, strict=True)]
    offset = Int64(tile.first + r) * Int64(columns) + Int64(tile.column)
    inside = Int32(Boolean(r < tile.count) & tile.in_columns)
    words = numbers.pack_elements(scaled, fmt)
    if wanted[0]:
        bits.store(targets[0] + offset // fmt.element.per_byte, words, inside)
    if wanted[1]:
        dequantized = numbers.decode_elements(words, factors.to_value, fmt, VALUES)
        bits.store(targets[1] + offset * bits.SIZES[VALUES], dequantized, inside)


def _matrix_scales(amax, tile, spec):
    """The scale on top of a block's, and the factors of all elements; None where there is none."""
    fmt = spec.format
    if not spec.has_matrix_scales:
        return None, None
    (largest,) = bits.load(amax + Int64(tile.group) * 4, Int32(1), 1)
    if fmt.has_tensor_scale:
        return numbers.tensor_scale(largest, fmt), None
    return None, _factors([numbers.encode_scale(largest, None, fmt)], None, tile, spec)


def _stored_matrix_scale(amax, fmt):
    if fmt.has_tensor_scale:
        return bits.to_bits(numbers.tensor_scale(amax, fmt))
    return numbers.encode_scale(amax, None, fmt)[0]


def _quantize_block(x, pitch, tile, outer, common, out, columns, col_blocks, spec):
    """Scales and elements of a thread's rows; ``common`` are the factors of all of them, if any."""
    words = load_rows(x, pitch, tile, spec)
    if not spec.format.directional and common is None:
        common = square_factors(words, tile, columns, out.row_scale, spec)
    by_row, by_column = (spec.rowwise, spec.row_values), (spec.columnwise, spec.col_values)
    of_columns = None
    if any(by_column):
        of_columns = _column_factors(words, tile, outer, columns, out.col_scale, col_blocks, spec)
    for r in range(spec.thread_rows):
        values = bits.unpack(words[r], spec.dtype)
        if any(by_row):
            of_row = common
            if common is None:
                of_row = _row_factors(words[r], r, tile, outer, columns, out.row_scale, spec)
            targets = out.row_data, out.row_values
            _store_row(targets, by_row, values, of_row, r, tile, columns, spec)
        if any(by_column):
            targets = out.col_data, out.col_values
            _store_row(targets, by_column, values, of_columns, r, tile, columns, spec)


def _store_spare_scales(tile, outer, col_scale, columns, col_blocks, spec):
    """Column-wise scales of a block of no rows."""
    fmt = spec.format
    scale, _ = numbers.encode_scale(Uint32(0), outer, fmt)
    offset = Int64(tile.block) * Int64(columns) + Int64(tile.column)
    inside = Int32(tile.in_columns & (tile.part == 0) & (tile.block < col_blocks))
    address = col_scale + offset * numbers.scale_bytes(fmt)
    _store_scales(address, [scale] * spec.vector, fmt, inside)


@cute.jit
def _store_matrix_scales(amax: Int64, out: Out, groups: Int32, spec: cutlass.Constexpr):
    """The scales of whole matrices, for both uses, by one group of threads."""
    thread, _, _ = cute.arch.thread_idx()
    whole = out.row_tensor_scale if spec.format.has_tensor_scale else out.row_scale
    for group in cutlass.range(thread, groups, THREADS, unroll=1):
        (largest,) = bits.load(amax + Int64(group) * 4, Int32(1), 1)
        scale = _stored_matrix_scale(largest, spec.format)
        if cutlass.const_expr(spec.rowwise):
            bits.store(whole + Int64(group) * 4, [scale], Int32(1))
        if cutlass.const_expr(spec.columnwise):
            bits.store(out.col_tensor_scale + Int64(group) * 4, [scale], Int32(1))


@cute.kernel
def _quantize(
    x: Int64,
    ends: Int64,
    amax: Int64,
    row_data: Int64,
    row_scale: Int64,
    row_tensor_scale: Int64,
    col_data: Int64,
    col_scale: Int64,
    col_tensor_scale: Int64,
    row_values: Int64,
    col_values: Int64,
    rows: Int32,
    columns: Int32,
    pitch: Int64,
    groups: Int32,
    matrix_rows: Int32,
    col_blocks: Int32,
    blocks: Int32,
    chunks: Int32,
    spec: cutlass.Constexpr,
):
    cta, _, _ = cute.arch.block_idx()
    # Backwards: what the pass for the largest magnitude read last is still in the cache.
    block = blocks - 1 - cta // chunks
    tile = thread_tile(block, cta % chunks, rows, columns, groups, matrix_rows, ends, spec)
    out = Out(
        row_data, row_scale, row_tensor_scale, col_data, col_scale, col_tensor_scale, row_values,
        col_values,
    )  # fmt: skip
    outer, common = _matrix_scales(amax, tile, spec)
    if cutlass.const_expr(spec.has_matrix_scales):
        if cta == 0:
            _store_matrix_scales(amax, out, groups, spec)
    if tile.rows > 0:
        _quantize_block(x, pitch, tile, outer, common, out, columns, col_blocks, spec)
    elif cutlass.const_expr(spec.columnwise):
        _store_spare_scales(tile, outer, col_scale, columns, col_blocks, spec)


@cute.jit
def quantize(
    x: Int64,
    ends: Int64,
    amax: Int64,
    row_data: Int64,
    row_scale: Int64,
    row_tensor_scale: Int64,
    col_data: Int64,
    col_scale: Int64,
    col_tensor_scale: Int64,
    row_values: Int64,
    col_values: Int64,
    rows: Int32,
    columns: Int32,
    pitch: Int64,
    groups: Int32,
    matrix_rows: Int32,
    col_blocks: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch over ``[rows, columns]`` in ``groups``: addresses, sizes, ``pitch`` in elements."""
    blocks, chunks = grid_of(rows, columns, groups, matrix_rows, spec)
    _quantize(
        x, ends, amax, row_data, row_scale, row_tensor_scale, col_data, col_scale,
        col_tensor_scale, row_values, col_values, rows, columns, pitch, groups, matrix_rows,
        col_blocks, blocks, chunks, spec,
    ).launch(
        grid=[blocks * chunks, 1, 1], block=[THREADS, 1, 1], stream=stream,
        min_blocks_per_mp=spec.resident, preferred_smem_carveout=SHARED_PERCENT,
    )  # fmt: skip


@cute.kernel
def _amax(
    x: Int64,
    ends: Int64,
    amax: Int64,
    rows: Int32,
    columns: Int32,
    pitch: Int64,
    groups: Int32,
    matrix_rows: Int32,
    chunks: Int32,
    spec: cutlass.Constexpr,
):
    cta, _, _ = cute.arch.block_idx()
    tile = thread_tile(cta // chunks, cta % chunks, rows, columns, groups, matrix_rows, ends, spec)
    words = load_rows(x, pitch, tile, spec)
    largest = largest_of(largest_of_columns(words, spec.dtype), spec.dtype)
    largest = magnitude(largest_of_lanes(largest, 32, spec.dtype), spec.dtype)
    target = amax + Int64(tile.group) * 4
    # Most groups of threads find a larger one already there.
    (known,) = bits.load(target, Int32(1), 1)
    bits.raise_to(target, largest, Int32((cute.arch.lane_idx() == 0) & (largest > known)))


@cute.jit
def amax(
    x: Int64,
    ends: Int64,
    amax: Int64,
    rows: Int32,
    columns: Int32,
    pitch: Int64,
    groups: Int32,
    matrix_rows: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: raise each of ``amax``, bits of FP32, to the largest magnitude of its group."""
    blocks, chunks = grid_of(rows, columns, groups, matrix_rows, spec)
    _amax(x, ends, amax, rows, columns, pitch, groups, matrix_rows, chunks, spec).launch(
        grid=[blocks * chunks, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
