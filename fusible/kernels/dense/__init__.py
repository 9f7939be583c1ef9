"""Backwards of dense ops in one pass, and dense products of FP8 operands with scales."""

from __future__ import annotations

from torch import Tensor

from fusible import flops
from fusible.formulas import math_dtype
from fusible.kernels.dense import cuda, definitions
from fusible.library import define
from fusible.recipes.formats import value_dtype


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


def _scaled_mm_fake(x: Tensor, w: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0], dtype=value_dtype(x.dtype))


scaled_mm = define(
    definitions.scaled_mm,
    _scaled_mm_fake,
    [cuda.scaled_mm_pytorch, cuda.scaled_mm_grouped],
    lambda x, w, *_: flops.product(x, [w]),
)
