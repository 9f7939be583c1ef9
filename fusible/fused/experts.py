"""All that a token's experts do on Hopper as one op, from its dispatch to the sum of its rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusible.formulas import cast
from fusible.fused.grouped_mlp import MLP, GroupedMLP, ScaledGLU
from fusible.fused.kernel_selection import SM90_ROW
from fusible.fuser.conditions import equal, this
from fusible.fuser.context import OperationContext
from fusible.fuser.rules import rule
from fusible.kernels import moe
from fusible.ops import Combine, Dispatch, FusedOperation, GroupedLinear
from fusible.ops.grouped_kernels import GroupedKernels
from fusible.ops.op import ExtraTensors, FusedGrads, FusedOutputs
from fusible.recipes.product import values


class MoEExperts(FusedOperation):
    """``Dispatch``, the fused grouped MLP and ``Combine``.

    Rows, the ``top_k`` copies of each token, are the largest tensors of a block. Here those of the
    backward live only as long as they are read, and with ``recompute_rows`` those of the forward
    are not saved.
    """

    saves = "x or tokens, row map, pre-activation, scales, end rows of the groups, weights"

    def __init__(
        self,
        kernels: GroupedKernels,
        dispatch: Dispatch,
        fc1: GroupedLinear,
        act: ScaledGLU,
        fc2: GroupedLinear,
        combine: Combine,
    ) -> None:
        super().__init__([dispatch, fc1, act, fc2, combine])
        self._parts = dispatch, fc1, act, fc2, combine
        self._mlp = GroupedMLP(kernels, fc1, act, fc2)

    def forward_impl(
        self,
        ctxs: Sequence[OperationContext],
        x: Tensor,
        extra_inputs: ExtraTensors,
    ) -> FusedOutputs:
        """Row map, rows, two products, sums."""
        first, *middle, last = ctxs
        dispatch, *_, combine = self._parts
        rows, *outputs = dispatch.forward_impl(first, x, *extra_inputs[0])
        own = dict(zip(dispatch.extra_output_names, outputs, strict=True))
        # What the dispatch gives to the others arrives as None.
        given = [
            [own[op.extra_input_name(i)] if t is None else t for i, t in enumerate(extra)]
            for op, extra in zip(self._parts, extra_inputs, strict=True)
        ]
        # Which of the activation and FC2's bias take its scales.
        first.gives_scales = [of_op[-1] is None for of_op in extra_inputs[2:4]]
        y, _ = self._mlp.forward_impl(middle, rows, given[1:4])
        y = combine.forward_impl(last, y, *given[4])
        if first.requires_grad and dispatch.recompute_rows:
            tokens = cast(values(x), rows.dtype).reshape(-1, rows.shape[1])
            middle[0].save_for_backward(tokens, *middle[0].to_save[1:])
        return y, [outputs, (), (), (), ()]

    def backward_impl(
        self,
        ctxs: Sequence[OperationContext],
        grad_output: Tensor,
        grad_extra_outputs: ExtraTensors,
    ) -> FusedGrads:
        """As the parts would, in the order that needs the least memory."""
        first, *middle, last = ctxs
        ctx1 = middle[0]
        dispatch, fc1, _, _, combine = self._parts
        (row_map,) = first.saved_tensors
        dy, *_ = combine.backward_impl(last, grad_output)
        assert dy is not None
        second = self._mlp.second_backward(middle, dy)
        del dy
        drows = fc1.data_grad(
            self._mlp.kernels, ctx1, second.dpreact, second.saved, second.dpreact.row
        )
        assert drows is not None
        dmoved = grad_extra_outputs[0][1]
        for grad, given in zip((second.dscales, second.extra[-1]), first.gives_scales, strict=True):
            if given and grad is not None:
                dmoved = grad if dmoved is None else grad + dmoved
        dx, *extra0 = dispatch.backward_impl(first, drows, None, dmoved, None)
        del drows
        x = second.saved.x
        if dispatch.recompute_rows:
            x, _ = moe.scatter_rows(x, row_map, None, last.num_rows, False)
        params1, extra1 = self._mlp.first_grads(ctx1, second, x, second.dpreact.row)
        params = [(), params1, (), second.params, ()]
        return dx, params, [extra0, extra1, (second.dscales,), second.extra, (None,)]


@rule(
    equal(this.dispatch.scale_input, False),
    equal(this.dispatch.requires_grad, this.fc1.requires_grad),
    equal(this.combine.weighted, False),
    *MLP,
    equal(this.quantizes, False),
    kernels=[SM90_ROW.for_mlp],
)
def moe_experts(
    kernels: GroupedKernels,
    dispatch: Dispatch,
    fc1: GroupedLinear,
    act: ScaledGLU,
    fc2: GroupedLinear,
    combine: Combine,
) -> MoEExperts:
    """1.02x as fast as its parts on qwen3-30b, 28 % less memory; `recompute_rows` saves more."""
    return MoEExperts(kernels, dispatch, fc1, act, fc2, combine)
