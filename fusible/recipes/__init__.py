"""What numbers look like: formats, quantizers, quantized tensors, recipes."""

from fusible.recipes.autocast import autocast, current_recipe, keep_recipe
from fusible.recipes.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Role,
)

__all__ = [
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
    "Role",
    "autocast",
    "current_recipe",
    "keep_recipe",
]
