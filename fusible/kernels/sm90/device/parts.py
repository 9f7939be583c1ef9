"""What a block's warps share: names for what the kernel hands to each of its parts."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute, pipeline, select_

from fusible.kernels.sm90.device.tile_scheduler import TileQueue
from fusible.kernels.sm90.spec import WARPGROUP_ROWS, Spec

WARPGROUP = 128  # threads
# Named barriers, two each: of a warpgroup's epilogue, and in ping-pong of whose turn it is to
# multiply, and to read pre-activations. Without the last one warpgroup could wait for a slot's next
# contents while the other's have yet to come, and mistake those for its own.
EPILOGUE_BARRIER, MULTIPLY_TURN, PREACT_TURN = 1, 3, 5


class Problem(NamedTuple):
    """Sizes, and where the matrices of the groups lie."""

    total_rows: Int32
    columns: Int32  # of the output of a product of rows
    depth: Int32
    groups: Int32
    glu_block: Int32  # columns from a gate to its linear column
    table: Any  # addresses of the weights (wgrad: of the outputs), where they are separate
    base: Int64  # address from which their descriptor counts


class TileReader(NamedTuple):
    """Where the warps of a block read which tiles it computes."""

    queue: TileQueue
    in_cluster: tuple[Int32, Int32]  # the block's coordinates

    def begin(self):
        """The state with which a warp reads its first tile."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, TileQueue.SLOTS)

    def next(self, state):
        """See `TileQueue.next`."""
        return self.queue.next(state)


class TileCoord(NamedTuple):
    """Where a tile lies."""

    group: Int32
    start: Int32  # the group's first row
    rows: Int32  # of the group
    row: Int32  # the tile's first, counted from the group's first
    column: Int32  # the tile's first


class Operands(NamedTuple):
    """The stages of operands, in one ring or in `Spec.rings` of as many stages each."""

    load_a: Any  # TMA descriptors
    load_b: Any
    load_column_scales: Any  # of the scales of operand B's rows
    a: cute.Tensor  # shared memory
    b: cute.Tensor
    column_scales: Any
    pipeline: Any


class Scales(NamedTuple):
    """Scales of FP8 operands in global memory, one for `FP8_BLOCK` of the reduction."""

    a: cute.Tensor  # [rows, blocks of the reduction]
    b: Any  # [groups, blocks of columns, blocks of the reduction]; None where stages hold them


class Preacts(NamedTuple):
    """The ring of pre-activation blocks, of gate and linear columns each if it is gated.

    A slot is loaded; a warpgroup puts gradients in the place of what it reads, and activations in a
    block outside the ring; both are then stored, after which slot and block are free.
    """

    loads: tuple[Any, ...]
    blocks: cute.Tensor
    pipeline: Any
    vacated: cute.Pointer  # the pipeline's barriers of empty slots
    done: cute.Pointer  # barriers of slots with gradients, at which a warpgroup's warps arrive


class Outputs(NamedTuple):
    """Where an epilogue writes, and what it reads of each column or row."""

    store: Any  # TMA descriptors; None if the output is quantized
    store_preact: tuple[Any, ...] | None
    blocks: cute.Tensor  # shared memory that stores read
    bias: Any
    scales: Any
    partials: Any  # sums over a tile's columns, of which the gradients of scales are made
    quantized: Any  # addresses of a quantized output's elements and scales
    quantized_preact: Any  # the same of a quantized pre-activation
    constants: tuple[Any, Any, Any]  # of the activation


def tile_coord(spec: Spec, in_cluster, group, m, n, start, rows):
    """Where a block's tile lies, for the tile of its cluster that the queue gives."""
    tile = spec.tile
    row = (m * tile.cluster_m + in_cluster[0]) * tile.m
    return TileCoord(group, start, rows, row, (n * tile.cluster_n + in_cluster[1]) * spec.width)


def steps_of(spec: Spec, problem: Problem, group, rows):
    """Pipeline stages of a tile; rows past the last group have none."""
    if not spec.by_rows:
        return cute.ceil_div(rows, spec.tile_k)
    depth = cute.ceil_div(problem.depth, spec.tile_k)
    return Int32(select_(group < problem.groups, depth, Int32(0)))


def preact_blocks_of(spec: Spec, rows, row):
    """Blocks of pre-activations of the tile that begins at ``row`` of a group of ``rows`` rows.

    64 rows of the tile that lie past the group's have none.
    """
    slabs = cutlass.max(cutlass.min(cute.ceil_div(rows - row, WARPGROUP_ROWS), spec.tile.slabs), 0)
    return slabs * (spec.preact_blocks // spec.tile.slabs)


def gate_column(spec: Spec, column, glu_block):
    """Where the gate of an activation column lies among gate and linear columns.

    Of an activation that is not gated, the column itself.
    """
    if spec.sides == 1:
        return column
    if spec.paired:
        return (column // glu_block) * 2 * glu_block + column % glu_block
    return column * 2


def row_in_tile(spec: Spec, thread, warpgroup, m, half):
    """Row of the tile that a thread holds in the m-th 64 rows of its warpgroup: one of two."""
    # Shifts: a division of signed numbers takes many instructions.
    first = (thread >> 5) * 16 + ((thread & 31) >> 2) + half * 8
    if spec.tile.warpgroups == 2:
        first += warpgroup * WARPGROUP_ROWS
    return first + m * spec.tile.warpgroups * WARPGROUP_ROWS


def ring_state(spec: Spec, user):
    """Where a warp begins to use a ring of operand stages."""
    return pipeline.make_pipeline_state(user, spec.stages // spec.rings)


def in_ring(spec: Spec, state, ring):
    """``state``, which counts the stages of one ring, with its index among those of all rings."""
    if spec.rings == 1:
        return state
    index = state.index + ring * state.stages
    return pipeline.PipelineState(state.stages, state.count, index, state.phase)


def behind(state, count):
    """The state ``count`` stages before ``state``; at most the pipeline's number of stages."""
    index, phase = state.index - count, state.phase
    phase = Int32(select_(index < 0, phase ^ 1, phase))
    index = Int32(select_(index < 0, index + state.stages, index))
    return pipeline.PipelineState(state.stages, state.count, index, phase)


# Turns of the two warpgroups, in ping-pong: a pair of named barriers each.


def wait_turn(turns, warpgroup):
    """Wait until the other warpgroup has passed the turn to ``warpgroup``."""
    cute.arch.barrier(barrier_id=turns + warpgroup, number_of_threads=2 * WARPGROUP)


def pass_turn(turns, warpgroup):
    """Signal the other warpgroup that it is its turn."""
    cute.arch.barrier_arrive(barrier_id=turns + 1 - warpgroup, number_of_threads=2 * WARPGROUP)
