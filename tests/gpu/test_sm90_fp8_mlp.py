"""Grouped linears and MLPs in FP8 by Hopper's kernels, against the definitions on the CPU.

Tensor cores keep 14 bits of a running sum, which small integers do not exceed: their sums are
exact. The ways of training are those of `test_training_cuda`, which has these kernels' paths.
"""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import pytest
import reference as ref
import torch
from checks import graph_of, hopper, launched, never_waiting
from number_formats import BLOCK_FP8, CURRENT_FP8, each_fp8_recipe
from sm90_launches import is_direct, ops_only

import fusible as fz
from fusible.recipes import Float8BlockScaling, Format, MXFP8BlockScaling, group_quantize
from fusible.testing import assume_target

pytestmark = hopper

SIZES = (127, 0, 128, 129, 1, 256, 0, 300)
TAIL = 60
ROWS = sum(SIZES) + TAIL
RECIPES = {
    "e4m3": BLOCK_FP8,
    "hybrid": Float8BlockScaling(fp8_format=Format.HYBRID),
    "fp32 scales": Float8BlockScaling(use_f32_scales=True),
    "current": CURRENT_FP8,
    "mxfp8": MXFP8BlockScaling(fp8_products=True),
}
BF16 = torch.bfloat16
# A value that BF16 rounds otherwise turns the rounding of some quantized ones, of two operands.
NEAR = 2 * (2**-3 * 2**-7) ** 0.5


def build(hidden=144, inner=320, recipe=None, act=None, **options):
    """FC1, activation, FC2, on the CPU."""
    torch.manual_seed(0)
    options = {"dtype": BF16, "single_grouped_weight": True, "bias": False, **options}
    with fz.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        mlp = fz.Sequential(
            fz.GroupedLinear(len(SIZES), hidden, 2 * inner, **options),
            act or fz.ScaledSwiGLU(),
            fz.GroupedLinear(len(SIZES), inner, hidden, **options),
        )
    with torch.no_grad():
        for p in mlp.parameters():
            p.copy_(torch.randn(p.shape) / 8)
    return mlp


def inputs(hidden=144, sizes=SIZES):
    torch.manual_seed(1)
    x, dy = (torch.randn(ROWS, hidden).to(BF16) for _ in range(2))
    return x, torch.tensor(sizes), torch.rand(ROWS), dy


def step(module, recipe, x, splits, scales, dy, machine="sm90"):
    """Output and all gradients where the module is; x may be quantized."""
    device = module[0].weights()[0].device
    x, splits, scales, dy = (t.to(device) for t in (x, splits, scales, dy))
    if not hasattr(x, "rowwise_data"):
        x.requires_grad_()
    scales.requires_grad_()
    leaves = [t for t in (x, scales, *module.parameters()) if t.requires_grad]
    with assume_target(machine), fz.autocast(recipe=recipe):
        y = module(x, splits, scales, splits)
        assert module.plan.fired == ("grouped_mlp_sm90_fp8",)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_near(got, want):
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        ref.assert_near(mine.cpu().float(), theirs.float(), NEAR)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("stored", [False, True], ids=["", "stored"])
@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
def test_kernels_equal_the_definitions(recipe, stored, single):
    mlp = build(recipe=recipe if stored else None, single_grouped_weight=single)
    want = step(mlp, recipe, *inputs())
    assert_near(step(copy.deepcopy(mlp).cuda(), recipe, *inputs()), want)


@pytest.mark.parametrize(
    ("features", "act"),
    [
        ((128, 128), fz.ScaledSwiGLU()),
        ((2880, 2880), fz.ScaledSwiGLU()),
        ((16, 64), fz.ScaledClampedQGeGLU()),
        ((16, 16), fz.ScaledSwiGLU(16)),
        ((512, 144), fz.ScaledClampedQGeGLU(8)),
    ],
    ids=str,
)
@each_fp8_recipe
def test_features_and_activations(features, act, recipe):
    mlp = build(*features, act=copy.deepcopy(act), bias=True)
    given = inputs(features[0])
    assert_near(step(copy.deepcopy(mlp).cuda(), recipe, *given), step(mlp, recipe, *given))


@pytest.mark.parametrize("sizes", [SIZES, [0] * 8, [0, 0, ROWS, *[0] * 5], [1] * 8], ids=str)
@each_fp8_recipe
def test_groups_of_any_size(sizes, recipe):
    mlp, given = build(), inputs(sizes=sizes)
    got = step(copy.deepcopy(mlp).cuda(), recipe, *given)
    assert_near(got, step(mlp, recipe, *given))
    for t in got[:2]:
        assert not t[sum(sizes) :].any()
    for grad in got[3:]:
        assert not grad[given[1].cuda() == 0].any()


