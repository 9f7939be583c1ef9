"""CUDA implementations of the dense backwards and scaled products.

For arguments that the kernels do not support the functions
return NotImplemented, and the definitions run.
"""

from __future__ import annotations

from functools import lru_cache
from types import NotImplementedType

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.kernels.dense.spec import (
    MAX_FEATURES,
    MIN_SM,
    NORM_DTYPES,
    VECTOR,
    ActivationBiasSpec,
    RMSNormSpec,
)
from fusible.kernels.grouped import grouped_mm
from fusible.kernels.runtime.gpu import PTX_NAMES, capability, multiprocessors, runs_kernels
from fusible.kernels.runtime.launch import aligned, launch

_STRIPS_PER_MULTIPROCESSOR = 16  # of the activation's kernel: as many warps
_MIN_STRIP, _MAX_STRIP = 4, 128  # rows


def supports_rows(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels support ``[rows, features]`` tensors, which must have one dtype."""
    rows, features = x.shape
    return (
        x.dtype in NORM_DTYPES
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
    spec = ActivationBiasSpec(activation, PTX_NAMES[x.dtype])
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
    gain = aligned(cast(gain, torch.float32))
    addend = None if addend is None else aligned(addend)
    spec = RMSNormSpec(x.shape[1], PTX_NAMES[x.dtype], addend is not None)
    blocks = min(x.shape[0], spec.resident * multiprocessors(x.device))
    dx = torch.empty_like(x)
    partial = x.new_empty(blocks, x.shape[1], dtype=torch.float32)
    tensors = dy, x, rstd, gain, addend, dx, partial
    launch("dense.rms_norm.rms_norm_backward", (spec,), x.device, *tensors, x.shape[0], blocks)
    return dx, partial.sum(0)


@lru_cache(maxsize=64)
def _has_block_scales(device: torch.device) -> bool:
    """Whether PyTorch's product on a device has scales of 1x128 and 128x128."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    return device.type == "cuda" and capability(device) == (9, 0) and version >= (12, 9)


def scaled_mm_pytorch(
    x: Tensor, w: Tensor, ends: Tensor, x_scale: Tensor, w_scale: Tensor
) -> Tensor | NotImplementedType:
    """`definitions.scaled_mm` by cuBLASLt, which has such scales from 12.9 on, on SM90."""
    (rows, depth), blocks = x.shape, x_scale.shape[1]
    if not (
        _has_block_scales(x.device)
        and x.dtype == w.dtype == torch.float8_e4m3fn
        and rows > 0
        and rows % 16 == w.shape[0] % 16 == depth % 16 == 0
        and blocks % 4 == 0
        and x_scale.stride() == (1, rows)  # of blocks; scales that are repeated have stride 0
        and x.is_contiguous()
        and w.is_contiguous()
    ):
        return NotImplemented
    scales = x_scale, w_scale.contiguous().t()
    try:
        return torch._scaled_mm(x, w.t(), *scales, out_dtype=torch.bfloat16)
    except RuntimeError:  # sizes for which cuBLASLt has no kernel
        return NotImplemented


def scaled_mm_grouped(
    x: Tensor, w: Tensor, ends: Tensor, x_scale: Tensor, w_scale: Tensor
) -> Tensor:
    """`definitions.scaled_mm` as the grouped product of one group."""
    return grouped_mm(x, [w[None]], ends, x_scale=x_scale, w_scale=w_scale[None])
