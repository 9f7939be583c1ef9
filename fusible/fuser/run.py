"""A run of ops: the plan key of a call, and the cached plans."""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from fusible.caches import keep
from fusible.fuser import target as targets
from fusible.fuser.callers_buffers import check_buffers
from fusible.fuser.error_notes import note_op, outermost_call
from fusible.fuser.expected import expected_of
from fusible.fuser.flow import Dtypes, facts_of_ops, features_read
from fusible.fuser.node import RunFunction, folded, run_directly, run_formula, run_forward
from fusible.fuser.parts import Part, parts_of, run_parts
from fusible.fuser.plan import GradNeeds, Plan, UserFusions, of_parts, plan
from fusible.fuser.plan_key import PlanKey, TensorKey, first_places, fix_features, slices
from fusible.fuser.registry import is_ours, registry
from fusible.fuser.rules import Rule
from fusible.fuser.schedule import Diagnostics, Direct, Kwargs, Schedule, scheduled
from fusible.fuser.target import Target
from fusible.fuser.tracing import WeakGroups, constant_when_traced
from fusible.fuser.wiring import CALLER, Output, Wiring, wire
from fusible.logs import log_once
from fusible.recipes.autocast import Forward, current_recipe
from fusible.recipes.recipe import Recipe

logger = logging.getLogger(__name__)


MOST_PLANS = 256
"""Entries of each cache of a run; then the oldest one is dropped."""

_runs: WeakGroups[Run] = WeakGroups()

# Names of the attributes under which compiled code finds the schedules of calls. Guards of the code
# miss a schedule that was dropped; a name that was dropped is never given again.
_traced_names: dict[tuple[Any, ...], str] = {}
_name_numbers = count()


class _Traced:
    """The schedules of a run that compiled code finds, as attributes."""


class _Observation(threading.local):
    """What gives the schedule of every call of a run on this thread, where ``explain`` sets it."""

    schedule_for: Callable[[Run, tuple[Any, ...], torch.device], Schedule] | None = None


_observation = _Observation()


