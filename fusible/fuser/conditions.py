"""Conditions of fusion rules: a predicate on facts, and the sentence that says what it requires.

``this.fc1.in_features`` records a path; a function such as ``multiple_of`` makes both the predicate
and the sentence from it, so that they cannot disagree. Facts are integers, booleans and names,
never tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fusible.names import did_you_mean


@dataclass(frozen=True)
class Path:
    """A fact to read later, times an integer factor: ``2 * this.fc2.in_features``."""

    names: tuple[str, ...] = ()
    factor: int = 1

    def __getattr__(self, name: str) -> Path:
        if name.startswith("__"):
            raise AttributeError(name)
        return Path((*self.names, name), self.factor)

    def __rmul__(self, factor: int) -> Path:
        return Path(self.names, factor * self.factor)

    def __str__(self) -> str:
        path = ".".join(self.names)
        return path if self.factor == 1 else f"{self.factor} * {path}"

    def read(self, facts: Any) -> Any:
        """The fact's value in ``facts``; ``AttributeError`` lists the facts there are."""
        for name in self.names:
            if not hasattr(facts, name):
                known = sorted(getattr(facts, "_fields", getattr(facts, "__dict__", {})))
                raise AttributeError(
                    f"{'.'.join(self.names)} is not a fact: there is no {name!r} among "
                    f"{', '.join(known) or 'none'}{did_you_mean(name, known)}"
                )
            facts = getattr(facts, name)
        return facts if facts is None or self.factor == 1 else self.factor * facts


this = Path()

UNKNOWN = "unknown"
"""The fact for a dtype that is not known."""


@dataclass(frozen=True)
class Condition:
    """``subject`` must satisfy ``holds``; ``says`` completes the sentence.

    ``hint`` tells the user what can be done where it does not.
    """

    subject: Path
    says: str
    holds: Callable[[Any, Any], bool]
    other: Path | None = None
    hint: str = ""
    only_where: tuple[tuple[Path, Any], ...] = ()
    """Facts and their values where it is needed; nothing is needed elsewhere."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of all facts that it reads."""
        other = () if self.other is None else (self.other,)
        return (self.subject, *other, *[fact for fact, _ in self.only_where])

    def why_not(self, facts: Any) -> str | None:
        """The sentence that is false of ``facts``, or None where the condition holds."""
        if any(fact.read(facts) != value for fact, value in self.only_where):
            return None
        value = self.subject.read(facts)
        other = None if self.other is None else self.other.read(facts)
        hint = f"; {self.hint}" if self.hint else ""
        try:
            if self.holds(value, other):
                return None
        except TypeError as error:  # the values have no order
            hint = f", which cannot be compared ({type(error).__name__}: {error})"
        said = self.other in (None, *[fact for fact, _ in self.only_where])
        which = "" if said else f" (which is {other})"
        if UNKNOWN in (value, other):
            hint += "; define output_dtypes of the op that gives it"
        return f"{self.subject} must be {self.says}{which}{self._where()}, got {value}{hint}"

    def _where(self) -> str:
        facts = " and ".join(f"{fact} is {value}" for fact, value in self.only_where)
        return facts and f" where {facts}"

    def __str__(self) -> str:
        return f"{self.subject} is {self.says}{self._where()}"


def equal(subject: Path, value: Any, hint: str = "") -> Condition:
    """``subject`` equals a constant, or another fact."""
    if isinstance(value, Path):
        return Condition(subject, f"equal to {value}", lambda a, b: a == b, value, hint)
    return Condition(subject, str(value), lambda a, _: a == value, None, hint)


def one_of(subject: Path, *values: Any) -> Condition:
    """``subject`` is one of ``values``."""
    says = f"one of {', '.join(map(str, values))}"
    return Condition(subject, says, lambda a, _: a in values)


def at_least(subject: Path, least: Any, hint: str = "") -> Condition:
    """``subject`` is a number or version of at least ``least``; None counts as too small."""
    says = f"at least {least}"
    return Condition(subject, says, lambda a, _: a is not None and a >= least, None, hint)


def at_most(subject: Path, most: int) -> Condition:
    """``subject`` is a number of at most ``most``; None counts as too large."""
    return Condition(subject, f"at most {most}", lambda a, _: a is not None and a <= most)


def multiple_of(subject: Path, unit: int | Path) -> Condition:
    """``subject`` is a multiple of a constant, or of another fact unless that is None.

    None is no multiple.
    """

    def holds(a: Any, b: Any) -> bool:
        return b is None or (a is not None and a % b == 0)

    if isinstance(unit, Path):
        return Condition(subject, f"a multiple of {unit}", holds, unit)
    return Condition(subject, f"a multiple of {unit}", lambda a, _: holds(a, unit))


def where(fact: Path, value: Any, need: Condition) -> Condition:
    """``need`` of one fact, where another equals ``value``."""
    return replace(need, only_where=(*need.only_where, (fact, value)))
