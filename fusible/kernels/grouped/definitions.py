"""The grouped products in plain PyTorch, of any device and floating dtype: what kernels equal.

A loop over the groups, which reads their end rows on the host. The signatures are those of the
library ops.

Operands are FP8 if their scales are given, ``x_scale`` and the like, FP32 and of any strides: one
for each 128 elements along the reduction, and a weight's for each 128 x 128. An element times its
scale is the value. These products are computed in FP32 and rounded once, to BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.formulas import math_dtype
from fusible.kernels.glu import Glu
from fusible.kernels.quantize.k_major import quantize_k_major
from fusible.kernels.quantize.saved_input import quantize_input
from fusible.kernels.stacking import stacked, write
from fusible.recipes.blocks import with_zero_tail
from fusible.recipes.formats import BLOCKS, FP8_BLOCK, NumberFormat, value_dtype
from fusible.recipes.stored import StoredWeights


def _sizes(ends: Tensor) -> list[int]:
    """Rows of every group; reads ``ends`` on the host."""
    values = ends.tolist()
    return [max(end - start, 0) for start, end in zip([0, *values], values, strict=False)]


def _by_group(t: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """The rows of every group, then the tail."""
    return t.split_with_sizes([*sizes, t.shape[0] - sum(sizes)])


def dequantized(elements: Tensor, scale: Tensor) -> Tensor:
    """FP32 values of FP8 elements, with a scale for each one or 128 of them along a dimension."""
    for dim in range(-elements.dim(), 0):
        size, count = elements.shape[dim], scale.shape[dim]
        blocks = size if dim < -2 else -(-size // FP8_BLOCK)
        if count not in (size, blocks):
            raise ValueError(
                f"scales must be one for each element or {FP8_BLOCK} along dimension {dim} of "
                f"{tuple(elements.shape)}, got shape {tuple(scale.shape)}"
            )
        if count != size:
            scale = scale.repeat_interleave(FP8_BLOCK, dim).narrow(dim, 0, size)
    return elements.float() * scale


def check_scale_pair(first: Tensor | None, second: Tensor | None) -> None:
    """Raise ValueError unless both operands have scales, or neither."""
    if (first is None) != (second is None):
        raise ValueError(
            "both operands of a product must have scales, or neither, got those of the "
            f"{'second' if first is None else 'first'} alone"
        )


def grouped_mm(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    transpose_w: bool = False,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    *,
    out: Tensor | None = None,
    zero_tail: bool = True,
    reads_ahead: bool = False,
) -> Tensor:
    """``x @ w[e].T + bias[e] * row_scale`` for the rows of each group e.

    With ``transpose_w``, ``x @ w[e]``: the data gradient, from the same parameter. ``bias`` is
    ``[E, N]``, ``row_scale`` has one value for each row. FP8 operands are ``x`` ``[M, K]`` with
    ``x_scale`` ``[M, ceil(K / 128)]`` and ``w`` with ``w_scale``
    ``[E, ceil(N / 128), ceil(K / 128)]``, not transposed. ``out`` is memory for the result, of its
    shape and dtype, which implementations may leave alone. ``zero_tail`` and ``reads_ahead`` are
    arguments of direct calls. Without the first, rows past the last group's end may be anything.
    The second promises that the kernel ahead on the stream writes neither ``w`` nor ``ends``, which
    may be read before it has ended.
    """
    check_scale_pair(x_scale, w_scale)
    if x_scale is not None and w_scale is not None:
        nominal = value_dtype(x.dtype)
        x, w = dequantized(x, x_scale), [dequantized(stacked(w), w_scale)]
        bias = None if bias is None else bias.float()
        return grouped_mm(x, w, ends, bias, row_scale, transpose_w).to(nominal)
    if out is None:
        out = x.new_empty(x.shape[0], w[0].shape[-1 if transpose_w else -2])
    if w[0].dim() == 3:
        matrices: Sequence[Tensor] = (w[0] if transpose_w else w[0].mT).unbind(0)
    else:
        matrices = w if transpose_w else [matrix.t() for matrix in w]
    sizes = _sizes(ends)
    xs, ys = _by_group(x, sizes), _by_group(out, sizes)
    if zero_tail:
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
    return out


@torch.no_grad()
def grouped_glu(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    scales: Tensor | None,
    glu: Glu,
    bias: Tensor | None = None,
    save_preact: bool = True,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    *,
    zero_tail: bool = True,
    product: Callable[..., Tensor] = grouped_mm,
) -> tuple[Tensor, Tensor]:
    """``preact = x @ w[e].T + bias[e]`` and ``glu(preact) * scales``, one scale for each row.

    With None the activation is not scaled. Without ``save_preact`` the first result has no rows.
    FP8 operands are those of `grouped_mm`.
    """
    preact = product(x, w, ends, bias, x_scale=x_scale, w_scale=w_scale)
    out = with_zero_tail(glu.forward(preact, scales), ends)
    return preact if save_preact else preact.new_empty(0, preact.shape[1]), out


def grouped_glu_quantized(  # noqa: PLR0913, PLR0917 (those of `grouped_glu` and the formats)
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    scales: Tensor | None,
    glu: Glu,
    bias: Tensor | None,
    save_preact: bool,
    x_scale: Tensor,
    w_scale: Tensor,
    fmt: NumberFormat,
    quantize_preact: bool = False,
    *,
    zero_tail: bool = True,
    product: Callable[..., tuple[Tensor, Tensor]] = grouped_glu,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`grouped_glu` of FP8 operands, whose activation is rounded to BF16, then quantized.

    In a format of 1x128 blocks. The results are the pre-activation, the activation's elements
    ``[M, F]``, their scales ``[ceil(F / 128), M]``, and with ``quantize_preact`` the scales of the
    pre-activation, which then is in the format `SAVED_INPUT`. Raises ValueError for other formats.
    """
    if fmt.block != BLOCKS[0]:
        raise ValueError(
            f"a quantized activation must have scales of 1x128 blocks, got {fmt}; use grouped_glu "
            "and quantize_k_major"
        )
    preact, out = product(x, w, ends, scales, glu, bias, save_preact, x_scale, w_scale)
    row = quantize_k_major(out, fmt, rowwise=True, columnwise=False).row
    assert row is not None
    preact_scale = out.new_empty(0, dtype=torch.float32)
    if quantize_preact:
        saved = quantize_input(preact)
        preact, preact_scale = saved.data, saved.scale.t()
    return preact, row.data, row.scale.t(), preact_scale


