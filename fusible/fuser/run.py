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
from fusible.fuser.plan import Facts, GradNeeds, OpFacts, Plan, TensorFacts, UserFusions, plan
from fusible.fuser.registry import registry
from fusible.fuser.target import Target
from fusible.fuser.wiring import CALLER, wire
from fusible.recipes import current_recipe

Kwargs = Sequence[dict[str, Any]]


class _Call(NamedTuple):
    """What a plan may depend on in one call, hashable: the key of the plan cache."""

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
    return t.dtype, t.device.type, features, t.requires_grad, source


def _tensor_facts(key: tuple[Any, ...], target: Target) -> TensorFacts:
    dtype, device, *rest = key
    # Another machine's plan speaks of the tensors as that machine would hold them.
    return TensorFacts(dtype_name(dtype), device if device == "cpu" else target.device, *rest)


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


class _Observation(threading.local):
    """Who is told of every run's call on this thread (``explain``), if anybody."""

    note: Callable[[Run, _Call], None] | None = None


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
        self._plans: dict[_Call, Plan] = {}
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
            unique.setdefault(t, len(unique))
            for t in (x, *extra_inputs, *(p for ps in params for p in ps))
        )
        call = self._call(x, extra_inputs, slots, params)
        if _observation.note is not None:
            _observation.note(self, call)
            current = self.plan_for(call, targets.target_of(x.device))
        elif torch.compiler.is_compiling():
            current = _plan_while_compiling(self, call)
        else:
            current = self._plans.get(call) or self.plan_for(call)
            self.plan = current
        if current.grad and current.grad[-1].requires_grad:
            return _RunFunction.apply(self, current, slots, kwargs, *unique)
        output, extra_outputs, _ = _forward(self, current, x, extra_inputs, kwargs)
        return (output, *extra_outputs) if extra_outputs else output

    @staticmethod
    @contextmanager
    def observed(note: Callable[[Run, Any], None]) -> Iterator[None]:
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

    def _call(
        self,
        x: Tensor,
        extra_inputs: Sequence[Tensor],
        slots: tuple[int, ...],
        params: Sequence[Sequence[Tensor]],
    ) -> _Call:
        device = x.device
        autocast = torch.is_autocast_enabled(device.type)
        return _Call(
            current_recipe(),
            torch.get_autocast_dtype(device.type) if autocast else None,
            torch.is_grad_enabled(),
            device,
            targets.assumed_target(),
            registry.version,
            _tensor_key(x, slots[0]),
            tuple([_tensor_key(t, s) for t, s in zip(extra_inputs, slots[1:], strict=False)]),
            tuple([tuple([(p.dtype, p.requires_grad) for p in ps]) for ps in params]),
            tuple([op.read_facts() for op in self.ops]),
        )

    def plan_for(self, call: _Call, target: Target | None = None) -> Plan:
        """The plan for a call, made, checked for required rules and cached; or, uncached, another
        machine's.
        """
        cached = self._plans.get(call) if target is None else None
        if cached is not None:
            return cached
        grad = self._gradient_needs(call)
        user_key = (call.recipe, grad, call.registry_version)
        if user_key not in self._user:
            self._user[user_key] = registry.apply(self.ops, call.recipe)
        on = target or targets.target_of(call.device)
        made = plan(
            self.ops,
            self._facts(call, on),
            recipe=call.recipe,
            target=on,
            rules=registry.rules,
            grad=grad,
            user=self._user[user_key],
        )
        if target is None:
            made.require(self.require)
            self._plans[call] = made
        return made

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
def _plan_while_compiling(run: Run, call: _Call) -> Plan:
    """Planning happens while tracing; its inputs are guarded by what was read to build ``call``."""
    return run.plan_for(call)


