"""Grouped linears on Hopper as one autograd node that calls the kernels: the least host time.

This path is for calls that need nothing but the kernels: no check, copy or cast.
`GroupedFastPath.of` decides by the plan of one op, once, and `GroupedFastPath.prepared` by the
tensors of each call. All other calls run by the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor

from fusible.calls import in_data_parallel, is_intercepted
from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.fuser.plan import GradNeeds, Plan
from fusible.fuser.plan_key import PlanKey
from fusible.fuser.saved_rows import active_pool
from fusible.fuser.tracing import keeps_graph
from fusible.kernels import grouped
from fusible.kernels.glu import Glu
from fusible.kernels.grouped.groups import checks_enabled
from fusible.kernels.grouped.vectors import launch_group_ends
from fusible.kernels.runtime.launch import TENSOR_TYPES
from fusible.kernels.sm90.grouped_products import DenseOperand, can_read_in_place, products_by_rows
from fusible.kernels.sm90.operands import is_row_scale
from fusible.ops.op import Grads
from fusible.ops.scaled_activation import in_pieces
from fusible.ops.sm90_kernels import SM90
from fusible.ops.weights import WeightedOperation
from fusible.ops.wgrad import grouped_gradient

AccumulatingContexts = Mapping[int, OperationContext]
"""Contexts of the ops that ``accumulates_grads``, by index."""


class _LinearOfPlan:
    """A linear of the plan: its products, and where its parameters are."""

    def __init__(
        self,
        index: int,
        op: Any,
        needs: GradNeeds,
        products: Any,
        size: int,
        first_param: int,
        first_weight: int,
    ) -> None:
        self.index, self.op, self.needs, self.products = index, op, needs, products
        _, rows, depth = shape = op.num_groups, op.out_features, op.in_features
        self.weights = slice(first_param, first_param + op.num_weights)
        self.saved_weights = slice(first_weight, first_weight + op.num_weights)
        self.biases = slice(self.weights.stop, first_param + len(op.own_parameter_names()))
        self.weight_layout: Any = (
            (shape, 0) if op.single_grouped_weight else (shape[1:], rows * depth * size)
        )
        self.bias_layout: Any = (
            (shape[:2], 0) if op.single_grouped_bias else (shape[1:2], rows * size)
        )

    def bias_operands(self, params: Sequence[Tensor]) -> list[DenseOperand]:
        """The biases as one operand, if there are any."""
        return [(params[self.biases], *self.bias_layout)] if self.op.has_bias else []

    def first_bias(self, params: Sequence[Tensor]) -> Tensor | None:
        """The first bias, from whose address on the kernels read all of them; None without."""
        return params[self.biases.start] if self.op.has_bias else None

    def weights_to_save(self, params: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The weights, if its backward reads them."""
        return params[self.weights] if self.needs.input else (None,) * self.op.num_weights

    def saved_bias(self, params: Sequence[Tensor]) -> Tensor | None:
        """The biases ``[groups, rows]`` for `scale_grads`, None if nothing needs them."""
        if not (self.op.scale_bias and self.needs.extra_inputs[1]):
            return None
        biases = params[self.biases]
        return biases[0] if self.op.single_grouped_bias else torch.stack(tuple(biases))

    def scale_grads(
        self, dy: Tensor, ends: Tensor, row_scale: Tensor, bias: Tensor | None
    ) -> Grads:
        """The gradient of the scales of its bias; ``bias`` is None if it is not needed."""
        if bias is None:
            return (None,)
        return (cast(grouped.grouped_dots(dy, bias, ends), row_scale.dtype),)

    def weight_grads(
        self,
        wgrad: Callable[..., Any],
        dy: Any,
        x: Any,
        ends: Tensor,
        contexts: AccumulatingContexts,
    ) -> Grads:
        """The gradients of the weights, by ``wgrad`` if they go to autograd."""
        op = self.op
        if op.accumulates_grads:
            return op.weight_grads(contexts[self.index], grouped_gradient(dy, x, ends, False))
        if not self.needs.params[0]:
            return (None,) * op.num_weights
        return op.as_weight_grads(wgrad(dy, x, ends))

    def bias_grads(self, dy: Tensor | None, ends: Tensor, row_scale: Tensor | None = None) -> Grads:
        """The gradients of the biases; ``dy`` may be None if they are not needed."""
        op = self.op
        if not op.has_bias:
            return ()
        if dy is None or not self.needs.params[-1]:
            return op.as_bias_grads(None)
        return op.as_bias_grads(grouped.grouped_sum(dy, ends, row_scale))


def _extra_inputs(ops: Sequence[Any]) -> list[str]:
    """The names of the extra inputs of ops."""
    return [op.extra_input_name(slot) for op in ops for slot in range(op.num_extra_inputs)]


_LIBRARY_PRODUCTS = SimpleNamespace(
    forward=grouped.grouped_mm,
    dglu=grouped.grouped_dglu,
    wgrad=grouped.grouped_wgrad,
)
"""The products of a backward by library ops, for operands that must be checked or traced."""


