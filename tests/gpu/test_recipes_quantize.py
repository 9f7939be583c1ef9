"""The CUDA quantizers give the bits of the formulas, which run on the CPU here."""

import pytest
import reference as ref
import torch
from checks import graph_of, launched, never_waiting
from number_formats import FORMATS, GROUPED, OWN, is_square

from fusible.kernels.quantize.cuda import supports_matrix
from fusible.recipes.formats import mxfp8
from fusible.recipes.matrix import QuantizedMatrix, Uses
from fusible.recipes.quantization import dequantize
from fusible.recipes.quantize_ops import quantize_for, quantize_matrix

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ENDS = {
    "one": [96],
    "ragged": [0, 1, 33, 33, 64, 95],
    "tail": [5, 5, 40],
    "empty": [0, 0],
    "beyond": [32, 1000],
    "many": [3 * i for i in range(1, 33)],
    "more than a warp": sorted([i % 97 for i in range(100)]),
}


def formats(*names):
    """Tests of each format on one worker of ``pytest -n 8 --dist loadgroup``, which compiles it."""
    params = [
        pytest.param((FORMATS | OWN)[n], marks=pytest.mark.xdist_group(n), id=n) for n in names
    ]
    return pytest.mark.parametrize("fmt", params)


each_format = formats(*FORMATS, *OWN)
each_format_with_groups = formats(*GROUPED, *OWN)
four_formats = formats("mxfp8_e4m3", "fp8_1x128_e4m3", "fp8_tensor_e4m3", "nvfp4")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


