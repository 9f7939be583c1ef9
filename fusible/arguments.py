"""Checks of the arguments of public functions and constructors."""

from __future__ import annotations


def check_bools(who: str, **flags: object) -> None:
    """Raise TypeError for a flag that is no bool: anything else would count as True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} of {who} must be a bool, got {flag!r:.200}")
