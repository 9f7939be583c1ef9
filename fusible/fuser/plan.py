"""Planning: which fused ops and kernels run which basic ops, from facts alone, for any target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, product
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

from fusible.fuser.conditions import UNKNOWN
from fusible.fuser.rules import KernelRow, Phase, Rule
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
    dimensions, and of no fewer than the input (row counts are no facts), None where no rule whose
    pattern fits, and no row of kernels, reads it; equal ``source`` means the very same tensor.
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


_NO_GRAD = GradNeeds(False, False, (), ())


def facts_of_op(
    declared: Mapping[str, Any],
    extra_inputs: Mapping[str, TensorFacts],
    needs: GradNeeds,
    input: TensorFacts,
    dtype: str,
    param_dtype: str | None,
) -> SimpleNamespace:
    """The facts of one basic op that conditions read as ``this.<op>``.

    ``dtype`` is that of its output, in which it computes.
    """
    of_all = {
        "input": input,
        "dtype": dtype,
        "param_dtype": param_dtype,
        "requires_grad": needs.requires_grad,
        "params_require_grad": any(needs.params),
    }
    for name in (*declared, *extra_inputs):
        if name in of_all or (name in declared and name in extra_inputs):
            raise ValueError(
                f"fact_names and extra inputs of an op must have names of their own, not of what "
                f"all ops have ({', '.join(of_all)}), got {name!r}; rename it"
            )
    return SimpleNamespace(**{**declared, **extra_inputs, **of_all})


Facts = tuple[SimpleNamespace, ...]
"""The facts of each op in one call (:func:`facts_of_op`)."""


@dataclass(frozen=True, repr=False)
class Refusal:
    """A rule whose pattern fits the ops from ``start``, and the conditions that were false.

    Or a row of kernels of one op. ``other_target``: whether it is for other machines or recipes.
    """

    rule: Rule | KernelRow
    start: int
    ops: tuple[Any, ...]
    reasons: tuple[str, ...]
    other_target: bool = False

    def __repr__(self) -> str:
        where = f"ops[{self.start}:{self.start + len(self.ops)}]"
        return f"{self.rule.name} not used for {where}: {'; '.join(self.reasons)}"


class Fusion(NamedTuple):
    """The fused op that runs basic ops ``start`` to ``stop`` in a phase.

    ``name`` is that of the rule, or of the user's function, that made it.
    """

    phase: Phase
    start: int
    stop: int
    built: Any
    name: str

    def shifted(self, by: int) -> Fusion:
        """The same behind as many more ops."""
        return self._replace(start=self.start + by, stop=self.stop + by)


@dataclass(frozen=True, repr=False)
class Plan:
    """The fused and basic ops that run a sequence of basic ops, forward and backward.

    Attributes:
        basic_ops: the ops as written.
        fusions: the fused ops of each part of the run, by phase (``"joint"``, ``"forward"``,
            ``"backward"``).
        kernel_rows: of each basic op the row of the kernels selected for it; None where a fusion
            covers it, and for its default.
        refusals: the rules that fit some ops and did not fire, and the rows of kernels that come
            before the selected one, with the reasons.
        grad: which gradients each basic op has to give.
        recipe, autocast_dtype, target, facts: what the plan was made for.
        recipes: of each basic op the recipe, and whether it quantizes operands of products.
    """

    basic_ops: tuple[Any, ...]
    fusions: tuple[Fusion, ...]
    kernel_rows: tuple[KernelRow | None, ...]
    refusals: tuple[Refusal, ...]
    grad: tuple[GradNeeds, ...]
    recipe: Any
    autocast_dtype: Any
    target: Target
    facts: Facts = field(repr=False)
    recipes: tuple[tuple[Any, bool], ...]

    def __repr__(self) -> str:
        forward, backward = (
            ", ".join([type(op).__name__ for op in ops])
            for ops in (self.forward_ops, self.backward_ops)
        )
        passes = f"forward: {forward}; backward: {backward}"
        return f"Plan({self.target}, recipe {self.recipe_name}, {passes})"

    @property
    def forward_ops(self) -> tuple[Any, ...]:
        """The ops that run in the forward, fused and basic ones, in order."""
        return self._covering(self.of_phase("joint", "forward"))

    @property
    def backward_ops(self) -> tuple[Any, ...]:
        """The ops that run in the backward, in the order of the forward."""
        return self._covering(self.of_phase("joint", "backward"))

    def _covering(self, fusions: Sequence[Fusion]) -> tuple[Any, ...]:
        """Fused ops where there are some, the basic ops themselves elsewhere."""
        covering: dict[int, Any] = dict(enumerate(self.basic_ops))
        for fusion in fusions:
            for i in range(fusion.start, fusion.stop):
                del covering[i]
            covering[fusion.start] = fusion.built
        return tuple(covering[i] for i in sorted(covering))

    def of_phase(self, *phases: Phase) -> tuple[Fusion, ...]:
        """The fusions of one phase, or of several."""
        return tuple(f for f in self.fusions if f.phase in phases)

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
        """Ops, heading, fusions and selected kernels in one line."""
        fused = [f"{f.name} ({f.phase}) of ops[{f.start}:{f.stop}]" for f in self.fusions]
        rows = [f"kernels {r.name} for ops[{i}]" for i, r in enumerate(self.kernel_rows) if r]
        ops = ", ".join(type(op).__name__ for op in self.basic_ops)
        return f"{ops} on {self.heading}: {', '.join([*fused, *rows]) or 'nothing fused'}"

    @property
    def fired(self) -> tuple[str, ...]:
        """Names of the rules, and of the user's fusion functions, that fired."""
        return tuple(f.name for f in self.fusions)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels selected for single ops, in order."""
        return tuple(row.name for row in self.kernel_rows if row)

    def require(self, rules: Sequence[Rule]) -> None:
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
            if not reasons and self.fired:
                fired = ", ".join(self.fired)
                reasons = [f"its pattern fits, but other fusions took its ops; fired: {fired}"]
            why = "\n".join(reasons) or "no rule fused its ops"
            raise NotFused(f"{rule.name} is required but did not fire for {self.target}:\n{why}")


def plan(
    ops: Sequence[Any],
    facts: Facts,
    *,
    recipe: Any,
    autocast_dtype: Any,
    target: Target,
    rules: Sequence[Rule],
    grad: Sequence[GradNeeds],
    user: Sequence[Fusion],
) -> Plan:
    """Plan a run of basic ops; pure, needs no device and runs no kernel.

    The user's own fusions stand as they are; built-in rules take only ops that these leave, joint
    rules first, then forward and backward rules independently of each other. Kernels are
    selected for each op that no fusion covers.
    """
    requires_grad = any(needs.requires_grad for needs in grad)
    matcher = _Matcher(ops, facts, recipe, target, requires_grad)
    fusions, phases = list(user), get_args(Phase)
    for phase in phases:
        if phase == "backward" and not requires_grad:
            continue
        taken = [f for f in fusions if {f.phase, phase} != {"forward", "backward"}]
        fusions += matcher.scan([r for r in rules if r.phase == phase], taken)
    fusions.sort(key=lambda f: phases.index(f.phase))
    fused = {i for f in fusions for i in range(f.start, f.stop)}
    rows = [None if i in fused else matcher.kernel_row(i) for i, _ in enumerate(ops)]
    recipes = [None if recipe is None else recipe.over(i, i + 1) for i, _ in enumerate(ops)]
    return Plan(
        tuple(ops),
        tuple(fusions),
        tuple(rows),
        tuple(matcher.refusals),
        tuple(grad),
        recipe,
        autocast_dtype,
        target,
        facts,
        tuple([(r, r is not None and r.quantizes) for r in recipes]),
    )


@dataclass
class _Matcher:
    """Matches rules to ops under the facts of one call; keeps the refusals."""

    ops: Sequence[Any]
    facts: Facts
    recipe: Any
    target: Target
    requires_grad: bool
    refusals: list[Refusal] = field(default_factory=list)

    def scan(self, rules: Sequence[Rule], taken: Sequence[Fusion]) -> Iterator[Fusion]:
        """The fusions of one pass over the ops not taken, each by the first rule that fits."""
        blocked = {i for fusion in taken for i in range(fusion.start, fusion.stop)}
        at, end = 0, len(self.ops)
        while at < end:
            free = next((i for i in range(at, end) if i in blocked), end)
            fusion = self._first_match(self.ops[:free], at, rules)
            if fusion is not None:
                yield fusion
            at = at + 1 if fusion is None else fusion.stop

    def _first_match(self, ops: Sequence[Any], at: int, rules: Sequence[Rule]) -> Fusion | None:
        """The fusion by the first rule that applies to these ops from ``at`` on."""
        for rule in rules:
            bound = rule.fit(ops, at)
            if bound is None:
                continue
            covered = tuple(op for op in bound.values() if op is not None)
            this = self.this(bound, at)
            for tried in rule.variants:
                mixed = f"its ops must run under one recipe, got {this.recipe}"
                reasons = (mixed,) if this.mixed else tried.why_not(bound, this)
                if not reasons:
                    built = _build_op(tried, bound, covered)
                    return Fusion(tried.phase, at, at + len(covered), built, tried.name)
                self._refuse(tried, at, covered, reasons, this)
        return None

    def kernel_row(self, at: int) -> KernelRow | None:
        """The first row of kernels that applies to an op; None for its default."""
        op = self.ops[at]
        this = self.this({"op": op}, at) if op.kernel_rows else None
        for row in op.kernel_rows:
            try:
                reasons = row.why_not(op, this)
            except AttributeError as error:
                error.add_note(f"in the needs of kernels {row.name} of {type(op).__name__}")
                raise
            if not reasons:
                return row
            self._refuse(row, at, (op,), reasons, this)
        return None

    def _refuse(
        self, tried: Rule | KernelRow, at: int, ops: tuple[Any, ...], reasons: Any, this: Any
    ) -> None:
        other_target = not tried.applies_to_target(this)
        self.refusals.append(Refusal(tried, at, ops, reasons, other_target))

    def this(self, bound: dict[str, Any], at: int) -> SimpleNamespace:
        """The namespace ``this`` of ops that fit a pattern from an index on."""
        count = sum(op is not None for op in bound.values())
        recipe = None if self.recipe is None else self.recipe.over(at, at + count)
        this = SimpleNamespace(
            recipe="none" if recipe is None else recipe.name,
            quantizes=recipe is not None and recipe.quantizes,
            mixed=recipe is not None and recipe.is_mixed,
            backward_override=_override(recipe),
            fp8_products=recipe is None or recipe.fp8_products,
            format=_format_facts(recipe, "name"),
            scaling=_format_facts(recipe and recipe.of_fp8_products, "scaling"),
            reduction_blocks=_format_facts(recipe, "reduction_blocks"),
            sm=self.target.sm,
            cudnn_frontend=self.target.cudnn_frontend,
            cutlass_dsl=self.target.cutlass_dsl,
            cuda_driver=self.target.cuda_driver,
            device=self.target.device,
            dtype=self.facts[at].dtype,
            input=self.facts[at].input,
            requires_grad=self.requires_grad,
        )
        for name, op in bound.items():
            if op is not None:
                setattr(this, name, self.facts[at])
                at += 1
        return this


def _build_op(rule: Rule, bound: dict[str, Any], ops: Sequence[Any]) -> Any:
    """Call the rule's function; RuntimeError unless the fused op covers exactly these ops."""
    try:
        op = rule.build(**bound)
    except Exception as error:
        error.add_note(f"in the function of rule {rule.name}")
        raise
    covered = getattr(op, "basic_ops", ())
    if [*map(id, covered)] != [*map(id, ops)]:
        raise RuntimeError(
            f"{rule.name} must build a fused op of {[type(part).__name__ for part in ops]}, in "
            f"this order, got {type(op).__name__} of {[type(part).__name__ for part in covered]}"
        )
    return op


