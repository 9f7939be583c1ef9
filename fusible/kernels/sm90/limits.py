"""What the SM90 kernels take, as plain data: rules read it, and the ops' checks are made of it."""

from fusible import activations

ARCHITECTURE = 90
ALIGNMENT_BYTES = 16  # of addresses and of row pitches: what a TMA box may begin at
MULTIPLE_OF = 8  # features, in and out: 16 bytes of a 16-bit type
DTYPES = ("bfloat16", "float16")
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float64")
ACTIVATIONS = activations.SM90
