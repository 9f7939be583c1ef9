"""Every format at the ends of its range, against a reference in NumPy: tables and FP64."""

import numpy as np
import pytest
import torch
from number_formats import each_format, is_square

from fusible.recipes.formats import nvfp4
from fusible.recipes.quantization import dequantize, quantize

FLT_MAX = np.finfo(np.float32).max
TINY = 2.0**-126

# --- the reference -------------------------------------------------------------------------------


def table(exponent_bits, mantissa_bits, largest):
    """The magnitudes of a small floating format, by code."""
    bias, values = (1 << (exponent_bits - 1)) - 1, []
    for exponent in range(1 << exponent_bits):
        for mantissa in range(1 << mantissa_bits):
            fraction = mantissa / (1 << mantissa_bits)
            lead = 0 if exponent == 0 else 1
            values.append((lead + fraction) * 2.0 ** (max(exponent, 1) - bias))
    return np.array([v for v in values if v <= largest])


TABLES = {"e4m3": table(4, 3, 448.0), "e5m2": table(5, 2, 57344.0), "e2m1": table(2, 1, 6.0)}


def nearest(x, name):
    """The codes of FP32 numbers: nearest, ties to even codes, saturating; NaN is all ones."""
    values = TABLES[name]
    magnitude = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    halves = (values[:-1] + values[1:]) / 2
    code = np.searchsorted(halves, magnitude, side="left")  # a tie goes down,
    tie = (code < len(halves)) & (halves[np.minimum(code, len(halves) - 1)] == magnitude)
    code = np.where(tie & (code % 2 == 1), code + 1, code)  # and up from an odd code
    sign = {"e2m1": 8}.get(name, 128)
    nan = {"e2m1": 7}.get(name, 127)
    return np.where(np.isnan(x), nan, code + sign * np.signbit(x)).astype(np.uint8)


def f32(x):
    return np.asarray(x, dtype=np.float64).astype(np.float32)


def e8m0(amax, fmt):
    """Byte and multiplier: the exponent of amax / max, rounded up, or of amax less that of max."""
    largest = TABLES[fmt.element.name][-1]
    if fmt.scale == "e8m0_up":
        ratio = f32(amax.astype(np.float64) * np.float64(np.float32(1 / largest)))
        fraction, exponent = np.frexp(ratio.astype(np.float64))
        power = np.where(fraction == 0.5, exponent - 1, exponent)
        power = np.where(ratio == 0, -127, power)
    else:
        _, exponent = np.frexp(amax.astype(np.float64))
        # Denormals of FP32 count as its least exponent but one.
        power = np.maximum(exponent - 1, -127) - int(np.log2(largest))
        power = np.where(amax == 0, -127, power)
    byte = np.clip(power + 127, 0, 254).astype(np.int64)
    byte = np.where(np.isinf(amax), 254, byte)
    multiplier = f32(2.0 ** (127.0 - byte))
    nan = np.isnan(amax)
    return np.where(nan, 255, byte).astype(np.uint8), np.where(nan, np.float32(np.nan), multiplier)


def fp32_scale(amax, fmt):
    amax = np.maximum(amax, np.float32(fmt.amax_epsilon))
    factor = f32(TABLES[fmt.element.name][-1] / amax.astype(np.float64))
    factor = np.where(amax == 0, np.float32(1), np.minimum(factor, FLT_MAX))
    if fmt.scale == "fp32_power_of_two":
        _, exponent = np.frexp(factor.astype(np.float64))
        factor = f32(2.0 ** (exponent - 1.0))
    factor = np.where(np.isfinite(amax), factor, np.float32(np.nan))
    return f32(1 / factor.astype(np.float64)), factor


def e4m3_scale(amax, outer):
    wanted = f32(f32(amax.astype(np.float64) / 6).astype(np.float64) / np.float64(outer))
    byte = nearest(wanted, "e4m3")
    decoded = np.where(byte == 127, np.nan, TABLES["e4m3"][np.minimum(byte, 126)])
    inverse = f32(1 / f32(decoded * np.float64(outer)).astype(np.float64))
    inverse = np.where(np.isnan(inverse), inverse, np.minimum(inverse, FLT_MAX))
    return byte, np.where(decoded == 0, np.float32(0), inverse)


