"""Values of the Hopper kernels against FP32 math, where every output starts as NaN."""

import math

import pytest
import reference as ref
import torch
import torch.nn.functional as F
from checks import graph_of, hopper, never_waiting
from sm90_in_tile import in_tile

from fusible.activations import ACTIVATIONS
from fusible.kernels import grouped
from fusible.kernels.glu import Glu
from fusible.kernels.grouped.vectors import launch_tile_sums
from fusible.kernels.sm90 import checked_products as ops
from fusible.kernels.sm90 import spec, tiles

pytestmark = [*hopper, pytest.mark.usefixtures("poisoned")]

DEVICE = "cuda"
QGEGLU = {"activation": "clamped_qgeglu", "limit": 1.5, "alpha": 1.702, "offset": 1.0}
SWIGLU = {"activation": "swiglu"}
# Just under, at and just over one to four times a warpgroup's 64 rows; empty; one row; skewed.
SIZES = (127, 0, 128, 129, 1, 191, 192, 0, 193, 63, 64, 65, 255, 256, 257, 700)
TAIL = 70


def ends_of(sizes):
    return torch.tensor(sizes).cumsum(0).to(DEVICE, torch.int32)


def groups(sizes):
    start = 0
    for e, size in enumerate(sizes):
        yield e, slice(start, start + size)
        start += size