def hostile(*shape, dtype=torch.bfloat16, special=True, seed=0):
    """Numbers of every magnitude, zero and tiny blocks, zeros of both signs; NaN and Inf too."""
    g = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-140, 127, shape, generator=g)
    x = torch.randn(shape, generator=g) * 2.0**exponents
    mode = torch.randint(0, 8, shape, generator=g)
    x = torch.where(mode < 6, torch.randn(shape, generator=g), x)
    largest = torch.finfo(dtype).max
    x = torch.where(mode == 6, x, x.clamp(-largest, largest))
    x = torch.where(x.isfinite(), x, 1.0)
    if shape[-1] >= 384:
        x[..., 96:256] = 0
        x[..., 256:384] *= 1e-38
        x[..., 100] = -0.0
    x = x.to(dtype)
    x = x if special else torch.where(x.isfinite(), x, 1)
    if special and shape[-1] >= 384:
        rows = shape[-2]
        x[..., rows // 2, 40] = float("nan")
        x[..., rows // 3, 70] = float("inf")
        x[..., rows // 4, 71] = -float("inf")
    return x


def matrix_of(tensors, fmt, columnwise, ends):
    data, scale, tensor_scale = [t if t.numel() else None for t in tensors[:3]]
    return QuantizedMatrix(data, scale.view(fmt.scale_dtype), tensor_scale, fmt, columnwise, ends)


def compare(x, fmt, ends=None, uses=(True, True), dequantized=(torch.bfloat16,)):
    """Bits of every piece, and values dequantized from them."""
    uses = uses if fmt.directional else (True, False)
    on_device = x.cuda(), None if ends is None else ends.cuda()
    assert supports_matrix(on_device[0], x.dtype, on_device[1])
    got = torch.ops.fusible.quantize(*on_device, None, *fmt.as_constants(), *uses)
    want = torch.ops.fusible.quantize(x, ends, None, *fmt.as_constants(), *uses)
    ref.assert_same_bits(got, want)
    for dtype in dequantized:
        for columnwise in (False, True):
            if not uses[columnwise]:
                continue
            pieces = [t if t.numel() else None for t in got[3 * columnwise :][:3]]
            values = torch.ops.fusible.dequantize(
                *pieces, *fmt.as_constants(), columnwise, on_device[1], dtype
            )
            expected = dequantize(matrix_of(want[3 * columnwise :], fmt, columnwise, ends), dtype)
            assert values.dtype == dtype
            torch.testing.assert_close(values.cpu(), expected, rtol=0, atol=0, equal_nan=True)
            signs = expected.signbit() | expected.isnan()
            assert torch.equal(values.cpu().signbit() | expected.isnan(), signs)


@each_dtype
@each_format
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("uses", [(True, True), (True, False), (False, True)])
def test_bits(fmt, dtype, special, uses):
    x = hostile(256, 1152, dtype=dtype, special=special)
    compare(x, fmt, uses=uses, dequantized=DTYPES if dtype == torch.bfloat16 else [dtype])


@each_dtype
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("ends", ENDS)
@each_format_with_groups
def test_bits_of_groups(fmt, ends, special, dtype):
    x = hostile(96, 1152, dtype=dtype, special=special)
    compare(x, fmt, torch.tensor(ENDS[ends], dtype=torch.int32))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("wanted", [Uses(False, True, True, False), Uses(False, False, True, True)])
@each_format
def test_bits_of_values_from_the_launch_that_quantizes(fmt, wanted, special):
    x = hostile(128, 1152, special=special)
    compare_quantized(x, fmt, wanted)
    for ends in ENDS.values() if not is_square(fmt) else ():
        compare_quantized(x[:97], fmt, wanted, torch.tensor(ends, dtype=torch.int32))


@each_dtype
@four_formats
def test_bits_of_everything_at_once(fmt, dtype):
    x = hostile(2, 100, 1152, dtype=dtype)
    compare_quantized(x, fmt, Uses(True, True, True, True))
    compare_quantized(x[:, :, :24], fmt, Uses(False, False, False, True))


def compare_quantized(x, fmt, wanted, ends=None):
    """Bits of what direct calls give, against the formulas."""
    on_device = None if ends is None else ends.cuda()
    with torch.no_grad():
        got = quantize_for(x.cuda(), fmt, wanted, on_device)
    uses = (wanted.rowwise, wanted.columnwise)
    matrices = quantize_matrix(x, fmt, rowwise=uses[0], columnwise=uses[1], ends=ends)
    for columnwise, use in enumerate(matrices):
        assert (got[columnwise] is not None) == wanted[columnwise]
        assert (got[2 + columnwise] is not None) == wanted[2 + columnwise]
        if wanted[columnwise]:
            assert (got[columnwise].tensor_scale is None) == (use.tensor_scale is None)
            pieces = [[t for t in m[:3] if t is not None] for m in (got[columnwise], use)]
            ref.assert_same_bits(*pieces)
        if wanted[2 + columnwise]:
            want = dequantize(use, torch.bfloat16)
            nan = want.isnan()
            values = got[2 + columnwise].cpu()
            assert torch.equal(values.isnan(), nan)
            ref.assert_same_bits([values.masked_fill(nan, 0)], [want.masked_fill(nan, 0)])


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 33, 127, 129, 300])
@pytest.mark.parametrize("columns", [128, 896, 1024, 2176])
@four_formats
def test_bits_at_tile_edges(fmt, rows, columns):
    compare(hostile(rows, columns, special=False, seed=rows), fmt)


@pytest.mark.parametrize("columns", [8, 24, 104])
@four_formats
def test_bits_of_columns_that_are_no_blocks_column_wise(fmt, columns):
    compare(hostile(200, columns, special=False), fmt, uses=(False, True))


@pytest.mark.parametrize("rows", [128, 40])
@each_format
def test_bits_of_a_batch_of_matrices(fmt, rows):
    rows = 128 if is_square(fmt) else rows
    x = hostile(2, 3, rows, 384, special=False)
    x[1, 1, 3, 5] = float("nan")
    compare(x, fmt)
    compare(x[:, 1:], fmt)


@each_format
def test_bits_of_every_bf16(fmt):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    compare(every.view(256, 256), fmt)
    finite = torch.where(every.isfinite(), every, 0).sort().values
    compare(finite.view(512, 128).repeat_interleave(2, 1), fmt)
    blocks = torch.zeros(65536, 32, dtype=torch.bfloat16)
    blocks[:, 0] = every
    blocks[:, 1] = every.flip(0)
    compare(blocks.view(-1, 128), fmt)


@pytest.mark.parametrize("amax", [6.0, 1.0, 448.0, 3.0e38, 1.1e-38, 1e-44])
@each_format
def test_bits_beside_every_rounding_boundary(fmt, amax):
    """FP32 numbers at and beside the halfway points of the elements, under a given maximum."""
    steps = torch.arange(0, 64.5, 0.25).tolist() + [2.0**-e for e in range(1, 40)]
    around = torch.tensor(steps)
    points = torch.stack(
        (around, around.nextafter(torch.tensor(1e3)), around.nextafter(around - 1))
    )
    points = torch.cat((points.flatten(), -points.flatten()))
    x = (points / points.abs().max() * amax).to(torch.float32)
    x = torch.nn.functional.pad(x, (0, -len(x) % 127)).view(-1, 127)
    x = torch.nn.functional.pad(x, (1, 0), value=amax).repeat(1, 2)
    compare(torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 128)), fmt)


