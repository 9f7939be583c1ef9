"""Limits of the SM90 kernels, as plain data: for rules, and for kernel selection in a call."""

import functools

from fusible.activations import ACTIVATIONS, GATED
from fusible.recipes.formats import BLOCKS, fp8_block, fp8_tensor

ARCHITECTURE = 90
ALIGNMENT_BYTES = 16  # of addresses and row pitches, which TMA requires
MULTIPLE_OF = 8  # of features, in and out: 16 bytes of a 16-bit type
DTYPES = ("bfloat16", "float16")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
FP8_MULTIPLE_OF = 16  # of their features: 16 bytes
FP8_GLU_UNIT = 64  # of the columns of a gated activation in halves, so that a tile's share a scale
# Of the operands of products, by role: each may be any of these.
FP8_SCALING = {
    role: (fp8_block(block=BLOCKS[role == "weight"]).scaling, fp8_tensor().scaling)
    for role in ("input", "weight", "grad")
}
ROW_SCALE_DTYPES = ("float32", "bfloat16", "float16", "float64")
# Layouts of gate and linear columns: halves (0), or alternating blocks of that many columns.
INTERLEAVES = (0, *(1 << i for i in range(11)))


def supports_products(sm: int, dtype: str, *features: int) -> bool:
    """Whether the kernels run on ``sm``, for matrices of ``dtype`` with these features.

    Those of FP8 have scales.
    """
    if sm != ARCHITECTURE or dtype not in (*DTYPES, *FP8_DTYPES):
        return False
    unit = FP8_MULTIPLE_OF if dtype in FP8_DTYPES else MULTIPLE_OF
    return all([size > 0 and size % unit == 0 for size in features])


def fits_256_columns(activation: str, bias: bool) -> bool:
    """Whether FP8 tiles of 256 columns leave registers for an epilogue."""
    return not bias and activation != "situglu"


def quantizes_activation(activation: str, bias: bool) -> bool:
    """Whether an epilogue quantizes an activation, in blocks of 128 columns.

    For these a tile needs 256 columns if it is gated.
    """
    return activation not in GATED or fits_256_columns(activation, bias)


@functools.lru_cache(maxsize=1024)
def supports_activation(
    activation: str, interleave: int, features: int, unit: int = MULTIPLE_OF
) -> bool:
    """Whether an epilogue has an activation for ``features`` columns, gate and linear together.

    ``unit`` divides the columns of each.
    """
    row = ACTIVATIONS.get(activation)
    if row is None or interleave not in (INTERLEAVES if row.sides == 2 else (0,)):
        return False
    return features % (row.sides * max(interleave, unit)) == 0
