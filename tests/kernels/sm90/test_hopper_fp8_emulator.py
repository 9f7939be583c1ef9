"""The emulator of Hopper's FP8 sums equals exact arithmetic, and what was measured."""

from fractions import Fraction

import pytest
import torch
from hopper_fp8 import exponents, power_of_two, product, tensor_core_sum

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FIELDS = {E4M3: (3, 15, 7), E5M2: (2, 31, 15)}  # bits of a fraction, largest exponent, its bias


def exponent_of(byte, dtype):
    fraction, largest, shift = FIELDS[dtype]
    return max(byte >> fraction & largest, 1) - shift


def kept(value, exponent):
    """``value`` cut towards zero to 13 bits behind the point of ``2 ** exponent``."""
    unit = Fraction(2) ** (exponent - 13)
    return int(value / unit) * unit


def exact_sum(a, b):
    """Of two rows, in Python's integers."""
    total = Fraction(0)
    values = [[Fraction(v) for v in t.float().tolist()] for t in (a, b)]
    of = [[exponent_of(v, t.dtype) for v in t.view(torch.uint8).tolist()] for t in (a, b)]
    for start in range(0, len(a), 32):
        at = slice(start, start + 32)
        terms = [
            (x * y, of_x + of_y)
            for x, y, of_x, of_y in zip(*[t[at] for t in (*values, *of)], strict=True)
            if x * y
        ]
        if total:
            terms.append((total, floor_log2(total)))
        if terms:
            top = max(exponent for _, exponent in terms)
            total = sum(kept(value, top) for value, _ in terms)
            total = kept(total, floor_log2(total)) if total else Fraction(0)
    return total


def floor_log2(value):
    numerator, denominator = abs(value.numerator), value.denominator
    return numerator.bit_length() - 1 - (denominator.bit_length() - 1)


def any_bits(*shape, dtype):
    t = torch.randint(256, shape, dtype=torch.uint8).view(dtype).float()
    return torch.where(t.isfinite(), t, 0).to(dtype)


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
@pytest.mark.parametrize("depth", [16, 128])
def test_sums_equal_exact_arithmetic(types, depth):
    a, b = (any_bits(8, depth, dtype=dtype) for dtype in types)
    a[0], b[1] = 2.0**-9, 2.0**-9  # subnormal in E4M3
    a[2], a[3, 1:] = 0, 0
    want = [[float(exact_sum(x, y)) for y in b] for x in a]
    assert tensor_core_sum(a, b).tolist() == want
    few = a.float() @ b.float().T
    assert (tensor_core_sum(a, b) != few).any()


@pytest.mark.parametrize("at", [1, 32, 100])
@pytest.mark.parametrize(("small", "kept"), [(2.0**-7, True), (2.0**-8, False)])
def test_products_down_to_two_to_the_minus_13_count(at, small, kept):
    """As on an H200, within an instruction and between them."""
    a, b = torch.zeros(2, 1, 128)
    a[0, 0] = b[0, 0] = 1
    a[0, at], b[0, at] = 2.0**-6, small
    expected = 1 + 2.0**-13 if kept else 1
    assert tensor_core_sum(a.to(E4M3), b.to(E4M3)).item() == expected


def test_blocks_of_128_are_promoted_to_fp32():
    a, b = torch.zeros(2, 1, 256)
    a[0, 0] = b[0, 0] = 256
    a[0, 128] = b[0, 128] = 1
    a, b = a.to(E4M3), b.to(E4M3)
    scale = torch.tensor([[2.0, 0.5]])
    assert tensor_core_sum(a, b).item() == 2**16
    assert product(a, b, scale, scale).item() == 2**18 + 0.25


def test_promotion_is_in_fp32():
    """``fma(a_scale * b_scale, sum, total)``, the product of the scales rounded."""
    a = torch.ones(1, 256).to(E4M3)
    first, second = torch.tensor([[1.0, 1 + 2.0**-23]]), torch.tensor([[2.0**-7, 1 + 2.0**-23]])
    # (1 + 2^-22) * 128, and 1 before it.
    assert product(a, a, first, second).item() == 129 + 2.0**-15


def test_powers_of_two_and_exponents():
    exponent = torch.tensor([-400, -126, 0, 1, 127])
    assert power_of_two(exponent).tolist() == [2.0 ** int(e) for e in exponent]
    t = torch.tensor([0.0, 1.0, -1.5, 2.0, 2.0**-9, torch.inf], dtype=torch.float64)
    assert exponents(t, -6).tolist()[:5] == [-200, 0, 0, 1, -6]
