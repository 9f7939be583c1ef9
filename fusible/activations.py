"""The table of activations: functions, options, and which kernels have it, a row each.

A new activation is a row here and a subclass of its kind in ``ops/activation.py`` (times a scale
per row, ``ops/scaled_activation.py``). A kernel has it by a function of the row's name in its
``device/activations.py``, which the row then says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fusible import formulas
from fusible.arguments import check_numbers
from fusible.formulas import Unary

UNARY: dict[str, Unary] = {
    "gelu": formulas.GELU,
    "qgelu": formulas.QGELU,
    "relu": formulas.RELU,
    "srelu": formulas.SRELU,
    "silu": formulas.SILU,
}
"""Functions of each element; the dense kernels' backward with a bias has them all."""


class Option(NamedTuple):
    """A constant of a formula: its keyword, an op's attribute, and what it must be if not any."""

    keyword: str
    attribute: str
    must_be: str = ""

    def check(self, op_name: str, value: float) -> None:
        """Refuse another value.

        Raises:
            TypeError: it is no number.
            ValueError: it is not what it must be.
        """
        check_numbers(op_name, **{self.attribute: value})
        finite = "finite" not in self.must_be or math.isfinite(value)
        positive = "positive" not in self.must_be or value > 0
        if not (finite and positive):
            raise ValueError(f"{self.attribute} of {op_name} must be {self.must_be}, got {value}")


@dataclass(frozen=True)
class Gated:
    """A gated linear unit: the functions of its gate and linear half, from its options."""

    halves: Callable[..., tuple[Unary, Unary | None]]
    options: tuple[Option, ...] = ()
    sm90: bool = False
    """Whether the SM90 kernels have it."""
    sm100: str = ""
    """What the cuDNN front end calls it; empty if its kernels, as they are called here, lack it."""

    def forward(
        self,
        x: Tensor,
        scales: Tensor | None = None,
        interleave: int | None = None,
        **options: float,
    ) -> Tensor:
        """See :func:`fusible.formulas.gated`."""
        return formulas.gated(x, scales, interleave, *self.halves(**options))

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        scales: Tensor | None = None,
        interleave: int | None = None,
        **options: float,
    ) -> tuple[Tensor, Tensor | None]:
        """See :func:`fusible.formulas.gated_backward`."""
        return formulas.gated_backward(dy, x, scales, interleave, *self.halves(**options))


GATED: dict[str, Gated] = {
    "glu": Gated(lambda: (formulas.SIGMOID, None)),
    "geglu": Gated(lambda: (formulas.GELU, None)),
    "qgeglu": Gated(lambda: (formulas.QGELU, None)),
    "reglu": Gated(lambda: (formulas.RELU, None)),
    "sreglu": Gated(lambda: (formulas.SRELU, None)),
    "swiglu": Gated(lambda: (formulas.SILU, None), sm90=True, sm100="swiglu"),
    "clamped_qgeglu": Gated(
        formulas.clamped_halves,
        (
            Option("limit", "limit", "positive"),
            Option("alpha", "alpha"),
            Option("offset", "glu_linear_offset"),
        ),
        sm90=True,
        sm100="geglu",
    ),
    "situglu": Gated(
        formulas.soft_capped_halves,
        (
            Option("beta1", "beta1", "finite and positive"),
            Option("beta2", "beta2", "finite and positive"),
        ),
    ),
}
"""Gated linear units by name."""

SM90 = tuple(name for name, row in GATED.items() if row.sm90)
SM100 = {name: row.sm100 for name, row in GATED.items() if row.sm100}
