"""``Quantize``: says where in a run tensors are converted to the recipe's number format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusible.arguments import check_bools
from fusible.fuser.context import OperationContext
from fusible.ops.checks import beside, check_sizes
from fusible.ops.handover import hand_over
from fusible.ops.op import BasicOperation, Grads
from fusible.recipes.grouped import GroupedQuantizer
from fusible.recipes.product import values


class Quantize(BasicOperation):
    """The input, quantized as the next op wants it; the gradient, as the previous op wants it.

    Without a recipe it is the identity. With ``num_groups`` it takes the extra input
    ``split_sizes``, integers ``[num_groups]``, the rows of each group, which it saves; else it
    saves nothing.

    Args:
        forward: quantize the input. The next op must take quantized inputs (``BasicLinear``,
            ``GroupedLinear``).
        backward: quantize the gradient. The previous op must take quantized gradients.
        num_groups: groups of rows to quantize apart, as a neighbouring ``GroupedLinear`` wants
            them.

    Raises:
        ValueError: in a call, a neighbour does not take what it would be handed, or is a
            ``GroupedLinear`` and ``num_groups`` is None.
    """

    extra_input_names = ("split_sizes",)
    fact_names = ("quantize_forward", "quantize_backward")
    keywords = ()
    saves = "split sizes, if rows are grouped"

    def __init__(
        self, forward: bool = True, backward: bool = False, *, num_groups: int | None = None
    ) -> None:
        check_bools("Quantize", forward=forward, backward=backward)
        if num_groups is not None:
            check_sizes("Quantize", num_groups=num_groups)
        self.num_extra_inputs = 0 if num_groups is None else 1
        super().__init__()
        self.quantize_forward = forward
        self.quantize_backward = backward
        self.num_groups = num_groups

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
        """``q(x)``."""
        (ctx,), (sizes,) = basic_op_ctxs, basic_op_extra_inputs
        recipe = ctx.recipe
        forward = self.quantize_forward and recipe is not None and recipe.format("input")
        backward = self.quantize_backward and recipe is not None and recipe.format("grad")
        groups = [_on_device(s, input_) for s in sizes] if forward or backward else []
        if backward:
            quantizer = prev_op_grad_output_quantizer
            ctx.grad_quantizer = _required(quantizer, "previous", "gradients", groups)
            ctx.save_for_backward(*groups)
        if not forward:
            return input_, [()]
        quantizer = _required(next_op_input_quantizer, "next", "inputs", groups)
        return hand_over(input_, quantizer, *groups), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """``q(dy)``."""
        (ctx,) = basic_op_ctxs
        extra = [(None,) * self.num_extra_inputs]
        if ctx.grad_quantizer is None or not ctx.needs.input:
            return grad_output, [()], extra
        dx = hand_over(values(grad_output), ctx.grad_quantizer, *ctx.saved_tensors)
        return dx, [()], extra

    def extra_repr(self) -> str:
        """Passes."""
        groups = "" if self.num_groups is None else f", num_groups={self.num_groups}"
        return f"forward={self.quantize_forward}, backward={self.quantize_backward}{groups}"


def _on_device(sizes: Tensor | None, x: Tensor) -> Tensor | None:
    """Row counts where the rows are; negative ones count as zero, as in ``GroupedLinear``."""
    return None if sizes is None else beside(x, sizes, "Quantize").clamp(min=0)


def _required(quantizer: Any, which: str, what: str, groups: Sequence[Any]) -> Any:
    if isinstance(quantizer, GroupedQuantizer) and not groups:
        raise ValueError(
            f"Quantize next to a GroupedLinear of {quantizer.num_groups} groups must be given the "
            f"rows of each, got none; make it Quantize(num_groups={quantizer.num_groups})"
        )
    if quantizer is None:
        raise ValueError(
            f"the op {'after' if which == 'next' else 'before'} Quantize must take quantized "
            f"{what}, as BasicLinear does, got one that does not (or none); remove the Quantize op"
        )
    return quantizer
