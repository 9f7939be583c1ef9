"""The grouped library ops on the CPU: the oracle that the kernels of every machine are held to."""

import copy

import pytest
import reference as ref
import torch

import fusible as fz
from fusible.kernels import grouped
from fusible.kernels.glu import Glu
from fusible.kernels.grouped import definitions, pytorch
from fusible.kernels.grouped.groups import row_groups
from fusible.kernels.stacking import stacked
from fusible.recipes.formats import fp8_block, fp8_tensor

E, K, N = 4, 6, 5
SPLITS = [
    pytest.param([3, 2, 4, 1], 10, id="all rows"),
    pytest.param([3, 0, 4, 0], 10, id="empty groups and a tail"),
    pytest.param([0, 0, 0, 0], 7, id="only a tail"),
    pytest.param([0, 0, 9, 0], 9, id="one group"),
    pytest.param([0, 0, 0, 0], 0, id="no rows"),
]


def ends_of(sizes):
    return torch.tensor(sizes).cumsum(0).int()


def strided(t, pitch=3):
    """The same values, each row ``pitch`` elements apart from the next one's end."""
    wide = torch.full((t.shape[0], t.shape[1] + pitch), float("nan"), dtype=t.dtype)
    wide[:, : t.shape[1]] = t
    return wide[:, : t.shape[1]]


@pytest.fixture(params=["single", "abutting", "scattered", "views of transposed"])
def weight_form(request):
    """A function that gives ``[E, R, C]`` to the op in one of the forms it takes."""

    def give(w):
        if request.param == "single":
            return [w]
        if request.param == "abutting":
            return list(w.contiguous().unbind(0))
        if request.param == "scattered":
            return [m.clone() for m in w]
        return [w.mT.contiguous().mT]

    return give


