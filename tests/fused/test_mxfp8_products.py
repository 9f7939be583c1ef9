"""MXFP8 with FP8 products on Hopper: operands in blocks of 128, as under ``Float8BlockScaling``."""

import pytest
import reference as ref
import torch
from test_sm90_fp8 import (
    BF16,
    BOTH,
    HIDDEN,
    ROW,
    ROWS,
    SIZES,
    SPLITS,
    WEIGHT,
    WEIGHT_AND_COPY,
    assert_equal_but_for_order,
    backward,
    explained,
    forward,
    inputs,
    integers,
    mlp,
    step,
)

import fusible as fz
from fusible.recipes import (
    ByPass,
    Float8BlockScaling,
    Format,
    MXFP8BlockScaling,
    group_quantize,
)
from fusible.recipes.formats import fp8_block, mxfp8
from fusible.recipes.quantization import dequantize, quantize

MX = MXFP8BlockScaling(fp8_products=True)
FORMATS = Format.E4M3, Format.HYBRID, Format.E5M2


def randomized(module):
    """``module`` with weights whose elements lose bits in blocks of 128."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) * torch.rand(p.shape).pow(8))
    return module


def dequantized(stored, like):
    """``like`` with the values of the stored weights of ``stored``."""
    with torch.no_grad():
        for own, other in zip(like.parameters(), stored.parameters(), strict=True):
            values = other.dequantize() if hasattr(other, "dequantize") else other
            own.copy_(values)
    return like


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", ["mlp", "grouped", "dense"])
def test_numbers_are_those_of_blocks_of_128(kind, fmt):
    torch.manual_seed(0)
    if kind == "mlp":
        module, rows = mlp(), ROWS
        given, fired = inputs(module), "grouped_mlp_sm90_fp8"
    elif kind == "grouped":
        module, rows = fz.GroupedLinear(len(SIZES), HIDDEN, HIDDEN, dtype=BF16), ROWS
        given, fired = (torch.randn(ROWS, HIDDEN).to(BF16), SPLITS), "sm90_fp8"
    else:
        module, rows = fz.BasicLinear(HIDDEN, HIDDEN, dtype=BF16), ROWS
        given, fired = (torch.randn(ROWS, HIDDEN).to(BF16),), "sm90_fp8"
    randomized(module)
    given = (given[0].detach().requires_grad_(), *given[1:])
    dy = torch.randn(rows, HIDDEN).to(BF16)
    recipe = MXFP8BlockScaling(fmt, fp8_products=True)
    got = step(module, recipe, given, dy, fired=fired)
    ref.assert_equal(got, step(module, Float8BlockScaling(fp8_format=fmt), given, dy, fired=fired))
    off = step(module, MXFP8BlockScaling(fmt), given, dy, "cpu")
    # E5M2 has bits enough for these numbers.
    assert torch.equal(got[0], off[0]) == (fmt is Format.E5M2)
    # Elsewhere the option changes nothing.
    ref.assert_equal(step(module, recipe, given, dy, "cpu"), off)


@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
@pytest.mark.parametrize("recipe", [MX, Float8BlockScaling()], ids=["mxfp8", "fp8_block"])
@pytest.mark.parametrize("usage", ["training", "inference"])
def test_stored_weights_are_quantized_once_for_their_values(single, usage, recipe):
    """Those that are stored in MXFP8, under either recipe."""
    torch.manual_seed(0)
    options = {"bias": False, "single_grouped_weight": single}
    module = fz.quantize_(randomized(mlp(**options)), MX, usage=usage)
    like = dequantized(module, mlp(**options))
    given, dy = inputs(like), integers(ROWS, HIDDEN)
    want = step(like, Float8BlockScaling(), given, dy)
    ref.assert_equal(step(module, recipe, given, dy), want)
    y, made = forward(module, given, recipe=recipe)
    assert made == [BOTH, BOTH]
    assert backward(y) == [BOTH, BOTH]
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(p.dequantize() * 2)
        dequantized(module, like)
    want = step(like, Float8BlockScaling(), given, dy)
    ref.assert_equal(step(module, recipe, given, dy), want)
    with torch.no_grad():
        forward(module, given, recipe=recipe)
        assert forward(module, given, recipe=recipe)[1] == [ROW]  # an epilogue has the activation


def test_reused_weights_are_quantized_once():
    module = mlp()
    given = inputs(module)
    with fz.reuse_quantized_weights(module):
        assert forward(module, given, recipe=MX)[1] == [BOTH, WEIGHT_AND_COPY] * 2
        assert forward(module, given, recipe=MX)[1] == [BOTH, BOTH]
    with torch.no_grad():
        assert forward(module, given, recipe=MX)[1] == [ROW, WEIGHT] * 2


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (True, True), (False, True)])
def test_a_quantized_input_is_that_of_its_values(rowwise, columnwise):
    torch.manual_seed(0)
    module = randomized(mlp(bias=False))
    _, *extra = inputs(module)
    x, dy = torch.randn(ROWS, HIDDEN).to(BF16), integers(ROWS, HIDDEN)
    with fz.autocast(recipe=MX):
        q = module[0].get_input_quantizer()
    assert q.format == mxfp8()
    q.set_usage(rowwise=rowwise, columnwise=columnwise)
    grouped = group_quantize(x, q, len(SIZES), SPLITS)
    got = step(module, MX, (grouped, *extra), dy)
    values = grouped.dequantize().to(BF16)
    want = step(module, Float8BlockScaling(), (values, *extra), dy)
    assert_equal_but_for_order(got, want)


@pytest.mark.parametrize("columnwise", [False, True])
def test_the_error_of_a_block_is_what_the_option_says(columnwise):
    """Relative to MXFP8's values: at most 2^-10 of the scale of 128, 2^-17 of their largest."""
    torch.manual_seed(0)
    x = (torch.randn(256, 256) * torch.rand(256, 256).pow(16)).to(BF16)
    x[:, 32:64] *= 2.0**-12  # short blocks beside others, along either dimension
    x[32:64] *= 2.0**-12
    values = dequantize(quantize(x, mxfp8(), columnwise=columnwise), torch.float32)
    again = dequantize(quantize(values, fp8_block(), columnwise=columnwise), torch.float32)
    if columnwise:
        values, again = values.T, again.T
    blocks = values.reshape(-1, 128)
    largest = blocks.abs().amax(1, keepdim=True)
    error = (again.reshape(-1, 128) - blocks).abs()
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    assert (error <= scale * 2**-10).all()
    assert (error <= largest * 2**-17).all()
    assert error.any()
    exact = blocks.abs() >= scale * 2**-6
    assert not error[exact].any()


