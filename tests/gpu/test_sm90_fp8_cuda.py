"""FP8 products on Hopper against FP32 products of the same elements and scales.

Every output starts as NaN, as does what lies behind every operand's groups.
"""

import math

import pytest
import torch
from checks import hopper
from sm90_in_tile import in_tile

from fusible.activations import ACTIVATIONS
from fusible.kernels import grouped
from fusible.kernels.glu import Glu
from fusible.kernels.grouped import definitions
from fusible.kernels.quantize.glu_backward import quantize_glu_backward
from fusible.kernels.quantize.k_major import quantize_k_major
from fusible.kernels.sm90 import checked_products as ops
from fusible.kernels.sm90.spec import Spec, Tile
from fusible.kernels.sm90.tiles import FP8_TILES, supports_tile
from fusible.recipes.formats import E5M2 as E5M2_ELEMENT
from fusible.recipes.formats import SAVED_INPUT, fp8_block, fp8_tensor

pytestmark = [*hopper, pytest.mark.usefixtures("poisoned")]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = (127, 0, 128, 129, 1, 191, 192, 0, 193, 63, 64, 65, 255, 256, 257, 700)
TAIL = 70


def ends_of(sizes):
    return torch.tensor(sizes).cumsum(0).to("cuda", torch.int32)


def elements(*shape, dtype=E4M3):
    return (torch.randn(*shape, device="cuda") * 16).to(dtype)


def scales_of(*shape):
    """Powers of two, far apart from one another."""
    return torch.randint(-8, 9, shape, device="cuda").float().exp2()


