"""Products of few rows with stored weights: numbers on arrays, the ops on the CPU, compilation."""

import re
from itertools import product

import numpy as np
import pytest
import torch
from pairs import every_pair
from stored_weights import FORMATS, stored

import fusible as fz
from fusible import recipes
from fusible.fused.grouped_mlp import GroupedMLP
from fusible.kernels import few_rows, grouped
from fusible.kernels.few_rows.spec import FewRowsSpec, reads_format, supports_weights
from fusible.kernels.glu import Glu
from fusible.recipes.formats import (
    E4M3,
    E5M2,
    NumberFormat,
    mxfp8,
    nvfp4,
)
from fusible.testing import assume_target

# --- numbers, on arrays --------------------------------------------------------------------------


@pytest.fixture
def device_code(monkeypatch):
    """The module of device code, of which plain functions run on numpy's integers."""
    pytest.importorskip("cutlass")
    from fusible.kernels.few_rows.device import product

    monkeypatch.setattr(product, "Uint32", np.uint32)
    monkeypatch.setattr(product, "_halves", lambda a, b, high: _halves(a, b, 16 * high))
    return product


def _halves(a, b, shift):
    return (a >> np.uint32(shift)) & np.uint32(0xFFFF) | (b >> np.uint32(shift)) << np.uint32(16)


def bf16(words, exponent):
    """The numbers of pairs, in order, times ``2^exponent``; BF16 of a pair by FP32's bits."""
    halves = [
        half for word in words for half in (word << np.uint32(16), word & np.uint32(65535 << 16))
    ]
    floats = [np.asarray(half, np.uint32).view(np.float32).astype(np.float64) for half in halves]
    return np.stack(floats, -1) * 2.0**exponent


