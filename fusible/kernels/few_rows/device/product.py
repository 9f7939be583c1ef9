# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""Products of few rows a group with weights as they are stored (CuTe DSL).

Reading the weights is nearly all of the time, so they are read once for up to 32 rows, by every
thread 16 bytes of a row at a time, straight to registers, and become BF16 there. ``mma.sync``
multiplies 16 rows of the weight by 8 of x. Which 16 numbers of the reduction an instruction takes
is free, as long as both operands agree: a thread gives those that it has loaded.

The warps of a block divide the reduction, and add up through shared memory.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.arch import inline_ptx, shuffle_sync_bfly
from cutlass.memory import SmemAllocator

from fusible.kernels.device import bits
from fusible.kernels.device.activations import evaluate
from fusible.kernels.device.dependent_launch import has_pdl, wait
from fusible.kernels.few_rows.spec import (
    MAX_GROUPS,
    MMA_ROWS,
    RESIDENT,
    THREADS,
    WARP_FEATURES,
    WARPS,
)
from fusible.kernels.quantize.device import numbers
from fusible.recipes.formats import E2M1, E4M3

_ROWS = 4  # of the weight that a thread loads: two of each instruction's 16
_BIAS = {"e4m3": 120, "e2m1": 126}  # BF16 of the shifted bits is 2^-this times the element
_DTYPE = "bf16"  # of rows, biases and the output
_HEADROOM = 16  # scaled values are 2^-this times too small, so that BF16 holds the factor


class _GroupWeights(NamedTuple):
    """A thread's rows of the weight of a group."""

    data: Int64  # address of the matrix
    rows: Any  # where the rows begin, in bytes
    scale: Int64  # address of its scales
    scale_rows: Any
    depth: Int32


# --- numbers --------------------------------------------------------------------------------------


def weight_pairs(words, fmt):
    """Pairs of 8 numbers of a weight, BF16: too small by `_BIAS`; the order is that of `x_pairs`.

    ``words`` are one of E2M1 or two of E4M3.
    """
    if fmt.element == E2M1:
        (word,) = words
        shifts = ((12, 6), (8, 2), (4, -2), (0, -6))
        return [
            _shifted(word, sign) & Uint32(0x80008000) | _shifted(word, rest) & Uint32(0x01C001C0)
            for sign, rest in shifts
        ]
    return [
        _shifted(word, sign) & Uint32(0x80008000) | _shifted(word, rest) & Uint32(0x07F007F0)
        for word in words
        for sign, rest in ((8, 4), (0, -4))
    ]


def _shifted(word, by):
    return word << by if by > 0 else word >> -by if by < 0 else word


def x_pairs(words, fmt):
    """The same pairs of 8 numbers of x, from four words of two neighbours each."""
    a, b, c, d = words
    first, second = ((a, c), (b, d)) if fmt.element == E2M1 else ((a, b), (c, d))
    return [_halves(*pair, high) for pair in (first, second) for high in (False, True)]


