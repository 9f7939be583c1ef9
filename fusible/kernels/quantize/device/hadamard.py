"""The Hadamard transform of columns in the registers of a thread: ``recipes.hadamard``."""

from cutlass import Float32

from fusible.kernels.device import bits
from fusible.recipes.formats import HADAMARD
from fusible.recipes.hadamard import NEGATIVE, SCALE


def transformed(rows, dtype, whole):
    """Words of the rows of a block, transformed along the columns, and their type: FP32 or BF16.

    Of a block of fewer rows, which is not ``whole``, they are what they were, in that type.
    """
    becomes = "f32" if dtype == "f32" else "bf16"
    if not whole:
        return [bits.pack(bits.unpack(row, dtype), becomes) for row in rows], becomes
    words = [_transformed(of_column, dtype, becomes) for of_column in zip(*rows, strict=True)]
    return [*zip(*words, strict=True)], becomes


def _transformed(words, dtype, becomes):
    """One word of every row."""
    columns = zip(*[bits.unpack([word], dtype) for word in words], strict=True)
    mixed = zip(*[_hadamard(column) for column in columns], strict=True)
    return [bits.pack(row, becomes)[0] for row in mixed]


def _hadamard(column):
    rows = [-value if i in NEGATIVE else value for i, value in enumerate(column)]
    step = 1
    while step < HADAMARD:
        for i in range(HADAMARD):
            if not i & step:
                a, b = rows[i], rows[i + step]
                rows[i], rows[i + step] = a + b, a - b
        step *= 2
    return [row * Float32(SCALE) for row in rows]
