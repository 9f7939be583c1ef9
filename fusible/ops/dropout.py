"""Dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.arguments import check_numbers
from fusible.fuser.context import OperationContext
from fusible.ops.casting import CastingOp, apply_quantizer, cast_grad


class Dropout(CastingOp):
    """Zeros with probability ``p`` in training, other elements of x ``[...]`` over ``1 - p``.

    In evaluation the input itself. Draws from PyTorch's generator of the device as
    ``torch.nn.functional.dropout`` does, so ``torch.manual_seed`` decides, and checkpointing
    repeats it. Saves ``(mask,)``, one byte an element, in training, and nothing in evaluation.

    Args:
        p: at least 0 and at most 1.

    Raises:
        ValueError: it is not.
    """

    fact_names = ("p",)
    saves = "mask"

    def __init__(self, p: float) -> None:
        check_numbers(type(self).__name__, p=p)
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p of Dropout must be at least 0 and at most 1, got {p}")
        self.p = p

    @property
    def dropout_probability(self) -> float:
        """``p``."""
        return self.p

    def forward_impl(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """The input, partly dropped."""
        x = self.cast_input(ctx, input_)
        if self.training and self.p == 1:  # PyTorch draws nothing for it
            x, mask = x * 0, torch.zeros_like(x, dtype=torch.bool)
            ctx.save_for_backward(mask)
        elif self.training and self.p > 0:
            x, mask = torch.native_dropout(x, self.p, True)
            ctx.save_for_backward(mask)
        return apply_quantizer(x, ctx.next_quantizer)

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> Tensor:
        """The gradient, dropped where the forward did."""
        dx = cast_grad(ctx, grad_output)
        if ctx.saved_tensors:
            scale = 0.0 if self.p == 1 else 1 / (1 - self.p)
            dx = torch.ops.aten.native_dropout_backward(dx, ctx.saved_tensors[0], scale)
        return apply_quantizer(dx, ctx.grad_quantizer)
