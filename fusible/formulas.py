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


# --- routing ----------------------------------------------------------------------------------


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
        groups = ranked.unflatten(-1, (num_groups, -1))
        worth = torch.sort(groups, dim=-1, descending=True).values[..., :group_top].sum(-1)
        best = _largest(worth, top_groups)
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, best, True)
        ranked = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
    return _largest(ranked, top_k)


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest in the last dimension; a stable order, unlike topk's."""
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices
    return order[..., :count].contiguous()


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
            probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
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
            total = p.sum(-1, keepdim=True) + 1e-20
            d = (d - (d * p).sum(-1, keepdim=True) / total) / total
        d = d * p * (1 - p)
    return torch.zeros_like(logits).scatter(-1, ids, d)


def load_balancing_loss(logits: Tensor, ids: Tensor, score_function: str) -> Tensor:
    """``E sum_e f_e P_e``: f_e the share of choices of expert e, P_e its mean share of the scores.

    One where the load is even. Source: Switch Transformers, arXiv 2101.03961, equation 4; sigmoid
    scores are normalised first, as in DeepSeek-V3, arXiv 2412.19437, equation 19.
    """
    experts = logits.shape[-1]
    scores = router_scores(logits, score_function)
    if score_function == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    chosen = ids.reshape(-1)
    counts = chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    share = counts.to(scores.dtype) / max(chosen.numel(), 1)
    return experts * (share * scores.reshape(-1, experts).mean(0)).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean of ``logsumexp(logits)^2``. Source: ST-MoE, arXiv 2202.08906, equation 5."""
    return logits.logsumexp(-1).square().mean()
