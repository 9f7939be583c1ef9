"""The multiplying warpgroups: matrix products tile by tile, each followed by its epilogue."""

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from fusible.kernels.sm90.device.epilogue import PREACT_TURN, Epilogue, Place
from fusible.kernels.sm90.device.parts import (
    WARPGROUP,
    Operands,
    Outputs,
    Preacts,
    Problem,
    Walk,
    behind,
    give_turn,
    preact_blocks_of,
    steps_of,
    take_turn,
)
from fusible.kernels.sm90.spec import TILE_K, WARPGROUP_ROWS, Spec

_MULTIPLY_TURN = 3  # and 4: named barriers of whose turn it is, in ping-pong, to multiply
_MAJOR = {"k": OperandMajorMode.K, "n": OperandMajorMode.MN}
_READ_AS = {"k": LayoutEnum.ROW_MAJOR, "n": LayoutEnum.COL_MAJOR}  # as an A operand


def operand_layout(major, rows, dtype, stages):
    """Shared memory of ``stages`` stages of an operand of ``rows`` rows (of A, or columns of B)."""
    return hopper.make_smem_layout_a(_READ_AS[major], (rows, 1, TILE_K), dtype, stages)


def _as_tiles(fragment, rank):
    """One instruction's fragment as ``cute.gemm`` wants it: tiled, by a single tile."""
    one = cute.make_layout(1)
    return cute.make_tensor(fragment.iterator, cute.append(fragment.layout, one, up_to_rank=rank))


@cute.jit
def multiply(
    spec: cutlass.Constexpr[Spec],
    problem: Problem,
    walk: Walk,
    operands: Operands,
    preacts: Preacts | None,
    outputs: Outputs,
    thread: Int32,
    team: Int32,
):
    """A consumer warpgroup (``team``, of two): products, then the epilogue, tile by tile."""
    tile, teams = spec.tile, spec.tile.teams
    dtype = operands.a.element_type
    mma = hopper.make_trivial_tiled_mma(
        dtype,
        dtype,
        _MAJOR[spec.a_major],
        _MAJOR[spec.b_major],
        Float32,
        (teams, 1, 1),
        (WARPGROUP_ROWS, tile.n),
    )
    slice_mma = mma.get_slice(team * WARPGROUP if const_expr(teams == 2) else 0)
    shared_b = operands.b
    if const_expr(spec.b_parts == 2):
        # The two halves of a stage lie next to each other: one operand.
        layout = operand_layout(spec.b_major, tile.n, dtype, spec.stages)
        shared_b = cute.make_tensor(shared_b.iterator, layout.outer)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    fragment_a = mma.make_fragment_A(slice_mma.partition_A(operands.a))
    fragment_b = mma.make_fragment_B(slice_mma.partition_B(shared_b))
    accumulator = cute.make_rmem_tensor(mma.partition_shape_C((tile.m, tile.n)), Float32)
    epilogue = Epilogue(spec, problem, preacts, outputs, dtype, thread & (WARPGROUP - 1), team)
    # Bound here: an object whose methods a loop calls is taken for one that the loop changes.
    scales_of, write = epilogue.row_scales, epilogue.write

    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, spec.stages)
    preact_state = epilogue.preact_state()
    if const_expr(tile.pingpong):  # noqa: SIM102 (decided when compiling)
        if team == 0:
            give_turn(_MULTIPLY_TURN, Int32(1))
            if const_expr(spec.kind == "dglu"):
                give_turn(PREACT_TURN, Int32(1))

    turn = Int32(0)
    read, valid, group, m, n, start, rows = walk.next(walk.begin())
    while valid:
        steps = steps_of(spec, problem, group, rows)
        row = (m * tile.cluster_m + walk.in_cluster[0]) * tile.m
        mine = Boolean(True)
        if const_expr(tile.pingpong):
            mine = turn == team
        if mine:
            column = (n * tile.cluster_n + walk.in_cluster[1]) * spec.width
            place = Place(group, start, rows, row, column)
            row_scales = scales_of(place)
            # Here, not by the first product: under the other warpgroup's products in
            # ping-pong, and the last tile's values need no registers any more.
            accumulator.fill(0.0)
            if const_expr(tile.pingpong):
                take_turn(_MULTIPLY_TURN, team)
            loop = (mma, accumulator, fragment_a, fragment_b, operands.pipeline, steps)
            if const_expr(spec.by_rows and tile.pingpong):
                # Where a group ends within the tile, the rows behind need no products.
                if rows - row > WARPGROUP_ROWS:
                    state = _mainloop(*loop, state, tile.slabs)
                else:
                    state = _mainloop(*loop, state, 1)
            elif const_expr(not spec.by_rows):
                # The last stage of a group may hold fewer rows than it has place for.
                whole = (rows + 15) // TILE_K
                state = _mainloop(*loop[:-1], whole, state, tile.slabs)
                rest = cute.ceil_div(rows - whole * TILE_K, 16)
                if rest == 1:
                    state = _step(*loop[:-1], whole, state, tile.slabs, 1)
                elif rest == 2:
                    state = _step(*loop[:-1], whole, state, tile.slabs, 2)
                elif rest == 3:
                    state = _step(*loop[:-1], whole, state, tile.slabs, 3)
            else:
                state = _mainloop(*loop, state, tile.slabs)
            if const_expr(tile.pingpong):
                # All products are issued: the other's may queue up behind them.
                give_turn(_MULTIPLY_TURN, team)
            _drain(operands.pipeline, state, steps)
            preact_state = write(accumulator, row_scales, place, preact_state)
        else:
            if steps > 0:
                state.advance(steps)
            if const_expr(spec.kind == "dglu"):
                preact_state.advance(preact_blocks_of(spec, rows, row))
        if const_expr(tile.pingpong):
            turn = 1 - turn
        read, valid, group, m, n, start, rows = walk.next(read)
    cute.arch.cp_async_bulk_wait_group(0, read=False)


@cute.jit
def _mainloop(
    mma, accumulator, fragment_a, fragment_b, ring, steps, state, slabs: cutlass.Constexpr
):
    """Issue the products of ``steps`` stages, of ``slabs`` times 64 rows of the accumulator."""
    for step in cutlass.range(steps, unroll=1):
        state = _step(
            mma, accumulator, fragment_a, fragment_b, ring, step, state, slabs,
            cute.size(fragment_a, mode=[2]),
        )  # fmt: skip
    return state


@cute.jit
def _step(
    mma, accumulator, fragment_a, fragment_b, ring, step, state, slabs: cutlass.Constexpr,
    depth: cutlass.Constexpr,
):  # fmt: skip
    """Issue the products of a stage, of ``depth`` times 16 of the reduction; release the last."""
    ring.consumer_wait(state)
    warpgroup.fence()
    for k in cutlass.range_constexpr(depth):
        for m in cutlass.range_constexpr(slabs):
            cute.gemm(
                mma,
                _as_tiles(accumulator[None, m, 0], 3),
                _as_tiles(fragment_a[None, m, k, state.index], 2),
                _as_tiles(fragment_b[None, 0, k, state.index], 2),
                _as_tiles(accumulator[None, m, 0], 3),
            )
    warpgroup.commit_group()
    state.advance()
    if step > 0:
        warpgroup.wait_group(1)
        ring.consumer_release(behind(state, 2))
    return state


@cute.jit
def _drain(ring, state, steps):
    """Wait for the last products of a tile."""
    warpgroup.wait_group(0)
    if steps > 0:
        ring.consumer_release(behind(state, 1))
