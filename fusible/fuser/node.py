"""Execution of a schedule: a run of ops as one autograd function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_leaves

from fusible.fuser.backwards import Backward
from fusible.fuser.context import OperationContext
from fusible.fuser.error_notes import note_failure
from fusible.fuser.memory import AliasTracker, InputAliasTracker, check_grad_input, returned_grad
from fusible.fuser.overlap import complete_output
from fusible.fuser.saved_rows import active_pool, with_rows, without_rows
from fusible.fuser.schedule import SAME_STEP, Kwargs, Schedule, ScheduledStep, outside_autocast
from fusible.fuser.tracing import hooks_hold_saved
from fusible.fuser.user_steps import kind_of
from fusible.fuser.wiring import CALLER, Output


def run_forward(
    schedule: Schedule, operands: Sequence[Tensor], kwargs: Kwargs | None
) -> tuple[list[Tensor], list[OperationContext]]:
    """Run the plan's forward ops; gives the output with the public extra ones, and the contexts.

    ``operands`` are the caller's inputs, then the parameters.
    """
    contexts = _new_contexts(schedule, operands, kwargs)
    compiling = torch.compiler.is_compiling()
    for context in contexts if compiling else ():
        context.operands = operands
    x, wiring = operands[0], schedule.wiring
    # Of each op, and the extra inputs as those of the caller.
    produced: dict[int, Sequence[Any]] = {CALLER: operands[1 : 1 + len(wiring.names)]}
    aliases = None
    if schedule.writes_inputs and not compiling:
        ops, callers = schedule.plan.basic_ops, (x, *produced[CALLER])
        aliases = InputAliasTracker(callers, ops, wiring, contexts, produced)
    profiled = _is_profiled()
    for step in schedule.forward:
        own = contexts[step.start : step.stop]
        if step.quantizers is not None:
            last = own[-1]
            own[0].grad_quantizer, last.next_quantizer, last.output_grad_quantizer = step.quantizers
        inputs = [
            [None if source == SAME_STEP else produced[source[0]][source[1]] for source in of_op]
            for of_op in step.sources
        ]
        if step.overlap is not None:
            own[-1].deferred = not compiling
        for overlap in step.reads:
            complete_output(contexts[overlap.ops.stop - 1])
        if aliases is not None:
            aliases.mark_writable_inputs(x, inputs, step.start)
        run = step.run
        if profiled:
            run = record_function(f"{step.label} forward")(run)
        try:
            returned = run(own, x, inputs)
        except Exception as error:
            note_failure(error, schedule, step)
            raise
        if aliases is not None and step.is_users:  # which may go on reading its arguments
            aliases.retain(tree_leaves((x, inputs, returned)))
        x, outputs = returned
        produced.update(enumerate(outputs, step.start))
    return [x, *[produced[op][slot] for op, slot in wiring.public]], contexts


def run_formula(
    schedule: Schedule, formula: Callable[..., Tensor], operands: Sequence[Tensor]
) -> Tensor:
    """The output of the only op by its formula, which autograd differentiates."""

    def checked(*operands: Tensor) -> Tensor:
        output = formula(*operands)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"formula of {type(schedule.forward[0].op).__name__} must return one tensor, got "
                f"{kind_of(output)}"
            )
        return output

    return _call_only_op(schedule, checked, operands)


def _call_only_op(
    schedule: Schedule,
    function: Callable[..., Any],
    given: Sequence[Any],
    contexts: Sequence[OperationContext] | None = None,
) -> Any:
    """What a function of the only op of the forward gives; ``contexts`` in its backward."""
    (step,) = schedule.forward
    function = outside_autocast(schedule.plan, step.op, function)
    if _is_profiled():
        name = f"{step.label} {'forward' if contexts is None else 'backward'}"
        function = record_function(name)(function)
    try:
        return function(*given)
    except Exception as error:
        note_failure(error, schedule, step, contexts)
        raise


def _new_contexts(
    schedule: Schedule, operands: Sequence[Tensor], kwargs: Kwargs | None
) -> list[OperationContext]:
    plan = schedule.plan
    memo: dict[Any, Any] = {}
    autocast = plan.autocast_dtype
    contexts = [
        OperationContext(needs, recipe, autocast, operands[own], memo, quantizes)
        for needs, own, (recipe, quantizes) in zip(
            plan.grad, schedule.params, plan.recipes, strict=True
        )
    ]
    if kwargs is not None:
        for context, of_op in zip(contexts, kwargs, strict=True):
            context.kwargs = of_op
    for i, kernels in schedule.kernels:
        contexts[i].kernels = kernels
    return contexts


def _is_profiled() -> bool:
    """Whether a profiler records this thread; compiled code records no ranges."""
    return not torch.compiler.is_compiling() and torch._C._autograd._profiler_enabled()


class RunFunction(torch.autograd.Function):
    """The whole run as one node, since forward and backward may be fused differently."""

    @staticmethod
    def forward(
        fctx: Any,
        schedule: Schedule,
        slots: tuple[int, ...] | None,
        kwargs: Kwargs | None,
        *tensors: Tensor,
    ) -> Any:
        """Run forward; ``slots`` of compiled code say which tensor each operand is."""
        operands = tensors if slots is None else [tensors[slot] for slot in slots]
        outputs, contexts = run_forward(schedule, operands, kwargs)
        saved: list[Tensor | None] = []
        # The contexts outlive the forward: only autograd may keep tensors.
        states, pool = [], active_pool()
        for context in contexts:
            first, rows = len(saved), {}
            if context.requires_grad:
                rows = {} if pool is None else pool.save(context)
                saved.extend(context.to_save if not rows else without_rows(context, rows))
            context.parameters, context.to_save, context.memo = (), (), {}
            context.row_ends = None
            if kwargs is not None:
                context.kwargs = {}
            if slots is not None:
                context.operands = ()
            states.append((first, len(saved), context, rows))
        fctx.save_for_backward(*saved)
        fctx.call = schedule, slots, states, slots is None and kwargs is not None
        if slots is None:
            fctx.within = Backward.running() if schedule.accumulating else None
            outputs = without_views(schedule, kwargs, outputs, tensors, saved)
        outputs = _unaliased_outputs(outputs, tensors)
        if len(outputs) > 1:
            grad = schedule.plan.grad
            fctx.mark_non_differentiable(
                *[
                    t
                    for t, (op, _) in zip(outputs[1:], schedule.wiring.public, strict=True)
                    if not (grad[op].requires_grad and t.is_floating_point())
                ]
            )
            if slots is None:  # compiled code does not know the attribute
                fctx._materialize_non_diff_grads = False  # else each would get zeros
        return tuple(outputs)

    @staticmethod
    def backward(fctx: Any, *grads: Tensor) -> Any:
        """Run backward; gives the gradients of the tensors that forward was given."""
        _refuse_second_derivatives()
        schedule, slots, states, may_have_buffers = fctx.call
        saved = fctx.saved_tensors
        # New contexts: nothing that the forward made is changed, so that a second backward works.
        contexts = [
            context.for_backward(with_rows(saved[first:last], rows))
            for first, last, context, rows in states
        ]
        if slots is None and schedule.accumulating:
            _set_leaves(fctx, schedule, contexts)
        if may_have_buffers:
            check_grad_input(schedule.plan.basic_ops, contexts[0], grads, saved)
        aliases = None
        # Compiled autograd traces this, but cannot tell memory by its address.
        if schedule.writes_grads and slots is None and not torch.compiler.is_compiling():
            aliases = AliasTracker((*grads, *saved))
        flat = _run_backward(schedule, contexts, grads, aliases)
        cast_grads = [
            g if g is None or g.dtype == dtype else g.to(dtype)
            for g, dtype in zip(flat, schedule.dtypes, strict=True)
        ]
        if may_have_buffers:
            to_leaf = _leaf(fctx.next_functions[0][0]) is not None
            cast_grads[0] = returned_grad(contexts[0], cast_grads[0], to_leaf)
        of_tensors = cast_grads if slots is None else _summed(cast_grads, slots)
        return (None, None, None, *_without_shared_memory(fctx, of_tensors))


def _run_backward(
    schedule: Schedule,
    contexts: Sequence[OperationContext],
    grads: Sequence[Tensor],
    aliases: AliasTracker | None,
) -> list[Tensor | None]:
    """The gradients of the inputs, then of the parameters, from those of the outputs."""
    needs, wiring = schedule.plan.grad, schedule.wiring
    # Of extra outputs, summed over their uses, and of the caller's extra inputs.
    of_extra: dict[Output, Tensor | None] = {
        output: grad
        for output, grad in zip(wiring.public, grads[1:], strict=True)
        if needs[output[0]].requires_grad
    }
    of_params: list[Sequence[Tensor | None]] = [(None,) * len(n.params) for n in needs]
    grad: Tensor | None = grads[0]
    profiled = _is_profiled()
    for step in schedule.backward:
        start, stop = step.start, step.stop
        own = contexts[start:stop]
        if not own[-1].requires_grad:
            grad = None
            break
        if grad is None:  # of a user's op, through which nothing flows back
            grad = grads[0].new_zeros(contexts[stop].forward.grad_input_shape or ())
        grad_extra = [
            tuple([of_extra.pop((start + i, k), None) for k in range(count)]) if count else ()
            for i, count in enumerate(step.num_extra_outputs)
        ]
        if aliases is not None and (step.is_users or step.op.writes_grads):
            others = *of_extra.values(), *chain(*of_params)
            aliases.mark_writable_grads(own, grad, grad_extra, others)
        run = step.run
        if profiled:
            run = record_function(f"{step.label} backward")(run)
        try:
            returned = run(own, grad, grad_extra)
        except Exception as error:
            note_failure(error, schedule, step, own)
            raise
        if aliases is not None and (step.is_users or step.op.keeps_grads):
            aliases.retain(tree_leaves((grad, grad_extra, returned)))
        grad, of_params[start:stop], step_extra = returned
        grad = grad if grad is None or step.cast_from is None else grad.to(step.cast_from)
        _accumulate_extra_grads(step, step_extra, of_extra)
        if step.reads:
            _begin_sending(step, contexts, of_extra)
    of_inputs = [of_extra.get((CALLER, k)) for k in range(len(wiring.names))]
    return [grad, *of_inputs, *chain(*of_params)]


def _set_leaves(
    fctx: Any,
    schedule: Schedule,
    contexts: Mapping[int, OperationContext] | Sequence[OperationContext],
) -> None:
    """Set on the contexts of ops that accumulate gradients themselves what autograd does with them.

    ``fctx.within``: the backward in which the forward ran, where checkpointing repeated it.
    """
    backward = fctx.within
    if backward is None or not backward.is_running:
        backward = Backward.running()
    for i in schedule.accumulating:
        nodes = fctx.next_functions[schedule.params[i]]
        contexts[i].leaves = [_leaf(node) for node, _ in nodes]
        weights = nodes[: schedule.plan.basic_ops[i].num_weights]
        contexts[i].collects_grads = any([_will_run(node) for node, _ in weights])
        contexts[i].backward = backward


def _leaf(node: Any) -> Tensor | None:
    """The tensor whose gradient an autograd node accumulates, or None if it does no such thing."""
    kind = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
    return node.variable if isinstance(node, kind) else None


def _will_run(node: Any) -> bool:
    """Whether this backward collects the gradient of a parameter: not if ``inputs=`` leaves it out.

    PyTorch raises an error where the gradient is a result, of ``torch.autograd.grad``.
    """
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True


def _begin_sending(
    step: ScheduledStep,
    contexts: Sequence[OperationContext],
    of_extra: dict[Output, Tensor | None],
) -> None:
    """Send the gradients that this step has completed, of ops whose backward comes later."""
    for overlap in () if torch.compiler.is_compiling() else step.reads:
        grad, early = of_extra.get(overlap.output), contexts[overlap.ops]
        if grad is not None and early[-1].requires_grad:
            overlap.op.begin_sending(early, grad)


def _accumulate_extra_grads(
    step: ScheduledStep,
    step_extra: Sequence[Sequence[Tensor | None]],
    of_extra: dict[Output, Tensor | None],
) -> None:
    """Add the gradients of a step's extra inputs to those of their sources; None is zero."""
    for of_op, grads in zip(step.sources, step_extra, strict=True):
        for source, g in zip(of_op, grads, strict=True):
            if g is not None and source != SAME_STEP:
                of_extra[source] = _sum(of_extra.get(source), g)


