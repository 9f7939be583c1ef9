"""Router, dispatch and combine, against loops over tokens and choices; gradients in FP64."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import reference as ref
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fusible as fz
from fusible import formulas
from fusible.kernels import moe
from fusible.recipes.formats import E5M2, fp8_block
from fusible.recipes.quantization import quantize
from fusible.testing import assume_target

HIDDEN, EXPERTS, TOP_K = 8, 6, 3

# --- the same once more, choice by choice ---------------------------------------------------------


def expected_rows(ids, experts, capacity=None):
    """Per expert, the choices ``(token, j)`` that it computes; and those that nobody does."""
    taken, left = [[] for _ in range(experts)], []
    choices = [(t, j) for t in range(ids.shape[0]) for j in range(ids.shape[1])]
    for t, j in choices:
        expert = int(ids[t, j])
        computed = 0 <= expert < experts
        full = computed and capacity is not None and len(taken[expert]) >= capacity
        (taken[expert] if computed and not full else left).append((t, j))
    return taken, left


def routed(
    logits, top_k, *, sigmoid=False, normalize=True, bias=None, groups=(1, 1, 2), factor=1.0
):
    """Weights and ids, token by token: plain Python, except the scores' derivative."""
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    number, kept, summed = groups
    all_ids, all_probs = [], []
    for token in scores:
        value = token.tolist() if bias is None else (token + bias).tolist()
        size = len(value) // number
        worth = [sum(sorted(value[g * size : (g + 1) * size])[-summed:]) for g in range(number)]
        best = sorted(range(number), key=lambda g: (-worth[g], g))[:kept]
        allowed = [e for e in range(len(value)) if e // size in best]
        ids = sorted(allowed, key=lambda e: (-value[e], e))[:top_k]
        probs = token[ids]
        all_ids.append(ids)
        all_probs.append(factor * (probs / probs.sum() if normalize else probs))
    return torch.stack(all_probs), torch.tensor(all_ids)


def random_ids(tokens=11, top_k=TOP_K, experts=EXPERTS, foreign=False):
    """Different experts for a token; some of other ranks."""
    pool = experts + 4 if foreign else experts
    ids = torch.stack([torch.randperm(pool)[:top_k] for _ in range(tokens)])
    if foreign:
        ids[ids == pool - 1] = -1
    return ids


# --- row map --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("capacity", [None, 0, 1, 4, 100])
def test_row_map(capacity, foreign, dtype):
    ids = random_ids(foreign=foreign)
    row_map, sizes, ends = moe.permutation(ids.to(dtype), EXPERTS, capacity)
    taken, left = expected_rows(ids, EXPERTS, capacity)
    assert sizes.tolist() == [len(rows) for rows in taken]
    assert ends.tolist() == sizes.cumsum(0).tolist()
    order = [choice for rows in taken for choice in rows]
    assert [int(row_map[choice]) for choice in order] == list(range(len(order)))
    # What is not computed has the rows of the tail, each once.
    tail = sorted(~int(row_map[choice]) for choice in left)
    assert tail == list(range(len(order), ids.numel()))
    assert row_map.dtype == ends.dtype == torch.int32
    assert sizes.dtype == torch.int64


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("factor", [None, 0.5, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_moving_rows(weighted, factor, foreign):
    """The three products of a row map and its values, by index."""
    ids, x = random_ids(foreign=foreign), torch.randn(11, HIDDEN, dtype=torch.float64)
    capacity = None if factor is None else math.ceil(factor * ids.numel() / EXPERTS)
    rows = ids.numel() if factor is None else min(ids.numel(), EXPERTS * capacity)
    probs = torch.rand(ids.shape, dtype=torch.float64)
    row_map, *counts = moe.permutation(ids, EXPERTS, capacity)
    taken, _ = expected_rows(ids, EXPERTS, capacity)
    order = [choice for of_expert in taken for choice in of_expert]
    want, scales = torch.zeros(rows, HIDDEN).double(), torch.zeros(rows).double()
    for r, (t, j) in enumerate(order):
        scales[r] = probs[t, j]
        want[r] = x[t] * (probs[t, j] if weighted else 1)
    got, moved = moe.scatter_rows(x, row_map, probs, rows, weighted)
    assert torch.equal(got, want)
    assert torch.equal(moved, scales)
    given = x, probs, ids, EXPERTS, capacity, rows, weighted
    outputs = want, scales, row_map, *counts
    ref.assert_equal(moe.permute_rows(*given), outputs)
    sources, moved = moe.row_sources(row_map, probs, rows)
    assert sources[: len(order)].tolist() == [t for t, _ in order]
    assert ((sources >= 0) & (sources < len(x))).all()
    assert sources.dtype == torch.int32
    assert torch.equal(moved, scales)
    by_row, none = moe.scatter_rows(x, row_map, scales if weighted else None, rows, weighted)
    assert torch.equal(by_row, want)
    assert none.numel() == 0

    y, values = torch.randn(rows, HIDDEN).double(), torch.randn(rows).double()
    total, picked, dots = torch.zeros_like(x), torch.zeros_like(probs), torch.zeros_like(probs)
    row_dots = torch.zeros(rows).double()
    for r, (t, j) in enumerate(order):
        total[t] += y[r] * (probs[t, j] if weighted else 1)
        picked[t, j] = values[r]
        dots[t, j] = row_dots[r] = y[r] @ x[t]
    for weights in (probs, scales):
        got, mine = moe.gather_sum(y, row_map, weights if weighted else None, values)
        torch.testing.assert_close(got, total, rtol=1e-14, atol=1e-14)
        assert torch.equal(mine, picked)
    for by_row, exact in ((False, dots), (True, row_dots)):
        got = moe.row_dots(y, x, row_map, by_row)
        torch.testing.assert_close(got, exact, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("fmt", [fp8_block(), fp8_block(E5M2, amax_epsilon=0.5)], ids=str)
@pytest.mark.parametrize("capacity", [None, 1, 3])
def test_quantized_rows_are_the_rows_quantized(fmt, capacity):
    x, ids, probs = torch.randn(9, 200).bfloat16(), random_ids(9, 2), torch.rand(9, 2)
    x[2] = 0
    x[3, 7], x[4, 150] = math.nan, math.inf
    rows = 18 if capacity is None else min(18, EXPERTS * capacity)
    given = x, probs, ids, EXPERTS, capacity, rows
    written, *places = moe.permute_rows(*given, False)
    data, scale, *others = moe.permute_rows_quantized(*given, fmt)
    want = quantize(written, fmt)
    assert torch.equal(data.view(torch.uint8), want.data.view(torch.uint8))
    torch.testing.assert_close(scale, want.scale.t(), rtol=0, atol=0, equal_nan=True)
    ref.assert_equal(others, places)


def test_values_of_dropped_rows_do_not_spread():
    """NaN in the tail, or in the weight of a dropped choice, stays there."""
    ids = torch.tensor([[0, 9], [9, 1]])
    row_map, *_ = moe.permutation(ids, 2, None)
    y = torch.tensor([[1.0], [2.0], [math.nan], [math.nan]])
    probs = torch.tensor([[0.5, math.nan], [math.nan, 0.25]])
    total, picked = moe.gather_sum(y, row_map, probs, y[:, 0])
    assert total.tolist() == [[0.5], [0.5]]
    assert picked.tolist() == [[1, 0], [0, 2]]
    rows, scales = moe.scatter_rows(torch.ones(2, 1), row_map, probs, 4, True)
    assert rows[:, 0].tolist() == scales.tolist() == [0.5, 0.25, 0, 0]


def test_sums_are_in_fp32_in_the_order_of_choices():
    row_map = torch.tensor([[2, 0, 1, 3]], dtype=torch.int32)
    y = torch.tensor([[256.0], [1.0], [0.5], [1.0]], dtype=torch.bfloat16)
    total, _ = moe.gather_sum(y, row_map, None, None)
    assert total.item() == 258  # 258.5 rounded once; 256 if it had been in BF16
    tiny = torch.tensor([[1.0], [2.0**-24], [2.0**-24], [0.0]])
    forwards, _ = moe.gather_sum(tiny, torch.tensor([[1, 2, 0]]).int(), None, None)
    backwards, _ = moe.gather_sum(tiny, torch.tensor([[0, 1, 2]]).int(), None, None)
    assert forwards.item() > backwards.item() == 1.0


LIBRARY_CALLS = {
    "permutation": lambda m: (torch.tensor([[0, 1], [7, 1]]), 3, 2),
    "scatter_rows": lambda m: (torch.randn(2, 4), m, torch.rand(2, 2), 4, True),
    "permute_rows": lambda m: (torch.randn(2, 4), torch.rand(2, 2), m, 3, 2, 4, True),
    "permute_rows_quantized": lambda m: (
        *(torch.randn(2, 200).bfloat16(), torch.rand(2, 2), m, 3, 2, 4),
        *fp8_block().as_constants(),
    ),
    "gather_sum": lambda m: (torch.randn(4, 4), m, torch.rand(4), torch.rand(4)),
    "row_dots": lambda m: (torch.randn(4, 4), torch.randn(2, 4), m, True),
}


@pytest.mark.parametrize("name", LIBRARY_CALLS)
def test_opcheck(name):
    row_map, *_ = moe.permutation(torch.tensor([[0, 1], [7, 1]]), 3, None)
    args = LIBRARY_CALLS[name](row_map)
    torch.library.opcheck(getattr(torch.ops.fusible, name).default, args)


def test_opcheck_of_routing():
    logits, ids = torch.randn(4, 6), random_ids(4, 2)
    args = (logits, torch.zeros(6), 2, "sigmoid", True, 1.5, [2, 1, 2])
    torch.library.opcheck(torch.ops.fusible.route.default, args)
    torch.library.opcheck(
        torch.ops.fusible.route_backward.default,
        (torch.rand(4, 2), logits, ids, "softmax", True, 1.0),
    )


# --- router ---------------------------------------------------------------------------------------

ROUTERS = {
    "Mixtral, Qwen3-MoE": ({}, {}),
    "not normalised": ({"normalize": False}, {"normalize": False}),
    "GPT-OSS": ({"bias": True}, {}),
    "Llama-4": (
        {"score_function": "sigmoid", "normalize": False},
        {"sigmoid": True, "normalize": False},
    ),
    "DeepSeek-V3": (
        {
            "score_function": "sigmoid",
            "num_groups": 3,
            "top_groups": 2,
            "expert_bias": True,
            "scaling_factor": 2.5,
        },
        {"sigmoid": True, "groups": (3, 2, 2), "factor": 2.5},
    ),
    "DeepSeek-V2": (
        {"normalize": False, "num_groups": 3, "top_groups": 2, "group_top": 1, "scaling_factor": 4},
        {"normalize": False, "groups": (3, 2, 1), "factor": 4},
    ),
}


def make_router(options, **more):
    router = fz.TopKRouter(HIDDEN, EXPERTS, TOP_K, **options, **more)
    with torch.no_grad():
        for p in router.parameters():
            p.copy_(torch.randn(p.shape))
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.randn(EXPERTS) / 2)
    return router


@pytest.mark.parametrize("shape", [(7,), (2, 5)])
@pytest.mark.parametrize(("options", "plain"), ROUTERS.values(), ids=ROUTERS)
def test_router(options, plain, shape):
    router = make_router(options).double()
    x = torch.randn(*shape, HIDDEN, dtype=torch.float64, requires_grad=True)
    y, probs, ids = router(x)
    dy, dprobs = torch.randn_like(y), torch.randn_like(probs)
    leaves = [x, *router.parameters()]
    grads = torch.autograd.grad((y, probs), leaves, (dy, dprobs))

    def function(x, weight, *bias):
        logits = x.reshape(-1, HIDDEN) @ weight.T + (bias[0] if bias else 0)
        found, where = routed(logits, TOP_K, bias=router.expert_bias, **plain)
        assert torch.equal(where.view(ids.shape), ids)
        torch.testing.assert_close(found.view(probs.shape), probs, rtol=1e-12, atol=1e-13)
        return (x * dy).sum() + (found.view(probs.shape) * dprobs).sum()

    _, exact = ref.gradients(function, leaves, torch.ones(()))
    torch.testing.assert_close(grads, tuple(exact), rtol=1e-10, atol=1e-12)
    assert torch.equal(y, x)
    assert not ids.requires_grad


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_hand_written_gradient_of_the_weights(function, normalize):
    logits, ids = torch.randn(5, EXPERTS).double(), random_ids(5)
    dprobs = torch.randn(5, TOP_K).double()

    def probs(logits):
        return formulas.router_probs(logits, ids, function, normalize, 1.7)

    _, derivative = torch.func.vjp(probs, logits)
    mine = moe.route_backward(dprobs, logits, ids, function, normalize, 1.7)
    torch.testing.assert_close(mine, derivative(dprobs)[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_losses(function):
    router = make_router(
        {"score_function": function, "load_balancing_loss": True, "z_loss": True}
    ).double()
    x = torch.randn(9, HIDDEN, dtype=torch.float64, requires_grad=True)
    _, _, ids, balance, z = router(x)

    def losses(x, weight):
        logits = x @ weight.T
        scores = logits.sigmoid() if function == "sigmoid" else logits.softmax(-1)
        scores = scores / scores.sum(-1, keepdim=True)
        share = [(ids == e).double().mean() for e in range(EXPERTS)]
        mean = [scores[:, e].mean() for e in range(EXPERTS)]
        even = EXPERTS * sum(f * p for f, p in zip(share, mean, strict=True))
        return torch.stack((even, (logits.exp().sum(-1).log() ** 2).mean()))

    dy = torch.tensor([0.3, 0.7]).double()
    exact, grads = ref.gradients(losses, [x, router.weight], dy)
    torch.testing.assert_close(torch.stack((balance, z)).detach(), exact)
    mine = torch.autograd.grad((balance, z), [x, router.weight], (dy[0], dy[1]))
    torch.testing.assert_close(mine, tuple(grads), rtol=1e-10, atol=1e-12)
    even = formulas.load_balancing_loss(torch.zeros(6, 6), torch.arange(6).view(6, 1), function)
    torch.testing.assert_close(even, torch.tensor(1.0))


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_of_equal_scores_the_first_expert_is_chosen(function):
    logits = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, 3.0]])
    _, ids = moe.route(logits, None, 5, function, True, 1.0, [1, 1, 2])
    assert ids.tolist() == [[1, 2, 5, 0, 3]]
    _, ids = moe.route(logits, torch.zeros(6), 5, function, True, 1.0, [1, 1, 2])
    assert ids.tolist() == [[1, 2, 5, 0, 3]]
    # Scores that round to the same are told apart by their logits.
    _, ids = moe.route(torch.tensor([[80.0, 90.0]]), None, 1, function, True, 1.0, [1, 1, 2])
    assert ids.item() == 1


@pytest.mark.parametrize("dtype", ref.LOW_PRECISION)
def test_scores_of_low_precision_inputs_are_fp32(dtype):
    router = make_router({}).to(dtype)
    x = torch.randn(9, HIDDEN).to(dtype).requires_grad_()
    y, probs, ids = router(x)
    logits = x.detach().double() @ router.weight.detach().double().T
    exact, where = routed(logits, TOP_K)
    assert y.dtype == dtype
    assert probs.dtype == torch.float32
    assert torch.equal(ids, where)
    ref.assert_accurate(probs.detach(), exact)
    dx, dw = torch.autograd.grad(probs, (x, router.weight), torch.ones_like(probs))
    assert dx.dtype == dw.dtype == dtype


def test_router_in_fp32_of_bf16_tokens_and_under_autocast():
    router, x = make_router({}), torch.randn(9, HIDDEN).bfloat16()
    wide = routed(x.double() @ router.weight.double().T, TOP_K)
    _, probs, _ = router(x)
    ref.assert_accurate(probs.detach(), wide[0].detach())
    with torch.autocast("cpu", torch.bfloat16):
        _, probs, _ = router(x.float())
        _, compiled, _ = torch.compile(router, fullgraph=True, backend="aot_eager")(x.float())
    narrow = routed(x.double() @ router.weight.bfloat16().double().T, TOP_K)
    for got in (probs, compiled):
        assert got.dtype == torch.float32
        ref.assert_accurate(got.detach(), narrow[0].detach())


def test_bias_update_evens_the_load():
    router = make_router({"score_function": "sigmoid", "expert_bias": True})
    before = router.expert_bias.clone()
    router.update_expert_bias(torch.tensor([10, 0, 5, 5, 5, 5]), rate=0.25)
    step = (router.expert_bias - before).tolist()
    assert step == pytest.approx([-0.25, 0.25, 0, 0, 0, 0])
    assert "expert_bias" in router.state_dict()
    x = torch.randn(200, HIDDEN)
    for _ in range(100):
        *_, ids = router(x)
        router.update_expert_bias(ids.flatten().bincount(minlength=EXPERTS), rate=0.03)
    load = ids.flatten().bincount(minlength=EXPERTS)
    assert load.max() < 1.2 * load.double().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bias_of_a_converted_router_stays_in_fp32(dtype):
    router = make_router({"score_function": "sigmoid", "expert_bias": True})
    router.expert_bias.copy_(torch.linspace(0.3, 0.8, EXPERTS))
    before = router.expert_bias.clone()
    router.to(dtype)
    assert torch.equal(router.expert_bias, before)
    router.update_expert_bias(torch.tensor([10, 0, 5, 5, 5, 5]))
    assert (router.expert_bias - before).tolist() == pytest.approx(
        [-1e-3, 1e-3, 0, 0, 0, 0], rel=1e-4
    )
    assert router(torch.randn(4, HIDDEN).to(dtype))[2].shape == (4, TOP_K)


def test_a_router_starts_without_bias_from_the_meta_device():
    router = fz.TopKRouter(HIDDEN, EXPERTS, 2, bias=True, expert_bias=True, device="meta")
    router.to_empty(device="cpu")
    router.expert_bias.fill_(float("nan"))
    router.reset_parameters()
    assert torch.equal(router.expert_bias, torch.zeros(EXPERTS))
    assert torch.equal(router.bias, torch.zeros(EXPERTS))


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_losses_of_no_tokens_are_zero(function):
    """A rank may have none, and must not poison the others' sum."""
    options = {"score_function": function, "load_balancing_loss": True, "z_loss": True}
    router = make_router(options)
    *_, balance, z = router(torch.zeros(0, HIDDEN))
    (balance + z).backward()
    assert balance == z == 0
    assert torch.equal(router.weight.grad, torch.zeros_like(router.weight))


# --- dispatch and combine -------------------------------------------------------------------------


def exact_moe(x, probs, ids, w1, w2, capacity=None, scale_input=False, scale_output=False):
    """The block, choice by choice."""
    taken, _ = expected_rows(ids, len(w1), capacity)
    out = [torch.zeros(w2.shape[1], dtype=x.dtype) for _ in x]
    for expert, choices in enumerate(taken):
        for t, j in choices:
            p = probs[t, j]
            h = ref.swiglu(w1[expert] @ (x[t] * p if scale_input else x[t]))
            h = h if scale_input or scale_output else h * p
            y = w2[expert] @ h
            out[t] = out[t] + (y * p if scale_output else y)
    return torch.stack(out)


WAYS = {
    "scaled activation": ({}, {}, fz.ScaledSwiGLU),
    "scaled input": ({"scale_input": True}, {}, fz.SwiGLU),
    "scaled output": ({}, {"scale_output": True}, fz.SwiGLU),
}


def make_experts(way, *, capacity_factor=None, dtype=torch.float64, experts=EXPERTS):
    dispatch, combine, act = WAYS[way]
    options = {"bias": False, "single_grouped_weight": True, "dtype": dtype}
    return fz.Sequential(
        fz.Dispatch(experts, capacity_factor=capacity_factor, **dispatch),
        fz.GroupedLinear(experts, HIDDEN, 10, **options),
        act(),
        fz.GroupedLinear(experts, 5, HIDDEN, **options),
        fz.Combine(weighted=bool(combine)),
    )


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("factor", [None, 0.5, 1.3])
@pytest.mark.parametrize("way", WAYS)
def test_block_of_experts(way, factor, foreign):
    dispatch, combine, _ = WAYS[way]
    mlp = make_experts(way, capacity_factor=factor)
    ids = random_ids(foreign=foreign)
    x = torch.randn(11, HIDDEN, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(ids.shape, dtype=torch.float64, requires_grad=True)
    y = mlp(x, probs, ids)
    dy = torch.randn_like(y)
    leaves = [x, probs, *mlp.parameters()]
    grads = torch.autograd.grad(y, leaves, dy)
    capacity = None if factor is None else math.ceil(factor * ids.numel() / EXPERTS)
    exact_y, exact = ref.gradients(
        lambda x, probs, w1, w2: exact_moe(x, probs, ids, w1, w2, capacity, **dispatch, **combine),
        leaves,
        dy,
    )
    torch.testing.assert_close(y.detach(), exact_y, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grads, tuple(exact), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", ref.LOW_PRECISION)
@pytest.mark.parametrize("way", WAYS)
def test_block_of_experts_in_low_precision(way, dtype):
    dispatch, combine, _ = WAYS[way]
    mlp, ids = make_experts(way, dtype=dtype), random_ids()
    x = torch.randn(11, HIDDEN).to(dtype).requires_grad_()
    probs = torch.rand(ids.shape, requires_grad=True)
    y = mlp(x, probs, ids)
    dy = torch.randn(y.shape).to(dtype)
    leaves = [x, probs, *mlp.parameters()]
    grads = torch.autograd.grad(y, leaves, dy)
    exact_y, exact = ref.gradients(
        lambda x, probs, w1, w2: exact_moe(x, probs, ids, w1, w2, **dispatch, **combine), leaves, dy
    )
    ref.assert_accurate(y.detach(), exact_y, roundings=8)
    for leaf, mine, theirs in zip(leaves, grads, exact, strict=True):
        assert mine.dtype == leaf.dtype
        ref.assert_accurate(mine.to(dtype), theirs, roundings=8)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    mlp = make_experts("scaled activation", capacity_factor=1.0)
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(tokens, 2, dtype=torch.float64, requires_grad=True)
    y = mlp(x, probs, random_ids(tokens, 2) if tokens else torch.empty(0, 2, dtype=torch.int64))
    y.sum().backward()
    assert y.shape == x.grad.shape == (tokens, HIDDEN)


def test_all_choices_elsewhere_give_zero():
    mlp = make_experts("scaled activation")
    x = torch.randn(4, HIDDEN, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    y = mlp(x, probs, torch.full((4, 2), EXPERTS))
    y.sum().backward()
    for t in (y, x.grad, probs.grad, *[p.grad for p in mlp.parameters()]):
        assert t.abs().max() == 0


@pytest.mark.parametrize("needs", ["x", "probs", "neither"])
def test_what_needs_no_gradient_gets_none(needs):
    for way in WAYS:
        mlp = make_experts(way).requires_grad_(False)
        x = torch.randn(5, HIDDEN, dtype=torch.float64, requires_grad=needs == "x")
        probs = torch.rand(5, 2, dtype=torch.float64, requires_grad=needs == "probs")
        y = mlp(x, probs, random_ids(5, 2))
        assert y.requires_grad == (needs != "neither")
        if y.requires_grad:
            y.sum().backward()
        assert (x.grad is not None) == (needs == "x")
        assert (probs.grad is not None) == (needs == "probs")


def test_dispatch_alone_gives_everything_out():
    ids, probs = random_ids(10).view(2, 5, TOP_K), torch.rand(2, 5, TOP_K)
    x = torch.randn(2, 5, HIDDEN)
    rows, sizes, scales, row_map = fz.Dispatch(EXPERTS)(x, probs, ids)
    assert row_map.shape == ids.shape
    assert torch.equal(rows[row_map.long()], x[:, :, None].expand(-1, -1, TOP_K, -1))
    assert torch.equal(scales[row_map.long()], probs)
    assert sizes.sum() == len(rows) == ids.numel()
    y = fz.Combine()(rows, row_map)
    torch.testing.assert_close(y, TOP_K * x)
    torch.testing.assert_close(
        fz.Combine(weighted=True)(rows, row_map, scales), probs.sum(-1, keepdim=True) * x
    )


def test_under_autocast_rows_are_narrow():
    x, ids = torch.randn(5, HIDDEN, requires_grad=True), random_ids(5)
    probs = torch.rand(ids.shape, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        rows, _, scales, _ = fz.Dispatch(EXPERTS)(x, probs, ids)
    assert (rows.dtype, scales.dtype) == (torch.bfloat16, torch.float32)
    (rows.sum() + scales.sum()).backward()
    assert x.grad.dtype == probs.grad.dtype == torch.float32


@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_gradients_of_any_layout(layout):
    ids = random_ids(5)
    x = torch.randn(5, HIDDEN, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(5, TOP_K, dtype=torch.float64, requires_grad=True)
    mlp = make_experts("scaled activation")
    y = mlp(x, probs, ids)
    dy = (
        torch.randn(HIDDEN, 5).double().T
        if layout == "transposed"
        else y.new_ones(1, 1).expand(5, 8)
    )
    grads = [torch.autograd.grad(y, x, d, retain_graph=True)[0] for d in (dy, dy.contiguous())]
    assert torch.equal(*grads)


class Means(fz.BasicOperation):
    """The mean of each token, four times, as an extra output."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return input_, [(input_.float().mean(-1).repeat(4),)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        dmeans = basic_op_grad_extra_outputs[0][0].view(4, -1, 1).sum(0)
        return grad_output + dmeans.to(grad_output.dtype) / grad_output.shape[1], [()], [()]


@pytest.mark.parametrize("scale_bias", [False, True])
@pytest.mark.parametrize("own_scales", [False, True])
def test_recomputed_rows(own_scales, scale_bias):
    """Fused, the tokens are saved, not their copies; nothing else changes."""
    results = []
    for recompute in (False, True):
        torch.manual_seed(1)
        options = {"bias": False, "single_grouped_weight": True, "dtype": torch.bfloat16}
        act = fz.ScaledSwiGLU()
        if own_scales:
            act.set_extra_input_channel(0, "means")
        seq = fz.Sequential(
            Means().set_extra_output_channel(0, "means"),
            fz.Dispatch(EXPERTS, recompute_rows=recompute).set_extra_output_channel(1, "weights"),
            fz.GroupedLinear(EXPERTS, 64, 32, **options),
            act,
            fz.GroupedLinear(
                EXPERTS, 16, 64, **{**options, "bias": scale_bias}, scale_bias=scale_bias
            ),
            fz.Combine(),
        )
        x = torch.randn(40, 64).bfloat16().requires_grad_()
        ids, probs = random_ids(40, 4), torch.rand(40, 4, requires_grad=True)
        saved = []
        pack = lambda t, to=saved: to.append(tuple(t.shape)) or t  # noqa: E731
        with assume_target("sm90"), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            outputs = seq(x, probs, ids)
            fired = seq.plan.fired
            loss = sum(t.float().sin().sum() for t in outputs)
            grads = torch.autograd.grad(loss, [x, probs, *seq.parameters()])
        assert fired == ("moe_experts_sm90",)
        assert ((160, 64) in saved) != recompute
        results.append((*outputs, *grads))
        if not recompute:
            with assume_target("sm80"):
                outputs = seq(x, probs, ids)
                loss = sum(t.float().sin().sum() for t in outputs)
                unfused = torch.autograd.grad(loss, [x, probs, *seq.parameters()])
            torch.testing.assert_close(grads, unfused, rtol=0.02, atol=0.02)
    ref.assert_equal(*results)


@pytest.mark.parametrize("scale_input", [False, True])
def test_recomputed_rows_of_wider_tokens(scale_input):
    """Rows of FP32 tokens are rounded as the linear's input, also those that are made again."""
    results = []
    for recompute in (False, True):
        torch.manual_seed(1)
        options = {"bias": False, "single_grouped_weight": True, "dtype": torch.bfloat16}
        seq = fz.Sequential(
            fz.Dispatch(EXPERTS, recompute_rows=recompute, scale_input=scale_input),
            fz.GroupedLinear(EXPERTS, 64, 32, **options),
            fz.SwiGLU() if scale_input else fz.ScaledSwiGLU(),
            fz.GroupedLinear(EXPERTS, 16, 64, **options),
            fz.Combine(),
        )
        x, probs = torch.randn(40, 64, requires_grad=True), torch.rand(40, 4, requires_grad=True)
        with assume_target("sm90"):
            y = seq(x, probs, random_ids(40, 4))
        assert seq.plan.fired == ("moe_experts_sm90",)
        loss = y.float().sin().sum()
        results.append((y, *torch.autograd.grad(loss, [x, probs, *seq.parameters()])))
    ref.assert_equal(*results)


# --- the block as one Sequential ------------------------------------------------------------------


def make_block(*, shared=False, **router):
    return ref.moe_block(HIDDEN, EXPERTS, 5, 2, 3 if shared else 0, **router).double()


def exact_block(x, router, w1, w2, *shared):
    probs, ids = routed(x @ router.T, 2)
    y = exact_moe(x, probs, ids, w1, w2)
    return y if not shared else y + ref.swiglu(x @ shared[0].T) @ shared[1].T


@pytest.mark.parametrize("shared", [False, True])
def test_block_as_one_sequential(shared):
    block = make_block(shared=shared)
    assert block.num_extra_inputs == 0
    x = torch.randn(7, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = block(x)
    dy = torch.randn_like(y)
    leaves = [x, *block.parameters()]
    exact_y, exact = ref.gradients(exact_block, leaves, dy)
    torch.testing.assert_close(y.detach(), exact_y, rtol=1e-12, atol=1e-13)
    grads = torch.autograd.grad(y, leaves, dy)
    torch.testing.assert_close(grads, tuple(exact), rtol=1e-10, atol=1e-12)


def test_what_no_op_reads_goes_to_the_caller():
    block = make_block(load_balancing_loss=True)
    x = torch.randn(7, HIDDEN, dtype=torch.float64)
    y, balance = block(x)
    assert y.shape == x.shape
    assert balance.shape == ()
    block = make_block()
    block[1].set_extra_output_channel(0, "load")
    y, load = block(x)
    assert load.sum() == 14
    router = make_block()[0]
    assert [t.shape for t in router(x)] == [x.shape, (7, 2), (7, 2)]


def test_two_blocks_in_one_run():
    """Names find the nearest earlier op."""
    one, two = make_block(), make_block()
    x = torch.randn(7, HIDDEN, dtype=torch.float64)
    assert torch.equal(fz.Sequential(*one, *two)(x), two(one(x)))


def test_a_hook_on_a_block_fires():
    block = make_block()
    seen = []
    block.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    x = torch.randn(7, HIDDEN, dtype=torch.float64)
    assert [block(x).shape] == seen == [x.shape]


def test_a_channel_goes_before_a_name():
    """A named extra input that has a channel takes what the channel carries."""
    scale = fz.MakeExtraOutput().set_extra_output_channel(0, "mine", output_to_caller=False)
    act = fz.ScaledSwiGLU().set_extra_input_channel(0, "mine")
    x = torch.randn(8)
    seq = fz.Sequential(scale, fz.Reshape((8, 1)), fz.Swap(), act)
    y, swapped = seq(x, torch.randn(8, 4))
    assert y.shape == (8, 2)
    assert torch.equal(swapped, x[:, None])


def test_swap():
    x, extra = torch.randn(2, 3, 4, requires_grad=True).unbind(0)
    x, extra = x.detach().requires_grad_(), torch.randn(5, requires_grad=True)
    y, out = fz.Swap()(x, extra)
    assert torch.equal(y, extra)
    assert torch.equal(out, x)
    dx, dextra = torch.autograd.grad(
        (y, out), (x, extra), (2 * torch.ones(5), 3 * torch.ones(3, 4))
    )
    assert torch.equal(dx, torch.full((3, 4), 3.0))
    assert torch.equal(dextra, torch.full((5,), 2.0))
    (dx,) = torch.autograd.grad(fz.Swap()(x, extra)[0].sum(), x)
    assert torch.equal(dx, torch.zeros(3, 4))


# --- compiled -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
def test_block_compiles_as_one_graph():
    options = {"score_function": "sigmoid", "expert_bias": True, "z_loss": True}
    block = make_block(shared=True, **options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    for tokens in (5, 7, 9):
        x = torch.randn(tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
        leaves = [x, *block.parameters()]
        results = []
        for call in (block, compiled):
            out = call(x)
            loss = out[0].sin().sum() + out[1]
            results.append((*out, *torch.autograd.grad(loss, leaves)))
        torch.testing.assert_close(*results)
    assert counter.frame_count == 2
    block[1].update_expert_bias(torch.arange(EXPERTS), rate=10.0)
    torch.testing.assert_close(compiled(x), block(x))
    assert counter.frame_count == 2


def test_no_zeros_are_made_for_integer_outputs(monkeypatch):
    """They have no gradient; zeros would be two launches."""
    dispatch, seen = fz.Dispatch(EXPERTS), []
    backward = dispatch.fuser_backward

    def watched(contexts, dy, *, basic_op_grad_extra_outputs):
        seen.extend(basic_op_grad_extra_outputs[0])
        return backward(contexts, dy, basic_op_grad_extra_outputs=basic_op_grad_extra_outputs)

    monkeypatch.setattr(dispatch, "fuser_backward", watched)
    ids = random_ids()
    x = torch.randn(len(ids), HIDDEN, requires_grad=True)
    rows, _, _, _ = dispatch(x, torch.rand(ids.shape, requires_grad=True), ids)
    rows.sum().backward()
    split_sizes, scales, row_map = seen
    assert split_sizes is None
    assert row_map is None
    assert torch.equal(scales, torch.zeros(ids.numel()))


@pytest.mark.parametrize(
    ("factor", "capacity"),
    [(None, None), (1e-9, 1), (0.1, 1), (1.0, 6), (1.25, 8), (1e9, 6 * 10**9)],
)
def test_capacity_is_rounded_up(factor, capacity):
    assert fz.Dispatch(4, capacity_factor=factor).capacity(24) == capacity


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", ["scaled input", "scaled output"])
def test_experts_compile_with_capacity(way):
    mlp = make_experts(way, capacity_factor=0.7)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mlp, backend=counter, fullgraph=True)
    for tokens in (6, 11):
        ids = random_ids(tokens, foreign=True)
        x = torch.randn(tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
        probs = torch.rand(ids.shape, dtype=torch.float64, requires_grad=True)
        leaves = [x, probs, *mlp.parameters()]
        results = []
        for call in (mlp, compiled):
            y = call(x, probs, ids)
            results.append((y, *torch.autograd.grad(y.sin().sum(), leaves)))
        torch.testing.assert_close(*results)
    assert counter.frame_count == 2


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fz.TopKRouter(8, 6, 7), "top_k of TopKRouter must be from 1 to 6"),
        (lambda: fz.TopKRouter(8, 6, 0), "top_k of TopKRouter must be at least 1, got 0"),
        (lambda: fz.TopKRouter(8, 6, 2, num_groups=0), "num_groups of TopKRouter must be at least"),
        (lambda: fz.TopKRouter(8, 6, 2, num_groups=4), "num_groups of TopKRouter must divide"),
        (lambda: fz.TopKRouter(8, 6, 2, num_groups=3, top_groups=4), "top_groups of TopKRouter"),
        (lambda: fz.TopKRouter(8, 6, 3, num_groups=3, top_groups=1), "top_k .* from 1 to 2"),
        (lambda: fz.TopKRouter(8, 6, 2, num_groups=3, group_top=3), "group_top .* from 1 to 2"),
        (lambda: fz.TopKRouter(8, 6, 2, score_function="tanh"), "score_function of TopKRouter"),
        (lambda: fz.Dispatch(0), "num_experts of Dispatch must be at least 1"),
        (lambda: fz.Dispatch(4, capacity_factor=0.0), "capacity_factor of Dispatch must be"),
        (lambda: fz.Dispatch(4, capacity_factor=math.inf), "must be positive and finite, or None"),
    ],
)
def test_refused_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def good(tokens=4):
    ids = random_ids(tokens)
    return SimpleNamespace(x=torch.randn(tokens, HIDDEN), probs=torch.rand(ids.shape), ids=ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(4, 2)}, "expert_ids of Dispatch must be int64 or int32"),
        ({"ids": torch.zeros(3, 3, dtype=torch.int64)}, r"of shape \(4, k\).* got torch.int64"),
        ({"ids": torch.zeros(4, 0, dtype=torch.int64)}, r"of shape \(4, k\).* got torch.int64"),
        ({"probs": torch.zeros(4, 2)}, r"probs of Dispatch must be floating of the shape \(4, 3\)"),
        ({"probs": torch.zeros(4, 3).int()}, "probs of Dispatch must be floating"),
        ({"x": torch.zeros(4, HIDDEN).int()}, "input of Dispatch must be one of"),
        ({"probs": torch.zeros(4, 3, device="meta")}, "must be on one device"),
    ],
)
def test_refused_inputs_of_dispatch(change, message):
    given = SimpleNamespace(**{**vars(good()), **change})
    with pytest.raises(ValueError, match=message):
        fz.Dispatch(EXPERTS)(given.x, given.probs, given.ids)


@pytest.mark.parametrize(
    ("rows", "row_map", "message"),
    [
        (torch.zeros(4, 8), torch.zeros(2, 2), "row_map of Combine must be int32"),
        (torch.zeros(5, 8), torch.zeros(2, 2).int(), "at most the 4 choices"),
        (torch.zeros(2, 2, 8), torch.zeros(2, 2).int(), "must be rows of shape"),
        (torch.zeros(4, 8).int(), torch.zeros(2, 2).int(), "input of Combine must be one of"),
    ],
)
def test_refused_inputs_of_combine(rows, row_map, message):
    with pytest.raises(ValueError, match=message):
        fz.Combine()(rows, row_map)
    with pytest.raises(ValueError, match="scales of Combine must be a floating tensor"):
        fz.Combine(weighted=True)(torch.zeros(4, 8), torch.zeros(2, 2).int(), torch.zeros(3))


def test_too_many_rows_are_refused_in_compiled_code():
    combine = torch.compile(fz.Combine(), backend="aot_eager", fullgraph=True)
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=r"at most the|ValueErr"):
        combine(torch.zeros(6, 8, requires_grad=True), torch.zeros(2, 2).int())


def test_refused_calls_of_the_router():
    router = fz.TopKRouter(HIDDEN, EXPERTS, 2)
    with pytest.raises(ValueError, match="must have 8 features"):
        router(torch.zeros(3, 7))
    with pytest.raises(ValueError, match="input of TopKRouter must be one of"):
        router(torch.zeros(3, HIDDEN, dtype=torch.int64))
    with pytest.raises(ValueError, match="input of TopKRouter must be one of"):
        router(torch.zeros(3, HIDDEN).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="needs expert_bias=True"):
        router.update_expert_bias(torch.ones(EXPERTS))
    router = fz.TopKRouter(HIDDEN, EXPERTS, 2, expert_bias=True)
    with pytest.raises(ValueError, match=r"a tensor of shape \(6,\).* got torch.float32 .*\(7,\)"):
        router.update_expert_bias(torch.ones(EXPERTS + 1))
    with pytest.raises(ValueError, match=r"a tensor of shape \(6,\).* got list"):
        router.update_expert_bias([1] * EXPERTS)


@pytest.mark.parametrize("assign", [False, True])
def test_the_bias_for_balance_stays_fp32_when_it_is_loaded(assign):
    """In BF16 a step of 0.001 would be lost."""
    router = fz.TopKRouter(HIDDEN, 4, 2, expert_bias=True)
    state = {name: t.bfloat16() for name, t in router.state_dict().items()}
    state["expert_bias"] = torch.full((4,), 0.6, dtype=torch.bfloat16)
    router.load_state_dict(state, assign=assign)
    before = router.expert_bias.clone()
    assert before.dtype == torch.float32
    assert torch.equal(before, state["expert_bias"].float())
    router.update_expert_bias(torch.tensor([9, 1, 1, 1]))
    moved = torch.tensor([-1, 1, 1, 1]) * 1e-3
    torch.testing.assert_close(router.expert_bias - before, moved, rtol=0, atol=1e-6)


def test_a_backward_inside_hooks_of_saved_tensors():
    """The router's losses are differentiated there, as any module is."""
    torch.manual_seed(0)
    router = fz.TopKRouter(16, 4, 2, load_balancing_loss=True, z_loss=True)
    x, grads = torch.randn(6, 16), []
    for hooks in (nullcontext(), torch.autograd.graph.save_on_cpu()):
        leaf = x.clone().requires_grad_()
        with hooks:
            sum(t.sum() for t in router(leaf) if t.requires_grad).backward()
        grads.append([leaf.grad, router.weight.grad])
        router.zero_grad()
    for want, got in zip(*grads, strict=True):
        assert torch.equal(got, want)
        assert want.any()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_router_refuses_replaced_parameters(name):
    router, x = fz.TopKRouter(8, 4, 2, bias=True), torch.randn(3, 8)
    own = getattr(router, name)
    for replaced, why in (
        (own[:1], f"{name} of TopKRouter must have shape"),
        (own.to("meta"), "input and parameters of TopKRouter must be on one device"),
    ):
        with pytest.raises(ValueError, match=why):
            torch.func.functional_call(router, {name: replaced.detach()}, (x,))
