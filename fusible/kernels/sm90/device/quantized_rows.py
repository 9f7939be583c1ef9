"""Rows of an output that are quantized in registers, and stored from there.

Four threads have a row: of each 8 columns, each has two, as BF16 numbers in a word. They exchange
elements, so that each stores 16 neighbouring ones.
"""

from cutlass import Boolean, Int32, Int64, Uint32, cute

from fusible.kernels.device import bits
from fusible.kernels.quantize.device import numbers
from fusible.kernels.quantize.device.magnitudes import largest_of, largest_of_lanes, magnitude
from fusible.kernels.sm90.device.parts import Problem, TileCoord
from fusible.recipes.formats import FP8_BLOCK, NumberFormat

_VECTOR = 16  # elements of one store


def store_quantized(
    words,
    fmt: NumberFormat,
    addresses,
    columns: Int32,
    column: Int32,
    problem: Problem,
    coord: TileCoord,
    row: Int32,
):
    """Quantize a thread's part of `FP8_BLOCK` columns of a row, and store it.

    The columns share a scale; they begin at ``column`` and are as many as the output has from the
    tile's on. ``row`` is counted from the group's first. ``addresses`` are those of the elements
    ``[total_rows, columns]`` and of the scales ``[blocks of columns, total_rows]``; ``columns`` is
    a multiple of 16.
    """
    elements, scales = addresses
    part, left = cute.arch.lane_idx() % 4, problem.columns - coord.column
    inside, at = Boolean(row < coord.rows) & (left > 0), Int64(coord.start + row)
    # Columns past the last may hold anything, and count as zeros.
    words = [bits.select(left > i // 2 * _VECTOR, word, 0) for i, word in enumerate(words)]
    largest = largest_of_lanes(largest_of(words, "bf16"), 4, "bf16")
    scale, factor = numbers.encode_scale(magnitude(largest, "bf16"), None, fmt)
    offset = Int64(column // FP8_BLOCK) * Int64(problem.total_rows) + at
    bits.store(scales + offset * 4, [scale], Int32(inside & (part == 0)))
    packed = numbers.pack_elements([value * factor for value in bits.unpack(words, "bf16")], fmt)
    for first in range(0, len(packed), 4):
        own = (first + part) * _VECTOR
        vector = _neighbours(_of_four_threads(packed[first : first + 4]))
        offset = at * Int64(columns) + Int64(column + own)
        bits.store(elements + offset, vector, Int32(inside & (own < left)))


def _of_four_threads(words):
    """Transpose: the i-th of four threads gets the i-th word of each."""
    words, lane = list(words), cute.arch.lane_idx()
    for step in (2, 1):
        upper = lane & step
        for i in range(4):
            if not i & step:
                low, high = words[i], words[i + step]
                got = cute.arch.shuffle_sync_bfly(bits.select(upper, low, high), step)
                words[i] = bits.select(upper, got, low)
                words[i + step] = bits.select(upper, high, got)
    return words


def _neighbours(words):
    """16 elements in order.

    Each word, of one thread, has two of the first 8 in its lower half, two of the others above.
    """
    pairs = words[:2], words[2:]
    first = [low & 0xFFFF | high << 16 for low, high in pairs]
    second = [low >> 16 | high & 0xFFFF0000 for low, high in pairs]
    return [Uint32(word) for word in (*first, *second)]
