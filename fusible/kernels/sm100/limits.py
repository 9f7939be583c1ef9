"""Limits of the SM100 kernels, as plain data: for rules, and for the ops' checks."""

from fusible.recipes.formats import mxfp8, nvfp4

# Blackwell's data-centre GPUs. 107 is Rubin; 101 was Thor until CUDA 13, which calls it 110.
ARCHITECTURES = (100, 103)
GROUP_ROWS = 256  # groups are whole tiles of the kernels, whose stores are not clipped at their end
MULTIPLE_OF = 64  # features, in and out: pairs of the GLU's blocks, 16 bytes of FP4, tails of tiles
INTERLEAVE = 32  # gate and linear columns alternate in blocks of 32, in every format
FP4_ALIGNMENT = 32  # bytes, of the address of FP4 elements; 16 of all others
MAX_GROUPS = 1024
DTYPE = "bfloat16"  # of what is not quantized
# Activations with BF16 operands; the clamped GeGLU then has these constants baked in: limit, alpha.
BF16_ACTIVATIONS = ("swiglu", "clamped_qgeglu")
BF16_CLAMP = (7.0, 1.702)
QUANTIZED = (mxfp8(), nvfp4())
REDUCTION_BLOCKS = ("none", *[fmt.reduction_blocks for fmt in QUANTIZED])
