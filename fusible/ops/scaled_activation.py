"""Activations times one scale per row: a router's weights, applied where the experts' rows are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.arguments import check_bools
from fusible.fuser.context import OperationContext
from fusible.ops.activation import Activation, GatedOp
from fusible.ops.casting import apply_quantizer, cast_grad
from fusible.ops.inputs import check_row_scales
from fusible.ops.op import OpGrads


class _Scaled(Activation):
    """An activation times one scale per row, which is the extra input ``scales``.

    Saves ``(x, scales)``, and the dtype of ``x`` as ``ctx.dtype``. ``scales`` may have any
    floating dtype, in which its gradient comes back; arithmetic is in FP32.
    """

    num_extra_inputs = 1
    extra_input_names = ("scales",)
    saves = "x, scales"

    def __init__(
        self, *, activation_recompute_in_mlp: bool = False, cache_quantized_input: bool = False
    ) -> None:
        flags = {"activation_recompute_in_mlp": activation_recompute_in_mlp}
        check_bools(type(self).__name__, **flags)
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def forward_impl(self, ctx: OperationContext, input_: Tensor, scales: Tensor | None) -> Tensor:
        """The activation, scaled."""
        x = self.cast_input(ctx, input_)
        scales = check_row_scales(scales, x, type(self).__name__)
        self.save_inputs(ctx, x, scales)
        (y,) = in_pieces(lambda *rows: (self.value(*rows),), x, scales)
        return apply_quantizer(y, ctx.next_quantizer)

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        """Gradients of the input and of the scales."""
        dy = cast_grad(ctx, grad_output)
        dx, dscales = in_pieces(self.grads, dy, *self.saved_inputs(ctx))
        return apply_quantizer(dx, ctx.grad_quantizer), dscales


PIECE_ELEMENTS = 1 << 24  # elements


def in_pieces(formula: Callable[..., Sequence[Any]], *tensors: Tensor) -> Sequence[Any]:
    """The results of a row-wise formula, computed for some rows at a time.

    It takes some rows after the other where there are many: its temporaries, which are several in
    FP32, then have the size of a piece. A compiler fuses them away by itself.
    """
    first = tensors[0]
    if torch.compiler.is_compiling() or first.numel() <= PIECE_ELEMENTS:
        return formula(*tensors)
    rows = max(PIECE_ELEMENTS * len(first) // first.numel(), 1)
    parts = [formula(*part) for part in zip(*[t.split(rows) for t in tensors], strict=True)]
    return [torch.cat(of_all) for of_all in zip(*parts, strict=True)]


class ScaledSReLU(_Scaled):
    """``max(x, 0)^2 * scales[row]``.

    Extra input: ``scales`` ``[...]``, one per row. Saves ``(x, scales)`` and ``ctx.dtype``.

    Args:
        activation_recompute_in_mlp: a fused grouped MLP shall compute the activation again in its
            backward, from the pre-activation, rather than save it. On Blackwell it always does, on
            Hopper in high precision and with FP8 products in blocks, and under other recipes with
            this; values differ by a rounding at most. Where no fusion takes the op, the linear
            after it saves the activation, as ``explain`` says.
        cache_quantized_input: as in :class:`GELU`.
    """

    activation = "srelu"

    def notes(self, dtype: str, target: Any) -> tuple[str, ...]:
        """A note if recomputation was requested and does not take place."""
        if not self.activation_recompute_in_mlp:
            return ()
        return (
            "activation_recompute_in_mlp has no effect unfused: the next linear saves its input",
        )


class ScaledGLU(_Scaled, GatedOp):
    """A gated activation times one scale per row."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        cache_quantized_input: bool = False,
    ) -> None:
        super().__init__(
            activation_recompute_in_mlp=activation_recompute_in_mlp,
            cache_quantized_input=cache_quantized_input,
        )
        if activation_recompute_in_mlp:
            raise ValueError(
                f"activation_recompute_in_mlp must be False in {type(self).__name__}, got True; "
                "only ScaledSReLU takes it (fused grouped MLPs on Hopper recompute gated "
                "activations anyway)"
            )
        self.set_interleave(glu_interleave_size)


class ScaledSwiGLU(ScaledGLU):
    """``silu(gate) * linear * scales[row]`` for x ``[..., 2F]``, gate first.

    Extra input: ``scales`` ``[...]``, one per row. Saves ``(x, scales)`` and ``ctx.dtype``.

    Args:
        glu_interleave_size: with b, blocks of b gate and b linear features alternate; by default
            the first half is the gate and the second is linear.
        activation_recompute_in_mlp: must be False.
        cache_quantized_input: as in :class:`GELU`.

    Raises:
        ValueError: an option that cannot be; in a call, the last dimension is not of whole pairs,
            or ``scales`` are not one floating value for each row, on its device.
    """

    activation = "swiglu"


class ScaledClampedQGeGLU(ScaledGLU):
    """``g sigmoid(alpha g) (l + glu_linear_offset) * scales[row]``, clamped, as in GPT-OSS.

    ``g = min(gate, limit)`` and ``l = clamp(linear, -limit, limit)`` for x ``[..., 2F]``, gate
    first. Extra input: ``scales`` ``[...]``, one per row. Saves ``(x, scales)`` and ``ctx.dtype``.

    Args:
        glu_interleave_size, activation_recompute_in_mlp, cache_quantized_input: as in
            :class:`ScaledSwiGLU`.
        limit, alpha, glu_linear_offset: as in :class:`ClampedSwiGLU`.
    """

    activation = "clamped_qgeglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        *,
        activation_recompute_in_mlp: bool = False,
        cache_quantized_input: bool = False,
    ) -> None:
        super().__init__(
            glu_interleave_size,
            activation_recompute_in_mlp=activation_recompute_in_mlp,
            cache_quantized_input=cache_quantized_input,
        )
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset
        self.check_options()


class ScaledSiTUGLU(ScaledGLU):
    """``beta1 tanh(gate / beta1) sigmoid(gate) * beta2 tanh(linear / beta2) * scales[row]``.

    Extra input: ``scales`` ``[...]``, one per row. Saves ``(x, scales)`` and ``ctx.dtype``.

    Args:
        glu_interleave_size, activation_recompute_in_mlp, cache_quantized_input: as in
            :class:`ScaledSwiGLU`.
        beta1, beta2: as in :class:`SiTUGLU`.
    """

    activation = "situglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        cache_quantized_input: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        super().__init__(
            glu_interleave_size,
            activation_recompute_in_mlp=activation_recompute_in_mlp,
            cache_quantized_input=cache_quantized_input,
        )
        self.beta1, self.beta2 = beta1, beta2
        self.check_options()
