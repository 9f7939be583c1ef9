"""The fusion rules, and the user's fusion functions."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from fusible.arguments import check_bools
from fusible.fuser.conditions import UNKNOWN
from fusible.fuser.plan import Fusion, check_facts
from fusible.fuser.rules import Phase, Rule
from fusible.names import did_you_mean
from fusible.recipes.recipe import Recipe


class Registry:
    """The rules and users' functions that replace ops.

    ``version`` is part of the plan key and grows with each change.
    """

    def __init__(self) -> None:
        self.rules: tuple[Rule, ...] = ()
        self.functions: tuple[Rule, ...] = ()
        self.version = 0
        self.has_users = False
        """Whether a rule or a function is a user's."""

    def install(self, rules: Sequence[Rule]) -> None:
        """Set the built-in rules, in order of priority."""
        self.rules = tuple(rules)
        self.changed()

    def rule(self, name: str) -> Rule:
        """The rule or the user's function of that name; ValueError names those there are."""
        return _named(name, [*self.rules, *self.functions])

    def changed(self) -> None:
        """Increment the version: rules or functions have changed."""
        self.version += 1
        builds = [rule.build for rule in self.rules]
        self.has_users = bool(self.functions) or not all(map(is_ours, builds))

    def apply(self, ops: Sequence[Any], recipe: Any) -> tuple[Fusion, ...]:
        """Run the user's functions over ``ops``: joint ones, then the other two on the result."""
        makers: dict[Any, str] = {}  # the name of the function that made each fused op

        def run(phase: Phase, start: Sequence[Any]) -> list[Any]:
            current = list(start)
            for user in [user for user in self.functions if user.phase == phase]:
                name, returned = user.name, user.build(current, recipe=recipe)
                current = list(returned) if isinstance(returned, Iterable) else [returned]
                if not all(hasattr(op, "basic_ops") for op in current):
                    raise TypeError(f"the fusion {name} must return ops, got {returned!r:.200}")
                _check_cover(current, ops, name)
                for op in current:
                    if op.is_fused_op:
                        makers.setdefault(op, name)
            return current

        def fusions_of(phase: Phase, current: Sequence[Any]) -> tuple[Fusion, ...]:
            ends = [0, *accumulate(len(op.basic_ops) for op in current)]
            placed = zip(current, pairwise(ends), strict=True)
            return tuple(Fusion(phase, *at, op, makers[op]) for op, at in placed if op.is_fused_op)

        joint_ops = run("joint", ops)
        fusions = joint = fusions_of("joint", joint_ops)
        for phase in ("forward", "backward"):
            fused = fusions_of(phase, run(phase, joint_ops))
            for fusion in joint:
                if fusion._replace(phase=phase) not in fused:
                    raise RuntimeError(
                        f"{type(fusion.built).__name__} was made by a joint fusion, whose forward "
                        "and backward agree only with each other; forward and backward fusion "
                        "functions must leave it in place"
                    )
            fusions += tuple(f for f in fused if f.built not in joint_ops)
        return fusions


def _check_cover(fused: Sequence[Any], basic: Sequence[Any], name: str) -> None:
    """Raise RuntimeError unless what the function ``name`` returned covers exactly ``basic``."""
    expanded = [part for op in fused for part in op.basic_ops]
    if [*map(id, expanded)] != [*map(id, basic)]:
        raise RuntimeError(
            f"the fusion function {name} must return ops that cover exactly the basic ops it was "
            f"given, in order: given {[type(op).__name__ for op in basic]}, got "
            f"{[type(op).__name__ for op in fused]} covering "
            f"{[type(op).__name__ for op in expanded]}; correct it, or remove it with "
            "unregister_rule"
        )


def _named(name: str, among: Iterable[Rule]) -> Rule:
    """The rule, variant or function of that name; ValueError names those there are."""
    by_name = {known.name: known for rule in among for known in (rule, *rule.variants)}
    if name in by_name:
        return by_name[name]
    raise ValueError(
        f"a fusion rule must be one of {', '.join(by_name)}, got {name!r}"
        f"{did_you_mean(name, by_name)}"
    )


def _names(rule: Rule) -> tuple[str, ...]:
    return (rule.name, *[variant.name for variant in rule.variants])


def is_ours(defined: Any) -> bool:
    """Whether a class or a function is of this package."""
    return (defined.__module__ or "").startswith("fusible.")  # None of what exec defined


def check_names(rule: Rule) -> None:
    """Check the dtypes and recipes for which a rule has conditions (``where``).

    Under a wrong name a condition is never needed, which ``explain`` cannot show. An unknown recipe
    is a warning, since its class may be defined later.

    Raises:
        ValueError: a dtype is compared with no name of one.
    """
    dtypes = [str(d).removeprefix("torch.") for d in vars(torch).values() if type(d) is torch.dtype]
    recipes = list(dict.fromkeys(_recipe_names(Recipe)))
    for path, value in [pair for need in rule.needs for pair in need.only_where]:
        if path.names == ("recipe",) and value not in recipes:
            warnings.warn(
                f"a condition of the rule {rule.name} compares recipe with {value!r}, which no "
                f"recipe is called yet; there are {', '.join(recipes)}"
                f"{did_you_mean(str(value), recipes)}",
                UserWarning,
                stacklevel=3,
            )
        # These are always the fuser's: an op cannot have facts of its own by these names.
        is_dtype = path.names[-1:] in (("dtype",), ("param_dtype",))
        if is_dtype and value not in (*dtypes, UNKNOWN, None):
            got = str(value).removeprefix("torch.")
            raise ValueError(
                f"the conditions of the rule {rule.name} must compare {path} with names of dtypes "
                f"(float32, bfloat16, ...), got {value!r}{did_you_mean(got, dtypes)}"
            )


