"""Ops that a user of the package would write, which the fuzzer puts between the others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fusible as fz


class Affine(fz.BasicOperation):
    """``sin(x) * gain * factor + shift``, by a formula."""

    factor = 1.0

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(size, dtype=dtype))
        self.shift = nn.Parameter(torch.empty(size, dtype=dtype))

    def formula(self, x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        return torch.sin(x) * (gain * self.factor) + shift


class HandWritten(fz.BasicOperation):
    """``sin(x) * gain * factor + shift``, forward and backward by hand."""

    factor = 1.0

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(size, dtype=dtype))
        self.shift = nn.Parameter(torch.empty(size, dtype=dtype))

    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer):
        gain = self.gain
        ctx.factor = self.factor
        ctx.save_for_backward(input_, gain)
        return torch.sin(input_) * (gain * self.factor) + self.shift

    def op_backward(self, ctx, grad_output):
        x, gain = ctx.saved_tensors
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        dgain = (rows * torch.sin(x).reshape(rows.shape)).sum(0) * ctx.factor
        return grad_output * (gain * ctx.factor) * torch.cos(x), (dgain, rows.sum(0))


class Inner(fz.BasicOperation):
    """``x + tanh(x @ w.T)``, by a formula that calls a module."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size, bias=False, dtype=dtype)

    def formula(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Noisy(fz.BasicOperation):
    """``x * gain * u`` for uniform u, by a formula that draws."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(size, dtype=dtype))

    def formula(self, x: Tensor, gain: Tensor) -> Tensor:
        return x * gain * torch.rand(x.shape).to(x.dtype)
