"""FP8 products on Hopper (SM90): what is quantized is multiplied, not its dequantized values.

Its tensor cores read 8-bit operands with the reduced dimension contiguous. So rows are quantized as
they are, for products that reduce their features, and transposed, in groups padded to whole blocks,
for weight gradients, both in one launch. The activation between two linears is quantized in the
epilogue of the first, and transposed by the launch of its backward, which computes it again.
Weights are quantized once, with a transposed copy for the data gradient. Products accumulate in
FP32 and give BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible.fuser.context import OperationContext
from fusible.fuser.target import Target
from fusible.kernels import grouped
from fusible.kernels.quantize.glu_backward import quantize_glu_backward, writes_activation
from fusible.kernels.quantize.k_major import (
    KMajorOperands,
    RowsToQuantize,
    ScaledMatrix,
    quantize_k_major,
    row_operand,
    transposed,
)
from fusible.kernels.quantize.saved_input import input_values
from fusible.kernels.sm90 import fp8_times, tiles
from fusible.kernels.sm90.limits import quantizes_activation
from fusible.kernels.sm90.spec import Tile
from fusible.kernels.stacking import stacked
from fusible.ops.grouped_kernels import (
    Activated,
    ActivationGrads,
    GroupedKernels,
    GroupedOperand,
    LinearCall,
    SavedLinear,
)
from fusible.ops.matrices import GatheredRows, QuantizedRows, as_2d, source_of
from fusible.ops.operand_cache import cached_copy
from fusible.ops.sm90_kernels import has_row_major_weights
from fusible.ops.weights import quantize_weights, stack_weights
from fusible.ops.wgrad import WeightGradient, grouped_gradient
from fusible.recipes.formats import FP8_BLOCK, NumberFormat
from fusible.recipes.matrix import QuantizedMatrix, Uses
from fusible.recipes.product import is_quantized, operand_values, quantize_operand, values
from fusible.recipes.recipe import Recipe, Role
from fusible.recipes.tensor import QuantizedTensor


class Sm90Fp8Kernels(GroupedKernels):
    """Saves what the gradients read of the input and of the weights, in FP8, transposed."""

    saves = (
        "x as the weight gradient reads it and weights as the data gradient reads them, both in "
        "FP8 and transposed; of groups the end rows, and row scales"
    )
    gathers = True
    quantizes_own_inputs = True  # one launch quantizes for both products, in their layouts
    reads_quantized_preact = True

    def multiplies(self, recipe: Recipe, *ops: Any) -> str:
        """See `GroupedKernels`; with an estimated time for steps with scales of blocks."""
        says = (
            "FP8, in all products: one launch quantizes an input or a gradient for its two "
            "products, one the weights"
        )
        if len(ops) > 1 and epilogue_quantizes(recipe, *ops[:2], trains=False):
            says += "; FC1's epilogue quantizes the activation"
            if not epilogue_quantizes(recipe, *ops[:2], trains=True):
                says += " in inference"
        own, recipe = recipe, recipe.of_fp8_products
        if own != recipe:
            says += f", as under {recipe!r}"
        formats = [recipe.format(role) for role in ("input", "weight", "grad")]
        if any([fmt is None or fmt.block is None for fmt in formats]):
            return f"{says}, after another that finds the scales of whole groups and weights"
        sizes = [(linear.in_features, linear.out_features) for linear in ops[::2]]
        return f"{says}; {fp8_times.speed_note(sizes)}"

    def describe_tiles(
        self,
        target: Target,
        op: Any,
        ctx: OperationContext,
        rows: int,
        act: Any = None,
        dact: Any = None,
    ) -> Sequence[Tile]:
        """See `GroupedKernels`; none of a dense linear, whose products may be PyTorch's."""
        sms = target.multiprocessors
        if op.num_groups is None or not has_row_major_weights(op, ctx):
            return ()
        if act is None:
            return tiles.of_linear(op, rows, sms, fp8=True)
        quantized = epilogue_quantizes(ctx.recipe, op, act, trains=ctx.requires_grad)
        return tiles.of_linear(op, rows, sms, act.glu, fp8=True, quantized=quantized)

    def rows_format(self, ctx: OperationContext, dtype: torch.dtype) -> NumberFormat | None:
        """See `GroupedKernels`: one of blocks of a row."""
        fmt = _format(ctx.recipe, "input")
        return fmt if dtype == torch.bfloat16 and fmt.directional else None

    def single_group(self, x: Any) -> Tensor:
        """See `GroupedKernels`."""
        rows = x.numel() // x.shape[-1]
        return torch.full((1,), rows, dtype=torch.int32, device=x.device)

    def prepare_rows(
        self,
        call: LinearCall,
        x: Any,
        role: Role,
        uses: Uses,
        row_scale: Tensor | None = None,
    ) -> GroupedOperand:
        """Both uses from one launch; of a quantized ``x``, the row-wise use as it is stored."""
        if isinstance(x, GroupedOperand):  # of `glu` or `dglu`
            return x
        if isinstance(x, QuantizedRows):
            return GroupedOperand(x.take(), None)
        recipe = call.ctx.recipe.of_fp8_products
        rowwise, columnwise, row = uses.row, uses.column, None
        if is_quantized(x):
            ends = None if call.linear.num_groups is None else call.ends
            if rowwise:
                stored = quantize_operand(x, recipe, role, Uses(row=True), ends).row
                assert stored is not None
                operand = row_operand(stored)
                row, rowwise = ScaledMatrix(as_2d(operand.data), as_2d(operand.scale)), False
            if columnwise:
                columns = quantize_operand(x, recipe, role, Uses(column=True), ends)
                x = as_2d(operand_values(columns, columnwise=True))
        later = columnwise and isinstance(x, GatheredRows) and x.regather
        if not (rowwise or columnwise):
            return GroupedOperand(row, None)
        operands = _quantized(x, call, role, rowwise=rowwise, columnwise=columnwise and not later)
        column: Any = operands.column
        if role == "input":
            column = RowsToQuantize(x.source, None, x.index) if later else _in_memory_order(column)
        return GroupedOperand(operands.row or row, column)

    def weights(self, call: LinearCall) -> tuple[ScaledMatrix, ScaledMatrix | None]:
        """See `GroupedKernels`; the second one is a transposed copy. One matrix if dense."""
        row, column = call.linear.weight_operands(call.ctx, quantize_weights_k_major)
        if call.linear.num_groups is not None:
            return row, column
        return _first(row), None if column is None else _first(column)

    def weight_grad(
        self, call: LinearCall, dy: ScaledMatrix, x: ScaledMatrix | RowsToQuantize
    ) -> WeightGradient:
        """See `GroupedKernels`; the groups are those of ``dy``, rows to quantize are gathered."""
        if isinstance(x, RowsToQuantize):
            assert x.row_index is not None
            rows = GatheredRows(x.x, x.row_index)
            columns = _quantized(rows, call, "input", rowwise=False, columnwise=True).column
        else:
            columns = ScaledMatrix(x.data.t(), x.scale)
        assert dy.ends is not None
        return grouped_gradient(dy, columns, dy.ends, call.ctx.column_major)

    def glu(
        self,
        call: LinearCall,
        act: Any,
        x: ScaledMatrix,
        weights: ScaledMatrix,
        scales: Tensor | None,
        save_preact: bool,
    ) -> Activated:
        """The epilogue quantizes the activation for the second linear's product, if it can.

        Its weight gradient then reads what `dglu` computes again. Otherwise the second linear
        quantizes the activation for its product and for its weight gradient.
        """
        linear, ctx = call.linear, call.ctx
        if not epilogue_quantizes(ctx.recipe, linear, act, trains=save_preact):
            return super().glu(call, act, x, weights, scales, save_preact)
        fmt = _format(ctx.recipe, "input")
        bias = linear.stacked_bias(ctx, torch.bfloat16)
        given = call.ends, scales, act.glu, bias, save_preact, x.scale, weights.scale, fmt
        quantized = save_preact and act.cache_quantized_input
        preact, data, scale, preact_scale = grouped.grouped_glu_quantized(
            x.data, [weights.data], *given, quantized, zero_tail=ctx.zero_tail
        )
        saved = ScaledMatrix(preact, preact_scale.t()) if quantized else preact
        return Activated(saved, GroupedOperand(ScaledMatrix(data, scale.t()), None))

    def dglu(
        self,
        first: LinearCall,
        second: SavedLinear,
        act: Any,
        dy: ScaledMatrix,
        preact: Tensor | ScaledMatrix,
        scales: Tensor | None,
        overwrite: bool,
    ) -> ActivationGrads:
        """The data gradient, then the activation's backward, which quantizes what it computes.

        One epilogue for both was slower (``benchmarks/NOTES.md``).
        """
        call, linear, glu = second.call, first.linear, act.glu
        recipe, ends = call.ctx.recipe, call.ends
        fmt, of_input = _format(recipe, "grad"), _format(recipe, "input")
        columns = first.linear.out_features
        writes = second.lacks_x and writes_activation(glu, columns, fmt, of_input)
        uses = linear.grad_uses(first.ctx)
        gradients = quantize_glu_backward(
            self.data_grad(call, dy, second.weights, None),
            preact,
            scales,
            ends,
            glu,
            fmt,
            rowwise=uses.row,
            columnwise=uses.column,
            values=linear.needs_bias_grads(first.ctx),
            act_format=of_input if writes else None,
        )
        sums = None if gradients.values is None else grouped.grouped_sum(gradients.values, ends)
        output = _in_memory_order(gradients.activation)
        if second.lacks_x and not writes:
            rows = glu.forward(input_values(preact, torch.bfloat16), scales)
            output = self.prepare_rows(call, rows, "input", Uses(column=True)).column
        return ActivationGrads(GroupedOperand(*gradients.operands), output, gradients.scales, sums)


