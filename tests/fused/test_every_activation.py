"""Grouped MLPs and whole experts on Hopper with every activation, against FP64 and unfused."""

import copy

import pytest
import reference as ref
import torch
from checks import saved_tensors
from number_formats import BLOCK_FP8, CURRENT_FP8, RECIPES
from sm90_launches import is_direct, ops_only, sm90_on_cpu

import fusible as fz
from fusible.testing import assume_target

BF16 = torch.bfloat16
OPTIONS = {"dtype": BF16, "single_grouped_weight": True, "single_grouped_bias": True}
SIZES, ROWS, TOKENS = [5, 0, 4, 2], 12, 6
IDS = torch.tensor([[0, 1], [3, 9], [0, 3], [2, 0], [-1, 3], [3, 0]])

UNARY = [fz.GELU, fz.QGELU, fz.ReLU, fz.SReLU, fz.SiLU, fz.ScaledSReLU]
GATED = [fz.GLU, fz.GEGLU, fz.QGEGLU, fz.ReGLU, fz.SReGLU, fz.SwiGLU, fz.ClampedSwiGLU, fz.SiTUGLU]
GATED += [fz.ScaledSwiGLU, fz.ScaledClampedQGeGLU, fz.ScaledSiTUGLU]
MAKE = [(kind, None) for kind in (*UNARY, *GATED)] + [(kind, 32) for kind in GATED]
every_activation = pytest.mark.parametrize(
    ("kind", "interleave"), MAKE, ids=lambda v: getattr(v, "__name__", v)
)


def activation(kind, interleave=None):
    return kind() if interleave is None else kind(glu_interleave_size=interleave)


def mlp(act, bias=True, hidden=32, inner=64):
    fc1 = fz.GroupedLinear(4, hidden, (1 + act.gated) * inner, bias=bias, **OPTIONS)
    fc2 = fz.GroupedLinear(4, inner, hidden, bias=bias, scale_bias=bias, **OPTIONS)
    return randomised(fz.Sequential(fc1, act, fc2))


def randomised(module):
    torch.manual_seed(0)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return module


