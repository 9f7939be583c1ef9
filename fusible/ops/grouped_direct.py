"""Grouped linears and grouped MLPs on Hopper as one autograd node each, with the least host time.

They run calls that need nothing but the kernels; the fused ops run all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.fuser.plan import GradNeeds
from fusible.fuser.tracing import keeps_graph
from fusible.kernels import grouped, sm90
from fusible.kernels.grouped import Glu
from fusible.kernels.sm90 import tiles


def has_default_gradients(linear: Any) -> bool:
    """Whether a linear is its product alone and hands all its gradients to autograd."""
    return not (
        linear.has_bias
        or linear.accumulate_into_main_grad
        or linear.delay_wgrad_compute
        or linear.split_alignment > 1
    )


class _Direct:
    """The products of some linears, found once for few rows and once for many."""

    def __init__(self, *linears: Any) -> None:
        self._linears = linears
        self._shapes = [
            (linear.num_groups, linear.out_features, linear.in_features) for linear in linears
        ]
        self._groups, _, self._features = self._shapes[0]
        self._by_row_count: dict[bool, Any] = {}

    def _takes(self, x: Tensor, split_sizes: Tensor) -> bool:
        """Whether these are the input and the groups' sizes, whose values no check reads."""
        return (
            x.shape[-1] == self._features
            and split_sizes.shape == (self._groups,)
            and split_sizes.dtype in (torch.int64, torch.int32)
            and split_sizes.is_contiguous()
            and split_sizes.device == x.device
            and not grouped.checks_enabled()
        )

    def _products(self, rows: Sequence[Tensor], weights: Sequence[Sequence[Tensor]]) -> Any:
        """The products, each with its weight, that run these operands, or None."""
        many = tiles.has_many_rows(rows[0].shape[0], self._groups)
        found = self._by_row_count.get(many)
        if found is None or not sm90.still_fits(
            rows, [w[0] for w in weights if len(w) == 1], self._shapes
        ):
            found = sm90.find_products(rows, *zip(self._shapes, weights, strict=True))
            # A weight gradient has its weight's layout; these products write contiguous ones only.
            if found is None or not all([w[0].is_contiguous() for w in weights]):
                return None
            self._by_row_count[many] = found
        return [(p, p.weight_address(w)) for p, w in zip(found, weights, strict=True)]

    def _backward_products(
        self, rows: Sequence[Tensor], weights: Sequence[Sequence[Tensor]]
    ) -> Any:
        """The rows and the products, by library ops where no other runs these operands."""
        found = self._products(rows, weights)
        if found is not None:
            return rows, found
        return rows, [(_LIBRARY_PRODUCTS, w) for w in weights]


class _LibraryProducts:
    """The products of a backward by library ops, for operands that must be checked or traced."""

    @staticmethod
    def dgrad(dy: Tensor, w: Sequence[Tensor], ends: Tensor) -> Tensor:
        """``dy @ w[e]``."""
        return grouped.grouped_mm(dy, w, ends, transpose_w=True)

    dglu = staticmethod(grouped.grouped_dglu)
    wgrad = staticmethod(grouped.grouped_wgrad)


_LIBRARY_PRODUCTS = _LibraryProducts()


class DirectLinear(_Direct):
    """One ``GroupedLinear``: operands ``x, split_sizes, *weights``."""

    def __init__(self, linear: Any, needs: GradNeeds) -> None:
        super().__init__(linear)
        self._needs = needs

    def prepared(self, *operands: Tensor) -> Any:
        """The product that runs these operands, or None."""
        x, split_sizes, *weights = operands
        return self._products([x], [weights]) if self._takes(x, split_sizes) else None

    def forward(self, prepared: Any, *operands: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output, and what the backward reads."""
        x, split_sizes, *weights = operands
        ((product, w),) = prepared
        ends = product.ends(split_sizes, x.shape[0])
        return product.forward(x, w, ends), (x, ends, *weights)

    def backward(
        self, saved: Sequence[Tensor], grad_output: Tensor, held: bool
    ) -> Sequence[Tensor | None]:
        """The gradients of the operands; ``held`` says that others may read what was saved."""
        x, ends, *weights = saved
        (dy, x), ((product, w),) = self._backward_products([grad_output, x], [weights])
        dx = product.dgrad(dy, w, ends) if self._needs.input else None
        dweights: Sequence[Tensor | None] = [None] * len(weights)
        if self._needs.params[0]:
            dweights = self._linears[0].as_weight_grads(product.wgrad(dy, x, ends))
        return dx, None, *dweights


class DirectMLP(_Direct):
    """FC1, a scaled gated activation, FC2: ``x, split_sizes, scales, split_sizes, *weights``."""

    def __init__(self, fc1: Any, glu: Glu, fc2: Any, needs: Sequence[GradNeeds]) -> None:
        super().__init__(fc1, fc2)
        self._glu, self._cut = glu, fc1.num_weights
        self._needs1, _, self._needs2 = needs

    def prepared(self, *operands: Tensor) -> Any:
        """The products that run these operands, or None."""
        x, split_sizes, scales, _, *weights = operands
        if not (
            scales.shape == x.shape[:1]
            and scales.is_floating_point()
            and scales.is_contiguous()
            and scales.device == x.device
            and self._takes(x, split_sizes)
        ):
            return None
        return self._products([x], [weights[: self._cut], weights[self._cut :]])

    def forward(self, prepared: Any, *operands: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output, and what the backward reads."""
        x, split_sizes, scales, _, *weights = operands
        (first, w1), (second, w2) = prepared
        ends = first.ends(split_sizes, x.shape[0])
        save_preact = self._needs2.requires_grad
        preact, hidden = first.glu(x, w1, ends, scales, self._glu, None, save_preact)
        return second.forward(hidden, w2, ends), (x, ends, scales, preact, *weights)

    def backward(
        self, saved: Sequence[Tensor], grad_output: Tensor, held: bool
    ) -> Sequence[Tensor | None]:
        """The gradients of the operands; ``held`` says that others may read what was saved."""
        x, ends, scales, preact, *weights = saved
        (fc1, fc2), cut = self._linears, self._cut
        (dy, x, preact), ((first, w1), (second, w2)) = self._backward_products(
            [grad_output, x, preact], [weights[:cut], weights[cut:]]
        )
        dpreact, hidden, dscales = second.dglu(
            dy, w2, ends, preact, scales, self._glu, overwrite=not (held or keeps_graph())
        )
        dweights: list[Tensor | None] = [None] * len(weights)
        if self._needs2.params[0]:
            dweights[cut:] = fc2.as_weight_grads(second.wgrad(dy, hidden, ends))
        del hidden  # its memory serves what follows
        dx = first.dgrad(dpreact, w1, ends) if self._needs1.input else None
        if self._needs1.params[0]:
            dweights[:cut] = fc1.as_weight_grads(first.wgrad(dpreact, x, ends))
        return dx, None, dscales, None, *dweights
