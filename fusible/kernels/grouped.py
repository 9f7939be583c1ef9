"""Grouped matrix products as ``torch.library`` ops: the contract, and PyTorch's implementations.

Rows of ``x`` are sorted by group; group e owns rows ``ends[e-1]`` to ``ends[e]``. ``ends`` is
int32 ``[E]`` on the device of ``x``, non-decreasing and at most the number of rows. Rows past the
last end (the tail) give zero output and take no part in any gradient; an empty group's weight and
bias gradients are exactly zero. No op here synchronises for BF16 on CUDA; FP16 and FP32 there run
the loop over groups that also serves the CPU, which reads ``ends`` on the host.

The loop is the oracle: any floating dtype, FP64 included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from fusible.arguments import check_bools
from fusible.formulas import math_dtype
from fusible.kernels import flops
from fusible.kernels.library import define

_ALIGNMENT = 16  # bytes: what torch.nn.functional.grouped_mm asks of strides and pointers

_checking = False


@contextmanager
def checking(enabled: bool = True) -> Iterator[None]:
    """Verify split sizes that live on a device too, at the price of one synchronisation a call.

    Outside this scope, values on a device are never read by the host: negative sizes count as
    zero and rows beyond those given are not touched. Inside, they raise ``ValueError`` as host
    values do. The switch is one for the process.
    """
    check_bools("checking", enabled=enabled)
    global _checking  # noqa: PLW0603 - a debugging switch, one for the process
    outer, _checking = _checking, enabled
    try:
        yield
    finally:
        _checking = outer


def checks_enabled() -> bool:
    """Whether split sizes on a device are to be verified (`checking`)."""
    return _checking


# --- group_ends -----------------------------------------------------------------------------------


def _group_ends(split_sizes: Tensor, rows: int) -> Tensor:
    if _checking or split_sizes.device.type == "cpu":
        sizes = split_sizes.tolist()
        if min(sizes) < 0:
            group = min(range(len(sizes)), key=sizes.__getitem__)
            raise ValueError(
                f"split_sizes must not be negative, got {sizes[group]} for group {group}; "
                "give every group the number of its rows, 0 for none"
            )
        if sum(sizes) > rows:
            raise ValueError(
                f"split_sizes must sum to at most the {rows} rows of the input, got {sum(sizes)}; "
                "give as many rows as the groups hold"
            )
        return split_sizes.cumsum(0, dtype=torch.int32)
    return split_sizes.clamp(min=0).cumsum(0).clamp(max=rows).to(torch.int32)


def _check_alignment(split_sizes: Tensor, alignment: int) -> None:
    if _checking or split_sizes.device.type == "cpu":
        wrong = [size for size in split_sizes.tolist() if size % alignment]
        if wrong:
            raise ValueError(
                f"split_sizes must be multiples of {alignment}, as split_alignment promises, got "
                f"{wrong[0]}; pad the groups or do not promise it"
            )


def group_ends_fake(split_sizes: Tensor, rows: int) -> Tensor:
    """End rows without values."""
    return split_sizes.new_empty(split_sizes.shape, dtype=torch.int32)


define(
    "group_ends(Tensor split_sizes, SymInt rows) -> Tensor",
    group_ends_fake,
    _group_ends,
    _group_ends,
)

define(
    "check_alignment(Tensor split_sizes, int alignment) -> ()",
    lambda split_sizes, alignment: None,
    _check_alignment,
    _check_alignment,
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


def row_groups(ends: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Group of every row (tail rows: the last group), and whether the row is in use; no sync."""
    row = torch.arange(rows, device=ends.device, dtype=torch.int32)
    group = torch.searchsorted(ends, row, right=True).clamp_(max=ends.shape[0] - 1)
    return group, row < ends[-1]


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


define(
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


define(
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


define(
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


define(
    "grouped_wgrad_(Tensor(a!)[] out, Tensor dy, Tensor x, Tensor ends, bool accumulate) -> ()",
    _grouped_wgrad_out_fake,
    _grouped_wgrad_out,
    _grouped_wgrad_out_cuda,
    flops.wgrad_into,
)

# --- grouped_sum ----------------------------------------------------------------------------------


def grouped_sum_definition(dy: Tensor, ends: Tensor, row_scale: Tensor | None) -> Tensor:
    """The bias gradient: the sum of each group's rows of dy, times row_scale, ``[E, N]``."""
    wide = dy.to(math_dtype(dy.dtype))
    if row_scale is not None:
        wide = wide * row_scale[:, None].to(wide.dtype)
    offsets = F.pad(ends, (1, 0)).long()
    # unsafe: its checks would read the offsets on the host; they hold by construction.
    sums = torch.segment_reduce(wide, "sum", offsets=offsets, axis=0, unsafe=True, initial=0)
    return sums.to(dy.dtype)


def _grouped_sum_fake(dy: Tensor, ends: Tensor, row_scale: Tensor | None) -> Tensor:
    return dy.new_empty(ends.shape[0], dy.shape[1])


# CUDA's own implementations of this op and the next are in kernels.moe.launch.
define(
    "grouped_sum(Tensor dy, Tensor ends, Tensor? row_scale) -> Tensor",
    _grouped_sum_fake,
    grouped_sum_definition,
)

# --- grouped_dots ---------------------------------------------------------------------------------


def grouped_dots_definition(dy: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """The gradient of a bias's row scales: ``sum(dy * bias[group])``, zero in the tail, ``[M]``.

    In FP32, of FP64 in FP64.
    """
    wide = math_dtype(dy.dtype)
    group, live = row_groups(ends, dy.shape[0])
    dots = (dy.to(wide) * bias.to(wide)[group]).sum(-1)
    return torch.where(live, dots, 0)


def _grouped_dots_fake(dy: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    return dy.new_empty(dy.shape[0], dtype=math_dtype(dy.dtype))


define(
    "grouped_dots(Tensor dy, Tensor bias, Tensor ends) -> Tensor",
    _grouped_dots_fake,
    grouped_dots_definition,
)

grouped_mm = torch.ops.fusible.grouped_mm.default
grouped_mm_ = torch.ops.fusible.grouped_mm_.default
grouped_wgrad = torch.ops.fusible.grouped_wgrad.default
grouped_wgrad_ = torch.ops.fusible.grouped_wgrad_.default
grouped_sum = torch.ops.fusible.grouped_sum.default
grouped_dots = torch.ops.fusible.grouped_dots.default
group_ends = torch.ops.fusible.group_ends.default
check_alignment = torch.ops.fusible.check_alignment.default