def _forward(
    run: Run, current: Plan, x: Tensor, extra_inputs: Sequence[Tensor], kwargs: Kwargs
) -> tuple[Tensor, list[Tensor], list[OperationContext]]:
    """Run the plan's forward ops; gives the output, the public extra outputs and the contexts."""
    sources, recipe = run.wiring.sources, current.recipe
    memo: dict[Any, Tensor] = {}
    contexts = [OperationContext(needs, recipe, memo) for needs in current.grad]
    produced: list[Sequence[Tensor | None]] = []
    quantizer_before = quantizer_after = None
    for op, basic_ops in current.forward_ops:
        start = len(produced)
        stop = start + len(basic_ops)
        inputs = [
            [
                extra_inputs[slot]
                if producer == CALLER
                # What a fused op makes for itself, it has to wire itself.
                else (produced[producer][slot] if producer < start else None)
                for producer, slot in sources[i]
            ]
            for i in range(start, stop)
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
        _check_outputs(run, op, outputs, start, stop)
        produced.extend(outputs)
    public = [produced[op][slot] for op, slot in run.wiring.public]
    return x, public, contexts


def _check_outputs(
    run: Run, op: Any, outputs: Sequence[Sequence[Tensor | None]], start: int, stop: int
) -> None:
    """Refuse extra outputs that are not one sequence a basic op, complete where they are needed."""
    name = type(op).__name__
    wanted = [basic.num_extra_outputs for basic in run.ops[start:stop]]
    got = [len(values) for values in outputs]
    if got != wanted:
        raise RuntimeError(
            f"{name} must return one sequence of extra outputs for each basic op, of lengths "
            f"{wanted}, got {got}"
        )
    for i, values in enumerate(outputs, start):
        for slot, value in enumerate(values):
            if value is None and run.wiring.needed_outside((i, slot), start, stop):
                raise RuntimeError(
                    f"{name} must return extra output {slot} of op {i} "
                    f"({type(run.ops[i]).__name__}), which is needed outside it, got None"
                )


class _RunFunction(torch.autograd.Function):
    """The whole run as one node, since forward and backward may be fused differently."""

    @staticmethod
    def forward(  # type: ignore[override]
        fctx: Any, run: Run, current: Plan, slots: tuple[int, ...], kwargs: Kwargs, *unique: Tensor
    ) -> Any:
        x, *extra_inputs = [unique[slot] for slot in slots[: 1 + run.num_extra_inputs]]
        output, extra_outputs, contexts = _forward(run, current, x, extra_inputs, kwargs)

        saved: list[Tensor | None] = []
        states = []
        for context in contexts:
            tensors, state = context.saved_state()
            states.append((len(saved), len(saved) + len(tensors), state))
            saved.extend(tensors)
        fctx.save_for_backward(*saved)
        fctx.run, fctx.plan, fctx.slots, fctx.states = run, current, slots, states
        fctx.dtypes = [t.dtype for t in unique]

        outputs = _distinct([output, *extra_outputs], unique)
        fctx.mark_non_differentiable(
            *[
                t
                for t, (op, _) in zip(outputs[1:], run.wiring.public, strict=True)
                if not (current.grad[op].requires_grad and t.is_floating_point())
            ]
        )
        return tuple(outputs) if extra_outputs else outputs[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(fctx: Any, grad_output: Tensor, *grad_extra_outputs: Tensor) -> Any:
        run, current, saved = fctx.run, fctx.plan, fctx.saved_tensors
        sources = run.wiring.sources
        n = len(run.ops)
        # New contexts: nothing that the forward made is changed, so that a second backward works.
        contexts = [
            OperationContext.restored(saved[first:last], state)
            for first, last, state in fctx.states
        ]

        grads_produced: dict[tuple[int, int], Tensor | None] = {
            key: grad
            for key, grad in zip(run.wiring.public, grad_extra_outputs, strict=True)
            if current.grad[key[0]].requires_grad
        }
        grads_extra: list[Tensor | None] = [None] * run.num_extra_inputs
        grads_params: list[Sequence[Tensor | None]] = [(None,) * len(g.params) for g in current.grad]
        grad: Tensor | None = grad_output
        stop = n
        for op, basic_ops in reversed(current.backward_ops):
            start = stop - len(basic_ops)
            if not current.grad[stop - 1].requires_grad:
                grad = None
                break
            grad, of_params, of_extra = op.fuser_backward(
                contexts[start:stop],
                grad,
                basic_op_grad_extra_outputs=[
                    tuple(grads_produced.get((i, k)) for k in range(run.ops[i].num_extra_outputs))
                    for i in range(start, stop)
                ],
            )
            _check_gradients(run, op, of_params, of_extra, current.grad, start, stop)
            for i, for_params, for_extra in zip(
                range(start, stop), of_params, of_extra, strict=True
            ):
                grads_params[i] = for_params
                for (producer, k), g in zip(sources[i], for_extra, strict=True):
                    if producer == CALLER:
                        grads_extra[k] = _sum(grads_extra[k], g)
                    elif producer < start:
                        grads_produced[producer, k] = _sum(grads_produced.get((producer, k)), g)
            stop = start

        by_tensor: list[Tensor | None] = [None] * len(fctx.dtypes)
        flat = [grad, *grads_extra, *[g for grads in grads_params for g in grads]]
        for slot, g in zip(fctx.slots, flat, strict=True):
            by_tensor[slot] = _sum(by_tensor[slot], g)
        cast = [
            None if g is None else g.to(dtype)
            for g, dtype in zip(by_tensor, fctx.dtypes, strict=True)
        ]
        return None, None, None, None, *cast


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _distinct(outputs: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """``outputs`` with a view in place of each that is an input, or an earlier output, itself."""
    distinct: list[Tensor] = []
    for t in outputs:
        known = any(t is other for other in inputs) or any(t is other for other in distinct)
        distinct.append(t.view_as(t) if known else t)
    return distinct


def _check_gradients(  # noqa: PLR0913 - what has to agree
    run: Run,
    op: Any,
    of_params: Sequence[Sequence[Any]],
    of_extra: Sequence[Sequence[Any]],
    needs: Sequence[GradNeeds],
    start: int,
    stop: int,
) -> None:
    """Refuse a backward that does not give one entry for every parameter and extra input."""
    wanted = [(len(needs[i].params), len(needs[i].extra_inputs)) for i in range(start, stop)]
    got = [(len(p), len(e)) for p, e in zip(of_params, of_extra, strict=True)]
    if got != wanted:
        raise RuntimeError(
            f"the backward of {type(op).__name__} must return gradients (None where there is none) "
            f"for each basic op's parameters and extra inputs, numbering {wanted}, got {got}"
        )
