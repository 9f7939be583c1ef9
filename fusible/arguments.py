"""Checks of the arguments of public functions and constructors."""

from __future__ import annotations

from numbers import Real

from torch import Tensor


def check_bools(function: str, **flags: object) -> None:
    """Raise TypeError for a flag that is no bool: anything else would count as True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} of {function} must be a bool, got {flag!r:.200}")


def check_numbers(function: str, **values: object) -> None:
    """Raise TypeError for a constant that is no number: a tensor would get no gradient.

    And ValueError for NaN.
    """
    for name, value in values.items():
        if isinstance(value, Real) and value != value:  # noqa: PLR0124
            raise ValueError(f"{name} of {function} must not be NaN")
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(
                f"{name} of {function} must be a number, a constant that is not trained, got "
                f"{value!r:.200}; take .item() of a tensor, or define an op with a parameter"
            )


def described(t: object) -> str:
    """Describe an unfit value, or tensor, in an error message."""
    if not isinstance(t, Tensor):
        return "None" if t is None else type(t).__name__
    return f"{t.dtype} of shape {tuple(t.shape)} on {t.device}"
