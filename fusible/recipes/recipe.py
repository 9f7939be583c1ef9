"""What a recipe is: a frozen, hashable choice of number formats that ops and plans can read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Number formats of the operands of every matrix product run under it.

    Frozen and hashable, because plans are cached by recipe. Subclasses set ``name``, which is what
    conditions of fusion rules read and what ``explain`` prints.
    """

    @property
    def name(self) -> str:
        """Short lower-case name of the format family, for instance ``"mxfp8"``."""
        return type(self).__name__.lower()
