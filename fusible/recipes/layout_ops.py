"""The scale layout of Blackwell's MMA as library ops: scales laid out, and read back.

``layout`` has the formula; here are the arguments in public, their checks and the ops' fakes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusible.arguments import check_bools
from fusible.library import define
from fusible.recipes.blocks import column_block_bound, padded_size, place_rows, scatter_rows
from fusible.recipes.layout import (
    ATOM_ROWS,
    swizzle_group_scales,
    swizzle_scales,
    swizzled_group_bytes,
    swizzled_shape,
    unswizzle_group_scales,
    unswizzle_scales,
)


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
      in NVFP4) to a block, blocks anew in every group: the MMA's rows are the columns, and every
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
    wanted = _swizzled_shape(shape, ends, rows, columnwise, block_size)
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
    if offsets.ndim != 1 or not offsets.shape[0] or offsets.device != scale.device:
        raise ValueError(
            f"{name} must be of shape (groups,) with at least one group on {scale.device}, "
            f"got shape {tuple(offsets.shape)} on {offsets.device}"
        )
    if name == "starts":
        return torch.cat((offsets[1:], offsets.new_full((1,), rows)))
    return offsets.cumsum(0) if name == "sizes" else offsets


def _swizzled_shape(
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
    return swizzle_scales(scatter_rows(scale, place, padded_size(rows, len(ends), ATOM_ROWS)))


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
    lambda scale, *rest: scale.new_empty(_swizzled_shape(scale.shape, *rest)),
    name="swizzle_block_scales",
)
_unswizzle_op = define(
    _unswizzle,
    lambda swizzled, shape, *_: swizzled.new_empty(shape),
    name="unswizzle_block_scales",
)
