"""Tensors ``[..., features]`` as the rows that matrix products take, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.recipes.product import is_quantized


def as_2d(t: Tensor) -> Tensor:
    """``t`` as ``[rows, features]``; copied if no view gives that."""
    return t if t.dim() == 2 else t.reshape(-1, t.shape[-1])


def as_rows(buffer: Tensor | None) -> Tensor | None:
    """A caller's buffer, contiguous, as ``[rows, features]`` of the same memory."""
    return None if buffer is None else buffer.view(-1, buffer.shape[-1])


def matrix(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` as ``[rows, features]`` in ``dtype``, or as it is if it is quantized."""
    return t if is_quantized(t) else cast(as_2d(t), dtype)


def with_rows_of(t: Tensor, like: Tensor) -> Tensor:
    """``t``, whose first dimension counts rows, with the leading dimensions of ``like``."""
    return t if like.dim() == 2 else t.view(*like.shape[:-1], *t.shape[1:])
