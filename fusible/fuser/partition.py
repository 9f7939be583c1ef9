"""Parts of a sequence of ops that run one after the other, and what each hands to later ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.fuser.memory import overlapping
from fusible.fuser.wiring import CALLER, Output, Wiring


class Part(NamedTuple):
    """Consecutive ops that run by themselves, or a module that is called.

    Its caller holds the extra inputs of the whole, then the extra outputs of each part, in order.
    """

    call: Any  # a run of the ops, or a module
    ops: slice
    inputs: tuple[int, ...]  # the places of its extra inputs among the tensors held
    inputs_to_copy: tuple[int, ...]  # indices in `inputs` to copy first: the part may write to them
    num_outputs: int | None
    """Of extra outputs. None if the module does not declare it: all then go to the caller."""
    public: tuple[int, ...]  # the extra outputs that the caller gets
    why: str | None = None  # why a module is called
    nested: bool = False  # whether it is a Sequential that is called
    partition: Partition | None = None  # of a nested Sequential whose ops are wired to others


class Partition(NamedTuple):
    """Ops in parts, and their wiring as a whole."""

    parts: tuple[Part, ...]
    ops: tuple[Any, ...]
    wiring: Wiring
    written: tuple[Output, ...]  # ops that write to extra inputs of the caller, with their numbers
    single_run: Callable[..., Any] | None  # the run of ops that is all there is, if so


def partition_at(
    ops: tuple[Any, ...],
    wiring: Wiring,
    stops: Iterable[int],
    make: Callable[[int, slice, Wiring, Sequence[Output]], tuple[dict[str, Any], Any]],
) -> Partition:
    """The ops in parts that end before each of ``stops``.

    ``make(number, ops, wiring, outputs)`` gives the other fields of a part, and the extra outputs
    that it returns, None if unknown: from its own wiring, and those that are needed.
    """
    places: dict[Output, int] = {(CALLER, k): k for k, _ in enumerate(wiring.names)}
    parts: list[Part] = []
    start = 0
    for number, stop in enumerate(stops):
        own, inputs, needed = wiring.part(ops, start, stop)
        fields, outputs = make(number, slice(start, stop), own, needed)
        parts.append(
            Part(
                ops=slice(start, stop),
                inputs=tuple([places[source] for source in inputs]),
                inputs_to_copy=own.copied_inputs,
                num_outputs=None if outputs is None else len(outputs),
                public=tuple([k for k, o in enumerate(outputs or ()) if o in wiring.public]),
                **fields,
            )
        )
        places.update({output: k for k, output in enumerate(outputs or (), len(places))})
        start = stop
    single_run = parts[0].call if len(parts) == 1 and parts[0].why is None else None
    written = [
        (i, k)
        for i, of_op in enumerate(wiring.sources)
        for producer, k in of_op
        if producer == CALLER and ops[i].writes_extra_inputs
    ]
    return Partition(tuple(parts), ops, wiring, tuple(written), single_run)


def run_parts(
    partition: Partition,
    inputs: Sequence[Any],
    call: Callable[[Part, Any, list[Any]], Any],
    modules: Sequence[Any],
) -> Any:
    """The output of the last part, with the extra outputs that the caller gets if there are any.

    ``call`` gives what a part returns for its input and its extra inputs. An op that writes to one
    gets a copy where something else reads that, be it a parameter of ``modules``.
    """
    x, held = inputs[0], list(inputs[1:])  # torch 2.11 takes those of x, *held for a tuple
    given: list[Any] = []
    for part in partition.parts:
        taken = [held[place] for place in part.inputs]
        for n in part.inputs_to_copy:
            taken[n] = taken[n].clone()
        for i, k in partition.written:
            is_written = part.ops.start <= i < part.ops.stop and isinstance(held[k], Tensor)
            if is_written and not torch.compiler.is_compiling():
                later = {
                    n for of_op in partition.wiring.sources[i:] for at, n in of_op if at == CALLER
                }
                read = {*later, *range(len(inputs) - 1, len(held))} - {k}
                others = [("another reader", held[n]) for n in read]
                if any(overlapping(held[k], others, modules)):
                    taken[part.inputs.index(k)] = held[k].clone()
        x = call(part, x, taken)
        if part.num_outputs:
            x, *outputs = x
            held.extend(outputs)
            given.extend([outputs[n] for n in part.public])
        elif part.num_outputs is None and isinstance(x, tuple):
            x, *outputs = x
            given.extend(outputs)
    return (x, *given) if given else x
