"""Who owns memory: what may be written to in a run, and what else reads it.

An op may write to a tensor that only the run reads: made in this pass, and read by nothing else
that is alive. To the caller's memory it writes where the caller asks for it (``in_place=True``,
``op_kwargs``), unless something else would read the result in its place.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import TensorWeakRef

from fusible.fuser.context import OperationContext, Tensors
from fusible.fuser.wiring import CALLER, Output, Wiring, op_at

Reads = Iterable[tuple[str, Any]]
"""Descriptions of readers, each with the tensor that is read; other values are skipped."""

_PLAIN = Tensor, torch.nn.Parameter


def storage_id(t: Tensor) -> int:
    """An identifier of the storage of ``t``, also of an empty or a fake tensor."""
    return t.untyped_storage()._cdata


# --- tensors that the run made -------------------------------------------------------------------


class AliasTracker:
    """Tracks which tensors of a pass only the run reads, so that an op may write to them.

    Others read ``read``, before the pass or after it.
    """

    def __init__(self, read: Iterable[Tensor | None]) -> None:
        self._read = {storage_id(t) for t in read if t is not None}
        # Weak references, which keep the addresses of freed storages from being given to others.
        self._retained: dict[int, StorageWeakRef] = {}

    def retain(self, tensors: Iterable[Any]) -> None:
        """Note the tensors among these, which an op may go on reading after it ran."""
        for t in tensors:
            if isinstance(t, Tensor):
                self._retained[storage_id(t)] = StorageWeakRef(t.untyped_storage())

    def unshared(self, tensors: Tensors, others: Iterable[Tensor | None]) -> list[bool]:
        """Which of an op's tensors are plain and read by nothing else; others read ``others``."""
        readers = Counter(storage_id(t) for t in chain(tensors, others) if t is not None)

        def is_unshared(t: Tensor | None) -> bool:
            if t is None or type(t) is not Tensor or repeats_elements(t):
                return False
            storage = storage_id(t)
            known = storage in self._read or storage in self._retained
            return readers[storage] == 1 and not known

        return list(map(is_unshared, tensors))

    def mark_writable_grads(
        self,
        contexts: Sequence[OperationContext],
        grad_output: Tensor,
        grad_extra: Sequence[Tensors],
        others: Tensors,
    ) -> None:
        """Set on an op's contexts which of its gradients it may write to; ``others`` are read."""
        grads = [grad_output, *chain.from_iterable(grad_extra)]
        contexts[-1].writable_grad_output, *rest = self.unshared(grads, others)
        own = iter(rest)
        for context, of_op in zip(contexts, grad_extra, strict=True):
            context.writable_extra = frozenset([k for k, _ in enumerate(of_op) if next(own)])


