"""Memory of the caller for a run's output and for its input's gradient, by ``op_kwargs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

NAMES = ("output", "grad_input")


def take(
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
    wanted = (
        f"the caller's {name!r} must be a contiguous {dtype} tensor of shape {tuple(shape)} on "
        f"{x.device} without requires_grad, got "
    )
    if not isinstance(buffer, Tensor):
        raise ValueError(f"{wanted}{type(buffer).__name__}")
    if buffer.shape != tuple(shape) or buffer.dtype != dtype or buffer.device != x.device:
        raise ValueError(
            f"{wanted}{buffer.dtype} of shape {tuple(buffer.shape)} on {buffer.device}"
        )
    if not buffer.is_contiguous():
        raise ValueError(f"{wanted}strides {buffer.stride()}")
    if buffer.requires_grad:
        raise ValueError(f"{wanted}requires_grad=True; give buffer.detach()")
    return buffer.detach()


def written(buffer: Tensor) -> Tensor:
    """``buffer``, which a kernel is about to write: autograd shall see that it changes."""
    increment_version(buffer)
    return buffer
