"""Linear + bias + activation, forward: the bias is added inside the matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusible import formulas
from fusible.fuser.conditions import equal, this
from fusible.fuser.context import OperationContext
from fusible.fuser.rules import rule
from fusible.ops import GELU, BasicLinear, Bias, FusedOperation, ReLU, SiLU


class LinearBiasActivation(FusedOperation):
    """Forward of ``activation(x @ weight.T + bias)``, with or without the activation."""

    def __init__(
        self, linear: BasicLinear, bias: Bias, activation: GELU | ReLU | SiLU | None
    ) -> None:
        super().__init__([op for op in (linear, bias, activation) if op is not None])
        self._parts = linear, bias, activation

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        """One product with the bias in its epilogue, then the activation."""
        linear, _, activation = self._parts
        ctx, ctx_bias = basic_op_ctxs[:2]
        x, weight = linear.operands(ctx, input_)
        linear.output_buffer(ctx, input_, basic_op_kwargs[0])  # not the last op: none
        y = formulas.linear(x, weight, ctx_bias.parameters[0].to(x.dtype))
        if activation is not None:
            y = activation.op_forward(
                basic_op_ctxs[-1], y, prev_op_grad_output_quantizer, next_op_input_quantizer
            )
        return y, [()] * len(basic_op_ctxs)


@rule(
    equal(this.recipe, "none"),
    equal(this.bias.size, this.linear.out_features),
    phase="forward",
)
def linear_bias_activation(
    linear: BasicLinear, bias: Bias, activation: GELU | ReLU | SiLU | None
) -> LinearBiasActivation:
    """One pass over the output less: the product's epilogue adds the bias, in FP32."""
    return LinearBiasActivation(linear, bias, activation)
