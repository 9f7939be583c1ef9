"""Small ops: of each element or of the shape, and extra tensors in and out of a run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusible.arguments import check_bools, check_numbers
from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.fuser.op_facts import Dtypes
from fusible.ops.casting import CastingOp, apply_quantizer, cast_grad
from fusible.ops.op import BasicOperation
from fusible.recipes.product import values


class Identity(BasicOperation):
    """The input itself, of any shape and dtype. Saves nothing."""

    saves = "nothing"

    def forward_impl(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """``x``."""
        return input_

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> Tensor:
        """``dy``."""
        return grad_output


class Reshape(BasicOperation):
    """``x.reshape(shape)``. Saves only the shape of x, as ``ctx.input_shape``.

    Args:
        shape: the output's sizes, of which one may be -1.

    Raises:
        RuntimeError: PyTorch's, in a call: the input has another number of elements.
    """

    fact_names = ("shape",)
    saves = "its input's shape"

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward_impl(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """``x`` in the new shape."""
        ctx.input_shape = input_.shape
        return input_.reshape(self.shape)

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> Tensor:
        """``dy`` in the old shape."""
        return grad_output.reshape(ctx.input_shape)


class ConstantScale(BasicOperation):
    """``x * scale`` for x ``[...]``. Saves nothing.

    Args:
        scale: a constant number.

    Raises:
        TypeError: it is no number.
    """

    fact_names = ("scale",)
    saves = "nothing"

    def __init__(self, scale: float) -> None:
        check_numbers(type(self).__name__, scale=scale)
        super().__init__()
        self.scale = scale

    def forward_impl(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """``x * scale``."""
        return values(input_) * self.scale

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> Tensor:
        """``dy * scale``."""
        return values(grad_output) * self.scale


class Dropout(CastingOp):
    """Zeros with probability ``p`` in training, other elements of x ``[...]`` over ``1 - p``.

    In evaluation the input itself. Draws from PyTorch's generator of the device as
    ``torch.nn.functional.dropout`` does, so ``torch.manual_seed`` decides, and checkpointing
    repeats it. Saves ``(mask,)``, one byte an element, in training, and nothing in evaluation.

    Args:
        p: at least 0 and at most 1.

    Raises:
        ValueError: it is not.
    """

    fact_names = ("p",)
    saves = "mask"

    def __init__(self, p: float) -> None:
        check_numbers(type(self).__name__, p=p)
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p of Dropout must be at least 0 and at most 1, got {p}")
        self.p = p

    @property
    def dropout_probability(self) -> float:
        """``p``."""
        return self.p

    def forward_impl(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """The input, partly dropped."""
        x = self.cast_input(ctx, input_)
        if self.training and self.p == 1:  # PyTorch draws nothing for it
            x, mask = x * 0, torch.zeros_like(x, dtype=torch.bool)
            ctx.save_for_backward(mask)
        elif self.training and self.p > 0:
            x, mask = torch.native_dropout(x, self.p, True)
            ctx.save_for_backward(mask)
        return apply_quantizer(x, ctx.next_quantizer)

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> Tensor:
        """The gradient, dropped where the forward did."""
        dx = cast_grad(ctx, grad_output)
        if ctx.saved_tensors:
            scale = 0.0 if self.p == 1 else 1 / (1 - self.p)
            dx = torch.ops.aten.native_dropout_backward(dx, ctx.saved_tensors[0], scale)
        return apply_quantizer(dx, ctx.grad_quantizer)


class _InPlaceOp(BasicOperation):
    """An op that may write its sum to a tensor that it is given. Saves nothing."""

    fact_names = ("in_place",)
    saves = "nothing"

    def __init__(self, *, in_place: bool = False) -> None:
        check_bools(type(self).__name__, in_place=in_place)
        super().__init__()
        self.in_place = in_place


class AddExtraInput(_InPlaceOp):
    """``x + extra`` for x ``[...]`` and an extra input that broadcasts to it. Saves nothing.

    Args:
        in_place: the output has the dtype of the extra input and no new memory: the sum is written
            into the extra input, of which the output is then an alias. Into one of the caller's
            unless it is broadcast, expanded, a leaf that requires a gradient, or read by another op
            of the run; autograd refuses the backward of what saved it before. Into one that the run
            made where nothing else reads it. Otherwise, and in compiled code, the sum is a new
            tensor.

    Raises:
        ValueError: in a call, the extra input does not broadcast to x or is elsewhere.
        RuntimeError: in place inside a checkpoint.
    """

    num_extra_inputs = 1
    extra_input_names = ("addend",)

    def output_dtypes(self, given: Dtypes) -> tuple[torch.dtype | None, ...]:
        """The promoted dtype of both, or the extra input's if the sum is written into it."""
        (addend,) = given.extra_inputs
        if self.in_place or given.input is None or addend is None:
            return (addend if self.in_place else None,)
        return (torch.promote_types(given.input, addend),)

    def forward_impl(self, ctx: OperationContext, input_: Tensor, addend: Tensor | None) -> Tensor:
        """``x + extra``."""
        addend = check_addend(ctx, addend, input_.shape, input_)
        if not self.in_place:
            return values(input_) + values(addend)
        if 0 in ctx.writable_extra and ctx.addend_shape is None:
            return addend.detach().add_(values(input_))
        return cast(values(input_) + values(addend), addend.dtype)

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """``dy``, and its sum over what the extra input was broadcast over."""
        shape = getattr(ctx, "addend_shape", None)  # not set by a user's fused forward
        return grad_output, grad_output if shape is None else grad_output.sum_to_size(shape)

    @property
    def writes_extra_inputs(self) -> bool:
        """Whether the sum is written in place."""
        return self.in_place


