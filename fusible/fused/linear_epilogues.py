"""Matrix products that add a bias or a residual, or scale, before they round and store."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusible.formulas import cast
from fusible.fuser.conditions import equal, this
from fusible.fuser.rules import rule
from fusible.ops import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    FusedOperation,
    MakeExtraOutput,
    ReLU,
    SiLU,
)
from fusible.ops.elementary import check_addend, holds_sum
from fusible.ops.matrices import add_product
from fusible.ops.op import Contexts, ExtraTensors, FusedGrads, FusedOutputs
from fusible.ops.wgrad import dense_gradient

_NO_RECIPE = equal(this.recipe, "none")
_ONE_DTYPE = _NO_RECIPE, equal(this.linear.param_dtype, this.linear.dtype)

# --- bias and activation --------------------------------------------------------------------------


class LinearBiasActivation(FusedOperation):
    """Forward of ``activation(x @ weight.T + bias)``, with or without the activation."""

    _basic_ops: tuple[Any, ...]

    def forward_impl(self, ctxs: Contexts, input_: Tensor, extra: ExtraTensors) -> FusedOutputs:
        """One product with the bias in its epilogue, then the activation."""
        linear, _, *activations = self._basic_ops
        ctx, ctx_bias = ctxs[:2]
        x, weight = linear.operands(ctx, input_)
        linear.output_buffer(ctx, input_)  # not the last op: none
        y = F.linear(x, weight, ctx_bias.parameters[0].to(x.dtype))
        for activation in activations:  # one or none
            y = activation.forward_impl(ctxs[-1], y)
        return y, [()] * len(ctxs)


@rule(_NO_RECIPE, equal(this.bias.size, this.linear.out_features), phase="forward")
def linear_bias_activation(
    linear: BasicLinear, bias: Bias, activation: GELU | ReLU | SiLU | None
) -> LinearBiasActivation:
    """One pass over the output less: the product's epilogue adds the bias, in FP32."""
    return LinearBiasActivation([op for op in (linear, bias, activation) if op is not None])


# --- residual -------------------------------------------------------------------------------------


class LinearAdd(FusedOperation):
    """Forward of ``scale * (x @ weight.T) + addend``, with or without the scale."""

    _basic_ops: tuple[Any, ...]

    def forward_impl(self, ctxs: Contexts, input_: Tensor, extra: ExtraTensors) -> FusedOutputs:
        """One product that starts from the addend."""
        linear, *scales, add = self._basic_ops
        alpha = scales[0].scale if scales else 1.0
        x, weight = linear.operands(ctxs[0], input_)
        linear.output_buffer(ctxs[0], input_)  # none: not the last op
        shape = torch.Size((*x.shape[:-1], weight.shape[0]))
        addend = check_addend(ctxs[-1], extra[-1][0], shape, x)
        own_shape = ctxs[-1].addend_shape is None
        in_place = add.in_place and own_shape and 0 in ctxs[-1].writable_extra
        y = add_product(addend.detach(), x, weight.t(), alpha, in_place=in_place)
        return cast(y, addend.dtype) if add.in_place else y, [()] * len(ctxs)


class BackwardLinearAdd(FusedOperation):
    """Backward of ``MakeExtraOutput`` + ``BasicLinear``: ``dy @ weight`` added to ``dextra``."""

    _basic_ops: tuple[MakeExtraOutput, BasicLinear]

    writes_grads = True

    def backward_impl(self, ctxs: Contexts, dy: Tensor, dextras: ExtraTensors) -> FusedGrads:
        """One product that is added to the extra output's gradient, in its memory if it may."""
        fork, ctx = ctxs
        x, weight = ctx.saved_tensors
        dy = cast(dy, ctx.dtype)
        dextra = dextras[0][0]
        dx = None
        if ctx.needs.input and dextra is not None:
            in_place = 0 in fork.writable_extra and holds_sum(dextra, dy)
            dx = add_product(dextra, dy, weight, in_place=in_place)
        elif ctx.needs.input:
            dx = dy @ weight
        return dx, [(), self._basic_ops[1].weight_grads(ctx, dense_gradient(dy, x))], [(), ()]


@rule(*_ONE_DTYPE, phase="forward")
def linear_add(linear: BasicLinear, scale: ConstantScale | None, add: AddExtraInput) -> LinearAdd:
    """One or two passes over the output less: the epilogue adds."""
    return LinearAdd([op for op in (linear, scale, add) if op is not None])


@rule(*_ONE_DTYPE, equal(this.fork.in_place, True), phase="backward")
def backward_linear_add(fork: MakeExtraOutput, linear: BasicLinear) -> BackwardLinearAdd:
    """Two passes over the gradient less: the epilogue adds to the branch's gradient in place."""
    return BackwardLinearAdd([fork, linear])


# --- constant scale -------------------------------------------------------------------------------


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


@rule(_NO_RECIPE, phase="backward")
def backward_linear_scale(linear: BasicLinear, scale: ConstantScale) -> BackwardLinearScale:
    """One pass over the gradient less: the epilogues scale in FP32, before rounding."""
    return BackwardLinearScale([linear, scale])
