"""The one ``quantize`` and ``dequantize`` that serve every number format.

Plain vectorised torch on any device, without host synchronisation. All arithmetic is FP32 (each
operation correctly rounded) and all packing is in integers, so that every machine gives the same
bits. The kernels must reproduce them: this module is the specification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusible.recipes.blocks import blocks_of, column_block_bound, zero_tail
from fusible.recipes.encoding import DECODERS, ENCODERS, SCALES, SMALLEST_NORMAL, divide, e8m0_value
from fusible.recipes.rows import (
    E2M1,
    E4M3,
    E5M2,
    Element,
    NumberFormat,
    fp8_block,
    fp8_tensor,
    mxfp8,
    nvfp4,
)

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "HIGH_PRECISION",
    "Element",
    "Encoded",
    "NumberFormat",
    "check_encoded",
    "check_ends",
    "check_input",
    "check_sizes",
    "dequantize",
    "e8m0_value",
    "fp8_block",
    "fp8_tensor",
    "mxfp8",
    "nvfp4",
    "quantize",
    "shapes_of",
]

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that are quantized, and decoded to."""


class Encoded(NamedTuple):
    """A tensor in some format. Shapes are for ``[rows, columns]``; leading dimensions stay."""

    data: Tensor
    """Elements, in the input's layout: ``[rows, columns / per_byte]``."""
    scale: Tensor
    """Factors from element to value. Row-wise ``[rows, columns / B]``, column-wise ``[blocks,
    columns]``, two-dimensional blocks ``[rows / B, columns / B]``, whole matrices ``[1]``, groups
    ``[groups]``."""
    tensor_scale: Tensor | None
    """FP32 factor on top, ``[1]`` or ``[groups]``, where the format has one."""


def quantize(
    x: Tensor,
    fmt: NumberFormat,
    *,
    columnwise: bool = False,
    ends: Tensor | None = None,
    amax: Tensor | None = None,
) -> Encoded:
    """Convert ``x`` ``[..., rows, columns]`` to ``fmt``, to be reduced along rows or columns.

    ``ends`` (int32 or int64 ``[groups]``, cumulative end rows, on ``x.device``) starts blocks anew
    at each group of rows; a group's last, shorter block has its own scale. Rows past the last end
    are zero. Column-wise scales of group g begin at block ``sum(ceil(rows of earlier groups / B))``
    and there are ``(rows + groups * (B - 1)) // B`` of them, spare ones with the scale of zeros, so
    that no size depends on the data.

    ``amax``, FP32, is the largest magnitude of the tensor, or of each group, where it is known, for
    a format with a scale on top. It may leave out NaN and what lies beside it: a block that is too
    large for it is NaN.

    NaN in a block makes the whole block NaN; so does Inf where scales are not E8M0, whose Inf stays
    Inf. Raises TypeError for dtypes other than FP32, BF16 and FP16, ValueError for rows that are
    not whole blocks.
    """
    check_input(x, fmt, columnwise)
    check_ends(x, fmt, ends)
    if ends is not None:
        ends = ends.clamp(max=x.shape[0])
        x = zero_tail(x, ends)
    blocks = blocks_of(x, fmt.block, columnwise, ends)
    tensor_scale = _tensor_scale(x, fmt, ends, amax)
    outer = None if tensor_scale is None else blocks.spread_groups(tensor_scale)
    scale, multiplier = SCALES[fmt.scale].encode(blocks.amax(x).float(), fmt, outer)
    scaled = x.float() * blocks.expand(multiplier)
    if ends is not None:
        scaled = zero_tail(scaled, ends)
    return Encoded(ENCODERS[fmt.element](scaled), scale, tensor_scale)


def dequantize(
    encoded: Encoded,
    fmt: NumberFormat,
    dtype: torch.dtype = torch.float32,
    *,
    columnwise: bool = False,
    ends: Tensor | None = None,
) -> Tensor:
    """Return the values of ``encoded``, with the ``columnwise`` and ``ends`` of its ``quantize``.

    Computed in FP32 and rounded once to ``dtype``; MXFP8 is exact in BF16 (normal range) and FP32.
    """
    check_encoded(encoded, fmt)
    elements = DECODERS[fmt.element](encoded.data)
    ends = None if ends is None else ends.clamp(max=elements.shape[0])
    blocks = blocks_of(elements, fmt.block, columnwise, ends)
    scale = SCALES[fmt.scale].decode(encoded.scale)
    if encoded.tensor_scale is not None:
        scale = scale * blocks.spread_groups(encoded.tensor_scale)
    values = elements * blocks.expand(scale)
    if ends is not None:
        values = zero_tail(values, ends)
    return values.to(dtype)


def check_input(x: Tensor, fmt: NumberFormat, columnwise: bool) -> None:
    """Raise the error of ``quantize`` for what ``fmt`` cannot hold, before anything is written."""
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"a tensor to quantize must be float32, bfloat16 or float16, got {x.dtype}; "
            "convert it first"
        )
    if x.ndim < 2:
        raise ValueError(
            f"a tensor to quantize must have rows and columns, got shape {tuple(x.shape)}; "
            "use x.unsqueeze(0) for one row"
        )
    _check_blocks(x.shape, fmt, columnwise)


