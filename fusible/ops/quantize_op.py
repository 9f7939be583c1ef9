"""``Quantize``: converts tensors inside a run to the recipe's number format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.arguments import check_bools
from fusible.fuser.context import OperationContext
from fusible.fuser.own_recipes import own_recipe
from fusible.fuser.tracing import constant_when_traced
from fusible.fuser.wiring import CALLER
from fusible.kernels import grouped
from fusible.ops.casting import apply_quantizer, quantized_values
from fusible.ops.inputs import check_sizes, on_device_of
from fusible.ops.op import BasicOperation, OpGrads
from fusible.recipes.formats import NumberFormat
from fusible.recipes.grouped import GroupedQuantizer
from fusible.recipes.product import is_quantized, values
from fusible.recipes.quantizer import Quantizer
from fusible.recipes.recipe import Role


class _BoundaryQuantizer(NamedTuple):
    """The quantizer of a tensor that leaves the run: the last output or the first gradient."""

    quantizer: Quantizer
    sizes: int | None = None
    """The index of the caller's extra input with the sizes of the groups, if any."""

    def placed(self, sources: Sequence[tuple[int, int]]) -> _BoundaryQuantizer:
        """Return the same, in a run where the op's extra inputs come from ``sources``."""
        of_caller = [number for producer, number in sources if producer == CALLER]
        return self._replace(sizes=of_caller[0] if of_caller else None)

    def after_run(self, x: Tensor) -> bool:
        """Whether compiled code quantizes the output after the run, which cannot return it so.

        Groups need to be known there, and rows of a matrix.
        """
        by_group = isinstance(self.quantizer, GroupedQuantizer)
        possible = not by_group or (self.sizes is not None and x.dim() == 2)
        return torch.compiler.is_compiling() and possible

    def returned(self, output: Tensor, extra_inputs: Sequence[Tensor]) -> Tensor:
        """The output of a run as its caller, who gave ``extra_inputs``, gets it."""
        if is_quantized(output) or not self.after_run(output):
            return output
        self._allow_in_graph()
        quantizer = self.quantizer
        groups: tuple[Any, ...] = ()
        if isinstance(quantizer, GroupedQuantizer):
            assert self.sizes is not None
            groups = quantizer.num_groups, _sizes_for(output, extra_inputs[self.sizes])
        constants = quantizer.format.as_constants()
        return _quantize_output(output, constants, quantizer.columnwise_usage, *groups)

    @constant_when_traced
    def _allow_in_graph(self) -> bool:
        torch.compiler.allow_in_graph(_quantize_output)
        return True


