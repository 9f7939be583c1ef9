"""Grouped matrix products as ``torch.library`` ops: the contract, and PyTorch's implementations.

Rows of ``x`` are sorted by group; group e owns rows ``ends[e-1]`` to ``ends[e]``. ``ends`` is
int32 ``[E]`` on the device of ``x``, non-decreasing and at most the number of rows. Rows past the
last end (the tail) give zero output and take no part in any gradient; an empty group's weight and
bias gradients are exactly zero. No op here synchronises for BF16 on CUDA; FP16 and FP32 there run
the loop over groups that also serves the CPU, which reads ``ends`` on the host.

The loop is the oracle: any floating dtype, FP64 included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fusible.formulas import math_dtype
from fusible.kernels.grouped import bias_gradients
from fusible.kernels.grouped.ends import (
    check_alignment_definition,
    checking,
    checks_enabled,
    group_ends_definition,
    row_groups,
)
from fusible.kernels.runtime import flops
from fusible.kernels.runtime.library import define

__all__ = [
    "check_alignment",
    "checking",
    "checks_enabled",
    "group_ends",
    "grouped_dots",
    "grouped_mm",
    "grouped_mm_",
    "grouped_sum",
    "grouped_wgrad",
    "grouped_wgrad_",
    "row_groups",
    "side_by_side",
    "stacked",
]

_ALIGNMENT = 16  # bytes: what torch.nn.functional.grouped_mm asks of strides and pointers

# --- ends of groups -------------------------------------------------------------------------------


def group_ends_fake(split_sizes: Tensor, rows: int) -> Tensor:
    """End rows without values."""
    return split_sizes.new_empty(split_sizes.shape, dtype=torch.int32)


group_ends = define(
    "group_ends(Tensor split_sizes, SymInt rows) -> Tensor",
    group_ends_fake,
    group_ends_definition,
    group_ends_definition,
)

check_alignment = define(
    "check_alignment(Tensor split_sizes, int alignment) -> ()",
    lambda split_sizes, alignment: None,
    check_alignment_definition,
    check_alignment_definition,
)

# --- grouped_mm -----------------------------------------------------------------------------------


def _sizes(ends: Tensor) -> list[int]:
    """Rows of every group; reads ``ends`` on the host."""
    values = ends.tolist()
    return [max(end - start, 0) for start, end in zip([0, *values], values, strict=False)]


def _by_group(t: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """The rows of every group, then the tail."""
    return t.split_with_sizes([*sizes, t.shape[0] - sum(sizes)])


def _per_group(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """One matrix per group, from one 3-D tensor or from separate matrices."""
    return tensors[0].unbind(0) if tensors[0].dim() == 3 else tensors


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
    ``.to(dtype)``, deepcopy or ``load_state_dict(assign=True)`` they may lie anywhere.
    """
    if len(tensors) == 1:
        return tensors[0] if tensors[0].dim() == 3 else tensors[0].unsqueeze(0)
    together = side_by_side(tensors)
    return torch.stack(tuple(tensors)) if together is None else together


def _grouped_mm_loop(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
) -> Tensor:
    y = _grouped_mm_fake(x, w, ends, bias, row_scale, transpose_w)
    _grouped_mm_out_loop(y, x, w, ends, bias, row_scale, transpose_w)
    return y


def _grouped_mm_out_loop(
    y: Tensor,
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
) -> None:
    if w[0].dim() == 3:
        matrices: Sequence[Tensor] = (w[0] if transpose_w else w[0].mT).unbind(0)
    else:
        matrices = w if transpose_w else [matrix.t() for matrix in w]
    sizes = _sizes(ends)
    xs, ys = _by_group(x, sizes), _by_group(y, sizes)
    ys[-1].zero_()
    scales = None if row_scale is None else _by_group(row_scale, sizes)
    with torch.no_grad():
        for group, size in enumerate(sizes):
            if size == 0:
                continue
            if bias is None or scales is not None:
                torch.mm(xs[group], matrices[group], out=ys[group])
            else:
                torch.addmm(bias[group], xs[group], matrices[group], out=ys[group])
            if bias is not None and scales is not None:
                wide = math_dtype(x.dtype)
                shift = scales[group][:, None].to(wide) * bias[group].to(wide)
                ys[group].copy_(ys[group].to(wide) + shift)


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


def _grouped_mm_cuda(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
) -> Tensor:
    if x.dtype != torch.bfloat16:
        return _grouped_mm_loop(x, w, ends, bias, row_scale, transpose_w)
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
    # grouped_mm leaves the tail uninitialised, so it is selected away, never multiplied.
    group, live = row_groups(ends, rows)
    if bias is not None:
        shift = bias[group]
        if row_scale is not None:
            shift = shift.float() * row_scale[:, None].float()
        y = y + shift
    return torch.where(live[:, None], y, 0).to(x.dtype)


