"""From elements and scales back to values in one pass: FP32, rounded once."""

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from fusible.kernels.device import bits
from fusible.kernels.quantize.device import numbers
from fusible.kernels.quantize.device.blocks import block_coord, block_count, grid_of
from fusible.kernels.quantize.spec import THREADS


def _column_scales(scale, block, columns, column, inside, spec):
    """Stored scales of neighbouring columns."""
    fmt = spec.format
    size = numbers.scale_bytes(fmt)
    offset = (Int64(block) * Int64(columns) + Int64(column)) * size
    words = bits.load(scale + offset, inside, spec.vector * size // 4)
    if size == 4:
        return words
    return [(word >> shift) & 255 for word in words for shift in (0, 8, 16, 24)]


def _row_scale(scale, row, columns, column, inside, spec):
    """Stored scale of a thread's columns in one row of blocks."""
    fmt = spec.format
    along = fmt.block[1]
    offset = Int64(row) * Int64(block_count(columns, along)) + Int64(column // along)
    if numbers.scale_bytes(fmt) == 1:
        return bits.load_byte(scale + offset, inside)
    return bits.load(scale + offset * 4, inside, 1)[0]


def _stored_scales(scale, coord, block, first, columns, column, insides, live, spec):
    """Stored scales of every row of a thread: one for all its columns or one for each."""
    fmt = spec.format
    if fmt.directional and not spec.columnwise:
        return [
            [_row_scale(scale, first + r, columns, column, inside, spec)]
            for r, inside in enumerate(insides)
        ]
    if fmt.block is None:
        same = bits.load(scale + Int64(coord.group) * 4, live, 1)
    elif fmt.directional:
        same = _column_scales(scale, block, columns, column, live, spec)
    else:
        same = [_row_scale(scale, block, columns, column, live, spec)]
    return [same] * spec.thread_rows


def _dequantize_rows(source, out, coord, block, first, columns, column, scales, spec):
    fmt, (scale, tensor_scale) = spec.format, scales
    count = coord.end - first
    exists = [Boolean(r < count) & (column < columns) for r in range(spec.thread_rows)]
    live = Boolean(column < columns) & (coord.live != 0)
    insides = [Int32(Boolean(r < count) & live) for r in range(spec.thread_rows)]

    per_byte = fmt.element.per_byte
    offset = Int64(first) * Int64(columns) + Int64(column)
    words = [
        bits.load(
            source + (offset + r * Int64(columns)) // per_byte, inside, spec.vector // per_byte // 4
        )
        for r, inside in enumerate(insides)
    ]
    stored = _stored_scales(scale, coord, block, first, columns, column, insides, Int32(live), spec)
    outer = None
    if fmt.has_tensor_scale:
        outer = bits.to_float(bits.load(tensor_scale + Int64(coord.group) * 4, Int32(live), 1)[0])

    factors, of = None, None
    for r in range(spec.thread_rows):
        if stored[r] is not of:
            factors, of = [numbers.decode_scale(one, fmt) for one in stored[r]], stored[r]
            factors = factors if outer is None else [factor * outer for factor in factors]
            factors *= spec.vector // len(factors)
        values = numbers.decode_elements(words[r], factors, fmt, spec.dtype)
        target = out + (offset + r * Int64(columns)) * bits.SIZES[spec.dtype]
        bits.store(target, values, Int32(exists[r]))


@cute.kernel
def _dequantize(
    data: Int64,
    scale: Int64,
    tensor_scale: Int64,
    ends: Int64,
    out: Int64,
    rows: Int32,
    columns: Int32,
    groups: Int32,
    matrix_rows: Int32,
    chunks: Int32,
    spec: cutlass.Constexpr,
):
    cta, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    width = THREADS // spec.parts
    block = cta // chunks
    column = ((cta % chunks) * width + thread % width) * spec.vector
    coord = block_coord(block, rows, groups, matrix_rows, ends, spec)
    first = coord.first + (thread // width) * spec.thread_rows
    scales = (scale, tensor_scale)
    _dequantize_rows(data, out, coord, block, first, columns, column, scales, spec)


@cute.jit
def dequantize(
    data: Int64,
    scale: Int64,
    tensor_scale: Int64,
    ends: Int64,
    out: Int64,
    rows: Int32,
    columns: Int32,
    groups: Int32,
    matrix_rows: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch over ``[rows, columns]`` in ``groups``: addresses and sizes, all contiguous."""
    blocks, chunks = grid_of(rows, columns, groups, matrix_rows, spec)
    _dequantize(
        data, scale, tensor_scale, ends, out, rows, columns, groups, matrix_rows, chunks, spec
    ).launch(grid=[blocks * chunks, 1, 1], block=[THREADS, 1, 1], stream=stream)
