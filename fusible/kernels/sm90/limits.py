"""What the SM90 kernels take, as plain data: for rules, and for the choice at run time."""

import functools

from fusible import activations

ARCHITECTURE = 90
ALIGNMENT_BYTES = 16  # of addresses and of row pitches: what a TMA box may begin at
MULTIPLE_OF = 8  # features, in and out: 16 bytes of a 16-bit type
DTYPES = ("bfloat16", "float16")
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float64")
ACTIVATIONS = activations.SM90
# Layouts of gate and linear columns: halves, or alternating blocks of so many.
INTERLEAVES = (0, *(1 << i for i in range(11)))


def takes(sm: int, dtype: str, *features: int) -> bool:
    """Whether kernels for a machine of ``sm`` multiply matrices of ``dtype`` and these features."""
    sizes = all([size > 0 and size % MULTIPLE_OF == 0 for size in features])
    return sm == ARCHITECTURE and dtype in DTYPES and sizes


@functools.lru_cache(maxsize=1024)
def takes_glu(activation: str, interleave: int, features: int) -> bool:
    """Whether their epilogue has an activation of ``features`` gate and linear columns together."""
    known = activation in ACTIVATIONS and interleave in INTERLEAVES
    return known and features % (2 * max(interleave, MULTIPLE_OF)) == 0
