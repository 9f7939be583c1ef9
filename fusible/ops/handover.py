"""Tensors between ops: taken in the dtype an op computes in, handed on quantized where asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.fuser.flow import Dtypes, autocast_to
from fusible.ops.inputs import check_dtype
from fusible.recipes.grouped import GroupedQuantizer
from fusible.recipes.product import is_quantized, values


def accept(
    ctx: OperationContext, x: Tensor, op_name: str, dtype: torch.dtype | None = None
) -> Tensor:
    """``x`` decoded if it is quantized, in the dtype of ``torch.autocast``, or in ``dtype``.

    Notes its dtype as ``ctx.dtype``, in which the backward takes the gradient. Autocast leaves
    FP64 as it is; without ``dtype``, which is a weight's, x keeps its own.

    Raises:
        ValueError: a dtype that ops do not compute in.
    """
    check_dtype(x, "input", op_name)
    x = values(x)
    ctx.dtype = autocast_to(x.dtype if dtype is None else dtype, ctx.autocast_dtype)
    return cast(x, ctx.dtype)


def accepted(given: Dtypes) -> tuple[torch.dtype | None]:
    """The dtype of what `accept` gives, in which an op's output is too."""
    return (None if given.input is None else autocast_to(given.input, given.autocast),)


def accepted_by_weight(given: Dtypes) -> tuple[torch.dtype | None]:
    """The dtype of the output of an op that casts its input to its weight's dtype."""
    return (autocast_to(given.params[0], given.autocast),)


def accept_grad(ctx: OperationContext, grad_output: Tensor) -> Tensor:
    """The output's gradient, decoded if it is quantized, in the dtype of the forward."""
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
