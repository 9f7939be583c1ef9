"""Hopper (SM90) kernels written in the CuTe DSL: grouped matrix products with fused epilogues.

Rows belong to groups (experts); ``ends`` (int32, on the device) holds each group's first row past
it. Groups may be empty and of any size; rows past the last end give zeros. Weights are one tensor
``[E, N, K]`` or E tensors ``[N, K]``, in either memory order. `limits` says what the kernels take.
Importing this package imports no cutlass; a kernel is compiled, or read from disk, at its first
launch.
"""

import torch
from torch import Tensor

from fusible.calls import is_direct
from fusible.kernels import grouped
from fusible.kernels.sm90 import limits, ops  # the latter registers the ops
from fusible.kernels.sm90.checks import has_matrix_layout, takes_wgrad
from fusible.kernels.sm90.prepared import fit_again, products

_ops = torch.ops.fusible

__all__ = [
    "fit_again",
    "group_ends",
    "grouped_gemm",
    "grouped_gemm_dglu",
    "grouped_gemm_glu",
    "grouped_wgrad",
    "grouped_wgrad_",
    "has_matrix_layout",
    "limits",
    "products",
    "takes_wgrad",
]


def group_ends(split_sizes: Tensor, rows: int) -> Tensor:
    """First row past each group, int32 ``[E]``; negative sizes count as 0, the last is ``rows``."""
    if grouped.checks_enabled() or not split_sizes.is_cuda:
        return grouped.group_ends(split_sizes, rows)  # which checks them
    call = ops.group_ends if is_direct(split_sizes) else _ops.sm90_group_ends.default
    return call(split_sizes, rows)


def grouped_gemm(
    x: Tensor,
    w: list[Tensor],
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    transpose_w: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ w[e].T + bias[e] * row_scale`` for the rows of each group e, in ``out`` if given.

    With ``transpose_w``, ``x @ w[e]``: the data gradient, from the same parameter.
    """
    if out is not None:
        write = ops.grouped_gemm_ if is_direct(x) else _ops.sm90_grouped_gemm_.default
        write(out, x, w, ends, bias, row_scale, transpose_w)
        return out
    call = ops.grouped_gemm if is_direct(x) else _ops.sm90_grouped_gemm.default
    return call(x, w, ends, bias, row_scale, transpose_w)


def grouped_gemm_glu(
    x: Tensor,
    w: list[Tensor],
    ends: Tensor,
    scales: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "swiglu",
    interleave: int = 0,
    limit: float = 0.0,
    alpha: float = 0.0,
    offset: float = 0.0,
    store_preact: bool = True,
) -> tuple[Tensor, Tensor]:
    """``preact = x @ w[e].T + bias[e]`` and ``glu(preact) * scales``, in one kernel.

    Gates are the first half of ``preact``'s columns, or the even ones of its blocks of
    ``interleave`` columns. Without ``store_preact`` the first result has no rows. ``limit``,
    ``alpha`` and ``offset`` belong to ``clamped_qgeglu``.
    """
    call = ops.grouped_gemm_glu if is_direct(x) else _ops.sm90_grouped_gemm_glu.default
    return call(
        x, w, ends, bias, scales, activation, interleave, limit, alpha, offset, store_preact
    )


def grouped_gemm_dglu(
    dy: Tensor,
    w: list[Tensor],
    ends: Tensor,
    preact: Tensor,
    scales: Tensor,
    *,
    activation: str = "swiglu",
    interleave: int = 0,
    limit: float = 0.0,
    alpha: float = 0.0,
    offset: float = 0.0,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of the activation between two grouped linears, in the second one's data gradient.

    With ``d = dy @ w[e]``, gives the gradient of ``preact`` (in its layout), the activation
    ``glu(preact) * scales`` once more (for the weight gradient of the second linear), and the
    gradient of ``scales``, always with the same bits. With ``overwrite`` the gradient may take the
    memory of ``preact``.
    """
    given = (dy, w, ends, preact, scales, activation, interleave, limit, alpha, offset)
    if is_direct(dy):
        return ops.grouped_gemm_dglu(*given, overwrite=overwrite)
    return _ops.sm90_grouped_gemm_dglu.default(*given)


def grouped_wgrad(
    dy: Tensor, x: Tensor, ends: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``dy[rows of e].T @ x[rows of e]`` for each group e: ``[E, N, K]``; zeros for no rows."""
    call = ops.grouped_wgrad if is_direct(dy) else _ops.sm90_grouped_wgrad.default
    return call(dy, x, ends, out_dtype)


def grouped_wgrad_(
    out: list[Tensor], dy: Tensor, x: Tensor, ends: Tensor, accumulate: bool = False
) -> None:
    """`grouped_wgrad` into one tensor ``[E, N, K]`` or E of ``[N, K]``, or added to them."""
    _ops.sm90_grouped_wgrad_.default(out, dy, x, ends, accumulate)
