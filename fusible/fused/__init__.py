"""Which runs of ops are replaced: every rule, in order of priority."""

from fusible.fused.linear_add import backward_linear_add, linear_add
from fusible.fused.linear_bias_activation import linear_bias_activation

RULES = (linear_bias_activation, linear_add, backward_linear_add)
