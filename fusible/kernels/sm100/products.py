"""Operands of the SM100 kernels and what these write, and their plain product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.kernels.runtime.launch import aligned, begins_aligned
from fusible.kernels.sm100 import ops
from fusible.kernels.sm100.checks import FP8, address_unit
from fusible.kernels.sm100.padding import (
    PaddedGroups,
    packed_columns,
    packed_rows,
    packed_scales,
    pad_rows,
    unpad_rows,
)
from fusible.kernels.sm100.quantizer import QuantizeOptions, quantize_packed
from fusible.recipes.formats import NumberFormat
from fusible.recipes.layout import ATOM_ROWS
from fusible.recipes.matrix import Operand, OperandData, QuantizedMatrix
from fusible.recipes.product import is_quantized


class UnquantizedRows(NamedTuple):
    """BF16 rows that a kernel wrote, to be quantized where a recipe says so."""

    rows: Tensor
    amax: Tensor | None
    """FP32 ``[E, parts]``, the largest magnitudes before they were rounded, where it gave them."""


def pad_and_pack(x: Operand, padded: PaddedGroups) -> Operand:
    """Rows ``x``, quantized by group, as the kernels read them."""
    if x.row_values is not None:
        rows = aligned(pad_rows(x.row_values, padded))
        return Operand(row_values=rows, column_values=rows)
    row, column = x.row, x.column
    return Operand(
        None if row is None else _packed(row, *packed_rows(row, padded)),
        None if column is None else _packed(column, *packed_columns(column, padded)),
    )


def _packed(matrix: QuantizedMatrix, data: Tensor, scale: Tensor) -> QuantizedMatrix:
    return matrix._replace(data=data, scale=scale, ends=None)


def quantize_padded(
    x: Tensor,
    fmt: NumberFormat,
    ends: Tensor,
    padded: PaddedGroups,
    options: QuantizeOptions,
) -> tuple[Operand, Tensor | None]:
    """`pad_and_pack` of rows ``x``, in groups up to ``ends``, quantized to ``fmt``, in one pass.

    And the sums of the rows of each group ``[E, K]``, if ``options`` ask for them.
    """
    row, row_scales, column, column_scales, of_row, sums, of_column = quantize_packed(
        x, fmt, ends, padded, options
    )
    top = of_row if fmt.has_tensor_scale else None
    across = of_column if fmt.hadamard else top
    operand = Operand(
        QuantizedMatrix(row, row_scales, top, fmt) if options.rowwise else None,
        QuantizedMatrix(column, column_scales, across, fmt, True) if options.columnwise else None,
    )
    return operand, None if options.sums is None else sums


def in_one_pass(weights: list[Tensor], fmt: NumberFormat) -> bool:
    """Whether `quantize_packed_weights` supports them: not quantized, whole atoms of scales."""
    whole = fmt.directional and weights[0].shape[-2] % ATOM_ROWS == 0
    return whole and not any(map(is_quantized, weights))


def quantize_packed_weights(w: Tensor, fmt: NumberFormat, transposed: bool) -> Operand:
    """Weights ``[E, N, K]`` or ``[N, K]`` for the forward and, if asked, the data gradient.

    ``pack_weights`` of what `fusible.ops.weights.quantize_weights` gives, in one pass: matrices are
    groups of N rows.
    """
    n, k = w.shape[-2:]
    rows = w.reshape(-1, k)
    size = rows.shape[0]
    ends = torch.arange(n, size + 1, n, dtype=torch.int32, device=w.device)
    padded = PaddedGroups(ends, None, size)
    packed, _ = quantize_padded(rows, fmt, ends, padded, QuantizeOptions(True, transposed))
    per_byte = fmt.element.per_byte
    return Operand(
        _of_matrices(packed.row, (n, k // per_byte)),
        _of_matrices(packed.column, (k, n // 2) if per_byte == 2 else (n, k)),
    )


def _of_matrices(rows: QuantizedMatrix | None, shape: tuple[int, int]) -> QuantizedMatrix | None:
    """Matrices ``[E, *shape]`` and the scales of each, from those of all their rows."""
    if rows is None:
        return None
    data = rows.data.view(-1, *shape)
    return rows._replace(data=data, scale=rows.scale.view(len(data), -1))


def pack_weights(weights: list[Operand]) -> list[Operand]:
    """Quantized weights ``[E, N, K]``, or E of ``[N, K]``, as the kernels read them."""
    return [
        Operand(_packed_weight(weight.row, False), _packed_weight(weight.column, True))
        for weight in weights
    ]


def _packed_weight(weight: QuantizedMatrix | None, columnwise: bool) -> QuantizedMatrix | None:
    if weight is None:
        return None
    if not weight.format.directional:  # each vector along the reduction gets its block's scale
        assert weight.format.block is not None
        along, size = weight.format.block[1], weight.shape[-1 if columnwise else -2]
        scale = weight.scale.repeat_interleave(along, -1 if columnwise else -2)
        scale = scale.narrow(-1 if columnwise else -2, 0, size)
        weight = weight._replace(scale=scale, columnwise=columnwise)
    data = aligned(weight.data, address_unit(weight.data.dtype))  # in the layout of the weight
    if not weight.columnwise:
        return _packed(weight, data, packed_scales(weight.scale))
    if weight.format.element.per_byte == 2:
        data = _fp4_transposed(data)
    return _packed(weight, data, packed_scales(weight.scale.mT))


def _fp4_transposed(data: Tensor) -> Tensor:
    """FP4 bytes ``[..., N, K / 2]`` as ``[..., K, N / 2]``."""
    values = torch.stack((data & 15, data >> 4), -1).flatten(-2).mT
    return (values[..., 0::2] | values[..., 1::2] << 4).contiguous()


def _alpha(x: QuantizedMatrix, w: Sequence[Any]) -> Tensor | None:
    """The factor of each group's product: the tensor scales of ``x`` times those of ``w``."""
    if x.tensor_scale is None:
        return None
    factors = [weight.tensor_scale.flatten() for weight in w]
    return x.tensor_scale.flatten() * (factors[0] if len(factors) == 1 else torch.cat(factors))


