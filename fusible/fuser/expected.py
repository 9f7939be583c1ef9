"""Checks that a user's fused op gives what its basic ops give on fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from fusible.fuser.context import call_fuser_forward
from fusible.fuser.fakes import restoring
from fusible.fuser.node import run_forward
from fusible.fuser.schedule import Kwargs, Schedule, unfused
from fusible.fuser.user_steps import Expected, UserForward, num_saved

logger = logging.getLogger(__name__)


def expect_outputs(schedule: Schedule, operands: Sequence[Tensor], kwargs: Kwargs | None) -> None:
    """Have each user's fused op in a schedule's forward check its outputs in the next call.

    None is checked where the basic ops cannot run on fake tensors, or refuse these inputs. Of a
    schedule that is split, the schedules of its parts do it.
    """
    users = [step for step in schedule.forward if step.is_users and step.op.is_fused_op]
    if not users or schedule.split is not None:
        return
    ran: list[tuple[Tensor, int]] = []  # of each basic op, its output and how many tensors it saved

    def recorded(op: Any) -> Callable[..., Any]:
        def forward(contexts: list[Any], *args: Any) -> Any:
            returned = call_fuser_forward(op, contexts, *args)
            ran.append((returned[0], num_saved(contexts[0])))
            return returned

        return forward

    alone = unfused(schedule, recorded)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    count = 1 + len(schedule.wiring.names)
    try:
        fakes, fake_kwargs = tree_map_only(
            Tensor, lambda t: mode.from_tensor(t.detach()), ([*operands[:count]], kwargs)
        )
        parts = [part for op in schedule.plan.basic_ops for part in op.modules()]
        with restoring(parts, mode, all_attributes=True), torch.no_grad():
            run_forward(alone, (*fakes, *operands[count:]), fake_kwargs)
    except Exception as error:  # a kernel that takes no fake tensors, or bad inputs
        logger.debug("outputs of users' fused ops are not checked: %r", error)
        return
    joint = {id(f.built) for f in schedule.plan.of_phase("joint")}
    for op, run, start, stop, *_ in users:
        assert isinstance(run, UserForward)
        output, _ = ran[stop - 1]
        saved = None if id(op) in joint else tuple([count for _, count in ran[start:stop]])
        run.expected = Expected(output.shape, output.dtype, output.device, saved)
