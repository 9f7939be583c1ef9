"""The provider of cuDNN's kernels for SM100: its front end, or a replacement in tests."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# It may be a module's name, imported at the first launch: plans do not need the package.
_provider: Any = "cudnn"


def provider() -> Any:
    """``cudnn`` (nvidia-cudnn-frontend), or what has wrappers of the same names and signatures.

    The rules require the version that has them.
    """
    return importlib.import_module(_provider) if isinstance(_provider, str) else _provider


@contextmanager
def use_provider(replacement: Any) -> Iterator[None]:
    """Take the kernels from ``replacement``, an object or a module's name; None changes nothing."""
    global _provider  # noqa: PLW0603 - as in `checking`, one for the process
    outer = _provider
    _provider = outer if replacement is None else replacement
    try:
        yield
    finally:
        _provider = outer
