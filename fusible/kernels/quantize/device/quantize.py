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
from fusible.kernels.quantize.device import numbers, philox
from fusible.kernels.quantize.device.blocks import (
    block_and_chunk,
    block_coord,
    block_count,
    grid_of,
)
from fusible.kernels.quantize.device.hadamard import transformed
from fusible.kernels.quantize.device.magnitudes import (
    largest_of,
    largest_of_columns,
    largest_of_lanes,
    magnitude,
)
from fusible.kernels.quantize.spec import THREADS, VALUES
from fusible.recipes.formats import HADAMARD

SHARED_PERCENT = 8  # of the memory that shared memory and the L1 cache divide: 2 KiB a block


class QuantizedOut(NamedTuple):
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


def _load_gathered_rows(x, pitch, index, tile, spec):
    """The same of the rows that ``index`` names, each thread of a row reading one entry."""
    size = spec.words * 4 // spec.vector
    own = cute.arch.lane_idx() % spec.lanes
    live = tile.live != 0
    entry = Int64(tile.first + own) * 4
    (named,) = bits.load(index + entry, Int32(Boolean(own < tile.count) & live), 1)
    first = cute.arch.lane_idx() - own
    rows = []
    for r in range(spec.thread_rows):
        row = cute.arch.shuffle_sync(named, first + r)
        inside = Int32(Boolean(r < tile.count) & tile.in_columns & live)
        at = x + (Int64(row) * pitch + Int64(tile.column)) * size
        rows.append(bits.load(at, inside, spec.words))
    return rows


def load_input(x, index, pitch, tile, spec):
    """Words of the rows of a thread, which ``index`` names if they are to be gathered."""
    if spec.gathered:
        return _load_gathered_rows(x, pitch, index, tile, spec)
    return load_rows(x, pitch, tile, spec)


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


def _column_factors(rows, dtype, tile, outer, columns, col_scale, col_blocks, spec):
    """The factors of a thread's columns; their scales are stored."""
    largest = _largest_of_parts(largest_of_columns(rows, dtype), spec)
    scaling = [
        numbers.encode_scale(amax, outer, spec.format) for amax in bits.magnitudes(largest, dtype)
    ]
    if spec.columnwise:
        scales = [scale for scale, _ in scaling]
        _store_column_scales(scales, tile, col_scale, columns, col_blocks, spec)
    return _factors(scaling, outer, tile, spec)


def _store_column_scales(scales, tile, col_scale, columns, col_blocks, spec):
    fmt = spec.format
    offset = Int64(tile.block) * Int64(columns) + Int64(tile.column)
    inside = Int32(tile.in_columns & (tile.part == 0) & (tile.block < col_blocks))
    _store_scales(col_scale + offset * numbers.scale_bytes(fmt), scales, fmt, inside)


