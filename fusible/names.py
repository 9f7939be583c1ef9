"""Suggestions for misspelt names in errors."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(got: str, known: Iterable[str]) -> str | None:
    """The known name nearest to ``got``; None if none is near."""
    return next(iter(get_close_matches(got, list(known), n=1)), None)


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """``"; did you mean 'name'?"`` for the known name nearest to ``got``; empty if none is near."""
    near = nearest(got, known)
    return "" if near is None else f"; did you mean {near!r}?"
