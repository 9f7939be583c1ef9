"""``explain``: the plan of every run in a module, and the reasons why rules did not fire."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from fusible.fuser import svg
from fusible.fuser.conditions import UNKNOWN
from fusible.fuser.context import OperationContext, call_fuser_forward
from fusible.fuser.fakes import restoring
from fusible.fuser.module_names import named_modules, op_names, path
from fusible.fuser.overlap import overlap_notes
from fusible.fuser.partition import Part
from fusible.fuser.plan import Plan, Refusal, of_parts
from fusible.fuser.plan_key import PlanKey
from fusible.fuser.rules import KernelRow, Rule
from fusible.fuser.run import Run, observed
from fusible.fuser.schedule import Schedule, unfused
from fusible.fuser.target import Target, target_of


@dataclass(frozen=True)
class PlannedRun:
    """One run of ops in a module, with its plan for a target; ``name`` says where it is."""

    name: str
    run: Run
    plan: Plan
    call_notes: dict[int, tuple[str, ...]] = field(default_factory=dict, repr=False, compare=False)
    """Notes on this call by the place of the op (tiles, ``BasicOperation.call_notes``)."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """The plans of a module's runs; prints as :meth:`to_text`, draws itself by :meth:`to_svg`."""

    planned: tuple[PlannedRun, ...]
    run_ends: tuple[str, ...] = ()
    """Modules that ended a run of ops (ordinary ones, those with hooks), a sentence each."""
    errors: tuple[str, ...] = ()
    """What ops would raise in this call, after the op's place; values of the right shape stand in
    for what they would give."""

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each run."""
        return tuple(p.plan for p in self.planned)

    @property
    def fired(self) -> tuple[str, ...]:
        """Names of the rules that fired, over all runs."""
        return tuple(name for plan in self.plans for name in plan.fired)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels selected for single ops, over all runs."""
        return tuple(name for plan in self.plans for name in plan.kernels)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """`Plan.refusals` of all runs."""
        return tuple(refusal for plan in self.plans for refusal in plan.refusals)

    def __repr__(self) -> str:
        return self.to_text()

    def to_text(self, *, every_rule: bool = False) -> str:
        """The ops of every run as a tree, then why rules that fit did not fire.

        Equal runs, such as those of a model's layers, are shown once.

        Args:
            every_rule: also those for other machines or recipes, which are otherwise counted.
        """
        lines = []
        for first, others in self._grouped(every_rule):
            lines.append(f"{first.name}: {first.plan.heading}")
            lines.extend(_lines(first, every_rule))
            if others:
                named = others if len(others) < 4 else [others[0], "...", others[-1]]
                lines.append(f"{_counted(others)}: {'; '.join(named)}")
        lines.extend(self.run_ends)
        lines.extend(f"does not run: {error}" for error in self.errors)
        return "\n".join(lines)

    def to_svg(self, path: str | Path | None = None) -> str:
        """The op graph as written (left) and as run (right), as SVG; also written to ``path``."""
        runs = []
        for first, others in self._grouped():
            more = f" and {_counted(others)}" if others else ""
            runs.append((f"{first.name}{more}: {first.plan.heading}", first.run.wiring, first.plan))
        drawing = svg.draw(runs)
        if path is not None:
            Path(path).write_text(drawing, encoding="utf-8")
        return drawing

    def _grouped(self, every_rule: bool = False) -> list[tuple[PlannedRun, list[str]]]:
        """The first of equal runs, with the names of the others."""
        kinds: dict[str, list[PlannedRun]] = {}
        for p in self.planned:
            text = "\n".join([p.plan.heading, *_lines(p, every_rule), repr(p.run.wiring)])
            kinds.setdefault(text, []).append(p)
        return [(first, [p.name for p in others]) for first, *others in kinds.values()]


def _counted(runs: Sequence[str]) -> str:
    return f"{len(runs)} equal run{'s' if len(runs) > 1 else ''}"


