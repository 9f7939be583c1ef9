"""Norms over rows: PyTorch's fused CUDA kernels where they compute the same, else the formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible import formulas
from fusible.formulas import cast
from fusible.kernels import dense
from fusible.kernels.dense.spec import MAX_FEATURES, NORM_DTYPES


def _fused(x: Tensor, weight: Tensor, zero_centered: bool) -> bool:
    """Whether PyTorch's kernels compute the same.

    They take one dtype only, in which ``1 + weight`` would be rounded.
    """
    return x.is_cuda and x.dtype == weight.dtype and not zero_centered


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`fusible.formulas.layer_norm`."""
    if _fused(x, weight, zero_centered) and bias.dtype == x.dtype:
        return torch.native_layer_norm(x, x.shape[1:], weight, bias, eps)
    return formulas.layer_norm(x, weight, bias, eps, zero_centered)


def layer_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`fusible.formulas.layer_norm_backward`; the gradient of x in its dtype."""
    if _fused(x, weight, zero_centered):
        # The bias is given for its dtype only.
        return torch.ops.aten.native_layer_norm_backward(
            dy, x, x.shape[1:], mean, rstd, weight, weight, [True, True, True]
        )
    dx, dweight, dbias = formulas.layer_norm_backward(dy, x, mean, rstd, weight, zero_centered)
    return cast(dx, x.dtype), dweight, dbias


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """See :func:`fusible.formulas.rms_norm`."""
    if _fused(x, weight, zero_centered):
        return torch.ops.aten._fused_rms_norm(x, x.shape[1:], weight, eps)
    return formulas.rms_norm(x, weight, eps, zero_centered)


def rms_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """See :func:`fusible.formulas.rms_norm_backward`; the gradient of x in its dtype."""
    if torch.compiler.is_compiling() or not x.is_cuda:
        dx, dweight = formulas.rms_norm_backward(dy, x, rstd, weight, zero_centered)
        return cast(dx, x.dtype), dweight
    ours = x.dtype in NORM_DTYPES and x.shape[1] <= MAX_FEATURES
    if not ours and _fused(x, weight, zero_centered):
        return torch.ops.aten._fused_rms_norm_backward(
            dy, x, x.shape[1:], rstd, weight, [True, True]
        )
    return dense.rms_norm_backward(
        dy, x, rstd, formulas.gain(weight, rstd.dtype, zero_centered), None
    )
