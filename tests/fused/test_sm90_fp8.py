"""FP8 products on Hopper against the dequantized path: the same values, summed in another order."""

import json
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import reference as ref
import torch
from checks import Recorded, saved_tensors
from number_formats import BLOCK_FP8, CURRENT_FP8, each_fp8_recipe
from sm90_launches import sm90_on_cpu

import fusible as fz
from fusible.kernels.sm90 import fp8_times
from fusible.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    group_quantize,
)
from fusible.recipes.quantization import dequantize, quantize
from fusible.testing import assume_target

SIZES = [129, 0, 37, 128, 1, 0]
ROWS = sum(SIZES) + 5  # the last ones belong to no group
HIDDEN, INNER = 144, 320  # one block and an eighth, two blocks and a half
RECIPES = {
    "e4m3": BLOCK_FP8,
    "hybrid": Float8BlockScaling(fp8_format=Format.HYBRID),
    "e5m2": Float8BlockScaling(fp8_format=Format.E5M2),
    "current": CURRENT_FP8,
    "current, powers": Float8CurrentScaling(Format.E4M3, use_power_2_scales=True),
    "mxfp8": MXFP8BlockScaling(fp8_products=True),
}
BF16 = torch.bfloat16
SPLITS = torch.tensor(SIZES)


def integers(*shape, of=1.0, most=2):
    return (torch.randint(-most, most + 1, shape) * of).to(BF16)


