"""Which output tile a cluster computes next, from group ends that only the device knows.

The grid is persistent: cluster ``c`` of ``C`` takes tiles ``c``, ``c + C``, ... Every warp decodes
tile numbers for itself, so that no warp waits for another to learn its work. Both schedules give
``(schedule, valid, group, m, n, start, rows)``: the schedule to ask next, tile coordinates in units of cluster tiles, the group's
first row and its number of rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_up

_LANES = 32
# Tiles are walked down at most this many rows of tiles before the next column, so that both the
# rows and the weights of the tiles in flight stay in the L2 cache.
_BAND = 16


@cute.jit
def group_end(ends: cute.Tensor, group: Int32, total_rows: Int32) -> Int32:
    """First row past ``group``; 0 for group -1."""
    end = Int32(0)
    if group >= 0:
        end = cutlass.min(cutlass.max(ends[group], Int32(0)), total_rows)
    return end


class RowSchedule:
    """Tiles of an output whose rows are grouped.

    Group ``groups`` stands for the rows past the last end, whose output is zero. Lane ``i`` of a
    warp knows group ``base + i``; a tile is found by a ballot, and the lanes move on to the next
    32 groups when the tile lies past theirs.
    """

    def __init__(self, ends, total_rows, groups, columns, tile_rows, state=None):
        self.ends, self.total_rows, self.groups, self.columns = ends, total_rows, groups, columns
        self.tile_rows = tile_rows
        self.base, self.first, self.last, self.start, self.rows = state or self._look(
            Int32(0), Int32(0)
        )

    def __extract_mlir_values__(self):
        values = [self.total_rows, self.groups, self.columns]
        values += [self.base, self.first, self.last, self.start, self.rows]
        return cutlass.extract_mlir_values(self.ends) + [
            v for value in values for v in cutlass.extract_mlir_values(value)
        ]

    def __new_from_mlir_values__(self, values):
        width = len(cutlass.extract_mlir_values(self.ends))
        ends = cutlass.new_from_mlir_values(self.ends, values[:width])
        total_rows, groups, columns, *state = (Int32(v) for v in values[width:])
        return RowSchedule(ends, total_rows, groups, columns, self.tile_rows, tuple(state))

    def _with(self, state):
        return RowSchedule(
            self.ends, self.total_rows, self.groups, self.columns, self.tile_rows, state
        )

    @cute.jit
    def _look(self, base: Int32, first: Int32):
        """Each lane looks at its group of the 32 from ``base``, the first of tile ``first``."""
        lane = cute.arch.lane_idx()
        group = base + lane
        start, end = Int32(0), Int32(0)
        if group <= self.groups:
            start = group_end(self.ends, group - 1, self.total_rows)
            end = self.total_rows
            if group < self.groups:
                end = group_end(self.ends, group, self.total_rows)
        rows = cutlass.max(end - start, Int32(0))
        last = cute.ceil_div(rows, self.tile_rows) * self.columns
        for step in cutlass.range_constexpr(5):
            below = shuffle_sync_up(last, 1 << step)
            if lane >= (1 << step):
                last += below
        return base, first, first + last, start, rows

    @cute.jit
    def seek(self, tile: Int32):
        """The tile's coordinates; tiles are asked for in ascending order."""
        base, first, last = self.base, self.first, self.last
        start, rows = self.start, self.rows
        end = shuffle_sync(last, _LANES - 1)
        while (tile >= end) & (base + _LANES <= self.groups):
            base, first, last, start, rows = self._look(base + _LANES, end)
            end = shuffle_sync(last, _LANES - 1)
        moved = self._with((base, first, last, start, rows))
        lane = cute.arch.popc(cute.arch.vote_ballot_sync(last <= tile))
        valid = lane < _LANES
        lane = cutlass.min(lane, Int32(_LANES - 1))
        group_start, group_rows = shuffle_sync(start, lane), shuffle_sync(rows, lane)
        tiles_down = cutlass.max(cute.ceil_div(group_rows, self.tile_rows), Int32(1))
        index = tile - (shuffle_sync(last, lane) - tiles_down * self.columns)
        m, n = _in_bands(index, tiles_down, self.columns)
        return moved, valid, base + lane, m, n, group_start, group_rows


class ReductionSchedule:
    """Tiles of an output that every group has one of, reduced over the group's rows."""

    def __init__(self, ends, total_rows, groups, tiles_down, columns):
        self.ends, self.total_rows, self.groups = ends, total_rows, groups
        self.tiles_down, self.columns = tiles_down, columns

    def __extract_mlir_values__(self):
        values = [self.total_rows, self.groups, self.tiles_down, self.columns]
        return cutlass.extract_mlir_values(self.ends) + [
            v for value in values for v in cutlass.extract_mlir_values(value)
        ]

    def __new_from_mlir_values__(self, values):
        width = len(cutlass.extract_mlir_values(self.ends))
        ends = cutlass.new_from_mlir_values(self.ends, values[:width])
        return ReductionSchedule(ends, *(Int32(v) for v in values[width:]))

    @cute.jit
    def seek(self, tile: Int32):
        """The tile's coordinates."""
        tiles = self.tiles_down * self.columns
        group = tile // tiles
        start, rows = Int32(0), Int32(0)
        if group < self.groups:
            start = group_end(self.ends, group - 1, self.total_rows)
            rows = group_end(self.ends, group, self.total_rows) - start
        m, n = _in_bands(tile - group * tiles, self.tiles_down, self.columns)
        rows = cutlass.max(rows, Int32(0))
        return self, Boolean(group < self.groups), group, m, n, start, rows


@cute.jit
def _in_bands(index: Int32, tiles_down: Int32, columns: Int32):
    band = index // (_BAND * columns)
    index -= band * _BAND * columns
    height = cutlass.min(tiles_down - band * _BAND, Int32(_BAND))
    column = index // height
    return band * _BAND + index - column * height, column
