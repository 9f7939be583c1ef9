"""Random bytes of stochastic rounding on the device: ``recipes.philox``, bit for bit."""

from cutlass import Int32, Uint32

from fusible.kernels.device import bits
from fusible.recipes.philox import MULTIPLIERS, NEIGHBOURS, ROUNDS, WEYL


def load_key(address):
    """The words of a key: of the seed, then of the offset, lower halves first."""
    return [*bits.load(address, Int32(1), 2), *bits.load(address + 8, Int32(1), 2)]


def random_words(key, row, column):
    """Four words of random bytes for ``NEIGHBOURS`` columns from ``column`` on, of one row.

    Two for the row-wise use and two for the column-wise one.
    """
    k0, k1, *offset = key
    a, b, c, d = Uint32(column // NEIGHBOURS), Uint32(row), *offset
    for _ in range(ROUNDS):
        (low, high), (low_c, high_c) = (
            bits.multiply_wide(word, Uint32(by))
            for word, by in zip((a, c), MULTIPLIERS, strict=True)
        )
        a, b, c, d = high_c ^ b ^ k0, low_c, high ^ d ^ k1, low
        k0, k1 = k0 + Uint32(WEYL[0]), k1 + Uint32(WEYL[1])
    return [a, b, c, d]
