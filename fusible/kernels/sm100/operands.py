"""Operands of the SM100 kernels, and the kernels as typed functions of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.kernels.runtime.launch import aligned, begins_aligned
from fusible.kernels.sm100.checks import FP8, address_unit
from fusible.kernels.sm100.padding import (
    Places,
    moved,
    packed_columns,
    packed_rows,
    packed_scales,
    returned,
)
from fusible.kernels.sm100.quantizer import quantized
from fusible.recipes.formats import NumberFormat
from fusible.recipes.layout import ATOM_ROWS
from fusible.recipes.matrix import Operand
from fusible.recipes.product import is_quantized

_ops = torch.ops.fusible


class Use(NamedTuple):
    """A matrix as one product reads it: elements, packed scales, FP32 factors per group."""

    data: Tensor
    scales: Tensor | None = None
    factors: Tensor | None = None


class Packed(NamedTuple):
    """Rows of groups in their places, for products along the columns and along the rows."""

    row: Use | None
    column: Use | None
    sums: Tensor | None = None
    """Of the rows of each group ``[E, K]``, where they were asked for."""


class Rounded(NamedTuple):
    """BF16 rows that a kernel wrote, to be quantized where a recipe says so."""

    rows: Tensor
    amax: Tensor | None
    """FP32 ``[E, parts]``, the largest magnitudes before they were rounded, where it gave them."""


class PackedWeights(NamedTuple):
    """Weights for one product: one ``[E, ...]`` or one for each group, their packed scales."""

    data: list[Tensor]
    scales: list[Tensor]
    factors: Tensor | None = None


def pack(x: Operand, ends: Tensor, places: Places) -> Packed:
    """Rows ``x`` in groups up to ``ends``, encoded by group, as the kernels read them."""
    if x.row_values is not None:
        use = Use(aligned(moved(x.row_values, places)))
        return Packed(use, use)
    row = column = None
    if x.row is not None:
        row = Use(*packed_rows(x.row, places), x.row.tensor_scale)
    if x.column is not None:
        column = Use(*packed_columns(x.column, places), x.column.tensor_scale)
    return Packed(row, column)


def quantize(
    x: Tensor,
    fmt: NumberFormat,
    ends: Tensor,
    places: Places,
    *,
    rowwise: bool,
    columnwise: bool,
    sums: torch.dtype | None = None,
    row_scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> Packed:
    """Rows ``x`` in groups up to ``ends`` in ``fmt``: ``pack`` of what ``encode`` gives, in one.

    ``sums``, a dtype, asks for those of the rows of each group, each times its ``row_scale``.
    ``amax`` as `Rounded` has it saves the pass that finds it.
    """
    pieces = quantized(x, fmt, ends, places, rowwise, columnwise, sums, row_scale, amax)
    factors = pieces.factors if fmt.has_tensor_scale else None
    return Packed(
        Use(pieces.row, pieces.row_scales, factors) if rowwise else None,
        Use(pieces.column, pieces.column_scales, factors) if columnwise else None,
        None if sums is None else pieces.sums,
    )


def in_one_pass(weights: list[Tensor]) -> bool:
    """Whether `quantize_weights` takes them: not quantized, of whole atoms of scales each."""
    return not is_quantized(weights[0]) and weights[0].shape[-2] % ATOM_ROWS == 0


def quantize_weights(
    w: Tensor, fmt: NumberFormat, transposed: bool
) -> tuple[PackedWeights, PackedWeights | None]:
    """Weights ``[E, N, K]`` or ``[N, K]`` for the forward and, if asked, the data gradient.

    ``pack_weights`` of what ``encode`` gives, in one pass: matrices are groups of N rows.
    """
    n, k = w.shape[-2:]
    rows = w.reshape(-1, k)
    size = rows.shape[0]
    ends = torch.arange(n, size + 1, n, dtype=torch.int32, device=w.device)
    places = Places(ends, None, size)
    packed = quantize(rows, fmt, ends, places, rowwise=True, columnwise=transposed)
    row, column = packed.row, packed.column
    assert row is not None
    forward = _of_matrices(row, (n, row.data.shape[1]))
    if column is None:
        return forward, None
    pairs = fmt.element.per_byte == 2
    return forward, _of_matrices(column, (k, n // 2) if pairs else (n, k))


def _of_matrices(use: Use, shape: tuple[int, int]) -> PackedWeights:
    """``use`` of rows as that of matrices ``[E, *shape]`` and the scales of each."""
    data = use.data.view(-1, *shape)
    assert use.scales is not None
    return PackedWeights([data], [use.scales.view(len(data), -1)], use.factors)


def pack_weights(operands: list[Operand], *, transposed: bool) -> PackedWeights:
    """Weights ``[E, N, K]``, or E of ``[N, K]``, for the forward, or for the data gradient."""
    uses = [_weight_use(operand, transposed) for operand in operands]
    factors = None
    if uses[0].factors is not None:
        factors = torch.cat([use.factors.flatten() for use in uses if use.factors is not None])
    scales = [use.scales for use in uses if use.scales is not None]
    return PackedWeights([use.data for use in uses], scales, factors)


def _weight_use(weight: Operand, transposed: bool) -> Use:
    if weight.row_values is not None:
        return Use(weight.row_values)
    encoded = weight.column if transposed else weight.row
    assert encoded is not None
    scale = encoded.scale.mT if transposed else encoded.scale
    data = aligned(encoded.data, address_unit(encoded.data.dtype))  # it lies as the weight does
    if transposed and encoded.format.element.per_byte == 2:
        data = _fp4_transposed(data)
    return Use(data, packed_scales(scale), encoded.tensor_scale)


def _fp4_transposed(data: Tensor) -> Tensor:
    """FP4 bytes ``[..., N, K / 2]`` as ``[..., K, N / 2]``."""
    values = torch.stack((data & 15, data >> 4), -1).flatten(-2).mT
    return (values[..., 0::2] | values[..., 1::2] << 4).contiguous()


def _alpha(x: Use, w: PackedWeights) -> Tensor | None:
    """What the products of elements and scales are to be multiplied by, per group."""
    if x.factors is None or w.factors is None:
        return None
    return x.factors.flatten() * w.factors


def glu(
    x: Use,
    w: PackedWeights,
    places: Places,
    prob: Tensor,
    *,
    bias: Tensor | None,
    activation: str,
    limit: float = 0.0,
    alpha: float = 0.0,
    offset: float = 0.0,
) -> tuple[Tensor, Packed | Rounded]:
    """The first linear with the activation: BF16 ``c``, and ``d`` of the second linear's operand.

    ``c = x @ w[e].T + bias[e]`` and ``d = glu(c) * prob``, gate and linear features alternating in
    blocks of 32. ``d`` is taken from the unrounded product; of MXFP8 operands it is quantized for
    both uses, of others it is BF16. ``prob`` is FP32, one value a row.
    """
    bias = None if bias is None else aligned(bias)
    c, *d = _ops.sm100_glu.default(
        *_product(x, w, places), bias, prob, activation, limit, alpha, offset
    )
    return c, _written(*d)


def _written(
    d: Tensor, scales: Tensor, column: Tensor, column_scales: Tensor, amax: Tensor
) -> Packed | Rounded:
    if d.dtype != FP8:
        return Rounded(d, amax if amax.dim() == 2 else None)
    return Packed(Use(d, scales), Use(column, column_scales))


def dglu(
    dy: Use,
    w: PackedWeights,
    places: Places,
    c: Tensor,
    prob: Tensor,
    *,
    bias: bool,
    activation: str,
    limit: float = 0.0,
    alpha: float = 0.0,
    offset: float = 0.0,
) -> tuple[Packed | Rounded, Tensor, Tensor]:
    """Gradients of ``c``, of ``prob`` (where the rows came from) and of the bias ``[E, N]``.

    From ``dy @ w[e]`` and what ``glu`` was given and gave. The gradient of ``c`` is as ``glu``
    gives ``d``; without ``bias`` the third has no rows.
    """
    *d, dprob, dbias = _ops.sm100_dglu.default(
        *_product(dy, w, places), c, prob, bias, activation, limit, alpha, offset
    )
    dprob = dprob[:-1] if places.rows is None else returned(dprob, places)
    return _written(*d), dprob, dbias


def gemm(
    x: Use,
    w: PackedWeights,
    places: Places,
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    transpose_w: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ w[e].T + bias[e] * row_scale`` in BF16, its rows where they came from.

    With ``transpose_w``, ``x @ w[e]``. Rows of no group are zero. Written to ``out`` if given.
    """
    bias = None if bias is None else aligned(bias)
    y = _ops.sm100_gemm.default(*_product(x, w, places), bias, row_scale, transpose_w)
    if places.rows is not None:
        return returned(y, places, out)
    # The kernel has left the rows past the last group as they were.
    live = torch.arange(places.size, device=y.device)[:, None] < places.ends[-1]
    if out is None:
        return torch.where(live, y[:-1], 0)
    return torch.where(live, y[:-1], y.new_zeros(()), out=out)


