"""The multiplying warpgroups: matrix products tile by tile, each followed by its epilogue."""

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu import warpgroup as wgmma
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from fusible.kernels.device.bits import CUTLASS_DTYPES
from fusible.kernels.sm90.device.epilogue import Epilogue
from fusible.kernels.sm90.device.parts import (
    MULTIPLY_TURN,
    PREACT_TURN,
    WARPGROUP,
    Operands,
    Outputs,
    Preacts,
    Problem,
    Scales,
    TileCoord,
    TileReader,
    behind,
    in_ring,
    pass_turn,
    preact_blocks_of,
    ring_state,
    steps_of,
    tile_coord,
    wait_turn,
)
from fusible.kernels.sm90.device.promotion import (
    SCALE_STAGES,
    Promotion,
    add_scaled,
    column_scales,
    load_scales,
    row_scales,
    scale_registers,
)
from fusible.kernels.sm90.spec import WARPGROUP_ROWS, Spec

_MAJOR = {"k": OperandMajorMode.K, "n": OperandMajorMode.MN}
_READ_AS = {"k": LayoutEnum.ROW_MAJOR, "n": LayoutEnum.COL_MAJOR}  # as an A operand


def operand_layout(spec, major, rows, dtype, parts=1):
    """Shared memory of all stages of an operand of ``rows`` rows (of A, or columns of B).

    In ``parts`` of so many rows.
    """
    tile = rows, 1, spec.tile_k
    return hopper.make_smem_layout_a(_READ_AS[major], tile, dtype, spec.stages * parts)


def _instruction_rows(spec, shared):
    """Operand A's stages as a WGMMA instruction reads them: 64 rows, of which 16 were loaded.

    The other 48 are what follows in shared memory: the next stages, and after the last three
    operand B, which is larger than 6 KB. They may be uninitialised, NaN, or being written by TMA: a
    row of A reaches only its own row of the accumulator, and these rows are not stored.
    """
    assert spec.a_major == "k"
    layout = operand_layout(spec, spec.a_major, WARPGROUP_ROWS, shared.element_type).outer
    strides = (*layout.stride[:2], shared.layout.stride[2])
    return cute.make_tensor(shared.iterator, cute.make_layout(layout.shape, stride=strides))


def _as_tiles(fragment, rank):
    """One instruction's fragment as ``cute.gemm`` wants it: tiled, by a single tile."""
    one = cute.make_layout(1)
    return cute.make_tensor(fragment.iterator, cute.append(fragment.layout, one, up_to_rank=rank))