@pytest.mark.parametrize("fmt", [mxfp8(), nvfp4()], ids=lambda f: f.element.name)
def test_elements_become_bf16_in_the_order_of_x(device_code, fmt):
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (4096, 8 // fmt.element.per_byte), dtype=np.uint8)
    if fmt.element is E4M3:
        data[:256, 0] = np.arange(256)
        data[data & 127 == 127] = 0  # NaN, see the next test
        values = torch.from_numpy(data).view(torch.float8_e4m3fn).double().numpy()
    else:
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = np.stack([data & 15, data >> 4], -1).reshape(len(data), 8)
        values = np.where(codes & 8, -1.0, 1.0) * table[codes & 7]
    words = np.moveaxis(data.view(np.uint32), -1, 0)
    exponent = device_code._BIAS[fmt.element.name]
    # x numbers the columns: as many BF16 integers as there are.
    order = np.arange(8, dtype=np.float32).view(np.uint32)
    x = [order[i] >> np.uint32(16) | order[i + 1] & np.uint32(0xFFFF0000) for i in range(0, 8, 2)]
    columns = bf16(device_code.x_pairs(x, fmt), 0).astype(int)
    assert sorted(columns) == list(range(8))
    got = bf16(device_code.weight_pairs(list(words), fmt), exponent)
    np.testing.assert_array_equal(got, values[:, columns])


def test_every_nan_element_is_noticed(device_code):
    codes = np.arange(256, dtype=np.uint32)
    nan = (codes & 127) == 127
    for at in range(0, 32, 8):
        others = np.uint32(0x7E7E7E7E & ~(0xFF << at))  # the largest numbers beside it
        found = device_code.nan_bytes(codes << np.uint32(at) | others) != 0
        np.testing.assert_array_equal(found, nan)


# --- what is supported ---------------------------------------------------------------------------


def test_formats_of_weights():
    assert all(reads_format(fmt) for fmt in FORMATS)
    assert reads_format(NumberFormat("fp32_scales_of_64", E4M3, (1, 64), "fp32"))
    assert not reads_format(mxfp8(E5M2))
    assert not reads_format(NumberFormat("e8m0_scales_of_256", E4M3, (1, 256), "e8m0_up"))


def test_sizes_and_machines():
    assert supports_weights(90, "bfloat16", mxfp8(), 128, 1536, 2048)
    assert supports_weights(90, "bfloat16", nvfp4(), 128, 2880, 2880)
    for sm, dtype, fmt, groups, features, depth in (
        (80, "bfloat16", mxfp8(), 8, 64, 64),
        (100, "bfloat16", mxfp8(), 8, 64, 64),
        (90, "float16", mxfp8(), 8, 64, 64),
        (90, "bfloat16", mxfp8(), 8, 60, 64),
        (90, "bfloat16", mxfp8(), 8, 64, 72),
        (90, "bfloat16", nvfp4(), 8, 64, 48),
        (90, "bfloat16", mxfp8(), 2000, 64, 64),
        (90, "bfloat16", mxfp8(), 8, 1 << 17, 1 << 14),
    ):
        assert not supports_weights(sm, dtype, fmt, groups, features, depth)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("depth", [512, 2048, 14336])
@pytest.mark.parametrize("rows", [1, 8, 9, 512])
def test_tiles_fit(fmt, rows, depth):
    across, row_tiles = few_rows._tile(fmt, 8, rows, depth)
    spec = FewRowsSpec(fmt, warps_across=across, row_tiles=row_tiles)
    assert spec.warps_across * spec.warps_along == 8
    assert spec.shared_percent <= 100
    assert not (spec.scales_sums and row_tiles == 4)


def compiled_specs():
    """Every pair of format, number of rows and epilogue; each format with most rows in both."""
    few, most = product(FORMATS, (1, 2), (False, True)), product(FORMATS, (4,), (False, True))
    for fmt, row_tiles, gated in [*every_pair(few), *most]:
        spec = FewRowsSpec(fmt, table=gated, bias=gated, scale="f32", row_tiles=row_tiles)
        if spec.scales_sums and row_tiles == 4:
            continue  # not chosen: see test_tiles_fit
        if gated:
            of_glu = {"activation": "swiglu", "gated": True, "interleave": 32}
            spec = spec._replace(**of_glu, warps_across=2)
        yield pytest.param(spec, id=f"{fmt.name}-{row_tiles}-{gated}")


@pytest.mark.parametrize("spec", [*compiled_specs()])
def test_kernels_compile_with_few_spills(spec, capfd, tmp_path):
    pytest.importorskip("cutlass")
    from fusible.kernels.runtime.launch import compile_kernel

    options = f"--gpu-arch sm_90a remarks{{ptx}} --keep-ptx --dump-dir={tmp_path}"
    compile_kernel("few_rows.product.product", (spec,), options)
    report = "".join(capfd.readouterr())
    assert "Used " in report
    # The assembler fills the registers that two blocks leave: a few constants of the loop spill.
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", report))) <= 100
    (ptx,) = [path.read_text() for path in tmp_path.glob("*.ptx")]
    assert 0 < ptx.index("griddepcontrol.wait") < ptx.index("ld.global")


# --- the ops -------------------------------------------------------------------------------------


def random_stored(fmt, groups, features, depth, separate):
    return stored(torch.randn(groups, features, depth).bfloat16(), fmt, separate)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_ops_are_those_of_the_values(fmt, separate):
    w, values = random_stored(fmt, 4, 32, 64, separate)
    if not separate:
        values = [values]
    x, ends = torch.randn(12, 64).bfloat16(), torch.tensor([3, 3, 9, 10], dtype=torch.int32)
    bias, scales = torch.randn(4, 32).bfloat16(), torch.rand(12)
    for given in ((), (bias,), (bias, scales)):
        got = grouped.grouped_mm_stored(x, w, fmt, ends, *given)
        assert torch.equal(got, grouped.grouped_mm(x, [*values], ends, *given))
    for glu in (Glu(), Glu("swiglu", 8), Glu("srelu")):
        got = grouped.grouped_glu_stored(x, w, fmt, ends, scales, glu, bias)
        want = grouped.grouped_glu(x, [*values], ends, scales, glu, bias, False)[1]
        assert torch.equal(got, want)
        assert not got[10:].any()


@pytest.fixture
def launches(monkeypatch):
    """What is launched for operands on the CPU, as if it were Hopper."""
    made = []
    monkeypatch.setattr(few_rows, "_supports", lambda *_: True)
    monkeypatch.setattr(few_rows, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(few_rows, "launch", lambda *args: made.append(args))
    return made


def test_what_is_launched(launches):
    w, _ = random_stored(nvfp4(), 4, 64, 256, False)
    x, ends = torch.randn(9, 256).bfloat16(), torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    bias, scales = torch.randn(4, 64).bfloat16(), torch.rand(9, dtype=torch.float64)
    out = few_rows.grouped_glu_stored(x, w, nvfp4(), ends, scales, Glu("swiglu", 8, 1.0), bias)
    ((path, (spec,), device, *args),) = launches
    assert (path, device) == ("few_rows.product.product", x.device)
    assert spec == FewRowsSpec(nvfp4(), False, True, "f32", "swiglu", 8, True, 4, 2)
    assert out.shape == (9, 32)
    given = [t.data_ptr() if isinstance(t, torch.Tensor) else t for t in args]
    assert given[:6] == [
        x.data_ptr(), w.data[0].data_ptr(), w.scale[0].data_ptr(), w.tensor_scale[0].data_ptr(),
        None, ends.data_ptr(),
    ]  # fmt: skip
    assert given[6] == bias.data_ptr()
    assert torch.equal(args[7], scales.float())
    assert given[8:] == [out.data_ptr(), 9, 32, 256, 4, 1.0, 0.0, 0.0, 5]

    few_rows.grouped_mm_stored(x, w, nvfp4(), ends, None, scales[:3])  # which nothing reads
    assert launches[1][1] == (FewRowsSpec(nvfp4(), warps_across=4, row_tiles=2),)
    assert few_rows.grouped_mm_stored(x[:0], w, nvfp4(), torch.zeros_like(ends)).shape == (0, 64)
    many = torch.randn(few_rows.max_rows(nvfp4()) * 4 + 1, 256).bfloat16()
    assert few_rows.grouped_mm_stored(many, w, nvfp4(), ends) is NotImplemented
    assert len(launches) == 2


@pytest.mark.parametrize("part", [0, 1])
def test_weights_that_begin_anywhere_are_not_launched(part, launches):
    w, _ = random_stored(mxfp8(), 2, 64, 128, False)
    at = w[part][0].contiguous().view(torch.uint8)
    moved = torch.empty(at.numel() + 1, dtype=torch.uint8)[1:].view(at.shape)
    w[part][0] = moved.copy_(at).view(w[part][0].dtype)
    x, ends = torch.randn(5, 128).bfloat16(), torch.tensor([3, 5], dtype=torch.int32)
    assert few_rows.grouped_mm_stored(x, w, mxfp8(), ends) is NotImplemented
    assert not launches


def test_operands_that_do_not_fit_raise(launches):
    w, _ = random_stored(mxfp8(), 2, 64, 128, False)
    x, ends = torch.randn(5, 128).bfloat16(), torch.tensor([3, 5], dtype=torch.int32)
    bias, scale = torch.randn(2, 64).bfloat16(), torch.rand(5)
    few_rows.grouped_mm_stored(x, w, mxfp8(), ends, bias, scale)
    for wrong, named in (
        ((x[:, :64], ends, bias, scale), "x must have 128 columns"),
        ((x, ends.long(), bias, scale), "ends must be"),
        ((x, ends[:1], bias, scale), "ends must be"),
        ((x, ends, bias[:, :32], scale), "bias must be"),
        ((x, ends, bias, scale[:4]), "scales must have"),
    ):
        with pytest.raises(ValueError, match=named):
            few_rows.grouped_mm_stored(wrong[0], w, mxfp8(), *wrong[1:])
    for part in (
        w._replace(scale=[w.scale[0][:, :32].contiguous()]),
        w._replace(tensor_scale=[torch.ones(2, 1)]),
        w._replace(data=[w.data[0], w.data[0]]),
        w._replace(data=[w.data[0].to("meta")]),
    ):
        with pytest.raises(ValueError, match="of weights in mxfp8_e4m3 must be"):
            few_rows.grouped_mm_stored(x, part, mxfp8(), ends)
    assert len(launches) == 1


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_weights_of_every_format_fit(fmt, separate, launches):
    x, ends = torch.randn(5, 96).bfloat16(), torch.tensor([1, 3, 5], dtype=torch.int32)
    w, _ = random_stored(fmt, 3, 72, 96, separate)
    shape = few_rows._shape(w, fmt)
    assert shape == (3, 72, 96)
    assert few_rows._reads(x, w, fmt, shape)
    few_rows._checked(x, w, fmt, shape, ends, torch.randn(3, 72).bfloat16(), torch.rand(5))


@pytest.mark.parametrize("op", ["grouped_mm_stored", "grouped_glu_stored"])
def test_ops_pass_opcheck(op):
    w, _ = random_stored(nvfp4(), 3, 32, 64, True)
    x, ends = torch.randn(5, 64).bfloat16(), torch.tensor([1, 3, 5], dtype=torch.int32)
    args = x, *w, *nvfp4().as_constants(), ends, None
    if "glu" in op:
        args = (*args, *Glu())
    # Of the eight-bit dtypes PyTorch's other checks multiply elements, which it cannot.
    torch.library.opcheck(
        getattr(torch.ops.fusible, op).default, (*args, None), test_utils="test_faketensor"
    )


# --- modules -------------------------------------------------------------------------------------

RECIPES = [
    recipes.MXFP8BlockScaling(),
    recipes.NVFP4BlockScaling(),
    recipes.NVFP4BlockScaling(disable_2d_quantization=True),
    recipes.Float8BlockScaling(),
    recipes.Float8CurrentScaling(),
]


def mlp(separate, dtype=torch.bfloat16):
    torch.manual_seed(0)
    options = {"dtype": dtype, "single_grouped_weight": not separate}
    fc1 = fz.GroupedLinear(4, 64, 256, bias=True, **options)
    return fz.Sequential(fc1, fz.ScaledSwiGLU(), fz.GroupedLinear(4, 128, 64, **options))


def arguments(dtype=torch.bfloat16):
    x, sizes = torch.randn(11, 64).to(dtype), torch.tensor([4, 0, 3, 2])
    return x, sizes, torch.rand(11), sizes


def calls(monkeypatch):
    """The names of the ops for stored weights that are called from now on."""
    made = []
    for name in ("grouped_mm_stored", "grouped_glu_stored"):
        op = getattr(grouped, name)
        monkeypatch.setattr(grouped, name, lambda *a, n=name, op=op: made.append(n) or op(*a))
    return made


def stored_and_plain(recipe, separate, usage):
    """A block of stored weights, and one of their values."""
    block = fz.quantize_(mlp(separate), recipe, usage=usage)
    plain = mlp(separate)
    with torch.no_grad():
        for own, given in zip(plain.parameters(), block.parameters(), strict=True):
            own.copy_(given)
    return block, plain


@pytest.mark.parametrize("usage", ["inference", "training"])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_inference_multiplies_weights_as_they_are_stored(recipe, separate, usage, monkeypatch):
    block, plain = stored_and_plain(recipe, separate, usage)
    given, made = arguments(), calls(monkeypatch)
    with torch.no_grad():
        want = plain(*given)
        assert made == []
        assert torch.equal(block(*given), want)
        assert made == ["grouped_mm_stored"] * 2
        # The plan of Hopper, with its activation in the epilogue, by the definitions of the CPU.
        with assume_target("sm90"):
            assert any(isinstance(op, GroupedMLP) for op in block_plan(block, given))
            made.clear()
            assert torch.equal(block(*given), want)
        assert made == ["grouped_glu_stored", "grouped_mm_stored"]
    x = given[0].clone().requires_grad_()
    before = len(made)
    block(x, *given[1:]).sum().backward()
    # The first linear's input needs its gradient, and so does the second's.
    assert len(made) == before
    assert x.grad is not None


@pytest.mark.parametrize(
    ("recipe", "separate", "usage"),
    every_pair(product(RECIPES, (False, True), ("inference", "training"))),
    ids=str,
)
def test_compiled_inference_gives_the_same(recipe, separate, usage, fresh_compiler):
    block, plain = stored_and_plain(recipe, separate, usage)
    given = arguments()
    with torch.no_grad():
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*given), plain(*given))


