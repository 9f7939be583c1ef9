"""Execution: a run of ops as one autograd function, through a cached plan."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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
from fusible.fuser.target import Target
from fusible.fuser.wiring import CALLER, wire
from fusible.recipes import current_recipe

Kwargs = Sequence[dict[str, Any]]


class _Call(NamedTuple):
    """What a plan may depend on in one call, all of it hashable: the key of the plan cache."""

    recipe: Any
    autocast_dtype: torch.dtype | None
    grad_enabled: bool
    device: torch.device
    assumed: Target | None
    registry_version: int
    input: tuple[Any, ...]
    extra_inputs: tuple[tuple[Any, ...], ...]
    params: tuple[tuple[Any, ...], ...]
    facts: tuple[tuple[Any, ...], ...]


def _tensor_key(t: Tensor, source: int) -> tuple[Any, ...]:
    # operator.index makes a symbolic size a constant under torch.compile; row counts stay symbolic.
    features = operator.index(t.shape[-1]) if t.dim() > 1 else None
    return t.dtype, t.device, features, t.requires_grad, source


def _tensor_facts(key: tuple[Any, ...], target: Target) -> TensorFacts:
    dtype, device, *rest = key
    # Another machine's plan speaks of the tensors as that machine would hold them.
    kind = "cpu" if device.type == "cpu" else target.device
    return TensorFacts(dtype_name(dtype), kind, *rest)


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


class _Schedule(NamedTuple):
    """A plan with all that its execution looks up."""

    plan: Plan
    forward: tuple[_Step, ...]
    backward: tuple[_Step, ...]


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

    def __init__(self, ops: Sequence[Any], require: Sequence[str] = ()) -> None:
        self.ops = tuple(ops)
        self.wiring = wire(self.ops)
        for op in self.ops:
            op.freeze_channels()
        self.require = tuple(require)
        self.num_extra_inputs = self.wiring.num_caller_inputs
        self.plan: Plan | None = None
        self._schedules: dict[tuple[Any, ...], _Schedule] = {}
        self._traced: list[_Schedule] = []
        self._user: dict[tuple[Any, ...], UserFusions] = {}
        self._no_kwargs: Kwargs = [{} for _ in self.ops]

    def __call__(self, x: Tensor, *extra_inputs: Any, kwargs: Kwargs | None = None) -> Any:
        """Run the ops; returns the output, followed by public extra outputs if there are any."""
        kwargs = self._no_kwargs if kwargs is None else kwargs
        extra_inputs = self._as_tensors(x, extra_inputs)
        params = [op.own_parameters() for op in self.ops]
        # The same tensor in two places is passed once and its gradients are summed: autograd
        # functions under torch.compile do not take it twice.
        unique: dict[Tensor, int] = {}
        slots = tuple(
            [
                unique.setdefault(t, len(unique))
                for t in (x, *extra_inputs, *[p for ps in params for p in ps])
            ]
        )
        key = self._key(x, extra_inputs, slots, params)
        if torch.compiler.is_compiling():
            schedule = self._traced[_schedule_while_compiling(self, key)]
        elif _observation.note is not None:
            _observation.note(self, key, x.device)
            schedule = self._schedule(self.plan_for(key, targets.target_of(x.device)))
        else:
            schedule = self._schedules.get(key) or self.schedule_for(key)
            self.plan = schedule.plan
        if schedule.plan.grad[-1].requires_grad:
            outputs = _RunFunction.apply(self, schedule, slots, kwargs, *unique)
        else:
            outputs = _forward(self, schedule, x, extra_inputs, kwargs)[0]
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    @contextmanager
    def observed(note: Callable[[Run, tuple[Any, ...], torch.device], None]) -> Iterator[None]:
        """Tell ``note`` of every call of a run on this thread; calls leave no plan behind."""
        outer, _observation.note = _observation.note, note
        try:
            yield
        finally:
            _observation.note = outer

    def _as_tensors(self, x: Any, extra_inputs: Sequence[Any]) -> Sequence[Tensor]:
        """Check the inputs' number and kind; lists of integers become tensors, each once."""
        if len(extra_inputs) != self.num_extra_inputs:
            wanted = ", ".join(
                f"{op.extra_input_name(slot)} of op {i} ({type(op).__name__})"
                for i, op in enumerate(self.ops)
                for slot, (producer, _) in enumerate(self.wiring.sources[i])
                if producer == CALLER
            )
            raise ValueError(
                f"extra inputs must number {self.num_extra_inputs} ({wanted or 'none'}), got "
                f"{len(extra_inputs)}"
            )
        if not isinstance(x, Tensor):
            raise TypeError(f"input must be a tensor, got {type(x).__name__}")
        if all([isinstance(t, Tensor) for t in extra_inputs]):
            return extra_inputs
        made: dict[int, Tensor] = {}
        return [
            t if isinstance(t, Tensor) else made.setdefault(id(t), torch.tensor(t))
            for t in extra_inputs
        ]

    def _key(
        self,
        x: Tensor,
        extra_inputs: Sequence[Tensor],
        slots: tuple[int, ...],
        params: Sequence[Sequence[Tensor]],
    ) -> tuple[Any, ...]:
        """The fields of a :class:`_Call`; a plain tuple, which ``torch.compile`` can carry over."""
        device = x.device
        autocast = torch.is_autocast_enabled(device.type)
        return (
            current_recipe(),
            torch.get_autocast_dtype(device.type) if autocast else None,
            torch.is_grad_enabled(),
            device,
            targets.assumed_target(),
            registry.version,
            _tensor_key(x, 0),
            tuple([_tensor_key(t, slots[1 + i]) for i, t in enumerate(extra_inputs)]),
            tuple([tuple([(p.dtype, p.requires_grad) for p in ps]) for ps in params]),
            tuple([op.read_facts() for op in self.ops]),
        )

    def schedule_for(self, key: tuple[Any, ...]) -> _Schedule:
        """The schedule for a call on this machine; checked for required rules and cached."""
        if key not in self._schedules:
            made = self.plan_for(key, targets.target_of(_Call(*key).device))
            made.require(self.require)
            self._schedules[key] = self._schedule(made)
        return self._schedules[key]

    def _schedule(self, plan: Plan) -> _Schedule:
        return _Schedule(plan, self._steps(plan.forward_ops), self._steps(plan.backward_ops))

    def _steps(self, steps: Sequence[Step]) -> tuple[_Step, ...]:
        made, start = [], 0
        for op, basic_ops in steps:
            stop = start + len(basic_ops)
            sources = tuple(
                tuple(_INTERNAL if source[0] >= start else source for source in of_op)
                for of_op in self.wiring.sources[start:stop]
            )
            counts = [basic.num_extra_outputs for basic in basic_ops]
            made.append(_Step(op, start, stop, sources, counts))
            start = stop
        return tuple(made)

    def plan_for(self, key: tuple[Any, ...], target: Target) -> Plan:
        """The plan of a call on a target. A user's fusion functions run once for all targets."""
        call = _Call(*key)
        grad = self._gradient_needs(call)
        user_key = (call.recipe, grad, call.registry_version)
        if user_key not in self._user:
            self._user[user_key] = registry.apply(self.ops, call.recipe)
        return plan(
            self.ops,
            self._facts(call, target),
            recipe=call.recipe,
            target=target,
            rules=registry.rules,
            grad=grad,
            user=self._user[user_key],
        )

    def _gradient_needs(self, call: _Call) -> tuple[GradNeeds, ...]:
        """Which gradients each op has to give, from what requires one."""
        needs: list[GradNeeds] = []
        upstream = call.grad_enabled and call.input[3]
        for i, op_sources in enumerate(self.wiring.sources):
            params = tuple(call.grad_enabled and p[1] for p in call.params[i])
            extra = tuple(
                call.grad_enabled and call.extra_inputs[slot][3]
                if op == CALLER
                else needs[op].requires_grad
                for op, slot in op_sources
            )
            requires_grad = upstream or any(params) or any(extra)
            needs.append(GradNeeds(requires_grad, upstream, params, extra))
            upstream = requires_grad
        return tuple(needs)

    def _facts(self, call: _Call, target: Target) -> Facts:
        ops = []
        for op, sources, values, params in zip(
            self.ops, self.wiring.sources, call.facts, call.params, strict=True
        ):
            extra = {}
            for slot, (producer, k) in enumerate(sources):
                if producer == CALLER:
                    extra[op.extra_input_name(slot)] = _tensor_facts(call.extra_inputs[k], target)
                else:
                    channel = TensorFacts("", target.device, None, True, f"op {producer} slot {k}")
                    extra[op.extra_input_name(slot)] = channel
            dtype = dtype_name(params[0][0]) if params else None
            ops.append(OpFacts(dict(zip(op.fact_names, values, strict=True)), dtype, extra))
        dtype = call.autocast_dtype or call.input[0]
        return Facts(dtype_name(dtype), _tensor_facts(call.input, target), tuple(ops))


