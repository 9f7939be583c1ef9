"""Groups padded to whole 256 rows for the SM100 kernels, and operands packed so.

The kernels take groups of whole 256 rows. Each group of a matrix of ``rows`` rows is followed by
rows of zeros, and the matrix by as many more as its static size needs: at most 255 a group, rounded
down to 256, since the sum of whole 256 rows is one. Nothing is read on the host. Everything here is
plain PyTorch: the definition of what ``quantizer`` does in one pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusible.kernels.runtime.launch import aligned
from fusible.kernels.sm100 import limits
from fusible.kernels.sm100.checks import address_unit
from fusible.library import define
from fusible.recipes.blocks import (
    column_block_ends,
    group_of_row,
    group_starts,
    padded_size,
    place_rows,
    put_rows,
)
from fusible.recipes.layout import ATOM_ROWS, swizzle_group_scales, swizzle_scales, swizzled_shape
from fusible.recipes.matrix import QuantizedMatrix


class PaddedGroups(NamedTuple):
    """Groups of rows as the kernels see them."""

    ends: Tensor
    """Int32 ``[E]``, the end of each group: multiples of 256."""
    rows: Tensor | None
    """Int64 ``[rows]``, where each row goes, ``size`` for rows of no group; None: nowhere else."""
    size: int
    """The number of rows with padding, a multiple of 256."""


def pad_groups(ends: Tensor, rows: int, aligned: bool) -> PaddedGroups:
    """Groups up to ``ends`` of ``rows`` rows, of which some may belong to no group, padded.

    ``aligned`` promises that every group has a multiple of 256 rows, so that they need not move.
    """
    if aligned and rows % limits.GROUP_ROWS == 0:
        return PaddedGroups(ends, None, rows)
    size = padded_size(rows, ends.shape[0], limits.GROUP_ROWS)
    ends_padded, place = _place_groups_op(ends, rows, limits.GROUP_ROWS)
    return PaddedGroups(ends_padded, place, size)


def pad_rows(t: Tensor, padded: PaddedGroups) -> Tensor:
    """The rows of ``t`` with padding of zeros between groups; of any dtype."""
    if padded.rows is None:
        return t
    return put_rows(t, padded.rows, padded.size)


def unpad_rows(t: Tensor, padded: PaddedGroups, out: Tensor | None = None) -> Tensor:
    """The rows without padding; ``t`` has one row more, which rows of no group get."""
    if padded.rows is None:
        return t[:-1]
    return torch.index_select(t, 0, padded.rows, out=out)


def own_rows(t: Tensor, padded: PaddedGroups) -> Tensor:
    """The rows of ``t`` ``[size, ...]`` without padding; those of no group are any."""
    if padded.rows is None:
        return t
    return t.index_select(0, padded.rows.clamp(max=padded.size - 1))


def pad_scales(scale: Tensor, ends: Tensor, padded: PaddedGroups, along: int) -> Tensor:
    """Column-wise scales ``[blocks, columns]`` of groups up to ``ends``, where their rows are."""
    if padded.rows is None:
        return scale[: padded.size // along]
    block_ends = column_block_ends(ends, along)
    _, place = place_rows(block_ends, scale.shape[0], limits.GROUP_ROWS // along)
    return put_rows(scale, place, padded.size // along)


def packed_rows(matrix: QuantizedMatrix, padded: PaddedGroups) -> tuple[Tensor, Tensor]:
    """Data ``[size, K]`` and packed scales of rows quantized row-wise."""
    if padded.rows is None:
        # In the layout of the matrix, which may be a transpose, at any address.
        unit = address_unit(matrix.data.dtype)
        return aligned(matrix.data, unit), packed_scales(matrix.scale)
    return _pack_rows_op(matrix.data, matrix.scale, padded)


def packed_columns(matrix: QuantizedMatrix, padded: PaddedGroups) -> tuple[Tensor, Tensor]:
    """Data and packed scales of groups quantized column-wise.

    MXFP8: data ``[size, K]`` in row order. NVFP4: ``[K, size / 2]``, which only contains the
    bytes of one matrix ``[K, rows / 2]`` per group, two rows in a byte. Scales:
    ``[round_up(K, 128), size / block]``, which only contains one compact region per group.
    """
    fmt = matrix.format
    assert fmt.block is not None
    pairs = fmt.element.per_byte == 2
    assert matrix.ends is not None
    data, scales = _pack_columns_op(
        matrix.data, matrix.scale, matrix.ends, padded, fmt.block[1], pairs
    )
    return aligned(matrix.data) if padded.rows is None and not pairs else data, scales


def _pack_rows(data: Tensor, scale: Tensor, padded: PaddedGroups) -> tuple[Tensor, Tensor]:
    return pad_rows(data, padded), swizzle_scales(pad_rows(scale, padded))


def _pack_columns(
    data: Tensor, scale: Tensor, ends: Tensor, padded: PaddedGroups, along: int, pairs: bool
) -> tuple[Tensor, Tensor]:
    padded_ends, rows, size = padded
    scale = pad_scales(scale, ends, padded, along)
    lines, across = -(-scale.shape[1] // ATOM_ROWS) * ATOM_ROWS, size // along
    scales = swizzle_group_scales(scale, size, padded_ends, along)
    scales = scales[: lines * across].view(lines, across)
    if pairs:
        return _pairs_of_rows(pad_rows(data, padded), padded_ends), scales
    # An op returns no tensor that it was given.
    return pad_rows(data, padded) if rows is not None else data.new_empty(0), scales


def _pack_columns_fake(
    data: Tensor, scale: Tensor, ends: Tensor, padded: PaddedGroups, along: int, pairs: bool
) -> tuple[Tensor, Tensor]:
    size = padded.size
    lines = (scale.shape[1] + ATOM_ROWS - 1) // ATOM_ROWS * ATOM_ROWS
    scales = scale.new_empty(lines, size // along)
    if pairs:
        return data.new_empty(2 * data.shape[1], size // 2), scales
    return data.new_empty((size, data.shape[1]) if padded.rows is not None else 0), scales


def _pairs_of_rows(data: Tensor, ends: Tensor) -> Tensor:
    """FP4 bytes ``[rows, K / 2]`` of two columns each, as two rows each, group by group."""
    low, high = data & 15, data >> 4
    values = torch.stack((low, high), -1).flatten(-2)  # [rows, K]
    pairs = (values[0::2] | values[1::2] << 4).contiguous()  # [rows / 2, K]
    half_ends, columns = ends // 2, pairs.shape[1]
    row = torch.arange(pairs.shape[0], device=data.device)
    group = group_of_row(half_ends, pairs.shape[0])
    start, sizes = group_starts(half_ends)[group], (half_ends - group_starts(half_ends))[group]
    column = torch.arange(columns, device=data.device)
    # Group g's matrix [K, rows of g / 2] begins at its first row times K.
    place = start[:, None] * columns + column * sizes[:, None] + (row - start)[:, None]
    spare = pairs.numel()
    place = torch.where((row < half_ends[-1])[:, None], place, spare)
    out = pairs.new_zeros(spare + 1)
    out[place] = pairs
    return out[:spare].view(columns, -1)


# torch.compile makes no code for E8M0 scales: what moves them are ops of their own.
_place_groups_op = define(
    place_rows,
    lambda ends, rows, unit: (torch.empty_like(ends), ends.new_empty(rows, dtype=torch.int64)),
    name="sm100_pad_groups",
)
packed_scales = define(
    swizzle_scales,
    lambda scale: scale.new_empty(swizzled_shape(scale.shape, scale.shape[-2])),
    name="sm100_pack_scales",
)
"""Scales ``[..., rows, blocks]``, blocks along the reduction, as the MMA reads them."""
_pack_rows_op = define(
    _pack_rows,
    lambda data, scale, padded: (
        data.new_empty(padded.size, data.shape[1]),
        scale.new_empty(swizzled_shape(scale.shape, padded.size)),
    ),
    name="sm100_pack_rows",
)
_pack_columns_op = define(_pack_columns, _pack_columns_fake, name="sm100_pack_columns")
