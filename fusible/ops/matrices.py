"""Tensors ``[..., features]`` as the rows that matrix products take, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.fuser.memory import storage_id
from fusible.kernels.quantize.k_major import ScaledMatrix
from fusible.recipes.product import is_quantized


class _Rows:
    """Rows ``[rows, features]`` that are in no tensor of their dtype.

    To the checks of a linear they are its input; `GroupedKernels.prepare_rows` takes them.
    """

    is_nested = False

    def dim(self) -> int:
        """Two."""
        return 2


class GatheredRows(_Rows):
    """Rows ``source[index]``, which kernels gather while they read them: ``gathers``.

    ``source`` is ``[tokens, features]``, ``index`` int32 ``[rows]``; what it holds past the last
    group is not read. ``regather``: save the source, and gather once more for the weight gradient.
    """

    def __init__(self, source: Tensor, index: Tensor, regather: bool = False) -> None:
        self.source, self.index, self.regather = source, index, regather
        self.dtype, self.device = source.dtype, source.device
        self.shape = torch.Size((index.shape[0], source.shape[1]))


class QuantizedRows(_Rows):
    """Rows of ``dtype`` that are quantized, for one product of a forward that no backward follows.

    See ``rows_format``. The product takes the operand, whose memory then serves what follows.
    """

    def __init__(self, operand: ScaledMatrix, dtype: torch.dtype) -> None:
        self._operand: ScaledMatrix | None = operand
        self.dtype, self.shape, self.device = dtype, operand.data.shape, operand.data.device

    def take(self) -> ScaledMatrix:
        """The operand, once."""
        operand, self._operand = self._operand, None
        assert operand is not None
        return operand


def source_of(rows: Any) -> tuple[Tensor, Tensor | None]:
    """The source and the index of gathered rows; the rows and None if they are a tensor."""
    return (rows.source, rows.index) if isinstance(rows, GatheredRows) else (rows, None)


def as_2d(t: Tensor) -> Tensor:
    """``t`` as ``[rows, features]``; copied if no view gives that."""
    return t if t.dim() == 2 else t.reshape(-1, t.shape[-1])


def buffer_rows(buffer: Tensor | None) -> Tensor | None:
    """A caller's buffer, contiguous, as ``[rows, features]`` of the same memory."""
    return None if buffer is None else buffer.view(-1, buffer.shape[-1])


def matrix(t: Any, dtype: torch.dtype) -> Any:
    """``t`` as ``[rows, features]`` in ``dtype``, or as it is if it is quantized."""
    if isinstance(t, GatheredRows):
        return GatheredRows(cast(t.source, dtype), t.index, t.regather)
    return t if is_quantized(t) or isinstance(t, QuantizedRows) else cast(as_2d(t), dtype)


def restore_leading_dims(t: Tensor, like: Tensor) -> Tensor:
    """``t``, whose first dimension counts rows, with the leading dimensions of ``like``."""
    return t if like.dim() == 2 else t.view(*like.shape[:-1], *t.shape[1:])


def add_product(
    addend: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, *, in_place: bool = False
) -> Tensor:
    """``addend + alpha * a @ b`` for a ``[..., K]`` and b ``[K, N]``, in one product.

    Where the addend has another dtype than the product (a wider one, under autocast), in two steps.
    ``in_place``: written to the addend, which is then the result.
    """
    if addend.dtype != a.dtype:
        add = addend.add_ if in_place else addend.add
        return add(a @ b, alpha=alpha)
    rows = a.reshape(-1, a.shape[-1])
    as_matrix = addend.dim() == 2 or addend.is_contiguous()
    if in_place and as_matrix and storage_id(addend) != storage_id(rows):
        flat = addend.view(-1, b.shape[1])
        torch.addmm(flat, rows, b, alpha=alpha, out=flat)  # PyTorch does not count addmm_'s FLOPs
        return addend
    total = torch.addmm(addend.reshape(-1, b.shape[1]), rows, b, alpha=alpha)
    total = restore_leading_dims(total, a)
    return addend.copy_(total) if in_place else total
