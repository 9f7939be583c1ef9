"""The dense backwards and scaled products in plain PyTorch: what the kernels must equal.

Arithmetic and sums are in FP32 (FP64 for FP64); only results are rounded.
"""

from __future__ import annotations

from torch import Tensor

from fusible import formulas
from fusible.activations import UNARY
from fusible.formulas import cast, math_dtype
from fusible.kernels.grouped.definitions import dequantized
from fusible.recipes.formats import value_dtype


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


def scaled_mm(x: Tensor, w: Tensor, ends: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    """``x @ w.T`` in BF16, for FP8 ``x`` ``[M, K]`` and ``w`` ``[N, K]`` with FP32 scales.

    ``x_scale`` ``[M, ceil(K / 128)]`` has one for each row and 128 of K, ``w_scale`` ``[ceil(N /
    128), ceil(K / 128)]`` one for each 128 x 128. ``ends``, int32 ``[1]``, holds M, for kernels of
    groups.
    """
    return (dequantized(x, x_scale) @ dequantized(w, w_scale).t()).to(value_dtype(x.dtype))
