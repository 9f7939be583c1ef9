"""Grouped MLPs with FP8 products as one node without contexts: the same bits as the ops."""

import weakref

import pytest
import reference as ref
import torch
from fast_paths import (
    assert_equals_the_ops,
    assert_equals_the_ops_without_gradients,
    assert_graph_may_be_kept,
    both,
    call,
    gradients,
    on_sm90,
    steps,
    with_biases,
)
from number_formats import BLOCK_FP8, CURRENT_FP8
from sm90_launches import is_direct, launch_quantize

import fusible as fz
from fusible.fused import fp8_fast_path
from fusible.kernels.sm90 import tiles
from fusible.recipes import (
    ByOp,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
)
from fusible.recipes.blocks import padded_size

SIZES = [129, 0, 37, 1]
ROWS = sum(SIZES) + 5  # the last ones belong to no group
HIDDEN, INNER = 144, 256
BF16 = torch.bfloat16
RECIPES = {
    "block": BLOCK_FP8,
    "hybrid": Float8BlockScaling(fp8_format=Format.HYBRID),
    "current": CURRENT_FP8,
    "current, hybrid": Float8CurrentScaling(),
    "mxfp8": MXFP8BlockScaling(fp8_products=True),
}


def mlp(stored=None, act=None, inner=INNER, **options):
    options = {"bias": False, "dtype": BF16, "single_grouped_weight": True} | options
    scale_bias = options.pop("scale_bias", False)
    act = act or fz.ScaledSwiGLU()
    torch.manual_seed(1)
    with fz.quantized_model_init(enabled=stored is not None, recipe=stored):
        return fz.Sequential(
            fz.GroupedLinear(len(SIZES), HIDDEN, (1 + act.gated) * inner, **options),
            act,
            fz.GroupedLinear(len(SIZES), inner, HIDDEN, scale_bias=scale_bias, **options),
        )


def inputs(model):
    torch.manual_seed(3)
    x = torch.randn(ROWS, HIDDEN).to(BF16).requires_grad_()
    splits, scales = torch.tensor(SIZES), torch.rand(ROWS, requires_grad=True)
    of_bias = torch.rand(ROWS).to(BF16).requires_grad_()
    of_act = [scales] * model[1].num_extra_inputs
    return x, splits, *of_act, splits, *[of_bias] * model[2].scale_bias


def assert_fp8_equals_the_ops(model, recipe=BLOCK_FP8):
    assert_equals_the_ops(model, inputs(model), recipe)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("stored", [False, True], ids=["", "stored"])
@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
def test_equals_the_ops(recipe, stored, single):
    assert_fp8_equals_the_ops(mlp(recipe if stored else None, single_grouped_weight=single), recipe)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("frozen", ["x", "weight", "0.weight", "2.weight", "x and scales"])
def test_equals_the_ops_where_something_is_frozen(recipe, frozen):
    model = mlp()
    given = inputs(model)
    for name, t in (("x", given[0]), ("scales", given[2]), *model.named_parameters()):
        t.requires_grad_(name not in frozen.split(" and ") and not name.endswith("." + frozen))
    assert_equals_the_ops(model, given, recipe)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize(
    "act",
    [
        fz.SwiGLU,
        fz.ScaledSReLU,
        fz.ScaledSiTUGLU,
        lambda: fz.ScaledSwiGLU(32),
        lambda: fz.ScaledSReLU(activation_recompute_in_mlp=True),
        lambda: fz.ScaledSwiGLU(cache_quantized_input=True),
        lambda: fz.ScaledSwiGLU(32, cache_quantized_input=True),
        lambda: fz.SReLU(cache_quantized_input=True),
    ],
    ids=[
        "SwiGLU",
        "ScaledSReLU",
        "ScaledSiTUGLU",
        "interleaved",
        "recomputed",
        "cached",
        "cached, interleaved",
        "cached SReLU",
    ],
)
def test_equals_the_ops_for_other_activations(recipe, act):
    assert_fp8_equals_the_ops(mlp(act=act()), recipe)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
