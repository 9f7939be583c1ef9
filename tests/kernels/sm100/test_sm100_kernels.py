"""The typed SM100 kernels: what they refuse themselves; padded groups; fakes."""

import re

import pytest
import torch
from number_formats import NV

import fusible as fz
from fusible import recipes
from fusible.kernels.glu import Glu
from fusible.kernels.sm100 import ops, padding, products, warmup
from fusible.kernels.sm100.checks import FP8
from fusible.kernels.sm100.limits import GROUP_ROWS
from fusible.recipes.blocks import group_starts, padded_size
from fusible.recipes.formats import mxfp8, nvfp4
from fusible.recipes.layout import swizzle_scales
from fusible.recipes.matrix import Operand
from fusible.recipes.quantization import quantize
from fusible.recipes.quantize_ops import quantize_matrix
from fusible.testing import assume_target, emulator_sm100

BF16, E8M0 = torch.bfloat16, torch.float8_e8m0fnu
M, N, K, E = 512, 128, 64, 2


class NoKernels:
    """Nothing is refused here: it must not come so far."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was called with what it cannot take")


def scales(rows, columns, groups=1):
    return torch.zeros(groups * -(-rows // 128) * -(-columns // 128) * 512, dtype=E8M0)


def fp8(*shape):
    return torch.zeros(shape, dtype=FP8)


def ends(*values, dtype=torch.int32):
    return torch.tensor(values or (256, 512), dtype=dtype)


PRODUCT = {
    "x": fp8(M, K),
    "x_scales": scales(M, K),
    "w": [fp8(E, N, K)],
    "w_scales": [scales(N, K, E)],
    "ends": ends(),
    "alpha": None,
}
SWIGLU = {"glu": Glu(interleave=32)}
GLU = {**PRODUCT, "bias": None, "prob": torch.ones(M), **SWIGLU}
# dY [M, K] against W2 [E, K, N] as it is stored: n = N, contiguous.
DGLU = {
    **PRODUCT,
    "w": [fp8(E, K, N)],
    "c": torch.zeros(M, 2 * N, dtype=BF16),
    "prob": torch.ones(M),
    "bias": False,
    **SWIGLU,
}
SRELU = {"glu": Glu("srelu")}
DSRELU = {**DGLU, "c": torch.zeros(M, N, dtype=BF16), **SRELU}
GEMM = {**PRODUCT, "bias": None, "row_scale": None, "transpose_w": False}
COLUMNS = torch.zeros(128, M // 32, dtype=E8M0)
WGRAD = {
    "out": [torch.zeros(E, N, K)],
    "dy": fp8(M, N),
    "dy_scales": COLUMNS,
    "x": fp8(M, K),
    "x_scales": COLUMNS,
    "ends": ends(),
    "dy_global": None,
    "x_global": None,
    "accumulate": False,
}
BFLOAT = {
    "x": torch.zeros(M, K, dtype=BF16),
    "x_scales": None,
    "w": [torch.zeros(E, N, K, dtype=BF16)],
    "w_scales": [],
}
KERNELS = {
    "glu": (ops._glu, GLU),
    "dglu": (ops._dglu, DGLU),
    "gemm": (ops._gemm, GEMM),
    "wgrad": (ops._wgrad_, WGRAD),
}


def run(kernel, arguments):
    """The op of a kernel, of its operands and all other arguments by name."""
    kind = ops.WgradOperands if kernel == "wgrad" else ops.ProductOperands
    operands = kind(**{name: arguments[name] for name in kind._fields})
    rest = {name: value for name, value in arguments.items() if name not in kind._fields}
    return KERNELS[kernel][0](operands=operands, **rest)


POINTERS = {"w": [fp8(N, K) for _ in range(E)], "w_scales": [scales(N, K) for _ in range(E)]}

WRONG = [
    # What the front end does not notice.
    ("glu", {"prob": torch.ones(M, dtype=BF16)}, "prob must be contiguous float32 of shape (512,)"),
    ("glu", {"prob": None}, "prob must be contiguous float32 of shape (512,), got None"),
    ("glu", {"prob": torch.ones(M - 1)}, "prob must be contiguous float32 of shape (512,)"),
    ("glu", {"ends": ends(dtype=torch.int64)}, "ends must be contiguous int32 of shape (2,), got"),
    ("glu", {"ends": ends(512)}, "ends must be contiguous int32 of shape (2,)"),
    ("glu", {"alpha": torch.ones(E, dtype=BF16)}, "alpha must be contiguous float32 of shape (2,)"),
    ("glu", {"x": fp8(K, M).t()}, "x must be contiguous and begin at a multiple of 16 bytes"),
    ("glu", {"w": [fp8(E, K, N).mT]}, "w[0] must be contiguous float8_e4m3fn of shape (2, 128, 64"),
    ("glu", {"w": [fp8(E, N, K).to(torch.float8_e5m2)]}, "w[0] must be contiguous float8_e4m3fn"),
    ("glu", {"bias": torch.zeros(E, N)}, "bias must be contiguous bfloat16 of shape (2, 128)"),
    (
        "glu",
        {"bias": torch.zeros(N, E, dtype=BF16).t()},
        "bias must be contiguous bfloat16 of shape (2, 128), got torch.bfloat16 of shape",
    ),
    ("glu", {**POINTERS, "bias": torch.zeros(E, N)}, "bias must be contiguous bfloat16 of"),
    ("glu", {**POINTERS, "w": 2 * [fp8(K, N).t()]}, "w[0] must be contiguous float8_e4m3fn of"),
    (
        "glu",
        {**POINTERS, "w_scales": 2 * [scales(N, 2 * K * 2)]},
        "scales of w[0] must be 512 contiguous torch.float8_e8m0fnu, packed for the MMA, got",
    ),
    (
        "glu",
        {"w": 2 * [fp8(N, 2 * K)], "w_scales": 2 * [scales(N, 2 * K)]},
        "x and w must share the reduced dimension 64, got 128",
    ),
    ("glu", {"glu": Glu()}, "interleave must be 32, got 0"),
    ("glu", {"glu": Glu("srelu", 32)}, "interleave must be 0, got 32"),
    ("glu", {**BFLOAT, **SRELU}, "x must be MXFP8 or NVFP4 with srelu, got torch.bfloat16"),
    (
        "glu",
        {**BFLOAT, "glu": Glu("situglu", 32, 1.0, 1.0)},
        "x must be MXFP8 or NVFP4 with situglu, got torch.bfloat16",
    ),
    ("dglu", SRELU, "c must be contiguous bfloat16 of shape (512, 128)"),
    ("dglu", {"prob": torch.ones(M, dtype=BF16)}, "prob must be contiguous float32"),
    ("dglu", {"c": torch.zeros(M, 2 * N)}, "c must be contiguous bfloat16 of shape (512, 256)"),
    (
        "dglu",
        {"c": torch.zeros(M, N, dtype=BF16)},
        "c must be contiguous bfloat16 of shape (512, 256)",
    ),
    ("dglu", {"w": [fp8(E, N, K)]}, "x and w must share the reduced dimension 64, got 128"),
    ("gemm", {"row_scale": torch.ones(M)}, "row_scale must come with the bias that it scales"),
    (
        "gemm",
        {"row_scale": torch.ones(M, dtype=BF16), "bias": torch.zeros(E, N, dtype=BF16)},
        "row_scale must be contiguous float32",
    ),
    ("gemm", {"w": [fp8(N, K), fp8(N, 2 * K)], "w_scales": 2 * [scales(N, K)]}, "w[1] must be con"),
    ("wgrad", {"dy": fp8(N, M).t()}, "dy must be contiguous and begin at a multiple of 16 bytes"),
    ("wgrad", {"dy_scales": COLUMNS.flatten()}, "scales of dy must be contiguous"),
    ("wgrad", {"dy_scales": COLUMNS.view(1, 4, 1, 32, 4, 4)}, "scales of dy must be contiguous"),
    ("wgrad", {"out": [torch.zeros(E, K, N)]}, "out must be contiguous float32 of shape (2, 128, "),
    ("wgrad", {"out": [torch.zeros(N, K)]}, "out must be one tensor or 2, got 1"),
    ("wgrad", {"out": [torch.zeros(E, N, K, dtype=torch.half)]}, "out must be BF16 or FP32"),
    ("wgrad", {"out": [torch.zeros(E, K, N).mT]}, "out must be contiguous"),
]

# What it refuses by itself, by what its sentences hold.
REFUSED = [
    ("gemm", {"x": fp8(M - 128, K), "x_scales": scales(M - 128, K)}, "divisible by 256"),
    ("gemm", {"x_scales": scales(M, 2 * K * 2)}, "complete MMA-packed scale buffer"),
    ("gemm", {"w_scales": []}, "sfb_tensor?\\)? (is|are) required|sample_sfb is required"),
    ("gemm", {"w_scales": [scales(N, K)]}, "complete MMA-packed scale buffer"),
    ("glu", {**BFLOAT, "glu": Glu("clamped_qgeglu", 32, 2.0)}, "forbids scale control geglu_alpha"),
    ("wgrad", {"x": torch.zeros(M, K, dtype=BF16), "x_scales": None}, "mixed dtype families"),
    (
        "wgrad",
        {
            "dy": torch.zeros(M, N, dtype=BF16),
            "dy_scales": None,
            "x": torch.zeros(M + 256, K, dtype=BF16),
            "x_scales": None,
        },
        "token dimensions must match",
    ),
]


@pytest.mark.parametrize(("kernel", "change", "sentence"), WRONG)
def test_wrong_arguments_are_refused_first(kernel, change, sentence):
    _, right = KERNELS[kernel]
    with assume_target("sm100", emulator_sm100):
        run(kernel, right)
    with assume_target("sm100", NoKernels()), pytest.raises(ValueError, match=re.escape(sentence)):
        run(kernel, {**right, **change})


def test_fp4_weight_gradients_need_their_factors():
    half = torch.zeros(N, M // 2, dtype=torch.uint8)
    packed = torch.zeros(N, M // 16, dtype=torch.float8_e4m3fn)
    given = {**WGRAD, "dy": half, "x": half, "dy_scales": packed, "x_scales": packed}
    given["out"] = [torch.zeros(E, N, N)]
    with (
        assume_target("sm100", NoKernels()),
        pytest.raises(ValueError, match="global_scale_a must be contiguous float32 of shape"),
    ):
        run("wgrad", given)


# --- launches -------------------------------------------------------------------------------------


def test_a_capture_needs_a_warm_configuration(monkeypatch):
    monkeypatch.setattr(warmup, "_warm", set())
    monkeypatch.setattr(warmup, "_last_streams", {})
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "a stream")
    gpu = torch.device("cuda", 0)
    warmup.before_launch(gpu, "glu", FP8, 64)
    capturing = True
    warmup.before_launch(gpu, "glu", FP8, 64)
    warmup.before_launch(torch.device("cpu"), "glu", FP8, 128)
    with pytest.raises(RuntimeError, match=r"must have run once before .* got glu in a conf"):
        warmup.before_launch(gpu, "glu", FP8, 128)


def test_another_stream_waits_for_the_last(monkeypatch):
    waited = []

    class Stream:
        def wait_stream(self, other):
            waited.append((self, other))

    first, second = Stream(), Stream()
    current = first
    monkeypatch.setattr(warmup, "_warm", set())
    monkeypatch.setattr(warmup, "_last_streams", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    gpu = torch.device("cuda", 0)
    for stream in (first, first, second, second, first):
        current = stream
        warmup.before_launch(gpu, "glu")
    assert waited == [(second, first), (first, second)]


# --- padded groups --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [([20, 0, 33], 60), ([256, 512], 768), ([1] * 5, 5), ([257, 255], 600), ([0], 0), ([0, 0], 9)],
)
def test_places_are_whole_tiles_and_cover_every_row(sizes, rows):
    end_rows = torch.tensor(sizes).cumsum(0).int()
    padded = padding.pad_groups(end_rows, rows, aligned=False)
    rooms = [-(-size // 256) * 256 for size in sizes]
    assert padded.ends.tolist() == torch.tensor(rooms).cumsum(0).tolist()
    assert padded.size % 256 == 0
    assert padded.size <= rows + 255 * len(sizes)
    assert padded.ends[-1] <= padded.size
    expected, start = [], 0
    for size, room in zip(sizes, rooms, strict=True):
        expected += range(start, start + size)
        start += room
    expected += [padded.size] * (rows - sum(sizes))
    assert padded.rows.tolist() == expected
    x = torch.randn(rows, 3)
    there = padding.pad_rows(x, padded)
    assert there.shape == (padded.size, 3)
    assert there.any(1).sum() == sum(sizes)
    back = padding.unpad_rows(torch.cat((there, torch.zeros(1, 3))), padded)
    assert torch.equal(back[: sum(sizes)], x[: sum(sizes)])
    assert not back[sum(sizes) :].any()


def test_the_worst_case_needs_all_places():
    """One row a group: the bound is met."""
    assert padded_size(4, 4, GROUP_ROWS) == 1024
    assert padded_size(256, 256, GROUP_ROWS) == 256 * 256


@pytest.mark.parametrize("fmt", [mxfp8(), nvfp4()])
@pytest.mark.parametrize("columns", [64, 192])
def test_packed_columns_are_those_of_each_group_alone(fmt, columns):
    sizes, rows = [300, 0, 20], 330
    end_rows = torch.tensor(sizes).cumsum(0).int()
    x = torch.randn(rows, columns, dtype=BF16)
    padded = padding.pad_groups(end_rows, rows, aligned=False)
    along, per_byte = fmt.block[1], fmt.element.per_byte
    _, column = quantize_matrix(x, fmt, rowwise=False, columnwise=True, ends=end_rows)
    data, packed = padding.packed_columns(column, padded)
    assert packed.shape == (-(-columns // 128) * 128, padded.size // along)
    start = 0
    for size, end in zip(sizes, padded.ends.tolist(), strict=True):
        first = int(group_starts(padded.ends)[sizes.index(size)])
        room = end - first
        alone = torch.zeros(room, columns, dtype=BF16)
        alone[:size] = x[start : start + size]
        if room:
            quantized = quantize(alone, fmt, columnwise=True)
            wanted = swizzle_scales(quantized.scale.T.contiguous()).view(torch.uint8).flatten()
            base = packed.shape[0] * first // along
            region = packed.view(torch.uint8).flatten()[base : base + len(wanted)]
            assert torch.equal(region, wanted)
            bits = quantized.data.view(torch.uint8)
            if per_byte == 2:
                values = torch.stack((bits & 15, bits >> 4), -1).flatten(1).T
                bits = (values[:, 0::2] | values[:, 1::2] << 4).flatten()
                assert torch.equal(data.flatten()[columns * first // 2 :][: len(bits)], bits)
            else:
                assert torch.equal(data.view(torch.uint8)[first:end], bits)
        start += size


def test_packed_rows_are_swizzled_where_they_lie():
    sizes = [300, 0, 20]
    end_rows = torch.tensor(sizes).cumsum(0).int()
    x = torch.randn(330, 192, dtype=BF16)
    padded = padding.pad_groups(end_rows, 330, aligned=False)
    row, _ = quantize_matrix(x, mxfp8(), rowwise=True, columnwise=False, ends=end_rows)
    data, packed = padding.packed_rows(row, padded)
    x[320:] = 0
    there = quantize(padding.pad_rows(x, padded), mxfp8())
    assert torch.equal(data.view(torch.uint8), there.data.view(torch.uint8))
    assert torch.equal(packed.view(torch.uint8), swizzle_scales(there.scale).view(torch.uint8))


# --- library ops ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "dtype", "change"),
    [
        *[(kernel, dtype, {}) for kernel in KERNELS for dtype in (FP8, BF16)],
        ("glu", FP8, SRELU),
        ("dglu", FP8, DSRELU),
    ],
)
def test_fakes_are_like_the_real_ones(kernel, dtype, change):
    name = f"sm100_{kernel}"
    arguments = {**KERNELS[kernel][1], **change}
    if kernel == "wgrad":
        del arguments["out"], arguments["accumulate"]
        arguments["out_dtype"] = BF16
    if dtype == BF16:
        for key, value in list(arguments.items()):
            if key in ("x", "dy"):
                arguments[key] = value.to(BF16)
            elif key.endswith("_scales"):
                arguments[key] = [] if isinstance(value, list) else None
            elif key == "w":
                arguments[key] = [w.to(BF16) for w in value]
    flat = []
    for value in arguments.values():
        flat.extend(value if isinstance(value, Glu) else (value,))
    with assume_target("sm100"):
        torch.library.opcheck(
            getattr(torch.ops.fusible, name).default,
            tuple(flat),
            # It multiplies the arguments, which FP8 cannot be.
            test_utils=("test_faketensor", *(["test_schema"] if dtype == BF16 else [])),
        )


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling(), NV])
def test_meta_tensors_have_no_values_to_read(recipe):
    """What stands for a device's tensors: forward and backward read nothing on the host."""
    options = {"dtype": BF16, "single_grouped_weight": True, "device": "meta"}
    module = fz.Sequential(
        fz.GroupedLinear(3, 64, 128, **options),
        fz.ScaledSwiGLU(glu_interleave_size=32),
        fz.GroupedLinear(3, 64, 64, **options),
    )
    x = torch.empty(50, 64, dtype=BF16, device="meta", requires_grad=True)
    prob = torch.empty(50, device="meta", requires_grad=True)
    splits = torch.empty(3, dtype=torch.int64, device="meta")
    with (
        assume_target("sm100", NoKernels()),
        fz.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        y = module(x, splits, prob, splits)
        y.sum().backward()
    assert module.plan.fired == ("grouped_mlp_sm100",)
    assert (y.shape, y.dtype) == ((50, 64), BF16)
    for t in (x, prob, *module.parameters()):
        assert (t.grad.shape, t.grad.dtype) == (t.shape, t.dtype)


def test_aligned_groups_stay_where_they_are():
    given = ends()
    padded = padding.pad_groups(given, M, aligned=True)
    assert padded.rows is None
    assert padded.ends is given
    assert padded.size == M
    # Other rows than whole tiles cannot be promised: they are padded.
    assert padding.pad_groups(given, M + 1, aligned=True).size == 768


def test_pack_keeps_what_is_not_quantized():
    x = torch.randn(5, 64, dtype=BF16)
    padded = padding.pad_groups(ends(2, 5), 5, aligned=False)
    packed = products.pad_and_pack(Operand(row_values=x, column_values=x), padded)
    assert packed.row_values is packed.column_values
    assert torch.equal(packed.row_values[padded.rows], x)
