"""Which rows a block of threads works on: blocks start anew at every group."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from fusible.kernels.device.bits import load_index, store
from fusible.kernels.quantize.spec import THREADS


class BlockCoord(NamedTuple):
    """Rows of one block."""

    first: Int32
    end: Int32
    live: Int32
    """Whether they are rows of a group, not past the last."""
    group: Int32
    """Group of the rows; rows past the last group count to it."""


def block_count(size, along):
    """Blocks of ``along`` that ``size`` rows or columns are in, the last one perhaps short."""
    return (size + along - 1) // along


def grid_of(rows, columns, groups, matrix_rows, spec):
    """Blocks of rows to launch, where every group may end in a part of one, and chunks of each."""
    size, width = spec.rows, THREADS // spec.parts * spec.vector
    blocks = groups * block_count(matrix_rows, size)
    if cutlass.const_expr(spec.grouped):
        # So may the rows past the last group.
        blocks = (rows + (groups + 1) * (size - 1)) // size
    return blocks, block_count(columns, width)


def block_and_chunk(cta, blocks, pass_chunks, spec):
    """The block of rows of a group of threads, and the chunk of its columns."""
    turn = cta // pass_chunks
    chunk = cta - turn * pass_chunks
    if not spec.gathered:
        return turn, chunk
    return turn % blocks, turn // blocks * pass_chunks + chunk


def block_coord(block, rows, groups, matrix_rows, ends, spec):
    """The rows of ``block``, by the group ends at address ``ends`` or in equal matrices."""
    if cutlass.const_expr(spec.grouped):
        return BlockCoord(*find(ends, groups, rows, block, spec.rows, spec.wide_ends))
    blocks = block_count(matrix_rows, spec.rows)
    group = block // blocks
    first = group * matrix_rows + (block - group * blocks) * spec.rows
    end = cutlass.min(first + spec.rows, (group + 1) * matrix_rows)
    return BlockCoord(first, end, Int32(1), group)


@cute.jit
def _scan(
    ends: Int64,
    groups: Int32,
    rows: Int32,
    group: Int32,
    rows_before: Int32,
    blocks_before: Int32,
    size: cutlass.Constexpr,
    wide: cutlass.Constexpr,
):
    """First row, end row and blocks of the group of each lane of a warp, and blocks up to its end.

    What is before the first lane's group is given. The group after the last one ends with the rows.
    """
    lane = cute.arch.lane_idx()
    end = rows
    if group < groups:
        end = load_index(ends + Int64(group) * (8 if wide else 4), wide)
    end = cutlass.min(end, rows)
    start = cute.arch.shuffle_sync_up(end, 1)
    if lane == 0:
        start = rows_before
    blocks = (end - start + (size - 1)) // size
    through = blocks
    for i in cutlass.range_constexpr(5):
        earlier = cute.arch.shuffle_sync_up(through, 1 << i)
        if lane >= (1 << i):
            through += earlier
    return start, end, blocks, through + blocks_before


@cute.jit
def store_padded_ends(
    ends: Int64,
    padded_ends: Int64,
    groups: Int32,
    rows: Int32,
    size: cutlass.Constexpr,
    wide: cutlass.Constexpr,
):
    """The ends of groups that are padded to whole blocks of ``size`` rows, by each warp."""
    lane = cute.arch.lane_idx()
    blocks_before = Int32(0)
    rows_before = Int32(0)
    for step in cutlass.range((groups + 31) // 32, unroll=1):
        group = step * 32 + lane
        _, end, _, through = _scan(
            ends, groups, rows, group, rows_before, blocks_before, size, wide
        )
        store(padded_ends + Int64(group) * 4, [Uint32(through * size)], Int32(group < groups))
        blocks_before = cute.arch.shuffle_sync(through, 31)
        rows_before = cute.arch.shuffle_sync(end, 31)


@cute.jit
def find(
    ends: Int64,
    groups: Int32,
    rows: Int32,
    block: Int32,
    size: cutlass.Constexpr,
    wide: cutlass.Constexpr,
):
    """``BlockCoord`` of a block; the rows past the last group are a group of their own.

    The lanes of a warp look at 32 groups at a time.
    """
    lane = cute.arch.lane_idx()
    first = rows
    last = rows
    live = Int32(0)
    found = groups - 1
    done = Int32(0)
    blocks_before = Int32(0)
    rows_before = Int32(0)
    for step in cutlass.range((groups + 32) // 32, unroll=1):
        if done == 0:
            start, end, blocks, through = _scan(
                ends, groups, rows, step * 32 + lane, rows_before, blocks_before, size, wide
            )
            hits = Int32(cute.arch.vote_ballot_sync(through > block))
            if hits != 0:
                source = cute.arch.popc((hits & -hits) - 1)
                first = start + (block - (through - blocks)) * size
                first = cute.arch.shuffle_sync(first, source)
                last = cute.arch.shuffle_sync(end, source)
                live = Int32(step * 32 + source < groups)
                found = cutlass.min(step * 32 + source, groups - 1)
                done = Int32(1)
            blocks_before = cute.arch.shuffle_sync(through, 31)
            rows_before = cute.arch.shuffle_sync(end, 31)
    return first, cutlass.min(first + size, last), live, found
