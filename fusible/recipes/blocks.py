"""Blocks of a format in a matrix: reduction to one number per block, and back.

``ends`` are the cumulative end rows of groups, read on the device only; every size follows from the
number of rows and of groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """The blocks of one tensor of ``[..., rows, columns]``."""

    amax: Callable[[Tensor], Tensor]
    """Largest magnitude per block; NaN if one is in it."""
    expand: Callable[[Tensor], Tensor]
    """One number per block to a shape that broadcasts against the tensor."""
    spread_groups: Callable[[Tensor], Tensor]
    """One number per group to a shape that broadcasts against one per block."""


def blocks_of(
    x: Tensor, block: tuple[int, int] | None, columnwise: bool, ends: Tensor | None
) -> Blocks:
    """Return the blocks of ``x`` for a format's ``block`` and use; only its shape is read."""
    if block is None:
        return _whole(x, ends)
    (across, along), rows = block, x.shape[-2]
    if columnwise and across != along:
        return _tiled(x, along, across) if ends is None else _columns(along, rows, ends)
    blocks = _tiled(x, across, along)
    if ends is None:
        return blocks
    return blocks._replace(spread_groups=lambda s: s[group_of_row(ends, rows), None])


def with_zero_tail(x: Tensor, ends: Tensor) -> Tensor:
    """Set the rows of ``x`` past the last group to zero, in a copy."""
    row = torch.arange(x.shape[0], device=x.device)
    return torch.where((row < ends[-1]).view(-1, *[1] * (x.dim() - 1)), x, 0)


def gather_rows(x: Tensor, index: Tensor | None, ends: Tensor | None) -> Tensor:
    """``x[index]``, if there is one; past the last group, where it is not read, any row."""
    if index is None:
        return x
    if ends is not None:
        index = torch.where(torch.arange(len(index), device=x.device) < ends[-1], index, 0)
    return x.index_select(0, index)


def check_per_group(name: str, t: Tensor, device: torch.device, groups: int | None = None) -> None:
    """Raise ValueError unless ``t`` has an integer for each of ``groups`` groups, on ``device``."""
    one_each = t.ndim == 1 and (t.shape[0] > 0 if groups is None else t.shape[0] == groups)
    integers, there = t.dtype in (torch.int32, torch.int64), t.device == device
    if one_each and integers and there:
        return
    shape = "(groups,) with at least one group" if groups is None else f"({groups},)"
    problems = {
        f"int32 or int64, got {t.dtype}": integers,
        f"of shape {shape}, got {tuple(t.shape)}": one_each,
        f"on {device}, where the rows are, got {t.device}": there,
    }
    wrong = [sentence for sentence, holds in problems.items() if not holds]
    raise ValueError(f"{name} must be {' and '.join(wrong)}")


def group_starts(ends: Tensor) -> Tensor:
    """Return the first row of each group, from the cumulative end rows."""
    return torch.cat((ends.new_zeros(1), ends[:-1]))


