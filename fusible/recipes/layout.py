"""The scale layout that Blackwell's block-scaled MMA reads (32x4x4).

Scales of 128 rows by 4 blocks are in one atom of 512 bytes, atoms row-major. With ``block`` along
the reduction, ``atoms = ceil(blocks / 4)``, the byte of scale (row, block) is

    ((row // 128) * atoms + block // 4) * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4

It is cuBLAS' 32x4x4 layout and torch's ``SwizzleType.SWIZZLE_32_4_4``. Padding bytes are zero.
``swizzle_block_scales`` and its inverse are library ops, the other functions their definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fusible.arguments import check_bools
from fusible.library import define
from fusible.recipes.blocks import (
    check_per_group,
    column_block_bound,
    column_block_ends,
    group_of_row,
    group_starts,
    padded_size,
    place_rows,
    put_rows,
)

ATOM_ROWS, ATOM_BLOCKS, ATOM_BYTES = 128, 4, 512


def scale_offset(row: Tensor, block: Tensor, blocks: int | Tensor) -> Tensor:
    """Return the byte of scale (``row``, ``block``) in a matrix of ``blocks`` blocks per row."""
    atoms = (blocks + ATOM_BLOCKS - 1) // ATOM_BLOCKS
    atom = (row // ATOM_ROWS) * atoms + block // ATOM_BLOCKS
    return atom * ATOM_BYTES + (row % 32) * 16 + (row % ATOM_ROWS // 32) * 4 + block % ATOM_BLOCKS


def swizzle_scales(scale: Tensor) -> Tensor:
    """Lay out ``scale`` ``[..., rows, blocks]``: a contiguous tensor of ``swizzled_shape``.

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


# --- library ops ---------------------------------------------------------------------------------


def swizzle_block_scales(
    scale: Tensor,
    ends: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    sizes: Tensor | None = None,
    rows: int | None = None,
    columnwise: bool = False,
    block_size: int = 32,
) -> Tensor:
    """Lay out block scales in the 128x4 tiles that Blackwell's block-scaled MMA reads.

    Without groups, ``scale`` is ``[..., rows, blocks]`` with blocks along the reduction, and the
    result ``[..., ceil(rows / 128), ceil(blocks / 4), 32, 4, 4]``; scale (row, block) is in tile
    (row // 128, block // 4) at (row % 32, row % 128 // 32, block % 4).

    With groups, one of ``ends`` (first row after each group), ``starts`` (first row of each group;
    the last one ends at ``rows``) and ``sizes`` says where groups of the quantized tensor's rows
    are. They are int32 or int64 ``[groups]`` on the scales' device, without gaps from row 0. They
    are not read by the host, so the sizes of results follow from ``rows`` and ``groups`` alone and
    only the beginning of a result is used:

    - row-wise scales ``[rows, blocks]``: every group begins at a tile, the result is
      ``[(rows + 127 * groups) // 128, ceil(blocks / 4), 32, 4, 4]``;
    - ``columnwise`` scales ``[blocks, columns]`` of ``rows`` rows, ``block_size`` (32 in MXFP8, 16
      in NVFP4) to a block, blocks restart in every group: the MMA's rows are the columns, and every
      group is a matrix ``[columns, rows of the group]`` of its own, padded to 128 rows. The result
      is one-dimensional, the tiles of a group behind those of the group before.

    All scales have one byte (``float8_e8m0fnu``, ``float8_e4m3fn``, ``uint8``), and so has the
    result. Bytes of padding, and of rows of no group in the row-wise form, are zero.

    Raises:
        TypeError: ``scale`` does not have one byte per number, or the offsets are not integers.
        ValueError: more than one of ``ends``, ``starts``, ``sizes`` is given, or shapes or devices
            do not fit.
    """
    check_bools("swizzle_block_scales", columnwise=columnwise)
    groups = {"ends": ends, "starts": starts, "sizes": sizes}
    rows, ends = _checked(scale, scale.shape, groups, rows, columnwise, block_size)
    return _swizzle_op(scale, ends, rows, columnwise, block_size)


def unswizzle_block_scales(
    swizzled: Tensor,
    shape: Sequence[int],
    ends: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    sizes: Tensor | None = None,
    rows: int | None = None,
    columnwise: bool = False,
    block_size: int = 32,
) -> Tensor:
    """Undo ``swizzle_block_scales``; ``shape`` is that of the scales which it was given.

    The other arguments and the errors are its own. Scales of no group are zero.
    """
    check_bools("unswizzle_block_scales", columnwise=columnwise)
    shape = tuple(shape)
    groups = {"ends": ends, "starts": starts, "sizes": sizes}
    rows, ends = _checked(swizzled, shape, groups, rows, columnwise, block_size)
    wanted = _shape_of_result(shape, ends, rows, columnwise, block_size)
    if tuple(swizzled.shape) != wanted:
        raise ValueError(
            f"swizzled scales of shape {shape} must have shape {wanted}, got "
            f"{tuple(swizzled.shape)}; pass the shape, rows and groups that they were made of"
        )
    return _unswizzle_op(swizzled, torch.Size(shape), ends, columnwise, block_size)


