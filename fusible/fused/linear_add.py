"""Linear + residual add: the sum is taken inside the matrix product, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.fuser.conditions import equal, this
from fusible.fuser.context import OperationContext
from fusible.fuser.rules import rule
from fusible.ops import AddExtraInput, BasicLinear, FusedOperation, MakeExtraOutput
from fusible.ops.elementary import check_addend
from fusible.ops.op import Grads
from fusible.ops.wgrad import dense_gradient


def _add_product(addend: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``addend + a @ b`` for a ``[..., K]`` and b ``[K, N]``, in one product."""
    rows = a.reshape(-1, a.shape[-1])
    return torch.addmm(addend.reshape(-1, b.shape[1]), rows, b).view(addend.shape)


def _sum(dextra: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """``dextra + dy @ weight``, where under autocast ``dextra`` may be wider than the product."""
    return _add_product(dextra, dy, weight) if dextra.dtype == dy.dtype else dextra + dy @ weight


class LinearAdd(FusedOperation):
    """Forward of ``x @ weight.T + addend``."""

    def __init__(self, linear: BasicLinear, add: AddExtraInput) -> None:
        super().__init__([linear, add])
        self._parts = linear, add

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
        """One product that starts from the addend."""
        x, weight = self._parts[0].operands(basic_op_ctxs[0], input_)
        shape = (*x.shape[:-1], weight.shape[0])
        addend = check_addend(basic_op_extra_inputs[1][0], shape, x)
        return _add_product(addend, x, weight.t()), [(), ()]


class BackwardLinearAdd(FusedOperation):
    """Backward of ``MakeExtraOutput`` + ``BasicLinear``: ``dy @ weight + dextra``."""

    def __init__(self, fork: MakeExtraOutput, linear: BasicLinear) -> None:
        super().__init__([fork, linear])
        self._parts = fork, linear

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """One product that starts from the extra output's gradient."""
        ctx = basic_op_ctxs[1]
        weight = ctx.saved_tensors[1]
        dy = grad_output.to(ctx.dtype)
        dextra = basic_op_grad_extra_outputs[0][0]
        dx = None
        if ctx.needs.input:
            dx = dy @ weight if dextra is None else _sum(dextra, dy, weight)
        dweight = self._parts[1].weight_grads(ctx, dense_gradient(dy, ctx.saved_tensors[0]))
        return dx, [(), dweight], [(), ()]


@rule(
    equal(this.recipe, "none"),
    equal(this.add.addend.dtype, this.dtype),
    equal(this.linear.param_dtype, this.dtype),
    phase="forward",
)
def linear_add(linear: BasicLinear, add: AddExtraInput) -> LinearAdd:
    """One pass over the output less, and one rounding: the product starts from the addend."""
    return LinearAdd(linear, add)


@rule(
    equal(this.recipe, "none"),
    equal(this.linear.param_dtype, this.dtype),
    phase="backward",
)
def backward_linear_add(fork: MakeExtraOutput, linear: BasicLinear) -> BackwardLinearAdd:
    """One pass over the gradient less: the data gradient starts from the branch's gradient."""
    return BackwardLinearAdd(fork, linear)
