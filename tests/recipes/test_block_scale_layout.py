"""``swizzle_block_scales`` and its inverse against the byte of every scale, element by element."""

import pytest
import torch

from fusible import recipes
from fusible.recipes import blocks

CASES = [  # rows of each group, rows past the last one
    ([128, 0, 256, 256], 0),
    ([10, 0, 67, 123], 5),
    ([1], 300),
    ([0, 0], 9),
    ([129], 0),
]


def byte_in_matrix(row, block, blocks_in_row):
    """The byte of a scale in tiles of 128 rows and 4 blocks, of 512 bytes each, row by row."""
    tile = (row // 128) * -(-blocks_in_row // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row // 32 % 4 * 4 + block % 4


def offsets(kind, sizes, dtype=torch.int64):
    ends = torch.tensor(sizes).cumsum(0)
    value = {"ends": ends, "starts": ends - torch.tensor(sizes), "sizes": torch.tensor(sizes)}
    return {kind: value[kind].to(dtype)}


def numbers(*shape):
    return torch.randint(1, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (300, 13), (2, 129, 5), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn])
def test_a_matrix_of_scales(shape, dtype):
    scale = numbers(*shape)
    laid_out = recipes.swizzle_block_scales(scale.view(dtype))
    *batch, rows, count = shape
    assert laid_out.dtype == dtype
    assert laid_out.shape == (*batch, -(-rows // 128), -(-count // 4), 32, 4, 4)
    got = laid_out.view(torch.uint8)
    matrices = scale.reshape(-1, rows, count) if rows else got
    for matrix, flat in zip(matrices, got.reshape(len(matrices), -1) if rows else got, strict=True):
        want = torch.zeros(flat.numel(), dtype=torch.uint8)
        for row in range(rows):
            for block in range(count):
                want[byte_in_matrix(row, block, count)] = matrix[row, block]
        assert torch.equal(flat.flatten(), want)
    back = recipes.unswizzle_block_scales(laid_out, shape)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), scale)


