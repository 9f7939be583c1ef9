"""Products of few rows with weights of 16 bits on Hopper, whose reduction warps divide."""

import pytest
import torch
from checks import graph_of, hopper, never_waiting

import fusible as fz
from fusible.kernels import few_rows, grouped
from fusible.kernels.few_rows.spec import divided_rows
from fusible.kernels.glu import Glu

pytestmark = [*hopper, pytest.mark.usefixtures("poisoned")]

SIZES = [
    ((1, 0, 0, 0, 0, 0, 0, 0), 0),
    ((0, 0, 3, 0, 0, 1, 0, 0), 2),
    ((0, 0, 0, 0, 0, 0, 0, 0), 3),
    ((0, 8, 0, 0, 0, 0, 0, 0), 0),
    ((1, 1, 1, 1, 1, 1, 1, 0), 1),
]
FEATURES = [(64, 128), (136, 96), (8, 8), (1536, 2048), (2048, 768), (96, 2880), (176, 40)]
BITS = {torch.bfloat16: 8, torch.float16: 11}


def ends_of(sizes):
    return torch.tensor(sizes, device="cuda").cumsum(0).int()


def product(x, values, sizes):
    """In FP64, with zeros in the rows past the last group."""
    out = x.new_zeros(len(x), values.shape[1], dtype=torch.float64)
    start = 0
    for size, w in zip(sizes, values, strict=True):
        out[start : start + size] = x[start : start + size].double() @ w.double().T
        start += size
    return out


def case(features, sizes, tail, dtype, groups=None):
    groups = groups or len(sizes)
    w = (torch.randn(groups, *features, device="cuda") * features[1] ** -0.5).to(dtype)
    x = torch.randn(sum(sizes) + tail, features[1], device="cuda").to(dtype)
    x[sum(sizes) :] = torch.nan
    return x, w


def assert_near(got, want, live):
    """One rounding of each element, and of FP32 sums."""
    assert (got[live:] == 0).all()
    error = (got.double() - want).abs()
    unit = 2.0 ** -BITS[got.dtype]
    assert (error <= unit * want.abs() + 1e-5 * want.abs().max().clamp(min=1)).all()


@pytest.mark.parametrize(("sizes", "tail"), SIZES, ids=str)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_products(dtype, features, separate, sizes, tail):
    columns, live = features[0], sum(sizes)
    x, w = case(features, sizes, tail, dtype)
    weights = [t.clone() for t in w.unbind(0)] if separate else [w]
    bias = torch.randn(len(sizes), columns, device="cuda").to(dtype)
    scale, ends = torch.rand(live + tail, device="cuda"), ends_of(sizes)
    exact = product(x, w, sizes)
    of_row = bias.double().repeat_interleave(torch.tensor(sizes, device="cuda"), 0)

    assert_near(few_rows.inference_mm(x, weights, ends), exact, live)
    for scales in (None, scale, scale.to(dtype), scale.double()):
        got = few_rows.inference_mm(x, weights, ends, bias, scales)
        want = exact.clone()
        of_scales = 1 if scales is None else scales[:live, None].double()
        want[:live] += of_row * of_scales
        assert_near(got, want, live)

    want = exact.clone()
    want[:live] += of_row
    for glu in (
        Glu("swiglu"),
        Glu("swiglu", 8),
        Glu("srelu"),
        Glu("clamped_qgeglu", 8, 1.0, 1.7, 1.0),
    ):
        if columns % (glu.sides * max(glu.interleave, 8)):
            continue
        for scales, given, preact in ((scale, bias, want), (None, None, exact)):
            got = few_rows.inference_glu(x, weights, ends, scales, glu, given)
            act = glu.forward(preact.float(), scales).double()
            act[live:] = 0
            assert (got[live:] == 0).all()
            assert (got.double() - act).norm() <= 3e-3 * act.norm()


@pytest.mark.parametrize("features", [(1536, 2048), (2048, 768)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 64])
def test_rows_of_a_router(tokens, features):
    """A row has the same bits beside any others, as long as they are few."""
    ids = torch.stack([torch.randperm(128)[:8] for _ in range(tokens)]).flatten().sort().values
    sizes = torch.bincount(ids, minlength=128).tolist()
    x, w = case(features, sizes, 0, torch.bfloat16)
    got = few_rows.inference_mm(x, [w], ends_of(sizes))
    if len(x) > divided_rows(128, *features):
        assert got is NotImplemented
        got = grouped.inference_mm(x, [w], ends_of(sizes))
        assert torch.equal(got, grouped.grouped_mm(x, [w], ends_of(sizes)))
        assert_near(got, product(x, w, sizes), len(x))
        return
    assert_near(got, product(x, w, sizes), len(x))
    for i, group in enumerate(ids.tolist()):
        alone = [int(e == group) for e in range(128)]
        one = few_rows.inference_mm(x[i : i + 1].contiguous(), [w], ends_of(alone))
        assert torch.equal(one[0], got[i])


