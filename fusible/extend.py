"""What rules and ops of your own are written with; ``docs/extending.md`` shows how."""

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
from fusible.fuser.rules import Rule, rule
from fusible.fuser.target import Target
from fusible.ops import BasicOperation, FusedOperation

__all__ = [
    "BasicOperation",
    "Condition",
    "FusedOperation",
    "OperationContext",
    "Rule",
    "Target",
    "at_least",
    "at_most",
    "equal",
    "fusion_rules",
    "multiple_of",
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
