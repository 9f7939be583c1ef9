"""Execution: a run of ops as one autograd function, through a cached plan."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fusible.fuser import target as targets
from fusible.fuser.context import OperationContext
from fusible.fuser.plan import (
    Facts,
    GradNeeds,
    OpFacts,
    Plan,
    Step,
    TensorFacts,
    UserFusions,
    plan,
)
from fusible.fuser.registry import registry
from fusible.fuser.rules import Rule
from fusible.fuser.target import Target
from fusible.fuser.tracing import Alike, constant_when_traced
from fusible.fuser.wiring import CALLER, wire
from fusible.recipes.autocast import Forward, autocast, current_recipe
from fusible.recipes.recipe import Recipe

Kwargs = Sequence[dict[str, Any]]

# torch 2.11 compiles an autograd function so that every tensor made in its forward is an output,
# and a tensor that a cast to its own dtype returned is two: the gradient goes to the wrong one,
# and what the backward sees is zero. A view is one of a kind.
_LOSES_OUTPUTS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


class _Call(NamedTuple):
    """What a plan may depend on in one call, all of it hashable: the key of the plan cache.

    The ops' own facts are not here: they are frozen when a run captures its ops.
    """

    recipe: Any
    autocast_dtype: torch.dtype | None
    grad_enabled: bool
    device: torch.device
    assumed: str | None
    registry_version: int
    sources: tuple[int, ...]
    """The first place of each input among the inputs: equal for the same tensor."""
    inputs: tuple[_TensorKey, ...]
    param_dtypes: tuple[torch.dtype, ...]
    params_require_grad: tuple[bool, ...]


class _TensorKey(NamedTuple):
    """What a plan may depend on in one input."""

    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    features: int | None

    def facts(self, source: int, target: Target) -> TensorFacts:
        """As conditions see it; a plan for a GPU speaks of the tensors as it would hold them."""
        device = "cpu" if self.device.type == "cpu" else target.device
        return TensorFacts(
            dtype_name(self.dtype), device, self.features, self.requires_grad, source
        )


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


class _Step(NamedTuple):
    """One op of a plan, ready to run: ops[start:stop], and for each where extra inputs are from."""

    op: Any
    start: int
    stop: int
    sources: tuple[tuple[tuple[int, int], ...], ...]
    num_extra_outputs: list[int]
    num_grads: tuple[list[int], list[int]]
    quantizers: tuple[Any, Any]
    """Of the previous op's output gradient and of the next op's input."""


class Direct(Protocol):
    """A plan of one op as one autograd node of its own, without contexts: the host's time.

    The operands are the inputs and then the parameters. What it takes it runs as the op would, with
    the same results.
    """

    def prepared(self, *operands: Tensor) -> Any:
        """What the forward needs to run these operands, or None if the op itself shall run."""

    def forward(self, prepared: Any, *operands: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output, and what the backward reads."""

    def backward(self, saved: Sequence[Tensor], grad_output: Tensor) -> Sequence[Tensor | None]:
        """The gradients of the operands, in their dtypes."""


class _Schedule(NamedTuple):
    """A plan with all that its execution looks up."""

    plan: Plan
    forward: tuple[_Step, ...]
    backward: tuple[_Step, ...]  # the last op first
    dtypes: tuple[torch.dtype, ...]  # of the inputs, then of the parameters
    direct: Direct | None


_runs: Alike[Run] = Alike()

# Names of the attributes under which compiled code finds the schedules of calls.
_traced_names: dict[tuple[Any, ...], str] = {}

# In a step's sources: made and used inside one fused op, which wires it itself.
_INTERNAL = (-2, 0)


class _Observation(threading.local):
    """Who is told of every run's call on this thread (``explain``), if anybody."""

    note: Callable[[Run, tuple[Any, ...], torch.device], None] | None = None


_observation = _Observation()


