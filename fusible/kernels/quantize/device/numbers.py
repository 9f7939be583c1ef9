"""Scales and elements of every format on the device: ``recipes.encoding``, bit for bit."""

import cutlass
from cutlass import Float32, Uint32
from cutlass.cute.arch import inline_ptx

from fusible.kernels.device.bits import (
    INF,
    NAN,
    ONE,
    divide,
    pack,
    select,
    smaller,
    to_bits,
    to_float,
    unpack_f16,
)
from fusible.recipes.formats import E4M3, E4M3_OVERFLOW

_FLT_MAX = 0x7F7FFFFF
_NAN_E4M3 = 0x7F
_HALF = 0x3F000000
_SMALLEST_NORMAL = 0x00800000


def _power(exponent):
    """Bits of 2^(exponent - 127), for an exponent below 255."""
    return select(exponent == 0, 0x400000, exponent << 23)


def _e8m0_up(amax, outer, fmt):
    bits = to_bits(to_float(amax) * Float32(1.0 / fmt.element.max))
    # Adding all mantissa bits carries into the exponent unless the mantissa is zero.
    byte = (bits + 0x7FFFFF) >> 23
    return _e8m0(select(bits <= 0x400000, 0, byte), amax)


def _e8m0_floor(amax, outer, fmt):
    exponent, least = amax >> 23, fmt.element.max_exponent
    return _e8m0(select(exponent <= least, 0, exponent - least), amax)


def _e8m0(byte, amax):
    byte = select(amax >= INF, 254, byte)
    nan = amax > INF
    return select(nan, 255, byte), to_float(select(nan, NAN, _power(254 - byte)))


def _fp32(amax, outer, fmt):
    amax = cutlass.max(amax, to_bits(Float32(max(fmt.amax_epsilon, 0.0))))
    factor = cutlass.min(to_bits(divide(fmt.element.max, to_float(amax))), Uint32(_FLT_MAX))
    factor = select(amax == 0, ONE, factor)
    if fmt.scale == "fp32_power_of_two":
        exponent = factor >> 23
        factor, inverse = exponent << 23, _power(254 - exponent)
    else:
        inverse = to_bits(divide(1.0, to_float(factor)))
    lost = amax >= INF
    return select(lost, NAN, inverse), to_float(select(lost, NAN, factor))


def _e4m3(amax, outer, fmt):
    wanted = divide(divide(to_float(amax), fmt.element.max), outer)
    byte = pack_fp8([wanted, Float32(0), Float32(0), Float32(0)], E4M3)
    byte = select(wanted > Float32(E4M3_OVERFLOW), _NAN_E4M3, byte)
    (value,) = unpack_fp8(byte, 1, E4M3)
    inverse = cutlass.min(to_bits(divide(1.0, value * outer)), Uint32(_FLT_MAX))
    inverse = select(byte == _NAN_E4M3, NAN, inverse)
    return byte, to_float(select(byte == 0, 0, inverse))


_SCALES = {
    "e8m0_up": _e8m0_up,
    "e8m0_floor": _e8m0_floor,
    "fp32": _fp32,
    "fp32_power_of_two": _fp32,
    "e4m3": _e4m3,
}


def encode_scale(amax, outer, fmt):
    """Stored scale of a largest magnitude's bits, and the factor from value to element.

    The scale is a byte or the bits of an FP32 number. ``outer`` is the tensor's own scale, where
    the format has one.
    """
    return _SCALES[fmt.scale](amax, outer, fmt)


def decode_scale(stored, fmt):
    """The FP32 factor from element to value."""
    if fmt.scale.startswith("e8m0"):
        return to_float(select(stored == 255, NAN, _power(stored)))
    if fmt.scale == "e4m3":
        return unpack_fp8(stored, 1, E4M3)[0]
    return to_float(stored)


def tensor_scale(amax, fmt):
    """The scale of a whole tensor, from the bits of its largest magnitude."""
    scale = to_bits(divide(to_float(amax), fmt.element.max * E4M3.max))
    scale = cutlass.max(scale, Uint32(_SMALLEST_NORMAL))
    return to_float(select(amax >= INF, NAN, scale))


def scale_bytes(fmt):
    """Size of one stored scale."""
    return 4 if fmt.scale.startswith("fp32") else 1


def pack_elements(values, fmt, random=None):
    """Words of saturated elements, the first lowest.

    They are rounded to nearest even, or by ``random`` bytes where ``fmt`` is stochastic.
    """
    if fmt.stochastic:
        return [pack_stochastically(values, random)]
    if fmt.element.per_byte == 2:
        return [pack_e2m1(values[i : i + 8]) for i in range(0, len(values), 8)]
    return [pack_fp8(values[i : i + 4], fmt.element) for i in range(0, len(values), 4)]


