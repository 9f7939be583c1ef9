"""A plan with all that its execution looks up: the steps, and where their tensors are from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fusible.fuser.conditions import UNKNOWN
from fusible.fuser.context import OperationContext, call_fuser_backward, call_fuser_forward
from fusible.fuser.overlap import Overlap, overlaps
from fusible.fuser.partition import Partition
from fusible.fuser.plan import Plan
from fusible.fuser.registry import is_ours
from fusible.fuser.user_steps import UserForward, user_backward
from fusible.fuser.wiring import Output, Wiring
from fusible.recipes.autocast import autocast

Kwargs = Sequence[dict[str, Any]]

SAME_STEP = (-2, 0)
"""In a step's sources: what an op of the same step produces. The fused op wires it itself."""


class ScheduledStep(NamedTuple):
    """One op of a plan, ready to run: ops[start:stop], and for each where extra inputs are from."""

    op: Any
    run: Callable[..., Any]
    """Its forward or backward, of the contexts, the input and the extra inputs, or of the contexts
    and the gradients of the outputs; outside of ``torch.autocast`` if it casts by itself. Of a
    user's op, its results are checked (:mod:`fusible.fuser.user_steps`)."""
    start: int
    stop: int
    sources: tuple[tuple[Output, ...], ...]
    num_extra_outputs: list[int]
    quantizers: tuple[Any, Any, Any] | None
    """How the previous op wants the gradient, how the next op wants the output, and how the next op
    quantizes the output's gradient; None without a recipe."""
    is_users: bool  # whether the op or the method is not of this package
    cast_from: torch.dtype | None
    """Under a recipe, the dtype of an input from another op that this one casts: its gradient is
    cast back before it is quantized, as where the ops run one by one."""
    label: str  # the op and its place, as profilers show it
    overlap: Overlap | None  # the ops that run during the communication of this one
    reads: tuple[Overlap, ...]  # those of earlier ops whose outputs this step is the first to read