@pytest.mark.parametrize("scale_bias", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("frozen", ["", "0.", "2.bias", "weight", "scales of bias"])
@pytest.mark.parametrize("act", [fz.ScaledSwiGLU, fz.ScaledSReLU])
def test_equals_the_ops_with_biases(recipe, single, scale_bias, frozen, act):
    options = {"single_grouped_weight": single, "single_grouped_bias": single}
    model = with_biases(mlp(act=act(), bias=True, scale_bias=scale_bias, **options))
    given = inputs(model)
    of_bias = [("scales of bias", given[-1])] * scale_bias
    for name, t in (*of_bias, *model.named_parameters()):
        if frozen and frozen in name and (frozen != "0." or "bias" in name):
            t.requires_grad_(False)
    assert_equals_the_ops(model, given, recipe)


@pytest.mark.parametrize("inner", [16, 192, 320])
def test_equals_the_ops_where_blocks_are_short(inner):
    """No epilogue quantizes the activation then: its backward could not."""
    assert_fp8_equals_the_ops(mlp(inner=inner, act=fz.ScaledSReLU()))
    if inner % 64 == 0:
        assert_fp8_equals_the_ops(mlp(inner=inner))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_equals_the_ops_under_autocast(recipe):
    with torch.autocast("cpu", BF16):
        assert_fp8_equals_the_ops(mlp(), recipe)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("until_updated", [False, True])
def test_equals_the_ops_with_weights_that_are_reused(recipe, until_updated):
    model = mlp()
    with fz.reuse_quantized_weights(model, until_updated=until_updated):
        for _ in range(2):
            assert_fp8_equals_the_ops(model, recipe)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_without_gradients(recipe):
    model = mlp(recipe)
    assert_equals_the_ops_without_gradients(model, inputs(model), recipe)


@pytest.mark.parametrize(
    "options", [{"accumulate_into_main_grad": True}, {"delay_wgrad_compute": True}], ids=str
)
@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["", "reentrant", "checkpoint"])
def test_gradients_outside_of_autograd(options, use_reentrant):
    model = mlp(**options)
    given = inputs(model)
    got, want = [steps(model, given, how, use_reentrant, BLOCK_FP8) for how in (True, False)]
    ref.assert_equal(got[0], want[0])
    assert got[1] == want[1]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_an_activation_is_freed_when_it_is_quantized(recipe, monkeypatch):
    kept, alive, product = [], [], fp8_fast_path._product

    def quantized(source, *args, **kwargs):
        kept.append(weakref.ref(source.x))
        return launch_quantize(source, *args, **kwargs)

    def multiply(*args):
        alive.extend(kept[1:] and [kept[1]()])
        return product(*args)

    model = with_biases(mlp(bias=True))
    given = inputs(model)
    with on_sm90(recipe=recipe):
        monkeypatch.setattr(fp8_fast_path, "launch_quantize", quantized)
        monkeypatch.setattr(fp8_fast_path, "_product", multiply)
        assert is_direct(model(*given))
    assert alive == [None]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("frozen", [0, 2])
def test_nothing_empty_is_saved(recipe, frozen):
    model = mlp()
    model[frozen].weight.requires_grad_(False)
    sizes = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: (sizes.append(t.numel()), t)[1], lambda t: t
    )
    with hooks:
        assert is_direct(call(model, inputs(model), recipe=recipe))
    assert sizes
    assert min(sizes) > 0


