"""Modules run on fake tensors, and left as they were."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_torch_logger = logging.getLogger("torch._subclasses.fake_tensor")


class _ReadOnly(TorchDispatchMode):
    """Gives operations that write a fake tensor in the place of a real one.

    ``FakeTensorMode`` itself lets some (``add_``, ``mul_``) write to real tensors.
    """

    supports_higher_order_operators = True

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not isinstance(func, HigherOrderOperator) and func._schema.is_mutable:
            args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _fake(self, t: Tensor) -> Tensor:
        return self._mode.from_tensor(t) if type(t) in (Tensor, nn.Parameter) else t


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Autocast keeps the weights that it casts: later calls must not find fake ones."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextmanager
def _without_logged_errors() -> Iterator[None]:
    """PyTorch logs each error of an operation on fake tensors, with its stack, and raises it."""
    thread = threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    _torch_logger.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        _torch_logger.removeFilter(is_of_another_thread)


@contextmanager
def restoring(
    modules: Iterable[nn.Module], mode: FakeTensorMode, *, all_attributes: bool = False
) -> Iterator[None]:
    """Runs under ``mode``; afterwards every attribute rebound to a fake tensor is put back.

    The modules keep their real parameters and buffers and may be called with fake inputs. Entries
    of dictionaries and lists that are attributes are put back too; with ``all_attributes``, so is
    whatever else was rebound. Random numbers are drawn for fake tensors only, which changes the
    state of no generator.
    """
    before = [(held, held.copy()) for held in _containers([vars(m) for m in modules])]
    values = [t for _, held in before for t in _items(held) if type(t) in (Tensor, nn.Parameter)]
    data = [(t, t.detach()) for t in values]
    try:
        with mode, _ReadOnly(mode), _without_autocast_cache(), _without_logged_errors():
            yield
    finally:
        for t, known in data:
            if t.device != known.device:  # t.data = fake
                t.data = known
        for held, known in before:
            if isinstance(held, list):
                held[:] = known if all_attributes or _holds_fake(held) else held
                continue
            if all_attributes:
                held.update({name: value for name, value in known.items() if name not in held})
            for name, value in [*held.items()]:
                if value is known.get(name, held) or not (all_attributes or _holds_fake(value)):
                    continue
                if name in known:
                    held[name] = known[name]
                else:
                    del held[name]


def _containers(pending: list[Any]) -> Iterator[Any]:
    """The dictionaries and lists, with those that they hold."""
    seen = set()
    while pending:
        held = pending.pop()
        if type(held) in (dict, OrderedDict, list) and id(held) not in seen:
            seen.add(id(held))
            yield held
            pending.extend(_items(held))


def _items(held: Any) -> Iterable[Any]:
    return held if isinstance(held, list) else held.values()


def _holds_fake(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value))
