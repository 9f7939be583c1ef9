"""Grouped tensors, their offsets, and the scale layout of the MMA."""

import pytest
import reference as ref
import torch
from number_formats import GROUPED, each_grouped_format

from fusible import recipes
from fusible.recipes.blocks import column_block_bound, column_block_ends
from fusible.recipes.formats import E4M3, fp8_block, mxfp8
from fusible.recipes.layout import (
    swizzle_group_scales,
    swizzle_scales,
    swizzled_group_bytes,
)

SIZES = [5, 0, 64, 33]


def rows(count=110, columns=128):
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, columns, generator=generator, dtype=torch.bfloat16)


def make(fmt, sizes=SIZES, *, rowwise=True, columnwise=True, wide=True):
    dims = torch.tensor(sizes, dtype=torch.int64 if wide else torch.int32)
    quantizer = recipes.Quantizer(fmt, rowwise=rowwise, columnwise=columnwise)
    return recipes.group_quantize(rows(), quantizer, len(sizes), dims)


@each_grouped_format
@pytest.mark.parametrize("wide", [False, True])
def test_groups_are_what_each_alone_is(fmt, wide):
    g = make(fmt, wide=wide)
    assert g.num_tensors == 4
    assert g.logical_shape == (110, 128)
    assert g.tensor_offsets.tolist() == [0, 640, 640, 640 + 64 * 128, 102 * 128]
    assert g.tensor_offsets.dtype == torch.int64
    quantizer = recipes.Quantizer(fmt)
    start = 0
    for size, member in zip(SIZES, g.split_into_quantized_tensors(), strict=True):
        alone = quantizer(rows()[start : start + size])
        if size:
            # A column-wise group's scales are its blocks of the shared buffer.
            ref.assert_same_bits(member.pieces(), alone.pieces())
            for columnwise in (False, True):
                assert torch.equal(
                    member.dequantize(columnwise=columnwise),
                    g.dequantize(columnwise=columnwise)[start : start + size],
                )
        assert member.shape == (size, 128)
        start += size
    assert not g.dequantize()[102:].any()
    back = recipes.group_dequantize(g, torch.float32)
    assert back.format is None
    assert back.dtype == torch.float32
    assert torch.equal(back.rowwise_data, g.dequantize(torch.float32))
    assert torch.equal(back.split_into_quantized_tensors()[2], g.dequantize(torch.float32)[5:69])


def test_members_are_views():
    g = make(mxfp8())
    member = g.split_into_quantized_tensors()[2]
    member.zero_()
    assert not g.dequantize()[5:69].any()
    assert g.dequantize()[:5].any()


