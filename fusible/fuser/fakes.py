"""Modules run on fake tensors, and left as they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class _ReadOnly(TorchDispatchMode):
    """Gives operations that write a fake tensor in the place of a real one.

    ``FakeTensorMode`` itself lets some (``add_``, ``mul_``) write to real tensors.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _fake(self, t: Tensor) -> Tensor:
        return self._mode.from_tensor(t) if type(t) in (Tensor, nn.Parameter) else t


@contextmanager
def leaving_alone(modules: Iterable[nn.Module], mode: FakeTensorMode) -> Iterator[None]:
    """In ``mode``, where the modules may be given its fake tensors beside their own real ones.

    Their parameters and buffers stay as they are, and so do attributes to which they bind a tensor.
    Random numbers are drawn of fake tensors only, which no generator notices.
    """
    states = [state for m in modules for state in (vars(m), m._parameters, m._buffers)]
    before = [dict(state) for state in states]
    try:
        with mode, _ReadOnly(mode):
            yield
    finally:
        for state, known in zip(states, before, strict=True):
            for name, value in [*state.items()]:
                if value is known.get(name) or not _holds_fake(value):
                    continue
                if name in known:
                    state[name] = known[name]
                else:
                    del state[name]


def _holds_fake(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value))
