"""What numbers look like: formats, quantizers, quantized tensors, recipes."""

from fusible.recipes.autocast import autocast, current_recipe
from fusible.recipes.recipe import Recipe

__all__ = ["Recipe", "autocast", "current_recipe"]