class FastPath(Protocol):
    """A faster path for a plan with one op in the forward: an autograd function without contexts.

    The operands are the inputs and then the parameters.
    """

    def prepared(self, *operands: Tensor) -> Any:
        """The launches for these operands, None if it does not support them."""

    def forward(self, prepared: Any, *operands: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The output, and what the backward reads."""

    def backward(
        self,
        saved: Sequence[Tensor],
        grad_output: Tensor,
        held: bool,
        contexts: Mapping[int, OperationContext],
    ) -> Sequence[Tensor | None]:
        """The gradients of the operands, in their dtypes.

        ``held`` says that ``saved_tensors_hooks`` may go on reading what was saved. ``contexts``
        are those of ops that ``accumulates_grads``, by index.
        """


class Origin:
    """The outermost module in whose call a schedule was made, for errors; None if there is none.

    A class, not a tuple: compiled code would guard every field of a tuple.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.module = (lambda: None) if module is None else weakref.ref(module)


class Schedule(NamedTuple):
    """A plan with all that its execution looks up."""

    plan: Plan
    wiring: Wiring
    forward: tuple[ScheduledStep, ...]
    backward: tuple[ScheduledStep, ...]  # the last op first
    dtypes: tuple[torch.dtype, ...]  # of the inputs, then of the parameters
    params: tuple[slice, ...]  # where each op's parameters are among these
    kernels: Sequence[tuple[int, Any]]  # those selected for ops, by index
    fast_path: FastPath | None
    writes_inputs: bool  # whether an op of the forward writes to extra inputs
    writes_grads: bool  # whether an op of the backward writes to gradients
    is_formula: bool  # whether it is one op with only a formula, which autograd differentiates
    split: Partition | None  # what runs instead, if so: such formulas, and runs between them
    accumulating: Sequence[int]  # the ops that add to their parameters' gradients themselves
    origin: Origin


def schedule_steps(
    plan: Plan,
    wiring: Wiring,
    paths: tuple[str, ...],
    ops: Sequence[Any],
    direction: Literal["forward", "backward"],
    wrap: Callable[[Any], Callable[..., Any]] | None = None,
) -> tuple[ScheduledStep, ...]:
    """The steps of a plan's forward or backward, in order; ``wrap(op)`` runs in an op's place."""
    ends = [0, *accumulate(len(op.basic_ops) for op in ops)]
    spans = [(op, *span) for op, span in zip(ops, pairwise(ends), strict=True)]
    overlapping = list(overlaps(plan.basic_ops, wiring, spans))
    scheduled = []
    for op, start, stop in spans:
        sources = tuple(
            tuple(SAME_STEP if source[0] >= start else source for source in of_op)
            for of_op in wiring.sources[start:stop]
        )
        run = _function(op, direction) if wrap is None else wrap(op)
        run = outside_autocast(plan, op, run)
        is_users = not (op.uses_impl(direction) and is_ours(type(op)))
        if is_users and direction == "forward":
            run = UserForward(run, op, plan, wiring, start, stop)
        elif is_users:
            run = partial(user_backward, run, type(op).__name__, sources)
        scheduled.append(
            ScheduledStep(
                op,
                run,
                start,
                stop,
                sources,
                [basic.num_extra_outputs for basic in op.basic_ops],
                _quantizers(plan, wiring, start, stop),
                is_users,
                _cast_from(plan, start) if start else None,
                f"fusible::{type(op).__name__}{_place(paths, start, stop)}",
                next((o for o in overlapping if o.ops.start == start), None),
                tuple([o for o in overlapping if o.reader == start]),
            )
        )
    return tuple(scheduled)


def _function(op: Any, direction: Literal["forward", "backward"]) -> Callable[..., Any]:
    """What runs an op: its ``impl`` of this package, or the method of te.ops that overrides it."""
    if op.uses_impl(direction):
        return getattr(op, f"{direction}_impl" if op.is_fused_op else f"run_{direction}")
    return partial(call_fuser_forward if direction == "forward" else call_fuser_backward, op)


def outside_autocast(plan: Plan, op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, outside of the ``torch.autocast`` of a plan's calls if the op casts itself."""
    if plan.autocast_dtype is None or not op.handles_autocast:
        return function

    def run(first: Any, *others: Any) -> Any:
        x = first if isinstance(first, Tensor) else others[0]  # after contexts, or what is saved
        with torch.autocast(x.device.type, enabled=False):
            return function(first, *others)

    return run


def _cast_from(plan: Plan, at: int) -> torch.dtype | None:
    """The dtype from which op ``at`` casts its input, under a recipe and if it is known."""
    facts = plan.facts[at]
    dtypes = facts.input.dtype, facts.dtype
    if plan.recipe is None or UNKNOWN in dtypes or dtypes[0] == dtypes[1]:
        return None
    return getattr(torch, facts.input.dtype)


def unfused(schedule: Schedule, wrap: Callable[[Any], Callable[..., Any]]) -> Schedule:
    """A schedule that runs the basic ops one by one.

    ``wrap(op)`` is called in place of each op's forward, as :func:`call_fuser_forward` calls it.
    """
    plan, wiring, ops = schedule.plan, schedule.wiring, schedule.plan.basic_ops
    return schedule._replace(
        kernels=(),
        forward=schedule_steps(plan, wiring, (), ops, "forward", wrap),
        backward=schedule_steps(plan, wiring, (), ops, "backward")[::-1],
        fast_path=None,
        writes_grads=any(op.writes_grads for op in ops),
        is_formula=False,
    )


def _quantizers(plan: Plan, wiring: Wiring, start: int, stop: int) -> tuple[Any, Any, Any] | None:
    """How ops[start:stop] quantize what they give, and how their output's gradient is quantized."""
    if plan.recipe is None:
        return None
    ops, rows = plan.basic_ops, plan.kernel_rows
    by_receiver = [row and getattr(row.kernels, "quantizes_own_inputs", False) for row in rows]

    def quantizer(at: int, which: str) -> Any:
        recipe, _ = plan.recipes[at]
        with autocast(enabled=recipe is not None, recipe=recipe):
            wanted = getattr(ops[at], f"get_{which}_quantizer")()
        if wanted is not None and by_receiver[at]:
            wanted.by_receiver = True
        return wanted

    before = quantizer(0, "grad_input")
    if start:
        before = None if _cast_from(plan, start) else quantizer(start - 1, "grad_output")
    if stop == len(ops):
        after = quantizer(stop - 1, "output")
        if hasattr(after, "placed"):  # a user's op may have one of another class
            after = after.placed(wiring.sources[-1])
        return before, after, None
    if _cast_from(plan, stop) and quantizer(stop - 1, "output") is None:
        return before, None, None  # the op quantizes its input, and the one before the gradient
    return before, quantizer(stop, "input"), quantizer(stop, "grad_input")


def _place(paths: tuple[str, ...], start: int, stop: int) -> str:
    """The index or slice of ops[start:stop] in their Sequential: ``" [0:3]"``."""
    if not paths:
        return ""
    first, last = paths[start], paths[stop - 1]
    if first == last:
        return f" [{first}]"
    if first.isdigit() and last.isdigit():
        return f" [{first}:{int(last) + 1}]"
    return f" [{first} to {last}]"
