"""Checkpoints loaded onto a GPU, and recipes by op and by pass there."""

import checkpoint_writers as write
import numpy as np
import pytest
import torch

import fusible as fz
from fusible import recipes
from fusible.integrations.checkpoint_layouts import MXFP4
from fusible.integrations.checkpoints import load_checkpoint
from fusible.recipes.recipe import Recipe

pytestmark = pytest.mark.gpu
E, BF16 = 4, torch.bfloat16
MXFP8 = recipes.MXFP8BlockScaling()
NVFP4 = recipes.NVFP4BlockScaling(
    disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
)


class MXFP4Weights(Recipe):
    name = "mxfp4_weights"

    def format(self, role):
        return MXFP4 if role == "weight" else None


CASES = {
    "nvfp4": (write.nvfp4_modelopt, NVFP4),
    "deepseek": (write.deepseek, recipes.Float8BlockScaling(use_f32_scales=True)),
    "mxfp4": (write.mxfp4_compressed, MXFP4Weights()),
    "mxfp4 as mxfp8": (write.mxfp4_compressed, MXFP8),
}


@pytest.mark.parametrize(("writer", "recipe"), CASES.values(), ids=CASES)
def test_stored_weights_have_the_values_of_the_checkpoint(writer, recipe):
    state, values = write.experts(writer, np.random.default_rng(0), E, 256, 512, "up_proj")
    with fz.quantized_model_init(recipe=recipe, usage="inference"):
        op = fz.GroupedLinear(
            E, 512, 256, bias=False, dtype=BF16, device="cuda", single_grouped_weight=True
        )
    load_checkpoint(op, state, {"": "experts.*.up_proj"})
    expected = torch.from_numpy(values).to(BF16)
    assert torch.equal(op.weight.dequantize().cpu(), expected)
    x = torch.randn(96, 512, device="cuda", dtype=BF16)
    splits = torch.tensor([40, 0, 32, 24], device="cuda")
    with torch.no_grad():
        y = op(x, splits)
    ends = splits.cumsum(0).tolist()
    for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        want = x[begin:end].cpu().double() @ expected[e].double().T
        got = y[begin:end].cpu().double()
        assert ((got - want).norm() <= 2**-7 * want.norm()).item()


def step(module, recipe, device):
    module = module.to(device)
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(device, BF16)
    x.requires_grad_()
    splits = torch.tensor([40, 0, 32, 24], device=device)
    scales = torch.linspace(0.1, 1, 96, device=device)
    module.zero_grad()
    with fz.autocast(recipe=recipe(module)):
        y = module(x, splits, scales, splits)
    y.float().square().sum().backward()
    return [t.detach().float().cpu() for t in (y, x.grad, *[p.grad for p in module.parameters()])]


RECIPES = {
    "by pass": lambda _: recipes.ByPass(NVFP4, MXFP8),
    "by pass, backward in BF16": lambda _: recipes.ByPass(MXFP8, None),
    "by op": lambda m: {m[0]: MXFP8, m[2]: NVFP4},
    "by op, one in BF16": lambda m: {m[0]: None, m[2]: MXFP8},
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_mixed_recipes_have_the_values_of_the_cpu(recipe):
    torch.manual_seed(0)
    options = {"bias": False, "dtype": BF16, "single_grouped_weight": True}
    module = fz.Sequential(
        fz.GroupedLinear(E, 64, 256, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(E, 128, 64, **options),
    )
    expected = step(module, recipe, "cpu")
    for got, want in zip(step(module, recipe, "cuda"), expected, strict=True):
        # Where the devices round to BF16 differently, by 2**-8, a value may fall on the other side
        # of a boundary of four bits, a third of it apart: a share of 3 * 2**-8, hence a relative
        # error of (3 * 2**-8 / 9) ** 0.5 of an operand. Three operands at most are behind a result.
        assert ((got - want).norm() <= 2**-4 * want.norm()).item()