def _halves(a, b, high):
    """The lower or the upper halves of two words."""
    return inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {0x7632 if high else 0x5410};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def _times(a, b):
    """The products of two pairs of BF16; ``b`` may be a constant, which the instruction lacks."""
    return inline_ptx(
        "{ .reg .b32 b; mov.b32 b, {$r1}; mul.rn.bf16x2 {$w0}, {$r0}, b; }",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def _power_pair(exponent):
    """A pair of ``2^exponent`` in BF16."""
    return Uint32((exponent + 127) * 0x00800080)


def nan_bytes(word):
    """Not zero if an E4M3 element of a word is NaN."""
    return ((word & Uint32(0x7F7F7F7F)) + Uint32(0x01010101)) & Uint32(0x80808080)


def _factors(stored, spec):
    """Of each row of a thread, pairs of BF16 by which values of `weight_pairs` are multiplied.

    From the row's one or two stored scales; None where sums are scaled.
    """
    if not spec.scales_values:
        return [[None]] * _ROWS
    if spec.scales_of_thread == 1:
        return [[_factor(stored[r], spec.format)] for r in range(_ROWS)]
    return [
        [_factor((stored[r] >> shift) & 255, spec.format) for shift in (0, 8)] for r in range(_ROWS)
    ]


def _factor(stored, fmt):
    value = numbers.decode_scale(stored, fmt)
    if fmt.scale == "e4m3":
        value = value * Float32(2.0 ** (_BIAS[fmt.element.name] - _HEADROOM))
    (pair,) = bits.pack([value, value], "bf16")
    return pair


def _scaled(pairs, factor, fmt):
    """Values of pairs of `weight_pairs`; ``factor`` is None where sums are scaled."""
    if fmt.scale != "e4m3":
        power = _power_pair(_BIAS[fmt.element.name])
        pairs = [_times(pair, power) for pair in pairs]
    return pairs if factor is None else [_times(pair, factor) for pair in pairs]


def _mma(sums, at, a, b):
    """Add the product of 16 x 16 and 16 x 8 numbers to four sums of a thread, from ``at`` on."""
    new = inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *[sums[at + i] for i in range(4)]],
    )
    for i in range(4):
        sums[at + i] = new[i]


# --- loads ----------------------------------------------------------------------------------------


def _load_weights(weights, k, words, scales, spec):
    """What a thread loads of its rows at number ``k`` of the reduction, zeros past the end."""
    fmt = spec.format
    inside = Int32(k < weights.depth)
    for r in range(_ROWS):
        offset = weights.rows[r] + k // fmt.element.per_byte
        found = bits.load(weights.data + Int64(offset), inside, 4)
        for i in range(4):
            words[4 * r + i] = found[i]
    if spec.scales_sums:  # of all threads, whose sums are of all that the warp loads
        k -= cute.arch.lane_idx() % 4 * spec.vector
        inside = Int32(k < weights.depth)
    if not (spec.scales_values or spec.scales_sums):
        return
    for r in range(_ROWS):
        offset = weights.scale_rows[r] + k // fmt.block[1] * numbers.scale_bytes(fmt)
        at = weights.scale + Int64(offset)
        if spec.scales_sums:
            scales[r] = bits.load(at, inside, 1)[0]
        elif spec.scales_of_thread == 2:
            scales[r] = bits.load_half(at, inside)
        else:
            scales[r] = bits.load_byte(at, inside)


def _load_x(rows, tiles, k, inside):
    """8 numbers of each of a thread's rows of x, from an address and where the rows begin."""
    address, offsets = rows
    return [
        bits.load(address + Int64(offset + 2 * k), inside, 4, cached=True)
        for offset in offsets[:tiles]
    ]


# --- products -------------------------------------------------------------------------------------


