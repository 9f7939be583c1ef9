"""The providers of kernels of another package: that package, or its replacement in tests."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# A provider may be a module's name, imported at the first launch: plans do not need the package.
_providers: dict[str, Any] = {"sm100": "cudnn"}


def provider(arch: str) -> Any:
    """The provider of the kernels of an architecture.

    That of ``"sm100"`` is ``cudnn`` (nvidia-cudnn-frontend), or has wrappers of the same names and
    signatures. The rules require the version that has them.
    """
    module = _providers[arch]
    return importlib.import_module(module) if isinstance(module, str) else module


@contextmanager
def use_provider(arch: str, replacement: Any) -> Iterator[None]:
    """Take the kernels of ``arch`` from ``replacement``, an object or a module's name.

    None changes nothing.
    """
    outer = dict(_providers)
    if replacement is not None:
        _providers[arch] = replacement
    try:
        yield
    finally:
        _providers.clear()
        _providers.update(outer)
