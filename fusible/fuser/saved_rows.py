"""A pool for saved rows: of many layers in one buffer, only those that are in use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible.fuser.context import OperationContext
from fusible.fuser.tracing import hooks_hold_saved
from fusible.kernels.saved_rows import header_size, restore, save, supports_copy
from fusible.kernels.saved_rows.spec import LINE

_COPIES = 4096  # of a step


class SavedRowsPool:
    """Memory for the rows that grouped linears and MLPs save for the backward.

    Tensors of rows ``[M, F]`` have room for the most rows that a routing can give, which a CUDA
    graph cannot change. ``split_sizes`` say on the device how many of them are in use. Inside
    ``with pool:`` a forward copies only these to the pool, of a linear's input and of an MLP's
    pre-activation, one after another, and its backward copies them back. So saved rows take the
    memory of those in use, and the copies take time. Nothing synchronises with the host. Outputs
    and gradients have the same bits as without a pool.

    ::

        pool = fusible.SavedRowsPool(2 << 30)
        for tokens in batches:  # or in a captured CUDA graph
            with pool:
                loss = model(tokens)
            loss.backward()
        assert not pool.overflowed()  # synchronises

    ``with pool:`` begins a step. All forwards of a step are inside, and their backwards run before
    the pool is entered again; a later backward raises RuntimeError. Rows that do not fit are
    restored as NaN, so that gradients are NaN; `overflowed` tells, and `peak_bytes` is the size
    that the pool must have.

    Not in the pool, but saved as without one, are: inputs of linears under a recipe (the
    pre-activation is in the pool), inputs that the backward computes again, inputs of activations
    that are not fused, tensors on other devices, tensors after the 4096th of a step, rows whose
    size is no multiple of 16 bytes, and everything that ``torch.compile`` traces or that
    ``saved_tensors_hooks`` take, as those of ``torch.utils.checkpoint`` do.

    Args:
        num_bytes: Size of the buffer, which is allocated here.
        device: Its device, by default the current CUDA device, or the CPU without one.

    Raises:
        ValueError: ``num_bytes`` is not positive.
    """

    def __init__(self, num_bytes: int, device: torch.device | str | None = None) -> None:
        if num_bytes < 1:
            raise ValueError(f"num_bytes must be positive, got {num_bytes}")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._lines = -(-num_bytes // LINE)
        header = header_size(_COPIES)
        size = header + (self._lines + 1) * LINE
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._memory[:header].zero_()
        self._step = self._used = 0
        self._is_entered = False

    def __enter__(self) -> SavedRowsPool:
        if getattr(_active, "pool", None) is not None or self._is_entered:
            raise RuntimeError("a SavedRowsPool must not be entered inside another, or twice")
        self._step, self._used = self._step + 1, 0
        _active.pool, self._is_entered = self, True
        return self

    def __exit__(self, *_: object) -> None:
        _active.pool, self._is_entered = None, False

    def peak_bytes(self) -> int:
        """Return the most bytes that the rows of a step have needed; synchronises."""
        return int(self._memory[:4].view(torch.int32)) * LINE

    def overflowed(self) -> bool:
        """Return whether the rows of a step did not fit; synchronises."""
        return self.peak_bytes() > self._lines * LINE

    def save(self, context: OperationContext) -> RestoreByPlace:
        """Copy what an op has saved of its rows."""
        ends = context.row_ends
        found: RestoreByPlace = {}
        for place in () if ends is None else context.grouped_rows:
            rows = context.to_save[place]
            fits = rows is not None and rows.device == self._memory.device and supports_copy(rows)
            if rows is None or ends is None or not fits or self._used == _COPIES:
                continue
            save(self._memory, rows, ends, self._used, _COPIES)
            copy = ends, self._used, _COPIES, rows.shape, rows.dtype
            found[place] = partial(self._restore, self._step, *copy)
            self._used += 1
        return found

    def _restore(self, step: int, *copy: Any) -> Tensor:
        """The rows of a step that is still this one."""
        if step != self._step:
            raise RuntimeError(
                "a backward must run before its SavedRowsPool is entered again, got one of step "
                f"{step} in step {self._step}; enter the pool once around all forwards of a step"
            )
        return restore(self._memory, *copy)


RestoreByPlace = dict[int, Callable[[], Tensor]]
"""What gives the rows in a pool, by place among what an op saves."""


_active = threading.local()


def active_pool() -> SavedRowsPool | None:
    """The pool in which this thread saves; None where hooks take what is saved, or it is traced."""
    pool = None if torch.compiler.is_compiling() else getattr(_active, "pool", None)
    return None if pool is None or hooks_hold_saved() else pool


def without_rows(context: OperationContext, rows: RestoreByPlace) -> list[Tensor | None]:
    """The tensors that an op saves, None for those in a pool."""
    return [None if i in rows else t for i, t in enumerate(context.to_save)]


def with_rows(saved: tuple[Tensor | None, ...], rows: RestoreByPlace) -> tuple[Tensor | None, ...]:
    """The tensors that an op has saved, with those from the pool."""
    if not rows:
        return saved
    return tuple([rows[i]() if i in rows else t for i, t in enumerate(saved)])
