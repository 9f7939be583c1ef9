"""Where kernels of another package come from: that package, or a stand-in for tests."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# What is named by a string is imported at the first launch, so that plans need none of it.
_providers: dict[str, Any] = {"sm100": "fusible.kernels.sm100.frontend"}


def provider(arch: str) -> Any:
    """The kernels of an architecture, or what stands in for them.

    ``"sm100"`` has the wrappers of the ``cudnn`` package (nvidia-cudnn-frontend), under their own
    names and with their own signatures.
    """
    found = _providers[arch]
    return importlib.import_module(found) if isinstance(found, str) else found


@contextmanager
def provided(arch: str, stand_in: Any) -> Iterator[None]:
    """Let fused ops get the kernels of ``arch`` from ``stand_in``, unless that is None.

    A stand-in may be a module's name.
    """
    outer = dict(_providers)
    if stand_in is not None:
        _providers[arch] = stand_in
    try:
        yield
    finally:
        _providers.clear()
        _providers.update(outer)