def _checked(
    scale: Tensor,
    shape: Sequence[int],
    groups: dict[str, Tensor | None],
    rows: int | None,
    columnwise: bool,
    block_size: int,
) -> tuple[int, Tensor | None]:
    """Return the rows of the tensor that was quantized, and the end row of each of its groups.

    Raises the errors of both functions, for ``scale``, laid out or not, of scales of ``shape``.
    """
    if len(shape) < 2:
        raise ValueError(f"block scales must have rows and blocks, got shape {tuple(shape)}")
    if columnwise and rows is None:
        raise ValueError(
            "rows must be given for column-wise scales, got None; "
            "pass the number of rows of the tensor that was quantized"
        )
    if not columnwise and rows not in (None, shape[-2]):
        raise ValueError(f"rows must be the {shape[-2]} rows of the scales, got {rows}")
    rows = shape[-2] if rows is None else rows
    ends = _ends_of(scale, groups, rows)
    if scale.element_size() != 1:
        raise TypeError(f"block scales must have one byte each, got {scale.dtype}")
    if ends is not None and len(shape) != 2:
        raise ValueError(f"scales of groups must be 2-D, got shape {tuple(shape)}")
    if not columnwise:
        return rows, ends
    if block_size not in (16, 32):
        raise ValueError(f"block_size must be 16 or 32, got {block_size}")
    if ends is None:
        raise ValueError(
            "column-wise scales must be of groups, got none of ends, starts and sizes; "
            "pass scale.mT without groups"
        )
    blocks = column_block_bound(rows, ends.shape[0], block_size)
    if shape[0] != blocks:
        raise ValueError(
            f"column-wise scales of {rows} rows in {ends.shape[0]} groups must have {blocks} "
            f"blocks of {block_size} rows, got {shape[0]}; quantize the rows in these groups"
        )
    return rows, ends


def _ends_of(scale: Tensor, groups: dict[str, Tensor | None], rows: int) -> Tensor | None:
    """Return the end row of each group from the one of the three that is given, None from none."""
    given = {name: offsets for name, offsets in groups.items() if offsets is not None}
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"one of ends, starts and sizes must be given, got {', '.join(given)}")
    ((name, offsets),) = given.items()
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {offsets.dtype}")
    check_per_group(name, offsets, scale.device)
    if name == "starts":
        return torch.cat((offsets[1:], offsets.new_full((1,), rows)))
    return offsets.cumsum(0) if name == "sizes" else offsets


def _shape_of_result(
    shape: Sequence[int], ends: Tensor | None, rows: int, columnwise: bool, block_size: int
) -> tuple[int, ...]:
    if columnwise:
        assert ends is not None
        return (swizzled_group_bytes(rows, shape[1], ends.shape[0], block_size),)
    padded = rows if ends is None else padded_size(rows, ends.shape[0], ATOM_ROWS)
    return swizzled_shape(shape, padded)


def _swizzle(
    scale: Tensor, ends: Tensor | None, rows: int, columnwise: bool, block_size: int
) -> Tensor:
    if ends is None:
        return swizzle_scales(scale)
    if columnwise:
        return swizzle_group_scales(scale, rows, ends, block_size)
    _, place = place_rows(ends, rows, ATOM_ROWS)
    return swizzle_scales(put_rows(scale, place, padded_size(rows, len(ends), ATOM_ROWS)))


def _unswizzle(
    swizzled: Tensor, shape: torch.Size, ends: Tensor | None, columnwise: bool, block_size: int
) -> Tensor:
    if columnwise:
        assert ends is not None
        return unswizzle_group_scales(swizzled, shape[0], shape[1], ends, block_size)
    rows, blocks = shape[-2:]
    if ends is None:
        return unswizzle_scales(swizzled, rows, blocks)
    _, place = place_rows(ends, rows, ATOM_ROWS)
    padded = unswizzle_scales(swizzled, swizzled.shape[0] * ATOM_ROWS, blocks).view(torch.uint8)
    # One row of zeros more, which rows of no group get.
    padded = torch.cat((padded, padded.new_zeros(1, blocks)))
    return padded.index_select(0, place).view(swizzled.dtype)


_swizzle_op = define(
    _swizzle,
    lambda scale, *rest: scale.new_empty(_shape_of_result(scale.shape, *rest)),
    name="swizzle_block_scales",
)
_unswizzle_op = define(
    _unswizzle,
    lambda swizzled, shape, *_: swizzled.new_empty(shape),
    name="unswizzle_block_scales",
)
