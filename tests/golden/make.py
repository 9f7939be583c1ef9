"""Makes the golden vectors: quantized blocks computed with exact fractions.

    python tests/golden/make.py

Written from the definitions alone (OCP Microscaling Formats v1.0 sections 5 and 6.3, OCP OFP8 v1.0,
NVIDIA's NVFP4 description), with Python integers and fractions: neither torch nor fusible is
imported. FP32 steps that a definition names are rounded by ``fp32`` below. Numbers are stored as
the hexadecimal digits of their little-endian bytes.
"""

import bisect
import functools
import gzip
import itertools
import json
import math
import random
import struct
from fractions import Fraction
from pathlib import Path

HERE = Path(__file__).parent
NAN, INF = math.nan, math.inf
FLT_MAX = 2.0**128 - 2.0**104

# name: exponent bits, mantissa bits, bias, largest finite magnitude, code of NaN
ELEMENTS = {
    "e4m3": (4, 3, 7, Fraction(448), 0x7F),
    "e5m2": (5, 2, 15, Fraction(57344), 0x7F),
    "e2m1": (2, 1, 1, Fraction(6), 0x7),
}


def decode_magnitude(element, code):
    """Value of a code without sign by OFP8 / MX table 1, None if it is not a finite number."""
    _, mantissa_bits, bias, largest, _ = ELEMENTS[element]
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    fraction = Fraction(mantissa, 1 << mantissa_bits)
    if exponent == 0:
        value = fraction * Fraction(2) ** (1 - bias)
    else:
        value = (1 + fraction) * Fraction(2) ** (exponent - bias)
    return value if value <= largest else None


@functools.cache
def magnitudes(element):
    bits = ELEMENTS[element][0] + ELEMENTS[element][1]
    decoded = [decode_magnitude(element, code) for code in range(1 << bits)]
    return [value for value in decoded if value is not None]


@functools.cache
def halfways(element):
    values = magnitudes(element)
    return [(low + high) / 2 for low, high in itertools.pairwise(values)]


def nearest(element, magnitude):
    """Index of the nearest magnitude, the even one of two, saturating."""
    between = halfways(element)
    i = bisect.bisect_left(between, magnitude)
    tie = i < len(between) and between[i] == magnitude
    return i + 1 if tie and i % 2 else i


def encode(element, x):
    """Code of ``x`` (float, exact), round to nearest even, saturating."""
    bits = ELEMENTS[element][0] + ELEMENTS[element][1]
    if math.isnan(x):
        return ELEMENTS[element][4]
    sign = (1 << bits) if math.copysign(1, x) < 0 else 0
    if math.isinf(x):
        return sign | (len(magnitudes(element)) - 1)
    if x == 0:
        return sign
    return sign | nearest(element, abs(Fraction(x)))


def fp32(x):
    """Round a fraction (or pass NaN and Inf) to FP32: nearest even, denormals, overflow to Inf."""
    if isinstance(x, float) and not math.isfinite(x):
        return x
    x = Fraction(x)
    if x == 0:
        return 0.0
    exponent = max(floor_log2(abs(x)), -126)
    unit = Fraction(2) ** (exponent - 23)
    scaled = abs(x) / unit
    n = scaled.numerator // scaled.denominator
    rest = scaled - n
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and n % 2):
        n += 1
    if n * unit >= Fraction(2) ** 128:
        return INF if x > 0 else -INF
    return float(n * unit) if x > 0 else -float(n * unit)


def floor_log2(x):
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def ceil_log2(x):
    e = floor_log2(x)
    return e if Fraction(2) ** e == x else e + 1


