"""A cache of weights as operands of quantized products, from one forward to the next."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusible.calls import may_cache
from fusible.recipes.matrix import Uses
from fusible.recipes.tensor import QuantizedTensor
from fusible.recipes.wrapper import UnseenWrites


class _Steps:
    """Steps of all optimizers so far, counted in `counting_steps`.

    Fused optimizers write parameters without a change of their versions.
    """

    count = 0


@contextmanager
def counting_steps() -> Iterator[None]:
    """Count the steps of all ``torch.optim.Optimizer`` inside."""

    def count(*_: object) -> None:
        _Steps.count += 1

    handle = register_optimizer_step_post_hook(count)
    try:
        yield
    finally:
        handle.remove()


class _Entry(NamedTuple):
    state: tuple[Any, ...]
    """What tells the tensors and their values from others; see `_state`."""
    held: Sequence[Any]
    """Parameters, and memory, which nothing else may get; weak references to the other tensors."""
    gone: Sequence[ref[Tensor]]
    """References whose tensor has been freed: its id may be another tensor's now."""
    operands: dict[Hashable, tuple[Uses, Any]]
    """By key: the uses that operands are for, and the operands."""

    @classmethod
    def of(cls, state: tuple[Any, ...], stored: Sequence[Tensor], *, hold: bool) -> Self:
        """An entry of `stored_tensors`; of a quantized one it keeps what its pieces tell.

        With ``hold`` their memory too, which the state then names.

        A parameter itself: PyTorch refuses to swap one that has a weak reference, as conversions
        and loads do under ``torch.__future__.set_swap_module_params_on_conversion``; one that is
        replaced lives until the op's next forward. A parametrization, and so an adapter of peft,
        swaps a parameter of a subclass with itself.
        """
        gone: list[ref[Tensor]] = []
        plain = [t for t in stored if not isinstance(t, QuantizedTensor)]
        held = [t if isinstance(t, nn.Parameter) else ref(t, gone.append) for t in plain]
        memory = [t.untyped_storage() for t in plain] if hold else []
        return cls(state, (*held, *memory), gone, {})


class OperandCache:
    """The quantized weights of one op, kept while its weights are the same tensors.

    Args:
        until_updated: only while they have the same values, too, as far as versions and memory of
            tensors and steps of optimizers tell; of weights without a version nothing is cached.
        shards: parameters that the weights are gathered from, whose versions count instead.
    """

    def __init__(self, until_updated: bool, shards: Sequence[Tensor] = ()) -> None:
        self.until_updated = until_updated
        self._shards = tuple(shards)
        # Replaced as a whole: other threads may run the op.
        self._cached = _Entry.of((), (), hold=False)

    def get(
        self,
        stored: Sequence[Tensor],
        key: Hashable,
        make: Callable[[], Any],
        uses: Uses,
    ) -> Any:
        """The cached result of ``make`` for the `stored_tensors` of weights and this ``key``.

        An entry is for the ``uses`` that it was made for; one for more of them replaces it.
        """
        if self.until_updated and any([t.is_inference() for t in stored]):
            return make()  # it has no version
        entry, state = self._cached, self._state(stored)
        if entry.state != state or entry.gone:
            if self.until_updated and not all([t.is_leaf for t in stored]):
                return make()
            # The old operands are freed before new ones are made.
            entry = self._cached = _Entry.of(state, stored, hold=self.until_updated)
        # Operands can be read without waiting on the stream on which they are made.
        on_cuda = stored[0].is_cuda
        key = key, torch._C._cuda_getCurrentRawStream(stored[0].device.index) if on_cuda else 0
        cached = entry.operands.get(key)
        if cached is None or not (cached[0] == uses or all(map(operator.ge, cached[0], uses))):
            # Autograd cannot save what inference mode made.
            with torch.inference_mode(False), torch.no_grad():
                cached = entry.operands[key] = uses, make()
        return cached[1]

    def _state(self, stored: Sequence[Tensor]) -> tuple[Any, ...]:
        """What changes where tensors are others or, with ``until_updated``, may have other values.

        An assignment to ``.data`` changes no version, and may give another view of the same memory.
        """
        if not self.until_updated:
            return tuple([(id(t), t.dtype, t.device) for t in stored])
        of_shards = [t._version for t in self._shards]
        # The memory of gathered weights moves; their storage stays.
        memory = [t.untyped_storage() if of_shards else t.data_ptr() for t in stored]
        states = [(id(t), t.dtype, t._version, t.shape, t.stride()) for t in stored]
        return _Steps.count, UnseenWrites.gathers, of_shards, memory, states


def stored_tensors(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The weights, and what those consist of that are stored quantized."""
    stored = list(weights)
    for w in weights:
        if isinstance(w, QuantizedTensor):
            stored += w.pieces().values()
    return stored


_copies: dict[int, OperandCache] = {}
"""Of stored weights, by the id of the first tensor of the first one, as long as that exists."""


def cached_copy(
    weights: Sequence[QuantizedTensor],
    key: Hashable,
    make: Callable[[], Any],
    uses: Uses,
) -> Any:
    """What ``make`` makes of stored weights, once for their values; freed with their memory.

    See `OperandCache.get`. The result must not hold the tensors that the weights consist of.

    The caller promises nothing: every write to a quantized tensor, eager or compiled, changes its
    version or a piece's, or is counted by `UnseenWrites`.
    """
    if UnseenWrites.captured or not may_cache():
        return make()
    stored = stored_tensors(weights)
    anchor = stored[len(weights)]
    cache = _copies.get(id(anchor))
    if cache is None:
        cache = _copies[id(anchor)] = OperandCache(until_updated=True)
        # Another thread may have been first.
        finalize(anchor, _copies.pop, id(anchor), None).atexit = False
    return cache.get(stored, key, make, uses)
