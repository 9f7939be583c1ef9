"""Which runs of ops are replaced: every rule, in order of priority."""

from fusible.fused.activation_bias import backward_activation_bias
from fusible.fused.add_rms_norm import backward_add_rms_norm
from fusible.fused.experts_sm90 import moe_experts_sm90
from fusible.fused.grouped_sm90 import (
    grouped_linear_backward_sm90,
    grouped_linear_forward_sm90,
    grouped_linear_glu_sm90,
    grouped_mlp_sm90,
)
from fusible.fused.grouped_sm100 import (
    grouped_linear_sm100,
    grouped_mlp_sm100,
)
from fusible.fused.linear_add import backward_linear_add, linear_add
from fusible.fused.linear_bias_activation import linear_bias_activation
from fusible.fused.linear_scale import backward_linear_scale
from fusible.fused.recipes_sm90 import (
    recipe_linear_backward_sm90,
    recipe_linear_forward_sm90,
    recipe_mlp_sm90,
)

RULES = (
    moe_experts_sm90,
    grouped_mlp_sm90,
    grouped_linear_glu_sm90,
    grouped_linear_forward_sm90,
    grouped_linear_backward_sm90,
    recipe_mlp_sm90,
    recipe_linear_forward_sm90,
    recipe_linear_backward_sm90,
    grouped_mlp_sm100,
    grouped_linear_sm100,
    linear_bias_activation,
    linear_add,
    backward_linear_add,
    backward_linear_scale,
    backward_activation_bias,
    backward_add_rms_norm,
)
