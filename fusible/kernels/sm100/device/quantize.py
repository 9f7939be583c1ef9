"""Quantization of ragged groups straight into the layout of the SM100 kernels.

A thread takes a few rows and columns of the padded matrix, rows of one group: groups begin at
multiples of 256. Rows that do not exist are loaded as zeros, which is what is stored for them (or
NaN, for the column-wise use, under a scale that is NaN: the value is NaN in both cases); so every
element is written, and every scale of a column that exists.

The sums of each group's rows, which are the gradient of a bias, are taken on the way: a thread
adds up its rows, and ``sum_blocks`` those sums, both in an order that the rows alone decide.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from fusible.kernels.device import bits
from fusible.kernels.quantize.device import numbers
from fusible.kernels.quantize.device.blocks import find
from fusible.kernels.quantize.device.magnitudes import (
    largest_of,
    largest_of_columns,
    largest_of_lanes,
    magnitude,
)
from fusible.kernels.quantize.spec import THREADS
from fusible.kernels.sm100.spec import DTYPE, RESIDENT, ROWS, SLICES, SUMMED, VECTOR, WORDS
from fusible.recipes.layout import scale_offset


class Groups(NamedTuple):
    """Where groups end: in x, and in the padded matrix of ``size`` rows."""

    ends: Int64
    placed_ends: Int64
    count: Int32
    size: Int32


class PackedSource(NamedTuple):
    """Addresses of what is read, and the distance of rows of ``x`` in elements."""

    x: Int64
    pitch: Int64
    row_scale: Int64


class PackedOut(NamedTuple):
    """Addresses of what is written."""

    row_data: Int64
    row_scales: Int64
    col_data: Int64
    col_scales: Int64
    factors: Int64
    """The scale of each group as a whole, where the format has one."""
    sums: Int64
    """FP32, of the rows of each thread."""


class PackedTile(NamedTuple):
    """The part of a matrix that a thread takes."""

    first: Int32
    """Of the padded rows."""
    source: Int32
    """The same row in x."""
    count: Int32
    """Rows that exist, which may be none or negative."""
    group: Int32
    region: Int32
    """The first padded row of the group; those past the last group are a group of their own."""
    region_end: Int32
    column: Int32
    columns: Int32
    inside: Int32
    """Whether its columns exist."""


def _start(ends, group):
    """The first row of a group."""
    (start,) = bits.load(ends + Int64(group - 1) * 4, Int32(group > 0), 1)
    return Int32(start)


def _end(ends, group):
    return bits.load_index(ends + Int64(group) * 4, False)


def _thread_tile(groups, first, column, columns, rows):
    _, _, live, group = find(
        groups.placed_ends, groups.count, groups.size, first // rows, rows, False
    )
    start, end = _start(groups.ends, group), _end(groups.ends, group)
    placed, placed_end = _start(groups.placed_ends, group), _end(groups.placed_ends, group)
    source = first - placed + start
    region = Int32(bits.select(live != 0, placed, placed_end))
    region_end = Int32(bits.select(live != 0, placed_end, groups.size))
    count = (end - source) * live
    inside = Int32(column < columns)
    return PackedTile(first, source, count, group, region, region_end, column, columns, inside)


@cute.kernel
def _quantize(
    x: Int64,
    row_scale: Int64,
    amax: Int64,
    ends: Int64,
    placed_ends: Int64,
    row_data: Int64,
    row_scales: Int64,
    col_data: Int64,
    col_scales: Int64,
    factors: Int64,
    sums: Int64,
    size: Int32,
    columns: Int32,
    pitch: Int64,
    count: Int32,
    parts: Int32,
    chunks: Int32,
    spec: cutlass.Constexpr,
):
    cta, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    groups = Groups(ends, placed_ends, count, size)
    out = PackedOut(row_data, row_scales, col_data, col_scales, factors, sums)
    column = ((cta % chunks) * THREADS + thread) * VECTOR
    tile = _thread_tile(groups, (cta // chunks) * ROWS, column, columns, ROWS)
    outer = None
    if cutlass.const_expr(spec.format.has_tensor_scale):
        if cta == 0:
            _store_factors(amax, parts, factors, count, spec)
        outer = _tensor_scale(amax, parts, tile.group, spec)
    _quantize_rows(PackedSource(x, pitch, row_scale), tile, outer, out, spec)


@cute.jit
def _store_factors(
    amax: Int64, parts: Int32, factors: Int64, count: Int32, spec: cutlass.Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    for group in cutlass.range(thread, count, THREADS, unroll=1):
        factor = _tensor_scale(amax, parts, group, spec)
        bits.store(factors + Int64(group) * 4, [bits.to_bits(factor)], Int32(1))


# Helpers below are plain functions: their loops are unrolled.


def _tensor_scale(amax, parts, group, spec):
    """The scale of a group from its ``parts``, one or two largest magnitudes, rounded as x is.

    A negative one is that of nothing.
    """
    first = amax + Int64(group * parts) * 4
    words = [bits.load(first + Int64(part) * 4, Int32(1), 1)[0] for part in (0, parts - 1)]
    found = [bits.to_float(cutlass.max(Int32(word), Int32(0))) for word in words]
    return numbers.tensor_scale(magnitude(bits.pack(found, DTYPE)[0], DTYPE), spec.format)


def _quantize_rows(source, tile, outer, out, spec):
    """All that a thread reads and writes of its rows."""
    total, pairs = [Float32(0)] * VECTOR, [[] for _ in range(VECTOR)]
    for block in range(0, ROWS, spec.along):
        words, factors = _load(source, tile, block, spec), None
        if spec.columnwise:
            factors = _column_factors(words, tile, block, outer, out.col_scales, spec)
        for r, row in enumerate(words, block):
            values = bits.unpack(row, DTYPE)
            if spec.sums:
                total = _added(total, values, tile, r, source, spec)
            if spec.rowwise:
                factor = _row_factor(row, tile, r, outer, out.row_scales, spec)
                _store_row(out.row_data, values, [factor] * VECTOR, tile, r, spec)
            if spec.columnwise:
                _store_columns(out.col_data, values, factors, tile, r, pairs, spec)
    if spec.sums:
        offset = Int64(tile.first // ROWS) * Int64(tile.columns) + Int64(tile.column)
        bits.store(out.sums + offset * 4, [bits.to_bits(t) for t in total], tile.inside)


def _load(source, tile, first, spec):
    """Words of a block's rows of a thread, zeros where there is nothing."""
    start = Int64(tile.source + first) * source.pitch + Int64(tile.column)
    address, inside = source.x + start * 2, Boolean(tile.inside != 0)
    return [
        bits.load(
            address + r * (source.pitch * 2), Int32(Boolean(first + r < tile.count) & inside), WORDS
        )
        for r in range(spec.along)
    ]