def exactly_summed(module):
    """``module`` with parameters whose products with small integers have exact sums in FP32."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(integers(*p.shape, of=1 / 8))
    return module


def mlp(recipe=None, *, inner=INNER, act=None, **options):
    options = {"dtype": BF16, "single_grouped_weight": True, **options}
    first = {key: v for key, v in options.items() if key != "scale_bias"}
    act = act or fz.ScaledSwiGLU(None if options["single_grouped_weight"] else 16)
    with fz.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        return exactly_summed(
            fz.Sequential(
                fz.GroupedLinear(len(SIZES), HIDDEN, (1 + act.gated) * inner, **first),
                act,
                fz.GroupedLinear(len(SIZES), inner, HIDDEN, **options),
            )
        )


def inputs(module):
    x, scales = integers(ROWS, HIDDEN), integers(ROWS, of=0.5).abs().float()
    more = [torch.rand(ROWS).requires_grad_()] if module[2].scale_bias else []
    return x.requires_grad_(), SPLITS, scales.requires_grad_(), SPLITS, *more


@contextmanager
def on(machine, recipe):
    with assume_target(machine), fz.autocast(recipe=recipe):
        yield


def step(module, recipe, given, dy, machine="sm90", fired="grouped_mlp_sm90_fp8"):
    """Output and all gradients, with FP8 products or ("cpu") with dequantized operands."""
    given = [
        t.detach().requires_grad_() if isinstance(t, torch.Tensor) and t.requires_grad else t
        for t in given
    ]
    leaves = [t for t in (*given, *module.parameters()) if t.requires_grad]
    with on(machine, recipe):
        y = module(*given)
        names = module.plan.fired + module.plan.kernels
        assert names == ((fired,) if machine == "sm90" else ())
    return [y, *torch.autograd.grad(y, leaves, dy)]


def assert_equal_but_for_order(got, want, terms=ROWS):
    """Sums of so many FP32 terms, rounded to BF16 once."""
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert theirs.isfinite().all()
        largest = theirs.abs().max().item()
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=terms * 2**-23 * largest)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("stored", [False, True], ids=["", "stored"])
@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
def test_a_grouped_mlp_equals_the_dequantized_path(recipe, stored, single):
    module = mlp(recipe if stored else None, bias=not stored, single_grouped_weight=single)
    given, dy = inputs(module), integers(ROWS, HIDDEN)
    got = step(module, recipe, given, dy)
    assert_equal_but_for_order(got, step(module, recipe, given, dy, "cpu"))
    assert not got[0][sum(SIZES) :].any()
    assert not got[1][sum(SIZES) :].any()


@pytest.mark.parametrize(
    "sizes", [SIZES, [0] * 6, [0, 0, 0, 300, 0, 0], [1, 2, 3, 4, 5, 6]], ids=str
)
@pytest.mark.parametrize("activation", [fz.ScaledSwiGLU, fz.ScaledClampedQGeGLU])
@each_fp8_recipe
def test_groups_of_any_size(sizes, activation, recipe):
    module = mlp(bias=True, single_grouped_bias=True)
    module = fz.Sequential(module[0], activation(), module[2])
    x, _, scales, _ = inputs(module)
    splits, dy = torch.tensor(sizes), integers(ROWS, HIDDEN)
    given = x, splits, scales, splits
    got = step(module, recipe, given, dy)
    assert_equal_but_for_order(got, step(module, recipe, given, dy, "cpu"))
    for grads in got[3:]:  # of weights and biases
        assert not grads[torch.tensor(sizes) == 0].any()


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16])
@pytest.mark.parametrize("options", [{}, {"scale_bias": True}, {"bias": False}], ids=str)
@each_fp8_recipe
def test_a_linear_equals_the_dequantized_path(dtype, options, recipe):
    linear = fz.GroupedLinear(len(SIZES), HIDDEN, INNER, dtype=dtype, **options)
    exactly_summed(linear)
    given = [integers(ROWS, HIDDEN).to(dtype).requires_grad_(), SPLITS]
    if linear.scale_bias:
        given.append(torch.rand(ROWS).requires_grad_())
    dy = integers(ROWS, INNER).to(dtype)
    got = step(linear, recipe, given, dy, fired="sm90_fp8")
    assert_equal_but_for_order(got, step(linear, recipe, given, dy, "cpu"))


@each_fp8_recipe
def test_no_rows(recipe):
    module = mlp()
    x, splits = torch.empty(0, HIDDEN, dtype=BF16, requires_grad=True), torch.zeros(6, dtype=int)
    y, dx, *grads = step(module, recipe, (x, splits, torch.empty(0), splits), torch.empty_like(x))
    assert (y.shape, dx.shape) == ((0, HIDDEN), (0, HIDDEN))
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize(
    "recipe", [Float8BlockScaling(use_f32_scales=True), CURRENT_FP8], ids=["blocks", "current"]
)
def test_fp32_scales_are_not_rounded(recipe):
    """Results are FP64 products of what was quantized, rounded once.

    A sum in FP32 may be next to a boundary of BF16; values or scales of fewer bits than FP32 would
    turn the rounding of one result in three.
    """
    options = {"dtype": BF16, "bias": False, "single_grouped_weight": True}
    linear = fz.GroupedLinear(len(SIZES), HIDDEN, INNER, **options)
    x, dy = torch.randn(ROWS, HIDDEN).to(BF16), torch.randn(ROWS, INNER).to(BF16)
    given = x.requires_grad_(), SPLITS
    y, dx, dw = step(linear, recipe, given, dy, fired="sm90_fp8")

    def values(t, role, columnwise=False):
        quantized = quantize(t.detach(), recipe.format(role), columnwise=columnwise)
        return dequantize(quantized, torch.float32).double()

    pairs, rows = [], torch.arange(sum(SIZES)).split(SIZES)
    for e, own in enumerate(rows):
        w = values(linear.weight[e], "weight")
        pairs += [
            (y[own], values(x[own], "input") @ w.T),
            (dx[own], values(dy[own], "grad") @ w),
            (dw[e], values(dy[own], "grad", True).T @ values(x[own], "input", True)),
        ]
    for got, want in pairs:
        if got.numel():
            assert (got == want.to(BF16)).double().mean() > 0.99
        assert got.shape == want.shape


# --- the launches ---------------------------------------------------------------------------------


def launches(loaded):
    return sorted(spec.kind for spec in loaded)


@pytest.mark.parametrize(
    ("stored", "column_major"),  # quantized weights have one layout
    [(False, False), (True, False), (False, True)],
    ids=["", "stored", "column-major"],
)
@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
@each_fp8_recipe
def test_every_product_is_a_launch_of_fp8(stored, single, column_major, recipe):
    """The kernels take what this makes: addresses, strides and scales."""
    module = mlp(recipe if stored else None, bias=not stored, single_grouped_weight=single)
    for fc in (module[0], module[2]) if column_major else ():
        for name, w in fc.named_parameters():
            if name.startswith("weight"):
                setattr(fc, name, torch.nn.Parameter(w.detach().mT.contiguous().mT))
    given, dy = inputs(module), integers(ROWS, HIDDEN)
    want = step(module, recipe, given, dy)
    with sm90_on_cpu() as loaded:
        got = step(module, recipe, given, dy)
        with torch.no_grad(), on("sm90", recipe):
            module(*given)
    assert all(spec.is_fp8 for spec in loaded)
    assert launches(loaded) == ["glu", "glu", "store", "store", "store", "wgrad", "wgrad"]
    # The columns of a group share its scale.
    of_columns = "rows" if recipe is BLOCK_FP8 else "blocks"
    gradients = [spec for spec in loaded if spec.kind == "wgrad"]
    assert {spec.b_scale_layout for spec in gradients} == {of_columns}
    assert_equal_but_for_order(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@each_fp8_recipe
def test_gradients_into_main_grads_and_later(dtype, recipe):
    plain, dy = mlp(bias=False), integers(ROWS, HIDDEN)
    given = inputs(plain)
    *_, dw1, dw2 = step(plain, recipe, given, dy)
    module = mlp(bias=False, accumulate_into_main_grad=True, delay_wgrad_compute=True)
    module.load_state_dict(plain.state_dict())
    for fc in (module[0], module[2]):
        fc.weight.main_grad = torch.ones(fc.weight.shape, dtype=dtype)
    with sm90_on_cpu() as loaded:
        with on("sm90", recipe):
            y = module(*given)
        y.backward(dy)
        assert "wgrad" not in launches(loaded)
        module[0].backward_dw()
        module[2].backward_dw()
    assert launches(loaded) == ["glu", "store", "store", "store", "wgrad", "wgrad"]
    for fc, dw in ((module[0], dw1), (module[2], dw2)):
        near = {"rtol": 2**-7, "atol": 2**-7}
        torch.testing.assert_close(fc.weight.main_grad.float(), 1 + dw.float(), **near)


# --- what is quantized, when, and what is saved ---------------------------------------------------


def quantizing(func, args):
    """The quantizing launches: dimensions of the input, and whether each use is made."""
    if func is torch.ops.fusible.quantize_k_major.default:
        yield (args[0].dim(), *args[-2:])
    if func is torch.ops.fusible.quantize_glu_backward.default:
        act, rowwise, columnwise, _ = args[-4:]
        yield (args[0].dim(), rowwise, columnwise, *["activation"] * act)
    if func in (torch.ops.fusible.quantize.default, torch.ops.fusible.dequantize.default):
        yield func


ROW, COLUMN, BOTH = (2, True, False), (2, False, True), (2, True, True)
BOTH_AND_ACTIVATION = (*BOTH, "activation")
WEIGHT, WEIGHT_AND_COPY = (3, True, False), (3, True, True)


def forward(module, given, recipe=BLOCK_FP8):
    with on("sm90", recipe), Recorded(quantizing) as recorded:
        y = module(*given)
    return y, recorded.made


def backward(y):
    with Recorded(quantizing) as recorded:
        y.backward(torch.ones_like(y))
    return recorded.made


@each_fp8_recipe
def test_training_quantizes_each_operand_once(recipe):
    module = mlp()
    both = module, inputs(module)
    y, made = forward(*both, recipe=recipe)
    assert made == [BOTH, WEIGHT_AND_COPY, BOTH, WEIGHT_AND_COPY]
    assert backward(y) == [BOTH, BOTH]
    with torch.no_grad():
        assert forward(*both, recipe=recipe)[1] == [ROW, WEIGHT, ROW, WEIGHT]


@each_fp8_recipe
def test_what_no_gradient_reads_is_not_made(recipe):
    module = mlp(bias=True)
    x, splits, scales, _ = inputs(module)
    given = x.detach(), splits, scales, splits
    y, made = forward(module, given, recipe=recipe)
    assert made == [BOTH, WEIGHT, BOTH, WEIGHT_AND_COPY]
    assert backward(y) == [BOTH, COLUMN]
    for fc in (module[0], module[2]):
        fc.weight.requires_grad_(False)
    y, made = forward(module, (x, *given[1:]), recipe=recipe)
    assert made == [ROW, WEIGHT_AND_COPY, ROW, WEIGHT_AND_COPY]
    assert backward(y) == [ROW, ROW]
    linear = module[2]
    h = torch.ones(ROWS, INNER, dtype=BF16)
    y, made = forward(linear, (h, splits), recipe=recipe)
    assert made == [ROW, WEIGHT]
    assert backward(y) == []
    assert linear.biases()[0].grad.any()


@each_fp8_recipe
def test_operands_of_gradients_are_saved_in_fp8(recipe):
    module = mlp()
    with saved_tensors() as saved:
        forward(module, inputs(module), recipe=recipe)
    padded = (ROWS + 127 * len(SIZES)) // 128 * 128
    elements = [t for t in saved if t.dtype == torch.float8_e4m3fn]
    shapes = [(HIDDEN, padded), (6, HIDDEN, 2 * INNER), (INNER, padded), (6, INNER, HIDDEN)]
    assert [tuple(t.shape) for t in elements] == shapes
    assert all(t.is_contiguous() for t in elements)
    wide = [tuple(t.shape) for t in saved if t.dtype == BF16]
    assert wide == [(ROWS, 2 * INNER)]  # the pre-activation


# --- an activation that an epilogue quantizes -----------------------------------------------------

ALIGNED = {  # gate and linear columns in whole blocks, or one operand
    "halves": {"inner": 256},
    "stripes": {"inner": 256, "act": fz.ScaledSwiGLU(128)},
    "part of a block": {"inner": 336, "act": fz.ScaledSReLU()},
    "biases": {"inner": 256, "act": fz.ScaledSReLU(), "bias": True},
    "recomputed": {"inner": 256, "act": fz.ScaledSReLU(activation_recompute_in_mlp=True)},
    "not scaled": {"inner": 128, "act": fz.SwiGLU()},
}
aligned = pytest.mark.parametrize("options", ALIGNED.values(), ids=ALIGNED)


def aligned_mlp(options, recipe=None):
    """And its inputs."""
    module = mlp(recipe, **{"bias": False, **options})
    x, splits, scales, *rest = inputs(module)
    return module, (x, splits, *[scales] * module[1].num_extra_inputs, *rest)


@aligned
@pytest.mark.parametrize("stored", [False, True], ids=["", "stored"])
@pytest.mark.parametrize("recipe", [RECIPES[name] for name in ("e4m3", "hybrid", "e5m2", "mxfp8")])
def test_activation_in_an_epilogue_equals_the_dequantized_path(options, stored, recipe):
    module, given = aligned_mlp(options, recipe if stored else None)
    dy = integers(ROWS, HIDDEN)
    got = step(module, recipe, given, dy)
    assert_equal_but_for_order(got, step(module, recipe, given, dy, "cpu"))
    with sm90_on_cpu() as loaded:
        ref.assert_equal(step(module, recipe, given, dy), got)
    formats = {spec.out_format for spec in loaded}
    assert recipe.of_fp8_products.format("input") in formats
    module.requires_grad_(False)
    with torch.no_grad(), on("sm90", recipe):
        torch.testing.assert_close(module(*given), got[0], rtol=0, atol=0)


@aligned
def test_activation_in_an_epilogue_is_neither_quantized_again_nor_saved(options):
    module, given = aligned_mlp(options)
    with saved_tensors() as saved:
        y, made = forward(module, given)
    assert made == [BOTH, WEIGHT_AND_COPY, WEIGHT_AND_COPY]
    elements = [t for t in saved if t.dtype == torch.float8_e4m3fn]
    assert [tuple(t.shape[:-1]) for t in elements] == [
        (HIDDEN,),
        (6, HIDDEN),
        (6, module[2].in_features),
    ]
    assert backward(y) == [BOTH, BOTH_AND_ACTIVATION]
    with torch.no_grad():
        assert forward(module, given)[1] == [ROW, WEIGHT, WEIGHT]


def test_what_no_gradient_reads_is_not_made_of_an_activation_in_an_epilogue():
    for frozen, of_backward in ((2, [ROW, BOTH]), (0, [BOTH, (*ROW, "activation")])):
        module, given = aligned_mlp(ALIGNED["halves"])
        module[frozen].requires_grad_(False)
        y, _ = forward(module, given)
        assert backward(y) == of_backward


def test_explain_says_where_an_epilogue_quantizes_the_activation():
    says = "one the weights; FC1's epilogue quantizes the activation"
    for options, where in (
        ({}, ";"),
        ({"act": fz.ScaledSwiGLU(32)}, " in inference;"),
        ({"bias": True}, None),
    ):
        module, given = aligned_mlp({"inner": 256, **options})
        text = explained(module, *given, recipe=BLOCK_FP8)
        assert (says + where in text) if where else (says not in text)


@dataclass(frozen=True)
class MixedFormats(fz.recipes.Recipe):
    """One scale for a group's inputs, one for 1x128 of its gradients."""

    name = "mixed_formats"

    def format(self, role):
        return (CURRENT_FP8 if role == "input" else BLOCK_FP8).format(role)


