"""What a user's fused op has to give: what its basic ops would, found on fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from fusible.fuser.context import OperationContext

if TYPE_CHECKING:
    from fusible.fuser.node import Schedule
    from fusible.fuser.run import Run

logger = logging.getLogger(__name__)


class Expected(NamedTuple):
    """The output of the last basic op, and how many tensors each saves for its own backward.

    The latter is None where the fused op runs the backward too, which reads what it likes.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    saved: tuple[int, ...] | None

    def check(self, op: Any, output: Tensor, contexts: Sequence[OperationContext]) -> None:
        """Refuse a fused op's ``output``, or what it saved, if it is another.

        Raises:
            RuntimeError: naming the op.
        """
        parts = " + ".join(type(part).__name__ for part in op.basic_ops)
        got = output.shape, output.dtype, output.device
        if got != (self.shape, self.dtype, self.device):
            raise RuntimeError(
                f"{type(op).__name__} must return what {parts} would, {_told(*self[:3])}, got "
                f"{_told(*got)}"
            )
        saved = _numbers_saved(contexts)
        if self.saved is not None and saved != self.saved:
            saves = "; ".join(f"{type(part).__name__}: {part.saves}" for part in op.basic_ops)
            raise RuntimeError(
                f"the forward of {type(op).__name__} must save for each of {parts} what that op's "
                f"own backward reads, {list(self.saved)} tensors ({saves}), got {list(saved)}"
            )


def check_first(
    expected: dict[Any, Expected], op: Any, output: Tensor, contexts: Sequence[OperationContext]
) -> None:
    """Check what an op gave until it was once as it must be."""
    if not torch.compiler.is_compiling() and op in expected:
        expected[op].check(op, output, contexts)
        del expected[op]


def _numbers_saved(contexts: Sequence[OperationContext]) -> tuple[int, ...]:
    """How many tensors each op saved, 0 of one whose backward will not run."""
    return tuple([len(c.to_save) if c.requires_grad else 0 for c in contexts])


def _told(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{dtype} of shape {tuple(shape)} on {device}"


class _Recorded:
    """A basic op that keeps what its forward returns and saves."""

    def __init__(self, op: Any) -> None:
        self._op, self.casts_itself = op, op.casts_itself
        self.output: Any = None
        self.saved = 0

    def fuser_forward(self, contexts: list[OperationContext], *args: Any, **kwargs: Any) -> Any:
        """The op's own."""
        returned = self._op.fuser_forward(contexts, *args, **kwargs)
        self.output, self.saved = returned[0], _numbers_saved(contexts)[0]
        return returned


def expected_of(
    run: Run, schedule: Schedule, given: Sequence[Tensor], kwargs: Any
) -> Mapping[Any, Expected]:
    """What each user's fused op of a schedule's forward has to give for inputs and parameters.

    Empty where the basic ops cannot run on fake tensors, or refuse these inputs.
    """
    from fusible.fuser.node import run_forward

    users = [step for step in schedule.forward if step.is_users and step.op.is_fused_op]
    if not users:
        return {}
    recorded = [_Recorded(op) for op in run.ops]
    steps = run.alone(recorded, schedule.plan)
    alone = schedule._replace(forward=steps, fused_backward=range(len(steps)))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    count = 1 + run.num_extra_inputs
    try:
        fakes, fake_kwargs = tree_map_only(
            Tensor, lambda t: mode.from_tensor(t.detach()), ([*given[:count]], kwargs)
        )
        with mode, torch.no_grad():
            run_forward(run, alone, (*fakes, *given[count:]), fake_kwargs)
    except Exception as error:  # a kernel that takes no fake tensors, or bad inputs
        logger.debug("outputs of users' fused ops are not checked: %r", error)
        return {}
    joint = {id(f.op) for phase, f in schedule.plan.fusions if phase == "joint"}
    return {
        step.op: Expected(
            recorded[step.stop - 1].output.shape,
            recorded[step.stop - 1].output.dtype,
            recorded[step.stop - 1].output.device,
            None
            if id(step.op) in joint
            else tuple(r.saved for r in recorded[step.start : step.stop]),
        )
        for step in users
    }
