"""The grouped products on CUDA: which kernels run a call, chosen by what they take.

Ours on SM90, of BF16 and FP16 (`fusible.kernels.sm90.limits`); PyTorch's grouped product of BF16
elsewhere; else the loop of `definitions`, which reads the end rows of the groups on the host. An
activation that no epilogue has follows its product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusible.kernels import sm90
from fusible.kernels.glu import Glu
from fusible.kernels.grouped import definitions, pytorch
from fusible.kernels.grouped.groups import checks_enabled, group_ends_definition


def group_ends(split_sizes: Tensor, rows: int) -> Tensor:
    """`group_ends_definition`; the kernel does not check sizes."""
    if checks_enabled() or not sm90.supports(split_sizes.device, torch.bfloat16):
        return group_ends_definition(split_sizes, rows)
    return sm90.group_ends(split_sizes, rows)


def grouped_mm(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
) -> Tensor:
    """`definitions.grouped_mm`."""
    if sm90.supports(x.device, x.dtype, *w[0].shape[-2:]):
        return sm90.grouped_mm(x, w, ends, bias, row_scale, transpose_w)
    chosen = pytorch if x.dtype == torch.bfloat16 else definitions
    return chosen.grouped_mm(x, w, ends, bias, row_scale, transpose_w)


def grouped_mm_(
    out: Tensor,
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
) -> None:
    """`definitions.grouped_mm_`."""
    if sm90.supports(x.device, x.dtype, *w[0].shape[-2:]):
        sm90.grouped_mm_(out, x, w, ends, bias, row_scale, transpose_w)
    else:  # PyTorch's grouped product allocates its result
        out.copy_(grouped_mm(x, w, ends, bias, row_scale, transpose_w))


def grouped_glu(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    scales: Tensor | None,
    glu: Glu,
    bias: Tensor | None,
    save_preact: bool,
) -> tuple[Tensor, Tensor]:
    """`definitions.grouped_glu`."""
    features = w[0].shape[-2]
    if sm90.supports(x.device, x.dtype, *w[0].shape[-2:]) and sm90.limits.takes_glu(
        glu.activation, glu.interleave, features
    ):
        return sm90.grouped_glu(x, w, ends, scales, glu, bias, save_preact)
    return definitions.grouped_glu(x, w, ends, scales, glu, bias, save_preact, grouped_mm)


def grouped_dglu(
    dy: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    preact: Tensor,
    scales: Tensor,
    glu: Glu,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`definitions.grouped_dglu`; ``overwrite`` lets the gradient take the memory of ``preact``."""
    if sm90.supports(dy.device, dy.dtype, *w[0].shape[-2:]) and sm90.limits.takes_glu(
        glu.activation, glu.interleave, 2 * w[0].shape[-1]
    ):
        return sm90.grouped_dglu(dy, w, ends, preact, scales, glu, overwrite)
    return definitions.grouped_dglu(dy, w, ends, preact, scales, glu, grouped_mm)


def grouped_wgrad(dy: Tensor, x: Tensor, ends: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """`definitions.grouped_wgrad`."""
    if sm90.supports(x.device, x.dtype, dy.shape[1], x.shape[1]):
        return sm90.grouped_wgrad(dy, x, ends, out_dtype)
    if dy.dtype != torch.bfloat16:
        return definitions.grouped_wgrad(dy, x, ends, out_dtype)
    return pytorch.grouped_wgrad(dy, x, ends).to(out_dtype or dy.dtype)


def grouped_wgrad_(
    out: Sequence[Tensor], dy: Tensor, x: Tensor, ends: Tensor, accumulate: bool
) -> None:
    """`definitions.grouped_wgrad_`."""
    if sm90.supports(x.device, x.dtype, dy.shape[1], x.shape[1]):
        sm90.grouped_wgrad_(out, dy, x, ends, accumulate)
    else:
        chosen = pytorch if dy.dtype == torch.bfloat16 else definitions
        chosen.grouped_wgrad_(out, dy, x, ends, accumulate)
