"""The grouped products in Triton: plain kernels for GPUs that have no others.

Sizes of groups are read on the device: a grid has room for any sizes, and a program without rows
does nothing. Sums are FP32.
"""

import triton
import triton.language as tl


@triton.jit
def _bounds(ends, group, rows):
    """First row of a group and the first past it."""
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    stop = tl.load(ends + group)
    return tl.minimum(tl.maximum(start, 0), rows), tl.minimum(stop, rows)


@triton.jit(do_not_specialize=["rows"])
def rows_grouped(
    x, w, ends, bias, row_scale, out,
    rows, groups, columns, depth,
    x_row, x_depth, w_group, w_column, w_depth, out_row, out_column,
    has_bias: tl.constexpr,
    has_scale: tl.constexpr,
    slots: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """``x @ w[e].T + bias[e] * row_scale`` for rows of group e, zeros past the last group.

    A program computes one tile. ``slots``, a power of two, are more than there are groups: one for
    each, and one for the rows past the last.
    """
    across = tl.cdiv(columns, block_columns)
    tile, column = tl.program_id(0) // across, tl.program_id(0) % across
    slot = tl.arange(0, slots)
    start = tl.load(ends + slot - 1, mask=(slot > 0) & (slot <= groups), other=0)
    stop = tl.load(ends + slot, mask=slot < groups, other=rows)
    start = tl.minimum(tl.maximum(start, 0), rows)
    stop = tl.minimum(stop, rows)
    size = tl.where(slot <= groups, tl.maximum(stop - start, 0), 0)
    tiles = tl.cdiv(size, block_rows)
    through = tl.cumsum(tiles, 0)
    group = tl.sum((through <= tile).to(tl.int32), 0)
    if group <= groups:
        mine = slot == group
        before = tl.sum(tl.where(mine, through - tiles, 0), 0)
        first = tl.sum(tl.where(mine, start, 0), 0) + (tile - before) * block_rows
        row = (first + tl.arange(0, block_rows)).to(tl.int64)
        at_row = row < tl.sum(tl.where(mine, stop, 0), 0)
        col = (column * block_columns + tl.arange(0, block_columns)).to(tl.int64)
        at_col = col < columns
        total = tl.zeros((block_rows, block_columns), dtype=tl.float32)
        if group < groups:
            weight = w + group.to(tl.int64) * w_group
            for k in range(0, depth, block_depth):
                at = (k + tl.arange(0, block_depth)).to(tl.int64)
                inside = at < depth
                a = tl.load(
                    x + row[:, None] * x_row + at[None, :] * x_depth,
                    mask=at_row[:, None] & inside[None, :],
                    other=0.0,
                )
                b = tl.load(
                    weight + at[:, None] * w_depth + col[None, :] * w_column,
                    mask=inside[:, None] & at_col[None, :],
                    other=0.0,
                )
                total = tl.dot(a, b, total, input_precision=precision)
            if has_bias:
                shift = tl.load(bias + group.to(tl.int64) * columns + col, mask=at_col, other=0.0)
                shift = tl.broadcast_to(shift.to(tl.float32)[None, :], total.shape)
                if has_scale:
                    scale = tl.load(row_scale + row, mask=at_row, other=0.0).to(tl.float32)
                    shift = shift * scale[:, None]
                total += shift
        tl.store(
            out + row[:, None] * out_row + col[None, :] * out_column,
            total.to(out.dtype.element_ty),
            mask=at_row[:, None] & at_col[None, :],
        )


@triton.jit(do_not_specialize=["rows"])
def reduction_grouped(
    dy, x, ends, out,
    rows, columns, depth,
    dy_row, dy_column, x_row, x_column,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """``dy[rows of e].T @ x[rows of e]`` to the contiguous ``out[e]``, one tile a program."""
    across = tl.cdiv(depth, block_depth)
    down, right = tl.program_id(0) // across, tl.program_id(0) % across
    group = tl.program_id(1)
    start, stop = _bounds(ends, group, rows)
    col = (down * block_columns + tl.arange(0, block_columns)).to(tl.int64)
    at = (right * block_depth + tl.arange(0, block_depth)).to(tl.int64)
    at_col, inside = col < columns, at < depth
    total = tl.zeros((block_columns, block_depth), dtype=tl.float32)
    for first in range(start, stop, block_rows):
        row = (first + tl.arange(0, block_rows)).to(tl.int64)
        at_row = row < stop
        a = tl.load(
            dy + col[:, None] * dy_column + row[None, :] * dy_row,
            mask=at_col[:, None] & at_row[None, :],
            other=0.0,
        )
        b = tl.load(
            x + row[:, None] * x_row + at[None, :] * x_column,
            mask=at_row[:, None] & inside[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=precision)
    target = out + group.to(tl.int64) * columns * depth
    tl.store(
        target + col[:, None] * depth + at[None, :],
        total.to(out.dtype.element_ty),
        mask=at_col[:, None] & inside[None, :],
    )
