"""The interface of an architecture for grouped linears, grouped MLPs and dense linears.

`GroupedLinear`, the fused grouped MLP and, under a recipe, `BasicLinear`, whose rows are one group,
are written once, over a `GroupedKernels`. The class itself runs the library ops of
`fusible.kernels.grouped` (the definition on the CPU, our kernels on SM90, PyTorch's grouped product
or kernels in Triton on other GPUs), and PyTorch's products for dense linears. An architecture whose
kernels read operands in a layout of their own, such as SM100, is a subclass; which one an op gets
is kernel selection (`fusible.ops.kernel_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from fusible.calls import is_traced
from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.fuser.target import Target
from fusible.kernels import grouped
from fusible.kernels.dense import scaled_mm
from fusible.kernels.quantize.k_major import ScaledMatrix, elements_and_scale
from fusible.kernels.sm90.spec import Tile
from fusible.ops.matrices import as_2d, buffer_rows
from fusible.ops.wgrad import WeightGradient, dense_gradient, grouped_gradient
from fusible.recipes.formats import NumberFormat, value_dtype
from fusible.recipes.matrix import OperandData, QuantizedMatrix, Uses
from fusible.recipes.product import backward_operand, operand_values, quantize_operand
from fusible.recipes.quantize_ops import compute_dtype, dequantize_matrix
from fusible.recipes.recipe import Recipe, Role
from fusible.recipes.stored import StoredWeights
from fusible.recipes.tensor import QuantizedTensor


class GroupedOperand(NamedTuple):
    """Rows ``[rows, features]`` of all groups in the kernels' format, opaque to the caller."""

    row: Any
    """For `product`, `glu`, `data_grad` and `dglu`, which reduce along the features."""
    column: Any
    """For `weight_grad`, which reduces along the rows; of an input what is saved."""
    sums: Tensor | None = None
    """FP32 or BF16 ``[E, features]``, the sums of each group's rows, where quantizing made them."""


class Activated(NamedTuple):
    """The outputs of `GroupedKernels.glu`."""

    preact: Tensor | ScaledMatrix
    """``[rows, columns]``, without rows if it is not saved: ``2 * features`` columns of a gated
    activation, else ``features``. Or `quantize_input` of it."""
    output: Any
    """The activation ``[rows, features]``: ``x`` of `GroupedKernels.prepare_rows`, opaque."""


class ActivationGrads(NamedTuple):
    """The outputs of `GroupedKernels.dglu`."""

    preact: Any
    """Gradient ``[rows, columns]``: ``x`` of `GroupedKernels.prepare_rows`, opaque."""
    output: Any | None
    """The activation ``[rows, features]`` as `weight_grad` reads it, if the second linear
    ``lacks_x``."""
    scales: Tensor
    """Gradient of the row scales, ``[rows]``; without rows if there are none."""
    bias: Tensor | None
    """Gradient ``[E, columns]`` of the first linear's bias, if it is needed and fused."""


class LinearCall(NamedTuple):
    """The shared arguments of all products of one linear in a forward, or in a backward."""

    kernels: GroupedKernels
    linear: Any
    ctx: OperationContext
    """Has the recipe, the dtype and which gradients are needed."""
    ends: Any
    """End rows of the groups, an int32 tensor ``[E]``; None for a dense linear by PyTorch."""
    groups: Any
    """`GroupedKernels.groups`."""


class SavedLinear(NamedTuple):
    """What a linear saved, as its backward reads it."""

    call: LinearCall
    """The call of the backward."""
    x: Any
    """The input, as the weight gradient reads it; None where it was not saved."""
    row_scale: Tensor | None
    """The factor of the bias of each row, ``[rows]``."""
    weights: Any
    """The weights in the form that the data gradient reads."""

    @property
    def lacks_x(self) -> bool:
        """Whether the weight gradient needs the input, which was not saved."""
        return self.x is None and self.call.ctx.needs.params[0]


