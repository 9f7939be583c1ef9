"""Effects of a module's call besides its class's ``forward``: hooks, patches, compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch import nn


class _Patches:
    """How often what a call of some module runs was set on the module itself."""

    count = 0


patches = _Patches()
_CALLED = ("forward", "_compiled_call_impl")


class PatchesCounted(nn.Module):
    """A module that counts its patches: ``module.forward = ...`` and ``module.compile()``."""

    slot_values: ClassVar[Mapping[str, Any]] = {}
    """Names and initial values of the slots; a replica, a copy of ``__dict__``, has none."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An object with nothing but its slots."""
        made = super().__new__(cls)
        for name, value in cls.slot_values.items():
            object.__setattr__(made, name, value)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLED:
            patches.count += 1
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in _CALLED:
            patches.count += 1
        super().__delattr__(name)


HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
"""The hooks that a call of a module fires."""


def why_called(module: nn.Module) -> str | None:
    """Why a call of ``module`` does more than its class's ``forward``; None if it does not."""
    for name, words in HOOKS.items():
        if getattr(module, name):
            return f"has {words}"
    if module._compiled_call_impl is not None:
        return "is compiled by itself"
    return "has a forward of its own" if "forward" in vars(module) else None
