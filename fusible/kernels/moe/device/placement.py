# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""A stable counting sort of choices by group, in one launch of one cluster (CuTe DSL).

The choices are divided among the CTAs of the cluster, and a CTA's among its warps, so that each
warp has neighbours. A warp counts its choices by group and notes which of the group's each one is:
among the 32 that are looked at together, that is a matter of votes. The CTAs send each other their
counts through distributed shared memory, and each computes where the groups begin and what came
before its warps; then a choice's place is a sum. Choices of no group are those of one more group,
whose rows are in the tail, after those that were too many for theirs.
"""

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from fusible.kernels.device import bits
from fusible.kernels.device.dependent_launch import has_pdl, wait
from fusible.kernels.moe.spec import GROUP_BITS

TOGETHER = 4  # loads a thread has in flight


@cute.kernel
def _permutation(
    ids: cute.Tensor,
    row_map: cute.Tensor,
    sizes: cute.Tensor,
    ends: cute.Tensor,
    capacity: Int32,
    spec: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.warp_idx()
    if cutlass.const_expr(spec.ctas > 1):
        cute.arch.cluster_arrive_relaxed()  # see that all CTAs are there before one is written to
    # Choices of no group are counted in the last column but one, what is no choice in the last.
    shared = SmemAllocator()
    counters = integers(shared, spec.warps, spec.groups + 2)
    counts = integers(shared, spec.ctas, spec.groups + 1)
    # Of each group: rows, first row, first row of the tail.
    table = integers(shared, 3, spec.groups + 1)
    for i in cutlass.range(thread, spec.warps * (spec.groups + 2), spec.threads, unroll=1):
        (counters.iterator + i).store(Int32(0))
    cute.arch.sync_threads()
    wait()
    choices = cute.size(ids)
    workers = spec.ctas * spec.warps
    per_warp = (choices + 32 * workers - 1) // (32 * workers) * 32
    first = cutlass.min((block * spec.warps + warp) * per_warp, choices)
    stop = cutlass.min(first + per_warp, choices)

    _count(ids, row_map, counters[warp, None], first, stop, spec.groups)
    cute.arch.sync_threads()
    if cutlass.const_expr(spec.ctas > 1):
        cute.arch.cluster_wait()
    for group in cutlass.range(thread, spec.groups + 1, spec.threads, unroll=1):
        total = Int32(0)
        for w in cutlass.range_constexpr(spec.warps):
            total += counters[w, group]
        for cta in cutlass.range_constexpr(spec.ctas):
            _send(counts, block * (spec.groups + 1) + group, total, cta, spec.ctas)
    if cutlass.const_expr(spec.ctas > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    # From here on the counters say how many of the group came before the warp's choices.
    for group in cutlass.range(thread, spec.groups + 1, spec.threads, unroll=1):
        before, total = Int32(0), Int32(0)
        for cta in cutlass.range_constexpr(spec.ctas):
            count = counts[cta, group]
            total += count
            if cta < block:
                before += count
        table[0, group] = total
        for w in cutlass.range_constexpr(spec.warps):
            count = counters[w, group]
            counters[w, group] = before
            before += count
    cute.arch.sync_threads()
    if warp == 0:
        place_groups(table, capacity, spec.groups)
    cute.arch.sync_threads()
    if block == 0:
        for group in cutlass.range(thread, spec.groups, spec.threads, unroll=1):
            size = table[0, group]
            sizes[group] = Int64(size)
            ends[group] = table[1, group] + size
    _place(row_map, counters[warp, None], table, first, stop)


@cute.jit
def _count(
    ids: cute.Tensor,
    row_map: cute.Tensor,
    counters: cute.Tensor,
    first: Int32,
    stop: Int32,
    groups: cutlass.Constexpr,
):
    """A warp counts its choices by group.

    Until it has its row, a choice's entry in ``row_map`` is its group and how many of the warp's
    choices before it have the same.
    """
    for start in cutlass.range(first, stop, 32 * TOGETHER, unroll=1):
        found = []
        for choice, wanted in _loaded(ids, start, stop):
            group = group_of(wanted, choice < stop, groups)
            found.append((choice, group, _peers(group, (groups + 1).bit_length())))
        for choice, group, peers in found:
            earlier = Int32(cute.arch.popc(peers & cute.arch.lanemask_lt()))
            before = counters[group]
            cute.arch.sync_warp()
            if earlier == 0:
                counters[group] = before + Int32(cute.arch.popc(peers))
            cute.arch.sync_warp()
            if choice < stop:
                row_map[choice] = ((before + earlier) << GROUP_BITS) | group


@cute.jit
def _place(
    row_map: cute.Tensor, counters: cute.Tensor, table: cute.Tensor, first: Int32, stop: Int32
):
    """A warp gives its choices their rows."""
    for start in cutlass.range(first, stop, 32 * TOGETHER, unroll=1):
        for choice, noted in _loaded(row_map, start, stop):
            note = cutlass.select_(choice < stop, noted, Int32(0))
            group = note & ((1 << GROUP_BITS) - 1)
            within = (note >> GROUP_BITS) + counters[group]
            row = row_of(table, group, within)
            if choice < stop:
                row_map[choice] = row


@cute.jit
def row_of(table: cute.Tensor, group: Int32, within: Int32) -> Int32:
    """The row map's entry of a group's choice number ``within``, from `place_groups`."""
    size, begin, spare = table[0, group], table[1, group], table[2, group]
    row = begin + within
    if within >= size:
        row = ~(spare + within - size)
    return row


def _loaded(tensor, start, stop):
    """A thread's choices from ``start`` on, each with its number; from ``stop`` on, any number."""
    choices = [start + 32 * i + cute.arch.lane_idx() for i in range(TOGETHER)]
    numbers = [tensor[cutlass.min(choice, stop - 1)] for choice in choices]
    return list(zip(choices, numbers, strict=True))


