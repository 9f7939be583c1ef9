"""Grouped linears and grouped MLPs on Hopper, by our own SM90 kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusible.formulas import cast
from fusible.fused.direct_sm90 import DirectLinear, DirectMLP, is_plain
from fusible.fused.grouped_mlp import GROUPED_MLP, ScaledGLU
from fusible.fused.packages import CUTLASS
from fusible.fused.sm90_operands import (
    INTERLEAVES,
    as_vector,
    features_fit,
    glu_of,
    prepare,
)
from fusible.fuser.conditions import Condition, equal, multiple_of, one_of, this
from fusible.fuser.context import OperationContext
from fusible.fuser.plan import GradNeeds
from fusible.fuser.rules import rule
from fusible.fuser.tracing import hooks_hold_saved, keeps_graph
from fusible.kernels import grouped
from fusible.kernels.grouped import Glu
from fusible.kernels.sm90 import limits
from fusible.ops import FusedOperation, GroupedLinear
from fusible.ops.checks import check_row_scales
from fusible.ops.op import FusibleOperation, Grads
from fusible.ops.rows import as_2d, as_rows, with_rows_of
from fusible.ops.wgrad import laid_out


def fits(*linears: Any) -> tuple[Condition, ...]:
    """What the kernels need of the machine and of linears: their own limits, as conditions."""
    return (
        equal(this.sm, limits.ARCHITECTURE),
        CUTLASS,
        equal(this.recipe, "none"),
        one_of(linears[0].dtype, *limits.DTYPES),
        *features_fit(*linears),
    )


class GroupedLinearForwardSm90(FusedOperation):
    """Forward of one ``GroupedLinear``."""

    _basic_ops: tuple[GroupedLinear]

    def direct(self, backward: FusibleOperation, needs: Sequence[GradNeeds]) -> DirectLinear | None:
        """With the backward of this machine, or none, a plain linear."""
        (linear,), (own,) = self._basic_ops, needs
        fits = isinstance(backward, GroupedLinearBackwardSm90) or not own.requires_grad
        return DirectLinear(linear, own) if fits and is_plain(linear) else None

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
        """One grouped product."""
        (linear,), (ctx,) = self._basic_ops, basic_op_ctxs
        return grouped_linear(linear, ctx, input_, basic_op_extra_inputs[0], basic_op_kwargs[0]), [
            ()
        ]


def grouped_linear(
    linear: GroupedLinear,
    ctx: OperationContext,
    input_: Tensor,
    extra_inputs: Sequence[Tensor | None],
    kwargs: dict[str, Any],
) -> Tensor:
    """Output of a linear, which saves what it documents."""
    x, ends, row_scale, weights = linear.operands(ctx, input_, *extra_inputs)
    bias, output = linear.stacked_bias(ctx, x.dtype), linear.output_buffer(ctx, input_, kwargs)
    (x,), ((product, w),) = prepare([x], (linear, weights), bias=bias)
    y = product.forward(x, w, ends, bias, row_scale, as_rows(output))
    return with_rows_of(cast(y, ctx.dtype), input_)


class GroupedLinearBackwardSm90(FusedOperation):
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
        x, ends, row_scale, *weights, _ = ctx.saved_tensors
        dy = as_2d(cast(grad_output, ctx.dtype))
        (dy, x), ((product, w),) = prepare([dy, x], (linear, weights))
        params, extra = param_grads(linear, ctx, product, dy, x, ends, row_scale, grad_output)
        return data_grad(linear, ctx, product, w, dy, ends, grad_output), [params], [extra]


def data_grad(
    linear: GroupedLinear,
    ctx: OperationContext,
    product: Any,
    w: Any,
    dy: Tensor,
    ends: Tensor,
    grad_output: Tensor,
) -> Tensor | None:
    """The input's gradient, with the leading dimensions of ``grad_output``, from the rows dy."""
    if not ctx.needs.input:
        return None
    buffer = as_rows(linear.grad_input_buffer(ctx))
    return with_rows_of(cast(product.dgrad(dy, w, ends, buffer), ctx.dtype), grad_output)


def param_grads(
    linear: GroupedLinear,
    ctx: OperationContext,
    product: Any,
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    row_scale: Tensor | None,
    grad_output: Tensor,
) -> tuple[Grads, Grads]:
    """Gradients of the parameters and of the extra inputs."""
    dweights = weight_grads(linear, ctx, product, dy, x, ends)
    return linear.grads(ctx, dweights, dy, ends, row_scale, grad_output.shape[:-1])


def weight_grads(
    linear: GroupedLinear,
    ctx: OperationContext,
    product: Any,
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
) -> Grads:
    """Gradients of the weight parameters: all that fused ops on Hopper compute are made here."""

    def multiply(
        a: Tensor, b: Tensor, out: Sequence[Tensor] | None, accumulate: bool
    ) -> Tensor | None:
        if out is None:
            return product.wgrad(a, b, ends)
        grouped.grouped_wgrad_(out, a, b, ends, accumulate)
        return None

    return linear.weight_grads(ctx, laid_out(ctx.transposed, multiply, dy, x, ends))


class GroupedLinearGLUSm90(FusedOperation):
    """Forward of ``GroupedLinear`` and a scaled gated activation, in the product's epilogue."""

    def __init__(self, linear: GroupedLinear, act: ScaledGLU) -> None:
        super().__init__([linear, act])
        self._parts = linear, act
        self.glu = glu_of(act)

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
        """One launch; the pre-activation is stored only if a backward will read it."""
        y = linear_glu(
            *self._parts, self.glu, basic_op_ctxs, input_, basic_op_extra_inputs, basic_op_kwargs
        )
        return y, [(), ()]


