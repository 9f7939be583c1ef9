"""The kernel that quantizes operands of FP8 products gives the bits of the definition."""

import pytest
import reference as ref
import torch
from checks import graph_of, launched, never_waiting, poison_free_memory

from fusible.kernels.quantize import k_major
from fusible.kernels.quantize.cuda import supports_matrix
from fusible.kernels.quantize.k_major import quantize_k_major, transposed
from fusible.recipes.formats import E5M2, fp8_block, fp8_tensor

pytestmark = pytest.mark.gpu

ENDS = {
    "none": None,
    "ragged": [0, 1, 128, 256, 385, 513],  # groups of 0, 1, 127, 128, 129 and 128 rows, and a tail
    "whole": [600],
    "empty": [0, 0],
    "beyond": [130, 1000],
    "many": [5 * i for i in range(1, 100)],
}
FORMATS = {
    "e4m3": fp8_block(),
    "e5m2": fp8_block(E5M2),
    "fp32_scales": fp8_block(power_of_two=False, amax_epsilon=1e-3),
    "groups": fp8_tensor(),
    "groups_e5m2_powers": fp8_tensor(E5M2, power_of_two=True),
}
SQUARE, MATRIX = fp8_block(block=(128, 128)), fp8_tensor()
each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
USES = [(True, True), (True, False), (False, True)]
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
each_use = pytest.mark.parametrize("uses", USES, ids=["both", "rows", "columns"])


def numbers(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-12, 12, (*shape[:-1], 1), generator=generator)
    x = (torch.randn(shape, generator=generator) * 2.0**exponents).to(dtype)
    x[..., 40, 3], x[..., 7, 140] = float("nan"), float("inf")
    if len(shape) > 2:  # a matrix without either
        x[0].nan_to_num_(0.0, 1.0)
    return x


def compare(x, fmt, ends, uses, on_device=None, index=None):
    """Bits of each piece, to the end of the last padded group."""
    op = torch.ops.fusible.quantize_k_major
    want = op(x, ends, index, *fmt.as_constants(), *uses)
    x = x.cuda() if on_device is None else on_device
    ends, index = (None if t is None else t.cuda() for t in (ends, index))
    assert supports_matrix(x, x.dtype, ends)
    poison_free_memory()
    got = op(x, ends, index, *fmt.as_constants(), *uses)
    same_to_the_padded_end(got, want, fmt, uses)


