"""The kernels of cuDNN's front end on Blackwell (SM100), over operands in their own layout.

BF16, MXFP8 and NVFP4 share one structure: rows are quantized where the recipe says so and moved
into groups that are padded to whole 256 rows (`fusible.kernels.sm100.padding`), kernels read what
other kernels wrote, and the last product's rows are gathered back. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.fuser.context import OperationContext
from fusible.kernels.runtime.launch import aligned
from fusible.kernels.sm100 import limits, ops, padding, products
from fusible.kernels.sm100.padding import PaddedGroups
from fusible.kernels.sm100.quantizer import QuantizeOptions
from fusible.kernels.stacking import write
from fusible.ops.casting import format_of_grad
from fusible.ops.grouped_kernels import (
    Activated,
    ActivationGrads,
    GroupedKernels,
    GroupedOperand,
    LinearCall,
    SavedLinear,
)
from fusible.ops.matrices import buffer_rows
from fusible.ops.weights import quantize_weights, stack_weights
from fusible.ops.wgrad import WeightGradient
from fusible.recipes.matrix import Operand, OperandData, Uses
from fusible.recipes.product import is_quantized, quantize_operand
from fusible.recipes.recipe import Recipe, Role
from fusible.recipes.tensor import QuantizedTensor


class Sm100Kernels(GroupedKernels):
    """Saves what the gradients read of the input and of the weights, in the kernels' layouts."""

    saves = (
        "x as the weight gradient reads it, end rows and padding of the groups, row scales, "
        "weights as the data gradient reads them"
    )
    saves_input = False  # but padded groups

    def multiplies(self, recipe: Recipe, *ops: Any) -> str:
        """See `GroupedKernels`."""
        return "quantized operands, in all products"

    def groups(self, linear: Any, ends: Tensor, num_rows: int) -> PaddedGroups:
        """Each group padded to whole 256 rows, unless the caller promises that they are."""
        aligned = linear.split_alignment % limits.GROUP_ROWS == 0
        return padding.pad_groups(ends, num_rows, aligned)

    def prepare_rows(
        self,
        call: LinearCall,
        x: Any,
        role: Role,
        uses: Uses,
        row_scale: Tensor | None = None,
    ) -> GroupedOperand:
        """Padded rows; of a gradient with the sums for the bias, where one pass makes both."""
        _, linear, ctx, ends, padded = call
        if isinstance(x, Operand):  # quantized by the kernel that made it
            return GroupedOperand(x.row, x.column)
        options: dict[str, Any] = {}
        fmt = _recipe(ctx).format(role)
        if isinstance(x, products.UnquantizedRows) and fmt is not None and fmt.hadamard:
            # Short blocks of the groups' own rows are not transformed, so these must be known.
            x = padding.own_rows(x.rows, padded)
        elif isinstance(x, products.UnquantizedRows):  # whose rows are padded already
            options["amax"] = x.amax
            x, ends, padded = x.rows, padded.ends, padded._replace(rows=None)
        elif (
            role == "grad"
            and linear.needs_bias_grads(ctx)
            and format_of_grad(ctx, by_group=True) is None  # else sums are of quantized values
        ):
            options["sums"] = torch.bfloat16 if ctx.bias_dtype == torch.bfloat16 else torch.float32
            options["row_scale"] = row_scale
        if fmt is None or is_quantized(x):
            packed = products.pad_and_pack(_quantized(x, ctx, role, uses, ends), padded)
            return GroupedOperand(
                packed.data_for(columnwise=False), packed.data_for(columnwise=True)
            )
        wanted = QuantizeOptions(uses.row, uses.column, **options)
        packed, sums = products.quantize_padded(x, fmt, ends, padded, wanted)
        return GroupedOperand(packed.row, packed.column, sums)

    def weights(self, call: LinearCall) -> tuple[Sequence[OperandData], Sequence[OperandData]]:
        """See `GroupedKernels`."""
        linear, ctx = call.linear, call.ctx
        ctx.bias_dtype = ctx.parameters[-1].dtype
        if _recipe(ctx).format("weight") is None:
            plain = [aligned(weight) for weight in linear.weights_in(ctx, ctx.dtype)]
            return plain, plain
        weights = linear.weight_operands(ctx, quantize_weights_sm100)
        return [w.row for w in weights], [w.column for w in weights]

    def product(
        self,
        call: LinearCall,
        x: OperandData,
        weights: Sequence[OperandData],
        row_scale: Tensor | None,
        output: Tensor | None,
    ) -> Tensor:
        """See `GroupedKernels`."""
        return products.gemm(
            x,
            weights,
            call.groups,
            bias=call.linear.stacked_bias(call.ctx, call.ctx.dtype),
            row_scale=None if row_scale is None else self.row_scales(call, row_scale),
            out=buffer_rows(output),
        )

    def data_grad(
        self,
        call: LinearCall,
        dy: OperandData,
        weights: Sequence[OperandData],
        output: Tensor | None,
    ) -> Tensor:
        """See `GroupedKernels`."""
        return products.gemm(dy, weights, call.groups, transpose_w=True, out=buffer_rows(output))

    def weight_grad(self, call: LinearCall, dy: OperandData, x: OperandData) -> WeightGradient:
        """See `GroupedKernels`."""
        given = products.wgrad_operands(dy, x, call.groups)

        def gradient(out: Sequence[Tensor] | None, accumulate: bool) -> Tensor | None:
            if out is None:
                return ops.wgrad(given, torch.bfloat16)
            if products.supports_wgrad_outputs(out):
                ops.wgrad_(list(out), given, accumulate)
                return None
            write(out, ops.wgrad(given, torch.float32), accumulate)
            return None

        return WeightGradient(gradient, tuple([t for t in given if t is not None]))

    def saves_activation(self, ctx: OperationContext, act: Any) -> bool:
        """True for gated activations, which the forward prepares for both uses.

        For the others the backward's kernel computes the activation again.
        """
        return bool(act.gated)

    def row_scales(self, call: LinearCall, scales: Tensor | None) -> Tensor:
        """One FP32 value per padded row, zero for those of padding; ones where None are given."""
        padded = call.groups
        if scales is None:
            rows = padded.size if padded.rows is None else padded.rows.shape[0]
            scales = torch.ones(rows, dtype=torch.float32, device=padded.ends.device)
        return aligned(padding.pad_rows(scales.reshape(-1).float(), padded))

    def preact_ends(self, call: LinearCall) -> Tensor:
        """See `GroupedKernels`: those of padded groups."""
        return call.groups.ends

    def glu(
        self,
        call: LinearCall,
        act: Any,
        x: OperandData,
        weights: Sequence[OperandData],
        scales: Any,
        save_preact: bool,
    ) -> Activated:
        """See `GroupedKernels`; the kernel always gives the pre-activation."""
        bias = call.linear.stacked_bias(call.ctx, call.ctx.dtype)
        operands = products.product_operands(x, weights, call.groups)
        preact, *d = ops.glu(operands, None if bias is None else aligned(bias), scales, act.glu)
        return Activated(preact, products.written(x, d))

    def dglu(
        self,
        first: LinearCall,
        second: SavedLinear,
        act: Any,
        dy: OperandData,
        preact: Tensor,
        scales: Any,
        overwrite: bool,
    ) -> ActivationGrads:
        """See `GroupedKernels`; the kernel sums the bias's gradient."""
        call, bias = second.call, first.linear.needs_bias_grads(first.ctx)
        operands = products.product_operands(dy, second.weights, call.groups)
        *d, dscales, dbias, again, its_scales = ops.dglu(operands, preact, scales, bias, act.glu)
        output = None
        if second.lacks_x and not act.gated:  # of which the kernel computes it again
            rows = products.recomputed(dy, again, its_scales)
            output = self.prepare_rows(call, rows, "input", Uses(column=True)).column
        dscales, dpreact = padding.unpad_rows(dscales, call.groups), products.written(dy, d)
        return ActivationGrads(dpreact, output, dscales, dbias if bias else None)