def times(a, b):
    """FP32 product of two FP32 numbers, NaN and Inf included."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    if a == 0 or b == 0:
        return math.copysign(0.0, math.copysign(1, a) * math.copysign(1, b))
    product = fp32(Fraction(a) * Fraction(b))
    return math.copysign(product, math.copysign(1, a) * math.copysign(1, b))


def amax(xs):
    return NAN if any(math.isnan(x) for x in xs) else max(abs(x) for x in xs)


# --- Scales: each returns (stored bytes, multiplier from value to element) -----------------------


def e8m0(element, a, rounding):
    """One power of two; the exponent is rounded up from a/max, or down as MX section 6.3."""
    _, _, _, largest, _ = ELEMENTS[element]
    if math.isnan(a):
        return b"\xff", NAN
    if math.isinf(a):
        exponent = 127
    elif a == 0:
        exponent = -127
    elif rounding == "up":
        scaled = fp32(Fraction(a) * Fraction(fp32(1 / largest)))
        exponent = ceil_log2(Fraction(scaled)) if scaled else -127
    else:
        exponent = floor_log2(Fraction(a)) - floor_log2(largest)
    exponent = min(max(exponent, -127), 127)
    return bytes([exponent + 127]), float(Fraction(2) ** -exponent)


def fp32_scale(element, a, power_of_two):
    """Take max/a in FP32 as multiplier, at most the largest FP32, and store its inverse."""
    largest = ELEMENTS[element][3]
    if not math.isfinite(a):
        return struct.pack("<f", NAN), NAN
    if a == 0:
        multiplier = 1.0
    else:
        multiplier = fp32(largest / Fraction(a))
        if math.isinf(multiplier):
            multiplier = FLT_MAX
    if power_of_two:
        multiplier = float(Fraction(2) ** floor_log2(Fraction(multiplier)))
    return struct.pack("<f", fp32(1 / Fraction(multiplier))), multiplier


def nvfp4_scale(a, outer):
    """a/6 in units of the tensor's scale, in E4M3; the multiplier is the inverse of both."""
    if math.isnan(outer):
        return bytes([0x7F]), NAN
    wanted = fp32(Fraction(fp32(Fraction(a) / 6)) / Fraction(outer))
    code = encode("e4m3", wanted)
    value = decode_magnitude("e4m3", code)
    if value == 0:
        return bytes([code]), 0.0
    inverse = fp32(1 / Fraction(fp32(value * Fraction(outer))))
    return bytes([code]), min(inverse, FLT_MAX)


def nvfp4_outer(a):
    if not math.isfinite(a):
        return NAN
    return max(fp32(Fraction(a) / 2688), float(Fraction(2) ** -126))


# --- Cases ---------------------------------------------------------------------------------------


def block_case(name, element, size, scale, rows):
    """Every row of ``rows`` is one block."""
    codes, scales = b"", b""
    for row in rows:
        assert len(row) == size
        stored, multiplier = scale(amax(row))
        scales += stored
        row_codes = [encode(element, times(x, multiplier)) for x in row]
        if element == "e2m1":
            pairs = zip(row_codes[::2], row_codes[1::2], strict=True)
            codes += bytes(low | high << 4 for low, high in pairs)
        else:
            codes += bytes(row_codes)
    case = {"format": name, "columns": size, "data": codes.hex(), "scale": scales.hex()}
    return case | {"input": b"".join(struct.pack("<f", x) for row in rows for x in row).hex()}


