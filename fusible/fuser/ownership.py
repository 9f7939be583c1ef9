"""Memory ownership: which tensors the ops of a run may write to, and which ones overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from fusible.fuser.context import OperationContext
from fusible.fuser.wiring import CALLER, Wiring

Tensors = Sequence[Tensor | None]


class Owner:
    """Tracks which tensors of a pass only the run reads, so that an op may write to them.

    Such a tensor was made in this pass, and nothing else that is alive reads it.

    Args:
        read: tensors that others read, before the pass or after it.
    """

    def __init__(self, read: Iterable[Tensor | None]) -> None:
        self._read = {memory(t) for t in read if t is not None}
        # Weak references, which keep the addresses of freed storages from being given to others.
        self._retained: dict[int, StorageWeakRef] = {}

    def retain(self, tensors: Iterable[Tensor | None]) -> None:
        """Note tensors that an op may go on reading after it ran."""
        for t in tensors:
            if t is not None:
                self._retained[memory(t)] = StorageWeakRef(t.untyped_storage())

    def own(self, tensors: Tensors, others: Iterable[Tensor | None]) -> list[bool]:
        """Which of an op's tensors are own, while it reads all of them and others read ``others``.

        Plain tensors only, without elements that share a place.
        """
        readers = Counter(memory(t) for t in chain(tensors, others) if t is not None)

        def is_own(t: Tensor | None) -> bool:
            if t is None or type(t) is not Tensor or repeats_elements(t):
                return False
            place = memory(t)
            return readers[place] == 1 and place not in self._read and place not in self._retained

        return list(map(is_own, tensors))


def owned_grads(
    backward: Callable[..., Any], owner: Owner, others: Tensors, keeps: bool
) -> Callable[..., Any]:
    """An op's ``fuser_backward``, whose contexts say which of its gradients it may write to.

    ``others`` are what is read after it; ``keeps`` says that it may itself go on reading.
    """

    def run(
        contexts: Sequence[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Tensors],
    ) -> Any:
        grads = [grad_output, *chain.from_iterable(basic_op_grad_extra_outputs)]
        contexts[-1].writable_grad_output, *rest = owner.own(grads, others)
        own = iter(rest)
        for context, of_op in zip(contexts, basic_op_grad_extra_outputs, strict=True):
            context.writable_extra = frozenset([k for k, _ in enumerate(of_op) if next(own)])
        returned = backward(
            contexts, grad_output, basic_op_grad_extra_outputs=basic_op_grad_extra_outputs
        )
        if keeps:
            owner.retain(t for t in tree_leaves((grads, returned)) if isinstance(t, Tensor))
        return returned

    return run


class InputOwner:
    """Which extra inputs the ops of a forward may write to, for those that write to such.

    One of the caller's in any case, which is what in_place=True asks for; it is refused where
    something else would read the sum in its place. One that the run made only if it is its own.
    """

    def __init__(
        self,
        ops: Sequence[Any],
        wiring: Wiring,
        contexts: Sequence[OperationContext],
        caller_inputs: Sequence[Tensor],
    ) -> None:
        self._ops, self._wiring = ops, wiring
        self._contexts, self._caller_inputs = contexts, caller_inputs
        self._owner = Owner([*caller_inputs, *(t for _, t in _state(ops))])
        self._written: list[tuple[int, Tensor]] = []

    def before(
        self,
        x: Tensor,
        inputs: Sequence[Tensors],
        produced: Sequence[Tensors],
        start: int,
        stop: int,
    ) -> None:
        """Note on the contexts of ops[start:stop], which are about to run, what they may write to.

        Raises:
            ValueError: a tensor of the caller is to be written to that something else reads, or
                whose elements share a place.
            RuntimeError: one is, inside a backward, where checkpointing repeats a forward.
        """
        self._written = []
        for i, of_op in enumerate(inputs, start):
            if not self._ops[i].writes_extra_inputs:
                continue
            writable = []
            for slot, ((producer, _), t) in enumerate(
                zip(self._wiring.sources[i], of_op, strict=True)
            ):
                if t is None:
                    continue
                readers = list(self._readers(produced, start, (i, slot)))
                if producer == CALLER:
                    self._check_target(i, t, readers)
                    self._written.append((i, t))
                    writable.append(slot)
                elif self._owner.own([t, x], [t for _, t in readers])[0]:
                    writable.append(slot)
            self._contexts[i].writable_extra = frozenset(writable)

    def after(self, is_users: bool, tensors: Iterable[Tensor | None], stop: int) -> None:
        """Check what ops[:stop] saved; a user's op may have kept ``tensors``, that it was given.

        Raises:
            ValueError: an op saved a tensor of the caller that was written to.
        """
        if is_users:
            self._owner.retain(tensors)
        for i, t in self._written:
            self._check_apart(i, t, self._saved(stop))

    def _readers(
        self, produced: Sequence[Tensors], start: int, target: tuple[int, int]
    ) -> Iterator[tuple[str, Tensor]]:
        """What is read once the ops from ``start`` on run, but for one of their extra inputs."""
        yield from self._saved(start)
        wiring, ops = self._wiring, self._ops
        for op, slot in wiring.public:
            if op < start and (t := produced[op][slot]) is not None:
                yield f"extra output {slot} of {_named(ops, op)}, which the caller gets", t
        for i in range(start, len(ops)):
            for slot, (producer, k) in enumerate(wiring.sources[i]):
                if (i, slot) == target or producer >= start:
                    continue
                t = self._caller_inputs[1 + k] if producer == CALLER else produced[producer][k]
                if t is not None:
                    yield f"extra input {slot} of {_named(ops, i)}", t

    def _saved(self, stop: int) -> Iterator[tuple[str, Tensor]]:
        for i, context in enumerate(self._contexts[:stop]):
            for t in context.to_save if context.requires_grad else ():
                if t is not None:
                    yield f"what {_named(self._ops, i)} saved for its backward", t

    def _check_target(self, i: int, t: Tensor, readers: Iterable[tuple[str, Tensor]]) -> None:
        name = type(self._ops[i]).__name__
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{name} must have in_place=False inside torch.utils.checkpoint, got True; the "
                "forward that it repeats would add to the extra input once more"
            )
        if repeats_elements(t):
            raise ValueError(
                f"extra input of {name} must not be expanded with in_place=True, got strides "
                f"{t.stride()}; give a contiguous one"
            )
        self._check_apart(i, t, chain(readers, _state(self._ops)))

    def _check_apart(self, i: int, t: Tensor, readers: Iterable[tuple[str, Tensor]]) -> None:
        for what, read in readers:
            if overlap(t, read):
                raise ValueError(
                    f"{_named(self._ops, i)} must not write to memory of {what}, got "
                    "in_place=True and such an extra input; make it False"
                )


def _named(ops: Sequence[Any], i: int) -> str:
    return f"op {i} ({type(ops[i]).__name__})"


def _state(ops: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of ops, each with what it is."""
    for i, op in enumerate(ops):
        for name, t in chain(op.named_parameters(), op.named_buffers()):
            yield f"{name} of {_named(ops, i)}", t


