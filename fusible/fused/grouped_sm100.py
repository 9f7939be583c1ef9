"""Grouped linears and grouped MLPs on Blackwell, by the grouped kernels of cuDNN's front end.

BF16, MXFP8 and NVFP4 share one structure: rows are quantized where the recipe says so and brought
to their places among groups of whole 256 rows (``kernels.sm100.padding``), kernels read what other
kernels wrote, and the last product's rows are gathered back. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.fused.grouped_mlp import GROUPED_MLP, ScaledGLU
from fusible.fused.packages import CUDNN, CUTLASS, DRIVER
from fusible.fuser.conditions import at_most, equal, multiple_of, one_of, this, where
from fusible.fuser.context import OperationContext
from fusible.fuser.rules import rule
from fusible.kernels import sm100
from fusible.kernels.runtime.launch import aligned
from fusible.kernels.sm100 import limits
from fusible.ops import FusedOperation, GroupedLinear
from fusible.ops.checks import check_row_scales
from fusible.ops.op import Grads
from fusible.ops.rows import as_rows, matrix, with_rows_of
from fusible.ops.weights import encode_weights, one_weight
from fusible.ops.wgrad import WeightGradient, add_or_copy
from fusible.recipes.matrix import SAVED, Form, Operand, restored_form, saved_form
from fusible.recipes.product import (
    Product,
    encode_operand,
    is_quantized,
    values,
)
from fusible.recipes.recipe import Recipe, Role
from fusible.recipes.tensor import QuantizedTensor

# What the kernels need of the machine, the recipe and a GroupedLinear: their own limits.
_MACHINE = (
    one_of(this.sm, *limits.ARCHITECTURES),
    CUDNN,
    CUTLASS,
    DRIVER,
    one_of(this.format.input, *limits.FORMATS),
    equal(this.format.weight, this.format.input),
    equal(this.format.grad, this.format.input),
)
_CONVERT = (
    "store FC1's weight and bias by fusible.interleave_glu and pass "
    f"glu_interleave_size={limits.INTERLEAVE}"
)


def _linears(*linears: Any) -> tuple[Any, ...]:
    sizes = [size for linear in linears for size in (linear.in_features, linear.out_features)]
    return (
        equal(linears[0].dtype, limits.DTYPE),
        *[multiple_of(size, limits.MULTIPLE_OF) for size in sizes],
        at_most(linears[0].num_groups, limits.MAX_GROUPS),
    )


# --- operands -------------------------------------------------------------------------------------


def _recipe(ctx: OperationContext) -> Recipe:
    return Recipe() if ctx.recipe is None else ctx.recipe


def _places(linear: GroupedLinear, ends: Tensor, rows: int) -> sm100.Places:
    return sm100.places_of(ends, rows, linear.split_alignment % limits.GROUP_ROWS == 0)


def _known_places(ends: Tensor, rows: Tensor | None, count: int) -> sm100.Places:
    """The places of ``count`` rows that the forward has found."""
    size = count if rows is None else sm100.padded_size(count, ends.shape[0])
    return sm100.Places(ends, rows, size)


def _in_place(places: sm100.Places) -> sm100.Places:
    """For rows that a kernel has left in their places."""
    return places._replace(rows=None)


def _encoded(
    x: Tensor, ctx: OperationContext, role: Role, wanted: dict[Product, bool], ends: Tensor
) -> Operand:
    """Rows for the products that are wanted."""
    recipe = _recipe(ctx)
    products = [product for product, needed in wanted.items() if needed]
    if not isinstance(x, QuantizedTensor) or "wgrad" not in products:
        return encode_operand(x, recipe, role, *products, ends=ends)
    # Quantized as a whole, so that its column-wise blocks cross the groups: those are made anew.
    others = [product for product in products if product != "wgrad"]
    columns = encode_operand(x.dequantize(), recipe, role, "wgrad", ends=ends)
    return columns._replace(row=encode_operand(x, recipe, role, *others).row)


class _Rows(NamedTuple):
    """Rows for the two products that read them."""

    row: Form | None
    column: Form | None
    sums: Tensor | None = None
    """Of the rows of each group ``[E, K]``, where they were asked for."""


def _packed(
    x: Tensor,
    ctx: OperationContext,
    role: Role,
    wanted: dict[Product, bool],
    ends: Tensor,
    places: sm100.Places,
    **options: Any,
) -> _Rows:
    """Rows for the products that are wanted, where they are quantized with ``options`` of that."""
    fmt = _recipe(ctx).format(role)
    if fmt is None or is_quantized(x):
        packed, sums = sm100.pack(_encoded(x, ctx, role, wanted, ends), places), None
    else:
        columnwise = wanted["wgrad"]
        rowwise = any(needed for product, needed in wanted.items() if product != "wgrad")
        packed, sums = sm100.quantize(
            x, fmt, ends, places, rowwise=rowwise, columnwise=columnwise, **options
        )
    return _Rows(packed.form(False), packed.form(True), sums)


def _packed_grad(
    linear: GroupedLinear,
    ctx: OperationContext,
    dy: Tensor,
    wanted: dict[Product, bool],
    ends: Tensor,
    places: sm100.Places,
    row_scale: Tensor | None,
) -> _Rows:
    """The gradient of a linear's output, with that of its bias where one pass makes both."""
    if not linear.needs_bias_grads(ctx):
        return _packed(dy, ctx, "grad", wanted, ends, places)
    sums = torch.bfloat16 if ctx.bias_dtype == torch.bfloat16 else torch.float32
    return _packed(dy, ctx, "grad", wanted, ends, places, sums=sums, row_scale=row_scale)