def _added(total, values, tile, r, source, spec):
    """``total`` and the values of row ``r``, times its scale where there is one."""
    if spec.scaled:
        address = source.row_scale + Int64(tile.source + r) * 4
        scale = bits.to_float(bits.load(address, Int32(r < tile.count), 1)[0])
        values = [bits.mul(value, scale) for value in values]
    return [bits.add(t, value) for t, value in zip(total, values, strict=True)]


def _outer(outer, there):
    """The scale of a thread's group, and any number for what is not ``there``: it is zero."""
    there = Int32(there)
    return (
        outer if outer is None else bits.to_float(bits.select(there, bits.to_bits(outer), bits.ONE))
    )


def _column_factors(words, tile, first, outer, scales, spec):
    """The factor of each column of a block of rows; the scales go to the group's own region."""
    largest = bits.magnitudes(largest_of_columns(words, DTYPE), DTYPE)
    outer = _outer(outer, first < tile.count)
    scaling = [numbers.encode_scale(amax, outer, spec.format) for amax in largest]
    lines = (tile.columns + 127) // 128 * 128
    base = scales + Int64(tile.region // spec.along) * Int64(lines)
    blocks = (tile.region_end - tile.region) // spec.along
    block = (tile.first + first - tile.region) // spec.along
    for i, (scale, _) in enumerate(scaling):
        offset = scale_offset(tile.column + i, block, blocks)
        bits.store_byte(base + Int64(offset), scale, tile.inside)
    return [factor for _, factor in scaling]


def _store_row(data, values, factors, tile, r, spec):
    """Store the elements of row ``r``, row-wise."""
    scaled = [value * factor for value, factor in zip(values, factors, strict=True)]
    offset = Int64(tile.first + r) * Int64(tile.columns) + Int64(tile.column)
    if spec.pairs:
        words, offset = [numbers.pack_e2m1(scaled, spec.fp4_instruction)], offset // 2
    else:
        words = numbers.pack_elements(scaled, spec.format)
    bits.store(data + offset, words, tile.inside)


def _store_columns(data, values, factors, tile, r, pairs, spec):
    """The elements of row ``r`` for the column-wise use.

    Two rows to a byte are a matrix ``[columns, rows / 2]`` of every group: ``pairs`` collects, for
    each column, words of eight rows, and between them the number of the row before.
    """
    if not spec.pairs:
        _store_row(data, values, factors, tile, r, spec)
        return
    for column, value, factor in zip(pairs, values, factors, strict=True):
        column.append(value * factor)
        if r % 2:
            high, low = column.pop(), column.pop()
            byte = numbers.pack_e2m1([low, high], spec.fp4_instruction) << (4 * (r % 8 - 1))
            column.append(byte if r % 8 == 1 else column.pop() | byte)
    if r == ROWS - 1:
        pitch = Int64(tile.region_end - tile.region) // 2
        start = Int64(tile.region // 2) * Int64(tile.columns) + Int64(tile.first - tile.region) // 2
        for i, words in enumerate(pairs):
            bits.store(data + start + Int64(tile.column + i) * pitch, words, tile.inside)


def _row_factor(words, tile, r, outer, scales, spec):
    """The factor of a row's block; its scale is stored by the block's first thread."""
    largest = largest_of_lanes(largest_of(words, DTYPE), spec.along // VECTOR, DTYPE)
    outer = _outer(outer, r < tile.count)
    scale, factor = numbers.encode_scale(magnitude(largest, DTYPE), outer, spec.format)
    offset = scale_offset(tile.first + r, tile.column // spec.along, tile.columns // spec.along)
    first = Int32(Boolean(tile.inside != 0) & (tile.column % spec.along == 0))
    bits.store_byte(scales + Int64(offset), scale, first)
    return factor


@cute.jit
def quantize(
    x: Int64,
    row_scale: Int64,
    amax: Int64,
    ends: Int64,
    placed_ends: Int64,
    row_data: Int64,
    row_scales: Int64,
    col_data: Int64,
    col_scales: Int64,
    factors: Int64,
    sums: Int64,
    size: Int32,
    columns: Int32,
    pitch: Int64,
    groups: Int32,
    parts: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch over ``size`` padded rows: addresses, sizes, ``pitch`` of x in elements.

    ``amax``, FP32 ``[groups, parts]``, is read where the format has a scale for each group.
    """
    width = THREADS * VECTOR
    chunks = (columns + width - 1) // width
    _quantize(
        x, row_scale, amax, ends, placed_ends, row_data, row_scales, col_data, col_scales, factors,
        sums, size, columns, pitch, groups, parts, chunks, spec,
    ).launch(
        grid=[size // ROWS * chunks, 1, 1], block=[THREADS, 1, 1], stream=stream,
        min_blocks_per_mp=RESIDENT, preferred_smem_carveout=0,
    )  # fmt: skip


@cute.kernel
def _sum_blocks(
    sums: Int64,
    ends: Int64,
    placed_ends: Int64,
    out: Int64,
    columns: Int32,
    chunks: Int32,
    block_rows: cutlass.Constexpr,
    wide: cutlass.Constexpr,
):
    cta, _, _ = cute.arch.block_idx()
    lane, slice_, _ = cute.arch.thread_idx()
    group, column = cta // chunks, ((cta % chunks) * 32 + lane) * SUMMED
    rows = _end(ends, group) - _start(ends, group)
    blocks = (rows + block_rows - 1) // block_rows
    inside = Int32(column < columns)
    first = Int64(_start(placed_ends, group) // block_rows)
    total = cute.make_rmem_tensor(SUMMED, Float32)
    total.fill(0)
    for block in cutlass.range(slice_, blocks, SLICES, unroll=4):
        address = sums + ((first + Int64(block)) * Int64(columns) + Int64(column)) * 4
        for i, word in enumerate(bits.load(address, inside, SUMMED)):
            total[i] = bits.add(total[i], bits.to_float(word))
    shared = cute.make_tensor(
        cute.arch.alloc_smem(Float32, SLICES * 32 * SUMMED),
        cute.make_layout((SLICES, 32, SUMMED), stride=(32 * SUMMED, 1, 32)),
    )
    for i in cutlass.range_constexpr(SUMMED):
        shared[slice_, lane, i] = total[i]
    cute.arch.sync_threads()
    if slice_ == 0:
        for other in cutlass.range_constexpr(1, SLICES):
            for i in cutlass.range_constexpr(SUMMED):
                total[i] = bits.add(total[i], shared[other, lane, i])
        words = bits.pack([total[i] for i in range(SUMMED)], "f32" if wide else DTYPE)
        offset = Int64(group) * Int64(columns) + Int64(column)
        bits.store(out + offset * (4 if wide else 2), words, inside)


@cute.jit
def sum_blocks(
    sums: Int64,
    ends: Int64,
    placed_ends: Int64,
    out: Int64,
    columns: Int32,
    groups: Int32,
    stream,
    block_rows: cutlass.Constexpr,
    wide: cutlass.Constexpr,
):
    """Launch: add up sums of ``block_rows`` rows each to those of groups, ``[groups, columns]``.

    In FP32 if ``wide``, else BF16.
    """
    chunks = (columns + 32 * SUMMED - 1) // (32 * SUMMED)
    _sum_blocks(sums, ends, placed_ends, out, columns, chunks, block_rows, wide).launch(
        grid=[groups * chunks, 1, 1], block=[32, SLICES, 1], stream=stream
    )
