"""The dense backwards as ``torch.library`` ops: the contract, and its definition in PyTorch.

Arithmetic and sums are in FP32 (FP64 for FP64); only results are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusible import formulas
from fusible.formulas import cast, math_dtype
from fusible.kernels.library import define

ACTIVATIONS = {
    "gelu": formulas.GELU,
    "qgelu": formulas.QGELU,
    "relu": formulas.RELU,
    "srelu": formulas.SRELU,
    "silu": formulas.SILU,
}


def activation_bias_backward_definition(
    dy: Tensor, x: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """``dx = dy * slope(x)`` for ``[rows, F]``, and its sum over rows, ``[F]`` in FP32."""
    wide = math_dtype(x.dtype)
    dx = ACTIVATIONS[activation].backward(cast(dy, wide), cast(x, wide))
    return cast(dx, x.dtype), dx.sum(0)


def _activation_bias_backward_fake(dy: Tensor, x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=math_dtype(x.dtype))


define(
    "activation_bias_backward(Tensor dy, Tensor x, str activation) -> (Tensor, Tensor)",
    _activation_bias_backward_fake,
    activation_bias_backward_definition,
)


def rms_norm_backward_definition(
    dy: Tensor, x: Tensor, rstd: Tensor, gain: Tensor, addend: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``formulas.rms_norm_backward`` with ``addend`` ``[rows, F]`` added to the gradient of x.

    ``gain`` ``[F]`` is what the norm multiplies by, in FP32, as its gradient.
    """
    dx, dgain = formulas.rms_norm_backward(dy, x, rstd, gain)
    if addend is not None:
        dx = dx + addend
    return cast(dx, x.dtype), dgain


def _rms_norm_backward_fake(
    dy: Tensor, x: Tensor, rstd: Tensor, gain: Tensor, addend: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=rstd.dtype)


define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor rstd, Tensor gain, Tensor? addend) "
    "-> (Tensor, Tensor)",
    _rms_norm_backward_fake,
    rms_norm_backward_definition,
)

activation_bias_backward = torch.ops.fusible.activation_bias_backward.default
rms_norm_backward = torch.ops.fusible.rms_norm_backward.default
