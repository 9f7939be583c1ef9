"""Grouped linears and grouped MLPs on Hopper under a recipe: our SM90 kernels on what it decodes.

Operands are encoded in the recipe's formats, saved so, and decoded to BF16, in one launch each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusible.fused.grouped_mlp import ScaledGLU
from fusible.fused.grouped_sm90 import (
    MLP_FITS,
    GroupedLinearForwardSm90,
    data_grad,
    grouped_linear,
    linear_glu,
    weight_grads,
)
from fusible.fused.packages import CUTLASS
from fusible.fused.sm90_operands import (
    CheckedProducts,
    as_vector,
    features_fit,
    glu_of,
    prepare,
)
from fusible.fuser.conditions import Condition, equal, one_of, this
from fusible.fuser.context import OperationContext
from fusible.fuser.rules import rule
from fusible.kernels.sm90 import limits
from fusible.ops import FusedOperation, GroupedLinear
from fusible.ops.grouped_linear import GradOperands
from fusible.ops.op import Grads
from fusible.ops.rows import as_2d, with_rows_of


def _fits(*linears: Any) -> tuple[Condition, ...]:
    """What the kernels need of the machine, the recipe and linears."""
    return (
        equal(this.sm, limits.ARCHITECTURE),
        CUTLASS,
        one_of(this.recipe, "mxfp8", "fp8_block", "fp8_current", "nvfp4"),
        equal(linears[0].dtype, "bfloat16"),
        *features_fit(*linears),
    )


class RecipeLinearBackwardSm90(FusedOperation):
    """Backward of one ``GroupedLinear``."""

    _basic_ops: tuple[GroupedLinear]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """Two grouped products."""
        (linear,), (ctx,) = self._basic_ops, basic_op_ctxs
        dx, params, extra = _backward(linear, ctx, grad_output)
        return dx, [params], [extra]


class RecipeMLPSm90(FusedOperation):
    """``GroupedLinear`` + scaled gated activation + ``GroupedLinear``, forward and backward.

    Saves what the ops alone save, where the activation between them is FC2's quantized input.
    """

    saves = "quantized inputs and weights, pre-activation, scales, end rows of the groups"

    def __init__(self, fc1: GroupedLinear, act: ScaledGLU, fc2: GroupedLinear) -> None:
        super().__init__([fc1, act, fc2])
        self._parts = fc1, act, fc2
        self._glu = glu_of(act)

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
        """Two products, the first with the activation taken from its accumulators."""
        fc1, act, fc2 = self._parts
        *ctxs, ctx = basic_op_ctxs
        hidden = linear_glu(
            fc1, act, self._glu, ctxs, input_, basic_op_extra_inputs, basic_op_kwargs
        )
        y = grouped_linear(fc2, ctx, hidden, basic_op_extra_inputs[2], basic_op_kwargs[2])
        return y, [(), (), ()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """Four products, FC2's data gradient with that of the activation."""
        fc1, _, fc2 = self._parts
        ctx1, ctx_act, ctx2 = basic_op_ctxs
        preact, scales = ctx_act.saved_tensors
        given = fc2.grad_operands(ctx2, grad_output)
        rows = [*_rows(given), as_2d(preact)]
        (dy, *others, preact), ((product, w),) = prepare(rows, (fc2, given.weights))
        dpreact, _, dscales = product.dglu(dy, w, given.ends, preact, as_vector(scales), self._glu)
        params2, extra2 = _param_grads(fc2, ctx2, product, given, grad_output)
        del given, rows, dy, others  # its memory serves what follows
        dx, params1, extra1 = _backward(fc1, ctx1, with_rows_of(dpreact, grad_output))
        return dx, [params1, (), params2], [extra1, (with_rows_of(dscales, grad_output),), extra2]


def _backward(
    linear: GroupedLinear, ctx: OperationContext, grad_output: Tensor
) -> tuple[Tensor | None, Grads, Grads]:
    """Gradients of one linear, from what it saved: of its input, parameters and extra inputs."""
    given = linear.grad_operands(ctx, grad_output)
    dx: Tensor | None = None
    product: Any = CheckedProducts
    if ctx.needs.input:
        (dy, *_), ((product, w),) = prepare(_rows(given), (linear, given.weights))
        dx = data_grad(linear, ctx, product, w, dy, given.ends, grad_output)
    return dx, *_param_grads(linear, ctx, product, given, grad_output)


def _rows(given: GradOperands) -> list[Tensor]:
    """All that is multiplied with the weight, first, or for its gradient."""
    return [t for t in (given.rows, given.columns, given.x) if t is not None]


def _param_grads(
    linear: GroupedLinear,
    ctx: OperationContext,
    product: Any,
    given: GradOperands,
    grad_output: Tensor,
) -> tuple[Grads, Grads]:
    """Gradients of the parameters and of the extra inputs."""
    dweights = weight_grads(linear, ctx, product, given.columns, given.x, given.ends)
    dy, ends, row_scale = given.dy, given.ends, given.row_scale
    return linear.grads(ctx, dweights, dy, ends, row_scale, grad_output.shape[:-1])


@rule(*_fits(this.fc1, this.fc2), *MLP_FITS)
def recipe_mlp_sm90(fc1: GroupedLinear, act: ScaledGLU, fc2: GroupedLinear) -> RecipeMLPSm90:
    """The BF16 kernels on dequantized operands, with the activation in the epilogue."""
    return RecipeMLPSm90(fc1, act, fc2)


@rule(*_fits(this.linear), phase="forward")
def recipe_linear_forward_sm90(linear: GroupedLinear) -> GroupedLinearForwardSm90:
    """One launch for all groups and the rows past them, on dequantized operands."""
    return GroupedLinearForwardSm90([linear])


@rule(*_fits(this.linear), phase="backward")
def recipe_linear_backward_sm90(linear: GroupedLinear) -> RecipeLinearBackwardSm90:
    """Two launches, data gradient and weight gradient, on dequantized operands."""
    return RecipeLinearBackwardSm90([linear])
