"""Number formats, quantization, quantized tensors and recipes."""

from fusible.recipes.autocast import autocast, current_recipe, keep_recipe, recipe_context_fn
from fusible.recipes.checkpoint_state import register_state_hooks, tensor_from_state, tensor_state
from fusible.recipes.grouped import (
    GroupedQuantizer,
    GroupedTensor,
    group,
    group_dequantize,
    group_quantize,
)
from fusible.recipes.layout import swizzle_block_scales, unswizzle_block_scales
from fusible.recipes.matrix import Operand, QuantizedMatrix, Uses
from fusible.recipes.mixed import ByOp, ByPass
from fusible.recipes.model_init import quantized_model_init, weight_parameter
from fusible.recipes.product import operand_values, quantize_operand
from fusible.recipes.quantize_ops import random_key
from fusible.recipes.quantizer import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from fusible.recipes.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8Quantizer,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
    Role,
    get_default_recipe,
)
from fusible.recipes.tensor import QuantizedTensor
from fusible.recipes.tensor_dispatch import implicit_dequantizes, no_implicit_dequantize

__all__ = [
    "ByOp",
    "ByPass",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Format",
    "GroupedQuantizer",
    "GroupedTensor",
    "MMParams",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "Operand",
    "QParams",
    "QuantizedMatrix",
    "QuantizedTensor",
    "Quantizer",
    "Recipe",
    "Role",
    "Uses",
    "autocast",
    "current_recipe",
    "get_default_recipe",
    "group",
    "group_dequantize",
    "group_quantize",
    "implicit_dequantizes",
    "keep_recipe",
    "no_implicit_dequantize",
    "operand_values",
    "quantize_operand",
    "quantized_model_init",
    "random_key",
    "recipe_context_fn",
    "register_state_hooks",
    "swizzle_block_scales",
    "tensor_from_state",
    "tensor_state",
    "unswizzle_block_scales",
    "weight_parameter",
]