def reference(x, fmt):
    """Bytes of elements, of scales and of the tensor's scale, of FP32 ``[rows, columns]``."""
    (across, along) = fmt.block or x.shape
    tiles = x.reshape(x.shape[0] // across, across, x.shape[1] // along, along)
    amax = np.abs(tiles).max(axis=(1, 3))  # NaN if one is in it
    outer = None
    if fmt.scale == "e4m3":
        outer = f32(np.float64(np.abs(x).max()) / (6 * 448))
        outer = np.maximum(outer, np.float32(TINY)) if np.isfinite(outer) else np.float32(np.nan)
        scale, multiplier = e4m3_scale(amax, outer)
    elif fmt.scale.startswith("e8m0"):
        scale, multiplier = e8m0(amax, fmt)
    else:
        scale, multiplier = fp32_scale(amax, fmt)
    scaled = f32(tiles.astype(np.float64) * multiplier[:, None, :, None].astype(np.float64))
    code = nearest(scaled, fmt.element.name).reshape(x.shape)
    if fmt.element.per_byte == 2:
        code = code[:, ::2] | (code[:, 1::2] << 4)
    return code, scale, outer


# --- the inputs ----------------------------------------------------------------------------------

# Largest magnitude of each block of a tensor, as far as the dtype has it.
REGIMES = {
    "zero": [0.0],
    "smallest denormal of FP32": [2.0**-149],
    "denormals of FP32": [2.0**-149, 2.0**-140, 2.0**-130, 2.0**-127],
    "tiny": [2.0**-126, 2.0**-120, 2.0**-118, 2.0**-117],
    "tiny beside zeros": [0.0, 2.0**-126, 0.0, 2.0**-122],
    "tiny beside larger": [2.0**-126, 2.0**-100, 1.0, 2.0**-110],
    "denormals of FP16": [2.0**-24, 2.0**-20, 2.0**-15, 0.0],
    "around one": [0.75, 1.0, 1.5, 6.0],
    "at the elements' maxima": [448.0, 57344.0, 6.0, 449.0],
    "largest": [2.5e38, 6e4, 1e38, 1.0],
    "rounded to infinity": [3.3e38, 6e4, 1e38, 1.0],
}
SPECIAL = {"none": None, "inf": np.inf, "-inf": -np.inf, "nan": np.nan}


def values(regime, special, dtype, fmt):
    rng, rows = np.random.default_rng(3), 128 if is_square(fmt) else 8
    x = rng.uniform(-1, 1, (rows, 512))
    largest = np.resize(np.repeat(REGIMES[regime], 128), 512)
    x = x * largest
    x[0] = largest
    x[1] = -largest
    x[2] = 0.0
    x[3] = -0.0
    x[:, 7::16] = 0.0
    if SPECIAL[special] is not None:
        x[5, 40] = SPECIAL[special]
    limit = torch.finfo(dtype).max
    clipped = np.where(np.isfinite(x), np.clip(x, -limit, limit), x)
    return torch.from_numpy(clipped).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("special", SPECIAL)
@each_format
def test_bits_are_those_of_the_reference(fmt, special, dtype):
    for regime in REGIMES:
        x = values(regime, special, dtype, fmt)
        made = quantize(x, fmt)
        with np.errstate(all="ignore"):
            code, scale, outer = reference(x.float().numpy(), fmt)
        if made.tensor_scale is not None:
            np.testing.assert_array_equal(made.tensor_scale.numpy()[0], outer, regime)
        if made.scale.dtype == torch.float32:
            np.testing.assert_array_equal(made.scale.numpy().reshape(scale.shape), scale, regime)
        else:
            np.testing.assert_array_equal(made.scale.view(torch.uint8).numpy(), scale, regime)
        np.testing.assert_array_equal(made.data.view(torch.uint8).numpy(), code, regime)


@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "column"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each_format
def test_zeros_stay_zeros_and_finite_values_finite(fmt, dtype, columnwise):
    for regime in REGIMES.keys() - {"rounded to infinity"}:
        x = values(regime, "none", dtype, fmt)
        made = dequantize(quantize(x, fmt, columnwise=columnwise))
        assert made.isfinite().all(), regime
        assert (made[x == 0] == 0).all(), regime
        assert (made.signbit() == x.signbit())[made != 0].all(), regime


@pytest.mark.parametrize("exponent", range(-149, -110))
def test_nvfp4_of_tiny_tensors(exponent):
    """Once, a scale under 2^-128 had no finite inverse, and zeros became 6 times that scale."""
    x = torch.zeros(16, 32)
    x[0, ::2] = 2.0**exponent
    values = dequantize(quantize(x, nvfp4()))
    assert (values[x == 0] == 0).all()
    assert (values <= 2 * x).all()
    if exponent > -126:
        torch.testing.assert_close(values, x, rtol=0.25, atol=0)
