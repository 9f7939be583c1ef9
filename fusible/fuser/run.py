"""A run of ops: the plan key of a call, and the cached plans."""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from fusible.caches import keep
from fusible.fuser import target as targets
from fusible.fuser.error_notes import note_op, outermost_call
from fusible.fuser.expected import expect_outputs
from fusible.fuser.memory import check_buffers
from fusible.fuser.node import (
    RunFunction,
    deduplicated,
    run_fast_path,
    run_formula,
    run_forward,
    without_views,
)
from fusible.fuser.op_facts import facts_of_ops, features_read, gradient_needs
from fusible.fuser.own_recipes import recipe_of_ops
from fusible.fuser.partition import Part, Partition, partition_at, run_parts
from fusible.fuser.plan import Fusion, Plan, of_parts, plan
from fusible.fuser.plan_key import PlanKey, first_places, fix_features, slices
from fusible.fuser.registry import is_ours, registry
from fusible.fuser.rules import Rule
from fusible.fuser.schedule import FastPath, Kwargs, Origin, Schedule, schedule_steps
from fusible.fuser.target import Target
from fusible.fuser.tracing import WeakGroups, constant_when_traced
from fusible.fuser.wiring import Output, Wiring, wire
from fusible.logs import log_once
from fusible.recipes.autocast import Forward, current_recipe
from fusible.recipes.mixed import ByOp, PerOp
from fusible.recipes.recipe import Recipe

logger = logging.getLogger(__name__)


MOST_PLANS = 256
"""Entries of each cache of a run; then the oldest one is dropped."""

_runs: WeakGroups[Run] = WeakGroups()

# Names of the attributes under which compiled code finds the schedules of calls. Code is guarded by
# its attribute: after that is dropped, it is compiled again, so a dropped name is never reused.
_traced_names: dict[tuple[Any, ...], str] = {}
_name_numbers = count()


class _Traced:
    """The schedules of a run that compiled code finds, as attributes."""


ScheduleFor = Callable[["Run", PlanKey], Schedule]


_observed: ContextVar[ScheduleFor | None] = ContextVar("_observed", default=None)


@contextmanager
def observed(schedule_for: ScheduleFor) -> Iterator[None]:
    """Run what ``schedule_for(run, plan key)`` gives for every call in this context, uncached."""
    token = _observed.set(schedule_for)
    try:
        yield
    finally:
        _observed.reset(token)