def linear_glu(
    linear: GroupedLinear,
    act: ScaledGLU,
    glu: Glu,
    ctxs: Sequence[OperationContext],
    input_: Tensor,
    extra_inputs: Sequence[Sequence[Tensor | None]],
    kwargs: Sequence[dict[str, Any]],
) -> Tensor:
    """Scaled activation of a grouped product, ``[..., F]``; saves what both ops document."""
    ctx, ctx_act = ctxs
    (scales,) = extra_inputs[1]
    scales = check_row_scales(scales, input_, type(act).__name__)
    x, ends, _, weights = linear.operands(ctx, input_, *extra_inputs[0])
    bias = linear.stacked_bias(ctx, x.dtype)
    linear.output_buffer(ctx, input_, kwargs[0])  # none: it is not the last op
    (x,), ((product, w),) = prepare([x], (linear, weights), bias=bias)
    keep = ctx_act.requires_grad
    preact, out = product.glu(x, w, ends, as_vector(scales), glu, bias, keep)
    ctx_act.dtype = ctx.dtype
    if keep:
        ctx_act.held = hooks_hold_saved()
        ctx_act.save_for_backward(with_rows_of(preact, input_), scales)
    return with_rows_of(cast(out, ctx.dtype), input_)


class GroupedMLPSm90(FusedOperation):
    """``GroupedLinear`` + scaled gated activation + ``GroupedLinear``, forward and backward.

    Saves the input and the pre-activation; the activation is recomputed in the backward.
    """

    saves = "x, pre-activation, scales, end rows of the groups, row scales, weights"

    def __init__(self, fc1: GroupedLinear, act: ScaledGLU, fc2: GroupedLinear) -> None:
        super().__init__([fc1, act, fc2])
        self._parts = fc1, act, fc2
        self.glu = glu_of(act)

    def direct(self, backward: FusibleOperation, needs: Sequence[GradNeeds]) -> DirectMLP | None:
        """Plain linears."""
        fc1, _, fc2 = self._parts
        return DirectMLP(fc1, self.glu, fc2, needs) if is_plain(fc1) and is_plain(fc2) else None

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
        """Two launches."""
        fc1, act, fc2 = self._parts
        *ctxs, ctx = basic_op_ctxs
        hidden = linear_glu(
            fc1, act, self.glu, ctxs, input_, basic_op_extra_inputs, basic_op_kwargs
        )
        y = grouped_linear(fc2, ctx, hidden, basic_op_extra_inputs[2], basic_op_kwargs[2])
        # Not the activation, which the backward computes again, nor the end rows once more.
        ctx.save_for_backward(*ctx.to_save[2:])
        return y, [(), (), ()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """Four launches: FC2's data gradient with the activation's, FC1's, two weight gradients."""
        fc1, _, fc2 = self._parts
        ctx1, ctx_act, ctx2 = basic_op_ctxs
        x, ends, row_scale1, *weights1, _ = ctx1.saved_tensors
        preact, scales = ctx_act.saved_tensors
        row_scale2, *weights2, _ = ctx2.saved_tensors
        dy = as_2d(cast(grad_output, ctx2.dtype))
        (dy, x, preact), ((first, w1), (second, w2)) = prepare(
            [dy, x, as_2d(preact)], (fc1, weights1), (fc2, weights2)
        )
        dpreact, hidden, dscales = second.dglu(
            dy, w2, ends, preact, as_vector(scales), self.glu, not (ctx_act.held or keeps_graph())
        )
        params2, extra2 = param_grads(fc2, ctx2, second, dy, hidden, ends, row_scale2, grad_output)
        del hidden  # its memory serves what follows
        params1, extra1 = param_grads(fc1, ctx1, first, dpreact, x, ends, row_scale1, grad_output)
        dx = data_grad(fc1, ctx1, first, w1, dpreact, ends, grad_output)
        dscales = with_rows_of(dscales, grad_output)
        return dx, [params1, (), params2], [extra1, (dscales,), extra2]


MLP_FITS = (
    *GROUPED_MLP,
    one_of(this.act.glu_interleave_size, *INTERLEAVES),
    multiple_of(this.fc2.in_features, this.act.glu_interleave_size),
)


@rule(*fits(this.fc1, this.fc2), *MLP_FITS)
def grouped_mlp_sm90(fc1: GroupedLinear, act: ScaledGLU, fc2: GroupedLinear) -> GroupedMLPSm90:
    """Two launches forward, four backward: the activation and its backward are in epilogues."""
    return GroupedMLPSm90(fc1, act, fc2)


@rule(
    *fits(this.linear),
    equal(this.linear.scale_bias, False),
    one_of(this.act.glu_interleave_size, *INTERLEAVES),
    multiple_of(this.linear.out_features, 2 * this.act.glu_interleave_size),
    phase="forward",
)
def grouped_linear_glu_sm90(linear: GroupedLinear, act: ScaledGLU) -> GroupedLinearGLUSm90:
    """The activation is in the epilogue, on the FP32 accumulators."""
    return GroupedLinearGLUSm90(linear, act)


@rule(*fits(this.linear), phase="forward")
def grouped_linear_forward_sm90(linear: GroupedLinear) -> GroupedLinearForwardSm90:
    """One launch for all groups and the rows past them; FP16 needs no host synchronisation."""
    return GroupedLinearForwardSm90([linear])


@rule(*fits(this.linear), phase="backward")
def grouped_linear_backward_sm90(linear: GroupedLinear) -> GroupedLinearBackwardSm90:
    """Two launches, data gradient and weight gradient, without a copy of the weight."""
    return GroupedLinearBackwardSm90([linear])