def test_nan_and_infinity_come_out():
    x, w = case((64, 128), (2, 2), 0, torch.bfloat16, groups=4)
    w[1, 5, 7], w[0, 3, 0], x[1, 9] = torch.nan, torch.inf, torch.inf
    sizes = (2, 2, 0, 0)
    got = few_rows.inference_mm(x, [w], ends_of(sizes))
    want = product(x, w, sizes)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


@pytest.mark.parametrize("separate", [False, True])
def test_one_group_and_many(separate):
    for groups in (1, 300, 1024):
        sizes = [0] * groups
        sizes[-1] += 1
        sizes[groups // 2] += 4 if groups > 1 else 0
        x, w = case((32, 64), sizes, min(2, groups - 1), torch.bfloat16)
        weights = [t.clone() for t in w.unbind(0)] if separate and groups < 500 else [w]
        got = few_rows.inference_mm(x, weights, ends_of(sizes))
        assert_near(got, product(x, w, sizes), sum(sizes))


def test_bits_repeat_and_graphs_take_other_groups():
    x, w = case((256, 512), [1] * 8, 0, torch.bfloat16)
    sizes = torch.tensor([1] * 8, device="cuda", dtype=torch.int32)
    with never_waiting():
        graph, got = graph_of(lambda: grouped.inference_mm(x, [w], sizes.cumsum(0).int()))
    for of_case in ([1] * 8, [8] + [0] * 7, [0, 1, 2, 3, 0, 0, 0, 0]):
        sizes.copy_(torch.tensor(of_case))
        graph.replay()
        assert_near(got, product(x, w, of_case), sum(of_case))
        assert torch.equal(got, grouped.inference_mm(x, [w], sizes.cumsum(0).int()))


@pytest.fixture
def launches(monkeypatch):
    """What is launched to multiply few rows."""
    made, launch = [], few_rows.launch
    monkeypatch.setattr(few_rows, "launch", lambda *args: made.append(args) or launch(*args))
    return made


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_experts(dtype, bias, single, launches):
    """Few tokens have other bits than among many, but not under `batch_invariant`."""
    torch.manual_seed(0)
    options = {"dtype": dtype, "device": "cuda", "bias": bias, "single_grouped_weight": single}
    experts = fz.Sequential(
        fz.Dispatch(16),
        fz.GroupedLinear(16, 128, 512, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(16, 256, 128, **options),
        fz.Combine(),
    )
    x, probs = torch.randn(64, 128, device="cuda").to(dtype), torch.rand(64, 4, device="cuda")
    ids = torch.stack([torch.randperm(18)[:4] for _ in range(64)]).cuda() - 1
    with torch.no_grad():
        among_many = experts(x, probs, ids)
        assert not launches
        for tokens in (1, 3, 4, 5, 64):
            given = x[:tokens], probs[:tokens], ids[:tokens]
            want = among_many[:tokens]
            with fz.batch_invariant():
                assert torch.equal(experts(*given), want)
            assert not launches
            got = experts(*given)
            assert len(launches) == (2 if tokens <= 4 else 0)
            assert torch.equal(got, want) or tokens <= 4
            assert (got - want).norm() <= 1e-2 * want.norm()
            graph, captured = graph_of(lambda given=given: experts(*given))
            graph.replay()
            assert torch.equal(captured, got)
            launches.clear()
    experts(x[:1].clone().requires_grad_(), probs[:1], ids[:1])
    assert not launches


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_linears_and_mlps(rows, launches):
    """Ops without a block, which otherwise run without contexts."""
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    fc1, fc2 = fz.GroupedLinear(8, 128, 512, **options), fz.GroupedLinear(8, 256, 128, **options)
    x, sizes = torch.randn(rows, 128, device="cuda").bfloat16(), [0, 0, 0, rows - 1, 0, 1, 0, 0]
    sizes, scales = torch.tensor(sizes, device="cuda"), torch.rand(rows, device="cuda")
    for module, given in (
        (fc1, (sizes,)),
        (fz.Sequential(fc1, fz.ScaledSwiGLU()), (sizes, scales)),
        (fz.Sequential(fc1, fz.SwiGLU(), fc2), (sizes, sizes)),
    ):
        with torch.no_grad():
            with fz.batch_invariant():
                want = module(x, *given)
            assert not launches
            got = module(x, *given)
        few = rows <= 8
        assert len(launches) == few * (2 if len(module.plan.basic_ops) == 3 else 1)
        assert torch.equal(got, want) or few
        assert (got - want).norm() <= 1e-2 * want.norm()
        launches.clear()
        module(x, *given)
        assert not launches
