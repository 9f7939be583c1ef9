"""Products under a recipe by Hopper's kernels: the operands that the recipe dequantizes."""

import pytest
import torch
from number_formats import each_recipe

import fusible as fz
from fusible.testing import assume_target

SIZES = [37, 0, 20, 5]


def step(module, recipe, x, *extra):
    x = x.detach().requires_grad_()
    with fz.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, *extra)
        plan = module.plan
    y.float().square().sum().backward()
    grads = [x.grad, *[p.grad for p in module.parameters()]]
    module.zero_grad()
    return [y.detach(), *grads], plan


def error(got, want):
    """Relative to the norm, of the worst of output, input gradient and the weights' gradients."""
    pairs = zip(got, want, strict=True)
    norms = [((a - b).float().norm(), b.float().norm()) for a, b in pairs]
    whole = torch.stack([torch.stack(pair) for pair in norms[2:]]).norm(dim=0)
    return max(float(a / b) for a, b in (*norms[:2], tuple(whole)))


@pytest.mark.parametrize("single", [True, False])
@each_recipe
def test_the_kernels_of_one_product_run_under_a_recipe(recipe, single):
    options = {"single_grouped_weight": single, "dtype": torch.bfloat16}
    module = fz.Sequential(
        fz.GroupedLinear(4, 128, 128, **options),
        fz.GroupedLinear(4, 128, 256, **options),
        fz.ScaledSwiGLU(None if single else 1),
        fz.GroupedLinear(4, 128, 128, **options),
    )
    x, splits = torch.randn(70, 128).bfloat16(), torch.tensor(SIZES)
    inputs = x, splits, splits, torch.rand(70), splits
    exact, _ = step(module, None, *inputs)
    want, _ = step(module, recipe, *inputs)
    with assume_target("sm90"):
        got, plan = step(module, recipe, *inputs)
    assert (plan.fired, plan.kernels) == (("grouped_mlp_sm90",), ("sm90",))
    # The activation is taken of FP32 here, of BF16 there, and quantizing widens the difference.
    assert error(got, want) < error(want, exact)
    assert error(got, exact) < 1.05 * error(want, exact)
    assert [t.dtype for t in got] == [t.dtype for t in want]