def _row_factors(words, r, tile, outer, columns, row_scale, spec):
    """The factors of row ``r`` of a thread; its scale is stored by the first thread of a block."""
    fmt, along = spec.format, spec.format.block[1]
    largest = largest_of_lanes(largest_of(words, spec.dtype), spec.lanes, spec.dtype)
    scaling = numbers.encode_scale(magnitude(largest, spec.dtype), outer, fmt)
    if spec.rowwise:
        row_blocks = Int64(tile.first + r) * Int64(block_count(columns, along))
        offset = row_blocks + Int64(tile.column // along)
        inside = Boolean(r < tile.count) & tile.in_columns & (tile.column % along == 0)
        address = row_scale + offset * numbers.scale_bytes(fmt)
        _store_scale(address, scaling[0], fmt, Int32(inside))
    return _factors([scaling], outer, tile, spec)


def square_factors(rows, tile, columns, row_scale, spec, outer=None):
    """The factors of a square block; its scale is stored by one thread."""
    fmt, along = spec.format, spec.format.block[1]
    largest = largest_of(largest_of_columns(rows, spec.dtype), spec.dtype)
    largest = largest_of_lanes(largest, spec.lanes, spec.dtype)
    (largest,) = _largest_of_parts([largest], spec)
    scaling = numbers.encode_scale(magnitude(largest, spec.dtype), outer, fmt)
    if spec.rowwise or spec.columnwise:
        row_blocks = Int64(tile.block) * Int64(block_count(columns, along))
        offset = row_blocks + Int64(tile.column // along)
        inside = tile.in_columns & (tile.part == 0) & (tile.column % along == 0)
        address = row_scale + offset * numbers.scale_bytes(fmt)
        _store_scale(address, scaling[0], fmt, Int32(inside))
    return _factors([scaling], outer, tile, spec)


def _store_row(targets, wanted, values, factors, random, r, tile, columns, spec):
    """Elements of row ``r`` of a thread, and their values, to those ``targets`` that are wanted.

    Returns a word of the elements.
    """
    fmt = spec.format
    scaled = [value * factor for value, factor in zip(values, factors.to_element, strict=True)]
    offset = Int64(tile.first + r) * Int64(columns) + Int64(tile.column)
    inside = Int32(Boolean(r < tile.count) & tile.in_columns)
    words = numbers.pack_elements(scaled, fmt, random)
    if wanted[0]:
        bits.store(targets[0] + offset // fmt.element.per_byte, words, inside)
    if wanted[1]:
        dequantized = numbers.decode_elements(words, factors.to_value, fmt, VALUES)
        bits.store(targets[1] + offset * bits.SIZES[VALUES], dequantized, inside)
    return words[0]


def _matrix_scales(amax, groups, tile, spec):
    """The scales on top of a block's, row-wise and column-wise, and the factors of all elements.

    None where there are none.
    """
    fmt = spec.format
    if not spec.has_matrix_scales:
        return (None, None), None
    (largest,) = bits.load(amax + Int64(tile.group) * 4, Int32(1), 1)
    if not fmt.has_tensor_scale:
        return (None, None), _factors([numbers.encode_scale(largest, None, fmt)], None, tile, spec)
    outer = of_columns = numbers.tensor_scale(largest, fmt)
    if fmt.hadamard:
        (largest,) = bits.load(amax + Int64(groups + tile.group) * 4, Int32(1), 1)
        of_columns = numbers.tensor_scale(largest, fmt)
    return (outer, of_columns), None


def _stored_matrix_scale(amax, fmt):
    if fmt.has_tensor_scale:
        return bits.to_bits(numbers.tensor_scale(amax, fmt))
    return numbers.encode_scale(amax, None, fmt)[0]


def _quantize_block(
    x, pitch, tile, outers, common, key, zero, out, columns, col_blocks, spec, whole=False
):
    """Scales and elements of a thread's rows; ``common`` are the factors of all of them, if any.

    ``whole`` blocks are transformed in a format that does so.
    """
    words, (outer, col_outer) = load_rows(x, pitch, tile, spec), outers
    if not spec.format.directional and common is None:
        common = square_factors(words, tile, columns, out.row_scale, spec, outer)
    by_row, by_column = (spec.rowwise, spec.row_values), (spec.columnwise, spec.col_values)
    randoms = _RandomRows(key, tile, zero, spec)

    def store_row(words, r):
        of_row = common
        if common is None:
            of_row = _row_factors(words[r], r, tile, outer, columns, out.row_scale, spec)
        targets, values = (out.row_data, out.row_values), bits.unpack(words[r], spec.dtype)
        random = randoms.of(r, columnwise=False)
        randoms.before = _store_row(targets, by_row, values, of_row, random, r, tile, columns, spec)

    def store_column(words, dtype, factors, r):
        targets, values = (out.col_data, out.col_values), bits.unpack(words[r], dtype)
        random = randoms.of(r, columnwise=True)
        randoms.before = _store_row(
            targets, by_column, values, factors, random, r, tile, columns, spec
        )

    dtype, apart = spec.dtype, spec.format.hadamard
    if any(by_row) and apart:
        for r in range(spec.thread_rows):
            store_row(words, r)
    if any(by_column):
        if apart:
            words, dtype = transformed(randoms.after_rows(words), dtype, whole)
        factors = _column_factors(
            words, dtype, tile, col_outer, columns, out.col_scale, col_blocks, spec
        )
        randoms.before = bits.to_bits(factors.to_element[0])
    for r in range(spec.thread_rows):
        if any(by_row) and not apart:
            store_row(words, r)
        if any(by_column):
            store_column(words, dtype, factors, r)


class _RandomRows:
    """Random bytes of a thread's rows, made when they are asked for.

    ``zero`` is 0, which the compiler does not know: it makes those of a row depend on the elements
    ``before``, so that not all are computed, and held in registers, while the input is loaded.
    """

    def __init__(self, key, tile, zero, spec):
        self.key, self.tile, self.zero, self.spec = key, tile, zero, spec
        self.row, self.words, self.before = None, None, Uint32(0)

    def of(self, r, columnwise):
        if not self.spec.format.stochastic:
            return None
        if r != self.row:  # else they are those that the other use had part of
            row = Uint32(self.tile.first + r) | (self.before & self.zero)
            self.row, self.words = r, philox.random_words(self.key, row, self.tile.column)
        return self.words[2:] if columnwise else self.words[:2]

    def after_rows(self, rows):
        """The same words, which depend on the elements before."""
        if not self.spec.format.stochastic:
            return rows
        nothing = self.before & self.zero
        return [[word | nothing for word in row] for row in rows]


def _store_spare_scales(tile, outer, col_scale, columns, col_blocks, spec):
    """Column-wise scales of a block of no rows."""
    scale, _ = numbers.encode_scale(Uint32(0), outer, spec.format)
    _store_column_scales([scale] * spec.vector, tile, col_scale, columns, col_blocks, spec)


@cute.jit
def _store_matrix_scales(amax: Int64, out: QuantizedOut, groups: Int32, spec: cutlass.Constexpr):
    """The scales of whole matrices, for both uses, by one group of threads."""
    thread, _, _ = cute.arch.thread_idx()
    whole = out.row_tensor_scale if spec.format.has_tensor_scale else out.row_scale
    for group in cutlass.range(thread, groups, THREADS, unroll=1):
        (largest,) = bits.load(amax + Int64(group) * 4, Int32(1), 1)
        scale = _stored_matrix_scale(largest, spec.format)
        if cutlass.const_expr(spec.rowwise):
            bits.store(whole + Int64(group) * 4, [scale], Int32(1))
        if cutlass.const_expr(spec.columnwise):
            if cutlass.const_expr(spec.format.hadamard):
                (largest,) = bits.load(amax + Int64(groups + group) * 4, Int32(1), 1)
                scale = _stored_matrix_scale(largest, spec.format)
            bits.store(out.col_tensor_scale + Int64(group) * 4, [scale], Int32(1))


@cute.kernel
def _quantize(
    x: Int64,
    ends: Int64,
    amax: Int64,
    key: Int64,
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
    out = QuantizedOut(
        row_data, row_scale, row_tensor_scale, col_data, col_scale, col_tensor_scale, row_values,
        col_values,
    )  # fmt: skip
    outers, common = _matrix_scales(amax, groups, tile, spec)
    words_of_key = None
    if cutlass.const_expr(spec.format.stochastic):
        words_of_key = philox.load_key(key)
    if cutlass.const_expr(spec.has_matrix_scales):
        if cta == 0:
            _store_matrix_scales(amax, out, groups, spec)
    zero = Uint32(groups) >> 31
    arguments = x, pitch, tile, outers, common, words_of_key, zero, out, columns, col_blocks, spec
    if cutlass.const_expr(spec.format.hadamard):
        # Two kinds of blocks, so that nothing is selected element by element.
        if tile.rows == HADAMARD:
            _quantize_block(*arguments, whole=True)
        elif tile.rows > 0:
            _quantize_block(*arguments, whole=False)
        elif cutlass.const_expr(spec.columnwise):
            _store_spare_scales(tile, outers[1], col_scale, columns, col_blocks, spec)
    elif tile.rows > 0:
        _quantize_block(*arguments)
    elif cutlass.const_expr(spec.columnwise):
        _store_spare_scales(tile, outers[1], col_scale, columns, col_blocks, spec)


@cute.jit
def quantize(
    x: Int64,
    ends: Int64,
    amax: Int64,
    key: Int64,
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
        x, ends, amax, key, row_data, row_scale, row_tensor_scale, col_data, col_scale,
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
    index: Int64,
    amax: Int64,
    rows: Int32,
    columns: Int32,
    pitch: Int64,
    groups: Int32,
    matrix_rows: Int32,
    pass_chunks: Int32,
    blocks: Int32,
    spec: cutlass.Constexpr,
):
    cta, _, _ = cute.arch.block_idx()
    block, chunk = block_and_chunk(cta, blocks, pass_chunks, spec)
    tile = thread_tile(block, chunk, rows, columns, groups, matrix_rows, ends, spec)
    words = load_input(x, index, pitch, tile, spec)
    if cutlass.const_expr(spec.rowwise):
        raise_to_largest(amax + Int64(tile.group) * 4, words, spec.dtype)
    if cutlass.const_expr(spec.columnwise and spec.format.hadamard):
        target = amax + Int64(groups + tile.group) * 4
        if tile.rows == HADAMARD:
            raise_to_largest(target, *transformed(words, spec.dtype, True))
        else:
            raise_to_largest(target, *transformed(words, spec.dtype, False))


def raise_to_largest(target, words, dtype):
    """Raise the bits of FP32 at ``target`` to the largest magnitude in the words of a warp."""
    largest = largest_of(largest_of_columns(words, dtype), dtype)
    largest = magnitude(largest_of_lanes(largest, 32, dtype), dtype)
    # Most groups of threads find a larger one already there.
    (known,) = bits.load(target, Int32(1), 1)
    bits.raise_to(target, largest, Int32((cute.arch.lane_idx() == 0) & (largest > known)))


@cute.jit
def amax(
    x: Int64,
    ends: Int64,
    index: Int64,
    amax: Int64,
    rows: Int32,
    columns: Int32,
    pitch: Int64,
    groups: Int32,
    matrix_rows: Int32,
    pass_chunks: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: raise each of ``amax``, bits of FP32, to the largest magnitude of its group.

    In a format with Hadamard transform, those of the transformed groups follow. ``index`` and
    ``pass_chunks`` are those of ``k_major``.
    """
    blocks, chunks = grid_of(rows, columns, groups, matrix_rows, spec)
    if cutlass.const_expr(not spec.gathered):
        pass_chunks = chunks
    _amax(
        x, ends, index, amax, rows, columns, pitch, groups, matrix_rows, pass_chunks, blocks, spec
    ).launch(grid=[blocks * chunks, 1, 1], block=[THREADS, 1, 1], stream=stream)
