"""Products of few rows with stored weights on Hopper: values, tails, NaN, graphs, modules."""

import pytest
import stored_weights as support
import torch
from checks import graph_of, hopper, never_waiting

import fusible as fz
from fusible import recipes
from fusible.kernels import few_rows, grouped
from fusible.kernels.glu import Glu
from fusible.recipes.formats import fp8_block, mxfp8, nvfp4
from fusible.recipes.stored import StoredWeights

pytestmark = [*hopper, pytest.mark.usefixtures("poisoned")]

SIZES = [((3, 0, 1, 9), 0), ((0, 0, 0, 0), 3), ((17, 40, 2, 8), 5), ((8, 16, 33, 64), 0)]


def stored(w, fmt, separate=False):
    """Weights ``[E, N, K]`` as they are stored, and their values in FP64."""
    weights, values = support.stored(w, fmt, separate, torch.float32)
    return weights, values.double()


def ends_of(sizes):
    return torch.tensor(sizes, device="cuda").cumsum(0).int()


def product(x, values, sizes):
    """In FP64, with zeros in the rows past the last group."""
    out = x.new_zeros(len(x), values.shape[1], dtype=torch.float64)
    start = 0
    for size, w in zip(sizes, values, strict=True):
        out[start : start + size] = x[start : start + size].double() @ w.T
        start += size
    return out


def assert_near(got, want, live):
    assert (got[live:] == 0).all()
    assert (got.double() - want).norm() <= 3e-3 * want.norm()  # one rounding to BF16


@pytest.mark.parametrize(("sizes", "tail"), SIZES, ids=str)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("features", [(64, 128), (136, 96), (1536, 2048), (96, 2880)], ids=str)
@pytest.mark.parametrize("fmt", support.FORMATS, ids=lambda f: f.name)
def test_products(fmt, features, separate, sizes, tail):
    columns, depth = features
    live = sum(sizes)
    w = (torch.randn(4, *features, device="cuda") * depth**-0.5).bfloat16()
    x = torch.randn(live + tail, depth, device="cuda").bfloat16()
    x[live:] = torch.nan
    weights, values = stored(w, fmt, separate)
    bias = torch.randn(4, columns, device="cuda").bfloat16()
    scale, ends = torch.rand(live + tail, device="cuda"), ends_of(sizes)
    exact = product(x, values, sizes)
    of_row = bias.double().repeat_interleave(torch.tensor(sizes, device="cuda"), 0)

    got = few_rows.grouped_mm_stored(x, weights, fmt, ends)
    assert_near(got, exact, live)
    got = few_rows.grouped_mm_stored(x, weights, fmt, ends, bias, scale)
    want = exact.clone()
    want[:live] += of_row * scale[:live, None].double()
    assert_near(got, want, live)

    want = exact.clone()
    want[:live] += of_row
    for glu in (Glu("swiglu"), Glu("swiglu", 8), Glu("srelu")):
        if columns % (glu.sides * max(glu.interleave, 8)):
            continue
        got = few_rows.grouped_glu_stored(x, weights, fmt, ends, scale, glu, bias)
        act = glu.forward(want.float(), scale).double()
        act[live:] = 0
        assert_near(got, act, live)


@pytest.mark.parametrize("fmt", support.FORMATS, ids=lambda f: f.name)
def test_nan_of_weights_comes_out(fmt):
    w = torch.randn(2, 64, 128, device="cuda").bfloat16()
    w[1, 5, 7] = torch.nan
    weights, values = stored(w, fmt)
    x = torch.ones(4, 128, device="cuda").bfloat16()
    got = few_rows.grouped_mm_stored(x, weights, fmt, ends_of((2, 2)))
    assert torch.equal(got.isnan(), product(x, values, (2, 2)).isnan())


@pytest.mark.parametrize("at", [0, 5, 77, 127])
def test_nan_elements_come_out_in_all_rows(at):
    weights, _ = stored(torch.randn(1, 64, 128, device="cuda").bfloat16(), mxfp8())
    weights.data[0].view(torch.uint8)[0, 3, at] = 0xFF
    x = torch.zeros(11, 128, device="cuda").bfloat16()
    got = few_rows.grouped_mm_stored(x, weights, mxfp8(), ends_of((11,)))
    assert got[:, 3].isnan().all()
    assert got.isnan().sum() == 11


@pytest.mark.parametrize("exponent", [-120, -60, 60, 100])
@pytest.mark.parametrize("fmt", [mxfp8(), nvfp4(), fp8_block(block=(128, 128))], ids=str)
def test_scales_far_from_one(fmt, exponent):
    w = (torch.randn(1, 64, 128, device="cuda") * 2.0**exponent).bfloat16()
    weights, values = stored(w, fmt)
    x = (torch.randn(4, 128, device="cuda") * 2.0 ** (-exponent / 2)).bfloat16()
    got = few_rows.grouped_mm_stored(x, weights, fmt, ends_of((4,)))
    assert_near(got, product(x, values, (4,)), 4)