def explain(
    module: nn.Module, *inputs: Any, target: Target | str | None = None, **kwargs: Any
) -> Explanation:
    """Plan every run of ops that ``module(*inputs, **kwargs)`` would execute, without running it.

    Args:
        module: an op, a Sequential, or any module that contains some, compiled or not: its
            uncompiled forward is what is planned. Its forward and hooks are called, with fake
            tensors; its parameters, buffers and attributes that hold tensors stay as they are.
        *inputs: what the module would be called with; only shapes, dtypes and devices matter.
        target: the machine to plan for, such as ``"sm90"`` or ``"cpu"``; by default this one.
        **kwargs: keyword arguments of the call.

    Returns:
        The plans, with the sentence of every condition that blocked a candidate rule, and
        what ops would refuse in this call.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: ``module`` contains no fusible op, or decides by the values of its input; or
            what the module itself would raise where nothing can stand in.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            "explain needs a module, and then the inputs of a call of it, got "
            f"{type(module).__name__}"
        )
    planning = _Planning(module, None if target is None else Target.parse(target))
    _check_initialized(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    *fakes, fake_kwargs = _fakes(mode, (*inputs, kwargs))
    parts = [part for _, part in named_modules(module)]
    with (
        _named_errors(module, planning.planned),
        _uncompiled(),
        restoring(parts, mode),
        observed(planning.schedule_for),
    ):
        module(*fakes, **fake_kwargs)
    if not planning.planned:
        raise ValueError(
            f"explain needs a module whose forward runs fusible ops, got {type(module).__name__}, "
            "which ran none"
        )
    planning.join()
    return Explanation(
        tuple(planning.planned), tuple(_run_ends(module)), tuple(planning.errors.values())
    )


class _Planning:
    """The plans that a call of ``module`` on a target asks for; it runs basic ops one by one."""

    def __init__(self, module: nn.Module, target: Target | None) -> None:
        self.planned: list[PlannedRun] = []  # in the order of the call
        self.errors: dict[Any, str] = {}  # what ops would raise
        self._module, self._target = module, target
        self._names: dict[Any, str] = {}
        self._overlap_notes: dict[Any, tuple[str, ...]] = {}
        self._split: list[tuple[PlannedRun, Sequence[Part]]] = []

    def schedule_for(self, run: Run, key: PlanKey) -> Schedule:
        """The schedule of a run for a call: basic ops whose errors are noted."""
        names = self._names
        if run.ops[0] not in names:  # a stand-in for a module may be made in the call
            names.update(op_names(self._module))
        first, last = names[run.ops[0]], names[run.ops[-1]]
        where = first if first == last else f"{first} to {last}"
        plan = run.plan_for(key, self._target or target_of(key.device))
        schedule = run.make_schedule(plan, key)
        planned = PlannedRun(where, run, plan)
        if schedule.split is not None:  # each part of which is planned in its turn
            self._split.append((planned, schedule.split.parts))
            return schedule
        self.planned.append(planned)
        self._overlap_notes.update(
            overlap_notes(plan.basic_ops, schedule.forward, schedule.backward)
        )
        for op, needs, (recipe, _) in zip(plan.basic_ops, plan.grad, plan.recipes, strict=True):
            try:
                op.check_plan(needs, recipe, backward=True)
            except ValueError as error:
                self._note(op, error)
        places = count()
        return unfused(
            schedule, lambda op: partial(self._forward_or_note, planned, next(places), op)
        )

    def _note(self, op: Any, error: Exception) -> None:
        self.errors.setdefault(op, f"{self._names[op]} ({type(op).__name__}): {error}")

    def _forward_or_note(
        self,
        planned: PlannedRun,
        at: int,
        op: Any,
        contexts: list[OperationContext],
        x: Tensor,
        extra_inputs: Any,
    ) -> Any:
        """The op's outputs; where its forward raises, the error is noted.

        It then gives what it would for an input that fits it, outside of a recipe.
        """
        (context,) = contexts
        try:
            outputs = call_fuser_forward(op, contexts, x, extra_inputs)
        except (TypeError, ValueError) as error:
            self._note(op, error)
            context.recipe = context.next_quantizer = None
            context.quantizes = False
            sizes = [getattr(op, name, None) for name in ("in_features", "hidden_size", "size")]
            for features in (x.shape[-1:], *[(size,) for size in sizes if isinstance(size, int)]):
                dtype = context.parameters[0].dtype if context.parameters else x.dtype
                with suppress(TypeError, ValueError):
                    fits = x.new_empty((*x.shape[:-1], *features), dtype=dtype)
                    return call_fuser_forward(op, contexts, fits, extra_inputs)
            raise
        notes = *_tiles(planned.plan, at, context, x), *op.call_notes(context)
        planned.call_notes[at] = (*notes, *self._overlap_notes[op])
        return outputs

    def join(self) -> None:
        """Put one plan in the place of those of a run's parts, unless the call left some out."""
        for whole, parts in reversed(self._split):  # a part may be divided again
            runs = [part.call for part in parts]
            found = [p for p in self.planned if p.run in runs]
            if len(found) == len(runs):
                at = self.planned.index(found[0])
                made = of_parts(whole.plan, [p.plan for p in found])
                starts = accumulate([len(p.plan.basic_ops) for p in found], initial=0)
                notes = {
                    start + i: of_op
                    for p, start in zip(found, starts, strict=False)
                    for i, of_op in p.call_notes.items()
                }
                joined = replace(whole, plan=made, call_notes=notes)
                self.planned[at : at + len(found)] = [joined]