@pytest.mark.parametrize("options", [{"bias": False}, {}, {"scale_bias": True}], ids=str)
@each_fp8_recipe
def test_exact_sums_are_exact(options, recipe):
    """Of small integers, all three products have the bits of the definitions.

    Current scaling makes powers of two of them, which tensor cores add exactly as well.
    """
    if not recipe.float8_block_scaling():
        recipe = replace(recipe, use_power_2_scales=True)
    options = {"dtype": BF16, "single_grouped_weight": True, **options}
    linear = fz.GroupedLinear(len(SIZES), 160, 272, **options)
    with torch.no_grad():
        for p in linear.parameters():
            p.copy_(torch.randint(-2, 3, p.shape) / 8)
    x, dy = (torch.randint(-2, 3, (ROWS, n)).to(BF16) for n in (160, 272))
    scale = [torch.randint(1, 3, (ROWS,)).float()] if linear.scale_bias else []
    results = []
    for device in ("cpu", "cuda"):
        op = copy.deepcopy(linear).to(device)
        given = [x.to(device).requires_grad_(), torch.tensor(SIZES, device=device)]
        given += [s.to(device) for s in scale]
        with assume_target("sm90"), fz.autocast(recipe=recipe):
            y = op(*given)
            assert op.plan.kernels == ("sm90_fp8",)
        leaves = [given[0], op.weight]
        results.append([t.cpu() for t in (y, *torch.autograd.grad(y, leaves, dy.to(device)))])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@each_fp8_recipe
def test_repeatable_without_a_synchronisation(recipe):
    mlp = build(bias=True).cuda()
    given = [t.cuda() for t in inputs()]
    first = step(mlp, recipe, *given)
    with never_waiting():
        again = [step(mlp, recipe, *given) for _ in range(10)]
    for other in again:
        ref.assert_same_bits(other, first)


@each_fp8_recipe
def test_cuda_graph_replay_with_other_splits(recipe):
    mlp = build().cuda()
    x, splits, scales, dy = (t.cuda() for t in inputs())
    graph, captured = graph_of(lambda: step(mlp, recipe, x, splits, scales, dy))
    for sizes in ([ROWS, *[0] * 7], [1] * 8, [0] * 8, [ROWS // 8] * 8, SIZES):
        splits.copy_(torch.tensor(sizes))
        graph.replay()
        for got, want in zip(captured, step(mlp, recipe, x, splits, scales, dy), strict=True):
            assert torch.equal(got, want), sizes


@each_fp8_recipe
def test_reused_and_stored_weights_are_quantized_once(recipe):
    mlp = build().cuda()
    given = [t.cuda() for t in inputs()]
    want = step(mlp, recipe, *given)
    each, _ = launched(lambda: step(mlp, recipe, *given))
    with fz.reuse_quantized_weights(mlp):
        ref.assert_same_bits(step(mlp, recipe, *given), want)
        reusing, got = launched(lambda: step(mlp, recipe, *given))
    ref.assert_same_bits(got, want)
    of_each = 1 if recipe.float8_block_scaling() else 3  # with the largest magnitudes, and zeros
    assert len(reusing) == len(each) - 2 * of_each
    assert_near(want, step(copy.deepcopy(mlp).cpu(), recipe, *inputs()))


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (True, True), (False, True)])
@each_fp8_recipe
def test_a_quantized_input(rowwise, columnwise, recipe):
    mlp, (x, *given) = build(), inputs()
    with fz.autocast(recipe=recipe):
        quantizer = mlp[0].get_input_quantizer()
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    results = []
    for device in ("cpu", "cuda"):
        q = group_quantize(x.to(device), quantizer, len(SIZES), given[0].to(device))
        results.append(step(copy.deepcopy(mlp).to(device), recipe, q, *given))
    assert_near(results[1], results[0])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("stored", [False, True], ids=["", "stored"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_the_node_without_contexts_has_the_bits_of_the_ops_and_no_more_memory(
    recipe, stored, bias, autocast
):
    mlp = build(256, 512, recipe if stored else None, bias=bias, single_grouped_bias=True).cuda()
    x, sizes, scales, dy = [t.cuda() for t in inputs(256)]
    given = x.requires_grad_(), sizes, scales.requires_grad_(), sizes
    leaves = [t for t in (*given, *mlp.parameters()) if t.requires_grad]

    def step(direct):
        gc.collect()  # what it frees in a step would not count
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with fz.autocast(recipe=recipe), torch.autocast("cuda", torch.bfloat16, autocast):
            y = mlp(*given)
        assert is_direct(y) == direct
        got = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        return got, torch.cuda.max_memory_allocated() - before

    for _ in range(2):  # the first one fills caches
        got, memory = step(direct=True)
        with ops_only():
            want, by_ops = step(direct=False)
    ref.assert_equal(got, want)
    assert memory <= by_ops
