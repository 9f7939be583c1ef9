"""The fused grouped MLP on Hopper against the same ops unfused and FP64 math."""

from __future__ import annotations

import copy

import pytest
import torch
from checks import graph_of, hopper, launched, never_waiting
from sm90_launches import is_direct

import fusible as fz
from fusible.ops import grouped_fast_path
from fusible.testing import assume_target

pytestmark = hopper

HIDDEN, INNER = 128, 96
SIZES = (127, 0, 128, 129, 1, 256, 0, 300)
TAIL = 60


def build(act, single=True, bias=True, dtype=torch.bfloat16, transposed=False, **options):
    torch.manual_seed(0)
    options |= {"device": "cuda", "dtype": dtype, "bias": bias}
    options |= {"single_grouped_weight": single, "single_grouped_bias": single}
    mlp = fz.Sequential(
        fz.GroupedLinear(len(SIZES), HIDDEN, (1 + act.gated) * INNER, **options),
        act,
        fz.GroupedLinear(len(SIZES), INNER, HIDDEN, scale_bias=bias, **options),
    )
    for fc in (mlp[0], mlp[2]):
        for name, p in list(fc.named_parameters()):
            torch.nn.init.normal_(p, std=0.1)
            if transposed and name.startswith("weight"):
                setattr(fc, name, torch.nn.Parameter(p.detach().mT.contiguous().mT))
    return mlp


def inputs(dtype=torch.bfloat16):
    rows = sum(SIZES) + TAIL
    x = torch.randn(rows, HIDDEN, device="cuda").to(dtype)
    x[sum(SIZES) :] = float("nan")
    scales = torch.rand(rows, device="cuda")
    return x.requires_grad_(), scales.requires_grad_(), torch.tensor(SIZES, device="cuda")


def step(mlp, x, scales, splits, dy):
    """Output and every gradient, by name."""
    names = [op.extra_input_name(i) for op in mlp for i in range(op.num_extra_inputs)]
    y = mlp(x, *[splits if name == "split_sizes" else scales for name in names])
    leaves = {"x": x, "scales": scales, **dict(mlp.named_parameters())}
    if set(names) == {"split_sizes"}:
        del leaves["scales"]
    return {"y": y, **dict(zip(leaves, torch.autograd.grad(y, leaves.values(), dy), strict=True))}


def by_kind(values):
    """Values on the CPU, those of one parameter of all groups as one vector."""
    kinds = {}
    for name, value in values.items():
        kinds.setdefault(name.rstrip("0123456789"), []).append(value.detach().cpu().flatten())
    return {kind: torch.cat(parts) for kind, parts in kinds.items()}


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "act",
    [
        fz.ScaledSwiGLU(),
        fz.ScaledSwiGLU(1),
        fz.ScaledSwiGLU(8),
        fz.ScaledSwiGLU(32),
        # A limit that clamps a few: rounding decides on which side of it a value near it lies.
        fz.ScaledClampedQGeGLU(limit=2.5),
        fz.ScaledClampedQGeGLU(2, limit=2.5),
        fz.ScaledClampedQGeGLU(32, limit=2.5),
        fz.ScaledSReLU(activation_recompute_in_mlp=True),
        fz.ScaledSiTUGLU(beta1=1.5, beta2=2.5),
        fz.SwiGLU(),
        fz.GEGLU(glu_interleave_size=32),
    ],
    ids=str,
)
def test_fused_is_no_worse_than_unfused(act, bias, single, dtype):
    assert_no_worse(build(copy.deepcopy(act), single, bias, dtype), dtype)


@pytest.mark.parametrize(
    "act",
    [
        *[kind() for kind in (fz.GELU, fz.QGELU, fz.ReLU, fz.SReLU, fz.SiLU)],
        *[kind() for kind in (fz.GLU, fz.GEGLU, fz.QGEGLU, fz.ReGLU, fz.SReGLU)],
        *[kind(glu_interleave_size=32) for kind in (fz.GLU, fz.QGEGLU, fz.ReGLU, fz.SReGLU)],
        fz.ClampedSwiGLU(limit=2.5),
        fz.SiTUGLU(beta1=1.5, beta2=2.5),
        fz.SiTUGLU(beta1=1.5, beta2=2.5, glu_interleave_size=32),
        fz.ScaledSiTUGLU(32),
    ],
    ids=str,
)
def test_every_activation(act):
    assert_no_worse(build(copy.deepcopy(act)), torch.bfloat16)


