"""The source of each extra input of every op: the caller, or an earlier op by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusible.names import did_you_mean

CALLER = -1

Output = tuple[int, int]
"""An extra output, by op and slot, or an extra input of the caller."""


def op_at(ops: Sequence[Any], i: int) -> str:
    """An op or module of several, for a sentence."""
    return f"op {i} ({type(ops[i]).__name__})"


@dataclass(frozen=True)
class Wiring:
    """Routing of extra tensors among ops, by op index and slot.

    ``sources[i][j]`` is ``(CALLER, k)`` for the caller's k-th extra input, else ``(op, slot)`` of
    the earlier extra output that feeds it. ``names`` are those of the caller's extra inputs.
    ``public`` lists the extra outputs the caller gets. ``copied_inputs`` are those of the caller's
    extra inputs that are passed as copies: an op writes to them.
    """

    sources: tuple[tuple[Output, ...], ...]
    names: tuple[str, ...]
    public: tuple[Output, ...]
    consumers: dict[Output, tuple[int, ...]]
    copied_inputs: tuple[int, ...] = ()

    def needed_outside(self, output: Output, start: int, stop: int) -> bool:
        """Whether an extra output of ops[start:stop] is used outside them."""
        uses = self.consumers.get(output, ())
        return output in self.public or any(not start <= op < stop for op in uses)

    def part(
        self, ops: Sequence[Any], start: int, stop: int
    ) -> tuple[Wiring, Sequence[Output], Sequence[Output]]:
        """The wiring of ops[start:stop], and what comes from outside and is needed there."""
        inputs: list[Output] = []
        names = []
        sources = []
        copied = []
        for op, of_op in zip(ops[start:stop], self.sources[start:stop], strict=True):
            op_sources = []
            for slot, (producer, k) in enumerate(of_op):
                if producer >= start:
                    op_sources.append((producer - start, k))
                else:
                    op_sources.append((CALLER, len(inputs)))
                    if producer != CALLER and op.writes_extra_inputs:
                        copied.append(len(inputs))
                    inputs.append((producer, k))
                    names.append(op.extra_input_name(slot))
            sources.append(tuple(op_sources))
        all_outputs = {*self.public, *self.consumers}
        outputs = sorted(
            o for o in all_outputs if start <= o[0] < stop and self.needed_outside(o, start, stop)
        )
        consumers = {
            (op - start, slot): inside
            for (op, slot), uses in self.consumers.items()
            if start <= op and (inside := tuple(use - start for use in uses if use < stop))
        }
        public = tuple((op - start, slot) for op, slot in outputs)
        wiring = Wiring(tuple(sources), tuple(names), public, consumers, tuple(copied))
        return wiring, inputs, outputs

    def check_number(self, ops: Sequence[Any], number: int) -> None:
        """Raise ValueError unless ``number`` extra inputs are what the ops need."""
        if number != len(self.names):
            readers = [i for i, of_op in enumerate(self.sources) for p, _ in of_op if p == CALLER]
            wanted = ", ".join(
                f"{name} of {op_at(ops, i)}" for name, i in zip(self.names, readers, strict=True)
            )
            raise ValueError(
                f"extra inputs must number {len(self.names)} ({wanted or 'none'}), got {number}"
            )


def wire(ops: Sequence[Any], *, alone: bool = False) -> Wiring:
    """Resolve the channels of ops, and the names of what no channel is set for.

    An extra input without a channel is fed by the nearest earlier extra output of its name, else
    by the caller. An extra output without a channel goes to the caller unless it feeds one so.

    ``alone``: these are the parts of one op, called by itself. The caller then gives what none of
    them produces, and gets all extra outputs.

    Raises:
        ValueError: for a channel without a producer, with two, or produced after its consumer; or
            what an op says of a producer that does not fit it.
    """
    producers = _producers(ops)
    last_of_name: dict[str, Output] = {}
    sources = []
    names: list[str] = []
    consumers: dict[Output, tuple[int, ...]] = {}
    for i, op in enumerate(ops):
        op_sources = []
        for slot, channel in enumerate(op.extra_input_channels):
            source = CALLER, len(names)
            if channel is None:
                source = last_of_name.get(op.extra_input_name(slot), source)
            elif not alone or channel in producers:
                source = _producer(channel, producers, ops, i)
            if source[0] == CALLER:
                names.append(op.extra_input_name(slot))
            else:
                op.check_producer(slot, ops[source[0]])
                consumers[source] = (*consumers.get(source, ()), i)
            op_sources.append(source)
        sources.append(tuple(op_sources))
        last_of_name.update({name: (i, slot) for slot, name in enumerate(op.extra_output_names)})
    public = [
        (i, slot)
        for i, op in enumerate(ops)
        for slot, (channel, to_caller) in enumerate(op.extra_output_channels)
        if alone or (to_caller and (channel is not None or (i, slot) not in consumers))
    ]
    return Wiring(tuple(sources), tuple(names), tuple(public), consumers)


def by_name(
    names: Sequence[str], given: Sequence[Any], named: Mapping[str, Any], op_name: str
) -> tuple[Any, ...]:
    """All extra inputs in order: those ``given`` by position, then those ``named``.

    ``names`` are those of all, in order; one may come more than once, and takes one value.

    Raises:
        ValueError: one is given twice, or not at all, or has another name.
    """
    known = [*dict.fromkeys(names)]
    for name in named:
        if name not in known:
            raise ValueError(
                f"keyword arguments of {op_name} must be among its extra inputs {known}, got "
                f"{name!r}{did_you_mean(name, known)}"
            )
        if name in names[: len(given)]:
            raise ValueError(
                f"extra input {name!r} of {op_name} must be given once, got it by position and by "
                f"name; in order the extra inputs are {list(names)}"
            )
    rest = names[len(given) :]
    if missing := [name for name in rest if name not in named]:
        raise ValueError(
            f"extra inputs of {op_name} must be all of {list(names)}, in order or by name, got "
            f"{len(given)} by position and {list(named)} by name; {missing[0]!r} is missing"
        )
    return (*given, *[named[name] for name in rest])


def _producers(ops: Sequence[Any]) -> dict[str, Output]:
    """The extra output behind every channel."""
    producers: dict[str, Output] = {}
    for i, op in enumerate(ops):
        for slot, (name, _) in enumerate(op.extra_output_channels):
            if name is None:
                continue
            if name in producers:
                first = op_at(ops, producers[name][0])
                raise ValueError(
                    f"channel {name!r} must have one producer, got extra outputs of {first} and "
                    f"{op_at(ops, i)}; rename one"
                )
            producers[name] = (i, slot)
    return producers


def _producer(name: str, producers: dict[str, Output], ops: Sequence[Any], consumer: int) -> Output:
    op_name = op_at(ops, consumer)
    if name not in producers:
        known = ", ".join(map(repr, producers)) or "none"
        raise ValueError(
            f"channel {name!r} of {op_name} must be produced by an earlier op of the same "
            f"Sequential, got none; channels there are: {known}{did_you_mean(name, producers)}"
        )
    at = producers[name][0]
    if at >= consumer:
        raise ValueError(
            f"channel {name!r} of {op_name} must be produced earlier, got {op_at(ops, at)} as its "
            "producer; move the producer before its consumer"
        )
    return producers[name]