def wgrad(dy: Use, x: Use, places: Places, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``dy[rows of e].T @ x[rows of e]`` for each group e: ``[E, N, K]``; zeros for no rows."""
    return _ops.sm100_wgrad.default(*_columns(dy, x, places), out_dtype)


def wgrad_(out: list[Tensor], dy: Use, x: Use, places: Places, accumulate: bool) -> None:
    """`wgrad` into one tensor ``[E, N, K]`` or E of ``[N, K]``, or added to them."""
    _ops.sm100_wgrad_.default(out, *_columns(dy, x, places), accumulate)


def takes_wgrad(out: Sequence[Tensor]) -> bool:
    """Whether the kernel can write weight gradients to ``out``, or add to it, as it lies."""
    return all(
        t.dtype in (torch.bfloat16, torch.float32) and t.is_contiguous() and begins_aligned(t)
        for t in out
    )


def _product(x: Use, w: PackedWeights, places: Places) -> tuple[Any, ...]:
    return x.data, x.scales, w.data, w.scales, places.ends, _alpha(x, w)


def _columns(dy: Use, x: Use, places: Places) -> tuple[Any, ...]:
    factors = [None if use.factors is None else use.factors.flatten() for use in (dy, x)]
    return dy.data, dy.scales, x.data, x.scales, places.ends, *factors