def neighbours(x):
    """FP32 ``x`` with the numbers beside it."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    return [struct.unpack("<f", struct.pack("<I", b))[0] for b in (bits - 1, bits, bits + 1)]


def bf16_neighbours(x):
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    top = bits >> 16
    return [struct.unpack("<f", struct.pack("<I", b << 16))[0] for b in (top - 1, top, top + 1)]


def pad(xs, size):
    return [*xs, *[0.0] * (size - len(xs))]


def element_rows(element, size):
    """With a scale of one: every value, halfway points and their neighbours, both signs."""
    values = magnitudes(element)
    largest = float(values[-1])
    probes = [float(v) for v in values]
    for low, high in itertools.pairwise(values):
        probes += neighbours(float((low + high) / 2))
    probes += [math.copysign(0.0, -1)] + [-p for p in probes]
    rows = []
    for i in range(0, len(probes), size - 1):
        rows.append(pad([largest, *probes[i : i + size - 1]], size))
    return rows


def scale_rows(element, size):
    """Largest magnitudes at and beside every boundary of every E8M0 byte, FP32 and BF16."""
    largest = ELEMENTS[element][3]
    power = Fraction(2) ** floor_log2(largest)
    rows = []
    for exponent in range(-127, 128):
        for boundary in (largest, power):
            value = boundary * Fraction(2) ** exponent
            if Fraction(2) ** -126 <= value < Fraction(2) ** 127:
                for probe in (*neighbours(float(value)), *bf16_neighbours(float(value))):
                    rows.append(pad([probe, -probe / 2, 0.0], size))
    return rows


def special_rows(size, seed):
    generator = random.Random(seed)

    def random_row(spread):
        return [
            fp32(Fraction(generator.gauss(0, 1)) * Fraction(2) ** generator.randint(*spread))
            for _ in range(size)
        ]

    tiny = float(Fraction(2) ** -149)
    rows = [
        pad([], size),
        pad([-0.0, 0.0], size),
        pad([NAN, 1.0], size),
        pad([INF, 1.0, -2.0], size),
        pad([-INF, 3.0], size),
        pad([NAN, INF], size),
        pad([tiny], size),
        pad([tiny * 1000, -tiny], size),
        pad([float(Fraction(2) ** -126)], size),
        pad([float(Fraction(2) ** 128 - Fraction(2) ** 104), 1.0], size),
        pad([float(Fraction(448) * Fraction(2) ** -127)], size),
        pad([1e-36, 1e-37, -1e-38], size),
    ]
    rows = [[fp32(x) if math.isfinite(x) and x else x for x in row] for row in rows]
    rows += [random_row((0, 0)) for _ in range(6)]
    rows += [random_row((-12, 12)) for _ in range(4)]
    rows += [random_row((-130, -110)) for _ in range(2)]
    return rows


def mx_cases():
    for element in ("e4m3", "e5m2"):
        for rounding, suffix in (("up", ""), ("floor", "_floor")):
            rows = element_rows(element, 32) + scale_rows(element, 32) + special_rows(32, 1)
            name = f"mxfp8_{element}{suffix}"
            yield block_case(
                name, element, 32, lambda a, e=element, r=rounding: e8m0(e, a, r), rows
            )


def fp8_cases():
    for power in (True, False):
        rows = element_rows("e4m3", 128) + special_rows(128, 2)
        name = "fp8_1x128_e4m3" + ("" if power else "_fp32")
        yield block_case(name, "e4m3", 128, lambda a, p=power: fp32_scale("e4m3", a, p), rows)
    for element in ("e4m3", "e5m2"):
        for row in element_rows(element, 128)[:2] + special_rows(16, 3):
            yield block_case(
                f"fp8_tensor_{element}",
                element,
                len(row),
                lambda a, e=element: fp32_scale(e, a, False),
                [row],
            )


def nvfp4_cases():
    tensors = [element_rows("e2m1", 16)] + [
        [row, *special_rows(16, 4)[12:]] for row in special_rows(16, 5)
    ]
    # The largest block makes the tensor's scale one, so that every E4M3 scale and its halfway
    # points are met: a block's amax is six times the wanted scale.
    values = magnitudes("e4m3")
    wanted = [float(6 * v) for v in values]
    for low, high in itertools.pairwise(values):
        wanted += neighbours(float(3 * (low + high)))
    tensors.append([pad([2688.0], 16)] + [pad([w, -w / 2], 16) for w in wanted])
    for rows in tensors:
        outer = nvfp4_outer(amax([x for row in rows for x in row]))
        case = block_case("nvfp4", "e2m1", 16, lambda a, o=outer: nvfp4_scale(a, o), rows)
        yield case | {"tensor_scale": struct.pack("<f", outer).hex()}


# --- NVFP4 as it is trained with ------------------------------------------------------------------

SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def bf16(x):
    """Round FP32 to BF16, nearest even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("<f", struct.pack("<I", bits >> 16 << 16))[0]


def add(a, b):
    """FP32 sum of finite numbers that are not negative zeros both."""
    return fp32(Fraction(a) + Fraction(b))


def hadamard(column):
    """Sums and differences of halves of the signed column, recursively from pairs on; a quarter."""
    done = [sign * x for sign, x in zip(SIGNS, column, strict=True)]
    size = 1
    while size < 16:
        blocks = [done[i : i + 2 * size] for i in range(0, 16, 2 * size)]
        done = [
            number
            for block in blocks
            for number in (
                *(add(a, b) for a, b in zip(block[:size], block[size:], strict=True)),
                *(add(a, -b) for a, b in zip(block[:size], block[size:], strict=True)),
            )
        ]
        size *= 2
    return [number / 4 for number in done]