def test_split_is_that_of_an_ordinary_tensor():
    g = make(mxfp8())
    for along in ((40,), ([28, 100], 1)):
        for got, want in zip(g.split(*along), g.dequantize().split(*along), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("groups", [1, 2, 33, 4096])
def test_offsets(groups, dtype):
    dims = torch.randint(0, 5, (groups,), dtype=dtype)
    dims[groups // 2] = 0
    g = recipes.group(torch.zeros(int(dims.sum()), 7), groups, dims)
    got, ends = g.tensor_offsets, g.ends
    assert got.dtype == ends.dtype == torch.int64
    want = [0]
    for n in dims.tolist():
        want.append(want[-1] + 7 * n)
    assert got.tolist() == want
    assert torch.equal(ends * 7, got[1:])


def test_offsets_do_not_overflow_int32():
    dims = torch.tensor([2**30, 2**30], dtype=torch.int32)
    rows = torch.zeros(1).expand(2**31, 4096)
    assert recipes.group(rows, 2, dims).tensor_offsets.tolist() == [0, 2**42, 2**43]


def test_equal_groups_need_no_sizes():
    quantizer = recipes.MXFP8Quantizer()
    g = recipes.group_quantize(rows(96), quantizer, 3)
    assert g.logical_shape == (96, 128)
    assert g.first_dims.tolist() == [32, 32, 32]
    assert torch.equal(
        g.split_into_quantized_tensors()[1].dequantize(), quantizer(rows(96)[32:64]).dequantize()
    )


def test_no_size_is_read_from_the_device():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(64, 128, dtype=torch.bfloat16)
        dims = torch.empty(4, dtype=torch.int64)
        for fmt in GROUPED.values():
            g = recipes.group_quantize(x, recipes.Quantizer(fmt), 4, dims)
            for columnwise in (False, True):
                assert g.dequantize(columnwise=columnwise).shape == (64, 128)


@pytest.mark.parametrize("fmt", [*GROUPED.values(), None])
def test_grouped_tensors_are_tensors(fmt):
    """Reads are of the values; writes are quantized into the memory there is."""

    def made(x=None, sizes=SIZES):
        x, sizes = rows() if x is None else x, torch.tensor(sizes)
        if fmt is None:
            return recipes.group(x.clone(), 4, sizes)
        return recipes.group_quantize(x, recipes.Quantizer(fmt), 4, sizes)

    g = made()
    plain = g.dequantize()
    for function in (
        lambda t: t + 1,
        lambda t: t[0],
        lambda t: t.view(-1),
        lambda t: t @ rows().mT,
        lambda t: t.sum(0),
        lambda t: torch.cat((t, t)),
    ):
        assert not isinstance(function(g), recipes.GroupedTensor)
        assert torch.equal(function(g), function(plain))
        if fmt is not None:
            with (
                recipes.no_implicit_dequantize(),
                pytest.raises(NotImplementedError, match="split"),
            ):
                function(g)
    zeros = torch.zeros_like(g)
    assert (type(zeros), zeros.shape, zeros.dtype) == (torch.Tensor, g.shape, g.dtype)
    pointers = {name: piece.data_ptr() for name, piece in g.pieces().items()}
    new = rows().flip(0) * 2
    for write in (
        lambda t: t.add_(1),
        lambda t: t.mul_(new),
        lambda t: t.fill_(0.3),
        lambda t: t.fill_diagonal_(3.0),
        lambda t: (t.view(110, 128).add_(1), t)[1],
        lambda t: (t[:].squeeze().expand_as(new).mul_(2), t)[1],
        lambda t: t.copy_(0.7),
        lambda t: t.copy_(new),
        lambda t: t.copy_(new[0]),
    ):
        want = write(g.dequantize())
        assert write(g) is g
        ref.assert_same_bits(g.pieces(), made(want).pieces())
    assert g.quantize_(rows()) is g
    ref.assert_same_bits(g.pieces(), made().pieces())
    other = made(new, SIZES[::-1])
    g.copy_(other)  # its groups, too
    ref.assert_same_bits(g.pieces(), other.pieces())
    assert {name: piece.data_ptr() for name, piece in g.pieces().items()} == pointers
    for kind in [kind for kind in (None, *GROUPED.values()) if kind != fmt]:
        g, sizes = made(), torch.tensor(SIZES[::-1])
        pointers = {name: piece.data_ptr() for name, piece in g.pieces().items()}
        other = recipes.group(new, 4, sizes)
        if kind is not None:
            other = recipes.group_quantize(new, recipes.Quantizer(kind), 4, sizes)
        g.copy_(other)
        want = made(other.dequantize(torch.float32).bfloat16(), SIZES[::-1])
        ref.assert_same_bits(g.pieces(), want.pieces())
        assert {name: piece.data_ptr() for name, piece in g.pieces().items()} == pointers
    equal = recipes.group(rows(112), 4)
    other = recipes.group(rows(112) + 1, 4, torch.tensor(SIZES))
    equal.copy_(other)  # whose groups are not equal: the values only
    assert equal.first_dims.tolist() == [28] * 4
    assert torch.equal(equal.dequantize(), other.dequantize())


def test_what_keeps_the_groups():
    g = make(mxfp8())
    ref.assert_same_bits(g.clone().pieces(), g.pieces())
    assert g.detach().rowwise_data.data_ptr() == g.rowwise_data.data_ptr()
    moved = g.to("meta")
    assert moved.rowwise_data.is_meta
    assert moved.first_dims.is_meta
    assert g.to(torch.float16).dtype == torch.float16
    plain = recipes.group(rows(), 4, torch.tensor(SIZES))
    assert plain.to(torch.float32).rowwise_data.dtype == torch.float32
    names, meta = g.__tensor_flatten__()
    inner = {name: getattr(g, name) for name in names}
    again = recipes.GroupedTensor.__tensor_unflatten__(inner, meta, g.shape, g.stride())
    ref.assert_same_bits(again.pieces(), g.pieces())
    assert "4 tensors" in repr(g)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((3, torch.tensor([1.0, 2, 3])), "int32 or int64, got torch.float32"),
        ((3, torch.tensor([1, 2])), r"of shape \(3,\), got \(2,\)"),
        ((3, torch.empty(3, dtype=torch.int64, device="meta")), "where the rows are, got meta"),
        ((3, None), "multiple of num_groups=3"),
        ((0, None), "multiple of num_groups=0"),
    ],
)
def test_bad_groups(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        recipes.group_quantize(rows(), recipes.MXFP8Quantizer(), *arguments)


def test_blocks_of_weights_cannot_be_grouped():
    quantizer = recipes.Float8BlockQuantizer()
    with pytest.raises(ValueError, match="cannot be grouped"):
        recipes.group_quantize(rows(128), quantizer, 1, torch.tensor([128]))
    assert quantizer.format == fp8_block(E4M3, (128, 128))


# --- Layout --------------------------------------------------------------------------------------


def byte_of(row, block, blocks):
    """SM100_CONTRACTS 1.3, the formula as it stands there."""
    return (
        ((row // 128) * -(-blocks // 4) + block // 4) * 512
        + (row % 32) * 16
        + ((row % 128) // 32) * 4
        + block % 4
    )


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (300, 13), (2, 129, 5)])
def test_dense_layout_is_the_formula(shape):
    scale = torch.randint(1, 256, shape, dtype=torch.uint8)
    laid_out = swizzle_scales(scale)
    *batch, count, blocks = shape
    assert laid_out.shape == (*batch, -(-count // 128), -(-blocks // 4), 32, 4, 4)
    assert laid_out.is_contiguous()
    matrices = scale.reshape(-1, count, blocks)
    for flat, matrix in zip(laid_out.reshape(len(matrices), -1), matrices, strict=True):
        want = torch.zeros_like(flat)
        for row in range(count):
            for block in range(blocks):
                want[byte_of(row, block, blocks)] = matrix[row, block]
        assert torch.equal(flat, want)
    typed = swizzle_scales(scale.view(torch.float8_e8m0fnu))
    assert typed.dtype == torch.float8_e8m0fnu


@pytest.mark.parametrize("columns", [64, 200])
@pytest.mark.parametrize(
    ("sizes", "tail"), [([128, 0, 256, 256], 0), ([10, 0, 67, 123], 5), ([1], 300), ([0, 0], 9)]
)
def test_group_layout_is_the_formula(sizes, tail, columns):
    total = sum(sizes) + tail
    ends = torch.tensor(sizes).cumsum(0)
    blocks = int(column_block_ends(ends, 32)[-1])
    bound = column_block_bound(total, len(sizes), 32)
    scale = torch.zeros(bound, columns, dtype=torch.uint8)
    scale[:blocks] = torch.randint(1, 256, (blocks, columns), dtype=torch.uint8)
    got = swizzle_group_scales(scale, total, ends, 32)
    assert got.numel() == swizzled_group_bytes(total, columns, len(sizes), 32)
    want = torch.zeros_like(got)
    first_block = padded_rows = 0
    for size in sizes:
        # Whole groups of 128 rows begin at start / 32 * round_up(columns, 128), as in the contract.
        region = padded_rows // 32 * (-(-columns // 128) * 128)
        padded = -(-size // 128) * 128
        for block in range(-(-size // 32)):
            for column in range(columns):
                where = region + byte_of(column, block, padded // 32)
                want[where] = scale[first_block + block, column]
        first_block += -(-size // 32)
        padded_rows += padded
    assert torch.equal(got, want)


def test_what_is_allocated_alike_has_the_sizes_of_the_groups():
    x, sizes = torch.randn(10, 64), torch.tensor([3, 0, 7])
    q = recipes.group_quantize(x, recipes.MXFP8Quantizer(), 3, sizes)
    new = torch.empty_like(q, device="cpu")
    assert torch.equal(new.first_dims, q.first_dims)
    assert torch.equal(new.tensor_offsets, q.tensor_offsets)
    new.copy_(x)
    members = new.split_into_quantized_tensors(), q.split_into_quantized_tensors()
    for got, want in zip(*members, strict=True):
        assert torch.equal(got.dequantize(), want.dequantize())


def test_a_view_of_the_same_shape_keeps_the_format_with_and_without_gradients():
    q = recipes.group_quantize(
        torch.randn(10, 64), recipes.MXFP8Quantizer(), 2, torch.tensor([3, 7])
    )
    with recipes.no_implicit_dequantize():
        same = q.view_as(q)
    assert type(same) is type(q)
    assert torch.equal(same.rowwise_data.view(torch.uint8), q.rowwise_data.view(torch.uint8))


@pytest.mark.parametrize("sizes", [[-3, 3], [3, 3]])
def test_sizes_that_the_host_knows_are_checked(sizes):
    x = torch.randn(4, 32)
    with pytest.raises(ValueError, match="first_dims must not be negative, and sum to at most"):
        recipes.group_quantize(x, recipes.MXFP8Quantizer(), 2, torch.tensor(sizes))