class InputAliasTracker(AliasTracker):
    """Finds the extra inputs that the ops of a forward may write to.

    A caller's tensor: unless something else reads it afterwards. One that the run made: only if
    nothing else reads it.
    """

    def __init__(
        self,
        callers: Sequence[Tensor],
        ops: Sequence[Any],
        wiring: Wiring,
        contexts: Sequence[OperationContext],
        produced: Mapping[int, Tensors],
    ) -> None:
        super().__init__(callers)
        self._ops, self._wiring = ops, wiring
        self._contexts, self._produced = contexts, produced

    def mark_writable_inputs(self, x: Tensor, inputs: Sequence[Tensors], start: int) -> None:
        """Set on the contexts which extra inputs the step from op ``start`` on may write to."""
        for i, of_op in enumerate(inputs, start):
            if self._ops[i].writes_extra_inputs:
                self._contexts[i].writable_extra = frozenset(
                    slot
                    for slot, t in enumerate(of_op)
                    if t is not None and self._may_write((i, slot), t, x, start)
                )

    def _may_write(self, target: Output, t: Tensor, x: Tensor, start: int) -> bool:
        i, slot = target
        producer, k = self._wiring.sources[i][slot]
        if producer == CALLER and k in self._wiring.copied_inputs:
            return True
        readers = list(self._readers(start, target))
        if producer != CALLER:
            is_unshared = self.unshared([t, x], readers)[0]
            return is_unshared and not any(overlapping(t, (), self._ops))
        if self._contexts[i].requires_grad:  # a fused op may save its input
            readers.append(x)
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{type(self._ops[i]).__name__} must have in_place=False inside "
                "torch.utils.checkpoint, got True; the forward that it repeats would add to the "
                "extra input once more"
            )
        of = t._base if t._is_view() else t
        is_leaf = of is not None and of.is_leaf and self._contexts[i].needs.extra_inputs[slot]
        reads = [("another reader", other) for other in readers]
        return not (is_leaf or repeats_elements(t) or any(overlapping(t, reads, self._ops)))

    def _readers(self, start: int, target: Output) -> Iterator[Tensor | None]:
        """The tensors that the ops from ``start`` on read, but for one of their extra inputs."""
        for context in self._contexts[:start]:
            yield from context.to_save if context.requires_grad else ()
        read = list(self._wiring.public)
        for i in range(start, len(self._ops)):
            sources = enumerate(self._wiring.sources[i])
            read += [source for slot, source in sources if (i, slot) != target]
        yield from [self._produced[op][slot] for op, slot in read if op < start]


# --- memory of the caller ------------------------------------------------------------------------


class _ReturnedGrads(threading.local):
    """Gradients returned in the caller's buffers on this thread, each with its graph task."""

    grads: tuple[tuple[int, TensorWeakRef], ...] = ()


_returned = _ReturnedGrads()


def check_buffers(
    ops: Sequence[Any],
    inputs: Sequence[Any],
    kwargs: Sequence[dict[str, Any]],
    modules: Sequence[Any],
) -> None:
    """Raise ValueError for memory for results that overlaps what ``modules`` read, or other such.

    ``ops`` are those of them that were given ``kwargs``.
    """
    names = ["the input", *[f"extra input {k}" for k, _ in enumerate(inputs[1:])]]
    reads = [*zip(names, inputs, strict=True)]
    for op, of_op in zip(ops, kwargs, strict=True):
        for name, t in of_op.items():
            if name in op.buffer_keywords and isinstance(t, Tensor):
                what = f"the caller's {name!r}"
                _check_apart(what, t, reads, modules)
                reads.append((what, t))


def check_grad_input(
    ops: Sequence[Any], context: OperationContext, grads: Tensors, saved: Tensors
) -> None:
    """Raise ValueError for memory for the input's gradient that overlaps what the backward reads.

    Also what the same call of ``backward()`` has returned there before and still holds, to sum it
    with others for instance.
    """
    buffer = vars(context.forward).get("grad_input")
    if buffer is None:
        return
    names = ["the output's gradient"] + ["an extra output's gradient"] * (len(grads) - 1)
    reads = [*zip(names, grads, strict=True), *[("a saved tensor", t) for t in saved]]
    task = torch._C._current_graph_task_id()
    known = [ref() for of_task, ref in _returned.grads if of_task == task]
    reads.extend([("the gradient that another op has returned in its buffer", t) for t in known])
    _check_apart("the caller's 'grad_input'", buffer, reads, ops)


def returned_grad(context: OperationContext, grad: Tensor | None, to_leaf: bool) -> Tensor | None:
    """The input's gradient as autograd gets it: noted, if it is in the caller's buffer.

    If the input is a leaf, a second reference makes autograd copy the gradient into ``.grad``, so
    that the next backward does not overwrite it.
    """
    buffer = vars(context.forward).get("grad_input")
    if grad is None or buffer is None or storage_id(grad) != storage_id(buffer):
        return grad
    grad = grad.detach()  # which none but autograd holds
    if to_leaf:
        context.forward.returned_grad = grad
    alive = [entry for entry in _returned.grads if entry[1]() is not None]
    _returned.grads = (*alive, (torch._C._current_graph_task_id(), TensorWeakRef(grad)))
    return grad