def written(x: OperandData, outputs: Sequence[Tensor]) -> Operand | UnquantizedRows:
    """What a kernel with operand ``x`` wrote: `ops.KernelOutputs`."""
    d, scales, column, column_scales, amax = outputs
    if isinstance(x, Tensor) or d.dtype != FP8:
        return UnquantizedRows(d, amax if amax.dim() == 2 else None)
    return Operand(
        QuantizedMatrix(d, scales, None, x.format),
        QuantizedMatrix(column, column_scales, None, x.format, True),
    )


def recomputed(x: OperandData, act: Tensor, scales: Tensor) -> Operand | UnquantizedRows:
    """The activation that a kernel with operand ``x`` computed again, for the weight gradient."""
    if isinstance(x, Tensor) or act.dtype != FP8:
        return UnquantizedRows(act, None)
    return Operand(None, QuantizedMatrix(act, scales, None, x.format, True))


def gemm(
    x: OperandData,
    w: Sequence[OperandData],
    padded: PaddedGroups,
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    transpose_w: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ w[e].T + bias[e] * row_scale`` in BF16, of the rows without padding.

    With ``transpose_w``, ``x @ w[e]``. Rows of no group are zero. Written to ``out`` if given.
    """
    bias = None if bias is None else aligned(bias)
    y = ops.gemm(product_operands(x, w, padded), bias, row_scale, transpose_w)
    if padded.rows is not None:
        return unpad_rows(y, padded, out)
    # The kernel has left the rows past the last group as they were.
    live = torch.arange(padded.size, device=y.device)[:, None] < padded.ends[-1]
    if out is None:
        return torch.where(live, y[:-1], 0)
    return torch.where(live, y[:-1], y.new_zeros(()), out=out)


def supports_wgrad_outputs(out: Sequence[Tensor]) -> bool:
    """Whether the kernel can write weight gradients to ``out``, or add to it, in place."""
    return all([
        t.dtype in (torch.bfloat16, torch.float32) and t.is_contiguous() and begins_aligned(t)
        for t in out
    ])  # fmt: skip


def product_operands(x: OperandData, w: Sequence[Any], padded: PaddedGroups) -> ops.ProductOperands:
    """The operands of the products of rows in `ops`."""
    if isinstance(x, Tensor):
        return ops.ProductOperands(x, None, list(w), [], padded.ends, None)
    data, scales = [weight.data for weight in w], [weight.scale for weight in w]
    return ops.ProductOperands(x.data, x.scale, data, scales, padded.ends, _alpha(x, w))


def wgrad_operands(dy: Any, x: Any, padded: PaddedGroups) -> ops.WgradOperands:
    """The operands of `ops.wgrad`."""
    if isinstance(x, Tensor):
        return ops.WgradOperands(dy, None, x, None, padded.ends, None, None)
    tops = [None if m.tensor_scale is None else m.tensor_scale.flatten() for m in (dy, x)]
    return ops.WgradOperands(dy.data, dy.scale, x.data, x.scale, padded.ends, *tops)
