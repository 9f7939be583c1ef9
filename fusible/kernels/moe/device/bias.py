# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""The gradients of a bias that each group adds to its rows, and of the rows' scales (CuTe DSL)."""

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from fusible.kernels.device import bits
from fusible.kernels.device.dependent_launch import has_pdl, wait

WARPS = 8
LANES = 8  # of a warp side by side on a row: 128 bytes; the other lanes are on the next rows
UNROLL = 4  # rows a thread has in flight
ROWS = WARPS * 32 // LANES


def _source(index, row, inside, spec):
    """Which row of the matrix a row is."""
    if not spec.indexed:
        return Int64(row)
    return Int64(bits.load(index + Int64(row) * 4, Int32(inside), 1)[0])


@cute.kernel
def _sums(
    dy: Int64,
    ends: Int64,
    scales: Int64,
    index: Int64,
    out: Int64,
    spec: cutlass.Constexpr,
):
    """A block sums 128 bytes of columns over all rows of one group, always in the same order."""
    wait()
    thread, _, _ = cute.arch.thread_idx()
    chunk, group, _ = cute.arch.block_idx()
    warp, lane = thread // 32, thread % 32
    column = chunk * LANES + lane % LANES
    first = bits.load(ends + Int64(group) * 4 - 4, Int32(group > 0), 1)[0]
    stop = Int32(bits.load(ends + Int64(group) * 4, Int32(1), 1)[0])
    sums = [Float32(0) for _ in range(spec.per_vector)]
    for start in cutlass.range(Int32(first) + thread // LANES, stop, ROWS * UNROLL, unroll=1):
        loaded = []
        for u in cutlass.range_constexpr(UNROLL):
            row = start + u * ROWS
            inside = Boolean(row < stop) & (column < spec.vectors)
            source = _source(index, row, inside, spec)
            words = bits.load(dy + (source * spec.vectors + column) * 16, Int32(inside), 4)
            factor = Float32(1)
            if cutlass.const_expr(spec.weights == "row"):
                factor = bits.load_number(scales, row, inside, spec.weight_dtype)
            loaded.append((words, factor))
        for words, factor in loaded:
            for i, value in enumerate(bits.unpack(words, spec.dtype)):
                sums[i] = sums[i] + value * factor
    shared = cute.arch.alloc_smem(Float32, WARPS * LANES * spec.per_vector)
    for i in cutlass.range_constexpr(spec.per_vector):
        total = sums[i]
        for step in (8, 16):
            total = total + cute.arch.shuffle_sync_bfly(total, step)
        if lane < LANES:
            shared[(warp * LANES + lane) * spec.per_vector + i] = total
    cute.arch.sync_threads()
    per_chunk = LANES * spec.per_vector
    if thread < per_chunk:
        total = Float32(0)
        for w in cutlass.range_constexpr(WARPS):
            total = total + shared[w * per_chunk + thread]
        columns = spec.vectors * spec.per_vector
        at = chunk * per_chunk + thread
        bits.store_number(out, Int64(group) * columns + at, total, at < columns, spec.dtype)


@cute.kernel
def _dots(
    dy: Int64,
    ends: Int64,
    bias: Int64,
    index: Int64,
    out: Int64,
    rows: Int32,
    groups: Int32,
    spec: cutlass.Constexpr,
):
    """A warp for each row, whose group is the number of groups that end before it."""
    wait()
    lane = cute.arch.lane_idx()
    cta, _, _ = cute.arch.block_idx()
    row = cta * WARPS + cute.arch.warp_idx()
    exists = row < rows
    group = Int32(0)
    for other in cutlass.range(lane, groups, 32, unroll=1):
        end = Int32(bits.load(ends + Int64(other) * 4, Int32(1), 1)[0])
        group += Int32(end <= row)
    for step in cutlass.range_constexpr(5):
        group = group + cute.arch.shuffle_sync_bfly(group, 1 << step)
    live = Boolean(exists) & (group < groups)
    total = Float32(0)
    source = _source(index, row, live, spec)
    for column in cutlass.range(lane, spec.vectors, 32, unroll=UNROLL):
        a = bits.load(dy + (source * spec.vectors + column) * 16, Int32(live), 4)
        b = bits.load(bias + (Int64(group) * spec.vectors + column) * 16, Int32(live), 4)
        for left, right in zip(bits.unpack(a, spec.dtype), bits.unpack(b, spec.dtype), strict=True):
            total = total + left * right
    for step in cutlass.range_constexpr(5):
        total = total + cute.arch.shuffle_sync_bfly(total, 1 << step)
    bits.store_number(out, row, total, Boolean(exists) & (lane == 0), "f32")


@cute.jit
def group_sums(
    dy: Int64,
    ends: Int64,
    scales: Int64,
    index: Int64,
    out: Int64,
    groups: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: addresses of contiguous tensors, as ``grouped.grouped_sum`` names them."""
    chunks = (spec.vectors + LANES - 1) // LANES
    _sums(dy, ends, scales, index, out, spec).launch(
        grid=[chunks, groups, 1], block=[32 * WARPS, 1, 1], stream=stream, use_pdl=has_pdl()
    )


@cute.jit
def group_dots(
    dy: Int64,
    ends: Int64,
    bias: Int64,
    index: Int64,
    out: Int64,
    rows: Int32,
    groups: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: addresses of contiguous tensors, as ``grouped.grouped_dots`` names them."""
    _dots(dy, ends, bias, index, out, rows, groups, spec).launch(
        grid=[(rows + WARPS - 1) // WARPS, 1, 1],
        block=[32 * WARPS, 1, 1],
        stream=stream,
        use_pdl=has_pdl(),
    )
