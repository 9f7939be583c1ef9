"""The interface for rules and ops of your own; ``docs/extending.md`` shows how to use it."""

from fusible.fuser.conditions import (
    Condition,
    at_least,
    at_most,
    equal,
    multiple_of,
    one_of,
    this,
    where,
)
from fusible.fuser.context import OperationContext
from fusible.fuser.registry import (
    fusion_rules,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    register_rule,
    unregister_rule,
)
from fusible.fuser.rules import KernelRow, Rule, rule
from fusible.fuser.target import Target
from fusible.kernels.glu import Glu
from fusible.kernels.grouped import (
    grouped_dglu,
    grouped_glu,
    grouped_mm,
    grouped_wgrad,
    grouped_wgrad_,
)
from fusible.ops import BasicOperation, FusedOperation
from fusible.ops.kernel_rows import needs_sm90, needs_sm100

__all__ = [
    "BasicOperation",
    "Condition",
    "FusedOperation",
    "Glu",
    "KernelRow",
    "OperationContext",
    "Rule",
    "Target",
    "at_least",
    "at_most",
    "equal",
    "fusion_rules",
    "grouped_dglu",
    "grouped_glu",
    "grouped_mm",
    "grouped_wgrad",
    "grouped_wgrad_",
    "multiple_of",
    "needs_sm90",
    "needs_sm100",
    "one_of",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "register_rule",
    "rule",
    "this",
    "unregister_rule",
    "where",
]
