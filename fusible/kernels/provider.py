"""Where fused ops get an architecture's kernels from: the real ones, or a stand-in for tests."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_stand_ins: dict[str, Any] = {}


def provider(arch: str) -> Any:
    """The kernels of an architecture: ``fusible.kernels.<arch>``, or what stands in for it.

    Imported at the first launch, so that plans for it can be made where it cannot run.
    """
    stand_in = _stand_ins.get(arch)
    return importlib.import_module(f"fusible.kernels.{arch}") if stand_in is None else stand_in


@contextmanager
def provided(arch: str, stand_in: Any) -> Iterator[None]:
    """Let fused ops get the kernels of ``arch`` from ``stand_in``, or the real ones if None."""
    outer = _stand_ins.get(arch)
    _stand_ins[arch] = stand_in
    try:
        yield
    finally:
        _stand_ins[arch] = outer
