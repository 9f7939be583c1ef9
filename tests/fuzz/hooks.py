"""Hooks of modules, done alike to an op and to its reference."""

from __future__ import annotations

from typing import Any

from torch import nn


def _times(values: Any, factor: float) -> Any:
    """The first of one or more tensors, multiplied."""
    if isinstance(values, tuple):
        return (_times(values[0], factor), *values[1:])
    return None if values is None else values * factor


def watch(module: nn.Module, *seen: Any) -> None:
    """Sees, and changes nothing."""


def double_output(module: nn.Module, args: Any, output: Any) -> Any:
    return _times(output, 2.0)


def double_input(module: nn.Module, args: Any) -> Any:
    return _times(args, 2.0)


def triple_grad_input(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return _times(grad_input, 3.0)


def triple_grad_output(module: nn.Module, grad_output: Any) -> Any:
    return _times(grad_output, 3.0)
