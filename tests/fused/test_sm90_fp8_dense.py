"""Dense linears with FP8 products on Hopper: values of dequantized operands, and the launches."""

import pytest
import torch
from number_formats import CURRENT_FP8, each_fp8_recipe
from sm90_launches import sm90_on_cpu
from test_sm90_fp8 import (
    BF16,
    BOTH,
    COLUMN,
    INNER,
    RECIPES,
    ROW,
    WEIGHT,
    WEIGHT_AND_COPY,
    assert_equal_but_for_order,
    backward,
    exactly_summed,
    explained,
    forward,
    integers,
    launches,
    on,
    step,
)

import fusible as fz
from fusible.recipes import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from fusible.recipes.quantization import dequantize, quantize

FEATURES, ROWS = 144, 269
FIRED = "sm90_fp8"


def linear(recipe=None, **options):
    options = {"dtype": BF16, "bias": False, **options}
    with fz.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        return exactly_summed(fz.Linear(FEATURES, INNER, **options))


def given(*shape, dtype=BF16):
    return integers(*(shape or (ROWS,)), FEATURES).to(dtype).requires_grad_()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("stored", [False, True], ids=["", "stored"])
@pytest.mark.parametrize("shape", [(ROWS,), (2, 3, 50), (1,)], ids=str)
def test_a_linear_equals_the_dequantized_path(recipe, stored, shape):
    module = linear(recipe if stored else None, bias=True)
    x, dy = given(*shape), integers(*shape, INNER)
    got = step(module, recipe, [x], dy, fired=FIRED)
    assert_equal_but_for_order(got, step(module, recipe, [x], dy, "cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@each_fp8_recipe
def test_other_dtypes(dtype, recipe):
    module, x, dy = linear(dtype=dtype), given(dtype=dtype), integers(ROWS, INNER).to(dtype)
    got = step(module, recipe, [x], dy, fired=FIRED)
    assert_equal_but_for_order(got, step(module, recipe, [x], dy, "cpu"))


@pytest.mark.parametrize(
    "recipe", [Float8BlockScaling(use_f32_scales=True), CURRENT_FP8], ids=["blocks", "current"]
)
def test_values_are_fp64_products_of_what_was_quantized(recipe):
    module = fz.Linear(FEATURES, INNER, dtype=BF16, bias=False)
    x, dy = torch.randn(ROWS, FEATURES).to(BF16).requires_grad_(), torch.randn(ROWS, INNER).to(BF16)

    def values(t, role, columnwise=False):
        quantized = quantize(t.detach(), recipe.format(role), columnwise=columnwise)
        return dequantize(quantized, torch.float32).double()

    w = values(module.weight, "weight")
    want = (
        values(x, "input") @ w.T,
        values(dy, "grad") @ w,
        values(dy, "grad", True).T @ values(x, "input", True),
    )
    for got, exact in zip(step(module, recipe, [x], dy, fired=FIRED), want, strict=True):
        assert (got == exact.to(BF16)).double().mean() > 0.99


@each_fp8_recipe
def test_no_rows(recipe):
    module, x = linear(), torch.empty(0, FEATURES, dtype=BF16, requires_grad=True)
    y, dx, dw = step(module, recipe, [x], torch.empty(0, INNER, dtype=BF16), fired=FIRED)
    assert (y.shape, dx.shape, dw.shape) == ((0, INNER), (0, FEATURES), (INNER, FEATURES))
    assert not dw.any()


@pytest.mark.parametrize("column_major", [False, True])
@each_fp8_recipe
def test_every_product_is_a_launch_of_fp8(column_major, recipe):
    module, x, dy = linear(bias=True), given(3, 50), integers(3, 50, INNER)
    if column_major:
        module.weight = torch.nn.Parameter(module.weight.detach().mT.contiguous().mT)
    want = step(module, recipe, [x], dy, fired=FIRED)
    with sm90_on_cpu() as loaded:
        got = step(module, recipe, [x], dy, fired=FIRED)
    assert all(spec.is_fp8 for spec in loaded)
    assert launches(loaded) == ["store", "store", "wgrad"]
    assert_equal_but_for_order(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("delayed", [False, True])
@each_fp8_recipe
def test_gradients_into_main_grads_and_later(dtype, delayed, recipe):
    plain, x, dy = linear(), given(), integers(ROWS, INNER)
    *_, dw = step(plain, recipe, [x], dy, fired=FIRED)
    module = fz.BasicLinear(FEATURES, INNER, dtype=BF16, accumulate_into_main_grad=True)
    module.delay_wgrad_compute = delayed
    module.load_state_dict(plain.state_dict())
    module.weight.main_grad = torch.ones(INNER, FEATURES, dtype=dtype)
    with on("sm90", recipe):
        y = module(x)
    y.backward(dy)
    assert module.plan.kernels == (FIRED,)
    module.backward_dw()
    near = {"rtol": 2**-7, "atol": 2**-7}
    torch.testing.assert_close(module.weight.main_grad.float(), 1 + dw.float(), **near)


@each_fp8_recipe
def test_buffers_of_the_caller(recipe):
    module, x, dy = (
        fz.BasicLinear(FEATURES, INNER, dtype=BF16),
        given(2, 25),
        integers(2, 25, INNER),
    )
    y, dx, _ = step(module, recipe, [x], dy, fired=FIRED)
    buffers = {"output": torch.empty_like(y), "grad_input": torch.empty_like(dx)}
    sequential = fz.Sequential(module)
    with on("sm90", recipe):
        got = sequential(x, op_kwargs={0: buffers})
    (dgot,) = torch.autograd.grad(got, x, dy)
    for mine, buffer, want in zip((got, dgot), buffers.values(), (y, dx), strict=True):
        assert mine.data_ptr() == buffer.data_ptr()
        assert torch.equal(mine, want)


# --- what is quantized, and by whom ---------------------------------------------------------------


@each_fp8_recipe
def test_each_operand_is_quantized_once_by_the_linears(recipe):
    """Norms, activations and biases give values: one launch quantizes them for both products."""
    module = fz.Sequential(
        fz.LayerNorm(FEATURES, dtype=BF16), linear(bias=True), fz.GELU(), linear_back(bias=True)
    )
    y, made = forward(module, [given()], recipe=recipe)
    assert made == [BOTH, WEIGHT_AND_COPY, BOTH, WEIGHT_AND_COPY]
    assert backward(y) == [BOTH, BOTH]
    with torch.no_grad():
        assert forward(module, [given()], recipe=recipe)[1] == [ROW, WEIGHT, ROW, WEIGHT]


def linear_back(**options):
    return exactly_summed(fz.Linear(INNER, FEATURES, dtype=BF16, **options))


@each_fp8_recipe
def test_what_no_gradient_reads_is_not_made(recipe):
    module, x = linear(), given()
    y, made = forward(module, [x.detach()], recipe=recipe)
    assert made == [BOTH, WEIGHT]
    assert backward(y) == [COLUMN]
    module.weight.requires_grad_(False)
    y, made = forward(module, [x], recipe=recipe)
    assert made == [ROW, WEIGHT_AND_COPY]
    assert backward(y) == [ROW]


@each_fp8_recipe
def test_reused_and_stored_weights_are_not_quantized_again(recipe):
    module = linear()
    with fz.reuse_quantized_weights(module):
        assert forward(module, [given()], recipe=recipe)[1] == [BOTH, WEIGHT_AND_COPY]
        assert forward(module, [given()], recipe=recipe)[1] == [BOTH]
    assert forward(linear(recipe), [given()], recipe=recipe)[1] == [BOTH]


@pytest.mark.parametrize("backward", [False, True])
@each_fp8_recipe
def test_quantize_beside_a_linear(backward, recipe):
    module = fz.Sequential(
        fz.Quantize(forward=True, backward=backward), linear(bias=True), fz.Quantize(backward=True)
    )
    x, dy = given(), integers(ROWS, INNER)
    results = []
    for machine in ("sm90", "cpu"):
        with on(machine, recipe):
            y = module(x)
        assert (FIRED in module.plan.kernels) == (machine == "sm90")
        results.append([y.dequantize(), *torch.autograd.grad(y, [x, *module.parameters()], dy)])
    values = [[getattr(t, "dequantize", lambda t=t: t)() for t in each] for each in results]
    assert_equal_but_for_order(*values)


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("shape", [(ROWS,), (2, 25)], ids=str)
@each_fp8_recipe
def test_a_quantized_input(rowwise, columnwise, shape, recipe):
    module, dy = linear(bias=True), integers(*shape, INNER)
    with fz.autocast(recipe=recipe):
        quantizer = module.basic_ops[0].get_input_quantizer()
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    x = quantizer(given(*shape).detach())
    got = step(module, recipe, [x], dy, fired=FIRED)
    assert_equal_but_for_order(got, step(module, recipe, [x], dy, "cpu"))


# --- compiled, and explained ----------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@each_fp8_recipe
def test_compiles_whole(recipe):
    module, x, dy = linear(bias=True), given(), integers(ROWS, INNER)
    want = step(module, recipe, [x], dy, fired=FIRED)
    with on("sm90", recipe):
        y = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)(x)
    got = [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]
    assert_equal_but_for_order(got, want)


def test_explain_says_what_multiplies_in_fp8():
    text = explained(linear(), given())
    assert f"kernels: {FIRED}\n" in text
    assert "multiplies FP8, in all products" in text
    text = explained(linear(), given(), recipe=MXFP8BlockScaling())
    assert f"{FIRED} for ops[0:1]" in text
    assert "fp8_products must be True, got False; set fp8_products=True in the recipe" in text
    text = explained(linear(), given(), recipe=NVFP4BlockScaling(), every_rule=True)
    assert f"{FIRED} for ops[0:1]" in text
    assert "scaling.input must be one of fp8 with one float32 scale per 1x128, fp8 with" in text
    odd = fz.Linear(24, 32, dtype=BF16, bias=False)
    text = explained(odd, torch.ones(4, 24, dtype=BF16, requires_grad=True))
    assert "op.in_features must be a multiple of 16, got 24" in text
