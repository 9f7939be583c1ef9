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


def note_place(
    error: Exception,
    schedule: Schedule,
    step: ScheduledStep,
    contexts: Sequence[OperationContext] | None = None,
) -> None:
    """Note on an error where the op of a step is in the model; once an error.

    In a forward that is the outermost module whose call is running, in a backward the outermost one
    of the call in which the schedule was made.

    Args:
        error: what the op raised.
        schedule: that of the step.
        step: of the forward or of the backward.
        contexts: those of the op in its backward, None in its forward.
    """
    if torch.compiler.is_compiling():
        return
    if any(note.startswith(_NOTED) for note in getattr(error, "__notes__", ())):
        return
    names = _names_in(outermost_call() if contexts is None else schedule.diagnostics.root())
    parts = [schedule.plan.basic_ops[i] for i in (step.start, step.stop - 1)]
    first, last = (names.get(part, type(part).__name__) for part in parts)
    where = first if first == last else f"{first} to {last}"
    what = "forward" if contexts is None else "backward"
    if contexts is not None and step.is_users:
        saved = [len(context.saved_tensors) for context in contexts]
        what += f", for whose basic ops the forward saved {saved} tensors"
    error.add_note(f"{_NOTED}{where} ({type(step.op).__name__}), {what}")


def note_op(error: Exception, op: Any) -> None:
    """Note on an error where in the outermost module whose call is running an op is."""
    names = _names_in(outermost_call())
    error.add_note(f"{_NOTED}{names.get(op, type(op).__name__)} ({type(op).__name__})")


def _names_in(root: nn.Module | None) -> dict[Any, str]:
    return {} if root is None else op_names(root)


def outermost_call() -> nn.Module | None:
    """The outermost module whose call is on this thread's stack."""
    found: nn.Module | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            caller = frame.f_locals.get("self")
            found = caller if isinstance(caller, nn.Module) else found
        frame = frame.f_back
    return found
