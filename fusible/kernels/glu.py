"""An activation with its options: an argument of the grouped products that fuse one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fusible.activations import ACTIVATIONS, ActivationFormula
from fusible.recipes.formats import FP8_BLOCK


class Glu(NamedTuple):
    """An activation of `fusible.activations`, gated or not, the layout of columns, and its options.

    Gates are the first half of the pre-activation's columns, or the even ones of its blocks of
    ``interleave`` columns, which is 0 of an activation that is not gated. ``limit``, ``alpha`` and
    ``offset`` are the options of its row in :data:`fusible.activations.ACTIVATIONS`, in order; the
    others are not read.
    """

    activation: str = "swiglu"
    interleave: int = 0
    limit: float = 0.0
    alpha: float = 0.0
    offset: float = 0.0

    @property
    def row(self) -> ActivationFormula:
        """Its row in the table.

        Raises:
            ValueError: there is none of this name.
        """
        if self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation of Glu must be one of {known}, got {self.activation!r}")
        return ACTIVATIONS[self.activation]

    @property
    def sides(self) -> int:
        """Columns of the pre-activation for one of the activation: 2 if it is gated, else 1."""
        return self.row.sides

    def stripe(self, columns: int) -> int:
        """Neighbouring gate columns before their linear columns, in a pre-activation's columns."""
        return self.interleave or columns // self.sides

    def separates_blocks(self, columns: int) -> bool:
        """Whether gate and linear columns of a pre-activation are in blocks of 128 of their own."""
        return self.sides == 1 or self.stripe(columns) % FP8_BLOCK == 0

    @property
    def options(self) -> dict[str, float]:
        """The constants of its formula, by keyword."""
        return {o.keyword: v for o, v in zip(self.row.options, self[2:], strict=False)}

    def forward(self, preact: Tensor, scales: Tensor | None) -> Tensor:
        """The activation, times the scale of each row if there are scales."""
        return self.row.forward(preact, scales, self.interleave or None, **self.options)

    def backward(
        self, dy: Tensor, preact: Tensor, scales: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the pre-activation and, if there are scales, of these."""
        return self.row.backward(dy, preact, scales, self.interleave or None, **self.options)
