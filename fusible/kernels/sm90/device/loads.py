"""The loading warps: rings of shared memory kept filled by TMA."""

import cutlass
from cutlass import const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from fusible.kernels.sm90.device.addressing import at_distance, group_rows
from fusible.kernels.sm90.device.parts import (
    Operands,
    Preacts,
    Problem,
    Walk,
    gate_column,
    steps_of,
)
from fusible.kernels.sm90.device.schedule import TileQueue
from fusible.kernels.sm90.spec import TILE_K, WARPGROUP_ROWS, Spec


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


@cute.jit
def load_operands(spec: cutlass.Constexpr[Spec], problem: Problem, walk: Walk, operands: Operands):
    """Keep the operand stages filled; by one warp."""
    tile, in_cluster = spec.tile, walk.in_cluster
    load_a, load_b, ring = operands.load_a, operands.load_b, operands.pipeline
    tile_a, tile_b = (tile.m, TILE_K), (tile.n // spec.b_parts, TILE_K)
    # A block loads its slice of what a row or column of the cluster shares, for all of it.
    mask_a, mask_b = 0, 0
    if const_expr(tile.cluster_n > 1):
        every = sum(1 << (n * tile.cluster_m) for n in range(tile.cluster_n))
        mask_a = cutlass.Int16(every << in_cluster[0])
    if const_expr(tile.cluster_m > 1):
        every = (1 << tile.cluster_m) - 1
        mask_b = cutlass.Int16(every << (in_cluster[1] * tile.cluster_m))

    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, spec.stages)
    drawn = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, TileQueue.SLOTS)
    tile_index = walk.first
    schedule, valid, group, m, n, start, rows = walk.schedule.seek(tile_index)
    while valid:
        row = (m * tile.cluster_m + in_cluster[0]) * tile.m
        column = (n * tile.cluster_n + in_cluster[1]) * spec.width
        if const_expr(spec.by_rows):
            tensor_a, offset_a = load_a.tma_tensor, (start + row, 0)
            tensor_b, offset_b = load_b.tma_tensor, (column, 0)
            weight = cutlass.min(group, problem.groups - 1)
            if const_expr(spec.table):
                tensor_b = at_distance(tensor_b, problem.table[weight] - problem.base)
            else:
                tensor_b = tensor_b[None, None, weight]
            if const_expr(spec.kind == "glu"):
                offset_b = (gate_column(spec, column, problem.glu_block), 0)
        else:
            tensor_a = group_rows(load_a.tma_tensor, 1, start, rows)
            tensor_b = group_rows(load_b.tma_tensor, 1, start, rows)
            offset_a, offset_b = (row, 0), (column, 0)
        shared_by = (tile.cluster_n, in_cluster[1])
        to_a, from_a = _boxes(load_a, operands.a, tensor_a, tile_a, offset_a, shared_by)
        boxes_b = [
            _boxes(
                load_b,
                operands.b,
                tensor_b,
                tile_b,
                (offset_b[0] + part * problem.glu_block, 0),
                (tile.cluster_m, in_cluster[0]),
            )
            for part in range(spec.b_parts)
        ]
        for step in cutlass.range(steps_of(spec, problem, group, rows), unroll=1):
            ring.producer_acquire(state)
            barrier = ring.producer_get_barrier(state)
            cute.copy(
                load_a.atom,
                from_a[None, step],
                to_a[None, state.index],
                tma_bar_ptr=barrier,
                mcast_mask=mask_a,
            )
            for part in cutlass.range_constexpr(spec.b_parts):
                to_b, from_b = boxes_b[part]
                cute.copy(
                    load_b.atom,
                    from_b[None, step],
                    to_b[None, state.index * spec.b_parts + part],
                    tma_bar_ptr=barrier,
                    mcast_mask=mask_b,
                )
            state.advance()
        tile_index, drawn = walk.next(drawn, tile_index)
        schedule, valid, group, m, n, start, rows = schedule.seek(tile_index)
    # Wait until the cluster has read what this block sent, before it may exit.
    ring.producer_tail(state)


@cute.jit
def load_preacts(spec: cutlass.Constexpr[Spec], problem: Problem, walk: Walk, preacts: Preacts):
    """Keep the pre-activation blocks filled, in the order the epilogue reads them; by one warp."""
    tile, in_cluster, ring = spec.tile, walk.in_cluster, preacts.pipeline
    box = (WARPGROUP_ROWS, spec.block_columns)
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, spec.preact_slots)
    drawn = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, TileQueue.SLOTS)
    tile_index = walk.first
    schedule, valid, group, m, n, start, _ = walk.schedule.seek(tile_index)
    while valid:
        row = start + (m * tile.cluster_m + in_cluster[0]) * tile.m
        if group >= problem.groups:
            row = problem.total_rows  # out of bounds: zeros for the rows past the last group
        column = (n * tile.cluster_n + in_cluster[1]) * tile.n
        for block in cutlass.range(spec.preact_blocks, unroll=1):
            down, right = block // (tile.n // box[1]), block % (tile.n // box[1])
            at = gate_column(spec, column + right * box[1], problem.glu_block)
            ring.producer_acquire(state)
            for side in cutlass.range_constexpr(2):
                load = preacts.loads[side if const_expr(spec.paired) else 0]
                shift = 0 if const_expr(spec.paired) else side * box[1]
                offset = (row + down * box[0], at + shift)
                to_block, from_block = _boxes(load, preacts.blocks, load.tma_tensor, box, offset)
                cute.copy(
                    load.atom,
                    from_block[None, 0],
                    to_block[None, 2 * state.index + side],
                    tma_bar_ptr=ring.producer_get_barrier(state),
                )
            state.advance()
        tile_index, drawn = walk.next(drawn, tile_index)
        schedule, valid, group, m, n, start, _ = schedule.seek(tile_index)
