"""FP8 products into the FP32 accumulator: each block of the reduction times its scales.

The tensor cores of Hopper add FP8 products with 13 fraction bits. So the sum of each `FP8_BLOCK` of
the reduction is multiplied by its scales and added to an FP32 accumulator.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute, select_
from cutlass.cute.arch import shuffle_sync

from fusible.kernels.sm90.device.parts import Problem, Scales, TileCoord, gate_column
from fusible.kernels.sm90.spec import WARP_ROWS, WARPGROUP_ROWS, Spec
from fusible.recipes.formats import FP8_BLOCK

SCALE_STAGES = 4  # pipeline stages whose scales are loaded at once


class Promotion(NamedTuple):
    """Where a warp finds the scales of its products.

    Loading scales takes longer than the products of a stage. So a warp loads those of
    `SCALE_STAGES` stages at once, while the stages before are multiplied: each lane the scales of
    one of the warp's rows, and one scale of operand B for one of the stages. Lanes exchange them by
    shuffles. Scales of operand B that differ by column lie in the stages instead.
    """

    problem: Problem
    scales: Scales
    column_scales: Any  # shared memory
    thread: Int32  # of the warpgroup
    warpgroup: Int32


def scale_registers(spec: Spec):
    """A lane's registers for scales: of a row for `SCALE_STAGES` stages, and one of operand B."""
    assert spec.tile.slabs * WARP_ROWS <= 32  # lanes
    assert spec.tile.slabs == 1 or spec.tile.n == spec.mma_columns
    assert spec.b_scale_layout == "rows" or spec.tile.n // spec.scale_columns * SCALE_STAGES <= 32
    return cute.make_rmem_tensor((SCALE_STAGES + 1,), Float32)


@cute.jit
def load_scales(
    spec: cutlass.Constexpr[Spec],
    promotion: Promotion,
    values: cute.Tensor,
    coord: TileCoord,
    step: Int32,
):
    """Load a tile's scales for `SCALE_STAGES` stages from ``step`` on.

    Past its last stage, those of the last.
    """
    a, b, tile = promotion.scales.a, promotion.scales.b, spec.tile
    first, block = coord.start + coord.row, step
    if const_expr(not spec.by_rows):
        first, block = coord.row, coord.start // FP8_BLOCK + step
    last = cute.size(a, mode=[1]) - 1
    lane = promotion.thread & 31
    row = first + (promotion.thread >> 5) * WARP_ROWS + lane % WARP_ROWS
    if const_expr(tile.warpgroups == 2):
        row += promotion.warpgroup * WARPGROUP_ROWS
    row += lane // WARP_ROWS % tile.slabs * tile.warpgroups * WARPGROUP_ROWS
    row = cutlass.min(row, cute.size(a, mode=[0]) - 1)
    for i in cutlass.range_constexpr(SCALE_STAGES):
        values[i] = a[row, cutlass.min(block + i, last)]
    if const_expr(b is not None):
        group = cutlass.min(coord.group, cute.size(b, mode=[0]) - 1)
        column = gate_column(spec, coord.column, promotion.problem.glu_block)
        side = const_expr(tile.n // spec.b_parts)
        at = cutlass.min(lane // SCALE_STAGES * spec.scale_columns, tile.n - 1)
        column += at % side + at // side * promotion.problem.glu_block
        across = cutlass.min(column // FP8_BLOCK, cute.size(b, mode=[1]) - 1)
        values[SCALE_STAGES] = b[group, across, cutlass.min(block + lane % SCALE_STAGES, last)]


def row_scales(promotion: Promotion, values: cute.Tensor, index: Int32, m: int):
    """The scales of a thread's two rows of the m-th 64, in the ``index``-th stage of ``values``."""
    low, high = (select_(index % 2 == 0, values[i], values[i + 1]) for i in (0, 2))
    own = Float32(select_(index < 2, low, high))
    lane = m * WARP_ROWS + ((promotion.thread & 31) >> 2)
    return [shuffle_sync(own, lane + half * 8) for half in range(2)]


def column_scales(
    spec: Spec, promotion: Promotion, values: cute.Tensor, index: Int32, part: int, stage: Int32
):
    """The scales of the part-th `Spec.mma_columns` columns.

    One for each of the thread's columns ("rows"), or for each `Spec.scale_columns` ("blocks").
    """
    if spec.b_scale_layout == "rows":
        first = part * spec.mma_columns + 2 * (promotion.thread & 3)
        columns = [
            first + 8 * i + parity for i in range(spec.mma_columns // 8) for parity in (0, 1)
        ]
        return [promotion.column_scales[column, 0, stage] for column in columns]
    count = spec.mma_columns // spec.scale_columns
    lanes = range(part * count * SCALE_STAGES, (part + 1) * count * SCALE_STAGES, SCALE_STAGES)
    return [shuffle_sync(values[SCALE_STAGES], lane + index) for lane in lanes]


def add_scaled(spec: Spec, accumulator, m: int, part: int, products, of_rows, of_columns):
    """``accumulator += products * scales`` of the m-th 64 rows, the part-th `Spec.mma_columns`."""
    groups = spec.mma_columns // 8
    for i in range(groups):
        for parity in range(2):
            of_column = of_columns[
                2 * i + parity if spec.b_scale_layout == "rows" else 8 * i // spec.scale_columns
            ]
            for half in range(2):
                accumulator[(parity, half, part * groups + i), m, 0] += (
                    of_rows[half] * of_column * products[(parity, half, i), 0, 0]
                )
