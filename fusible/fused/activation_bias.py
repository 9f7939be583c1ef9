"""Activation + bias, backward: the bias' gradient is summed where the activation's is made."""

from __future__ import annotations

from torch import Tensor

from fusible.fused.kernel_selection import CUTLASS
from fusible.fuser.conditions import at_least, equal, multiple_of, one_of, this, where
from fusible.fuser.rules import rule
from fusible.kernels.dense import activation_bias_backward
from fusible.kernels.dense.spec import MIN_SM, VECTOR
from fusible.ops import GELU, QGELU, Bias, FusedOperation, ReLU, SiLU, SReLU
from fusible.ops.casting import apply_quantizer, cast_grad
from fusible.ops.op import Contexts, ExtraTensors, FusedGrads

UnscaledFunction = GELU | QGELU | ReLU | SReLU | SiLU


class BackwardActivationBias(FusedOperation):
    """Backward of ``activation(x + bias)``."""

    _basic_ops: tuple[Bias, UnscaledFunction]

    def backward_impl(self, ctxs: Contexts, dy: Tensor, dextras: ExtraTensors) -> FusedGrads:
        """One pass over the gradient and the activation's input."""
        (bias, activation), (ctx, ctx_act) = self._basic_ops, ctxs
        x, dy = activation.saved_input(ctx_act), cast_grad(ctx_act, dy)
        rows = dy.reshape(-1, bias.size), x.reshape(-1, bias.size)
        dx: Tensor | None
        dx, dbias = activation_bias_backward(*rows, type(activation).__name__.lower())
        dx = apply_quantizer(dx.view(x.shape), ctx.grad_quantizer) if ctx.needs.input else None
        return dx, [(bias.bias_grad(dbias),), ()], [(), ()]


@rule(
    where(this.device, "cuda", at_least(this.sm, MIN_SM)),
    where(this.device, "cuda", CUTLASS),
    one_of(this.activation.dtype, "bfloat16", "float16"),
    where(this.device, "cuda", multiple_of(this.bias.size, VECTOR)),
    equal(this.bias.params_require_grad, True),
    phase="backward",
)
def backward_activation_bias(bias: Bias, activation: UnscaledFunction) -> BackwardActivationBias:
    """One pass over the gradient less: the pass that computes it sums it over rows, in FP32."""
    return BackwardActivationBias([bias, activation])
