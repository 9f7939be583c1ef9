"""Rows quantized in an epilogue: the device code, on arrays, against the quantizer."""

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import simt

from fusible.kernels.quantize.k_major import quantize_k_major
from fusible.kernels.sm90.device import quantized_rows
from fusible.kernels.sm90.device.parts import Problem, TileCoord
from fusible.recipes.formats import E5M2, fp8_block

ROWS, SIZES = 200, (70, 0, 64, 41)  # the last 25 are not written
UNTOUCHED = 7  # what elements and scales begin with


def store(monkeypatch, x, fmt, before=0):
    """What tiles of 64 rows write of ``x``, of which the rows of each group are one after another.

    Past the last column a thread holds NaN. The output has as many columns ``before`` these.
    """
    columns, blocks = x.shape[1], -(-x.shape[1] // 128)
    total = before + columns
    wide = torch.full((ROWS + 64, blocks * 128), torch.nan, dtype=torch.bfloat16)
    wide[:ROWS, :columns] = x
    elements = torch.full((ROWS, total), UNTOUCHED, dtype=torch.uint8)
    scales = torch.full((before // 128 + blocks, ROWS), float(UNTOUCHED))
    starts = np.cumsum([0, *SIZES])
    tiles = [
        (start, size, row, 128 * block)
        for start, size in zip(starts, SIZES, strict=False)
        for row in range(0, size, 64)
        for block in range(blocks)
    ]
    start, size, first, column = np.array(tiles).T[:, :, None]
    thread = np.arange(simt.THREADS)
    memory = simt.Memory()
    addresses = memory.place(elements), memory.place(scales)
    words = wide.view(torch.int16).numpy().view(np.uint32)  # pairs of columns
    with monkeypatch.context() as patch, np.errstate(all="ignore"):
        simt.emulate(patch, len(tiles), memory)
        problem = Problem(ROWS, columns, 0, len(SIZES), 0, None, 0)
        coord = TileCoord(0, start, size, first, column)
        for half in (0, 8):
            row = first + thread // 32 * 16 + thread % 32 // 4 + half
            pairs = [column // 2 + 4 * eight + thread % 4 for eight in range(16)]
            held = [words[start + row, pair] for pair in pairs]
            to = addresses, total, before + column, problem, coord, row
            quantized_rows.store_quantized(held, fmt, *to)
    return elements, scales


@pytest.mark.parametrize("columns", [128, 16, 272, 384 + 112])
@pytest.mark.parametrize(
    "fmt", [fp8_block(), fp8_block(E5M2), fp8_block(power_of_two=False, amax_epsilon=0.25)]
)
def test_elements_and_scales_are_those_of_the_quantizer(monkeypatch, columns, fmt):
    torch.manual_seed(columns)
    x = (torch.randn(ROWS, columns) * torch.randint(-20, 20, (ROWS, 1)).exp2()).bfloat16()
    x[0], x[3, 1], x[9, -1], x[11, 5] = 0, torch.inf, torch.nan, -0.0
    x[-60:-30] = 0  # as rows past the last group are
    want, live = quantize_k_major(x, fmt, rowwise=True, columnwise=False).row, sum(SIZES)
    elements, scales = store(monkeypatch, x, fmt)
    assert torch.equal(elements[:live], want.data[:live].view(torch.uint8))
    torch.testing.assert_close(
        scales[:, :live], want.scale.t()[:, :live], rtol=0, atol=0, equal_nan=True
    )
    assert (elements[live:] == UNTOUCHED).all()
    assert (scales[:, live:] == UNTOUCHED).all()


def test_columns_of_one_side_of_a_pre_activation(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(ROWS, 256).bfloat16()
    alone = store(monkeypatch, x, fp8_block())
    elements, scales = store(monkeypatch, x, fp8_block(), before=256)
    assert torch.equal(elements[:, 256:], alone[0])
    assert torch.equal(scales[2:], alone[1])
    assert (elements[:, :256] == UNTOUCHED).all()
    assert (scales[:2] == UNTOUCHED).all()
