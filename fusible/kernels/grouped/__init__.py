"""Grouped matrix products as ``torch.library`` ops: one op a product, for every device.

Rows of ``x`` are sorted by group; group e owns rows ``ends[e-1]`` to ``ends[e]``. ``ends`` is
int32 ``[E]`` on the device of ``x``, non-decreasing and at most the number of rows. Rows past the
last end (the tail) give zero output and take no part in any gradient; without ``zero_tail``, an
argument of direct calls, their output may be anything. An empty group's weight and bias gradients
are exactly zero. Weights are one tensor ``[E, N, K]`` or E of ``[N, K]``; operands may have any
strides.

On the CPU the ops are their definitions (`definitions`, `groups`, `bias_gradients`), of any
floating dtype. On CUDA the first of these that supports a call runs: our kernels for SM90, of BF16
and FP16 (`fusible.kernels.sm90.limits`); PyTorch's grouped product, of BF16 on SM 9.0 and 10.x;
kernels in Triton (`portable`), of BF16, FP16 and FP32; the definition, which reads the end rows on
the host. An activation, or its quantization, that no epilogue has runs after its product.

Where a plan has shown that operands need no check, `sm90.grouped_products` gives the launches of
our kernels themselves (`fusible.ops.grouped_fast_path`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible import flops
from fusible.formulas import math_dtype
from fusible.kernels import few_rows
from fusible.kernels.grouped import bias_gradients, definitions, groups, portable, pytorch
from fusible.kernels.sm90 import checked_products as sm90
from fusible.library import define
from fusible.recipes.formats import value_dtype

# --- groups ---------------------------------------------------------------------------------------


group_ends = define(
    groups.group_ends,
    lambda sizes, rows: sizes.new_empty(sizes.shape, dtype=torch.int32),
    [sm90.group_ends],
)
check_alignment = define(groups.check_alignment)


# --- products of rows -----------------------------------------------------------------------------


def _grouped_mm_fake(x: Tensor, w: Sequence[Tensor], *rest: Any) -> Tensor:
    *_, transpose_w, _x_scale, _w_scale = rest
    shape = x.shape[0], w[0].shape[-1 if transpose_w else -2]
    return x.new_empty(shape, dtype=value_dtype(x.dtype))


_grouped_mm = define(
    definitions.grouped_mm,
    _grouped_mm_fake,
    [sm90.grouped_mm, pytorch.grouped_mm, portable.grouped_mm],
    flops.product,
)


def grouped_mm(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    transpose_w: bool = False,
    out: Tensor | None = None,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    *,
    zero_tail: bool = True,
    reads_ahead: bool = False,
) -> Tensor:
    """`definitions.grouped_mm`, in ``out`` if given."""
    memory = None if out is None or out.dtype != value_dtype(x.dtype) else out
    options = bias, row_scale, transpose_w, x_scale, w_scale
    y = _grouped_mm(x, w, ends, *options, out=memory, zero_tail=zero_tail, reads_ahead=reads_ahead)
    return y if out is None or y is out else out.copy_(y)


# --- products with an activation, and with weights as they are stored -----------------------------


# In terms of the other ops: where no kernel supports a call, and, by their fakes, on fake tensors.
_composed_glu = partial(definitions.grouped_glu, product=_grouped_mm)
grouped_glu = define(
    definitions.grouped_glu,
    _composed_glu,
    [sm90.grouped_glu, _composed_glu],
    flops.product,
)
_composed_glu_quantized = partial(definitions.grouped_glu_quantized, product=grouped_glu)
grouped_glu_quantized = define(
    definitions.grouped_glu_quantized,
    _composed_glu_quantized,
    [sm90.grouped_glu, _composed_glu_quantized],
    flops.product,
)
_composed_dglu = partial(definitions.grouped_dglu, product=_grouped_mm)
grouped_dglu = define(
    definitions.grouped_dglu,
    _composed_dglu,
    [sm90.grouped_dglu, _composed_dglu],
    lambda dy, w, ends, preact, *_: dy.numel() * preact.shape[1],
)
_composed_mm_stored = partial(definitions.grouped_mm_stored, product=_grouped_mm)
grouped_mm_stored = define(
    definitions.grouped_mm_stored,
    _composed_mm_stored,
    [few_rows.grouped_mm_stored, _composed_mm_stored],
    flops.stored_product,
)
_composed_glu_stored = partial(definitions.grouped_glu_stored, product=grouped_glu)
grouped_glu_stored = define(
    definitions.grouped_glu_stored,
    _composed_glu_stored,
    [few_rows.grouped_glu_stored, _composed_glu_stored],
    flops.stored_product,
)


# --- gradients of weights and biases --------------------------------------------------------------


def _grouped_wgrad_fake(
    dy: Tensor, x: Tensor, ends: Tensor, out_dtype: torch.dtype | None, *_: Any
) -> Tensor:
    shape = ends.shape[0], dy.shape[1], x.shape[1]
    return dy.new_empty(shape, dtype=out_dtype or value_dtype(dy.dtype))


grouped_wgrad = define(
    definitions.grouped_wgrad,
    _grouped_wgrad_fake,
    [sm90.grouped_wgrad, pytorch.grouped_wgrad, portable.grouped_wgrad],
    flops.wgrad,
)
grouped_wgrad_ = define(
    definitions.grouped_wgrad_,
    cuda=[
        sm90.grouped_wgrad_,
        partial(definitions.grouped_wgrad_, product=pytorch.grouped_wgrad, rounds=True),
        partial(definitions.grouped_wgrad_, product=portable.grouped_wgrad),
    ],
    flops=lambda out, *operands: flops.wgrad(*operands),
)


def _grouped_dots_fake(dy: Tensor, bias: Tensor, ends: Tensor, index: Tensor | None) -> Tensor:
    rows = dy if index is None else index
    return dy.new_empty(rows.shape[0], dtype=math_dtype(dy.dtype))


grouped_sum = define(
    bias_gradients.grouped_sum,
    lambda dy, ends, *_: dy.new_empty(ends.shape[0], dy.shape[1]),
    [bias_gradients.grouped_sum_cuda],
)
grouped_dots = define(
    bias_gradients.grouped_dots, _grouped_dots_fake, [bias_gradients.grouped_dots_cuda]
)
