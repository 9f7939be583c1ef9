"""An operation fuser for PyTorch: blocks written as a Sequential of ops, run as fused kernels."""

from typing import TYPE_CHECKING, NoReturn

import fusible.kernels.quantize  # noqa: F401 - registers its kernels for CUDA
from fusible import extend, ops, recipes
from fusible.compat import (
    checkpoint,
    fp8_autocast,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    make_graphed_callables,
)
from fusible.distributed import expert_parallel
from fusible.fused import RULES
from fusible.fuser.explain import Explanation, explain
from fusible.fuser.plan import NotFused, Plan
from fusible.fuser.registry import register_rule, registry, unregister_rule
from fusible.fuser.target import Target
from fusible.kernels.grouped import checking
from fusible.names import did_you_mean
from fusible.ops import *  # noqa: F403 - the ops' own list of names
from fusible.recipes import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    GroupedTensor,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    autocast,
    get_default_recipe,
    keep_recipe,
    quantized_model_init,
)

__version__ = "0.1.0"

registry.install(RULES)

fp8_model_init = quantized_model_init

_NOT_OFFERED = {
    "UserBufferQuantizationMode": "userbuffers are not; leave them out, the values are the same",
    "destroy_ub": "userbuffers are not; leave them out, the values are the same",
    "initialize_ub": "userbuffers are not; leave them out, the values are the same",
    "is_op_fuser_grouped_tensor_path_supported": "explain says how a GroupedLinear runs",
}


if not TYPE_CHECKING:  # for which every name would exist

    def __getattr__(name: str) -> NoReturn:
        if name in _NOT_OFFERED:
            raise AttributeError(f"fusible.{name} is not offered: {_NOT_OFFERED[name]}")
        known = [other for other in globals() if not other.startswith("_")]
        hint = did_you_mean(name, known)
        raise AttributeError(f"module 'fusible' has no attribute {name!r}{hint}")


__all__ = [
    "Explanation",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "GroupedTensor",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "NotFused",
    "Plan",
    "QuantizedTensor",
    "Quantizer",
    "Target",
    "autocast",
    "checking",
    "checkpoint",
    "expert_parallel",
    "explain",
    "extend",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "keep_recipe",
    "make_graphed_callables",
    "ops",
    "quantized_model_init",
    "recipes",
    "register_rule",
    "unregister_rule",
    *ops.__all__,
]
