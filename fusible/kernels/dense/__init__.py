"""Backwards of dense ops in one pass: an activation with a bias, an RMS norm with a residual."""

from __future__ import annotations

from torch import Tensor

from fusible.formulas import math_dtype
from fusible.kernels.dense import cuda, definitions
from fusible.library import define


def _activation_bias_backward_fake(dy: Tensor, x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=math_dtype(x.dtype))


def _rms_norm_backward_fake(
    dy: Tensor, x: Tensor, rstd: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=rstd.dtype)


activation_bias_backward = define(
    definitions.activation_bias_backward,
    _activation_bias_backward_fake,
    [cuda.activation_bias_backward],
)
rms_norm_backward = define(
    definitions.rms_norm_backward, _rms_norm_backward_fake, [cuda.rms_norm_backward]
)
