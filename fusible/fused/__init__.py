"""Every rule: which runs of ops are fused, in order of priority."""

from fusible.fused.dense_backwards import backward_activation_bias, backward_add_rms_norm
from fusible.fused.experts import moe_experts
from fusible.fused.grouped_mlp import grouped_linear_glu_sm90, grouped_mlp
from fusible.fused.linear_epilogues import (
    backward_linear_add,
    backward_linear_scale,
    linear_add,
    linear_bias_activation,
)

RULES = (
    moe_experts,
    grouped_mlp,
    grouped_linear_glu_sm90,
    linear_bias_activation,
    linear_add,
    backward_linear_add,
    backward_linear_scale,
    backward_activation_bias,
    backward_add_rms_norm,
)