@torch._dynamo.assume_constant_result
def _schedule_while_compiling(run: Run, key: tuple[Any, ...]) -> int:
    """Plans are made for real while tracing; what was read to build ``key`` is guarded.

    Gives the schedule's place in a list of the run: the tracer takes modules only from there.
    """
    schedule = run.schedule_for(key)
    if not any(schedule is known for known in run._traced):
        run._traced.append(schedule)
    return next(i for i, known in enumerate(run._traced) if schedule is known)


def _forward(
    run: Run, schedule: _Schedule, x: Tensor, extra_inputs: Sequence[Tensor], kwargs: Kwargs
) -> tuple[list[Tensor], list[OperationContext]]:
    """Run the plan's forward ops; gives the output with the public extra ones, and the contexts."""
    recipe = schedule.plan.recipe
    memo: dict[Any, Tensor] = {}
    contexts = [OperationContext(needs, recipe, memo) for needs in schedule.plan.grad]
    produced: list[Sequence[Tensor | None]] = []
    quantizer_before = quantizer_after = None
    for op, start, stop, sources, num_extra_outputs in schedule.forward:
        inputs = [
            [
                extra_inputs[slot]
                if producer == CALLER
                else (produced[producer][slot] if producer >= 0 else None)
                for producer, slot in of_op
            ]
            for of_op in sources
        ]
        if recipe is not None:
            quantizer_before = run.ops[start - 1].get_grad_output_quantizer() if start else None
            last = stop == len(run.ops)
            quantizer_after = None if last else run.ops[stop].get_input_quantizer()
        x, outputs = op.fuser_forward(
            contexts[start:stop],
            x,
            basic_op_extra_inputs=inputs,
            prev_op_grad_output_quantizer=quantizer_before,
            next_op_input_quantizer=quantizer_after,
            basic_op_kwargs=kwargs[start:stop],
        )
        if [len(of_op) for of_op in outputs] != num_extra_outputs:
            raise RuntimeError(
                f"{type(op).__name__} must return one sequence of extra outputs for each basic op, "
                f"of lengths {num_extra_outputs}, got {[len(of_op) for of_op in outputs]}"
            )
        if any(num_extra_outputs):
            _check_complete(run, op, outputs, start, stop)
        produced.extend(outputs)
    return [x, *[produced[op][slot] for op, slot in run.wiring.public]], contexts  # type: ignore[list-item]


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


