"""The grouped products in plain PyTorch, of any device and floating dtype: what kernels equal.

A loop over the groups, which reads their end rows on the host. The signatures are those of the
library ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusible.formulas import math_dtype
from fusible.kernels.glu import Glu
from fusible.kernels.grouped.groups import row_groups
from fusible.kernels.stacking import write


def _sizes(ends: Tensor) -> list[int]:
    """Rows of every group; reads ``ends`` on the host."""
    values = ends.tolist()
    return [max(end - start, 0) for start, end in zip([0, *values], values, strict=False)]


def _by_group(t: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """The rows of every group, then the tail."""
    return t.split_with_sizes([*sizes, t.shape[0] - sum(sizes)])


def grouped_mm(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    transpose_w: bool = False,
) -> Tensor:
    """``x @ w[e].T + bias[e] * row_scale`` for the rows of each group e.

    With ``transpose_w``, ``x @ w[e]``: the data gradient, from the same parameter. ``bias`` is
    ``[E, N]``, ``row_scale`` has one value for each row.
    """
    y = x.new_empty(x.shape[0], w[0].shape[-1 if transpose_w else -2])
    grouped_mm_(y, x, w, ends, bias, row_scale, transpose_w)
    return y


def grouped_mm_(
    out: Tensor,
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    transpose_w: bool = False,
) -> None:
    """`grouped_mm` into ``out``."""
    if w[0].dim() == 3:
        matrices: Sequence[Tensor] = (w[0] if transpose_w else w[0].mT).unbind(0)
    else:
        matrices = w if transpose_w else [matrix.t() for matrix in w]
    sizes = _sizes(ends)
    xs, ys = _by_group(x, sizes), _by_group(out, sizes)
    ys[-1].zero_()
    scales = None if row_scale is None else _by_group(row_scale, sizes)
    with torch.no_grad():
        for group, size in enumerate(sizes):
            if size == 0:
                continue
            if bias is None or scales is not None:
                torch.mm(xs[group], matrices[group], out=ys[group])
            else:
                torch.addmm(bias[group], xs[group], matrices[group], out=ys[group])
            if bias is not None and scales is not None:
                wide = math_dtype(x.dtype)
                shift = scales[group][:, None].to(wide) * bias[group].to(wide)
                ys[group].copy_(ys[group].to(wide) + shift)


@torch.no_grad()
def grouped_glu(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    scales: Tensor | None,
    glu: Glu,
    bias: Tensor | None = None,
    save_preact: bool = True,
    *,
    product: Callable[..., Tensor] = grouped_mm,
) -> tuple[Tensor, Tensor]:
    """``preact = x @ w[e].T + bias[e]`` and ``glu(preact) * scales``, one scale for each row.

    With None the activation is not scaled. Without ``save_preact`` the first result has no rows.
    """
    preact = product(x, w, ends, bias)
    out = _without_tail(glu.forward(preact, scales), ends)
    return preact if save_preact else preact.new_empty(0, preact.shape[1]), out


@torch.no_grad()
def grouped_dglu(
    dy: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    preact: Tensor,
    scales: Tensor,
    glu: Glu,
    *,
    overwrite: bool = False,
    product: Callable[..., Tensor] = grouped_mm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of the activation between two grouped linears, in the second one's data gradient.

    With ``d = dy @ w[e]``, gives the gradient of ``preact`` (in its layout of columns), the
    activation ``glu(preact) * scales`` once more (for the weight gradient of the second linear),
    and the gradient of ``scales``. With ``overwrite`` the first may take the memory of ``preact``.
    """
    d = product(dy, w, ends, transpose_w=True)
    dpreact, dscales = glu.backward(d, preact, scales)
    assert dscales is not None
    act = glu.forward(preact, scales)
    return _without_tail(dpreact, ends), _without_tail(act, ends), _without_tail(dscales, ends)


def _without_tail(t: Tensor, ends: Tensor) -> Tensor:
    """``t`` with zeros in the rows past the last group."""
    _, live = row_groups(ends, t.shape[0])
    return torch.where(live.view(-1, *[1] * (t.dim() - 1)), t, 0)


def grouped_wgrad(
    dy: Tensor, x: Tensor, ends: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``dy[rows of e].T @ x[rows of e]`` for each group e, ``[E, N, K]``; zeros for no rows.

    Rounded once, to ``out_dtype``.
    """
    if out_dtype not in (None, dy.dtype):
        wide = torch.promote_types(out_dtype, dy.dtype)
        return grouped_wgrad(dy.to(wide), x.to(wide), ends).to(out_dtype)
    dw = dy.new_zeros(ends.shape[0], dy.shape[1], x.shape[1])
    sizes = _sizes(ends)
    dys, xs = _by_group(dy, sizes), _by_group(x, sizes)
    with torch.no_grad():
        for group, size in enumerate(sizes):
            if size:
                torch.mm(dys[group].t(), xs[group], out=dw[group])
    return dw


def grouped_wgrad_(
    out: Sequence[Tensor], dy: Tensor, x: Tensor, ends: Tensor, accumulate: bool = False
) -> None:
    """`grouped_wgrad` into one tensor ``[E, N, K]`` or E of ``[N, K]``, or added to them."""
    # Products into a wider buffer are taken in its dtype, so that nothing is rounded on the way.
    wide = torch.promote_types(out[0].dtype, dy.dtype)
    write(out, grouped_wgrad(dy.to(wide), x.to(wide), ends), accumulate)