def test_retain_graph():
    model = mlp()
    assert_graph_may_be_kept(model, inputs(model), BLOCK_FP8)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_saved_tensors_may_come_back_laid_out_otherwise(recipe):
    model = mlp(recipe)
    given = inputs(model)

    def elsewhere(t):
        padded = t.new_empty(*t.shape[:-1], t.shape[-1] + 3) if t.dim() else t
        padded[..., 1:-2] = t
        return padded[..., 1:-2]

    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: elsewhere(t.detach()) if t.numel() else t, lambda t: t
    ):
        y = call(model, given, recipe=recipe)
    assert is_direct(y)
    ref.assert_equal(gradients(model, given, y), both(model, given, False, recipe)[1:])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_tiles_are_chosen_for_the_rows(recipe, monkeypatch):
    chosen, choose = [], tiles.choose

    def record(kind, rows, *args, **options):
        chosen.append((kind == "wgrad", rows))
        return choose(kind, rows, *args, **options)

    monkeypatch.setattr(tiles, "choose", record)
    model = mlp()
    both(model, inputs(model), True, recipe)
    groups, padded = len(SIZES), padded_size(ROWS, len(SIZES), 128)
    assert set(chosen) == {
        (False, tiles.rows_bucket(ROWS, groups)), (True, tiles.rows_bucket(padded, groups))
    }  # fmt: skip


def test_a_stored_weight_may_begin_anywhere():
    model = mlp(BLOCK_FP8)
    with torch.no_grad():
        for op in model[::2]:
            weight = op.weight
            data = weight.pieces()
            name, piece = next(iter(data.items()))
            moved = torch.cat(
                [piece.new_zeros(1, dtype=torch.uint8), piece.view(torch.uint8).flatten()]
            )
            piece.set_(moved.untyped_storage(), 1, piece.shape, piece.stride())
    assert op.weight.pieces()[name].data_ptr() % 16
    assert_fp8_equals_the_ops(model)


@pytest.mark.parametrize(
    ("model", "change"),
    [
        (mlp, lambda x: x[None]),
        (mlp, lambda x: torch.stack([x, x], -1)[..., 0]),
        (mlp, lambda x: x[:0]),
        (lambda: transposed(mlp()), lambda x: x),
    ],
    ids=["3-D", "strided", "no rows", "transposed"],
)
def test_calls_that_it_does_not_support_run_the_op_path(model, change):
    model = model()
    x, _, scales, _ = inputs(model)
    x = change(x)
    splits = torch.tensor(SIZES) * (x.numel() > 0)
    given = x, splits, scales[: x.shape[-2]].expand(x.shape[:-1]), splits
    got = call(model, given, recipe=BLOCK_FP8)
    assert not is_direct(got)
    ref.assert_equal([got], [call(model, given, False, BLOCK_FP8)])


def transposed(model):
    for op in model[::2]:
        op.weight = torch.nn.Parameter(op.weight.detach().mT.contiguous().mT)
    return model


class Wrapped(torch.nn.Parameter):
    """A subclass, whose memory may not hold its values."""


def wrapped(model):
    model[2].weight = Wrapped(model[2].weight.detach())
    return model


def test_modes_and_wrapped_weights_run_the_op_path():
    model, out = mlp(), torch.empty(ROWS, HIDDEN, dtype=BF16)
    given = inputs(model)
    want = call(model, given, recipe=BLOCK_FP8)
    assert is_direct(want)
    with on_sm90(recipe=BLOCK_FP8):
        with fz.checking():
            checked = model(*given)
        with fz.SavedRowsPool(1 << 20, "cpu"):
            pooled = model(*given)
        model(*given, op_kwargs={2: {"output": out}})
        of_wrapped = wrapped(mlp())(*given)
    for got in (checked, pooled, of_wrapped):
        assert not is_direct(got)
        assert torch.equal(got, want)
    assert torch.equal(out, want)


def test_a_recipe_by_op_that_gives_both_linears_one():
    model = mlp()
    given = inputs(model)
    one, other = ByOp({fz.GroupedLinear: BLOCK_FP8}), ByOp({model[0]: BLOCK_FP8})
    assert is_direct(call(model, given, recipe=one))
    with on_sm90(recipe=other):
        assert not is_direct(model(*given))
        assert "grouped_mlp_sm90_fp8" not in model.plan.fired
