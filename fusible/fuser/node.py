"""A schedule's execution: a run of ops as one autograd function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fusible.fuser.context import OperationContext
from fusible.fuser.expected import check_first
from fusible.fuser.ownership import InputOwner, Owner, check_grad_input, owned_grads
from fusible.fuser.places import note_place
from fusible.fuser.plan import Plan
from fusible.fuser.tracing import hooks_hold_saved
from fusible.fuser.wiring import CALLER

if TYPE_CHECKING:
    from fusible.fuser.run import Run

Kwargs = Sequence[dict[str, Any]]

# torch 2.11 compiles an autograd function so that every tensor made in its forward is an output,
# and a tensor that a cast to its own dtype returned is two: the gradient goes to the wrong one,
# and what the backward sees is zero. A view is one of a kind.
_LOSES_OUTPUTS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


class ScheduledStep(NamedTuple):
    """One op of a plan, ready to run: ops[start:stop], and for each where extra inputs are from."""

    op: Any
    start: int
    stop: int
    sources: tuple[tuple[tuple[int, int], ...], ...]
    num_extra_outputs: list[int]
    num_grads: tuple[list[int], list[int]]
    quantizers: tuple[Any, Any]
    """Of the previous op's output gradient and of the next op's input."""
    is_users: bool
    """Whether the op is not of this package: that it gives all its gradients is then checked."""
    label: str
    """The op and its place, as profilers show it."""


class Direct(Protocol):
    """A plan of one op as one autograd node of its own, without contexts: the host's time.

    The operands are the inputs and then the parameters. What it takes it runs as the op would, with
    the same results.
    """

    def prepared(self, *operands: Tensor) -> Any:
        """What the forward needs to run these operands, or None if the op itself shall run."""

    def forward(self, prepared: Any, *operands: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The output, and what the backward reads."""

    def backward(
        self, saved: Sequence[Tensor], grad_output: Tensor, held: bool
    ) -> Sequence[Tensor | None]:
        """The gradients of the operands, in their dtypes.

        ``held`` says that ``saved_tensors_hooks`` may go on reading what was saved.
        """


class Schedule(NamedTuple):
    """A plan with all that its execution looks up."""

    plan: Plan
    forward: tuple[ScheduledStep, ...]
    backward: tuple[ScheduledStep, ...]  # the last op first
    dtypes: tuple[torch.dtype, ...]  # of the inputs, then of the parameters
    params: tuple[slice, ...]  # where each op's parameters are among these
    direct: Direct | None
    writes_grads: bool
    """Whether an op of the backward writes to gradients, if they are the run's own."""
    fused_backward: Sequence[int]
    """Indices of the ops whose backward a fused op runs."""


# In a step's sources: made and used inside one fused op, which wires it itself.
INTERNAL = (-2, 0)