class Run:
    """A maximal sequence of basic ops in a Sequential, executed together.

    Capturing ops freezes their channel bindings. ``op_names`` say where each op is in the
    Sequential that holds it, if one does.
    """

    def __init__(
        self, ops: Sequence[Any], require: Sequence[Rule] = (), wiring: Wiring | None = None
    ) -> None:
        self.ops = tuple(ops)
        self.op_names: tuple[str, ...] = ()
        self.wiring = wire(self.ops) if wiring is None else wiring
        self.require = tuple(rule for rule in require if any(rule.matches(self.ops)))
        self._num_inputs = 1 + len(self.wiring.names)
        self._schedule: Schedule | None = None  # of the last call
        self._splits: dict[tuple[int, ...], Partition] = {}
        self._schedules: dict[tuple[Any, ...], Schedule] = {}
        self._traced = _Traced()
        self._own_recipes: dict[ByOp, Recipe | None] = {}
        self._user: dict[tuple[Any, ...], tuple[Fusion, ...]] = {}
        self._read: tuple[int, tuple[int, ...]] = (-1, ())
        # Never dropped, unlike plans: at most two for each recipe.
        self._forwards: set[Forward] = set()
        self._facts = [op.freeze() for op in self.ops]
        forwards = [f for op in self.ops for f in (type(op).fuser_forward, type(op).op_forward)]
        self.has_user_ops = not all(map(is_ours, forwards))
        _runs.add(map(type, self.ops), self)

    def __call__(self, x: Tensor, *extra_inputs: Any, kwargs: Kwargs | None = None) -> Any:
        """Run the ops; returns the output, followed by public extra outputs if there are any."""
        inputs = (x, *extra_inputs)
        if len(inputs) != self._num_inputs or not all([isinstance(t, Tensor) for t in inputs]):
            inputs = self._tensors(inputs)
        if kwargs is not None and not torch.compiler.is_compiling():
            check_buffers(self.ops, inputs, kwargs, self.ops)
        if (self.has_user_ops or registry.has_users) and self._parametrized():
            # A user's code may read parameters from the module: they must be these tensors.
            with _parametrize_cached():
                return self._execute(inputs, kwargs, self._parameters(), current_recipe(self))
        return self._execute(inputs, kwargs, self._parameters(), current_recipe(self))

    def _parameters(self) -> list[tuple[Tensor, ...]]:
        """The parameters of each op, read here only: a parametrization is evaluated once a call."""
        return [
            op.own_parameters() if op.expert_processes is None else op.local_parameters()
            for op in self.ops
        ]

    def _execute(
        self,
        inputs: tuple[Tensor, ...],
        kwargs: Kwargs | None,
        params: Sequence[tuple[Tensor, ...]],
        recipe: Recipe | None,
    ) -> Any:
        of_ops = [p for of_op in params for p in of_op]
        operands = (*inputs, *of_ops)
        tracing = torch.compiler.is_compiling()
        own = recipe if tracing else self._own_recipe(recipe)
        key = self._key(inputs, of_ops, tuple(map(len, params)), own)
        if tracing:
            if of_ops or self.has_user_ops:
                fix_features(inputs)
            constants = None if recipe is None else recipe.as_constants()
            schedule = getattr(self._traced, self._trace_schedule(constants, key[1:]))
        elif (schedule_for := _observed.get()) is not None:
            schedule = schedule_for(self, PlanKey(*key))
        else:
            schedule = self._schedules.get(key)
            if schedule is None:
                schedule = self.schedule_for(key)
                expect_outputs(schedule, operands, kwargs)
            self._schedule = schedule
            if schedule.fast_path is not None and kwargs is None:
                prepared = schedule.fast_path.prepared(*operands)
                if prepared is not None:
                    return run_fast_path(schedule, prepared, operands)
        if schedule.split is not None:
            return self._execute_split(schedule.split, inputs, kwargs, params, recipe)
        if schedule.is_formula:
            return run_formula(schedule, self.ops[0].formula_of(len(params[0])), operands)
        if not schedule.plan.grad[-1].requires_grad:
            made, _ = run_forward(schedule, operands, kwargs)
            outputs = tuple(made if tracing else without_views(schedule, kwargs, made, operands))
        elif torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "fusible ops must not need gradients inside a transform of torch.func (grad, vmap, "
                "jvp, ...), which cannot follow their backward, got one that does; use "
                "torch.autograd, which torch.func.functional_call goes with, or no_grad()"
            )
        else:
            tensors, slots = deduplicated(operands) if tracing else (operands, None)
            outputs = RunFunction.apply(schedule, slots, kwargs, *tensors)
        outputs = _as_returned(schedule, outputs, inputs[1:]) if tracing else outputs
        return outputs if len(outputs) > 1 else outputs[0]

    def _execute_split(
        self,
        split: Partition,
        inputs: tuple[Tensor, ...],
        kwargs: Kwargs | None,
        params: Sequence[tuple[Tensor, ...]],
        recipe: Recipe | None,
    ) -> Any:

        def call(part: Part, x: Tensor, extra_inputs: Sequence[Tensor]) -> Any:
            of_ops = kwargs and kwargs[part.ops]
            # In a repeated forward the recipe is a `PerOp` of the whole run: take the part's.
            own = recipe
            if isinstance(recipe, PerOp):
                own = recipe.over(part.ops.start, part.ops.stop)
            return part.call._execute((x, *extra_inputs), of_ops, params[part.ops], own)

        return run_parts(split, inputs, call, self.ops)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last call; None before the first."""
        if self._schedule is None:
            return None
        split = self._schedule.split
        plans = [] if split is None else [part.call.plan for part in split.parts]
        return of_parts(self._schedule.plan, plans) if plans and all(plans) else self._schedule.plan

    def __repr__(self) -> str:
        return f"Run({', '.join(type(op).__name__ for op in self.ops)})"

    def _own_recipe(self, recipe: Recipe | None) -> Recipe | None:
        """The recipe of the ops, or those of each, where a scope gives recipes by op."""
        if not isinstance(recipe, ByOp):
            return recipe
        if recipe not in self._own_recipes:
            keep(self._own_recipes, recipe, recipe_of_ops(recipe, self.ops), MOST_PLANS)
        return self._own_recipes[recipe]

    def forwards(self) -> set[Forward]:
        """The recipes and gradient modes of the forwards so far."""
        return set(self._forwards)

    def _tensors(self, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Check the inputs' number and kind; lists of integers become tensors, each once."""
        self.wiring.check_number(self.ops, len(inputs) - 1)
        if not isinstance(inputs[0], Tensor):
            raise TypeError(f"input must be a tensor, got {type(inputs[0]).__name__}")
        for k, t in enumerate(inputs[1:]):
            if not isinstance(t, Tensor | list | tuple):
                raise TypeError(
                    f"extra inputs must be tensors or lists of numbers, got {type(t).__name__} as "
                    f"extra input {k}"
                )
        made: dict[int, Tensor] = {}
        return tuple(
            [t if isinstance(t, Tensor) else made.setdefault(id(t), _numbers(t)) for t in inputs]
        )

    def _parametrized(self) -> bool:
        """Whether ``torch.nn.utils.parametrize`` computes parameters of an op."""
        return any(["parametrizations" in op._modules for op in self.ops])

    def _key(
        self,
        inputs: Sequence[Tensor],
        params: Sequence[Tensor],
        param_counts: tuple[int, ...],
        recipe: Recipe | None,
    ) -> tuple[Any, ...]:
        """The fields of a :class:`PlanKey`, in plain tuples, which ``torch.compile`` can trace."""
        x = inputs[0]
        device = x.device
        kind = device.type
        # Autocast knows no meta device, and raises where asked about it.
        on = kind != "meta" and torch.is_autocast_enabled(kind)
        autocast_dtype = torch.get_autocast_dtype(kind) if on else None
        features: tuple[int | None, ...] = ()
        if read := self._features_read(registry.version):
            # Of tensors that have not one value per row. operator.index makes a symbolic size a
            # constant when compiling; others stay symbolic.
            index, dims = operator.index, max(x.dim(), 2)
            features = tuple(
                [
                    index(t.shape[-1]) if i in read and t.dim() >= dims else None
                    for i, t in enumerate(inputs)
                ]
            )
        return (
            recipe,
            autocast_dtype,
            torch.is_grad_enabled(),
            device,
            targets.assumed_key,
            registry.version,
            first_places(inputs),
            tuple([(t.dtype, t.device, t.requires_grad) for t in inputs]),
            features,
            param_counts,
            tuple([p.dtype for p in params]),
            tuple([p.requires_grad for p in params]),
        )

    @constant_when_traced
    def _features_read(self, version: int) -> tuple[int, ...]:
        """See :func:`features_read`, found once for each version of the registry."""
        known, read = self._read
        if known != version:
            read = features_read(self.ops, self.wiring, registry.rules)
            self._read = version, read
        return read

    def schedule_for(self, key: tuple[Any, ...]) -> Schedule:
        """The schedule for a call on this machine; checked for required rules and cached."""
        schedule = self._schedules.get(key)
        if schedule is None:
            call = PlanKey(*key)
            made = self.plan_for(call, targets.target_of(call.device))
            made.require(self.require)
            self._check(made)
            schedule = self.make_schedule(made, call)
            if schedule.split is None:
                _log_plan(made)
            keep(self._schedules, key, schedule, MOST_PLANS)
            self._forwards.add(Forward(call.recipe, call.grad_enabled))
        return schedule

    def _check(self, plan: Plan) -> None:
        """Raise the ValueError of an op that cannot run a plan, with the op's place."""
        for op, needs, (recipe, _) in zip(self.ops, plan.grad, plan.recipes, strict=True):
            try:
                op.check_plan(needs, recipe)
            except ValueError as error:
                if not torch.compiler.is_compiling():
                    note_op(error, op)
                raise

    @constant_when_traced
    def _trace_schedule(self, recipe: tuple[Any, ...] | None, rest: tuple[Any, ...]) -> str:
        """The name of the attribute that holds a call's schedule; the plan key is guarded.

        A name, since the tracer takes modules only from attributes that it reads itself; not an
        index into a list, whose length would be guarded: each new schedule would recompile all.
        The recipe as :meth:`Recipe.as_constants`, since it takes constants only.
        """
        key = (self._own_recipe(Recipe.from_constants(recipe)), *rest)
        name = _traced_names.get(key)
        if name is None:
            name = f"call{next(_name_numbers)}"
            keep(_traced_names, key, name, MOST_PLANS)
        self._prepare(key, name)
        for run in _runs.others(map(type, self.ops), self):
            # Parameters that no call could read.
            with suppress(AttributeError, TypeError, ValueError):
                if name not in vars(run._traced) and run._static_key() == self._static_key():
                    run._prepare(key, name)
        return name

    def _prepare(self, key: tuple[Any, ...], name: str) -> None:
        """Set the attribute in which compiled code finds a call's schedule.

        And the plan: a run that shares this code will not be traced when it is called.
        """
        self._schedule = self.schedule_for(key)
        keep(vars(self._traced), name, self._schedule, MOST_PLANS)

    def _static_key(self) -> tuple[Any, ...]:
        """The part of what plans depend on that is not in the key of a call."""
        params = [
            (p.dtype, p.requires_grad)
            for op in self.ops
            for name in op.own_parameter_names()
            for p in op.stored(name)
        ]
        return self.wiring, self.require, self._facts, params

    def make_schedule(self, plan: Plan, key: PlanKey) -> Schedule:
        """A plan of a call with all that its execution looks up."""
        backward = schedule_steps(plan, self.wiring, self.op_names, plan.backward_ops, "backward")
        forward = schedule_steps(plan, self.wiring, self.op_names, plan.forward_ops, "forward")
        own = [{s.start for s in steps if not s.op.is_fused_op} for steps in (forward, backward)]
        formulas = [i for i in sorted(own[0] & own[1]) if self.ops[i].is_formula]
        is_formula = len(formulas) == len(self.ops) == 1
        return Schedule(
            plan,
            self.wiring,
            forward=forward,
            backward=backward[::-1],
            dtypes=(*[dtype for dtype, *_ in key.inputs], *key.param_dtypes),
            params=slices(len(key.inputs), key.param_counts),
            kernels=[(i, row.kernels) for i, row in enumerate(plan.kernel_rows) if row],
            fast_path=self._fast_path(plan, key),
            writes_inputs=any(op.writes_extra_inputs for op in self.ops),
            writes_grads=any(op.writes_grads for op in plan.backward_ops),
            is_formula=is_formula,
            split=None if is_formula else self._split_at(formulas),
            accumulating=[i for i, op in enumerate(self.ops) if op.accumulates_grads],
            origin=Origin(outermost_call()),
        )

    def _split_at(self, formulas: Sequence[int]) -> Partition | None:
        """The run in parts, of which each of the ops ``formulas`` is one; None without any."""
        if not formulas:
            return None
        stops = tuple(sorted({len(self.ops), *formulas, *[i + 1 for i in formulas]} - {0}))
        if stops not in self._splits:
            split = partition_at(self.ops, self.wiring, stops, self._part)
            keep(self._splits, stops, split, MOST_PLANS)
        return self._splits[stops]

    def _part(
        self, _: int, ops: slice, wiring: Wiring, outputs: Sequence[Output]
    ) -> tuple[dict[str, Any], Sequence[Output]]:
        """A run of some of the ops, with the required rules that fit there."""
        rules = [rule for rule in self.require if rule.pattern]
        run = Run(self.ops[ops], rules, wiring)
        run.op_names = self.op_names[ops]
        return {"call": run}, outputs

    def _fast_path(self, plan: Plan, key: PlanKey) -> FastPath | None:
        if self.wiring.public:
            return None
        forward, *others = plan.forward_ops
        if others or plan.backward_ops not in ((forward,), forward.basic_ops):
            return None
        return forward.fast_path(plan, key)

    def plan_for(self, key: PlanKey, target: Target) -> Plan:
        """The plan of a call on a target. A user's fusion functions run once for all targets."""
        grad = gradient_needs(self.ops, self.wiring, key)
        user_key = (key.recipe, grad, key.registry_version)
        user = self._user.get(user_key)
        if user is None:
            user = registry.apply(self.ops, key.recipe)
            keep(self._user, user_key, user, MOST_PLANS)
        rules = registry.rules
        return plan(
            self.ops,
            facts_of_ops(self.ops, self._facts, self.wiring, key, target, grad, rules),
            recipe=key.recipe,
            autocast_dtype=key.autocast_dtype,
            target=target,
            rules=rules,
            grad=grad,
            user=user,
        )


