"""Operands of FP8 products: what the op makes is what the formulas make of each group."""

import pytest
import reference as ref
import simt
import torch
from torch.library import opcheck

from fusible.kernels.quantize.k_major import (
    chunks_per_pass,
    quantize_k_major,
    row_operand,
    transposed,
)
from fusible.kernels.quantize.spec import QuantizeSpec
from fusible.kernels.runtime.gpu import PTX_NAMES
from fusible.recipes.formats import E5M2, fp8_block, fp8_tensor, mxfp8, nvfp4
from fusible.recipes.quantization import quantize

ROWS = 600
ENDS = {
    "ragged": [0, 1, 128, 256, 385, 513],  # groups of 0, 1, 127, 128, 129 and 128 rows
    "one": [600],
    "empty": [0, 0],
    "beyond": [130, 1000],
    "many": [5 * i for i in range(1, 100)],
}
FORMATS = {
    "e4m3": fp8_block(),
    "e5m2": fp8_block(E5M2),
    "fp32 scales": fp8_block(power_of_two=False, amax_epsilon=1e-3),
}
OF_GROUPS = {
    "groups e4m3": fp8_tensor(power_of_two=True),
    "groups e5m2": fp8_tensor(E5M2),
    "groups epsilon": fp8_tensor(amax_epsilon=1e-3),
}
SQUARE, MATRIX = fp8_block(block=(128, 128)), fp8_tensor()
each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
each_format_of_rows = pytest.mark.parametrize(
    "fmt", [*FORMATS.values(), *OF_GROUPS.values()], ids=[*FORMATS, *OF_GROUPS]
)
each_format_of_weights = pytest.mark.parametrize("fmt", [SQUARE, MATRIX], ids=["square", "matrix"])
each_scaling = pytest.mark.parametrize("formats", [FORMATS, OF_GROUPS], ids=["blocks", "groups"])
each_ends = pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)


def rows(columns=272, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-20, 20, (ROWS, 1), generator=generator)
    return (torch.randn(ROWS, columns, generator=generator) * 2.0**exponents).to(dtype)


def for_blocks(scale, fmt, *shape):
    """Scales as products read them: one of a matrix, in the last dimension, for all of them."""
    return scale if fmt.block else scale[..., None].expand(*scale.shape[:-1], *shape)