def inputs(module):
    """Its input and extra inputs, which share their sizes and scales."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, module[0].in_features).to(BF16).requires_grad_()
    splits, scales = torch.tensor(SIZES), torch.rand(ROWS, requires_grad=True)
    names = [op.extra_input_name(i) for op in module for i in range(op.num_extra_inputs)]
    return [x, *[splits if name == "split_sizes" else scales for name in names]]


def doubled(module, given):
    """FP64 copies; what is one tensor stays one."""
    known = {id(t): ref.double(t) if t.is_floating_point() else t for t in given}
    return copy.deepcopy(module).double(), [known[id(t)] for t in given]


def step(module, given, target):
    """Outputs and every gradient."""
    leaves = {id(t): t for t in (*given, *module.parameters()) if t.requires_grad}
    with assume_target(target):
        out = module(*given)
        outs = out if isinstance(out, tuple) else (out,)
        torch.manual_seed(2)
        dys = [torch.randn(y.shape).to(y.dtype) for y in outs]
        grads = torch.autograd.grad(outs, [*leaves.values()], dys)
    return *outs, *grads


def assert_no_worse(fused, plain, exact):
    for mine, theirs, right in zip(fused, plain, exact, strict=True):
        assert mine.dtype == theirs.dtype
        errors = [(t.double() - right).norm() for t in (mine, theirs)]
        assert errors[0] <= 1.25 * errors[1] + 2**-9 * right.norm()


@every_activation
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_grouped_mlp(kind, interleave, bias):
    """By launches of the kernels, one node and op by op: the same bits, no worse than unfused."""
    module = mlp(activation(kind, interleave), bias)
    given = inputs(module)
    with sm90_on_cpu() as loaded:
        fused = step(module, given, "sm90")
        assert module.plan.fired == ("grouped_mlp_sm90",)
        assert is_direct(fused[0])
        with ops_only():
            ref.assert_equal(step(module, given, "sm90"), fused)
    forward, backward = ("glu", "dglu") if module[1].gated else ("act", "dact")
    kinds = {spec.kind: spec for spec in loaded}
    assert kinds.keys() == {"store", "wgrad", forward, backward}
    assert bool(kinds[backward].row_scale) == (module[1].num_extra_inputs > 0)
    assert_no_worse(fused, step(module, given, "cpu"), step(*doubled(module, given), "cpu"))


@every_activation
def test_linear_and_activation(kind, interleave):
    module = mlp(activation(kind, interleave))[:2]
    given = inputs(module)
    with sm90_on_cpu():
        fused = step(module, given, "sm90")
    assert module.plan.fired == ("grouped_linear_glu_sm90",)
    assert_no_worse(fused, step(module, given, "cpu"), step(*doubled(module, given), "cpu"))


@pytest.mark.parametrize("kind", [fz.GELU, fz.SwiGLU, fz.ScaledSReLU])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8 products"])
def test_under_a_recipe(kind, recipe):
    """The values of the ops one by one, whose activations are rounded once more."""
    rule = "grouped_mlp_sm90_fp8" if recipe == "fp8 products" else "grouped_mlp_sm90"
    with fz.autocast(recipe=BLOCK_FP8 if rule.endswith("fp8") else RECIPES[recipe]):
        module = mlp(activation(kind), bias=False, hidden=128, inner=128)
        given = inputs(module)
        fused = step(module, given, "sm90")
        assert module.plan.fired == (rule,)
        for mine, theirs in zip(fused, step(module, given, "cpu"), strict=True):
            assert (mine.double() - theirs.double()).norm() <= 0.03 * theirs.double().norm()


@pytest.mark.parametrize("trained", [True, False], ids=["", "frozen fc2"])
@pytest.mark.parametrize("recipe", [RECIPES["mxfp8"], BLOCK_FP8], ids=["mxfp8", "fp8 products"])
def test_recomputed_activation_under_a_recipe(recipe, trained):
    """Nothing is saved of FC2's input; where an epilogue quantizes that, as without the option."""
    kept = []
    for recompute in (False, True):
        act = fz.ScaledSReLU(activation_recompute_in_mlp=recompute)
        module = mlp(act, bias=False, hidden=128, inner=128)
        module[2].requires_grad_(trained)
        with fz.autocast(recipe=recipe), saved_tensors() as saved:
            values = step(module, inputs(module), "sm90")
        kept.append((sum(t.numel() * t.itemsize for t in saved), values))
    (whole, want), (less, got) = kept
    if recipe == BLOCK_FP8:
        assert whole == less
    else:
        assert whole - less >= ROWS * 128 * trained
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.double() - theirs.double()).norm() <= 0.02 * theirs.double().norm()


# --- whole experts --------------------------------------------------------------------------------


def experts(act, scale_input, weighted, **options):
    return randomised(
        fz.Sequential(
            fz.Dispatch(4, scale_input=scale_input, **options),
            fz.GroupedLinear(4, 32, (1 + act.gated) * 64, **OPTIONS),
            act,
            fz.GroupedLinear(4, 64, 32, **OPTIONS),
            fz.Combine(weighted=weighted),
        )
    )


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize(
    ("kind", "scale_input", "weighted"),
    [
        (fz.SwiGLU, True, False),  # Llama-4
        (fz.SwiGLU, False, True),
        (fz.GELU, False, True),
        (fz.SReLU, True, False),
        (fz.ScaledSwiGLU, False, True),
        (fz.SwiGLU, False, False),  # which gives out the weights
    ],
)
@pytest.mark.parametrize("recipe", [None, "fp8 products"])
def test_experts(kind, scale_input, weighted, recompute, recipe):
    module = experts(kind(), scale_input, weighted, recompute_rows=recompute)
    torch.manual_seed(1)
    x = torch.randn(TOKENS, 32).to(BF16).requires_grad_()
    probs = torch.rand(TOKENS, 2, requires_grad=True)
    given = x, probs, IDS
    rule = "moe_experts_sm90_fp8" if recipe else "moe_experts_sm90"
    with fz.autocast(enabled=recipe is not None, recipe=BLOCK_FP8):
        fused = step(module, given, "sm90")
        assert module.plan.fired == (rule,)
        plain = step(module, given, "cpu")
    if recipe is None:
        assert_no_worse(fused, plain, step(*doubled(module, given), "cpu"))
    for mine, theirs in zip(fused, plain, strict=True):
        assert (mine.double() - theirs.double()).norm() <= 0.06 * theirs.double().norm()