def run_forward(
    run: Run, schedule: Schedule, given: Sequence[Tensor], kwargs: Kwargs
) -> tuple[list[Tensor], list[OperationContext]]:
    """Run the plan's forward ops; gives the output with the public extra ones, and the contexts.

    ``given`` are the caller's inputs, then the parameters.
    """
    plan = schedule.plan
    memo: dict[Any, Any] = {}
    contexts = [
        OperationContext(needs, plan.recipe, plan.autocast_dtype, memo, given[own])
        for needs, own in zip(plan.grad, schedule.params, strict=True)
    ]
    for i in schedule.fused_backward:
        contexts[i].fused_backward = True
    x = given[0]
    produced: list[Sequence[Any]] = []
    writes = run.writes and not torch.compiler.is_compiling()
    owner = InputOwner(run, contexts, given[: 1 + run.num_extra_inputs]) if writes else None
    profiled = _is_profiled()
    for step in schedule.forward:
        op, start, stop, sources, _, _, quantizers, is_users, label = step
        inputs = [
            [
                given[1 + slot]
                if producer == CALLER
                else (produced[producer][slot] if producer >= 0 else None)
                for producer, slot in of_op
            ]
            for of_op in sources
        ]
        forward = op.fuser_forward
        if plan.autocast_dtype is not None and op.casts_itself:
            forward = _without_autocast(forward, x.device.type)
        if profiled:
            forward = _in_range(f"{label} forward", forward)
        if is_users:
            _note_inputs(contexts[start:stop], x, inputs)
        if owner is not None:
            owner.before(x, inputs, produced, start, stop)
        try:
            returned = forward(
                contexts[start:stop],
                x,
                basic_op_extra_inputs=inputs,
                prev_op_grad_output_quantizer=quantizers[0],
                next_op_input_quantizer=quantizers[1],
                basic_op_kwargs=kwargs[start:stop],
            )
        except Exception as error:
            note_place(error, run, op, start, stop, "forward")
            raise
        if not _is_tuple(returned, 2) or not isinstance(returned[0], Tensor):
            _refuse_returned(op, returned)
        taken, (x, outputs) = x, returned
        if is_users:
            check_first(run.expected, op, x, contexts[start:stop])
        _check_outputs(run, step, outputs)
        if owner is not None:
            owner.after(is_users, chain([taken, x], *inputs, *outputs), stop)
        produced.extend(outputs)
    if not run.wiring.public:
        return [x], contexts
    return [x, *[produced[op][slot] for op, slot in run.wiring.public]], contexts


def _refuse_returned(op: Any, returned: Any) -> None:
    raise TypeError(
        f"the forward of {type(op).__name__} must return its output, one tensor, and the "
        f"extra outputs of each basic op, got {kind_of(returned)}"
    )


def _is_tuple(returned: Any, length: int) -> bool:
    return isinstance(returned, tuple | list) and len(returned) == length


def kind_of(returned: Any) -> str:
    """What an op returned, for a sentence."""
    if isinstance(returned, tuple | list):
        kinds = ", ".join([kind_of(value) for value in returned])
        return f"[{kinds}]" if isinstance(returned, list) else f"({kinds})"
    return "a tensor" if isinstance(returned, Tensor) else repr(returned)


def _is_profiled() -> bool:
    """Whether a profiler records this thread; compiled code has no ranges."""
    return not torch.compiler.is_compiling() and torch._C._autograd._profiler_enabled()


