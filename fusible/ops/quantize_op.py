"""``Quantize``: says where in a run tensors are converted to the recipe's number format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusible.arguments import check_bools
from fusible.fuser.context import OperationContext
from fusible.ops.handover import hand_over
from fusible.ops.inputs import check_sizes, on_device_of
from fusible.ops.op import BasicOperation
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

    def forward_impl(self, ctx: OperationContext, input_: Tensor, *split_sizes: Tensor) -> Tensor:
        """``q(x)``."""
        recipe = ctx.recipe
        forward = self.quantize_forward and recipe is not None and recipe.format("input")
        backward = self.quantize_backward and recipe is not None and recipe.format("grad")
        groups = [_on_device(s, input_) for s in split_sizes] if forward or backward else []
        if backward:
            _required(ctx.grad_quantizer, "previous", "gradients", groups)
            ctx.save_for_backward(*groups)
        else:
            ctx.grad_quantizer = None
        if not forward:
            return input_
        quantizer = _required(ctx.next_quantizer, "next", "inputs", groups)
        return hand_over(input_, quantizer, *groups)

    def backward_impl(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, ...]:
        """``q(dy)``."""
        extra = (None,) * self.num_extra_inputs
        if ctx.grad_quantizer is None or not ctx.needs.input:
            return grad_output, *extra
        dx = hand_over(values(grad_output), ctx.grad_quantizer, *ctx.saved_tensors)
        return dx, *extra

    def extra_repr(self) -> str:
        """Passes."""
        groups = "" if self.num_groups is None else f", num_groups={self.num_groups}"
        return f"forward={self.quantize_forward}, backward={self.quantize_backward}{groups}"


def _on_device(sizes: Tensor | None, x: Tensor) -> Tensor | None:
    """Row counts where the rows are; negative ones count as zero, as in ``GroupedLinear``."""
    return None if sizes is None else on_device_of(x, sizes, "Quantize").clamp(min=0)


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
