"""What the SM100 kernels take, as plain data: rules read it, and the ops' checks are made of it."""

ARCHITECTURES = (100, 101, 103)  # Blackwell's data-centre GPUs: SM 10.x, but for Rubin's 107
GROUP_ROWS = 256  # groups are whole tiles of the kernels, whose stores are not clipped at their end
MULTIPLE_OF = 64  # features, in and out: pairs of the GLU's blocks, 16 bytes of FP4, tails of tiles
INTERLEAVE = 32  # gate and linear columns alternate in blocks of 32, in every format
MAX_GROUPS = 1024
DTYPE = "bfloat16"  # of what is not quantized
# With BF16 operands the clamped GeGLU has these constants baked in: limit and alpha.
BF16_GEGLU = (7.0, 1.702)
FORMATS = ("none", "mxfp8_e4m3", "nvfp4")
