"""Products of rows found by index: the bits of the same kernels on rows that lie in order."""

import math

import pytest
import torch

from fusible.kernels import sm90
from fusible.kernels.sm90 import ops
from fusible.kernels.sm90.spec import Tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]

DEVICE = "cuda"
# Just under, at and just over the tiles' 128 and 256 rows; empty; one row; skewed.
SIZES = (127, 0, 128, 129, 1, 191, 192, 0, 193, 255, 256, 257, 700)
TAIL, TOKENS = 70, 301
SWIGLU = ("swiglu", 0, 0.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def _poisoned():
    """New tensors begin as NaN, so that an element that nothing wrote is seen."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


def ends_of(sizes):
    return torch.tensor(sizes).cumsum(0).to(DEVICE, torch.int32)


def random(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def index_of(sizes=SIZES, tail=TAIL, tokens=TOKENS):
    """A token for each row; past the last group what must not be read."""
    index = torch.randint(tokens, (sum(sizes) + tail,), dtype=torch.int32)
    index[sum(sizes) :] = torch.tensor((-(2**31), 2**31 - 1), dtype=torch.int32).repeat(tail)[:tail]
    return index.to(DEVICE)


def in_order(x, index, live):
    """The rows that the index names; NaN past the last group."""
    rows = x.new_full((len(index), x.shape[1]), math.nan)
    rows[:live] = x[index[:live].long()]
    return rows


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert not a.isnan().any()
        assert torch.equal(a, b), f"{(a != b).float().mean():.2%} of the elements differ"


def stored(w, how):
    """Weights [E, N, K] as given, with N contiguous, or as separate tensors in random places."""
    if how == "n":
        return [w.transpose(1, 2).contiguous().transpose(1, 2)]
    if how == "separate":
        return [one.clone() for one in w]
    return [w]


every_tile = pytest.mark.parametrize(
    "tile",
    [
        Tile(128, 128, True, m, n, dynamic, gatherers=warps)
        for m, n in ((2, 1), (1, 1), (1, 2))
        for dynamic in (False, True)
        for warps in (2, 4)
        if n == 1 or warps == 4
    ],
    ids=lambda tile: f"{tile}{tile.gatherers}",
)


@every_tile
@pytest.mark.parametrize("how", ["k", "n", "separate"])
def test_activation(tile, how):
    if tile.cluster_n > 1:
        pytest.skip("blocks that share rows would each need them all")
    hidden, inner, live = 328, 264, sum(SIZES)
    x, index, ends = random(TOKENS, hidden), index_of(), ends_of(SIZES)
    scales = torch.rand(len(index), device=DEVICE)
    w = stored(random(len(SIZES), 2 * inner, hidden, scale=hidden**-0.5), how)
    got = ops.grouped_gemm_glu(x, w, ends, None, scales, *SWIGLU, True, index, tile=tile)
    want = ops.grouped_gemm_glu(
        in_order(x, index, live), w, ends, None, scales, *SWIGLU, True, tile=tile
    )
    assert_same(got, want)
    assert (got[1][live:] == 0).all()
    _, alone = ops.grouped_gemm_glu(x, w, ends, None, scales, *SWIGLU, False, index, tile=tile)
    assert torch.equal(alone, want[1])


@every_tile
@pytest.mark.parametrize("how", ["k", "separate"])
def test_activation_backward(tile, how):
    if tile.cluster_n > 1:
        pytest.skip("blocks that share rows would each need them all")
    hidden, inner, live = 328, 264, sum(SIZES)
    dy, index, ends = random(TOKENS, hidden), index_of(), ends_of(SIZES)
    scales, preact = torch.rand(len(index), device=DEVICE), random(len(index), 2 * inner)
    w = stored(random(len(SIZES), hidden, inner, scale=hidden**-0.5), how)
    options = (w, ends, preact, scales, *SWIGLU)
    got = ops.grouped_gemm_dglu(dy, *options, index, tile=tile)
    want = ops.grouped_gemm_dglu(in_order(dy, index, live), *options, tile=tile)
    assert_same(got, want)


@every_tile
@pytest.mark.parametrize("which", ["dy", "x"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weight_gradient(tile, which, out_dtype):
    if (tile.cluster_n > 1 and which == "dy") or (tile.cluster_m > 1 and which == "x"):
        pytest.skip("blocks that share rows would each need them all")
    hidden, inner, live = 328, 264, sum(SIZES)
    index, ends = index_of(), ends_of(SIZES)
    dy, x = random(len(index), inner), random(len(index), hidden)
    dy[live:], x[live:] = math.nan, math.nan
    tokens = random(TOKENS, inner if which == "dy" else hidden)
    # A token of one group only is NaN: no other group may see it, in whatever memory it was.
    index[: SIZES[0]][index[: SIZES[0]] == 5] = 6
    index[SIZES[0] : live][index[SIZES[0] : live] == 5] = 6
    index[3] = 5
    tokens[5] = math.nan
    given = in_order(tokens, index, live)
    start = random(len(SIZES), inner, hidden).to(out_dtype)
    want, got = start.clone(), start.clone()
    if which == "dy":
        ops.grouped_wgrad_([want], given, x, ends, True, tile=tile)
        ops.grouped_wgrad_([got], tokens, x, ends, True, index, None, tile=tile)
    else:
        ops.grouped_wgrad_([want], dy, given, ends, True, tile=tile)
        ops.grouped_wgrad_([got], dy, tokens, ends, True, None, index, tile=tile)
    assert got[0].isnan().any()
    assert torch.equal(want[0].isnan(), got[0].isnan())
    assert_same([got[1:]], [want[1:]])
    assert torch.equal(got[1], start[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_bias_and_pitch(dtype):
    sizes, hidden, inner = (300, 0, 77), 192, 128
    live = sum(sizes)
    wide = random(TOKENS, 2 * hidden, dtype=dtype)
    x, index, ends = wide[:, :hidden], index_of(sizes), ends_of(sizes)
    scales = torch.rand(len(index), device=DEVICE).to(dtype)
    w, bias = random(3, 2 * inner, hidden, dtype=dtype), random(3, 2 * inner, dtype=dtype)
    got = sm90.grouped_gemm_glu(x, [w], ends, scales, bias=bias, interleave=8, index=index)
    ordered = in_order(x, index, live)
    want = sm90.grouped_gemm_glu(ordered, [w], ends, scales, bias=bias, interleave=8)
    assert_same(got, want)
    dy = random(len(index), inner, dtype=dtype)
    got = sm90.grouped_wgrad(dy, x, ends, torch.float32, x_index=index)
    want = sm90.grouped_wgrad(dy, ordered, ends, torch.float32)
    assert_same([got], [want])
    expected = torch.stack(
        [dy[a:b].float().T @ ordered[a:b].float() for a, b in ((0, 300), (300, 300), (300, 377))]
    )
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("sizes", [(0, 0, 0), (0, 1, 0), (5000, 0, 0), (1,) * 200], ids=str)
def test_extreme_groups(sizes):
    hidden, inner, live = 64, 64, sum(sizes)
    x, index, ends = random(TOKENS, hidden), index_of(sizes), ends_of(sizes)
    scales, dy = torch.rand(len(index), device=DEVICE), random(len(index), 2 * inner)
    w = random(len(sizes), 2 * inner, hidden)
    ordered = in_order(x, index, live)
    got = sm90.grouped_gemm_glu(x, [w], ends, scales, index=index)
    assert_same(got, sm90.grouped_gemm_glu(ordered, [w], ends, scales))
    got = sm90.grouped_wgrad(dy, x, ends, x_index=index)
    assert_same([got], [sm90.grouped_wgrad(dy, ordered, ends)])


def test_addresses_beyond_32_bits():
    tokens, hidden = 330_000, 8192  # 5.4 GB
    x = torch.empty(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
    chosen = torch.tensor((tokens - 1, 0, 262_144, 131_071, 262_143), dtype=torch.int32)
    index = chosen.repeat(40).to(DEVICE)
    x[chosen.tolist()] = random(5, hidden)
    scales, ends, w = torch.rand(200, device=DEVICE), ends_of((200,)), random(1, 128, hidden)
    ordered = x[index.long()]
    got = sm90.grouped_gemm_glu(x, [w], ends, scales, index=index)
    assert_same(got, sm90.grouped_gemm_glu(ordered, [w], ends, scales))
    got = sm90.grouped_wgrad(got[0], x, ends, x_index=index)
    assert got.isfinite().all()
    del x


def test_same_bits_every_time_and_in_a_graph():
    hidden, inner = 512, 256
    x, index, ends = random(TOKENS, hidden), index_of(), ends_of(SIZES)
    scales = torch.rand(len(index), device=DEVICE)
    w = random(len(SIZES), 2 * inner, hidden)

    def step():
        preact, out = sm90.grouped_gemm_glu(x, [w], ends, scales, index=index)
        return preact, out, sm90.grouped_wgrad(preact, x, ends, x_index=index)

    first = step()
    for _ in range(20):
        assert_same(step(), first)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    # Replayed with other tokens in other groups.
    sizes = tuple(reversed(SIZES))
    index.copy_(index_of(sizes))
    ends.copy_(ends_of(sizes))
    x.copy_(random(TOKENS, hidden))
    graph.replay()
    torch.cuda.synchronize()
    assert_same(outs, step())


def test_no_synchronisation():
    x, index, ends = random(TOKENS, 64), index_of(), ends_of(SIZES)
    scales, w = torch.rand(len(index), device=DEVICE), random(len(SIZES), 128, 64)

    def step():
        preact, _ = sm90.grouped_gemm_glu(x, [w], ends, scales, index=index)
        sm90.grouped_wgrad(preact, x, ends, x_index=index)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_ops_pass_opcheck():
    x, index, ends = random(TOKENS, 64), index_of(), ends_of(SIZES)
    scales, w = torch.rand(len(index), device=DEVICE), [random(len(SIZES), 128, 64)]
    preact, w2 = random(len(index), 128), [random(len(SIZES), 64, 64)]
    index[sum(SIZES) :] = 0  # opcheck runs fakes and clones, not only kernels
    fusible = torch.ops.fusible
    for op, given in (
        (fusible.sm90_grouped_gemm_glu, (x, w, ends, None, scales, *SWIGLU, True, index)),
        (fusible.sm90_grouped_gemm_dglu, (x, w2, ends, preact, scales, *SWIGLU, index)),
        (fusible.sm90_grouped_wgrad, (preact, x, ends, None, None, index)),
        (fusible.sm90_grouped_wgrad, (x, preact, ends, None, index, None)),
    ):
        torch.library.opcheck(op, given)


def test_bad_index_is_refused():
    x, index, ends = random(TOKENS, 64), index_of(), ends_of(SIZES)
    scales, w = torch.rand(len(index), device=DEVICE), random(len(SIZES), 128, 64)
    for bad, sentence in (
        (index.long(), "index must be a contiguous int32 tensor"),
        (index[::2], "index must be a contiguous int32 tensor"),
        (index.cpu(), "index must be on cuda"),
        (index[:-1], "scales must be contiguous with one value for each"),
    ):
        with pytest.raises(ValueError, match=sentence):
            sm90.grouped_gemm_glu(x, [w], ends, scales, index=bad)
    dy = random(len(index), 128)
    with pytest.raises(ValueError, match="one of dy_index and x_index must be None"):
        sm90.grouped_wgrad(dy, x, ends, dy_index=index, x_index=index)
    with pytest.raises(ValueError, match="dy and x must share dtype, rows and device"):
        sm90.grouped_wgrad(dy, x, ends, x_index=index[:-1])