def test_every_element_and_half_of_the_scales():
    """Products with rows of the unit matrix are the values, with scales from 2^-63 to 2^64."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    data = codes.view(1, 256, 1).expand(1, 256, 32).contiguous()
    x = torch.eye(32, device="cuda").bfloat16()
    for byte in range(64, 192):
        scale = torch.full((1, 256, 1), byte, dtype=torch.uint8, device="cuda")
        weights = StoredWeights([data.view(torch.float8_e4m3fn)], [scale], [])
        got = few_rows.grouped_mm_stored(x, weights, mxfp8(), ends_of((32,)))
        want = data[0, :, 0].view(torch.float8_e4m3fn).double() * 2.0 ** (byte - 127)
        torch.testing.assert_close(
            got.double(), want.expand(32, -1), rtol=0, atol=0, equal_nan=True
        )


def test_rows_that_are_many_are_not_multiplied():
    weights, values = stored(torch.randn(2, 64, 128, device="cuda").bfloat16(), nvfp4())
    x = torch.randn(2 * few_rows.max_rows(nvfp4()) + 1, 128, device="cuda").bfloat16()
    sizes = (len(x) - 1, 1)
    assert few_rows.grouped_mm_stored(x, weights, nvfp4(), ends_of(sizes)) is NotImplemented
    got = grouped.grouped_mm_stored(x, weights, nvfp4(), ends_of(sizes))
    assert (got.double() - product(x, values, sizes)).norm() <= 6e-3 * got.double().norm()


@pytest.mark.parametrize("part", [0, 1])
def test_weights_that_begin_anywhere_are_dequantized(part):
    """As slices of a file in memory."""
    weights, values = stored(torch.randn(2, 64, 128, device="cuda").bfloat16(), mxfp8())
    at = weights[part][0].contiguous().view(torch.uint8)
    moved = torch.empty(at.numel() + 1, dtype=torch.uint8, device="cuda")[1:].view(at.shape)
    weights[part][0] = moved.copy_(at).view(weights[part][0].dtype)
    x = torch.randn(5, 128, device="cuda").bfloat16()
    assert few_rows.grouped_mm_stored(x, weights, mxfp8(), ends_of((3, 2))) is NotImplemented
    got = grouped.grouped_mm_stored(x, weights, mxfp8(), ends_of((3, 2)))
    assert_near(got, product(x, values, (3, 2)), 5)


@pytest.mark.parametrize("separate", [False, True])
def test_one_group_of_all_and_many_groups(separate):
    for groups in (1, 300, 600, 1024):
        w = torch.randn(groups, 32, 64, device="cuda").bfloat16()
        weights, values = stored(w, mxfp8(), separate and groups < 500)
        sizes = [0] * groups
        sizes[-1], sizes[groups // 2] = 5, 3 + sizes[groups // 2]
        x = torch.randn(sum(sizes) + 2, 64, device="cuda").bfloat16()
        got = few_rows.grouped_mm_stored(x, weights, mxfp8(), ends_of(sizes))
        assert_near(got, product(x, values, sizes), sum(sizes))


def test_bits_repeat_and_graphs_take_other_groups():
    weights, values = stored(torch.randn(8, 256, 512, device="cuda").bfloat16(), nvfp4())
    x = torch.randn(24, 512, device="cuda").bfloat16()
    sizes = torch.tensor([3] * 8, device="cuda", dtype=torch.int32)
    with never_waiting():
        graph, got = graph_of(
            lambda: grouped.grouped_mm_stored(x, weights, nvfp4(), sizes.cumsum(0).int())
        )
    for case in ([3] * 8, [24] + [0] * 7, [0, 1, 2, 3, 4, 5, 0, 0]):
        sizes.copy_(torch.tensor(case))
        graph.replay()
        assert_near(got, product(x, values, case), sum(case))
        again = grouped.grouped_mm_stored(x, weights, nvfp4(), sizes.cumsum(0).int())
        assert torch.equal(got, again)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [
        recipes.MXFP8BlockScaling(),
        recipes.NVFP4BlockScaling(),
        recipes.Float8BlockScaling(),
        recipes.Float8CurrentScaling(),
    ],
    ids=str,
)
def test_blocks(recipe, single):
    """A block of experts decodes by its stored weights; prefilling dequantizes them."""
    torch.manual_seed(0)
    options = {
        "dtype": torch.bfloat16,
        "device": "cuda",
        "bias": False,
        "single_grouped_weight": single,
    }

    def make():
        return fz.Sequential(
            fz.TopKRouter(128, 16, 4, device="cuda", dtype=torch.bfloat16),
            fz.Dispatch(16),
            fz.GroupedLinear(16, 128, 512, **options),
            fz.ScaledSwiGLU(),
            fz.GroupedLinear(16, 256, 128, **options),
            fz.Combine(),
        )

    block, plain = make(), make()
    fz.quantize_(block, recipe, usage="inference")
    with torch.no_grad():
        for own, given in zip(plain.parameters(), block.parameters(), strict=True):
            own.copy_(given)
        for tokens in (1, 3, 64, 1000):
            x = torch.randn(tokens, 128, device="cuda").bfloat16()
            got, want = block(x), plain(x)
            assert (got - want).norm() <= 1e-2 * want.norm()
