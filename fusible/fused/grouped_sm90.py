"""Grouped linears and grouped MLPs on Hopper, by our own SM90 kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.fused.sm90_operands import (
    INTERLEAVES,
    ScaledGLU,
    as_matrix,
    as_rows,
    as_vector,
    features_fit,
    glu_options,
    kernel_operands,
    readable,
    with_shape,
)
from fusible.fuser.conditions import equal, multiple_of, one_of, this
from fusible.fuser.context import OperationContext
from fusible.fuser.rules import rule
from fusible.fuser.tracing import keeps_graph
from fusible.kernels.provider import provider
from fusible.kernels.sm90 import limits
from fusible.ops import FusedOperation, GroupedLinear
from fusible.ops.activation import check_row_scales
from fusible.ops.op import Grads
from fusible.ops.wgrad import add_or_copy, laid_out_as

# What the kernels need of the machine and of a GroupedLinear: their own limits, as conditions.
_MACHINE = (
    equal(this.sm, limits.ARCHITECTURE),
    equal(this.recipe, "none"),
    one_of(this.dtype, *limits.DTYPES),
)


class GroupedLinearForwardSm90(FusedOperation):
    """Forward of one ``GroupedLinear``."""

    def __init__(self, linear: GroupedLinear) -> None:
        super().__init__([linear])
        self._parts = (linear,)

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
        kernels = provider("sm90")
        (linear,), (ctx,) = self._parts, basic_op_ctxs
        x, ends, row_scale, weights = kernel_operands(
            kernels, linear, ctx, input_, *basic_op_extra_inputs[0]
        )
        bias = linear.stacked_bias(ctx.dtype)
        output = linear.output_buffer(ctx, input_, basic_op_kwargs[0])
        y = kernels.grouped_gemm(x, weights, ends, bias, row_scale, out=as_rows(output))
        return with_shape(y, input_.shape[:-1]), [()]


class GroupedLinearBackwardSm90(FusedOperation):
    """Backward of one ``GroupedLinear``."""

    def __init__(self, linear: GroupedLinear) -> None:
        super().__init__([linear])
        self._parts = (linear,)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """Two grouped products."""
        kernels = provider("sm90")
        (linear,), (ctx,) = self._parts, basic_op_ctxs
        x, ends, row_scale, *weights = ctx.saved_tensors
        dy = as_matrix(kernels, cast(grad_output, ctx.dtype))
        rows = grad_output.shape[:-1]
        params, extra = param_grads(linear, ctx, dy, x, ends, row_scale, rows)
        return data_grad(linear, ctx, dy, ends, weights, grad_output), [params], [extra]


def data_grad(
    linear: GroupedLinear,
    ctx: OperationContext,
    dy: Tensor,
    ends: Tensor,
    weights: Sequence[Tensor],
    grad_output: Tensor,
    prepared: Callable[..., Tensor] | None = None,
) -> Tensor | None:
    """The input's gradient, with the leading dimensions of ``grad_output``, from the rows dy."""
    if not ctx.needs.input:
        return None
    buffer = as_rows(linear.grad_input_buffer(ctx, grad_output))
    if prepared is not None and buffer is None:
        dx = prepared(dy, weights[0], ends)
    else:
        kernels = provider("sm90")
        w = readable(kernels, weights)
        dx = kernels.grouped_gemm(dy, w, ends, transpose_w=True, out=buffer)
    return with_shape(dx, grad_output.shape[:-1])


