"""Gradients of the bias of a grouped product and of the row scales that multiply the bias."""

from __future__ import annotations

from types import NotImplementedType

import torch
import torch.nn.functional as F
from torch import Tensor

from fusible.formulas import math_dtype
from fusible.kernels.grouped.groups import row_groups
from fusible.kernels.moe.cuda import rows_spec, supports_row_copies
from fusible.kernels.runtime.launch import aligned, launch
from fusible.recipes.blocks import gather_rows

_MAX_GRID_Y = 2**16


def grouped_sum(
    dy: Tensor, ends: Tensor, row_scale: Tensor | None = None, index: Tensor | None = None
) -> Tensor:
    """The bias gradient: the sum of each group's rows of dy, times row_scale, ``[E, N]``.

    With ``index``, int32 ``[M]``, the rows are ``dy[index]``.
    """
    wide = gather_rows(dy, index, ends).to(math_dtype(dy.dtype))
    if row_scale is not None:
        wide = wide * row_scale[:, None].to(wide.dtype)
    offsets = F.pad(ends, (1, 0)).long()
    # unsafe: the checks, which hold by construction, would read the offsets on the host.
    sums = torch.segment_reduce(wide, "sum", offsets=offsets, axis=0, unsafe=True, initial=0)
    return sums.to(dy.dtype)


def grouped_dots(dy: Tensor, bias: Tensor, ends: Tensor, index: Tensor | None = None) -> Tensor:
    """The gradient of a bias's row scales: ``sum(dy * bias[group])``, zero in the tail, ``[M]``.

    In FP32, of FP64 in FP64. With ``index``, int32 ``[M]``, the rows are ``dy[index]``.
    """
    wide, dy = math_dtype(dy.dtype), gather_rows(dy, index, ends)
    group, live = row_groups(ends, dy.shape[0])
    dots = (dy.to(wide) * bias.to(wide)[group]).sum(-1)
    return torch.where(live, dots, 0)


def _takes_bias(dy: Tensor, ends: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels of a bias's gradients support the rows."""
    return supports_row_copies(dy, ends[:, None], *others) and ends.shape[0] < _MAX_GRID_Y


def grouped_sum_cuda(
    dy: Tensor, ends: Tensor, row_scale: Tensor | None = None, index: Tensor | None = None
) -> Tensor | NotImplementedType:
    """`grouped_sum` by a kernel."""
    if not _takes_bias(dy, ends, row_scale):
        return NotImplemented
    dy, ends = aligned(dy), ends.contiguous()
    row_scale = None if row_scale is None else row_scale.contiguous()
    out = dy.new_empty(ends.shape[0], dy.shape[1])
    spec = rows_spec(dy, ends[:, None], row_scale, indexed=index is not None)
    arguments = dy, ends, row_scale, index, out, ends.shape[0]
    launch("moe.bias.group_sums", (spec,), dy.device, *arguments)
    return out


def grouped_dots_cuda(
    dy: Tensor, bias: Tensor, ends: Tensor, index: Tensor | None = None
) -> Tensor | NotImplementedType:
    """`grouped_dots` by a kernel."""
    if dy.dtype != bias.dtype or not _takes_bias(dy, ends):
        return NotImplemented
    dy, bias, ends = aligned(dy), aligned(bias), ends.contiguous()
    rows = dy.shape[0] if index is None else index.shape[0]
    out = dy.new_empty(rows, dtype=torch.float32)
    spec = rows_spec(dy, ends[:, None], None, indexed=index is not None)
    arguments = dy, ends, bias, index, out, rows, ends.shape[0]
    launch("moe.bias.group_dots", (spec,), dy.device, *arguments)
    return out
