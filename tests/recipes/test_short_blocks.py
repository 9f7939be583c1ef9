"""Features that end in a short block, such as GPT-OSS's 2880 in blocks of 128."""

import pytest
import torch
from number_formats import each_recipe
from torch.nn.functional import pad

import fusible as fz
from fusible.testing import assume_target

BLOCK = fz.recipes.Float8BlockScaling()


@each_recipe
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(("features", "out"), [(160, 200), (2, 6), (2880, 32)])
def test_a_linear_is_the_padded_one(recipe, stored, features, out):
    torch.manual_seed(1)
    up, wide = -(-features // 128) * 128, -(-out // 128) * 128
    weight, x, grad = torch.randn(out, features), torch.randn(40, features), torch.randn(40, out)
    results = []
    for padded in (False, True):
        sizes = (up, wide) if padded else (features, out)
        with fz.quantized_model_init(enabled=stored, recipe=recipe):
            op = fz.BasicLinear(*sizes)
        more = (up - features, wide - out) if padded else (0, 0)
        with torch.no_grad():
            op.weight.copy_(pad(weight, (0, more[0], 0, more[1])))
        t = pad(x, (0, more[0])).requires_grad_()
        with fz.autocast(recipe=recipe):
            y = op(t)
        y.backward(pad(grad, (0, more[1])))
        results.append((y[:, :out], t.grad[:, :features], op.weight.grad[:out, :features]))
    for got, want in zip(*results, strict=True):
        # The same products, summed in another order.
        bound = 1e-6 * up * want.abs().max().item()
        torch.testing.assert_close(got, want, rtol=0, atol=bound)


def moe_mlp(hidden, inner):
    torch.manual_seed(3)
    return fz.Sequential(
        fz.GroupedLinear(2, hidden, 2 * inner, dtype=torch.bfloat16),
        fz.ScaledClampedQGeGLU(),
        fz.GroupedLinear(2, inner, hidden, dtype=torch.bfloat16),
    )


def test_gpt_oss_is_fused_as_under_other_recipes():
    mlp = moe_mlp(2880, 2880)
    splits, scales = torch.tensor([2, 1]), torch.rand(3)
    x = torch.randn(3, 2880, dtype=torch.bfloat16, requires_grad=True)
    for recipe in (fz.recipes.MXFP8BlockScaling(), BLOCK):
        with fz.autocast(recipe=recipe):
            explained = fz.explain(mlp, x, splits, scales, splits, target="sm90")
        assert "grouped_mlp_sm90" in str(explained)
        assert not explained.refused


@pytest.mark.parametrize("machine", [None, "sm90"])
def test_gpt_oss_trains_under_blocks_of_128(machine):
    """Near the gradients of the values without a recipe, and downhill."""
    hidden, inner = 2880 // 9, 160  # 2.5 blocks
    mlp = moe_mlp(hidden, inner)
    splits, scales = torch.tensor([20, 12]), torch.rand(32)
    x = torch.randn(32, hidden, dtype=torch.bfloat16)
    target = torch.randn(32, hidden, dtype=torch.bfloat16)

    def gradients(recipe):
        mlp.zero_grad()
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            y = mlp(x, splits, scales, splits)
        loss = (y - target).float().square().mean()
        loss.backward()
        return loss.item(), [p.grad.float().clone() for p in mlp.parameters()]

    _, plain = gradients(None)
    if machine is None:
        _, got = gradients(BLOCK)
    else:
        with assume_target(machine):
            _, got = gradients(BLOCK)
    for quantized, exact in zip(got, plain, strict=True):
        # Each operand is off by at most 2^-4 of itself, and there are up to four in a row.
        assert (quantized - exact).norm() < 0.25 * exact.norm()
    if machine is None:
        optimizer = torch.optim.SGD(mlp.parameters(), 1.0)
        losses = []
        for _ in range(5):
            losses.append(gradients(BLOCK)[0])
            optimizer.step()
        assert losses[-1] < losses[0]