SM100 = Sm100Kernels()


_HIGH_PRECISION = Recipe()


def _recipe(ctx: OperationContext) -> Recipe:
    return ctx.recipe or _HIGH_PRECISION


def _quantized(x: Tensor, ctx: OperationContext, role: Role, uses: Uses, ends: Tensor) -> Operand:
    """Rows for products, quantized in PyTorch or by the caller."""
    recipe = _recipe(ctx)
    if not isinstance(x, QuantizedTensor) or not uses.column:
        return quantize_operand(x, recipe, role, uses, ends)
    # Quantized as a whole, so that column-wise blocks cross the groups: they are quantized again.
    columns = quantize_operand(x.dequantize(), recipe, role, Uses(column=True), ends)
    return columns._replace(row=quantize_operand(x, recipe, role, Uses(row=uses.row)).row)


def quantize_weights_sm100(
    weights: list[Tensor], recipe: Recipe, dtype: torch.dtype, uses: Uses
) -> list[Operand]:
    """Weights as the kernels read them for the forward and, if asked, the data gradient."""
    fmt = recipe.format("weight")
    assert fmt is not None
    if products.in_one_pass(weights, fmt):
        weight = stack_weights(weights, dtype)
        return [products.quantize_packed_weights(weight, fmt, uses.column)]
    return products.pack_weights(quantize_weights(weights, recipe, dtype, uses))