class _RunFunction(torch.autograd.Function):
    """The whole run as one node, since forward and backward may be fused differently."""

    @staticmethod
    def forward(  # type: ignore[override]
        fctx: Any,
        run: Run,
        schedule: _Schedule,
        slots: tuple[int, ...],
        kwargs: Kwargs,
        *unique: Tensor,
    ) -> tuple[Tensor, ...]:
        x, *extra_inputs = [unique[slot] for slot in slots[: 1 + run.num_extra_inputs]]
        outputs, contexts = _forward(run, schedule, x, extra_inputs, kwargs)
        saved: list[Tensor | None] = []
        states = []
        for context in contexts:
            first = len(saved)
            if context.requires_grad:
                saved.extend(context.to_save)
            states.append((first, len(saved), context.own_values()))
        fctx.save_for_backward(*saved)
        fctx.run, fctx.schedule, fctx.slots, fctx.states = run, schedule, slots, states
        fctx.dtypes = [t.dtype for t in unique]
        outputs = _distinct(outputs, unique)
        if run.wiring.public:
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
    @torch.autograd.function.once_differentiable
    def backward(fctx: Any, grad_output: Tensor, *grad_extra_outputs: Tensor) -> Any:
        run, plan, saved = fctx.run, fctx.schedule.plan, fctx.saved_tensors
        # New contexts: nothing that the forward made is changed, so that a second backward works.
        contexts = [
            OperationContext.restored(needs, plan.recipe, saved[first:last], values)
            for needs, (first, last, values) in zip(plan.grad, fctx.states, strict=True)
        ]
        # Gradients of extra outputs, by (op, slot), summed over their uses.
        flowing: dict[tuple[int, int], Tensor | None] = {
            output: grad
            for output, grad in zip(run.wiring.public, grad_extra_outputs, strict=True)
            if plan.grad[output[0]].requires_grad
        }
        of_callers: list[Tensor | None] = [None] * run.num_extra_inputs
        of_params: list[Sequence[Tensor | None]] = [(None,) * len(n.params) for n in plan.grad]
        grad: Tensor | None = grad_output
        for op, start, stop, sources, num_extra_outputs in reversed(fctx.schedule.backward):
            if not contexts[stop - 1].requires_grad:
                grad = None
                break
            grad, step_params, step_extra = op.fuser_backward(
                contexts[start:stop],
                grad,
                basic_op_grad_extra_outputs=[
                    tuple([flowing.get((start + i, k)) for k in range(count)])
                    for i, count in enumerate(num_extra_outputs)
                ],
            )
            _check_gradients(op, step_params, step_extra, plan.grad[start:stop])
            of_params[start:stop] = step_params
            for of_op, grads in zip(sources, step_extra, strict=True):
                for (producer, k), g in zip(of_op, grads, strict=True):
                    if producer == CALLER:
                        of_callers[k] = _sum(of_callers[k], g)
                    elif producer >= 0:
                        flowing[producer, k] = _sum(flowing.get((producer, k)), g)
        by_tensor: list[Tensor | None] = [None] * len(fctx.dtypes)
        flat = (grad, *of_callers, *[g for grads in of_params for g in grads])
        for slot, g in zip(fctx.slots, flat, strict=True):
            by_tensor[slot] = _sum(by_tensor[slot], g)
        return (
            *(None, None, None, None),
            *[
                g if g is None or g.dtype == dtype else g.to(dtype)
                for g, dtype in zip(by_tensor, fctx.dtypes, strict=True)
            ],
        )


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _distinct(outputs: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """``outputs`` with a view in place of each that is an input, or an earlier output, itself."""
    distinct: list[Tensor] = []
    for t in outputs:
        known = any([t is other for other in inputs]) or any([t is other for other in distinct])
        distinct.append(t.view_as(t) if known else t)
    return distinct


def _check_gradients(
    op: Any,
    of_params: Sequence[Sequence[Any]],
    of_extra: Sequence[Sequence[Any]],
    needs: Sequence[GradNeeds],
) -> None:
    """Refuse a backward that does not give one entry for every parameter and extra input."""
    got = [(len(p), len(e)) for p, e in zip(of_params, of_extra, strict=False)]
    wanted = [(len(n.params), len(n.extra_inputs)) for n in needs]
    if got != wanted:
        raise RuntimeError(
            f"the backward of {type(op).__name__} must return gradients (None where there is none) "
            f"for each basic op's parameters and extra inputs, numbering {wanted}, got {got}"
        )
