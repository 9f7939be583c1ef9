"""The grouped products on CUDA by PyTorch's own, of BF16 operands.

FP8 operands are dequantized to BF16. Each returns NotImplemented for operands of another dtype, and
where PyTorch would read the sizes of groups on the host and `portable` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NotImplementedType

import torch
import torch.nn.functional as F
from torch import Tensor

from fusible import versions
from fusible.kernels.grouped import portable
from fusible.kernels.grouped.definitions import dequantized
from fusible.kernels.grouped.groups import row_groups
from fusible.kernels.runtime.gpu import sm_of
from fusible.kernels.stacking import stacked

_ALIGNMENT = 16  # bytes, of strides and pointers, which torch.nn.functional.grouped_mm requires


def _is_preferred(t: Tensor) -> bool:
    """Whether PyTorch's product reads sizes on the device, or no Triton could take its place."""
    if t.device.type != "cuda" or torch.version.hip or not versions.has_triton():
        return True
    return portable.pytorch_reads_on_device("bfloat16", sm_of(t.device))


def _pitched(t: Tensor) -> Tensor:
    """``t`` with a unit last stride, and pitch, pointer and last dimension fit for grouped_mm.

    The last dimension is padded with zeros where its size is not a multiple of 16 bytes.
    """
    unit = _ALIGNMENT // t.element_size()
    if short := -t.shape[-1] % unit:
        return F.pad(t, (0, short))
    fits = t.stride(-1) == 1 and all(s % unit == 0 for s in t.stride()[:-1])
    # An expanded gradient has stride 0, which grouped_mm refuses.
    fits = fits and t.stride(-2) >= t.shape[-1] and t.data_ptr() % _ALIGNMENT == 0
    return t if fits else t.clone(memory_format=torch.contiguous_format)


def grouped_mm(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    transpose_w: bool = False,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    *,
    out: Tensor | None = None,
    zero_tail: bool = True,
    reads_ahead: bool = False,
) -> Tensor | NotImplementedType:
    """`definitions.grouped_mm`."""
    if x_scale is not None and w_scale is not None:
        x, w = dequantized(x, x_scale).bfloat16(), [dequantized(stacked(w), w_scale).bfloat16()]
        if not _is_preferred(x):
            return portable.grouped_mm(x, w, ends, bias, row_scale, transpose_w, out=out)
    if x.dtype != torch.bfloat16 or not _is_preferred(x):
        return NotImplemented
    weight = stacked(w)
    rows, out_features = x.shape[0], weight.shape[2 if transpose_w else 1]
    if rows == 0:
        return x.new_zeros(rows, out_features)
    x = _pitched(x)
    unit = _ALIGNMENT // x.element_size()
    if short := -weight.shape[1] % unit:  # the side that _pitched does not pad
        weight = F.pad(weight, (0, 0, 0, short))
    weight = _pitched(weight) if weight.stride(1) != 1 else _pitched(weight.mT).mT
    y = F.grouped_mm(x, weight if transpose_w else weight.mT, offs=ends)[:, :out_features]
    # grouped_mm leaves the tail uninitialised: torch.where, since a product with 0 may give NaN.
    group, live = row_groups(ends, rows)
    if bias is not None:
        shift = bias[group]
        if row_scale is not None:
            shift = shift.float() * row_scale[:, None].float()
        y = y + shift
    return torch.where(live[:, None], y, 0).to(x.dtype)


def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype | None = None,
    dy_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> Tensor | NotImplementedType:
    """`definitions.grouped_wgrad`, except that it rounds to BF16 before ``out_dtype``."""
    if dy_scale is not None and x_scale is not None:
        dy, x = dequantized(dy, dy_scale).bfloat16(), dequantized(x, x_scale).bfloat16()
        if not _is_preferred(x):
            return portable.grouped_wgrad(dy, x, ends, out_dtype)
    if dy.dtype != torch.bfloat16 or not _is_preferred(dy):
        return NotImplemented
    out_features, in_features = dy.shape[1], x.shape[1]
    if dy.shape[0] == 0:
        return dy.new_zeros(ends.shape[0], out_features, in_features, dtype=out_dtype)
    dw = F.grouped_mm(_pitched(dy).t(), _pitched(x), offs=ends)
    return dw[:, :out_features, :in_features].contiguous().to(out_dtype or dy.dtype)
