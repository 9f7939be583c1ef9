"""What the SM90 kernels support, as plain data: for rules, and for kernel selection in a call."""

import functools

from fusible import activations

ARCHITECTURE = 90
ALIGNMENT_BYTES = 16  # of addresses and row pitches, which TMA requires
MULTIPLE_OF = 8  # of features, in and out: 16 bytes of a 16-bit type
DTYPES = ("bfloat16", "float16")
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float64")
ACTIVATIONS = activations.SM90
# Layouts of gate and linear columns: halves (0), or alternating blocks of that many columns.
INTERLEAVES = (0, *(1 << i for i in range(11)))


def takes(sm: int, dtype: str, *features: int) -> bool:
    """Whether the kernels run on ``sm``, for matrices of ``dtype`` with these features."""
    sizes = all([size > 0 and size % MULTIPLE_OF == 0 for size in features])
    return sm == ARCHITECTURE and dtype in DTYPES and sizes


@functools.lru_cache(maxsize=1024)
def takes_glu(activation: str, interleave: int, features: int) -> bool:
    """Whether an epilogue has an activation for ``features`` columns, gate and linear together."""
    known = activation in ACTIVATIONS and interleave in INTERLEAVES
    return known and features % (2 * max(interleave, MULTIPLE_OF)) == 0
