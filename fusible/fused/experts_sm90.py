"""All that a token's experts do on Hopper as one op, from its dispatch to the sum of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusible.formulas import cast
from fusible.fused.grouped_mlp import ScaledGLU
from fusible.fused.grouped_sm90 import MLP_FITS, GroupedMLPSm90, data_grad, fits, param_grads
from fusible.fused.sm90_operands import as_vector, prepare
from fusible.fuser.conditions import equal, this
from fusible.fuser.context import OperationContext
from fusible.fuser.rules import rule
from fusible.fuser.tracing import keeps_graph
from fusible.kernels.moe import permute
from fusible.ops import Combine, Dispatch, FusedOperation, GroupedLinear
from fusible.ops.op import Grads
from fusible.recipes.product import values


class MoEExpertsSm90(FusedOperation):
    """``Dispatch``, the fused grouped MLP and ``Combine``.

    Rows, the ``top_k`` copies of each token, are the largest tensors of a block. Here those of the
    backward live only as long as they are read, and with ``recompute_rows`` those of the forward
    are not kept for it.
    """

    saves = "x or tokens, row map, pre-activation, scales, end rows of the groups, weights"

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
        """Row map, rows, two products, sums."""
        first, *middle, last = basic_op_ctxs
        dispatch, *_, combine = self._parts

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
            for op, extra in zip(self._parts, basic_op_extra_inputs, strict=True)
        ]
        # Which of the activation and FC2's bias take its scales.
        first.gives_scales = [of_op[-1] is None for of_op in basic_op_extra_inputs[2:4]]
        y, _ = run(self._mlp, middle, rows, slice(1, 4), given[1:4])
        y, _ = run(combine, [last], y, slice(4, 5), given[4:])
        if first.requires_grad and dispatch.recompute_rows:
            tokens = cast(values(input_), rows.dtype).reshape(-1, rows.shape[1])
            middle[0].save_for_backward(tokens, *middle[0].to_save[1:])
        return y, [*outputs, (), (), (), ()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """As the parts would, in the order that needs the least memory."""
        first, ctx1, ctx_act, ctx2, last = basic_op_ctxs
        dispatch, fc1, _, fc2, combine = self._parts
        (row_map,) = first.saved_tensors
        preact, scales = ctx_act.saved_tensors
        x, ends, row_scale1, *weights1, _ = ctx1.saved_tensors
        row_scale2, *weights2, _ = ctx2.saved_tensors

        dy, _, _ = combine.fuser_backward([last], grad_output, basic_op_grad_extra_outputs=[()])
        assert dy is not None
        dy = cast(dy, ctx2.dtype)
        (dy, preact), ((first_product, w1), (second, w2)) = prepare(
            [dy, preact], (fc1, weights1), (fc2, weights2)
        )
        dpreact, hidden, dscales = second.dglu(
            dy,
            w2,
            ends,
            preact,
            as_vector(scales),
            self._mlp.glu,
            not (ctx_act.held or keeps_graph()),
        )
        params2, extra2 = param_grads(fc2, ctx2, second, dy, hidden, ends, row_scale2, dy)
        del dy, hidden  # their memory serves what follows

        drows = data_grad(fc1, ctx1, first_product, w1, dpreact, ends, dpreact)
        assert drows is not None
        dmoved = basic_op_grad_extra_outputs[0][1]
        for mine, given in zip((dscales, extra2[-1]), first.gives_scales, strict=True):
            if given and mine is not None:
                dmoved = mine if dmoved is None else mine + dmoved
        dx, none, extra0 = dispatch.fuser_backward(
            [first], drows, basic_op_grad_extra_outputs=[(None, dmoved, None)]
        )
        del drows

        if dispatch.recompute_rows:
            x, _ = permute.scatter_rows(x, row_map, None, last.num_rows, False)
        (dpreact, x), ((first_product, _),) = prepare([dpreact, x], (fc1, weights1))
        params1, extra1 = param_grads(
            fc1, ctx1, first_product, dpreact, x, ends, row_scale1, dpreact
        )
        return dx, [*none, params1, (), params2, ()], [*extra0, extra1, (dscales,), extra2, (None,)]


@rule(
    equal(this.dispatch.scale_input, False),
    equal(this.dispatch.requires_grad, this.fc1.requires_grad),
    equal(this.combine.weighted, False),
    *fits(this.fc1, this.fc2),
    *MLP_FITS,
)
def moe_experts_sm90(
    dispatch: Dispatch,
    fc1: GroupedLinear,
    act: ScaledGLU,
    fc2: GroupedLinear,
    combine: Combine,
) -> MoEExpertsSm90:
    """1.02x as fast as its parts on qwen3-30b, 28 % less memory; `recompute_rows` saves more."""
    return MoEExpertsSm90(dispatch, fc1, act, fc2, combine)