def check_addend(
    ctx: OperationContext, addend: Tensor | None, shape: torch.Size, input_: Tensor
) -> Tensor:
    """The extra input of ``AddExtraInput``, expanded to ``shape``, the sum's.

    Its own shape is ``ctx.addend_shape``, None where that is the sum's.
    """
    ctx.addend_shape = None
    if addend is not None and addend.device == input_.device:
        if addend.shape == shape:
            return addend
        sizes = addend.shape
        fits = zip(reversed(sizes), reversed(shape), strict=False)
        if len(sizes) <= len(shape) and all(size in (1, full) for size, full in fits):
            ctx.addend_shape = sizes
            return values(addend).expand(shape)
    got = None if addend is None else f"{tuple(addend.shape)} on {addend.device}"
    raise ValueError(
        f"extra input of AddExtraInput must have shape {tuple(shape)}, or one that broadcasts to "
        f"it, and be on {input_.device}, as what it is added to, got {got}"
    )


class MakeExtraOutput(_InPlaceOp):
    """The input ``[...]``, also given out as an extra output. Saves nothing.

    Both outputs share the input's memory.

    Args:
        in_place: write the sum of both gradients into one of them, which saves memory, where that
            was made by the run's backward and nothing else reads it. Compiled code makes a new
            tensor.
    """

    num_extra_outputs = 1

    def output_dtypes(self, given: Dtypes) -> tuple[torch.dtype | None, ...]:
        """The input's, twice."""
        return (given.input, given.input)

    def forward_impl(self, ctx: OperationContext, input_: Tensor) -> tuple[Tensor, Tensor]:
        """``x``, twice."""
        return input_, input_

    def backward_impl(
        self, ctx: OperationContext, grad_output: Tensor, extra: Tensor | None
    ) -> Tensor:
        """The sum of both gradients."""
        if extra is None:
            return grad_output
        if self.in_place:
            if 0 in ctx.writable_extra and holds_sum(extra, grad_output):
                return extra.add_(grad_output)
            if ctx.writable_grad_output and holds_sum(grad_output, extra):
                return grad_output.add_(extra)
        return grad_output + extra

    @property
    def writes_grads(self) -> bool:
        """Whether the sum is written in place."""
        return self.in_place


class Swap(BasicOperation):
    """The extra input in place of the input, which goes out as the extra output. Saves nothing.

    How one run holds two branches: with channels, the second branch starts from a tensor made
    earlier, and the first one's result waits to be added. Both outputs share their inputs' memory.
    """

    num_extra_inputs = 1
    num_extra_outputs = 1
    extra_input_names = ("incoming",)
    saves = "nothing"
    passes_input = True

    def output_dtypes(self, given: Dtypes) -> tuple[torch.dtype | None, ...]:
        """The dtypes of the inputs, exchanged."""
        return (*given.extra_inputs, given.input)

    def forward_impl(
        self, ctx: OperationContext, input_: Tensor, incoming: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``extra``, and ``x``."""
        ctx.shape = input_.shape
        return incoming, input_

    def backward_impl(
        self, ctx: OperationContext, grad_output: Tensor, dextra: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """``dextra``, and ``dy``."""
        if dextra is None:
            dextra = grad_output.new_zeros(ctx.shape)
        return dextra, grad_output


def holds_sum(into: Tensor, other: Tensor) -> bool:
    """Whether the sum of two tensors has the dtype of the first."""
    return torch.result_type(into, other) == into.dtype
