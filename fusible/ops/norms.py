"""Normalization over the last dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from fusible import formulas
from fusible.arguments import check_bools, check_numbers
from fusible.fuser.context import OperationContext
from fusible.kernels import normalization as kernels
from fusible.ops.casting import CastingOp, apply_quantizer, cast_grad
from fusible.ops.inputs import check_device, check_sizes, nested_input, wrong_shape
from fusible.ops.op import OpGrads


class _Norm(CastingOp):
    """A norm with a weight of ``normalized_shape``, the last dimensions of the input.

    Arithmetic is in FP32, on the input cast to the weight's dtype, that of ``torch.autocast``
    inside it, which the output has too.
    """

    fact_names = ("normalized_shape", "features", "eps", "zero_centered_gamma")
    kernel: ClassVar[Callable[..., tuple[Tensor, ...]]]
    """Gives the output, and statistics that ``backward_kernel`` reads."""
    backward_kernel: ClassVar[Callable[..., tuple[Tensor, ...]]]
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        check_bools(type(self).__name__, zero_centered_gamma=zero_centered_gamma)
        super().__init__()
        if isinstance(normalized_shape, Iterable) and not isinstance(normalized_shape, str):
            self.normalized_shape = tuple(normalized_shape)
        else:
            self.normalized_shape = (normalized_shape,)
        for size in self.normalized_shape:
            check_sizes(type(self).__name__, dtype, normalized_shape=size)
        _check_eps(eps, type(self).__name__)
        self.features = math.prod(self.normalized_shape)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sm_margin = sm_margin
        for name, present in (("weight", True), ("bias", "bias" in (self.parameter_names or ()))):
            empty = torch.empty(self.normalized_shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty) if present else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """No change: a weight of ones (zeros with ``zero_centered_gamma``), a bias of zeros."""
        nn.init.constant_(self.weight, 0 if self.zero_centered_gamma else 1)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def rows(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """The input as ``[rows, features]``, refused unless it ends in ``normalized_shape``."""
        op_name, shape = type(self).__name__, self.normalized_shape
        if input_.shape[input_.dim() - len(shape) :] != shape or input_.dim() < len(shape):
            raise ValueError(
                f"input of {op_name} must end in the dimensions {shape}, got shape "
                f"{tuple(input_.shape)}"
            )
        if input_.is_nested:
            raise nested_input(op_name)
        for name, parameter in zip(self.parameter_names or (), ctx.parameters, strict=True):
            if parameter.shape != shape:
                raise wrong_shape(name, parameter, shape, op_name)
        check_device(input_, ctx.parameters[0], op_name)
        return self.cast_input(ctx, input_).reshape(-1, self.features)

    def forward_impl(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """The normalized input."""
        x, parameters = self.rows(ctx, input_), ctx.parameters
        flat = [p.view(-1) for p in parameters]
        y, *statistics = type(self).kernel(x, *flat, self.eps, self.zero_centered_gamma)
        ctx.save_for_backward(x, *statistics, parameters[0])
        return apply_quantizer(y.view(input_.shape), ctx.next_quantizer)

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        """Gradients of the input and of the parameters."""
        x, *statistics, weight = ctx.saved_tensors
        dy = cast_grad(ctx, grad_output).reshape(x.shape)
        dx, *dparams = type(self).backward_kernel(
            dy, x, *statistics, weight.view(-1), self.zero_centered_gamma
        )
        dx = apply_quantizer(dx.view(grad_output.shape), ctx.grad_quantizer)
        return dx, *[dparam.view(weight.shape) for dparam in dparams]


def _check_eps(eps: float, op_name: str) -> None:
    check_numbers(op_name, eps=eps)
    if not eps >= 0:
        raise ValueError(f"eps of {op_name} must not be negative, got {eps}")


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimensions.

    Saves ``(x, mean, rstd, weight)`` with x as ``[rows, features]`` and both statistics in FP32,
    ``[rows, 1]``; its dtype as ``ctx.dtype``.

    Args:
        normalized_shape: the last dimensions of the input, over which it normalizes.
        eps: added to the variance.
        device, dtype: of the parameters; PyTorch's defaults if None.
        zero_centered_gamma: multiply by ``1 + weight``; the weight starts at zero.
        sm_margin: has no effect: these kernels leave no SMs to others.

    Raises:
        TypeError: a size is no integer.
        ValueError: a size is under 1, ``eps`` negative, or the dtype none that ops compute in; in a
            call, the input does not end in ``normalized_shape`` or is elsewhere.
    """

    parameter_names = ("weight", "bias")
    saves = "x, mean, reciprocal deviation, weight"
    kernel, backward_kernel = kernels.layer_norm, kernels.layer_norm_backward
    bias: nn.Parameter


class RMSNorm(_Norm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimensions.

    Saves ``(x, rstd, weight)`` with x as ``[rows, features]`` and the reciprocal of the root in
    FP32, ``[rows, 1]``; the dtype of x as ``ctx.dtype``. Arguments and errors as in
    :class:`LayerNorm`.
    """

    parameter_names = ("weight",)
    saves = "x, reciprocal root mean square, weight"
    kernel, backward_kernel = kernels.rms_norm, kernels.rms_norm_backward


class L2Normalization(CastingOp):
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension, as for queries and keys.

    Saves ``(x, rnorm)``, the latter the reciprocal of the root in FP32, ``[..., 1]``; the dtype of
    x as ``ctx.dtype``.

    Args:
        eps: added to the sum of squares.
        seq_length, micro_batch_size: have no effect: nothing is compiled ahead.

    Raises:
        ValueError: ``eps`` is negative; in a call, x has a dtype that ops do not compute in.
    """

    fact_names = ("eps",)
    saves = "x, reciprocal norm"

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        _check_eps(eps, "L2Normalization")
        self.eps = eps
        self.seq_length, self.micro_batch_size = seq_length, micro_batch_size

    def forward_impl(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """See :func:`fusible.formulas.l2_normalize`."""
        x = self.cast_input(ctx, input_)
        y, rnorm = formulas.l2_normalize(x, self.eps)
        ctx.save_for_backward(x, rnorm)
        return apply_quantizer(y, ctx.next_quantizer)

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> Tensor:
        """See :func:`fusible.formulas.l2_normalize_backward`."""
        x, rnorm = ctx.saved_tensors
        dx = formulas.l2_normalize_backward(cast_grad(ctx, grad_output), x, rnorm)
        return apply_quantizer(dx, ctx.grad_quantizer)