def _tiles(plan: Plan, at: int, context: OperationContext, x: Tensor) -> Iterator[str]:
    """A note on the tiles of the products with ``x`` of the op at a place, if they are known."""
    ops, row, rows = plan.basic_ops, plan.kernel_rows[at], x.shape[:-1].numel()
    covering = [f for f in plan.fusions if f.start <= at < f.stop]
    if (
        rows == 0
        or len(covering) > 1
        or any(ops[f.start : f.stop].count(ops[at]) > 1 for f in covering)
    ):
        return
    runs_on = [row.kernels] if row else [f.built for f in covering]
    describe = getattr(runs_on[0], "describe_tiles", None) if runs_on else None
    if describe is None:
        return
    wanted = True, context.needs.input, any(context.needs.params[:1])
    names = "forward", "data gradient", "weight gradient"
    found = zip(names, wanted, describe(plan.target, ops[at], context, rows), strict=False)
    if said := [f"{name} {tile}" for name, is_needed, tile in found if is_needed]:
        yield f"tiles for {rows} rows: {', '.join(said)}"


@contextmanager
def _named_errors(module: nn.Module, planned: Sequence[PlannedRun]) -> Iterator[None]:
    """Errors of a call with fake tensors name the part that raised them."""
    try:
        yield
    except Exception as error:
        called, ran = _caller(error, module), "no fusible op ran before"
        if planned:
            ran = f"the last fusible ops before were {planned[-1].name}"
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            raise ValueError(
                "explain runs with fake tensors and needs a module without data-dependent control "
                f"flow, got {called}, which reads a value ({error}); {ran}; explain its parts"
            ) from error
        error.add_note(f"explain called {called} with fake tensors; {ran}")
        raise


def _caller(error: Exception, module: nn.Module) -> str:
    """The path and type of the innermost part of ``module`` in whose call an error was raised."""
    names = {part: name for name, part in named_modules(module)}
    calls = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [called for called in calls if isinstance(called, nn.Module) and called in names]
    part = [module, *found][-1]
    name = path(type(module).__name__, names[part])
    return name if part is module else f"{name} ({type(part).__name__})"


def _check_initialized(module: nn.Module) -> None:
    """Raise ValueError for parameters and buffers that the first call will make."""
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(t):
            raise ValueError(
                "explain needs a model whose parameters have shapes, got the uninitialized "
                f"{path(type(module).__name__, name)}, which its first call initializes; call the "
                "model once"
            )