@cute.jit
def group_of(wanted, exists, groups: cutlass.Constexpr):
    """The group of an id, ``groups`` for an id that is none, ``groups + 1`` for no choice."""
    group = Int32(groups)
    if (wanted >= 0) & (wanted < groups):
        group = Int32(wanted)
    if not exists:
        group = Int32(groups + 1)
    return group


def _peers(group, count):
    """The lanes with the same group, by its ``count`` bits: a ``match`` of many takes longer."""
    peers = Uint32(0xFFFFFFFF)
    for i in range(count):
        bit = Uint32((group >> i) & 1)
        peers = peers & (Uint32(cute.arch.vote_ballot_sync(bit != 0)) ^ (bit - 1))
    return peers


@cute.jit
def place_groups(table: cute.Tensor, capacity: Int32, groups: cutlass.Constexpr):
    """One warp: sizes, first rows and first spare rows from the total counts in ``table[0]``.

    A lane has ``per_lane`` neighbouring groups; what is of no group comes last and has size zero.
    """
    lane = cute.arch.lane_idx()
    per_lane = (groups + 1 + 31) // 32
    begin = lane * per_lane
    kept, left = Int32(0), Int32(0)
    found = []
    for i in cutlass.range_constexpr(per_lane):
        group, total = begin + i, Int32(0)
        if group <= groups:
            total = table[0, group]
        size = cutlass.select_(group < groups, cutlass.min(total, capacity), Int32(0))
        kept += size
        left += total - size
        found.append((group, size, total - size))
    rows, spare = _through(kept, lane), _through(left, lane)
    live = cute.arch.shuffle_sync(rows, 31)
    rows, spare = rows - kept, live + spare - left
    for group, size, excess in found:
        if group <= groups:
            table[0, group] = size
            table[1, group] = rows
            table[2, group] = spare
        rows += size
        spare += excess


@cute.jit
def _through(value: Int32, lane: Int32):
    """Sum over this lane and those before it."""
    for i in cutlass.range_constexpr(5):
        before = cute.arch.shuffle_sync_up(value, 1 << i)
        if lane >= (1 << i):
            value += before
    return value


def integers(shared, rows, columns):
    """A matrix in shared memory."""
    return shared.allocate_tensor(Int32, cute.make_layout((rows, columns), stride=(columns, 1)))


def _send(tensor, index, value, cta, ctas):
    """Store at ``index`` of the same tensor in shared memory of a CTA of the cluster."""
    to = tensor.iterator + index
    if ctas > 1:
        to = cute.arch.map_dsmem_ptr(to, cta)
    to.store(value)


@cute.jit
def permutation(
    ids: Int64,
    row_map: Int64,
    sizes: Int64,
    ends: Int64,
    choices: Int32,
    capacity: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: addresses of contiguous tensors, as ``definitions.permutation`` names them."""
    _permutation(
        bits.vector(ids, Int64 if spec.wide else Int32, choices),
        bits.vector(row_map, Int32, choices),
        bits.vector(sizes, Int64, spec.groups),
        bits.vector(ends, Int32, spec.groups),
        capacity,
        spec,
    ).launch(
        grid=[spec.ctas, 1, 1],
        block=[spec.threads, 1, 1],
        cluster=[spec.ctas, 1, 1],
        stream=stream,
        use_pdl=has_pdl(),
    )