@cute.jit
def _multiply(
    weights: _GroupWeights,
    x_rows,
    words: cute.Tensor,
    scales: cute.Tensor,
    sums: cute.Tensor,
    nans: cute.Tensor,
    along: Int32,
    spec: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
):
    """A warp's part of the products with 8 x ``tiles`` rows of x.

    ``words`` and ``scales`` are what `_load_weights` loaded at `_first_number`.
    """
    vector = spec.vector
    coming = cute.make_rmem_tensor((4 * _ROWS,), Uint32)
    coming_scales = cute.make_rmem_tensor((_ROWS,), Uint32)
    block_sums = cute.make_rmem_tensor((8 * tiles,), Float32)
    into = block_sums if const_expr(spec.scales_sums) else sums
    chunks = cute.ceil_div(weights.depth, spec.chunk)
    k = _first_number(along, spec)
    step = spec.warps_along * spec.chunk
    for _ in cutlass.range(along, chunks, spec.warps_along, unroll=1):
        _load_weights(weights, k + step, coming, coming_scales, spec)
        inside = Int32(k < weights.depth)
        if const_expr(spec.scales_sums):
            block_sums.fill(0.0)
        x_now = _load_x(x_rows, tiles, k, inside)
        factors = _factors(scales, spec)
        for part in cutlass.range_constexpr(vector // 8):
            x_next = x_now
            if const_expr(part + 1 < vector // 8):
                x_next = _load_x(x_rows, tiles, k + 8 * (part + 1), inside)
            _multiply_part(words, factors, x_now, into, nans, part, spec, tiles)
            x_now = x_next
        if const_expr(spec.scales_sums):
            for i in cutlass.range_constexpr(8 * tiles):
                # Of four sums of an instruction, the second two are of a row 8 below.
                row = 2 * (i // 4 % 2) + i % 4 // 2
                sums[i] = sums[i] + block_sums[i] * bits.to_float(scales[row])
        for i in cutlass.range_constexpr(4 * _ROWS):
            words[i] = coming[i]
        for i in cutlass.range_constexpr(_ROWS):
            scales[i] = coming_scales[i]
        k += step


def _first_number(along, spec):
    """The first number of the reduction that a thread loads."""
    return along * spec.chunk + cute.arch.lane_idx() % 4 * spec.vector


def _multiply_part(words, factors, x_words, sums, nans, part, spec, tiles):
    """The products of 8 numbers of each row that a thread has loaded."""
    fmt = spec.format
    count = 4 // (spec.vector // 8)  # words of a row
    pairs = []
    for r in range(_ROWS):
        own = [words[4 * r + part * count + i] for i in range(count)]
        factor = factors[r][part * len(factors[r]) // (spec.vector // 8)]
        if fmt.element == E4M3:
            for word in own:
                nans[r] = nans[r] | nan_bytes(word)
        pairs.append(_scaled(weight_pairs(own, fmt), factor, fmt))
    for n in range(tiles):
        of_x = x_pairs(x_words[n], fmt)
        for m in range(2):
            upper, lower = pairs[2 * m], pairs[2 * m + 1]
            for half in (0, 2):
                a = [upper[half], lower[half], upper[half + 1], lower[half + 1]]
                _mma(sums, 8 * n + 4 * m, a, of_x[half : half + 2])


# --- a tile ---------------------------------------------------------------------------------------


def _weight_row(column, side, columns, spec):
    """The row of the weight of a gate or a linear column of the activation."""
    if not spec.gated:
        return column
    if spec.interleave == 0:
        return column + side * columns
    block = spec.interleave
    return column // block * (2 * block) + column % block + side * block


def _rows_of_thread(column, warp_across, columns, spec):
    """The rows of the weight that a thread loads, for the tile whose first column is ``column``."""
    lane = cute.arch.lane_idx()
    rows = []
    for m in range(2):
        for half in range(2):
            own = lane // 4 + 8 * half
            if spec.gated:
                at = column + warp_across * (WARP_FEATURES // 2) + own
            else:
                at = column + warp_across * WARP_FEATURES + 16 * m + own
            rows.append(_weight_row(cutlass.min(at, columns - 1), m, columns, spec))
    return rows


class _Arguments(NamedTuple):
    """The arguments of `product`."""

    x: Int64
    data: Int64
    scale: Int64
    outer: Int64
    table: Int64
    ends: Int64
    bias: Int64
    row_scale: Int64
    out: Int64
    total_rows: Int32
    columns: Int32
    depth: Int32
    groups: Int32
    constants: Any


def _weights_of(problem, group, column, warp_across, spec):
    """Addresses of a thread's rows of the weight of a group, and of its scale as a matrix."""
    fmt, group = spec.format, cutlass.min(group, problem.groups - 1)  # also asked of the tail
    features = problem.columns * (2 if spec.gated else 1)
    pitch = problem.depth // fmt.element.per_byte
    scale_pitch, scale_rows, across_block = Int32(0), Int32(0), 1
    if fmt.block is not None:
        across_block, along_block = fmt.block
        scale_pitch = cute.ceil_div(problem.depth, along_block) * numbers.scale_bytes(fmt)
        scale_rows = cute.ceil_div(features, across_block)
    if spec.table:
        entry = problem.table + Int64(group) * 8
        stride = Int64(problem.groups) * 8
        data, scale, outer = [bits.load_address(entry + i * stride) for i in range(3)]
    else:
        data = problem.data + Int64(group) * (Int64(features) * Int64(pitch))
        scale = problem.scale + Int64(group) * (Int64(scale_rows) * Int64(scale_pitch))
        outer = problem.outer + Int64(group) * 4
    rows = _rows_of_thread(column, warp_across, problem.columns, spec)
    of_scales = [row // across_block * scale_pitch for row in rows]
    offsets = [row * pitch for row in rows]
    return _GroupWeights(data, offsets, scale, of_scales, problem.depth), outer


def _put_sums(shared, sums, nans, warp_across, along, spec):
    """Write a warp's sums to shared memory, ``[warps along, rows of x, features]``.

    They are NaN where one of the four threads that share a row of the weight loaded a NaN.
    """
    lane = cute.arch.lane_idx()
    found = [nans[r] for r in range(_ROWS)]
    has_nan = spec.format.element == E4M3
    for other in (1, 2) if has_nan else ():
        found = [word | shuffle_sync_bfly(word, other) for word in found]
    for n in range(spec.row_tiles):
        for m in range(2):
            for i in range(4):
                row = 8 * n + 2 * (lane % 4) + i % 2
                feature = WARP_FEATURES * warp_across + 16 * m + lane // 4 + 8 * (i // 2)
                value = sums[8 * n + 4 * m + i]
                if has_nan:
                    nan = found[2 * m + i // 2] != 0
                    value = bits.to_float(bits.select(nan, bits.NAN, bits.to_bits(value)))
                shared[along, row, feature] = value


def _total(shared, row, feature, spec):
    """A sum over the warps along the reduction, always in the same order."""
    total = shared[0, row, feature]
    for along in range(1, spec.warps_along):
        total = total + shared[along, row, feature]
    return total


@cute.jit
def _write(
    problem: _Arguments,
    shared: cute.Tensor,
    group: Int32,
    first: Int32,
    count: Int32,
    column: Int32,
    spec: cutlass.Constexpr,
):
    """The epilogue of ``count`` rows of a tile, the first being row ``first`` of the output."""
    fmt = spec.format
    thread, _, _ = cute.arch.thread_idx()
    factor = Float32(1.0)
    if const_expr(spec.outer_scale):
        _, outer = _weights_of(problem, group, column, Int32(0), spec)
        factor = bits.to_float(bits.load(outer, Int32(1), 1)[0])
    for i in cutlass.range(thread, count * spec.width, THREADS, unroll=1):
        row, column_in_tile = i // spec.width, i % spec.width
        at = column + column_in_tile
        if at < problem.columns:
            values = []
            for side in cutlass.range_constexpr(2 if spec.gated else 1):
                feature = column_in_tile
                if const_expr(spec.gated):
                    feature = column_in_tile // 16 * 32 + column_in_tile % 16 + 16 * side
                value = _total(shared, row, feature, spec)
                if const_expr(fmt.scale == "e4m3"):
                    value = value * Float32(2.0**_HEADROOM)
                if const_expr(spec.outer_scale):
                    value = value * factor
                if const_expr(spec.bias):
                    features = problem.columns * (2 if spec.gated else 1)
                    of_bias = group * features + _weight_row(at, side, problem.columns, spec)
                    bias = bits.load_number(problem.bias, of_bias, True, _DTYPE)
                    if const_expr(spec.scale != "" and spec.activation == ""):
                        bias = bias * bits.load_number(
                            problem.row_scale, first + row, True, spec.scale
                        )
                    value = value + bias
                values.append(value)
            result = values[0]
            if const_expr(spec.activation != ""):
                result, _ = evaluate(spec.activation, values, problem.constants)
                if const_expr(spec.scale != ""):
                    result = result * bits.load_number(
                        problem.row_scale, first + row, True, spec.scale
                    )
            index = Int64(first + row) * problem.columns + at
            bits.store_number(problem.out, index, result, True, _DTYPE)


@cute.jit
def _fill_zeros(
    problem: _Arguments, first: Int32, rows: Int32, column: Int32, spec: cutlass.Constexpr
):
    """Zeros in the rows past the last group, in the columns of a tile."""
    thread, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(thread, rows * spec.width, THREADS, unroll=1):
        at = column + i % spec.width
        index = Int64(first + i // spec.width) * problem.columns + at
        bits.store_number(problem.out, index, Float32(0.0), Boolean(at < problem.columns), _DTYPE)


@cute.jit
def _load_first(
    problem: _Arguments,
    words: cute.Tensor,
    scales: cute.Tensor,
    group: Int32,
    column: Int32,
    spec: cutlass.Constexpr,
):
    """What a thread multiplies first of a tile."""
    warp = cute.arch.warp_idx()
    weights, _ = _weights_of(problem, group, column, warp % spec.warps_across, spec)
    _load_weights(weights, _first_number(warp // spec.warps_across, spec), words, scales, spec)


@cute.jit
def _multiply_rows(
    problem: _Arguments,
    words: cute.Tensor,
    scales: cute.Tensor,
    sums: cute.Tensor,
    nans: cute.Tensor,
    group: Int32,
    column: Int32,
    first: Int32,
    count: Int32,
    spec: cutlass.Constexpr,
):
    """A warp's sums of ``count`` rows from ``first`` on, in the columns of a tile."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    warp_across, along = warp % spec.warps_across, warp // spec.warps_across
    weights, _ = _weights_of(problem, group, column, warp_across, spec)
    pitch = problem.depth * 2
    x_rows = (
        problem.x + Int64(first) * Int64(pitch),
        [cutlass.min(MMA_ROWS * n + lane // 4, count - 1) * pitch for n in range(spec.row_tiles)],
    )
    sums.fill(0.0)
    nans.fill(0)
    operands = weights, x_rows, words, scales, sums, nans, along, spec
    if const_expr(spec.row_tiles == 1):
        _multiply(*operands, 1)
    elif const_expr(spec.row_tiles == 2):
        if count <= MMA_ROWS:
            _multiply(*operands, 1)
        else:
            _multiply(*operands, 2)
    elif count <= MMA_ROWS:
        _multiply(*operands, 1)
    elif count <= 2 * MMA_ROWS:
        _multiply(*operands, 2)
    else:
        _multiply(*operands, 4)


@cute.jit
def _list_groups(problem: _Arguments, used: cute.Tensor, counts: cute.Tensor) -> Int32:
    """Write the groups that have rows to shared memory, in order; return how many there are.

    The rows past the last group are one more. By all threads.
    """
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    total = Int32(0)
    for base in cutlass.range(0, problem.groups + 1, THREADS, unroll=1):
        group = base + thread
        start, end = _rows_of(problem, group)
        found = Boolean(group <= problem.groups) & (start < end)
        votes = cute.arch.vote_ballot_sync(found)
        if lane == 0:
            counts[warp] = Int32(cute.arch.popc(votes))
        cute.arch.sync_threads()
        at = total + Int32(cute.arch.popc(votes & cute.arch.lanemask_lt()))
        for w in cutlass.range_constexpr(WARPS):
            count = counts[w]
            total += count
            if w < warp:
                at += count
        if found:
            used[at] = group
        cute.arch.sync_threads()
    return total


def _rows_of(problem, group):
    """The first row of a group and the one after its last; of the tail after the last group."""
    inside = Boolean(group > 0) & (group <= problem.groups)
    (start,) = bits.load(problem.ends + Int64(group - 1) * 4, Int32(inside), 1, cached=True)
    (end,) = bits.load(
        problem.ends + Int64(group) * 4, Int32(group < problem.groups), 1, cached=True
    )
    end = cutlass.select_(group < problem.groups, Int32(end), problem.total_rows)
    return Int32(start), cutlass.min(end, problem.total_rows)


@cute.kernel
def _product(problem: _Arguments, spec: cutlass.Constexpr):
    memory = SmemAllocator()
    used = memory.allocate_tensor(Int32, cute.make_layout(MAX_GROUPS + 1))
    counts = memory.allocate_tensor(Int32, cute.make_layout(WARPS))
    features = WARP_FEATURES * spec.warps_across
    rows = MMA_ROWS * spec.row_tiles
    strides = rows * spec.pitch, spec.pitch, 1
    shared = memory.allocate_tensor(
        Float32, cute.make_layout((spec.warps_along, rows, features), stride=strides)
    )
    wait()
    tiles_across = cute.ceil_div(problem.columns, spec.width)
    tiles = _list_groups(problem, used, counts) * tiles_across
    tile, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    words = cute.make_rmem_tensor((4 * _ROWS,), Uint32)
    scales = cute.make_rmem_tensor((_ROWS,), Uint32)
    sums = cute.make_rmem_tensor((8 * spec.row_tiles,), Float32)
    nans = cute.make_rmem_tensor((_ROWS,), Uint32)
    warp = cute.arch.warp_idx()
    start = Int32(0)
    if tile < tiles:
        _load_first(
            problem, words, scales,
            used[tile // tiles_across], tile % tiles_across * spec.width, spec,
        )  # fmt: skip
    while tile < tiles:
        group, column = used[tile // tiles_across], tile % tiles_across * spec.width
        first, end = _rows_of(problem, group)
        begin, next_tile, next_start = first + start, tile, start + rows
        if (first + next_start >= end) | (group == problem.groups):
            next_tile, next_start = tile + blocks, Int32(0)
        if group < problem.groups:
            count = cutlass.min(end - begin, rows)
            _multiply_rows(problem, words, scales, sums, nans, group, column, begin, count, spec)
            if next_tile < tiles:  # under the epilogue
                _load_first(
                    problem, words, scales,
                    used[next_tile // tiles_across], next_tile % tiles_across * spec.width, spec,
                )  # fmt: skip
            _put_sums(shared, sums, nans, warp % spec.warps_across, warp // spec.warps_across, spec)
            cute.arch.sync_threads()
            _write(problem, shared, group, begin, count, column, spec)
            cute.arch.sync_threads()
        else:
            _fill_zeros(problem, first, end - first, column, spec)
        tile, start = next_tile, next_start


@cute.jit
def product(
    x: Int64,
    data: Int64,
    scale: Int64,
    outer: Int64,
    table: Int64,
    ends: Int64,
    bias: Int64,
    row_scale: Int64,
    out: Int64,
    total_rows: Int32,
    columns: Int32,
    depth: Int32,
    groups: Int32,
    limit: Float32,
    alpha: Float32,
    offset: Float32,
    blocks: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: ``x`` [total_rows, depth], ``out`` [total_rows, columns], contiguous.

    ``columns`` are those of the activation, if it is gated half of the weight's rows. ``data``,
    ``scale`` and ``outer`` are the addresses of ``[groups, ...]``, or ``table`` that of theirs
    ``[3, groups]``.
    """
    constants = (limit, alpha, offset)
    problem = _Arguments(
        x, data, scale, outer, table, ends, bias, row_scale, out,
        total_rows, columns, depth, groups, constants,
    )  # fmt: skip
    _product(problem, spec).launch(
        grid=[blocks, 1, 1],
        block=[THREADS, 1, 1],
        min_blocks_per_mp=RESIDENT,
        preferred_smem_carveout=spec.shared_percent,
        use_pdl=has_pdl(),
        stream=stream,
    )