def unpack_elements(words, fmt):
    """The FP32 numbers of words of elements."""
    if fmt.element.per_byte == 2:
        return [value for word in words for value in unpack_e2m1(word)]
    return [value for word in words for value in unpack_fp8(word, 4, fmt.element)]


def decode_elements(words, factors, fmt, dtype):
    """Words of ``dtype`` of the values of elements, each times its factor."""
    elements = unpack_elements(words, fmt)
    values = [value * factor for value, factor in zip(elements, factors, strict=True)]
    return pack(values, dtype)


def pack_fp8(values, element):
    """Four FP32 numbers to the four elements of a word; NaN is 0x7F."""
    kind = element.name
    return inline_ptx(
        f"{{ .reg .b16 a, b; cvt.rn.satfinite.{kind}x2.f32 a, {{$r1}}, {{$r0}}; "
        f"cvt.rn.satfinite.{kind}x2.f32 b, {{$r3}}, {{$r2}}; mov.b32 {{$w0}}, {{a, b}}; }}",
        write_only_types=[Uint32],
        read_only_args=list(values),
    )


def unpack_fp8(word, count, element):
    """The first ``count`` FP32 numbers of a word of four elements."""
    kind = element.name
    pairs = inline_ptx(
        f"{{ .reg .b16 a, b; mov.b32 {{a, b}}, {{$r0}}; cvt.rn.f16x2.{kind}x2 {{$w0}}, a; "
        f"cvt.rn.f16x2.{kind}x2 {{$w1}}, b; }}",
        write_only_types=[Uint32, Uint32],
        read_only_args=[word],
    )
    return [value for pair in pairs for value in unpack_f16(pair)][:count]


def pack_e2m1(values, instruction=False):
    """FP32 numbers to elements from the lowest bits on; NaN, which has no sign here, is 6.

    They are eight in a word, or two in a byte. SM100 has an ``instruction`` for two.
    """
    word = Uint32(0)
    if instruction:
        for i in range(0, len(values), 2):
            word = word | (_e2m1_pair(values[i], values[i + 1]) << (4 * i))
        return word
    for i, value in enumerate(values):
        word = word | (_e2m1(value) << (4 * i))
    return word


def _e2m1_pair(low, high):
    return inline_ptx(
        "{ .reg .b8 a; cvt.rn.satfinite.e2m1x2.f32 a, {$r1}, {$r0}; cvt.u32.u8 {$w0}, a; }",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def _e2m1(value):
    """Code of one number, by an addition that leaves its code in the lowest bits of the sum.

    Adding 2^(22 + e) rounds a number of exponent e to steps of 2^(e - 1), nearest even; below 1
    the step stays 1/2, and every binade begins two codes after the one before.
    """
    bits = to_bits(value)
    magnitude = smaller(to_float(bits & 0x7FFFFFFF), 6.0)
    binade = cutlass.max(to_bits(magnitude) & INF, Uint32(ONE))
    shift = binade + (22 << 23)
    steps = to_bits(magnitude + to_float(shift)) - shift
    return steps + ((binade - ONE) >> 22) | (bits >> 28) & 8


def pack_stochastically(values, random):
    """Up to eight FP32 numbers to a word of E2M1, by a byte each of ``random`` words."""
    word = Uint32(0)
    for i, value in enumerate(values):
        byte = (random[i // 4] >> (8 * (i % 4))) & 255
        word = word | (_e2m1_at_random(value, byte) << (4 * i))
    return word


def _e2m1_at_random(value, byte):
    bits = to_bits(value)
    magnitude = smaller(to_float(bits & 0x7FFFFFFF), 6.0)
    binade = cutlass.max(to_bits(magnitude) & INF, Uint32(ONE))
    # Half the binade is the step, of which (2 * byte + 1) / 512 is added: that plus 1, less 1.
    part = to_float(ONE | (2 * byte + 1) << 14) - Float32(1)
    cut = to_bits(magnitude + part * to_float(binade - (1 << 23)))
    code = select(cut >= ONE, ((cut - ONE) >> 22) + 2, select(cut >= _HALF, 1, 0))
    return code | (bits >> 28) & 8


def unpack_e2m1(word):
    """The eight FP32 numbers of a word: bits of the elements stand for tiny numbers of FP32."""
    values = []
    for i in range(8):
        code = word >> (4 * i)
        tiny = to_float((code & 7) << 22 | (code & 8) << 28)
        values.append(tiny * Float32(2.0**126))
    return values
