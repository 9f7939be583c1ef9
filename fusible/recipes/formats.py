"""Number formats as frozen rows, and the one ``quantize`` and ``dequantize`` that serve them all.

Plain vectorised torch on any device, without host synchronisation. All arithmetic is FP32 (each
operation correctly rounded) and all packing is in integers, so that every machine gives the same
bits. The kernels must reproduce them: this module is the specification.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fusible.recipes.blocks import blocks_of, zero_tail

FLT_MAX = torch.finfo(torch.float32).max
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Element:
    """How one number is stored. ``max`` is the largest finite magnitude."""

    name: str
    max: float
    max_exponent: int
    """Exponent of ``max``: floor(log2(max))."""
    dtype: torch.dtype
    per_byte: int = 1
    """Numbers in one item of ``dtype``; the earlier one is in the lower bits."""


E4M3 = Element("e4m3", 448.0, 8, torch.float8_e4m3fn)
E5M2 = Element("e5m2", 57344.0, 15, torch.float8_e5m2)
# torch.float4_e2m1fn_x2 supports too few operations; it is a view of these bytes at a kernel.
E2M1 = Element("e2m1", 6.0, 2, torch.uint8, per_byte=2)

ScaleName = Literal["e8m0_up", "e8m0_floor", "fp32", "fp32_power_of_two", "e4m3"]


def check_scale_name(name: str) -> ScaleName:
    """Return ``name`` if it is a kind of scale, KeyError if not."""
    known: dict[str, ScaleName] = {known: known for known in _SCALES}
    return known[name]


@dataclass(frozen=True)
class NumberFormat:
    """``element`` numbers sharing one ``scale`` per ``block``; a value is element times scale.

    ``block`` is (across, along) the reduction of the matrix product, so (1, 32) is 32 columns of a
    row used row-wise and 32 rows of a column used column-wise; None is the whole matrix.
    """

    name: str
    element: Element
    block: tuple[int, int] | None
    scale: ScaleName
    amax_epsilon: float = 0.0
    """Lower bound of the largest magnitude from which an FP32 scale is computed."""

    @property
    def scale_dtype(self) -> torch.dtype:
        """Return the dtype of the scales."""
        return _SCALES[self.scale].dtype

    @property
    def has_tensor_scale(self) -> bool:
        """Tell whether a second, FP32 scale covers each matrix or group."""
        return self.scale == "e4m3"

    @property
    def directional(self) -> bool:
        """Tell whether row-wise and column-wise use need two different sets of numbers."""
        return self.block is not None and self.block[0] != self.block[1]


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


@cache
def mxfp8(element: Element = E4M3, rounding: Literal["up", "floor"] = "up") -> NumberFormat:
    """Describe OCP MXFP8: one power of two per 32; ``rounding`` is that of the scale.

    "up", the rule of Transformer Engine and cuDNN, saturates no element; "floor" is the rule of the
    OCP MX specification, section 6.3, which saturates those above ``element.max`` times the scale.
    """
    if rounding not in ("up", "floor"):
        raise ValueError(f'rounding must be "up" or "floor", got {rounding!r}')
    suffix = "" if rounding == "up" else "_floor"
    scale: ScaleName = "e8m0_up" if rounding == "up" else "e8m0_floor"
    return NumberFormat(f"mxfp8_{element.name}{suffix}", element, (1, 32), scale)


@cache
def fp8_block(
    element: Element = E4M3,
    block: tuple[int, int] = (1, 128),
    power_of_two: bool = True,
    amax_epsilon: float = 0.0,
) -> NumberFormat:
    """Describe FP8 with an FP32 scale per 1x128 or 128x128."""
    if block not in ((1, 128), (128, 128)):
        raise ValueError(f"block must be (1, 128) or (128, 128), got {block}")
    name = f"fp8_{block[0]}x{block[1]}_{element.name}"
    return NumberFormat(name, element, block, _fp32_scale(power_of_two), amax_epsilon)


@cache
def fp8_tensor(
    element: Element = E4M3, power_of_two: bool = False, amax_epsilon: float = 0.0
) -> NumberFormat:
    """Describe FP8 with one FP32 scale per tensor, from the tensor itself (current scaling)."""
    name = f"fp8_tensor_{element.name}"
    return NumberFormat(name, element, None, _fp32_scale(power_of_two), amax_epsilon)


@cache
def nvfp4() -> NumberFormat:
    """Describe NVFP4: one E4M3 scale per 16 and an FP32 scale per tensor, amax / (6 * 448)."""
    return NumberFormat("nvfp4", E2M1, (1, 16), "e4m3")


def _fp32_scale(power_of_two: bool) -> ScaleName:
    return "fp32_power_of_two" if power_of_two else "fp32"


# --- The two functions ---------------------------------------------------------------------------


def quantize(
    x: Tensor, fmt: NumberFormat, *, columnwise: bool = False, ends: Tensor | None = None
) -> Encoded:
    """Convert ``x`` ``[..., rows, columns]`` to ``fmt``, to be reduced along rows or columns.

    ``ends`` (int32 or int64 ``[groups]``, cumulative end rows, on ``x.device``) starts blocks anew
    at each group of rows; a group's last, shorter block has its own scale. Rows past the last end
    are zero. Column-wise scales of group g begin at block ``sum(ceil(rows of earlier groups / B))``
    and there are ``(rows + groups * (B - 1)) // B`` of them, spare ones with the scale of zeros, so
    that no size depends on the data.

    NaN in a block makes the whole block NaN; so does Inf where scales are not E8M0, whose Inf stays
    Inf. Raises TypeError for dtypes other than FP32, BF16 and FP16, ValueError for rows that are
    not whole blocks.
    """
    check_input(x, fmt, columnwise)
    check_ends(x, ends)
    if ends is not None:
        ends = ends.clamp(max=x.shape[0])
        x = zero_tail(x, ends)
    blocks = blocks_of(x, fmt.block, columnwise, ends)
    amax = blocks.amax(x).float()
    tensor_scale = _tensor_scale(x, fmt, ends)
    outer = None if tensor_scale is None else blocks.spread_groups(tensor_scale)
    scale, multiplier = _SCALES[fmt.scale].encode(amax, fmt, outer)
    scaled = x.float() * blocks.expand(multiplier)
    if ends is not None:
        scaled = zero_tail(scaled, ends)
    return Encoded(_ENCODERS[fmt.element](scaled), scale, tensor_scale)


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
    elements = _DECODERS[fmt.element](encoded.data)
    ends = None if ends is None else ends.clamp(max=elements.shape[0])
    blocks = blocks_of(elements, fmt.block, columnwise, ends)
    scale = _SCALES[fmt.scale].decode(encoded.scale)
    if encoded.tensor_scale is not None:
        scale = scale * blocks.spread_groups(encoded.tensor_scale)
    values = elements * blocks.expand(scale)
    if ends is not None:
        values = zero_tail(values, ends)
    return values.to(dtype)


def check_input(x: Tensor, fmt: NumberFormat, columnwise: bool) -> None:
    """Raise the error of ``quantize`` for what ``fmt`` cannot hold, before anything is written."""
    if x.dtype not in _HIGH_PRECISION:
        raise TypeError(
            f"a tensor to quantize must be float32, bfloat16 or float16, got {x.dtype}; "
            "convert it first"
        )
    if x.ndim < 2:
        raise ValueError(
            f"a tensor to quantize must have rows and columns, got shape {tuple(x.shape)}; "
            "use x.unsqueeze(0) for one row"
        )
    rows, columns = x.shape[-2:]
    across, along = fmt.block or (1, 1)
    needed = {"columns": (columns, fmt.element.per_byte)}
    if fmt.directional and not columnwise:
        needed["columns"] = (columns, along)
    if not fmt.directional:
        needed = {
            "rows": (rows, across),
            "columns": (columns, math.lcm(along, fmt.element.per_byte)),
        }
    for what, (size, multiple) in needed.items():
        if size % multiple:
            raise ValueError(
                f"{what} must be a multiple of {multiple} for {fmt.name}, got {size} "
                f"(shape {tuple(x.shape)}); pad the tensor with zeros"
            )


def check_ends(x: Tensor, ends: Tensor | None) -> None:
    """Raise ValueError unless ``ends`` can be cumulative end rows of groups of ``x``."""
    if ends is None:
        return
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


# --- Scales --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """``encode`` gives (stored scale, FP32 multiplier from value to element) of block maxima."""

    dtype: torch.dtype
    encode: Callable[[Tensor, NumberFormat, Tensor | None], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor], Tensor]


def e8m0_value(byte: Tensor) -> Tensor:
    """Return 2^(byte - 127) in FP32, exact, NaN for 255 (OCP MX, section 5.4.1)."""
    exponent = byte.view(torch.uint8).to(torch.int32)
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def _e8m0_up(amax: Tensor, fmt: NumberFormat, _: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round amax / element.max up to a power of two; 0 gives byte 0, Inf byte 254."""
    bits = (amax * (1.0 / fmt.element.max)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Byte 0 is 2^-127, whose mantissa as a denormal is 0x400000: up to there it need not grow.
    grow = (mantissa != 0) & ((exponent > 0) | (mantissa > 0x400000))
    return _e8m0(exponent + grow.to(torch.int32), amax)


def _e8m0_floor(amax: Tensor, fmt: NumberFormat, _: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return floor(log2(amax)) - max_exponent (OCP MX, section 6.3), as `_e8m0_up` at 0 and Inf."""
    exponent = amax.view(torch.int32) >> 23
    return _e8m0(torch.where(amax.isinf(), 254, exponent - fmt.element.max_exponent), amax)


def _e8m0(exponent: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    byte = torch.where(amax.isnan(), 255, exponent.clamp(0, 254)).to(torch.uint8)
    multiplier = torch.where(amax.isnan(), math.nan, e8m0_value(254 - byte))
    return byte.view(torch.float8_e8m0fnu), multiplier


def _fp32(amax: Tensor, fmt: NumberFormat, _: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return max / amax, at most FLT_MAX and 1 for zeros; the stored scale is its inverse."""
    amax = amax.clamp(min=fmt.amax_epsilon)
    multiplier = _divide(fmt.element.max, amax).clamp(max=FLT_MAX)
    multiplier = torch.where(amax == 0, 1.0, multiplier)
    if fmt.scale == "fp32_power_of_two":
        multiplier = (multiplier.view(torch.int32) & 0x7F800000).view(torch.float32)
    multiplier = torch.where(amax.isfinite(), multiplier, math.nan)
    return _divide(1.0, multiplier), multiplier


def _e4m3(amax: Tensor, fmt: NumberFormat, outer: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round amax / element.max, in units of the tensor's scale, to E4M3; at 0 elements are 0."""
    assert outer is not None
    wanted = _divide(_divide(amax, fmt.element.max), outer)
    scale = _encode_fp8(wanted, E4M3)
    decoded = scale.float()
    multiplier = torch.where(decoded == 0, 0.0, _divide(1.0, decoded * outer))
    return scale, multiplier


def _divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Divide FP32 numbers, correctly rounded on every device, compiled or not.

    Compiled CUDA code divides FP32 approximately, and eager CUDA turns a division by a number into
    a product. FP64 is exact on both; rounding twice is harmless since 53 >= 2 * 24 + 2 bits.
    """
    wide = [v.double() if isinstance(v, Tensor) else v for v in (a, b)]
    return torch.true_divide(*_as_tensors(*wide)).float()


def _as_tensors(a: Tensor | float, b: Tensor | float) -> tuple[Tensor, Tensor]:
    if isinstance(a, Tensor):
        return a, b if isinstance(b, Tensor) else torch.full_like(a, b)
    assert isinstance(b, Tensor)
    return torch.full_like(b, a), b


def _to_float(scale: Tensor) -> Tensor:
    return scale.float()


_SCALES: dict[ScaleName, _Scale] = {
    "e8m0_up": _Scale(torch.float8_e8m0fnu, _e8m0_up, e8m0_value),
    "e8m0_floor": _Scale(torch.float8_e8m0fnu, _e8m0_floor, e8m0_value),
    "fp32": _Scale(torch.float32, _fp32, _to_float),
    "fp32_power_of_two": _Scale(torch.float32, _fp32, _to_float),
    "e4m3": _Scale(torch.float8_e4m3fn, _e4m3, _to_float),
}


def _tensor_scale(x: Tensor, fmt: NumberFormat, ends: Tensor | None) -> Tensor | None:
    """Return amax / (element.max * 448) per tensor or group, at least 2^-126, NaN for Inf."""
    if not fmt.has_tensor_scale:
        return None
    amax = blocks_of(x, None, False, ends).amax(x).float()
    scale = _divide(amax, fmt.element.max * E4M3.max)
    return torch.where(scale.isfinite(), scale.clamp(min=_SMALLEST_NORMAL), math.nan)


# --- Elements ------------------------------------------------------------------------------------


def _encode_fp8(x: Tensor, element: Element) -> Tensor:
    """Saturate and round to nearest even; every NaN becomes 0x7F, as in hardware."""
    # Clamped first: torch 2.11 turns an overflow into NaN, 2.13 saturates.
    clamped = x.clamp(-element.max, element.max)
    return torch.where(x.isnan(), math.nan, clamped).to(element.dtype)


def _encode_e2m1(x: Tensor) -> Tensor:
    """Saturate and round to nearest even; NaN becomes 6, its scale carries it."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    # Halfway points of 0, .5, 1, 1.5, 2, 3, 4, 6: a tie goes to the even code.
    for i, halfway in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        above = magnitude > halfway if i % 2 == 0 else magnitude >= halfway
        code += above
    code = torch.where(x.isnan(), 7, code + (x.signbit() & ~x.isnan()) * 8).to(torch.uint8)
    return code[..., ::2] | (code[..., 1::2] << 4)


def _decode_e2m1(packed: Tensor) -> Tensor:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=packed.device)
    code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int64)
    magnitude = values[code & 7]
    return torch.where(code >= 8, -magnitude, magnitude)


_ENCODERS: dict[Element, Callable[[Tensor], Tensor]] = {
    E4M3: lambda x: _encode_fp8(x, E4M3),
    E5M2: lambda x: _encode_fp8(x, E5M2),
    E2M1: _encode_e2m1,
}
_DECODERS: dict[Element, Callable[[Tensor], Tensor]] = {
    E4M3: _to_float,
    E5M2: _to_float,
    E2M1: _decode_e2m1,
}
