"""Checks of what cuDNN's front end does not notice in the SM100 kernels' arguments: ValueErrors.

It takes vectors of any dtype, reads what lies behind addresses, and reads nothing on the device. It
refuses operands that do not fit each other, scales of another size, and rows that are not whole
tiles. The rules see to the activation, and to the sizes of linears.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.kernels.sm100 import limits
from fusible.recipes.formats import E2M1, E4M3

FP4_BYTES = E2M1.dtype  # two numbers a byte; torch.float4_e2m1fn_x2 at the kernel itself
FP8 = E4M3.dtype
SCALES = {fmt.element.dtype: fmt.scale_dtype for fmt in limits.QUANTIZED}
VECTOR = {fmt.element.dtype: fmt.block[1] for fmt in limits.QUANTIZED if fmt.block}
"""How many numbers share a scale."""


def require(holds: bool, must: str, got: object, then: str = "") -> None:
    """Raise ValueError with what ``must`` hold and what was given, unless it ``holds``."""
    if not holds:
        raise ValueError(f"{must}, got {got}" + (f"; {then}" if then else ""))


def address_unit(dtype: torch.dtype) -> int:
    """Bytes that addresses of a dtype are multiples of."""
    return limits.FP4_ALIGNMENT if dtype == FP4_BYTES else 16


def check_aligned(name: str, x: Tensor) -> None:
    """Check that a matrix is contiguous and aligned."""
    unit = address_unit(x.dtype)
    require(
        x.is_contiguous() and x.data_ptr() % unit == 0,
        f"{name} must be contiguous and begin at a multiple of {unit} bytes",
        f"strides {x.stride()} at {x.data_ptr():#x}",
        "call .contiguous()",
    )


def check_contiguous(
    name: str, t: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Check that a tensor is given, contiguous, of this dtype and shape and on this device."""
    require(
        t is not None and t.dtype == dtype and t.shape == shape and t.is_contiguous(),
        f"{name} must be contiguous {str(dtype).removeprefix('torch.')} of shape {tuple(shape)}",
        None if t is None else f"{t.dtype} of shape {tuple(t.shape)}, strides {t.stride()}",
    )
    assert t is not None
    require(t.device == device, f"{name} must be on {device}", t.device)


def check_matrix(
    name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Check a matrix as the kernels read or write it where it lies."""
    check_contiguous(name, t, dtype, shape, device)
    check_aligned(name, t)


def check_packed_scales(name: str, scales: Tensor, dtype: torch.dtype, n: int, k: int) -> None:
    """Check the packed scales of a matrix ``[n, k]`` of a quantized ``dtype``."""
    size = -(-n // 128) * -(-k // (4 * VECTOR[dtype])) * 512
    require(
        scales.dtype == SCALES[dtype] and scales.numel() == size and scales.is_contiguous(),
        f"scales of {name} must be {size} contiguous {SCALES[dtype]}, packed for the MMA",
        f"{scales.dtype} of shape {tuple(scales.shape)} with strides {scales.stride()}",
        "use recipes.swizzle_block_scales",
    )
