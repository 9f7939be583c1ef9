"""Rows of ragged groups quantized into the layout of the SM100 kernels, in one pass on CUDA.

The op's definition is ``encode`` and ``packed_rows`` and ``packed_columns``, on any device; the
kernel for CUDA, which Hopper runs too, gives the same values, and the same bytes but for elements
of padding under a scale that is NaN.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusible.kernels.quantize.launch import why_not
from fusible.kernels.quantize.spec import DTYPES, EncodeSpec
from fusible.kernels.sm100.padding import Places, library, packed_columns, packed_rows
from fusible.recipes.formats import mxfp8
from fusible.recipes.library import encode

Pieces = tuple[Tensor, Tensor, Tensor, Tensor]
"""Row-wise data and packed scales, column-wise data and packed scales; empty where not wanted."""


def quantized(x: Tensor, ends: Tensor, places: Places, rowwise: bool, columnwise: bool) -> Pieces:
    """MXFP8 of ``x`` ``[rows, columns]`` in groups up to ``ends``, in their places and packed.

    The columns are a multiple of 32.
    """
    return torch.ops.fusible.sm100_quantize.default(x, ends, *places, rowwise, columnwise)


def _quantize(
    x: Tensor,
    ends: Tensor,
    placed_ends: Tensor,
    rows: Tensor | None,
    size: int,
    rowwise: bool,
    columnwise: bool,
) -> Pieces:
    places = Places(placed_ends, rows, size)
    fmt = mxfp8()
    row, column = encode(x, fmt, rowwise=rowwise, columnwise=columnwise, ends=ends)
    pieces = list(_empty(x, 0, False, False))
    if row is not None:
        pieces[:2] = packed_rows(row, places)
    if column is not None:
        pieces[2:] = packed_columns(column, fmt, ends, places)
    return pieces[0], pieces[1], pieces[2], pieces[3]


def _empty(x: Tensor, size: int, rowwise: bool, columnwise: bool) -> Pieces:
    columns, fmt = x.shape[1], mxfp8()
    lines, atoms = (columns + 127) // 128, (columns // 32 + 3) // 4
    # What pads the scales is zero; the kernel writes those that there are.
    make = x.new_empty if columns % 128 == 0 else x.new_zeros
    row = ((size, columns), (size // 128, atoms, 32, 4, 4)) if rowwise else ((0,), (0,))
    column = ((size, columns), (128 * lines, size // 32)) if columnwise else ((0,), (0,))
    return (
        x.new_empty(row[0], dtype=fmt.element.dtype),
        make(row[1], dtype=torch.uint8).view(fmt.scale_dtype),
        x.new_empty(column[0], dtype=fmt.element.dtype),
        make(column[1], dtype=torch.uint8).view(fmt.scale_dtype),
    )


def _fake(
    x: Tensor,
    ends: Tensor,
    placed_ends: Tensor,
    rows: Tensor | None,
    size: int,
    rowwise: bool,
    columnwise: bool,
) -> Pieces:
    return _empty(x, size, rowwise, columnwise)


@cache
def compiled(rowwise: bool, columnwise: bool, options: str = "") -> Any:
    """Compile the kernel; ``options`` such as ``"--gpu-arch sm_90a"`` for a GPU not here."""
    from cutlass import Int32, Int64, cute
    from cutlass.cute.runtime import make_fake_stream

    from fusible.kernels.sm100.device import quantize

    spec = EncodeSpec(mxfp8(), DTYPES[torch.bfloat16], True, False, rowwise, columnwise)
    kinds = [Int64] * 7 + [Int32] * 2 + [Int64] + [Int32]
    return cute.compile(
        quantize.quantize,
        *[kind(0) for kind in kinds],
        make_fake_stream(),
        spec,
        options=f"--enable-tvm-ffi {options}",
    )


def _cuda(
    x: Tensor,
    ends: Tensor,
    placed_ends: Tensor,
    rows: Tensor | None,
    size: int,
    rowwise: bool,
    columnwise: bool,
) -> Pieces:
    readable = x.dtype == torch.bfloat16 and x.stride(1) == 1 and x.stride(0) % 8 == 0
    if (
        not (rowwise or columnwise)
        or size == 0
        or not readable
        or x.data_ptr() % 16
        or ends.dtype != torch.int32
        or why_not(x, x.dtype, ends) is not None
    ):
        return _quantize(x, ends, placed_ends, rows, size, rowwise, columnwise)
    pieces = _empty(x, size, rowwise, columnwise)
    with torch.cuda.device(x.device):
        compiled(rowwise, columnwise)(
            x.data_ptr(),
            ends.data_ptr(),
            placed_ends.data_ptr(),
            *[piece.data_ptr() for piece in pieces],
            size,
            x.shape[1],
            x.stride(0),
            len(ends),
            torch._C._cuda_getCurrentRawStream(x.device.index),
        )
    return pieces


library.define(
    "sm100_quantize(Tensor x, Tensor ends, Tensor placed_ends, Tensor? rows, SymInt size, "
    "bool rowwise, bool columnwise) -> (Tensor, Tensor, Tensor, Tensor)"
)
library.impl("sm100_quantize", _quantize, "CompositeExplicitAutograd")
library.impl("sm100_quantize", _cuda, "CUDA")
torch.library.register_fake("fusible::sm100_quantize", _fake, lib=library)
