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


def magnitude(word, dtype):
    """FP32 bits of the largest magnitude in a word."""
    values = bits.magnitudes([word], dtype)
    return values[0] if len(values) == 1 else cutlass.max(*values)
