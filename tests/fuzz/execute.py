"""Runs a case: its program on the package and on the references, compared after every step."""

from __future__ import annotations

import random
import re
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, replace

from fusible.testing import assume_target

from . import quantizing
from .build import Side, sides
from .caller import Result, step
from .cases import Action, Case, InvalidError
from .compare import differences
from .surgery import SURGERIES

MARGIN = {"float64": 1e-9, "float32": 1e-4}
"""The least distance between what a router chose and what it did not, relative to rounding."""


@dataclass(frozen=True)
class Outcome:
    """``kind`` is passed, refused, failed, or undecided (the reference cannot say)."""

    kind: str
    text: str = ""
    fired: tuple[str, ...] = ()
    """The rules that some step fused by."""

    @property
    def label(self) -> str:
        """What outcomes of one cause have in common."""
        text = re.sub(r" error [^;]*|is None[^;]*|, must be[^;]*", "", self.text)
        return f"{self.kind}: {re.sub(r'[0-9.e+-]*[0-9][0-9.e+-]*', '#', text)[:160]}"


def run(case: Case) -> Outcome:
    """What comes of a case. InvalidError passes through."""
    if not case.ops:
        raise InvalidError
    try:
        made = sides(case)
    except (ValueError, TypeError, RuntimeError) as error:
        return _refusal(error, "building")
    fired: set[str] = set()
    for number, action in enumerate(case.program):
        outcome = _action(made, action, f"{number} {action.name}")
        if outcome is not None:
            return replace(outcome, fired=tuple(fired))
        if action.name == "step" and made[0].model.plan is not None:
            fired.update(made[0].model.plan.fired + made[0].model.plan.kernels)
    return Outcome("passed", fired=tuple(fired))


def _action(made: list[Side], action: Action, name: str) -> Outcome | None:
    """What ends the program here, or None."""
    package, *references = made
    if action.name == "quantize":
        try:
            wrong = quantizing.differences(package, action.options, name)
        except Exception as error:
            return _refusal(error, name)
        return Outcome("failed", f"{name}: {'; '.join(wrong)}") if wrong else None
    try:
        exact, *plain = [_do(side, action, name, None) for side in references]
    except InvalidError:
        raise
    except Exception as error:
        return Outcome("undecided", f"{name}: PyTorch raises {error!r:.120}")
    try:
        got = _do(package, action, name, exact and exact.live)
    except Exception as error:
        if action.options.get("between", "none") != "none" and NOTICED in str(error):
            return Outcome("passed")
        return _refusal(error, name)
    return _judge(got, exact, plain, made, name) if exact is not None else None


NOTICED = "inplace"  # in the words of autograd


def _do(side: Side, action: Action, name: str, live: list[int] | None) -> Result | None:
    target = side.case.target if side.of_package else None
    with assume_target(target) if target else nullcontext():
        if action.name == "step":
            return step(side, action.options, name, live)
        SURGERIES[action.name](side, random.Random(f"{side.case.seed}/{name}"), name)
        return None


def _refusal(error: Exception, name: str) -> Outcome:
    """A refusal in the package's words, or a failure."""
    text = str(error)
    documented = isinstance(error, ValueError | TypeError | RuntimeError) and re.search(
        r"must .*got |needs .*got |cannot be differentiated", text, re.DOTALL
    )
    if documented:
        return Outcome("refused", f"{type(error).__name__}: {text}")
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{where.filename.rpartition('/')[2]}:{where.name}"
    return Outcome("failed", f"{name}: {type(error).__name__} in {place}: {text[:300]}")


def _judge(
    got: Result, exact: Result, plain: list[Result], made: list[Side], name: str
) -> Outcome | None:
    margins = [m.margin for m in made[1].model.modules() if hasattr(m, "margin")]
    if margins and min(margins) < MARGIN.get(made[0].case.dtype, 1e-3):
        return Outcome("undecided", "a router's choice is too close")
    low = plain[0].values if plain else None
    found = differences(made[0].case, got.values, exact.values, low)
    found += [f"{n} was changed" for n in sorted(got.changed - exact.changed)]
    return Outcome("failed", f"{name}: {'; '.join(found)}") if found else None