def test_recomputed_activation_in_another_format_than_gradients():
    """The launch of the backward gives both in blocks, or only the gradients."""
    act = fz.ScaledSReLU(activation_recompute_in_mlp=True)
    module, given = aligned_mlp({"inner": 256, "act": act})
    dy, recipe = integers(ROWS, HIDDEN), MixedFormats()
    got = step(module, recipe, given, dy)
    assert_equal_but_for_order(got, step(module, recipe, given, dy, "cpu"))
    y, _ = forward(module, given, recipe=recipe)
    assert backward(y) == [BOTH, BOTH, COLUMN]


def test_where_no_epilogue_quantizes_the_activation():
    """Biases; stripes that are no whole blocks, but without a backward; scales of whole groups."""
    for options, recipe, training, inference in (
        ({"inner": 256, "bias": True}, BLOCK_FP8, True, True),
        ({"inner": 256, "bias": False, "act": fz.ScaledSwiGLU(32)}, BLOCK_FP8, True, False),
        ({"inner": 256, "bias": False}, CURRENT_FP8, True, True),
    ):
        module = mlp(**options)
        given = inputs(module)
        both = [WEIGHT_AND_COPY, *[BOTH] * training, WEIGHT_AND_COPY]
        assert forward(module, given, recipe=recipe)[1] == [BOTH, *both]
        with torch.no_grad():
            rows = [WEIGHT, *[ROW] * inference, WEIGHT]
            assert forward(module, given, recipe=recipe)[1] == [ROW, *rows]


