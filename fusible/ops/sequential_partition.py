"""How a Sequential divides into runs of ops and modules that are called, and what each hands on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from torch import nn

from fusible.fuser.partition import Part, Partition, partition_at
from fusible.fuser.plan import NotFused
from fusible.fuser.registry import registry
from fusible.fuser.run import Run
from fusible.fuser.wiring import Output, Wiring, wire


class Member(NamedTuple):
    """A module of a Sequential, nested ones unfolded."""

    module: nn.Module
    ops: tuple[Any, ...]  # its basic ops
    why: str | None  # why the module is called; None if its ops are part of a run
    inside: tuple[Member, ...] = ()  # of a Sequential that is called
    require: tuple[str, ...] = ()


class ForeignModule:
    """Represents in the wiring a module with extra tensors that is neither op nor Sequential."""

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


def partition_of(
    members: Sequence[Member], require: Sequence[str], wiring: Wiring | None = None
) -> Partition:
    """Consecutive fusible ops as runs, the other modules as they are.

    ``wiring`` is that of all the ops, by default that of these alone.

    Raises:
        ValueError: channels that cannot be wired.
        NotFused: a rule that is required fits none of the runs.
    """
    ops = tuple(op for member in members for op in member.ops)
    wiring = wire(ops) if wiring is None else wiring
    rules = [registry.rule(name) for name in require]
    groups = list(_groups(members))
    stops = accumulate(sum(len(member.ops) for member in group) for group in groups)

    def make(
        number: int, at: slice, own: Wiring, needed: Sequence[Output]
    ) -> tuple[dict[str, Any], Sequence[Output] | None]:
        first, *_ = groups[number]
        fields: dict[str, Any] = {"why": first.why, "nested": bool(first.inside)}
        fields["call"] = Run(ops[at], rules, own) if first.why is None else first.module
        if first.inside and not _is_wired_alone(ops[at], own):
            fields["partition"] = partition_of(first.inside, first.require, own)
        return fields, _outputs(first, needed, ops, at.start)

    partition = partition_at(ops, wiring, stops, make)
    runs = [part.call for part in partition.parts if isinstance(part.call, Run)]
    for rule in rules:
        if not any(rule in run.require for run in runs):
            raise NotFused(
                f"{rule.name} is required but no run of ops fits its pattern {rule}; the "
                f"modules are {', '.join(map(_describe, members))}"
            )
    return partition


def _describe(member: Member) -> str:
    name = type(member.module).__name__
    return f"{name}, which {member.why}" if member.ops and member.why else name


def _groups(members: Sequence[Member]) -> Iterator[list[Member]]:
    """The members that make one run together, and the others one by one."""
    for runs, group in groupby(members, lambda member: member.why is None):
        if runs:
            yield list(group)
        else:
            yield from ([member] for member in group)


def _outputs(
    member: Member, needed: Sequence[Output], ops: tuple[Any, ...], start: int
) -> Sequence[Output] | None:
    """The extra outputs that a part gives; None if unknown."""
    if member.why is None or member.inside:
        return needed
    if any(isinstance(op, ForeignModule) and not op.counts_outputs for op in member.ops):
        return None
    # An op that is called gives all its extra outputs.
    stop = start + len(member.ops)
    return tuple(
        (i, slot)
        for i, op in enumerate(ops[start:stop], start)
        for slot in range(len(op.extra_output_channels))
    )


def _is_wired_alone(ops: Sequence[Any], wiring: Wiring) -> bool:
    """Whether ops by themselves would be wired so."""
    try:
        return wire(ops) == wiring
    except ValueError:  # of a channel that is produced elsewhere
        return False


def run_boundaries(partition: Partition) -> list[tuple[nn.Module, str, tuple[str, ...]]]:
    """The modules between runs that are called: each with why, and the rules that it blocked.

    These are the rules whose patterns fit some of its ops together with ops of its neighbours.
    """
    if len(partition.parts) < 2:
        return []
    ends: list[tuple[nn.Module, str, tuple[str, ...]]] = []
    for part in partition.parts:
        if part.why is not None and isinstance(part.call, nn.Module):
            ends.append((part.call, part.why, _blocked_rules(part, partition)))
        if part.partition is not None:
            ends.extend(run_boundaries(part.partition))
    return ends


def _blocked_rules(blocking: Part, partition: Partition) -> tuple[str, ...]:
    """Names of the rules that fit some ops of a part together with some of its neighbours."""
    ops: list[Any] = []
    own: set[int] = set()
    for part in partition.parts:
        of_part = partition.ops[part.ops] or (None,)  # no rule fits over a module without ops
        if part is blocking:
            own = {*range(len(ops), len(ops) + len(of_part))}
        ops.extend(of_part)
    names = []
    for rule in registry.rules:
        for at, bound in rule.matches(ops):
            covered = {*range(at, at + sum(op is not None for op in bound.values()))}
            if covered & own and covered - own:
                names.append(rule.name)
                break
    return tuple(names)
