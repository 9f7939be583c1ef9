"""Activations, plain and scaled per row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusible import formulas
from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.ops.checks import check_dtype, refuse
from fusible.ops.op import BasicOperation, Grads


class _Activation(BasicOperation):
    """An elementwise op without parameters. Saves ``(x,)``, and its dtype as ``ctx.dtype``."""

    saves = "x"

    def __init__(self, cache_quantized_input: bool = False) -> None:
        super().__init__()
        if cache_quantized_input:
            raise refuse(
                "cache_quantized_input", type(self).__name__, "the input is saved as it is"
            )

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
    ) -> Tensor:
        """The formula."""
        check_dtype(input_, "input", type(self).__name__)
        ctx.dtype = input_.dtype
        ctx.save_for_backward(input_)
        return self.formula(input_)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Grads]:
        """The formula's derivative, by hand in ``grad``."""
        (x,) = ctx.saved_tensors
        return self.grad(cast(grad_output, ctx.dtype), x), ()

    def grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """The input's gradient from the output's gradient and the input."""
        _, derivative = torch.func.vjp(self.formula, x)  # type: ignore[misc]
        return derivative(dy)[0]


class GELU(_Activation):
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``. Saves ``(x,)`` and ``ctx.dtype``."""

    def formula(self, input_: Tensor) -> Tensor:
        """See :func:`fusible.formulas.gelu`."""
        return formulas.gelu(input_)

    def grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """PyTorch's own backward kernel."""
        return torch.ops.aten.gelu_backward(dy, x, approximate="tanh")


class ReLU(_Activation):
    """``max(x, 0)``. Saves ``(x,)`` and ``ctx.dtype``."""

    def formula(self, input_: Tensor) -> Tensor:
        """See :func:`fusible.formulas.relu`."""
        return formulas.relu(input_)

    def grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """PyTorch's own backward kernel."""
        return torch.ops.aten.threshold_backward(dy, x, 0)


class SiLU(_Activation):
    """``x sigmoid(x)``. Saves ``(x,)`` and ``ctx.dtype``."""

    def formula(self, input_: Tensor) -> Tensor:
        """See :func:`fusible.formulas.silu`."""
        return formulas.silu(input_)

    def grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """PyTorch's own backward kernel."""
        return torch.ops.aten.silu_backward(dy, x)


def _check_glu(x: Tensor, interleave: int | None, who: str) -> None:
    unit = 2 if interleave is None else 2 * interleave
    if x.dim() == 0 or x.shape[-1] % unit:
        layout = "two halves" if interleave is None else f"blocks of {interleave}, by twos"
        raise ValueError(
            f"last dimension of the input of {who} must be a multiple of {unit} ({layout}), got "
            f"shape {tuple(x.shape)}"
        )


def _check_interleave(size: int | None, who: str) -> int | None:
    if size is not None and size < 1:
        raise ValueError(f"glu_interleave_size of {who} must be None or at least 1, got {size}")
    return size


class SwiGLU(_Activation):
    """``silu(gate) * linear`` for x ``[..., 2F]``, gate first. Saves ``(x,)`` and ``ctx.dtype``.

    Args:
        cache_quantized_input: not offered yet.
        glu_interleave_size: with b, blocks of b gate and b linear features alternate; by default
            the first half is the gate and the second is linear.
    """

    fact_names = ("glu_interleave_size",)

    def __init__(
        self, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(cache_quantized_input)
        self.glu_interleave_size = _check_interleave(glu_interleave_size, "SwiGLU")

    def formula(self, input_: Tensor) -> Tensor:
        """See :func:`fusible.formulas.swiglu`."""
        _check_glu(input_, self.glu_interleave_size, "SwiGLU")
        return formulas.swiglu(input_, None, self.glu_interleave_size)

    def grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """See :func:`fusible.formulas.swiglu_backward`."""
        return formulas.swiglu_backward(dy, x, None, self.glu_interleave_size)[0]

    def extra_repr(self) -> str:
        """Layout."""
        return f"glu_interleave_size={self.glu_interleave_size}"


class _ScaledGLU(BasicOperation):
    """A gated activation times one scale per row, which is the extra input ``scales``.

    Saves ``(x, scales)``, and the dtype of ``x`` as ``ctx.dtype``. ``scales`` may have any
    floating dtype, in which its gradient comes back; arithmetic is in FP32.
    """

    num_extra_inputs = 1
    fact_names: ClassVar[tuple[str, ...]] = ("glu_interleave_size", "geglu")
    extra_input_names = ("scales",)
    saves = "x, scales"

    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False
    ) -> None:
        super().__init__()
        who = type(self).__name__
        if activation_recompute_in_mlp:
            raise refuse(
                "activation_recompute_in_mlp", who, "use torch.utils.checkpoint to save memory"
            )
        self.glu_interleave_size = _check_interleave(glu_interleave_size, who)

    @property
    def geglu(self) -> tuple[float, float] | None:
        """Limit and slope of a GeGLU, None of a SwiGLU."""
        return None

    def glu(self) -> tuple[Callable[..., Tensor], Callable[..., Any], dict[str, float]]:
        """The formula, its backward, and the keyword arguments of both."""
        raise TypeError(f"{type(self).__name__} must define glu")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        """The formula."""
        (ctx,) = basic_op_ctxs
        scales = basic_op_extra_inputs[0][0]
        check_dtype(input_, "input", type(self).__name__)
        _check_glu(input_, self.glu_interleave_size, type(self).__name__)
        check_row_scales(scales, input_, type(self).__name__)
        ctx.dtype = input_.dtype
        ctx.save_for_backward(input_, scales)
        formula, _, options = self.glu()
        return formula(input_, scales, self.glu_interleave_size, **options), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """Gradients of the input and of the scales."""
        x, scales = basic_op_ctxs[0].saved_tensors
        _, backward, options = self.glu()
        dx, dscales = backward(grad_output, x, scales, self.glu_interleave_size, **options)
        return dx, [()], [(dscales,)]

    def extra_repr(self) -> str:
        """Layout and parameters."""
        options = "".join(f", {k}={v}" for k, v in self.glu()[2].items())
        return f"glu_interleave_size={self.glu_interleave_size}{options}"