def assert_is_the_step_of_rounded_pre_activations(cached, module, given):
    """The bits of the same step without the option, with its saved pre-activation rounded."""

    def pack(t):
        is_preact = t.dtype == BF16 and t.dim() == 2 and t.shape[1] == fc1.out_features
        return ref.in_fp8(t) if is_preact else t

    (fc1,) = [op for op in module if isinstance(op, fz.GroupedLinear)][:1]
    plain = step(module, given, "sm90")
    assert any([not torch.equal(one, other) for one, other in zip(cached, plain, strict=True)])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ref.assert_equal(cached, step(module, given, "sm90"))


def test_a_cached_quantized_input_of_a_linear_and_its_activation():
    module = mlp(fz.ScaledSwiGLU(cache_quantized_input=True))[:2]
    given = inputs(module)
    cached = step(module, given, "sm90")
    assert module.plan.fired == ("grouped_linear_glu_sm90",)
    plain = fz.Sequential(module[0], fz.ScaledSwiGLU())
    assert_is_the_step_of_rounded_pre_activations(cached, plain, given)


@pytest.mark.parametrize("recipe", [None, "fp8 products"])
@pytest.mark.parametrize("interleave", [None, 8])
def test_a_cached_quantized_input_in_experts(recipe, interleave):
    x = torch.randn(TOKENS, 32).to(BF16).requires_grad_()
    given = x, torch.rand(TOKENS, 2, requires_grad=True), IDS
    with fz.autocast(enabled=recipe is not None, recipe=BLOCK_FP8):
        module = experts(fz.ScaledSwiGLU(interleave, cache_quantized_input=True), False, False)
        cached = step(module, given, "sm90")
        assert module.plan.fired == (f"moe_experts_sm90{'_fp8' if recipe else ''}",)
        module = experts(fz.ScaledSwiGLU(interleave), False, False)
        assert_is_the_step_of_rounded_pre_activations(cached, module, given)


def test_the_epilogue_of_inference_does_not_depend_on_what_is_cached():
    """In stripes of 32, in which it quantizes no pre-activation."""
    loaded = []
    for cached in (True, False):
        module = mlp(fz.ScaledSwiGLU(32, cache_quantized_input=cached), bias=False, inner=128)
        given = inputs(module)
        on_hopper = assume_target("sm90"), fz.autocast(recipe=BLOCK_FP8), torch.no_grad()
        with sm90_on_cpu() as kernels, ops_only(), on_hopper[0], on_hopper[1], on_hopper[2]:
            module(*given)
        loaded.append(set(kernels))
    assert loaded[0] == loaded[1]
    assert any([spec.out_format is not None for spec in loaded[0]])


@pytest.mark.parametrize("recipe", [None, BLOCK_FP8, CURRENT_FP8], ids=["", "block", "current"])
@pytest.mark.parametrize("make", [fz.GELU, fz.ScaledSwiGLU])
@pytest.mark.parametrize("inner", [64, 128])
def test_a_cached_quantized_input(make, recipe, inner):
    """Fused it saves half the pre-activation; only gradients differ, by what FP8 rounds."""
    results, saved = {}, {}
    for cached in (True, False):
        module = mlp(make(cache_quantized_input=cached), inner=inner)
        given = inputs(module)
        with fz.autocast(enabled=recipe is not None, recipe=recipe or BLOCK_FP8):
            text = str(fz.explain(module, *given, target="sm90"))
            assert ("pre-activation in FP8" in text) == cached
            with saved_tensors() as kept:
                results[cached] = step(module, given, "sm90")
            saved[cached] = sum(t.numel() * t.itemsize for t in kept)
        assert module.plan.fired == ("grouped_mlp_sm90_fp8" if recipe else "grouped_mlp_sm90",)
    with fz.autocast(enabled=recipe is not None, recipe=recipe or BLOCK_FP8):
        assert_is_the_step_of_rounded_pre_activations(results[True], module, given)
    columns = module[0].out_features
    assert saved[False] - saved[True] == ROWS * (columns - 4 * -(-columns // 128))
