# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""A stable counting sort of choices by group in two launches (CuTe DSL).

The choices are divided among the CTAs, and a CTA's among its warps, so that each warp has
neighbours. First every CTA counts its choices by group. Then every CTA sums the counts of
the CTAs before it, counts its own once more, by warp, and places them: a choice's rank among the 32
of its warp that are looked at together is a matter of one ``match``. Choices of no group are those
of one more group, whose rows are in the tail, after those that were too many for theirs.
"""

import cutlass
from cutlass import Int32, Int64, cute

WARPS = 8
THREADS = 32 * WARPS


@cute.jit
def _group_of(ids: cute.Tensor, choice: Int32, last: Int32, groups: cutlass.Constexpr):
    """The group of a choice, ``groups`` for an id that is none, ``groups + 1`` beyond the last."""
    group = Int32(groups + 1)
    if choice < last:
        group = Int32(groups)
        wanted = ids[choice]
        if (wanted >= 0) & (wanted < groups):
            group = Int32(wanted)
    return group


@cute.jit
def _tally(
    ids: cute.Tensor,
    counters: cute.Tensor,
    table: cute.Tensor,
    row_map: cute.Tensor,
    first: Int32,
    last: Int32,
    groups: cutlass.Constexpr,
    place: cutlass.Constexpr,
):
    """A warp goes through its choices, 32 at a time, and counts them by group.

    ``counters`` ``[groups + 2]`` are the warp's; where the choices are placed they start from the
    number of earlier choices of the group.
    """
    lane = cute.arch.lane_idx()
    for at in cutlass.range(first, last, 32, unroll=1):
        choice = at + lane
        group = _group_of(ids, choice, last, groups)
        peers = cute.arch.match_sync(0xFFFFFFFF, group)
        earlier = Int32(cute.arch.popc(peers & cute.arch.lanemask_lt()))
        start = counters[group]
        cute.arch.sync_warp()
        if earlier == 0:
            counters[group] = start + Int32(cute.arch.popc(peers))
        cute.arch.sync_warp()
        if cutlass.const_expr(place):  # noqa: SIM102 - one is known to the compiler
            if choice < last:
                within = start + earlier
                size, begin, spare = table[0, group], table[1, group], table[2, group]
                row = begin + within
                if within >= size:
                    row = ~(spare + within - size)
                row_map[choice] = row


@cute.kernel
def _count(ids: cute.Tensor, counts: cute.Tensor, per_block: Int32, groups: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.warp_idx()
    counters = _shared(WARPS, groups + 2)
    _zero(counters, thread)
    first, last = _span(cute.size(ids), per_block, block, warp)
    _tally(ids, counters[warp, None], counters, ids, first, last, groups, False)
    cute.arch.sync_threads()
    for group in cutlass.range(thread, groups + 1, THREADS, unroll=1):
        total = Int32(0)
        for w in cutlass.range_constexpr(WARPS):
            total += counters[w, group]
        counts[block, group] = total


@cute.kernel
def _place(
    ids: cute.Tensor,
    counts: cute.Tensor,
    row_map: cute.Tensor,
    sizes: cute.Tensor,
    ends: cute.Tensor,
    per_block: Int32,
    capacity: Int32,
    groups: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.warp_idx()
    counters = _shared(WARPS, groups + 2)
    table = _shared(3, groups + 2)  # of each group: rows, first row, first row of the tail
    _zero(counters, thread)
    first, last = _span(cute.size(ids), per_block, block, warp)
    _tally(ids, counters[warp, None], counters, ids, first, last, groups, False)
    for group in cutlass.range(thread, groups + 1, THREADS, unroll=1):
        before, total = Int32(0), Int32(0)
        for other in cutlass.range(cute.size(counts, mode=[0]), unroll=16):
            count = counts[other, group]
            total += count
            if other < block:
                before += count
        table[0, group] = total
        table[2, group] = before
    cute.arch.sync_threads()
    # From here on the counters say how many of the group came before the warp's choices.
    for group in cutlass.range(thread, groups + 1, THREADS, unroll=1):
        before = table[2, group]
        for w in cutlass.range_constexpr(WARPS):
            count = counters[w, group]
            counters[w, group] = before
            before += count
    cute.arch.sync_threads()
    if warp == 0:
        _scan(table, capacity, groups)
    cute.arch.sync_threads()
    if block == 0:
        for group in cutlass.range(thread, groups, THREADS, unroll=1):
            size = table[0, group]
            sizes[group] = Int64(size)
            ends[group] = table[1, group] + size
    _tally(ids, counters[warp, None], table, row_map, first, last, groups, True)


@cute.jit
def _scan(table: cute.Tensor, capacity: Int32, groups: cutlass.Constexpr):
    """One warp: sizes, first rows and first spare rows from the total counts in ``table[0]``.

    A lane has ``per_lane`` neighbouring groups; what is of no group comes last and has size zero.
    """
    lane = cute.arch.lane_idx()
    per_lane = (groups + 1 + 31) // 32
    begin = lane * per_lane
    end = cutlass.min(begin + per_lane, groups + 1)
    kept, left = Int32(0), Int32(0)
    for group in cutlass.range(begin, end, unroll=1):
        total = table[0, group]
        size = cutlass.min(total, capacity)
        if group == groups:
            size = Int32(0)
        kept += size
        left += total - size
    rows, spare = _through(kept, lane), _through(left, lane)
    live = cute.arch.shuffle_sync(rows, 31)
    rows, spare = rows - kept, live + spare - left
    for group in cutlass.range(begin, end, unroll=1):
        total = table[0, group]
        size = cutlass.min(total, capacity)
        if group == groups:
            size = Int32(0)
        table[0, group] = size
        table[1, group] = rows
        table[2, group] = spare
        rows += size
        spare += total - size


@cute.jit
def _through(value: Int32, lane: Int32):
    """Sum over this lane and those before it."""
    for i in cutlass.range_constexpr(5):
        before = cute.arch.shuffle_sync_up(value, 1 << i)
        if lane >= (1 << i):
            value += before
    return value


def _shared(rows, columns):
    """Integers in shared memory."""
    pointer = cute.arch.alloc_smem(Int32, rows * columns, alignment=16)
    return cute.make_tensor(pointer, cute.make_layout((rows, columns), stride=(columns, 1)))


@cute.jit
def _zero(counters: cute.Tensor, thread: Int32):
    flat = cute.make_tensor(counters.iterator, cute.make_layout(cute.size(counters)))
    for i in cutlass.range(thread, cute.size(counters), THREADS, unroll=1):
        flat[i] = Int32(0)
    cute.arch.sync_threads()


def _span(choices, per_block, block, warp):
    """First and last choice of a warp; every part but the last is a multiple of 32."""
    per_warp = per_block // WARPS
    first = block * per_block + warp * per_warp
    return cutlass.min(first, choices), cutlass.min(first + per_warp, choices)


@cute.jit
def permutation(
    ids: cute.Tensor,
    counts: cute.Tensor,
    row_map: cute.Tensor,
    sizes: cute.Tensor,
    ends: cute.Tensor,
    per_block: Int32,
    capacity: Int32,
    groups: cutlass.Constexpr,
    stream,
):
    """Launch both kernels over ``ids`` ``[N]``; ``counts`` ``[CTAs, groups + 1]`` is scratch."""
    blocks = cute.size(counts, mode=[0])
    _count(ids, counts, per_block, groups).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
    _place(ids, counts, row_map, sizes, ends, per_block, capacity, groups).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
