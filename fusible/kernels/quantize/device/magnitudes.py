"""Largest magnitudes of packed numbers, in the registers of a thread and of its neighbours."""

import cutlass
from cutlass import cute

from fusible.kernels.device import bits


def largest_of(words, dtype):
    """One word of the largest magnitudes of several."""
    largest = words[0]
    for word in words[1:]:
        largest = bits.larger_magnitude(largest, word, dtype)
    return largest


def largest_of_columns(rows, dtype):
    """Words of the largest magnitude of every column."""
    return [largest_of(column, dtype) for column in zip(*rows, strict=True)]


def largest_of_lanes(word, lanes, dtype):
    """The largest magnitudes of the words of neighbouring threads."""
    step = 1
    while step < lanes:
        word = bits.larger_magnitude(word, cute.arch.shuffle_sync_bfly(word, step), dtype)
        step *= 2
    return word


def largest_of_rows(words, lanes, dtype):
    """The largest magnitudes of one word of ``lanes`` neighbouring threads, another in each thread.

    Thread i has those of word i, counted anew after the last.
    """
    return over_rows(words, lanes, lambda a, b: bits.larger_magnitude(a, b, dtype))


def over_rows(words, lanes, combine):
    """Word i of ``lanes`` neighbouring threads, combined, in thread i; at most one per thread.

    In every step a thread keeps half of its words, and gets what its partner has of them.
    """
    lane, count, step = cute.arch.lane_idx(), len(words), len(words) // 2
    while step:
        upper = lane & step
        pairs = list(zip(words[:step], words[step:], strict=True))
        got = [
            cute.arch.shuffle_sync_bfly(bits.select(upper, low, high), step) for low, high in pairs
        ]
        kept = [bits.select(upper, high, low) for low, high in pairs]
        words = [combine(*pair) for pair in zip(kept, got, strict=True)]
        step //= 2
    (word,) = words
    while count < lanes:
        word = combine(word, cute.arch.shuffle_sync_bfly(word, count))
        count *= 2
    return word


def magnitude(word, dtype):
    """FP32 bits of the largest magnitude in a word."""
    values = bits.magnitudes([word], dtype)
    return values[0] if len(values) == 1 else cutlass.max(*values)
