"""Begins and ends of groups from their sizes, in one launch."""

import cutlass
from cutlass import Int32, Int64, cute

from fusible.kernels.device import bits


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
    first_dims: Int64,
    offsets: Int64,
    ends: Int64,
    groups: Int32,
    columns: Int64,
    stream,
    wide: cutlass.Constexpr,
):
    """Launch: addresses of the rows of each group, and of where they begin, in elements, and end.

    ``offsets`` and ``ends`` are int64, ``first_dims`` too if ``wide``, else int32.
    """
    _group_offsets(
        bits.vector(first_dims, Int64 if wide else Int32, groups),
        bits.vector(offsets, Int64, groups + 1),
        bits.vector(ends, Int64, groups),
        columns,
    ).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)