def _bias_grads(
    linear: GroupedLinear,
    ctx: OperationContext,
    packed: _Rows,
    dy: Tensor,
    ends: Tensor,
    row_scale: Tensor | None,
) -> Grads:
    if packed.sums is None:
        return linear.bias_grads(ctx, dy, ends, row_scale)
    return linear.as_bias_grads(packed.sums)


def _packed_output(
    d: Operand | sm100.Rounded,
    ctx: OperationContext,
    role: Role,
    wanted: dict[Product, bool],
    places: sm100.Places,
) -> _Rows:
    """What a kernel gave, quantized by it or to be quantized."""
    if isinstance(d, Operand):
        return _Rows(d.row, d.column)
    return _packed(d.rows, ctx, role, wanted, places.ends, _in_place(places), amax=d.amax)


def _weights(linear: GroupedLinear, ctx: OperationContext) -> tuple[Sequence[Form], Sequence[Form]]:
    """The weights for the forward and, if it will be taken, the data gradient."""
    if _recipe(ctx).format("weight") is None:
        plain = [aligned(weight) for weight in linear.weights_in(ctx, ctx.dtype)]
        return plain, plain
    weights = linear.encoded_weights(ctx, _quantized_weights)
    return [w.row for w in weights], [w.column for w in weights]


def _quantized_weights(
    weights: list[Tensor], recipe: Recipe, dtype: torch.dtype, products: Sequence[Product]
) -> list[Operand]:
    fmt = recipe.format("weight")
    assert fmt is not None
    if sm100.in_one_pass(weights):
        return [sm100.quantize_weights(one_weight(weights, dtype), fmt, "dgrad" in products)]
    return sm100.pack_weights(encode_weights(weights, recipe, dtype, products))


def _saved_weights(weights: Sequence[Form]) -> Sequence[Any]:
    if not weights or isinstance(weights[0], Tensor):
        return weights
    return [t for weight in weights for t in saved_form(weight)]


def _restored_weights(saved: Sequence[Any], ctx: OperationContext) -> list[Any]:
    fmt = _recipe(ctx).format("weight")
    if fmt is None:
        return list(saved)
    return [restored_form(saved[i : i + SAVED], fmt) for i in range(0, len(saved), SAVED)]


def _restored_rows(saved: Sequence[Any], ctx: OperationContext) -> Form | None:
    return restored_form(saved, _recipe(ctx).format("input"))


def _product(
    linear: GroupedLinear,
    ctx: OperationContext,
    x: _Rows,
    places: sm100.Places,
    row_scale: Tensor | None,
    output: Tensor | None,
) -> tuple[Tensor, Sequence[Form]]:
    """Output ``[M, N]`` of a linear, and its weights for the data gradient."""
    assert x.row is not None
    weights, transposed = _weights(linear, ctx)
    ctx.bias_dtype = ctx.parameters[-1].dtype
    y = sm100.gemm(
        x.row,
        weights,
        places,
        bias=linear.stacked_bias(ctx, ctx.dtype),
        row_scale=None if row_scale is None else _moved_scales(row_scale, places),
        out=as_rows(output),
    )
    return y, transposed


def _data_grad(
    linear: GroupedLinear,
    ctx: OperationContext,
    dy: _Rows,
    saved: Sequence[Any],
    places: sm100.Places,
    grad_output: Tensor,
) -> Tensor | None:
    """The input's gradient, if it is needed, from the weights as they were saved."""
    if not ctx.needs.input:
        return None
    assert dy.row is not None
    buffer = as_rows(linear.grad_input_buffer(ctx))
    dx = sm100.gemm(dy.row, _restored_weights(saved, ctx), places, transpose_w=True, out=buffer)
    return with_rows_of(dx, grad_output)


def _moved_scales(scales: Tensor, places: sm100.Places) -> Tensor:
    """One FP32 value per row, in its place, zero elsewhere."""
    return aligned(sm100.moved(scales.reshape(-1).float(), places))


