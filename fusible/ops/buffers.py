"""Memory of the caller for a run's output and for its input's gradient, by ``op_kwargs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusible.arguments import described

NAMES = ("output", "grad_input")


def checked_buffer(
    kwargs: dict[str, Any], name: str, shape: Sequence[int], dtype: torch.dtype, x: Tensor
) -> Tensor | None:
    """The caller's buffer of a linear transformation of ``x``, detached, or None without one.

    Raises:
        ValueError: it is no contiguous tensor of this shape and dtype on the device of ``x`` that
            needs no gradient. That it shares no memory with what the run reads, the run checks.
        RuntimeError: while compiling, where results have no address.
    """
    buffer = kwargs.get(name)
    if buffer is None:
        return None
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"op_kwargs must not give {name!r} under torch.compile, which allocates "
            "results itself; copy the result, or call the module uncompiled"
        )
    if (
        isinstance(buffer, Tensor)
        and (buffer.shape, buffer.dtype, buffer.device) == (tuple(shape), dtype, x.device)
        and buffer.is_contiguous()
        and not buffer.requires_grad
    ):
        return buffer.detach()
    got = described(buffer)
    if isinstance(buffer, Tensor):
        got += f" with strides {buffer.stride()} and requires_grad={buffer.requires_grad}"
    raise ValueError(
        f"the caller's {name!r} must be a contiguous {dtype} tensor of shape {tuple(shape)} on "
        f"{x.device} without requires_grad, got {got}; give buffer.detach() if it has the latter"
    )


def marked_written(buffer: Tensor) -> Tensor:
    """``buffer``, which a kernel is about to write: autograd shall see that it changes."""
    increment_version(buffer)
    return buffer
