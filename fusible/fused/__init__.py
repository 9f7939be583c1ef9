"""Every rule: which runs of ops are fused, in order of priority, and which kernels run an op."""

from fusible.fused.activation_bias import backward_activation_bias
from fusible.fused.add_rms_norm import backward_add_rms_norm
from fusible.fused.experts import moe_experts
from fusible.fused.grouped_mlp import grouped_linear_glu_sm90, grouped_mlp
from fusible.fused.kernel_selection import grouped_linear, linear
from fusible.fused.linear_add import backward_linear_add, linear_add
from fusible.fused.linear_bias_activation import linear_bias_activation
from fusible.fused.linear_scale import backward_linear_scale

FUSIONS = (
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

RULES = (*FUSIONS, grouped_linear, linear)
