"""What a case is: plain data, which a seed makes, JSON holds and shrinking makes smaller."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


class InvalidError(Exception):
    """The case makes no sense, such as a gated activation of an odd number of features."""


@dataclass(frozen=True)
class Op:
    """One op of a pipeline; sizes that follow from the op before are not in it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    reads: tuple[str | None, ...] = ()
    """The channel of each extra input."""
    writes: tuple[tuple[str | None, bool], ...] = ()
    """The channel of each extra output, and whether the caller gets it."""


@dataclass(frozen=True)
class Action:
    """A call with its backward (``step``), or a change of the module (the name of a surgery)."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A pipeline and what is done with it."""

    ops: tuple[Op, ...]
    shape: tuple[int, ...]
    program: tuple[Action, ...] = (Action("step"),)
    dtype: str = "float64"
    target: str | None = None
    recipe: str | None = None
    stored: bool = False
    """Whether weights are stored in the recipe's format."""
    autocast: str | None = None
    compiled: bool = False
    backend: str = "aot_eager"
    """Of ``torch.compile``."""
    seed: int = 0

    @property
    def outline(self) -> str:
        """Ops, surgeries, and what is not plain in the steps."""
        words = [op.name for op in self.ops]
        for action in self.program:
            words += [action.name, *[f"{v}" for v in action.options.values()]]
        return " ".join([*words, self.dtype, self.target or "", self.recipe or ""])

    def to_json(self) -> str:
        """One line."""
        plain = {k: v for k, v in asdict(self).items() if v != getattr(_DEFAULT, k)}
        return json.dumps({"shape": self.shape, **plain}, separators=(",", ":"))


_DEFAULT = Case((), ())


def from_json(text: str) -> Case:
    """Undo :meth:`Case.to_json`."""
    values = json.loads(text)
    values["shape"] = tuple(values["shape"])
    values["ops"] = tuple(
        Op(
            op["name"],
            op["options"],
            tuple(op["reads"]),
            tuple((channel, public) for channel, public in op["writes"]),
        )
        for op in values.get("ops", ())
    )
    if "program" in values:
        values["program"] = tuple(Action(**action) for action in values["program"])
    return Case(**values)