def _refuse_second_derivatives() -> None:
    # Not by once_differentiable, which misses second derivatives by what was saved.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "the backward of fusible ops cannot be differentiated: create_graph must be False, "
            "got True; write what needs second derivatives with torch.nn modules"
        )


class _FastPathFunction(torch.autograd.Function):
    """A plan by its :class:`FastPath`."""

    @staticmethod
    def forward(fctx: Any, schedule: Schedule, prepared: Any, *operands: Tensor) -> Tensor:
        forward = schedule.fast_path.forward  # type: ignore[union-attr]
        output, saved = _call_only_op(schedule, forward, (prepared, *operands))
        fctx.save_for_backward(*saved)
        fctx.schedule, fctx.held = schedule, hooks_hold_saved()
        if schedule.accumulating:
            fctx.within = Backward.running()
        return output

    @staticmethod
    def backward(fctx: Any, grad_output: Tensor) -> Any:
        _refuse_second_derivatives()
        schedule = fctx.schedule
        contexts = {i: OperationContext(schedule.plan.grad[i]) for i in schedule.accumulating}
        if contexts:
            _set_leaves(fctx, schedule, contexts)
        given = fctx.saved_tensors, grad_output, fctx.held, contexts
        return None, None, *_call_only_op(schedule, schedule.fast_path.backward, given, ())