def philox(counter, key):
    """Philox4x32-10 by Salmon et al., from its definition."""
    x, k = [*counter], [*key]
    for _ in range(10):
        first, second = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [
            second >> 32 ^ x[1] ^ k[0],
            second % 2**32,
            first >> 32 ^ x[3] ^ k[1],
            first % 2**32,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


def random_byte(key, row, column, columnwise):
    seed, offset = (number % 2**64 for number in key)
    words = philox((column // 8, row, offset % 2**32, offset >> 32), (seed % 2**32, seed >> 32))
    word = words[2 * columnwise + column % 8 // 4]
    return word >> 8 * (column % 4) & 255


def encode_by_chance(x, byte):
    """Code of E2M1 ``x``: up where the fraction of the step and (2 byte + 1) / 512 reach one."""
    table = magnitudes("e2m1")
    magnitude = min(abs(Fraction(x)), table[-1])
    code = bisect.bisect_right(table, magnitude) - 1
    if code < 7:
        step = table[code + 1] - table[code]
        code += (magnitude - table[code]) / step + Fraction(2 * byte + 1, 512) >= 1
    return (8 if math.copysign(1, x) < 0 else 0) | code


def training_case(rows, key=None, transform=False, short=False):
    """``rows`` of BF16 quantized for the column-wise use.

    Columns of 16 rows, or fewer if ``short``, are one block each.
    """
    columns = [*zip(*rows, strict=True)]
    if transform and not short:
        columns = [[bf16(x) for x in hadamard(column)] for column in columns]
    outer = nvfp4_outer(amax([x for column in columns for x in column]))
    codes, scales = [], b""
    for c, column in enumerate(columns):
        stored, multiplier = nvfp4_scale(amax(column), outer)
        scales += stored
        scaled = [times(x, multiplier) for x in column]
        codes.append([
            encode("e2m1", x) if key is None else encode_by_chance(x, random_byte(key, r, c, True))
            for r, x in enumerate(scaled)
        ])  # fmt: skip
    in_rows = [*zip(*codes, strict=True)]
    data = bytes(
        low | high << 4 for row in in_rows for low, high in zip(row[::2], row[1::2], strict=True)
    )
    return {
        "input": b"".join(struct.pack("<f", x) for row in rows for x in row).hex(),
        "columns": len(rows[0]), "key": key, "hadamard": transform, "data": data.hex(),
        "scale": scales.hex(), "tensor_scale": struct.pack("<f", outer).hex(),
    }  # fmt: skip


def training_cases():
    generator = random.Random(7)

    def rows(count, columns):
        spread = [2.0 ** generator.randint(-6, 6) for _ in range(columns)]
        return [[bf16(fp32(Fraction(generator.gauss(0, 1)) * Fraction(s))) for s in spread]
                for _ in range(count)]  # fmt: skip

    keys = [None, [0, 0], [-17, 2**40 + 3], [2**62 + 5, -1]]
    for key in keys:
        for transform in (False, True):
            if key or transform:
                yield training_case(rows(16, 48), key, transform)
                yield training_case(rows(11, 24), key, transform, short=True)


def values():
    """Return decoded values of every code, as FP32; NaN and Inf where a code means that."""
    table = {}
    for element, (_, _, _, _, _) in ELEMENTS.items():
        finite = [float(v) for v in magnitudes(element)]
        if element == "e5m2":
            finite += [INF, NAN, NAN, NAN]
        if element == "e4m3":
            finite += [NAN]
        table[element] = struct.pack(f"<{2 * len(finite)}f", *finite, *(-v for v in finite)).hex()
    powers = [float(Fraction(2) ** (byte - 127)) for byte in range(255)]
    table["e8m0"] = struct.pack("<256f", *powers, NAN).hex()
    return table


def main():
    """Write ``values.json``, ``blocks.json.gz`` and ``training.json``."""
    (HERE / "values.json").write_text(json.dumps(values(), indent=1) + "\n")
    cases = [*mx_cases(), *fp8_cases(), *nvfp4_cases()]
    # No time in the header: the same vectors are the same file.
    (HERE / "training.json").write_text(json.dumps([*training_cases()]) + "\n")
    (HERE / "blocks.json.gz").write_bytes(gzip.compress(json.dumps(cases).encode(), mtime=0))


if __name__ == "__main__":
    main()