# --- one grouped linear ---------------------------------------------------------------------------


class GroupedLinearSm100(FusedOperation):
    """One ``GroupedLinear``, forward and backward.

    Saves what the gradients read of the input and of the weights, in the kernels' layouts.
    """

    saves = (
        "x as the weight gradient reads it, end rows and places of the groups, row scales, weights "
        "as the data gradient reads them"
    )

    _basic_ops: tuple[GroupedLinear]

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        """One grouped product."""
        (linear,), (ctx,) = self._basic_ops, basic_op_ctxs
        x, ends, row_scale = linear.rows(ctx, input_, *basic_op_extra_inputs[0])
        output = linear.output_buffer(ctx, input_, basic_op_kwargs[0])
        places = _places(linear, ends, x.shape[0])
        wgrad = ctx.needs.params[0]
        xq = _packed(x, ctx, "input", {"forward": True, "wgrad": wgrad}, ends, places)
        y, transposed = _product(linear, ctx, xq, places, row_scale, output)
        ctx.save_for_backward(
            ends,
            row_scale,
            places.ends,
            places.rows,
            *saved_form(xq.column if wgrad else None),
            *_saved_weights(transposed if ctx.needs.input else ()),
            linear.scaled_bias(ctx),
        )
        return with_rows_of(y, input_), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """Two grouped products."""
        (linear,), (ctx,) = self._basic_ops, basic_op_ctxs
        ends, row_scale, padded, rows, *saved, _ = ctx.saved_tensors
        dy = matrix(grad_output, ctx.dtype)
        places = _known_places(padded, rows, dy.shape[0])
        wanted: dict[Product, bool] = {"dgrad": ctx.needs.input, "wgrad": ctx.needs.params[0]}
        dyq = _packed_grad(linear, ctx, dy, wanted, ends, places, row_scale)
        dx = _data_grad(linear, ctx, dyq, saved[SAVED:], places, grad_output)
        x = _restored_rows(saved[:SAVED], ctx)
        dweights = _weight_grads(linear, ctx, dyq.column, x, places)
        dy = values(dy)
        return (
            dx,
            [(*dweights, *_bias_grads(linear, ctx, dyq, dy, ends, row_scale))],
            [(None, *linear.scale_grad(ctx, dy, ends, grad_output.shape[:-1]))],
        )


# --- the grouped MLP ------------------------------------------------------------------------------


