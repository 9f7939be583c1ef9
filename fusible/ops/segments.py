"""How a Sequential divides into runs of ops and modules that are called, and what each hands on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from fusible.fuser.plan import NotFused
from fusible.fuser.registry import registry
from fusible.fuser.rules import Rule
from fusible.fuser.run import Run
from fusible.fuser.wiring import CALLER, Part, Wiring, WrittenInput, wire


class Unit(NamedTuple):
    """A module of a Sequential, nested ones unfolded.

    ``ops`` are the basic ops that it stands for, ``inside`` the units of a Sequential that is
    called. ``why`` says why the module is called; where it is None, its ops are part of a run.
    """

    module: nn.Module
    ops: tuple[Any, ...]
    why: str | None
    inside: tuple[Unit, ...] = ()
    require: tuple[str, ...] = ()


class Opaque:
    """Stands in the wiring for a module with extra tensors that is neither op nor Sequential."""

    extra_output_names = ()
    writes_extra_inputs = False

    def __init__(self, module: Any) -> None:
        self.kind = type(module).__name__
        self.counts_outputs = hasattr(module, "num_extra_outputs")
        outputs = module.num_extra_outputs if self.counts_outputs else 0
        self.extra_input_channels = [None] * module.num_extra_inputs
        self.extra_output_channels = [(None, True)] * outputs

    def extra_input_name(self, slot: int) -> str:
        """A name that nothing gives."""
        return f"extra input {slot} of {self.kind}"


class Segment(NamedTuple):
    """A run of ops or a module that is called, and its extra tensors.

    A Sequential holds its extra inputs, then what each segment gives, in order. ``inputs`` are the
    places of what the segment takes; ``copied`` says which of these (0 for the first) it might
    write to though they are not the caller's. Of its ``num_outputs`` extra outputs (None: as many
    as come, all for the caller) ``public`` go to the caller. ``division`` is that of a nested
    Sequential whose ops are wired to others outside of it; ``why`` as in :class:`Unit`.
    """

    call: Run | nn.Module
    division: Division | None
    ops: tuple[Any, ...]
    why: str | None
    nested: bool
    inputs: tuple[int, ...]
    copied: tuple[int, ...]
    num_outputs: int | None
    public: tuple[int, ...]


class Division(NamedTuple):
    """The segments of a Sequential, and its ops and their wiring as a whole."""

    segments: tuple[Segment, ...]
    ops: tuple[Any, ...]
    wiring: Wiring
    only: Run | None
    """The run that is all there is, if so."""
    written: tuple[WrittenInput, ...]
    """What ops write to of the caller's."""


def divide(units: Sequence[Unit], require: Sequence[str], wiring: Wiring | None = None) -> Division:
    """Consecutive fusible ops as runs, the other modules as they are.

    Args:
        units: the modules.
        require: names of rules, each of which must fit one of the runs.
        wiring: of all the ops; by default that of these alone.

    Raises:
        ValueError: channels that cannot be wired.
        NotFused: a required rule fits no run.
    """
    ops = tuple(op for unit in units for op in unit.ops)
    wiring = wire(ops) if wiring is None else wiring
    rules = [registry.rule(name) for name in require]
    places = {(CALLER, k): k for k in range(wiring.num_caller_inputs)}
    segments: list[Segment] = []
    start = 0
    for group in _groups(units):
        stop = start + sum(len(unit.ops) for unit in group)
        part = wiring.part(ops, start, stop)
        outputs = _outputs(group[0], part, ops, start)
        segments.append(
            Segment(
                *_call(group[0], part, ops[start:stop], rules),
                ops=ops[start:stop],
                why=group[0].why,
                nested=bool(group[0].inside),
                inputs=tuple(places[source] for source in part.inputs),
                copied=part.copied,
                num_outputs=None if outputs is None else len(outputs),
                public=tuple(n for n, o in enumerate(outputs or ()) if o in wiring.public),
            )
        )
        places.update({output: n for n, output in enumerate(outputs or (), len(places))})
        start = stop
    runs = [segment.call for segment in segments if isinstance(segment.call, Run)]
    for rule in rules:
        if not any(rule in run.require for run in runs):
            raise NotFused(
                f"{rule.name} is required but no run of ops fits its pattern {rule}; the "
                f"modules are {', '.join(map(_told, units))}"
            )
    return Division(
        tuple(segments),
        ops,
        wiring,
        runs[0] if len(segments) == len(runs) == 1 else None,
        wiring.written_inputs(ops),
    )


