"""A cache of weights as operands of quantized products, from one forward to the next."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

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


_Reference = ref[Tensor] | nn.Parameter | int


class _Entry(NamedTuple):
    stored: tuple[_Reference, ...] = ()
    versions: tuple[Any, ...] = ()
    operands: dict[Hashable, tuple[Uses, Any]] = {}  # noqa: RUF012 - never written to
    """By key: the uses that operands are for, and the operands."""


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
        self._cached = _Entry()

    def get(
        self,
        stored: tuple[Tensor, ...],
        key: Hashable,
        make: Callable[[], Any],
        uses: Uses,
    ) -> Any:
        """The cached result of ``make`` for the `stored_tensors` of weights and this ``key``.

        An entry is for the ``uses`` that it was made for; one for more of them replaces it.
        """
        entry = self._cached
        same = len(entry.stored) == len(stored) and all(map(_refers, entry.stored, stored))
        versions: tuple[Any, ...] = ()
        if self.until_updated:
            if not same and any([t.is_inference() or not t.is_leaf for t in stored]):
                return make()
            # An assignment to .data changes no version, and may give another view of the same
            # memory. Held, so that nothing else gets the memory.
            states = [
                (t._version, t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
                for t in stored
            ]
            of_shards = [t._version for t in self._shards]
            versions = _Steps.count, UnseenWrites.gathers, of_shards, states
        if not same or entry.versions != versions:
            # The old operands are freed before new ones are made.
            entry = self._cached = _Entry(tuple(map(_reference, stored)), versions, {})
        # Operands can be read without waiting on the stream on which they are made.
        device = stored[0].device
        cuda = device.type == "cuda"
        stream = torch._C._cuda_getCurrentRawStream(device.index) if cuda else 0
        key = key, stored[0].dtype, device, stream
        cached = entry.operands.get(key)
        if cached is None or not all(map(operator.ge, cached[0], uses)):
            # Autograd cannot save what inference mode made.
            with torch.inference_mode(False), torch.no_grad():
                cached = entry.operands[key] = uses, make()
        return cached[1]


def stored_tensors(weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The weights, and what those consist of that are stored quantized."""
    pieces = [p for w in weights if isinstance(w, QuantizedTensor) for p in w.pieces().values()]
    return *weights, *pieces


def _reference(t: Tensor) -> _Reference:
    """A weak reference to ``t``, or its id if it is quantized (its pieces have references).

    A parameter itself: PyTorch refuses to swap one that has a weak reference, as conversions and
    loads do under ``torch.__future__.set_swap_module_params_on_conversion``; one that is replaced
    lives until the op's next forward. A parametrization, and so an adapter of peft, swaps a
    parameter of a subclass with itself.
    """
    if isinstance(t, QuantizedTensor):
        return id(t)
    return t if isinstance(t, nn.Parameter) else ref(t)


def _refers(reference: _Reference, t: Tensor) -> bool:
    if isinstance(reference, int):
        return reference == id(t)
    return (reference() if isinstance(reference, ref) else reference) is t


_copies = WeakIdKeyDictionary()  # of stored weights, by the first tensor of the first one


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
    cache = _copies.get(anchor)
    if cache is None:
        cache = _copies[anchor] = OperandCache(until_updated=True)
    return cache.get(stored, key, make, uses)
