"""Modules of ops that stand in for a module of another project, without being part of its tree."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

ATTRIBUTE = "_fusible_block"
"""Where a module holds what stands in for it: in ``__dict__``, so that its state stays its own."""


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``module.named_modules()``, and after each module what stands in for it, under its name."""
    for name, part in module.named_modules():
        yield name, part
        stand_in = vars(part).get(ATTRIBUTE)
        if stand_in is not None:
            yield from stand_in.named_modules(prefix=name)
