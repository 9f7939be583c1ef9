"""Which object fused ops get an architecture's kernels from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_providers: dict[str, Any] = {}


def provider(arch: str) -> Any:
    """The kernels of an architecture (``"sm90"``): the real ones, or their stand-in in a test.

    Raises:
        LookupError: there are none.
    """
    if arch not in _providers:
        known = ", ".join(_providers) or "none"
        raise LookupError(f"kernels must be provided for {arch} before they run, got {known}")
    return _providers[arch]


@contextmanager
def provided(arch: str, stand_in: Any | None) -> Iterator[None]:
    """Let fused ops get the kernels of ``arch`` from ``stand_in``, unless that is None."""
    outer = dict(_providers)
    if stand_in is not None:
        _providers[arch] = stand_in
    try:
        yield
    finally:
        _providers.clear()
        _providers.update(outer)