def _recipe_names(kind: type[Recipe]) -> Iterator[str]:
    if isinstance(kind.name, str) and not kind.__name__.startswith("_"):  # a base of ours, or many
        yield kind.name
    for derived in kind.__subclasses__():
        yield from _recipe_names(derived)


def _has_fusion_signature(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind([], recipe=None)
    except TypeError:
        return False
    except ValueError:  # a builtin, which has no signature
        pass
    return True


registry = Registry()


def register_rule(rule: Rule, *, before: str | None = None, after: str | None = None) -> None:
    """Add a fusion rule of your own; it is tried after all users' functions.

    It is tried, refused and explained as built-in rules are, and ``Sequential(require=...)`` knows
    its name.

    Args:
        rule: made by :func:`fusible.extend.rule`.
        before: the name of a rule that shall be tried after it; by default all there are.
        after: the name of a rule that shall be tried before it.

    Raises:
        TypeError: it is no rule.
        ValueError: there is a rule of that name, none of the name given, or a condition reads what
            is no fact.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"a rule must be made by fusible.extend.rule, got {rule!r}")
    rules = registry.rules
    if any(rule.name in _names(known) for known in rules):
        raise ValueError(
            f"a rule's name must be new, got {rule.name!r}; rename its function, or remove "
            "the earlier one with unregister_rule"
        )
    if before is not None and after is not None:
        raise ValueError(
            f"a rule must be placed before another or after one, got {before!r} and {after!r}"
        )
    for variant in rule.variants:
        check_facts(variant)
        check_names(variant)
    at = 0
    if neighbour := before or after:
        _named(neighbour, rules)
        at = [neighbour in _names(known) for known in rules].index(True)
        at += after is not None
    registry.install((*rules[:at], rule, *rules[at:]))


def unregister_rule(rule: Rule | Callable[..., Any] | str) -> None:
    """Take a rule or a fusion function away, given itself or by its name; also a built-in rule.

    Raises:
        ValueError: there is none of that name.
    """
    found = [known for known in registry.functions if known.build == rule]
    if not found:
        name = str(getattr(rule, "name", rule))
        registry.rule(name)
        found = [known for known in registry.functions if known.name == name]
        registry.rules = tuple(left for known in registry.rules if (left := known.without(name)))
    registry.functions = tuple(known for known in registry.functions if known not in found)
    registry.changed()


def fusion_rules() -> tuple[Rule, ...]:
    """All rules in order of priority: your own, then the built-in ones."""
    return registry.rules


def _register(phase: Phase, function: Callable[..., Any], prepend: bool) -> None:
    if not callable(function) or not _has_fusion_signature(function):
        raise TypeError(
            f"a fusion must be a function func(ops, *, recipe) -> ops, got {function!r}"
        )
    check_bools("a fusion", prepend=prepend)
    of = getattr(function, "func", function)  # of functools.partial
    name = getattr(of, "__name__", type(of).__name__)
    added, known = Rule(name, phase, (), (), function, ""), registry.functions
    if added not in known:
        registry.functions = (added, *known) if prepend else (*known, added)
        registry.changed()


def register_forward_backward_fusion(
    op_fusion_func: Callable[..., Any], prepend: bool = False
) -> None:
    """Register a joint fusion, ``op_fusion_func(ops, *, recipe) -> ops``.

    A fused op made by it runs forward and backward and need agree only with itself. Users'
    functions run before the built-in rules, each once per run of ops, recipe and gradient
    requirements, and again for each part of a run between formulas that autograd differentiates;
    ``prepend`` puts this one before the user's others.
    """
    _register("joint", op_fusion_func, prepend)


def register_forward_fusion(op_fusion_func: Callable[..., Any], prepend: bool = False) -> None:
    """Register a forward-only fusion, ``op_fusion_func(ops, *, recipe) -> ops``.

    The fused op's forward must save, in each basic op's context, what that op documents as its
    saved state, since the basic ops' own backwards (or another fusion of them) will read it. See
    :func:`register_forward_backward_fusion` for when functions run.
    """
    _register("forward", op_fusion_func, prepend)


def register_backward_fusion(op_fusion_func: Callable[..., Any], prepend: bool = False) -> None:
    """Register a backward-only fusion, ``op_fusion_func(ops, *, recipe) -> ops``.

    The fused op's backward reads the state that each basic op documents, whichever forward saved
    it. See :func:`register_forward_backward_fusion` for when functions run.
    """
    _register("backward", op_fusion_func, prepend)