def block_plan(block, given):
    return fz.explain(block, *given, target="sm90").plans[0].forward_ops


def test_under_the_recipe_of_their_format(monkeypatch):
    recipe = recipes.MXFP8BlockScaling()
    block = fz.quantize_(mlp(True), recipe, usage="inference")
    plain = mlp(True)
    with torch.no_grad():
        for own, given in zip(plain.parameters(), block.parameters(), strict=True):
            own.copy_(given)
    given, made = arguments(), calls(monkeypatch)
    with torch.no_grad(), fz.autocast(recipe=recipe):
        want = plain(*given)
        assert made == []
        assert torch.equal(block(*given), want)
    assert made == ["grouped_mm_stored"] * 2


def test_trained_biases_need_the_preactivation(monkeypatch):
    """The input needs no gradient, the bias does: the weights are read as values."""
    recipe = recipes.MXFP8BlockScaling()
    block, plain = fz.quantize_(mlp(False), recipe), mlp(False)
    with torch.no_grad():
        for own, given in zip(plain.parameters(), block.parameters(), strict=True):
            own.copy_(given)
    grads = []
    for module in (block, plain):
        for name, p in module.named_parameters():
            p.requires_grad_(name == "0.bias0")
        with assume_target("sm90"):
            torch.manual_seed(1)
            module(*arguments()).float().square().sum().backward()
        grads.append(module[0].bias0.grad)
    assert torch.equal(*grads)


def test_other_nominal_dtypes_are_dequantized(monkeypatch):
    block = fz.quantize_(mlp(False, torch.float32), recipes.MXFP8BlockScaling())
    made = calls(monkeypatch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        block(*arguments(torch.float32))
    assert made == []


def test_explain_says_how_weights_are_read():
    given = arguments()
    block = mlp(False)
    read = "by weights as they are stored"
    assert read not in str(fz.explain(block, *given, target="sm90"))
    fz.quantize_(block, recipes.NVFP4BlockScaling(), usage="inference")
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            assert str(fz.explain(block, *given, target="sm90")).count(read) == 2
    half = mlp(False, torch.float16)
    fz.quantize_(half, recipes.NVFP4BlockScaling(), usage="inference")
    text = str(fz.explain(half, *arguments(torch.float16), target="sm90"))
    assert text.count("every forward dequantizes the stored weights") == 2
    with torch.no_grad(), fz.autocast(recipe=recipes.NVFP4BlockScaling()):
        assert read not in str(fz.explain(block, *given, target="sm90"))
