"""Backwards of dense ops in one pass, and dense products of FP8 operands with scales."""

from __future__ import annotations

from fusible import flops
from fusible.formulas import math_dtype
from fusible.kernels.dense import cuda, definitions
from fusible.library import define
from fusible.recipes.formats import value_dtype

activation_bias_backward = define(
    definitions.activation_bias_backward,
    lambda dy, x, _: (x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=math_dtype(x.dtype))),
    [cuda.activation_bias_backward],
)
rms_norm_backward = define(
    definitions.rms_norm_backward,
    lambda dy, x, rstd, *_: (x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=rstd.dtype)),
    [cuda.rms_norm_backward],
)
scaled_mm = define(
    definitions.scaled_mm,
    lambda x, w, *_: x.new_empty(x.shape[0], w.shape[0], dtype=value_dtype(x.dtype)),
    [cuda.scaled_mm_pytorch, cuda.scaled_mm_grouped],
    lambda x, w, *_: flops.product(x, [w]),
)
