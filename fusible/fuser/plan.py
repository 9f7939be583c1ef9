"""Planning: which fused ops run which basic ops, from facts alone, for any target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any, NamedTuple

from fusible.fuser.conditions import UNKNOWN
from fusible.fuser.rules import Phase, Rule
from fusible.fuser.target import Target


class NotFused(RuntimeError):
    """A rule of ``Sequential(..., require=[...])`` did not fire; says why."""


def dtype_name(dtype: Any) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``, ``"unknown"`` for None."""
    return UNKNOWN if dtype is None else str(dtype).removeprefix("torch.")


class TensorFacts(NamedTuple):
    """The facts of an input tensor that conditions may read.

    ``dtype`` is a short name, ``"unknown"`` behind a user's op that neither declares it nor runs on
    fake tensors; ``features`` the size of the last dimension of a caller's tensor of two or more
    dimensions, and of no fewer than the input (row counts are no facts), None where no rule that
    fits reads it; equal ``source`` means the very same tensor.
    """

    dtype: str
    device: str
    features: int | None
    requires_grad: bool
    source: int | str


class GradNeeds(NamedTuple):
    """The gradients that one op must compute; ``requires_grad``: whether its backward runs."""

    requires_grad: bool
    input: bool
    params: tuple[bool, ...]
    extra_inputs: tuple[bool, ...]


_FACTS_OF_ALL = ("input", "dtype", "param_dtype", "requires_grad", "params_require_grad")


@dataclass(frozen=True)
class OpFacts:
    """The facts of one basic op that conditions can read: declared ones, parameters, inputs.

    ``dtype`` is that of its output, in which it computes.
    """

    facts: dict[str, Any]
    param_dtype: str | None
    extra_inputs: dict[str, TensorFacts]
    input: TensorFacts
    dtype: str

    @staticmethod
    def of_type(kind: Any, blank: TensorFacts) -> SimpleNamespace:
        """The namespace that ``this.<op>`` reads, with blank values, of an op of a type."""
        extra = [kind.extra_input_name(kind, slot) for slot in range(kind.num_extra_inputs)]
        names = {*extra, *kind.extra_input_names}
        facts = dict.fromkeys(kind.fact_names)
        op = OpFacts(facts, None, dict.fromkeys(names, blank), blank, "")
        return op.namespace(GradNeeds(False, False, (), ()))

    def namespace(self, needs: GradNeeds) -> SimpleNamespace:
        """The namespace that ``this.<op>`` reads."""
        for name in self.facts:
            if name in _FACTS_OF_ALL:
                raise ValueError(
                    f"fact_names of an op must not hold what all ops have "
                    f"({', '.join(_FACTS_OF_ALL)}), got {name!r}; rename the attribute"
                )
        return SimpleNamespace(
            **self.facts,
            **self.extra_inputs,
            input=self.input,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            requires_grad=needs.requires_grad,
            params_require_grad=any(needs.params),
        )


Facts = tuple[OpFacts, ...]
"""Everything that conditions may read of one call, except recipe, target and gradients."""

FactsOf = Callable[[dict[str, Any], int], SimpleNamespace]
"""Makes the namespace ``this`` of ops that fit a pattern from an index on."""


