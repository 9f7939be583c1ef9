"""What an error says of an unknown name."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """``"; did you mean 'name'?"`` for the known name nearest to ``got``; empty if none is near."""
    near = get_close_matches(got, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
