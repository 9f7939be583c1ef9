"""What an architecture provides for grouped linears and grouped MLPs.

`GroupedLinear` and the fused grouped MLP are written once, over a `GroupedKernels`. The class
itself runs the library ops of `fusible.kernels.grouped`: the definition on the CPU, our kernels on
SM90, PyTorch's grouped product on other GPUs. An architecture whose kernels read operands in a
layout of their own, such as SM100, is a subclass; which one an op gets is kernel selection
(`fusible.fused.kernel_selection`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.kernels import grouped
from fusible.kernels.grouped import Glu
from fusible.ops.rows import as_rows
from fusible.ops.wgrad import WeightGradient, grouped_gradient
from fusible.recipes.matrix import SAVED, Operand
from fusible.recipes.product import Product, encode_operand, operand, values
from fusible.recipes.quantize_ops import compute_dtype
from fusible.recipes.recipe import Role

Saved = tuple[Tensor | None, ...]


class Rows(NamedTuple):
    """Rows of groups as the kernels read them."""

    row: Any
    """For the forward and the data gradient, which reduce along the features."""
    column: Any
    """For the weight gradient, which reduces along the rows; what `saved_rows` takes."""
    sums: Tensor | None = None
    """FP32 or BF16 ``[E, features]``, the sums of each group's rows, where they came for free."""


class Activated(NamedTuple):
    """What the kernel of the first linear and the activation gives."""

    preact: Tensor
    """``[rows, 2 * features]``, without rows if it is not kept."""
    output: Any
    """The activation ``[rows, features]``, as `GroupedKernels.rows` takes it."""


class ActivationGrads(NamedTuple):
    """What the kernel of the second linear's data gradient and the activation's backward gives."""

    preact: Any
    """The pre-activation's gradient, as `GroupedKernels.rows` takes it."""
    output: Any | None
    """The activation once more, as a weight gradient reads it; None where it was saved."""
    scales: Tensor
    """``[rows]``."""
    bias: Tensor | None
    """``[E, 2 * features]``, where the kernel gives it and it was asked for."""


