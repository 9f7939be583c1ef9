"""Ops that run while the output of another op, or its gradient, is sent between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusible.fuser.context import OperationContext
from fusible.fuser.registry import is_ours
from fusible.fuser.wiring import Output, Wiring


class Overlap(NamedTuple):
    """The output of an op that ``communicates`` is read only after the ops in between.

    In the forward its output is completed before the step that reads it. In the backward its
    gradient is sent as soon as that step's backward has made it.
    """

    op: Any
    ops: slice  # the basic ops that it covers
    output: Output  # the extra output that passes its output on
    overlapped: slice  # the ops that run while it communicates
    reader: int  # the first op of the step that reads the output


def overlaps(
    ops: Sequence[Any], wiring: Wiring, steps: Sequence[tuple[Any, int, int]]
) -> Iterator[Overlap]:
    """The overlaps of a plan's forward or backward, from its steps ``(op, start, stop)`` in order.

    The op must be followed by one that passes its input, unread, to one later op
    (:class:`fusible.Swap`). That is how one run holds two branches: the second one, such as a
    shared expert, needs nothing of the first one's output.
    """
    starts = {i: start for _, start, stop in steps for i in range(start, stop)}
    first = {start: op for op, start, _ in steps}
    for op, start, stop in steps:
        swap = first.get(stop)  # by itself: an op that covers it may read its input
        if swap is None or swap is not ops[stop] or not (swap.passes_input and is_ours(type(swap))):
            continue
        if not (op.communicates and is_ours(type(op))):
            continue
        output = stop, 0
        readers = wiring.consumers.get(output, ())
        if len(readers) == 1 and output not in wiring.public:
            reader = starts[readers[0]]
            if reader > stop + 1:
                yield Overlap(op, slice(start, stop), output, slice(stop + 1, reader), reader)


def overlap_notes(
    ops: Sequence[Any], forward: Sequence[Any], backward: Sequence[Any]
) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """For each op, sentences of what runs during its communication, if it ``communicates``.

    ``forward`` and ``backward`` are the steps of a schedule.
    """
    for at, op in enumerate(ops):
        notes = []
        for what, of, steps in (
            ("its output", "", forward),
            ("its output's gradient", "the backward of ", backward),
        ):
            overlap = next((s.overlap for s in steps if s.stop == at + 1), None)
            if overlap is None:
                notes.append(
                    f"nothing runs while {what} is sent; a second branch after a Swap would"
                )
            else:
                names = ", ".join(type(hidden).__name__ for hidden in ops[overlap.overlapped])
                notes.append(f"{what} is sent while {of}{names} runs")
        yield op, tuple(notes) if op.communicates else ()


def defer(ctx: OperationContext, y: Tensor, complete: Callable[[], Tensor]) -> Tensor:
    """``y``, to be filled with what ``complete`` gives before an op reads it."""
    ctx.complete = lambda: y.copy_(complete())
    return y


def complete_output(ctx: OperationContext) -> None:
    """Fill the output of an op, if it was deferred."""
    if ctx.complete is not None:
        ctx.complete()
        ctx.complete = None