@pytest.mark.parametrize("kind", ["ends", "starts", "sizes"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("sizes", "tail"), CASES)
def test_groups_of_rows(sizes, tail, kind, dtype):
    count, rows = 6, sum(sizes) + tail
    if kind == "starts":  # the last group ends with the rows
        sizes, tail = [*sizes[:-1], sizes[-1] + tail], 0
    scale = numbers(rows, count)
    given = offsets(kind, sizes, dtype)
    got = recipes.swizzle_block_scales(scale, **given)
    assert got.shape == ((rows + 127 * len(sizes)) // 128, 2, 32, 4, 4)
    want, kept = torch.zeros(got.numel(), dtype=torch.uint8), torch.zeros_like(scale)
    first = first_padded = 0
    for size in sizes:
        for row in range(size):
            for block in range(count):
                where = byte_in_matrix(first_padded + row, block, count)
                want[where] = kept[first + row, block] = scale[first + row, block]
        first, first_padded = first + size, first_padded + -(-size // 128) * 128
    assert torch.equal(got.flatten(), want)
    assert torch.equal(recipes.unswizzle_block_scales(got, scale.shape, **given), kept)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("columns", [64, 200])
@pytest.mark.parametrize(("sizes", "tail"), CASES)
@pytest.mark.parametrize("kind", ["ends", "starts", "sizes"])
def test_groups_of_column_wise_scales(sizes, tail, columns, block_size, kind):
    rows = sum(sizes) + tail
    if kind == "starts":
        sizes = [*sizes[:-1], sizes[-1] + tail]
    scale = numbers(blocks.column_block_bound(rows, len(sizes), block_size), columns)
    options = {"rows": rows, "columnwise": True, "block_size": block_size}
    options |= offsets(kind, sizes)
    got = recipes.swizzle_block_scales(scale, **options)
    want, kept = torch.zeros_like(got), torch.zeros_like(scale)
    first = region = 0
    for size in sizes:
        padded = -(-size // 128) * 128 // block_size
        for block in range(-(-size // block_size)):
            for column in range(columns):
                where = region + byte_in_matrix(column, block, padded)
                want[where] = kept[first + block, column] = scale[first + block, column]
        first += -(-size // block_size)
        region += -(-columns // 128) * 128 * padded
    assert torch.equal(got, want)
    assert torch.equal(recipes.unswizzle_block_scales(got, scale.shape, **options), kept)


@pytest.mark.parametrize("given", ["none", "row-wise", "column-wise"])
def test_the_ops_have_fakes_and_compile(given):
    ends = None if given == "none" else torch.tensor([3, 3, 140])
    rows, columnwise, shape = 150, given == "column-wise", (150, 5)
    if columnwise:
        shape = (blocks.column_block_bound(rows, 3, 16), 24)
    scale = numbers(*shape).view(torch.float8_e4m3fn)
    laid_out = recipes.swizzle_block_scales(
        scale, ends, rows=rows, columnwise=columnwise, block_size=16
    )
    ops = torch.ops.fusible
    torch.library.opcheck(
        ops.swizzle_block_scales.default, (scale.view(torch.uint8), ends, rows, columnwise, 16)
    )
    torch.library.opcheck(
        ops.unswizzle_block_scales.default,
        (laid_out.view(torch.uint8), shape, ends, columnwise, 16),
    )

    @torch.compile(fullgraph=True, backend="aot_eager")
    def there_and_back(scale, sizes):
        options = {"sizes": sizes, "rows": rows, "columnwise": columnwise, "block_size": 16}
        made = recipes.swizzle_block_scales(scale, **options)
        return made, recipes.unswizzle_block_scales(made, scale.shape, **options)

    sizes = None if ends is None else torch.tensor([3, 0, 137])
    made, back = there_and_back(scale, sizes)
    assert torch.equal(made.view(torch.uint8), laid_out.view(torch.uint8))
    eager = recipes.unswizzle_block_scales(
        laid_out, shape, ends, rows=rows, columnwise=columnwise, block_size=16
    )
    assert torch.equal(back.view(torch.uint8), eager.view(torch.uint8))


E8M0 = torch.zeros(4, 4, dtype=torch.uint8)
ENDS = torch.tensor([4])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((E8M0.float(),), {}, TypeError, "one byte each, got torch.float32"),
        ((E8M0[0],), {}, ValueError, "must have rows and blocks"),
        ((E8M0, ENDS), {"sizes": ENDS}, ValueError, "one of ends, starts and sizes"),
        ((E8M0, ENDS.float()), {}, TypeError, "ends must be int32 or int64"),
        ((E8M0,), {"starts": ENDS[:0]}, ValueError, "starts must be of shape"),
        ((E8M0[None], ENDS), {}, ValueError, "of groups must be 2-D"),
        ((E8M0, ENDS), {"rows": 5}, ValueError, "rows must be the 4 rows"),
        ((E8M0, ENDS), {"columnwise": True}, ValueError, "rows must be given"),
        ((E8M0,), {"columnwise": True, "rows": 4}, ValueError, "must be of groups"),
        ((E8M0, ENDS), {"columnwise": True, "rows": 4}, ValueError, "must have 1 blocks of 32"),
        (
            (E8M0, ENDS),
            {"columnwise": True, "rows": 128, "block_size": 8},
            ValueError,
            "block_size must be 16 or 32",
        ),
    ],
)
def test_errors_say_what_must_hold(arguments, options, error, words):
    with pytest.raises(error, match=words):
        recipes.swizzle_block_scales(*arguments, **options)


def test_the_inverse_checks_the_shape():
    with pytest.raises(ValueError, match=r"must have shape \(2, 1, 32, 4, 4\)"):
        recipes.unswizzle_block_scales(recipes.swizzle_block_scales(E8M0), (129, 4))
