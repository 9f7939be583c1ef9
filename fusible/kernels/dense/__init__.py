"""Backwards of dense ops in one pass: an activation with a bias, an RMS norm with a residual."""

from __future__ import annotations

from torch import Tensor

from fusible.formulas import math_dtype
from fusible.kernels.dense import definitions, launch
from fusible.kernels.runtime.library import define


def _activation_bias_backward_fake(dy: Tensor, x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=math_dtype(x.dtype))


activation_bias_backward = define(
    "activation_bias_backward(Tensor dy, Tensor x, str activation) -> (Tensor, Tensor)",
    _activation_bias_backward_fake,
    definitions.activation_bias_backward,
    launch.activation_bias_backward,
)


def _rms_norm_backward_fake(
    dy: Tensor, x: Tensor, rstd: Tensor, gain: Tensor, addend: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=rstd.dtype)


rms_norm_backward = define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor rstd, Tensor gain, Tensor? addend) "
    "-> (Tensor, Tensor)",
    _rms_norm_backward_fake,
    definitions.rms_norm_backward,
    launch.rms_norm_backward,
)