class Run:
    """A maximal sequence of basic ops in a Sequential, executed together.

    Capturing ops freezes their channel bindings.
    """

    def __init__(self, ops: Sequence[Any], require: Sequence[Rule] = ()) -> None:
        self.ops = tuple(ops)
        self.wiring = wire(self.ops)
        self.require = tuple(require)
        self.num_extra_inputs = self.wiring.num_caller_inputs
        self.plan: Plan | None = None
        self._schedules: dict[tuple[Any, ...], _Schedule] = {}
        self._user: dict[tuple[Any, ...], UserFusions] = {}
        self._no_kwargs: Kwargs = [{} for _ in self.ops]
        self._facts = [op.freeze() for op in self.ops]
        _runs.add(tuple(map(type, self.ops)), self)
        self.writes = any(op.num_extra_inputs and getattr(op, "in_place", False) for op in self.ops)

    def __call__(self, x: Tensor, *extra_inputs: Any, kwargs: Kwargs | None = None) -> Any:
        """Run the ops; returns the output, followed by public extra outputs if there are any."""
        inputs = self._tensors((x, *extra_inputs))
        params = [p for op in self.ops for p in op.own_parameters()]
        key = self._key(inputs, params)
        tensors, slots = (*inputs, *params), None
        tracing = torch.compiler.is_compiling()
        if tracing:
            recipe = None if key[0] is None else key[0].spelled()
            schedule = getattr(self, self._trace_schedule(recipe, key[1:]))
            tensors, slots = _folded(tensors)
        elif _observation.note is not None:
            _observation.note(self, key, inputs[0].device)
            schedule = self._schedule(self.plan_for(key, targets.target_of(inputs[0].device)), key)
        else:
            schedule = self._schedules.get(key) or self.schedule_for(key)
            self.plan = schedule.plan
            if schedule.direct is not None and kwargs is None:
                prepared = schedule.direct.prepared(*tensors)
                if prepared is not None:
                    return _run_directly(schedule, prepared, tensors)
        kwargs = self._no_kwargs if kwargs is None else kwargs
        if schedule.plan.grad[-1].requires_grad:
            if not tracing and torch._C._are_functorch_transforms_active():
                raise RuntimeError(
                    "fusible ops must not need gradients inside a transform of torch.func (grad, "
                    "vmap, jvp, ...), which cannot follow their backward, got one that does; use "
                    "torch.autograd, which torch.func.functional_call goes with, or no_grad()"
                )
            outputs = _RunFunction.apply(self, schedule, slots, kwargs, *tensors)
        else:
            outputs = tuple(_forward(self, schedule, inputs, kwargs)[0])
        return outputs if len(outputs) > 1 else outputs[0]

    def __repr__(self) -> str:
        """Name the ops."""
        return f"Run({', '.join(type(op).__name__ for op in self.ops)})"

    def forwards(self) -> set[Forward]:
        """Under what recipes forwards ran so far: every plan's key says it."""
        calls = [_Call(*key) for key in self._schedules]
        return {Forward(call.recipe, call.grad_enabled) for call in calls}

    @staticmethod
    @contextmanager
    def observed(note: Callable[[Run, tuple[Any, ...], torch.device], None]) -> Iterator[None]:
        """Tell ``note`` of every call of a run on this thread; calls leave no plan behind."""
        outer, _observation.note = _observation.note, note
        try:
            yield
        finally:
            _observation.note = outer

    def _tensors(self, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Check the inputs' number and kind; lists of integers become tensors, each once."""
        if len(inputs) - 1 != self.num_extra_inputs:
            wanted = ", ".join(
                f"{op.extra_input_name(slot)} of op {i} ({type(op).__name__})"
                for i, op in enumerate(self.ops)
                for slot, (producer, _) in enumerate(self.wiring.sources[i])
                if producer == CALLER
            )
            few = len(inputs) - 1 < self.num_extra_inputs
            reach = "; earlier ops give theirs within a run, which hooks and other modules end"
            raise ValueError(
                f"extra inputs must number {self.num_extra_inputs} ({wanted or 'none'}), got "
                f"{len(inputs) - 1}{reach if few else ''}"
            )
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

    def _key(self, inputs: Sequence[Tensor], params: Sequence[Tensor]) -> tuple[Any, ...]:
        """The fields of a :class:`_Call`; plain tuples, which ``torch.compile`` can carry over."""
        x = inputs[0]
        device = x.device
        kind = device.type
        # Autocast knows no meta device, and raises where asked about it.
        on = kind != "meta" and torch.is_autocast_enabled(kind)
        autocast_dtype = torch.get_autocast_dtype(kind) if on else None
        # operator.index makes a symbolic size a constant when compiling; row counts stay symbolic,
        # and so does the last size of an input that has one value per row.
        index, dims = operator.index, max(x.dim(), 2)
        return (
            current_recipe(self),
            autocast_dtype,
            torch.is_grad_enabled(),
            device,
            targets.assumed_target(),
            registry.version,
            _first_places(inputs),
            tuple(
                [
                    (
                        t.dtype,
                        t.device,
                        t.requires_grad,
                        index(t.shape[-1]) if t.dim() >= dims else None,
                    )
                    for t in inputs
                ]
            ),
            tuple([p.dtype for p in params]),
            tuple([p.requires_grad for p in params]),
        )

    def schedule_for(self, key: tuple[Any, ...]) -> _Schedule:
        """The schedule for a call on this machine; checked for required rules and cached."""
        if key not in self._schedules:
            made = self.plan_for(key, targets.target_of(_Call(*key).device))
            made.require(self.require)
            self._schedules[key] = self._schedule(made, key)
        return self._schedules[key]

    @constant_when_traced
    def _trace_schedule(self, recipe: tuple[Any, ...] | None, rest: tuple[Any, ...]) -> str:
        """Name the attribute that holds a call's schedule; what its key came from is guarded.

        A name, since the tracer takes modules only from where it sees them; and no place in a
        list, whose length the tracer would guard: a new schedule would expire all others' code.
        The recipe as :meth:`Recipe.spelled`, since it takes constants only.
        """
        key = (recipe and Recipe.from_spelled(recipe), *rest)
        name = _traced_names.setdefault(key, f"_traced{len(_traced_names)}")
        self._prepare(key, name)
        for run in _runs.others(tuple(map(type, self.ops)), self):
            with suppress(AttributeError, TypeError):  # parameters that no call could read
                if name not in vars(run) and run._form() == self._form():
                    run._prepare(key, name)
        return name

    def _prepare(self, key: tuple[Any, ...], name: str) -> None:
        """Make a call's schedule where compiled code finds it."""
        schedule = self.schedule_for(key)
        self.plan = schedule.plan
        setattr(self, name, schedule)

    def _form(self) -> tuple[Any, ...]:
        """What plans depend on, but for the call: equal for runs that have the same plans."""
        params = [(p.dtype, p.requires_grad) for op in self.ops for p in op.own_parameters()]
        return self.wiring, self.require, self._facts, params

    def _schedule(self, plan: Plan, key: tuple[Any, ...]) -> _Schedule:
        for op, needs in zip(self.ops, plan.grad, strict=True):
            op.check_needs(needs)
        forward, backward = (
            self._steps(ops, plan) for ops in (plan.forward_ops, plan.backward_ops)
        )
        call = _Call(*key)
        dtypes = (*[_TensorKey(*t).dtype for t in call.inputs], *call.param_dtypes)
        return _Schedule(plan, forward, backward[::-1], dtypes, self._direct(plan))

    def _direct(self, plan: Plan) -> Direct | None:
        if plan.recipe is not None or plan.autocast_dtype is not None or self.wiring.public:
            return None
        if len(plan.forward_ops) > 1 or len(plan.backward_ops) > 1:
            return None
        (forward, _), (backward, _) = *plan.forward_ops, *plan.backward_ops
        return forward.direct(backward, plan.grad)

    def _steps(self, steps: Sequence[Step], plan: Plan) -> tuple[_Step, ...]:
        made, start = [], 0
        for op, basic_ops in steps:
            stop = start + len(basic_ops)
            sources = tuple(
                tuple(_INTERNAL if source[0] >= start else source for source in of_op)
                for of_op in self.wiring.sources[start:stop]
            )
            counts = [basic.num_extra_outputs for basic in basic_ops]
            needs = plan.grad[start:stop]
            grads = [len(n.params) for n in needs], [len(n.extra_inputs) for n in needs]
            quantizers = self._quantizers(start, stop, plan.recipe)
            made.append(_Step(op, start, stop, sources, counts, grads, quantizers))
            start = stop
        return tuple(made)

    def _quantizers(self, start: int, stop: int, recipe: Any) -> tuple[Any, Any]:
        """How the op before and the op after ops[start:stop] want tensors to be handed to them."""
        if recipe is None:
            return None, None
        with autocast(recipe=recipe):
            before = self.ops[start - 1].get_grad_output_quantizer() if start else None
            last = stop == len(self.ops)
            return before, None if last else self.ops[stop].get_input_quantizer()

    def plan_for(self, key: tuple[Any, ...], target: Target) -> Plan:
        """The plan of a call on a target. A user's fusion functions run once for all targets."""
        call = _Call(*key)
        inputs = [_TensorKey(*t) for t in call.inputs]
        params = self._by_op(zip(call.param_dtypes, call.params_require_grad, strict=True))
        grad = self._gradient_needs(call.grad_enabled, inputs, params)
        user_key = (call.recipe, grad, call.registry_version)
        if user_key not in self._user:
            self._user[user_key] = registry.apply(self.ops, call.recipe)
        dtype = dtype_name(call.autocast_dtype or inputs[0].dtype)
        known = [t.facts(source, target) for t, source in zip(inputs, call.sources, strict=True)]
        return plan(
            self.ops,
            Facts(dtype, known[0], self._op_facts(known[1:], params, target)),
            recipe=call.recipe,
            autocast_dtype=call.autocast_dtype,
            target=target,
            rules=registry.rules,
            grad=grad,
            user=self._user[user_key],
        )

    def _by_op(self, params: Iterable[Any]) -> list[tuple[Any, ...]]:
        """Values that belong to the parameters of all ops, divided by op."""
        values = iter(params)
        return [tuple(next(values) for _ in op.own_parameters()) for op in self.ops]

    def _gradient_needs(
        self, enabled: bool, inputs: Sequence[_TensorKey], params: Sequence[Sequence[Any]]
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

    def _op_facts(
        self, extra_inputs: Sequence[TensorFacts], params: Sequence[Sequence[Any]], target: Target
    ) -> tuple[OpFacts, ...]:
        made = []
        for op, facts, sources, of_op in zip(
            self.ops, self._facts, self.wiring.sources, params, strict=True
        ):
            extra = {
                op.extra_input_name(slot): extra_inputs[k]
                if producer == CALLER
                else TensorFacts("", target.device, None, True, f"op {producer} slot {k}")
                for slot, (producer, k) in enumerate(sources)
            }
            made.append(OpFacts(facts, dtype_name(of_op[0][0]) if of_op else None, extra))
        return tuple(made)


def _first_places(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Where each of the tensors comes first."""
    if torch.compiler.is_compiling():  # which does not know ids
        places: dict[Tensor, int] = {}
        return tuple([places.setdefault(t, i) for i, t in enumerate(tensors)])
    ids = list(map(id, tensors))
    return tuple(map(ids.index, ids))


def _forward(
    run: Run, schedule: _Schedule, caller_inputs: Sequence[Tensor], kwargs: Kwargs
) -> tuple[list[Tensor], list[OperationContext]]:
    """Run the plan's forward ops; gives the output with the public extra ones, and the contexts."""
    plan = schedule.plan
    memo: dict[Any, Any] = {}
    contexts = [
        OperationContext(needs, plan.recipe, plan.autocast_dtype, memo) for needs in plan.grad
    ]
    x = caller_inputs[0]
    produced: list[Sequence[Any]] = []
    for op, start, stop, sources, num_extra_outputs, _, quantizers in schedule.forward:
        inputs = [
            [
                caller_inputs[1 + slot]
                if producer == CALLER
                else (produced[producer][slot] if producer >= 0 else None)
                for producer, slot in of_op
            ]
            for of_op in sources
        ]
        forward = op.fuser_forward
        if plan.autocast_dtype is not None and op.casts_itself:
            forward = _without_autocast(forward, x.device.type)
        returned = forward(
            contexts[start:stop],
            x,
            basic_op_extra_inputs=inputs,
            prev_op_grad_output_quantizer=quantizers[0],
            next_op_input_quantizer=quantizers[1],
            basic_op_kwargs=kwargs[start:stop],
        )
        if not _is_tuple(returned, 2) or not isinstance(returned[0], Tensor):
            raise TypeError(
                f"the forward of {type(op).__name__} must return its output, one tensor, and the "
                f"extra outputs of each basic op, got {kind_of(returned)}"
            )
        x, outputs = returned
        if [len(of_op) for of_op in outputs] != num_extra_outputs:
            raise RuntimeError(
                f"{type(op).__name__} must return one sequence of extra outputs for each basic op, "
                f"of lengths {num_extra_outputs}, got {[len(of_op) for of_op in outputs]}"
            )
        if any(num_extra_outputs):
            _check_complete(run, op, outputs, start, stop)
        if run.writes and not torch.compiler.is_compiling():
            _check_not_saved(run, contexts, inputs, start, stop)
        produced.extend(outputs)
    if not run.wiring.public:
        return [x], contexts
    return [x, *[produced[op][slot] for op, slot in run.wiring.public]], contexts


def _is_tuple(returned: Any, length: int) -> bool:
    return isinstance(returned, tuple | list) and len(returned) == length


def kind_of(returned: Any) -> str:
    """What an op returned, for a sentence."""
    if isinstance(returned, tuple | list):
        kinds = ", ".join([kind_of(value) for value in returned])
        return f"[{kinds}]" if isinstance(returned, list) else f"({kinds})"
    return "a tensor" if isinstance(returned, Tensor) else repr(returned)


def _numbers(values: Sequence[Any]) -> Tensor:
    try:
        return torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"extra inputs must be tensors or lists of numbers, got {values!r:.80}"
        ) from error


def _without_autocast(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """``function`` outside of ``torch.autocast``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return function(*args, **kwargs)

    return run


def _check_complete(
    run: Run, op: Any, outputs: Sequence[Sequence[Tensor | None]], start: int, stop: int
) -> None:
    """Refuse a missing extra output that something outside the op needs."""
    for i, values in enumerate(outputs, start):
        for slot, value in enumerate(values):
            if value is None and run.wiring.needed_outside((i, slot), start, stop):
                raise RuntimeError(
                    f"{type(op).__name__} must return extra output {slot} of op {i} "
                    f"({type(run.ops[i]).__name__}), which is needed outside it, got None"
                )


def _check_not_saved(
    run: Run,
    contexts: Sequence[OperationContext],
    inputs: Sequence[Sequence[Tensor | None]],
    start: int,
    stop: int,
) -> None:
    """Refuse extra inputs that were written to after an op of this very run had saved them.

    Autograd notices only what changes after the run, which saves for all its ops at its end.
    """
    for i, of_op in enumerate(inputs, start):
        if not getattr(run.ops[i], "in_place", False):
            continue
        written = {memory(t) for t in of_op if t is not None}
        for j, context in enumerate(contexts[:stop]):
            if context.requires_grad and any(
                memory(t) in written for t in context.to_save if t is not None
            ):
                raise ValueError(
                    f"op {i} ({type(run.ops[i]).__name__}) must not write to a tensor that op {j} "
                    f"({type(run.ops[j]).__name__}) saved for its backward, got in_place=True; "
                    "make it False"
                )


def memory(t: Tensor) -> int:
    """Which storage ``t`` has: equal for tensors that share one, also of no bytes or fake ones."""
    return t.untyped_storage()._cdata


class _RunFunction(torch.autograd.Function):
    """The whole run as one node, since forward and backward may be fused differently."""

    @staticmethod
    def forward(
        fctx: Any,
        run: Run,
        schedule: _Schedule,
        slots: tuple[int, ...] | None,
        kwargs: Kwargs,
        *tensors: Tensor,
    ) -> Any:
        """Run forward; ``slots`` says which tensor each input and parameter is, if not its own."""
        inputs: Sequence[Tensor] = tensors[: 1 + run.num_extra_inputs]
        if slots is not None:
            inputs = [tensors[slot] for slot in slots[: 1 + run.num_extra_inputs]]
        outputs, contexts = _forward(run, schedule, inputs, kwargs)
        saved: list[Tensor | None] = []
        # The contexts outlive the forward: only autograd may keep tensors.
        states = []
        for context in contexts:
            first = len(saved)
            if context.requires_grad:
                saved.extend(context.to_save)
            context.to_save, context.memo = (), {}
            states.append((first, len(saved), context))
        fctx.save_for_backward(*saved)
        fctx.call = run, schedule, slots, states
        outputs = _distinct(outputs, inputs if slots is None else tensors)
        if len(outputs) > 1:
            grad = schedule.plan.grad
            fctx.mark_non_differentiable(
                *[
                    t
                    for t, (op, _) in zip(outputs[1:], run.wiring.public, strict=True)
                    if not (grad[op].requires_grad and t.is_floating_point())
                ]
            )
        return tuple(outputs)

    @staticmethod
    def backward(fctx: Any, grad_output: Tensor, *grad_extra_outputs: Tensor) -> Any:
        _refuse_second_derivatives()
        run, schedule, slots, states = fctx.call
        plan, saved = schedule.plan, fctx.saved_tensors
        # New contexts: nothing that the forward made is changed, so that a second backward works.
        contexts = [context.for_backward(saved[first:last]) for first, last, context in states]
        # Gradients of extra outputs, by (op, slot), summed over their uses.
        flowing: dict[tuple[int, int], Tensor | None] = {
            output: grad
            for output, grad in zip(run.wiring.public, grad_extra_outputs, strict=True)
            if plan.grad[output[0]].requires_grad
        }
        of_callers: list[Tensor | None] = [None] * run.num_extra_inputs
        of_params: list[Sequence[Tensor | None]] = [(None,) * len(n.params) for n in plan.grad]
        grad: Tensor | None = grad_output
        for op, start, stop, sources, num_extra_outputs, num_grads, _ in schedule.backward:
            if not contexts[stop - 1].requires_grad:
                grad = None
                break
            grad, step_params, step_extra = _gradients(
                op,
                contexts[start:stop],
                grad,
                [
                    tuple([flowing.get((start + i, k)) for k in range(count)]) if count else ()
                    for i, count in enumerate(num_extra_outputs)
                ],
                num_grads,
            )
            of_params[start:stop] = step_params
            for of_op, grads in zip(sources, step_extra, strict=True):
                for (producer, k), g in zip(of_op, grads, strict=True):
                    if g is None:
                        continue
                    if producer == CALLER:
                        of_callers[k] = g
                    elif producer >= 0:
                        flowing[producer, k] = _sum(flowing.get((producer, k)), g)
        flat = grad, *of_callers, *chain(*of_params)
        given = [
            g if g is None or g.dtype == dtype else g.to(dtype)
            for g, dtype in zip(flat, schedule.dtypes, strict=True)
        ]
        return (None, None, None, None, *(given if slots is None else _summed(given, slots)))


def _gradients(
    op: Any,
    contexts: list[OperationContext],
    grad_output: Tensor | None,
    of_extra_outputs: list[tuple[Tensor | None, ...]],
    num_grads: tuple[list[int], list[int]],
) -> tuple[Tensor | None, Sequence[Sequence[Tensor | None]], Sequence[Sequence[Tensor | None]]]:
    """What the backward of an op of a plan returns, checked to be of the right form."""
    name = type(op).__name__
    if grad_output is None:
        raise RuntimeError(
            f"the op after {name} must return the gradient of its input, got None; where nothing "
            "flows back it is zeros"
        )
    returned = op.fuser_backward(
        contexts, grad_output, basic_op_grad_extra_outputs=of_extra_outputs
    )
    if not _is_tuple(returned, 3):
        raise TypeError(
            f"the backward of {name} must return the gradient of its input, and for each basic op "
            f"those of its parameters and of its extra inputs, got {kind_of(returned)}"
        )
    grad_input, of_params, of_extra_inputs = returned
    got = list(map(len, of_params)), list(map(len, of_extra_inputs))
    if got != num_grads:
        raise RuntimeError(
            f"the backward of {name} must return gradients (None where there is none) for each "
            f"basic op's parameters and extra inputs, numbering {num_grads[0]} and {num_grads[1]}, "
            f"got {got[0]} and {got[1]}"
        )
    return grad_input, of_params, of_extra_inputs


def _refuse_second_derivatives() -> None:
    # Not by once_differentiable, which misses second derivatives by what was saved.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "the backward of fusible ops cannot be differentiated: create_graph must be False, "
            "got True; write what needs second derivatives with torch.nn modules"
        )


class _DirectFunction(torch.autograd.Function):
    """A plan of one op, in the op's shorter way."""

    @staticmethod
    def forward(fctx: Any, direct: Direct, prepared: Any, *operands: Tensor) -> Tensor:
        output, saved = direct.forward(prepared, *operands)
        fctx.save_for_backward(*saved)
        fctx.direct = direct
        return output

    @staticmethod
    def backward(fctx: Any, grad_output: Tensor) -> Any:
        _refuse_second_derivatives()
        return None, None, *fctx.direct.backward(fctx.saved_tensors, grad_output)


def _run_directly(schedule: _Schedule, prepared: Any, operands: Sequence[Tensor]) -> Tensor:
    direct = schedule.direct
    assert direct is not None
    if schedule.plan.grad[-1].requires_grad:
        return _DirectFunction.apply(direct, prepared, *operands)
    return direct.forward(prepared, *operands)[0]


def _folded(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The tensors without repetitions, and the place of each.

    An autograd function under torch.compile does not take a tensor twice.
    """
    unique: dict[Tensor, int] = {}
    slots = tuple([unique.setdefault(t, len(unique)) for t in tensors])
    return tuple(unique), slots


def _summed(grads: Sequence[Tensor | None], slots: Sequence[int]) -> list[Tensor | None]:
    """The gradients of folded tensors from those of their uses."""
    total: list[Tensor | None] = [None] * (1 + max(slots))
    for slot, grad in zip(slots, grads, strict=True):
        if grad is not None:
            total[slot] = _sum(total[slot], grad)
    return total


def _sum(total: Tensor | None, grad: Tensor) -> Tensor:
    return grad if total is None else total + grad


def _distinct(outputs: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """``outputs`` with a view in place of each that is an input, or an earlier output, itself."""
    distinct: list[Tensor] = []
    twice = _LOSES_OUTPUTS and torch.compiler.is_compiling()
    for t in outputs:
        known = any([t is other for other in inputs]) or any([t is other for other in distinct])
        distinct.append(t.view_as(t) if known or twice else t)
    return distinct