class GroupedFastPath:
    """Base of the fast paths; see `fusible.fuser.schedule.FastPath`.

    The operands are ``x``, ``split_sizes``, the other extra inputs of ``ops``, and parameters.
    ``products`` are those of each linear among the ops, by rows. A linear with an activation behind
    it has no scaled bias.
    """

    can_quantize_preact = False
    """Whether it can save the pre-activation in FP8."""
    _act: Any = None
    _glu: Glu
    _scaled = False

    @classmethod
    def of(cls, plan: Plan, key: PlanKey, *ops: Any) -> Self | None:
        """The fast path of a plan of ``ops``; None if its calls may need more than the kernels."""
        (dtype, device, _), *extra = key.inputs
        linears: list[Any] = [op for op in ops if isinstance(op, WeightedOperation)]
        acts = [op for op in ops if op not in linears]
        products = [cls._products_of(plan, op, device, dtype) for op in linears]
        fits = (
            plan.autocast_dtype in (None, dtype)
            and len({needs.requires_grad for needs in plan.grad}) == 1
            and None not in products
            and all([on == device for _, on, _ in key.inputs])
            and all([of_param == dtype for of_param in key.param_dtypes])
            and all([
                is_row_scale(of_input)
                if name == "scales"
                else of_input in (torch.int64, torch.int32)
                for name, (of_input, *_) in zip(_extra_inputs(ops), extra, strict=True)
            ])
            and all([op.split_alignment == 1 for op in linears])
            and (
                cls.can_quantize_preact
                or not plan.grad[-1].requires_grad
                or not any([op.cache_quantized_input for op in acts])
            )
        )  # fmt: skip
        return cls(plan, key, ops, products) if fits else None

    @classmethod
    def _products_of(
        cls, plan: Plan, op: Any, device: torch.device, dtype: torch.dtype
    ) -> Any | None:
        """The products of a linear, by rows.

        None if other kernels are selected, or these do not support its features.
        """
        others = [row for row in plan.kernel_rows if row and row.kernels is not SM90]
        if plan.recipe is not None or others:
            return None
        shape = op.num_groups, op.out_features, op.in_features
        return products_by_rows(device, dtype, *shape)

    def __init__(
        self, plan: Plan, key: PlanKey, ops: Sequence[Any], products: Sequence[Any]
    ) -> None:
        self._dtype, self._device, _ = key.inputs[0]
        self._linears: list[_LinearOfPlan] = []
        first_param, first_weight, size = 0, 0, self._dtype.itemsize
        for i, (op, of_op) in enumerate(zip(ops, plan.grad, strict=True)):
            if not isinstance(op, WeightedOperation):
                self._act, self._glu, self._scaled = op, op.glu, op.num_extra_inputs > 0
                continue
            of_linear = products[len(self._linears)]
            self._linears.append(
                _LinearOfPlan(i, op, of_op, of_linear, size, first_param, first_weight)
            )
            first_param += len(op.own_parameter_names())
            first_weight += op.num_weights
        names = _extra_inputs(ops)
        self._first_param = 1 + len(names)
        self._scales = [i for i, name in enumerate(names, 1) if name == "scales"]
        self._row_scale = len(names) if ops[-1].num_extra_inputs > 1 else None
        self._groups, self._features = ops[0].num_groups, ops[0].in_features
        self._delays = any([linear.op.delay_wgrad_compute for linear in self._linears])

    def _call_fits(
        self, dense: Sequence[DenseOperand], vectors: Iterable[tuple[Tensor, int]] = ()
    ) -> bool:
        """Whether kernels can read all operands where they are, and nothing else sees the call.

        ``vectors`` are tensors of any dtype with the number of their elements.
        """
        if is_intercepted() or checks_enabled() or active_pool() is not None:
            return False
        device = self._device
        if not can_read_in_place(dense, self._dtype, device):
            return False
        for t, size in vectors:
            if not (
                type(t) in TENSOR_TYPES
                and t.shape == (size,)
                and t.is_contiguous()
                and t.device == device
            ):
                return False
        return True

    def _scales_of(self, operands: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """The row scales of the activation, and those of the last linear's bias."""
        scales = operands[2] if self._scaled else None
        return scales, operands[self._row_scale] if self._row_scale else None

    def _inputs_fit(self, operands: Sequence[Tensor], dense: Sequence[DenseOperand]) -> bool:
        """`_call_fits`, of the inputs of a forward and other operands."""
        x = operands[0]
        if x.dim() != 2 or x.shape[0] == 0 or (self._delays and in_data_parallel()):
            return False
        rows = x.shape[0]
        vectors = [(operands[1], self._groups), *[(operands[i], rows) for i in self._scales]]
        return self._call_fits([((x,), (rows, self._features), 0), *dense], vectors)

    def prepared(self, *operands: Tensor) -> Any:
        """The products, weights and biases that run these operands, or None."""
        params = operands[self._first_param :]
        dense: list[DenseOperand] = []
        for linear in self._linears:
            dense += (params[linear.weights], *linear.weight_layout), *linear.bias_operands(params)
        if not self._inputs_fit(operands, dense):
            return None
        rows = operands[0].shape[0]
        return [
            (
                linear.products(rows),
                params[linear.weights.start].data_ptr(),
                linear.first_bias(params),
            )
            for linear in self._linears
        ]

    def _backward_products(
        self, dy: Tensor, matrices: Sequence[tuple[Tensor | None, int]], weights: Sequence[Any]
    ) -> Sequence[tuple[Any, Any]]:
        """For each linear, the products of a backward, and the weight in their form.

        The rows of ``matrices`` each have so many features. Matrices and weights that were not
        saved are None.
        """
        rows = dy.shape[0]
        dense: list[DenseOperand] = [
            ((t,), (rows, features), 0) for t, features in matrices if t is not None
        ]
        of_linears = [weights[linear.saved_weights] for linear in self._linears]
        for linear, own in zip(self._linears, of_linears, strict=True):
            if own[0] is not None:
                dense.append((own, *linear.weight_layout))
        if not self._call_fits(dense):
            return [(_LIBRARY_PRODUCTS, own) for own in of_linears]
        return [
            (linear.products(rows), 0 if own[0] is None else own[0].data_ptr())
            for linear, own in zip(self._linears, of_linears, strict=True)
        ]

    def forward(self, prepared: Any, *operands: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The output, and what the backward reads."""
        (products, w, bias), *second = prepared
        x, split_sizes, params = operands[0], operands[1], operands[self._first_param :]
        scales, row_scale = self._scales_of(operands)
        first, last, preact = self._linears[0], self._linears[-1], None
        ends = launch_group_ends(split_sizes, x.shape[0])
        if self._act is None:
            y = products.forward(x, w, ends, bias, row_scale)
        else:
            save_preact = last.needs.requires_grad
            preact, y, _ = products.glu(x, w, ends, scales, self._glu, bias, save_preact)
        for products, w, bias in second:
            y = products.forward(y, w, ends, bias, row_scale, reads_ahead=True)
        x_to_save = x if first.needs.params[0] else None
        saved = x_to_save, ends, scales, preact, row_scale, last.saved_bias(params)
        weights = [w for linear in self._linears for w in linear.weights_to_save(params)]
        return y, (*saved, *weights)


class LinearFastPath(GroupedFastPath):
    """One ``GroupedLinear``, with or without an activation behind it."""

    def backward(
        self,
        saved: Sequence[Tensor],
        grad_output: Tensor,
        held: bool,
        contexts: AccumulatingContexts,
    ) -> Grads:
        """The gradients of the operands."""
        x, ends, scales, preact, row_scale, bias, *weights = saved
        (linear,), dy = self._linears, grad_output
        of_scales: Grads = ()
        if scales is not None:
            dy, *of_scales = in_pieces(self._act.grads, dy, preact, scales)
        elif self._act is not None:
            dy, _ = self._act.grads(dy, preact)
        rows = (dy, linear.op.out_features), (x, self._features)
        ((products, w),) = self._backward_products(dy, rows, weights)
        dx = products.forward(dy, w, ends, transpose_w=True) if linear.needs.input else None
        if row_scale is not None:
            of_scales = linear.scale_grads(dy, ends, row_scale, bias)
        weight_grads = linear.weight_grads(products.wgrad, dy, x, ends, contexts)
        return dx, None, *of_scales, *weight_grads, *linear.bias_grads(dy, ends, row_scale)


class MLPFastPath(GroupedFastPath):
    """FC1, an activation, FC2."""

    def backward(
        self,
        saved: Sequence[Tensor],
        grad_output: Tensor,
        held: bool,
        contexts: AccumulatingContexts,
    ) -> Grads:
        """The gradients of the operands."""
        x, ends, scales, preact, row_scale, bias2, *weights = saved
        (fc1, fc2), dy = self._linears, grad_output
        rows = (dy, fc2.op.out_features), (x, self._features), (preact, fc1.op.out_features)
        (first, w1), (second, w2) = self._backward_products(dy, rows, weights)
        dpreact, hidden, dscales = second.dglu(
            dy, w2, ends, preact, scales, self._glu, overwrite=not (held or keeps_graph())
        )
        weights2 = fc2.weight_grads(second.wgrad, dy, hidden, ends, contexts)
        del hidden  # its memory serves what follows
        dx = first.forward(dpreact, w1, ends, transpose_w=True) if fc1.needs.input else None
        params1 = (
            *fc1.weight_grads(first.wgrad, dpreact, x, ends, contexts),
            *fc1.bias_grads(dpreact, ends),
        )
        params2 = *weights2, *fc2.bias_grads(dy, ends, row_scale)
        of_scales = () if scales is None else (dscales,)
        of_bias = () if row_scale is None else fc2.scale_grads(dy, ends, row_scale, bias2)
        return dx, None, *of_scales, None, *of_bias, *params1, *params2
