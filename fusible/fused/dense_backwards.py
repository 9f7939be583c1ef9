"""Two backwards of neighbouring dense ops in one pass over the gradient.

The gradient of a bias is summed where the activation's is made, and that of a residual branch is
added where the norm's is made.
"""

from __future__ import annotations

from torch import Tensor

from fusible.formulas import gain
from fusible.fuser.conditions import at_least, at_most, equal, multiple_of, one_of, this, where
from fusible.fuser.rules import rule
from fusible.kernels.dense import activation_bias_backward, rms_norm_backward
from fusible.kernels.dense.spec import MAX_FEATURES, MIN_SM, VECTOR
from fusible.ops import (
    GELU,
    QGELU,
    Bias,
    FusedOperation,
    MakeExtraOutput,
    ReLU,
    RMSNorm,
    SiLU,
    SReLU,
)
from fusible.ops.casting import apply_quantizer, cast_grad
from fusible.ops.kernel_rows import CUTLASS
from fusible.ops.op import Contexts, ExtraTensors, FusedGrads

_KERNELS = [where(this.device, "cuda", has) for has in (at_least(this.sm, MIN_SM), CUTLASS)]

UnscaledFunction = GELU | QGELU | ReLU | SReLU | SiLU


class BackwardActivationBias(FusedOperation):
    """Backward of ``activation(x + bias)``."""

    _basic_ops: tuple[Bias, UnscaledFunction]

    def backward_impl(self, ctxs: Contexts, dy: Tensor, dextras: ExtraTensors) -> FusedGrads:
        """One pass over the gradient and the activation's input."""
        (bias, activation), (ctx, ctx_act) = self._basic_ops, ctxs
        (x,), dy = activation.saved_inputs(ctx_act), cast_grad(ctx_act, dy)
        rows = dy.reshape(-1, bias.size), x.reshape(-1, bias.size)
        dx: Tensor | None
        dx, dbias = activation_bias_backward(*rows, type(activation).__name__.lower())
        dx = apply_quantizer(dx.view(x.shape), ctx.grad_quantizer) if ctx.needs.input else None
        return dx, [(bias.bias_grad(dbias),), ()], [(), ()]


@rule(
    *_KERNELS,
    one_of(this.activation.dtype, "bfloat16", "float16"),
    where(this.device, "cuda", multiple_of(this.bias.size, VECTOR)),
    equal(this.bias.params_require_grad, True),
    phase="backward",
)
def backward_activation_bias(bias: Bias, activation: UnscaledFunction) -> BackwardActivationBias:
    """One pass over the gradient less: the pass that computes it sums it over rows, in FP32."""
    return BackwardActivationBias([bias, activation])


class BackwardAddRMSNorm(FusedOperation):
    """Backward of ``MakeExtraOutput`` + ``RMSNorm``."""

    _basic_ops: tuple[MakeExtraOutput, RMSNorm]

    def backward_impl(self, ctxs: Contexts, dy: Tensor, dextras: ExtraTensors) -> FusedGrads:
        """One pass over the gradients of both outputs and the norm's input."""
        (_, norm), (_, ctx) = self._basic_ops, ctxs
        x, rstd, weight = ctx.saved_tensors
        rows = cast_grad(ctx, dy).reshape(x.shape)
        dextra = dextras[0][0]
        factor = gain(weight.view(-1), rstd.dtype, norm.zero_centered_gamma)
        # Under autocast the branch may be wider than the norm; its gradient stays so.
        wider = dextra is not None and dextra.dtype != x.dtype
        addend = None if dextra is None or wider else dextra.reshape(x.shape)
        dx, dweight = rms_norm_backward(rows, x, rstd, factor, addend)
        dx = dx.view(dy.shape)
        if dextra is not None and wider:
            dx = dextra + dx
        return dx, [(), (dweight.view(weight.shape),)], [(), ()]


@rule(
    *_KERNELS,
    one_of(this.norm.dtype, "bfloat16", "float16"),
    where(this.device, "cuda", multiple_of(this.norm.features, VECTOR)),
    where(this.device, "cuda", at_most(this.norm.features, MAX_FEATURES)),
    equal(this.fork.in_place, False),
    phase="backward",
)
def backward_add_rms_norm(fork: MakeExtraOutput, norm: RMSNorm) -> BackwardAddRMSNorm:
    """Two passes over the gradient less: the norm's backward adds the branch's, in FP32."""
    return BackwardAddRMSNorm([fork, norm])
