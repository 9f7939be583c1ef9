"""What ``torch.compile`` should know of planning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def constant_when_traced(function: F) -> F:
    """Run a method for real while tracing, and take its result as a constant.

    Methods only: torch 2.11 takes no module as an argument of such a function.

    ``torch.compiler.assume_constant_result`` without importing the compiler, which takes seconds:
    it sets the same mark.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def keeps_graph() -> bool:
    """Whether what the running backward reads may be read again (``retain_graph``).

    Always so where it is traced: the compiler decides about memory itself.
    """
    if torch.compiler.is_compiling():
        return True
    return torch._C._autograd._get_current_graph_task_keep_graph()


def hooks_hold_saved() -> bool:
    """Whether what a forward saves now goes to ``saved_tensors_hooks``, which may keep it.

    Always so where it is traced.
    """
    if torch.compiler.is_compiling():
        return True
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Alike(Generic[T]):
    """Objects that are alive, by what makes them alike (hashable).

    Code compiled for one layer of a model serves the others where its guards hold, and these read
    what a layer has prepared. So who is traced prepares those alike, which were not called yet;
    else every layer would be compiled anew, and refused from the ninth on.
    """

    def __init__(self) -> None:
        self._members: dict[Any, WeakSet[T]] = {}

    def add(self, form: Any, member: T) -> None:
        """Note an object."""
        self._members.setdefault(form, WeakSet()).add(member)

    def others(self, form: Any, member: T) -> Iterator[T]:
        """All of a form but ``member``."""
        return (m for m in tuple(self._members.get(form, ())) if m is not member)
