"""All that a token's experts do on Hopper as one op, from its dispatch to the sum of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusible.formulas import cast
from fusible.fused.grouped_sm90 import (
    MLP_NEEDS,
    GroupedMLPSm90,
    activation_grad,
    data_grad,
    param_grads,
)
from fusible.fused.sm90_operands import ScaledGLU, as_matrix
from fusible.fuser.conditions import equal, this
from fusible.fuser.context import OperationContext
from fusible.fuser.rules import rule
from fusible.kernels.moe import permute
from fusible.kernels.provider import provider
from fusible.ops import Combine, Dispatch, FusedOperation, GroupedLinear
from fusible.ops.op import Grads


class MoEExpertsSm90(FusedOperation):
    """``Dispatch``, the fused grouped MLP and ``Combine``.

    Rows, the ``top_k`` copies of each token, would be the largest tensors of a block. Here the
    products find them among the tokens, and those of the output's gradient among that of the
    tokens, so that neither exists; those of FC2's output and of the tokens' gradient do, between
    the product and the sum.
    """

    saves = "tokens, row map, token of each row, pre-activation, scales, end rows, weights"

    def __init__(
        self,
        dispatch: Dispatch,
        fc1: GroupedLinear,
        act: ScaledGLU,
        fc2: GroupedLinear,
        combine: Combine,
    ) -> None:
        super().__init__([dispatch, fc1, act, fc2, combine])
        self._parts = dispatch, fc1, act, fc2, combine
        self._mlp = GroupedMLPSm90(fc1, act, fc2)

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
        """Row map, tokens of the rows, two products, sums."""
        first, *middle, last = basic_op_ctxs
        dispatch, *_, combine = self._parts
        tokens, probs, row_map, split_sizes, num_rows = dispatch.placed(
            first, input_, *basic_op_extra_inputs[0]
        )
        index, scales = permute.row_tokens(row_map, probs, num_rows)
        first.save_for_backward(row_map)
        row_map = row_map.view(*input_.shape[:-1], row_map.shape[1])
        outputs = split_sizes, scales, row_map
        own = dict(zip(dispatch.extra_output_names, outputs, strict=True))
        # What the dispatch gives to the others arrives as None.
        given = [
            [own[op.extra_input_name(i)] if t is None else t for i, t in enumerate(extra)]
            for op, extra in zip(self._parts, basic_op_extra_inputs, strict=True)
        ]
        # Which of the activation and FC2's bias take its scales.
        first.gives_scales = [of_op[-1] is None for of_op in basic_op_extra_inputs[2:4]]
        y = self._mlp.run(middle, tokens, given[1:4], basic_op_kwargs[1:4], index)
        middle[0].save_for_backward(*middle[0].to_save, index)
        y, _ = combine.fuser_forward(
            [last],
            y,
            basic_op_extra_inputs=given[4:],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=basic_op_kwargs[4:],
        )
        return y, [outputs, (), (), (), ()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """As the parts would, in the order that needs the least memory."""
        first, ctx1, ctx_act, ctx2, _ = basic_op_ctxs
        dispatch, fc1, act, fc2, _ = self._parts
        tokens, ends, row_scale1, *weights1, index = ctx1.saved_tensors
        row_scale2, *weights2 = ctx2.saved_tensors
        shape = index.shape

        (row_map,) = first.saved_tensors
        dy, found = as_matrix(provider("sm90"), cast(grad_output, ctx2.dtype)), {"dy_index": index}
        if fc2.has_bias:  # its gradient is a sum over rows
            dy, _ = permute.scatter_rows(dy, row_map, None, shape[0], False)
            found = {}
        dpreact, hidden, dscales = activation_grad(
            act, ctx_act, dy, ends, weights2, found.get("dy_index")
        )
        params2, extra2 = param_grads(fc2, ctx2, dy, hidden, ends, row_scale2, shape, **found)
        del dy, hidden  # their memory serves what follows

        drows = data_grad(fc1, ctx1, dpreact, ends, weights1, dpreact)
        assert drows is not None
        dmoved = basic_op_grad_extra_outputs[0][1]
        for mine, given in zip((dscales, extra2[-1]), first.gives_scales, strict=True):
            if given and mine is not None:
                dmoved = mine if dmoved is None else mine + dmoved
        dx, none, extra0 = dispatch.fuser_backward(
            [first], drows, basic_op_grad_extra_outputs=[(None, dmoved, None)]
        )
        del drows
        params1, extra1 = param_grads(
            fc1, ctx1, dpreact, tokens, ends, row_scale1, shape, x_index=index
        )
        return dx, [*none, params1, (), params2, ()], [*extra0, extra1, (dscales,), extra2, (None,)]


@rule(
    equal(this.dispatch.scale_input, False),
    equal(this.dispatch.requires_grad, this.fc1.requires_grad),
    equal(this.combine.weighted, False),
    *MLP_NEEDS,
)
def moe_experts_sm90(
    dispatch: Dispatch,
    fc1: GroupedLinear,
    act: ScaledGLU,
    fc2: GroupedLinear,
    combine: Combine,
) -> MoEExpertsSm90:
    """28 % less peak memory than its parts on qwen3-30b; 3 % more time halves what is kept."""
    return MoEExpertsSm90(dispatch, fc1, act, fc2, combine)
