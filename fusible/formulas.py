"""The math of every op, each formula once, as ordinary differentiable PyTorch.

A formula is what runs where no kernel does, what the tests compare with, what gives shapes on fake
tensors and, through `vjp`, the definition of the backward. Functions named ``*_backward`` are
hand-written because they are hot; the tests compare each with the derivative of its formula in
FP64.

Arithmetic is in FP32 (FP64 for FP64 inputs); results have the dtype of the first argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which formulas compute: FP64 for FP64, FP32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``, without its 1.5 us of host time where nothing is to be done."""
    return t if t.dtype == dtype else t.to(dtype)


def vjp(
    formula: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of ``tensors``, from that of ``formula(*tensors)``.

    By ``torch.autograd.grad``, since ``torch.func.vjp`` raises an error under hooks of saved
    tensors; by the latter in compiled code, which cannot trace the former.
    """
    if torch.compiler.is_compiling():
        output, derivative = torch.func.vjp(formula, *tensors)  # type: ignore[misc]
        return derivative(cast(grad, output.dtype))
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in tensors]
        output = formula(*leaves)
        grad = cast(grad, output.dtype)
        if not output.requires_grad:
            return tuple([torch.zeros_like(t) for t in tensors])
        return torch.autograd.grad(output, leaves, grad, materialize_grads=True)


# --- functions of one element ---------------------------------------------------------------------


class Unary(NamedTuple):
    """A function of each element, ``value(x)``; ``backward(dy, x)`` is ``dy`` times its slope."""

    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


GELU = Unary(
    partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh")
)
"""GELU in its tanh form, ``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``.

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415, section 2.
"""


def _qgelu(x: Tensor, alpha: float) -> Tensor:
    wide = cast(x, math_dtype(x.dtype))
    return cast(wide * torch.sigmoid(alpha * wide), x.dtype)


def _qgelu_backward(dy: Tensor, x: Tensor, alpha: float) -> Tensor:
    wide = cast(x, math_dtype(x.dtype))
    sigmoid = torch.sigmoid(alpha * wide)
    return cast(dy * sigmoid * (1 + alpha * wide * (1 - sigmoid)), x.dtype)


# A literal: a default argument is traced as an input by `torch.compile(dynamic=True)`.
QGELU = Unary(lambda x: _qgelu(x, 1.702), lambda dy, x: _qgelu_backward(dy, x, 1.702))
"""Quick GELU, ``x sigmoid(1.702 x)``. Source: arXiv 1606.08415, section 2."""

RELU = Unary(F.relu, lambda dy, x: torch.ops.aten.threshold_backward(dy, x, 0))
"""``max(x, 0)``."""

SRELU = Unary(lambda x: F.relu(x).square(), lambda dy, x: dy * F.relu(x) * 2)
"""``max(x, 0)^2``. Source: So et al., "Primer", arXiv 2109.08668."""

SILU = Unary(F.silu, torch.ops.aten.silu_backward)
"""``x sigmoid(x)``. Source: Elfwing et al., arXiv 1702.03118."""

SIGMOID = Unary(torch.sigmoid, lambda dy, x: torch.ops.aten.sigmoid_backward(dy, torch.sigmoid(x)))
"""``1 / (1 + exp(-x))``."""


def scaled(x: Tensor, scales: Tensor | None, function: Unary) -> Tensor:
    """``function(x)`` for x ``[..., F]``, times one scale per row, ``[...]``, if there are any."""
    if scales is None:
        return function.value(x)
    wide = math_dtype(x.dtype)
    return cast(function.value(cast(x, wide)) * cast(scales, wide).unsqueeze(-1), x.dtype)


def scaled_backward(
    dy: Tensor, x: Tensor, scales: Tensor | None, function: Unary
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`scaled` with respect to ``x`` and ``scales``."""
    if scales is None:
        return function.backward(dy, x), None
    wide = math_dtype(x.dtype)
    x_wide, dy = cast(x, wide), cast(dy, wide)
    dx = function.backward(dy * cast(scales, wide).unsqueeze(-1), x_wide)
    dscales = (dy * function.value(x_wide)).sum(-1)
    return cast(dx, x.dtype), cast(dscales, scales.dtype)


# --- gated linear units ---------------------------------------------------------------------------


def split_glu(x: Tensor, interleave: int | None) -> tuple[Tensor, Tensor]:
    """The gate and the linear half of ``x`` ``[..., 2F]``, each ``[..., F]``.

    The first half is the gate; with ``interleave=b`` blocks of b gate and b linear features
    alternate instead.
    """
    if interleave is None:
        gate, linear = x.chunk(2, dim=-1)
        return gate, linear
    blocks = torch.unflatten(x, -1, (-1, 2, interleave))
    return blocks.select(-2, 0).flatten(-2), blocks.select(-2, 1).flatten(-2)


def join_glu(gate: Tensor, linear: Tensor, interleave: int | None) -> Tensor:
    """The inverse of :func:`split_glu`."""
    if interleave is None:
        return torch.cat((gate, linear), dim=-1)
    blocks = [torch.unflatten(half, -1, (-1, interleave)) for half in (gate, linear)]
    return torch.stack(blocks, dim=-2).flatten(-3)


def gated(
    x: Tensor,
    scales: Tensor | None,
    interleave: int | None,
    gate: Unary,
    linear: Unary | None = None,
) -> Tensor:
    """``gate(first) * linear(second) * scales`` for the halves of x ``[..., 2F]``, the gate first.

    ``scales`` has one value per row, ``[...]``; without ``linear`` that half is taken as it is.
    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """
    g, up = split_glu(cast(x, math_dtype(x.dtype)), interleave)
    y = gate.value(g) * (up if linear is None else linear.value(up))
    if scales is not None:
        y = y * cast(scales, y.dtype).unsqueeze(-1)
    return cast(y, x.dtype)


def gated_backward(
    dy: Tensor,
    x: Tensor,
    scales: Tensor | None,
    interleave: int | None,
    gate: Unary,
    linear: Unary | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`gated` with respect to ``x`` and ``scales``."""
    wide = math_dtype(x.dtype)
    g, up = split_glu(cast(x, wide), interleave)
    factor = up if linear is None else linear.value(up)
    dy = cast(dy, wide)
    dfactor, dact = dy * gate.value(g), dy * factor
    dscales = None
    if scales is not None:
        dscales = cast((dfactor * factor).sum(-1), scales.dtype)
        scale = cast(scales, wide).unsqueeze(-1)
        dfactor, dact = dfactor * scale, dact * scale
    dg = gate.backward(dact, g)
    dup = dfactor if linear is None else linear.backward(dfactor, up)
    return join_glu(cast(dg, x.dtype), cast(dup, x.dtype), interleave), dscales


def clamped_halves(
    limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0
) -> tuple[Unary, Unary]:
    """The gate and linear functions of ``g sigmoid(alpha g) (l + offset)``, for :func:`gated`.

    ``g = min(gate, limit)`` and ``l = clamp(linear, -limit, limit)``; a clamped element passes no
    gradient. Source: the GPT-OSS model's feed-forward block (openai/gpt-oss, ``swiglu``).
    """

    def clamped(x: Tensor) -> Tensor:
        # The gradient at the limit itself: that of clamp is 1 before torch 2.14, then 0.
        return torch.where(x.abs() <= limit, x, x.clamp(-limit, limit))

    gate = Unary(
        lambda g: _qgelu(torch.where(g > limit, limit, g), alpha),
        lambda dy, g: _qgelu_backward(dy, g.clamp(max=limit), alpha) * (g <= limit),
    )
    linear = Unary(lambda up: clamped(up) + offset, lambda dy, up: dy * (up.abs() <= limit))
    return gate, linear


def soft_capped_halves(beta1: float = 4.0, beta2: float = 25.0) -> tuple[Unary, Unary]:
    """The functions of ``b1 tanh(gate / b1) sigmoid(gate) * b2 tanh(linear / b2)``.

    Source: the Kimi K3 technical report (MoonshotAI/Kimi-K3).
    """

    def gate_backward(dy: Tensor, g: Tensor) -> Tensor:
        tanh, s = torch.tanh(g / beta1), torch.sigmoid(g)
        return dy * s * (1 - tanh.square() + beta1 * tanh * (1 - s))

    gate = Unary(lambda g: beta1 * torch.tanh(g / beta1) * torch.sigmoid(g), gate_backward)
    linear = Unary(
        lambda up: beta2 * torch.tanh(up / beta2),
        lambda dy, up: dy * (1 - torch.tanh(up / beta2).square()),
    )
    return gate, linear


# --- normalization --------------------------------------------------------------------------------


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension of x ``[rows, F]``.

    With ``zero_centered`` it is times ``1 + weight``. Also gives the mean and the reciprocal of the
    deviation, ``[rows, 1]``, in the dtype of the arithmetic. Source: Ba et al., arXiv 1607.06450.
    """
    wide = cast(x, math_dtype(x.dtype))
    affine = gain(weight, wide.dtype, zero_centered), cast(bias, wide.dtype)
    y, mean, rstd = torch.native_layer_norm(wide, wide.shape[-1:], *affine, eps)
    return cast(y, x.dtype), mean, rstd


def layer_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`layer_norm` with respect to ``x``, ``weight`` and ``bias``.

    In the dtype of the arithmetic.
    """
    dy = cast(dy, rstd.dtype)
    normal = (cast(x, rstd.dtype) - mean) * rstd
    dnormal = dy * gain(weight, rstd.dtype, zero_centered)
    inner = (dnormal * normal).mean(-1, keepdim=True)
    dx = (dnormal - dnormal.mean(-1, keepdim=True) - normal * inner) * rstd
    return dx, (dy * normal).sum(0), dy.sum(0)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension of x ``[rows, F]``.

    With ``zero_centered`` it is times ``1 + weight``. Also gives the reciprocal of the root,
    ``[rows, 1]``, in the dtype of the arithmetic. Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    wide = cast(x, math_dtype(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return cast(wide * rstd * gain(weight, wide.dtype, zero_centered), x.dtype), rstd


def rms_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`rms_norm` with respect to ``x`` and ``weight``.

    In the dtype of the arithmetic.
    """
    dy = cast(dy, rstd.dtype)
    normal = cast(x, rstd.dtype) * rstd
    dnormal = dy * gain(weight, rstd.dtype, zero_centered)
    dx = (dnormal - normal * (dnormal * normal).mean(-1, keepdim=True)) * rstd
    return dx, (dy * normal).sum(0)


def l2_normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension, and the reciprocal of the root."""
    wide = cast(x, math_dtype(x.dtype))
    rnorm = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return cast(wide * rnorm, x.dtype), rnorm


def l2_normalize_backward(dy: Tensor, x: Tensor, rnorm: Tensor) -> Tensor:
    """Gradient of :func:`l2_normalize` with respect to ``x``."""
    dy = cast(dy, rnorm.dtype)
    normal = cast(x, rnorm.dtype) * rnorm
    return cast((dy - normal * (dy * normal).sum(-1, keepdim=True)) * rnorm, x.dtype)


def gain(weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    """The factor of a norm: the weight, or ``1 + weight``, in ``dtype``."""
    return 1 + cast(weight, dtype) if zero_centered else cast(weight, dtype)


# --- routing --------------------------------------------------------------------------------------


def router_scores(logits: Tensor, score_function: str) -> Tensor:
    """Softmax or sigmoid of logits ``[..., E]``."""
    return logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()


def choose_experts(
    logits: Tensor,
    expert_bias: Tensor | None,
    top_k: int,
    score_function: str,
    num_groups: int,
    top_groups: int,
    group_top: int,
) -> Tensor:
    """Ids of the ``top_k`` largest of logits ``[..., E]``, best first; of equals the first.

    With groups, only in the ``top_groups`` of the ``num_groups`` groups of neighbours whose
    ``group_top`` best scores have the largest sum. With a bias ``[E]``, the largest of score +
    bias. Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    ranked = logits  # as the scores are, and where these would round to the same
    if expert_bias is not None or num_groups > 1:
        ranked = router_scores(logits, score_function)
        if expert_bias is not None:
            ranked = ranked + expert_bias.to(ranked.dtype)
    if num_groups > 1:
        groups = torch.unflatten(ranked, -1, (num_groups, -1))
        worth = torch.sort(groups, dim=-1, descending=True).values[..., :group_top].sum(-1)
        best = _largest(worth, top_groups)
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, best, True)
        ranked = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
    return _largest(ranked, top_k)


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest in the last dimension; a stable order, unlike topk's."""
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices
    return order[..., :count].contiguous()


def _total(scores: Tensor) -> Tensor:
    """Sums over the last dimension that can be divided by, as in DeepSeek-V3's own code."""
    return scores.sum(-1, keepdim=True) + 1e-20


def router_probs(
    logits: Tensor, ids: Tensor, score_function: str, normalize: bool, scaling_factor: float
) -> Tensor:
    """Scores of the experts chosen, ``[..., k]``; with ``normalize`` they sum to one.

    A softmax of all that is then normalised is the softmax of those chosen.
    """
    if score_function == "softmax" and not normalize:
        probs = logits.softmax(-1).gather(-1, ids)
    else:
        probs = router_scores(logits.gather(-1, ids), score_function)
        if score_function == "sigmoid" and normalize:
            probs = probs / _total(probs)
    return probs * scaling_factor


def router_probs_backward(
    dprobs: Tensor,
    logits: Tensor,
    ids: Tensor,
    score_function: str,
    normalize: bool,
    scaling_factor: float,
) -> Tensor:
    """Gradient of :func:`router_probs` with respect to the logits; the ids are constants."""
    d = cast(dprobs, logits.dtype) * scaling_factor
    if score_function == "softmax" and not normalize:
        return torch._softmax_backward_data(
            torch.zeros_like(logits).scatter(-1, ids, d), logits.softmax(-1), -1, logits.dtype
        )
    p = router_scores(logits.gather(-1, ids), score_function)
    if score_function == "softmax":
        d = p * (d - (d * p).sum(-1, keepdim=True))
    else:
        if normalize:
            total = _total(p)
            d = (d - (d * p).sum(-1, keepdim=True) / total) / total
        d = d * p * (1 - p)
    return torch.zeros_like(logits).scatter(-1, ids, d)


def load_balancing_loss(logits: Tensor, ids: Tensor, score_function: str) -> Tensor:
    """``E sum_e f_e P_e``: f_e the share of choices of expert e, P_e its mean share of the scores.

    One where the load is even, zero of no tokens; transformers' is ``top_k`` times as much. Source:
    Switch Transformers, arXiv 2101.03961, equation 4; sigmoid scores are normalised first, as in
    DeepSeek-V3, arXiv 2412.19437, equation 19.
    """
    experts = logits.shape[-1]
    scores = router_scores(logits, score_function)
    if score_function == "sigmoid":
        scores = scores / _total(scores)
    chosen = ids.reshape(-1)
    counts = chosen.new_zeros(experts).scatter_add(0, chosen, torch.ones_like(chosen))
    share = counts.to(scores.dtype) / max(chosen.numel(), 1)
    scores = scores.reshape(-1, experts)
    return experts * (share * scores.sum(0)).sum() / max(scores.shape[0], 1)


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean of ``logsumexp(logits)^2``, zero of no tokens.

    Source: ST-MoE, arXiv 2202.08906, equation 5.
    """
    squares = logits.logsumexp(-1).square()
    return squares.sum() / max(squares.numel(), 1)
