"""Errors of FP8 products on Hopper, against FP64 products of the same elements and scales.

The emulator of the kernels' arithmetic meets the same bounds on any machine. Memory behind every
operand, and every new output, is NaN.
"""

import math
from typing import Any, NamedTuple

import hopper_fp8 as emulator
import pytest
import reference as ref
import torch
from checks import hopper
from hopper_fp8 import bounded, by_reduction, by_rows, rounded

from fusible.kernels import grouped
from fusible.kernels.glu import Glu
from fusible.kernels.sm90 import checked_products

pytestmark = pytest.mark.usefixtures("poisoned")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOTH_E4M3 = E4M3, E4M3
TAIL = 70  # rows of no group
DEPTH = 656  # five blocks and an eighth: kernels load the scales of four at once
KINDS = ("normal", "FP32 scales", "any bits", "one huge product", "cancelling", "far scales")

each_kind = pytest.mark.parametrize("kind", KINDS)
each_type = pytest.mark.parametrize(
    "types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=str
)


class Case(NamedTuple):
    """What computes the products, and of how many rows and columns."""

    ops: Any
    sizes: tuple[int, ...]
    columns: int

    def live(self, t):
        return t[..., : sum(self.sizes), :]

    def row_operands(self, *kind):
        return row_operands(*kind, self.sizes, self.columns, DEPTH)

    def padded_operands(self, *kind):
        return padded_operands(*kind, self.sizes, self.columns, self.columns // 2 + 16)


@pytest.fixture(params=["emulator", pytest.param("kernels", marks=hopper)])
def case(request, default_device):
    """The emulator, of few rows; or on a Hopper GPU the kernels."""
    if request.param == "emulator":
        return Case(emulator, (9, 0, 1, 20), 64)
    default_device("cuda")
    return Case(checked_products, (129, 0, 1, 128, 0, 127, 700), 256)


# --- operands -------------------------------------------------------------------------------------


def before_nan(t):
    """A copy, with NaN in the memory behind it."""
    size = t.numel() * t.element_size()
    memory = torch.full((size + 2**16,), 0xFF, dtype=torch.uint8, device=t.device)
    copy = memory[:size].view(t.dtype).view(t.shape)
    return copy.copy_(t)


def elements(kind, *shape, dtype=E4M3):
    """Of an operand whose last dimension is reduced."""
    if kind == "any bits":
        t = torch.randint(256, shape, dtype=torch.uint8).view(dtype).float()
        return torch.where(t.isfinite(), t, 0).to(dtype)
    t = torch.randn(shape) * 16
    if kind == "positive":
        t = torch.rand(shape) * 448
    if kind == "one huge product":  # in each block, at the same place in both operands
        t = torch.ones(shape)
        t[..., 37::128] = 448
    return t.to(dtype)


def cancelled(t, factor):
    """The second half of each block of 128 is the first one times ``factor``."""
    t = t.float()
    for block in t.split(128, -1):
        half = block.shape[-1] // 2
        block[..., half:] = block[..., :half] * factor
    return t


def scales(kind, *shape):
    if kind == "FP32 scales":
        return torch.rand(shape) + 0.5
    if kind == "far scales":
        return torch.randint(2, shape).float().sub(0.5).mul(40).exp2()  # 2^-20 or 2^20
    return torch.randint(-4, 5, shape).float().exp2()


def pair(kind, types, of_a, of_b):
    """Elements of both operands."""
    a, b = (elements(kind, *s, dtype=t) for s, t in zip((of_a, of_b), types, strict=True))
    if kind == "cancelling":
        a, b = cancelled(a, 1).to(a.dtype), cancelled(b, -1).to(b.dtype)
    return a, b


def ends_of(sizes):
    return torch.tensor(sizes, device="cpu").cumsum(0).int().to(torch.get_default_device())


def blocks(size):
    return -(-size // 128)


def row_operands(kind, types, sizes, columns, depth):
    """``(x, [w], ends), (x_scale, w_scale)``; rows of no group are NaN."""
    shape = sum(sizes) + TAIL, depth
    x, w = pair(kind, types, shape, (len(sizes), columns, depth))
    x_scale = scales(kind, blocks(depth), len(x)).t()
    w_scale = scales(kind, len(sizes), blocks(columns), blocks(depth))
    x[sum(sizes) :], x_scale[sum(sizes) :] = math.nan, math.nan
    given = before_nan(x), [before_nan(w)], ends_of(sizes)
    return given, (before_nan(x_scale.t()).t(), before_nan(w_scale))


def padded_operands(kind, types, sizes, columns, depth):
    """``(dy, x, ends), (dy_scale, x_scale)`` of padded groups, NaN past the last one."""
    padded = [128 * blocks(size) for size in sizes]
    total = sum(padded) + 256
    operands = pair(kind, types, (columns, total), (depth, total))
    of_operands = [scales(kind, total // 128, len(t)) for t in operands]
    for t, scale in zip(operands, of_operands, strict=True):
        start = 0
        for size, place in zip(sizes, padded, strict=True):
            t[:, start + size : start + place] = 0
            start += place
        t[:, start:], scale[start // 128 :] = math.nan, math.nan
    dy, x = (before_nan(t).t() for t in operands)
    return (dy, x, ends_of(padded)), tuple(before_nan(s) for s in of_operands)


# --- bounds ---------------------------------------------------------------------------------------


def assert_within(got, exact, bound):
    assert got.shape == exact.shape
    error = (got.double() - exact).abs()
    assert not error.isnan().any()
    assert (error <= bound).all(), f"{(error / bound).max().item():.3g} times the bound"


@each_type
@each_kind
def test_products_of_rows_within_the_bound(case, types, kind):
    (x, w, ends), (x_scale, w_scale) = case.row_operands(kind, types)
    y = case.ops.grouped_mm(x, w, ends, x_scale=x_scale, w_scale=w_scale)
    exact, bound, _ = by_rows(bounded, x, w, ends, x_scale, w_scale)
    assert_within(case.live(y), case.live(exact), case.live(rounded(exact, bound)))
    assert not y[sum(case.sizes) :].any()


@each_type
@each_kind
def test_weight_gradients_within_the_bound(case, types, kind):
    given, of_given = case.padded_operands(kind, types)
    exact, bound, _ = by_reduction(bounded, *given, *of_given)
    assert_within(case.ops.grouped_wgrad(*given, torch.float32, *of_given), exact, bound)
    dw = case.ops.grouped_wgrad(*given, None, *of_given)
    assert dw.dtype == torch.bfloat16
    assert_within(dw, exact, rounded(exact, bound))


# The slope of SiLU is at most 1.1. The activation is computed in FP32, from an exponential and a
# reciprocal that the GPU approximates.
SLOPE, FP32_STEPS = 1.1, 2.0**-16


def silu(t):
    return t * t.sigmoid()


@each_kind
def test_activation_in_the_epilogue_within_the_bound(case, kind):
    (x, w, ends), of_operands = case.row_operands(kind, BOTH_E4M3)
    scale = torch.rand(len(x))
    preact, y = case.ops.grouped_glu(x, w, ends, scale, Glu(), None, True, *of_operands)
    exact, bound, _ = case.live(by_rows(bounded, x, w, ends, *of_operands))
    assert_within(case.live(preact), exact, rounded(exact, bound))
    (gate, linear), (of_gate, of_linear) = exact.chunk(2, -1), bound.chunk(2, -1)
    scale = scale[: sum(case.sizes), None].double()
    of_y = SLOPE * of_gate * (linear.abs() + of_linear) + silu(gate).abs() * of_linear
    exact = silu(gate) * linear * scale
    of_y = of_y * scale + FP32_STEPS * exact.abs() + 1e-30
    assert_within(case.live(y), exact, rounded(exact, of_y))


# --- bias -----------------------------------------------------------------------------------------


def bias(got, exact):
    """The mean error towards larger magnitudes, relative to the mean magnitude."""
    return ((got.double() - exact) * exact.sign()).sum().item() / exact.abs().sum().item()


@pytest.mark.parametrize(("kind", "most"), [("normal", 2.0**-12), ("positive", 2.0**-10)])
def test_sums_have_little_bias_whatever_their_length(case, kind, most):
    """Cuts towards zero make every block's sum smaller; more blocks do not add to that."""
    side, of_y, of_dw = case.columns // 2, [], []
    for depth in (128, 2048, 16384):
        (x, w, ends), of_operands = row_operands(kind, BOTH_E4M3, (side,), side, depth)
        of_operands = [torch.ones_like(scale) for scale in of_operands]
        y = case.ops.grouped_mm(x, w, ends, x_scale=of_operands[0], w_scale=of_operands[1])
        of_y.append(bias(y[:side], by_rows(bounded, x, w, ends, *of_operands)[0, :side]))
        given, of_given = padded_operands(kind, BOTH_E4M3, (depth,), side, side)
        of_given = [torch.ones_like(scale) for scale in of_given]
        dw = case.ops.grouped_wgrad(*given, torch.float32, *of_given)
        of_dw.append(bias(dw, by_reduction(bounded, *given, *of_given)[0]))
    assert max(map(abs, of_y + of_dw)) < most
    assert abs(of_dw[2]) < abs(of_dw[1]) + most / 8


# --- what is not a number, and whose it is --------------------------------------------------------


def special(t, places):
    """The magnitudes of FP8 elements or scales, none of which is zero, with others in places."""
    magnitudes = t.float().abs().clamp_min(0.125)
    for place, value in places.items():
        magnitudes[place] = value
    return before_nan(magnitudes.to(t.dtype))


def assert_same_special(got, exact, bound):
    """Finite values are within the bound; the others, of which there are some, are equal."""
    finite = exact.isfinite()
    assert not finite.all()
    assert_within(got[finite], exact[finite], bound[finite])
    torch.testing.assert_close(got[~finite].double(), exact[~finite], equal_nan=True)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("of_x", "of_scale"),
    [
        ({(0, 7): NAN}, {}),
        ({(0, 7): INF, (3, 40): -INF, (4, 0): INF, (4, 200): -INF, (5, 1): INF, (5, 2): -INF}, {}),
        ({}, {(0, 1): NAN, (2, 0): INF, (3, 1): -INF, (4, 0): INF, (4, 1): -INF}),
    ],
    ids=["NaN", "infinite elements", "scales"],
)
def test_nan_and_infinity_reach_their_rows_only(case, of_x, of_scale):
    types = (E5M2, E4M3) if INF in of_x.values() else BOTH_E4M3
    (x, w, ends), (x_scale, w_scale) = case.row_operands("normal", types)
    x, w = special(x[: sum(case.sizes)], of_x), [special(w[0], {})]
    x_scale = special(x_scale[: len(x)], of_scale)
    y = case.ops.grouped_mm(x, w, ends, x_scale=x_scale, w_scale=w_scale)
    exact, bound, _ = by_rows(bounded, x, w, ends, x_scale, w_scale)
    assert_same_special(y, exact, rounded(exact, bound))
    rows = {at[0] for at in (*of_x, *of_scale)}
    assert {int(row) for row in (~exact.isfinite()).any(-1).nonzero()} == rows
    # The same rows are the reduction's columns: one group, of whole blocks.
    columns, ends = len(x) // 16 * 16, torch.full((1,), 256, dtype=torch.int32)
    dy = x[:columns, :256].contiguous().t()
    given = dy, special(elements("normal", 64, 256), {}).t(), ends
    of_given = x_scale[:columns, :2].t(), scales("normal", 2, 64)
    dw = case.ops.grouped_wgrad(*given, torch.float32, *of_given)
    assert_same_special(dw, *by_reduction(bounded, *given, *of_given)[:2])


def poisoned_groups(t, groups, ends):
    """A copy in which the rows of ``groups`` are NaN."""
    t = t.clone()
    starts = [0, *ends.tolist()]
    for e in groups:
        t[starts[e] : starts[e + 1]] = math.nan
    return t


@pytest.mark.parametrize("which", [0, 1], ids=["even", "odd"])
def test_a_group_reads_nothing_of_the_others(case, which):
    """NaN in all of their operands changes none of its bits."""
    groups = range(which, len(case.sizes), 2)
    (x, w, ends), (x_scale, w_scale) = case.row_operands("normal", BOTH_E4M3)
    scale = torch.rand(len(x))
    given, of_given = case.padded_operands("normal", BOTH_E4M3)

    def results(rows, weights, padded):
        ops, of_x, x_, scale_ = case.ops, *(rows(t) for t in (x_scale, x, scale))
        w_, of_w = [weights(w[0])], weights(w_scale)
        y = ops.grouped_mm(x_, w_, ends, x_scale=of_x, w_scale=of_w)
        made = ops.grouped_glu(x_, w_, ends, scale_, Glu(), None, True, of_x, of_w)
        dw = ops.grouped_wgrad(*padded(given, of_given))
        return [y, *made], dw

    want, dw = results(*[lambda t: t] * 2, lambda operands, of: (*operands, None, *of))

    def of_padded(operands, of):
        dy, other, padded_ends = operands
        blocks_of = padded_ends // 128
        return (
            poisoned_groups(dy, groups, padded_ends),
            poisoned_groups(other, groups, padded_ends),
            padded_ends,
            None,
            *(poisoned_groups(s, groups, blocks_of) for s in of),
        )

    ones = torch.arange(1, len(case.sizes) + 1)
    got, got_dw = results(
        lambda t: poisoned_groups(t, groups, ends),
        lambda t: poisoned_groups(t, groups, ones),
        of_padded,
    )
    own = torch.ones(len(x), dtype=torch.bool)
    starts = [0, *ends.tolist()]
    for e in groups:
        own[starts[e] : starts[e + 1]] = False
    for mine, theirs in zip(got, want, strict=True):
        ref.assert_same_bits([mine[own]], [theirs[own]])
        assert mine[~own].isnan().all()
    others = [e for e in range(len(case.sizes)) if e not in groups]
    ref.assert_same_bits([got_dw[others]], [dw[others]])


# --- on a Hopper GPU alone ------------------------------------------------------------------------


@pytest.fixture
def _on_cuda(default_device):
    default_device("cuda")


def on_hopper(test):
    for mark in (*hopper, pytest.mark.usefixtures("_on_cuda")):
        test = mark(test)
    return test


def difference(name, got, want, unit):
    """How the kernels differ from the emulator, in words; they must not by more than a unit."""
    assert_within(got, want.double(), unit)
    most = ((got.double() - want.double()).abs() / unit).max().item()
    return f"{(got == want).double().mean().item():.4%} of {name}, the others by {most:.2g} units"


@on_hopper
@each_type
@pytest.mark.parametrize("kind", ["normal", "any bits", "FP32 scales"])
def test_kernels_equal_the_emulator(types, kind, record_property):
    """Within a unit of the last place that tensor cores keep; the share that is equal is listed."""
    given, of_given = padded_operands(kind, types, (640,), 128, 128)
    dw = checked_products.grouped_wgrad(*given, torch.float32, *of_given)
    want = by_reduction(emulator.product, *given, *of_given)
    unit = by_reduction(bounded, *given, *of_given)[2]
    found = [difference("FP32 sums", dw, want, unit)]
    given, (x_scale, w_scale) = row_operands(kind, types, (128,), 256, 640)
    y = checked_products.grouped_mm(*given, x_scale=x_scale, w_scale=w_scale)[:128]
    want = by_rows(emulator.product, *given, x_scale, w_scale)[:128]
    unit = rounded(want.double(), by_rows(bounded, *given, x_scale, w_scale)[2, :128])
    found.append(difference("BF16 results", y, want.bfloat16(), 2 * unit))
    record_property("emulator", f"{kind}, {types[0]} x {types[1]}: {'; '.join(found)}")


@on_hopper
def test_nothing_behind_an_output_is_written():
    sizes = (129, 0, 1, 128, 0, 127)
    given, (x_scale, w_scale) = row_operands("normal", BOTH_E4M3, sizes, 256, DEPTH)
    want = checked_products.grouped_mm(*given, x_scale=x_scale, w_scale=w_scale)
    rows = len(want)
    memory = torch.full((rows + 130, 256), NAN, dtype=torch.bfloat16)
    grouped.grouped_mm(*given, None, None, False, memory[:rows], x_scale, w_scale)
    assert torch.equal(memory[:rows], want)
    assert memory[rows:].isnan().all()
    given, of_given = padded_operands("normal", BOTH_E4M3, sizes, 256, 144)
    want = checked_products.grouped_wgrad(*given, torch.float32, *of_given)
    memory = torch.full((len(sizes) + 2, 256, 144), NAN)
    checked_products.grouped_wgrad_([memory[: len(sizes)]], *given, False, *of_given)
    assert torch.equal(memory[: len(sizes)], want)
    assert memory[len(sizes) :].isnan().all()