@each_fp8_recipe
def test_saved_tensors_may_be_packed(recipe):
    """As CPU offloading and compression do: other memory, other strides."""
    _check_packed(mlp(bias=True), recipe)
    _check_packed(mlp(bias=False, inner=256), recipe)


def _check_packed(module, recipe):
    given, dy = inputs(module), integers(ROWS, HIDDEN)
    want = step(module, recipe, given, dy)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.dtype, t.contiguous().view(torch.uint8).tolist()),
        lambda packed: torch.tensor(packed[1], dtype=torch.uint8).view(packed[0]),
    )
    with hooks:
        got = step(module, recipe, given, dy)
    assert_equal_but_for_order(got, want)


@each_fp8_recipe
def test_reused_weights_are_quantized_and_copied_once(recipe):
    module = mlp()
    given, dy = inputs(module), integers(ROWS, HIDDEN)
    want = step(module, recipe, given, dy)
    with fz.reuse_quantized_weights(module):
        y, made = forward(module, given, recipe=recipe)
        assert made == [BOTH, WEIGHT_AND_COPY, BOTH, WEIGHT_AND_COPY]
        backward(y)
        for _ in range(2):
            y, made = forward(module, given, recipe=recipe)
            assert made == [BOTH, BOTH]
            assert backward(y) == [BOTH, BOTH]
        ref.assert_equal(step(module, recipe, given, dy), want)
        with torch.no_grad():
            assert forward(module, given, recipe=recipe)[1] == [ROW, ROW]