def _check_apart(name: str, t: Tensor, reads: Reads, modules: Sequence[Any]) -> None:
    for what in overlapping(t, reads, modules):
        raise ValueError(
            f"{name} must share no memory with {what}, which is read after it is written, got "
            "one that does; give another buffer"
        )


# --- overlap -------------------------------------------------------------------------------------


def overlapping(t: Tensor, reads: Reads, modules: Sequence[Any]) -> Iterator[str]:
    """The memory that overlaps ``t``, of ``reads`` and the modules' parameters and buffers.

    A parameter's ``grad`` and ``main_grad`` count too.
    """
    yield from (what for what, r in reads if isinstance(r, Tensor) and overlap(t, r))
    is_apart = _quick_test(t)
    for i, module in enumerate(modules):
        for path, part in module.named_modules():
            for name, held in chain(part._parameters.items(), part._buffers.items()):
                if held is None:
                    continue
                grad = held.grad if held.is_leaf else None
                main_grad = getattr(held, "main_grad", None)
                for of, other in (("", held), ("grad of ", grad), ("main_grad of ", main_grad)):
                    if other is None or is_apart(other):
                        continue
                    if isinstance(other, Tensor) and overlap(t, other):
                        yield f"{of}{path and path + '.'}{name} of {op_at(modules, i)}"


def _quick_test(t: Tensor) -> Callable[[Any], bool]:
    """A quick test: True only of tensors that do not overlap ``t``, and of most of these."""
    if not (_has_address(t) and t.is_contiguous()):
        return lambda other: False
    start, stop = t.data_ptr(), t.data_ptr() + t.nbytes

    def is_apart(other: Any) -> bool:
        if type(other) not in _PLAIN:
            return False
        first = other.data_ptr()
        return first >= stop or (first + other.nbytes <= start and other.is_contiguous())

    return is_apart


def repeats_elements(t: Tensor) -> bool:
    """Whether elements of ``t`` may share a place, as those of an expanded tensor do."""
    span = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += stride * (size - 1)
    return False


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have bytes in common; other columns of one matrix have none.

    True also for some other interleaved tensors that have none.
    """
    return any(_overlap(p, q) for p in _plain(a) for q in _plain(b))


def _plain(t: Tensor) -> list[Tensor]:
    """A tensor itself, or the tensors that a quantized or distributed one is made of."""
    if not is_traceable_wrapper_subclass(t):
        return [t]
    names, _ = t.__tensor_flatten__()
    return [part for name in names for part in _plain(getattr(t, name))]


def _overlap(a: Tensor, b: Tensor) -> bool:
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    if not (_has_address(a) and _has_address(b)):
        return storage_id(a) == storage_id(b)
    (start, stop, pitch, width), (first, last, other_pitch, other_width) = _rows(a), _rows(b)
    if first >= stop or last <= start:
        return False
    if pitch != other_pitch:
        return True
    shift = (first - start) % pitch
    return shift < width or shift + other_width > pitch


def _has_address(t: Tensor) -> bool:
    return type(t) in _PLAIN and not t.is_meta


def _rows(t: Tensor) -> tuple[int, int, int, int]:
    """Start and end address of the elements; pitch and width in bytes of the rows of them."""
    dims: list[tuple[int, int]] = []  # stride and size, from the innermost on, merged
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = dims[-1][0], dims[-1][1] * size
        elif size > 1 and stride > 0:
            dims.append((stride, size))
    *inner, (pitch, rows) = dims or [(1, 1)]
    width = 1 + sum(stride * (size - 1) for stride, size in inner)
    start, size = t.data_ptr(), t.element_size()
    stop = start + ((rows - 1) * pitch + width) * size
    return start, stop, max(pitch, width) * size, width * size
