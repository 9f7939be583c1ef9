"""Tensors between ops: taken in the dtype an op computes in, handed on quantized where asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.fuser.flow import Dtypes, autocast_to
from fusible.ops.inputs import check_dtype
from fusible.ops.op import BasicOperation
from fusible.recipes.grouped import GroupedQuantizer
from fusible.recipes.product import is_quantized, values


class CastingOp(BasicOperation):
    """An op that computes, and gives its output, in the dtype of its weight, or of its input.

    In that of ``torch.autocast`` inside it, which leaves FP64 as it is.
    """

    def output_dtypes(self, given: Dtypes) -> tuple[torch.dtype | None, ...]:
        """Autocast's, or the weight's, or the input's."""
        dtype = given.params[0] if given.params else given.input
        return (None if dtype is None else autocast_to(dtype, given.autocast),)

    def accept(self, ctx: OperationContext, x: Tensor) -> Tensor:
        """``x`` in that dtype, dequantized if it is quantized.

        Notes the dtype as ``ctx.dtype``, in which the backward takes the gradient.

        Raises:
            ValueError: a dtype that ops do not compute in.
        """
        check_dtype(x, "input", type(self).__name__)
        x = values(x)
        dtype = ctx.parameters[0].dtype if ctx.parameters else x.dtype
        ctx.dtype = autocast_to(dtype, ctx.autocast_dtype)
        return cast(x, ctx.dtype)


def accept_grad(ctx: OperationContext, grad_output: Tensor) -> Tensor:
    """The output's gradient, dequantized if it is quantized, in the dtype of the forward."""
    return cast(values(grad_output), ctx.dtype)


def hand_over(x: Tensor, quantizer: Any, first_dims: Tensor | None = None) -> Tensor:
    """``x`` ``[..., features]`` quantized as its receiver wants it, if it does.

    As one matrix of all rows, which is how a linear quantizes for itself: the same bits; for a
    grouped linear by ``first_dims``, the rows of each group. Compiled code, and an op that does not
    know the groups, leave it to the receiver; so does one whose receiver reads the values too.
    """
    if quantizer is None or torch.compiler.is_compiling():
        return x
    if isinstance(quantizer, GroupedQuantizer):
        left = quantizer.by_receiver or first_dims is None or x.dim() != 2
        return x if left else quantizer(x, first_dims)
    if is_quantized(x) or x.dim() == 2:
        return quantizer(x)
    rows = quantizer(x.reshape(-1, x.shape[-1]))
    return rows.with_pieces(rows.pieces(), x.shape)
