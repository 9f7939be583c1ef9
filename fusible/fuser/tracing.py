"""Helpers for code that ``torch.compile`` traces: constants, saved tensors, modules alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def constant_when_traced(function: F) -> F:
    """``torch.compiler.assume_constant_result`` without importing the compiler, for methods only.

    The method then runs in Python. torch 2.11 takes no module as an argument of a function.
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


class WeakGroups(Generic[T]):
    """Weak references to objects, in groups by the classes that they are of or consist of.

    Code compiled for one layer of a model serves the others where its guards hold, and the guards
    read what planning has set on a layer. So the layer that is traced first plans for the other
    layers of its group too; else each would be compiled again, up to the recompilation limit.
    """

    def __init__(self) -> None:
        # By the ids of classes: that which PyTorch makes for a parametrized module refers to it.
        self._members: dict[tuple[int, ...], WeakSet[T]] = {}
        self._lock = threading.RLock()

    def add(self, kinds: Iterable[type], member: T) -> None:
        """Add an object to a group; a new group drops those without objects."""
        key = tuple(map(id, kinds))
        with self._lock:
            if key not in self._members:
                self._members = {k: alive for k, alive in self._members.items() if alive}
            self._members.setdefault(key, WeakSet()).add(member)

    def others(self, kinds: Iterable[type], member: T) -> Iterator[T]:
        """The objects of a group without ``member``."""
        key = tuple(map(id, kinds))
        with self._lock:  # no set may grow while it is read
            alive = tuple(self._members.get(key, ()))
        return (m for m in alive if m is not member)
