"""Features that end in a short block, such as GPT-OSS's 2880 in blocks of 128."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from number_formats import each_recipe
from torch.nn.functional import pad

import fusible as fz
from fusible.recipes import Uses, operand_values, quantize_operand
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
        assert not explained.errors


def exact(t, role, columnwise=False):
    """The operand of a product, dequantized, in FP64."""
    use = Uses(row=not columnwise, column=columnwise)
    operand = quantize_operand(t.detach(), BLOCK, role, use)
    return operand_values(operand, torch.float64, columnwise=columnwise)


def products_in_fp64(mlp, x, splits, scales, dy):
    """Output and gradients of the parameters; what lies between two products is BF16."""
    results = []
    groups = [t.split(splits.tolist()) for t in (x, scales, dy)]
    for group, (rows, scale, d) in enumerate(zip(*groups, strict=True)):
        up, down = mlp[0].weights()[group], mlp[2].weights()[group]
        y = exact(rows, "input") @ exact(up, "weight").t()
        y = (y + mlp[0].biases()[group].double()).bfloat16().double().requires_grad_()
        gate, linear = y.chunk(2, -1)
        gate, linear = gate.clamp(max=7.0), linear.clamp(-7.0, 7.0)
        act = gate * torch.sigmoid(1.702 * gate) * (linear + 1) * scale.double()[:, None]
        h = act.detach().bfloat16()
        out = exact(h, "input") @ exact(down, "weight").t()
        dh = exact(d, "grad") @ exact(down, "weight", columnwise=True)
        (dy_up,) = torch.autograd.grad(act, y, dh.bfloat16().double())
        dy_up = dy_up.bfloat16()
        results.append((
            out + mlp[2].biases()[group].double(),
            exact(dy_up, "grad", columnwise=True).t() @ exact(rows, "input", columnwise=True),
            dy_up.double().sum(0),
            exact(d, "grad", columnwise=True).t() @ exact(h, "input", columnwise=True),
            d.double().sum(0),
        ))  # fmt: skip
    return zip(*results, strict=True)


@pytest.mark.parametrize(
    ("fused", "hidden", "inner"),
    [
        ((), 320, 160),
        (("grouped_mlp_sm90_fp8",), 576, 576),  # half a block at the end, as 2880
    ],
)
def test_short_blocks_train_under_blocks_of_128(fused, hidden, inner):
    """Three steps of SGD, each with the FP64 products of the dequantized operands, and downhill."""
    mlp = moe_mlp(hidden, inner)
    splits, scales = torch.tensor([5, 3]), torch.rand(8)
    x, target = torch.randn(2, 8, hidden, dtype=torch.bfloat16)
    with torch.no_grad():
        for bias in (*mlp[0].biases(), *mlp[2].biases()):
            bias.normal_(std=0.1)
    recipe = replace(BLOCK, fp8_products="grouped_mlp_sm90_fp8" in fused)
    optimizer = torch.optim.SGD(mlp.parameters(), 1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        scope = assume_target("sm90") if fused else nullcontext()
        with scope, fz.autocast(recipe=recipe):
            y = mlp(x, splits, scales, splits)
            assert mlp.plan.fired + mlp.plan.kernels == fused
        losses.append((y - target).float().square().mean().item())
        dy = (y - target).detach() / 8
        y.backward(dy)
        grads = [
            [p.grad for p in of_op]
            for op in (mlp[0], mlp[2])
            for of_op in (op.weights(), op.biases())
        ]
        wanted = products_in_fp64(mlp, x, splits, scales, dy)
        for got, want in zip([y.split(splits.tolist()), *grads], wanted, strict=True):
            for ours, theirs in zip(got, want, strict=True):
                # BF16 rounds the result (at most 2^-9); the rest is what its FP32 sums change in
                # the BF16 values that the next product quantizes.
                assert (ours - theirs).norm() < 2**-8 * theirs.norm()
        optimizer.step()
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("role", ["input", "weight", "grad"])
def test_2880_features_have_the_bits_of_zero_padding_to_2944(role):
    torch.manual_seed(4)
    x = torch.randn(8, 2880, dtype=torch.bfloat16)
    quantizer = fz.recipes.Quantizer(BLOCK.format(role))
    for t, padded in ((x, pad(x, (0, 64))), (x.t(), pad(x.t(), (0, 0, 0, 64)))):
        got, want = quantizer(t.contiguous()), quantizer(padded.contiguous())
        for name, piece in got.pieces().items():
            own = tuple([slice(size) for size in piece.shape])
            assert torch.equal(piece, want.pieces()[name][own]), name