def run_fast_path(schedule: Schedule, prepared: Any, operands: Sequence[Tensor]) -> Tensor:
    """The output of a run by its :class:`FastPath`, ``prepared`` for these operands."""
    if schedule.plan.grad[-1].requires_grad:
        return _FastPathFunction.apply(schedule, prepared, *operands)
    forward = schedule.fast_path.forward  # type: ignore[union-attr]
    return _call_only_op(schedule, forward, (prepared, *operands))[0]


def deduplicated(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The distinct tensors, and the index of each tensor among them.

    An autograd function under torch.compile does not take a tensor twice.
    """
    unique: dict[Tensor, int] = {}
    slots = tuple([unique.setdefault(t, len(unique)) for t in tensors])
    return tuple(unique), slots


def _summed(grads: Sequence[Tensor | None], slots: Sequence[int]) -> list[Tensor | None]:
    """The gradient of each distinct tensor: the sum over its uses."""
    total: list[Tensor | None] = [None] * (1 + max(slots))
    for slot, grad in zip(slots, grads, strict=True):
        if grad is not None:
            total[slot] = _sum(total[slot], grad)
    return total


def _sum(total: Tensor | None, grad: Tensor) -> Tensor:
    return grad if total is None else total + grad


def _unaliased_outputs(outputs: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a run, as tensors that autograd can tell from its inputs and from each other.

    Eager, one that is an input or an earlier output becomes a view of it. PyTorch's compiled code
    must not return two views of one tensor, since it takes the gradient of that tensor for that
    of each view, nor the same tensor twice. Those are copied. The other outputs become aliases
    that autograd does not see as views: torch 2.11 makes each tensor of the forward an output of
    the function, so a tensor that a no-op cast returned would be two outputs, one without a
    gradient.
    """
    if not torch.compiler.is_compiling():
        ids = list(map(id, (*inputs, *outputs)))
        first = len(inputs)
        return [t.view_as(t) if id(t) in ids[:i] else t for i, t in enumerate(outputs, first)]
    distinct: list[Tensor] = []
    for i, t in enumerate(outputs):
        if any([t is other for other in (*inputs, *outputs[:i])]):
            distinct.append(t.clone())
        else:
            distinct.append(torch.ops.aten._unsafe_view(t, t.shape))
    return distinct


def without_views(
    schedule: Schedule,
    kwargs: Kwargs | None,
    outputs: list[Tensor],
    inputs: Sequence[Tensor],
    saved: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """The outputs of an eager run, without views of memory that no other tensor has.

    PyTorch refuses in-place operations on a view that an autograd function returns. Views of an
    input, of a saved tensor or of another output stay views, as do outputs in a caller's buffer
    and those of users' ops, which may hold the memory.
    """
    for t in outputs:  # not any(), which takes longer
        if t._is_view():
            break
    else:
        return outputs
    if kwargs is not None or any([step.is_users for step in schedule.forward]):
        return outputs
    others = (*inputs, *saved)
    return [
        t
        if not t._is_view() or _shares_memory(t, (*others, *outputs[:i], *outputs[i + 1 :]))
        else torch.ops.aten._unsafe_view(t, t.shape)
        for i, t in enumerate(outputs)
    ]


def _shares_memory(t: Tensor, others: Sequence[Tensor | None]) -> bool:
    return any([o is not None and torch._C._is_alias_of(t, o) for o in others])  # type: ignore[attr-defined]


def _without_shared_memory(fctx: Any, grads: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients, with copies of views of others' memory where the gradient is a leaf's.

    Autograd makes a gradient that nothing else refers to the leaf's ``.grad``, without a copy. It
    does not see that another tensor has its memory, and the two would be accumulated as one.
    Compiled code is left as it is: AOTAutograd returns such views for PyTorch's own ops too.
    """
    if torch.compiler.is_compiling():
        return grads
    for i, grad in enumerate(grads):
        if grad is not None and grad._is_view() and _leaf(fctx.next_functions[i][0]) is not None:
            others = *grads[:i], *grads[i + 1 :]
            if _shares_memory(grad, others):
                grads[i] = grad.clone()
    return grads
