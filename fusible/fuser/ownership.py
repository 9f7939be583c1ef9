"""Memory ownership: which tensors the ops of a run may write to, and which ones overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from fusible.fuser.context import OperationContext
from fusible.fuser.memory import memory, named, read_over, repeats_elements
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
    backward: Callable[..., Any], owner: Owner, others: Tensors, retains: bool
) -> Callable[..., Any]:
    """An op's backward, whose contexts say which of its gradients it may write to.

    ``others`` are what is read after it; ``retains`` says that it may itself go on reading.
    """

    def run(
        contexts: Sequence[OperationContext], grad_output: Tensor, grad_extra: Sequence[Tensors]
    ) -> Any:
        grads = [grad_output, *chain.from_iterable(grad_extra)]
        contexts[-1].writable_grad_output, *rest = owner.own(grads, others)
        own = iter(rest)
        for context, of_op in zip(contexts, grad_extra, strict=True):
            context.writable_extra = frozenset([k for k, _ in enumerate(of_op) if next(own)])
        returned = backward(contexts, grad_output, grad_extra)
        if retains:
            owner.retain(t for t in tree_leaves((grads, returned)) if isinstance(t, Tensor))
        return returned

    return run


class InputOwner:
    """Which extra inputs the ops of a forward may write to, for those that write to such.

    One of the caller's in any case, which is what in_place=True requests; it is refused where
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
        self._owner = Owner(caller_inputs)
        self._written: list[tuple[int, Tensor]] = []

    def before(
        self,
        x: Tensor,
        inputs: Sequence[Tensors],
        produced: Sequence[Tensors],
        start: int,
    ) -> None:
        """Set on the contexts which extra inputs the step that starts at op ``start`` may write to.

        Raises:
            ValueError: a tensor of the caller is to be written to that something else reads, whose
                elements share a place, or that is a leaf which requires a gradient.
            RuntimeError: one is, inside a backward, where checkpointing repeats a forward.
        """
        self._written = []
        for i, of_op in enumerate(inputs, start):
            if not self._ops[i].writes_extra_inputs:
                continue
            writable = []
            for slot, ((producer, k), t) in enumerate(
                zip(self._wiring.sources[i], of_op, strict=True)
            ):
                if t is None:
                    continue
                readers = list(self._readers(produced, start, (i, slot)))
                if producer == CALLER and k in self._wiring.copies:
                    writable.append(slot)
                elif producer == CALLER:
                    self._check_target(i, slot, t, readers)
                    self._written.append((i, t))
                    writable.append(slot)
                elif self._owner.own([t, x], [t for _, t in readers])[0] and not any(
                    read_over(t, (), self._ops)
                ):
                    writable.append(slot)
            self._contexts[i].writable_extra = frozenset(writable)

    def after(self, is_users: bool, tensors: Iterable[Tensor | None], stop: int) -> None:
        """Check what ops[:stop] saved; a user's op may hold ``tensors``, its arguments.

        Raises:
            ValueError: an op saved a tensor of the caller that was written to.
        """
        if is_users:
            self._owner.retain(tensors)
        for i, t in self._written:
            check_apart(named(self._ops, i), t, self._saved(stop))

    def _readers(
        self, produced: Sequence[Tensors], start: int, target: tuple[int, int]
    ) -> Iterator[tuple[str, Tensor]]:
        """What is read once the ops from ``start`` on run, but for one of their extra inputs."""
        yield from self._saved(start)
        wiring, ops = self._wiring, self._ops
        for op, slot in wiring.public:
            if op < start and (t := produced[op][slot]) is not None:
                yield f"extra output {slot} of {named(ops, op)}, which the caller gets", t
        for i in range(start, len(ops)):
            for slot, (producer, k) in enumerate(wiring.sources[i]):
                if (i, slot) == target or producer >= start:
                    continue
                t = self._caller_inputs[1 + k] if producer == CALLER else produced[producer][k]
                if t is not None:
                    yield f"extra input {slot} of {named(ops, i)}", t

    def _saved(self, stop: int) -> Iterator[tuple[str, Tensor]]:
        for i, context in enumerate(self._contexts[:stop]):
            for t in context.to_save if context.requires_grad else ():
                if t is not None:
                    yield f"what {named(self._ops, i)} saved for its backward", t

    def _check_target(
        self, i: int, slot: int, t: Tensor, readers: Iterable[tuple[str, Tensor]]
    ) -> None:
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
        of = t._base if t._is_view() else t
        if of is not None and of.is_leaf and self._contexts[i].needs.extra_inputs[slot]:
            raise ValueError(
                f"extra input of {name} must not be a leaf tensor that requires a gradient, or a "
                "view of one, with in_place=True, as for PyTorch's operations in place; give a "
                "copy, or make it False"
            )
        check_apart(named(self._ops, i), t, readers, self._ops)


def check_apart(
    op_name: str, t: Tensor, readers: Iterable[tuple[str, Tensor]], modules: Sequence[Any] = ()
) -> None:
    """Refuse that the op ``op_name`` writes to ``t`` where something else, or a module, reads it.

    Raises:
        ValueError: naming both.
    """
    for what in read_over(t, readers, modules):
        raise ValueError(
            f"{op_name} must not write to memory of {what}, got in_place=True and such an "
            "extra input; make it False"
        )