def _run_ends(module: nn.Module) -> Iterator[str]:
    """Reasons why runs of ops end in the Sequentials of ``module``."""
    parts = [(name, part) for name, part in reversed([*named_modules(module)])]
    names = {op: name for name, part in parts for op in getattr(part, "basic_ops", ())}
    names.update({part: name for name, part in parts})
    root = type(getattr(module, "_orig_mod", module)).__name__
    for part in [*names][::-1]:
        ask = getattr(type(part), "run_boundaries", None)
        for called, why, rules in () if ask is None else ask(part):
            tried = f"; rules not tried for that: {', '.join(rules)}" if rules else ""
            yield (
                f"{type(called).__name__} at {path(root, names[called])} {why}, which ends a run "
                f"of ops{tried}"
            )


def _uncompiled() -> AbstractContextManager[Any]:
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _fakes(mode: FakeTensorMode, inputs: tuple[Any, ...]) -> list[Any]:
    """The inputs with fake tensors for tensors; one input passed twice is one fake."""
    made: dict[int, Any] = {}

    def fake(t: Tensor) -> Tensor:
        if id(t) not in made:
            # Detached: mode.from_tensor reads .grad, which warns for a tensor that is no leaf.
            made[id(t)] = mode.from_tensor(t.detach()).requires_grad_(t.requires_grad)
        return made[id(t)]

    for value in inputs:
        if id(value) not in made:
            made[id(value)] = tree_map_only(Tensor, fake, value)
    return [made[id(value)] for value in inputs]


def _lines(planned: PlannedRun, every_rule: bool) -> Iterator[str]:
    plan = planned.plan
    blocks = _blocks(plan, planned.call_notes)
    for head, *rest in blocks[:-1]:
        yield from (f"├─ {head}", *[f"│    {line}" for line in rest])
    for head, *rest in blocks[-1:]:
        yield from (f"└─ {head}", *[f"     {line}" for line in rest])
    yield from _refusal_lines(plan, every_rule)


def _blocks(plan: Plan, call_notes: dict[int, tuple[str, ...]]) -> list[list[str]]:
    """One block of lines per op or joint fusion, in order."""
    said = [[f"  {note}" for note in call_notes.get(i, ())] for i, _ in enumerate(plan.basic_ops)]
    joint = {f.start: f for f in plan.of_phase("joint")}
    blocks, at = [], 0
    while at < len(plan.basic_ops):
        fusion = joint.get(at)
        if fusion is None:
            blocks.append([*_op_lines(plan, at), *said[at]])
            at += 1
            continue
        passes = "forward and backward" if plan.grad[at].requires_grad else "forward"
        lines = [f"{type(fusion.built).__name__} by {fusion.name}, {passes}"]
        for i in range(at, fusion.stop):
            notes = *_cast(plan, i), *said[i], *_recipe_notes(plan, i)
            lines.extend([f"  [{i}] {plan.basic_ops[i]}", *[f"    {note}" for note in notes]])
        lines.extend(_saves(plan, fusion.built, at))
        lines.extend(_multiplies(*plan.recipes[at], fusion.built))
        lines.extend(f"  {note}" for note in fusion.built.notes(plan.facts[at].dtype, plan.target))
        blocks.append(lines)
        at = fusion.stop
    return blocks


