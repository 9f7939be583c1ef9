"""Activations of one input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusible.activations import ACTIVATIONS
from fusible.arguments import check_bools
from fusible.formulas import join_glu, split_glu
from fusible.fuser.context import OperationContext
from fusible.kernels.glu import Glu
from fusible.kernels.quantize.k_major import ScaledMatrix
from fusible.kernels.quantize.saved_input import input_values, quantize_input
from fusible.ops.casting import CastingOp, apply_quantizer, cast_grad
from fusible.ops.inputs import check_interleaved, check_sizes
from fusible.recipes.formats import SAVED_INPUT


class Activation(CastingOp):
    """A function of the input, or of its gate and linear half, times one scale per row or none.

    Under ``torch.autocast`` input and output have its dtype.
    """

    activation: ClassVar[str]
    """The name of its row in :data:`fusible.activations.ACTIVATIONS`."""
    pattern_types: ClassVar[tuple[type[Activation], ...]] = ()
    """The activations of this package, which `Activation` stands for in a rule's pattern."""
    fact_names: ClassVar[tuple[str, ...]] = (
        "cache_quantized_input", "gated", "glu_interleave_size", "clamp",
    )  # fmt: skip
    gated: ClassVar[bool] = False
    glu_interleave_size: int | None = None
    activation_recompute_in_mlp: bool = False
    saves = "x"

    def __init__(self, cache_quantized_input: bool = False) -> None:
        check_bools(type(self).__name__, cache_quantized_input=cache_quantized_input)
        super().__init__()
        self.cache_quantized_input = cache_quantized_input
        if cache_quantized_input:
            self.saves = "x in FP8 with its scales" + self.saves.removeprefix("x")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make the row's name and its options facts."""
        super().__init_subclass__(**kwargs)
        if "activation" in vars(cls):
            options = [option.attribute for option in ACTIVATIONS[cls.activation].options]
            cls.fact_names = (*cls.fact_names, "activation", *options)
            if cls.__module__.startswith("fusible."):
                Activation.pattern_types += (cls,)

    @property
    def glu(self) -> Glu:
        """The activation with its options, as an argument of the grouped products."""
        options = ACTIVATIONS[self.activation].options
        constants = [getattr(self, option.attribute) for option in options]
        return Glu(self.activation, self.glu_interleave_size or 0, *constants)

    @property
    def clamp(self) -> tuple[float, float] | None:
        """Limit and slope of a clamped gated unit, None of another activation."""
        glu = self.glu
        return (glu.limit, glu.alpha) if "limit" in glu.options else None

    def value(self, x: Tensor, scales: Tensor | None = None) -> Tensor:
        """The activation, times one scale per row if there are any."""
        if self.gated:
            check_interleaved(x, self.glu_interleave_size, type(self).__name__)
        return self.glu.forward(x, scales)

    def grads(
        self, dy: Tensor, x: Tensor, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the input and of the scales, if there are any."""
        return self.glu.backward(dy, x, scales)

    def save_inputs(self, ctx: OperationContext, x: Tensor, *scales: Tensor | None) -> None:
        """Save ``(x, *scales)`` for the backward, also of an input that a fused op computed.

        With ``cache_quantized_input``, in the place of x: elements like x, and FP32 scales ``[rows,
        ceil(features / 128)]``.
        """
        ctx.dtype = x.dtype
        quantizes = self.cache_quantized_input and x.dtype != torch.float64
        if not (quantizes and ctx.requires_grad):
            ctx.save_for_backward(x, *scales)
            return
        saved = quantize_input(_as_rows(x))
        ctx.save_for_backward(saved.data.view(x.shape), saved.scale, *scales)

    def saved_inputs(self, ctx: OperationContext) -> Sequence[Any]:
        """The input in ``ctx.dtype``, and the scales, that `save_inputs` saved."""
        x, *others = ctx.saved_tensors
        if x.dtype != SAVED_INPUT.element.dtype:  # as it is, also if no gradient was needed
            return x, *others
        scale, *scales = others
        values = input_values(ScaledMatrix(_as_rows(x), scale), ctx.dtype)
        return values.view(x.shape), *scales


def _as_rows(x: Tensor) -> Tensor:
    """``x``, of any shape, as ``[rows, features]``."""
    features = x.shape[-1] if x.dim() else 1
    return x.reshape(x.numel() // max(features, 1), features)


class _Unscaled(Activation):
    """An op of one input without parameters; all else as in :class:`GELU`."""

    def forward_impl(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """The activation."""
        x = self.cast_input(ctx, input_)
        self.save_inputs(ctx, x)
        return apply_quantizer(self.value(x), ctx.next_quantizer)

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> Tensor:
        """Its derivative."""
        dx, _ = self.grads(cast_grad(ctx, grad_output), *self.saved_inputs(ctx))
        return apply_quantizer(dx, ctx.grad_quantizer)


class GELU(_Unscaled):
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`` for x ``[...]``, as in arXiv 1606.08415.

    Saves ``(x,)`` and ``ctx.dtype``; ``saved_inputs(ctx)`` reads them.

    Args:
        cache_quantized_input: save x in FP8 (E4M3, a power of two for each 128 features of a row,
            as in arXiv 2412.19437, section 3.3.3): half the memory of BF16, and a less exact
            gradient. The output is not affected. FP64 is saved as it is.

    Raises:
        ValueError: in a call, x has a dtype that ops do not compute in.
    """

    activation = "gelu"


class QGELU(_Unscaled):
    """``x sigmoid(1.702 x)`` for x ``[...]``. All else as in :class:`GELU`."""

    activation = "qgelu"


class ReLU(_Unscaled):
    """``max(x, 0)`` for x ``[...]``. All else as in :class:`GELU`."""

    activation = "relu"


class SReLU(_Unscaled):
    """``max(x, 0)^2`` for x ``[...]``. Source: arXiv 2109.08668. All else as in :class:`GELU`."""

    activation = "srelu"


class SiLU(_Unscaled):
    """``x sigmoid(x)`` for x ``[...]``. All else as in :class:`GELU`."""

    activation = "silu"


# --- gated ----------------------------------------------------------------------------------------


def interleave_glu(t: Tensor, size: int = 32, *, dim: int) -> Tensor:
    """Reorder features from two halves, gate then linear, to alternating blocks of ``size``.

    For the weight ``[..., out_features, in_features]`` (``dim=-2``) and the bias ``[...,
    out_features]`` (``dim=-1``) of a linear before a gated activation, which from then on has
    ``glu_interleave_size=size``. A copy of the same values; :func:`deinterleave_glu` undoes it.

    Raises:
        ValueError: ``size`` is not positive, or the dimension is no multiple of ``2 * size``.
    """
    return join_glu(*_gate_and_linear(t, size, dim, None), size).movedim(-1, dim).contiguous()


def deinterleave_glu(t: Tensor, size: int = 32, *, dim: int) -> Tensor:
    """Undo :func:`interleave_glu`: from alternating blocks of ``size`` to two halves."""
    return join_glu(*_gate_and_linear(t, size, dim, size), None).movedim(-1, dim).contiguous()


def _gate_and_linear(
    t: Tensor, size: int, dim: int, interleave: int | None
) -> tuple[Tensor, Tensor]:
    if size < 1 or t.shape[dim] % (2 * size):
        raise ValueError(
            "features to reorder must be a multiple of twice the block, a positive size, got "
            f"{t.shape[dim]} features in dimension {dim} of {tuple(t.shape)} and size={size}"
        )
    return split_glu(t.movedim(dim, -1), interleave)


class GatedOp(Activation):
    """A gated linear unit, with the options of its row as attributes."""

    gated = True

    def set_interleave(self, size: int | None) -> None:
        """Check and set the layout of its input."""
        if size is not None:
            check_sizes(type(self).__name__, glu_interleave_size=size)
        self.glu_interleave_size = size

    def check_options(self) -> None:
        """Check the constants of its formula, once they are set."""
        for option in ACTIVATIONS[self.activation].options:
            option.check(type(self).__name__, getattr(self, option.attribute))


class _GLU(_Unscaled, GatedOp):
    """A gated linear unit of one input; all else as in :class:`SwiGLU`."""

    def __init__(
        self, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(cache_quantized_input)
        self.set_interleave(glu_interleave_size)


class GLU(_GLU):
    """``sigmoid(gate) * linear``. All else as in :class:`SwiGLU`."""

    activation = "glu"


class GEGLU(_GLU):
    """``gelu(gate) * linear``. All else as in :class:`SwiGLU`."""

    activation = "geglu"


class QGEGLU(_GLU):
    """``gate sigmoid(1.702 gate) * linear``. All else as in :class:`SwiGLU`."""

    activation = "qgeglu"


class ReGLU(_GLU):
    """``max(gate, 0) * linear``. All else as in :class:`SwiGLU`."""

    activation = "reglu"


class SReGLU(_GLU):
    """``max(gate, 0)^2 * linear``. All else as in :class:`SwiGLU`."""

    activation = "sreglu"


class SwiGLU(_GLU):
    """``silu(gate) * linear`` for x ``[..., 2F]``, gate first. Saves ``(x,)`` and ``ctx.dtype``.

    Args:
        cache_quantized_input: as in :class:`GELU`.
        glu_interleave_size: with b, blocks of b gate and b linear features alternate; by default
            the first half is the gate and the second is linear.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.

    Raises:
        ValueError: the size is under 1; in a call, the last dimension is not of whole pairs, or x
            has a dtype that ops do not compute in.
    """

    activation = "swiglu"


class ClampedSwiGLU(_GLU):
    """``g sigmoid(alpha g) (l + glu_linear_offset)``, clamped, as in GPT-OSS.

    ``g = min(gate, limit)`` and ``l = clamp(linear, -limit, limit)`` for x ``[..., 2F]``, gate
    first (GPT-OSS itself has ``glu_interleave_size=1``). Saves ``(x,)`` and ``ctx.dtype``.

    Args:
        limit: bound of the clamps, positive.
        alpha: slope of the sigmoid.
        glu_linear_offset: added to the linear half after its clamp.
        cache_quantized_input, glu_interleave_size: as in :class:`SwiGLU`.
    """

    activation = "clamped_qgeglu"

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input, glu_interleave_size)
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset
        self.check_options()


class SiTUGLU(_GLU):
    """``beta1 tanh(gate / beta1) sigmoid(gate) * beta2 tanh(linear / beta2)``, as in Kimi K3.

    Saves ``(x,)`` and ``ctx.dtype``.

    Args:
        beta1, beta2: soft caps of the gate and of the linear half, finite and positive.
        cache_quantized_input, glu_interleave_size: as in :class:`SwiGLU`.
    """

    activation = "situglu"

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input, glu_interleave_size)
        self.beta1, self.beta2 = beta1, beta2
        self.check_options()
