"""Every recipe and every number format, for what shall hold for all of them."""

import pytest

from fusible import recipes
from fusible.recipes.formats import (
    E2M1,
    E4M3,
    E5M2,
    NumberFormat,
    fp8_block,
    fp8_tensor,
    mxfp8,
    nvfp4,
)

PLAIN = {f"disable_{option}": True for option in ("rht", "stochastic_rounding", "2d_quantization")}
"""Of `NVFP4BlockScaling`: all operands rounded to the nearest, in blocks along the reduction."""

RECIPES = {
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp8_hybrid": recipes.MXFP8BlockScaling(recipes.Format.HYBRID),
    "fp8_block": recipes.Float8BlockScaling(fp8_products=False),
    "fp8_current": recipes.Float8CurrentScaling(fp8_products=False),
    "nvfp4": recipes.NVFP4BlockScaling(**PLAIN),
    "nvfp4_rht_2d": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
MX, HYBRID, BLOCK, CURRENT, NV, NV_RHT_2D = RECIPES.values()
BLOCK_FP8, CURRENT_FP8 = recipes.Float8BlockScaling(), recipes.Float8CurrentScaling()
each_fp8_recipe = pytest.mark.parametrize(
    "recipe", [BLOCK_FP8, CURRENT_FP8], ids=["blocks", "current"]
)
"""Those whose products are of FP8 operands on Hopper."""

KINDS = {"none": None, "mxfp8": MX, "fp8_block": BLOCK, "fp8_current": CURRENT, "nvfp4": NV}
"""No recipe, and one of each kind."""

each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)

FORMATS = {
    "mxfp8_e4m3": mxfp8(),
    "mxfp8_e5m2": mxfp8(E5M2),
    "mxfp8_e4m3_floor": mxfp8(E4M3, "floor"),
    "mxfp8_e5m2_floor": mxfp8(E5M2, "floor"),
    "fp8_1x128_e4m3": fp8_block(),
    "fp8_1x128_e4m3_fp32": fp8_block(power_of_two=False),
    "fp8_1x128_e5m2_fp32": fp8_block(E5M2, power_of_two=False),
    "fp8_128x128_e4m3": fp8_block(block=(128, 128)),
    "fp8_128x128_e4m3_epsilon": fp8_block(block=(128, 128), power_of_two=False, amax_epsilon=1e-3),
    "fp8_tensor_e4m3": fp8_tensor(),
    "fp8_tensor_e5m2": fp8_tensor(E5M2),
    "fp8_tensor_e5m2_power": fp8_tensor(E5M2, power_of_two=True),
    "nvfp4": nvfp4(),
    "nvfp4_16x16": nvfp4((16, 16)),
    "nvfp4_rht": nvfp4(hadamard=True),
}
OWN = {
    "e4m3_1x64": NumberFormat("e4m3_1x64", E4M3, (1, 64), "fp32"),
    "e5m2_1x16": NumberFormat("e5m2_1x16", E5M2, (1, 16), "e8m0_up"),
    "e2m1_1x32": NumberFormat("e2m1_1x32", E2M1, (1, 32), "e4m3"),
}
"""Formats that no recipe of the package has: rows of known elements and kinds of scale."""


def is_square(fmt):
    """Whether blocks are of several rows, so that rows cannot be grouped."""
    return fmt.block is not None and not fmt.directional


GROUPED = {name: fmt for name, fmt in FORMATS.items() if not is_square(fmt)}
"""Formats whose blocks are of one row, so that groups of rows are quantized together."""

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
each_grouped_format = pytest.mark.parametrize("fmt", GROUPED.values(), ids=GROUPED)