def _told(unit: Unit) -> str:
    name = type(unit.module).__name__
    return f"{name}, which {unit.why}" if unit.ops and unit.why else name


def _groups(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """The units that make one run together, and the others one by one."""
    group: list[Unit] = []
    for unit in units:
        if unit.why is None:
            group.append(unit)
            continue
        if group:
            yield group
        group = []
        yield [unit]
    if group:
        yield group


def _call(
    unit: Unit, part: Part, ops: tuple[Any, ...], rules: Sequence[Rule]
) -> tuple[Run | nn.Module, Division | None]:
    """What a segment that starts with ``unit`` calls, and the division that it is called with."""
    if unit.why is None:
        return Run(ops, [rule for rule in rules if _fits(rule, ops)], part.wiring), None
    if unit.inside and not _is_wired_alone(ops, part.wiring):
        return unit.module, divide(unit.inside, unit.require, part.wiring)
    return unit.module, None


def _outputs(
    unit: Unit, part: Part, ops: tuple[Any, ...], start: int
) -> tuple[tuple[int, int], ...] | None:
    """The extra outputs that a segment gives; None if nobody knows which."""
    if unit.why is None or unit.inside:
        return part.outputs
    if any(isinstance(op, Opaque) and not op.counts_outputs for op in unit.ops):
        return None
    # An op that is called gives all its extra outputs.
    stop = start + len(unit.ops)
    return tuple(
        (i, slot)
        for i, op in enumerate(ops[start:stop], start)
        for slot in range(len(op.extra_output_channels))
    )


def _fits(rule: Rule, ops: Sequence[Any]) -> bool:
    """Whether the rule's pattern fits somewhere in a run of ops."""
    return any(rule.fit(ops, at) for at in range(len(ops)))


def _is_wired_alone(ops: Sequence[Any], wiring: Wiring) -> bool:
    """Whether ops by themselves would be wired so."""
    try:
        return wire(ops) == wiring
    except ValueError:  # of a channel that is produced elsewhere
        return False


def ends_of_runs(division: Division) -> list[tuple[nn.Module, str, tuple[str, ...]]]:
    """The modules that are called beside runs or ops: each with why, and the rules it kept out.

    These are rules whose pattern takes one of its ops with others beside it.
    """
    if len(division.segments) < 2:
        return []
    ends: list[tuple[nn.Module, str, tuple[str, ...]]] = []
    stretches = _stretches(division.segments)
    for segment in division.segments:
        if segment.why is not None and isinstance(segment.call, nn.Module):
            stretch = next((s for s in stretches if any(segment is of for of in s)), [])
            ends.append((segment.call, segment.why, _kept_out(segment, stretch)))
        if segment.division is not None:
            ends.extend(ends_of_runs(segment.division))
    return ends


def _stretches(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Neighbouring segments of basic ops, with no other module between them."""
    stretches: list[list[Segment]] = [[]]
    for segment in segments:
        if segment.ops and not isinstance(segment.ops[0], Opaque):
            stretches[-1].append(segment)
        else:
            stretches.append([])
    return stretches


def _kept_out(segment: Segment, stretch: Sequence[Segment]) -> tuple[str, ...]:
    """Names of the rules that fit over a segment and its neighbours."""
    ops = [op for of in stretch for op in of.ops]
    owners = [i for i, of in enumerate(stretch) for _ in of.ops]
    at = next((i for i, of in enumerate(stretch) if of is segment), None)
    names = []
    for rule in registry.rules:
        for first in range(len(ops)):
            bound = rule.fit(ops, first)
            if bound is not None:
                stop = first + sum(op is not None for op in bound.values())
                if at in owners[first:stop] and len({*owners[first:stop]}) > 1:
                    names.append(rule.name)
                    break
    return tuple(names)
