"""Which output tile a cluster computes next, from group ends that only the device knows.

The grid is persistent. One warp of a cluster finds its tiles (`TileScheduler`) and sends them to
all the others (`TileQueue`).
"""

import cutlass
from cutlass import Boolean, Int32, const_expr, cute, pipeline
from cutlass.cute.arch import inline_ptx, shuffle_sync, shuffle_sync_up

_LANES = 32
# Tiles are walked down at most this many rows of tiles before the next column, so that both the
# rows and the weights of the tiles in flight stay in the L2 cache.
BAND = 16
# Groups of a reduction of fewer rows than 2 ** _SHORT take about as long as each other.
_SHORT = 7


@cute.jit
def group_end(ends: cute.Tensor, group: Int32, total_rows: Int32) -> Int32:
    """First row past ``group``; 0 for group -1."""
    end = Int32(0)
    if group >= 0:
        end = cutlass.min(cutlass.max(ends[group], Int32(0)), total_rows)
    return end


class TileScheduler:
    """Tiles, group by group.

    Where rows are grouped, a tile has ``tile_rows`` rows, and group ``groups`` stands for the rows
    from the last end to ``tail_end``, whose output is zero. Where the reduction is grouped,
    ``tile_rows`` is 0: a group has ``tiles_down`` rows of tiles, or none if it has no rows and such
    are skipped. A row of tiles has ``tiles_across``. Lane ``i`` of a warp knows group ``base + i``,
    whose tiles end before ``tiles_end``; a tile is found by a ballot, and the lanes move on to the
    next 32 groups when it lies past theirs.

    The work of a tile of a grouped reduction grows with its group's rows, and blocks take tiles two
    ahead. Hence the longest come first, by ``level``: how many bits a group's number of rows has
    without its lowest `_SHORT`. The lanes go through all groups once for each level that there is;
    ``next_level`` is the next one.

    ``band`` rows of tiles are walked down before the next column.
    """

    def __init__(
        self, ends, total_rows, tail_end, groups, tiles_across, tiles_down, tile_rows,
        skips_empty_groups, band, state=None,
    ):  # fmt: skip
        self.ends, self.total_rows, self.tail_end = ends, total_rows, tail_end
        self.groups, self.tiles_across, self.tiles_down = groups, tiles_across, tiles_down
        self.tile_rows, self.skips_empty_groups, self.band = tile_rows, skips_empty_groups, band
        if state is None:
            self._prefetch()
            level = Int32(0) if tile_rows else self._highest_level()
            state = self._look(Int32(0), Int32(0), level, Int32(-1))
        self.base, self.tiles_end, self.start, self.rows, self.level, self.next_level = state

    def __extract_mlir_values__(self):
        values = [*self._fixed()[1:6], self.base, self.tiles_end, self.start, self.rows]
        values += [self.level, self.next_level]
        return cutlass.extract_mlir_values(self.ends) + [
            v for value in values for v in cutlass.extract_mlir_values(value)
        ]

    def __new_from_mlir_values__(self, values):
        width = len(cutlass.extract_mlir_values(self.ends))
        ends = cutlass.new_from_mlir_values(self.ends, values[:width])
        numbers = [Int32(v) for v in values[width:]]
        return TileScheduler(ends, *numbers[:5], *self._fixed()[6:], tuple(numbers[5:]))

    def _fixed(self):
        """What stays the same from tile to tile: the first six are traced values."""
        return (
            self.ends, self.total_rows, self.tail_end, self.groups, self.tiles_across,
            self.tiles_down, self.tile_rows, self.skips_empty_groups, self.band,
        )  # fmt: skip

    @cute.jit
    def _prefetch(self):
        """Bring all end rows to the L1 cache at once: looks wait for memory one after the other."""
        lines = cute.ceil_div(self.groups, _LANES)
        for line in cutlass.range(cute.arch.lane_idx(), lines, _LANES, unroll=1):
            at = (self.ends.iterator + line * _LANES).toint()
            inline_ptx("prefetch.global.L1 [{$r0}];", read_only_args=[at])

    @cute.jit
    def _level(self, group, rows):
        """The level of a group whose reduction has ``rows`` rows, -1 if it has no tiles."""
        level = 32 - Int32(cute.arch.clz(rows >> _SHORT))
        if ((rows == 0) & self.skips_empty_groups) | (group >= self.groups):
            level = Int32(-1)
        return level

    @cute.jit
    def _highest_level(self):
        """That of the longest group."""
        longest = Int32(0)
        for group in cutlass.range(cute.arch.lane_idx(), self.groups, _LANES, unroll=4):
            end = group_end(self.ends, group, self.total_rows)
            longest = cutlass.max(longest, end - group_end(self.ends, group - 1, self.total_rows))
        longest = cute.arch.warp_redux_sync(longest, "max")
        return 32 - Int32(cute.arch.clz(longest >> _SHORT))

    @cute.jit
    def _look(self, base: Int32, first_tile: Int32, level: Int32, next_level: Int32):
        """Each lane looks at its group of the 32 from ``base``, whose first is ``first_tile``."""
        lane = cute.arch.lane_idx()
        group = base + lane
        start, end = Int32(0), Int32(0)
        if group <= self.groups:
            start = group_end(self.ends, group - 1, self.total_rows)
            end = self.tail_end
            if group < self.groups:
                end = group_end(self.ends, group, self.total_rows)
        rows = cutlass.max(end - start, Int32(0))
        tiles_end = Int32(0)
        if const_expr(self.tile_rows):
            tiles_end = cute.ceil_div(rows, self.tile_rows) * self.tiles_across
            for step in cutlass.range_constexpr(5):
                below = shuffle_sync_up(tiles_end, 1 << step)
                if lane >= (1 << step):
                    tiles_end += below
        else:  # groups have as many tiles each
            own_level = self._level(group, rows)
            there = cute.arch.vote_ballot_sync(own_level == level) & cute.arch.lanemask_le()
            tiles_end = Int32(cute.arch.popc(there)) * self.tiles_down * self.tiles_across
            if own_level >= level:
                own_level = Int32(-1)
            next_level = cutlass.max(next_level, cute.arch.warp_redux_sync(own_level, "max"))
        return base, first_tile + tiles_end, start, rows, level, next_level

    @cute.jit
    def seek(self, tile: Int32):
        """The tile's coordinates; tiles are asked for in ascending order."""
        base, tiles_end, start, rows = self.base, self.tiles_end, self.start, self.rows
        level, next_level = self.level, self.next_level
        end = shuffle_sync(tiles_end, _LANES - 1)
        while (tile >= end) & ((base + _LANES <= self.groups) | (next_level >= 0)):
            base += _LANES
            if base > self.groups:
                base, level, next_level = Int32(0), next_level, Int32(-1)
            base, tiles_end, start, rows, level, next_level = self._look(
                base, end, level, next_level
            )
            end = shuffle_sync(tiles_end, _LANES - 1)
        moved = TileScheduler(*self._fixed(), (base, tiles_end, start, rows, level, next_level))
        lane = cute.arch.popc(cute.arch.vote_ballot_sync(tiles_end <= tile))
        valid = lane < _LANES
        lane = cutlass.min(lane, Int32(_LANES - 1))
        group = base + lane
        group_start, group_rows = shuffle_sync(start, lane), shuffle_sync(rows, lane)
        tiles_down = self.tiles_down
        if const_expr(self.tile_rows):
            tiles_down = cutlass.max(cute.ceil_div(group_rows, self.tile_rows), Int32(1))
        index = tile - (shuffle_sync(tiles_end, lane) - tiles_down * self.tiles_across)
        m, n = _in_bands(index, tiles_down, self.tiles_across, self.band)
        return moved, valid, group, m, n, group_start, group_rows