class GroupedKernels:
    """Grouped products of one architecture, over rows ``[rows, features]`` sorted by group.

    ``ends`` are the groups' int32 end rows. The methods read the recipe, the dtype and which
    gradients are needed from the op's context. None may wait for the device. Subclasses override
    what their operands need.
    """

    saves = ""
    """What a linear saves with these kernels, for ``explain``; its own text if empty."""

    # --- operands --------------------------------------------------------------------------------

    def groups(self, linear: Any, ends: Tensor, num_rows: int) -> Any:
        """What the products are told of the groups."""
        return ends

    def saved_groups(self, groups: Any) -> Saved:
        """What is saved of the groups beside ``ends``."""
        return ()

    def restored_groups(self, ends: Tensor, saved: Sequence[Any], num_rows: int) -> Any:
        """Undo `saved_groups`."""
        return ends

    num_saved_groups = 0

    def rows(
        self,
        linear: Any,
        ctx: OperationContext,
        x: Any,
        role: Role,
        products: Sequence[Product],
        groups: Any,
        row_scale: Tensor | None = None,
    ) -> Rows:
        """``x`` for ``products``: quantized where the recipe says so, each group apart.

        ``x`` is in ``ctx.dtype``, or quantized, or what another kernel gave. ``row_scale`` is that
        of the bias, for sums of a gradient's rows.
        """
        if not ctx.quantizes:
            x = values(x)
            return Rows(x, x)
        # An input's column-wise form is saved for the backward, encoded.
        as_values = ("forward",) if role == "input" else products
        encoded = encode_operand(x, ctx.recipe, role, *products, ends=groups, as_values=as_values)
        compute, row = compute_dtype(x.device), None
        for product in ("forward", "dgrad"):
            if product in products:
                row = operand(encoded, product, role, compute)
        if role == "input" or "wgrad" not in products:
            return Rows(row, encoded)
        return Rows(row, operand(encoded, "wgrad", role, compute))

    def saved_rows(self, ctx: OperationContext, column: Any) -> Saved:
        """What is saved of an input, given its `Rows.column`, or None if it is not kept."""
        if ctx.quantizes:
            return column.saved(needed=ctx.needs.params[0])
        return (column,)

    def num_saved_rows(self, ctx: OperationContext) -> int:
        """How many tensors `saved_rows` gives."""
        return SAVED if ctx.quantizes else 1

    def restored_rows(self, ctx: OperationContext, saved: Sequence[Any], groups: Any) -> Any:
        """The input as `weight_grad` reads it."""
        if not ctx.quantizes:
            return saved[0]
        if not ctx.needs.params[0]:
            return None
        encoded = Operand.from_saved(saved, ctx.recipe.format("input"))
        return operand(encoded, "wgrad", "input", compute_dtype(groups.device))

    def weights(self, linear: Any, ctx: OperationContext) -> tuple[Any, Any]:
        """The weights for the forward, and for the data gradient as `saved_weights` takes them."""
        if not ctx.quantizes:
            plain = linear.weights_in(ctx, ctx.dtype)
            return plain, plain
        encoded = linear.encoded_weights(ctx)
        compute = compute_dtype(ctx.parameters[0].device)
        return [operand(w, "forward", "weight", compute) for w in encoded], encoded

    def saved_weights(self, ctx: OperationContext, weights: Any) -> Saved:
        """What is saved of the weights."""
        if not ctx.quantizes:
            return tuple(weights)
        dgrad = ctx.needs.input
        return tuple([t for w in weights for t in w.saved(needed=dgrad)])

    def restored_weights(self, ctx: OperationContext, saved: Sequence[Any], groups: Any) -> Any:
        """The weights as `data_grad` and `dglu` read them."""
        if not ctx.quantizes:
            return list(saved)
        if not ctx.needs.input:
            return []
        fmt = ctx.recipe.format("weight")
        parts = [saved[i : i + SAVED] for i in range(0, len(saved), SAVED)]
        compute = compute_dtype(groups.device)
        return [operand(Operand.from_saved(p, fmt), "dgrad", "weight", compute) for p in parts]

    # --- products --------------------------------------------------------------------------------

    def product(
        self,
        linear: Any,
        ctx: OperationContext,
        x: Any,
        weights: Any,
        groups: Any,
        row_scale: Tensor | None,
        output: Tensor | None,
    ) -> Tensor:
        """``x @ w[e].T + bias[e] * row_scale`` in ``ctx.dtype``, in ``output`` if it is given."""
        bias = linear.stacked_bias(ctx, x.dtype)
        return _multiplied(ctx, x, weights, groups, bias, row_scale, False, output)

    def data_grad(
        self,
        ctx: OperationContext,
        dy: Any,
        weights: Any,
        groups: Any,
        output: Tensor | None,
    ) -> Tensor:
        """``dy @ w[e]`` in ``ctx.dtype``, in ``output`` if it is given."""
        return _multiplied(ctx, dy, weights, groups, None, None, True, output)

    def weight_grad(self, ctx: OperationContext, dy: Any, x: Any, groups: Any) -> WeightGradient:
        """``dy[rows of e].T @ x[rows of e]`` for each group e, not computed yet."""
        return grouped_gradient(dy, x, groups, ctx.transposed)

    # --- the activation between two linears ------------------------------------------------------

    def saves_activation(self, ctx: OperationContext) -> bool:
        """Whether the second linear saves the activation; otherwise `dglu` computes it again."""
        return ctx.quantizes

    def row_scales(self, scales: Tensor, groups: Any) -> Tensor:
        """Scales of the activation's rows as `glu` and `dglu` take them, and as they are saved."""
        return scales if scales.dim() == 1 and scales.is_contiguous() else _vector(scales)

    def glu(
        self,
        linear: Any,
        ctx: OperationContext,
        act: Any,
        x: Any,
        weights: Any,
        groups: Any,
        scales: Tensor,
        keep: bool,
    ) -> Activated:
        """``glu(x @ w[e].T + bias[e]) * scales``; ``keep`` the pre-activation."""
        bias = linear.stacked_bias(ctx, x.dtype)
        preact, out = grouped.grouped_glu(x, weights, groups, scales, glu_of(act), bias, keep)
        return Activated(preact, cast(out, ctx.dtype))

    def dglu(
        self,
        ctx: OperationContext,
        act: Any,
        dy: Any,
        weights: Any,
        groups: Any,
        preact: Tensor,
        scales: Tensor,
        *,
        bias: bool,
        overwrite: bool,
    ) -> ActivationGrads:
        """The activation's backward in the data gradient of the second linear, whose ``ctx`` it is.

        ``bias`` asks for the gradient of the first linear's bias, which the kernel may give.
        ``overwrite`` allows to write into ``preact``.
        """
        dpreact, act_again, dscales = grouped.grouped_dglu(
            dy, weights, groups, preact, scales, glu_of(act), overwrite
        )
        again = None if self.saves_activation(ctx) else act_again
        return ActivationGrads(cast(dpreact, ctx.dtype), again, dscales, None)


LIBRARY = GroupedKernels()
"""What runs where no other kernels are selected."""


def glu_of(act: Any) -> Glu:
    """A scaled gated activation as the library's kernels take it."""
    _, _, constants = act.glu()
    return Glu(act.activation, act.glu_interleave_size or 0, *constants.values())


def _vector(t: Tensor) -> Tensor:
    return t.reshape(-1).contiguous()


def _multiplied(
    ctx: OperationContext,
    x: Tensor,
    weights: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
    output: Tensor | None,
) -> Tensor:
    """A grouped product ``[rows, features]``, in ``output`` ``[..., features]`` if it is given."""
    y = grouped.grouped_mm(x, weights, ends, bias, row_scale, transpose_w, as_rows(output))
    return cast(y, ctx.dtype)