def check_row_scales(scales: Tensor | None, x: Tensor, who: str) -> None:
    """Raise ValueError unless ``scales`` has one floating value per row of ``x``, beside it."""
    fits = (
        scales is not None
        and scales.is_floating_point()
        and scales.shape == x.shape[:-1]
        and scales.device == x.device
    )
    if not fits:
        got = "None"
        if scales is not None:
            got = f"{scales.dtype} of shape {tuple(scales.shape)} on {scales.device}"
        raise ValueError(
            f"scales of {who} must be a floating tensor of shape {tuple(x.shape[:-1])} on "
            f"{x.device}, one value for each row of the input, got {got}"
        )


class ScaledSwiGLU(_ScaledGLU):
    """``silu(gate) * linear * scales[row]`` for x ``[..., 2F]``, gate first.

    Extra input: ``scales`` ``[...]``, one per row. Saves ``(x, scales)`` and ``ctx.dtype``.

    Args:
        glu_interleave_size: with b, blocks of b gate and b linear features alternate; by default
            the first half is the gate and the second is linear.
        activation_recompute_in_mlp: not offered yet.
    """

    def glu(self) -> tuple[Callable[..., Tensor], Callable[..., Any], dict[str, float]]:
        """The formula, its backward, no options."""
        return formulas.swiglu, formulas.swiglu_backward, {}


class ScaledClampedQGeGLU(_ScaledGLU):
    """``g sigmoid(alpha g) (l + glu_linear_offset) * scales[row]``, clamped, as in GPT-OSS.

    ``g = min(gate, limit)`` and ``l = clamp(linear, -limit, limit)`` for x ``[..., 2F]``, gate
    first. Extra input: ``scales`` ``[...]``, one per row. Saves ``(x, scales)`` and ``ctx.dtype``.

    Args:
        glu_interleave_size: as in :class:`ScaledSwiGLU`.
        limit: bound of the clamps, positive.
        alpha: slope of the sigmoid.
        glu_linear_offset: added to the linear half after its clamp.
        activation_recompute_in_mlp: not offered yet.
    """

    fact_names = ("glu_interleave_size", "geglu", "limit", "alpha", "glu_linear_offset")

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        *,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        super().__init__(
            glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp
        )
        if not limit > 0:
            raise ValueError(f"limit of ScaledClampedQGeGLU must be positive, got {limit}")
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset

    @property
    def geglu(self) -> tuple[float, float] | None:
        """Limit and slope."""
        return self.limit, self.alpha

    def glu(self) -> tuple[Callable[..., Tensor], Callable[..., Any], dict[str, float]]:
        """The formula, its backward, the clamps and the rest."""
        options = {"limit": self.limit, "alpha": self.alpha, "offset": self.glu_linear_offset}
        return formulas.clamped_qgeglu, formulas.clamped_qgeglu_backward, options


def interleave_glu(t: Tensor, size: int = 32, *, dim: int) -> Tensor:
    """Reorder features from two halves, gate then linear, to alternating blocks of ``size``.

    For the weight ``[..., out_features, in_features]`` (``dim=-2``) and the bias ``[...,
    out_features]`` (``dim=-1``) of a linear before a gated activation, which from then on has
    ``glu_interleave_size=size``. A copy of the same values; :func:`deinterleave_glu` undoes it.

    Raises:
        ValueError: ``size`` is not positive, or the dimension is no multiple of ``2 * size``.
    """
    return formulas.join_glu(*_halves(t, size, dim, None), size).movedim(-1, dim)


def deinterleave_glu(t: Tensor, size: int = 32, *, dim: int) -> Tensor:
    """Undo :func:`interleave_glu`: from alternating blocks of ``size`` to two halves."""
    return formulas.join_glu(*_halves(t, size, dim, size), None).movedim(-1, dim)


def _halves(t: Tensor, size: int, dim: int, interleave: int | None) -> tuple[Tensor, Tensor]:
    if size < 1 or t.shape[dim] % (2 * size):
        raise ValueError(
            f"features to reorder must be a multiple of twice the block, a positive size, got "
            f"{t.shape[dim]} features in dimension {dim} of {tuple(t.shape)} and size={size}"
        )
    return formulas.split_glu(t.movedim(dim, -1), interleave)