@pytest.mark.parametrize("act", [fz.GELU(), fz.SwiGLU(), fz.ScaledSReLU()], ids=str)
def test_every_activation_in_a_graph(act):
    """No synchronisation, and the same bits under replay with other splits."""
    mlp, (x, scales, splits) = build(copy.deepcopy(act), bias=False), inputs()
    with torch.no_grad():
        x.nan_to_num_()
    dy = torch.randn_like(x)
    step(mlp, x, scales, splits, dy)
    with never_waiting():
        step(mlp, x, scales, splits, dy)
    graph, captured = graph_of(lambda: step(mlp, x, scales, splits, dy))
    for sizes in ([1] * 8, [0] * 8, SIZES):
        splits.copy_(torch.tensor(sizes))
        graph.replay()
        for name, want in step(mlp, x, scales, splits, dy).items():
            assert torch.equal(captured[name], want), (sizes, name)


@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_transposed_weights_of_alternating_columns(bias, single):
    """As GPT-OSS stores them; their gradients lie as they do."""
    mlp = build(fz.ScaledClampedQGeGLU(1), single, bias, transposed=True)
    grads = assert_no_worse(mlp, torch.bfloat16)
    for name, p in mlp.named_parameters():
        if "weight" in name:
            assert not p.is_contiguous()
            assert grads[name].stride() == p.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
@pytest.mark.parametrize("fresh", [True, False], ids=["overwritten", "accumulated"])
def test_main_grads_of_transposed_weights(fresh, single, dtype):
    given = {"single": single, "transposed": True}
    x, scales, splits = inputs()
    dy = torch.randn_like(x.detach().nan_to_num())
    want = step(build(fz.ScaledClampedQGeGLU(1), **given), x, scales, splits, dy)
    mlp = build(fz.ScaledClampedQGeGLU(1), **given, accumulate_into_main_grad=True)
    for fc in (mlp[0], mlp[2]):
        for w in fc.weights():
            w.main_grad = torch.full_like(w, float("nan") if fresh else 1, dtype=dtype)
            assert w.main_grad.stride() == w.stride()
            w.overwrite_main_grad = fresh
    mlp(x, splits, scales, splits, scales).backward(dy)
    for name, p in mlp.named_parameters():
        if "weight" in name:
            grad = p.main_grad.float() - (0 if fresh else 1)
            assert not grad.isnan().any()
            assert relative(grad, want[name]) < 1e-2, name


def assert_no_worse(mlp, dtype):
    """Than the same ops unfused, against FP64; gives the fused output and gradients."""
    x, scales, splits = inputs(dtype)
    dy = torch.randn_like(x.detach().nan_to_num())
    fused = step(mlp, x, scales, splits, dy)
    assert mlp.plan.fired == ("grouped_mlp_sm90",)
    with assume_target("sm80"):
        apart = step(mlp, x, scales, splits, dy)
    exact_mlp = copy.deepcopy(mlp).double().cpu()
    exact_x = x.detach().double().nan_to_num().cpu().requires_grad_()
    exact_scales = scales.detach().double().cpu().requires_grad_()
    exact = step(exact_mlp, exact_x, exact_scales, splits.cpu(), dy.double().cpu())
    for tensor in (fused["y"], fused["x"]):
        assert (tensor[sum(SIZES) :] == 0).all()
    given = fused
    fused, apart, exact = (by_kind(values) for values in (fused, apart, exact))
    for name, want in exact.items():
        assert not fused[name].isnan().any(), name
        allowed = 1.1 * relative(apart[name], want) + 1e-3
        assert relative(fused[name], want) <= allowed, name
    return given


