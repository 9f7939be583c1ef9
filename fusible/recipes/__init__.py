"""What numbers look like: formats, quantizers, quantized tensors, recipes."""

from fusible.recipes.autocast import autocast, current_recipe, keep_recipe
from fusible.recipes.grouped import GroupedTensor, group, group_dequantize, group_quantize
from fusible.recipes.model_init import quantized_model_init, weight_parameter
from fusible.recipes.product import encode_operand, operand, save_for_wgrad
from fusible.recipes.quantizer import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from fusible.recipes.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Role,
)
from fusible.recipes.state import register_state_hooks, tensor_from_state, tensor_state
from fusible.recipes.tensor import QuantizedTensor

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Format",
    "GroupedTensor",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "QuantizedTensor",
    "Quantizer",
    "Recipe",
    "Role",
    "autocast",
    "current_recipe",
    "encode_operand",
    "group",
    "group_dequantize",
    "group_quantize",
    "keep_recipe",
    "operand",
    "quantized_model_init",
    "register_state_hooks",
    "save_for_wgrad",
    "tensor_from_state",
    "tensor_state",
    "weight_parameter",
]