def _check_blocks(shape: Sequence[int], fmt: NumberFormat, columnwise: bool) -> None:
    if found := misfit(shape, fmt, columnwise=columnwise):
        what, size, multiple = found
        raise ValueError(
            f"{what} must be a multiple of {multiple} for {fmt.name}, got {size} "
            f"(shape {tuple(shape)}); pad the tensor with zeros"
        )


def misfit(
    shape: Sequence[int], fmt: NumberFormat, *, columnwise: bool = False
) -> tuple[str, int, int] | None:
    """The dimension that is not whole blocks of a format, its size and its unit; or None."""
    (across, along), per_byte = fmt.block or (1, 1), fmt.element.per_byte
    multiples = 1, per_byte if columnwise else along
    if not fmt.directional:
        multiples = across, math.lcm(along, per_byte)
    for what, size, multiple in zip(("rows", "columns"), shape[-2:], multiples, strict=True):
        if size % multiple:
            return what, size, multiple
    return None


def check_ends(x: Tensor, fmt: NumberFormat, ends: Tensor | None) -> None:
    """Raise ValueError unless ``ends`` can be cumulative end rows of groups of ``x``."""
    if ends is None:
        return
    if x.ndim != 2:
        raise ValueError(f"grouped rows need a 2-D tensor, got shape {tuple(x.shape)}")
    if fmt.block is not None and not fmt.directional:
        along = fmt.block[1]
        raise ValueError(
            f"blocks of {along}x{along} hold weights and cannot be grouped by rows; "
            f"use blocks of 1x{along} or quantize every matrix by itself"
        )
    if ends.ndim != 1 or ends.shape[0] < 1 or ends.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "ends must be int32 or int64 of shape (groups,) with at least one group, "
            f"got {ends.dtype} of shape {tuple(ends.shape)}"
        )
    if ends.device != x.device:
        raise ValueError(
            f"ends must be on {x.device}, where the rows are, got {ends.device}; move them"
        )


def check_encoded(encoded: Encoded, fmt: NumberFormat) -> None:
    """Raise TypeError if the stored dtypes are not those of ``fmt``: bits are never reread."""
    wanted = (fmt.element.dtype, fmt.scale_dtype)
    got = (encoded.data.dtype, encoded.scale.dtype)
    if wanted != got:
        raise TypeError(
            f"data and scales of {fmt.name} must be {wanted[0]} and {wanted[1]}, "
            f"got {got[0]} and {got[1]}; use the format the tensor was quantized in"
        )


class Shapes(NamedTuple):
    """Of the tensors of an :class:`Encoded`."""

    data: tuple[int, ...]
    scale: tuple[int, ...]
    tensor_scale: tuple[int, ...] | None


def shapes_of(
    shape: Sequence[int], fmt: NumberFormat, columnwise: bool = False, groups: int | None = None
) -> Shapes:
    """Return the shapes that encode a tensor of ``shape`` ``[..., rows, columns]``, or groups."""
    *lead, rows, columns = shape
    across, along = fmt.block or (1, 1)
    whole = (*lead, 1) if groups is None else (groups,)
    if fmt.block is None:
        scale = whole
    elif columnwise and fmt.directional:
        scale = (*lead, column_block_bound(rows, groups or 1, along), columns)
    else:
        scale = (*lead, rows // across, columns // along)
    data = (*lead, rows, columns // fmt.element.per_byte)
    return Shapes(data, scale, whole if fmt.has_tensor_scale else None)


def check_sizes(
    encoded: Encoded, fmt: NumberFormat, columnwise: bool = False, groups: int | None = None
) -> None:
    """Raise ValueError unless the scales are as many, and where, the data of ``fmt`` need."""
    data, scale, tensor_scale = encoded
    if data.dim() < 2 or (groups is not None and data.dim() != 2):
        raise ValueError(f"data of {fmt.name} must be of matrices, got shape {tuple(data.shape)}")
    shape = (*data.shape[:-1], data.shape[-1] * fmt.element.per_byte)
    _check_blocks(shape, fmt, columnwise)
    wanted = shapes_of(shape, fmt, columnwise, groups)
    got = tuple(scale.shape), None if tensor_scale is None else tuple(tensor_scale.shape)
    if got != wanted[1:]:
        raise ValueError(
            f"scales and tensor scales of {fmt.name} data of shape {wanted.data} must be of shape "
            f"{wanted.scale} and {wanted.tensor_scale}, got {got[0]} and {got[1]}; quantize the "
            "original again"
        )
    for piece in (scale, tensor_scale):
        if piece is not None and piece.device != data.device:
            raise ValueError(f"scales must be on {data.device}, as the data, got {piece.device}")
    if tensor_scale is not None and tensor_scale.dtype != torch.float32:
        raise ValueError(f"tensor scales must be torch.float32, got {tensor_scale.dtype}")


def _tensor_scale(
    x: Tensor, fmt: NumberFormat, ends: Tensor | None, amax: Tensor | None
) -> Tensor | None:
    """Return amax / (element.max * 448) per tensor or group, at least 2^-126, NaN for Inf."""
    if not fmt.has_tensor_scale:
        return None
    if amax is None:
        amax = blocks_of(x, None, False, ends).amax(x).float()
    scale = divide(amax, fmt.element.max * E4M3.max)
    return torch.where(scale.isfinite(), scale.clamp(min=SMALLEST_NORMAL), math.nan)
