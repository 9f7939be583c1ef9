"""Launches of FP8 products: the kernels get the addresses and strides of operands and scales."""

import pytest
import torch
from sm90_launches import sm90_on_cpu

from fusible.kernels import grouped
from fusible.kernels.glu import Glu
from fusible.kernels.grouped import definitions
from fusible.kernels.sm90 import checked_products as ops
from fusible.recipes.formats import E5M2 as E5M2_ELEMENT
from fusible.recipes.formats import fp8_block, fp8_tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = (3, 0, 130, 7)
ENDS = torch.tensor(SIZES).cumsum(0).int()
ROWS = sum(SIZES) + 5


@pytest.fixture(autouse=True)
def launched():
    """The kernels that were loaded."""
    torch.manual_seed(0)
    with sm90_on_cpu() as loaded:
        yield loaded


def elements(*shape, dtype=E4M3):
    return torch.randn(*shape).mul(4).to(dtype)


def scales(*shape):
    return torch.randint(-4, 5, shape).float().exp2()


def operands(columns, depth, x_dtype=E4M3, w_dtype=E4M3):
    """Rows, weights and their scales as quantizers put them."""
    groups, blocks = len(SIZES), (-(-columns // 128), -(-depth // 128))
    x, w = elements(ROWS, depth, dtype=x_dtype), elements(groups, columns, depth, dtype=w_dtype)
    return x, [w], scales(blocks[1], ROWS).t(), scales(groups, *blocks[::-1]).mT


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_product(dtypes, scaled, launched):
    x, w, x_scale, w_scale = operands(144, 272, *dtypes)
    bias = torch.randn(len(SIZES), 144).bfloat16()
    row_scale = torch.rand(ROWS) if scaled else None
    given = x, w, ENDS, bias, row_scale, False, x_scale, w_scale
    assert_same(ops.grouped_mm(*given), definitions.grouped_mm(*given))
    (spec,) = set(launched)
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    assert [spec.dtype, spec.b_dtype, spec.b_scale_layout] == [*names, "blocks"]


def test_scales_that_lie_otherwise():
    x, w, x_scale, w_scale = operands(144, 272)
    for of_x, of_w in (
        (x_scale.contiguous(), w_scale.contiguous()),
        (x_scale[:1, :1].expand_as(x_scale), w_scale[:1, :1, :1].expand_as(w_scale)),
        (x_scale[:, :1].expand_as(x_scale), w_scale[:, :1, :1].expand_as(w_scale)),
    ):
        given = x, w, ENDS, None, None, False, of_x, of_w
        assert_same(ops.grouped_mm(*given), definitions.grouped_mm(*given))


def test_operands_that_lie_otherwise():
    """They are copied."""
    x, w, x_scale, w_scale = operands(144, 272)
    x = x.t().contiguous().t()
    w = [w[0].mT.contiguous().mT]
    given = x, w, ENDS, None, None, False, x_scale, w_scale
    assert_same(ops.grouped_mm(*given), definitions.grouped_mm(*given))


@pytest.mark.parametrize("interleave", [0, 16])
@pytest.mark.parametrize("save", [True, False])
def test_activation(interleave, save):
    x, w, x_scale, w_scale = operands(256, 272)
    given = x, w, ENDS, torch.rand(ROWS), Glu("swiglu", interleave), None, save, x_scale, w_scale
    for actual, expected in zip(
        ops.grouped_glu(*given), definitions.grouped_glu(*given), strict=True
    ):
        assert_same(actual, expected)


@pytest.mark.parametrize("interleave", [0, 16])
@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("columns", [256, 384])
def test_activation_that_is_quantized(interleave, save, columns, launched):
    x, w, *scales_of = operands(columns, 272)
    fmt, of_rows = fp8_block(E5M2_ELEMENT), (ENDS, torch.rand(ROWS), Glu("swiglu", interleave))
    given = x, w, *of_rows, None, save, *scales_of, fmt
    for actual, expected in zip(
        ops.grouped_glu(*given), definitions.grouped_glu_quantized(*given), strict=True
    ):
        assert_same(actual, expected)
    (spec,) = set(launched)
    assert (spec.width, spec.out_format) == (128, fmt)


@pytest.mark.parametrize("glu", [Glu("swiglu"), Glu("geglu", 128), Glu("srelu")])
@pytest.mark.parametrize("save", [True, False])
def test_pre_activation_that_is_quantized(glu, save, launched):
    x, w, *scales_of = operands(512, 272)
    given = x, w, ENDS, torch.rand(ROWS), glu, None, save, *scales_of, fp8_block(), True
    expected = definitions.grouped_glu_quantized(*given)
    for actual, wanted in zip(ops.grouped_glu(*given), expected, strict=True):
        assert actual.shape == wanted.shape
        assert_same(actual, wanted)
    (spec,) = set(launched)
    assert (spec.save_preact, spec.quantize_preact) == (False, save)


def test_pre_activation_in_other_stripes_is_left_to_others():
    x, w, *scales_of = operands(512, 272)
    given = x, w, ENDS, None, Glu("swiglu", 16), None, True, *scales_of, fp8_block()
    assert ops.grouped_glu(*given) is not NotImplemented
    assert ops.grouped_glu(*given, True) is NotImplemented


def test_activation_that_no_epilogue_quantizes():
    for columns, glu, bias, fmt in (
        (256, Glu(), torch.zeros(len(SIZES), 256).bfloat16(), fp8_block()),
        (256, Glu("situglu"), None, fp8_block()),
        (256, Glu(), None, fp8_tensor()),
        (272, Glu("swiglu", 8), None, fp8_block()),  # 136 elements in a row are no whole vectors
    ):
        x, w, *scales_of = operands(columns, 272)
        given = x, w, ENDS, None, glu, bias, True, *scales_of, fmt
        assert ops.grouped_glu(*given) is NotImplemented
        assert (
            ops.grouped_glu(*given[:4], Glu("swiglu", 8), None, *given[6:9]) is not NotImplemented
        )


def test_activation_of_no_known_name():
    x, w, *scales_of = operands(256, 272)
    with pytest.raises(ValueError, match=r"activation of Glu must be one of .* got 'swigl'"):
        grouped.grouped_glu_quantized(
            x, w, ENDS, None, Glu("swigl"), None, True, *scales_of, fp8_block()
        )


def test_activation_in_halves_of_other_widths_has_no_kernel():
    """A tile's linear columns would have two scales."""
    x, w, x_scale, w_scale = operands(288, 272)
    given = x, w, ENDS, None, Glu(), None, True, x_scale, w_scale
    assert ops.grouped_glu(*given) is NotImplemented
    assert ops.grouped_glu(*given[:4], Glu("swiglu", 16), *given[5:]) is not NotImplemented


def padded(columns, dtype=E4M3):
    """Column-major rows of padded groups, their scales and ends."""
    sizes = [-(-size // 128) * 128 for size in SIZES]
    x, at = elements(columns, sum(sizes) + 128, dtype=dtype), 0
    for size, place in zip(SIZES, sizes, strict=True):
        x[:, at + size : at + place] = 0
        at += place
    return x.t(), scales(x.shape[1] // 128, columns), torch.tensor(sizes).cumsum(0).int()


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.float16])
def test_weight_gradient(dtypes, out_dtype):
    (dy, dy_scale, ends), (x, x_scale, _) = padded(144, dtypes[0]), padded(272, dtypes[1])
    given = dy, x, ends, out_dtype, dy_scale, x_scale
    assert_same(ops.grouped_wgrad(*given), definitions.grouped_wgrad(*given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradient_into_a_buffer(dtype, separate, accumulate):
    (dy, dy_scale, ends), (x, x_scale, _) = padded(144), padded(272)
    start = torch.randn(len(SIZES), 144, 272).to(dtype)
    results = []
    for implementation in (ops, definitions):
        out = [one.clone() for one in start] if separate else [start.clone()]
        implementation.grouped_wgrad_(out, dy, x, ends, accumulate, dy_scale, x_scale)
        results.append(torch.stack(out) if separate else out[0])
    # FP64 buffers take what the kernels give, FP32 sums of up to 256 products in any order.
    largest = results[1].abs().max().item()
    atol = 2**-20 * largest if dtype == torch.float64 else 0
    torch.testing.assert_close(*results, rtol=0, atol=atol)


def test_wrong_operands_are_refused():
    x, w, x_scale, w_scale = operands(144, 272)
    with pytest.raises(
        ValueError, match=r"x_scale must be a torch.float32 tensor of shape \(145, 3"
    ):
        ops.grouped_mm(x, w, ENDS, x_scale=x_scale[:, :2], w_scale=w_scale)
    with pytest.raises(ValueError, match=r"w_scale must be a torch.float32 tensor"):
        ops.grouped_mm(x, w, ENDS, x_scale=x_scale, w_scale=w_scale.double())
    with pytest.raises(ValueError, match=r"x must have shape \[rows, 272\], got \(145, 256\)"):
        ops.grouped_mm(x[:, :256], w, ENDS, x_scale=x_scale, w_scale=w_scale)
    (dy, dy_scale, ends) = padded(144)
    with pytest.raises(ValueError, match="a multiple of 128 rows, got 300"):
        ops.grouped_wgrad(dy[:300], dy[:300], ends, None, dy_scale[:3], dy_scale[:3])
    with pytest.raises(ValueError, match="dy_scale must be"):
        ops.grouped_wgrad(dy, dy, ends, None, dy_scale[:1], dy_scale)


def test_transposed_weights_have_no_kernel():
    x, w, x_scale, w_scale = operands(272, 272)
    assert ops.grouped_mm(x, w, ENDS, None, None, True, x_scale, w_scale) is NotImplemented


def test_eight_bits_without_scales_have_no_kernel():
    x, w, x_scale, w_scale = operands(144, 272)
    assert ops.grouped_mm(x, w, ENDS) is NotImplemented
    assert ops.grouped_mm(x.bfloat16(), w, ENDS, x_scale=x_scale, w_scale=w_scale) is NotImplemented
    dy, _, ends = padded(144)
    assert ops.grouped_wgrad(dy, dy, ends) is NotImplemented
