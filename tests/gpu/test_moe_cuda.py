"""Routing and moving rows on CUDA: the bits of the definitions, which run on the CPU here."""

import copy

import pytest
import reference as ref
import torch
from checks import graph_of, launched, never_waiting
from torch._dynamo.testing import CompileCounterWithBackend

import fusible as fz
from fusible import formulas
from fusible.kernels import grouped, moe
from fusible.kernels.moe import cuda as kernels
from fusible.kernels.moe import definitions
from fusible.kernels.moe.cuda import PeerRows
from fusible.kernels.moe.spec import FUSED_ROUTER_TOKENS, SortSpec
from fusible.kernels.sm90.grouped_products import WeightProducts
from fusible.recipes import Float8BlockScaling
from fusible.recipes.formats import E5M2, fp8_block

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


on_poison = pytest.mark.usefixtures("poisoned")


def cuda(*tensors):
    return [t.cuda() if isinstance(t, torch.Tensor) else t for t in tensors]


def same(got, want):
    ref.assert_equal([t.cpu() for t in got], want)


IDS = {
    "even": lambda n, k, e: torch.randint(0, e, (n, k)),
    "one group": lambda n, k, e: torch.full((n, k), e // 2),
    "skewed": lambda n, k, e: (torch.rand(n, k) ** 4 * e).long(),
    "foreign": lambda n, k, e: torch.randint(-e // 4 - 1, e + e // 4 + 2, (n, k)),
    "all foreign": lambda n, k, e: torch.full((n, k), e),
}


@on_poison
@pytest.mark.parametrize("groups", [1, 31, 128, 1000, 1024])
@pytest.mark.parametrize("kind", IDS)
def test_row_map(kind, groups):
    for tokens, k in ((1, 1), (31, 1), (8, 4), (257, 1), (1000, 6), (4097, 8), (20001, 9)):
        ids = IDS[kind](tokens, k, groups)
        for capacity in (None, 0, 1, max(1, tokens * k // groups), 10**6):
            want = definitions.permutation(ids, groups, capacity)
            dtype = torch.int32 if capacity else torch.int64
            same(moe.permutation(ids.to(dtype).cuda(), groups, capacity), want)


@on_poison
@pytest.mark.parametrize(
    ("groups", "choices"), [(128, 2**22 + 5), (300, SortSpec(300, False, 8).most_choices)]
)
@pytest.mark.parametrize("kind", ["skewed", "one group"])
def test_row_map_of_many_choices(kind, groups, choices):
    ids = IDS[kind](choices, 1, groups).int().cuda()
    got = moe.permutation(ids, groups, choices // 2)
    ref.assert_equal(got, definitions.permutation(ids, groups, choices // 2))


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8])
def test_row_map_of_narrow_ids(dtype):
    ids = IDS["even"](1000, 4, 100).to(dtype)
    same(moe.permutation(ids.cuda(), 100, 50), definitions.permutation(ids, 100, 50))


def test_ids_beyond_32_bits():
    """None of them is a group, whatever their lower half says."""
    ids = torch.randint(0, 6, (1000, 4))
    ids[::2] += 2**32
    ids[::3] -= 2**33
    same(moe.permutation(ids.cuda(), 6, None), definitions.permutation(ids, 6, None))


def test_more_than_two_to_the_31_elements():
    tokens, k, hidden, groups = 65600, 8, 4112, 16
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, groups, (tokens, k), device="cuda")
    row_map, sizes, ends = moe.permutation(ids, groups, None)
    assert ids.numel() * hidden > 2**31
    rows, _ = moe.scatter_rows(x, row_map, None, ids.numel(), False)
    total, _ = moe.gather_sum(rows, row_map, None, None)
    assert torch.equal(total, k * x)
    for last in (rows[-1], rows[-2]):
        assert (last == x).all(-1).any()
    squares = x.float().square().sum(-1)
    dots = moe.row_dots(rows, x, row_map, False)
    torch.testing.assert_close(dots, squares[:, None].expand(-1, k), rtol=1e-4, atol=1e-3)
    sums = grouped.grouped_sum(rows.fill_(1), ends, None)
    assert torch.equal(sums, sizes.bfloat16()[:, None].expand(-1, hidden))


def rows_case(dtype, tokens, hidden, k, weights, capacity):
    groups = 16
    ids = torch.stack([torch.randperm(groups + 3)[:k] for _ in range(tokens)])
    row_map, _, ends = definitions.permutation(ids, groups, capacity)
    rows = tokens * k if capacity is None else min(tokens * k, groups * capacity)
    given = {
        "none": None,
        "choice": torch.rand(tokens, k),
        "choice, bf16": torch.rand(tokens, k).bfloat16(),
        "row": torch.rand(rows),
    }[weights]
    x, y = torch.randn(tokens, hidden).to(dtype), torch.randn(rows, hidden).to(dtype)
    return row_map, rows, given, x, y, ends


@on_poison
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", ["none", "choice", "choice, bf16", "row"])
@pytest.mark.parametrize("k", [1, 8, 11])
def test_rows(dtype, weights, k):
    for tokens, hidden, capacity in ((1, 40, None), (333, 40, None), (64, 2048, 7)):
        row_map, rows, w, x, y, ends = rows_case(dtype, tokens, hidden, k, weights, capacity)
        assert kernels.supports_row_copies(x.cuda(), row_map.cuda(), w)
        if w is not None and w.dim() == 2:
            args = (row_map, w, rows)
            same(moe.row_sources(*cuda(*args)), definitions.row_sources(*args))
        for scale in (False, True) if w is not None else (False,):
            args = (x, row_map, w, rows, scale)
            want, moved = definitions.scatter_rows(*args)
            same(moe.scatter_rows(*cuda(*args)), (want, moved))
            with torch.no_grad():  # as a direct call
                out, of_weights = moe.scatter_rows(*cuda(*args), zero_tail=False)
            same((out[: int(ends[-1])], of_weights), (want[: int(ends[-1])], moved))
            assert out[int(ends[-1]) :].isnan().all()
        for values in (None, torch.randn(rows), torch.randn(rows).half())[: 3 if k == 8 else 2]:
            args = (y, row_map, w, values)
            same(moe.gather_sum(*cuda(*args)), definitions.gather_sum(*args))


@on_poison
@pytest.mark.parametrize("groups", [1, 31, 128, 512, 1024])
@pytest.mark.parametrize("kind", IDS)
def test_rows_of_few_tokens(kind, groups):
    """The bits of the definition, and of the two launches that more tokens have."""
    for tokens, k, hidden in ((1, 8, 2048), (2, 1, 40), (5, 32, 8), (33, 10, 7168), (64, 8, 520)):
        ids = IDS[kind](tokens, k, groups)
        for i, capacity in enumerate((None, 1, max(1, tokens * k // groups), 10**6)):
            dtype = DTYPES[i % 3]
            x, probs = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, k)
            if tokens == 33:
                probs, ids = probs.bfloat16(), ids.int()
            rows = ids.numel() if capacity is None else min(ids.numel(), groups * capacity)
            for scale in (False, True):
                args = (x, probs, ids, groups, capacity, rows, scale)
                want = moe.permute_rows(*args)
                on_gpu = cuda(*args)
                assert kernels.permutes_rows(*on_gpu[:4], rows)
                same(moe.permute_rows(*on_gpu), want)
                x_there, probs_there, ids_there = on_gpu[:3]
                sort = moe.permutation(ids_there, groups, capacity)
                same((*moe.scatter_rows(x_there, sort[0], probs_there, rows, scale), *sort), want)
                with torch.no_grad():  # as a direct call
                    out, *others = moe.permute_rows(*on_gpu, zero_tail=False)
                live = int(want[-1][-1])
                same((out[:live], *others), (want[0][:live], *want[1:]))
                assert out[live:].isnan().all()


@on_poison
@pytest.mark.parametrize("fmt", [fp8_block(), fp8_block(E5M2, amax_epsilon=0.5)], ids=str)
@pytest.mark.parametrize("kind", IDS)
def test_quantized_rows(kind, fmt):
    """The bits of the definition: of few tokens by one launch, of more by three."""
    for tokens, k, hidden in ((1, 8, 2048), (2, 1, 40), (33, 10, 7168), (64, 8, 520), (77, 2, 264)):
        ids, groups = IDS[kind](tokens, k, 31), 31
        x, probs = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, k)
        x[-1] = 0
        x[0, 7], x[tokens // 2, 30] = float("nan"), float("inf")
        for capacity in (None, 1, max(1, tokens * k // groups)):
            rows = ids.numel() if capacity is None else min(ids.numel(), groups * capacity)
            args = (x, probs, ids, groups, capacity, rows, fmt)
            data, scale, *others = moe.permute_rows_quantized(*cuda(*args))
            want, want_scale, *others_want = moe.permute_rows_quantized(*args)
            bits = data.view(torch.uint8), scale.view(torch.int32)
            same(bits, (want.view(torch.uint8), want_scale.view(torch.int32)))
            same(others, others_want)


@pytest.mark.parametrize("case", ["tokens", "rows", "ids", "groups"])
def test_what_one_launch_does_not_take_is_served(case):
    tokens, groups, rows = 65 if case == "tokens" else 9, 1025 if case == "groups" else 7, 18
    rows = 0 if case == "rows" else 2 * tokens
    ids = torch.randint(-1, groups + 1, (tokens, 2))
    ids = ids.short() if case == "ids" else ids
    args = torch.randn(tokens, 16), torch.rand(tokens, 2), ids, groups, None, rows, True
    assert kernels.permute_rows(*cuda(*args)) is NotImplemented
    same(moe.permute_rows(*cuda(*args)), moe.permute_rows(*args))


def test_ids_of_few_tokens_beyond_32_bits():
    ids = torch.randint(0, 6, (50, 4))
    ids[::2] += 2**32
    ids[::3] -= 2**33
    args = torch.randn(50, 16), torch.rand(50, 4), ids, 6, None, 200, False
    same(moe.permute_rows(*cuda(*args)), moe.permute_rows(*args))


@on_poison
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", ["none", "choice", "row"])
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_rows_in_several_memories(dtype, weights, processes):
    """Of tokens whose memories begin at the addresses of a table, bits as of one memory."""
    for of_process, hidden, k in ((1, 40, 8), (111, 40, 1), (130, 2048, 8)):
        tokens = processes * of_process
        row_map, rows, w, x, y, _ = rows_case(dtype, tokens, hidden, k, weights, None)
        read, written = (peer_rows(processes, of_process, hidden, dtype, r) for r in range(2))
        read.copy_(x.cuda())
        for scale in (False, True) if w is not None else (False,):
            args = (row_map, w, rows, scale)
            same(kernels.scatter_rows(read, *cuda(*args)), definitions.scatter_rows(x, *args))
        args = (y, row_map, w, torch.randn(rows))
        _, picked = kernels.gather_sum(*cuda(*args), written)
        same((written.copied(), picked), definitions.gather_sum(*args))


def peer_rows(processes, of_process, hidden, dtype, rank):
    """Rows in as many memories, in each after 64 bytes that are not theirs."""
    size = of_process * hidden
    memories = [torch.full((size + 64,), torch.nan, device="cuda", dtype=dtype) for _ in "abcd"]
    memories, skipped = memories[:processes], 64 // dtype.itemsize
    table = torch.tensor([memory.data_ptr() for memory in memories], device="cuda")
    parts = [m[skipped : skipped + size].view(of_process, hidden) for m in memories]
    return PeerRows(parts, table.data_ptr(), 64, rank, lambda keep=table: None)


@on_poison
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 8, 11])
@pytest.mark.parametrize("by_row", [False, True])
def test_row_dots(dtype, k, by_row):
    for tokens, hidden, capacity in ((1, 40, None), (333, 40, None), (64, 2048, 7)):
        row_map, _, _, x, y, _ = rows_case(dtype, tokens, hidden, k, "none", capacity)
        x[0, 0] = torch.inf
        got = moe.row_dots(*cuda(y, x, row_map, by_row)).cpu()
        want = definitions.row_dots(y.double(), x.double(), row_map, by_row)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("case", ["dtype", "hidden", "choices", "layout"])
def test_what_the_kernels_do_not_take_is_served(case):
    tokens, hidden, k, dtype = 20, 16, 2, torch.float32
    if case == "dtype":
        dtype = torch.float64
    hidden = 3 if case == "hidden" else hidden
    k = 40 if case == "choices" else k
    ids = torch.randint(0, 5, (tokens, k))
    row_map, *_ = moe.permutation(ids, 4, None)
    x = torch.randn(tokens, hidden, dtype=dtype)
    x = x.T.contiguous().T if case == "layout" else x
    assert kernels.supports_row_copies(x.cuda(), row_map.cuda()) == (case == "layout")
    args = (x, row_map, torch.rand(tokens, k), tokens * k, True)
    same(moe.scatter_rows(*cuda(*args)), definitions.scatter_rows(*args))
    y = torch.randn(tokens * k, hidden, dtype=dtype)
    args = (y, row_map, None, torch.randn(tokens * k))
    same(moe.gather_sum(*cuda(*args)), definitions.gather_sum(*args))


# --- router ---------------------------------------------------------------------------------------


@on_poison
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_route(function, normalize):
    for tokens, experts, k in ((1, 1, 1), (300, 60, 4), (1000, 128, 8), (77, 1000, 32), (9, 33, 2)):
        logits = 3 * torch.randn(tokens, experts)
        logits[::3] = logits[::3].round()  # ties
        logits[0, 0] = torch.nan if tokens > 1 else 0
        args = (k, function, normalize, 2.5, [1, 1, 2])
        probs, ids = moe.route(logits.cuda(), None, *args)
        want, where = definitions.route(logits, None, *args)
        assert torch.equal(ids.cpu(), where)
        torch.testing.assert_close(probs.cpu(), want, rtol=2e-6, atol=1e-7, equal_nan=True)
        logits, ids = logits[1:], where[1:]
        dprobs = torch.randn(ids.shape)
        args = (function, normalize, 2.5)
        got = moe.route_backward(dprobs.cuda(), logits.cuda(), ids.cuda(), *args)
        exact = formulas.router_probs_backward(dprobs.double(), logits.double(), ids, *args)
        torch.testing.assert_close(got.cpu().double(), exact, rtol=1e-5, atol=1e-5)


@on_poison
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [(1, 1, 2), (8, 4, 2), (4, 1, 1), (32, 9, 3)])
def test_route_by_biased_scores_in_groups(groups, function, biased):
    logits, k = torch.randn(2000, 256), 6
    bias = torch.randn(256) / 10 if biased else None
    args = (k, function, True, 1.0, list(groups))
    probs, ids = moe.route(logits.cuda(), None if bias is None else bias.cuda(), *args)
    want, where = definitions.route(logits.double(), bias, *args)
    # Scores that differ by a rounding may change places.
    differs = (ids.cpu() != where).any(-1)
    assert differs.sum() <= 4
    torch.testing.assert_close(probs.cpu()[~differs].double(), want[~differs], rtol=1e-5, atol=1e-6)


@on_poison
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [(8, 4, 2), (4, 1, 1), (32, 9, 3)])
def test_ties_in_groups(groups, function):
    """Of equal groups the first are kept, of equal experts the first are chosen, as on the CPU."""
    logits = torch.randint(0, 4, (2000, 256)).float()
    args = (6, function, True, 1.0, list(groups))
    _, ids = moe.route(logits.cuda(), None, *args)
    _, want = definitions.route(logits, None, *args)
    assert torch.equal(ids.cpu(), want)


@on_poison
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("hidden", "experts", "k", "function", "groups"),
    [
        (2048, 128, 8, "softmax", [1, 1, 2]),
        (8, 1, 1, "softmax", [1, 1, 2]),
        (40, 60, 4, "sigmoid", [1, 1, 2]),
        (7168, 256, 8, "sigmoid", [8, 4, 2]),
        (136, 1000, 32, "softmax", [1, 1, 2]),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_few_tokens_are_routed_in_one_launch(hidden, experts, k, function, groups, dtype, biased):
    """Logits as in FP64, and the choice by them as that of the kernel that reads logits."""
    weight = (torch.randn(experts, hidden) / hidden**0.5).to("cuda", dtype)
    biases = [None, None]
    if biased:
        biases = [torch.randn(experts).to("cuda", dtype), torch.randn(experts, device="cuda") / 10]
    choice = k, function, True, 2.5, groups
    for tokens in range(1, FUSED_ROUTER_TOKENS + 2):
        x = torch.randn(tokens, hidden).to("cuda", dtype)
        x = x.T.contiguous().T if tokens == 3 else x
        moe.route_tokens(x, weight, *biases, *choice)
        names, (logits, probs, ids) = launched(
            lambda x=x: moe.route_tokens(x, weight, *biases, *choice)
        )
        # A copy of tokens that are not contiguous; above the bound PyTorch's product comes first.
        names = [name for name in names if "Fill" not in name]  # that of the poison
        assert any("route_tokens" in name for name in names) == (tokens <= FUSED_ROUTER_TOKENS)
        assert (len(names) == 1) == (tokens <= FUSED_ROUTER_TOKENS and x.is_contiguous()), names
        exact = x.double() @ weight.double().T + (biases[0].double() if biased else 0)
        torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
        want = moe.route(logits, biases[1], *choice)
        assert torch.equal(probs, want[0])
        assert torch.equal(ids, want[1])
        again = moe.route_tokens(x, weight, *biases, *choice)
        assert all(map(torch.equal, again, (logits, probs, ids)))


def test_a_router_of_few_tokens_in_graphs_and_streams():
    """Its count of CTAs is zero again after each launch, also where two run at once."""
    weight = torch.randn(512, 1024, device="cuda").bfloat16()
    x = torch.randn(4, 1024, device="cuda").bfloat16()
    choice = None, None, 8, "softmax", True, 1.0, [1, 1, 2]
    want = moe.route_tokens(x, weight, *choice)

    def many():
        return [moe.route_tokens(x, weight, *choice) for _ in range(20)]

    graphs = [graph_of(many) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(10):
        outputs = []
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                outputs += many()
    torch.cuda.synchronize()
    for found in (*outputs, *graphs[0][1], *graphs[1][1]):
        assert all(map(torch.equal, found, want))


LOSSES = {"load_balancing_loss": True, "z_loss": True}


@pytest.mark.parametrize("weighted", [True, False])
def test_one_or_two_launches(weighted):
    """Dispatch: the sort, then the rows. Combine, if weighted, has gradients of its weights."""
    dispatch, combine = fz.Dispatch(16), fz.Combine(weighted)
    x = torch.randn(100, 256, device="cuda", requires_grad=True)
    probs, ids = torch.rand(100, 4, device="cuda"), IDS["foreign"](100, 4, 16).cuda()

    def step():
        there, (rows, _, scales, row_map) = launched(
            lambda: dispatch(x, probs.requires_grad_(), ids)
        )
        own = [t.detach().requires_grad_() for t in (rows, scales)]
        back, y = launched(lambda: combine(own[0], row_map, *own[1:][:weighted]))
        dy, drows = torch.randn_like(y), [torch.randn_like(t) for t in (rows, scales)]
        of_back, _ = launched(lambda: torch.autograd.grad(y, own[: 1 + weighted], dy))
        of_there, _ = launched(lambda: torch.autograd.grad((rows, scales), (x, probs), drows))
        return there, of_there, back, of_back

    step()
    kernels = step()
    assert [len(names) for names in kernels] == [2, 1, 1, 1 + weighted], kernels
    few = x.detach()[:64], probs.detach()[:64], ids[:64]
    dispatch(*few)
    assert len(launched(lambda: dispatch(*few))[0]) == 1


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_losses(function):
    """Against FP64, without a synchronisation."""
    router, x = fz.TopKRouter(256, 16, 4, score_function=function, **LOSSES), torch.randn(500, 256)
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        router.to(device, dtype)
        tokens = x.to(device, dtype).requires_grad_()

        def losses_and_gradients(x):
            _, _, _, balance, z = router(x)
            loss = 0.3 * balance + 0.7 * z
            return [balance.detach(), z.detach(), *torch.autograd.grad(loss, [x, router.weight])]

        losses_and_gradients(tokens)  # compiles kernels
        with never_waiting():
            got = losses_and_gradients(tokens)
        results.append([t.cpu().double() for t in got])
    for got, want in zip(*results[::-1], strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_opcheck():
    ids = torch.randint(0, 5, (6, 2), device="cuda")
    row_map, *_ = moe.permutation(ids, 4, None)
    x, y = torch.randn(6, 8, device="cuda"), torch.randn(12, 8, device="cuda")
    w, v = torch.rand(6, 2, device="cuda"), torch.rand(12, device="cuda")
    torch.library.opcheck(torch.ops.fusible.permutation.default, (ids, 4, 3))
    torch.library.opcheck(torch.ops.fusible.row_sources.default, (row_map, w, 12))
    torch.library.opcheck(torch.ops.fusible.scatter_rows.default, (x, row_map, w, 12, True))
    torch.library.opcheck(torch.ops.fusible.permute_rows.default, (x, w, ids, 4, 3, 12, True))
    torch.library.opcheck(torch.ops.fusible.gather_sum.default, (y, row_map, w, v))
    torch.library.opcheck(torch.ops.fusible.row_dots.default, (y, x, row_map, False))
    logits, bias = torch.randn(6, 8, device="cuda"), torch.zeros(8, device="cuda")
    torch.library.opcheck(
        torch.ops.fusible.route.default, (logits, bias, 2, "sigmoid", True, 1.5, [2, 1, 2])
    )
    args = (w, logits, ids.clamp(max=7), "softmax", True, 1.0)
    torch.library.opcheck(torch.ops.fusible.route_backward.default, args)
    ends, rows = torch.tensor([3, 3, 9], device="cuda").int(), torch.randn(12, 8, device="cuda")
    sums, dots = torch.ops.fusible.grouped_sum.default, torch.ops.fusible.grouped_dots.default
    for given, index in ((rows, None), (rows[:4], torch.arange(12, device="cuda").int() % 4)):
        torch.library.opcheck(sums, (given, ends, v, index))
        torch.library.opcheck(dots, (given, rows[:3].clone(), ends, index))


# --- the block ------------------------------------------------------------------------------------

HIDDEN, EXPERTS, INNER, TOP_K = 256, 16, 128, 4


def make_block(shared=False, **options):
    return ref.moe_block(HIDDEN, EXPERTS, INNER, TOP_K, INNER if shared else 0, **options)


def step(block, x, dy):
    y = block(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *block.parameters()], dy)]


ROUTERS = {
    "softmax": {},
    "sigmoid, groups": {
        "score_function": "sigmoid",
        "num_groups": 4,
        "top_groups": 2,
        "expert_bias": True,
    },
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_block_against_fp64(shared, weighted, router):
    block = make_block(shared, weighted=weighted, **ROUTERS[router])
    x, dy = torch.randn(500, HIDDEN).bfloat16(), torch.randn(500, HIDDEN).bfloat16()
    exact = make_block(shared, weighted=weighted, **ROUTERS[router]).double()
    block = block.bfloat16()
    exact.load_state_dict({k: v.double() for k, v in block.state_dict().items()})
    want = step(exact, x.double().requires_grad_(), dy.double())
    block = block.cuda()
    got = step(block, x.cuda().requires_grad_(), dy.cuda())
    for a, b in zip(got, want, strict=True):
        error = (a.cpu().double() - b).norm() / b.norm()
        assert error < 0.04, error


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize(
    ("kind", "scale_input", "weighted"),
    [
        (fz.SwiGLU, True, False),  # Llama-4
        (fz.SwiGLU, False, True),
        (fz.GELU, False, True),
        (fz.SReLU, True, False),
        (fz.ScaledSReLU, False, False),
    ],
)
def test_experts_against_fp64(kind, scale_input, weighted, recompute):
    """Weights on the input, on the output and on the activation; empty experts and a tail."""
    act, options = kind(), {"single_grouped_weight": True, "single_grouped_bias": True}
    columns = (1 + act.gated) * INNER
    exact = fz.Sequential(
        fz.Dispatch(EXPERTS, scale_input=scale_input, recompute_rows=recompute),
        fz.GroupedLinear(EXPERTS, HIDDEN, columns, **options),
        act,
        fz.GroupedLinear(EXPERTS, INNER, HIDDEN, **options),
        fz.Combine(weighted=weighted),
    )
    for p in exact.parameters():
        torch.nn.init.normal_(p, std=0.1)
    block = copy.deepcopy(exact).bfloat16().cuda()
    exact = exact.double()
    exact.load_state_dict({k: v.double() for k, v in block.state_dict().items()})
    x, dy = torch.randn(2, 700, HIDDEN).bfloat16()
    probs, ids = torch.rand(700, TOP_K), torch.randint(-2, EXPERTS - 3, (700, TOP_K))

    def gradients(module, dtype, device):
        given, weights = x.to(device, dtype).requires_grad_(), probs.to(device).requires_grad_()
        y = module(given, weights, ids.to(device))
        leaves = [given, weights, *module.parameters()]
        return [y, *torch.autograd.grad(y, leaves, dy.to(device, dtype))]

    want, got = gradients(exact, torch.float64, "cpu"), gradients(block, torch.bfloat16, "cuda")
    if torch.cuda.get_device_capability()[0] == 9:
        assert block.plan.fired == ("moe_experts_sm90",)
    for mine, theirs in zip(got, want, strict=True):
        assert not mine.isnan().any()
        error = (mine.cpu().double() - theirs).norm() / theirs.double().norm()
        assert error < 0.02, error


def test_bitwise_over_20_runs():
    block = make_block(shared=True).bfloat16().cuda()
    x = torch.randn(2000, HIDDEN, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn_like(x)
    first = step(block, x, dy)
    for _ in range(20):
        ref.assert_equal(step(block, x, dy), first)


def test_recomputed_rows_give_the_same_bits():
    one, two = make_block().bfloat16().cuda(), make_block(recompute=True).bfloat16().cuda()
    two.load_state_dict(one.state_dict())
    x = torch.randn(900, HIDDEN, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn_like(x)
    ref.assert_equal(step(one, x, dy), step(two, x, dy))
    if torch.cuda.get_device_capability()[0] == 9:
        assert one.plan.fired == two.plan.fired == ("moe_experts_sm90",)


def test_no_synchronisation():
    block = make_block(shared=True).bfloat16().cuda()
    x = torch.randn(500, HIDDEN, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn_like(x)
    step(block, x, dy)
    torch.cuda.synchronize()
    with never_waiting():
        step(block, x, dy)


def test_cuda_graph_replayed_with_other_tokens():
    """The splits change from replay to replay."""
    block = make_block(shared=True).bfloat16().cuda()
    x = torch.randn(700, HIDDEN, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn_like(x)
    graph, captured = graph_of(lambda: step(block, x, dy))
    for seed in range(4):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x) + seed * torch.randn(HIDDEN, device="cuda"))
        graph.replay()
        replayed = [t.clone() for t in captured]
        ref.assert_equal(replayed, step(block, x, dy))


def balanced_step(block, x, dy):
    """Output, losses and gradients; then the router's bias is moved by the load."""
    y, balance, z, load = block(x)
    outputs = y, balance, z
    dys = dy, torch.ones_like(balance), torch.ones_like(z)
    grads = torch.autograd.grad(outputs, [x, *block.parameters()], dys)
    block[0].update_expert_bias(load, rate=0.05)
    return [*(t.detach() for t in outputs), *grads, block[0].expert_bias]


def balanced_block():
    block = make_block(score_function="sigmoid", expert_bias=True, **LOSSES).bfloat16().cuda()
    block[1].set_extra_output_channel(0, "load")
    return block


def test_balancing_in_a_graph():
    """Losses and the update of the bias too are captured, and see the tokens of each replay."""
    block = balanced_block()
    x = torch.randn(700, HIDDEN, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn_like(x)
    graph, captured = graph_of(lambda: balanced_step(block, x, dy))
    eager = copy.deepcopy(block)
    for seed in range(4):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x) + seed * torch.randn(HIDDEN, device="cuda"))
        before = block[0].expert_bias.clone()
        graph.replay()
        assert not torch.equal(block[0].expert_bias, before)
        ref.assert_equal(captured, balanced_step(eager, x, dy))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_block():
    """Router, losses, experts and sum as one graph, for any number of tokens."""
    block = balanced_block()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for tokens in (300, 77, 1000):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16().requires_grad_()
        results = []
        for call in (block, compiled):
            y, balance, z, load = call(x)
            loss = y.float().sin().sum() + balance + z
            grads = torch.autograd.grad(loss, [x, *block.parameters()])
            results.append([t.detach().double() for t in (y, balance, z, load, *grads)])
        for mine, theirs in zip(*results, strict=True):
            assert (mine - theirs).norm() <= 1e-3 * theirs.norm()
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3


def waits_first(patch, owner, name):
    """Let a function of `owner` never read ahead."""
    function = getattr(owner, name)
    patch.setattr(owner, name, lambda *a, **k: function(*a, **{**k, "reads_ahead": False}))


@pytest.mark.parametrize("tokens", [1, 4, 9, 64])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["", "fp8"])
def test_decoding_in_a_graph(tokens, router, recipe, monkeypatch):
    """What is read before the kernel ahead has ended is that of this layer and of this replay."""
    blocks = [make_block(**ROUTERS[router]).bfloat16().cuda() for _ in range(12)]
    if recipe is not None:
        blocks = [fz.quantize_(block, recipe, usage="inference") for block in blocks]
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()

    @torch.no_grad()
    def layers():
        found = [x]
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            for block in blocks:
                found.append(block(found[-1]) + found[-1])
        return found[1:]

    graph, captured = graph_of(layers)
    for seed in range(5):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        got = [*[t.clone() for t in captured], *layers()]
        with monkeypatch.context() as patch:
            waits_first(patch, WeightProducts, "forward")
            waits_first(patch, kernels, "rows_spec")
            ref.assert_equal(got, 2 * layers())


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_few_tokens(tokens):
    block = balanced_block()
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16().requires_grad_()
    got = balanced_step(block, x, torch.ones_like(x))
    for t in got[:-1]:
        assert torch.isfinite(t).all()
        assert tokens or not t.any()


def test_capacity_and_foreign_ids():
    options = {"bias": False, "single_grouped_weight": True}

    def experts(device, dtype):
        torch.manual_seed(3)
        return fz.Sequential(
            fz.Dispatch(EXPERTS, capacity_factor=0.8, scale_input=True),
            fz.GroupedLinear(EXPERTS, HIDDEN, 2 * INNER, **options),
            fz.SwiGLU(),
            fz.GroupedLinear(EXPERTS, INNER, HIDDEN, **options),
            fz.Combine(),
        ).to(device, dtype)

    x, dy = torch.randn(500, HIDDEN).bfloat16(), torch.randn(500, HIDDEN).bfloat16()
    ids, probs = torch.randint(0, EXPERTS + 4, (500, TOP_K)), torch.rand(500, TOP_K)
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        mlp = experts("cpu", torch.bfloat16).to(device, dtype)
        a, p = x.to(device, dtype).requires_grad_(), probs.to(device).requires_grad_()
        y = mlp(a, p, ids.to(device))
        grads = torch.autograd.grad(y, [a, p, *mlp.parameters()], dy.to(device, dtype))
        results.append([t.detach().cpu().double() for t in (y, *grads)])
    for want, got in zip(*results, strict=True):
        assert (got - want).norm() / want.norm() < 0.04