@cute.jit
def multiply(
    spec: cutlass.Constexpr[Spec],
    problem: Problem,
    tiles: TileReader,
    operands: Operands,
    scales: Scales | None,
    preacts: Preacts | None,
    outputs: Outputs,
    thread: Int32,
    warpgroup: Int32,
):
    """A consumer warpgroup (``warpgroup`` 0 or 1): products, then the epilogue, tile by tile."""
    tile, warpgroups = spec.tile, spec.tile.warpgroups
    mma = hopper.make_trivial_tiled_mma(
        operands.a.element_type,
        operands.b.element_type,
        _MAJOR[spec.a_major],
        _MAJOR[spec.b_major],
        Float32,
        (warpgroups, 1, 1),
        (WARPGROUP_ROWS, spec.mma_columns),
    )
    slice_mma = mma.get_slice(warpgroup * WARPGROUP if const_expr(warpgroups == 2) else 0)
    shared_a, shared_b = operands.a, operands.b
    if const_expr(tile.m < WARPGROUP_ROWS):
        shared_a = _instruction_rows(spec, shared_a)
    if const_expr(spec.b_parts == 2):
        # The two halves of a stage lie next to each other: one operand.
        layout = operand_layout(spec, spec.b_major, tile.n, operands.b.element_type)
        shared_b = cute.make_tensor(shared_b.iterator, layout.outer)
    mma.set(wgmma.Field.ACCUMULATE, True)
    fragment_a = mma.make_fragment_A(slice_mma.partition_A(shared_a))
    fragment_b = mma.make_fragment_B(slice_mma.partition_B(shared_b))
    accumulator = cute.make_rmem_tensor(((2, 2, tile.n // 8), tile.slabs, 1), Float32)
    epilogue = Epilogue(
        spec,
        problem,
        preacts,
        outputs,
        CUTLASS_DTYPES[spec.value_dtype],
        thread & (WARPGROUP - 1),
        warpgroup,
    )
    # Bound here: an object whose methods a loop calls is taken for one that the loop changes.
    scales_of, write = epilogue.output_scales, epilogue.write

    state = ring_state(spec, pipeline.PipelineUserType.Consumer)
    preact_state = epilogue.preact_state()
    products, promotion = None, None
    if const_expr(spec.is_fp8):
        shape = (2, 2, spec.mma_columns // 8), 1, 1
        products = cute.make_rmem_tensor(shape, Float32)
        within = thread & (WARPGROUP - 1)
        promotion = Promotion(problem, scales, operands.column_scales, within, warpgroup)
    turns = const_expr(tile.pingpong and spec.rings == 1)
    if const_expr(turns):  # noqa: SIM102 (decided when compiling)
        if warpgroup == 0:
            pass_turn(MULTIPLY_TURN, Int32(1))
            if const_expr(spec.is_backward):
                pass_turn(PREACT_TURN, Int32(1))

    turn, first_scales = Int32(0), None
    read, valid, group, m, n, start, rows = tiles.next(tiles.begin())
    if const_expr(spec.is_fp8):
        first_scales = scale_registers(spec)
        if const_expr(tile.pingpong):  # noqa: SIM102 (decided when compiling)
            if valid & (warpgroup == 1):
                read, valid, group, m, n, start, rows = tiles.next(read)
        if valid:
            coord = tile_coord(spec, tiles.in_cluster, group, m, n, start, rows)
            load_scales(spec, promotion, first_scales, coord, Int32(0))
    while valid:
        steps = steps_of(spec, problem, group, rows)
        coord = tile_coord(spec, tiles.in_cluster, group, m, n, start, rows)
        has_turn = Boolean(True)
        if const_expr(turns):
            has_turn = turn == warpgroup
        if has_turn:
            output_scales = scales_of(coord)
            # Here, not by the first product: under the other warpgroup's products in
            # ping-pong, and the last tile's values need no registers any more.
            accumulator.fill(0.0)
            if const_expr(turns):
                wait_turn(MULTIPLY_TURN, warpgroup)
            loop = (mma, accumulator, fragment_a, fragment_b, operands.pipeline, steps)
            if const_expr(spec.is_fp8):
                loop = (*loop, spec, promotion, products, first_scales, coord)
            mainloop = _fp8_mainloop if spec.is_fp8 else _mainloop
            partial = const_expr(spec.by_rows and (tile.pingpong or spec.is_fp8))
            # Rows past the group's end need no products. One if-elif chain: ptxas serializes
            # products in a branch that follows another.
            left = rows - coord.row
            if const_expr(partial and tile.slabs == 2):
                if left > WARPGROUP_ROWS * warpgroups:
                    state = mainloop(*loop, state, 2)
                else:
                    state = mainloop(*loop, state, 1)
            elif const_expr(partial and tile.slabs == 3):
                if left > 2 * WARPGROUP_ROWS * warpgroups:
                    state = mainloop(*loop, state, 3)
                elif left > WARPGROUP_ROWS * warpgroups:
                    state = mainloop(*loop, state, 2)
                else:
                    state = mainloop(*loop, state, 1)
            elif const_expr(spec.is_fp8):
                state = mainloop(*loop, state, tile.slabs)
            elif const_expr(not spec.by_rows):
                # The last stage of a group may hold fewer rows than it has place for.
                whole = (rows + 15) // spec.tile_k
                state = _mainloop(*loop[:-1], whole, state, tile.slabs)
                rest = cute.ceil_div(rows - whole * spec.tile_k, 16)
                if rest == 1:
                    state = _step(*loop[:-1], whole, state, tile.slabs, 1)
                elif rest == 2:
                    state = _step(*loop[:-1], whole, state, tile.slabs, 2)
                elif rest == 3:
                    state = _step(*loop[:-1], whole, state, tile.slabs, 3)
            else:
                state = _mainloop(*loop, state, tile.slabs)
            if const_expr(turns):
                # All products are issued: the other's may queue up behind them.
                pass_turn(MULTIPLY_TURN, warpgroup)
            if const_expr(not spec.is_fp8):
                _drain(operands.pipeline, state, steps)
            # Before the epilogue: the sooner a slot of the queue is vacant, the sooner the tile
            # after is found and loaded.
            read, valid, group, m, n, start, rows = tiles.next(read)
            if const_expr(spec.is_fp8):
                if const_expr(tile.pingpong):  # noqa: SIM102
                    if valid:
                        read, valid, group, m, n, start, rows = tiles.next(read)
                if valid:  # while the epilogue runs: the next tile's first scales
                    following = tile_coord(spec, tiles.in_cluster, group, m, n, start, rows)
                    load_scales(spec, promotion, first_scales, following, Int32(0))
            preact_state = write(accumulator, output_scales, coord, preact_state)
        else:  # in ping-pong of one ring: the other warpgroup's
            if steps > 0:
                state.advance(steps)
            if const_expr(spec.is_backward):
                preact_state.advance(preact_blocks_of(spec, rows, coord.row))
            read, valid, group, m, n, start, rows = tiles.next(read)
        if const_expr(turns):
            turn = 1 - turn
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
    wgmma.fence()
    for k in cutlass.range_constexpr(depth):
        for m in cutlass.range_constexpr(slabs):
            cute.gemm(
                mma,
                _as_tiles(accumulator[None, m, 0], 3),
                _as_tiles(fragment_a[None, m, k, state.index], 2),
                _as_tiles(fragment_b[None, 0, k, state.index], 2),
                _as_tiles(accumulator[None, m, 0], 3),
            )
    wgmma.commit_group()
    state.advance()
    if step > 0:
        wgmma.wait_group(1)
        ring.consumer_release(behind(state, 2))
    return state


@cute.jit
def _drain(ring, state, steps):
    """Wait for the last products of a tile."""
    wgmma.wait_group(0)
    if steps > 0:
        ring.consumer_release(behind(state, 1))


@cute.jit
def _fp8_mainloop(
    mma, accumulator, fragment_a, fragment_b, ring, steps, spec: cutlass.Constexpr[Spec],
    promotion: Promotion, products, scales, coord: TileCoord, state,
    slabs: cutlass.Constexpr,
):  # fmt: skip
    """Add the products of ``steps`` stages of FP8, each times its scales, to the accumulator.

    ``scales`` are those of the first `SCALE_STAGES` stages.
    """
    next_scales = scale_registers(spec)
    parts = const_expr(spec.tile.n // spec.mma_columns)
    for first in cutlass.range(0, steps, SCALE_STAGES, unroll=1):
        load_scales(spec, promotion, next_scales, coord, first + SCALE_STAGES)
        for index in cutlass.range(cutlass.min(steps - first, SCALE_STAGES), unroll=1):
            at = in_ring(spec, state, promotion.warpgroup)
            ring.consumer_wait(at)
            for m in cutlass.range_constexpr(slabs):
                for part in cutlass.range_constexpr(parts):
                    wgmma.fence()
                    mma.set(wgmma.Field.ACCUMULATE, False)
                    for k in cutlass.range_constexpr(cute.size(fragment_a, mode=[2])):
                        cute.gemm(
                            mma,
                            products,
                            _as_tiles(fragment_a[None, m, k, at.index], 2),
                            _as_tiles(fragment_b[None, part, k, at.index], 2),
                            products,
                        )
                        mma.set(wgmma.Field.ACCUMULATE, True)
                    wgmma.commit_group()
                    # While the tensor cores multiply, and before the stage is released. With two
                    # slabs there is one part: slab 1 has the column scales of slab 0.
                    of_rows = row_scales(promotion, scales, index, m)
                    if const_expr(m == 0):
                        of_columns = column_scales(spec, promotion, scales, index, part, at.index)
                    wgmma.wait_group(0)
                    if const_expr(m == slabs - 1 and part == parts - 1):
                        ring.consumer_release(at)
                    add_scaled(spec, accumulator, m, part, products, of_rows, of_columns)
            state.advance()
        for i in cutlass.range_constexpr(cute.size(scales)):
            scales[i] = next_scales[i]
    return state
