# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""Copies of the rows of groups to a buffer and back: ``kernels.saved_rows`` (CuTe DSL)."""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from fusible.kernels.device import bits
from fusible.kernels.saved_rows.spec import LINE, THREADS, TOGETHER, UNIT


class _Copy(NamedTuple):
    """The arguments of `save` and `restore`."""

    memory: Int64
    rows: Int64
    """Address of what is copied, or of where to."""
    ends: Int64
    row_count: Int32
    row_units: Int32
    groups: Int32
    index: Int32
    header: Int32
    """Its bytes."""
    lines: Int32


def _copy_range(copy):
    """The address of a copy, its units, the line that follows it, and whether there is room."""
    last = bits.load_index(copy.ends + Int64(copy.groups - 1) * 4, False)
    count = cutlass.min(last, copy.row_count) * copy.row_units
    start = bits.load_index(copy.memory + (Int64(copy.index) + 1) * 4, False)
    stop = start + (count + (LINE // UNIT - 1)) // (LINE // UNIT)
    address = copy.memory + Int64(copy.header) + Int64(start) * LINE
    return address, count, stop, stop <= copy.lines


def _own_units():
    """A thread's first unit, and the distance to its next."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return cta * THREADS + thread, ctas * THREADS


@cute.kernel
def _save(copy: _Copy):
    target, count, stop, fits = _copy_range(copy)
    first, step = _own_units()
    once = Int32(first == 0)
    bits.store(copy.memory + (Int64(copy.index) + 2) * 4, [Uint32(stop)], once)
    bits.raise_to(copy.memory, Uint32(stop), once)
    end = Int32(bits.select(fits, Uint32(count), 0))
    for unit in cutlass.range(first, end, step * TOGETHER, unroll=1):
        units = [unit + u * step for u in range(TOGETHER)]
        inside = [Int32(other < end) for other in units]
        words = [
            bits.load(copy.rows + Int64(other) * UNIT, exists, 4)
            for other, exists in zip(units, inside, strict=True)
        ]
        for other, exists, four in zip(units, inside, words, strict=True):
            bits.store(target + Int64(other) * UNIT, four, exists)


@cute.kernel
def _restore(copy: _Copy):
    source, count, _, fits = _copy_range(copy)
    # Not in the buffer: all bits are set.
    lost = bits.select(fits, Uint32(0), 0xFFFFFFFF)
    first, step = _own_units()
    end = copy.row_count * copy.row_units
    for unit in cutlass.range(first, end, step * TOGETHER, unroll=1):
        units = [unit + u * step for u in range(TOGETHER)]
        words = [
            bits.load(source + Int64(other) * UNIT, Int32(Boolean(fits) & (other < count)), 4)
            for other in units
        ]
        for other, four in zip(units, words, strict=True):
            filled = [word | bits.select(other < count, lost, 0) for word in four]
            bits.store(copy.rows + Int64(other) * UNIT, filled, Int32(other < end))


@cute.jit
def save(
    memory: Int64,
    rows: Int64,
    ends: Int64,
    row_count: Int32,
    row_units: Int32,
    groups: Int32,
    index: Int32,
    header: Int32,
    lines: Int32,
    blocks: Int32,
    stream,
):
    """Launch: addresses of contiguous tensors and sizes, ``header`` in bytes."""
    copy = _Copy(memory, rows, ends, row_count, row_units, groups, index, header, lines)
    _save(copy).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def restore(
    memory: Int64,
    rows: Int64,
    ends: Int64,
    row_count: Int32,
    row_units: Int32,
    groups: Int32,
    index: Int32,
    header: Int32,
    lines: Int32,
    blocks: Int32,
    stream,
):
    """Launch, as `save`."""
    copy = _Copy(memory, rows, ends, row_count, row_units, groups, index, header, lines)
    _restore(copy).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)
