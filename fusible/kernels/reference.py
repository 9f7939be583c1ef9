"""The SM90 kernels' entries in plain PyTorch, for any device and dtype: what they must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible import formulas
from fusible.kernels import grouped

group_ends = grouped.group_ends


def products(*_: Any) -> None:
    """Nothing is prepared."""


def has_matrix_layout(x: Tensor) -> bool:
    """Any layout will do."""
    return True


def grouped_gemm(
    x: Tensor,
    w: list[Tensor],
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    transpose_w: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ w[e].T + bias[e] * row_scale`` for the rows of each group; transposed, ``x @ w[e]``."""
    y = grouped.grouped_mm(x, w, ends, bias, row_scale, transpose_w)
    return y if out is None else out.copy_(y)


def grouped_gemm_glu(
    x: Tensor,
    w: list[Tensor],
    ends: Tensor,
    scales: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "swiglu",
    interleave: int = 0,
    store_preact: bool = True,
    **clamps: float,
) -> tuple[Tensor, Tensor]:
    """The pre-activation (without rows unless it is to be stored), and the scaled activation."""
    glu, _, options = _glu(activation, clamps)
    preact = grouped.grouped_mm(x, w, ends, bias, None, False)
    out = glu(preact, scales, interleave or None, **options)
    return preact if store_preact else preact[:0], _live(out, ends)


def grouped_gemm_dglu(
    dy: Tensor,
    w: list[Tensor],
    ends: Tensor,
    preact: Tensor,
    scales: Tensor,
    *,
    activation: str = "swiglu",
    interleave: int = 0,
    overwrite: bool = False,
    **clamps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The pre-activation's gradient, the scaled activation once more, the scales' gradient."""
    glu, backward, options = _glu(activation, clamps)
    d = grouped.grouped_mm(dy, w, ends, None, None, True)
    dpreact, dscales = backward(d, preact, scales, interleave or None, **options)
    act = glu(preact, scales, interleave or None, **options)
    return _live(dpreact, ends), _live(act, ends), _live(dscales, ends)


def grouped_wgrad(
    dy: Tensor, x: Tensor, ends: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``dy[rows of e].T @ x[rows of e]`` for each group e."""
    dw = grouped.grouped_wgrad(dy, x, ends)
    return dw if out_dtype is None else dw.to(out_dtype)


def takes_wgrad(out: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Any buffers will do."""
    return True


def grouped_wgrad_(
    out: list[Tensor], dy: Tensor, x: Tensor, ends: Tensor, accumulate: bool = False
) -> None:
    """``grouped_wgrad`` into one tensor ``[E, N, K]`` or E of ``[N, K]``, or added to them."""
    grouped.grouped_wgrad_(out, dy, x, ends, accumulate)


def _glu(
    activation: str, clamps: dict[str, float]
) -> tuple[Callable[..., Tensor], Callable[..., Any], dict[str, float]]:
    """The formula, its backward, and what both take."""
    if activation == "swiglu":
        return formulas.swiglu, formulas.swiglu_backward, {}
    return formulas.clamped_qgeglu, formulas.clamped_qgeglu_backward, clamps


def _live(t: Tensor, ends: Tensor) -> Tensor:
    """``t`` with zeros in the tail."""
    _, live = grouped.row_groups(ends, t.shape[0])
    return torch.where(live.view(-1, *[1] * (t.dim() - 1)), t, 0)
