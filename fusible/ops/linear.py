"""Dense linear transformation: ``BasicLinear``, ``Bias`` and their pair ``Linear``."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fusible import formulas
from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.ops.checks import check_device, check_features, product_dtype
from fusible.ops.op import BasicOperation, FusedOperation, Grads
from fusible.ops.weights import WeightedOperation, matrix
from fusible.ops.wgrad import dense_gradient
from fusible.recipes.product import (
    SAVED,
    Product,
    columnwise_only,
    compute_dtype,
    encode_operand,
    from_columnwise,
    operand,
    values,
)
from fusible.recipes.state import register_state_hooks


class BasicLinear(WeightedOperation):
    """``x @ weight.T`` for x ``[..., in_features]``, weight ``[out_features, in_features]``.

    Saves ``(x, weight)`` in the dtype of the product, and that as ``ctx.dtype``. Under a recipe
    each of the two is what ``columnwise_only`` gives of it, ``SAVED`` tensors, all None where no
    gradient reads it.

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the output's last dimension.
        device: of the weight; PyTorch's default if None.
        dtype: FP32, FP16 or BF16; PyTorch's default if None.
        rng_state_tracker_function: returns an object whose ``fork()`` is a context manager that
            sets the random state for initialisation (Megatron's tracker).
        accumulate_into_main_grad: add the weight's gradient to ``weight.main_grad`` (FP32 or BF16),
            or write it there if ``weight.overwrite_main_grad``, rather than give it to autograd.
    """

    fact_names = ("in_features", "out_features", "accumulate_into_main_grad")
    saves = "x, weight"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        super().__init__(accumulate_into_main_grad=accumulate_into_main_grad)
        self.in_features = in_features
        self.out_features = out_features
        self.rng_state_tracker_function = rng_state_tracker_function
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )
        self.reset_parameters()
        self.store_weights()

    def reset_parameters(self) -> None:
        """Kaiming-uniform, as ``torch.nn.Linear``."""
        tracker = self.rng_state_tracker_function
        with nullcontext() if tracker is None else tracker().fork():
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def own_parameters(self) -> tuple[nn.Parameter, ...]:
        """``(weight,)``."""
        return (self.weight,)

    def weights(self) -> list[Tensor]:
        """``[weight]``."""
        return [self.weight]

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
    ) -> Tensor:
        """``x @ weight.T``, of quantized operands under a recipe."""
        if ctx.recipe is not None and ctx.recipe.quantizes:
            return self._quantized_forward(ctx, input_)
        x, weight = self.operands(ctx, input_)
        return formulas.linear(x, weight)

    def operands(self, ctx: OperationContext, input_: Tensor) -> tuple[Tensor, Tensor]:
        """The checked input and weight in the product's dtype, saved as the backward expects.

        Without a recipe: quantized ones are decoded.
        """
        self._check(ctx, input_)
        x, weight = cast(values(input_), ctx.dtype), cast(values(self.weight), ctx.dtype)
        ctx.save_for_backward(x, weight)
        return x, weight

    def _check(self, ctx: OperationContext, input_: Tensor) -> None:
        check_features(input_, self.in_features, "BasicLinear")
        ctx.dtype = product_dtype(ctx, input_, self.weight, "BasicLinear")

    def _quantized_forward(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        self._check(ctx, input_)
        needs, compute = ctx.needs, compute_dtype(input_.device)
        products: tuple[Product, ...] = ("forward", "wgrad") if needs.params[0] else ("forward",)
        x = encode_operand(matrix(input_, ctx.dtype), ctx.recipe, "input", *products)
        (weight,) = self.encoded_weights(ctx)
        y = (
            operand(x, "forward", "input", compute)
            @ operand(weight, "forward", "weight", compute).t()
        )
        ctx.save_for_backward(
            *columnwise_only(x, needed=needs.params[0]),
            *columnwise_only(weight, needed=needs.input),
        )
        return y.to(ctx.dtype).view(*input_.shape[:-1], self.out_features)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Grads]:
        """``dy @ weight`` and ``dy.T @ x``, of quantized operands under a recipe."""
        if ctx.recipe is not None and ctx.recipe.quantizes:
            return self._quantized_backward(ctx, grad_output)
        weight = ctx.saved_tensors[1]
        dy = cast(grad_output, ctx.dtype)
        dx = (dy @ weight) if ctx.needs.input else None
        return dx, self.weight_grads(ctx, dense_gradient(dy, ctx.saved_tensors[0]))

    def _quantized_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Grads]:
        recipe, needs, compute = ctx.recipe, ctx.needs, compute_dtype(grad_output.device)
        products: list[Product] = ["dgrad"] if needs.input else []
        if needs.params[0]:
            products.append("wgrad")
        dy = encode_operand(matrix(grad_output, ctx.dtype), recipe, "grad", *products)
        saved = ctx.saved_tensors
        dx = None
        if needs.input:
            weight = from_columnwise(saved[SAVED:], recipe.format("weight"))
            dx = operand(dy, "dgrad", "grad", compute) @ operand(weight, "dgrad", "weight", compute)
            dx = dx.to(ctx.dtype).view(*grad_output.shape[:-1], self.in_features)
        if not needs.params[0]:
            return dx, (None,)
        x = from_columnwise(saved[:SAVED], recipe.format("input"))
        left = operand(dy, "wgrad", "grad", compute)
        right = operand(x, "wgrad", "input", compute)
        return dx, self.weight_grads(ctx, dense_gradient(left, right))

    def extra_repr(self) -> str:
        """Sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Bias(BasicOperation):
    """``x + bias`` for x ``[..., size]``, bias ``[size]``. Saves nothing."""

    fact_names = ("size",)
    saves = "nothing"

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros."""
        nn.init.zeros_(self.bias)

    def own_parameters(self) -> tuple[nn.Parameter, ...]:
        """``(bias,)``."""
        return (self.bias,)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
    ) -> Tensor:
        """``x + bias`` in the dtype of ``x``."""
        check_features(input_, self.size, "Bias")
        check_device(input_, self.bias, "Bias")
        return input_ + cast(self.bias, input_.dtype)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Grads]:
        """``dy``, and its sum over rows."""
        if not ctx.needs.params[0]:
            return grad_output, (None,)
        return grad_output, (grad_output.reshape(-1, self.size).sum(0),)

    def extra_repr(self) -> str:
        """Size."""
        return f"size={self.size}"


class Linear(FusedOperation):
    """``x @ weight.T + bias``, a drop-in replacement for ``torch.nn.Linear``.

    Runs as ``BasicLinear`` and ``Bias``, which fusion rules see; ``weight`` and ``bias`` are this
    module's own parameters. Arguments as in :class:`BasicLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        linear = BasicLinear(
            in_features,
            out_features,
            device=device,
            dtype=dtype,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        parts: list[BasicOperation] = [linear]
        if bias:
            parts.append(Bias(out_features, device=device, dtype=dtype))
        super().__init__(parts)
        register_state_hooks(self)
        for part in parts:
            self._parameters.update(part._parameters)
            # The parts read the very dictionary that holds this module's parameters, so that no
            # assignment (load_state_dict(assign=True), FSDP2, to_empty) can separate them.
            part.__dict__["_parameters"] = self._parameters
        if not bias:
            self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Kaiming-uniform weight, zero bias."""
        for part in self.basic_ops:
            part.reset_parameters()  # type: ignore[operator]

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.basic_ops[0].extra_repr()}, bias={len(self.basic_ops) > 1}"