class GroupedMLPSm100(FusedOperation):
    """``GroupedLinear`` + scaled gated activation + ``GroupedLinear``, forward and backward.

    Saves what the weight gradients read of the input and of the activation, quantized where the
    recipe quantizes, and the pre-activation in BF16, all in the places of padded groups.
    """

    saves = (
        "x and the activation as the weight gradients read them, pre-activation, scales, end rows "
        "and places of the groups, row scales, weights as the data gradients read them"
    )

    _basic_ops: tuple[GroupedLinear, ScaledGLU, GroupedLinear]

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        """Two products, the activation in the first one's epilogue."""
        fc1, act, fc2 = self._basic_ops
        ctx1, ctx_act, ctx2 = basic_op_ctxs
        x, ends, _ = fc1.rows(ctx1, input_, *basic_op_extra_inputs[0])
        (scales,), (_, *bias_scale) = basic_op_extra_inputs[1:]
        scales = check_row_scales(scales, input_, type(act).__name__)
        row_scale = fc2.checked_scales(ctx2, input_, *bias_scale or [None])
        fc1.output_buffer(ctx1, input_, basic_op_kwargs[0])  # none: it is not the last op
        output = fc2.output_buffer(ctx2, input_, basic_op_kwargs[2])
        places = _places(fc1, ends, x.shape[0])
        prob = _moved_scales(scales, places)
        wanted: dict[Product, bool] = {"forward": True, "wgrad": ctx1.needs.params[0]}
        xq = _packed(x, ctx1, "input", wanted, ends, places)
        weights1, transposed1 = _weights(fc1, ctx1)
        assert xq.row is not None
        c, d = sm100.glu(
            xq.row,
            weights1,
            places,
            prob,
            bias=fc1.stacked_bias(ctx1, ctx1.dtype),
            **_options(act),
        )
        wanted = {"forward": True, "wgrad": ctx2.needs.params[0]}
        hidden = _packed_output(d, ctx2, "input", wanted, places)
        y, transposed2 = _product(fc2, ctx2, hidden, places, row_scale, output)
        if ctx2.requires_grad:
            column = xq.column if ctx1.needs.params[0] else None
            ctx1.save_for_backward(
                ends, places.ends, places.rows, *saved_form(column),
                *_saved_weights(transposed1 if ctx1.needs.input else ()),
            )  # fmt: skip
            ctx_act.save_for_backward(c, prob)
            ctx_act.dtype = scales.dtype
            column = hidden.column if ctx2.needs.params[0] else None
            ctx2.save_for_backward(
                row_scale,
                *saved_form(column),
                *_saved_weights(transposed2 if ctx2.needs.input else ()),
                fc2.scaled_bias(ctx2),
            )
        return with_rows_of(y, input_), [(), (), ()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """FC2's data gradient with the activation's, FC1's, two weight gradients."""
        fc1, act, fc2 = self._basic_ops
        ctx1, ctx_act, ctx2 = basic_op_ctxs
        ends, padded, rows = ctx1.saved_tensors[:3]
        c, prob = ctx_act.saved_tensors
        row_scale = ctx2.saved_tensors[0]
        shape = grad_output.shape[:-1]
        dy = matrix(grad_output, ctx2.dtype)
        places = _known_places(padded, rows, dy.shape[0])
        wgrad1, wgrad2 = ctx1.needs.params[0], ctx2.needs.params[0]
        wanted: dict[Product, bool] = {"dgrad": True, "wgrad": wgrad2}
        dyq = _packed_grad(fc2, ctx2, dy, wanted, ends, places, row_scale)
        assert dyq.row is not None
        d, dscales, dbias = sm100.dglu(
            dyq.row,
            _restored_weights(ctx2.saved_tensors[1 + SAVED : -1], ctx2),
            places,
            c,
            prob,
            bias=fc1.needs_bias_grads(ctx1),
            **_options(act),
        )
        wanted = {"dgrad": ctx1.needs.input, "wgrad": wgrad1}
        dq = _packed_output(d, ctx1, "grad", wanted, places)
        dx = _data_grad(fc1, ctx1, dq, ctx1.saved_tensors[3 + SAVED :], places, grad_output)
        x = _restored_rows(ctx1.saved_tensors[3 : 3 + SAVED], ctx1)
        hidden = _restored_rows(ctx2.saved_tensors[1 : 1 + SAVED], ctx2)
        dweights1 = _weight_grads(fc1, ctx1, dq.column, x, places)
        dweights2 = _weight_grads(fc2, ctx2, dyq.column, hidden, places)
        dy = values(dy)
        return (
            dx,
            [
                (*dweights1, *fc1.as_bias_grads(dbias if fc1.needs_bias_grads(ctx1) else None)),
                (),
                (*dweights2, *_bias_grads(fc2, ctx2, dyq, dy, ends, row_scale)),
            ],
            [
                (None,),
                (dscales.to(ctx_act.dtype).view(shape),),
                (None, *fc2.scale_grad(ctx2, dy, ends, shape)),
            ],
        )


def _options(act: ScaledGLU) -> dict[str, Any]:
    formula, _, options = act.glu()
    return {"activation": formula.__name__, **options}


def _weight_grads(
    linear: GroupedLinear,
    ctx: OperationContext,
    dy: Form | None,
    x: Form | None,
    places: sm100.Places,
) -> Grads:
    """Gradients of the weight parameters: all that this module computes are made here."""

    def gradient(out: Sequence[Tensor] | None, accumulate: bool) -> Tensor | None:
        assert dy is not None
        assert x is not None
        if out is None:
            return sm100.wgrad(dy, x, places)
        if sm100.takes_wgrad(out):
            sm100.wgrad_(list(out), dy, x, places, accumulate)
            return None
        buffers = out[0].unbind(0) if out[0].dim() == 3 else out
        dw = sm100.wgrad(dy, x, places, torch.float32)
        add_or_copy(buffers, dw, [not accumulate] * len(buffers))
        return None

    reads = (*saved_form(dy), *saved_form(x), places.ends, places.rows)
    return linear.weight_grads(
        ctx, WeightGradient(gradient, tuple([t for t in reads if t is not None]))
    )


@rule(
    *_MACHINE,
    *_linears(this.fc1, this.fc2),
    *GROUPED_MLP,
    equal(this.act.glu_interleave_size, limits.INTERLEAVE, _CONVERT),
    where(this.format.input, "none", one_of(this.act.geglu, None, limits.BF16_GEGLU)),
)
def grouped_mlp_sm100(fc1: GroupedLinear, act: ScaledGLU, fc2: GroupedLinear) -> GroupedMLPSm100:
    """FC1, activation, scale and quantization in one kernel, whose output is FC2's operand."""
    return GroupedMLPSm100([fc1, act, fc2])


@rule(*_MACHINE, *_linears(this.linear))
def grouped_linear_sm100(linear: GroupedLinear) -> GroupedLinearSm100:
    """One launch forward and two backward, on operands in the recipe's own format."""
    return GroupedLinearSm100([linear])
