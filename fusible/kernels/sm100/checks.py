"""Checks of the SM100 kernels' arguments, before any kernel runs; they raise ValueError.

The checks of cuDNN's front end come later, name other arguments, and read nothing on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusible.kernels.grouped.groups import checks_enabled
from fusible.kernels.sm100 import limits
from fusible.recipes.formats import E2M1, E4M3

FP4 = E2M1.dtype  # two numbers a byte; torch.float4_e2m1fn_x2 at the kernel itself
FP8 = E4M3.dtype
_SCALES = {fmt.element.dtype: fmt.scale_dtype for fmt in limits.QUANTIZED}
VECTOR = {fmt.element.dtype: fmt.block[1] for fmt in limits.QUANTIZED if fmt.block}
"""How many numbers share a scale."""


def require(holds: bool, must: str, got: object, then: str = "") -> None:
    """Raise ValueError with what ``must`` hold and what was given, unless it ``holds``."""
    if not holds:
        raise ValueError(f"{must}, got {got}" + (f"; {then}" if then else ""))


class Rows(NamedTuple):
    """Sizes of a row-major operand ``[rows, depth]``."""

    rows: int
    depth: int
    dtype: torch.dtype


def check_rows(name: str, x: Tensor, scales: Tensor | None, columnwise: bool = False) -> Rows:
    """Check rows in groups and their packed scales; ``columnwise`` if they are reduced.

    Column-wise FP4 is ``[features, rows / 2]``, and column-wise scales are
    ``[round_up(features, 128), rows / block]``, which contain the regions of the groups.
    """
    require(x.ndim == 2, f"{name} must have 2 dimensions", x.ndim)
    require(
        x.dtype in (torch.bfloat16, FP8, FP4),
        f"{name} must be BF16, FP8 E4M3 or FP4 in bytes",
        x.dtype,
        "use a recipe of those elements",
    )
    rows, features = x.shape
    if x.dtype == FP4:
        rows, features = (2 * features, rows) if columnwise else (rows, 2 * features)
    check_aligned(name, x)
    require(
        rows % limits.GROUP_ROWS == 0,
        f"rows of {name} must be a multiple of {limits.GROUP_ROWS}",
        rows,
        "pad its groups first",
    )
    check_multiple(f"features of {name}", features)
    if columnwise and x.dtype in _SCALES:
        shape = (-(-features // 128) * 128, rows // VECTOR[x.dtype])
        check_contiguous(f"scales of {name}", scales, _SCALES[x.dtype], shape, x.device)
    else:
        check_scales(name, scales, x.dtype, rows, features)
    return Rows(rows, features, x.dtype)


def address_unit(dtype: torch.dtype) -> int:
    """Bytes that addresses of a dtype are multiples of."""
    return limits.FP4_ALIGNMENT if dtype == FP4 else 16


def check_aligned(name: str, x: Tensor) -> None:
    """Check that a tensor is contiguous and aligned."""
    unit = address_unit(x.dtype)
    require(
        x.is_contiguous() and x.data_ptr() % unit == 0,
        f"{name} must be contiguous and begin at a multiple of {unit} bytes",
        f"strides {x.stride()} at {x.data_ptr():#x}",
        "call .contiguous()",
    )


def check_multiple(what: str, features: int) -> None:
    """Check a number of features."""
    unit = limits.MULTIPLE_OF
    require(features > 0 and features % unit == 0, f"{what} must be a multiple of {unit}", features)


def check_scales(
    name: str, scales: Tensor | None, dtype: torch.dtype, rows: int, depth: int, groups: int = 1
) -> None:
    """Check the packed scales of ``groups`` matrices; BF16 has none."""
    if dtype not in _SCALES:
        require(scales is None, f"scales of {name} must be None for {dtype}", "a tensor")
        return
    require(scales is not None, f"scales of {name} must be given for {dtype}", None)
    assert scales is not None
    require(
        scales.dtype == _SCALES[dtype],
        f"scales of {name} must be {_SCALES[dtype]} for {dtype} elements",
        scales.dtype,
    )
    blocks = -(-depth // VECTOR[dtype])
    size = groups * -(-rows // 128) * -(-blocks // 4) * 512
    require(
        scales.numel() == size and scales.is_contiguous(),
        f"scales of {name} must be the {size} bytes of {rows} rows and {blocks} blocks, packed for "
        "the MMA",
        f"{scales.numel()} in {tuple(scales.shape)} with strides {scales.stride()}",
        "use recipes.swizzle_block_scales",
    )


class Weights(NamedTuple):
    """Weights of all groups as the kernels see them: ``[n, k]`` each, ``k`` being reduced."""

    groups: int
    n: int
    k: int
    dense: bool


def check_weights(
    w: Sequence[Tensor],
    scales: Sequence[Tensor],
    x: Rows,
    device: torch.device,
    n_major: bool,
) -> Weights:
    """Check ``[E, n, k]`` (``[E, k, n]`` if ``n_major``), or E of ``[n, k]``, and their scales."""
    first, dense = w[0], w[0].ndim == 3
    groups = first.shape[0] if dense else len(w)
    require(
        1 <= groups <= limits.MAX_GROUPS,
        f"the number of groups must be from 1 to {limits.MAX_GROUPS}",
        groups,
    )
    require(
        len(w) == 1 if dense else all(t.shape == first.shape for t in w),
        "w must be one tensor [E, N, K] or E tensors of one shape",
        [tuple(t.shape) for t in w],
    )
    scaled = x.dtype in _SCALES
    require(
        len(scales) == (len(w) if scaled else 0),
        "w must have scales where its elements need them, as many as tensors",
        f"{len(scales)} for {len(w)} of {first.dtype}",
    )
    n, k = first.shape[-2:]
    if first.dtype == FP4:
        require(not n_major, "FP4 weights must be contiguous along the reduction", "n-major ones")
        k *= 2
    if n_major:
        n, k = k, n
    for i, t in enumerate(w):
        require(t.dtype == x.dtype, f"w must have the dtype of x, {x.dtype}", t.dtype)
        require(t.device == device, f"w must be on {device}", t.device)
        check_aligned("w" if dense else f"w[{i}]", t)
        check_scales("w", scales[i] if scaled else None, t.dtype, n, k, groups if dense else 1)
    require(k == x.depth, f"x and w must share the reduced dimension {x.depth}", k)
    check_multiple("features of w", n)
    return Weights(groups, n, k, dense)


def check_padded_ends(ends: Tensor, groups: int, rows: int, device: torch.device) -> None:
    """Check end rows of groups of whole 256 rows; values on a device only under `checking`."""
    check_contiguous("ends", ends, torch.int32, (groups,), device)
    if device.type != "cpu" and not checks_enabled():
        return
    values = ends.tolist()
    sizes = [end - start for start, end in zip([0, *values], values, strict=False)]
    require(
        min(sizes) >= 0 and all(size % limits.GROUP_ROWS == 0 for size in sizes),
        f"groups must have multiples of {limits.GROUP_ROWS} rows",
        sizes,
        "pad them, or do not promise that they are aligned",
    )
    require(values[-1] <= rows, f"groups must end within the {rows} rows", values[-1])


def check_contiguous(
    name: str, t: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Check that a tensor is given, contiguous, of this dtype and shape and on this device."""
    require(
        t is not None and t.dtype == dtype and t.shape == shape and t.is_contiguous(),
        f"{name} must be contiguous {str(dtype).removeprefix('torch.')} of shape {shape}",
        None if t is None else f"{t.dtype} of shape {tuple(t.shape)}, strides {t.stride()}",
    )
    assert t is not None
    require(t.device == device, f"{name} must be on {device}", t.device)


def check_bias(bias: Tensor | None, weights: Weights, device: torch.device) -> None:
    """Check a bias, BF16 ``[E, n]``."""
    if bias is not None:
        check_contiguous("bias", bias, torch.bfloat16, (weights.groups, weights.n), device)
        check_aligned("bias", bias)
