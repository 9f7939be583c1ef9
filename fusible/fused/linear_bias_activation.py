"""Linear + bias + activation, forward: the bias is added inside the matrix product."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fusible.fuser.conditions import equal, this
from fusible.fuser.rules import rule
from fusible.ops import GELU, BasicLinear, Bias, FusedOperation, ReLU, SiLU
from fusible.ops.op import Contexts, ExtraTensors, FusedOutputs


class LinearBiasActivation(FusedOperation):
    """Forward of ``activation(x @ weight.T + bias)``, with or without the activation."""

    _basic_ops: tuple[Any, ...]

    def forward_impl(self, ctxs: Contexts, input_: Tensor, extra: ExtraTensors) -> FusedOutputs:
        """One product with the bias in its epilogue, then the activation."""
        linear, _, *activations = self._basic_ops
        ctx, ctx_bias = ctxs[:2]
        x, weight = linear.operands(ctx, input_)
        linear.output_buffer(ctx, input_)  # not the last op: none
        y = F.linear(x, weight, ctx_bias.parameters[0].to(x.dtype))
        for activation in activations:  # one or none
            y = activation.forward_impl(ctxs[-1], y)
        return y, [()] * len(ctxs)


@rule(
    equal(this.recipe, "none"),
    equal(this.bias.size, this.linear.out_features),
    phase="forward",
)
def linear_bias_activation(
    linear: BasicLinear, bias: Bias, activation: GELU | ReLU | SiLU | None
) -> LinearBiasActivation:
    """One pass over the output less: the product's epilogue adds the bias, in FP32."""
    return LinearBiasActivation([op for op in (linear, bias, activation) if op is not None])