def same_to_the_padded_end(got, want, fmt, uses):
    if uses[1] and want[4].numel():
        end = int(want[4][-1])
        got, want = [
            [*p[:2], p[2][:, :end].contiguous(), p[3][: end // 128], p[4]] for p in (got, want)
        ]
    ref.assert_same_bits(got, want)


@each_use
@each_dtype
@each_format
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_bits_of_rows(ends, fmt, dtype, uses):
    if ends is None and fmt.block is None:
        pytest.skip("a matrix as weights are")
    x = numbers(600, 2880 if uses == (True, True) else 272, dtype=dtype)
    compare(x, fmt, None if ends is None else torch.tensor(ends, dtype=torch.int32), uses)


def index_of(tokens, rows, ends):
    """The token of each row; past the last group, what names none and may not be read."""
    index = torch.randint(0, tokens, (rows,), dtype=torch.int32)
    if ends is not None:
        index[min(int(ends[-1]), rows) :] = 2**31 - 1
    return index


@each_use
@each_dtype
@each_format
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_bits_of_gathered_rows(ends, fmt, dtype, uses):
    if ends is None and fmt.block is None:
        pytest.skip("rows of no groups are not gathered")
    x = numbers(170, 2880 if uses == (True, True) else 272, dtype=dtype)
    ends = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    compare(x, fmt, ends, uses, index=index_of(170, 600, ends))


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("columns", [16, 128, 144, 2176])
@pytest.mark.parametrize("tokens", [1, 40, 3000])
def test_bits_of_gathered_rows_at_the_edges_of_blocks(rows, columns, tokens):
    x = torch.randn(tokens, columns, dtype=torch.bfloat16)
    for ends in (None, torch.tensor([rows // 2, rows]), torch.tensor([0, rows // 3])):
        compare(x, fp8_block(), ends, (True, True), index=index_of(tokens, rows, ends))
        if ends is not None:
            compare(x, MATRIX, ends, (True, True), index=index_of(tokens, rows, ends))


@pytest.mark.parametrize("pass_chunks", [1, 3, 8])
def test_any_number_of_columns_is_gathered_together(pass_chunks, monkeypatch):
    x, ends = torch.randn(170, 3072, dtype=torch.bfloat16), torch.tensor([7, 160, 160, 590])
    monkeypatch.setattr(k_major, "chunks_per_pass", lambda *_: pass_chunks)
    compare(x, fp8_block(), ends, (True, True), index=index_of(170, 600, ends))


def test_gathered_rows_of_any_pitch():
    x, ends = numbers(300, 768), torch.tensor([7, 160, 160, 590])
    on_device, index = x.cuda(), index_of(300, 600, ends)
    for part in (slice(512), slice(3, 515)):
        given = x[:, part].contiguous(), fp8_block(), ends, (True, True), on_device[:, part]
        compare(*given, index)
    one, same = (t[:1].expand(300, -1) for t in (x, on_device))
    compare(one, fp8_block(), ends, (True, True), same, index)


def test_gathered_rows_of_more_than_2_to_the_31_elements():
    x = torch.randn(70000, 32768, dtype=torch.bfloat16, device="cuda")
    index = torch.randint(0, 70000, (70000,), dtype=torch.int32, device="cuda")
    index[-1], index[0] = 69999, 69998
    flags = {"rowwise": True, "columnwise": True}
    made = quantize_k_major(x, fp8_block(), **flags, index=index)
    for first in (0, 69888):
        rows = index[first : first + 128]
        want = quantize_k_major(x[rows], fp8_block(), **flags)
        got = made.row.data[first : first + 128], made.row.scale[first : first + 128].contiguous()
        ref.assert_same_bits(got, [want.row.data, want.row.scale.contiguous()])
        column = made.column.data[first : first + 128].t().contiguous()
        ref.assert_same_bits(
            [column, made.column.scale[first // 128]],
            [want.column.data.t().contiguous(), want.column.scale[0]],
        )


@each_use
@each_dtype
@pytest.mark.parametrize("shape", [(3, 272, 144), (128, 256), (2, 2, 48, 400), (5, 384, 2880)])
@pytest.mark.parametrize("fmt", [SQUARE, MATRIX], ids=["square", "matrix"])
def test_bits_of_weights(shape, dtype, uses, fmt):
    compare(numbers(*shape, dtype=dtype), fmt, None, uses)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("columns", [16, 128, 144, 2176])
def test_bits_at_the_edges_of_blocks(rows, columns):
    x = torch.randn(rows, columns, dtype=torch.bfloat16)
    for ends in (None, torch.tensor([rows // 2, rows])):
        compare(x, fp8_block(), ends, (True, True))
        if ends is not None:
            compare(x, MATRIX, ends, (True, True))
    if rows % 16 == 0:
        compare(x, SQUARE, None, (True, True))


def test_bits_of_row_pitch_and_misaligned_rows():
    x, ends = numbers(300, 768), torch.tensor([7, 160, 160, 290])
    on_device = x.cuda()
    for part in (slice(512), slice(3, 515)):
        compare(x[:, part].contiguous(), fp8_block(), ends, (True, True), on_device[:, part])
        compare(x[:288, part].contiguous(), SQUARE, None, (True, True), on_device[:288, part])


def test_bits_of_more_than_2_to_the_31_elements():
    x = torch.randn(70000, 32768, dtype=torch.bfloat16, device="cuda")
    made = quantize_k_major(x, fp8_block(), rowwise=True, columnwise=True)
    for first in (0, 69888):  # blocks of 128 rows
        rows = slice(first, min(first + 128, len(x)))
        want = quantize_k_major(x[rows].cpu(), fp8_block(), rowwise=True, columnwise=True)
        got = made.row.data[rows], made.row.scale[rows].contiguous()
        ref.assert_same_bits(got, [want.row.data, want.row.scale.contiguous()])
        column = made.column.data[first : first + 128].t().contiguous(), made.column.scale
        ref.assert_same_bits(
            [column[0], column[1][first // 128]],
            [want.column.data.t().contiguous(), want.column.scale[0]],
        )


@pytest.mark.parametrize("fmt", [fp8_block(), MATRIX], ids=["blocks", "groups"])
def test_a_captured_graph_follows_new_ends(fmt):
    x = numbers(600, 512)
    on_gpu, ends = x.cuda(), torch.tensor([64, 128, 600], dtype=torch.int32, device="cuda")
    op, uses = torch.ops.fusible.quantize_k_major, (*fmt.as_constants(), True, True)
    index = torch.zeros(600, dtype=torch.int32, device="cuda")
    for named in (None, index):
        graph, got = graph_of(lambda named=named: op(on_gpu, ends, named, *uses))
        for sizes in ([64, 128, 600], [1, 2, 3], [333, 333, 550]):
            now = torch.tensor(sizes, dtype=torch.int32)
            ends.copy_(now)
            index.copy_(torch.randint(0, 600, (600,)))
            graph.replay()
            want = op(x, now, None if named is None else index.cpu(), *uses)
            same_to_the_padded_end(got, want, fmt, (True, True))


@torch.no_grad()
def test_one_launch_and_no_host_synchronisation():
    x, ends = torch.randn(600, 512, dtype=torch.bfloat16, device="cuda"), [64, 300, 600]
    ends = torch.tensor(ends, dtype=torch.int32, device="cuda")
    index = torch.randint(0, 600, (600,), dtype=torch.int32, device="cuda")
    cases = (fp8_block(), ends, None), (fp8_block(), None, None), (SQUARE, None, None)
    of_groups = (MATRIX, ends, None), (MATRIX, ends, index), (MATRIX, None, None)
    for fmt, groups, named in (*cases, (fp8_block(), ends, index), *of_groups):
        given = x[:512] if groups is None else x

        def call(given=given, fmt=fmt, groups=groups, named=named):
            flags = {"rowwise": True, "columnwise": True}
            return quantize_k_major(given, fmt, **flags, ends=groups, index=named)

        call()
        with never_waiting():
            call()
        kernels, _ = launched(call)
        assert len(kernels) == 1 if fmt.block else 3, kernels


def test_a_transposed_copy_of_elements():
    data = torch.randn(3, 272, 144, device="cuda").to(torch.float8_e4m3fn)
    want = data.cpu().view(torch.uint8).mT.contiguous()
    assert torch.equal(transposed(data).cpu().view(torch.uint8), want)
