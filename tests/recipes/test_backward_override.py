"""Recipes whose backward multiplies operands that are not quantized, or those of the forward."""

import pytest
import reference as ref
import torch

import fusible as fz
from fusible import recipes
from fusible.recipes import QuantizedTensor
from fusible.testing import assume_target

KINDS = [
    recipes.MXFP8BlockScaling,
    recipes.Float8BlockScaling,
    recipes.Float8CurrentScaling,
    recipes.NVFP4BlockScaling,
]
BF16 = torch.bfloat16


def quantized(t, fmt):
    rowwise = QuantizedTensor.quantize(t.detach(), fmt, rowwise=True, columnwise=False)
    return rowwise.dequantize().float()


def linear(kind):
    if kind == "dense":
        return fz.Linear(128, 128, bias=False, dtype=BF16)
    return fz.GroupedLinear(
        2, 128, 128, bias=False, dtype=BF16, single_grouped_weight=kind == "grouped, one weight"
    )


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["dense", "grouped", "grouped, one weight"])
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("make", KINDS)
def test_the_backward_reads_the_operands_that_the_recipe_names(make, override, kind, compiled):
    recipe = make(backward_override=override)
    op = linear(kind)
    x = torch.randn(128, 128, dtype=BF16, requires_grad=True)
    dy = torch.randn(128, 128, dtype=BF16)
    sizes = [128] if kind == "dense" else [96, 32]
    call = torch.compile(op, backend="aot_eager", fullgraph=True) if compiled else op
    with fz.autocast(recipe=recipe):
        y = call(x, *[torch.tensor(sizes)][: kind != "dense"])
    y.backward(dy)
    weights = [w for p in op.parameters() for w in (p if p.dim() == 3 else [p])]
    grads = [g for p in op.parameters() for g in (p.grad if p.dim() == 3 else [p.grad])]
    at = 0
    for rows, w, dw in zip(sizes, weights, grads, strict=True):
        of = slice(at, at + rows)
        at += rows
        xq, wq = quantized(x[of], recipe.format("input")), quantized(w, recipe.format("weight"))
        torch.testing.assert_close(y[of].float(), xq @ wq.T, rtol=2**-7, atol=2**-7)
        if override == "high_precision":
            xb, wb = x[of].float(), w.float()
        else:
            xb, wb = xq.to(BF16).float(), wq.to(BF16).float()
        g = dy[of].float()
        torch.testing.assert_close(x.grad[of].float(), g @ wb, rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(dw.float(), g.T @ xb, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("target", ["cpu", "sm90", "sm100"])
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_grouped_mlp_falls_back_and_says_so(override, target):
    options = {"bias": False, "dtype": BF16, "single_grouped_weight": True}
    mlp = fz.Sequential(
        fz.GroupedLinear(2, 64, 128, **options),
        fz.ScaledSwiGLU(glu_interleave_size=32),
        fz.GroupedLinear(2, 64, 64, **options),
    )
    x = torch.randn(64, 64, dtype=BF16, requires_grad=True)
    splits, scales = torch.tensor([32, 32]), torch.rand(64)
    recipe = recipes.MXFP8BlockScaling(backward_override=override)

    def step(run):
        with assume_target(target), fz.autocast(recipe=recipe):
            y = run()
            return y, *torch.autograd.grad(y.float().square().sum(), [x, *mlp.parameters()])

    one_by_one = step(lambda: mlp[2](mlp[1](mlp[0](x, splits), scales), splits))
    ref.assert_equal(step(lambda: mlp(x, splits, scales, splits)), one_by_one)
    if target == "sm90":
        assert f"backward_override must be None, got {override}" in str(mlp.plan.refusals)


def test_options_that_have_one_value():
    assert recipes.MXFP8BlockScaling(margin=0, fp8_dpa=False) == recipes.MXFP8BlockScaling()
    blocks = {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1}
    assert recipes.Float8BlockScaling(**blocks) == recipes.Float8BlockScaling()
    with pytest.raises(ValueError, match="Float8BlockScaling must have w_block_scaling_dim=2"):
        recipes.Float8BlockScaling(w_block_scaling_dim=1)
    with pytest.raises(ValueError, match="NVFP4BlockScaling must have nvfp4_4over6=none, got all"):
        recipes.NVFP4BlockScaling(nvfp4_4over6="all")
    with pytest.raises(ValueError, match=r"backward_override of .* must be None"):
        recipes.MXFP8BlockScaling(backward_override="bf16")
    hybrid = recipes.Float8BlockScaling(fp8_format=recipes.Format.HYBRID)
    assert hybrid.format("grad").element.dtype == torch.float8_e5m2
    assert hybrid.format("input").element.dtype == torch.float8_e4m3fn


def test_recipes_say_which_they_are():
    for make in KINDS:
        asked = ("mxfp8", "float8_block_scaling", "float8_current_scaling", "nvfp4", "delayed")
        answers = [getattr(make(), name)() for name in asked]
        assert answers == [make is kind for kind in KINDS] + [False]
