# Device code is traced by the CuTe DSL: its values have no static types, its loops are unrolled.
"""Copies of the rows of groups to a buffer and back: ``kernels.saved_rows`` (CuTe DSL)."""

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from fusible.kernels.device import bits

THREADS = 256
TOGETHER = 4  # units of 16 bytes that a thread has in flight
_LINE, _UNIT = 128, 16


def _place(memory, ends, rows, row_units, groups, copy, header, lines):
    """The address of a copy, its units, the line that follows it, and whether there is room."""
    last = bits.load_index(ends + Int64(groups - 1) * 4, False)
    count = cutlass.min(last, rows) * row_units
    start = bits.load_index(memory + (Int64(copy) + 1) * 4, False)
    stop = start + (count + (_LINE // _UNIT - 1)) // (_LINE // _UNIT)
    address = memory + Int64(header) + Int64(start) * _LINE
    return address, count, stop, stop <= lines


def _own_units():
    """A thread's first unit, and the distance to its next."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return cta * THREADS + thread, ctas * THREADS


@cute.kernel
def _save(
    memory: Int64,
    source: Int64,
    ends: Int64,
    rows: Int32,
    row_units: Int32,
    groups: Int32,
    copy: Int32,
    header: Int32,
    lines: Int32,
):
    given = memory, ends, rows, row_units, groups, copy, header, lines
    target, count, stop, fits = _place(*given)
    first, step = _own_units()
    once = Int32(first == 0)
    bits.store(memory + (Int64(copy) + 2) * 4, [Uint32(stop)], once)
    bits.raise_to(memory, Uint32(stop), once)
    end = Int32(bits.select(fits, Uint32(count), 0))
    for unit in cutlass.range(first, end, step * TOGETHER, unroll=1):
        units = [unit + u * step for u in range(TOGETHER)]
        inside = [Int32(other < end) for other in units]
        words = [
            bits.load(source + Int64(other) * _UNIT, exists, 4)
            for other, exists in zip(units, inside, strict=True)
        ]
        for other, exists, four in zip(units, inside, words, strict=True):
            bits.store(target + Int64(other) * _UNIT, four, exists)


@cute.kernel
def _restore(
    memory: Int64,
    target: Int64,
    ends: Int64,
    rows: Int32,
    row_units: Int32,
    groups: Int32,
    copy: Int32,
    header: Int32,
    lines: Int32,
):
    given = memory, ends, rows, row_units, groups, copy, header, lines
    source, count, _, fits = _place(*given)
    # Not in the buffer: all bits are set.
    lost = bits.select(fits, Uint32(0), 0xFFFFFFFF)
    first, step = _own_units()
    end = rows * row_units
    for unit in cutlass.range(first, end, step * TOGETHER, unroll=1):
        units = [unit + u * step for u in range(TOGETHER)]
        words = [
            bits.load(source + Int64(other) * _UNIT, Int32(Boolean(fits) & (other < count)), 4)
            for other in units
        ]
        for other, four in zip(units, words, strict=True):
            filled = [word | bits.select(other < count, lost, 0) for word in four]
            bits.store(target + Int64(other) * _UNIT, filled, Int32(other < end))


@cute.jit
def save(
    memory: Int64,
    source: Int64,
    ends: Int64,
    rows: Int32,
    row_units: Int32,
    groups: Int32,
    copy: Int32,
    header: Int32,
    lines: Int32,
    blocks: Int32,
    stream,
):
    """Launch: addresses of contiguous tensors and sizes, ``header`` in bytes."""
    _save(memory, source, ends, rows, row_units, groups, copy, header, lines).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@cute.jit
def restore(
    memory: Int64,
    target: Int64,
    ends: Int64,
    rows: Int32,
    row_units: Int32,
    groups: Int32,
    copy: Int32,
    header: Int32,
    lines: Int32,
    blocks: Int32,
    stream,
):
    """Launch, as `save`."""
    _restore(memory, target, ends, rows, row_units, groups, copy, header, lines).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
