"""The storing warps, and how a box is stored."""

import cutlass
from cutlass import const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from fusible.kernels.sm90.device.addressing import at_distance, group_rows
from fusible.kernels.sm90.device.parts import (
    Outputs,
    Preacts,
    Problem,
    TileReader,
    gate_column,
    preact_blocks_of,
)
from fusible.kernels.sm90.device.tile_scheduler import group_end
from fusible.kernels.sm90.spec import WARPGROUP_ROWS, Spec

_FILLED = 16 * 1024  # bytes of zeros in flight


def store_box(atom, tensor, box, offset, source):
    """Store one box from shared memory."""
    target = cute.local_tile(cute.domain_offset(offset, tensor), box, (0, 0))
    source, target = cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(source, 0, 2),
        cute.group_modes(target, 0, 2),
    )
    cute.copy(atom, source, target)


def output_of(spec, problem, store, group):
    """The output matrix of a group that the reduction is grouped by."""
    if spec.table:
        return at_distance(store.tma_tensor, problem.table[group] - problem.base)
    return store.tma_tensor[None, None, group]


@cute.jit
def store_gradients(
    spec: cutlass.Constexpr[Spec],
    problem: Problem,
    tiles: TileReader,
    preacts: Preacts,
    outputs: Outputs,
):
    """Store what a backward's epilogue puts together, and vacate it; by one warp."""
    tile, in_cluster, ring = spec.tile, tiles.in_cluster, preacts.pipeline
    box = (WARPGROUP_ROWS, spec.block_columns)
    across, act_blocks = tile.n // box[1], 2 * spec.out_blocks
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, spec.preact_slots)
    read, valid, _, m, n, start, rows = tiles.next(tiles.begin())
    while valid:
        row = (m * tile.cluster_m + in_cluster[0]) * tile.m
        column = (n * tile.cluster_n + in_cluster[1]) * tile.n
        out = group_rows(outputs.store.tma_tensor, 0, start, rows)
        preact_targets = [
            group_rows(view.tma_tensor, 0, start, rows) for view in outputs.store_preact
        ]
        for block in cutlass.range(preact_blocks_of(spec, rows, row), unroll=1):
            cute.arch.mbarrier_wait(preacts.done + state.index, state.phase)
            down, right = row + block // across * box[0], column + block % across * box[1]
            first = gate_column(spec, right, problem.glu_block)
            store_box(
                outputs.store.atom,
                out,
                box,
                (down, right),
                outputs.blocks[None, None, block % act_blocks],
            )
            for side in cutlass.range_constexpr(spec.sides):
                view = side if const_expr(spec.paired) else 0
                store_box(
                    outputs.store_preact[view].atom,
                    preact_targets[view],
                    box,
                    (down, first + (side - view) * box[1]),
                    preacts.blocks[None, None, spec.sides * state.index + side],
                )
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            ring.consumer_release(state)
            state.advance()
        read, valid, _, m, n, start, rows = tiles.next(read)
    cute.arch.cp_async_bulk_wait_group(0, read=False)


@cute.jit
def fill_empty(
    spec: cutlass.Constexpr[Spec],
    problem: Problem,
    ends: cute.Tensor,
    total_rows,
    columns,
    store,
    zeros,
):
    """Write zeros to the output matrices of groups without rows; by one warp of every block.

    Few are in flight, so that they do not delay what the other warps wait for.
    """
    lane = cute.arch.lane_idx()
    vector = cute.make_tensor(zeros.iterator, cute.make_layout(cute.size(zeros)))
    for i in cutlass.range(lane, cute.size(zeros), 32, unroll=8):
        vector[i] = zeros.element_type(0)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    box = (spec.stored_rows, spec.block_columns)
    down, across = cute.ceil_div(columns, box[0]), cute.ceil_div(problem.depth, box[1])
    for group in cutlass.range(problem.groups, unroll=1):
        start = group_end(ends, group - 1, total_rows)
        if group_end(ends, group, total_rows) <= start:
            out = output_of(spec, problem, store, group)
            for index in cutlass.range(block, down * across, blocks, unroll=1):
                offset = (index // across * box[0], index % across * box[1])
                store_box(store.atom, out, box, offset, zeros)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(_FILLED // spec.zero_bytes - 1, read=False)
    cute.arch.cp_async_bulk_wait_group(0, read=False)
