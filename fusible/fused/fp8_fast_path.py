"""A grouped MLP with FP8 products on Hopper as one autograd node: see `ops.grouped_fast_path`.

The launches are those of `sm90_fp8_kernels`, in the same order. Products take the operands that
quantizers have made here, which need no check; a backward whose saved tensors hooks may have moved
runs by library ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.fuser.plan import Plan
from fusible.fuser.plan_key import PlanKey
from fusible.kernels import grouped
from fusible.kernels.grouped.vectors import launch_group_ends
from fusible.kernels.quantize.glu_backward import (
    GluBackwardInputs,
    GluBackwardOptions,
    GluGradients,
    glu_gradients,
    launch_glu_backward,
    writes_activation,
)
from fusible.kernels.quantize.k_major import (
    KMajorOperands,
    PackedOperand,
    RowsToQuantize,
    ScaledMatrix,
    empty_operand,
    launch_quantize,
    packed_layout,
    quantize_k_major,
)
from fusible.kernels.quantize.saved_input import quantize_input
from fusible.kernels.runtime.launch import TENSOR_TYPES, aligned
from fusible.kernels.sm90.gemm_launch import OperandScales
from fusible.kernels.sm90.grouped_products import ProductsByRows, products_by_rows, scales_by_row
from fusible.ops.grouped_fast_path import AccumulatingContexts, GroupedFastPath
from fusible.ops.grouped_kernels import is_memory_of
from fusible.ops.op import Grads
from fusible.ops.sm90_fp8_kernels import epilogue_quantizes, quantize_weights_k_major
from fusible.ops.wgrad import grouped_gradient
from fusible.recipes.formats import NumberFormat
from fusible.recipes.tensor import QuantizedTensor


class _LinearProducts(NamedTuple):
    """The products of a linear; each gives its launches for a number of rows."""

    forward: ProductsByRows
    dgrad: ProductsByRows
    wgrad: ProductsByRows

    def data_grad(self, dy: PackedOperand, w: ScaledMatrix, ends: Tensor) -> Tensor:
        """``dy @ w[e].T``, of transposed weights."""
        return _product(self.dgrad, dy, w, ends)

    def weight_grad(self, dy: PackedOperand, x: PackedOperand) -> Tensor:
        """``dy.T @ x`` of each group of ``dy``."""
        (_, a_scale, ends), (_, b_scale, _) = dy.addresses(), x.addresses()
        of_dy, of_x = dy.layout, x.layout
        scales = OperandScales(
            a_scale,
            b_scale,
            of_dy.scale_pitch,
            of_dy.scale_block,
            b_pitch=of_x.scale_pitch,
            b_block=of_x.scale_block,
        )
        # Without `out` there is a result.
        return self.wgrad(dy.shape[0]).wgrad(dy, x, ends, operand_scales=scales)  # type: ignore[return-value]


def _product(
    by_rows: ProductsByRows,
    x: PackedOperand,
    w: ScaledMatrix,
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    reads_ahead: bool = False,
) -> Tensor:
    """``x @ w[e].T + bias[e] * row_scale``."""
    products, scales = by_rows(x.shape[0]), scales_by_row(x, w.scale)
    operands = x, w.data.data_ptr(), ends, bias, row_scale
    return products.forward(*operands, operand_scales=scales, reads_ahead=reads_ahead)


class _LibraryProducts:
    """Those of a backward by library ops, of operands that must be checked or traced."""

    @staticmethod
    def data_grad(dy: ScaledMatrix, w: ScaledMatrix, ends: Tensor) -> Tensor:
        """``dy @ w[e].T``, of transposed weights."""
        return grouped.grouped_mm(dy.data, [w.data], ends, x_scale=dy.scale, w_scale=w.scale)

    @staticmethod
    def weight_grad(dy: ScaledMatrix, x: ScaledMatrix) -> Tensor:
        """``dy.T @ x`` of each group of ``dy``."""
        assert dy.ends is not None
        return grouped.grouped_wgrad(dy.data, x.data, dy.ends, None, dy.scale, x.scale)


class Fp8MLPFastPath(GroupedFastPath):
    """FC1, an activation, FC2."""

    can_quantize_preact = True

    @classmethod
    def _products_of(
        cls, plan: Plan, op: Any, device: torch.device, dtype: torch.dtype
    ) -> _LinearProducts | None:
        """See the base class; the plan selects FP8 products, under one recipe."""
        if dtype != torch.bfloat16:
            return None
        recipe = plan.recipes[0][0].of_fp8_products
        formats = [recipe.format(role) for role in ("input", "weight", "grad")]
        x, w, dy = [fmt.element.dtype for fmt in formats]
        groups, columns, depth = op.num_groups, op.out_features, op.in_features
        products = (
            products_by_rows(device, x, groups, columns, depth, w),
            products_by_rows(device, dy, groups, depth, columns, w),
            products_by_rows(device, dy, groups, columns, depth, x),
        )
        return None if None in products else _LinearProducts(*products)  # type: ignore[arg-type]

    def __init__(
        self, plan: Plan, key: PlanKey, ops: Sequence[Any], products: Sequence[Any]
    ) -> None:
        super().__init__(plan, key, ops, products)
        self._recipe = plan.recipes[0][0]
        recipe = self._recipe.of_fp8_products
        self._x_format, self._dy_format = recipe.format("input"), recipe.format("grad")
        (fc1, fc2), act = self._linears, self._act
        needs_w2 = fc2.needs.params[0]
        self._trains = fc2.needs.requires_grad
        self._quantizes_preact = self._trains and act.cache_quantized_input
        self._quantizes_act = epilogue_quantizes(recipe, fc1.op, act, trains=self._trains)
        self._saves_act = needs_w2 and not (self._quantizes_act or act.activation_recompute_in_mlp)
        # Otherwise the activation's backward computes it again, and may quantize it.
        self._recomputes_act = needs_w2 and not self._saves_act
        formats = self._dy_format, self._x_format
        self._writes_act = writes_activation(self._glu, fc1.op.out_features, *formats)
        self._glu_backward = GluBackwardOptions(
            self._glu,
            *formats,
            activation=self._recomputes_act and self._writes_act,
            rowwise=fc1.needs.input,
            columnwise=fc1.needs.params[0],
            values=fc1.op.has_bias and fc1.needs.params[-1],
        )

    def prepared(self, *operands: Tensor) -> Any:
        """Whether these operands are supported: True, or None."""
        params = operands[self._first_param :]
        for linear in self._linears:
            for weight in params[linear.weights]:
                if not (
                    (type(weight) in TENSOR_TYPES or isinstance(weight, QuantizedTensor))
                    and weight.shape == linear.weight_layout[0]
                    and weight.is_contiguous()
                    and weight.device == self._device
                ):
                    return None
        biases = [part for linear in self._linears for part in linear.bias_operands(params)]
        return self._inputs_fit(operands, biases) or None

    def _weights(
        self, linear: Any, params: Sequence[Tensor]
    ) -> tuple[ScaledMatrix, ScaledMatrix | None]:
        """A linear's weights for the forward, aligned, and transposed for the data gradient."""
        options = linear.needs, self._recipe, self._dtype, quantize_weights_k_major
        row, column = linear.op.quantized_weights(list(params[linear.weights]), *options)
        return ScaledMatrix(aligned(row.data), row.scale), column

    def forward(self, prepared: Any, *operands: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The output, and what the backward reads."""
        x, split_sizes, params = operands[0], operands[1], operands[self._first_param :]
        scales, row_scale = self._scales_of(operands)
        fc1, fc2 = self._linears
        ends = launch_group_ends(split_sizes, x.shape[0])
        rows = RowsToQuantize(x, ends)
        x_row, x_column = _quantize(True, rows, self._x_format, True, fc1.needs.params[0])
        w, dgrad_w1 = self._weights(fc1, params)
        act_row: Any = None
        act_column, out = None, (0, 0)
        if self._quantizes_act:
            sizes = x.shape[0], fc2.op.in_features, self._groups
            act_row = empty_operand(x, *sizes, self._x_format, columnwise=False)
            out = act_row.addresses()[:2]
        preact, act, preact_scale = fc1.products.forward(x.shape[0]).glu(
            x_row,
            w.data.data_ptr(),
            ends,
            scales,
            self._glu,
            fc1.first_bias(params),
            self._trains,
            operand_scales=scales_by_row(x_row, w.scale),
            out_format=self._x_format if self._quantizes_act else None,
            quantize_preact=self._quantizes_act and self._quantizes_preact,
            out=out,
        )
        del x_row, w  # their memory serves what follows
        if not self._quantizes_act:
            if self._quantizes_preact:
                preact, scale, _ = quantize_input(preact)
                preact_scale = scale.t()
            rows = RowsToQuantize(act, ends)
            act_row, act_column = _quantize(True, rows, self._x_format, True, self._saves_act)
        del act, rows
        w, dgrad_w2 = self._weights(fc2, params)
        # FC1 wrote neither group ends nor stored weights.
        ahead = is_memory_of(w.data, params[fc2.weights.start])
        of_bias = fc2.first_bias(params), row_scale
        y = _product(fc2.products.forward, act_row, w, ends, *of_bias, ahead)
        columns = [None if saved is None else saved.memory for saved in (x_column, act_column)]
        weights = [(None, None) if w is None else w[:2] for w in (dgrad_w1, dgrad_w2)]
        of_act = ends, scales, preact, preact_scale
        saved = *columns, *of_act, row_scale, fc2.saved_bias(params)
        return y, (*saved, *weights[0], *weights[1])

    def backward(
        self,
        saved: Sequence[Tensor],
        grad_output: Tensor,
        held: bool,
        contexts: AccumulatingContexts,
    ) -> Grads:
        """The gradients of the operands."""
        x, act, ends, scales, preact, preact_scale, row_scale, bias2, *weights = saved
        w1, w2 = ScaledMatrix(*weights[:2]), ScaledMatrix(*weights[2:])
        (fc1, fc2), dy = self._linears, grad_output
        # What hooks give back may lie anywhere.
        direct = not held and self._call_fits([((dy,), (dy.shape[0], fc2.op.out_features), 0)])
        first, second = [of.products if direct else _LibraryProducts for of in self._linears]
        rows = RowsToQuantize(dy, ends)
        dy_row, dy_column = _quantize(direct, rows, self._dy_format, True, fc2.needs.params[0])
        dact = second.data_grad(dy_row, w2, ends)
        del rows, dy_row  # its memory serves what follows
        inputs = GluBackwardInputs(dact, preact, scales, ends, preact_scale)
        made = self._activation_grads(inputs, direct)
        (dpreact_row, dpreact_column), dscales, values, act_column = made
        del dact, inputs
        biases1 = fc1.bias_grads(values, ends)
        del made, values
        if self._saves_act:
            act_column = self._restored(act, fc2, dy.shape[0], direct)
        weights2 = self._weight_grads(fc2, second, dy_column, act_column, contexts)
        del dy_column, act_column
        dx = first.data_grad(dpreact_row, w1, ends) if fc1.needs.input else None
        del dpreact_row
        x_column = self._restored(x, fc1, dy.shape[0], direct)
        weights1 = self._weight_grads(fc1, first, dpreact_column, x_column, contexts)
        params1, params2 = (*weights1, *biases1), (*weights2, *fc2.bias_grads(dy, ends, row_scale))
        of_scales = () if scales is None else (dscales,)
        of_bias = () if row_scale is None else fc2.scale_grads(dy, ends, row_scale, bias2)
        return dx, None, *of_scales, None, *of_bias, *params1, *params2

    def _activation_grads(self, inputs: GluBackwardInputs, direct: bool) -> GluGradients:
        """The backward of the activation, with the activation itself if it was not saved."""
        backward = launch_glu_backward if direct else glu_gradients
        made = backward(inputs, self._glu_backward)
        if self._recomputes_act and not self._writes_act:
            preact = inputs.decoded().preact
            act = RowsToQuantize(self._glu.forward(preact, inputs.scales), inputs.ends)
            made = made._replace(activation=_quantize(direct, act, self._x_format, False, True)[1])
        return made

    def _restored(self, memory: Tensor | None, linear: Any, rows: int, direct: bool) -> Any:
        """An input of a linear, column-wise, from what was saved."""
        if memory is None:
            return None
        sizes = rows, linear.op.in_features, self._groups
        operand = PackedOperand(memory, packed_layout(*sizes, self._x_format, True))
        return operand if direct else operand.column(self._x_format)

    def _weight_grads(
        self,
        linear: Any,
        products: _LinearProducts | type[_LibraryProducts],
        dy: Any,
        x: Any,
        contexts: AccumulatingContexts,
    ) -> Grads:
        """The gradients of a linear's weights, of a `ScaledMatrix` each, or a `PackedOperand`."""
        op = linear.op
        if not linear.needs.params[0]:
            return (None,) * op.num_weights
        if not op.accumulates_grads:
            return op.as_weight_grads(products.weight_grad(dy, x))
        if isinstance(dy, PackedOperand):
            dy, x = dy.column(self._dy_format), x.column(self._x_format)
        return op.weight_grads(contexts[linear.index], grouped_gradient(dy, x, dy.ends, False))


def _quantize(
    direct: bool, rows: RowsToQuantize, fmt: NumberFormat, rowwise: bool, columnwise: bool
) -> KMajorOperands:
    """The operands of rows of groups, by a launch or by the library op."""
    if direct:
        return launch_quantize(rows, fmt, rowwise=rowwise, columnwise=columnwise)
    x, ends, _ = rows
    return quantize_k_major(x, fmt, rowwise=rowwise, columnwise=columnwise, ends=ends)
