"""Grouped matrix products as ``torch.library`` ops: one op a product, for every device.

Rows of ``x`` are sorted by group; group e owns rows ``ends[e-1]`` to ``ends[e]``. ``ends`` is
int32 ``[E]`` on the device of ``x``, non-decreasing and at most the number of rows. Rows past the
last end (the tail) give zero output and take no part in any gradient; an empty group's weight and
bias gradients are exactly zero. Weights are one tensor ``[E, N, K]`` or E of ``[N, K]``; operands
may have any strides.

On the CPU the ops are their definitions (`definitions`), of any floating dtype; `cuda` says which
kernels run them on a GPU. None synchronises there, but those of FP16 and FP32 that no kernel of
ours takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.formulas import math_dtype
from fusible.kernels.glu import Glu
from fusible.kernels.grouped import bias_gradients, cuda, definitions
from fusible.kernels.grouped.groups import (
    check_alignment_definition,
    checking,
    checks_enabled,
    group_ends_definition,
    row_groups,
)
from fusible.kernels.runtime import flops
from fusible.kernels.runtime.library import define
from fusible.kernels.stacking import side_by_side, stacked

__all__ = [
    "Glu",
    "check_alignment",
    "checking",
    "checks_enabled",
    "group_ends",
    "grouped_dglu",
    "grouped_dots",
    "grouped_glu",
    "grouped_mm",
    "grouped_sum",
    "grouped_wgrad",
    "grouped_wgrad_",
    "row_groups",
    "side_by_side",
    "stacked",
]

_GLU = "str activation, int interleave, float limit, float alpha, float offset"
_BIAS = "Tensor? bias, Tensor? row_scale, bool transpose_w"


def _nothing(*_: object) -> None:
    """The fake of an op that only writes to what it is given, or only checks it."""


# --- groups ---------------------------------------------------------------------------------------


def _group_ends_fake(split_sizes: Tensor, rows: int) -> Tensor:
    return split_sizes.new_empty(split_sizes.shape, dtype=torch.int32)


_group_ends = define(
    "group_ends(Tensor split_sizes, SymInt rows) -> Tensor",
    _group_ends_fake,
    group_ends_definition,
    cuda.group_ends,
)


def group_ends(split_sizes: Tensor, rows: int) -> Tensor:
    """First row past each group, int32 ``[E]``, from the integers ``split_sizes``.

    On a device negative sizes count as 0 and groups end at ``rows``; on the host, or under
    `checking`, they raise ValueError.
    """
    return _group_ends(split_sizes, rows)


_check_alignment = define(
    "check_alignment(Tensor split_sizes, int alignment) -> ()",
    _nothing,
    check_alignment_definition,
    check_alignment_definition,
)


def check_alignment(split_sizes: Tensor, alignment: int) -> None:
    """Raise ValueError for sizes that the host may see and that are not whole ``alignment``."""
    _check_alignment(split_sizes, alignment)


# --- products of rows -----------------------------------------------------------------------------


def _grouped_mm_fake(x: Tensor, w: list[Tensor], ends: Tensor, *rest: Any) -> Tensor:
    *_, transpose_w = rest
    return x.new_empty(x.shape[0], w[0].shape[-1 if transpose_w else -2])


_grouped_mm = define(
    f"grouped_mm(Tensor x, Tensor[] w, Tensor ends, {_BIAS}) -> Tensor",
    _grouped_mm_fake,
    definitions.grouped_mm,
    cuda.grouped_mm,
    flops.product,
)
_grouped_mm_ = define(
    f"grouped_mm_(Tensor(a!) out, Tensor x, Tensor[] w, Tensor ends, {_BIAS}) -> ()",
    _nothing,
    definitions.grouped_mm_,
    cuda.grouped_mm_,
    flops.product_into,
)


def grouped_mm(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    transpose_w: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ w[e].T + bias[e] * row_scale`` for the rows of each group e, in ``out`` if given.

    With ``transpose_w``, ``x @ w[e]``: the data gradient, from the same parameter. ``bias`` is
    ``[E, N]``, ``row_scale`` has one value for each row.
    """
    if out is None or out.dtype != x.dtype:
        y = _grouped_mm(x, w, ends, bias, row_scale, transpose_w)
        return y if out is None else out.copy_(y)
    _grouped_mm_(out, x, w, ends, bias, row_scale, transpose_w)
    return out


# --- products with an activation ------------------------------------------------------------------