@pytest.mark.parametrize("single", [True, False])
@each_fp8_recipe
def test_stored_weights_are_not_quantized_again(single, recipe):
    module = mlp(recipe, single_grouped_weight=single)
    y, made = forward(module, inputs(module), recipe=recipe)
    assert made == [BOTH, BOTH]
    assert backward(y) == [BOTH, BOTH]


# --- quantized inputs and gradients ---------------------------------------------------------------


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (True, True), (False, True)])
@each_fp8_recipe
def test_a_quantized_input(rowwise, columnwise, recipe):
    module, dy = mlp(bias=True), integers(ROWS, HIDDEN)
    x, *extra = inputs(module)
    with fz.autocast(recipe=recipe):
        q = module[0].get_input_quantizer()
    q.set_usage(rowwise=rowwise, columnwise=columnwise)
    grouped = group_quantize(x.detach(), q, len(SIZES), SPLITS)
    got = step(module, recipe, (grouped, *extra), dy)
    assert_equal_but_for_order(got, step(module, recipe, (grouped, *extra), dy, "cpu"))
    _, made = forward(module, (grouped, *extra), recipe=recipe)
    assert made.count(BOTH) == 1  # of the activation
    assert made.count(COLUMN) == 1  # of x, in the kernels' layout


@each_fp8_recipe
def test_a_quantized_gradient(recipe):
    module = mlp()
    given = inputs(module)
    dy = integers(ROWS, HIDDEN)
    with fz.autocast(recipe=recipe):
        q = module[2].get_grad_output_quantizer()
    grouped = group_quantize(dy, q, len(SIZES), SPLITS)
    for machine in ("sm90", "cpu"):
        got = step(module, recipe, given, grouped, machine)
        assert_equal_but_for_order(got, step(module, recipe, given, dy, "cpu"))


