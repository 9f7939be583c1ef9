"""Fusion rules, which replace ops, and rows of kernels, which run them, with their conditions."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal

from fusible.fuser.conditions import Condition, Path

Phase = Literal["joint", "forward", "backward"]


@dataclass(frozen=True)
class Slot:
    """One place of a pattern: its name, the op types it takes, and whether it may be left out."""

    name: str
    types: tuple[type, ...]
    optional: bool

    def __str__(self) -> str:
        return f"[{_names(self.types)}]" if self.optional else _names(self.types)


class _Conditional:
    """What is chosen only where all conditions in ``needs`` hold."""

    needs: tuple[Condition, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of all facts that the conditions read."""
        return tuple(path for need in self.needs for path in need.paths)

    def applies_to_target(self, facts: Any) -> bool:
        """Whether it is for this machine and this recipe, whatever else it needs."""
        about = [need for need in self.needs if need.subject.names[:1] in _TARGET_FACTS]
        return all(need.why_not(facts) is None for need in about)

    def _false(self, facts: Any) -> list[str]:
        return [reason for need in self.needs if (reason := need.why_not(facts)) is not None]


@dataclass(frozen=True)
class KernelRow(_Conditional):
    """Kernels, and what they need.

    In ``Rule.kernels`` they run what the rule builds, and need this beyond its own conditions. In
    ``BasicOperation.kernel_rows`` they run one op, which the conditions call ``this.op``.

    ``name`` is what ``plan.kernels`` has of them, and ``plan.fired`` after the rule's name;
    ``kernels`` any object: the argument ``kernels`` of the rule's function, or ``ctx.kernels`` of
    the op; ``needs`` a tuple of conditions; ``worth`` what they gain, for the tables of the docs.
    """

    name: str
    kernels: Any
    needs: tuple[Condition, ...]
    worth: str = ""

    def __post_init__(self) -> None:
        _check_needs(f"kernels {self.name}", self.needs)

    def why_not(self, op: Any, facts: Any) -> tuple[str, ...]:
        """Every sentence that is false of an op that has this row; empty where it applies."""
        owner = next(kind for kind in (op, *type(op).__mro__) if "kernel_rows" in vars(kind))
        formula = (
            "op must define op_forward or fuser_forward, which read ctx.kernels, got "
            f"{type(op).__name__}, which is a formula alone"
        )
        return (
            *([formula] if op.is_formula else ()),
            *(() if owner is op else _not_itself("op", (owner,), op)),
            *self._false(facts),
        )


