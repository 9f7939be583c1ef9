"""Adapters over frozen stored weights: weights that are computed from stored ones."""

import copy

import pytest
import reference as ref
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import fusible as fz
from fusible import recipes
from fusible.testing import assume_target

FORMATS = {
    "nvfp4": recipes.NVFP4BlockScaling(disable_2d_quantization=True),
    "nvfp4 16x16": recipes.NVFP4BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "fp8": recipes.Float8BlockScaling(),
}
GROUPS, RANK, IN, INNER = 3, 4, 128, 64
SIZES = torch.tensor([10, 0, 19])  # of 30 rows


class LoRA(nn.Module):
    """``weight + b @ a / 2``, as peft's ``target_parameters`` compute it."""

    def __init__(self, weight):
        super().__init__()
        *groups, out_features, in_features = weight.shape
        self.a = nn.Parameter(torch.randn(*groups, RANK, in_features).mul(0.2).to(weight.dtype))
        self.b = nn.Parameter(torch.randn(*groups, out_features, RANK).mul(0.2).to(weight.dtype))

    def forward(self, weight):
        return weight + 0.5 * self.b @ self.a


def weights_of(module):
    return [(op, name) for op in module for name, p in op.named_parameters() if "weight" in name]


def stored_experts(recipe, single, dtype=torch.float32):
    torch.manual_seed(0)
    one = {"single_grouped_weight": single, "single_grouped_bias": single, "dtype": dtype}
    experts = fz.Sequential(
        fz.GroupedLinear(GROUPS, IN, 2 * INNER, **one),
        fz.ScaledSwiGLU(glu_interleave_size=32),
        fz.GroupedLinear(GROUPS, INNER, IN, bias=False, **one),
    )
    return fz.quantize_(experts.requires_grad_(False), recipe, usage="inference")


def decoded(experts):
    """The same with ordinary weights of the stored values."""
    plain = copy.deepcopy(experts)
    for op, name in weights_of(plain):
        setattr(op, name, nn.Parameter(getattr(op, name).dequantize(), requires_grad=False))
    return plain


def with_adapters(experts):
    torch.manual_seed(1)
    for op, name in weights_of(experts):
        parametrize.register_parametrization(op, name, LoRA(getattr(op, name)))
    return experts


def step(experts, x, **options):
    """The output, and the gradients of x and of the adapters."""
    x = x.clone().requires_grad_()
    scales = torch.linspace(0.5, 1.5, len(x))
    with fz.autocast(bool(options), **options):
        y = experts(x, SIZES, scales, SIZES)
    y.float().square().sum().backward()
    return y.detach(), x.grad, {n: p.grad for n, p in experts.named_parameters() if p.requires_grad}


def reference(experts, x):
    """What ``step`` gives, in FP64 and by the stored values."""
    leaves, weights = {}, []
    for op in experts:
        matrices = []
        for name in getattr(op, "parametrizations", ()):
            part, lora = op.parametrizations[name], f"{name}.0"
            a, b = [t.detach().double().requires_grad_() for t in (part[0].a, part[0].b)]
            leaves |= {(op, f"{lora}.a"): a, (op, f"{lora}.b"): b}
            weight = part.original.dequantize().double() + 0.5 * b @ a
            matrices.append(weight if weight.dim() == 3 else weight[None])
        weights += [torch.cat(matrices)] if matrices else []
    bias = torch.cat(list(experts[0].biases())).view(GROUPS, -1).double()
    x = x.double().requires_grad_()
    used, outputs = int(SIZES.sum()), []
    scales = torch.linspace(0.5, 1.5, len(x)).double()
    of_groups = zip(*[t[:used].split(SIZES.tolist()) for t in (x, scales)], strict=True)
    for e, (rows, scale) in enumerate(of_groups):
        gate, linear = (rows @ weights[0][e].mT + bias[e]).unflatten(-1, (-1, 2, 32)).unbind(-2)
        hidden = (F.silu(gate) * linear).flatten(1) * scale[:, None]
        outputs.append(hidden @ weights[1][e].mT)
    y = F.pad(torch.cat(outputs), (0, 0, 0, len(x) - used))
    y.square().sum().backward()
    names = {op: name for name, op in experts.named_modules()}
    grads = {f"{names[op]}.parametrizations.{n}": leaf.grad for (op, n), leaf in leaves.items()}
    return y.detach(), x.grad, grads


