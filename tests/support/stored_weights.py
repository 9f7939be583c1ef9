"""Weights as they are stored in every format that the kernels for few rows read."""

import torch

from fusible.recipes.formats import E2M1, NumberFormat, fp8_block, fp8_tensor, mxfp8, nvfp4
from fusible.recipes.stored import StoredWeights
from fusible.recipes.tensor import QuantizedTensor

FORMATS = [
    mxfp8(),
    nvfp4(),
    nvfp4((16, 16)),
    NumberFormat("mxfp4", E2M1, (1, 32), "e8m0_floor"),
    fp8_block(block=(128, 128)),
    fp8_block(power_of_two=False),
    fp8_tensor(),
]


def stored(w, fmt, separate=False, dtype=None):
    """Weights ``[E, N, K]``, one tensor or separate ones, and their values, by default as w."""
    quantized = [QuantizedTensor.quantize(t, fmt) for t in (w.unbind(0) if separate else [w])]
    values = [q.dequantize(dtype or w.dtype).view(-1, *w.shape[1:]) for q in quantized]
    return StoredWeights.of([q.matrix() for q in quantized]), torch.cat(values)
