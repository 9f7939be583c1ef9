"""A grouped MLP by FP8 products on Hopper as one autograd node: see `ops.grouped_fast_path`.

The launches are those of `sm90_fp8_kernels`, in the same order. Products take the operands that
its quantizers have made, which need no check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.fused.sm90_fp8_kernels import epilogue_quantizes, quantize_weights_k_major
from fusible.fuser.plan import Plan
from fusible.fuser.plan_key import PlanKey
from fusible.kernels import grouped
from fusible.kernels.quantize.glu_backward import (
    GluGradients,
    quantize_glu_backward,
    writes_activation,
)
from fusible.kernels.quantize.k_major import (
    KMajorOperands,
    ScaledMatrix,
    column_to_save,
    quantize_k_major,
    saved_column,
)
from fusible.kernels.runtime.launch import TENSOR_TYPES, aligned
from fusible.kernels.sm90.grouped_products import (
    ProductsByRows,
    scales_by_reduction,
    scales_by_row,
)
from fusible.ops.grouped_fast_path import AccumulatingContexts, GroupedFastPath
from fusible.ops.op import Grads
from fusible.recipes.tensor import QuantizedTensor


class _Launches(NamedTuple):
    """The products of a linear, by rows, of operands that need no check."""

    forward: ProductsByRows
    dgrad: ProductsByRows
    wgrad: ProductsByRows

    def product(
        self,
        x: ScaledMatrix | None,
        w: ScaledMatrix,
        ends: Tensor,
        bias: Tensor | None,
        row_scale: Tensor | None,
    ) -> Tensor:
        """``x @ w[e].T + bias[e] * row_scale``."""
        return _product(self.forward, x, w, ends, bias, row_scale)

    def data_grad(self, dy: ScaledMatrix | None, w: ScaledMatrix, ends: Tensor) -> Tensor:
        """``dy @ w[e].T``, of transposed weights."""
        return _product(self.dgrad, dy, w, ends)

    def weight_grad(self, dy: ScaledMatrix, x: ScaledMatrix, ends: Tensor) -> Tensor:
        """``dy.T @ x`` of each group."""
        launches, scales = self.wgrad(dy.data.shape[0]), scales_by_reduction(dy.scale, x.scale)
        # Without `out` there is a result.
        return launches.wgrad(dy.data, x.data, ends, operand_scales=scales)  # type: ignore[return-value]


def _product(
    by_rows: ProductsByRows,
    x: ScaledMatrix | None,
    w: ScaledMatrix,
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    assert x is not None
    launches, scales = by_rows(x.data.shape[0]), scales_by_row(x.scale, w.scale)
    address = w.data.data_ptr()
    return launches.forward(x.data, address, ends, bias, row_scale, operand_scales=scales)


class _LibraryOps:
    """The gradients of `_Launches`, of operands that must be checked or traced."""

    @staticmethod
    def data_grad(dy: ScaledMatrix | None, w: ScaledMatrix, ends: Tensor) -> Tensor:
        """``dy @ w[e].T``, of transposed weights."""
        assert dy is not None
        return grouped.grouped_mm(dy.data, [w.data], ends, x_scale=dy.scale, w_scale=w.scale)

    @staticmethod
    def weight_grad(dy: ScaledMatrix, x: ScaledMatrix, ends: Tensor) -> Tensor:
        """``dy.T @ x`` of each group."""
        return grouped.grouped_wgrad(dy.data, x.data, ends, None, dy.scale, x.scale)


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
        return launches if all([one.is_supported for one in launches]) else None

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
        fc1, fc2 = self._linears
        launches = fc1.products.forward(x.shape[0])
        ends = launches.ends(split_sizes, x.shape[0])
        row, column = self._quantized(x, ends, columnwise=fc1.needs.params[0])
        assert row is not None
        w, dgrad_w1 = self._weights(fc1, params)
        preact, act, *act_scale = launches.glu(
            row.data,
            w.data.data_ptr(),
            ends,
            scales,
            self._glu,
            fc1.first_bias(params),
            self._trains,
            operand_scales=scales_by_row(row.scale, w.scale),
            out_format=self._x_format if self._quantizes_act else None,
        )
        del row, w  # their memory serves what follows
        if self._quantizes_act:
            act_row, act_column = KMajorOperands(ScaledMatrix(act, act_scale[0].t()), None)
        else:
            act_row, act_column = self._quantized(act, ends, columnwise=self._saves_act)
        del act
        w, dgrad_w2 = self._weights(fc2, params)
        y = fc2.products.product(act_row, w, ends, fc2.first_bias(params), row_scale)
        columns = *column_to_save(column), *column_to_save(act_column)
        weights = [(None, None) if w is None else w[:2] for w in (dgrad_w1, dgrad_w2)]
        saved = *columns, ends, scales, preact, row_scale, fc2.saved_bias(params)
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
        (fc1, fc2), dy = self._linears, grad_output
        # What hooks give back may lie anywhere.
        direct = not held and self._call_fits(())
        first, second = [of.products if direct else _LibraryOps for of in self._linears]
        dy_row, dy_column = quantize_k_major(
            dy, self._dy_format, rowwise=True, columnwise=fc2.needs.params[0], ends=ends
        )
        dact = second.data_grad(dy_row, w2, ends)
        del dy_row  # its memory serves what follows
        operands, dscales, values, hidden = self._activation_grads(dact, preact, scales, ends)
        (dpreact, dpreact_column), biases1 = operands, fc1.bias_grads(values, ends)
        del dact, operands, values
        if self._saves_act:
            hidden = saved_column(act, act_scale)
        weights2 = _weight_grads(fc2, second, dy_column, hidden, contexts)
        del dy_column, hidden
        dx = first.data_grad(dpreact, w1, ends) if fc1.needs.input else None
        del dpreact
        x_column = saved_column(x, x_scale)
        weights1 = _weight_grads(fc1, first, dpreact_column, x_column, contexts)
        params1, params2 = (*weights1, *biases1), (*weights2, *fc2.bias_grads(dy, ends, row_scale))
        of_scales = () if scales is None else (dscales,)
        of_bias = () if row_scale is None else fc2.scale_grads(dy, ends, row_scale, bias2)
        return dx, None, *of_scales, None, *of_bias, *params1, *params2

    def _activation_grads(
        self, dact: Tensor, preact: Tensor, scales: Tensor | None, ends: Tensor
    ) -> GluGradients:
        """The backward of the activation, with the activation itself if it was not saved."""
        fc1 = self._linears[0]
        found = quantize_glu_backward(
            dact,
            preact,
            scales,
            ends,
            self._glu,
            self._dy_format,
            rowwise=fc1.needs.input,
            columnwise=fc1.needs.params[0],
            values=fc1.op.has_bias and fc1.needs.params[-1],
            act_format=self._x_format if self._recomputes_act and self._writes_act else None,
        )
        if self._recomputes_act and found.activation is None:
            act = self._glu.forward(preact, scales)
            column = self._quantized(act, ends, rowwise=False, columnwise=True).column
            found = found._replace(activation=column)
        return found

    def _quantized(
        self, x: Tensor, ends: Tensor, *, rowwise: bool = True, columnwise: bool
    ) -> KMajorOperands:
        """An input of a linear for its products."""
        fmt = self._x_format
        return quantize_k_major(x, fmt, rowwise=rowwise, columnwise=columnwise, ends=ends)


def _weight_grads(
    linear: Any,
    products: Any,
    dy: ScaledMatrix | None,
    x: ScaledMatrix | None,
    contexts: AccumulatingContexts,
) -> Grads:
    """The gradients of a linear's weights; the operands are None if they are not needed."""
    if dy is None or x is None:
        return (None,) * linear.op.num_weights
    return linear.weight_grads(products.weight_grad, dy, x, dy.ends, contexts)