@dataclass(frozen=True, repr=False)
class Refusal:
    """A rule whose pattern fits the ops from ``start``, and the conditions that were false.

    ``other_target``: whether the rule is for other machines or recipes.
    """

    rule: Rule
    start: int
    ops: tuple[Any, ...]
    reasons: tuple[str, ...]
    other_target: bool = False

    def __repr__(self) -> str:
        where = f"ops[{self.start}:{self.start + len(self.ops)}]"
        return f"{self.rule.name} not used for {where}: {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class FusionFunction:
    """A user's fusion function, ``function(ops, *, recipe) -> ops``, called by its name."""

    phase: Phase
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        """The name of the function, or of the class of another callable."""
        function = getattr(self.function, "func", self.function)  # of functools.partial
        return getattr(function, "__name__", type(function).__name__)

    @property
    def variants(self) -> tuple[FusionFunction, ...]:
        """Itself, as of a rule without rows of kernels."""
        return (self,)

    def places(self, ops: Sequence[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Any ops: a function decides when it is called."""
        yield 0, {"ops": ops}

    def __str__(self) -> str:
        return "any ops"


class Fusion(NamedTuple):
    """A fused op over basic ops ``start`` to ``stop``.

    ``name`` is that of the rule or of the user's function. Of kernel selection, ``op`` are the
    kernels that the one op runs on.
    """

    start: int
    stop: int
    op: Any
    name: str

    def shifted(self, places: int) -> Fusion:
        """The same behind as many more ops."""
        return self._replace(start=self.start + places, stop=self.stop + places)


@dataclass(frozen=True)
class UserFusions:
    """The fused ops that the user's functions made for each pass, with their places."""

    joint: tuple[Fusion, ...] = ()
    forward: tuple[Fusion, ...] = ()
    backward: tuple[Fusion, ...] = ()


@dataclass(frozen=True, repr=False)
class Plan:
    """The fused and basic ops that run a sequence of basic ops, forward and backward.

    Attributes:
        basic_ops: the ops as written.
        forward_ops, backward_ops: the ops that run, fused and basic ones, which cover these in
            order.
        fusions: the fused ops, each with its phase: ``"joint"``, ``"forward"`` or
            ``"backward"``.
        kernels: those that are selected for basic ops; the others run on their own default.
        refusals: the rules that fit some ops and did not fire, with the reasons.
        grad: which gradients each basic op has to give.
        recipe, autocast_dtype, target, facts: what the plan was made for.
        recipes: of each basic op the recipe, and whether it quantizes operands of products.
    """

    basic_ops: tuple[Any, ...]
    forward_ops: tuple[Any, ...]
    backward_ops: tuple[Any, ...]
    fusions: tuple[tuple[Phase, Fusion], ...]
    kernels: tuple[Fusion, ...]
    refusals: tuple[Refusal, ...]
    grad: tuple[GradNeeds, ...]
    recipe: Any
    autocast_dtype: Any
    target: Target
    facts: Facts = field(repr=False)
    recipes: tuple[tuple[Any, bool], ...] = ()

    def __post_init__(self) -> None:
        """Find once whether each op's recipe quantizes."""
        if self.recipes:
            return
        places = range(len(self.basic_ops))
        own = [None if self.recipe is None else self.recipe.over(i, i + 1) for i in places]
        recipes = tuple([(r, r is not None and r.quantizes) for r in own])
        object.__setattr__(self, "recipes", recipes)

    def __repr__(self) -> str:
        """The target, the recipe, and the ops of each pass."""
        forward, backward = (
            ", ".join([type(op).__name__ for op in ops])
            for ops in (self.forward_ops, self.backward_ops)
        )
        passes = f"forward: {forward}; backward: {backward}"
        return f"Plan({self.target}, recipe {self.recipe_name}, {passes})"

    @property
    def recipe_name(self) -> str:
        """The name of the recipe, or of those of the ops, ``"none"`` in high precision."""
        names = ["none" if recipe is None else recipe.name for recipe, _ in self.recipes]
        return " and ".join(dict.fromkeys(names))

    @property
    def heading(self) -> str:
        """The target, recipe, dtype and mode that it was made for."""
        mode = "training" if any(n.requires_grad for n in self.grad) else "inference"
        autocast = self.autocast_dtype
        dtype = self.facts[0].input.dtype if autocast is None else dtype_name(autocast)
        return f"{self.target}, recipe {self.recipe_name}, {dtype}, {mode}"

    def summary(self) -> str:
        """Ops, heading and fusions in one line."""
        fused = [f"{f.name} ({phase}) of ops[{f.start}:{f.stop}]" for phase, f in self.fusions]
        fused += [f"{f.name} for ops[{f.start}]" for f in self.kernels]
        ops = ", ".join(type(op).__name__ for op in self.basic_ops)
        return f"{ops} on {self.heading}: {', '.join(fused) or 'nothing fused'}"

    @property
    def fired(self) -> tuple[str, ...]:
        """Names of the rules, and of the user's fusion functions, that fired."""
        return (*[f.name for _, f in self.fusions], *[f.name for f in self.kernels])

    def require(self, rules: Sequence[Rule | FusionFunction]) -> None:
        """Raise :class:`NotFused` with the reasons unless each of the rules and functions fired.

        Backward rules are exempt without a backward.
        """
        backward = any(needs.requires_grad for needs in self.grad)
        for rule in rules:
            names = [variant.name for variant in rule.variants]
            if any(name in self.fired for name in names) or (
                rule.phase == "backward" and not backward
            ):
                continue
            reasons = [str(r) for r in self.refusals if r.rule.name in names]
            why = (
                "\n".join(reasons) or f"what fuses its ops is {', '.join(self.fired) or 'nothing'}"
            )
            raise NotFused(f"{rule.name} is required but did not fire for {self.target}:\n{why}")


def plan(
    ops: Sequence[Any],
    facts: Facts,
    *,
    recipe: Any,
    target: Target,
    rules: Sequence[Rule],
    grad: Sequence[GradNeeds],
    autocast_dtype: Any,
    user: UserFusions,
) -> Plan:
    """Plan a run of basic ops; pure, needs no device and runs no kernel.

    The user's own fusions stand as they are; built-in rules take only ops that these leave, joint
    rules first, then forward and backward rules independently of each other.
    """
    refusals: list[Refusal] = []
    facts_of = _facts_reader(facts, recipe, target, grad)

    def scan(phase: Phase, taken: Sequence[Fusion]) -> list[Fusion]:
        chosen = [r for r in rules if r.phase == phase]
        return list(_scan(ops, chosen, taken, facts_of, refusals))

    # A user's joint fusions are among the forward ones and the backward ones too.
    own = scan("joint", [*user.joint, *user.forward, *user.backward])
    joint = [*user.joint, *own]
    forward = [*user.forward, *own]
    forward += scan("forward", forward)
    backward = [*user.backward, *own]
    if any(needs.requires_grad for needs in grad):
        backward += scan("backward", backward)
    made: list[tuple[Phase, Fusion]] = [
        *(("joint", f) for f in joint),
        *(("forward", f) for f in forward if f not in joint),
        *(("backward", f) for f in backward if f not in joint),
    ]
    kernels = scan("kernels", [*forward, *backward])
    return Plan(
        tuple(ops),
        _covering(ops, forward),
        _covering(ops, backward),
        tuple(made),
        tuple(kernels),
        tuple(refusals),
        tuple(grad),
        recipe,
        autocast_dtype,
        target,
        facts,
    )


def _scan(
    ops: Sequence[Any],
    rules: Sequence[Rule],
    taken: Sequence[Fusion],
    facts_of: FactsOf,
    refusals: list[Refusal],
) -> Iterator[Fusion]:
    """The fusions of one pass over the ops, each by the first rule that fits; adds the refusals."""
    blocked = {i for fusion in taken for i in range(fusion.start, fusion.stop)}
    at = 0
    while at < len(ops):
        free = at
        while free < len(ops) and free not in blocked:
            free += 1
        found, refused = _first_match(ops[:free], at, rules, facts_of)
        refusals.extend(refused)
        if found is not None:
            rule, bound, covered = found
            build = _build_kernels if rule.phase == "kernels" else _build_op
            op = build(rule, bound, covered)
            yield Fusion(at, at + len(covered), op, rule.name)
            at += len(covered) - 1
        at += 1


def _first_match(
    ops: Sequence[Any], at: int, rules: Sequence[Rule], facts_of: FactsOf
) -> tuple[tuple[Rule, dict[str, Any], tuple[Any, ...]] | None, list[Refusal]]:
    """The first rule that applies from ``at`` on, with the ops; and the refusals before it."""
    refused: list[Refusal] = []
    for rule in rules:
        bound = rule.fit(ops, at)
        if bound is None:
            continue
        covered = tuple(op for op in bound.values() if op is not None)
        this = facts_of(bound, at)
        for tried in rule.variants:
            if this.mixed:
                reasons: tuple[str, ...] = (
                    f"its ops must run under one recipe, got {this.recipe}",
                )
            else:
                reasons = tried.why_not(bound, this)
            if not reasons:
                return (tried, bound, covered), refused
            refused.append(Refusal(tried, at, covered, reasons, not tried.applies_to_target(this)))
    return None, refused


def _build_kernels(rule: Rule, bound: dict[str, Any], ops: Sequence[Any]) -> Any:
    """Call the rule; RuntimeError unless it returns kernels that the op runs on."""
    (op,), kernels = ops, rule.call(bound)
    if kernels is None or not isinstance(kernels, op.kernels_type):
        raise RuntimeError(
            f"{rule.name} must return kernels of {type(op).__name__}"
            f"{'' if op.kernels_type is object else f', a {op.kernels_type.__name__}'}, "
            f"got {kernels!r}"
        )
    return kernels


def _build_op(rule: Rule, bound: dict[str, Any], ops: Sequence[Any]) -> Any:
    """Call the rule; RuntimeError unless the fused op covers exactly these ops."""
    op = rule.call(bound)
    covered = getattr(op, "basic_ops", ())
    if [*map(id, covered)] != [*map(id, ops)]:
        raise RuntimeError(
            f"{rule.name} must build a fused op of {[type(part).__name__ for part in ops]}, in "
            f"this order, got {type(op).__name__} of {[type(part).__name__ for part in covered]}"
        )
    return op


def _facts_reader(
    facts: Facts, run_recipe: Any, target: Target, grad: Sequence[GradNeeds]
) -> FactsOf:
    def facts_of(bound: dict[str, Any], at: int) -> SimpleNamespace:
        count = sum(op is not None for op in bound.values())
        recipe = None if run_recipe is None else run_recipe.over(at, at + count)
        this = SimpleNamespace(
            recipe="none" if recipe is None else recipe.name,
            quantizes=recipe is not None and recipe.quantizes,
            mixed=recipe is not None and recipe.is_mixed,
            backward_override=_override(recipe),
            fp8_products=recipe is None or recipe.fp8_products,
            format=_format_facts(recipe, "name"),
            scaling=_format_facts(recipe and recipe.of_fp8_products, "scaling"),
            vectors=_format_facts(recipe, "vectors"),
            sm=target.sm,
            cudnn_frontend=target.cudnn_frontend,
            cutlass_dsl=target.cutlass_dsl,
            cuda_driver=target.cuda_driver,
            device=target.device,
            dtype=facts[at].dtype,
            input=facts[at].input,
            requires_grad=any(needs.requires_grad for needs in grad),
        )
        for name, op in bound.items():
            if op is not None:
                setattr(this, name, facts[at].namespace(grad[at]))
                at += 1
        return this

    return facts_of


def check_facts(rule: Rule) -> None:
    """Check that the conditions of a rule read facts that exist wherever its pattern fits.

    Raises:
        ValueError: naming the condition's path and the facts there are.
    """
    blank = TensorFacts("", "", None, False, 0)
    for kinds in product(*[slot.types for slot in rule.pattern]):
        this = _facts_reader((OpFacts({}, None, {}, blank, ""),), None, Target("cpu"), ())({}, 0)
        for slot, kind in zip(rule.pattern, kinds, strict=True):
            if hasattr(this, slot.name):
                raise ValueError(
                    f"the ops of the rule {rule.name} must not be called as what conditions read "
                    f"({', '.join(sorted(vars(this)))}), got {slot.name!r}"
                )
            if not slot.optional:  # which has no facts where it is left out
                setattr(this, slot.name, OpFacts.of_type(kind, blank))
        for path in rule.paths:
            try:
                path.read(this)
            except AttributeError as error:
                raise ValueError(
                    f"the conditions of the rule {rule.name} must read facts: {error}"
                ) from error


def _override(recipe: Any) -> str | None:
    """The override of the backward's operands, None if they have the forward's formats."""
    if recipe is None:
        return None
    return recipe.backward_override or ("other formats" if recipe.mixed_roles else None)


def _format_facts(recipe: Any, attribute: str) -> SimpleNamespace:
    """An attribute of the number format of each operand of a product, ``"none"`` without one."""
    formats = {
        role: None if recipe is None else recipe.format(role)
        for role in ("input", "weight", "grad")
    }
    return SimpleNamespace(**{
        role: "none" if fmt is None else getattr(fmt, attribute) for role, fmt in formats.items()
    })  # fmt: skip


def _covering(ops: Sequence[Any], fusions: Sequence[Fusion]) -> tuple[Any, ...]:
    """Fused ops where there are some, the basic ops themselves elsewhere."""
    covering: dict[int, Any] = dict(enumerate(ops))
    for fusion in fusions:
        for i in range(fusion.start, fusion.stop):
            del covering[i]
        covering[fusion.start] = fusion.op
    return tuple(covering[i] for i in sorted(covering))


def joined(plans: Sequence[Plan]) -> Plan | None:
    """The plans of consecutive runs as one, with indices into all ops; None if there is none."""
    if len(plans) < 2:
        return plans[0] if plans else None
    starts = accumulate([len(p.basic_ops) for p in plans[:-1]], initial=0)
    placed = list(zip(plans, starts, strict=True))
    return replace(
        plans[0],
        recipes=tuple(of_op for p in plans for of_op in p.recipes),
        basic_ops=tuple(op for p in plans for op in p.basic_ops),
        forward_ops=tuple(op for p in plans for op in p.forward_ops),
        backward_ops=tuple(op for p in plans for op in p.backward_ops),
        grad=tuple(needs for p in plans for needs in p.grad),
        facts=tuple(of_op for p in plans for of_op in p.facts),
        fusions=tuple((phase, f.shifted(at)) for p, at in placed for phase, f in p.fusions),
        kernels=tuple(f.shifted(at) for p, at in placed for f in p.kernels),
        refusals=tuple(replace(r, start=r.start + at) for p, at in placed for r in p.refusals),
    )


def of_parts(whole: Plan, plans: Sequence[Plan]) -> Plan:
    """The plans of a run's parts as one, with the refusals of rules that fit over several parts."""
    ends = [0, *accumulate(len(p.basic_ops) for p in plans)]
    across = [
        r for r in whole.refusals if any(r.start < end < r.start + len(r.ops) for end in ends)
    ]
    made = joined(plans)
    assert made is not None
    return replace(made, refusals=(*made.refusals, *across))


def check_cover(fused: Sequence[Any], basic: Sequence[Any], name: str) -> None:
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


def cover(fused: Sequence[Any], makers: Mapping[Any, str]) -> tuple[Fusion, ...]:
    """The fused ops of a list with their places; ``makers`` names the function of each."""
    found, at = [], 0
    for op in fused:
        stop = at + len(op.basic_ops)
        if op.is_fused_op:
            found.append(Fusion(at, stop, op, makers.get(op, type(op).__name__)))
        at = stop
    return tuple(found)