def bits(experts):
    """Copies of what is stored of the weights."""
    return [
        piece.view(torch.uint8).clone()
        for p in experts.parameters()
        if isinstance(p, fz.QuantizedTensor)
        for piece in p.pieces().values()
    ]


BOTH = pytest.mark.parametrize("single", [True, False], ids=["one weight", "one per group"])
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)


@BOTH
@EVERY_FORMAT
def test_gradients_are_those_of_the_decoded_weight_in_fp64(name, single):
    experts = with_adapters(stored_experts(FORMATS[name], single))
    before, x = bits(experts), torch.randn(30, IN)
    y, dx, grads = step(experts, x)
    expected, expected_dx, expected_grads = reference(experts, x)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dx.double(), expected_dx, rtol=1e-4, atol=1e-3)
    assert grads.keys() == expected_grads.keys()
    assert len(grads) == (4 if single else 4 * GROUPS)
    for leaf, grad in grads.items():
        torch.testing.assert_close(grad.double(), expected_grads[leaf], rtol=1e-4, atol=1e-3)
    torch.optim.AdamW([p for p in experts.parameters() if p.requires_grad]).step()
    held = [p for p in experts.parameters() if isinstance(p, fz.QuantizedTensor)]
    assert len(held) == (2 if single else 2 * GROUPS)
    assert all(p.grad is None and not p.requires_grad for p in held)
    ref.assert_equal(before, bits(experts))


@pytest.mark.parametrize("target", ["cpu", "sm90", "sm100"])
@pytest.mark.parametrize("under_recipe", [False, True])
@EVERY_FORMAT
def test_plans_of_every_target_compute_what_ordinary_weights_give(name, under_recipe, target):
    recipe = FORMATS[name]
    stored = stored_experts(recipe, single=True, dtype=torch.bfloat16)
    plain, stored = with_adapters(decoded(stored)), with_adapters(stored)
    x = torch.randn(30, IN, dtype=torch.bfloat16)
    options = {"recipe": recipe} if under_recipe else {}
    with assume_target(target):
        torch.manual_seed(2)
        got = step(stored, x, **options)
        torch.manual_seed(2)
        expected = step(plain, x, **options)
        assert stored.plan.fired == plain.plan.fired
    ref.assert_equal((*got[:2], *got[2].values()), (*expected[:2], *expected[2].values()))


def test_explain_says_that_stored_weights_are_decoded():
    stored = stored_experts(FORMATS["mxfp8"], single=True)
    given = torch.randn(30, IN), SIZES, torch.rand(30), SIZES
    note = "weights are computed from stored ones, which every forward dequantizes"
    assert note not in str(fz.explain(stored, *given))
    assert str(fz.explain(with_adapters(stored), *given)).count(note) == 2
    assert note not in str(
        fz.explain(with_adapters(decoded(stored_experts(FORMATS["mxfp8"], True))), *given)
    )


def test_compiled(fresh_compiler):
    experts, x = with_adapters(stored_experts(FORMATS["mxfp8"], single=True)), torch.randn(30, IN)
    y, dx, grads = step(experts, x)
    expected = [y, dx, *[grad.clone() for grad in grads.values()]]
    experts.zero_grad()
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    x, scales = x.requires_grad_(), torch.linspace(0.5, 1.5, len(x))
    y = compiled(x, SIZES, scales, SIZES)
    y.square().sum().backward()
    got = [y, x.grad, *[p.grad for p in experts.parameters() if p.requires_grad]]
    torch.testing.assert_close(got, expected)


def test_a_stored_weight_can_be_parametrized_while_operands_are_kept():
    """PyTorch swaps such a parameter with itself, and refuses where it is weakly referred to."""
    recipe = FORMATS["mxfp8"]
    experts, x = stored_experts(recipe, single=True), torch.randn(30, IN)
    with fz.autocast(recipe=recipe), fz.reuse_quantized_weights(experts):
        with torch.no_grad():
            experts(x, SIZES, torch.ones(30), SIZES)
        with_adapters(experts)
    recipe = FORMATS["fp8"]
    experts = stored_experts(recipe, single=True, dtype=torch.bfloat16)
    with assume_target("sm90"):  # whose FP8 products keep transposed copies
        step(experts, x.bfloat16(), recipe=recipe)
        step(with_adapters(experts), x.bfloat16(), recipe=recipe)
