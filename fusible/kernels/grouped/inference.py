"""Grouped products of forwards without gradients, in plain PyTorch.

Kernels may add up the products of a row in an order that depends on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fusible.kernels.glu import Glu
from fusible.kernels.grouped import definitions


def grouped_mm(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    *,
    zero_tail: bool = True,
    product: Callable[..., Tensor] = definitions.grouped_mm,
) -> Tensor:
    """`definitions.grouped_mm`."""
    return product(x, w, ends, bias, row_scale, zero_tail=zero_tail)


def grouped_glu(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    scales: Tensor | None,
    glu: Glu,
    bias: Tensor | None = None,
    *,
    zero_tail: bool = True,
    product: Callable[..., tuple[Tensor, Tensor]] = definitions.grouped_glu,
) -> Tensor:
    """The activation of `definitions.grouped_glu`."""
    return product(x, w, ends, scales, glu, bias, False, zero_tail=zero_tail)[1]