def test_recipes_by_pass():
    torch.manual_seed(0)
    module = randomized(mlp())
    given, dy = inputs(module), integers(ROWS, HIDDEN)
    want = step(module, Float8BlockScaling(), given, dy)
    ref.assert_equal(step(module, ByPass(MX, MX), given, dy), want)
    for other in (MXFP8BlockScaling(), Float8BlockScaling()):
        text = explained(module, *given, recipe=ByPass(MX, other))
        assert "GroupedMLP by grouped_mlp_sm90_fp8" not in text


def test_explain_says_what_is_multiplied_and_names_the_option():
    module = mlp()
    text = explained(module, *inputs(module), recipe=MX)
    assert "GroupedMLP by grouped_mlp_sm90_fp8, forward and backward" in text
    assert "one the weights, as under Float8BlockScaling()" in text
    text = explained(module, *inputs(module), recipe=MXFP8BlockScaling())
    assert "GroupedMLP by grouped_mlp_sm90," in text
    assert "fp8_products must be True, got False; set fp8_products=True in the recipe" in text
    text = explained(module, *inputs(module), recipe=fz.recipes.NVFP4BlockScaling())
    assert "fp8_products" not in text
    assert "fp8_products" not in fz.explain(module, *inputs(module), target="sm90").to_text()
