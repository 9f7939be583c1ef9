"""CUDA implementations of the dense backwards.

For arguments that the kernels do not support the functions
return NotImplemented, and the definitions run.
"""

from __future__ import annotations

from types import NotImplementedType

import torch
from torch import Tensor

from fusible.formulas import gain as _in_fp32
from fusible.kernels.dense.spec import (
    DTYPES,
    MAX_FEATURES,
    MIN_SM,
    VECTOR,
    ActivationBiasSpec,
    RMSNormSpec,
)
from fusible.kernels.runtime.gpu import multiprocessors, runs_kernels
from fusible.kernels.runtime.launch import aligned, launch

_STRIPS_PER_MULTIPROCESSOR = 16  # of the activation's kernel: as many warps
_MIN_STRIP, _MAX_STRIP = 4, 128  # rows


def supports_rows(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels support ``[rows, features]`` tensors, which must have one dtype."""
    rows, features = x.shape
    return (
        x.dtype in DTYPES
        and all([other is None or other.dtype == x.dtype for other in others])
        and features % VECTOR == 0
        and rows * features > 0
        and rows < 2**31 - 2**10
        and runs_kernels(x.device, MIN_SM)
    )


def activation_bias_backward(
    dy: Tensor, x: Tensor, activation: str
) -> tuple[Tensor, Tensor] | NotImplementedType:
    """`definitions.activation_bias_backward`."""
    if not supports_rows(x, dy):
        return NotImplemented
    dy, x = aligned(dy), aligned(x)
    rows, features = x.shape
    dx = torch.empty_like(x)
    strip = strip_rows(rows, features, multiprocessors(x.device))
    partial = x.new_empty(-(-rows // strip), features, dtype=torch.float32)
    spec = ActivationBiasSpec(activation, DTYPES[x.dtype])
    arguments = dy, x, dx, partial, rows, features, strip
    launch("dense.activation_bias.activation_bias", (spec,), x.device, *arguments)
    return dx, partial.sum(0)


def strip_rows(rows: int, features: int, multiprocessors: int) -> int:
    """Rows of a partial sum: few enough that every multiprocessor has work, a multiple of four."""
    across = -(-features // (32 * VECTOR))
    share = rows * across // (multiprocessors * _STRIPS_PER_MULTIPROCESSOR)
    return max(_MIN_STRIP, min(_MAX_STRIP, share // 4 * 4))


def rms_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, gain: Tensor, addend: Tensor | None
) -> tuple[Tensor, Tensor] | NotImplementedType:
    """`definitions.rms_norm_backward`."""
    fits = (
        supports_rows(x, dy, addend) and rstd.dtype == torch.float32 and x.shape[1] <= MAX_FEATURES
    )
    if not fits:
        return NotImplemented
    dy, x, rstd = aligned(dy), aligned(x), rstd.contiguous()
    gain = aligned(_in_fp32(gain, torch.float32, False))
    addend = None if addend is None else aligned(addend)
    spec = RMSNormSpec(x.shape[1], DTYPES[x.dtype], addend is not None)
    blocks = min(x.shape[0], spec.resident * multiprocessors(x.device))
    dx = torch.empty_like(x)
    partial = x.new_empty(blocks, x.shape[1], dtype=torch.float32)
    tensors = dy, x, rstd, gain, addend, dx, partial
    launch("dense.rms_norm.rms_norm_backward", (spec,), x.device, *tensors, x.shape[0], blocks)
    return dx, partial.sum(0)