@each_format_of_rows
@each_ends
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_each_group_is_quantized_by_itself(fmt, ends, kind):
    x, given = rows(), torch.tensor(ends, dtype=kind)
    made = quantize_k_major(x, fmt, rowwise=True, columnwise=True, ends=given)
    assert fmt.block is None or made.row.scale.t().is_contiguous()
    assert made.column.data.t().is_contiguous()
    assert made.column.data.shape == ((ROWS + 127 * len(ends)) // 128 * 128, x.shape[1])
    assert made.column.ends.dtype == torch.int32
    ref.assert_same_bits([made.row.data], [quantize(x, fmt, ends=given).data])
    start = padded = 0
    inside = given.clamp(max=ROWS).tolist()
    for end, padded_end in zip(inside, made.column.ends.tolist(), strict=True):
        assert padded_end == padded + -(-(end - start) // 128) * 128
        row, column = (quantize(x[start:end], fmt, columnwise=c) for c in (False, True))
        scale = for_blocks(row.scale, fmt, end - start, -(-x.shape[1] // 128))
        ref.assert_same_bits([t[start:end] for t in made.row[:2]], [row.data, scale])
        data = made.column.data[padded:padded_end]
        ref.assert_same_bits([data[: end - start]], [column.data])
        assert not data[end - start :].view(torch.uint8).any()
        scale = made.column.scale[padded // 128 : padded_end // 128]
        ref.assert_same_bits([scale], [for_blocks(column.scale, fmt, *scale.shape)])
        start, padded = end, padded_end
    assert padded <= len(made.column.data)
    tail = quantize(torch.zeros_like(x[start:]), fmt)
    data, scale = (t[start:] for t in made.row[:2])
    ref.assert_same_bits([data, scale], [tail.data, for_blocks(tail.scale, fmt, *scale.shape)])


@each_format
def test_values_are_elements_times_scales_of_their_blocks(fmt):
    x = rows(dtype=torch.float32)
    made = quantize_k_major(x, fmt, rowwise=True, columnwise=True)
    assert made.column.ends is None
    bits, smallest = (2, 2.0**-16) if fmt.element is E5M2 else (3, 2.0**-9)
    scales = (
        made.row.scale.repeat_interleave(128, 1)[:, : x.shape[1]],
        made.column.scale.repeat_interleave(128, 0)[:ROWS],
    )
    for matrix, scale in zip(made[:2], scales, strict=True):
        error = (matrix.data[:ROWS].float() * scale - x).abs()
        assert (error <= torch.maximum(x.abs() * 2.0**-bits, scale * smallest) / 2).all()
    assert not made.column.data[ROWS:].view(torch.uint8).any()


@each_format_of_weights
@pytest.mark.parametrize("shape", [(3, 272, 144), (128, 256), (2, 2, 48, 400)])
def test_weights_have_the_same_elements_for_both_uses(shape, fmt):
    w = torch.randn(shape, dtype=torch.bfloat16)
    made, want = quantize_k_major(w, fmt, rowwise=True, columnwise=True), quantize(w, fmt)
    scale = for_blocks(want.scale, fmt, *[-(-size // 128) for size in shape[-2:]])
    ref.assert_same_bits(made.row[:2], [want.data, scale])
    ref.assert_same_bits(row_operand(want, 128)[:2], made.row[:2])
    assert made.column.data.is_contiguous()
    ref.assert_same_bits(made.column[:2], [want.data.mT, scale.mT])
    ref.assert_same_bits([transposed(made.row.data)], [made.column.data])
    alone = quantize_k_major(w, fmt, rowwise=False, columnwise=True)
    assert alone.row is None
    ref.assert_same_bits(alone.column[:2], made.column[:2])


@pytest.mark.parametrize("uses", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "fmt", [*FORMATS.values(), SQUARE, MATRIX], ids=[*FORMATS, "square", "matrix"]
)
def test_the_op_passes_opcheck_and_compiles_whole(fmt, uses):
    x, index = torch.randn(150, 144), torch.randint(0, 150, (200,), dtype=torch.int32)
    torch.compiler.reset()
    op = torch.ops.fusible.quantize_k_major
    for ends in (None,) if fmt is SQUARE else (None, torch.tensor([3, 140])):
        named = index if fmt.directional or ends is not None else None
        for of_layout in (x, x.t().contiguous().t()):
            for rows in (None,) if named is None else (None, named):
                opcheck(op, (of_layout, ends, rows, *fmt.as_constants(), *uses))

        def call(x, ends, index=named):
            flags = {"rowwise": uses[0], "columnwise": uses[1]}
            made = quantize_k_major(x, fmt, **flags, ends=ends, index=index)
            tensors = [t for matrix in made if matrix for t in matrix if t is not None]
            return [t.view(torch.uint8) if t.itemsize == 1 else t for t in tensors]

        got = torch.compile(call, fullgraph=True, backend="aot_eager")(x, ends)
        ref.assert_same_bits(got, call(x, ends))
    opcheck(torch.ops.fusible.transposed_fp8, (torch.ones(2, 3, 4, dtype=torch.uint8),))


@pytest.mark.parametrize("fmt", [mxfp8(), nvfp4(), fp8_block(), SQUARE])
def test_the_op_for_all_formats_returns_contiguous_tensors(fmt):
    x, uses = torch.randn(160, 256).t(), (True, fmt.directional)
    opcheck(torch.ops.fusible.quantize, (x, None, None, *fmt.as_constants(), *uses))


def tokens_of_rows(tokens=170):
    """The token of each row, some of which are never taken, and others often."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, tokens, (ROWS,), generator=generator, dtype=torch.int32) // 2 * 2


def poisoned(index, ends):
    """``index`` with names of no row past the last group, where none may be read."""
    index = index.clone()
    if ends is not None:
        index[int(ends[-1].clamp(max=len(index))) :] = -(10**9)
    return index


@each_format_of_rows
@each_ends
def test_gathered_rows_are_those_of_a_copy(fmt, ends):
    x, index, ends = rows()[:170], tokens_of_rows(), torch.tensor(ends, dtype=torch.int32)
    index = poisoned(index, ends)
    for uses in [(True, True), (True, False), (False, True)]:
        flags = {"rowwise": uses[0], "columnwise": uses[1], "ends": ends}
        got = quantize_k_major(x, fmt, **flags, index=index)
        want = quantize_k_major(x[index.clamp(min=0)], fmt, **flags)
        for mine, theirs in zip(got, want, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                ref.assert_same_bits(mine[:2], theirs[:2])
        assert not uses[1] or torch.equal(got.column.ends, want.column.ends)


@pytest.mark.parametrize(
    "index",
    [torch.zeros(4, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32)],
    ids=["int64", "2-D"],
)
def test_another_index_is_refused(index):
    with pytest.raises(ValueError, match=r"index must be int32 of shape \(R,\)"):
        quantize_k_major(
            torch.randn(4, 32), fp8_block(), rowwise=True, columnwise=True, index=index
        )
    for fmt in (SQUARE, MATRIX):
        with pytest.raises(ValueError, match="for blocks of 1x128 or groups"):
            quantize_k_major(
                torch.randn(4, 32), fmt, rowwise=True, columnwise=True, index=index.flatten().int()
            )


@pytest.mark.parametrize("pass_chunks", [1, 3, 6])
def test_every_block_has_every_chunk_once(pass_chunks):
    pytest.importorskip("cutlass")
    from fusible.kernels.quantize.device.blocks import block_and_chunk

    blocks, chunks = 5, 6
    for gathered in (False, True):
        spec = QuantizeSpec(fp8_block(), "bf16", True, False, True, True, gathered=gathered)
        near = pass_chunks if gathered else chunks
        order = [block_and_chunk(cta, blocks, near, spec) for cta in range(blocks * chunks)]
        assert sorted(order) == [(b, c) for b in range(blocks) for c in range(chunks)]
        assert {chunk for _, chunk in order[: blocks * near]} == set(range(near))


@pytest.mark.parametrize(("rows", "pass_chunks"), [(10, 16), (8192, 4), (16384, 2), (10**6, 1)])
def test_gathered_columns_fit_the_cache(rows, pass_chunks):
    assert chunks_per_pass(rows, 2048, 2) == pass_chunks


def test_no_gradient_passes():
    made = quantize_k_major(
        torch.randn(4, 16, requires_grad=True), fp8_block(), rowwise=True, columnwise=False
    )
    assert not made.row.scale.requires_grad


@pytest.mark.parametrize("fmt", [mxfp8(), nvfp4()], ids=["mxfp8", "nvfp4"])
def test_other_formats_are_refused(fmt):
    with pytest.raises(ValueError, match="FP32 scale for each 1x128, 128x128 or matrix"):
        quantize_k_major(torch.randn(4, 32), fmt, rowwise=True, columnwise=True)


def test_a_batch_of_rows_is_refused():
    with pytest.raises(ValueError, match="must be 2-D"):
        quantize_k_major(torch.randn(2, 4, 32), fp8_block(), rowwise=True, columnwise=True)


def emulated(monkeypatch, x, fmt, ends, uses, index=None):
    """The pieces of the op by the kernel's code, in memory that nothing was written to."""
    constants = fmt.as_constants()
    pieces = torch.ops.fusible.quantize_k_major(x, ends, index, *constants, *uses)
    for piece in pieces:
        piece.flatten().view(torch.uint8).fill_(0xA5)
    spec = QuantizeSpec(fmt, PTX_NAMES[x.dtype], ends is not None, False, *uses, k_major=True)
    spec = spec._replace(gathered=index is not None)
    rows = len(x if index is None else index)
    inside = None if ends is None else ends.clamp(max=rows).tolist()
    simt.quantize_k_major(monkeypatch, x, inside, index, pieces, spec)
    return pieces


@each_scaling
@pytest.mark.parametrize("dtype", PTX_NAMES, ids=PTX_NAMES.values())
@pytest.mark.parametrize("ends", [None, *ENDS.values()], ids=["none", *ENDS])
def test_the_kernels_code_gives_the_bits_of_the_definition(ends, dtype, formats, monkeypatch):
    fmt = dict(zip(PTX_NAMES, formats.values(), strict=True))[dtype]
    if ends is None and not fmt.directional:
        pytest.skip("a matrix as weights are")
    x = rows(2880 if ends == ENDS["ragged"] else 272, dtype)
    for uses in [(True, True), (True, False), (False, True)][: 3 if ends == ENDS["one"] else 1]:
        compare(x, fmt, None if ends is None else torch.tensor(ends), uses, monkeypatch)


@each_scaling
@pytest.mark.parametrize("dtype", PTX_NAMES, ids=PTX_NAMES.values())
@pytest.mark.parametrize("ends", [None, *ENDS.values()], ids=["none", *ENDS])
def test_the_kernels_code_gives_the_bits_of_gathered_rows(ends, dtype, formats, monkeypatch):
    fmt = dict(zip(PTX_NAMES, formats.values(), strict=True))[dtype]
    if ends is None and not fmt.directional:
        pytest.skip("rows of no groups are not gathered")
    x, index = rows(2880 if ends == ENDS["ragged"] else 272, dtype)[:170], tokens_of_rows()
    for uses in [(True, True), (True, False), (False, True)][: 3 if ends == ENDS["one"] else 1]:
        given = None if ends is None else torch.tensor(ends)
        compare(x, fmt, given, uses, monkeypatch, poisoned(index, given))


@pytest.mark.parametrize("dtype", PTX_NAMES, ids=PTX_NAMES.values())
@each_format_of_rows
def test_the_kernels_code_of_groups_of_any_magnitude(fmt, dtype, monkeypatch):
    """Zeros, numbers below the normal ones, the largest, infinity, NaN; NaN past the last group."""
    x = torch.randn(ROWS, 272).clamp(-3, 3).to(dtype)
    limits = torch.finfo(dtype)
    factors = 0.0, limits.smallest_normal / 64, limits.max / 4, 1.0, 1.0, 1.0
    ends = torch.tensor(ENDS["ragged"])
    for factor, start, end in zip(factors[1:], ends[:-1], ends[1:], strict=True):
        x[start:end] *= factor
    x[0], x[300, 5], x[400, 7], x[513:] = 0, float("inf"), float("nan"), float("nan")
    compare(x, fmt, ends, (True, True), monkeypatch, poison=False)


def compare(x, fmt, ends, uses, monkeypatch, index=None, poison=True):
    pytest.importorskip("cutlass")
    if poison:
        x[130, 3], x[7, 140] = float("nan"), float("inf")
    want = torch.ops.fusible.quantize_k_major(x, ends, index, *fmt.as_constants(), *uses)
    got = emulated(monkeypatch, x, fmt, ends, uses, index)
    ref.assert_same_bits(got[:2], want[:2])
    if uses[1]:
        written = want[2].shape[1] if ends is None else int(want[4][-1])
        ref.assert_same_bits(*[[t[2][:, :written], t[3][: written // 128]] for t in (got, want)])


@each_format_of_weights
@pytest.mark.parametrize("uses", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", PTX_NAMES, ids=PTX_NAMES.values())
@pytest.mark.parametrize("shape", [(3, 272, 144), (128, 256), (2, 2, 48, 400)])
def test_the_kernels_code_gives_the_bits_of_weights(shape, dtype, uses, fmt, monkeypatch):
    pytest.importorskip("cutlass")
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    w.view(-1, *shape[-2:])[1:, 40, 3] = float("nan")
    want = torch.ops.fusible.quantize_k_major(w, None, None, *fmt.as_constants(), *uses)
    got = emulated(monkeypatch, w, fmt, None, uses)
    ref.assert_same_bits(got, want)