@dataclass(frozen=True)
class Rule(_Conditional):
    """Replaces a run of ops that fits ``pattern`` where every condition in ``needs`` holds.

    ``phase`` is ``"joint"`` (forward and backward together, agreeing only with each other),
    ``"forward"`` or ``"backward"`` (interchangeable with the ops' own).

    With rows of ``kernels`` it is tried with each in turn, as a rule of their joint name. A user's
    fusion function is a rule without a pattern, which decides itself what it replaces.
    """

    name: str
    phase: Phase
    pattern: tuple[Slot, ...]
    needs: tuple[Condition, ...]
    build: Callable[..., Any]
    worth: str
    kernels: tuple[KernelRow, ...] = ()

    @cached_property
    def variants(self) -> tuple[Rule, ...]:
        """The rule for each row of its kernels, in order of priority; itself without rows."""
        rows = [
            replace(
                self,
                name=f"{self.name}_{row.name}",
                needs=tuple(dict.fromkeys((*row.needs, *self.needs))),
                build=partial(self.build, kernels=row.kernels),
                worth=row.worth,
                kernels=(),
            )
            for row in self.kernels
        ]
        return (*rows,) or (self,)

    def without(self, name: str) -> Rule | None:
        """The rule without its variant ``name``, if it has that; None where none is left."""
        left = tuple(row for row in self.kernels if f"{self.name}_{row.name}" != name)
        if left != self.kernels:
            return replace(self, kernels=left) if left else None
        return None if name == self.name else self

    def fit(self, ops: Sequence[Any], at: int) -> dict[str, Any] | None:
        """The ops at ``at`` by slot name (None for an optional one left out), or None."""
        bound: dict[str, Any] = {}
        for slot in self.pattern:
            if at < len(ops) and isinstance(ops[at], slot.types):
                bound[slot.name] = ops[at]
                at += 1
            elif slot.optional:
                bound[slot.name] = None
            else:
                return None
        return bound

    def matches(self, ops: Sequence[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each match of the pattern in ``ops``: its index, and the ops by slot name."""
        for at in range(len(ops)):
            bound = self.fit(ops, at)
            if bound is not None:
                yield at, bound

    def why_not(self, bound: dict[str, Any], facts: Any) -> tuple[str, ...]:
        """Every sentence that is false of ``facts``; empty where the rule applies."""
        present = [slot for slot in self.pattern if bound[slot.name] is not None]
        others = [_not_itself(slot.name, slot.types, bound[slot.name]) for slot in present]
        return (*chain(*others), *self._false(facts))

    def __str__(self) -> str:
        return " + ".join(map(str, self.pattern)) or "any ops"


def rule(
    *needs: Condition, phase: Phase = "joint", kernels: Iterable[KernelRow] = ()
) -> Callable[[Callable[..., Any]], Rule]:
    """Make a :class:`Rule` of a function that builds a fused op.

    The function's signature is the pattern: each parameter names one op and its annotation says
    which types it may have (``A | B`` for alternatives, ``| None`` for an op that may be absent).
    Its docstring says what the fusion is worth. With rows of ``kernels``, those of the first row
    whose conditions hold are passed as ``kernels``; ``plan.fired`` then has the names of both
    (``grouped_mlp_sm90``).

    Raises:
        TypeError: a need is no condition, or the signature no pattern.
        ValueError: there is no such phase.
    """
    if phase not in typing.get_args(Phase):
        raise ValueError(f"phase must be one of {', '.join(typing.get_args(Phase))}, got {phase!r}")
    _check_needs("a rule", needs)
    rows = tuple(kernels)

    def make(build: Callable[..., Any]) -> Rule:
        hints = typing.get_type_hints(build)
        names = [name for name in inspect.signature(build).parameters if name != "kernels"]
        pattern = tuple(_slot(build.__name__, name, hints.get(name)) for name in names)
        if all(slot.optional for slot in pattern):
            raise TypeError(f"{build.__name__} must take an op that is not optional, got {names}")
        worth = inspect.cleandoc(build.__doc__ or "")
        return Rule(build.__name__, phase, pattern, needs, build, worth, rows)

    return make


# Facts of the machine and the recipe, which users rarely change to get a fusion.
_TARGET_FACTS = ("sm",), ("device",), ("recipe",), ("scaling",)


def _check_needs(whose: str, needs: Any) -> None:
    given = needs if isinstance(needs, tuple) else ()
    wrong = [need for need in given if not isinstance(need, Condition)]
    if wrong or given is not needs:
        raise TypeError(
            f"needs of {whose} must be a tuple of conditions made by fusible.extend, got "
            f"{(wrong or [needs])[0]!r:.200}"
        )


def _not_itself(name: str, kinds: tuple[type, ...], op: Any) -> list[str]:
    """The reason to refuse a subclass of ``kinds``, whose math may differ; empty for these."""
    if _computes_as(op) in kinds:
        return []
    got = f"got its subclass {type(op).__name__}, whose math may differ"
    return [f"{name} must be {_names(kinds)} itself, {got}"]


def _names(kinds: tuple[type, ...]) -> str:
    return " | ".join(kind.__name__ for kind in kinds)


def _computes_as(op: Any) -> type:
    """The class whose math an op has: its own, unless that says otherwise itself."""
    kind = type(op)
    if kind.__module__ == "torch.nn.utils.parametrize":
        (kind,) = kind.__bases__  # of the class that it makes for a module
    return vars(kind).get("computes_as", kind)


def _slot(rule: str, name: str, hint: Any) -> Slot:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    members = typing.get_args(hint) if union else (hint,)
    named = [t for t in members if t is not types.NoneType]
    kinds = tuple(
        kind for t in named for kind in getattr(t, "__dict__", {}).get("pattern_types", (t,))
    )
    if not all(hasattr(t, "extra_input_names") for t in kinds):
        raise TypeError(
            f"parameter {name} of {rule} must be annotated with the types of ops that it takes, "
            f"got {hint!r}; name basic ops: Linear is BasicLinear + Bias"
        )
    return Slot(name, kinds, len(named) < len(members))