def random(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def rows(sizes, tail, columns, dtype=torch.bfloat16):
    """Random rows, NaN past the last group."""
    x = random(sum(sizes) + tail, columns, dtype=dtype)
    x[sum(sizes) :] = math.nan
    return x


def assert_close(actual, expected, tolerance=4e-3):
    assert actual.shape == expected.shape
    assert not actual.isnan().any(), f"{int(actual.isnan().sum())} NaN"
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert error < tolerance, f"relative error {error:.2e}"


def split(preact, interleave):
    """Gate and linear columns."""
    if interleave == 0:
        return preact.chunk(2, dim=-1)
    blocks = preact.unflatten(-1, (-1, 2, interleave))
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


def clamped(gate, linear, limit, alpha, offset):
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return (linear + offset) * gate * torch.sigmoid(alpha * gate)


def soft_capped(gate, linear, beta1, beta2, _):
    gate = beta1 * torch.tanh(gate / beta1) * torch.sigmoid(gate)
    return gate * beta2 * torch.tanh(linear / beta2)


# Of a column, and of a gate, which multiplies its linear column.
FUNCTIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
GATES = {"glu": torch.sigmoid, "swiglu": F.silu} | {
    f"{name[:-2]}glu": FUNCTIONS[name] for name in ("gelu", "qgelu", "relu", "srelu")
}
PAIRS = {"clamped_qgeglu": clamped, "situglu": soft_capped}


def glu(preact, interleave, activation="swiglu", limit=0.0, alpha=0.0, offset=0.0):
    """The activation of pre-activations, gated or not."""
    if activation in FUNCTIONS:
        return FUNCTIONS[activation](preact)
    gate, linear = split(preact, interleave)
    if activation in GATES:
        return GATES[activation](gate) * linear
    return PAIRS[activation](gate, linear, limit, alpha, offset)


def product(x, w, sizes, bias=None, scale=None):
    """``x @ w[e].T + bias[e] * scale`` in FP32, zero past the last group."""
    y = torch.zeros(x.shape[0], w[0].shape[0], device=DEVICE)
    for e, part in groups(sizes):
        y[part] = x[part].float() @ w[e].float().T
        if bias is not None:
            factor = 1.0 if scale is None else scale[part].float()[:, None]
            y[part] += bias[e].float() * factor
    return y


def stored(w, how):
    """Weights [E, N, K] as given, with N contiguous, or as separate tensors in random places."""
    if how == "n":
        return [w.transpose(1, 2).contiguous().transpose(1, 2)]
    if how == "separate":
        return [one.clone() for one in w]
    return [w]


every_tile = pytest.mark.parametrize(
    ("kind", "tile"),
    [(kind, tile) for kind, choices in tiles.TILES.items() for tile in choices],
    ids=str,
)


def gated_tiles(interleave, how="k", bias=False):
    """The tiles that a product with an activation may get."""
    major = "n" if how == "n" else "k"
    choices = tiles.TILES["glu"]
    return [tile for tile in choices if tiles.supports_tile("glu", tile, major, interleave, bias)]


@pytest.mark.parametrize("n", [64, 128])
def test_rows_of_a_low_tile_do_not_mix(n):
    """Those past its 16 are read, too, whatever they hold: the bits are those of a tile of 64."""
    sizes = (3, 16, 0, 17, 1, 40)
    ends, x = ends_of(sizes), rows(sizes, 5, 256)
    w1, w2 = random(len(sizes), 256, 256), random(len(sizes), 256, 128)
    x[3:19], w1[3], w2[3] = math.nan, math.inf, math.nan
    found = []
    for tile in (spec.Tile(16, n), spec.Tile(64, n)):
        with in_tile(tile):
            kept, act = ops.grouped_glu(x, [w1], ends, None, Glu("swiglu"), None, True)
            found.append((kept, act, ops.grouped_mm(act, [w2], ends)))
    for low, high in zip(*found, strict=True):
        for e, part in groups(sizes):
            assert torch.equal(low[part], high[part]) != (e in (1, 3))
            assert low[part].isfinite().all() == (e not in (1, 3))


@pytest.mark.parametrize(
    "tile",
    [tile for tile in tiles.TILES["store"] if spec.Spec("store", tile).can_read_ahead],
    ids=str,
)
@pytest.mark.parametrize("how", ["k", "n"])
@pytest.mark.parametrize("inner", [64, 256, 1536])
@pytest.mark.parametrize(
    "sizes", [(1,) * 8 + (0,) * 56, (0,) * 8, (70, 0, 200, 3), (16,) * 300], ids=len
)
def test_weights_are_read_ahead(tile, how, inner, sizes):
    """In a captured graph, right behind the product that makes the rows; the same bits."""
    ends, x = ends_of(sizes), rows(sizes, 5, 512)
    w1, bias = random(len(sizes), 2 * inner, 512), random(len(sizes), 328)
    w2 = [stored(random(len(sizes), 328, inner), how) for _ in range(4)]

    def chain(reads_ahead):
        found = []
        for w in w2:
            _, act = ops.grouped_glu(x, [w1], ends, None, Glu("swiglu"), None, False)
            found.append(ops.grouped_mm(act, w, ends, bias, reads_ahead=reads_ahead))
        return found

    with torch.no_grad(), in_tile(tile):
        want = chain(False)
        chain(True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(True)
        for _ in range(3):
            for t in got:
                t.fill_(math.nan)
            graph.replay()
            assert all([torch.equal(mine, own) for mine, own in zip(got, want, strict=True)])


# A tile of each width that an activation's backward may get.
WIDTHS_OF_DGLU = list({tile.n: tile for tile in tiles.TILES["dglu"]}.values())
WIDTHS_OF_DACT = list({tile.n: tile for tile in tiles.TILES["dact"]}.values())


@every_tile
@pytest.mark.parametrize("how", ["k", "n", "separate"])
def test_every_tile(kind, tile, how):
    if kind == "glu" and tile not in gated_tiles(0, how):
        pytest.skip("not a tile of this product")
    sizes, hidden, inner = SIZES, 328, 264
    ends = ends_of(sizes)
    x = rows(sizes, TAIL, hidden)
    if kind == "store":
        w = random(len(sizes), inner, hidden, scale=hidden**-0.5)
        with in_tile(tile):
            y = ops.grouped_mm(x, stored(w, how), ends)
        assert_close(y, product(x, w, sizes))
        assert (y[sum(sizes) :] == 0).all()
    elif kind == "wgrad":
        dy = rows(sizes, TAIL, inner)
        out = random(len(sizes), inner, hidden)
        outs = stored(out, "k" if how == "n" else how)
        with in_tile(tile):
            ops.grouped_wgrad_(outs, dy, x, ends)
        expected = torch.stack([dy[p].float().T @ x[p].float() for _, p in groups(sizes)])
        got = torch.stack(list(outs)) if len(outs) > 1 else outs[0]
        assert_close(got, expected)
        assert (got[1] == 0).all()
    else:
        scales = torch.rand(x.shape[0], device=DEVICE)
        scales[sum(sizes) :] = math.nan
        options = {} if "glu" in kind else {"activation": "srelu"}
        if kind in spec.FORWARD:
            of = _glu(options, 0)
            w = random(len(sizes), of.sides * inner, hidden, scale=hidden**-0.5)
            with in_tile(tile):
                preact, out = ops.grouped_glu(x, stored(w, how), ends, scales, of)
            expected = product(x, w, sizes)
            assert_close(preact, expected)
            expected = glu(expected, 0, **options) * scales[:, None]
            expected[sum(sizes) :] = 0
            assert_close(out, expected)
        else:
            _check_dglu(tile, sizes, hidden, inner, how, 0, options)


def _glu(options, interleave):
    """An activation of those options."""
    return Glu(**{**SWIGLU, **options}, interleave=interleave)


def _check_dglu(
    tile, sizes, hidden, inner, how, interleave, options, dtype=torch.bfloat16, scaled=True
):
    ends, columns = ends_of(sizes), _glu(options, interleave).sides * inner
    dy, preact = rows(sizes, TAIL, hidden, dtype), rows(sizes, TAIL, columns, dtype)
    scales = torch.rand(dy.shape[0], device=DEVICE)
    scales[sum(sizes) :] = math.nan
    w = random(len(sizes), hidden, inner, dtype=dtype, scale=hidden**-0.5)
    # The parameter is [hidden, inner]; "k" and "n" here name its own order.
    with in_tile(tile):
        d_preact, act, d_scales = ops.grouped_dglu(
            dy, stored(w, how), ends, preact, scales if scaled else None, _glu(options, interleave)
        )
    live = sum(sizes)
    if not scaled:
        assert d_scales.numel() == 0
        scales = torch.ones_like(scales)
    d_act = product(dy, [one.T for one in w], sizes)[:live]
    leaf = preact[:live].double().requires_grad_()
    factor = scales[:live].double().requires_grad_()
    value = glu(leaf, interleave, **options) * factor[:, None]
    value.backward(d_act.double())
    pairs = [(act, value.detach()), (d_preact, leaf.grad)]
    if scaled:
        pairs.append((d_scales[:, None], factor.grad[:, None]))
    for actual, expected in pairs:
        assert (actual[live:] == 0).all()
        assert_close(actual[:live], expected)


@pytest.mark.parametrize(
    ("kind", "tile"),
    [(kind, tile) for kind in ("glu", "dglu") for tile in tiles.TILES[kind]],
    ids=str,
)
def test_every_tile_with_alternating_columns(kind, tile):
    """GPT-OSS: single columns alternate, N is contiguous, a bias, a clamped gate."""
    sizes, hidden, inner = SIZES, 328, 264
    if kind == "dglu":
        _check_dglu(tile, sizes, hidden, inner, "n", 1, QGEGLU)
        return
    x, w = rows(sizes, TAIL, hidden), random(len(sizes), 2 * inner, hidden, scale=hidden**-0.5)
    scales, bias = torch.rand(x.shape[0], device=DEVICE), random(len(sizes), 2 * inner)
    scales[sum(sizes) :] = math.nan
    if tile not in gated_tiles(1, "n", bias=True):
        pytest.skip("not a tile of this product")
    with in_tile(tile):
        preact, out = ops.grouped_glu(
            x, stored(w, "n"), ends_of(sizes), scales, _glu(QGEGLU, 1), bias
        )
    expected = product(x, w, sizes, bias)
    assert_close(preact, expected)
    expected = glu(expected, 1, **QGEGLU) * scales[:, None]
    expected[sum(sizes) :] = 0
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("interleave", [0, 1, 2, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("options", [{}, QGEGLU], ids=["swiglu", "qgeglu"])
def test_glu_layouts(dtype, interleave, options):
    sizes, hidden, inner = (130, 0, 77, 300), 192, 512
    ends, x = ends_of(sizes), rows((130, 0, 77, 300), TAIL, 192, dtype)
    scales = torch.rand(x.shape[0], device=DEVICE)
    w = random(len(sizes), 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
    expected = product(x, w, sizes)
    for tile in gated_tiles(interleave):
        arguments = (x, [w], ends, scales, _glu(options, interleave), None)
        with in_tile(tile):
            preact, out = ops.grouped_glu(*arguments, True)
            none, same = ops.grouped_glu(*arguments, False)
        assert none.shape[0] == 0
        assert torch.equal(out, same)
        assert_close(preact, expected)
        assert_close(out, glu(expected, interleave, **options) * scales[:, None])
    for tile in WIDTHS_OF_DGLU:
        _check_dglu(tile, sizes, hidden, inner, "k", interleave, options, dtype)


EVERY = [
    (activation, interleave)
    for activation, row in ACTIVATIONS.items()
    for interleave in ((0, 32) if row.sides == 2 else (0,))
]


@pytest.mark.parametrize("scaled", [True, False], ids=["scales", "no scales"])
@pytest.mark.parametrize(("activation", "interleave"), EVERY)
def test_every_activation(activation, interleave, scaled):
    """With a bias and without, the pre-activation kept or not, on the largest tile."""
    sizes, hidden, inner = (130, 0, 77, 1, 300), 192, 352
    options = {"activation": activation}
    if activation in PAIRS:
        options |= {"limit": 1.5, "alpha": 1.25, "offset": 0.5}
    of = _glu(options, interleave)
    ends, x = ends_of(sizes), rows(sizes, TAIL, hidden)
    scales = torch.rand(x.shape[0], device=DEVICE)
    scales[sum(sizes) :] = math.nan
    scales = scales if scaled else None
    w = random(len(sizes), of.sides * inner, hidden, scale=hidden**-0.5)
    for keep, bias in ((True, None), (False, random(len(sizes), of.sides * inner))):
        expected = product(x, w, sizes, bias)
        value = glu(expected.double(), interleave, **options)
        if scaled:
            value *= scales.double()[:, None]
        value[sum(sizes) :] = 0
        may = gated_tiles(interleave, bias=bias is not None)
        tile = max(
            may if of.sides == 2 else tiles.TILES["act"], key=lambda tile: tile.slabs * tile.n
        )
        with in_tile(tile):
            preact, out = ops.grouped_glu(x, [w], ends, scales, of, bias, keep)
        assert_close(out, value)
        assert preact.shape[0] == keep * len(x)
        if keep:
            assert_close(preact, expected)
    for tile in WIDTHS_OF_DGLU if of.sides == 2 else WIDTHS_OF_DACT:
        _check_dglu(tile, sizes, hidden, inner, "k", interleave, options, scaled=scaled)


@pytest.mark.parametrize("inner", [8, 40, 96, 120, 136, 352])
def test_columns_beside_the_tile_of_an_activation_that_is_not_gated(inner):
    sizes, hidden, options = (100, 200), 72, {"activation": "gelu"}
    ends, x = ends_of(sizes), rows((100, 200), TAIL, 72)
    w = random(len(sizes), inner, hidden, scale=hidden**-0.5)
    expected = product(x, w, sizes)
    for tile in tiles.TILES["act"]:
        with in_tile(tile):
            preact, out = ops.grouped_glu(x, [w], ends, None, _glu(options, 0))
        assert_close(preact, expected)
        assert_close(out, glu(expected, 0, **options))
    for tile in tiles.TILES["dact"]:
        _check_dglu(tile, sizes, hidden, inner, "n", 0, options)


@pytest.mark.parametrize("interleave", [0, 1, 4, 32])
@pytest.mark.parametrize("inner", [8, 96, 160, 200, 224, 352])  # 200: a third of 96, by 192
def test_glu_columns_beside_the_tile(interleave, inner):
    if interleave and inner % interleave:
        pytest.skip("the layout does not exist")
    sizes, hidden = (100, 200), 72
    ends, x = ends_of(sizes), rows((100, 200), TAIL, 72)
    scales = torch.rand(x.shape[0], device=DEVICE)
    w = random(len(sizes), 2 * inner, hidden, scale=hidden**-0.5)
    expected = product(x, w, sizes)
    for tile in gated_tiles(interleave):
        for keep in (True, False):
            with in_tile(tile):
                preact, out = ops.grouped_glu(
                    x, [w], ends, scales, Glu(interleave=interleave), None, keep
                )
            if keep:
                assert_close(preact, expected)
            assert_close(out, glu(expected, interleave) * scales[:, None])
    for tile in WIDTHS_OF_DGLU:
        _check_dglu(tile, sizes, hidden, inner, "k", interleave, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_bias(dtype):
    sizes, hidden, inner = SIZES, 256, 272
    ends, x = ends_of(sizes), rows(SIZES, TAIL, 256)
    w, bias = random(len(sizes), inner, hidden, scale=0.06), random(len(sizes), inner)
    scale = torch.rand(x.shape[0], device=DEVICE).to(dtype)
    scale[sum(sizes) :] = math.nan
    assert_close(grouped.grouped_mm(x, [w], ends, bias), product(x, w, sizes, bias))
    y = grouped.grouped_mm(x, [w], ends, bias, scale)
    assert_close(y, product(x, w, sizes, bias, scale))
    assert (y[sum(sizes) :] == 0).all()
    for interleave in (0, 1, 2, 8):
        preact, out = grouped.grouped_glu(x, [w], ends, scale, _glu(QGEGLU, interleave), bias)
        expected = product(x, w, sizes, bias)
        assert_close(preact, expected)
        unscaled = glu(expected, interleave, **QGEGLU)
        expected = unscaled * scale.float()[:, None]
        expected[sum(sizes) :] = 0
        assert_close(out, expected)
        _, out = grouped.grouped_glu(x, [w], ends, None, _glu(QGEGLU, interleave), bias)
        assert_close(out, unscaled)
        _, ones = grouped.grouped_glu(
            x, [w], ends, torch.ones_like(scale), _glu(QGEGLU, interleave), bias
        )
        assert torch.equal(out, ones)


@pytest.mark.parametrize("how", ["k", "n", "separate"])
def test_transposed_weight_is_the_data_gradient(how):
    sizes = SIZES
    dy, w = rows(sizes, TAIL, 264), random(len(sizes), 264, 328, scale=0.06)
    y = grouped.grouped_mm(dy, stored(w, how), ends_of(sizes), transpose_w=True)
    assert_close(y, product(dy, [one.T for one in w], sizes))


@pytest.mark.parametrize("how", ["k", "separate"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_wgrad_accumulates(how, out_dtype):
    sizes = SIZES
    dy, x = rows(sizes, TAIL, 264), rows(sizes, TAIL, 328)
    before = random(len(sizes), 264, 328, dtype=out_dtype)
    outs = stored(before.clone(), how)
    grouped.grouped_wgrad_(outs, dy, x, ends_of(sizes), accumulate=True)
    got = torch.stack(list(outs)) if len(outs) > 1 else outs[0]
    added = torch.stack([dy[p].float().T @ x[p].float() for _, p in groups(sizes)])
    assert_close(got, before.float() + added)
    assert torch.equal(got[1], before[1])  # an empty group adds nothing
    assert grouped.grouped_wgrad(dy, x, ends_of(sizes), out_dtype).dtype == out_dtype


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tile", [*tiles.TILES["wgrad"]], ids=str)
def test_many_groups(tile, out_dtype):
    # More groups than a warp has lanes, a few of them far above the mean, some empty.
    sizes = torch.randint(0, 60, (150,))
    sizes[::40], sizes[7::50], sizes[3::9] = 700, 150, 0
    sizes = tuple(sizes.tolist())
    x, w = rows(sizes, 5, 64), random(150, 64, 64, scale=0.125)
    y = grouped.grouped_mm(x, [w], ends_of(sizes))
    assert_close(y, product(x, w, sizes))
    dw = random(150, 64, 64, dtype=out_dtype)
    with in_tile(tile):
        ops.grouped_wgrad_([dw], y, x, ends_of(sizes))
    assert_close(dw, torch.stack([y[p].float().T @ x[p].float() for _, p in groups(sizes)]))
    assert (dw[3] == 0).all()


@pytest.mark.parametrize("tile", [*tiles.TILES["wgrad"]], ids=str)
def test_tiles_are_read_before_their_slots_are_filled_again(tile):
    """Where they were not, kernels of such groups stopped within 1000 launches."""
    sizes = (*range(147, 211), *range(210, 146, -1))
    dy, x = rows(sizes, 0, 6144), rows(sizes, 0, 768)
    dw, ends = random(len(sizes), 6144, 768), ends_of(sizes)
    with in_tile(tile):
        for _ in range(1000):
            ops.grouped_wgrad_([dw], dy, x, ends)
    for e, p in [*groups(sizes)][::16]:
        assert_close(dw[e], dy[p].float().T @ x[p].float())


@pytest.mark.parametrize("sizes", [(0, 0, 0), (0, 0, 5), (4000, 0, 0), (1, 1, 1)], ids=str)
def test_extreme_splits(sizes):
    x, w = rows(sizes, TAIL, 128), random(3, 128, 128, scale=0.09)
    y = grouped.grouped_mm(x, [w], ends_of(sizes))
    assert_close(y, product(x, w, sizes))
    wgrad = grouped.grouped_wgrad(x, x, ends_of(sizes))
    assert_close(wgrad, torch.stack([x[p].float().T @ x[p].float() for _, p in groups(sizes)]))


@pytest.mark.parametrize("sizes", [SIZES, (0, 0, 0), (5, 0), (31,) * 33, (4000, 1)], ids=str)
def test_rows_past_the_last_group_are_left_alone(sizes):
    """Without ``zero_tail``: the bits of the groups' rows, and what was in memory behind them."""
    x, ends, count = rows(sizes, 1000, 128), ends_of(sizes), sum(sizes)
    w1, w2 = random(len(sizes), 512, 128, scale=0.1), random(len(sizes), 128, 256, scale=0.1)
    scales, glu, dy = (
        torch.rand(len(x), device=DEVICE),
        Glu("swiglu", 0, 0, 0, 0),
        rows(sizes, 1000, 128),
    )
    preact, _ = ops.grouped_glu(x, [w1], ends, scales, glu)

    def results(zero_tail):
        y = torch.full((len(x), 256), math.nan, dtype=x.dtype, device=DEVICE)
        ops.grouped_mm(x, [w1[:, :256]], ends, out=y, zero_tail=zero_tail)
        forward = ops.grouped_glu(x, [w1], ends, scales, glu, zero_tail=zero_tail)
        return (
            y,
            *forward,
            *ops.grouped_dglu(dy, [w2], ends, preact, scales, glu, zero_tail=zero_tail),
        )

    for with_zeros, without in zip(results(True), results(False), strict=True):
        ref.assert_equal(without[:count], with_zeros[:count])
        assert not with_zeros[count:].any()
        assert without[count:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("groups", [1, 3, 31, 32, 33, 200])
def test_group_ends(dtype, groups):
    sizes = torch.randint(-3, 60, (groups,), dtype=dtype, device=DEVICE)
    whole = int(sizes.clamp(min=0).sum())
    for total in (whole, whole // 2, 0, whole + 5):
        want = sizes.clamp(min=0).cumsum(0).clamp(max=total).int()
        assert torch.equal(grouped.group_ends(sizes, total), want)
    sizes[0] = torch.iinfo(dtype).max  # sums that pass the rows must not wrap around
    sizes[-1] = torch.iinfo(dtype).max
    assert (grouped.group_ends(sizes, 2**31 - 1) == 2**31 - 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("tiles_across", [1, 2, 5, 6])
@pytest.mark.parametrize("rows", [1, 255, 256, 1000])
def test_sums_over_tiles(rows, tiles_across, dtype):
    partials = torch.randn(tiles_across, rows, device=DEVICE)
    want = torch.zeros(rows, device=DEVICE)
    for part in partials:  # in order, which fixes the bits
        want += part
    assert torch.equal(launch_tile_sums(partials.flatten(), rows, dtype), want.to(dtype))


@pytest.mark.parametrize("interleave", [0, 1, 2, 32])
@pytest.mark.parametrize("inner", [96, 264, 512])
def test_gradients_in_the_place_of_pre_activations(inner, interleave):
    if interleave and inner % interleave:
        pytest.skip("the layout does not exist")
    sizes, hidden = SIZES, 200
    ends, dy, preact = ends_of(sizes), rows(sizes, TAIL, hidden), rows(sizes, TAIL, 2 * inner)
    scales = torch.rand(dy.shape[0], device=DEVICE)
    w = random(len(sizes), hidden, inner, scale=hidden**-0.5)
    with torch.no_grad():
        glu = Glu(interleave=interleave)
        want = grouped.grouped_dglu(dy, [w], ends, preact, scales, glu)
        got = grouped.grouped_dglu(dy, [w], ends, preact, scales, glu, overwrite=True)
    assert got[0].data_ptr() == preact.data_ptr()
    ref.assert_equal(got, want)


def test_no_rows():
    ends = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    x, w = random(0, 64), random(3, 64, 64)
    assert grouped.grouped_mm(x, [w], ends).shape == (0, 64)
    assert (grouped.grouped_wgrad(x, x, ends) == 0).all()


def test_row_pitch_and_a_view():
    sizes = (100, 28)
    wide = random(128, 256)
    x, w = wide[:, 64:192], random(2, 64, 128, scale=0.09)
    assert_close(grouped.grouped_mm(x, [w], ends_of(sizes)), product(x, w, sizes))


@pytest.mark.parametrize("operand", ["x", "w", "w1", "out"])
def test_what_tma_cannot_read_is_copied(operand):
    sizes = (100, 28)
    x, w = random(128, 128), random(2, 64, 128, scale=0.09)
    want, ends, out = grouped.grouped_mm(x, [w], ends_of(sizes)), ends_of(sizes), None
    if operand == "x":
        x = random(128, 131)[:, :128].copy_(x)  # an odd pitch
    elif operand == "w":
        w = random(w.numel() + 1)[1:].view(w.shape).copy_(w)  # not on 16 bytes
    elif operand == "out":
        out = random(128, 67)[:, :64]
    weights = [w[0].clone(), w[1].t().contiguous().t()] if operand == "w1" else [w]
    assert torch.equal(grouped.grouped_mm(x, weights, ends, out=out), want)


def test_more_than_two_to_the_31_elements():
    count, columns = 2**31 // 4096 + 1000, 4096
    x = torch.zeros(count, columns, dtype=torch.bfloat16, device=DEVICE)
    x[-900:] = random(900, columns)
    ends = torch.tensor([count - 900, count], device=DEVICE, dtype=torch.int32)
    w = random(2, columns, columns, scale=columns**-0.5)
    y = grouped.grouped_mm(x, [w], ends)
    assert_close(y[-900:], x[-900:].float() @ w[1].float().T)
    assert (y[:-900] == 0).all()
    wgrad = grouped.grouped_wgrad(y, x, ends)
    assert_close(wgrad[1], y[-900:].float().T @ x[-900:].float())
    assert (wgrad[0] == 0).all()


def _all_kernels(x, w1, w2, ends, scales):
    preact, act = grouped.grouped_glu(x, w1, ends, scales, Glu())
    y = grouped.grouped_mm(act, w2, ends)
    d_preact, again, d_scales = grouped.grouped_dglu(y, w2, ends, preact, scales, Glu())
    return (
        preact, act, y, d_preact, again, d_scales,
        grouped.grouped_mm(d_preact, w1, ends, transpose_w=True),
        grouped.grouped_wgrad(d_preact, x, ends),
        grouped.grouped_wgrad(y, again, ends, torch.float32),
    )  # fmt: skip


def _block(sizes, separate):
    x, scales = rows(sizes, TAIL, 256), torch.rand(sum(sizes) + TAIL, device=DEVICE)
    w1, w2 = random(len(sizes), 512, 256, scale=0.06), random(len(sizes), 256, 256, scale=0.06)
    how = "separate" if separate else "k"
    return x, stored(w1, how), stored(w2, how), ends_of(sizes), scales


@pytest.fixture
def margins(monkeypatch):
    """What the kernels' outputs lie between: filled with a pattern that no kernel may touch."""
    pattern, width, kept = 77, 4096, []
    new_empty = torch.Tensor.new_empty

    def in_margins(self, *size, **options):
        size = torch.Size(size[0] if isinstance(size[0], tuple | list | torch.Size) else size)
        whole = new_empty(self, size.numel() + 2 * width, **options).fill_(pattern)
        kept.append((whole, size.numel()))
        return whole[width : width + size.numel()].view(size)

    monkeypatch.setattr(torch.Tensor, "new_empty", in_margins)

    def untouched():
        assert kept, "no output was made by new_empty"
        for whole, size in kept:
            assert (whole[:width] == pattern).all(), f"written before {size} elements"
            assert (whole[width + size :] == pattern).all(), f"written past {size} elements"

    return untouched


@every_tile
@pytest.mark.parametrize("interleave", [0, 8])
@pytest.mark.parametrize("inner", [264, 520])  # 3 and 5 tiles across: no whole number of clusters
def test_writes_nothing_beside_its_outputs(kind, tile, interleave, inner, margins):
    sizes, hidden = SIZES, 136
    ends = ends_of(sizes)
    x, dy, scales = rows(sizes, TAIL, hidden), rows(sizes, TAIL, hidden), rows(sizes, TAIL, 1)[:, 0]
    glu = Glu(interleave=interleave) if "glu" in kind else Glu("srelu")
    features = glu.sides * inner
    up, down = random(len(sizes), features, hidden), random(len(sizes), hidden, inner)
    out, preact = x.new_empty(len(sizes), inner, hidden), rows(sizes, TAIL, features)
    with in_tile(tile):
        if kind == "store":
            ops.grouped_mm(x, [up], ends)
        elif kind == "wgrad":
            ops.grouped_wgrad_([out], rows(sizes, TAIL, inner), x, ends)
        elif kind in spec.FORWARD:
            ops.grouped_glu(x, [up], ends, scales, glu)
        else:
            ops.grouped_dglu(dy, [down], ends, preact, scales, glu)
    margins()


@pytest.mark.parametrize("separate", [False, True])
def test_always_the_same_bits(separate):
    arguments = _block(SIZES, separate)
    first = _all_kernels(*arguments)
    for _ in range(20):
        ref.assert_equal(first, _all_kernels(*arguments))


@pytest.mark.parametrize("separate", [False, True])
def test_graph_replays_with_other_ends(separate):
    x, w1, w2, ends, scales = _block((100, 200, 0, 80), separate)
    x[:] = random(*x.shape)
    graph, captured = graph_of(lambda: _all_kernels(x, w1, w2, ends, scales))
    for sizes in ((100, 200, 0, 80), (0, 0, 0, 400), (33, 1, 340, 7)):
        ends.copy_(ends_of(sizes))
        graph.replay()
        torch.cuda.synchronize()
        ref.assert_equal(captured, _all_kernels(x, w1, w2, ends, scales))


def test_weights_made_in_a_graph():
    """Their addresses are new in the capture, and nothing but the call keeps a table of them."""
    sizes = (3, 0, 1, 2) * 32
    x, w1, w2, ends, scales = _block(sizes, separate=False)
    x[:], dy = random(*x.shape), random(x.shape[0], 256)
    preact, _ = grouped.grouped_glu(x, w1, ends, scales, Glu())

    def step():
        own, between = [], []
        for e, one in enumerate(w2[0]):
            between.append(one.new_empty(4096 * (1 + e % 3)))  # distances are uneven
            own.append(one.clone())
        return grouped.grouped_dglu(dy, own, ends, preact, scales, Glu())

    graph, captured = graph_of(step)
    for t in captured:
        t.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    ref.assert_equal(captured, grouped.grouped_dglu(dy, w2, ends, preact, scales, Glu()))


@pytest.mark.parametrize("separate", [False, True])
def test_never_synchronises(separate):
    arguments = _block(SIZES, separate)
    torch.cuda.synchronize()
    with never_waiting():
        _all_kernels(*arguments)


def test_two_streams_share_a_table_of_addresses():
    """Which the first copies when it has done what it has to do; the second waits for the copy."""
    x, ends = random(130, 128), ends_of((60, 0, 70))
    w = [random(90, 128)[:64], random(64, 128), random(64, 128)]  # not evenly spaced
    assert w[1].data_ptr() - w[0].data_ptr() != w[2].data_ptr() - w[1].data_ptr()
    want = grouped.grouped_mm(x, [torch.stack(w)], ends)
    torch.cuda.synchronize()
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(200_000_000)
        first = grouped.grouped_mm(x, w, ends)
    with torch.cuda.stream(other):
        second = grouped.grouped_mm(x, w, ends)
    torch.cuda.synchronize()
    assert torch.equal(first, want)
    assert torch.equal(second, want)


def test_opcheck():
    x, w1, w2, ends, scales = _block((60, 0, 70), separate=False)
    x[:] = random(*x.shape)
    fusible = torch.ops.fusible
    preact, act = grouped.grouped_glu(x, w1, ends, scales, Glu())
    calls = (
        (fusible.group_ends, (torch.tensor([60, 0, 70], device=DEVICE), 130)),
        (fusible.grouped_mm, (x, w1, ends, None, None, False, None, None)),
        (fusible.grouped_glu, (x, w1, ends, scales, *Glu(), None, True, None, None)),
        (fusible.grouped_dglu, (x, w2, ends, preact, scales, *Glu())),
        (fusible.grouped_wgrad, (act, x, ends, None, None, None)),
        (fusible.grouped_wgrad_, ([random(3, 256, 256)], act, x, ends, True, None, None)),
    )
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments)


def test_refusals_name_what_is_wrong():
    x, w, ends = random(64, 64), random(2, 64, 64), ends_of((30, 34))
    for message, arguments in (
        ("ends must be a contiguous int32 tensor", (x, [w], ends.long())),
        ("share the reduced dimension", (x[:, :32], [w], ends)),
        ("w must have x's dtype", (x, [w.half()], ends)),
    ):
        with pytest.raises(ValueError, match=message):
            grouped.grouped_mm(*arguments)
    scales = torch.rand(64, device=DEVICE)
    with pytest.raises(
        ValueError, match="scales must have one value for each of the 64 rows, on cuda"
    ):
        grouped.grouped_glu(x, [w], ends, scales.cpu(), Glu())
    for glu in (Glu(interleave=12), Glu(interleave=-1)):
        assert ops.grouped_glu(x, [w], ends, scales, glu, None, True) is NotImplemented
