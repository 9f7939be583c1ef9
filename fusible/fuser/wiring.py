"""Where the extra inputs of every op in a run come from: the caller, or an earlier op by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CALLER = -1


@dataclass(frozen=True)
class Wiring:
    """Routing of extra tensors in a run, by op index and slot.

    ``sources[i][j]`` is ``(CALLER, k)`` for the caller's k-th extra input, else ``(op, slot)`` of
    the earlier extra output that feeds it. ``public`` lists the extra outputs the caller gets.
    """

    sources: tuple[tuple[tuple[int, int], ...], ...]
    num_caller_inputs: int
    public: tuple[tuple[int, int], ...]
    consumers: dict[tuple[int, int], tuple[int, ...]]

    def needed_outside(self, output: tuple[int, int], start: int, stop: int) -> bool:
        """Whether an extra output of ops[start:stop] is used outside them."""
        uses = self.consumers.get(output, ())
        return output in self.public or any(not start <= op < stop for op in uses)


def wire(ops: Sequence[Any]) -> Wiring:
    """Resolve the channels of a run, and the names of what no channel is set for.

    An extra input without a channel is fed by the nearest earlier extra output of its name, else
    by the caller. An extra output without a channel goes to the caller unless it feeds one so.

    Raises:
        ValueError: for a channel without a producer, with two, or produced after its consumer.
    """
    producers = _producers(ops)
    named: dict[str, tuple[int, int]] = {}
    sources = []
    consumers: dict[tuple[int, int], tuple[int, ...]] = {}
    taken = 0
    for i, op in enumerate(ops):
        mine = []
        for slot, channel in enumerate(op.extra_input_channels):
            if channel is not None:
                source = _producer(channel, producers, ops, i)
            else:
                source = named.get(op.extra_input_name(slot), (CALLER, taken))
            if source[0] == CALLER:
                taken += 1
            else:
                consumers[source] = (*consumers.get(source, ()), i)
            mine.append(source)
        sources.append(tuple(mine))
        named.update({name: (i, slot) for slot, name in enumerate(op.extra_output_names)})
    public = [
        (i, slot)
        for i, op in enumerate(ops)
        for slot, (channel, to_caller) in enumerate(op.extra_output_channels)
        if to_caller and (channel is not None or (i, slot) not in consumers)
    ]
    return Wiring(tuple(sources), taken, tuple(public), consumers)


def _producers(ops: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """The extra output behind every channel."""
    producers: dict[str, tuple[int, int]] = {}
    for i, op in enumerate(ops):
        for slot, (name, _) in enumerate(op.extra_output_channels):
            if name is None:
                continue
            if name in producers:
                first = producers[name][0]
                raise ValueError(
                    f"channel {name!r} must have one producer, got extra outputs of op {first} "
                    f"({type(ops[first]).__name__}) and op {i} ({type(op).__name__}); rename one"
                )
            producers[name] = (i, slot)
    return producers


def _producer(
    name: str, producers: dict[str, tuple[int, int]], ops: Sequence[Any], consumer: int
) -> tuple[int, int]:
    who = f"op {consumer} ({type(ops[consumer]).__name__})"
    if name not in producers:
        known = ", ".join(map(repr, producers)) or "none"
        raise ValueError(
            f"channel {name!r} of {who} must be produced by an earlier op of the same run of ops, "
            f"got none; channels there are: {known}"
        )
    at = producers[name][0]
    if at >= consumer:
        raise ValueError(
            f"channel {name!r} of {who} must be produced earlier, got op {at} "
            f"({type(ops[at]).__name__}) as its producer; move the producer before its consumer"
        )
    return producers[name]
