"""An operation fuser for PyTorch: blocks written as a Sequential of ops, run as fused kernels."""

from typing import TYPE_CHECKING, NoReturn

import fusible.kernels.quantize  # noqa: F401 - registers its kernels for CUDA
from fusible import compat, extend, ops, recipes
from fusible.compat import *  # noqa: F403 - its own list of names
from fusible.distributed import expert_parallel
from fusible.fused import RULES
from fusible.fuser.explain import Explanation, explain
from fusible.fuser.plan import NotFused, Plan
from fusible.fuser.registry import register_rule, registry, unregister_rule
from fusible.fuser.saved_rows import SavedRowsPool
from fusible.fuser.target import Target
from fusible.kernels.grouped.groups import checking
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
    recipe_context_fn,
)

__version__ = "0.1.0"

registry.install(RULES)

fp8_model_init = quantized_model_init

_NOT_OFFERED = {
    "userbuffers are not; leave them out, the values are the same": (
        "UserBufferQuantizationMode",
        "UserbuffersBackwardLinear",
        "UserbuffersForwardLinear",
        "destroy_ub",
        "initialize_ub",
    ),
    "whole layers are not; put ops into a Sequential, and PyTorch's attention between two": (
        "DotProductAttention",
        "LayerNormLinear",
        "LayerNormMLP",
        "MultiheadAttention",
        "TransformerLayer",
    ),
    "rows of groups need no padding; pass the groups' sizes": ("Fp8Padding", "Fp8Unpadding"),
    "Dispatch sends tokens to experts and Combine collects them": (
        "moe_permute",
        "moe_permute_with_probs",
        "moe_sort_chunks_by_index",
        "moe_sort_chunks_by_index_with_probs",
        "moe_unpermute",
    ),
    "QuantizedTensor has every format; t.format says which": (
        "Float8BlockwiseQTensor",
        "Float8Tensor",
        "MXFP8Tensor",
        "NVFP4Tensor",
    ),
    "explain says how a GroupedLinear runs": ("is_op_fuser_grouped_tensor_path_supported",),
    "every op is fusible.X; rules choose fused ops": ("basic", "fused"),
    "recipes are in fusible.recipes": ("common",),
    "use PyTorch's: torch.optim, torch.autograd.graph.save_on_cpu, the CUDA generator": (
        "CudaRNGStatesTracker",
        "get_cpu_offload_context",
        "optimizers",
    ),
    recipes.DelayedScaling.why: ("DelayedScaling",),
}


if not TYPE_CHECKING:  # for which every name would exist

    def __getattr__(name: str) -> NoReturn:
        for why, names in _NOT_OFFERED.items():
            if name in names:
                raise AttributeError(f"fusible.{name} is not offered: {why}")
        if name in recipes.__all__:
            raise AttributeError(f"fusible.{name} is fusible.recipes.{name}")
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
    "SavedRowsPool",
    "Target",
    "autocast",
    "checking",
    "expert_parallel",
    "explain",
    "extend",
    "fp8_model_init",
    "get_default_recipe",
    "keep_recipe",
    "ops",
    "quantized_model_init",
    "recipe_context_fn",
    "recipes",
    "register_rule",
    "unregister_rule",
    *compat.__all__,
    *ops.__all__,
]