def grouped_mm_stored(
    x: Tensor,
    w: StoredWeights,
    fmt: NumberFormat,
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    *,
    product: Callable[..., Tensor] = grouped_mm,
) -> Tensor:
    """`grouped_mm` of weights stored in a format, by their values in x's dtype.

    A kernel that reads the weights as they are stored need not round the values.
    """
    return product(x, w.values(fmt, x), ends, bias, row_scale)


def grouped_glu_stored(
    x: Tensor,
    w: StoredWeights,
    fmt: NumberFormat,
    ends: Tensor,
    scales: Tensor | None,
    glu: Glu,
    bias: Tensor | None = None,
    *,
    product: Callable[..., tuple[Tensor, Tensor]] = grouped_glu,
) -> Tensor:
    """The activation of `grouped_glu`, as `grouped_mm_stored`."""
    return product(x, w.values(fmt, x), ends, scales, glu, bias, False)[1]


@torch.no_grad()
def grouped_dglu(
    dy: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    preact: Tensor,
    scales: Tensor | None,
    glu: Glu,
    *,
    overwrite: bool = False,
    zero_tail: bool = True,
    product: Callable[..., Tensor] = grouped_mm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of the activation between two grouped linears, in the second one's data gradient.

    With ``d = dy @ w[e]``, gives the gradient of ``preact`` (in its layout of columns), the
    activation ``glu(preact) * scales`` once more (for the weight gradient of the second linear),
    and the gradient of ``scales``, which has no rows without these. With ``overwrite`` the first
    may take the memory of ``preact``.
    """
    d = product(dy, w, ends, transpose_w=True)
    dpreact, dscales = glu.backward(d, preact, scales)
    act = glu.forward(preact, scales)
    dscales = (
        d.new_empty(0, dtype=torch.float32) if dscales is None else with_zero_tail(dscales, ends)
    )
    return with_zero_tail(dpreact, ends), with_zero_tail(act, ends), dscales


def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype | None = None,
    dy_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """``dy[rows of e].T @ x[rows of e]`` for each group e, ``[E, N, K]``; zeros for no rows.

    Rounded once, to ``out_dtype``. FP8 operands are column-major, with scales ``[rows / 128, N]``
    and ``[rows / 128, K]``; groups end at multiples of 128 rows, padded with zeros.
    """
    check_scale_pair(dy_scale, x_scale)
    if dy_scale is not None and x_scale is not None:
        out_dtype = out_dtype or value_dtype(dy.dtype)
        dy, x = dequantized(dy, dy_scale), dequantized(x, x_scale)
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
    out: Sequence[Tensor],
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    accumulate: bool = False,
    dy_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    *,
    product: Callable[..., Any] = grouped_wgrad,
    rounds: bool = False,
) -> None:
    """`grouped_wgrad` into one tensor ``[E, N, K]`` or E of ``[N, K]``, or added to them.

    ``product`` computes it; where that is NotImplemented, so is the result. ``rounds``: it gives
    the dtype of the operands only.
    """
    # Products into a wider buffer are taken in its dtype, so that nothing is rounded on the way.
    wide = torch.promote_types(out[0].dtype, dy.dtype if dy_scale is None else torch.float32)
    dw = product(dy, x, ends, None if rounds else wide, dy_scale, x_scale)
    if dw is NotImplemented:
        return NotImplemented
    write(out, dw, accumulate)
    return None
