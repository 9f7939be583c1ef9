"""An operation fuser for PyTorch: blocks written as a Sequential of ops, run as fused kernels."""

from fusible import ops, recipes
from fusible.fused import RULES
from fusible.fuser.explain import Explanation, explain
from fusible.fuser.plan import NotFused, Plan
from fusible.fuser.registry import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    registry,
)
from fusible.fuser.target import Target
from fusible.kernels.grouped import checking
from fusible.ops import *  # noqa: F403 - the ops' own list of names
from fusible.recipes import autocast

registry.install(RULES)

__all__ = [
    "Explanation",
    "NotFused",
    "Plan",
    "Target",
    "autocast",
    "checking",
    "explain",
    "ops",
    "recipes",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    *ops.__all__,
]
