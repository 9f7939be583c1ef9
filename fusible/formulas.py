"""The math of every op, each formula once, as ordinary differentiable PyTorch.

A formula is the fallback, the oracle of the tests, the shape function and, through
``torch.func.vjp``, the definition of the backward. Functions named ``*_backward`` are hand-written
because they are hot; the tests compare each with the derivative of its formula in FP64.

Arithmetic is in FP32 (FP64 for FP64 inputs); results have the dtype of the first argument.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which formulas compute: FP64 for FP64, FP32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``, without its 1.5 us of host time where nothing is to be done."""
    return t if t.dtype == dtype else t.to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for x ``[..., in]``, weight ``[out, in]``, bias ``[out]``."""
    return F.linear(x, weight, bias)


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, ``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415, section 2.
    """
    return F.gelu(x, approximate="tanh")


def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``."""
    return F.relu(x)


def silu(x: Tensor) -> Tensor:
    """``x sigmoid(x)``. Source: Elfwing et al., arXiv 1702.03118."""
    return F.silu(x)


def split_glu(x: Tensor, interleave: int | None) -> tuple[Tensor, Tensor]:
    """The gate and the linear half of ``x`` ``[..., 2F]``, each ``[..., F]``.

    The first half is the gate; with ``interleave=b`` blocks of b gate and b linear features
    alternate instead.
    """
    if interleave is None:
        gate, linear = x.chunk(2, dim=-1)
        return gate, linear
    blocks = x.unflatten(-1, (-1, 2, interleave))
    return blocks.select(-2, 0).flatten(-2), blocks.select(-2, 1).flatten(-2)


def join_glu(gate: Tensor, linear: Tensor, interleave: int | None) -> Tensor:
    """The inverse of :func:`split_glu`."""
    if interleave is None:
        return torch.cat((gate, linear), dim=-1)
    blocks = (gate.unflatten(-1, (-1, interleave)), linear.unflatten(-1, (-1, interleave)))
    return torch.stack(blocks, dim=-2).flatten(-3)


def swiglu(x: Tensor, scales: Tensor | None = None, interleave: int | None = None) -> Tensor:
    """``silu(gate) * linear * scales`` for x ``[..., 2F]`` and one scale per row, ``[...]``.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """
    gate, linear = split_glu(cast(x, math_dtype(x.dtype)), interleave)
    y = F.silu(gate) * linear
    if scales is not None:
        y = y * cast(scales, y.dtype).unsqueeze(-1)
    return cast(y, x.dtype)


def swiglu_backward(
    dy: Tensor, x: Tensor, scales: Tensor | None = None, interleave: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`swiglu` with respect to ``x`` and ``scales``."""
    wide = math_dtype(x.dtype)
    gate, linear = split_glu(cast(x, wide), interleave)
    dy = cast(dy, wide)
    dlinear = dy * F.silu(gate)
    dact = dy * linear
    dscales = None
    if scales is not None:
        dscales = cast((dlinear * linear).sum(-1), scales.dtype)
        scale = cast(scales, wide).unsqueeze(-1)
        dlinear, dact = dlinear * scale, dact * scale
    dgate = torch.ops.aten.silu_backward(dact, gate)
    return join_glu(cast(dgate, x.dtype), cast(dlinear, x.dtype), interleave), dscales


def clamped_qgeglu(
    x: Tensor,
    scales: Tensor | None = None,
    interleave: int | None = None,
    limit: float = 7.0,
    alpha: float = 1.702,
    offset: float = 1.0,
) -> Tensor:
    """``g sigmoid(alpha g) (l + offset) * scales``, g = min(gate, limit), l = clamp(linear, limit).

    ``x`` is ``[..., 2F]``, ``scales`` has one value per row, ``[...]``. Source: the GPT-OSS
    model's feed-forward block (openai/gpt-oss, ``swiglu``).
    """
    gate, linear = split_glu(cast(x, math_dtype(x.dtype)), interleave)
    gate = gate.clamp(max=limit)
    linear = linear.clamp(-limit, limit) + offset
    y = gate * torch.sigmoid(alpha * gate) * linear
    if scales is not None:
        y = y * cast(scales, y.dtype).unsqueeze(-1)
    return cast(y, x.dtype)


def clamped_qgeglu_backward(
    dy: Tensor,
    x: Tensor,
    scales: Tensor | None = None,
    interleave: int | None = None,
    limit: float = 7.0,
    alpha: float = 1.702,
    offset: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`clamped_qgeglu` with respect to ``x`` and ``scales``."""
    wide = math_dtype(x.dtype)
    gate_in, linear_in = split_glu(cast(x, wide), interleave)
    dy = cast(dy, wide)
    gate = gate_in.clamp(max=limit)
    linear = linear_in.clamp(-limit, limit) + offset
    sigmoid = torch.sigmoid(alpha * gate)
    act = gate * sigmoid
    dlinear = dy * act
    dact = dy * linear
    dscales = None
    if scales is not None:
        dscales = cast((dlinear * linear).sum(-1), scales.dtype)
        scale = cast(scales, wide).unsqueeze(-1)
        dlinear, dact = dlinear * scale, dact * scale
    dgate = dact * (sigmoid + alpha * act * (1 - sigmoid)) * (gate_in <= limit)
    dlinear = dlinear * (linear_in.abs() <= limit)
    return join_glu(cast(dgate, x.dtype), cast(dlinear, x.dtype), interleave), dscales