class _QuantizedOutput(torch.autograd.Function):
    @staticmethod
    def forward(fctx: Any, x: Tensor, quantizer: Quantizer, sizes: Tensor | None) -> Tensor:
        if isinstance(quantizer, GroupedQuantizer):
            return quantizer(x.detach(), sizes)
        rows = quantizer(x.detach().reshape(-1, x.shape[-1]))
        return rows.with_pieces(rows.pieces(), x.shape)

    @staticmethod
    def backward(fctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return values(grad), None, None


def _quantize_output(
    x: Tensor,
    constants: tuple[Any, ...],
    columnwise: bool,
    num_groups: int = 0,
    sizes: Tensor | None = None,
) -> Tensor:
    """``x`` quantized, in one piece for the tracer, which makes no quantized tensors itself."""
    fmt = NumberFormat.from_constants(*constants)
    quantizer = Quantizer(fmt, columnwise=columnwise)
    if num_groups:
        quantizer = GroupedQuantizer(fmt, num_groups, columnwise=columnwise)
    return _QuantizedOutput.apply(x, quantizer, sizes)


def _sizes_for(x: Tensor, split_sizes: Tensor) -> Tensor:
    """A copy of the sizes of the groups of ``x``: the caller may write to its own."""
    return on_device_of(x, split_sizes.clamp(min=0), "Quantize")


class Quantize(BasicOperation):
    """The input, and the gradient, in the formats of the recipe; without a recipe the identity.

    A neighbour that reads quantized tensors, as ``BasicLinear`` does, gets one in the format and
    for the uses that it wants. Any other gets the values of the quantized tensor. The last op of a
    run returns a quantized tensor, and the first one a quantized gradient. Compiled code has the
    values in place of that gradient, and of an output in groups whose sizes an op
    of the same run makes. Rows in groups that are no matrix stay values.

    With ``num_groups`` it takes the extra input ``split_sizes``, integers ``[num_groups]``, the
    rows of each group, which it saves; else it saves nothing.

    Args:
        forward: quantize the input, in the recipe's format of inputs.
        backward: quantize the gradient, in the recipe's format of gradients.
        num_groups: groups of rows to quantize apart, as a neighbouring ``GroupedLinear`` wants
            them; it quantizes the values itself if this is None.
    """

    extra_input_names = ("split_sizes",)
    fact_names = ("quantize_forward", "quantize_backward")
    keywords = ()
    saves = "split sizes, if rows are grouped"

    def __init__(
        self, forward: bool = True, backward: bool = False, *, num_groups: int | None = None
    ) -> None:
        check_bools("Quantize", forward=forward, backward=backward)
        if num_groups is not None:
            check_sizes("Quantize", num_groups=num_groups)
        self.num_extra_inputs = 0 if num_groups is None else 1
        super().__init__()
        self.quantize_forward = forward
        self.quantize_backward = backward
        self.num_groups = num_groups

    def get_output_quantizer(self) -> _BoundaryQuantizer | None:
        """The quantizer of inputs, None if they are not quantized."""
        return self._quantizer("input") if self.quantize_forward else None

    def get_grad_input_quantizer(self) -> _BoundaryQuantizer | None:
        """The quantizer of gradients, None if they are not quantized."""
        return self._quantizer("grad") if self.quantize_backward else None

    def _quantizer(self, role: Role) -> _BoundaryQuantizer | None:
        recipe = own_recipe(self)
        fmt = None if recipe is None else recipe.format(role)
        if fmt is None:
            return None
        uses = {"rowwise": True, "columnwise": torch.is_grad_enabled()}
        if self.num_groups is None:
            return _BoundaryQuantizer(Quantizer(fmt, **uses))
        return _BoundaryQuantizer(GroupedQuantizer(fmt, self.num_groups, **uses))

    def forward_impl(self, ctx: OperationContext, input_: Tensor, *split_sizes: Tensor) -> Tensor:
        """``q(x)``."""
        sizes = [_sizes_for(input_, s) for s in split_sizes]
        ctx.save_for_backward(*sizes)
        if not self.quantize_forward:
            return input_
        return _quantized(ctx, "input", input_, ctx.next_quantizer, sizes)

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        """``q(dy)``."""
        extra = (None,) * self.num_extra_inputs
        if not (self.quantize_backward and ctx.needs.input):
            return grad_output, *extra
        quantizer, sizes = ctx.grad_quantizer, ctx.saved_tensors
        return _quantized(ctx, "grad", grad_output, quantizer, sizes), *extra


def _quantized(
    ctx: OperationContext, role: Role, x: Tensor, quantizer: Any, sizes: Sequence[Tensor]
) -> Tensor:
    """``x`` as a neighbour reads it, which may want it quantized; compiled code has values."""
    fmt = None if ctx.recipe is None else ctx.recipe.format(role)
    if fmt is None:
        return x
    reads_values = quantizer is None
    if isinstance(quantizer, _BoundaryQuantizer):
        if role == "input" and quantizer.after_run(x):
            return values(x)
        quantizer = quantizer.quantizer
        grouped_rows = isinstance(quantizer, GroupedQuantizer) and x.dim() != 2
        reads_values = torch.compiler.is_compiling() or grouped_rows  # of no matrix: none is made
    by_group = isinstance(quantizer, GroupedQuantizer)
    if by_group != (len(sizes) > 0) and (by_group or getattr(quantizer, "by_receiver", False)):
        reads_values = True
    if getattr(quantizer, "format", fmt) != fmt:  # a neighbour's, under another recipe
        reads_values = True
    if is_quantized(x):
        return values(x) if reads_values else x
    if not reads_values:
        return apply_quantizer(x, quantizer, *sizes)
    rows = math.prod(x.shape[:-1])
    return quantized_values(x, fmt, grouped.group_ends(sizes[0], rows) if sizes else None)
