"""The caller's memory for results: what it must not overlap, and what reads it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from fusible.fuser.context import OperationContext
from fusible.fuser.memory import memory, read_over


class _GivenGrads(threading.local):
    """Gradients that backwards on this thread have returned in the caller's buffers."""

    grads: tuple[tuple[int, TensorWeakRef], ...] = ()
    """Each with the graph task that it is of."""


_given = _GivenGrads()


def check_buffers(
    ops: Sequence[Any],
    inputs: Sequence[Any],
    kwargs: Sequence[dict[str, Any]],
    modules: Sequence[Any],
) -> None:
    """Refuse memory for results that overlaps what ``modules`` read, or other such memory.

    ``ops`` are those of them that were given ``kwargs``.

    Raises:
        ValueError: naming both.
    """
    names = ["the input", *[f"extra input {k}" for k, _ in enumerate(inputs[1:])]]
    reads = [(n, t) for n, t in zip(names, inputs, strict=True) if isinstance(t, Tensor)]
    for op, of_op in zip(ops, kwargs, strict=True):
        for name, t in of_op.items():
            if name in op.buffer_keywords and isinstance(t, Tensor):
                what = f"the caller's {name!r}"
                _check_buffer(what, t, reads, modules)
                reads.append((what, t))


def check_grad_input(
    ops: Sequence[Any],
    context: OperationContext,
    grads: Sequence[Tensor | None],
    saved: Sequence[Tensor | None],
) -> None:
    """Refuse memory for the input's gradient that overlaps what the backward reads.

    Also what the same call of ``backward()`` has returned there before and still holds, to sum it
    with others for instance.

    Raises:
        ValueError: naming both.
    """
    buffer = vars(context.forward).get("grad_input")
    if buffer is None:
        return
    names = ["the output's gradient"] + ["an extra output's gradient"] * (len(grads) - 1)
    reads = [*zip(names, grads, strict=True), *[("a saved tensor", t) for t in saved]]
    task = torch._C._current_graph_task_id()
    known = [ref() for of_task, ref in _given.grads if of_task == task]
    reads.extend([("the gradient that another op has returned in its buffer", t) for t in known])
    found = [(what, t) for what, t in reads if t is not None]
    _check_buffer("the caller's 'grad_input'", buffer, found, ops)


def returned_grad(context: OperationContext, grad: Tensor | None, to_leaf: bool) -> Tensor | None:
    """The input's gradient as autograd gets it: noted, if it is in the caller's buffer.

    A reference to a leaf's is also held, which makes autograd copy it into ``.grad``: the next
    backward would write to the buffer before it adds to ``.grad``.
    """
    buffer = vars(context.forward).get("grad_input")
    if grad is None or buffer is None or memory(grad) != memory(buffer):
        return grad
    grad = grad.detach()  # which none but autograd holds
    if to_leaf:
        context.forward.returned_grad = grad
    alive = [entry for entry in _given.grads if entry[1]() is not None]
    _given.grads = (*alive, (torch._C._current_graph_task_id(), TensorWeakRef(grad)))
    return grad


def _check_buffer(
    name: str, buffer: Tensor, reads: Iterable[tuple[str, Tensor]], modules: Sequence[Any]
) -> None:
    for what in read_over(buffer, reads, modules):
        raise ValueError(
            f"{name} must share no memory with {what}, which is read after it is written, got "
            "one that does; give another buffer"
        )