# --- the caller's buffers -------------------------------------------------------------------------


def check_buffers(
    ops: Sequence[Any], inputs: Sequence[Tensor], kwargs: Sequence[dict[str, Any]]
) -> None:
    """Refuse memory for results that overlaps what the run reads, or other such memory.

    Raises:
        ValueError: naming both.
    """
    given = [
        (f"the caller's {name!r}", t)
        for op, of_op in zip(ops, kwargs, strict=True)
        for name, t in of_op.items()
        if name in op.buffer_keywords and isinstance(t, Tensor)
    ]
    if not given:
        return
    extra = [(f"extra input {k}", t) for k, t in enumerate(inputs[1:])]
    reads = [("the input", inputs[0]), *extra, *_state(ops), *_state_grads(ops)]
    for i, (name, t) in enumerate(given):
        _check_buffer(name, t, [*reads, *given[:i]])


def check_grad_input(
    ops: Sequence[Any], context: OperationContext, grads: Sequence[Tensor | None], saved: Tensors
) -> None:
    """Refuse memory for the input's gradient that overlaps what the backward reads.

    Raises:
        ValueError: naming both.
    """
    buffer = vars(context.forward).get("grad_input")
    if buffer is None:
        return
    names = ["the output's gradient"] + ["an extra output's gradient"] * (len(grads) - 1)
    reads = [*zip(names, grads, strict=True), *[("a saved tensor", t) for t in saved]]
    found = [(what, t) for what, t in reads if t is not None]
    _check_buffer("the caller's 'grad_input'", buffer, [*found, *_state_grads(ops)])


def _check_buffer(name: str, buffer: Tensor, reads: Iterable[tuple[str, Tensor]]) -> None:
    for what, t in reads:
        if overlap(buffer, t):
            raise ValueError(
                f"{name} must share no memory with {what}, which is read after it is written, got "
                "one that does; give another buffer"
            )


def _state_grads(ops: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """What the gradients of the ops' parameters are added to, each with what it is."""
    for what, t in _state(ops):
        for name in ("grad", "main_grad"):
            if isinstance(held := getattr(t, name, None), Tensor):
                yield f"{name} of {what}", held


# --- memory ---------------------------------------------------------------------------------------


def memory(t: Tensor) -> int:
    """An identifier of the storage of ``t``, also of an empty or a fake tensor."""
    return t.untyped_storage()._cdata


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
        return memory(a) == memory(b)
    (start, stop, pitch, width), (first, last, other_pitch, other_width) = _rows(a), _rows(b)
    if first >= stop or last <= start:
        return False
    if pitch != other_pitch:
        return True
    shift = (first - start) % pitch
    return shift < width or shift + other_width > pitch


def _has_address(t: Tensor) -> bool:
    return type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta


def _rows(t: Tensor) -> tuple[int, int, int, int]:
    """Addresses that the elements lie between; pitch and width in bytes of the rows of them."""
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
