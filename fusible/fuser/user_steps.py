"""What users' ops and fused ops are given and may return, in the steps of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.fuser.conditions import UNKNOWN
from fusible.fuser.context import OperationContext, Tensors
from fusible.fuser.op_facts import declares_dtypes
from fusible.fuser.plan import Plan
from fusible.fuser.wiring import Output, Wiring

_COMPILES_REQUIRES_GRAD = torch.__version__ >= "2.13"
"""Whether Dynamo traces ``requires_grad_()`` of a tensor that the traced code made."""


class Expected(NamedTuple):
    """The output of the basic ops of a user's fused op, and how many tensors each saves.

    The latter is None where the fused op has a backward of its own.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    saved: tuple[int, ...] | None

    def check(self, op: Any, output: Tensor, contexts: Sequence[OperationContext]) -> None:
        """Raise RuntimeError for another output, or another number of saved tensors."""
        parts = " + ".join(type(part).__name__ for part in op.basic_ops)
        got = output.shape, output.dtype, output.device
        if got != self[:3]:
            wanted, given = (
                f"{t} of shape {tuple(size)} on {on}" for size, t, on in (self[:3], got)
            )
            raise RuntimeError(
                f"{type(op).__name__} must return what {parts} would, {wanted}, got {given}"
            )
        saved = tuple(map(num_saved, contexts))
        if self.saved is not None and saved != self.saved:
            saves = "; ".join(f"{type(part).__name__}: {part.saves}" for part in op.basic_ops)
            raise RuntimeError(
                f"the forward of {type(op).__name__} must save for each of {parts} what that op's "
                f"own backward reads, {list(self.saved)} tensors ({saves}), got {list(saved)}"
            )


def num_saved(context: OperationContext) -> int:
    """How many tensors an op's forward saved, 0 if its backward will not run."""
    return len(context.to_save) if context.requires_grad else 0


class UserForward:
    """The forward ``run`` of a user's op over ops[start:stop], which checks what it returns.

    ``expected`` is what a fused op must give in the next call, None after it was checked.
    """

    def __init__(
        self, run: Callable[..., Any], op: Any, plan: Plan, wiring: Wiring, start: int, stop: int
    ) -> None:
        self._run, self._op, self._start = run, op, start
        self._output_dtype = _derived_dtype(plan, stop)
        self._needed = [  # which extra outputs are used outside the op, by basic op
            [wiring.needed_outside((i, k), start, stop) for k in range(basic.num_extra_outputs)]
            for i, basic in enumerate(op.basic_ops, start)
        ]
        self.expected: Expected | None = None

    def __call__(
        self, contexts: Sequence[OperationContext], x: Tensor, inputs: Sequence[Tensors]
    ) -> Any:
        """The output and the extra outputs; TypeError or RuntimeError for anything else."""
        returned = self._run(contexts, *_requiring_grad(contexts, x, inputs))
        name = type(self._op).__name__
        if not _is_tuple(returned, 2) or not isinstance(returned[0], Tensor):
            raise TypeError(
                f"the forward of {name} must return its output, one tensor, and the "
                f"extra outputs of each basic op, got {kind_of(returned)}"
            )
        output, outputs = returned
        if not torch.compiler.is_compiling() and (expected := self.expected) is not None:
            expected.check(self._op, output, contexts)  # else the next call is checked too
            self.expected = None
        if self._output_dtype not in (None, output.dtype):
            raise RuntimeError(
                f"{name} must give {self._output_dtype}, as it did when its plan was made, got "
                f"{output.dtype}; define its output_dtypes, which plans use"
            )
        wanted, got = [list(map(len, of_ops)) for of_ops in (self._needed, outputs)]
        if got != wanted:
            raise RuntimeError(
                f"{name} must return one sequence of extra outputs for each basic op, "
                f"of lengths {wanted}, got {got}"
            )
        for i, (needed, values) in enumerate(zip(self._needed, outputs, strict=True)):
            for slot, value in enumerate(values):
                if value is None and needed[slot]:
                    raise RuntimeError(
                        f"{name} must return extra output {slot} of op {self._start + i} "
                        f"({type(self._op.basic_ops[i]).__name__}), which is needed outside it, "
                        "got None"
                    )
        return returned


def _derived_dtype(plan: Plan, stop: int) -> torch.dtype | None:
    """The dtype of the output of ops[stop - 1] if that was derived, and ops after it are fused."""
    fused_after = any(f.start >= stop for f in plan.fusions)
    if not fused_after or declares_dtypes(type(plan.basic_ops[stop - 1])):
        return None
    name = plan.facts[stop].input.dtype
    return None if name == UNKNOWN else getattr(torch, name)


