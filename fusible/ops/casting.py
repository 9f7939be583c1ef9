"""Tensors between ops: cast to the dtype that an op computes in, quantized for the next op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.fuser.op_facts import Dtypes, autocast_to
from fusible.ops.inputs import check_dtype
from fusible.ops.op import BasicOperation
from fusible.recipes.formats import NumberFormat
from fusible.recipes.grouped import GroupedQuantizer
from fusible.recipes.product import is_quantized, values
from fusible.recipes.quantize_ops import dequantize_matrix, quantize_matrix


class CastingOp(BasicOperation):
    """An op that computes in the dtype of its weight, or of its input if it has no weight.

    Its output has that dtype. Inside ``torch.autocast`` the dtype is autocast's, unless it would be
    FP64, which stays.
    """

    def output_dtypes(self, given: Dtypes) -> tuple[torch.dtype | None, ...]:
        """Autocast's, or the weight's, or the input's."""
        dtype = given.params[0] if given.params else given.input
        return (None if dtype is None else autocast_to(dtype, given.autocast),)

    def cast_input(self, ctx: OperationContext, x: Tensor) -> Tensor:
        """``x`` in the dtype that the op computes in, dequantized if it is quantized.

        Stores the dtype as ``ctx.dtype``, to which the backward casts the gradient.

        Raises:
            ValueError: a dtype that ops do not compute in.
        """
        check_dtype(x, "input", type(self).__name__)
        x = values(x)
        dtype = ctx.parameters[0].dtype if ctx.parameters else x.dtype
        ctx.dtype = autocast_to(dtype, ctx.autocast_dtype)
        return cast(x, ctx.dtype)


def cast_grad(ctx: OperationContext, grad_output: Tensor) -> Tensor:
    """The output's gradient, dequantized if it is quantized, in the dtype of the forward."""
    return cast(values(grad_output), ctx.dtype)


def apply_quantizer(x: Tensor, quantizer: Any, first_dims: Tensor | None = None) -> Tensor:
    """``x`` ``[..., features]``, quantized by the ``quantizer`` of the op that reads it, if any.

    As one matrix of all rows, as a linear quantizes its own input, with the same bits; for a
    grouped linear in groups of ``first_dims`` rows. Returns ``x`` if it is quantized; also
    under torch.compile, if the groups are unknown, or if the reading op needs the values: that op
    quantizes it then.
    """
    if quantizer is None or is_quantized(x) or torch.compiler.is_compiling():
        return x
    if getattr(quantizer, "by_receiver", False):  # an own op's quantizer may be of any class
        return x
    if isinstance(quantizer, GroupedQuantizer):
        return x if first_dims is None or x.dim() != 2 else quantizer(x, first_dims)
    if x.dim() == 2:
        return quantizer(x)
    rows = quantizer(x.reshape(-1, x.shape[-1]))
    return rows.with_pieces(rows.pieces(), x.shape)


def quantized_values(x: Tensor, fmt: NumberFormat, ends: Tensor | None = None) -> Tensor:
    """The values of ``x`` ``[..., features]`` quantized row-wise, in groups up to ``ends``."""
    if is_quantized(x):
        return x.dequantize()
    rows = x.reshape(-1, x.shape[-1])
    matrix, _ = quantize_matrix(rows, fmt, rowwise=True, columnwise=False, ends=ends)
    assert matrix is not None
    return dequantize_matrix(matrix, x.dtype).view(x.shape)


def format_of_grad(ctx: OperationContext, *, by_group: bool) -> NumberFormat | None:
    """The output gradient's format, if this op and not the next one quantizes it.

    For each group separately, or for all rows: ``by_group``.
    """
    quantizer = ctx.output_grad_quantizer
    quantizer = getattr(quantizer, "quantizer", quantizer)
    if quantizer is None or isinstance(quantizer, GroupedQuantizer) != by_group:
        return None
    return getattr(quantizer, "format", None)
