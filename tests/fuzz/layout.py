"""What follows from a case's ops: shapes, where extra tensors come from, what the caller gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .cases import Case, InvalidError, Op
from .catalog import KINDS, Shape


class Given(NamedTuple):
    """An extra input that the caller gives."""

    name: str
    shape: Shape
    op: int
    experts: int
    in_place: bool


Source = tuple[int, int]
"""An op and its extra output; ``(-1, k)`` is the caller's extra input k."""


@dataclass
class Layout:
    shapes: list[Shape]
    """Of each op's input, then of the output."""
    sources: list[list[Source]]
    given: list[Given]
    public: list[tuple[int, int]]


def of_case(case: Case) -> Layout:
    """The layout by the documented rules.

    An extra input reads its channel; without one the nearest earlier extra output of its name;
    else the caller gives it. An extra output goes to the caller unless it has a channel that hides
    it, or none and an op reads it by name. A channel that no earlier op writes is none.
    """
    made = _Tracer(case.shape)
    for i, op in enumerate(case.ops):
        made.add(i, op)
    public = [
        (i, slot)
        for i, op in enumerate(case.ops)
        for slot in range(len(KINDS[op.name].outputs(op.options)))
        if _is_public(_written(op, slot), (i, slot) in made.read_by_name)
    ]
    return Layout(made.shapes, made.sources, made.given, public)


class _Tracer:
    """Follows a tensor's shape through the ops, and the extra tensors."""

    def __init__(self, shape: Shape) -> None:
        self.shapes, self.given, self.sources = [shape], [], []
        self.read_by_name: set[Source] = set()
        self._tokens: Shape = ()
        self._channels: dict[str, Source] = {}
        self._named: dict[str, Source] = {}
        self._of_output: dict[Source, Shape] = {}

    def add(self, i: int, op: Op) -> None:
        """The next op."""
        before = self.shapes[-1]
        mine = [
            self._source(i, op, slot, name)
            for slot, name in enumerate(KINDS[op.name].inputs(op.options))
        ]
        self.sources.append(mine)
        self.shapes.append(self._shape(op, before, mine))
        for slot, name in enumerate(KINDS[op.name].outputs(op.options)):
            if name:
                self._named[name] = (i, slot)
            else:
                self._of_output[i, slot] = before
            channel, _ = _written(op, slot)
            if channel is not None:
                if channel in self._channels:
                    raise InvalidError
                self._channels[channel] = (i, slot)

    def _source(self, i: int, op: Op, slot: int, name: str) -> Source:
        channel = _at(op.reads, slot)
        if channel in self._channels:
            return self._channels[channel]
        if name in self._named:
            self.read_by_name.add(self._named[name])
            return self._named[name]
        self.given.append(_given(name, self.shapes[-1], i, op))
        return -1, len(self.given) - 1

    def _shape(self, op: Op, before: Shape, sources: list[Source]) -> Shape:
        shape = KINDS[op.name].shape(before, op.options)
        if op.name == "Dispatch":
            self._tokens = before[:-1]
        if op.name == "Combine":
            return (*self._tokens, before[-1])
        if op.name == "Swap":
            return self._of_output.get(sources[0], before)
        if op.name == "AddExtraInput" and self._of_output.get(sources[0], shape) != shape:
            raise InvalidError
        return shape


def _given(name: str, shape: Shape, i: int, op: Op) -> Given:
    of = {"scales": shape[:-1], "split_sizes": (op.options.get("num_groups", 0),)}
    if name in ("probs", "expert_ids"):
        of[name] = (*shape[:-1], op.options["top_k"])
    if name == "row_map":
        raise InvalidError
    return Given(
        name,
        of.get(name, shape),
        i,
        op.options.get("num_experts", 0),
        bool(op.options.get("in_place")),
    )


def _at(values: tuple, slot: int):
    return values[slot] if slot < len(values) else None


def _written(op: Op, slot: int) -> tuple[str | None, bool]:
    return _at(op.writes, slot) or (None, True)


def _is_public(written: tuple[str | None, bool], read_by_name: bool) -> bool:
    channel, to_caller = written
    return to_caller if channel is not None else not read_by_name
