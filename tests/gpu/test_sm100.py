"""The SM100 fused ops on a Blackwell GPU: the real kernels against their emulator on the host.

    python -m pytest -m sm100 tests/gpu

Nothing here has run yet: see docs/blackwell.md.
"""

from contextlib import nullcontext

import pytest
import reference as ref
import torch
from checks import graph_of, never_waiting
from number_formats import MX, NV

import fusible as fz
from fusible.kernels.sm100 import products, quantizer
from fusible.testing import assume_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm100,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10,
        reason="needs a Blackwell GPU (SM 10.x)",
    ),
]

BF16 = torch.bfloat16
MXFP8, NVFP4 = MX, NV
RECIPES = pytest.mark.parametrize("recipe", [None, MXFP8, NVFP4], ids=["bf16", "mxfp8", "nvfp4"])
HIDDEN, INNER, OUT = 256, 192, 320
SPLITS = {
    "ragged": (300, [100, 0, 57]),
    "whole tiles": (1024, [256, 0, 512]),
    "around a tile": (900, [255, 257, 256]),
    "all empty": (70, [0, 0, 0]),
    "no tokens": (0, [0, 0, 0]),
    "one group": (700, [700]),
    "large": (20_000, [9_000, 1, 10_000]),
}
# Sums in another order, then roundings to few bits: MXFP8 and NVFP4 turn some of them.
BOUND = {None: 2**-7, MXFP8: 2**-6, NVFP4: 2**-5}


def mlp(groups, act=None, single=True, store=None, **options):
    options = {"dtype": BF16, "single_grouped_weight": single, **options}
    options["single_grouped_bias"] = True
    act = act or fz.ScaledSwiGLU(glu_interleave_size=32)
    with fz.quantized_model_init(enabled=store is not None, recipe=store):
        module = fz.Sequential(
            fz.GroupedLinear(groups, HIDDEN, 2 * INNER if act.gated else INNER, **options),
            act,
            fz.GroupedLinear(groups, INNER, OUT, **options),
        )
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) / 8)
    return module


def inputs(rows, sizes):
    x = torch.randn(rows, HIDDEN)
    return x, torch.tensor(sizes), torch.rand(rows), torch.randn(rows, OUT)


def step(module, given, recipe, device):
    """Output and gradients, on the host; by the emulator where the device is the host."""
    x, splits, scales, dy = (t.to(device) for t in given)
    x, scales = x.to(BF16).requires_grad_(), scales.requires_grad_()
    module.to(device)
    with fz.autocast(enabled=recipe is not None, recipe=recipe):
        if device == "cpu":
            with assume_target("sm100"):
                y = module(x, splits, scales, splits)
                grads = torch.autograd.grad(y, [x, scales, *module.parameters()], dy.to(BF16))
        else:
            y = module(x, splits, scales, splits)
            grads = torch.autograd.grad(y, [x, scales, *module.parameters()], dy.to(BF16))
    assert module.plan.fired == ("grouped_mlp_sm100",)
    return [t.detach().cpu() for t in (y, *grads)]


def close(mine, theirs, bound):
    names = ("y", "dx", "dscales", "dw1", "db1", "dw2", "db2")
    for name, a, b in zip(names, mine, theirs, strict=False):
        assert a.isfinite().all(), name
        error = (a.float() - b.float()).norm()
        assert error <= bound * b.float().norm(), (name, (error / b.float().norm()).item())
        assert torch.equal(a == 0, b == 0) or name in ("dscales", "db1"), name


@RECIPES
@pytest.mark.parametrize("splits", SPLITS)
def test_equals_the_emulator(recipe, splits):
    rows, sizes = SPLITS[splits]
    module, given = mlp(len(sizes)), inputs(rows, sizes)
    expected = step(module, given, recipe, "cpu")
    close(step(module, given, recipe, "cuda"), expected, BOUND[recipe])


@pytest.mark.parametrize("splits", SPLITS)
def test_largest_magnitudes_are_those_of_what_the_kernels_wrote(splits, monkeypatch):
    """NVFP4's bytes are those that a pass over the data gives."""
    given_to = []

    def both(*args):
        *given, options = args
        made = quantizer.quantize_packed(*args)
        if options.amax is not None:
            given_to.append(options.amax.shape[1])
            without = quantizer.quantize_packed(*given, options._replace(amax=None))
            ref.assert_same_bits(made, without)
        return made

    monkeypatch.setattr(products, "quantize_packed", both)
    rows, sizes = SPLITS[splits]
    step(mlp(len(sizes)), inputs(rows, sizes), NVFP4, "cuda")
    assert given_to == [1, 2]


@RECIPES
def test_clamped_geglu(recipe):
    rows, sizes = SPLITS["ragged"]
    module = mlp(3, fz.ScaledClampedQGeGLU(glu_interleave_size=32))
    given = inputs(rows, sizes)
    expected = step(module, given, recipe, "cpu")
    close(step(module, given, recipe, "cuda"), expected, BOUND[recipe])