class Run:
    """A maximal sequence of basic ops in a Sequential, executed together.

    Capturing ops freezes their channel bindings. ``paths`` say where each op is in the Sequential
    that holds it, if one does.
    """

    def __init__(
        self, ops: Sequence[Any], require: Sequence[Rule] = (), wiring: Wiring | None = None
    ) -> None:
        registry.discover()
        self.ops = tuple(ops)
        self.paths: tuple[str, ...] = ()
        self.wiring = wire(self.ops) if wiring is None else wiring
        self.require = tuple(require)
        self.num_extra_inputs = self.wiring.num_caller_inputs
        self._schedule: Schedule | None = None  # of the last call
        self._cuts: dict[tuple[int, ...], tuple[Part, ...]] = {}
        self._written = self.wiring.written_inputs(self.ops)
        self._schedules: dict[tuple[Any, ...], Schedule] = {}
        self._traced = _Traced()
        self._user: dict[tuple[Any, ...], UserFusions] = {}
        self._read: tuple[int, tuple[int, ...]] = (-1, ())
        # Unlike plans never dropped: at most two per recipe.
        self._forwards: set[Forward] = set()
        self.no_kwargs: Kwargs = [{} for _ in self.ops]
        self._facts = [op.freeze() for op in self.ops]
        forwards = [f for op in self.ops for f in (type(op).fuser_forward, type(op).op_forward)]
        self.has_user_ops = not all(map(is_ours, forwards))
        _runs.add(map(type, self.ops), self)

    def __call__(self, x: Tensor, *extra_inputs: Any, kwargs: Kwargs | None = None) -> Any:
        """Run the ops; returns the output, followed by public extra outputs if there are any."""
        inputs = self._tensors((x, *extra_inputs))
        if kwargs is not None and not torch.compiler.is_compiling():
            check_buffers(self.ops, inputs, kwargs, self.ops)
        if (self.has_user_ops or registry.has_users) and self._parametrized():
            # A user's code may read parameters from the module: they must be these tensors.
            with _parametrize_cached():
                return self._execute(inputs, kwargs, self._parameters(), current_recipe(self))
        return self._execute(inputs, kwargs, self._parameters(), current_recipe(self))

    def _parameters(self) -> list[tuple[Tensor, ...]]:
        """The parameters of each op, read here only: a parametrization is evaluated once a call."""
        return [op.own_parameters() for op in self.ops]

    def _execute(
        self,
        inputs: tuple[Tensor, ...],
        kwargs: Kwargs | None,
        params: Sequence[tuple[Tensor, ...]],
        recipe: Recipe | None,
    ) -> Any:
        given: tuple[Tensor, ...] = (*inputs, *[p for of_op in params for p in of_op])
        counts = tuple([len(of_op) for of_op in params])
        of_ops = given[len(inputs) :]
        key = self._key(inputs, of_ops, counts, recipe)
        tracing = torch.compiler.is_compiling()
        if tracing:
            if of_ops or self.has_user_ops:
                fix_features(inputs)
            constants = None if recipe is None else recipe.as_constants()
            schedule = getattr(self._traced, self._trace_schedule(constants, key[1:]))
        elif _observation.schedule_for is not None:
            schedule = _observation.schedule_for(self, key, inputs[0].device)
        else:
            schedule = self._schedules.get(key) or self._first_schedule(key, given, kwargs)
            self._schedule = schedule
            if schedule.direct is not None and kwargs is None:
                prepared = schedule.direct.prepared(*given)
                if prepared is not None:
                    return run_directly(schedule, prepared, given)
        if schedule.parts:
            return self._execute_parts(schedule, inputs, kwargs, params, recipe)
        if schedule.is_formula:
            return run_formula(schedule, self.ops[0].formula_of(len(params[0])), given)
        outputs = self._apply(schedule, given, self.no_kwargs if kwargs is None else kwargs)
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def _apply(schedule: Schedule, given: tuple[Tensor, ...], kwargs: Kwargs) -> tuple[Tensor, ...]:
        """The output and extra outputs of a schedule as one autograd function."""
        if not schedule.plan.grad[-1].requires_grad:
            return tuple(run_forward(schedule, given, kwargs)[0])
        if torch.compiler.is_compiling():
            tensors, slots = folded(given)
            return RunFunction.apply(schedule, slots, kwargs, *tensors)
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "fusible ops must not need gradients inside a transform of torch.func (grad, "
                "vmap, jvp, ...), which cannot follow their backward, got one that does; use "
                "torch.autograd, which torch.func.functional_call goes with, or no_grad()"
            )
        return RunFunction.apply(schedule, None, kwargs, *given)

    def _execute_parts(
        self,
        schedule: Schedule,
        inputs: tuple[Tensor, ...],
        kwargs: Kwargs | None,
        params: Sequence[tuple[Tensor, ...]],
        recipe: Recipe | None,
    ) -> Any:
        """Run the parts of a schedule, each with a plan of its own."""

        def call(part: Part, x: Tensor, given: Sequence[Tensor]) -> Any:
            of_ops = kwargs and kwargs[part.ops]
            return part.call._execute((x, *given), of_ops, params[part.ops], recipe)

        return run_parts(schedule.parts, inputs, call, self._written, self.ops)

    @property
    def plan(self) -> Plan | None:
        """What the last call ran as; None before the first."""
        if self._schedule is None:
            return None
        plans = [part.call.plan for part in self._schedule.parts]
        return of_parts(self._schedule.plan, plans) if plans and all(plans) else self._schedule.plan

    def __repr__(self) -> str:
        """Name the ops."""
        return f"Run({', '.join(type(op).__name__ for op in self.ops)})"

    def forwards(self) -> set[Forward]:
        """The recipes and gradient modes of the forwards so far."""
        return set(self._forwards)

    @staticmethod
    @contextmanager
    def observed(
        schedule_for: Callable[[Run, tuple[Any, ...], torch.device], Schedule],
    ) -> Iterator[None]:
        """Run what ``schedule_for(run, plan key, device)`` gives for every call on this thread.

        No plan is cached.
        """
        outer, _observation.schedule_for = _observation.schedule_for, schedule_for
        try:
            yield
        finally:
            _observation.schedule_for = outer

    def _tensors(self, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Check the inputs' number and kind; lists of integers become tensors, each once."""
        if len(inputs) - 1 != self.num_extra_inputs:
            self.wiring.check_number(self.ops, len(inputs) - 1)
        if all([isinstance(t, Tensor) for t in inputs]):
            return inputs
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
        return (
            recipe,
            autocast_dtype,
            torch.is_grad_enabled(),
            device,
            targets.assumed_target(),
            registry.version,
            first_places(inputs),
            tuple([(t.dtype, t.device, t.requires_grad) for t in inputs]),
            self._features(inputs),
            param_counts,
            tuple([p.dtype for p in params]),
            tuple([p.requires_grad for p in params]),
        )

    def _features(self, inputs: Sequence[Tensor]) -> tuple[int | None, ...]:
        """Of the inputs whose last size rules may read, unless they have one value per row."""
        read = self._features_read(registry.version)
        if not read:
            return ()
        # operator.index makes a symbolic size a constant when compiling; others stay symbolic.
        index, dims = operator.index, max(inputs[0].dim(), 2)
        return tuple(
            [
                index(t.shape[-1]) if i in read and t.dim() >= dims else None
                for i, t in enumerate(inputs)
            ]
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
            made = self.plan_for(key, targets.target_of(call.device))
            made.require(self.require)
            self._check(made)
            schedule = self.scheduled(made, key)
            if not schedule.parts:
                _log_plan(made)
            keep(self._schedules, key, schedule, MOST_PLANS)
            self._forwards.add(Forward(call.recipe, call.grad_enabled))
        return schedule

    def _check(self, plan: Plan) -> None:
        """Raise the ValueError of an op that cannot run a plan, with the op's place."""
        for op, needs in zip(self.ops, plan.grad, strict=True):
            try:
                op.check_plan(needs, plan.recipe)
            except ValueError as error:
                if not torch.compiler.is_compiling():
                    note_op(error, op)
                raise

    def _first_schedule(
        self, key: tuple[Any, ...], given: Sequence[Tensor], kwargs: Kwargs | None
    ) -> Schedule:
        """The schedule of a plan key's first call, in which users' fused ops are checked."""
        schedule = self.schedule_for(key)
        kwargs = self.no_kwargs if kwargs is None else kwargs
        if not schedule.parts:
            schedule.diagnostics.expected.update(expected_of(schedule, given, kwargs))
        return schedule

    @constant_when_traced
    def _trace_schedule(self, recipe: tuple[Any, ...] | None, rest: tuple[Any, ...]) -> str:
        """The name of the attribute that holds a call's schedule; the plan key is guarded.

        A name, since the tracer takes modules only from attributes that it reads itself; not an
        index into a list, whose length would be guarded: each new schedule would recompile all.
        The recipe as :meth:`Recipe.as_constants`, since it takes constants only.
        """
        key = (recipe and Recipe.from_constants(recipe), *rest)
        name = _traced_names.get(key)
        if name is None:
            name = f"call{next(_name_numbers)}"
            keep(_traced_names, key, name, MOST_PLANS)
        self._prepare(key, name)
        for run in _runs.others(map(type, self.ops), self):
            with suppress(AttributeError, TypeError):  # parameters that no call could read
                if name not in vars(run._traced) and run._static_key() == self._static_key():
                    run._prepare(key, name)
        return name

    def _prepare(self, key: tuple[Any, ...], name: str) -> None:
        """Set the attribute in which compiled code finds a call's schedule."""
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

    def scheduled(self, plan: Plan, key: tuple[Any, ...]) -> Schedule:
        """A plan of a call with all that its execution looks up."""
        call = PlanKey(*key)
        backward = scheduled(plan, self.wiring, self.paths, plan.backward_ops, "backward")
        forward = scheduled(plan, self.wiring, self.paths, plan.forward_ops, "forward")
        own = [{s.start for s in steps if not s.op.is_fused_op} for steps in (forward, backward)]
        formulas = [i for i in sorted(own[0] & own[1]) if self.ops[i].is_formula]
        is_formula = len(formulas) == len(self.ops) == 1
        parts = () if is_formula else self._cut(formulas)
        return Schedule(
            plan,
            self.wiring,
            self.paths,
            forward=forward,
            backward=backward[::-1],
            dtypes=(*[TensorKey(*t).dtype for t in call.inputs], *call.param_dtypes),
            params=slices(len(call.inputs), call.param_counts),
            no_kwargs=self.no_kwargs,
            direct=self._direct(plan),
            writes_inputs=any(op.writes_extra_inputs for op in self.ops),
            writes_grads=any(op.writes_grads for op, _ in plan.backward_ops),
            is_formula=is_formula,
            parts=parts,
            accumulating=[i for i, op in enumerate(self.ops) if op.accumulates_grads],
            diagnostics=Diagnostics(outermost_call()),
        )

    def _cut(self, formulas: Sequence[int]) -> tuple[Part, ...]:
        """The run in parts, of which each of the ops ``formulas`` is one; empty without any."""
        if not formulas:
            return ()
        stops = tuple(sorted({len(self.ops), *formulas, *[i + 1 for i in formulas]} - {0}))
        if stops not in self._cuts:
            parts = parts_of(self.ops, self.wiring, stops, self._part)
            keep(self._cuts, stops, parts, MOST_PLANS)
        return self._cuts[stops]

    def _part(
        self, _: int, ops: slice, wiring: Wiring, outputs: Sequence[Output]
    ) -> tuple[dict[str, Any], Sequence[Output]]:
        """A run of some of the ops, with the required rules that fit there."""
        rules = [rule for rule in self.require if isinstance(rule, Rule)]
        required = [rule for rule in rules if any(rule.places(self.ops[ops]))]
        run = Run(self.ops[ops], required, wiring)
        run.paths = self.paths[ops]
        return {"call": run}, outputs

    def _direct(self, plan: Plan) -> Direct | None:
        if plan.recipe is not None or plan.autocast_dtype is not None or self.wiring.public:
            return None
        if len(plan.forward_ops) > 1 or len(plan.backward_ops) > 1:
            return None
        dtype = plan.facts[0].input.dtype
        if any(of_op.param_dtype not in (None, dtype) for of_op in plan.facts):
            return None  # refused by the op, with its sentence
        ((forward, _),) = plan.forward_ops
        return forward.direct(plan)

    def plan_for(self, key: tuple[Any, ...], target: Target) -> Plan:
        """The plan of a call on a target. A user's fusion functions run once for all targets."""
        call = PlanKey(*key)
        inputs = [TensorKey(*t) for t in call.inputs]
        params = call.params()
        grad = self._gradient_needs(call.grad_enabled, inputs, params)
        user_key = (call.recipe, grad, call.registry_version)
        user = self._user.get(user_key)
        if user is None:
            user = registry.apply(self.ops, call.recipe)
            keep(self._user, user_key, user, MOST_PLANS)
        features = call.features or (None,) * len(inputs)
        known = [
            t.facts(size, source, target)
            for t, size, source in zip(inputs, features, call.sources, strict=True)
        ]
        own = [[dtype for dtype, _ in of_op] for of_op in params]
        first, *extra = [t.dtype for t in inputs]
        dtypes = Dtypes(first, tuple(extra), (), call.autocast_dtype)
        return plan(
            self.ops,
            facts_of_ops(
                self.ops, self._facts, self.wiring, known, dtypes, own, grad, registry.rules
            ),
            recipe=call.recipe,
            autocast_dtype=call.autocast_dtype,
            target=target,
            rules=registry.rules,
            grad=grad,
            user=user,
        )

    def _gradient_needs(
        self, enabled: bool, inputs: Sequence[TensorKey], params: Sequence[Sequence[Any]]
    ) -> tuple[GradNeeds, ...]:
        """Which gradients each op has to give, from what requires one."""
        needs: list[GradNeeds] = []
        upstream = enabled and inputs[0].requires_grad
        for of_op, op_sources in zip(params, self.wiring.sources, strict=True):
            own = tuple(enabled and requires_grad for _, requires_grad in of_op)
            extra = tuple(
                (enabled and inputs[1 + k].requires_grad)
                if producer == CALLER
                else needs[producer].requires_grad
                for producer, k in op_sources
            )
            requires_grad = upstream or any(own) or any(extra)
            needs.append(GradNeeds(requires_grad, upstream, own, extra))
            upstream = requires_grad
        return tuple(needs)


def _log_plan(plan: Plan) -> None:
    """Log what a plan fuses, once for all equal plans."""
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
        return torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"extra inputs must be tensors or lists of numbers, got {values!r:.80}"
        ) from error
