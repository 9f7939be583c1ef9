"""Matrices of all groups, as one tensor ``[E, N, K]`` or E of ``[N, K]``: one from the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """One tensor ``[E, ...]`` of E that abut in memory, which it shares; None if they do not."""
    first = tensors[0]
    step = first.numel() * first.element_size()
    base = first.data_ptr()
    room = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size()
    if (
        first.is_contiguous()
        and room >= step * len(tensors)
        and all(
            t.data_ptr() == base + i * step and t.is_contiguous() for i, t in enumerate(tensors)
        )
    ):
        shape = (len(tensors), *first.shape)
        return first.as_strided(shape, (first.numel(), *first.stride()))
    return None


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """``[E, ...]`` from one such tensor or E separate ones; a view where these abut in memory.

    Parameters per expert are allocated side by side, so the common case copies nothing; after
    ``.to(dtype)``, deepcopy or ``load_state_dict(assign=True)`` they may be anywhere in memory.
    """
    if len(tensors) == 1:
        return tensors[0] if tensors[0].dim() == 3 else tensors[0].unsqueeze(0)
    together = side_by_side(tensors)
    return torch.stack(tuple(tensors)) if together is None else together


def write(out: Sequence[Tensor], values: Tensor, accumulate: bool) -> None:
    """Copy matrices ``[E, N, K]`` to ``out``, one tensor or one per group, or add them there."""
    if out[0].dim() == 3:
        out[0].add_(values) if accumulate else out[0].copy_(values)
    else:
        (torch._foreach_add_ if accumulate else torch._foreach_copy_)(list(out), values.unbind(0))