SM90_FP8 = Sm90Fp8Kernels()


def epilogue_quantizes(recipe: Recipe, linear: Any, act: Any, *, trains: bool) -> bool:
    """Whether the epilogue of ``linear`` quantizes the activation that follows.

    ``trains``: only if the activation's backward can quantize it, too.
    """
    glu, fmt, of_grad = act.glu, _format(recipe, "input"), _format(recipe, "grad")
    if fmt.block is None or not quantizes_activation(glu.activation, linear.has_bias):
        return False
    return not trains or writes_activation(glu, linear.out_features, fmt, of_grad)


def _format(recipe: Recipe, role: Role) -> NumberFormat:
    """The format in which FP8 products read an operand; the rules require one."""
    fmt = recipe.of_fp8_products.format(role)
    assert fmt is not None
    return fmt


def _in_memory_order(column: ScaledMatrix | None) -> ScaledMatrix | None:
    """The column-wise use of an input ``[columns, padded]`` as its memory: ``[padded, columns]``.

    A saved-tensor hook may copy it, and keeps no other layout.
    """
    return None if column is None else ScaledMatrix(column.data.t(), column.scale)


def _first(weights: ScaledMatrix) -> ScaledMatrix:
    return ScaledMatrix(weights.data[0], weights.scale[0])


