"""An operation fuser for PyTorch: blocks written as a Sequential of ops, run as fused kernels."""

from typing import TYPE_CHECKING, NoReturn

import fusible.kernels.quantize  # noqa: F401 - registers its kernels for CUDA
from fusible import extend, ops, recipes
from fusible.fused import RULES
from fusible.fuser.explain import Explanation, explain
from fusible.fuser.plan import NotFused, Plan
from fusible.fuser.registry import register_rule, registry, unregister_rule
from fusible.fuser.target import Target
from fusible.kernels.grouped import checking
from fusible.names import did_you_mean
from fusible.ops import *  # noqa: F403 - the ops' own list of names
from fusible.recipes import (
    GroupedTensor,
    QuantizedTensor,
    autocast,
    keep_recipe,
    quantized_model_init,
)

__version__ = "0.1.0"

registry.install(RULES)

_OTHER_NAMES = {
    "fp8_autocast": "autocast",
    "fp8_model_init": "quantized_model_init",
    "recipe": "recipes",
}


if not TYPE_CHECKING:  # for which every name would exist

    def __getattr__(name: str) -> NoReturn:
        known = [other for other in globals() if not other.startswith("_")]
        hint = did_you_mean(_OTHER_NAMES.get(name, name), known)
        raise AttributeError(f"module 'fusible' has no attribute {name!r}{hint}")


__all__ = [
    "Explanation",
    "GroupedTensor",
    "NotFused",
    "Plan",
    "QuantizedTensor",
    "Target",
    "autocast",
    "checking",
    "explain",
    "extend",
    "keep_recipe",
    "ops",
    "quantized_model_init",
    "recipes",
    "register_rule",
    "unregister_rule",
    *ops.__all__,
]