def _as_returned(
    schedule: Schedule, outputs: tuple[Tensor, ...], extra_inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The outputs of a traced run, the first one quantized if the last op says so."""
    quantizers = schedule.forward[-1].quantizers
    if quantizers is None:
        return outputs
    # A user's op may have a quantizer of another class.
    returned = getattr(quantizers[1], "returned", None)
    return outputs if returned is None else (returned(outputs[0], extra_inputs), *outputs[1:])


def _log_plan(plan: Plan) -> None:
    if logger.isEnabledFor(logging.INFO):
        summary = plan.summary()
        log_once(logger, logging.INFO, "planned %s", summary)
        for refusal in plan.refusals:
            log_once(logger, logging.DEBUG, "planned %s: %s", summary, str(refusal))


_parametrize_lock = threading.Lock()


@contextmanager
def _parametrize_cached() -> Iterator[None]:
    """``parametrize.cached()``, with a lock around its global counter."""
    if torch.compiler.is_compiling():
        with parametrize.cached():
            yield
        return
    cached = parametrize.cached()
    with _parametrize_lock:
        cached.__enter__()
    try:
        yield
    finally:
        with _parametrize_lock:
            cached.__exit__(None, None, None)


def _numbers(values: Sequence[Any]) -> Tensor:
    try:
        return torch.tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"extra inputs must be tensors or lists of numbers, got {values!r:.80}"
        ) from error
