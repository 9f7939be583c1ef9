"""Where fused ops get an architecture's kernels from: the real ones, or a stand-in for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusible.kernels import sm90

# The packages import their compilers at the first launch, so that plans need none.
_providers: dict[str, Any] = {"sm90": sm90}


def provider(arch: str) -> Any:
    """The kernels of an architecture (``"sm90"``), or what stands in for them."""
    return _providers[arch]


@contextmanager
def provided(arch: str, stand_in: Any) -> Iterator[None]:
    """Let fused ops get the kernels of ``arch`` from ``stand_in``, unless that is None."""
    outer = dict(_providers)
    if stand_in is not None:
        _providers[arch] = stand_in
    try:
        yield
    finally:
        _providers.clear()
        _providers.update(outer)
