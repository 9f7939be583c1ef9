"""Copies of the rows of groups to one buffer, one after another, and back.

The buffer is bytes: a header of int32 numbers, then lines of 128 bytes. ``header[0]`` is the most
lines that were ever needed, ``header[1 + i]`` the line where copy ``i`` begins and the one before
it ends. How many rows are copied is read on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import NotImplementedType

import torch
from torch import Tensor

from fusible.kernels.runtime.gpu import MAX_INDEX, multiprocessors, runs_kernels
from fusible.kernels.runtime.launch import launch
from fusible.kernels.saved_rows.spec import LINE, THREADS, TOGETHER, UNIT
from fusible.library import define

_MIN_SM = 80
_BLOCKS = 8  # thread blocks for each multiprocessor


def supports_copy(t: Tensor) -> bool:
    """Whether rows ``[M, F]`` can be copied: contiguous, of a multiple of 16 bytes each."""
    return (
        type(t) is Tensor  # a subclass may keep its values elsewhere
        and t.dim() == 2
        and t.is_contiguous()
        and t.shape[1] * t.element_size() % UNIT == 0
        and 0 < t.numel() * t.element_size() // UNIT < MAX_INDEX
    )


def _numbers(memory: Tensor, copies: int) -> tuple[Tensor, Tensor, int]:
    """The header and the units of a buffer, and how many lines its copies may use."""
    header, lines = memory[: header_size(copies)].view(torch.int32), memory[header_size(copies) :]
    return header, lines.view(-1, UNIT), len(lines) // LINE - 1


def header_size(copies: int) -> int:
    """The bytes of a header for so many copies, whole lines."""
    return -(-4 * (copies + 2) // LINE) * LINE


def _places(
    memory: Tensor, units: int, row_units: int, ends: Tensor, copy: int, copies: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The place of each unit in the buffer, whether it belongs to a group, and the line after the
    copy.

    Those of no group, and of a copy without room, are where the buffer ends.
    """
    header, parts, capacity = _numbers(memory, copies)
    start, own = header[1 + copy].long(), torch.arange(units, device=memory.device)
    count = ends[-1].long().clamp(max=units // row_units) * row_units
    stop = start + (count * UNIT + LINE - 1) // LINE
    fits = stop <= capacity
    place = torch.where(fits & (own < count), start * (LINE // UNIT) + own, len(parts) - 1)
    return place, own < count, stop


def save_rows(out: Tensor, rows: Tensor, ends: Tensor, copy: int, copies: int) -> None:
    """Copy ``rows`` up to the last of ``ends`` to the buffer ``out`` as its copy ``copy``.

    ``rows`` ``[M, F]`` are contiguous, of a multiple of 16 bytes each; ``ends`` int32 ``[E]``. The
    buffer has one line more than its copies may use. Rows that do not fit are not copied.
    """
    units = rows.view(torch.uint8).view(-1, UNIT)
    header, parts, _ = _numbers(out, copies)
    place, _, stop = _places(out, len(units), len(units) // len(rows), ends, copy, copies)
    header[2 + copy] = stop
    header[0] = torch.maximum(header[0], stop)
    parts.index_copy_(0, place, units)


def restore_rows(
    memory: Tensor, ends: Tensor, copy: int, copies: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The rows that `save_rows` copied, ``[M, F]``, with zeros past the last group.

    All bits of a copy that did not fit are set, which is NaN in every floating-point format.
    """
    restored = memory.new_empty(tuple(shape), dtype=dtype)
    _, parts, capacity = _numbers(memory, copies)
    units = restored.view(torch.uint8).view(-1, UNIT)
    place, inside, stop = _places(memory, len(units), len(units) // shape[0], ends, copy, copies)
    copied = torch.where(stop <= capacity, parts[place], 255)
    units.copy_(torch.where(inside[:, None], copied, 0))
    return restored


def _launch(
    name: str, memory: Tensor, rows: Tensor, ends: Tensor, copy: int, copies: int
) -> NotImplementedType | None:
    """Launch a kernel if it supports the arguments: ``save`` rows, or ``restore`` into them."""
    fits = memory.data_ptr() % UNIT == rows.data_ptr() % UNIT == 0
    fits = fits and ends.dtype == torch.int32 and ends.is_contiguous()
    if not (fits and runs_kernels(memory.device, _MIN_SM)):
        return NotImplemented
    header = header_size(copies)
    row_units = rows.shape[1] * rows.element_size() // UNIT
    most_blocks = _BLOCKS * multiprocessors(rows.device)
    blocks = min(most_blocks, -(-rows.shape[0] * row_units // (THREADS * TOGETHER)))
    lines = (memory.numel() - header) // LINE - 1
    sizes = rows.shape[0], row_units, ends.shape[0], copy, header, lines, blocks
    launch(f"saved_rows.copy.{name}", (), rows.device, memory, rows, ends, *sizes)
    return None


def _restore_on_cuda(
    memory: Tensor, ends: Tensor, copy: int, copies: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor | NotImplementedType:
    restored = memory.new_empty(tuple(shape), dtype=dtype)
    unsupported = _launch("restore", memory, restored, ends, copy, copies)
    return restored if unsupported is None else unsupported


save = define(save_rows, None, [partial(_launch, "save")])
restore = define(
    restore_rows,
    lambda memory, ends, copy, copies, shape, dtype: memory.new_empty(tuple(shape), dtype=dtype),
    [_restore_on_cuda],
)
