# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""MXFP8 quantization for row-wise and column-wise use in one pass over the input (CuTe DSL).

A thread owns ``vector`` neighbouring columns of one block of 32 rows, all of it in registers: the
largest magnitude of a column is then its own, and that of a row's block of 32 columns needs two or
three shuffles. Nothing goes through shared memory; all loads of a block are in flight at once.
Works on BF16 and compiles for any architecture with E4M3 conversions (SM89 and later).
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.arch import inline_ptx

BLOCK = 32


class Config(NamedTuple):
    """What is fixed when the kernel is compiled."""

    element: str
    """PTX name of the element type."""
    max: float
    max_exponent: int
    round_up: bool
    """Round scales up; down as OCP MX otherwise."""
    grouped: bool
    rowwise: bool
    columnwise: bool
    vector: int = 8
    """BF16 numbers a thread loads at once, 4 or 8."""
    threads: int = 128


def _max_magnitude(a, b):
    """Larger magnitude of two packed BF16 pairs, NaN if one is NaN; signs are meaningless."""
    return inline_ptx(
        "max.NaN.xorsign.abs.bf16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def _max_over_lanes(largest, lanes):
    """Largest packed magnitudes of the threads that share a row's block."""
    step = 1
    while step < lanes:
        largest = _max_magnitude(largest, cute.arch.shuffle_sync_bfly(largest, step))
        step *= 2
    return largest


def _half(packed, which):
    """FP32 bits of the magnitude of the lower (0) or upper (1) BF16 of a pair."""
    return (packed & 0x7FFF) << 16 if which == 0 else packed & 0x7FFF0000


def _load(address, inside, count):
    """``count`` packed pairs of BF16 numbers, zeros where not ``inside``."""
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(count))
    words = ", ".join(f"{{$w{i}}}" for i in range(count))
    return inline_ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {zeros} "
        f"@p ld.global.L1::no_allocate.v{count}.b32 {{{words}}}, [{{$r0}}]; }}",
        write_only_types=[Uint32] * count,
        read_only_args=[address, inside],
    )


def _store(address, words, inside):
    """Packed elements where ``inside``."""
    values = ", ".join(f"{{$r{i + 2}}}" for i in range(len(words)))
    values = (
        f"v{len(words)}.b32 [{{$r0}}], {{{values}}}"
        if len(words) > 1
        else f"b32 [{{$r0}}], {values}"
    )
    inline_ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; @p st.global.{values}; }}",
        read_only_args=[address, inside, *words],
    )


def _store_byte(address, byte, inside):
    inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; @p st.global.b8 [{$r0}], {$r2}; }",
        read_only_args=[address, inside, byte],
    )


def _float(bits):
    return inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Uint32(bits)]
    )


def _bits(value):
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


def _select(condition, a, b):
    return inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; selp.b32 {$w0}, {$r1}, {$r2}, p; }",
        write_only_types=[Uint32],
        read_only_args=[Int32(condition), Uint32(a), Uint32(b)],
    )


def _pack(values, element):
    """Four FP32 numbers to four saturated elements, round to nearest even, the first lowest."""
    return inline_ptx(
        f"{{ .reg .b16 a, b; cvt.rn.satfinite.{element}x2.f32 a, {{$r1}}, {{$r0}}; "
        f"cvt.rn.satfinite.{element}x2.f32 b, {{$r3}}, {{$r2}}; mov.b32 {{$w0}}, {{a, b}}; }}",
        write_only_types=[Uint32],
        read_only_args=list(values),
    )


def _scale(amax_bits, config):
    """E8M0 byte of a largest magnitude, factor from value to element; see recipes.formats."""
    if config.round_up:
        bits = _bits(_float(amax_bits) * Float32(1.0 / config.max))
        # Adding all mantissa bits carries into the exponent unless the mantissa is zero.
        byte = (bits + 0x7FFFFF) >> 23
        byte = _select(bits <= 0x400000, 0, byte)
    else:
        exponent = amax_bits >> 23
        byte = _select(exponent <= config.max_exponent, 0, exponent - config.max_exponent)
    byte = _select(amax_bits >= 0x7F800000, 254, byte)
    factor = _select(byte == 254, 0x400000, (254 - byte) << 23)
    nan = amax_bits > 0x7F800000
    return _select(nan, 255, byte), _float(_select(nan, 0x7FC00000, factor))


