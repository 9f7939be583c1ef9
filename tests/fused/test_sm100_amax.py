"""NVFP4 from the largest magnitudes that the GLU kernels give: the same bits, a pass less."""

import math

import pytest
import reference as ref
import torch
from checks import Recorded
from number_formats import NV
from sm100_operands import largest_of_groups

import fusible as fz
from fusible.kernels.sm100 import padding, products, quantizer
from fusible.recipes.formats import mxfp8, nvfp4
from fusible.recipes.quantization import dequantize, quantize
from fusible.testing import assume_target

BF16, INF, NAN = torch.bfloat16, math.inf, math.nan
COLUMNS = 192

# Rows of the matrix and of its groups.
SPLITS = {
    "ragged": (400, [20, 0, 300]),
    "whole tiles": (768, [256, 0, 512]),
    "around a tile": (800, [255, 257, 256]),
    "many": (900, [1, 0, 33, 255, 0, 1, 600, 7]),
    "all empty": (5, [0, 0]),
    "no rows": (0, [0, 0]),
    "one group": (31, [31]),
}
SPECIAL = {
    "ordinary": lambda d: d,
    "zeros": lambda d: d * 0,
    "infinite": lambda d: torch.where((torch.arange(len(d)) == 3)[:, None], -INF, d),
    "too large for BF16": lambda d: d.clamp(-1, 1) * torch.finfo(torch.float32).max,
    "tiny": lambda d: d * 2.0**-130,
}


def groups_of(splits):
    """``(rows, ends, padded)``; a kernel's rows lie in their padded."""
    rows, sizes = SPLITS[splits]
    ends = torch.tensor(sizes).cumsum(0).int()
    return rows, sizes, padding.pad_groups(ends, rows, splits == "whole tiles")


def bytes_of(pieces):
    return [piece.view(torch.uint8) for piece in pieces]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("splits", SPLITS)
def test_the_same_bits_as_with_a_pass_of_its_own(splits, special, parts):
    rows, sizes, padded = groups_of(splits)
    ends = torch.tensor(sizes).cumsum(0).int()
    d = SPECIAL[special](torch.randn(rows, COLUMNS) * torch.randn(rows, 1).exp())
    d[sum(sizes) :] = NAN  # rows of no group, which no kernel has computed
    amax = largest_of_groups(d, sizes, parts)
    options = quantizer.QuantizeOptions(True, True, BF16)
    rest = nvfp4(), ends, padded
    want = quantizer.quantize_packed(d.to(BF16), *rest, options)
    mine = quantizer.quantize_packed(d.to(BF16), *rest, options._replace(amax=amax))
    ref.assert_equal(bytes_of(mine), bytes_of(want))


@pytest.mark.parametrize("columnwise", [False, True])
def test_no_nan_becomes_a_number_and_no_number_is_cut(columnwise):
    """The kernels' maxima leave out 32 columns beside a NaN, which may hold larger numbers."""
    torch.manual_seed(0)
    d = torch.randn(64, COLUMNS)
    d[5, 40], d[5, 62], d[5, 33] = NAN, 1000.0, 7.0  # one block of NaN, one of a large number
    ends = torch.tensor([32, 64], dtype=torch.int32)
    amax = largest_of_groups(d, [32, 32], 1)
    assert amax.max() < 10
    values = dequantize(quantize(d, nvfp4(), columnwise=columnwise, ends=ends, amax=amax.flatten()))
    if columnwise:
        d, values = d.mT, values.mT
    of_block, number = (t.unflatten(-1, (-1, 16)) for t in (d, values.isfinite()))
    assert not number[of_block.isnan() | (of_block == 1000)].any()
    assert number.double().mean() > 0.98
    # Half of E2M1's widest step is 1/6 of the largest element, and the scale is off by up to 1/16.
    error = (values - d).unflatten(-1, (-1, 16)).abs()
    bound = of_block.abs().amax(-1, keepdim=True) * (17 / 96 + 2**-20)
    assert ((error <= bound) | ~number).all()