def column_block_ends(ends: Tensor, along: int) -> Tensor:
    """Return the cumulative number of column-wise blocks, ``[groups]``; they restart at each."""
    return ((ends - group_starts(ends) + along - 1) // along).cumsum(0)


def column_block_bound(rows: int, groups: int, along: int) -> int:
    """Return the most column-wise blocks that ``rows`` rows in ``groups`` groups can have."""
    return (rows + groups * (along - 1)) // along


def padded_size(rows: int, groups: int, unit: int) -> int:
    """Return the most rows that ``rows`` rows in ``groups`` groups padded to ``unit`` can have."""
    return column_block_bound(rows, groups, unit) * unit


def place_rows(ends: Tensor, rows: int, unit: int) -> tuple[Tensor, Tensor]:
    """Return the end of each group, int32, when each is padded to ``unit`` rows, and row places.

    Those are int64 ``[rows]``, ``padded_size`` for rows of no group.
    """
    starts = group_starts(ends)
    padded_ends = ((ends - starts + unit - 1) // unit * unit).cumsum(0, dtype=torch.int32)
    row = torch.arange(rows, device=ends.device)
    place = row + (group_starts(padded_ends) - starts)[group_of_row(ends, rows)]
    return padded_ends, torch.where(row < ends[-1], place, padded_size(rows, len(ends), unit))


def group_of_row(ends: Tensor, rows: int) -> Tensor:
    """Return the group of each row, int64 ``[rows]``; that of rows past the end is the last."""
    row = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)


def put_rows(t: Tensor, place: Tensor, size: int) -> Tensor:
    """Return ``size`` rows: those of ``t`` at ``place``, dropped where that is ``size``, and zeros.

    ``t`` may have any dtype.
    """
    bits = t.view(torch.uint8) if t.element_size() == 1 else t
    out = bits.new_zeros(size + 1, *t.shape[1:])  # one row more, which takes the dropped ones
    return out.index_copy_(0, place, bits)[:size].view(t.dtype)


def _whole(x: Tensor, ends: Tensor | None) -> Blocks:
    if ends is None:

        def amax(x: Tensor) -> Tensor:
            if not x.numel():
                return x.new_zeros(*x.shape[:-2], 1)
            return x.abs().amax((-2, -1)).unsqueeze(-1)

        return Blocks(amax, lambda s: s.unsqueeze(-1), lambda s: s.unsqueeze(-1))
    group = group_of_row(ends, x.shape[0])

    def grouped_amax(x: Tensor) -> Tensor:
        # As integers, magnitudes keep their order and NaN is the largest, on every device.
        bits = x.abs().amax(-1).float().view(torch.int32)
        out = bits.new_zeros(len(ends)).scatter_reduce(0, group, bits, "amax")
        return out.view(torch.float32)

    return Blocks(grouped_amax, lambda s: s[group, None], lambda s: s)


def _tiled(x: Tensor, height: int, width: int) -> Blocks:
    """Blocks of ``height`` rows by ``width`` columns; the last ones may be short."""
    rows, columns = x.shape[-2:]
    down, across = -(-rows // height), -(-columns // width)
    padding = (0, across * width - columns, 0, down * height - rows)

    def amax(x: Tensor) -> Tensor:
        x = x.abs()
        if any(padding):
            x = torch.nn.functional.pad(x, padding)
        return x.unflatten(-1, (across, width)).unflatten(-3, (down, height)).amax((-3, -1))

    def expand(s: Tensor) -> Tensor:
        tiles = s[..., :, None, :, None].expand(*s.shape[:-1], height, across, width)
        return tiles.flatten(-4, -3).flatten(-2)[..., :rows, :columns]

    return Blocks(amax, expand, lambda s: s.unsqueeze(-1))


class ColumnBlocks(NamedTuple):
    """Blocks of neighbouring rows, which restart at every group."""

    block_of_row: Tensor
    """Int64 ``[rows]``; of rows past the last group any."""
    place_in_block: Tensor
    """Int64 ``[rows]``; of rows past the last group any."""
    rows: Tensor
    """Int64 ``[column_block_bound, along]``: the rows of each block, any where it is shorter."""
    inside: Tensor
    """Bool, of ``rows``: whether the block has that row."""
    group: Tensor
    """Int64 ``[column_block_bound]``: the group of each block."""


def column_blocks(ends: Tensor, rows: int, along: int) -> ColumnBlocks:
    """Return the blocks of up to ``along`` of ``rows`` rows, in groups up to ``ends``."""
    groups = len(ends)
    block_ends, starts = column_block_ends(ends, along), group_starts(ends)
    first_block = group_starts(block_ends)
    row = torch.arange(rows, device=ends.device)
    group = group_of_row(ends, rows)
    bound = column_block_bound(rows, groups, along)
    row_in_group = row - starts[group]
    block_of_row = first_block[group] + row_in_group // along
    block_of_row = block_of_row.clamp(max=bound - 1)  # rows past the last group

    block = torch.arange(bound, device=ends.device)
    group_of_block = group_of_row(block_ends, bound)
    first_row = starts[group_of_block] + (block - first_block[group_of_block]) * along
    rows_of_block = first_row[:, None] + torch.arange(along, device=ends.device)
    inside = rows_of_block < ends[group_of_block, None]
    rows_of_block = rows_of_block.clamp(max=max(rows - 1, 0))
    return ColumnBlocks(block_of_row, row_in_group % along, rows_of_block, inside, group_of_block)


def _columns(along: int, rows: int, ends: Tensor) -> Blocks:
    block_of_row, _, rows_of_block, inside, group_of_block = column_blocks(ends, rows, along)
    bound = rows_of_block.shape[0]

    def amax(x: Tensor) -> Tensor:
        if not bound or not rows:
            return x.new_zeros(bound, x.shape[1])
        return torch.where(inside[..., None], x.abs()[rows_of_block], 0).amax(1)

    return Blocks(amax, lambda s: s[block_of_row], lambda s: s[group_of_block, None])
