"""What outlives a conversion or a load of an op, and whose state dicts it takes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fusible.recipes.tensor import attributes_of, stack, unstack

State = dict[str, Any]


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Give parameters that replace others what was set on these (``main_grad``, tags).

    PyTorch keeps it where it changes a parameter's data, not where it makes a new parameter.
    """
    before = {name: attributes_of(p) for name, p in module._parameters.items() if p is not None}
    try:
        yield
    finally:
        for name, attributes in before.items():
            _give(module._parameters[name], attributes)


def deepcopy_with_attributes(module: nn.Module, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` of an op, whose parameters keep copies of what was set on them."""
    made = type(module).__new__(type(module))
    memo[id(module)] = made
    made.__setstate__(copy.deepcopy(module.__getstate__(), memo))
    for name, parameter in module._parameters.items():
        if parameter is not None:
            _give(made._parameters[name], copy.deepcopy(attributes_of(parameter), memo))
    return made


def _give(parameter: nn.Parameter | None, attributes: dict[str, Any]) -> None:
    if parameter is not None:
        for name, value in attributes.items():
            vars(parameter).setdefault(name, value)


def convert_layout(state: State, prefix: str, name: str, num_groups: int, *, single: bool) -> None:
    """Turn ``weight0`` ... of a state dict into one ``weight`` or back, as the module holds them.

    Leaves alone what is incomplete or there twice, for the load to complain about. Shards are
    gathered: their cuts differ.
    """
    whole, parts = prefix + name, [f"{prefix}{name}{group}" for group in range(num_groups)]
    held = [key for key in (whole, *parts) if key in state]
    if single and held == parts:
        state[whole] = stack([state.pop(part) for part in parts])
    elif not single and held == [whole] and len(state[whole]) == num_groups:
        state.update(zip(parts, unstack(state.pop(whole)), strict=True))