@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
def test_repeats_bitwise_without_synchronisation(single):
    mlp = build(fz.ScaledSwiGLU(), single)
    x, scales, splits = inputs()
    dy = torch.randn_like(x.detach().nan_to_num())
    first = step(mlp, x, scales, splits, dy)
    with never_waiting():
        again = [step(mlp, x, scales, splits, dy) for _ in range(20)]
    for other in again:
        for name, value in first.items():
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
def test_cuda_graph_replay_with_other_splits(single):
    mlp = build(fz.ScaledSwiGLU(), single)
    x, scales, splits = inputs()
    with torch.no_grad():
        x.nan_to_num_()
    dy = torch.randn_like(x)
    graph, captured = graph_of(lambda: step(mlp, x, scales, splits, dy))
    rows = len(x)
    for sizes in ([rows, *[0] * 7], [1] * 8, [0] * 8, [rows // 8] * 8, SIZES):
        splits.copy_(torch.tensor(sizes))
        graph.replay()
        for name, want in step(mlp, x, scales, splits, dy).items():
            assert torch.equal(captured[name], want), (sizes, name)


@pytest.mark.parametrize("act", [fz.ScaledSwiGLU(), fz.ScaledClampedQGeGLU(32)], ids=str)
@pytest.mark.parametrize("options", [{}, {"single": False}], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_prepared_launches_are_the_checked_ones(act, options, bias, autocast, monkeypatch):
    mlp = build(copy.deepcopy(act), bias=bias, **options)
    x, scales, splits = inputs()
    dy = torch.randn_like(x.detach().nan_to_num())
    extra = (splits, scales, splits, scales)[: mlp.num_extra_inputs]
    with torch.autocast("cuda", torch.bfloat16, autocast):
        assert is_direct(mlp(x, *extra))
        prepared = step(mlp, x, scales, splits, dy)
        monkeypatch.setattr(grouped_fast_path, "is_intercepted", lambda: True)
        assert not is_direct(mlp(x, *extra))
        by_ops = step(mlp, x, scales, splits, dy)
    for name, value in by_ops.items():
        assert torch.equal(value, prepared[name]), name


def test_second_backward_of_a_kept_graph():
    mlp = build(fz.ScaledSwiGLU(), bias=False)
    x, scales, splits = inputs()
    dy = torch.randn_like(x.detach().nan_to_num())
    leaves = (x, scales, *mlp.parameters())
    once = torch.autograd.grad(mlp(x, splits, scales, splits), leaves, dy)
    # A graph that is kept must not lose its pre-activation to the first backward.
    y = mlp(x, splits, scales, splits)
    for retain in (True, False):
        for got, want in zip(
            torch.autograd.grad(y, leaves, dy, retain_graph=retain), once, strict=True
        ):
            assert torch.equal(got, want)


def test_backward_needs_no_second_pre_activation():
    options = {"device": "cuda", "dtype": torch.bfloat16, "bias": False}
    options["single_grouped_weight"] = True
    rows, hidden, inner = 32768, 64, 1024
    mlp = fz.Sequential(
        fz.GroupedLinear(2, hidden, 2 * inner, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(2, inner, hidden, **options),
    )
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scales, splits = torch.rand(rows, device="cuda"), torch.tensor([rows // 2] * 2, device="cuda")

    def peak():
        y = mlp(x, splits, scales, splits)
        dy = torch.ones_like(y)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(y, (x, *mlp.parameters()), dy)
        return torch.cuda.max_memory_allocated() - before

    peak()
    # The recomputed activation, dx, weight gradients and sums of scales: not 2 * rows * 2 * inner.
    assert peak() < 2 * rows * (inner + hidden + 64) + 4 * 3 * hidden * inner


def test_saves_only_the_input_and_the_preactivation():
    mlp = build(fz.ScaledSwiGLU(), bias=False)
    x, scales, splits = inputs()
    kept = {}
    weights = {p.untyped_storage().data_ptr() for p in mlp.parameters()}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        mlp(x, splits, scales, splits)
    rows = len(x)
    small = scales.untyped_storage().nbytes() + 4 * len(SIZES)
    assert sum(kept.values()) <= 2 * rows * (HIDDEN + 2 * INNER) + small + 1024


@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
def test_launches_six_products_and_nothing_that_moves_activations(single):
    """Forward: end rows of the groups, then two products. Backward: four.

    And the sums of the scales' gradients over tiles, if columns are those of several.
    """
    mlp, (x, scales, splits) = build(fz.ScaledSwiGLU(), single, bias=False), inputs()
    dy = torch.randn_like(x.detach().nan_to_num())
    leaves = x, scales, *mlp.parameters()
    for _ in range(2):
        torch.autograd.grad(mlp(x, splits, scales, splits), leaves, dy)
    forward, y = launched(lambda: mlp(x, splits, scales, splits))
    backward, _ = launched(lambda: torch.autograd.grad(y, leaves, dy))
    products = [name for name in backward if "TileSums" not in name]
    assert (len(forward), len(products)) == (3, 4), (forward, backward)
    assert len(backward) - len(products) <= 1


def test_parts_of_the_pattern():
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16, "single_grouped_weight": True}
    options |= {"single_grouped_bias": True}
    x, scales, splits = inputs()
    pair = fz.Sequential(fz.GroupedLinear(8, HIDDEN, 2 * INNER, **options), fz.ScaledSwiGLU())
    alone = fz.Sequential(fz.GroupedLinear(8, HIDDEN, 64, **options))
    for mlp, extra, names in (
        (pair, (splits, scales), ("grouped_linear_glu_sm90",)),
        (alone, (splits,), ("sm90",)),
    ):
        leaves = (x, *mlp.parameters())
        y = mlp(x, *extra)
        assert mlp.plan.fired + mlp.plan.kernels == names
        dy = torch.randn_like(y)
        fused = (y, *torch.autograd.grad(y, leaves, dy))
        with assume_target("sm80"):
            z = mlp(x, *extra)
            apart = (z, *torch.autograd.grad(z, leaves, dy))
        for a, b in zip(fused, apart, strict=True):
            assert not a.isnan().any()
            assert relative(a, b) < 5e-3


def test_compiles_as_one_graph():
    mlp = build(fz.ScaledSwiGLU())
    x, scales, splits = inputs()
    with torch.no_grad():
        x.nan_to_num_()
    dy = torch.randn_like(x)
    want = step(mlp, x, scales, splits, dy)
    compiled = torch.compile(mlp, fullgraph=True)
    y = compiled(x, splits, scales, splits, scales)
    leaves = {"x": x, "scales": scales, **dict(mlp.named_parameters())}
    got = {"y": y, **dict(zip(leaves, torch.autograd.grad(y, leaves.values(), dy), strict=True))}
    for name, value in want.items():
        assert relative(got[name], value) < 1e-5, name


# --- what callers give ---------------------------------------------------------------------------

ALL = ("x", "scales", "0.weight", "0.bias", "2.weight", "2.bias")
TRAINED = (
    *[(name,) for name in ALL],
    ("0.weight", "2.weight"),
    ("0.weight", "0.bias"),
    ("2.weight", "2.bias"),
    ("0.bias", "2.bias"),
    ("x", "2.weight"),
    ("scales", "0.weight"),
)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("trained", TRAINED, ids="+".join)
def test_only_some_need_gradients(trained, bias):
    if not bias and any("bias" in name for name in trained):
        pytest.skip("there is none")
    mlp, (x, scales, splits) = build(fz.ScaledSwiGLU(), bias=bias), inputs()
    dy = torch.randn_like(x.detach().nan_to_num())
    want = step(mlp, x, scales, splits, dy)
    leaves = {"x": x, "scales": scales, **dict(mlp.named_parameters())}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in trained)
    extra = (splits, scales, splits, scales)[: mlp.num_extra_inputs]
    y = mlp(x, *extra)
    assert all("sm90" in name for name in mlp.plan.fired + mlp.plan.kernels)
    grads = torch.autograd.grad(y, [leaves[name] for name in trained], dy)
    for name, got in {"y": y, **dict(zip(trained, grads, strict=True))}.items():
        assert not got.isnan().any(), name
        assert relative(got, want[name]) < 5e-3, name
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert relative(mlp(x, *extra), want["y"]) < 5e-3


def laid_out(t, make):
    """The values of ``t`` in what ``make`` makes."""
    with torch.no_grad():
        other = make(t.detach())
        other.copy_(t)
    return other.requires_grad_(t.requires_grad)


def wider(x, before, after):
    return x.new_full((len(x), before + HIDDEN + after), float("nan"))[:, before : before + HIDDEN]


def odd(t):
    """Contiguous, but not from 16 bytes on."""
    return t.new_empty(t.numel() + 1)[1:].view(t.shape)


def turned(x):
    return torch.empty_like(x.t().contiguous()).t()


LAYOUTS = {
    "int32 sizes": lambda x, s, n, dy: (x, s, n.int(), dy),
    "sizes of the CPU": lambda x, s, n, dy: (x, s, n.cpu(), dy),
    "a list": lambda x, s, n, dy: (x, s, n.tolist(), dy),
    "sizes with a stride": lambda x, s, n, dy: (x, s, n.repeat_interleave(2)[::2], dy),
    "scales with a stride": lambda x, s, n, dy: (
        x, laid_out(s, lambda s: s.repeat_interleave(2)[::2]), n, dy,
    ),
    "rows of a wider tensor": lambda x, s, n, dy: (
        laid_out(x, lambda x: wider(x, 8, 8)), s, n, laid_out(dy, lambda x: wider(x, 0, 64)),
    ),
    "rows not on 16 bytes": lambda x, s, n, dy: (
        laid_out(x, lambda x: wider(x, 1, 0)), s, n, laid_out(dy, lambda x: wider(x, 3, 2)),
    ),
    "from an odd address": lambda x, s, n, dy: (
        laid_out(x, odd), s, n, laid_out(dy, odd),
    ),
    "features first": lambda x, s, n, dy: (laid_out(x, turned), s, n, laid_out(dy, turned)),
    "an expanded gradient": lambda x, s, n, dy: (x, s, n, dy[:1].expand_as(dy)),
    "three dimensions": lambda x, s, n, dy: (
        *[t.detach().unflatten(0, (7, -1)).requires_grad_() for t in (x, s)],
        n,
        dy.unflatten(0, (7, -1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_same_given_otherwise(how, bias):
    """Any layout that callers have gives the bits of the contiguous one."""
    mlp, (x, scales, splits) = build(fz.ScaledSwiGLU(), bias=bias), inputs()
    dy = torch.randn_like(x.detach().nan_to_num())
    if how == "an expanded gradient":
        dy = dy[:1].repeat(len(dy), 1)
    want = step(mlp, x, scales, splits, dy)
    got = step(mlp, *LAYOUTS[how](x, scales, splits, dy))
    assert mlp.plan.fired == ("grouped_mlp_sm90",)
    for name, value in want.items():
        assert torch.equal(got[name].reshape(value.shape), value), name


@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
def test_under_autocast(single):
    """FP32 parameters and tokens: the kernels run in BF16, gradients come back in FP32."""
    mlp = build(fz.ScaledSwiGLU(), single, dtype=torch.float32)
    x, scales, splits = inputs(torch.float32)
    dy = torch.randn_like(x.detach().nan_to_num())
    narrow = build(fz.ScaledSwiGLU(), single)
    narrow.load_state_dict(mlp.state_dict())
    want = step(narrow, laid_out(x, torch.Tensor.bfloat16), scales, splits, dy.bfloat16())
    with torch.autocast("cuda", torch.bfloat16):
        got = step(mlp, x, scales, splits, dy.bfloat16())
    assert mlp.plan.fired == ("grouped_mlp_sm90",)
    for name, value in want.items():
        assert got[name].dtype == (torch.bfloat16 if name == "y" else torch.float32)
        assert relative(got[name], value) < 5e-3, name


def unevenly(t):
    """Groups, or rows, that are 3 elements further apart."""
    first, *steps = t.stride()
    room = t.new_empty(t.shape[0] * (first + 3))
    return room.as_strided(t.shape, (first + 3, *steps))


@pytest.mark.parametrize("make", [odd, unevenly])
@pytest.mark.parametrize("of", ["all", "one", "biases"])
def test_parameters_that_lie_otherwise(of, make):
    """As parametrizations and ``functional_call`` may give them."""
    mlp, (x, scales, splits) = build(fz.ScaledSwiGLU(), single=of != "one"), inputs()
    dy = torch.randn_like(x.detach().nan_to_num())
    want = step(mlp, x, scales, splits, dy)
    which = {"all": ("weight",), "one": ("weight1",), "biases": ("bias",)}[of]
    for fc in (mlp[0], mlp[2]):
        for name in which:
            p = getattr(fc, name)
            setattr(fc, name, torch.nn.Parameter(laid_out(p, make)))
    got = step(mlp, x, scales, splits, dy)
    assert mlp.plan.fired == ("grouped_mlp_sm90",)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_scales_of_low_precision(bias):
    """Arithmetic is in FP32, and their gradient has their dtype."""
    mlp, (x, scales, splits) = build(fz.ScaledSwiGLU(), bias=bias), inputs()
    dy = torch.randn_like(x.detach().nan_to_num())
    narrow = scales.detach().bfloat16()
    want = step(mlp, x, narrow.float().requires_grad_(), splits, dy)
    got = step(mlp, x, narrow.requires_grad_(), splits, dy)
    assert mlp.plan.fired == ("grouped_mlp_sm90",)
    for name, value in want.items():
        if name == "scales":
            assert got[name].dtype == torch.bfloat16
            assert relative(got[name], value) < 5e-3
        else:
            assert torch.equal(got[name], value), name
