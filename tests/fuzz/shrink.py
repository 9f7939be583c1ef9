"""Makes a failing case smaller while it fails in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .cases import Action, Case, InvalidError, Op
from .execute import Outcome, run


def shrunk(case: Case, outcome: Outcome, tries: int = 300) -> Case:
    """The smallest case found that has an outcome of the same kind."""
    going = True
    while going and tries > 0:
        going = False
        for smaller in _smaller(case):
            tries -= 1
            if tries <= 0:
                break
            if _fails_alike(smaller, outcome):
                case, going = smaller, True
                break
    return case


def _fails_alike(case: Case, outcome: Outcome) -> bool:
    try:
        return _family(run(case)) == _family(outcome)
    except InvalidError:
        return False


def _family(outcome: Outcome) -> tuple[str, ...]:
    """Exceptions by their type and place; wrong values by the first of what is wrong."""
    text = outcome.text.partition(": ")[2]
    place = text.partition(":")[0]
    if " in " in place:
        return outcome.kind, place
    words = [
        part.split(" ")[0] + part.split(" ")[-1] * part.endswith("changed")
        for part in text.split("; ")
    ]
    return outcome.kind, *sorted(set(words))[:1]


def _smaller(case: Case) -> Iterator[Case]:
    """Candidates, the boldest first."""
    for i in range(len(case.program)):
        yield replace(case, program=case.program[:i] + case.program[i + 1 :])
    for i in range(len(case.ops)):
        yield replace(case, ops=case.ops[:i] + case.ops[i + 1 :])
    if case.dtype != "float64":
        yield replace(case, dtype="float64")
    for field, plain in (("target", None), ("autocast", None), ("recipe", None), ("stored", False)):
        if getattr(case, field) != plain and not (field == "recipe" and case.stored):
            yield replace(case, **{field: plain})
    if case.compiled:
        yield replace(case, compiled=False)
    for i, action in enumerate(case.program):
        for name in action.options:
            rest = {k: v for k, v in action.options.items() if k != name}
            actions = (*case.program[:i], Action(action.name, rest), *case.program[i + 1 :])
            yield replace(case, program=actions)
    for i, op in enumerate(case.ops):
        for simpler in _simpler(op):
            yield replace(case, ops=(*case.ops[:i], simpler, *case.ops[i + 1 :]))
    if len(case.shape) > 2:
        yield replace(case, shape=case.shape[-2:])
    if len(case.shape) == 2 and case.shape[0] > 2:
        yield replace(case, shape=(2, case.shape[1]))


def _simpler(op: Op) -> Iterator[Op]:
    for name, value in op.options.items():
        if value is True or (isinstance(value, str) and name != "score_function"):
            yield replace(op, options={**op.options, name: False})
    for slot, (channel, public) in enumerate(op.writes):
        if channel is not None and public:
            writes = (*op.writes[:slot], (channel, False), *op.writes[slot + 1 :])
            yield replace(op, writes=writes)