def _grouped_mm_fake(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
) -> Tensor:
    return x.new_empty(x.shape[0], w[0].shape[-1 if transpose_w else -2])


grouped_mm = define(
    "grouped_mm(Tensor x, Tensor[] w, Tensor ends, Tensor? bias, Tensor? row_scale, "
    "bool transpose_w) -> Tensor",
    _grouped_mm_fake,
    _grouped_mm_loop,
    _grouped_mm_cuda,
    flops.product,
)


def _grouped_mm_out_cuda(
    out: Tensor,
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
) -> None:
    # PyTorch's grouped product allocates its result.
    out.copy_(_grouped_mm_cuda(x, w, ends, bias, row_scale, transpose_w))


def _grouped_mm_out_fake(
    out: Tensor,
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
) -> None:
    return


grouped_mm_ = define(
    "grouped_mm_(Tensor(a!) out, Tensor x, Tensor[] w, Tensor ends, Tensor? bias, "
    "Tensor? row_scale, bool transpose_w) -> ()",
    _grouped_mm_out_fake,
    _grouped_mm_out_loop,
    _grouped_mm_out_cuda,
    flops.product_into,
)

# --- grouped_wgrad --------------------------------------------------------------------------------


def _grouped_wgrad_loop(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    dw = dy.new_zeros(ends.shape[0], dy.shape[1], x.shape[1])
    sizes = _sizes(ends)
    dys, xs = _by_group(dy, sizes), _by_group(x, sizes)
    with torch.no_grad():
        for group, size in enumerate(sizes):
            if size:
                torch.mm(dys[group].t(), xs[group], out=dw[group])
    return dw


def _grouped_wgrad_cuda(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if dy.dtype != torch.bfloat16:
        return _grouped_wgrad_loop(dy, x, ends)
    out_features, in_features = dy.shape[1], x.shape[1]
    if dy.shape[0] == 0:
        return dy.new_zeros(ends.shape[0], out_features, in_features)
    dw = F.grouped_mm(_pitched(dy).t(), _pitched(x), offs=ends)
    return dw[:, :out_features, :in_features].contiguous()


def _grouped_wgrad_fake(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return dy.new_empty(ends.shape[0], dy.shape[1], x.shape[1])


grouped_wgrad = define(
    "grouped_wgrad(Tensor dy, Tensor x, Tensor ends) -> Tensor",
    _grouped_wgrad_fake,
    _grouped_wgrad_loop,
    _grouped_wgrad_cuda,
    flops.wgrad,
)


def _grouped_wgrad_out(
    out: Sequence[Tensor], dy: Tensor, x: Tensor, ends: Tensor, accumulate: bool
) -> None:
    # Products into a wider buffer are taken in its dtype, so that nothing is rounded on the way.
    wide = torch.promote_types(out[0].dtype, dy.dtype)
    for target, part in zip(
        _per_group(out), _grouped_wgrad_loop(dy.to(wide), x.to(wide), ends), strict=True
    ):
        target.add_(part) if accumulate else target.copy_(part)


def _grouped_wgrad_out_cuda(
    out: Sequence[Tensor], dy: Tensor, x: Tensor, ends: Tensor, accumulate: bool
) -> None:
    if dy.dtype != torch.bfloat16:
        _grouped_wgrad_out(out, dy, x, ends, accumulate)
        return
    parts = _grouped_wgrad_cuda(dy, x, ends).unbind(0)
    targets = list(_per_group(out))
    (torch._foreach_add_ if accumulate else torch._foreach_copy_)(targets, parts)


def _grouped_wgrad_out_fake(
    out: Sequence[Tensor], dy: Tensor, x: Tensor, ends: Tensor, accumulate: bool
) -> None:
    return


grouped_wgrad_ = define(
    "grouped_wgrad_(Tensor(a!)[] out, Tensor dy, Tensor x, Tensor ends, bool accumulate) -> ()",
    _grouped_wgrad_out_fake,
    _grouped_wgrad_out,
    _grouped_wgrad_out_cuda,
    flops.wgrad_into,
)

# --- gradients of biases --------------------------------------------------------------------------


def _grouped_sum_fake(dy: Tensor, ends: Tensor, row_scale: Tensor | None) -> Tensor:
    return dy.new_empty(ends.shape[0], dy.shape[1])


grouped_sum = define(
    "grouped_sum(Tensor dy, Tensor ends, Tensor? row_scale) -> Tensor",
    _grouped_sum_fake,
    bias_gradients.grouped_sum_definition,
    bias_gradients.grouped_sum_cuda,
)


def _grouped_dots_fake(dy: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    return dy.new_empty(dy.shape[0], dtype=math_dtype(dy.dtype))


grouped_dots = define(
    "grouped_dots(Tensor dy, Tensor bias, Tensor ends) -> Tensor",
    _grouped_dots_fake,
    bias_gradients.grouped_dots_definition,
    bias_gradients.grouped_dots_cuda,
)
