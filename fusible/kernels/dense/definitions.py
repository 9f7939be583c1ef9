"""The dense backwards in plain PyTorch: what the kernels must equal.

Arithmetic and sums are in FP32 (FP64 for FP64); only results are rounded.
"""

from __future__ import annotations

from torch import Tensor

from fusible import formulas
from fusible.activations import UNARY
from fusible.formulas import cast, math_dtype


def activation_bias_backward(dy: Tensor, x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """``dx = dy * slope(x)`` for ``[rows, F]``, and its sum over rows, ``[F]`` in FP32."""
    wide = math_dtype(x.dtype)
    dx, _ = UNARY[activation].backward(cast(dy, wide), cast(x, wide))
    return cast(dx, x.dtype), dx.sum(0)


def rms_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, gain: Tensor, addend: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``formulas.rms_norm_backward`` with ``addend`` ``[rows, F]`` added to the gradient of x.

    ``gain`` ``[F]`` is what the norm multiplies by, in FP32, as its gradient.
    """
    dx, dgain = formulas.rms_norm_backward(dy, x, rstd, gain)
    if addend is not None:
        dx = dx + addend
    return cast(dx, x.dtype), dgain
