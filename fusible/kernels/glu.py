"""A gated activation with its options: an argument of the grouped products that fuse one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fusible.activations import GATED


class Glu(NamedTuple):
    """A gated activation of `fusible.activations`, the layout of its columns, and its options.

    Gates are the first half of the pre-activation's columns, or the even ones of its blocks of
    ``interleave`` columns. ``limit``, ``alpha`` and ``offset`` are the options of its row in
    :data:`fusible.activations.GATED`, in order; the others are not read.
    """

    activation: str = "swiglu"
    interleave: int = 0
    limit: float = 0.0
    alpha: float = 0.0
    offset: float = 0.0

    def forward(self, preact: Tensor, scales: Tensor | None) -> Tensor:
        """The activation, times the scale of each row if there are scales."""
        row = GATED[self.activation]
        return row.forward(preact, scales, self.interleave or None, **self._options())

    def backward(self, dy: Tensor, preact: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the pre-activation and of the scales."""
        row = GATED[self.activation]
        dpreact, dscales = row.backward(
            dy, preact, scales, self.interleave or None, **self._options()
        )
        assert dscales is not None
        return dpreact, dscales

    def _options(self) -> dict[str, float]:
        options = GATED[self.activation].options
        return {option.keyword: v for option, v in zip(options, self[2:], strict=False)}
