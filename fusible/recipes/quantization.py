"""``quantize`` and ``dequantize`` for every number format: the definition.

Plain vectorised torch on any device, without host synchronisation. All arithmetic is FP32 (each
operation correctly rounded) and all packing is in integers, so that every machine gives the same
bits. The kernels must reproduce them: this module is the specification.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusible.arguments import described
from fusible.recipes import hadamard, philox
from fusible.recipes.blocks import blocks_of, check_per_group, with_zero_tail
from fusible.recipes.encoding import (
    DECODERS,
    ENCODERS,
    SCALE_ENCODERS,
    SMALLEST_NORMAL,
    decode_scale,
    divide,
    encode_stochastically,
)
from fusible.recipes.formats import E4M3, NumberFormat
from fusible.recipes.matrix import QuantizedMatrix

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that are quantized, and dequantized to."""


def quantize(
    x: Tensor,
    fmt: NumberFormat,
    *,
    columnwise: bool = False,
    ends: Tensor | None = None,
    amax: Tensor | None = None,
    key: Tensor | None = None,
) -> QuantizedMatrix:
    """Convert ``x`` ``[..., rows, columns]`` to ``fmt``, to be reduced along rows or columns.

    ``ends`` (int32 or int64 ``[groups]``, cumulative end rows, on ``x.device``) restarts blocks
    at each group of rows. The last block of a row, a column or a group may be short: its scale is
    that of the block padded with zeros. Rows past the last end are zero. Column-wise scales of
    group g begin at block ``sum(ceil(rows of earlier groups / B))`` and there are
    ``(rows + groups * (B - 1)) // B`` of them, spare ones with the scale of zeros, so that no size
    depends on the data.

    The column-wise form of a format with ``hadamard`` is that of ``hadamard.transform`` of ``x``.
    One with ``stochastic`` needs a ``key``, int64 ``[2]`` on ``x.device``, by which elements are
    rounded (``philox.random_bytes``): a seed and an offset.

    ``amax``, FP32, is the largest magnitude of the tensor, or of each group, where it is known, for
    a format with tensor scales, after the transform if there is one. It may leave out NaN and
    neighbours of NaN: a block that is too large for it becomes NaN.

    NaN in a block makes the whole block NaN; so does Inf where scales are not E8M0, whose Inf stays
    Inf. Raises TypeError for dtypes other than FP32, BF16 and FP16, ValueError for columns that do
    not fill the bytes of packed elements.
    """
    check_arguments(x, ends, fmt, key)
    inside = None if ends is None else ends.clamp(max=x.shape[0])
    if inside is not None:
        x = with_zero_tail(x, inside)
    if columnwise and fmt.hadamard:
        x = hadamard.transform(x, inside)
    blocks = blocks_of(x, fmt.block, columnwise, inside)
    tensor_scale = _tensor_scale(x, fmt, inside, amax)
    outer = None if tensor_scale is None else blocks.spread_groups(tensor_scale)
    scale, multiplier = SCALE_ENCODERS[fmt.scale](blocks.amax(x).float(), fmt, outer)
    scaled = x.float() * blocks.expand(multiplier)
    if inside is not None:
        scaled = with_zero_tail(scaled, inside)
    along_columns = columnwise and fmt.directional
    if key is None or not fmt.stochastic:
        data = ENCODERS[fmt.element](scaled)
    else:
        size = x.shape[:-1].numel(), x.shape[-1]
        random = philox.random_bytes(key, *size, along_columns).view(x.shape)
        data = encode_stochastically(scaled, random)
    return QuantizedMatrix(data, scale, tensor_scale, fmt, along_columns, ends)


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of ``matrix``, as products read them: transformed, where it was.

    Computed in FP32 and rounded once to ``dtype``; MXFP8 is exact in BF16 (normal range) and FP32.
    """
    matrix.check_dtypes()
    fmt = matrix.format
    elements = DECODERS[fmt.element](matrix.data)
    ends = None if matrix.ends is None else matrix.ends.clamp(max=elements.shape[0])
    blocks = blocks_of(elements, fmt.block, matrix.columnwise, ends)
    scale = decode_scale(matrix.scale)
    if matrix.tensor_scale is not None:
        scale = scale * blocks.spread_groups(matrix.tensor_scale)
    values = elements * blocks.expand(scale)
    if ends is not None:
        values = with_zero_tail(values, ends)
    return values.to(dtype)


def check_arguments(x: Tensor, ends: Tensor | None, fmt: NumberFormat, key: Tensor | None) -> None:
    """Raise the errors of ``quantize``, before anything is written."""
    check_group_ends(x, fmt, ends)
    check_input(x, fmt)
    if not fmt.stochastic:
        return
    if key is None:
        raise ValueError(f"{fmt.name} rounds by a key, got None; pass recipes.random_key(x)")
    if key.dtype != torch.int64 or key.shape != (2,) or key.device != x.device:
        raise ValueError(
            f"key must be int64 of shape (2,) on {x.device}, where the tensor is, got "
            f"{described(key)}"
        )


def check_input(x: Tensor, fmt: NumberFormat) -> None:
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
    if x.shape[-1] % fmt.element.per_byte:
        raise ValueError(
            f"columns must be a multiple of {fmt.element.per_byte} for {fmt.name}, got "
            f"{x.shape[-1]}; pad the tensor with zeros"
        )


def check_group_ends(x: Tensor, fmt: NumberFormat, ends: Tensor | None) -> None:
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
    check_per_group("ends", ends, x.device)


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