def row_operand(rows, columns, dtype=E4M3):
    """Elements of rows, NaN past the last group, and scales that lie as the quantizer puts them."""
    x = elements(rows + TAIL, columns, dtype=dtype)
    x[rows:] = math.nan
    return x, scales_of(-(-columns // 128), rows + TAIL).t()


def weight_operand(groups, columns, depth, dtype=E4M3):
    blocks = -(-columns // 128), -(-depth // 128)
    return [elements(groups, columns, depth, dtype=dtype)], scales_of(groups, *blocks) * depth**-0.5


def padded_operand(sizes, columns, dtype=E4M3):
    """Transposed elements of padded groups, NaN past the last one, scales, and padded ends."""
    padded = [-(-size // 128) * 128 for size in sizes]
    x = elements(columns, sum(padded) + 256, dtype=dtype)
    at = 0
    for size, place in zip(sizes, padded, strict=True):
        x[:, at + size : at + place] = 0
        at += place
    x[:, at:] = math.nan
    scale = scales_of(x.shape[1] // 128, columns)
    scale[at // 128 :] = math.nan
    return x.t(), scale, ends_of(padded)


def relative(actual, expected):
    return (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)


def assert_close(actual, expected, more=0.0):
    """As near as rounding to BF16 and the tensor cores' sums of 13 fraction bits allow."""
    assert actual.shape == expected.shape
    assert not actual.isnan().any(), f"{int(actual.isnan().sum())} NaN"
    error = relative(actual, expected)
    assert error < 2.5e-3 + more, f"relative error {error:.2e}"


def unrounded(x, w, ends, bias=None, transpose_w=False, x_scale=None, w_scale=None):
    """`definitions.grouped_mm` in FP32, as an epilogue has it: not rounded to BF16."""
    x, w = definitions.dequantized(x, x_scale), definitions.dequantized(w[0], w_scale)
    bias = None if bias is None else bias.float()
    return definitions.grouped_mm(x, [w], ends, bias, transpose_w=transpose_w)


def live(t, sizes=SIZES):
    return t[: sum(sizes)]


types = pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)


@types
@pytest.mark.parametrize("sizes", [SIZES, (0, 0, 5), (0,), (1000,), (300,) * 40], ids=str)
@pytest.mark.parametrize(("columns", "depth"), [(384, 640), (16, 16), (2880, 144), (208, 2880)])
def test_product_of_rows(types, sizes, columns, depth):
    x, x_scale = row_operand(sum(sizes), depth, types[0])
    w, w_scale = weight_operand(len(sizes), columns, depth, types[1])
    y = ops.grouped_mm(x, w, ends_of(sizes), x_scale=x_scale, w_scale=w_scale)
    expected = definitions.grouped_mm(x, w, ends_of(sizes), x_scale=x_scale, w_scale=w_scale)
    assert y.dtype == torch.bfloat16
    assert_close(live(y, sizes), live(expected, sizes))
    assert (y[sum(sizes) :] == 0).all()


@pytest.mark.parametrize("scaled", [False, True])
def test_product_with_bias(scaled):
    x, x_scale = row_operand(sum(SIZES), 512)
    w, w_scale = weight_operand(len(SIZES), 272, 512)
    bias = torch.randn(len(SIZES), 272, device="cuda").bfloat16() * 30
    row_scale = torch.rand(len(x), device="cuda") if scaled else None
    given = x, w, ends_of(SIZES), bias, row_scale, False, x_scale, w_scale
    y, expected = ops.grouped_mm(*given), definitions.grouped_mm(*given)
    assert_close(live(y), live(expected))
    out = torch.full_like(y, math.nan)
    grouped.grouped_mm(*given[:6], out, x_scale, w_scale)
    torch.testing.assert_close(out, y, rtol=0, atol=0)


TILES = [
    *{tile for choices in FP8_TILES.values() for tile in choices},
    Tile(64, 128, True, 1, 2),
    Tile(256, 128, False, 1, 2, dynamic=True),
]


def has_weight_gradients(tile):
    """Whether a kernel of weight gradients is built in a tile: its stages must fit."""
    spec = Spec("wgrad", tile, "float8_e4m3fn", "float8_e4m3fn", "rows")
    return tile.m >= 64 and spec.stages >= 2 * spec.rings


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("columns", "depth"), [(384, 640), (832, 144), (208, 2880)])
def test_tiles_give_the_same_bits(tile, columns, depth):
    """Each sums an element in the same order. A tile's columns may have several scales."""
    x, x_scale = row_operand(sum(SIZES), depth)
    w, w_scale = weight_operand(len(SIZES), columns, depth)
    scales, ends = torch.rand(len(x), device="cuda"), ends_of(SIZES)
    dy, dy_scale, padded_ends = padded_operand(SIZES, columns)
    xt, xt_scale, _ = padded_operand(SIZES, depth)
    found = []
    for one in (None, tile):
        with in_tile(one):
            y = ops.grouped_mm(x, w, ends, x_scale=x_scale, w_scale=w_scale)
            glu = Glu("swiglu", 0 if columns % 128 == 0 else 8)
            given = x, w, ends, scales, glu, None, True, x_scale, w_scale
            found.append([y, *ops.grouped_glu(*given)])
            if has_weight_gradients(tile):
                dw = ops.grouped_wgrad(dy, xt, padded_ends, None, dy_scale, xt_scale)
                found[-1].append(dw)
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "tile", [one for one in FP8_TILES["store"] if Spec("store", one).can_read_ahead], ids=str
)
@pytest.mark.parametrize("inner", [128, 512, 1536])
@pytest.mark.parametrize("sizes", [(1,) * 8 + (0,) * 56, (70, 0, 200, 3), (16,) * 300], ids=len)
def test_weights_are_read_ahead(tile, inner, sizes):
    """In a captured graph, right behind the product that quantizes the rows; the same bits."""
    (x, x_scale), ends = row_operand(sum(sizes), 512), ends_of(sizes)
    w1, w1_scale = weight_operand(len(sizes), 2 * inner, 512)
    w2 = [weight_operand(len(sizes), 336, inner) for _ in range(4)]

    def chain(reads_ahead):
        found = []
        for w, w_scale in w2:
            given = x, w1, ends, None, Glu(), None, False, x_scale, w1_scale, fp8_block()
            _, act, scale, _ = ops.grouped_glu(*given)
            with in_tile(tile):
                options = {"x_scale": scale.t(), "w_scale": w_scale, "reads_ahead": reads_ahead}
                found.append(ops.grouped_mm(act, w, ends, **options))
        return found

    with torch.no_grad():
        want = chain(False)
        chain(True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(True)
        for _ in range(3):
            for t in got:
                t.fill_(math.nan)
            graph.replay()
            for mine, own in zip(got, want, strict=True):
                torch.testing.assert_close(live(mine, sizes), live(own, sizes), rtol=0, atol=0)


def test_scales_of_any_strides():
    """One for the whole matrix, one for each row, and in the order of the values."""
    x, _ = row_operand(sum(SIZES), 512)
    w, _ = weight_operand(len(SIZES), 256, 512)
    blocks, ends = 4, ends_of(SIZES)
    of_x = [
        scales_of(1, 1).expand(len(x), blocks),
        scales_of(len(x), 1).expand(-1, blocks),
        scales_of(len(x), blocks),
    ]
    of_w = [
        scales_of(len(SIZES), 1, 1).expand(-1, 2, blocks),
        scales_of(len(SIZES), blocks, 2).mT,
        scales_of(1, 1, 1).expand(len(SIZES), 2, blocks),
    ]
    for x_scale, w_scale in zip(of_x, of_w, strict=True):
        y = ops.grouped_mm(x, w, ends, x_scale=x_scale, w_scale=w_scale)
        expected = definitions.grouped_mm(x, w, ends, x_scale=x_scale, w_scale=w_scale)
        assert_close(live(y), live(expected))


@pytest.mark.parametrize("interleave", [0, 1, 2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_qgeglu"])
def test_activation_in_the_epilogue(interleave, save, activation):
    glu = Glu(activation, interleave, 4.0, 1.702, 1.0)
    x, x_scale = row_operand(sum(SIZES), 384)
    w, w_scale = weight_operand(len(SIZES), 768, 384)
    w_scale *= 2.0**-9
    scales = torch.rand(len(x), device="cuda")
    bias = (
        torch.randn(len(SIZES), 768, device="cuda").bfloat16() if activation != "swiglu" else None
    )
    given = x, w, ends_of(SIZES), scales, glu, bias, save, x_scale, w_scale
    preact, y = ops.grouped_glu(*given)
    expected = definitions.grouped_glu(*given, product=unrounded)
    if save:
        assert_close(live(preact), live(expected[0]))
    assert_close(live(y), live(expected[1]))
    assert (y[sum(SIZES) :] == 0).all()


def test_activation_of_half_blocks_is_left_to_others():
    """In halves of 72 columns a tile's linear columns would have two scales."""
    x, x_scale = row_operand(sum(SIZES), 384)
    w, w_scale = weight_operand(len(SIZES), 144, 384)
    given = x, w, ends_of(SIZES), None, Glu(), None, True, x_scale, w_scale
    assert ops.grouped_glu(*given) is NotImplemented
    made, expected = grouped.grouped_glu(*given), definitions.grouped_glu(*given)
    assert_close(live(made[0]), live(expected[0]))


@pytest.mark.parametrize("interleave", [0, 1, 2, 4, 8, 32])
@pytest.mark.parametrize("features", [256, 336, 2880])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_qgeglu"])
@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16])
def test_activations_backward(interleave, features, activation, scales_dtype):
    if interleave and features % interleave:
        pytest.skip("no whole blocks of gate columns")
    _check_backward(Glu(activation, interleave, 4.0, 1.702, 1.0), features, scales_dtype)


@pytest.mark.parametrize("scales_dtype", [torch.float32, None], ids=["scales", "no scales"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activations_backward(activation, scales_dtype):
    _check_backward(Glu(activation, 0, 4.0, 1.702, 1.0), 336, scales_dtype)


@pytest.mark.parametrize("scaled", [True, False], ids=["scales", "no scales"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, scaled):
    glu = Glu(activation, 0, 4.0, 1.702, 1.0)
    x, x_scale = row_operand(sum(SIZES), 384)
    w, w_scale = weight_operand(len(SIZES), 192 * glu.sides, 384)
    scales = torch.rand(len(x), device="cuda") if scaled else None
    given = x, w, ends_of(SIZES), scales, glu, None, True, x_scale, w_scale
    expected, expected_act = (live(t) for t in definitions.grouped_glu(*given, product=unrounded))
    preact, act = (live(t) for t in ops.grouped_glu(*given))
    assert_close(preact, expected)
    # An activation may enlarge the error of its input, as a sigmoid of large values does.
    of_preact = glu.forward(preact.float(), None if scales is None else live(scales))
    assert_close(act, expected_act, relative(of_preact, expected_act))


each_quantizing_tile = pytest.mark.parametrize(
    ("kind", "tile"),
    [
        (kind, tile)
        for kind in ("glu", "act")
        for tile in FP8_TILES[kind]
        if supports_tile(kind, tile, "k", 0, False, "", True, quantized=True)
    ],
    ids=str,
)


@each_quantizing_tile
@pytest.mark.parametrize("features", [128, 192, 1024 + 64])
def test_activation_quantized_in_the_epilogue(kind, tile, features):
    """The bits of a launch that stores the activation, and of the quantizer after it."""
    bias, gated = None, [Glu("swiglu"), Glu("clamped_qgeglu", 1, 7.0, 1.702, 1.0), Glu("geglu", 32)]
    if kind == "act":
        bias = torch.randn(len(SIZES), features, device="cuda").bfloat16()
    for glu in gated if kind == "glu" else [Glu("gelu"), Glu("srelu")]:
        x, x_scale = row_operand(sum(SIZES), 656)
        w, w_scale = weight_operand(len(SIZES), glu.sides * features, 656)
        scales = torch.rand(len(x), device="cuda")
        scales[sum(SIZES) :] = math.nan
        for fmt, save in ((fp8_block(), True), (fp8_block(power_of_two=False), False)):
            given = x, w, ends_of(SIZES), scales, glu, bias, save, x_scale, w_scale
            with in_tile(tile):
                preact, y = ops.grouped_glu(*given)
                made = ops.grouped_glu(*given, fmt)
            want = quantize_k_major(y, fmt, rowwise=True, columnwise=False).row
            assert torch.equal(made[0], preact)
            assert torch.equal(made[1].view(torch.uint8), want.data.view(torch.uint8))
            assert torch.equal(made[2], want.scale.t())


@each_quantizing_tile
@pytest.mark.parametrize("features", [128, 384, 1024 + 128])
def test_pre_activation_quantized_in_the_epilogue(kind, tile, features):
    """The bits of a launch that stores the pre-activation, and of the quantizer after it."""
    glus = [Glu("swiglu"), Glu("geglu", 128)] if kind == "glu" else [Glu("gelu")]
    for glu in glus:
        x, x_scale = row_operand(sum(SIZES), 656)
        w, w_scale = weight_operand(len(SIZES), glu.sides * features, 656)
        scales = torch.rand(len(x), device="cuda")
        given = x, w, ends_of(SIZES), scales, glu, None, True, x_scale, w_scale, fp8_block()
        with in_tile(tile):
            preact, *wanted = grouped.grouped_glu_quantized(*given)
            made, *others = grouped.grouped_glu_quantized(*given, True)
        row = quantize_k_major(preact, SAVED_INPUT, rowwise=True, columnwise=False).row
        assert_same_bits([made, others.pop()], [row.data, row.scale.t()])
        assert_same_bits(others, wanted[:2])


@pytest.mark.parametrize("sizes", [SIZES, (0, 0, 5), (0,), (300,) * 40], ids=str)
@pytest.mark.parametrize("fmt", [fp8_block(E5M2_ELEMENT), fp8_tensor()], ids=["blocks", "groups"])
@pytest.mark.parametrize(("interleave", "features"), [(0, 384), (128, 512), (0, 72), (8, 128)])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "srelu"])
def test_the_backward_of_a_quantized_pre_activation(activation, interleave, features, fmt, sizes):
    """The bits of the backward of its values in BF16."""
    glu = Glu(activation, interleave if ACTIVATIONS[activation].sides == 2 else 0)
    rows, ends = sum(sizes) + TAIL, ends_of(sizes)
    dy, preact = (torch.randn(rows, n * features, device="cuda").bfloat16() for n in (1, glu.sides))
    preact *= torch.randint(-8, 8, (rows, 1), device="cuda").float().exp2()
    scales = torch.rand(rows, device="cuda")
    for t in (dy, preact, scales):
        t[sum(sizes) :] = math.nan
    row = quantize_k_major(preact, SAVED_INPUT, rowwise=True, columnwise=False).row
    of_columns = row.scale.repeat_interleave(128, -1)[:, : preact.shape[1]]
    values = (row.data.float() * of_columns).bfloat16()
    uses = {"rowwise": True, "columnwise": True, "values": True, "act_format": fp8_block()}
    made, wanted = [
        quantize_glu_backward(dy, of, scales, ends, glu, fmt, **uses) for of in (row, values)
    ]
    assert_same_bits(made.operands.row[:2], wanted.operands.row[:2])
    assert_same_bits(*[written(of.operands.column) for of in (made, wanted)])
    assert_same_bits(*[written(of.activation) for of in (made, wanted)])
    assert_same_bits([made.values, made.scales], [wanted.values, wanted.scales])
    uses = {"rowwise": True, "columnwise": True}
    made, wanted = [
        quantize_glu_backward(dy, of, scales, ends, glu, fmt, **uses) for of in (row, values)
    ]
    assert_same_bits(made.operands.row[:2], wanted.operands.row[:2])
    assert_same_bits(*[written(of.operands.column) for of in (made, wanted)])
    assert_same_bits([made.scales], [wanted.scales])


def _check_backward(glu, features, scales_dtype):
    for fmt in (fp8_block(), fp8_tensor(E5M2_ELEMENT)):
        _check_quantized_backward(glu, features, scales_dtype, fmt)


def _check_quantized_backward(glu, features, scales_dtype, fmt):
    """Values are those of FP32 math, rounded once; what is quantized are these."""
    rows = sum(SIZES) + TAIL
    dy, preact = (torch.randn(rows, n * features, device="cuda").bfloat16() for n in (1, glu.sides))
    dy[sum(SIZES) :] = preact[sum(SIZES) :] = math.nan
    scales, of_live = None, None
    if scales_dtype is not None:
        scales = torch.rand(rows, device="cuda").to(scales_dtype)
        scales[sum(SIZES) :] = math.nan
        of_live = live(scales).float()
    given, uses = (dy, preact, scales, ends_of(SIZES), glu, fmt), {"rowwise": True}
    made = quantize_glu_backward(*given, **uses, columnwise=True, values=True)
    expected, dscales = glu.backward(live(dy).float(), live(preact).float(), of_live)
    assert_close(live(made.values), expected)
    assert (made.values[sum(SIZES) :] == 0).all()
    if scales is not None:
        assert made.scales.dtype == scales_dtype
        assert_close(live(made.scales), dscales)
    again = quantize_k_major(made.values, fmt, **uses, columnwise=True, ends=ends_of(SIZES))
    assert_same_bits(made.operands.row[:2], again.row[:2])
    assert_same_bits(*map(written, (made.operands.column, again.column)))
    alone = quantize_glu_backward(*given, **uses, columnwise=False)
    assert alone.values is None
    assert torch.equal(alone.operands.row.data.view(torch.uint8), again.row.data.view(torch.uint8))


def written(column):
    """Elements and scales of the padded groups."""
    end = int(column.ends[-1])
    return column.data[:end], column.scale[: end // 128]


def assert_same_bits(actual, wanted):
    for pair in zip(actual, wanted, strict=True):
        # A tensor of one number may count as contiguous with any stride.
        of_one_stride = [t.clone(memory_format=torch.contiguous_format).flatten() for t in pair]
        assert torch.equal(*[t.view(torch.uint8) for t in of_one_stride])


@pytest.mark.parametrize("sizes", [SIZES, (0, 0, 5), (0,), (300,) * 40], ids=str)
@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize(("interleave", "features"), [(0, 384), (128, 512), (0, 72), (8, 128)])
@pytest.mark.parametrize("activation", ["relu", "srelu", "silu", "reglu", "sreglu", "swiglu"])
def test_the_backward_quantizes_the_activation(
    activation, interleave, features, scales_dtype, sizes
):
    """In the kernel or by the definition, with the forward's bits where it has no exponential."""
    glu = Glu(activation, interleave if ACTIVATIONS[activation].sides == 2 else 0)
    rows, ends = sum(sizes) + TAIL, ends_of(sizes)
    dy, preact = (torch.randn(rows, n * features, device="cuda").bfloat16() for n in (1, glu.sides))
    scales = None if scales_dtype is None else torch.rand(rows, device="cuda").to(scales_dtype)
    for t in (dy, preact) if scales is None else (dy, preact, scales):
        t[sum(sizes) :] = math.nan
    given, uses = (dy, preact, scales, ends, glu), {"rowwise": False, "columnwise": True}
    made = quantize_glu_backward(
        *given, fp8_block(E5M2_ELEMENT), **uses, values=True, act_format=fp8_block()
    )
    again = quantize_k_major(made.values, fp8_block(E5M2_ELEMENT), **uses, ends=ends)
    assert_same_bits(*map(written, (made.operands.column, again.column)))
    act = glu.forward(preact, scales)
    wanted = quantize_k_major(act, fp8_block(), **uses, ends=ends).column
    assert torch.equal(made.activation.ends, wanted.ends)
    if activation in ("relu", "srelu", "reglu", "sreglu"):
        assert_same_bits(written(made.activation), written(wanted))
    for actual, of_forward in zip(written(made.activation), written(wanted), strict=True):
        differing = (actual.float() != of_forward.float()).sum()
        assert differing <= 0.01 * actual.numel()


@types
@pytest.mark.parametrize("sizes", [SIZES, (0, 0, 5), (0,), (1000,), (300,) * 40], ids=str)
@pytest.mark.parametrize(("columns", "depth"), [(384, 640), (16, 16), (2880, 144)])
def test_weight_gradient(types, sizes, columns, depth):
    dy, dy_scale, ends = padded_operand(sizes, columns, types[0])
    x, x_scale, _ = padded_operand(sizes, depth, types[1])
    given = dy, x, ends, None, dy_scale, x_scale
    dw, expected = ops.grouped_wgrad(*given), definitions.grouped_wgrad(*given)
    assert dw.dtype == torch.bfloat16
    assert_close(dw, expected)
    for e, size in enumerate(sizes):
        assert size or (dw[e] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradient_into_a_buffer(dtype, separate, accumulate):
    columns, depth = 272, 400
    dy, dy_scale, ends = padded_operand(SIZES, columns)
    x, x_scale, _ = padded_operand(SIZES, depth)
    start = torch.randn(len(SIZES), columns, depth, device="cuda").to(dtype)
    out = [one.clone() for one in start] if separate else [start.clone()]
    ops.grouped_wgrad_(out, dy, x, ends, accumulate, dy_scale, x_scale)
    expected = [one.clone() for one in start]
    definitions.grouped_wgrad_(expected, dy, x, ends, accumulate, dy_scale, x_scale)
    assert_close(torch.stack(out) if separate else out[0], torch.stack(expected))


def test_bits_repeat():
    x, x_scale = row_operand(sum(SIZES), 1024)
    w, w_scale = weight_operand(len(SIZES), 512, 1024)
    given = x, w, ends_of(SIZES), None, None, False, x_scale, w_scale
    first = ops.grouped_mm(*given)
    for _ in range(20):
        assert torch.equal(first, ops.grouped_mm(*given))


def test_wrong_scales_are_refused():
    x, x_scale = row_operand(sum(SIZES), 512)
    w, w_scale = weight_operand(len(SIZES), 256, 512)
    ends = ends_of(SIZES)
    with pytest.raises(ValueError, match=r"x_scale must be a torch.float32 tensor of shape"):
        ops.grouped_mm(x, w, ends, x_scale=x_scale[:, :3], w_scale=w_scale)
    with pytest.raises(ValueError, match=r"w_scale must be a torch.float32 tensor of shape"):
        ops.grouped_mm(x, w, ends, x_scale=x_scale, w_scale=w_scale.double())
    dy, dy_scale, padded = padded_operand((100, 200), 64)
    with pytest.raises(ValueError, match="a multiple of 128 rows, got 500"):
        ops.grouped_wgrad(dy[:500], dy[:500], padded, None, dy_scale[:3], dy_scale[:3])


def test_nan_and_infinite_scales_reach_their_rows_only():
    x, x_scale = row_operand(sum(SIZES), 512)
    w, w_scale = weight_operand(len(SIZES), 256, 512)
    x_scale = x_scale.contiguous()
    x_scale[40, 1], x_scale[300, 2] = math.nan, math.inf
    y = live(ops.grouped_mm(x, w, ends_of(SIZES), x_scale=x_scale, w_scale=w_scale))
    assert y[40].isnan().all()
    assert not y[300].isfinite().any()
    others = [i for i in range(len(y)) if i not in (40, 300)]
    assert y[others].isfinite().all()