@dataclass(frozen=True)
class OwnFormats(fz.recipes.Recipe):
    """The formats of another recipe under names of its own, or with other scales."""

    name = "own_formats"
    scale: str = "fp32"

    def format(self, role):
        return replace(BLOCK_FP8.format(role), name=f"own_{role}", scale=self.scale)


@pytest.mark.parametrize("scale", ["fp32", "fp32_power_of_two"])
def test_formats_of_ones_own(scale):
    """What kernels multiply is a matter of elements and scales, of no recipe's or format's name."""
    module, recipe = mlp(), OwnFormats(scale)
    given, dy = inputs(module), integers(ROWS, HIDDEN)
    got = step(module, recipe, given, dy)
    assert_equal_but_for_order(got, step(module, recipe, given, dy, "cpu"))
    other = OwnFormats(scale="e8m0_up")
    text = explained(module, *given, recipe=other, every_rule=True)
    assert "by grouped_mlp_sm90," in text
    assert (
        "scaling.weight must be one of fp8 with one float32 scale per 128x128, fp8 with one "
        "float32 scale per matrix where fp8_products is True, got fp8 with one float8_e8m0fnu "
        "scale per 128x128"
    ) in text


# --- why, and why not -----------------------------------------------------------------------------


def explained(module, *given, recipe=BLOCK_FP8, every_rule=False):
    with fz.autocast(recipe=recipe):
        return fz.explain(module, *given, target="sm90").to_text(every_rule=every_rule)


def test_explain_says_what_multiplies_in_fp8():
    module = mlp()
    text = explained(module, *inputs(module))
    assert "GroupedMLP by grouped_mlp_sm90_fp8, forward and backward" in text
    assert "multiplies FP8, in all products: one launch quantizes an input or a gradient" in text
    assert "estimated" in text
    text = explained(module, *inputs(module), recipe=CURRENT_FP8)
    assert "GroupedMLP by grouped_mlp_sm90_fp8, forward and backward" in text
    assert "after another that finds the scales of whole groups and weights" in text
    assert "estimated" not in text
    for kind in (Float8BlockScaling, Float8CurrentScaling):
        decoded = kind(fp8_products=False)
        text = explained(module, *inputs(module), recipe=decoded, every_rule=True)
        assert "GroupedMLP by grouped_mlp_sm90," in text
        assert "fp8_products must be True, got False; set fp8_products=True in the" in text
    decoded = explained(module, *inputs(module), recipe=MXFP8BlockScaling())
    assert "multiplies values of quantized operands, in BF16 on CUDA" in decoded


