"""The table of activations: functions with their derivatives, and options, a row each.

A new activation is a row here, a subclass of its kind in ``ops/activation.py`` (times a scale per
row, ``ops/scaled_activation.py``), and a row of the same name in ``kernels/device/activations.py``,
with which our kernels have it.
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
class ActivationFormula:
    """A function of each element, or a gated linear unit."""

    function: Unary | Callable[..., tuple[Unary, Unary | None]]
    """Of each element; of a unit, what gives those of its gate and linear half, from options."""
    options: tuple[Option, ...] = ()
    sm100: str = ""
    """Its name in the cuDNN front end; empty if the kernels that are called here lack it."""

    @property
    def sides(self) -> int:
        """Columns of the input for one of the output."""
        return 1 if isinstance(self.function, Unary) else 2

    def forward(
        self,
        x: Tensor,
        scales: Tensor | None = None,
        interleave: int | None = None,
        **options: float,
    ) -> Tensor:
        """See :func:`fusible.formulas.scaled` and :func:`fusible.formulas.gated`."""
        if isinstance(self.function, Unary):
            return formulas.scaled(x, scales, self.function)
        return formulas.gated(x, scales, interleave, *self.function(**options))

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        scales: Tensor | None = None,
        interleave: int | None = None,
        **options: float,
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the input and of the scales, if there are any."""
        if isinstance(self.function, Unary):
            return formulas.scaled_backward(dy, x, scales, self.function)
        return formulas.gated_backward(dy, x, scales, interleave, *self.function(**options))


UNARY: dict[str, ActivationFormula] = {
    "gelu": ActivationFormula(formulas.GELU),
    "qgelu": ActivationFormula(formulas.QGELU),
    "relu": ActivationFormula(formulas.RELU),
    "srelu": ActivationFormula(formulas.SRELU, sm100="srelu"),
    "silu": ActivationFormula(formulas.SILU),
}
"""Functions of each element by name."""

GATED: dict[str, ActivationFormula] = {
    "glu": ActivationFormula(lambda: (formulas.SIGMOID, None)),
    "geglu": ActivationFormula(lambda: (formulas.GELU, None)),
    "qgeglu": ActivationFormula(lambda: (formulas.QGELU, None)),
    "reglu": ActivationFormula(lambda: (formulas.RELU, None)),
    "sreglu": ActivationFormula(lambda: (formulas.SRELU, None)),
    "swiglu": ActivationFormula(lambda: (formulas.SILU, None), sm100="swiglu"),
    "clamped_qgeglu": ActivationFormula(
        formulas.clamped_halves,
        (
            Option("limit", "limit", "positive"),
            Option("alpha", "alpha"),
            Option("offset", "glu_linear_offset"),
        ),
        sm100="geglu",
    ),
    "situglu": ActivationFormula(
        formulas.soft_capped_halves,
        (
            Option("beta1", "beta1", "finite and positive"),
            Option("beta2", "beta2", "finite and positive"),
        ),
        sm100="situglu",
    ),
}
"""Gated linear units by name."""

ACTIVATIONS: dict[str, ActivationFormula] = {**UNARY, **GATED}
SM100_ACTIVATIONS = {name: row.sm100 for name, row in ACTIVATIONS.items() if row.sm100}
