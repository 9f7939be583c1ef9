"""How the fused ops on Hopper hand tensors to the SM90 kernels, and what those ask of the ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.fused.grouped_mlp import ScaledGLU
from fusible.fuser.conditions import multiple_of
from fusible.kernels.provider import provider
from fusible.kernels.sm90 import limits
from fusible.kernels.sm90.prepared import Glu
from fusible.ops import GroupedLinear
from fusible.ops.rows import as_2d

# Layouts of gate and linear columns that the kernels take: halves, or blocks of these columns.
INTERLEAVES = (None, *(1 << i for i in range(11)))


def features_fit(*linears: Any) -> tuple[Any, ...]:
    """Conditions: the sizes of linears are whole 16 bytes, which TMA reads."""
    return tuple(
        multiple_of(size, limits.MULTIPLE_OF)
        for linear in linears
        for size in (linear.in_features, linear.out_features)
    )


def readable(kernels: Any, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The weights in a layout that TMA reads: as they are, or copied where they have another."""
    fits, strides = kernels.has_matrix_layout, weights[0].stride()
    if all([(fits(w) or fits(w.mT)) and w.stride() == strides for w in weights]):
        return weights
    return [_copy(w) for w in weights]


def _copy(t: Tensor) -> Tensor:
    """A copy where a kernel can read it: contiguous, and from an address of its own."""
    return t.clone(memory_format=torch.contiguous_format)


def as_matrix(kernels: Any, t: Tensor) -> Tensor:
    """``t`` as ``[rows, features]``, contiguous in its features."""
    rows = as_2d(t)
    return rows if kernels.has_matrix_layout(rows) else _copy(rows)


def as_vector(t: Tensor) -> Tensor:
    """``t`` as one contiguous dimension."""
    return t if t.dim() == 1 and t.is_contiguous() else t.reshape(-1).contiguous()


class CheckedProducts:
    """The products of a grouped linear over operands of any layout, each of them checked.

    The methods are those of `fusible.kernels.sm90.prepared.Products`; ``w`` is the weight.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def of(self, w: Sequence[Tensor]) -> Sequence[Tensor]:
        """A weight as the methods take it."""
        return readable(self._kernels, w)

    def ends(self, split_sizes: Tensor, rows: int) -> Tensor:
        """First row past each group."""
        return self._kernels.group_ends(split_sizes, rows)

    def forward(
        self,
        x: Tensor,
        w: Sequence[Tensor],
        ends: Tensor,
        bias: Tensor | None = None,
        row_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The grouped product."""
        return self._kernels.grouped_gemm(x, w, ends, bias, row_scale, out=out)

    def glu(
        self,
        x: Tensor,
        w: Sequence[Tensor],
        ends: Tensor,
        scales: Tensor,
        glu: Glu,
        bias: Tensor | None = None,
        keep: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """The pre-activation, if it is kept, and the activation."""
        return self._kernels.grouped_gemm_glu(
            x, w, ends, scales, bias=bias, store_preact=keep, **glu._asdict()
        )

    def dgrad(
        self, dy: Tensor, w: Sequence[Tensor], ends: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """The input's gradient."""
        return self._kernels.grouped_gemm(dy, w, ends, transpose_w=True, out=out)

    def dglu(
        self,
        dy: Tensor,
        w: Sequence[Tensor],
        ends: Tensor,
        preact: Tensor,
        scales: Tensor,
        glu: Glu,
        overwrite: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of the pre-activation, the activation once more, gradient of the scales."""
        return self._kernels.grouped_gemm_dglu(
            dy, w, ends, preact, scales, overwrite=overwrite, **glu._asdict()
        )

    def wgrad(self, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        """``a[rows of e].T @ b[rows of e]`` for each group e."""
        a, b = as_matrix(self._kernels, a), as_matrix(self._kernels, b)
        return self._kernels.grouped_wgrad(a, b, ends)


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
    kernels = provider("sm90")
    found = kernels.products(rows, *[(shape_of(linear), weights) for linear, weights in linears])
    if found is None or not (bias is None or found[0].fits(bias)):
        rows = [as_matrix(kernels, t) for t in rows]
        found = [CheckedProducts(kernels)] * len(linears)
    return rows, [
        (product, product.of(weights)) for product, (_, weights) in zip(found, linears, strict=True)
    ]


def glu_of(act: ScaledGLU) -> Glu:
    """An activation as the kernels take it."""
    formula, _, options = act.glu()
    return Glu(formula.__name__, act.glu_interleave_size or 0, **options)
