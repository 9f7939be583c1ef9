"""The torch op of MXFP8 quantization, for row-wise and column-wise use at once.

Its implementation here is ``formats.quantize`` on any device; ``fusible.kernels`` adds a faster one
for CUDA, with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.recipes.blocks import column_block_bound
from fusible.recipes.formats import (
    E4M3,
    E5M2,
    Encoded,
    NumberFormat,
    check_ends,
    check_input,
    mxfp8,
    quantize,
)

_library = torch.library.Library("fusible", "FRAGMENT")
_library.define(
    "quantize_mxfp8(Tensor x, Tensor? ends, bool e5m2, bool round_up, bool rowwise, "
    "bool columnwise) -> (Tensor, Tensor, Tensor, Tensor)"
)

Pieces = tuple[Tensor, Tensor, Tensor, Tensor]
"""Row-wise data and scales, column-wise data and scales; empty where not asked for."""


def mxfp8_format(e5m2: bool, round_up: bool) -> NumberFormat:
    """Return the format that the op's two flags mean."""
    return mxfp8(E5M2 if e5m2 else E4M3, "up" if round_up else "floor")


def empty_pieces(
    x: Tensor, groups: int | None, e5m2: bool, rowwise: bool, columnwise: bool
) -> Pieces:
    """Allocate what the op returns for 2-D ``x``."""
    rows, columns = x.shape
    dtype = (E5M2 if e5m2 else E4M3).dtype
    blocks = column_block_bound(rows, groups or 1, 32)
    scales = torch.float8_e8m0fnu
    row = (rows, columns) if rowwise else (0, 0)
    row_scale = (rows, columns // 32) if rowwise else (0, 0)
    col = (rows, columns) if columnwise else (0, 0)
    col_scale = (blocks, columns) if columnwise else (0, 0)
    return (
        x.new_empty(row, dtype=dtype),
        x.new_empty(row_scale, dtype=scales),
        x.new_empty(col, dtype=dtype),
        x.new_empty(col_scale, dtype=scales),
    )


def quantize_mxfp8(
    x: Tensor, ends: Tensor | None, e5m2: bool, round_up: bool, rowwise: bool, columnwise: bool
) -> Pieces:
    """Quantize 2-D ``x`` by the formulas, whatever its device."""
    fmt = mxfp8_format(e5m2, round_up)
    pieces: list[Tensor] = []
    for wanted, use in ((rowwise, False), (columnwise, True)):
        if wanted:
            pieces += quantize(x, fmt, columnwise=use, ends=ends)[:2]
        else:
            empty = x.new_empty((0, 0))
            pieces += empty.to(fmt.element.dtype), empty.to(torch.uint8).view(fmt.scale_dtype)
    return pieces[0], pieces[1], pieces[2], pieces[3]


def _fake(
    x: Tensor, ends: Tensor | None, e5m2: bool, round_up: bool, rowwise: bool, columnwise: bool
) -> Pieces:
    return empty_pieces(x, None if ends is None else ends.shape[0], e5m2, rowwise, columnwise)


_library.impl("quantize_mxfp8", quantize_mxfp8, "CompositeExplicitAutograd")
torch.library.register_fake("fusible::quantize_mxfp8", _fake, lib=_library)


def encode(
    x: Tensor, fmt: NumberFormat, *, rowwise: bool, columnwise: bool, ends: Tensor | None = None
) -> tuple[Encoded | None, Encoded | None]:
    """Quantize ``x`` for row-wise and column-wise use, in one launch where a kernel can.

    A format whose blocks have no direction is encoded once, returned for both uses. No gradient
    passes: what the gradient of a quantized product is, its op decides.
    """
    x = x.detach()
    check_ends(x, ends)
    if rowwise:
        check_input(x, fmt, False)
    if columnwise:
        check_input(x, fmt, True)
    if not fmt.directional:
        both = quantize(x, fmt, ends=ends)
        return both if rowwise else None, both if columnwise else None
    if fmt.block == (1, 32) and (x.ndim == 2 or x.shape[-2] % 32 == 0):
        return _encode_mxfp8(x, fmt, rowwise, columnwise, ends)
    return (
        quantize(x, fmt, ends=ends) if rowwise else None,
        quantize(x, fmt, columnwise=True, ends=ends) if columnwise else None,
    )


def _encode_mxfp8(
    x: Tensor, fmt: NumberFormat, rowwise: bool, columnwise: bool, ends: Tensor | None
) -> tuple[Encoded | None, Encoded | None]:
    """Quantize matrices of whole blocks as one; leading dimensions come back."""
    flags = (fmt.element is E5M2, fmt.scale == "e8m0_up")
    lead, columns = x.shape[:-2], x.shape[-1]
    matrix = x.flatten(0, -2) if lead else x
    pieces = torch.ops.fusible.quantize_mxfp8(matrix, ends, *flags, rowwise, columnwise)
    data, scale, col_data, col_scale = pieces
    if lead and rowwise:
        data, scale = data.view(x.shape), scale.view(*x.shape[:-1], columns // 32)
    if lead and columnwise:
        col_data, col_scale = col_data.view(x.shape), col_scale.view(*lead, -1, columns)
    row = Encoded(data, scale, None) if rowwise else None
    return row, Encoded(col_data, col_scale, None) if columnwise else None