def check_facts(rule: Rule) -> None:
    """Check that the conditions of a rule read facts that exist wherever its pattern fits.

    Raises:
        ValueError: naming the condition's path and the facts there are.
    """
    blank = TensorFacts("", "", None, False, 0)
    for kinds in product(*[slot.types for slot in rule.pattern]):
        none = facts_of_op({}, {}, _NO_GRAD, blank, "", None)
        this = _Matcher((), (none,), None, Target("cpu"), False).this({}, 0)
        for slot, kind in zip(rule.pattern, kinds, strict=True):
            if hasattr(this, slot.name):
                raise ValueError(
                    f"the ops of the rule {rule.name} must not be called as what conditions read "
                    f"({', '.join(sorted(vars(this)))}), got {slot.name!r}"
                )
            if not slot.optional:  # which has no facts where it is left out
                setattr(this, slot.name, _blank_facts(kind, blank))
        for path in rule.paths:
            try:
                path.read(this)
            except AttributeError as error:
                raise ValueError(
                    f"the conditions of the rule {rule.name} must read facts: {error}"
                ) from error


def _blank_facts(kind: Any, blank: TensorFacts) -> SimpleNamespace:
    extra = [kind.extra_input_name(kind, slot) for slot in range(kind.num_extra_inputs)]
    inputs = dict.fromkeys({*extra, *kind.extra_input_names}, blank)
    declared = dict.fromkeys(kind.fact_names)
    return facts_of_op(declared, inputs, _NO_GRAD, blank, "", None)


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


def joined(plans: Sequence[Plan]) -> Plan | None:
    """The plans of consecutive runs as one, with indices into all ops; None if there is none."""
    if len(plans) < 2:
        return plans[0] if plans else None
    starts = accumulate([len(p.basic_ops) for p in plans[:-1]], initial=0)
    placed = list(zip(plans, starts, strict=True))
    names = ("recipes", "basic_ops", "grad", "facts", "kernel_rows")
    by_op: Any = {name: tuple(chain(*[getattr(p, name) for p in plans])) for name in names}
    return replace(
        plans[0],
        **by_op,
        fusions=tuple(f.shifted(at) for p, at in placed for f in p.fusions),
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
