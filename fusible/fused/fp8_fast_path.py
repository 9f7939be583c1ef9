"""A grouped MLP by FP8 products on Hopper as one autograd node: see `ops.grouped_fast_path`.

The launches are those of `sm90_fp8_kernels`, in the same order. Products take the operands that
its quantizers have made, which need no check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusible.fused.sm90_fp8_kernels import epilogue_quantizes, quantize_weights_k_major
from fusible.fuser.plan import Plan
from fusible.fuser.plan_key import PlanKey
from fusible.kernels import grouped
from fusible.kernels.quantize.glu_backward import (
    Inputs,
    Wanted,
    glu_backward_pieces,
    launch_glu_backward,
    writes_activation,
)
from fusible.kernels.quantize.k_major import (
    RowsToQuantize,
    ScaledMatrix,
    StoredColumns,
    StoredRows,
    launch_quantize,
    quantize_pieces,
)
from fusible.kernels.runtime.launch import TENSOR_TYPES, aligned
from fusible.kernels.sm90.grouped_products import ProductsByRows
from fusible.ops.grouped_fast_path import AccumulatingContexts, GroupedFastPath
from fusible.ops.op import Grads
from fusible.recipes.formats import NumberFormat
from fusible.recipes.tensor import QuantizedTensor


@dataclass(frozen=True)
class _Launches:
    """The launches of a linear, of operands that need no check; its products by rows."""

    forward: ProductsByRows
    dgrad: ProductsByRows
    wgrad: ProductsByRows

    quantize = staticmethod(launch_quantize)
    glu_backward = staticmethod(launch_glu_backward)

    def product(
        self,
        x: StoredRows,
        w: ScaledMatrix,
        ends: Tensor,
        bias: Tensor | None,
        row_scale: Tensor | None,
    ) -> Tensor:
        """``x @ w[e].T + bias[e] * row_scale``."""
        return _product(self.forward, x, w, ends, bias, row_scale)

    def data_grad(self, dy: StoredRows, w: ScaledMatrix, ends: Tensor) -> Tensor:
        """``dy @ w[e].T``, of transposed weights."""
        return _product(self.dgrad, dy, w, ends)

    def weight_grad(self, dy: StoredColumns, x: StoredColumns, ends: Tensor) -> Tensor:
        """``dy.T @ x`` of each group."""
        launches = self.wgrad(dy.data.shape[1])
        scales = _scales_by_reduction(dy.scale, x.scale)
        # Without `out` there is a result.
        return launches.wgrad(dy.data.t(), x.data.t(), ends, operand_scales=scales)  # type: ignore[return-value]


def _product(
    by_rows: ProductsByRows,
    x: StoredRows,
    w: ScaledMatrix,
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    launches, scales = by_rows(x.data.shape[0]), _scales_by_row(x.scale, w.scale)
    address = w.data.data_ptr()
    return launches.forward(x.data, address, ends, bias, row_scale, operand_scales=scales)


def _scales_by_row(x_scale: Tensor, w_scale: Tensor) -> tuple[int, ...]:
    """`scales_by_row`, of those of rows as they are stored."""
    of_blocks = x_scale.stride(0) if x_scale.dim() == 2 else 0
    return x_scale.data_ptr(), w_scale.data_ptr(), 1, of_blocks, *w_scale.stride()


def _scales_by_reduction(dy_scale: Tensor, x_scale: Tensor) -> tuple[int, ...]:
    """`scales_by_reduction`, of scales as they are stored."""
    (dy_block, dy_pitch), (x_block, x_pitch) = [
        scale.stride() if scale.dim() == 2 else (1, 0) for scale in (dy_scale, x_scale)
    ]
    return dy_scale.data_ptr(), x_scale.data_ptr(), dy_pitch, dy_block, 0, x_pitch, x_block


@dataclass(frozen=True)
class _LibraryOps:
    """The gradients of `_Launches`, of operands that must be checked or traced."""

    x_format: NumberFormat
    dy_format: NumberFormat

    quantize = staticmethod(quantize_pieces)
    glu_backward = staticmethod(glu_backward_pieces)

    def data_grad(self, dy: StoredRows, w: ScaledMatrix, ends: Tensor) -> Tensor:
        """``dy @ w[e].T``, of transposed weights."""
        row = dy.operand(self.dy_format)
        return grouped.grouped_mm(row.data, [w.data], ends, x_scale=row.scale, w_scale=w.scale)

    def weight_grad(self, dy: StoredColumns, x: StoredColumns, ends: Tensor) -> Tensor:
        """``dy.T @ x`` of each group."""
        a, b = dy.operand(self.dy_format), x.operand(self.x_format)
        return grouped.grouped_wgrad(a.data, b.data, ends, None, a.scale, b.scale)


class Fp8MLPFastPath(GroupedFastPath):
    """FC1, an activation, FC2."""

    @classmethod
    def _multiplies(cls, plan: Plan, dtype: torch.dtype) -> bool:
        """See the base class; the plan selects FP8 products, under one recipe."""
        return dtype == torch.bfloat16

    @classmethod
    def _products_of(
        cls, plan: Plan, op: Any, device: torch.device, dtype: torch.dtype
    ) -> _Launches | None:
        """See the base class."""
        recipe = plan.recipes[0][0].of_fp8_products
        formats = [recipe.format(role) for role in ("input", "weight", "grad")]
        x, w, dy = [fmt.element.dtype for fmt in formats]
        groups, columns, depth = op.num_groups, op.out_features, op.in_features
        launches = _Launches(
            ProductsByRows(device, x, groups, columns, depth, w),
            ProductsByRows(device, dy, groups, depth, columns, w),
            ProductsByRows(device, dy, groups, columns, depth, x),
        )
        products = launches.forward, launches.dgrad, launches.wgrad
        return launches if all([one.is_supported for one in products]) else None

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
        self._quantizes_act = epilogue_quantizes(recipe, fc1.op, act, trains=self._trains)
        self._saves_act = needs_w2 and not (self._quantizes_act or act.activation_recompute_in_mlp)
        # Otherwise the activation's backward computes it again, and may quantize it.
        self._recomputes_act = needs_w2 and not self._saves_act
        formats = self._dy_format, self._x_format
        self._writes_act = writes_activation(self._glu, fc1.op.out_features, *formats)

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
        """`KMajorOperands` of a linear's weights; stored ones may begin at any address."""
        options = linear.needs, self._recipe, self._dtype, quantize_weights_k_major
        row, column = linear.op.quantized_weights(list(params[linear.weights]), *options)
        return ScaledMatrix(aligned(row.data), row.scale), column

    def forward(self, prepared: Any, *operands: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The output, and what the backward reads."""
        x, split_sizes, params = operands[0], operands[1], operands[self._first_param :]
        scales, row_scale = self._scales_of(operands)
        (fc1, fc2), fmt = self._linears, self._x_format
        launches = fc1.products.forward(x.shape[0])
        ends = launches.ends(split_sizes, x.shape[0])
        pieces = fc1.products.quantize(RowsToQuantize(x, ends), fmt, True, fc1.needs.params[0])
        row, column = _row_and_column(pieces)
        w, dgrad_w1 = self._weights(fc1, params)
        preact, *act = launches.glu(
            row.data,
            w.data.data_ptr(),
            ends,
            scales,
            self._glu,
            fc1.first_bias(params),
            self._trains,
            operand_scales=_scales_by_row(row.scale, w.scale),
            out_format=fmt if self._quantizes_act else None,
        )
        del pieces, row, w  # their memory serves what follows
        of_act: Sequence[Tensor | None] = (None, None)
        if not self._quantizes_act:
            rows = RowsToQuantize(act.pop(), ends)
            act = fc2.products.quantize(rows, fmt, True, self._saves_act)
            of_act = act[2:4]
        w, dgrad_w2 = self._weights(fc2, params)
        bias = fc2.first_bias(params)
        y = fc2.products.product(StoredRows(*act[:2]), w, ends, bias, row_scale)
        weights = [(None, None) if w is None else w[:2] for w in (dgrad_w1, dgrad_w2)]
        saved = *column[:2], *of_act, ends, scales, preact, row_scale, fc2.saved_bias(params)
        return y, (*saved, *weights[0], *weights[1])

    def backward(
        self,
        saved: Sequence[Tensor],
        grad_output: Tensor,
        held: bool,
        contexts: AccumulatingContexts,
    ) -> Grads:
        """The gradients of the operands."""
        x, x_scale, act, act_scale, ends, scales, preact, row_scale, bias2, *weights = saved
        w1, w2 = ScaledMatrix(*weights[:2]), ScaledMatrix(*weights[2:])
        (fc1, fc2), dy, formats = self._linears, grad_output, (self._x_format, self._dy_format)
        # What hooks give back may lie anywhere.
        direct = not held and self._call_fits([((dy,), (dy.shape[0], fc2.op.out_features), 0)])
        library = _LibraryOps(*formats)
        first, second = [of.products if direct else library for of in self._linears]
        source, needs_w2 = RowsToQuantize(dy, ends), fc2.needs.params[0]
        dy_row, dy_column = _row_and_column(second.quantize(source, formats[1], True, needs_w2))
        dact = second.data_grad(dy_row, w2, ends)
        del dy_row  # its memory serves what follows
        dpreact, column, dscales, values, hidden = self._activation_grads(
            second, Inputs(dact, preact, scales, ends)
        )
        del dact
        biases1 = fc1.bias_grads(values, ends)
        del values
        if self._saves_act:
            hidden = StoredColumns(act, act_scale)
        weights2 = self._weight_grads(fc2, second, dy_column, hidden, contexts)
        del dy_column, hidden
        dx = first.data_grad(dpreact, w1, ends) if fc1.needs.input else None
        del dpreact
        weights1 = self._weight_grads(fc1, first, column, StoredColumns(x, x_scale), contexts)
        params1, params2 = (*weights1, *biases1), (*weights2, *fc2.bias_grads(dy, ends, row_scale))
        of_scales = () if scales is None else (dscales,)
        of_bias = () if row_scale is None else fc2.scale_grads(dy, ends, row_scale, bias2)
        return dx, None, *of_scales, None, *of_bias, *params1, *params2

    def _activation_grads(
        self, products: _Launches | _LibraryOps, inputs: Inputs
    ) -> tuple[StoredRows, StoredColumns, Tensor, Tensor | None, StoredColumns]:
        """The pre-activation's gradient for both products, that of the scales, the former in BF16
        if the bias needs it, and the activation if it was not saved.
        """
        fc1, ends = self._linears[0], inputs.ends
        needs_values, needs_w1 = fc1.op.has_bias and fc1.needs.params[-1], fc1.needs.params[0]
        activation = self._recomputes_act and self._writes_act
        wanted = Wanted(activation, fc1.needs.input, needs_w1, needs_values)
        formats = self._dy_format, self._x_format
        *pieces, dscales, values, act, act_scale = products.glu_backward(
            inputs, self._glu, *formats, wanted
        )
        hidden = StoredColumns(act, act_scale)
        if self._recomputes_act and not self._writes_act:
            rows = RowsToQuantize(self._glu.forward(inputs.preact, inputs.scales), ends)
            hidden = _row_and_column(products.quantize(rows, self._x_format, False, True))[1]
        return *_row_and_column(pieces), dscales, values if needs_values else None, hidden

    def _weight_grads(
        self,
        linear: Any,
        products: _Launches | _LibraryOps,
        dy: StoredColumns,
        x: StoredColumns,
        contexts: AccumulatingContexts,
    ) -> Grads:
        """The gradients of a linear's weights."""
        if not linear.needs.params[0]:
            return (None,) * linear.op.num_weights
        operands: Any = dy, x
        if linear.op.accumulates_grads:
            operands = dy.operand(self._dy_format), x.operand(self._x_format)
        return linear.weight_grads(products.weight_grad, *operands, dy.ends, contexts)


def _row_and_column(pieces: Sequence[Tensor]) -> tuple[StoredRows, StoredColumns]:
    return StoredRows(*pieces[:2]), StoredColumns(*pieces[2:])