def _in_range(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in a range that a profiler shows under ``label``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function(label):
            return function(*args, **kwargs)

    return run


def _without_autocast(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """``function`` outside of ``torch.autocast``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return function(*args, **kwargs)

    return run


def _check_outputs(
    run: Run, step: ScheduledStep, outputs: Sequence[Sequence[Tensor | None]]
) -> None:
    """Refuse another number of extra outputs, and a missing one that something else needs."""
    op, start, stop, _, wanted, *_ = step
    if [len(of_op) for of_op in outputs] != wanted:
        raise RuntimeError(
            f"{type(op).__name__} must return one sequence of extra outputs for each basic op, "
            f"of lengths {wanted}, got {[len(of_op) for of_op in outputs]}"
        )
    if not any(wanted):
        return
    for i, values in enumerate(outputs, start):
        for slot, value in enumerate(values):
            if value is None and run.wiring.needed_outside((i, slot), start, stop):
                raise RuntimeError(
                    f"{type(op).__name__} must return extra output {slot} of op {i} "
                    f"({type(run.ops[i]).__name__}), which is needed outside it, got None"
                )


class RunFunction(torch.autograd.Function):
    """The whole run as one node, since forward and backward may be fused differently."""

    @staticmethod
    def forward(
        fctx: Any,
        run: Run,
        schedule: Schedule,
        slots: tuple[int, ...] | None,
        kwargs: Kwargs,
        *tensors: Tensor,
    ) -> Any:
        """Run forward; ``slots`` says which tensor each input and parameter is, if not its own."""
        given = tensors if slots is None else [tensors[slot] for slot in slots]
        outputs, contexts = run_forward(run, schedule, given, kwargs)
        saved: list[Tensor | None] = []
        # The contexts outlive the forward: only autograd may keep tensors.
        states = []
        for context in contexts:
            first = len(saved)
            if context.requires_grad:
                saved.extend(context.to_save)
            context.parameters, context.to_save, context.memo = (), (), {}
            states.append((first, len(saved), context))
        fctx.save_for_backward(*saved)
        watched = not torch.compiler.is_compiling() and (
            schedule.writes_grads or kwargs is not run.no_kwargs
        )
        fctx.call = run, schedule, slots, states, watched
        outputs = _distinct(outputs, tensors)
        if len(outputs) > 1:
            grad = schedule.plan.grad
            fctx.mark_non_differentiable(
                *[
                    t
                    for t, (op, _) in zip(outputs[1:], run.wiring.public, strict=True)
                    if not (grad[op].requires_grad and t.is_floating_point())
                ]
            )
            if not torch.compiler.is_compiling():  # which does not know the attribute
                fctx._materialize_non_diff_grads = False  # else each would get zeros
        return tuple(outputs)

    @staticmethod
    def backward(fctx: Any, grad_output: Tensor, *grad_extra_outputs: Tensor) -> Any:
        """Run backward; gives the gradients of the tensors that forward was given."""
        _refuse_second_derivatives()
        run, schedule, slots, states, watched = fctx.call
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
        owner = None
        if watched:
            grads = grad_output, *grad_extra_outputs
            check_grad_input(run, contexts[0], grads, saved)
            owner = Owner((*grads, *saved)) if schedule.writes_grads else None
        profiled = _is_profiled()
        for step in schedule.backward:
            op, start, stop, _, num_extra_outputs, num_grads, _, is_users, label = step
            if not contexts[stop - 1].requires_grad:
                grad = None
                break
            if grad is None:
                raise RuntimeError(
                    f"the op after {type(op).__name__} must return the gradient of its input, got "
                    "None; where nothing flows back it is zeros"
                )
            backward = _checked_backward(op) if is_users else op.fuser_backward
            backward = _in_range(f"{label} backward", backward) if profiled else backward
            grad_extra = [
                tuple([flowing.pop((start + i, k), None) for k in range(count)]) if count else ()
                for i, count in enumerate(num_extra_outputs)
            ]
            if owner is not None:
                others = chain(flowing.values(), of_callers, *of_params)
                backward = owned_grads(backward, owner, list(others), is_users or op.keeps_grads)
            try:
                returned = backward(
                    contexts[start:stop], grad, basic_op_grad_extra_outputs=grad_extra
                )
            except Exception as error:
                note_place(error, run, op, start, stop, "backward")
                raise
            _check_grads(op, returned, num_grads)
            grad, step_params, step_extra = returned
            of_params[start:stop] = step_params
            _hand_back(step, contexts, step_extra, flowing, of_callers)
        flat = grad, *of_callers, *chain(*of_params)
        given = [
            g if g is None or g.dtype == dtype else g.to(dtype)
            for g, dtype in zip(flat, schedule.dtypes, strict=True)
        ]
        return (None, None, None, None, *(given if slots is None else _summed(given, slots)))


def _hand_back(
    step: ScheduledStep,
    contexts: Sequence[OperationContext],
    step_extra: Sequence[Sequence[Tensor | None]],
    flowing: dict[tuple[int, int], Tensor | None],
    of_callers: list[Tensor | None],
) -> None:
    """Give the gradients of a step's extra inputs to what they came from."""
    for i, (of_op, grads) in enumerate(zip(step.sources, step_extra, strict=True), step.start):
        for slot, ((producer, k), g) in enumerate(zip(of_op, grads, strict=True)):
            if g is None:
                if step.is_users and producer >= 0:
                    _check_not_lost(step.op, contexts[i], slot)
            elif producer == CALLER:
                of_callers[k] = g
            elif producer >= 0:
                flowing[producer, k] = _sum(flowing.get((producer, k)), g)


def _note_inputs(
    contexts: Sequence[OperationContext], x: Tensor, inputs: Sequence[Sequence[Tensor | None]]
) -> None:
    """Keep, for the checks of a user's backward, what the op's inputs were."""
    for context, of_op in zip(contexts, inputs, strict=True):
        context.floats = [t is not None and t.is_floating_point() for t in of_op]
    if not torch.compiler.is_compiling():
        contexts[0].given_shape = x.shape


def _checked_backward(op: Any) -> Callable[..., Any]:
    """A user's backward, named in its errors, whose input's gradient has the input's shape."""
    function = op.fuser_backward
    if torch.compiler.is_compiling():
        return function

    def run(contexts: Sequence[OperationContext], *args: Any, **kwargs: Any) -> Any:
        try:
            returned = function(contexts, *args, **kwargs)
        except Exception as error:
            saved = [len(context.saved_tensors) for context in contexts]
            error.add_note(
                f"in the backward of {type(op).__name__}, for whose basic ops the forward saved "
                f"{saved} tensors"
            )
            raise
        shape = contexts[0].given_shape
        grad = returned[0] if _is_tuple(returned, 3) else None
        if isinstance(grad, Tensor) and shape not in (None, grad.shape):
            raise RuntimeError(
                f"the backward of {type(op).__name__} must return a gradient of the shape of "
                f"its input, {tuple(shape)}, got {tuple(grad.shape)}"
            )
        return returned

    return run


def _check_not_lost(op: Any, context: OperationContext, slot: int) -> None:
    """Refuse that a user's op gives no gradient to what an earlier op made and needs one for."""
    floats = context.floats  # None if one of ours ran it forward
    if floats is not None and floats[slot] and context.needs.extra_inputs[slot]:
        raise RuntimeError(
            f"the backward of {type(op).__name__} must return the gradient of extra input {slot}, "
            "which an earlier op of the run made, got None; where nothing flows back it is zeros; "
            "ctx.needs says who needs gradients, tensors inside a run do not"
        )


def _check_grads(op: Any, returned: Any, num_grads: tuple[list[int], list[int]]) -> None:
    """Refuse what is not the gradients of an op's input, parameters and extra inputs."""
    if not _is_tuple(returned, 3):
        raise TypeError(
            f"the backward of {type(op).__name__} must return the gradient of its input, and for "
            "each basic op those of its parameters and of its extra inputs, got "
            f"{kind_of(returned)}"
        )
    _, params, extra = returned
    got = list(map(len, params)), list(map(len, extra))
    if got != num_grads:
        raise RuntimeError(
            f"the backward of {type(op).__name__} must return gradients (None where there is none) "
            "for each basic op's parameters and extra inputs, numbering "
            f"{num_grads[0]} and {num_grads[1]}, got {got[0]} and {got[1]}"
        )


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
    def forward(fctx: Any, schedule: Schedule, prepared: Any, *operands: Tensor) -> Tensor:
        output, saved = _direct_forward(schedule, prepared, operands)
        fctx.save_for_backward(*saved)
        fctx.schedule, fctx.held = schedule, hooks_hold_saved()
        return output

    @staticmethod
    def backward(fctx: Any, grad_output: Tensor) -> Any:
        _refuse_second_derivatives()
        schedule = fctx.schedule
        backward = schedule.direct.backward
        if _is_profiled():
            backward = _in_range(f"{schedule.backward[0].label} backward", backward)
        return None, None, *backward(fctx.saved_tensors, grad_output, fctx.held)


def _direct_forward(
    schedule: Schedule, prepared: Any, operands: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    forward = schedule.direct.forward  # type: ignore[union-attr]
    if _is_profiled():
        forward = _in_range(f"{schedule.forward[0].label} forward", forward)
    return forward(prepared, *operands)


def run_directly(schedule: Schedule, prepared: Any, operands: Sequence[Tensor]) -> Tensor:
    """The output of the only op, in its shorter way, ``prepared`` for these operands."""
    if schedule.plan.grad[-1].requires_grad:
        return _DirectFunction.apply(schedule, prepared, *operands)
    return _direct_forward(schedule, prepared, operands)[0]


def folded(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
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