class GroupedKernels:
    """Grouped products of one architecture, over rows ``[rows, features]`` sorted by group.

    None of the methods may synchronise with the device. An argument or result of type ``Any`` is
    opaque to the caller, which only passes it to the methods named here: groups, rows, weights and
    activations in the format of these kernels. A subclass for other formats overrides the methods
    that make and read them. The products here take FP8 operands too (`ScaledMatrix`): weights as
    one, transposed for the data gradient.
    """

    saves = ""
    """The saved tensors of a linear with these kernels, for ``explain``; its own text if empty."""

    def multiplies(self, recipe: Recipe, *ops: Any) -> str:
        """The operands of the products under a recipe, for ``explain``.

        ``ops`` are a linear, or the three of a grouped MLP.
        """
        return "values of quantized operands, in BF16 on CUDA"

    def describe_tiles(
        self,
        target: Target,
        op: Any,
        ctx: OperationContext,
        rows: int,
        act: Any = None,
        dact: Any = None,
    ) -> Sequence[Tile]:
        """The tiles of a linear's forward, data gradient and weight gradient, for ``explain``.

        Of the linear ``op``, for ``rows`` rows, at least one; empty where they are not known.
        ``ctx`` is that of a forward. `glu` has ``act`` in its epilogue, `dglu` the backward of
        ``dact``.
        """
        return ()

    saves_input = True
    """Whether `prepare_rows` in high precision gives the input itself, ``[rows, features]``."""
    gathers = False
    """Whether `prepare_rows` takes `GatheredRows`."""
    quantizes_own_inputs = False
    """Whether ops before and after should leave it to `prepare_rows` to quantize."""
    reads_quantized_preact = False
    """Whether `dglu` takes a pre-activation in FP8; else it gets the values."""

    def rows_format(self, ctx: OperationContext, dtype: torch.dtype) -> NumberFormat | None:
        """The format in which ``Dispatch`` may quantize rows of ``dtype``, if no backward follows.

        `prepare_rows` then takes `QuantizedRows`. None if it may not.
        """
        return None

    # --- operands --------------------------------------------------------------------------------

    def groups(self, linear: Any, ends: Tensor, num_rows: int) -> Any:
        """`LinearCall.groups` for rows ``[num_rows, features]``: what these kernels read of the
        groups besides ``ends``, here nothing. Saved for the backward.
        """
        return ()

    def single_group(self, x: Any) -> Tensor | None:
        """``ends`` of a dense linear: all rows of ``x``. Here None, for PyTorch's products."""
        return None

    def prepare_rows(
        self,
        call: LinearCall,
        x: Any,
        role: Role,
        uses: Uses,
        row_scale: Tensor | None = None,
    ) -> GroupedOperand:
        """``x`` as the operand ``role``, quantized by group if the recipe says so.

        Needed are `GroupedOperand.row` if ``uses.row``, and `GroupedOperand.column` if
        ``uses.column``.

        ``x`` is ``[rows, features]`` in ``ctx.dtype``, or quantized, or an output of `glu` or
        `dglu`, or `GatheredRows`, or without a backward `QuantizedRows`. ``row_scale`` ``[rows]``
        multiplies the rows of a gradient in the sums for the bias.
        """
        ctx = call.ctx
        if not ctx.quantizes:
            return GroupedOperand(x, x)
        read = Uses(row_values=uses.row, column_values=uses.column)
        if role == "input":  # whose column-wise form is saved for the backward, quantized
            read = Uses(row_values=uses.row, column=uses.column)
        quantized = quantize_operand(x, ctx.recipe, role, read, call.ends)
        row = operand_values(quantized, compute_dtype(x.device)) if uses.row else None
        if ctx.recipe.backward_override is not None and row is not None:
            return GroupedOperand(row, backward_operand(x, row, ctx.recipe, ctx.dtype))
        return GroupedOperand(row, quantized.data_for(columnwise=True))

    def weights(self, call: LinearCall) -> tuple[Any, Any]:
        """The weights for `product` and `glu`, and for `data_grad` and `dglu`, which are saved.

        Here in a list, E of ``[out, in]`` or one ``[E, out, in]``.
        """
        linear, ctx = call.linear, call.ctx
        if not ctx.quantizes:
            if not ctx.requires_grad and (stored := linear.stored_weights(ctx, ctx.dtype)):
                return stored, ()
            plain = linear.weights_in(ctx, ctx.dtype)
            return plain, plain
        quantized, override = linear.weight_operands(ctx), ctx.recipe.backward_override
        keeps_stored = not ctx.requires_grad and override is None and call.ends is not None
        if keeps_stored and all([w.row is not None and w.row_values is None for w in quantized]):
            return [w.row for w in quantized], ()
        compute = compute_dtype(ctx.parameters[0].device)
        matrices = [operand_values(w, compute) for w in quantized]
        if override is None:
            return matrices, [w.data_for(columnwise=True) for w in quantized]
        if override == "high_precision":
            return matrices, linear.weights_in(ctx, ctx.dtype)
        return matrices, [cast(w, ctx.dtype) for w in matrices]

    # --- products --------------------------------------------------------------------------------

    def product(
        self,
        call: LinearCall,
        x: Any,
        weights: Any,
        row_scale: Tensor | None,
        output: Tensor | None,
    ) -> Tensor:
        """``x @ w[e].T + bias[e] * row_scale``, ``[rows, out_features]`` in the context's dtype.

        ``x`` is `GroupedOperand.row`, ``row_scale`` ``[rows]`` or None; the result is written to
        ``output`` ``[..., out_features]`` if that is given.
        """
        return _matmul(call, x, weights, output, row_scale)

    def data_grad(self, call: LinearCall, dy: Any, weights: Any, output: Tensor | None) -> Tensor:
        """``dy @ w[e]``, ``[rows, in_features]`` in the context's dtype.

        ``dy`` is `GroupedOperand.row`; the result is written to ``output`` ``[..., in_features]``
        if that is given.
        """
        return _matmul(call, dy, _values_of_weights(call, weights), output, data_grad=True)

    def weight_grad(self, call: LinearCall, dy: Any, x: Any) -> WeightGradient:
        """``dy[rows of e].T @ x[rows of e]`` for each group e, not computed yet.

        Called only where the weights need gradients. ``dy`` is `GroupedOperand.column`, ``x`` that
        of an input; each gradient ``[out, in]``.
        """
        if call.ctx.quantizes:
            dy, x = _values_for_products(dy), _values_for_products(x)
        if call.ends is None:
            return dense_gradient(dy, x)
        return grouped_gradient(dy, x, call.ends, call.ctx.column_major)

    # --- the activation between two linears ------------------------------------------------------

    def saves_activation(self, ctx: OperationContext, act: Any) -> bool:
        """Whether the second linear saves the activation for its weight gradient.

        If `glu` gives it for that. `dglu` recomputes what is not saved.
        """
        return ctx.quantizes and not act.activation_recompute_in_mlp

    def preact_ends(self, call: LinearCall) -> Tensor:
        """End rows of the groups in the pre-activation of `glu`, int32 ``[E]``."""
        return call.ends

    def row_scales(self, call: LinearCall, scales: Tensor | None) -> Tensor | None:
        """Row scales of the activation, or None, as `glu` and `dglu` take and ops save them."""
        if scales is None or (scales.dim() == 1 and scales.is_contiguous()):
            return scales
        return scales.reshape(-1).contiguous()

    def glu(
        self,
        call: LinearCall,
        act: Any,
        x: Any,
        weights: Any,
        scales: Tensor | None,
        save_preact: bool,
    ) -> Activated:
        """``act(x @ w[e].T + bias[e]) * scales``, ``[rows, features]``.

        ``x`` is `GroupedOperand.row`, ``scales`` of `row_scales`, or None. The pre-activation has
        no rows without ``save_preact``.
        """
        if _are_stored(weights) and save_preact:
            weights = [dequantize_matrix(w, x.dtype) for w in weights]
        ctx, (x, w, x_scale, w_scale) = call.ctx, _split_scales(x, weights)
        bias = call.linear.stacked_bias(ctx, value_dtype(x.dtype))
        if _are_stored(w):
            stored = StoredWeights.of(w), w[0].format
            out = grouped.grouped_glu_stored(x, *stored, call.ends, scales, act.glu, bias)
            preact = x.new_empty(0, w[0].shape[-2])
        else:
            options = scales, act.glu, bias, save_preact, x_scale, w_scale
            preact, out = grouped.grouped_glu(x, w, call.ends, *options, zero_tail=ctx.zero_tail)
        return Activated(preact, cast(out, ctx.dtype))

    def dglu(
        self,
        first: LinearCall,
        second: SavedLinear,
        act: Any,
        dy: Any,
        preact: Any,
        scales: Tensor | None,
        overwrite: bool,
    ) -> ActivationGrads:
        """The second linear's data gradient, and the activation's backward.

        ``dy`` ``[rows, out_features]`` is `GroupedOperand.row`, ``preact`` ``[rows, columns]``, in
        FP8 a `ScaledMatrix` (`reads_quantized_preact`), and ``scales`` those of `glu`. The backward
        of the ``first`` linear will read the gradient of ``preact``. ``overwrite``: ``preact`` may
        be written to.
        """
        call, ctx = second.call, second.call.ctx
        of_activation, zero_tail = (preact, scales, act.glu), ctx.zero_tail
        weights = _values_of_weights(call, second.weights)
        dpreact, recomputed, dscales = grouped.grouped_dglu(
            dy, weights, call.ends, *of_activation, overwrite=overwrite, zero_tail=zero_tail
        )
        output: Any = recomputed if second.lacks_x else None
        if output is not None and ctx.quantizes:
            rows = cast(recomputed, ctx.dtype)
            output = self.prepare_rows(call, rows, "input", Uses(column=True)).column
        return ActivationGrads(cast(dpreact, ctx.dtype), output, dscales, None)


