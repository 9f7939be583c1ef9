"""Dense linears in FP8 by Hopper's kernels, against the definitions on the CPU."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import reference as ref
import torch
from checks import graph_of, hopper, never_waiting
from number_formats import CURRENT_FP8, each_fp8_recipe

import fusible as fz
from fusible.testing import assume_target

pytestmark = hopper

BF16 = torch.bfloat16
# A value that BF16 rounds otherwise turns the rounding of some quantized ones, of two operands.
NEAR = 2 * (2**-3 * 2**-7) ** 0.5


def step(module, recipe, x, dy):
    """Output and all gradients where the module is."""
    device = next(module.parameters()).device
    x, dy = x.to(device).detach().requires_grad_(), dy.to(device)
    with assume_target("sm90"), fz.autocast(recipe=recipe):
        y = module(x)
        assert "sm90_fp8" in module.plan.kernels
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


def linear(features, **options):
    module = fz.Linear(*features, dtype=BF16, **options)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randint(-2, 3, p.shape) / 8)
    return module


@pytest.mark.parametrize("rows", [1, 16, 127, 128, 129, 1000])
@pytest.mark.parametrize(
    "features", [(16, 16), (144, 320), (2880, 512), (512, 1024), (2048, 512)], ids=str
)
@each_fp8_recipe
def test_exact_sums_are_exact(features, rows, recipe):
    """Of small integers, all three products have the bits of the definitions."""
    if recipe is CURRENT_FP8:
        recipe = replace(recipe, use_power_2_scales=True)
    module = linear(features)
    x, dy = (torch.randint(-2, 3, (rows, n)).to(BF16) for n in features)
    want = step(module, recipe, x, dy)
    for mine, theirs in zip(step(copy.deepcopy(module).cuda(), recipe, x, dy), want, strict=True):
        assert torch.equal(mine.cpu(), theirs)


@each_fp8_recipe
def test_a_dense_mlp_equals_the_definitions(recipe):
    module = fz.Sequential(
        fz.RMSNorm(256, dtype=BF16), fz.Linear(256, 512, dtype=BF16), fz.GELU(),
        fz.Linear(512, 256, dtype=BF16),
    )  # fmt: skip
    x, dy = torch.randn(3, 90, 256).to(BF16), torch.randn(3, 90, 256).to(BF16)
    want = step(module, recipe, x, dy)
    module = copy.deepcopy(module).cuda()
    first = step(module, recipe, x, dy)
    for mine, theirs in zip(first, want, strict=True):
        ref.assert_near(mine.cpu().float(), theirs.float(), NEAR)
    x, dy = x.cuda(), dy.cuda()
    with never_waiting():
        again = step(module, recipe, x, dy)
    ref.assert_same_bits(again, first)
    graph, captured = graph_of(lambda: step(module, recipe, x, dy))
    x.normal_()
    graph.replay()
    ref.assert_same_bits(captured, step(module, recipe, x, dy))
