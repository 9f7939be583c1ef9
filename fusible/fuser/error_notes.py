"""The note on an error that names the op that raised it, by its path in the model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from fusible.fuser.context import OperationContext
from fusible.fuser.module_names import op_names
from fusible.fuser.schedule import Schedule, ScheduledStep

_NOTED = "raised in "


def note_failure(
    error: Exception,
    schedule: Schedule,
    step: ScheduledStep,
    contexts: Sequence[OperationContext] | None = None,
) -> None:
    """Tell all ops of the run that one failed, and note on the error, once, where that is.

    In a forward that is the outermost module whose call is running, in a backward, which has
    ``contexts``, the outermost one of the call in which the schedule was made.
    """
    if torch.compiler.is_compiling():
        return
    ops = schedule.plan.basic_ops
    for op in ops:
        op.on_failure()
    if any(note.startswith(_NOTED) for note in getattr(error, "__notes__", ())):
        return
    if contexts is None:
        root, what = outermost_call(), "forward"
    else:
        root, what = schedule.origin.module(), "backward"
        if step.is_users:
            saved = [len(context.saved_tensors) for context in contexts]
            what += f", for whose basic ops the forward saved {saved} tensors"
    where = _where(root, ops[step.start], ops[step.stop - 1])
    error.add_note(f"{_NOTED}{where} ({type(step.op).__name__}), {what}")


def note_op(error: Exception, op: Any) -> None:
    """Note on an error where in the outermost module whose call is running an op is."""
    error.add_note(f"{_NOTED}{_where(outermost_call(), op, op)} ({type(op).__name__})")


def _where(root: nn.Module | None, *ops: Any) -> str:
    """The path in ``root`` of the first op, or those of the first and the last one."""
    names = {} if root is None else op_names(root)
    first, last = (names.get(op, type(op).__name__) for op in ops)
    return first if first == last else f"{first} to {last}"


def outermost_call() -> nn.Module | None:
    """The outermost module whose call is on this thread's stack."""
    found: nn.Module | None = None
    # No list of frames: one that its own frame holds would keep what all of them hold.
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            caller = frame.f_locals.get("self")
            found = caller if isinstance(caller, nn.Module) else found
        frame = frame.f_back
    return found
