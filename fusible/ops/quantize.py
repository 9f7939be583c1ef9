"""``Quantize``: says where in a run tensors are converted to the recipe's number format."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusible.fuser.context import OperationContext
from fusible.ops.handover import hand_over
from fusible.ops.op import BasicOperation, Grads
from fusible.recipes.product import values


class Quantize(BasicOperation):
    """The input, quantized as the next op wants it; the gradient, as the previous op wants it.

    Without a recipe it is the identity. Saves nothing.

    Args:
        forward: quantize the input. The next op must take quantized inputs (``BasicLinear``;
            ``GroupedLinear`` quantizes by group, which it alone can).
        backward: quantize the gradient. The previous op must take quantized gradients.
    """

    fact_names = ("quantize_forward", "quantize_backward")
    saves = "nothing"

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.quantize_forward = forward
        self.quantize_backward = backward

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
    ) -> Tensor:
        """``q(x)``.

        Raises:
            ValueError: a neighbour does not take what it would be handed.
        """
        recipe = ctx.recipe
        forward = self.quantize_forward and recipe is not None and recipe.format("input")
        backward = self.quantize_backward and recipe is not None and recipe.format("grad")
        if backward:
            ctx.grad_quantizer = _required(prev_op_grad_output_quantizer, "previous", "gradients")
        if not forward:
            return input_
        return hand_over(input_, _required(next_op_input_quantizer, "next", "inputs"))

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Grads]:
        """``q(dy)``."""
        quantizer = ctx.grad_quantizer
        if quantizer is None or not ctx.needs.input:
            return grad_output, ()
        return hand_over(values(grad_output), quantizer), ()

    def extra_repr(self) -> str:
        """Passes."""
        return f"forward={self.quantize_forward}, backward={self.quantize_backward}"


def _required(quantizer: Any, which: str, what: str) -> Any:
    if quantizer is None:
        raise ValueError(
            f"the op {'after' if which == 'next' else 'before'} Quantize must take quantized "
            f"{what}, as BasicLinear does, got one that does not (or none); remove the Quantize op"
        )
    return quantizer