class TileQueue:
    """Tiles for every warp of every block of a cluster, found by one warp of its first block.

    Cluster ``c`` of ``C`` takes tiles ``c``, ``c + C``, ..., or, where tiles differ in length, tile
    ``c`` and then whichever is next, taken from a counter, when it is ready for one. Tiles are
    found ahead of their use and sent to a ring in every block; a slot is filled again when all its
    readers have read it. The counter is two integers, 0 before and after every launch: numbers
    taken, clusters done.
    """

    SLOTS = 2
    WORDS = 8  # of a slot: group, row and column in units of cluster tiles, start, rows; 3 unused

    def __init__(self, counter, slots, barriers, dynamic, readers, blocks):
        """``readers`` warps in each of ``blocks`` blocks of a cluster."""
        self.counter, self.slots, self.barriers = counter, slots, barriers
        self.dynamic, self.readers, self.blocks = dynamic, readers, blocks

    def __extract_mlir_values__(self):
        return [
            v
            for part in (self.counter, self.slots, self.barriers)
            for v in cutlass.extract_mlir_values(part)
        ]

    def __new_from_mlir_values__(self, values):
        parts = []
        for part in (self.counter, self.slots, self.barriers):
            width = len(cutlass.extract_mlir_values(part))
            parts.append(cutlass.new_from_mlir_values(part, values[:width]))
            values = values[width:]
        return TileQueue(*parts, self.dynamic, self.readers, self.blocks)

    @cute.jit
    def initialise(self):
        """By one warp, before the cluster's first synchronisation."""
        with cute.arch.elect_one():
            for slot in cutlass.range_constexpr(self.SLOTS):
                cute.arch.mbarrier_init(self.barriers + slot, 1)
                cute.arch.mbarrier_init(
                    self.barriers + self.SLOTS + slot, self.readers * self.blocks
                )

    @cute.jit
    def send_tiles(self, scheduler, tile: Int32, clusters: Int32):
        """One warp of the cluster: send tiles, from ``tile`` on, then that none is left."""
        lane = cute.arch.lane_idx()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.SLOTS)
        left = Boolean(True)
        while left:
            scheduler, left, group, m, n, start, rows = scheduler.seek(tile)
            cute.arch.mbarrier_wait(self.barriers + self.SLOTS + state.index, state.phase)
            if lane < self.blocks:
                full = self.barriers + state.index
                slot = (self.slots + state.index * self.WORDS).align(16)
                group = group if left else Int32(-1)
                if const_expr(self.blocks > 1):
                    cute.arch.mbarrier_arrive_and_expect_tx(full, 20, lane)
                    cute.arch.store_async_dsmem(slot, (group, m, n, start), full, lane)
                    cute.arch.store_async_dsmem(slot + 4, rows, full, lane)
                else:
                    words = cute.make_tensor(slot, cute.make_layout(self.WORDS))
                    for i, word in enumerate((group, m, n, start, rows)):
                        words[i] = word
                    cute.arch.mbarrier_arrive(full)
            state.advance()
            if const_expr(self.dynamic):
                if lane == 0:
                    tile = clusters + cute.arch.atomic_add(self.counter, Int32(1))
                tile = shuffle_sync(tile, 0)
            else:
                tile += clusters
        # The other blocks' readers arrive at this block's barriers: stay until they have.
        for _ in cutlass.range_constexpr(self.SLOTS):
            cute.arch.mbarrier_wait(self.barriers + self.SLOTS + state.index, state.phase)
            state.advance()
        if const_expr(self.dynamic):  # noqa: SIM102 (decided when compiling)
            if lane == 0:
                done = self.counter + 1
                if cute.arch.atomic_add(done, Int32(1), sem="acq_rel", scope="gpu") == clusters - 1:
                    cute.arch.store(self.counter, Int32(0))
                    cute.arch.store(done, Int32(0))

    @cute.jit
    def next(self, state):
        """A reading warp's next tile: ``(state, left, group, m, n, start, rows)``.

        ``left`` is whether there is one; ``state`` is where to read the tile after.
        """
        cute.arch.mbarrier_wait(self.barriers + state.index, state.phase)
        slot = cute.make_tensor(self.slots + state.index * self.WORDS, cute.make_layout(self.WORDS))
        group, m, n, start, rows = (cute.arch.make_warp_uniform(slot[i]) for i in range(5))
        cute.arch.sync_warp()
        read = self.barriers + self.SLOTS + state.index
        # Always true: an arrival at another block's barrier can overtake the loads from the slot,
        # which is then filled again too early, unless it needs their values.
        if (group >= -1) & (start >= 0) & (rows >= 0):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(read, 0 if const_expr(self.blocks > 1) else None)
        state.advance()
        return state, group >= 0, group, m, n, start, rows


@cute.jit
def _in_bands(index: Int32, tiles_down: Int32, tiles_across: Int32, most: cutlass.Constexpr):
    """Row and column of a tile.

    In bands of equal height as far as possible: a low band reuses weights little.
    """
    height = cute.ceil_div(tiles_down, cute.ceil_div(tiles_down, most))
    band = index // (height * tiles_across)
    index -= band * height * tiles_across
    rest = cutlass.min(tiles_down - band * height, height)
    column = index // rest
    return band * height + index - column * rest, column