@pytest.mark.parametrize(("sizes", "rows"), SPLITS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_grouped_mm(sizes, rows, biased, scaled, weight_form):
    x = torch.randn(rows, K, dtype=torch.float64)
    w = torch.randn(E, N, K, dtype=torch.float64)
    bias = torch.randn(E, N, dtype=torch.float64) if biased else None
    scales = torch.rand(rows, dtype=torch.float64) if scaled else None
    expected = ref.grouped_linear(x, w, sizes, bias, scales)
    for given in (x, strided(x)):
        y = grouped.grouped_mm(given, weight_form(w), ends_of(sizes), bias, scales, False)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
        assert torch.equal(y[sum(sizes) :], torch.zeros(rows - sum(sizes), N, dtype=y.dtype))


@pytest.mark.parametrize(("sizes", "rows"), SPLITS)
def test_grouped_mm_transposed_weights(sizes, rows, weight_form):
    dy = torch.randn(rows, N, dtype=torch.float64)
    w = torch.randn(E, N, K, dtype=torch.float64)
    expected = ref.grouped_linear(dy, w.mT, sizes)
    dx = grouped.grouped_mm(dy, weight_form(w), ends_of(sizes), None, None, True)
    torch.testing.assert_close(dx, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("transpose_w", [False, True])
def test_garbage_in_the_tail_stays_there(transpose_w):
    """Tail rows are selected away, never multiplied."""
    x = torch.randn(6, 4, dtype=torch.float64)
    x[4:] = float("nan")
    w, bias = torch.randn(2, 4, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    scales = torch.tensor([1.0, 2.0, 3.0, 4.0, float("nan"), float("inf")])
    ends = ends_of([1, 3])
    y = grouped.grouped_mm(x, [w], ends, bias, scales, transpose_w)
    assert torch.equal(y[4:], torch.zeros(2, 4, dtype=y.dtype))
    assert y[:4].isfinite().all()
    assert grouped.grouped_wgrad(x, x, ends).isfinite().all()
    assert grouped.grouped_sum(x, ends, scales).isfinite().all()


@pytest.mark.parametrize(("sizes", "rows"), SPLITS)
def test_grouped_wgrad(sizes, rows):
    dy = torch.randn(rows, N, dtype=torch.float64)
    x = torch.randn(rows, K, dtype=torch.float64)
    w = torch.zeros(E, N, K, dtype=torch.float64)
    _, (expected,) = ref.gradients(lambda w: ref.grouped_linear(x, w, sizes), [w], dy)
    for dy_, x_ in ((dy, x), (strided(dy), strided(x))):
        dw = grouped.grouped_wgrad(dy_, x_, ends_of(sizes))
        torch.testing.assert_close(dw, expected, rtol=1e-12, atol=1e-13)
        empty = torch.tensor(sizes) == 0
        assert torch.equal(dw[empty], torch.zeros_like(dw[empty]))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_grouped_wgrad_into_buffers(out_dtype, single, accumulate):
    sizes = [3, 0, 4, 1]
    dy, x = torch.randn(9, N).bfloat16(), torch.randn(9, K).bfloat16()
    before = torch.randn(E, N, K).to(out_dtype)
    w = torch.zeros(E, N, K)
    _, (exact,) = ref.gradients(lambda w: ref.grouped_linear(x.double(), w, sizes), [w], dy)
    if accumulate:
        exact = exact + before.double()
    buffer = before.clone()
    if not accumulate:
        buffer[1] = float("nan")  # garbage where the group is empty
    out = [buffer] if single else [m.clone() for m in buffer]
    grouped.grouped_wgrad_(out, dy, x, ends_of(sizes), accumulate)
    result = out[0] if single else torch.stack(out)
    ref.assert_accurate(result, exact, roundings=2)
    assert torch.equal(result[1], before[1] if accumulate else torch.zeros(N, K, dtype=out_dtype))


@pytest.mark.parametrize(("sizes", "rows"), SPLITS)
@pytest.mark.parametrize("scaled", [False, True])
def test_grouped_sum(sizes, rows, scaled):
    dy = torch.randn(rows, N, dtype=torch.float64)
    scales = torch.rand(rows, dtype=torch.float64) if scaled else None
    start, expected = 0, torch.zeros(E, N, dtype=torch.float64)
    for group, size in enumerate(sizes):
        for row in range(start, start + size):
            expected[group] += dy[row] * (1 if scales is None else scales[row])
        start += size
    for given in (dy, strided(dy)):
        sums = grouped.grouped_sum(given, ends_of(sizes), scales)
        torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-13)
    dy, index = scattered(dy, sum(sizes))
    by_index = grouped.grouped_sum(dy, ends_of(sizes), scales, index)
    assert torch.equal(by_index, sums)


def scattered(dy, live):
    """The rows of ``dy`` in another order, some twice, and where each is; nowhere in the tail."""
    order = torch.randperm(len(dy))
    index = torch.empty_like(order).scatter_(0, order, torch.arange(len(dy))).int()
    index[live:] = -(10**9)
    return torch.cat((dy[order], dy[:3])), index


@pytest.mark.parametrize(("sizes", "rows"), SPLITS)
def test_grouped_dots(sizes, rows):
    dy, bias = torch.randn(rows, N, dtype=torch.float64), torch.randn(E, N, dtype=torch.float64)
    expected = torch.zeros(rows, dtype=torch.float64)
    start = 0
    for group, size in enumerate(sizes):
        for row in range(start, start + size):
            expected[row] = (dy[row] * bias[group]).sum()
        start += size
    dy[start:] = float("nan")
    for given in (dy, strided(dy)):
        dots = grouped.grouped_dots(given, bias, ends_of(sizes))
        torch.testing.assert_close(dots, expected, rtol=1e-12, atol=1e-13)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        dots = grouped.grouped_dots(dy.to(dtype), bias.to(dtype), ends_of(sizes))
        assert dots.dtype == torch.float32
    mixed, index = scattered(dy, start)
    dots = grouped.grouped_dots(mixed, bias, ends_of(sizes), index)
    assert torch.equal(dots, grouped.grouped_dots(dy, bias, ends_of(sizes)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_expanded_gradients(dtype):
    """``y.sum().backward()`` hands out a gradient of strides (0, 0)."""
    sizes, ends = [3, 0, 4], ends_of([3, 0, 4])
    x, w = torch.randn(8, 16, dtype=dtype), torch.randn(3, 8, 16, dtype=dtype)
    ones = torch.ones((), dtype=dtype).expand(8, 8)
    assert ones.stride() == (0, 0)
    dense = ones.contiguous()
    for op, rest in (
        (grouped.grouped_wgrad, (x, ends)),
        (grouped.grouped_sum, (ends, None)),
        (grouped.grouped_mm, ([w], ends, None, None, True)),
    ):
        # Sums of at most 8 terms, from another layout.
        ref.assert_equal_but_for_rounding(op(ones, *rest), op(dense, *rest), roundings=3)
    exact = ref.grouped_linear(dense.double(), w.double().mT, sizes)
    ref.assert_accurate(grouped.grouped_mm(ones, [w], ends, None, None, True), exact, roundings=3)


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_dtypes(dtype, scaled):
    sizes = [5, 0, 3, 2]
    x, dy = torch.randn(12, 32).to(dtype), torch.randn(12, 16).to(dtype)
    w, bias = torch.randn(E, 16, 32).to(dtype), torch.randn(E, 16).to(dtype)
    scales = torch.rand(12) if scaled else None
    y, (dx, dw, db, *_) = ref.gradients(
        lambda x, w, b, *s: ref.grouped_linear(x, w, sizes, b, *s),
        [x, w, bias, *([] if scales is None else [scales])],
        dy,
    )
    ends = ends_of(sizes)
    for mine, exact in (
        (grouped.grouped_mm(x, [w], ends, bias, scales, False), y),
        (grouped.grouped_mm(dy, [w], ends, None, None, True), dx),
        (grouped.grouped_wgrad(dy, x, ends), dw),
        (grouped.grouped_sum(dy, ends, scales), db),
    ):
        assert mine.dtype == dtype
        ref.assert_accurate(mine, exact)


# --- what surrounds the products ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_group_ends(dtype):
    ends = grouped.group_ends(torch.tensor([3, 0, 4], dtype=dtype), 9)
    assert ends.dtype == torch.int32
    assert ends.tolist() == [3, 3, 7]


def test_row_groups():
    group, live = row_groups(ends_of([2, 0, 3]), 7)
    assert group.tolist() == [0, 0, 2, 2, 2, 2, 2]
    assert live.tolist() == [True] * 5 + [False] * 2
    group, live = row_groups(ends_of([0, 0]), 3)
    assert live.tolist() == [False] * 3
    assert group.max() <= 1


def test_stacked_views_weights_that_abut():
    op = fz.GroupedLinear(E, K, N, bias=False)
    weights = op.weights()
    view = stacked(weights)
    assert view.data_ptr() == weights[0].data_ptr()
    assert torch.equal(view, torch.stack(weights))


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda op: op.to(torch.bfloat16),
        lambda op: op.to_empty(device="cpu"),
        lambda op: (
            op.load_state_dict({k: v.clone() for k, v in op.state_dict().items()}, assign=True)
            and op
        ),
    ],
    ids=["deepcopy", "to dtype", "to_empty", "assign"],
)
def test_stacked_is_right_wherever_weights_lie(change):
    op = change(fz.GroupedLinear(E, K, N, bias=False))
    with torch.no_grad():
        for group, weight in enumerate(op.weights()):
            weight.fill_(group)
    expected = torch.arange(E, dtype=op.weight0.dtype)[:, None, None].expand(E, N, K)
    assert torch.equal(stacked(op.weights()), expected)


def test_stacked_copies_what_only_seems_to_abut():
    base = torch.arange(24.0)
    apart = [base[0:4].view(2, 2), base[8:12].view(2, 2)]
    transposed = [m.t() for m in base[:8].view(2, 2, 2)]
    swapped = [base[4:8].view(2, 2), base[0:4].view(2, 2)]
    for weights in (apart, transposed, swapped):
        assert torch.equal(stacked(weights), torch.stack(weights))


@pytest.mark.parametrize("interleave", [0, 2])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_qgeglu"])
@pytest.mark.parametrize(("sizes", "rows"), SPLITS)
def test_products_with_an_activation(sizes, rows, activation, interleave):
    """Forward, and backward against autograd, in FP64."""
    clamps = (1.5, 1.702, 1.0) if activation == "clamped_qgeglu" else ()
    glu, formula = Glu(activation, interleave, *clamps), getattr(ref, activation)
    x, dy = (torch.randn(rows, n, dtype=torch.float64) for n in (K, N))
    w1, w2 = (torch.randn(E, *s, dtype=torch.float64) for s in ((8, K), (N, 4)))
    bias, scales = torch.randn(E, 8).double(), torch.rand(rows).double().requires_grad_()
    ends = ends_of(sizes)
    want = ref.grouped_linear(x, w1, sizes, bias).requires_grad_()
    act = formula(want, scales, interleave or None, *clamps)
    live = (torch.arange(rows) < sum(sizes))[:, None]
    for save_preact in (True, False):
        preact, got = grouped.grouped_glu(x, [w1], ends, scales.detach(), glu, bias, save_preact)
        torch.testing.assert_close(preact, want.detach() if save_preact else want.detach()[:0])
        torch.testing.assert_close(got, (act * live).detach())
    _, got_unscaled = grouped.grouped_glu(x, [w1], ends, None, glu, bias)
    unscaled = formula(want.detach(), None, interleave or None, *clamps) * live
    torch.testing.assert_close(got_unscaled, unscaled)
    d = ref.grouped_linear(dy, w2.mT, sizes)
    dpreact, again, dscales = grouped.grouped_dglu(
        dy, [w2], ends, want.detach(), scales.detach(), glu
    )
    wanted = torch.autograd.grad(act, (want, scales), d)
    torch.testing.assert_close(again, got)
    torch.testing.assert_close((dpreact, dscales), wanted)


def test_a_weight_gradient_in_another_dtype_is_rounded_once():
    ends, x, dy = ends_of([3, 0, 4, 1]), torch.randn(9, K).bfloat16(), torch.randn(9, N).bfloat16()
    exact = grouped.grouped_wgrad(dy.double(), x.double(), ends)
    for dtype in (torch.float32, torch.float64):
        got = grouped.grouped_wgrad(dy, x, ends, dtype)
        assert got.dtype == dtype
        torch.testing.assert_close(got, exact.to(dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("x_scale", "w_scale"),
    [((9, 3), (2, 1, 2)), ((8, 2), (2, 1, 2)), ((9, 2), (2, 2, 2)), ((9, 2), (1, 1, 2)),
     (None, (2, 1, 2)), ((9, 2), None)],
)  # fmt: skip
def test_scales_of_other_sizes_are_refused(x_scale, w_scale):
    x, w = (torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((9, 160), (2, 128, 160)))
    scales = [None if shape is None else torch.ones(shape) for shape in (x_scale, w_scale)]
    given = dict(zip(("x_scale", "w_scale"), scales, strict=True))
    with pytest.raises(ValueError, match="scales"):
        grouped.grouped_mm(x, [w], torch.tensor([4, 9], dtype=torch.int32), **given)


def test_stacked_one():
    w = torch.randn(3, 2, 2)
    assert stacked([w]) is w
    assert torch.equal(stacked([w[0]]), w[:1])


# --- FP8 operands ---------------------------------------------------------------------------------


def fp8(shape, scales, dtype=torch.float8_e4m3fn):
    """Elements and scales of random values."""
    return torch.randn(shape).to(dtype), torch.exp2(torch.randint(-6, 6, scales).float())


def dequantized(elements, scale):
    """What each element stands for, in FP64: one by one."""
    shape = elements.shape
    blocks = [torch.arange(n) // (1 if scale.shape[d] == n else 128) for d, n in enumerate(shape)]
    return elements.double() * scale.double()[torch.meshgrid(*blocks, indexing="ij")]


@pytest.mark.parametrize(("sizes", "rows"), SPLITS)
@pytest.mark.parametrize("grad", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_products_of_fp8_rows(sizes, rows, grad):
    """Of values that the scales make, in FP32, rounded once; last blocks may be short."""
    ends, K, N = ends_of(sizes), 144, 272
    x, x_scale = fp8((rows, K), (rows, 2), grad)
    w, w_scale = fp8((E, N, K), (E, 3, 2))
    bias, scales = torch.randn(E, N).bfloat16(), torch.rand(rows)
    x64, w64 = dequantized(x, x_scale), dequantized(w, w_scale)
    given = {"x_scale": x_scale.t().contiguous().t(), "w_scale": w_scale}
    exact = ref.grouped_linear(x64, w64, sizes, bias.double(), scales.double())
    y = grouped.grouped_mm(x, [w], ends, bias, scales, **given)
    assert y.dtype == torch.bfloat16
    near = {"rtol": 2**-8, "atol": 2**-16 * float((x64.abs().amax() + 1) * w64.abs().amax() * K)} \
        if rows else {"rtol": 0, "atol": 0}  # fmt: skip
    torch.testing.assert_close(y.double(), exact, **near)
    torch.testing.assert_close(
        pytorch.grouped_mm(x, [w], ends, **given),
        grouped.grouped_mm(x, [w], ends, **given),
        rtol=2**-7,
        atol=near["atol"],
    )
    out = torch.empty_like(y)
    assert grouped.grouped_mm(x, [w], ends, bias, scales, out=out, **given) is out
    assert torch.equal(out, y)
    for module in (definitions, pytorch):
        separate = module.grouped_mm(x, [one.clone() for one in w], ends, **given)
        assert torch.equal(separate, module.grouped_mm(x, [w], ends, **given))
    one = given["w_scale"][:1, :1, :1].expand(E, 3, 2)  # of the whole tensor
    torch.testing.assert_close(
        grouped.grouped_mm(x, [w], ends, x_scale=x_scale, w_scale=one).double(),
        ref.grouped_linear(x64, dequantized(w, one), sizes), **near,
    )  # fmt: skip
    preact, act = grouped.grouped_glu(x, [w], ends, scales, Glu(), bias, **given)
    torch.testing.assert_close(preact, grouped.grouped_mm(x, [w], ends, bias, **given))
    torch.testing.assert_close(act, grouped.grouped_glu(*gated(preact, scales), Glu())[1])


def gated(preact, scales):
    """Arguments of a gated product whose pre-activation is ``preact``."""
    return preact, [torch.eye(preact.shape[1]).bfloat16()[None]], ends_of([len(preact)]), scales


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_weight_gradients_of_fp8_columns(out_dtype):
    sizes, P = [128, 0, 256, 128], 640  # what is behind the last group is not read
    (dy, dy_scale), (x, x_scale) = fp8((16, P), (5, 16)), fp8((32, P), (5, 32))
    dy.view(torch.uint8)[:, 512:] = 0x7F  # NaN
    dy, x, ends = dy.t(), x.t(), ends_of(sizes)
    exact = torch.stack([
        dequantized(dy, dy_scale)[end - size : end].T @ dequantized(x, x_scale)[end - size : end]
        for end, size in zip(ends.tolist(), sizes, strict=True)
    ])  # fmt: skip
    scales = {"dy_scale": dy_scale, "x_scale": x_scale}
    dw = grouped.grouped_wgrad(dy, x, ends, out_dtype, **scales)
    assert dw.dtype == (out_dtype or torch.bfloat16)
    near = {"rtol": 2**-8 if out_dtype is None else 1e-5, "atol": 1e-3}
    torch.testing.assert_close(dw.double(), exact, **near)
    by_pytorch = pytorch.grouped_wgrad(dy, x, ends, out_dtype, **scales)
    # PyTorch may round a BF16 product up or down: one unit in the last place.
    torch.testing.assert_close(by_pytorch.double(), exact, rtol=2**-7, atol=1e-3)
    main = torch.randn(4, 16, 32)
    for out in ([main.clone()], list(main.clone().unbind(0))):
        grouped.grouped_wgrad_(out, dy, x, ends, True, **scales)
        got = out[0] if len(out) == 1 else torch.stack(out)
        torch.testing.assert_close(got.double(), main + exact, rtol=1e-5, atol=1e-3)


# --- as library ops -------------------------------------------------------------------------------


def opcheck_cases():
    ops = torch.ops.fusible
    ends, x, dy = ends_of([3, 0, 4, 1]), torch.randn(9, K), torch.randn(9, N)
    w, bias, scales = torch.randn(E, N, K), torch.randn(E, N), torch.rand(9)
    yield "ends", ops.group_ends, (torch.tensor([3, 0, 4, 1]), 9)
    no = None, None  # scales of FP8 operands
    yield "mm", ops.grouped_mm, (x, [w], ends, None, None, False, *no)
    yield "mm, everything", ops.grouped_mm, (x, list(w.unbind(0)), ends, bias, scales, False, *no)
    yield "mm, transposed", ops.grouped_mm, (dy, [w], ends, None, None, True, *no)
    yield "mm, no rows", ops.grouped_mm, (x[:0], [w], ends_of([0] * E), None, None, False, *no)
    glu = Glu("clamped_qgeglu", 2, 1.5, 1.702, 1.0)
    w1, w2, preact = torch.randn(E, 8, K), torch.randn(E, N, 4), torch.randn(9, 8)
    yield "glu", ops.grouped_glu, (x, [w1], ends, scales, *glu, torch.randn(E, 8), True, *no)
    yield "glu, not kept", ops.grouped_glu, (x, [w1], ends, scales, *Glu(), None, False, *no)
    yield "glu, not scaled", ops.grouped_glu, (x, [w1], ends, None, *glu, None, True, *no)
    yield "dglu", ops.grouped_dglu, (dy, [w2], ends, preact, scales, *glu)
    yield "wgrad", ops.grouped_wgrad, (dy, x, ends, None, *no)
    yield "wgrad, in FP64", ops.grouped_wgrad, (dy, x, ends, torch.float64, *no)
    index = torch.randint(0, 9, (9,), dtype=torch.int32)
    yield "sum", ops.grouped_sum, (dy, ends, None, None)
    yield "sum, scaled, by index", ops.grouped_sum, (dy[:4], ends, scales, index % 4)
    yield "dots", ops.grouped_dots, (dy, bias, ends, None)
    yield "dots, by index", ops.grouped_dots, (dy[:4], bias, ends, index % 4)
    for accumulate in (False, True):
        yield (
            f"wgrad_, {accumulate=}",
            ops.grouped_wgrad_,
            ([torch.randn(E, N, K)], dy, x, ends, accumulate, *no),
        )


def fp8_cases():
    ops, ends = torch.ops.fusible, ends_of([3, 0, 4, 1])
    (x, x_scale), (w, w_scale) = fp8((9, 160), (9, 2)), fp8((E, 144, 160), (E, 2, 2))
    products = x, [w], ends, torch.randn(E, 144).bfloat16(), torch.rand(9), False, x_scale, w_scale
    yield "mm, FP8", ops.grouped_mm, products
    glu = torch.rand(9), *Glu(), None, True
    yield "glu, FP8", ops.grouped_glu, (x, [w], ends, *glu, x_scale, w_scale)
    quantized = x, [w], ends, *glu, x_scale, w_scale, *fp8_block().as_constants()
    yield "glu, FP8, quantized", ops.grouped_glu_quantized, (*quantized, False)
    yield "glu, FP8, both quantized", ops.grouped_glu_quantized, (*quantized, True)
    (dy, dy_scale), (x, x_scale) = fp8((384, 16), (3, 16)), fp8((384, 32), (3, 32))
    ends = ends_of([128, 0, 256, 0])
    yield "wgrad, FP8", ops.grouped_wgrad, (dy, x, ends, None, dy_scale, x_scale)
    out = [torch.randn(E, 16, 32)]
    yield "wgrad_, FP8", ops.grouped_wgrad_, (out, dy, x, ends, True, dy_scale, x_scale)


@pytest.mark.parametrize(
    ("op", "args"), [pytest.param(op, args, id=name) for name, op, args in opcheck_cases()]
)
def test_opcheck(op, args):
    torch.library.opcheck(op.default, args)


@pytest.mark.parametrize("fmt", [fp8_tensor(), fp8_block(block=(128, 128))])
def test_an_activation_is_quantized_in_blocks_of_rows(fmt):
    (x, x_scale), (w, w_scale) = fp8((9, 160), (9, 2)), fp8((E, 144, 160), (E, 2, 2))
    given = x, [w], ends_of([3, 0, 4, 1]), None, Glu(), None, True, x_scale, w_scale
    with pytest.raises(ValueError, match=r"must have scales of 1x128 blocks, got .*; use grouped_"):
        grouped.grouped_glu_quantized(*given, fmt)


@pytest.mark.parametrize(
    ("op", "args"), [pytest.param(op, args, id=name) for name, op, args in fp8_cases()]
)
def test_opcheck_of_fp8(op, args):
    others = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(op.default, args, test_utils=others)  # the schema's compares FP8 values


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_integers_of_one_byte_are_no_fp8(dtype):
    x, w = torch.ones(10, K, dtype=dtype), torch.ones(E, N, K, dtype=dtype)
    y = grouped.grouped_mm(x, [w], ends_of([3, 2, 4, 1]))
    assert y.dtype == dtype
    assert torch.equal(y, torch.full((10, N), K, dtype=dtype))