DEFAULT_KERNELS = GroupedKernels()
"""The default: kernels of the library ops, where kernel selection finds no others."""


def _values_of_weights(call: LinearCall, weights: Any) -> Any:
    """The weights that a product of the backward reads, from those that were saved."""
    if not call.ctx.quantizes or isinstance(weights, ScaledMatrix):
        return weights
    return [_values_for_products(w) for w in weights]


def _values_for_products(data: OperandData | None) -> Tensor | None:
    """The values that products of quantized operands read of one, in `compute_dtype`."""
    if isinstance(data, QuantizedMatrix):
        return dequantize_matrix(data, compute_dtype(data.data.device))
    return None if data is None else data.to(compute_dtype(data.device))


def kernels_of(ctx: OperationContext) -> GroupedKernels:
    """The kernels that kernel selection found for an op."""
    return DEFAULT_KERNELS if ctx.kernels is None else ctx.kernels


def _matmul(
    call: LinearCall,
    x: Tensor | ScaledMatrix,
    weights: Any,
    output: Tensor | None,
    row_scale: Tensor | None = None,
    data_grad: bool = False,
) -> Tensor:
    """A product with the bias, or, for ``data_grad``, with the weights transposed.

    ``[rows, features]``, in ``output`` ``[..., features]`` if it is given; dense if ``call.ends``
    is None, or by FP8 weights that are one matrix.
    """
    ctx, ends, out = call.ctx, call.ends, buffer_rows(output)
    x, w, x_scale, w_scale = _split_scales(x, weights)
    bias = None if data_grad else call.linear.stacked_bias(ctx, value_dtype(x.dtype))
    if _are_stored(w):
        y = grouped.grouped_mm_stored(x, StoredWeights.of(w), w[0].format, ends, bias, row_scale)
    elif ends is None:
        y = as_2d(x @ (w[0] if data_grad else w[0].t()))
    elif x_scale is not None and w_scale is not None and w_scale.dim() == 2:
        y = scaled_mm(x, w[0], ends, x_scale, w_scale)
    else:
        transpose_w = data_grad and w_scale is None  # FP8 ones are transposed already
        options = bias, row_scale, transpose_w, out, x_scale, w_scale
        # Weights that were just made of parameters are not read ahead. One matrix for all groups
        # begins where the first parameter does only if it is their own memory.
        pairs = zip(w, ctx.parameters, strict=False) if ctx.reads_ahead else ()
        ahead = ctx.reads_ahead and all([is_memory_of(*pair) for pair in pairs])
        tail = ctx.zero_tail
        y = grouped.grouped_mm(x, w, ends, *options, zero_tail=tail, reads_ahead=ahead)
        return cast(y, ctx.dtype)
    y = cast(y, ctx.dtype)
    return y if out is None else out.copy_(y)


def is_memory_of(weight: Tensor, parameter: Tensor) -> bool:
    """Whether an operand is a parameter itself, or the memory in which a quantized one is stored.

    False while tracing, where memory is unknown, unless it is the parameter itself.
    """
    if weight is parameter:
        return True
    if is_traced() or not isinstance(parameter, QuantizedTensor):
        return False
    return weight.data_ptr() in [piece.data_ptr() for piece in parameter.pieces().values()]


def _are_stored(weights: Any) -> TypeGuard[list[QuantizedMatrix]]:
    """Whether weights are given as they are stored."""
    return isinstance(weights, list) and isinstance(weights[0], QuantizedMatrix)


def _split_scales(
    x: Tensor | ScaledMatrix, weights: Any
) -> tuple[Tensor, Any, Tensor | None, Tensor | None]:
    """Rows and weights of a product, and the scales of both, which FP8 ones have."""
    x, x_scale = elements_and_scale(x)
    if isinstance(weights, ScaledMatrix):
        return x, [weights.data], x_scale, weights.scale
    return x, weights, x_scale, None
