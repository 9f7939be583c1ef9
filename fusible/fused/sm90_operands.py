"""How the fused ops on Hopper hand tensors to the SM90 kernels, and what those ask of the ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusible.fused.grouped_mlp import ScaledGLU
from fusible.fuser.conditions import multiple_of
from fusible.kernels import grouped, sm90
from fusible.kernels.grouped import Glu
from fusible.kernels.sm90 import limits
from fusible.ops import GroupedLinear
from fusible.ops.rows import as_2d

# Layouts of gate and linear columns that the kernels take: halves, or blocks of these columns.
INTERLEAVES = tuple(size or None for size in limits.INTERLEAVES)


def features_fit(*linears: Any) -> tuple[Any, ...]:
    """Conditions: the sizes of linears are whole 16 bytes, which TMA reads."""
    return tuple(
        multiple_of(size, limits.MULTIPLE_OF)
        for linear in linears
        for size in (linear.in_features, linear.out_features)
    )


def as_vector(t: Tensor) -> Tensor:
    """``t`` as one contiguous dimension."""
    return t if t.dim() == 1 and t.is_contiguous() else t.reshape(-1).contiguous()


class CheckedProducts:
    """The products of a grouped linear over operands of any layout, each of them checked.

    The methods are those of `fusible.kernels.sm90.grouped_products.Products`; ``w`` is the weight.
    """

    of = staticmethod(lambda w: w)
    ends = staticmethod(grouped.group_ends)
    glu = staticmethod(grouped.grouped_glu)
    dglu = staticmethod(grouped.grouped_dglu)
    wgrad = staticmethod(grouped.grouped_wgrad)

    @staticmethod
    def forward(
        x: Tensor,
        w: Sequence[Tensor],
        ends: Tensor,
        bias: Tensor | None = None,
        row_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The grouped product."""
        return grouped.grouped_mm(x, w, ends, bias, row_scale, False, out)

    @staticmethod
    def dgrad(dy: Tensor, w: Sequence[Tensor], ends: Tensor, out: Tensor | None = None) -> Tensor:
        """The input's gradient."""
        return grouped.grouped_mm(dy, w, ends, None, None, True, out)


def shape_of(linear: GroupedLinear) -> tuple[int, int, int]:
    """The shape of a linear's weight as one tensor."""
    return linear.num_groups, linear.out_features, linear.in_features


def prepare(
    rows: Sequence[Tensor],
    *linears: tuple[GroupedLinear, Sequence[Tensor]],
    bias: Tensor | None = None,
) -> tuple[Sequence[Tensor], list[tuple[Any, Any]]]:
    """The products of linears with their weights over ``rows``, in the quickest way there is.

    ``rows`` ``[rows, features]`` come back as the products take them, and with each product the
    weight as it takes that. ``bias`` is that of the only linear.
    """
    found: Any = sm90.products(rows, *[(shape_of(linear), w) for linear, w in linears])
    if found is None or not (bias is None or found[0].fits(bias)):
        rows = [as_2d(t) for t in rows]
        found = [CheckedProducts] * len(linears)
    return rows, [
        (product, product.of(weights)) for product, (_, weights) in zip(found, linears, strict=True)
    ]


def glu_of(act: ScaledGLU) -> Glu:
    """An activation as the kernels take it."""
    formula, _, options = act.glu()
    return Glu(formula.__name__, act.glu_interleave_size or 0, **options)