def test_explain_says_whether_bf16_would_be_faster():
    """Of one linear as well; by what the model says of its features."""
    module = mlp()
    bf16, fp8, _ = fp8_times.step_times([(HIDDEN, 2 * INNER), (INNER, HIDDEN)])
    assert fp8 > bf16
    text = explained(module, *inputs(module))
    assert f"estimated: {fp8 / bf16:.2f} of BF16's time, more with weights that are" in text
    linear = fz.GroupedLinear(2, 4096, 8192, dtype=BF16, bias=False, device="meta")
    x, sizes = (
        torch.ones(4, 4096, dtype=BF16, device="meta"),
        torch.ones(2, dtype=torch.int64, device="meta"),
    )
    bf16, fp8, weights = fp8_times.step_times([(4096, 8192)])
    rows = f"{fp8 / bf16:.2f} of BF16's time with weights stored or reused; with weights quantized "
    rows += f"in every forward, less than BF16's from {weights / (bf16 - fp8):.0f} rows a group"
    assert rows in explained(linear, x, sizes)


def test_estimated_times_are_near_the_measured_ones():
    """Of whole steps on an H200."""
    file = Path(__file__).parents[2] / "benchmarks/results/grouped_mlp_fp8_h200.json"
    shapes = {
        "qwen3-30b": (2048, 768, 1024),
        "mixtral-8x7b": (4096, 14336, 2048),
        "dsv3-ep32": (7168, 2048, 1024),
    }
    cells = [c for c in json.loads(file.read_text())["cells"] if c["pass"] != "inference"]
    assert len(cells) == 6  # balanced and skewed
    for cell in cells:
        hidden, inner, rows = shapes[cell["config"]]
        bf16, fp8, weights = fp8_times.step_times([(hidden, 2 * inner), (inner, hidden)])
        faster = cell["faster"]
        assert bf16 / (fp8 + weights / rows) == pytest.approx(faster["fp8_block"], rel=0.055)
        assert bf16 / fp8 == pytest.approx(faster["fp8_block, weights stored"], rel=0.055)


def test_explain_says_why_not():
    options = {"dtype": BF16, "bias": False}
    x = torch.ones(4, 24, dtype=BF16, requires_grad=True)
    text = explained(fz.GroupedLinear(2, 24, 32, **options), x, torch.tensor([3, 1]))
    assert "kernels: sm90\n" in text
    assert "kernels not selected:\n  sm90_fp8 for ops[0:1]\n" in text
    assert "op.in_features must be a multiple of 16, got 24" in text
    narrow = fz.Sequential(
        fz.GroupedLinear(2, 32, 64, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(2, 32, 32, **options),
    )
    splits = torch.tensor([3, 1])
    given = torch.ones(4, 32, dtype=BF16, requires_grad=True), splits, torch.ones(4), splits
    text = explained(narrow, *given)
    assert "fc2.in_features must be a multiple of 64 where act.glu_interleave_size is None" in text
    wide = mlp(dtype=torch.float32)
    x, *extra = inputs(wide)
    text = explained(wide, x.detach().float().requires_grad_(), *extra)
    assert "grouped_mlp_sm90_fp8 (joint) for ops[0:3]" in text
    assert "fc1.dtype must be bfloat16, got float32" in text
    assert text.count("kernels: sm90_fp8\n") == 2
    override = Float8BlockScaling(backward_override="dequantized")
    text = explained(mlp(), *inputs(mlp()), recipe=override)
    assert text.count("backward_override must be None, got dequantized") >= 1
    assert text.count("kernels: sm90\n") == 2
