"""FP8 products into the FP32 accumulator: each block of the reduction times its scales.

The tensor cores of Hopper add FP8 products with 13 fraction bits, so a sum is moved to registers of
its own after `FP8_BLOCK` products, which is also where the scales change.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from fusible.kernels.sm90.device.parts import Problem, Scales, TileCoord, gate_column, row_in_tile
from fusible.kernels.sm90.spec import Spec
from fusible.recipes.formats import FP8_BLOCK


class Promotion(NamedTuple):
    """Where a thread finds the scales of its products.

    It holds two rows of each 64, whose scales it loads one stage ahead. The scales of operand B are
    one for each `Spec.scale_columns` of the tile, or lie in shared memory, one for each column.
    """

    problem: Problem
    scales: Scales
    columns: Any
    thread: Int32
    warpgroup: Int32


def _parts(spec):
    """Scales of operand B that a thread loads for a stage."""
    return spec.tile.n // spec.scale_columns if spec.scaling == "blocks" else 0


def scale_registers(spec: Spec):
    """Registers for the scales that a thread loads for a stage."""
    return cute.make_rmem_tensor((2 * spec.tile.slabs + _parts(spec),), Float32)


@cute.jit
def load_scales(
    spec: cutlass.Constexpr[Spec],
    promotion: Promotion,
    values: cute.Tensor,
    coord: TileCoord,
    step: Int32,
):
    """Load the scales of a tile for a stage; past the last stage, those of the last."""
    a, b = promotion.scales.a, promotion.scales.b
    rows, blocks = cute.size(a, mode=[0]), cute.size(a, mode=[1])
    first, block = coord.start + coord.row, step
    if const_expr(not spec.by_rows):
        first, block = coord.row, coord.start // FP8_BLOCK + step
    block = cutlass.min(block, blocks - 1)
    own = 2 * spec.tile.slabs
    for i in cutlass.range_constexpr(own):
        row = first + row_in_tile(spec, promotion.thread, promotion.warpgroup, i // 2, i % 2)
        values[i] = a[cutlass.min(row, rows - 1), block]
    if const_expr(b is not None):
        group = cutlass.min(coord.group, cute.size(b, mode=[0]) - 1)
        column = coord.column
        if const_expr(spec.kind == "glu"):
            column = gate_column(spec, column, promotion.problem.glu_block)
        side = const_expr(spec.tile.n // spec.b_parts)
        for part in cutlass.range_constexpr(_parts(spec)):
            first = const_expr(part * spec.scale_columns)
            across = column + first % side + first // side * promotion.problem.glu_block
            across = cutlass.min(across // FP8_BLOCK, cute.size(b, mode=[1]) - 1)
            values[own + part] = b[group, across, block]


@cute.jit
def add_scaled(
    spec: cutlass.Constexpr[Spec], promotion: Promotion, accumulator, m: cutlass.Constexpr,
    part: cutlass.Constexpr, products, values, stage: Int32,
):  # fmt: skip
    """``accumulator += products * scales`` of the m-th 64 rows, the part-th `Spec.mma_columns`."""
    eights, own = const_expr(spec.mma_columns // 8), const_expr(2 * spec.tile.slabs)
    within = 2 * (promotion.thread & 3)
    for index in cutlass.range_constexpr(eights):
        eight = const_expr(part * eights + index)
        for side in cutlass.range_constexpr(2):
            if const_expr(spec.scaling == "blocks"):
                scale = values[own + eight * 8 // spec.scale_columns]
            else:
                scale = promotion.columns[eight * 8 + within + side, 0, stage]
            for half in cutlass.range_constexpr(2):
                factor = values[2 * m + half] * scale
                accumulator[(side, half, eight), m, 0] += (
                    factor * products[(side, half, index), 0, 0]
                )