def _quantized(
    x: Tensor | GatheredRows, call: LinearCall, role: Role, **uses: bool
) -> KMajorOperands:
    """Rows, gathered or as they are, for the products that read them, in one launch."""
    source, index = source_of(x)
    fmt = _format(call.ctx.recipe, role)
    return quantize_k_major(source, fmt, ends=call.ends, index=index, **uses)


def quantize_weights_k_major(
    weights: list[Tensor], recipe: Recipe, dtype: torch.dtype, uses: Uses
) -> KMajorOperands:
    """Weights ``[E, N, K]`` for the forward and, if it is taken, transposed for the data gradient.

    Stored ones are not quantized again, and copied once for their values; those that are stored in
    another format are quantized once for them.
    """
    recipe = recipe.of_fp8_products
    make = partial(_weights_k_major, weights, recipe, dtype, uses)
    quantized = [w for w in weights if isinstance(w, QuantizedTensor)]
    if len(quantized) < len(weights):
        return make()
    return cached_copy(quantized, recipe.format("weight"), make, uses)


def _weights_k_major(
    weights: list[Tensor], recipe: Recipe, dtype: torch.dtype, uses: Uses
) -> KMajorOperands:
    fmt = _format(recipe, "weight")
    if not any([isinstance(w, QuantizedTensor) and w.format == fmt for w in weights]):
        weight = stacked([stack_weights([*map(values, weights)], dtype)])
        return quantize_k_major(weight, fmt, rowwise=True, columnwise=uses.column)
    rows = [w.row for w in quantize_weights(weights, recipe, dtype, Uses(row=True))]
    parts = zip(*[(row.data, row.scale) for row in rows if row], strict=True)
    # Not the stored tensors themselves, which what is cached must not keep.
    data, scale = [stacked([stack_weights([*of], of[0].dtype)]).detach() for of in parts]
    row = row_operand(QuantizedMatrix(data, scale, None, fmt), FP8_BLOCK)
    column = ScaledMatrix(transposed(data), row.scale.mT) if uses.column else None
    return KMajorOperands(row, column)
