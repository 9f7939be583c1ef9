"""Grouped linears and grouped MLPs on Hopper as one autograd node each: least work for the host.

They take what asks for nothing but the kernels; all else goes the fused ops' own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.fused.sm90_operands import prepare, shape_of
from fusible.fuser.plan import GradNeeds
from fusible.fuser.tracing import keeps_graph
from fusible.kernels import grouped
from fusible.kernels.provider import provider
from fusible.kernels.sm90.prepared import Glu
from fusible.ops import GroupedLinear


def is_plain(linear: GroupedLinear) -> bool:
    """Whether a linear is its product, and its gradients are autograd's."""
    return not (
        linear.has_bias
        or linear.accumulate_into_main_grad
        or linear.delay_wgrad_compute
        or linear.split_alignment > 1
    )


def _fit(split_sizes: Tensor, x: Tensor, linear: GroupedLinear) -> bool:
    """Whether these may be the sizes of the linear's groups, and nothing asks to read them."""
    return (
        split_sizes.shape == (linear.num_groups,)
        and split_sizes.dtype in (torch.int64, torch.int32)
        and split_sizes.device == x.device
        and not grouped.checks_enabled()
    )


class DirectLinear:
    """One ``GroupedLinear``: operands ``x, split_sizes, *weights``."""

    def __init__(self, linear: GroupedLinear, needs: GradNeeds) -> None:
        self._linear, self._shape, self._needs = linear, shape_of(linear), needs

    def prepared(self, *operands: Tensor) -> Any:
        """The product that runs these operands, or None."""
        x, split_sizes, *weights = operands
        if not (_fit(split_sizes, x, self._linear) and weights[0].is_contiguous()):
            return None
        return provider("sm90").products([x], (self._shape, weights))

    def forward(self, prepared: Any, *operands: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output, and what the backward reads."""
        x, split_sizes, *weights = operands
        ((product, w),) = prepared
        ends = provider("sm90").group_ends(split_sizes, x.shape[0])
        return product.forward(x, w, ends), (x, ends, *weights)

    def backward(self, saved: Sequence[Tensor], grad_output: Tensor) -> Sequence[Tensor | None]:
        """The gradients of the operands."""
        x, ends, *weights = saved
        (dy, x), ((product, w),) = prepare([grad_output, x], (self._linear, weights))
        dweights: Sequence[Tensor | None] = [None] * len(weights)
        if self._needs.params[0]:
            dweights = self._linear.divided(product.wgrad(dy, x, ends))
        dx = product.dgrad(dy, w, ends) if self._needs.input else None
        return dx, None, *dweights


class DirectMLP:
    """FC1, a scaled gated activation, FC2: ``x, split_sizes, scales, split_sizes, *weights``."""

    def __init__(
        self, fc1: GroupedLinear, glu: Glu, fc2: GroupedLinear, needs: Sequence[GradNeeds]
    ) -> None:
        self._fc1, self._glu, self._fc2 = fc1, glu, fc2
        self._shape1, self._shape2 = shape_of(fc1), shape_of(fc2)
        self._needs1, _, self._needs2 = needs
        self._cut = len(fc1.weights())  # among the weights

    def prepared(self, *operands: Tensor) -> Any:
        """The products that run these operands, or None."""
        x, split_sizes, scales, _, *weights = operands
        if not (
            scales.is_contiguous()
            and scales.shape == x.shape[:1]
            and scales.is_floating_point()
            and scales.device == x.device
            and _fit(split_sizes, x, self._fc1)
            and weights[0].is_contiguous()
            and weights[self._cut].is_contiguous()
        ):
            return None
        first, second = weights[: self._cut], weights[self._cut :]
        return provider("sm90").products([x], (self._shape1, first), (self._shape2, second))

    def forward(self, prepared: Any, *operands: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output, and what the backward reads."""
        x, split_sizes, scales, _, *weights = operands
        (first, w1), (second, w2) = prepared
        ends = provider("sm90").group_ends(split_sizes, x.shape[0])
        keep = self._needs2.requires_grad
        preact, hidden = first.glu(x, w1, ends, scales, self._glu, None, keep)
        return second.forward(hidden, w2, ends), (x, ends, scales, preact, *weights)

    def backward(self, saved: Sequence[Tensor], grad_output: Tensor) -> Sequence[Tensor | None]:
        """The gradients of the operands."""
        x, ends, scales, preact, *weights = saved
        fc1, fc2, cut = self._fc1, self._fc2, self._cut
        (dy, x, preact), ((first, w1), (second, w2)) = prepare(
            [grad_output, x, preact], (fc1, weights[:cut]), (fc2, weights[cut:])
        )
        dpreact, hidden, dscales = second.dglu(
            dy, w2, ends, preact, scales, self._glu, not keeps_graph()
        )
        dweights: list[Tensor | None] = [None] * len(weights)
        if self._needs2.params[0]:
            dweights[cut:] = fc2.divided(second.wgrad(dy, hidden, ends))
        del hidden  # its memory serves what follows
        if self._needs1.params[0]:
            dweights[:cut] = fc1.divided(first.wgrad(dpreact, x, ends))
        dx = first.dgrad(dpreact, w1, ends) if self._needs1.input else None
        return dx, None, dscales, None, *dweights
