"""The fusion rules, and the user's fusion functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fusible.arguments import check_bools
from fusible.fuser.plan import UserFusions, cover
from fusible.fuser.rules import Phase, Rule
from fusible.names import did_you_mean

FusionFunction = Callable[..., Sequence[Any]]


class Registry:
    """What may replace ops. ``version`` moves with each change, so that earlier plans expire."""

    def __init__(self) -> None:
        self.rules: tuple[Rule, ...] = ()
        self.functions: dict[Phase, list[FusionFunction]] = {
            "joint": [],
            "forward": [],
            "backward": [],
        }
        self.version = 0

    def install(self, rules: Sequence[Rule]) -> None:
        """Set the built-in rules, in order of priority."""
        self.rules = tuple(rules)
        self.version += 1

    def rule(self, name: str) -> Rule:
        """The rule of that name; ValueError names the rules there are."""
        for rule in self.rules:
            if rule.name == name:
                return rule
        known = [rule.name for rule in self.rules]
        raise ValueError(
            f"a fusion rule must be one of {', '.join(known)}, got {name!r}"
            f"{did_you_mean(name, known)}"
        )

    def add(self, phase: Phase, function: FusionFunction, prepend: bool) -> None:
        """Add a user's fusion function.

        Raises:
            TypeError: it cannot be called, or ``prepend`` is no bool.
        """
        if not callable(function):
            raise TypeError(
                f"a fusion must be a function func(ops, *, recipe) -> ops, got {function!r}"
            )
        check_bools("a fusion", prepend=prepend)
        functions = self.functions[phase]
        functions.insert(0 if prepend else len(functions), function)
        self.version += 1

    def apply(self, ops: Sequence[Any], recipe: Any) -> UserFusions:
        """Run the user's functions over ``ops``: joint ones, then the other two on the result."""

        def run(phase: Phase, start: Sequence[Any]) -> list[Any]:
            current = list(start)
            for function in self.functions[phase]:
                returned = function(current, recipe=recipe)
                current = list(returned) if isinstance(returned, Iterable) else [returned]
                if not all(hasattr(op, "basic_ops") for op in current):
                    name = getattr(function, "__qualname__", function)
                    raise TypeError(f"the fusion {name} must return ops, got {returned!r:.200}")
            return current

        joint_ops = run("joint", ops)
        joint = cover(joint_ops, ops)
        forward, backward = (cover(run(p, joint_ops), ops) for p in ("forward", "backward"))
        for fusion in joint:
            if fusion not in forward or fusion not in backward:
                raise RuntimeError(
                    f"{type(fusion.op).__name__} was made by a joint fusion, whose forward and "
                    "backward agree only with each other; forward and backward fusion functions "
                    "must leave it in place"
                )
        return UserFusions(joint, forward, backward)


registry = Registry()


def register_rule(rule: Rule) -> None:
    """Add a fusion rule of your own, before all rules there are; after all users' functions.

    Made by :func:`fusible.fuser.rules.rule`. It is tried, refused and explained as built-in rules
    are, and ``Sequential(require=...)`` knows its name.

    Raises:
        TypeError: it is no rule.
        ValueError: there is a rule of that name.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"a rule must be made by fusible.fuser.rules.rule, got {rule!r}")
    if any(rule.name == known.name for known in registry.rules):
        raise ValueError(f"a rule's name must be new, got {rule.name!r}; rename its function")
    registry.install((rule, *registry.rules))


def register_forward_backward_fusion(func: FusionFunction, prepend: bool = False) -> None:
    """Register a joint fusion, ``func(ops, *, recipe) -> ops``.

    A fused op made by it runs forward and backward and need agree only with itself. Users'
    functions run before the built-in rules, each once per run of ops, recipe and gradient
    requirements; ``prepend`` puts this one before the user's others.
    """
    registry.add("joint", func, prepend)


def register_forward_fusion(func: FusionFunction, prepend: bool = False) -> None:
    """Register a forward-only fusion, ``func(ops, *, recipe) -> ops``.

    The fused op's forward must save, in each basic op's context, what that op documents as its
    saved state, since the basic ops' own backwards (or another fusion of them) will read it. See
    :func:`register_forward_backward_fusion` for when functions run.
    """
    registry.add("forward", func, prepend)


def register_backward_fusion(func: FusionFunction, prepend: bool = False) -> None:
    """Register a backward-only fusion, ``func(ops, *, recipe) -> ops``.

    The fused op's backward reads the state that each basic op documents, whichever forward saved
    it. See :func:`register_forward_backward_fusion` for when functions run.
    """
    registry.add("backward", func, prepend)
