"""State of ops through conversions and loads, and the state dicts that they take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from fusible.recipes.checkpoint_state import prepare_load, save_pieces
from fusible.recipes.quantization import HIGH_PRECISION
from fusible.recipes.tensor import QuantizedTensor, are_alike, stack, unstack
from fusible.recipes.wrapper import attributes_of

State = dict[str, Any]


class ModuleState(nn.Module):
    """A module whose parameters keep their attributes and formats: converted, loaded or copied."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # PyTorch does not see quantized parameters meanwhile. They keep their format, unless their
        # dtype becomes one to which no format is dequantized: then they become ordinary tensors.
        own = {name: p for name, p in self._parameters.items() if isinstance(p, QuantizedTensor)}
        with _attributes_kept(self):
            self._parameters.update(dict.fromkeys(own))
            try:
                super()._apply(fn, recurse)
            finally:
                self._parameters.update(own)
            for name, parameter in own.items():
                self._parameters[name] = _converted(parameter, fn)
        return self

    # No hooks of state dicts, which belong to one module: copies would run the original's.
    def _save_to_state_dict(self, destination: State, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_pieces(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: State, prefix: str, *args: Any) -> None:
        if type(self).set_extra_state is nn.Module.set_extra_state:
            # Transformer Engine's ops save their quantizers' state, of which there is none here.
            state_dict.pop(f"{prefix}_extra_state", None)
        prepare_load(self, state_dict, prefix, *args)
        with _attributes_kept(self):
            super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Parameters keep copies of what was set on them; a process group cannot be copied: shared.
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        state = self.copied_state()
        groups = getattr(torch.distributed, "ProcessGroup", ())
        memo.update({id(value): value for value in state.values() if isinstance(value, groups)})
        made.__setstate__(copy.deepcopy(state, memo))
        for name, parameter in self._parameters.items():
            if parameter is not None:
                copied: Any = made._parameters[name]
                copied.grad = None  # as nn.Parameter's copy; a quantized one keeps it
                _give(copied, copy.deepcopy(attributes_of(parameter), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return self.copied_state()

    def copied_state(self) -> dict[str, Any]:
        """The attributes of a copy, which no run has captured yet."""
        return {**self.__dict__}

    def copied(self) -> Self:
        """``copy.copy`` of this op, also where PyTorch refuses to pickle it (parametrized)."""
        copied = type(self).__new__(type(self))
        copied.__setstate__(self.copied_state())
        return copied


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Give parameters that replace others what was set on these (``main_grad``, tags).

    PyTorch keeps it where it changes a parameter's data, not where it makes a new parameter.
    """
    before = {name: attributes_of(p) for name, p in module._parameters.items() if p is not None}
    try:
        yield
    finally:
        for name, attributes in before.items():
            _give(module._parameters[name], attributes)


@torch.no_grad()
def _converted(parameter: Any, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    grad = parameter.grad
    new, new_grad = fn(parameter), None if grad is None else fn(grad)
    if new.dtype in HIGH_PRECISION:
        new = parameter.stored_alike(new)
    parameter.grad = None  # it may be of another dtype, on another device
    if isinstance(new, QuantizedTensor) and torch._has_compatible_shallow_copy_type(parameter, new):
        parameter.data = new
    else:  # in FP64, or from or to the meta device
        parameter = nn.Parameter(new, parameter.requires_grad)
    parameter.grad = new_grad
    return parameter


def _give(parameter: nn.Parameter | None, attributes: dict[str, Any]) -> None:
    if parameter is not None:
        for name, value in attributes.items():
            vars(parameter).setdefault(name, value)


def convert_layout(
    state: State, prefix: str, name: str, num_groups: int, errors: list[str], *, single: bool
) -> None:
    """Turn ``weight0`` ... of a state dict into one ``weight`` or back, as the module holds them.

    Parts that do not make up one are an error of the load, added to ``errors``; what is there
    twice, or of another number of groups, is left to PyTorch. Shards are gathered: their cuts
    differ.
    """
    whole, parts = prefix + name, [f"{prefix}{name}{group}" for group in range(num_groups)]
    held = [key for key in (whole, *parts) if key in state]
    if single and held == parts and are_alike([state[part] for part in parts]):
        state[whole] = stack([state.pop(part) for part in parts])
    elif single and held and whole not in held:
        got = [f"{part} of shape {tuple(state[part].shape)}" for part in held]
        missing = [f"no {part}" for part in parts if part not in state]
        errors.append(
            f"{whole} must be one tensor, or {parts[0]} to {parts[-1]} of one shape and format, "
            f"got {', '.join(missing or got)}"
        )
    elif not single and held == [whole] and state[whole].shape[:1] == (num_groups,):
        state.update(zip(parts, unstack(state.pop(whole)), strict=True))
