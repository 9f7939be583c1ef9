"""What an error says of the op that raised it: where it is in the model."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fusible.fuser.stand_ins import op_names

if TYPE_CHECKING:
    from fusible.fuser.run import Run

_NOTED = "raised in "


def note_place(error: Exception, run: Run, op: Any, start: int, stop: int, what: str) -> None:
    """Note on an error where ``op``, which runs ``run.ops[start:stop]``, is; once an error."""
    if torch.compiler.is_compiling():
        return
    if any(note.startswith(_NOTED) for note in getattr(error, "__notes__", ())):
        return
    names = op_names(_outermost(run.ops[start]))
    first, last = (
        names.get(part, type(part).__name__) for part in (run.ops[start], run.ops[stop - 1])
    )
    where = first if first == last else f"{first} to {last}"
    error.add_note(f"{_NOTED}{where} ({type(op).__name__}), {what}")


def _outermost(op: Any) -> nn.Module:
    """The outermost module whose call this is; in a backward, the largest that contains the op."""
    found: nn.Module = op
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            caller = frame.f_locals.get("self")
            found = caller if isinstance(caller, nn.Module) else found
        frame = frame.f_back
    return _largest(op) if found is op else found


def _largest(op: Any) -> nn.Module:
    sizes = {op: 0}
    for module in gc.get_objects():
        if issubclass(type(module), nn.Module) and "_modules" in vars(module):
            parts = list(module.modules())
            if any(op in getattr(part, "basic_ops", ()) for part in parts):
                sizes[module] = len(parts)
    return max(sizes, key=sizes.__getitem__)
