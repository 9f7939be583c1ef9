"""All that a token's experts do on Hopper as one op, which keeps tokens in the place of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusible.formulas import cast
from fusible.fused.grouped_sm90 import MLP_NEEDS, GroupedMLPSm90, ScaledGLU
from fusible.fuser.conditions import equal, this
from fusible.fuser.context import OperationContext
from fusible.fuser.rules import rule
from fusible.kernels.moe import permute
from fusible.ops import Combine, Dispatch, FusedOperation, GroupedLinear
from fusible.ops.op import Grads
from fusible.recipes.product import values


class MoEExpertsSm90(FusedOperation):
    """``Dispatch``, the fused grouped MLP and ``Combine``; the backward dispatches once more.

    Rows are ``top_k`` copies of each token: they are made where they are read, and gone after.
    """

    saves = "tokens, row map, pre-activation, scales, end rows of the groups, weights"

    def __init__(
        self,
        dispatch: Dispatch,
        fc1: GroupedLinear,
        act: ScaledGLU,
        fc2: GroupedLinear,
        combine: Combine,
    ) -> None:
        super().__init__([dispatch, fc1, act, fc2, combine])
        self._ends = dispatch, combine
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
        """Five launches or so: row map, rows, two products, sums."""
        first, *middle, last = basic_op_ctxs
        dispatch, combine = self._ends

        def run(op: Any, ctxs: Any, x: Tensor, places: slice, extra: Any) -> Any:
            return op.fuser_forward(
                ctxs,
                x,
                basic_op_extra_inputs=extra,
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=None,
                basic_op_kwargs=basic_op_kwargs[places],
            )

        rows, outputs = run(dispatch, [first], input_, slice(0, 1), basic_op_extra_inputs[:1])
        own = dict(zip(dispatch.extra_output_names, outputs[0], strict=True))
        # What the dispatch gives to the others arrives as None.
        given = [
            [own[op.extra_input_name(i)] if t is None else t for i, t in enumerate(extra)]
            for op, extra in zip(self.basic_ops, basic_op_extra_inputs, strict=True)
        ]
        first.gives_scales = basic_op_extra_inputs[2][0] is None
        y, _ = run(self._mlp, middle, rows, slice(1, 4), given[1:4])
        y, _ = run(combine, [last], y, slice(4, 5), given[4:])
        if first.requires_grad:
            tokens = cast(values(input_), rows.dtype).reshape(-1, rows.shape[1])
            first.save_for_backward(*first.to_save, tokens)
            middle[0].save_for_backward(*middle[0].to_save[1:])
        return y, [*outputs, (), (), (), ()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """The same the other way round, on rows made once more."""
        first, *middle, last = basic_op_ctxs
        dispatch, combine = self._ends
        row_map, tokens = first.saved_tensors
        first.saved_tensors = (row_map,)
        dy, _, _ = combine.fuser_backward([last], grad_output, basic_op_grad_extra_outputs=[()])
        assert dy is not None
        rows, _ = permute.scatter_rows(tokens, row_map, None, last.num_rows, False)
        middle[0].saved_tensors = (rows, *middle[0].saved_tensors)
        del rows
        drows, params, extra = self._mlp.fuser_backward(
            middle, dy, basic_op_grad_extra_outputs=[(), (), ()]
        )
        assert drows is not None
        dscales, of_act = basic_op_grad_extra_outputs[0][1], extra[1][0]
        if first.gives_scales and of_act is not None:
            dscales = of_act if dscales is None else dscales + of_act
        dx, none, dgiven = dispatch.fuser_backward(
            [first], drows, basic_op_grad_extra_outputs=[(None, dscales, None)]
        )
        return dx, [*none, *params, ()], [*dgiven, *extra, (None,)]


@rule(
    equal(this.dispatch.recompute_rows, True),
    equal(this.dispatch.scale_input, False),
    equal(this.dispatch.requires_grad, this.fc1.requires_grad),
    equal(this.combine.weighted, False),
    equal(this.fc2.scale_bias, False),
    *MLP_NEEDS,
)
def moe_experts_sm90(
    dispatch: Dispatch,
    fc1: GroupedLinear,
    act: ScaledGLU,
    fc2: GroupedLinear,
    combine: Combine,
) -> MoEExpertsSm90:
    """Tokens are kept for the backward, not ``top_k`` copies of them, for one launch more."""
    return MoEExpertsSm90(dispatch, fc1, act, fc2, combine)