def activation_grad(
    act: ScaledGLU, ctx: OperationContext, dy: Tensor, ends: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the pre-activation, the activation once more, gradient of the scales.

    From the next linear's rows ``dy`` and its weights; the first may overwrite what was saved.
    """
    kernels = provider("sm90")
    preact, scales = ctx.saved_tensors
    return kernels.grouped_gemm_dglu(
        dy,
        readable(kernels, weights),
        ends,
        as_matrix(kernels, preact),
        as_vector(scales),
        overwrite=not keeps_graph(),
        **glu_options(act),
    )


def param_grads(
    linear: GroupedLinear,
    ctx: OperationContext,
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    row_scale: Tensor | None,
    shape: Sequence[int],
    prepared: Callable[..., Tensor] | None = None,
) -> tuple[Grads, Grads]:
    """Gradients of the parameters and of the extra inputs, the latter of ``shape``."""
    dbiases = linear.bias_grads(ctx, dy, ends, row_scale)
    dscales = linear.scale_grad(ctx, dy, ends, shape)
    return (*weight_grads(linear, ctx, dy, x, ends, prepared), *dbiases), (None, *dscales)


def weight_grads(
    linear: GroupedLinear,
    ctx: OperationContext,
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    prepared: Callable[..., Tensor] | None = None,
) -> Grads:
    """Gradients of the weight parameters: all that this module computes are made here.

    ``prepared`` is the product for operands that need no look at their layout.
    """
    kernels = provider("sm90")

    def product(
        a: Tensor, b: Tensor, out: Sequence[Tensor] | None, accumulate: bool
    ) -> Tensor | None:
        if out is None and prepared is not None:
            return prepared(a, b, ends)
        a, b = as_matrix(kernels, a), as_matrix(kernels, b)
        if out is None:
            return kernels.grouped_wgrad(a, b, ends)
        if kernels.takes_wgrad(out, a.dtype):
            kernels.grouped_wgrad_(list(out), a, b, ends, accumulate)
            return None
        buffers = out[0].unbind(0) if out[0].dim() == 3 else out
        dw = kernels.grouped_wgrad(a, b, ends, torch.float32)
        add_or_copy(buffers, dw, [not accumulate] * len(buffers))
        return None

    return linear.weight_grads(ctx, laid_out_as(linear.weights()[0], product, dy, x))


class GroupedLinearGLUSm90(FusedOperation):
    """Forward of ``GroupedLinear`` and a scaled gated activation, in the product's epilogue."""

    def __init__(self, linear: GroupedLinear, act: ScaledGLU) -> None:
        super().__init__([linear, act])
        self._parts = linear, act

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
        y = linear_glu(*self._parts, basic_op_ctxs, input_, basic_op_extra_inputs, basic_op_kwargs)
        return y, [(), ()]


def linear_glu(
    linear: GroupedLinear,
    act: ScaledGLU,
    ctxs: Sequence[OperationContext],
    input_: Tensor,
    extra_inputs: Sequence[Sequence[Tensor | None]],
    kwargs: Sequence[dict[str, Any]],
) -> Tensor:
    """Scaled activation of a grouped product, ``[..., F]``; saves what both ops document."""
    kernels = provider("sm90")
    x, ends, _, weights = kernel_operands(kernels, linear, ctxs[0], input_, *extra_inputs[0])
    linear.output_buffer(ctxs[0], input_, kwargs[0])  # none: it is not the last op
    scales = _scales(act, input_, extra_inputs[1])
    keep, shape = ctxs[1].requires_grad, input_.shape[:-1]
    preact, out = kernels.grouped_gemm_glu(
        x,
        weights,
        ends,
        as_vector(scales),
        bias=linear.stacked_bias(ctxs[0].dtype),
        store_preact=keep,
        **glu_options(act),
    )
    _keep(ctxs[1], preact, scales, shape)
    return with_shape(out, shape)


def _scales(act: ScaledGLU, input_: Tensor, extra_inputs: Sequence[Tensor | None]) -> Tensor:
    (scales,) = extra_inputs
    check_row_scales(scales, input_, type(act).__name__)
    assert scales is not None
    return scales


def _keep(ctx: OperationContext, preact: Tensor, scales: Tensor, shape: Sequence[int]) -> None:
    """Save what the activation documents, if its backward will run."""
    ctx.dtype = preact.dtype
    if ctx.requires_grad:
        ctx.save_for_backward(with_shape(preact, shape), scales)


class GroupedMLPSm90(FusedOperation):
    """``GroupedLinear`` + scaled gated activation + ``GroupedLinear``, forward and backward.

    Saves the input and the pre-activation; the activation is recomputed in the backward.
    """

    saves = "x, pre-activation, scales, end rows of the groups, row scales, weights"

    def __init__(self, fc1: GroupedLinear, act: ScaledGLU, fc2: GroupedLinear) -> None:
        super().__init__([fc1, act, fc2])
        self._parts = fc1, act, fc2

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
        if not any(basic_op_kwargs):
            y = self._forward_prepared(basic_op_ctxs, input_, basic_op_extra_inputs)
            if y is not None:
                return y, [(), (), ()]
        kernels = provider("sm90")
        fc1, act, fc2 = self._parts
        ctx = basic_op_ctxs[2]
        hidden = linear_glu(
            fc1, act, basic_op_ctxs[:2], input_, basic_op_extra_inputs[:2], basic_op_kwargs
        )
        x, ends, row_scale, weights = kernel_operands(
            kernels, fc2, ctx, hidden, *basic_op_extra_inputs[2]
        )
        bias = fc2.stacked_bias(ctx.dtype)
        output = fc2.output_buffer(ctx, hidden, basic_op_kwargs[2])
        y = kernels.grouped_gemm(x, weights, ends, bias, row_scale, out=as_rows(output))
        # Not the activation, which the backward computes again.
        ctx.save_for_backward(row_scale, *weights)
        return with_shape(y, input_.shape[:-1]), [(), (), ()]

    def _prepared(
        self,
        kernels: Any,
        rows: Sequence[Tensor],
        weights1: Sequence[Tensor],
        weights2: Sequence[Tensor],
        scales: Tensor,
    ) -> Any:
        """The kernels with all that layouts decide behind them, or None where that takes more."""
        fc1, act, fc2 = self._parts
        if fc1.has_bias or fc2.has_bias:
            return None
        return kernels.prepared_mlp(rows, weights1, weights2, scales, **glu_options(act))

    def _forward_prepared(
        self,
        ctxs: Sequence[OperationContext],
        input_: Tensor,
        extra_inputs: Sequence[Sequence[Tensor | None]],
    ) -> Tensor | None:
        """The forward by prepared launches, if the operands allow it; else None."""
        kernels = provider("sm90")
        fc1, act, fc2 = self._parts
        ctx1, ctx_act, ctx2 = ctxs
        weights2, scales = fc2.weights(), _scales(act, input_, extra_inputs[1])
        x, ends, _, weights1 = fc1.operands(
            ctx1, input_, *extra_inputs[0], ends_of=kernels.group_ends
        )
        products = self._prepared(kernels, [x], weights1, weights2, scales)
        if products is None:
            return None
        shape = input_.shape[:-1]
        preact, hidden = products.glu(x, weights1[0], ends, scales, ctx_act.requires_grad)
        _keep(ctx_act, preact, scales, shape)
        ctx2.dtype = x.dtype
        ctx2.save_for_backward(None, *weights2)
        return with_shape(products.fc2(hidden, weights2[0], ends), shape)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """Four launches: FC2's data gradient with the activation's, FC1's, two weight gradients."""
        kernels = provider("sm90")
        fc1, act, fc2 = self._parts
        ctx1, ctx_act, ctx2 = basic_op_ctxs
        x, ends, row_scale1, *weights1 = ctx1.saved_tensors
        preact, scales = ctx_act.saved_tensors
        row_scale2, *weights2 = ctx2.saved_tensors
        shape = grad_output.shape[:-1]
        dy = as_matrix(kernels, cast(grad_output, ctx2.dtype))
        preact = as_matrix(kernels, preact)
        products = self._prepared(kernels, [x, dy, preact], weights1, weights2, scales)
        if products is None:
            dpreact, hidden, dscales = activation_grad(act, ctx_act, dy, ends, weights2)
        else:
            dpreact, hidden, dscales = products.dglu(
                dy, weights2[0], ends, preact, scales, not keeps_graph()
            )
        wgrad1, wgrad2 = (products.wgrad1, products.wgrad2) if products else (None, None)
        params2, extra2 = param_grads(fc2, ctx2, dy, hidden, ends, row_scale2, shape, wgrad2)
        del hidden  # its memory serves what follows
        params1, extra1 = param_grads(fc1, ctx1, dpreact, x, ends, row_scale1, shape, wgrad1)
        dgrad = products.dgrad1 if products else None
        dx = data_grad(fc1, ctx1, dpreact, ends, weights1, grad_output, dgrad)
        return dx, [params1, (), params2], [extra1, (with_shape(dscales, shape),), extra2]


MLP_NEEDS = (
    *_MACHINE,
    *features_fit(this.fc1, this.fc2),
    equal(this.fc1.num_groups, this.fc2.num_groups),
    equal(this.fc1.out_features, 2 * this.fc2.in_features),
    equal(this.fc1.split_sizes.source, this.fc2.split_sizes.source),
    equal(this.fc1.scale_bias, False),
    # Its backward reads what the first two ops save, which ops without a backward do not.
    equal(this.fc1.requires_grad, this.fc2.requires_grad),
    equal(this.act.requires_grad, this.fc2.requires_grad),
    one_of(this.act.glu_interleave_size, *INTERLEAVES),
    multiple_of(this.fc2.in_features, this.act.glu_interleave_size),
)


@rule(*MLP_NEEDS)
def grouped_mlp_sm90(fc1: GroupedLinear, act: ScaledGLU, fc2: GroupedLinear) -> GroupedMLPSm90:
    """Two launches forward, four backward: activations and their gradients never travel alone."""
    return GroupedMLPSm90(fc1, act, fc2)


@rule(
    *_MACHINE,
    *features_fit(this.linear),
    equal(this.linear.scale_bias, False),
    one_of(this.act.glu_interleave_size, *INTERLEAVES),
    multiple_of(this.linear.out_features, 2 * this.act.glu_interleave_size),
    phase="forward",
)
def grouped_linear_glu_sm90(linear: GroupedLinear, act: ScaledGLU) -> GroupedLinearGLUSm90:
    """The activation is taken from the product's accumulators, in FP32."""
    return GroupedLinearGLUSm90(linear, act)


@rule(*_MACHINE, *features_fit(this.linear), phase="forward")
def grouped_linear_forward_sm90(linear: GroupedLinear) -> GroupedLinearForwardSm90:
    """One launch over device-side groups, tail included, FP16 without a synchronisation too."""
    return GroupedLinearForwardSm90(linear)


@rule(*_MACHINE, *features_fit(this.linear), phase="backward")
def grouped_linear_backward_sm90(linear: GroupedLinear) -> GroupedLinearBackwardSm90:
    """Two launches: data gradient and weight gradient from the parameter as it lies."""
    return GroupedLinearBackwardSm90(linear)
