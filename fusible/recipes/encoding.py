"""How scales and elements are encoded: FP32 arithmetic that every machine repeats exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fusible.recipes.formats import (
    E2M1,
    E4M3,
    E4M3_OVERFLOW,
    E5M2,
    Element,
    NumberFormat,
    ScaleName,
)

FLT_MAX = torch.finfo(torch.float32).max
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


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
    multiplier = divide(fmt.element.max, amax).clamp(max=FLT_MAX)
    multiplier = torch.where(amax == 0, 1.0, multiplier)
    if fmt.scale == "fp32_power_of_two":
        multiplier = (multiplier.view(torch.int32) & 0x7F800000).view(torch.float32)
    multiplier = torch.where(amax.isfinite(), multiplier, math.nan)
    return divide(1.0, multiplier), multiplier


def _e4m3(amax: Tensor, fmt: NumberFormat, outer: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round amax / element.max, in units of the tensor's scale, to E4M3; at 0 elements are 0.

    A scale that E4M3 does not hold is NaN: a block is larger than its tensor was said to be.
    """
    assert outer is not None
    wanted = divide(divide(amax, fmt.element.max), outer)
    scale = _encode_fp8(torch.where(wanted > E4M3_OVERFLOW, math.nan, wanted), E4M3)
    decoded = scale.float()
    # At most FLT_MAX, as an FP32 scale: infinity times the zeros of a tiny tensor is no number.
    inverse = divide(1.0, decoded * outer).clamp(max=FLT_MAX)
    return scale, torch.where(decoded == 0, 0.0, inverse)


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Divide FP32 numbers, correctly rounded on every device, compiled or not.

    Compiled CUDA code divides FP32 approximately, and eager CUDA turns a division by a number into
    a product. FP64 is exact on both; rounding twice is harmless since 53 >= 2 * 24 + 2 bits.
    """
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    wide = [
        v.double() if isinstance(v, Tensor) else torch.full_like(like, v, dtype=torch.float64)
        for v in (a, b)
    ]
    return torch.true_divide(*wide).float()


def decode_scale(scale: Tensor) -> Tensor:
    """Return stored scales in FP32."""
    return e8m0_value(scale) if scale.dtype == torch.float8_e8m0fnu else scale.float()


SCALE_ENCODERS: dict[
    ScaleName, Callable[[Tensor, NumberFormat, Tensor | None], tuple[Tensor, Tensor]]
] = {
    "e8m0_up": _e8m0_up,
    "e8m0_floor": _e8m0_floor,
    "fp32": _fp32,
    "fp32_power_of_two": _fp32,
    "e4m3": _e4m3,
}
"""They give (stored scale, FP32 multiplier from value to element) of block maxima."""


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
    return _packed_e2m1(x, code)


def encode_stochastically(x: Tensor, random: Tensor) -> Tensor:
    """Saturate, and round to E2M1 up or down, by numbers from 0 to 255 for each of ``x``.

    The chance of the upper neighbour is the distance to the lower one, rounded to 1/256 of the step
    between them: (2 * random + 1) / 512 of a step is added to the magnitude, and the sum is cut. So
    a number of E2M1 stays what it is, and the mean is off by at most 1/512 of a step.
    """
    magnitude = x.abs().clamp(max=E2M1.max)
    step = torch.where(magnitude >= 4, 2.0, torch.where(magnitude >= 2, 1.0, 0.5))
    magnitude = magnitude + (2 * random + 1).float() * (1 / 512) * step
    code = torch.zeros_like(x, dtype=torch.uint8)
    for number in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
        code += magnitude >= number
    return _packed_e2m1(x, code)


def _packed_e2m1(x: Tensor, code: Tensor) -> Tensor:
    """Two elements to a byte, from the codes of the magnitudes of ``x``."""
    code = torch.where(x.isnan(), 7, code + (x.signbit() & ~x.isnan()) * 8).to(torch.uint8)
    return code[..., ::2] | (code[..., 1::2] << 4)


def _decode_e2m1(packed: Tensor) -> Tensor:
    # 0, .5, 1, 1.5, 2, 3, 4, 6 by arithmetic: a table would be copied to the device in every call.
    code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    index = (code & 7).float()
    magnitude = torch.where(index < 6, index - 2, 2 * index - 8)
    magnitude = torch.where(index < 4, index / 2, magnitude)
    return torch.where(code >= 8, -magnitude, magnitude)


ENCODERS: dict[Element, Callable[[Tensor], Tensor]] = {
    E4M3: lambda x: _encode_fp8(x, E4M3),
    E5M2: lambda x: _encode_fp8(x, E5M2),
    E2M1: _encode_e2m1,
}
DECODERS: dict[Element, Callable[[Tensor], Tensor]] = {
    E4M3: Tensor.float,
    E5M2: Tensor.float,
    E2M1: _decode_e2m1,
}
