"""The loading warps: rings of shared memory kept filled by TMA."""

import cutlass
from cutlass import Int32, const_expr, cute, pipeline, select_
from cutlass.cute.nvgpu import cpasync

from fusible.kernels.device.dependent_launch import wait
from fusible.kernels.sm90.device.addressing import at_distance, group_rows
from fusible.kernels.sm90.device.parts import (
    Operands,
    Preacts,
    Problem,
    TileReader,
    gate_column,
    in_ring,
    preact_blocks_of,
    ring_state,
    steps_of,
    tile_coord,
)
from fusible.kernels.sm90.spec import WARPGROUP_ROWS, Spec
from fusible.recipes.formats import FP8_BLOCK

_PREFETCHED = 8  # stages, of 16 KB each: 17 MB over all blocks


def _boxes(load, shared, tensor, tile, offset, multicast=(1, 0)):
    """Partition for a TMA load of one box at ``offset``, walking the second mode.

    ``multicast``: how many blocks share the box, and which of them this one is.
    """
    count, rank = multicast
    boxes = cute.local_tile(cute.domain_offset(offset, tensor), tile, (0, None))
    return cpasync.tma_partition(
        load.atom,
        rank,
        cute.make_layout(count),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(boxes, 0, 2),
    )


def _weight_boxes(spec, problem, operands, group, column, in_cluster):
    """Partition of a group's weight, of its gate and its linear columns if they lie apart."""
    tile, tensor = spec.tile, operands.load_b.tma_tensor
    weight = cutlass.min(group, problem.groups - 1)
    if spec.table:
        tensor = at_distance(tensor, problem.table[weight] - problem.base)
    else:
        tensor = tensor[None, None, weight]
    if spec.kind == "glu":
        column = gate_column(spec, column, problem.glu_block)
    box, sharing = (tile.n // spec.b_parts, spec.tile_k), (tile.cluster_m, in_cluster[0])
    return [
        _boxes(
            operands.load_b,
            operands.b,
            tensor,
            box,
            (column + part * problem.glu_block, 0),
            sharing,
        )
        for part in range(spec.b_parts)
    ]


@cute.jit
def prefetch_weights(
    spec: cutlass.Constexpr[Spec], problem: Problem, operands: Operands, first_tile, in_cluster,
    tiles_across,
):  # fmt: skip
    """Bring weights to the L2 cache under the end of the kernel before; by one warp.

    Those of a block's first tile, if groups have as many rows each. With less than four each, many
    have none, and what is fetched would not be used.
    """
    tiles_down = cutlass.max(cute.ceil_div(problem.total_rows, problem.groups * spec.tile.m), 1)
    group = first_tile // (tiles_across * tiles_down)
    n = first_tile % (tiles_across * tiles_down) // tiles_down
    column = (n * spec.tile.cluster_n + in_cluster[1]) * spec.width
    if (group < problem.groups) & (problem.total_rows >= 4 * problem.groups):
        boxes = _weight_boxes(spec, problem, operands, group, column, in_cluster)
        steps = cutlass.min(cute.ceil_div(problem.depth, spec.tile_k), _PREFETCHED)
        for step in cutlass.range(steps, unroll=1):
            for part in cutlass.range_constexpr(spec.b_parts):
                cute.prefetch(operands.load_b.atom, boxes[part][1][None, step])


@cute.jit
def load_operands(
    spec: cutlass.Constexpr[Spec],
    problem: Problem,
    tiles: TileReader,
    operands: Operands,
    which: Int32,
):
    """Keep the operand stages of a ring filled; by one warp.

    Each of two rings is filled for every other tile. With `Spec.reads_ahead` the first tile's
    weights are loaded before the kernel ahead has ended, as far as there are stages.
    """
    tile, in_cluster = spec.tile, tiles.in_cluster
    load_a, load_b, ring = operands.load_a, operands.load_b, operands.pipeline
    tile_a = (tile.m, spec.tile_k)
    # A block loads its slice of what a row or column of the cluster shares, for all of it.
    mask_a, mask_b = 0, 0
    if const_expr(tile.cluster_n > 1):
        every = sum(1 << (n * tile.cluster_m) for n in range(tile.cluster_n))
        mask_a = cutlass.Int16(every << in_cluster[0])
    if const_expr(tile.cluster_m > 1):
        every = (1 << tile.cluster_m) - 1
        mask_b = cutlass.Int16(every << (in_cluster[1] * tile.cluster_m))

    state = ring_state(spec, pipeline.PipelineUserType.Producer)
    turn = Int32(0)
    read, valid, group, m, n, start, rows = tiles.next(tiles.begin())
    loaded = Int32(0)  # steps of the first tile whose weights are loaded ahead
    if const_expr(spec.reads_ahead):
        if valid & (which == 0):  # the first tile is of the first ring
            coord = tile_coord(spec, in_cluster, group, m, n, start, rows)
            boxes_b = _weight_boxes(spec, problem, operands, group, coord.column, in_cluster)
            loaded = cutlass.min(steps_of(spec, problem, group, rows), spec.stages // spec.rings)
            for step in cutlass.range(loaded, unroll=1):
                at = in_ring(spec, state, which)
                ring.producer_acquire(at)
                _load_weights(spec, ring, at, load_b, boxes_b, step, mask_b)
                state.advance()
        wait()
        state = ring_state(spec, pipeline.PipelineUserType.Producer)
    while valid:
        coord = tile_coord(spec, in_cluster, group, m, n, start, rows)
        tensor_a, offset_a, boxes_b = _operand_boxes(spec, problem, operands, coord, in_cluster)
        shared_by = (tile.cluster_n, in_cluster[1])
        to_a, from_a = _boxes(load_a, operands.a, tensor_a, tile_a, offset_a, shared_by)
        steps = steps_of(spec, problem, group, rows)
        if const_expr(spec.rings == 2):
            steps = Int32(select_(turn == which, steps, Int32(0)))
            turn = 1 - turn
        for step in cutlass.range(steps, unroll=1):
            at = in_ring(spec, state, which)
            barrier, stage = ring.producer_get_barrier(at), at.index
            if const_expr(not spec.reads_ahead):
                ring.producer_acquire(at)
            else:  # noqa: PLR5501 (the other one is decided when compiling)
                if step >= loaded:
                    ring.producer_acquire(at)
                    _load_weights(spec, ring, at, load_b, boxes_b, step, mask_b)
            cute.copy(
                load_a.atom,
                from_a[None, step],
                to_a[None, stage],
                tma_bar_ptr=barrier,
                mcast_mask=mask_a,
            )
            if const_expr(not spec.reads_ahead):
                _load_weights(spec, ring, at, load_b, boxes_b, step, mask_b)
            if const_expr(spec.b_scale_layout == "rows"):
                block = start // FP8_BLOCK + step
                _load_column_scales(spec, operands, coord.column, block, stage, barrier)
            state.advance()
        loaded = Int32(0)
        read, valid, group, m, n, start, rows = tiles.next(read)
    # Wait until the cluster has read what this block sent, before it may exit.
    for _ in cutlass.range_constexpr(state.stages):
        at = in_ring(spec, state, which)
        ring.sync_object_empty.wait(at.index, at.phase)
        state.advance()


def _load_weights(spec, ring, at, load_b, boxes, step, mask):
    """Load a step's weights to the stage ``at``."""
    for part in range(spec.b_parts):
        to_b, from_b = boxes[part]
        cute.copy(
            load_b.atom,
            from_b[None, step],
            to_b[None, at.index * spec.b_parts + part],
            tma_bar_ptr=ring.producer_get_barrier(at),
            mcast_mask=mask,
        )


def _operand_boxes(spec, problem, operands, coord, in_cluster):
    """Operand A and where a tile begins in it, and the partition of operand B."""
    group, start, rows, row, column = coord
    load_a, load_b = operands.load_a, operands.load_b
    if spec.by_rows:
        boxes = _weight_boxes(spec, problem, operands, group, column, in_cluster)
        return load_a.tma_tensor, (start + row, 0), boxes
    tensors, first = (load_a.tma_tensor, load_b.tma_tensor), start
    if not spec.is_fp8:  # whose groups end anywhere
        tensors, first = [group_rows(tensor, 1, start, rows) for tensor in tensors], 0
    tile_b, sharing_b = (spec.tile.n, spec.tile_k), (spec.tile.cluster_m, in_cluster[0])
    boxes = [_boxes(load_b, operands.b, tensors[1], tile_b, (column, first), sharing_b)]
    return tensors[0], (row, first), boxes


def _load_column_scales(spec, operands, column, block, stage, barrier):
    """Load the scales of a tile's columns, those of operand B's rows, for a block of 128."""
    load, box = operands.load_column_scales, (spec.tile.n, 1)
    target, source = _boxes(load, operands.column_scales, load.tma_tensor, box, (column, block))
    cute.copy(load.atom, source[None, 0], target[None, stage], tma_bar_ptr=barrier)


@cute.jit
def load_preacts(
    spec: cutlass.Constexpr[Spec], problem: Problem, tiles: TileReader, preacts: Preacts
):
    """Keep the pre-activation blocks filled, in the order the epilogue reads them; by one warp."""
    tile, in_cluster, ring = spec.tile, tiles.in_cluster, preacts.pipeline
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, spec.preact_slots)
    read, valid, group, m, n, start, rows = tiles.next(tiles.begin())
    while valid:
        row = (m * tile.cluster_m + in_cluster[0]) * tile.m
        blocks = preact_blocks_of(spec, rows, row)
        row += start
        if group >= problem.groups:
            row = problem.total_rows  # out of bounds: zeros for the rows past the last group
        column = (n * tile.cluster_n + in_cluster[1]) * tile.n
        for block in cutlass.range(blocks, unroll=1):
            ring.producer_acquire(state)
            later = block + spec.preact_slots
            for side in cutlass.range_constexpr(spec.sides):
                atom, source, targets = _preact_box(
                    spec, problem, preacts, row, column, block, side
                )
                cute.copy(
                    atom,
                    source,
                    targets[None, spec.sides * state.index + side],
                    tma_bar_ptr=ring.producer_get_barrier(state),
                )
                if const_expr(spec.prefetches_preacts):  # noqa: SIM102 (decided when compiling)
                    if later < blocks:
                        atom, source, _ = _preact_box(
                            spec, problem, preacts, row, column, later, side
                        )
                        cute.prefetch(atom, source)
            state.advance()
        read, valid, group, m, n, start, rows = tiles.next(read)


def _preact_box(spec, problem, preacts, row, column, block, side):
    """Columns of a side of a block of a tile: TMA atom, where they are, where they may go."""
    box = (WARPGROUP_ROWS, spec.block_columns)
    across = spec.tile.n // box[1]
    load = preacts.loads[side if spec.paired else 0]
    at = gate_column(spec, column + block % across * box[1], problem.glu_block)
    offset = (row + block // across * box[0], at + (0 if spec.paired else side * box[1]))
    to_block, from_block = _boxes(load, preacts.blocks, load.tma_tensor, box, offset)
    return load.atom, from_block[None, 0], to_block