def _column_scales(rows, config):
    """Packed scale bytes of a thread's columns, and a factor for each, from packed rows."""
    scale_bytes, factors = [], []
    for pairs in zip(*rows, strict=True):
        largest = pairs[0]
        for pair in pairs[1:]:
            largest = _max_magnitude(largest, pair)
        for which in (0, 1):
            byte, factor = _scale(_half(largest, which), config)
            scale_bytes.append(byte)
            factors.append(factor)
    packed = []
    for i in range(0, config.vector, 4):
        a, b, c, d = scale_bytes[i : i + 4]
        packed.append(a | (b << 8) | (c << 16) | (d << 24))
    return packed, factors


def _row_scale(pairs, config):
    """Scale byte and factor of the row's block that a thread has a part of."""
    largest = pairs[0]
    for pair in pairs[1:]:
        largest = _max_magnitude(largest, pair)
    largest = _max_over_lanes(largest, BLOCK // config.vector)
    low, high = _half(largest, 0), _half(largest, 1)
    return _scale(_select(low > high, low, high), config)


def _unpack(pairs):
    """FP32 numbers of packed BF16 pairs."""
    halves = [bits for pair in pairs for bits in (pair << 16, pair & 0xFFFF0000)]
    return [_float(bits) for bits in halves]


def _pack_all(values, config):
    return [_pack(values[i : i + 4], config.element) for i in range(0, len(values), 4)]


@cute.jit
def _find_block(ends: cute.Tensor, groups: Int32, rows: Int32, block: Int32):
    """First and last row of ``block`` and whether it lies in a group; blocks start anew at each.

    The rows past the last group are a group of their own, which is loaded as zeros. The lanes of a
    warp look at 32 groups at a time.
    """
    lane = cute.arch.lane_idx()
    first = rows
    last = rows
    live = Int32(0)
    done = Int32(0)
    blocks_before = Int32(0)
    rows_before = Int32(0)
    for step in cutlass.range((groups + 32) // 32, unroll=1):
        if done == 0:
            group = step * 32 + lane
            end = rows
            if group < groups:
                end = Int32(ends[group])
            end = cutlass.min(end, rows)
            start = cute.arch.shuffle_sync_up(end, 1)
            if lane == 0:
                start = rows_before
            blocks = (end - start + (BLOCK - 1)) // BLOCK
            through = blocks
            for i in cutlass.range_constexpr(5):
                earlier = cute.arch.shuffle_sync_up(through, 1 << i)
                if lane >= (1 << i):
                    through += earlier
            through += blocks_before
            hits = Int32(cute.arch.vote_ballot_sync(through > block))
            if hits != 0:
                source = cute.arch.popc((hits & -hits) - 1)
                first = start + (block - (through - blocks)) * BLOCK
                first = cute.arch.shuffle_sync(first, source)
                last = cute.arch.shuffle_sync(end, source)
                live = Int32(step * 32 + source < groups)
                done = Int32(1)
            blocks_before = cute.arch.shuffle_sync(through, 31)
            rows_before = cute.arch.shuffle_sync(end, 31)
    return first, cutlass.min(first + BLOCK, last), live


@cute.kernel
def _quantize(
    x: cute.Tensor,
    ends: cute.Tensor,
    row_data: cute.Tensor,
    row_scale: cute.Tensor,
    col_data: cute.Tensor,
    col_scale: cute.Tensor,
    rows: Int32,
    columns: Int32,
    chunks: Int32,
    config: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    block = cta // chunks
    column = (cta % chunks) * (config.threads * config.vector) + thread * config.vector
    in_columns = column < columns

    first, end, live = block * BLOCK, cutlass.min(block * BLOCK + BLOCK, rows), Int32(1)
    if cutlass.const_expr(config.grouped):
        first, end, live = _find_block(ends, cute.size(ends), rows, block)
    count = end - first

    pitch = Int64(x.stride[0])
    source = x.iterator.toint() + (Int64(first) * pitch + Int64(column)) * 2
    words = []
    for r in cutlass.range_constexpr(BLOCK):
        inside = Int32(Boolean(r < count) & in_columns & (live != 0))
        words.append(_load(source + r * (pitch * 2), inside, config.vector // 2))

    offset = Int64(first) * Int64(columns) + Int64(column)
    col_factors = []
    if cutlass.const_expr(config.columnwise):
        packed, col_factors = _column_scales(words, config)
        address = col_scale.iterator.toint() + Int64(block) * Int64(columns) + Int64(column)
        kept = Int32(in_columns & (block < cute.size(col_scale, mode=[0])))
        _store(address, packed, kept)

    scale_columns = columns // BLOCK
    scale_address = (
        row_scale.iterator.toint() + Int64(first) * Int64(scale_columns) + Int64(column // BLOCK)
    )
    writes_scale = in_columns & (thread % (BLOCK // config.vector) == 0)
    for r in cutlass.range_constexpr(BLOCK):
        inside = Boolean(r < count) & in_columns
        values = _unpack(words[r])
        target = offset + r * Int64(columns)
        if cutlass.const_expr(config.rowwise):
            byte, factor = _row_scale(words[r], config)
            packed = _pack_all([v * factor for v in values], config)
            _store(row_data.iterator.toint() + target, packed, Int32(inside))
            _store_byte(
                scale_address + r * Int64(scale_columns),
                byte,
                Int32(Boolean(r < count) & writes_scale),
            )
        if cutlass.const_expr(config.columnwise):
            scaled = [v * f for v, f in zip(values, col_factors, strict=True)]
            packed = _pack_all(scaled, config)
            _store(col_data.iterator.toint() + target, packed, Int32(inside))


@cute.jit
def quantize(
    x: cute.Tensor,
    ends: cute.Tensor,
    row_data: cute.Tensor,
    row_scale: cute.Tensor,
    col_data: cute.Tensor,
    col_scale: cute.Tensor,
    config: cutlass.Constexpr,
    stream,
):
    """Launch over ``x`` ``[rows, columns]``: one group of threads per 32 rows and 1024 columns."""
    rows, columns = x.shape
    chunks = (columns + config.threads * config.vector - 1) // (config.threads * config.vector)
    blocks = (rows + BLOCK - 1) // BLOCK
    if cutlass.const_expr(config.grouped):
        # Every group, and the rows past the last one, can add one partial block.
        blocks = (rows + (cute.size(ends) + 1) * (BLOCK - 1)) // BLOCK
    _quantize(
        x, ends, row_data, row_scale, col_data, col_scale, rows, columns, chunks, config
    ).launch(grid=[blocks * chunks, 1, 1], block=[config.threads, 1, 1], stream=stream)


@cute.kernel
def _group_offsets(
    first_dims: cute.Tensor, offsets: cute.Tensor, ends: cute.Tensor, columns: Int64
):
    """One warp; a lane sums ``per_lane`` neighbouring groups, then the lanes' sums are scanned."""
    lane = cute.arch.lane_idx()
    groups = cute.size(first_dims)
    per_lane = (groups + 31) // 32
    begin = lane * per_lane
    end = cutlass.min(begin + per_lane, groups)
    total = Int64(0)
    for i in cutlass.range(begin, end, unroll=8):
        total += Int64(first_dims[i])
    through = total
    for i in cutlass.range_constexpr(5):
        earlier = cute.arch.shuffle_sync_up(through, 1 << i)
        if lane >= (1 << i):
            through += earlier
    rows = through - total
    if lane == 0:
        offsets[0] = Int64(0)
    for i in cutlass.range(begin, end, unroll=8):
        rows += Int64(first_dims[i])
        ends[i] = rows
        offsets[i + 1] = rows * columns


@cute.jit
def group_offsets(
    first_dims: cute.Tensor, offsets: cute.Tensor, ends: cute.Tensor, columns: Int64, stream
):
    """Launch: where groups of ``first_dims`` rows begin, in elements, and their end rows."""
    _group_offsets(first_dims, offsets, ends, columns).launch(
        grid=[1, 1, 1], block=[32, 1, 1], stream=stream
    )
