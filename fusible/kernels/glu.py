"""A gated activation, as the grouped products with one in their epilogue take it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fusible import formulas


class Glu(NamedTuple):
    """The formula of a gated activation, the layout of its columns, and the formula's constants.

    Gates are the first half of the pre-activation's columns, or the even ones of its blocks of
    ``interleave`` columns. The constants belong to ``clamped_qgeglu``.
    """

    activation: str = "swiglu"
    interleave: int = 0
    limit: float = 0.0
    alpha: float = 0.0
    offset: float = 0.0

    def forward(self, preact: Tensor, scales: Tensor) -> Tensor:
        """The activation times the scale of each row."""
        return getattr(formulas, self.activation)(preact, scales, *self._options())

    def backward(self, dy: Tensor, preact: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the pre-activation and of the scales."""
        formula = getattr(formulas, f"{self.activation}_backward")
        return formula(dy, preact, scales, *self._options())

    def _options(self) -> tuple[Any, ...]:
        clamps = () if self.activation == "swiglu" else self[2:]
        return self.interleave or None, *clamps
