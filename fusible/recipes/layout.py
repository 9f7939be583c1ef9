"""The scale layout that Blackwell's block-scaled MMA reads (32x4x4).

Scales of 128 rows by 4 blocks are in one atom of 512 bytes, atoms row-major. With ``block`` along
the reduction, ``atoms = ceil(blocks / 4)``, the byte of scale (row, block) is

    ((row // 128) * atoms + block // 4) * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4

It is cuBLAS' 32x4x4 layout and torch's ``SwizzleType.SWIZZLE_32_4_4``. Padding bytes are zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fusible.recipes.blocks import column_block_ends, group_of_row, group_starts, padded_size

ATOM_ROWS, ATOM_BLOCKS, ATOM_BYTES = 128, 4, 512


def scale_offset(row: Tensor, block: Tensor, blocks: int | Tensor) -> Tensor:
    """Return the byte of scale (``row``, ``block``) in a matrix of ``blocks`` blocks per row."""
    atoms = (blocks + ATOM_BLOCKS - 1) // ATOM_BLOCKS
    atom = (row // ATOM_ROWS) * atoms + block // ATOM_BLOCKS
    return atom * ATOM_BYTES + (row % 32) * 16 + (row % ATOM_ROWS // 32) * 4 + block % ATOM_BLOCKS


def swizzle_scales(scale: Tensor) -> Tensor:
    """Lay out ``scale`` ``[..., rows, blocks]``, blocks along the reduction, for the MMA.

    Returns a contiguous ``[..., ceil(rows / 128), ceil(blocks / 4), 32, 4, 4]`` of the same dtype;
    ``permute(3, 4, 1, 5, 2, 0)`` of a batched one is the view that cuDNN's kernels take.
    """
    rows, blocks = scale.shape[-2:]
    data = scale.view(torch.uint8)
    data = functional.pad(data, (0, -blocks % ATOM_BLOCKS, 0, -rows % ATOM_ROWS))
    # Atom of rows, row // 32, row % 32, atom of blocks, block % 4.
    tiles = data.unflatten(-1, (-1, ATOM_BLOCKS)).unflatten(-3, (-1, 4, 32))
    return tiles.transpose(-4, -2).contiguous().view(scale.dtype)


def swizzled_shape(shape: Sequence[int], rows: int) -> tuple[int, ...]:
    """Return the shape of scales of ``shape``, laid out, where they are padded to ``rows`` rows."""
    atoms = (rows + ATOM_ROWS - 1) // ATOM_ROWS, (shape[-1] + ATOM_BLOCKS - 1) // ATOM_BLOCKS
    return (*shape[:-2], *atoms, 32, 4, 4)


def unswizzle_scales(swizzled: Tensor, rows: int, blocks: int) -> Tensor:
    """Undo ``swizzle_scales``: return ``[..., rows, blocks]`` from tiles."""
    data = swizzled.view(torch.uint8).transpose(-4, -2)
    data = data.flatten(-5, -3).flatten(-2, -1)
    return data[..., :rows, :blocks].contiguous().view(swizzled.dtype)


def swizzled_group_bytes(rows: int, columns: int, groups: int, along: int) -> int:
    """Return the bytes that column-wise scales of ``rows`` rows in any ``groups`` groups can need.

    Every group is padded to 128 rows and the columns to 128; groups of whole 128 rows need
    ``rows // along * round_up(columns, 128)`` bytes, the beginning of the buffer.
    """
    return padded_size(rows, groups, ATOM_ROWS) // along * _round_up(columns, ATOM_ROWS)


def swizzle_group_scales(scale: Tensor, rows: int, ends: Tensor, along: int) -> Tensor:
    """Lay out column-wise ``scale`` ``[blocks, columns]``, one compact region per group.

    The MMA's rows are the columns of the tensor. A region begins at ``(padded rows of earlier
    groups) / along * round_up(columns, 128)``, groups padded to 128 rows, hence regions abut.
    Returns bytes ``[swizzled_group_bytes(...)]`` in the dtype of ``scale``.
    """
    size = swizzled_group_bytes(rows, scale.shape[1], len(ends), along)
    out = torch.zeros(size + 1, dtype=torch.uint8, device=scale.device)  # + 1: spare scales
    offset = _group_offsets(scale.shape[0], scale.shape[1], ends, along, spare=size)
    out[offset] = scale.view(torch.uint8)
    return out[:size].view(scale.dtype)


def unswizzle_group_scales(
    swizzled: Tensor, blocks: int, columns: int, ends: Tensor, along: int
) -> Tensor:
    """Undo ``swizzle_group_scales``: return ``[blocks, columns]``, zeros where no group is."""
    data = torch.cat((swizzled.view(torch.uint8), swizzled.new_zeros(1, dtype=torch.uint8)))
    offset = _group_offsets(blocks, columns, ends, along, spare=len(data) - 1)
    return data[offset].view(swizzled.dtype)


def _group_offsets(blocks: int, columns: int, ends: Tensor, along: int, spare: int) -> Tensor:
    """Return the byte of each column-wise scale, ``spare`` for those of no group."""
    sizes = ends - group_starts(ends)
    block_ends = column_block_ends(ends, along)
    block = torch.arange(blocks, device=ends.device)[:, None]
    group = group_of_row(block_ends, blocks)[:, None]
    padded = (sizes + ATOM_ROWS - 1) // ATOM_ROWS * ATOM_ROWS
    region = group_starts(padded.cumsum(0)) // along * _round_up(columns, ATOM_ROWS)
    local = block - group_starts(block_ends)[group]
    column = torch.arange(columns, device=ends.device)
    blocks_of_group = padded[group] // along
    offset = region[group] + scale_offset(column, local, blocks_of_group)
    return torch.where(block < block_ends[-1], offset, spare)


def _round_up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple
