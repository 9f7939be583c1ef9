"""How the fused ops on Hopper hand tensors to the SM90 kernels, and what those ask of the ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusible.fuser.conditions import multiple_of
from fusible.fuser.context import OperationContext
from fusible.kernels.sm90 import limits
from fusible.ops import GroupedLinear, ScaledClampedQGeGLU, ScaledSwiGLU

ScaledGLU = ScaledSwiGLU | ScaledClampedQGeGLU

# Layouts of gate and linear columns that the kernels take: halves, or blocks of these columns.
INTERLEAVES = (None, *(1 << i for i in range(11)))


def features_fit(*linears: Any) -> tuple[Any, ...]:
    """Conditions: the sizes of linears are whole 16 bytes, which TMA reads."""
    return tuple(
        multiple_of(size, limits.MULTIPLE_OF)
        for linear in linears
        for size in (linear.in_features, linear.out_features)
    )


def readable(kernels: Any, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors in a layout that TMA reads: as they are, or copied where they have another."""
    fits = kernels.has_matrix_layout
    if all([fits(t) for t in tensors]):
        return tensors
    return [t if fits(t) or fits(t.mT) else t.contiguous() for t in tensors]


def as_matrix(kernels: Any, t: Tensor) -> Tensor:
    """``t`` as ``[rows, features]``, contiguous in its features."""
    rows = t if t.dim() == 2 else t.reshape(-1, t.shape[-1])
    return rows if kernels.has_matrix_layout(rows) else rows.contiguous()


def as_vector(t: Tensor) -> Tensor:
    """``t`` as one contiguous dimension."""
    return t if t.dim() == 1 and t.is_contiguous() else t.reshape(-1).contiguous()


def as_rows(t: Tensor | None) -> Tensor | None:
    """A contiguous ``t`` as ``[rows, features]``."""
    return None if t is None else t.view(-1, t.shape[-1])


def with_shape(t: Tensor, shape: Sequence[int]) -> Tensor:
    """``t``, whose first dimension counts rows, with ``shape`` in its place."""
    return t if len(shape) == 1 else t.view(*shape, *t.shape[1:])


def kernel_operands(
    kernels: Any,
    linear: GroupedLinear,
    ctx: OperationContext,
    input_: Tensor,
    split_sizes: Tensor | None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Sequence[Tensor]]:
    """What ``linear.operands`` gives, as the kernels read it."""
    x, ends, row_scale, weights = linear.operands(
        ctx, input_, split_sizes, scales, ends_of=kernels.group_ends
    )
    return as_matrix(kernels, x), ends, row_scale, readable(kernels, weights)


def glu_options(act: ScaledGLU) -> dict[str, Any]:
    """The kernels' arguments for an activation."""
    formula, _, options = act.glu()
    return {
        "activation": formula.__name__,
        "interleave": act.glu_interleave_size or 0,
        **options,
    }
