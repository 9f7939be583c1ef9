"""Grouped products with weights as they are stored, in a number format, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fusible.kernels.glu import Glu
from fusible.kernels.grouped import definitions
from fusible.recipes.formats import NumberFormat
from fusible.recipes.stored import StoredWeights


def grouped_mm(
    x: Tensor,
    w: StoredWeights,
    fmt: NumberFormat,
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    *,
    product: Callable[..., Tensor] = definitions.grouped_mm,
) -> Tensor:
    """`definitions.grouped_mm` of weights stored in a format, by their values in x's dtype.

    A kernel that reads the weights as they are stored need not round the values.
    """
    return product(x, w.values(fmt, x), ends, bias, row_scale)


def grouped_glu(
    x: Tensor,
    w: StoredWeights,
    fmt: NumberFormat,
    ends: Tensor,
    scales: Tensor | None,
    glu: Glu,
    bias: Tensor | None = None,
    *,
    product: Callable[..., tuple[Tensor, Tensor]] = definitions.grouped_glu,
) -> Tensor:
    """The activation of `definitions.grouped_glu`, as `grouped_mm`."""
    return product(x, w.values(fmt, x), ends, scales, glu, bias, False)[1]