@pytest.mark.parametrize("recipe", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize("splits", SPLITS)
def test_srelu(recipe, splits):
    rows, sizes = SPLITS[splits]
    module, given = mlp(len(sizes), fz.ScaledSReLU()), inputs(rows, sizes)
    expected = step(module, given, recipe, "cpu")
    close(step(module, given, recipe, "cuda"), expected, BOUND[recipe])


@pytest.mark.parametrize("recipe", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize("options", [(1.5, 0.7, 0.25), (30.0, 1.0, 0.0)])
def test_other_clamp_constants(recipe, options):
    limit, alpha, offset = options
    constants = {"limit": limit, "alpha": alpha, "glu_linear_offset": offset}
    rows, sizes = SPLITS["ragged"]
    module = mlp(3, fz.ScaledClampedQGeGLU(glu_interleave_size=32, **constants))
    given = inputs(rows, sizes)
    expected = step(module, given, recipe, "cpu")
    close(step(module, given, recipe, "cuda"), expected, BOUND[recipe])


@RECIPES
def test_scaled_bias(recipe):
    rows, sizes = SPLITS["ragged"]
    x, splits, scales, dy = inputs(rows, sizes)
    options = {"dtype": BF16, "single_grouped_weight": True, "single_grouped_bias": True}
    linear = fz.GroupedLinear(3, HIDDEN, OUT, scale_bias=True, **options)
    torch.nn.init.normal_(linear.bias)
    results = []
    for device in ("cpu", "cuda"):
        linear.to(device)
        leaves = [x.to(device, BF16).requires_grad_(), scales.to(device).requires_grad_()]
        target = assume_target("sm100") if device == "cpu" else nullcontext()
        with target, fz.autocast(enabled=recipe is not None, recipe=recipe):
            y = linear(leaves[0], splits.to(device), leaves[1])
            leaves.extend(linear.parameters())
            grads = torch.autograd.grad(y, leaves, dy.to(device, BF16))
        assert linear.plan.kernels == ("sm100",)
        results.append([t.detach().cpu() for t in (y, *grads)])
    for mine, theirs in zip(results[1], results[0], strict=True):
        error = (mine.float() - theirs.float()).norm()
        assert error <= BOUND[recipe] * theirs.float().norm()


@pytest.mark.parametrize("recipe", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
def test_sums_in_order_are_the_same_bits_each_time(recipe):
    rows, sizes = SPLITS["large"]
    module, given = mlp(3, bias=False), inputs(rows, sizes)
    expected = step(module, given, recipe, "cpu")
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (step(module, given, recipe, "cuda") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    close(first, expected, BOUND[recipe])
    ref.assert_equal(first, again)


@RECIPES
def test_separate_weights_give_the_bits_of_a_single_one(recipe):
    rows, sizes = SPLITS["ragged"]
    whole, given = mlp(3, bias=False), inputs(rows, sizes)
    apart = mlp(3, bias=False, single=False, store=recipe)
    with torch.no_grad():
        for i in (0, 2):
            for group, w in enumerate(whole[i].weight):
                if recipe is None:
                    setattr(apart[i], f"weight{group}", torch.nn.Parameter(w.clone()))
                else:
                    getattr(apart[i], f"weight{group}").copy_(w)
    mine, theirs = step(apart, given, recipe, "cuda"), step(whole, given, recipe, "cuda")
    ref.assert_equal(mine[:2], theirs[:2])
    assert torch.equal(torch.stack(mine[3:6]), theirs[3])
    assert torch.equal(torch.stack(mine[6:9]), theirs[4])


@RECIPES
def test_no_synchronisation_and_graphs_replay_other_splits(recipe):
    rows, sizes = SPLITS["around a tile"]
    module = mlp(3).cuda()
    x, splits, scales, dy = (t.cuda() for t in inputs(rows, sizes))
    x, scales, dy = x.to(BF16).requires_grad_(), scales.requires_grad_(), dy.to(BF16)
    leaves = [x, scales, *module.parameters()]

    def work():
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x, splits, scales, splits)
            return [y, *torch.autograd.grad(y, leaves, dy)]

    for _ in range(3):
        work()
    with never_waiting():
        work()
    graph, captured = graph_of(work)
    for new in (sizes, [0, 768, 0], [1, 1, 700], [0, 0, 0]):
        splits.copy_(torch.tensor(new))
        graph.replay()
        replayed = [t.detach().cpu() for t in captured]
        close(replayed, [t.detach().cpu() for t in work()], BOUND[recipe])


@RECIPES
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_main_grads(recipe, dtype):
    rows, sizes = SPLITS["ragged"]
    plain, given = mlp(3, bias=False), inputs(rows, sizes)
    expected = step(plain, given, recipe, "cuda")
    module = mlp(3, bias=False, accumulate_into_main_grad=True).cuda()
    module.load_state_dict(plain.state_dict())
    for p in module.parameters():
        p.main_grad = torch.ones_like(p, dtype=dtype)
    x, splits, scales, dy = (t.cuda() for t in given)
    with fz.autocast(enabled=recipe is not None, recipe=recipe):
        module(x.to(BF16).requires_grad_(), splits, scales, splits).backward(dy.to(BF16))
    for p, grad in zip(module.parameters(), expected[3:], strict=True):
        assert torch.allclose(p.main_grad.cpu().float(), grad.float() + 1, rtol=2**-6, atol=2**-4)


@RECIPES
def test_grouped_linear_alone(recipe):
    linear = fz.GroupedLinear(3, HIDDEN, OUT, dtype=BF16, single_grouped_weight=True)
    rows, sizes = SPLITS["ragged"]
    x, splits, _, dy = inputs(rows, sizes)
    results = []
    for device in ("cpu", "cuda"):
        linear.to(device)
        leaf = x.to(device, BF16).requires_grad_()
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            y = linear(leaf, splits.to(device))
            grads = torch.autograd.grad(y, [leaf, *linear.parameters()], dy.to(device, BF16))
        results.append([t.detach().cpu() for t in (y, *grads)])
    assert linear.plan.kernels == ("sm100",)
    for mine, theirs in zip(results[1], results[0], strict=True):
        error = (mine.float() - theirs.float()).norm()
        assert error <= 2**-7 * theirs.float().norm()
