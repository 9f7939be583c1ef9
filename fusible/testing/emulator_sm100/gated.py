"""Gated activations over 32-interleaved columns, and their derivatives in closed form, in FP32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """(gate, linear) of columns in turns of 32: gate block, linear block."""
    blocks = x.reshape(x.shape[0], -1, 2, 32)
    return blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)


def interleaved(gate: Tensor, linear: Tensor) -> Tensor:
    """What `halves` took apart."""
    rows = gate.shape[0]
    pairs = torch.stack((gate.reshape(rows, -1, 32), linear.reshape(rows, -1, 32)), dim=2)
    return pairs.flatten(1)


def gated(gate: Tensor, up: Tensor, call: Any) -> Tensor:
    """The activation that ``call.act_func`` names, with its parameters."""
    if call.act_func.endswith("situglu"):
        beta1, beta2 = call.situ_beta1, call.situ_beta2
        return beta1 * (gate / beta1).tanh() * gate.sigmoid() * beta2 * (up / beta2).tanh()
    if call.act_func.endswith("geglu"):
        gate = gate.clamp(max=call.glu_clamp_max)
        up = up.clamp(call.glu_clamp_min, call.glu_clamp_max) + _offset(call)
        return up * gate * (call.geglu_alpha * gate).sigmoid()
    return up * gate * gate.sigmoid()


def gated_grad(grad: Tensor, gate: Tensor, up: Tensor, call: Any) -> tuple[Tensor, Tensor]:
    """Gradients of gate and linear part."""
    if call.act_func == "dsituglu":
        beta1, beta2 = call.situ_beta1, call.situ_beta2
        tanh_gate, tanh_up, sigmoid = (gate / beta1).tanh(), (up / beta2).tanh(), gate.sigmoid()
        slope = (1 - tanh_gate**2) * sigmoid + beta1 * tanh_gate * sigmoid * (1 - sigmoid)
        grad_up = grad * beta1 * tanh_gate * sigmoid * (1 - tanh_up**2)
        return grad * beta2 * tanh_up * slope, grad_up
    if call.act_func == "dgeglu":
        low, high, alpha = call.glu_clamp_min, call.glu_clamp_max, call.geglu_alpha
        g, u = gate.clamp(max=high), up.clamp(low, high) + _offset(call)
        sigmoid = (alpha * g).sigmoid()
        grad_gate = grad * u * sigmoid * (1 + alpha * g * (1 - sigmoid))
        inside = (up >= low) & (up <= high)
        return grad_gate * (gate <= high), grad * g * sigmoid * inside
    sigmoid = gate.sigmoid()
    return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


def _offset(call: Any) -> float:
    return 1.0 if call.linear_offset is None else call.linear_offset