def test_what_amax_must_be():
    x = torch.randn(256, COLUMNS, dtype=BF16)
    ends = torch.tensor([100, 256], dtype=torch.int32)
    padded = padding.PaddedGroups(ends, None, 256)

    def made(amax, fmt=None):
        options = quantizer.QuantizeOptions(True, False, amax=amax)
        return products.quantize_padded(x, fmt or nvfp4(), ends, padded, options)

    for wrong in (
        torch.ones(2),
        torch.ones(2, 3),
        torch.ones(1, 1),
        torch.ones(2, 1, dtype=BF16),
        torch.ones(2, 1, dtype=torch.int32),
        torch.ones(2, 1, device="meta"),
    ):
        with pytest.raises(ValueError, match=r"amax must be float32 of shape \(2, 1\) or \(2, 2\)"):
            made(wrong)
    with pytest.raises(ValueError, match="amax must be None for a format without group scales"):
        made(torch.ones(2, 1), mxfp8())


@pytest.mark.parametrize("given", [True, False])
def test_the_launches(given, monkeypatch):
    """One with what a kernel has found, else the pass before it too."""
    launched = []
    monkeypatch.setattr(quantizer, "_takes", lambda *_: True)
    monkeypatch.setattr(quantizer, "capability", lambda _: (10, 0))
    monkeypatch.setattr(quantizer, "launch", lambda kernel, *rest: launched.append((kernel, rest)))
    found = torch.zeros(3, dtype=torch.int32)
    monkeypatch.setattr(quantizer, "amax_bits", lambda *_: launched.append("a") or found)
    rows, sizes, padded = groups_of("ragged")
    x, ends = torch.randn(rows, COLUMNS, dtype=BF16), torch.tensor(sizes).cumsum(0).int()
    amax = torch.ones(3, 2) if given else None
    quantizer._cuda(x, ends, padded, nvfp4(), quantizer.QuantizeOptions(True, True, amax=amax))
    *before, (kernel, (_, _, *arguments)) = launched
    assert before == ([] if given else ["a"])
    assert kernel == "sm100.quantize.quantize"
    assert arguments[2] is (amax if given else found)
    assert arguments[-1] == (2 if given else 1)


def shape_of_amax(func, args):
    """In each call of the quantizer, None where there is none."""
    if func is torch.ops.fusible.sm100_quantize.default:
        amax = args[-2]  # the key is last
        yield None if amax is None else tuple(amax.shape)


def without_amax(*args):
    *given, options = args
    return quantizer.quantize_packed(*given, options._replace(amax=None))


@pytest.mark.parametrize(
    ("splits", "act"),
    [
        ("ragged", fz.ScaledSwiGLU),
        ("ragged", fz.ScaledClampedQGeGLU),
        ("whole tiles", fz.ScaledClampedQGeGLU),
        ("all empty", fz.ScaledSwiGLU),
        ("no rows", fz.ScaledSwiGLU),
    ],
)
def test_the_grouped_mlp_uses_them(splits, act, monkeypatch):
    rows, sizes = SPLITS[splits]
    groups, options = len(sizes), {"single_grouped_weight": True, "dtype": BF16}
    module = fz.Sequential(
        fz.GroupedLinear(groups, 128, 256, **options),
        act(glu_interleave_size=32),
        fz.GroupedLinear(groups, 128, 128, **options),
    )
    x = torch.randn(rows, 128, dtype=BF16, requires_grad=True)
    scales, splits = torch.randn(rows, requires_grad=True), torch.tensor(sizes)
    leaves, results = [x, scales, *module.parameters()], []
    for quantize_ in (quantizer.quantize_packed, without_amax):
        monkeypatch.setattr(products, "quantize_packed", quantize_)
        calls = Recorded(shape_of_amax)
        with calls, assume_target("sm100"), fz.autocast(recipe=NV):
            y = module(x, splits, scales, splits)
            results.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
        # Input, weight, activation, weight; gradient of the output and of the pre-activation.
        given = [None, None, (groups, 1), None, None, (groups, 2)]
        assert calls.made == (given if quantize_ is quantizer.quantize_packed else [None] * 6)
    assert module.plan.fired == ("grouped_mlp_sm100",)
    ref.assert_equal(*results)
