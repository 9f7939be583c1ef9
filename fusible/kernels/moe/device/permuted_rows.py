# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""Tokens to rows sorted by group, of a few tokens, in one launch (CuTe DSL).

A CTA copies 16 bytes a thread of one token, or quantizes them. It needs the rows of that token's
choices only, so it counts all choices by group in its shared memory, and each warp how many come
before a choice in its group. Every CTA finds the same counts; the first one writes them.
"""

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from fusible.kernels.device import bits
from fusible.kernels.device.dependent_launch import has_pdl, wait
from fusible.kernels.moe.device.placement import group_of, integers, place_groups, row_of
from fusible.kernels.moe.device.rows import store_rows
from fusible.kernels.moe.spec import BYTES
from fusible.kernels.moe.spec import PERMUTE_THREADS as THREADS
from fusible.kernels.quantize.device import numbers
from fusible.kernels.quantize.device.magnitudes import largest_of, largest_of_lanes, magnitude
from fusible.recipes.formats import FP8_BLOCK

_WARPS = THREADS // 32
_LANES = FP8_BLOCK * 2 // BYTES  # threads that share a block of BF16 numbers


@cute.kernel
def _permute_rows(
    x: Int64,
    weights: Int64,
    ids: cute.Tensor,
    out: Int64,
    scales: Int64,
    moved: Int64,
    row_map: cute.Tensor,
    sizes: cute.Tensor,
    ends: cute.Tensor,
    rows: Int32,
    capacity: Int32,
    zero_tail: Int32,
    spec: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    token, part, _ = cute.arch.block_idx()
    warp, top_k = cute.arch.warp_idx(), spec.rows.top_k
    shared = SmemAllocator()
    groups_of = shared.allocate_tensor(Int32, cute.make_layout(spec.padded_choices))
    before = shared.allocate_tensor(Int32, cute.make_layout(top_k))
    table = integers(shared, 3, spec.groups + 1)
    for group in cutlass.range(thread, spec.groups + 1, THREADS, unroll=1):
        table[0, group] = Int32(0)
    cute.arch.sync_threads()
    wait()
    choices = cute.size(ids)
    column = part * THREADS + thread
    exists = Boolean(column < spec.rows.vectors)
    words = bits.load(x + (Int64(token) * spec.rows.vectors + column) * 16, Int32(exists), 4)
    first = token * top_k
    own = Boolean(thread < top_k) & (part == 0)
    weight = bits.load_number(weights, first + thread, own, spec.rows.weight_dtype)
    places = [i * THREADS + thread for i in range(spec.padded_choices // THREADS)]
    wanted = [ids[cutlass.min(choice, choices - 1)] for choice in places]
    for choice, given in zip(places, wanted, strict=True):
        group = group_of(given, choice < choices, spec.groups)
        groups_of[choice] = group
        if choice < choices:
            cute.arch.atomic_add(table.iterator + group, Int32(1), sem="relaxed", scope="cta")
    cute.arch.sync_threads()
    if warp == _WARPS - 1:
        place_groups(table, capacity, spec.groups)
    for j in cutlass.range(warp, top_k, _WARPS, unroll=1):
        _count_before(groups_of, before, first + j, j)
    cute.arch.sync_threads()
    found = []
    for j in cutlass.range_constexpr(top_k):
        found.append(row_of(table, groups_of[first + j], before[j]))
    at = token, column, exists
    if cutlass.const_expr(spec.out_format is None):
        store_rows(words, found, at, weights, out, rows, zero_tail, spec.rows)
    else:
        _store_quantized(words, found, at, out, scales, rows, spec)
    if own:
        entry = row_of(table, groups_of[first + thread], before[thread])
        row_map[first + thread] = entry
        row = cutlass.max(entry, ~entry)
        kept = bits.to_float(bits.select(entry >= 0, bits.to_bits(weight), 0))
        bits.store_number(moved, row, kept, row < rows, spec.rows.weight_dtype)
    if (token == 0) & (part == 0):
        for group in cutlass.range(thread, spec.groups, THREADS, unroll=1):
            size = table[0, group]
            sizes[group] = Int64(size)
            ends[group] = table[1, group] + size


def _store_quantized(words, found, at, out, scales, rows, spec):
    """Quantize 16 bytes of a token, and store them to the rows of its choices.

    Scales are ``[blocks, rows]``. Rows of choices that are not computed are zeros.
    """
    (_, column, exists), fmt = at, spec.out_format
    largest = largest_of_lanes(largest_of(words, "bf16"), _LANES, "bf16")
    scale, factor = numbers.encode_scale(magnitude(largest, "bf16"), None, fmt)
    of_zeros, _ = numbers.encode_scale(Uint32(0), None, fmt)
    packed = numbers.pack_elements([value * factor for value in bits.unpack(words, "bf16")], fmt)
    for entry in found:
        computed, row = entry >= 0, cutlass.max(entry, ~entry)
        inside = Boolean(exists) & (row < rows)
        kept = [bits.select(computed, word, 0) for word in packed]
        vector = Int64(row) * spec.rows.vectors + column
        bits.store(out + vector * (BYTES // 2), kept, Int32(inside))
        first = inside & (column % _LANES == 0)
        place = Int64(column // _LANES) * Int64(rows) + row
        bits.store(scales + place * 4, [bits.select(computed, scale, of_zeros)], Int32(first))


@cute.jit
def _count_before(groups_of: cute.Tensor, before: cute.Tensor, choice: Int32, j: Int32):
    """A warp writes how many choices before ``choice`` have its group to ``before[j]``."""
    lane = cute.arch.lane_idx()
    group, count = groups_of[choice], Int32(0)
    for start in cutlass.range(0, choice, 32, unroll=4):
        same = Boolean(start + lane < choice) & (groups_of[start + lane] == group)
        count += Int32(cute.arch.popc(cute.arch.vote_ballot_sync(same)))
    if lane == 0:
        before[j] = count


@cute.jit
def permute_rows(
    x: Int64,
    weights: Int64,
    ids: Int64,
    out: Int64,
    scales: Int64,
    moved: Int64,
    row_map: Int64,
    sizes: Int64,
    ends: Int64,
    tokens: Int32,
    rows: Int32,
    capacity: Int32,
    zero_tail: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch: addresses of contiguous tensors, as ``moe.permute_rows`` names them.

    ``scales`` are those of the rows if these are quantized.
    """
    choices = tokens * spec.rows.top_k
    _permute_rows(
        x,
        weights,
        bits.vector(ids, Int64 if spec.wide else Int32, choices),
        out,
        scales,
        moved,
        bits.vector(row_map, Int32, choices),
        bits.vector(sizes, Int64, spec.groups),
        bits.vector(ends, Int32, spec.groups),
        rows,
        capacity,
        zero_tail,
        spec,
    ).launch(
        grid=[tokens, (spec.rows.vectors + THREADS - 1) // THREADS, 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=has_pdl(),
    )