def _of_glu(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    """``function`` of a `Glu`, of its fields at position ``after``, as a schema has them."""

    def flat(*args: Any, **direct_only: Any) -> Any:
        end = after + len(Glu._fields)
        return function(*args[:after], Glu(*args[after:end]), *args[end:], **direct_only)

    return flat


def _grouped_glu_fake(x: Tensor, w: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    *_, save_preact = rest
    rows, features = x.shape[0], w[0].shape[-2]
    return x.new_empty(rows if save_preact else 0, features), x.new_empty(rows, features // 2)


_grouped_glu = define(
    f"grouped_glu(Tensor x, Tensor[] w, Tensor ends, Tensor? scales, {_GLU}, Tensor? bias, "
    "bool save_preact) -> (Tensor, Tensor)",
    _grouped_glu_fake,
    _of_glu(definitions.grouped_glu, 4),
    _of_glu(cuda.grouped_glu, 4),
    lambda x, w, *_: flops.product(x, w, False),
)


def grouped_glu(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    scales: Tensor | None,
    glu: Glu,
    bias: Tensor | None = None,
    save_preact: bool = True,
) -> tuple[Tensor, Tensor]:
    """``preact = x @ w[e].T + bias[e]`` and ``glu(preact) * scales``, one scale for each row.

    With None the activation is not scaled. Without ``save_preact`` the first result has no rows.
    """
    return _grouped_glu(x, w, ends, scales, *glu, bias, save_preact)


def _grouped_dglu_fake(
    dy: Tensor, w: list[Tensor], ends: Tensor, preact: Tensor, scales: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    rows, features = dy.shape[0], w[0].shape[-1]
    act, dscales = dy.new_empty(rows, features), torch.empty_like(scales)
    return dy.new_empty(rows, 2 * features), act, dscales


_grouped_dglu = define(
    f"grouped_dglu(Tensor dy, Tensor[] w, Tensor ends, Tensor preact, Tensor scales, {_GLU}) "
    "-> (Tensor, Tensor, Tensor)",
    _grouped_dglu_fake,
    _of_glu(definitions.grouped_dglu, 5),
    _of_glu(cuda.grouped_dglu, 5),
    lambda dy, w, *_: flops.product(dy, w, True),
)


def grouped_dglu(
    dy: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    preact: Tensor,
    scales: Tensor,
    glu: Glu,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of the activation between two grouped linears, in the second one's data gradient.

    With ``d = dy @ w[e]``, gives the gradient of ``preact`` (in its layout of columns), the
    activation ``glu(preact) * scales`` once more (for the weight gradient of the second linear),
    and the gradient of ``scales``. With ``overwrite`` the first may take the memory of ``preact``.
    """
    return _grouped_dglu(dy, w, ends, preact, scales, *glu, overwrite=overwrite)


# --- weight gradients -----------------------------------------------------------------------------


def _grouped_wgrad_fake(
    dy: Tensor, x: Tensor, ends: Tensor, out_dtype: torch.dtype | None
) -> Tensor:
    shape = ends.shape[0], dy.shape[1], x.shape[1]
    return dy.new_empty(shape, dtype=out_dtype or dy.dtype)


_grouped_wgrad = define(
    "grouped_wgrad(Tensor dy, Tensor x, Tensor ends, ScalarType? out_dtype) -> Tensor",
    _grouped_wgrad_fake,
    definitions.grouped_wgrad,
    cuda.grouped_wgrad,
    flops.wgrad,
)
_grouped_wgrad_ = define(
    "grouped_wgrad_(Tensor(a!)[] out, Tensor dy, Tensor x, Tensor ends, bool accumulate) -> ()",
    _nothing,
    definitions.grouped_wgrad_,
    cuda.grouped_wgrad_,
    flops.wgrad_into,
)


def grouped_wgrad(
    dy: Tensor, x: Tensor, ends: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``dy[rows of e].T @ x[rows of e]`` for each group e, ``[E, N, K]``; zeros for no rows."""
    return _grouped_wgrad(dy, x, ends, out_dtype)


def grouped_wgrad_(
    out: Sequence[Tensor], dy: Tensor, x: Tensor, ends: Tensor, accumulate: bool = False
) -> None:
    """`grouped_wgrad` into one tensor ``[E, N, K]`` or E of ``[N, K]``, or added to them."""
    _grouped_wgrad_(out, dy, x, ends, accumulate)


# --- gradients of biases --------------------------------------------------------------------------


def _grouped_sum_fake(dy: Tensor, ends: Tensor, row_scale: Tensor | None) -> Tensor:
    return dy.new_empty(ends.shape[0], dy.shape[1])


_grouped_sum = define(
    "grouped_sum(Tensor dy, Tensor ends, Tensor? row_scale) -> Tensor",
    _grouped_sum_fake,
    bias_gradients.grouped_sum_definition,
    bias_gradients.grouped_sum_cuda,
)


def grouped_sum(dy: Tensor, ends: Tensor, row_scale: Tensor | None = None) -> Tensor:
    """The bias gradient: the sum of each group's rows of dy, times row_scale, ``[E, N]``."""
    return _grouped_sum(dy, ends, row_scale)


def _grouped_dots_fake(dy: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    return dy.new_empty(dy.shape[0], dtype=math_dtype(dy.dtype))


_grouped_dots = define(
    "grouped_dots(Tensor dy, Tensor bias, Tensor ends) -> Tensor",
    _grouped_dots_fake,
    bias_gradients.grouped_dots_definition,
    bias_gradients.grouped_dots_cuda,
)


def grouped_dots(dy: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """The gradient of a bias's row scales: ``sum(dy * bias[group])``, zero in the tail, ``[M]``."""
    return _grouped_dots(dy, bias, ends)