def _op_lines(plan: Plan, at: int) -> list[str]:
    """One basic op, and what its forward or backward is part of."""
    op = plan.basic_ops[at]
    fused = [
        f"  {f.phase} as part of {type(f.built).__name__} (ops[{f.start}:{f.stop}])"
        for f in plan.of_phase("forward", "backward")
        if f.start <= at < f.stop
    ]
    recipe, quantizes = plan.recipes[at]
    dtype = "bfloat16" if quantizes else plan.facts[at].dtype  # of the products, on CUDA
    row, notes = plan.kernel_rows[at], []
    if not fused and op.kernel_rows:
        notes.append(f"  kernels: {row.name if row else op.default_kernels(dtype, plan.target)}")
    if not (fused or row):
        notes.extend(f"  {note}" for note in op.notes(dtype, plan.target))
    notes.extend(_recipe_notes(plan, at))
    saves = "" if fused or not op.is_formula else "what autograd keeps of its formula"
    if row:
        saves = getattr(row.kernels, "saves", "")
        notes.extend(_multiplies(recipe, quantizes, row.kernels, op))
    return [f"[{at}] {op}", *_saves(plan, op, at, saves), *fused, *_cast(plan, at), *notes]


def _recipe_notes(plan: Plan, at: int) -> list[str]:
    """What the recipe does to an op, if it has one."""
    recipe, _ = plan.recipes[at]
    return [] if recipe is None else [f"  {n}" for n in plan.basic_ops[at].recipe_notes(recipe)]


def _cast(plan: Plan, at: int) -> list[str]:
    """A note that an op casts its input to the dtype of its weight, if it does."""
    facts = plan.facts[at]
    dtype, own = facts.input.dtype, facts.param_dtype
    if plan.autocast_dtype is not None or facts.dtype != own or dtype in (own, UNKNOWN):
        return []
    return [f"  casts its input from {dtype} to {own}, the dtype of its weight"]


def _saves(plan: Plan, op: Any, at: int, saves: str = "") -> list[str]:
    saves = saves or op.saves
    return [f"  saves {saves}"] if plan.grad[at].requires_grad and saves else []


def _multiplies(recipe: Any, quantizes: bool, kernels: Any, *ops: Any) -> list[str]:
    """The operands of a fused op, or of kernels selected for ``ops``, under a recipe."""
    multiplies = getattr(kernels, "multiplies", None)
    return [f"  multiplies {multiplies(recipe, *ops)}"] if quantizes and multiplies else []


def _refusal_lines(plan: Plan, every_rule: bool) -> Iterator[str]:
    shown = [r for r in plan.refusals if every_rule or not r.other_target]
    for heading, kind in (("not fused:", Rule), ("kernels not selected:", KernelRow)):
        some = [r for r in shown if isinstance(r.rule, kind)]
        yield from [heading] * bool(some)
        yield from _reasons(some)
    if others := {r.rule.name for r in plan.refusals if r not in shown}:
        rules = "rule or kernel is" if len(others) == 1 else "rules or kernels are"
        yield (
            f"{len(others)} more {rules} for other machines or recipes (to_text(every_rule=True))"
        )
    touched = {i for f in plan.fusions for i in range(f.start, f.stop)}
    touched |= {i for i, op in enumerate(plan.basic_ops) if op.kernel_rows}
    touched |= {i for r in plan.refusals for i in range(r.start, r.start + len(r.ops))}
    places = range(len(plan.basic_ops))
    for is_touched, group in groupby(places, touched.__contains__):
        if not is_touched:
            gap = list(group)
            start, stop = gap[0], gap[-1] + 1
            names = " + ".join(type(op).__name__ for op in plan.basic_ops[start:stop])
            yield f"no fusion rule covers {names} (ops[{start}:{stop}])"


def _reasons(refusals: Sequence[Refusal]) -> Iterator[str]:
    """The refusals with their reasons, those with the same ones together."""
    by_reasons: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for refusal in refusals:
        phase = f" ({refusal.rule.phase})" if isinstance(refusal.rule, Rule) else ""
        what = f"{refusal.rule.name}{phase}"
        where = f"ops[{refusal.start}:{refusal.start + len(refusal.ops)}]"
        by_reasons.setdefault(refusal.reasons, {}).setdefault(what, []).append(where)
    for reasons, refused in by_reasons.items():
        yield from (f"  {what} for {', '.join(where)}" for what, where in refused.items())
        yield from (f"    {reason}" for reason in reasons)