def _requiring_grad(
    contexts: Sequence[OperationContext], x: Tensor, inputs: Sequence[Tensors]
) -> tuple[Tensor, list[list[Tensor | None]]]:
    """The inputs of a user's op, with ``requires_grad`` where it has to give their gradients.

    Autograd records nothing inside a run, so those that earlier ops made do not have it.
    """
    compiling = torch.compiler.is_compiling()
    contexts[0].grad_input_shape = x.shape  # for its backward
    if compiling and not _COMPILES_REQUIRES_GRAD:
        for of_op, context in zip(inputs, contexts, strict=True):
            context.unmarked_extra = tuple([
                slot
                for slot, (t, needed) in enumerate(
                    zip(of_op, context.needs.extra_inputs, strict=True)
                )
                if t is not None and needed and t.is_floating_point()
            ])  # fmt: skip
        return x, [list(of_op) for of_op in inputs]
    if not compiling:
        for context in contexts:
            context.param_shapes = tuple([p.shape for p in context.parameters])

    def marked(t: Tensor | None, needed: bool) -> Tensor | None:
        if t is None or not needed or t.requires_grad or not t.is_floating_point():
            return t
        if not compiling:
            return t.detach().requires_grad_()
        # Compiled code must not return two views of one tensor.
        return t if any([t is other for other in contexts[0].operands]) else t.requires_grad_()

    extra = [
        [marked(t, needed) for t, needed in zip(of_op, context.needs.extra_inputs, strict=True)]
        for of_op, context in zip(inputs, contexts, strict=True)
    ]
    return marked(x, contexts[0].needs.input), extra  # type: ignore[return-value]


def user_backward(
    run: Callable[..., Any],
    name: str,
    sources: Sequence[Sequence[Output]],
    contexts: Sequence[OperationContext],
    grad: Tensor,
    grad_extra: Sequence[Tensors],
) -> Any:
    """What ``run``, the backward of a user's op, returns: gradients, or it is refused.

    ``sources`` are those of the op's extra inputs.
    """
    returned = run(contexts, grad, grad_extra)
    if not _is_tuple(returned, 3):
        raise TypeError(
            f"the backward of {name} must return the gradient of its input, and for "
            "each basic op those of its parameters and of its extra inputs, got "
            f"{kind_of(returned)}"
        )
    dx, params, extra = returned
    needs = [context.needs for context in contexts]
    wanted = [len(n.params) for n in needs], [len(n.extra_inputs) for n in needs]
    got = list(map(len, params)), list(map(len, extra))
    if got != wanted:
        raise RuntimeError(
            f"the backward of {name} must return gradients (None where there is none) "
            "for each basic op's parameters and extra inputs, numbering "
            f"{wanted[0]} and {wanted[1]}, got {got[0]} and {got[1]}"
        )
    if isinstance(dx, Tensor) and not torch.compiler.is_compiling():
        shape = contexts[0].forward.grad_input_shape
        if shape not in (None, dx.shape):
            raise RuntimeError(
                f"the backward of {name} must return a gradient of the shape of its input, "
                f"{tuple(shape)}, got {tuple(dx.shape)}"
            )
    for context, of_params, of_extra, of_op in zip(contexts, params, extra, sources, strict=True):
        for i, shape in enumerate(context.forward.param_shapes):
            g = of_params[i] if context.needs.params[i] else None
            if isinstance(g, Tensor) and not _sums_to(g.shape, shape):
                raise RuntimeError(
                    f"the backward of {name} must return a gradient of parameter {i} in its shape, "
                    f"{tuple(shape)}, or one that sums to it, got {tuple(g.shape)}"
                )
        for slot in context.forward.unmarked_extra:
            if of_extra[slot] is None and of_op[slot][0] >= 0:
                raise RuntimeError(
                    f"before torch 2.13 a compiled backward of {name} must "
                    f"return the gradient of extra input {slot}, which an earlier op of the "
                    "run made, got None; read ctx.needs, not requires_grad of the tensors, and "
                    "return zeros where nothing flows back"
                )
    return returned


def _sums_to(shape: torch.Size, target: torch.Size) -> bool:
    """Whether autograd sums a gradient of ``shape`` to ``target``, to which it broadcasts."""
    extra = len(shape) - len(target)
    pairs = zip(target, shape[max(extra, 0) :], strict=False)
    return extra >= 0 and all([size in (1, given) for size, given in pairs])


def _is_tuple(returned: Any, length: int) -> bool:
    return isinstance(returned, tuple | list) and len(returned) == length


def kind_of(returned: Any) -> str:
    """The types in what an op returned, for an error."""
    if isinstance(returned, tuple | list):
        kinds = ", ".join([kind_of(value) for value in returned])
        return f"[{kinds}]" if isinstance(returned, list) else f"({kinds})"
    return "a tensor" if isinstance(returned, Tensor) else repr(returned)
