"""What makes two grouped linears and an activation one grouped MLP, whichever kernels run it."""

from __future__ import annotations

from fusible.fuser.conditions import equal, this
from fusible.ops import ScaledClampedQGeGLU, ScaledSwiGLU

ScaledGLU = ScaledSwiGLU | ScaledClampedQGeGLU
"""The activations that kernels have."""

GROUPED_MLP = (
    equal(this.fc1.num_groups, this.fc2.num_groups),
    equal(this.fc1.dtype, this.fc2.dtype),
    equal(this.fc1.out_features, 2 * this.fc2.in_features),
    equal(this.fc1.split_sizes.source, this.fc2.split_sizes.source),
    equal(this.fc1.scale_bias, False),
    # Its backward reads what the first two ops save, which ops without a backward do not.
    equal(this.fc1.requires_grad, this.fc2.requires_grad),
    equal(this.act.requires_grad, this.fc2.requires_grad),
)
