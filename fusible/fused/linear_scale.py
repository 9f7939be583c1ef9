"""Linear + constant scale, backward: the products scale their results."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.fuser.conditions import equal, this
from fusible.fuser.rules import rule
from fusible.ops import BasicLinear, ConstantScale, FusedOperation
from fusible.ops.op import Contexts, ExtraTensors, FusedGrads
from fusible.ops.wgrad import dense_gradient


class BackwardLinearScale(FusedOperation):
    """Backward of ``scale * x @ weight.T``."""

    _basic_ops: tuple[BasicLinear, ConstantScale]

    def backward_impl(self, ctxs: Contexts, dy: Tensor, dextras: ExtraTensors) -> FusedGrads:
        """``scale * dy @ weight`` and ``scale * dy.T @ x``."""
        (linear, scale), ctx = self._basic_ops, ctxs[0]
        x, weight = ctx.saved_tensors
        dy = cast(dy, ctx.dtype)
        dx = None
        if ctx.needs.input:
            buffer = linear.grad_input_buffer(ctx)
            rows = dy.reshape(-1, dy.shape[-1])
            # With beta=0 addmm does not read its input.
            options = {} if buffer is None else {"out": buffer.view(-1, weight.shape[1])}
            dx = torch.addmm(dy.new_empty(1), rows, weight, beta=0, alpha=scale.scale, **options)
            dx = dx.view(*dy.shape[:-1], weight.shape[1]) if buffer is None else buffer
        dweight = linear.weight_grads(ctx, dense_gradient(dy, x, scale.scale))
        return dx, [dweight, ()], [(), ()]


@rule(equal(this.recipe, "none"), phase="backward")
def backward_linear_scale(linear: BasicLinear, scale: ConstantScale) -> BackwardLinearScale:
    """One pass over the gradient less: the epilogues scale in FP32, before rounding."""
    return BackwardLinearScale([linear, scale])