@each_format
def test_bits_of_int64_ends_and_row_pitch(fmt):
    x = hostile(128, 768, special=False)
    ends = None if is_square(fmt) else torch.tensor([7, 60, 60, 90])
    compare(x[:, :512], fmt, ends)
    compare(x[:, 3:515], fmt, ends)  # misaligned
    compare(x.t()[:256], fmt, ends)
    compare(x[:1].expand(128, -1), fmt, ends)


@each_format
@pytest.mark.parametrize("shape", [(96, 264), (2, 130, 136), (200, 2880), (5, 48)])
def test_bits_of_short_blocks(fmt, shape):
    x = torch.randn(shape, dtype=torch.bfloat16)
    compare(x, fmt)
    if x.dim() == 2 and not is_square(fmt):
        compare(x, fmt, torch.tensor([2, 3, 3, 5]))


def test_many_rows():
    x = torch.randn(70000, 8200, dtype=torch.bfloat16)[:, :8192].cuda()  # more than 2^29 numbers
    got = torch.ops.fusible.quantize(x, None, None, *mxfp8().as_constants(), True, True)
    for rows in (slice(0, 64), slice(69920, 69984)):
        want = torch.ops.fusible.quantize(
            x[rows].cpu(), None, None, *mxfp8().as_constants(), True, True
        )
        blocks = slice(rows.start // 32, rows.stop // 32)
        ref.assert_same_bits(
            [got[0][rows], got[1][rows], got[3][rows], got[4][blocks]],
            [want[0], want[1], want[3], want[4]],
        )


@each_format_with_groups
def test_a_captured_graph_follows_new_ends(fmt):
    x = hostile(256, 512, special=False)
    ends = torch.tensor([64, 128, 256], dtype=torch.int32, device="cuda")
    uses = (True, True) if fmt.directional else (True, False)
    on_gpu = x.cuda()

    def step():
        pieces = torch.ops.fusible.quantize(on_gpu, ends, None, *fmt.as_constants(), *uses)
        row = [t if t.numel() else None for t in pieces[:3]]
        return pieces, torch.ops.fusible.dequantize(
            *row, *fmt.as_constants(), False, ends, torch.bfloat16
        )

    graph, (got, values) = graph_of(step)
    for sizes in ([64, 128, 256], [1, 2, 3], [33, 33, 250]):
        ends.copy_(torch.tensor(sizes))
        graph.replay()
        want = torch.ops.fusible.quantize(x, torch.tensor(sizes), None, *fmt.as_constants(), *uses)
        ref.assert_same_bits(got, want)
        row = matrix_of(want, fmt, False, torch.tensor(sizes))
        assert torch.equal(values.cpu(), dequantize(row, torch.bfloat16))


@each_format
def test_no_host_synchronisation_and_the_launches_that_are_promised(fmt):
    ends = None if is_square(fmt) else torch.tensor([64, 256], device="cuda")
    x, uses = hostile(256, 512).cuda(), (True, fmt.directional)

    def step():
        pieces = torch.ops.fusible.quantize(x, ends, None, *fmt.as_constants(), *uses)
        row = [t if t.numel() else None for t in pieces[:3]]
        return torch.ops.fusible.dequantize(*row, *fmt.as_constants(), False, ends, torch.bfloat16)

    @torch.no_grad()
    def direct_step():
        return quantize_for(x, fmt, Uses(False, True, True, False), ends)

    whole = fmt.block is None or fmt.has_tensor_scale
    # The largest magnitudes of whole matrices: a fill and a pass. Then one pass, and one back.
    for call, passes in ((step, 2), (direct_step, 1)):
        call()
        with never_waiting():
            call()
        kernels, _ = launched(call)
        assert len(kernels) == passes + 2 * whole, kernels
