"""Grouped MLPs: two grouped linears with an activation between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusible.fused.fp8_fast_path import Fp8MLPFastPath
from fusible.fuser.conditions import equal, multiple_of, one_of, this, where
from fusible.fuser.context import OperationContext
from fusible.fuser.plan import Plan
from fusible.fuser.plan_key import PlanKey
from fusible.fuser.rules import rule
from fusible.fuser.schedule import FastPath
from fusible.fuser.target import Target
from fusible.fuser.tracing import hooks_hold_saved, keeps_graph
from fusible.kernels.quantize.k_major import ScaledMatrix
from fusible.kernels.quantize.saved_input import input_values, quantize_input
from fusible.kernels.sm90 import limits as sm90
from fusible.ops import FusedOperation, GroupedLinear
from fusible.ops.activation import Activation
from fusible.ops.grouped_fast_path import LinearFastPath, MLPFastPath
from fusible.ops.grouped_kernels import (
    Activated,
    GroupedKernels,
    GroupedOperand,
    LinearCall,
    SavedLinear,
)
from fusible.ops.grouped_linear import operand_rows
from fusible.ops.inputs import check_row_scales
from fusible.ops.kernel_rows import KERNELS, NO_OVERRIDE, SM90_INTERLEAVES, needs_sm90
from fusible.ops.matrices import restore_leading_dims
from fusible.ops.op import BasicOperation, Contexts, ExtraTensors, FusedGrads, FusedOutputs, Grads
from fusible.ops.sm90_fp8_kernels import SM90_FP8
from fusible.ops.sm90_kernels import SM90
from fusible.recipes.recipe import Recipe


def _linear_glu(
    linear: GroupedLinear,
    act: Activation,
    ctxs: Contexts,
    x: Tensor,
    extra_inputs: ExtraTensors,
) -> tuple[Activated, LinearCall, Tensor | None]:
    """A linear and its activation in one kernel; saves what the linear documents.

    Also gives the linear's call, and the activation's scales as the kernels take them.
    """
    ctx, ctx_act = ctxs
    scales = None
    if act.num_extra_inputs:
        scales = check_row_scales(extra_inputs[1][0], x, type(act).__name__)
    call, rows, _ = linear.prepare_input(ctx, x, *extra_inputs[0])
    linear.output_buffer(ctx, x)  # none: it is not the last op
    kernels = call.kernels
    prepared = kernels.row_scales(call, scales)
    operand = kernels.prepare_rows(call, rows, "input", linear.input_uses(ctx))
    weights, backward_weights = kernels.weights(call)
    activated = kernels.glu(call, act, operand.row, weights, prepared, ctx_act.requires_grad)
    linear.save(call, operand.column, None, backward_weights)
    return activated, call, prepared


class GroupedLinearGLU(FusedOperation):
    """Forward of ``GroupedLinear`` and an activation, in the product's epilogue."""

    _basic_ops: tuple[GroupedLinear, Activation]

    def describe_tiles(
        self, target: Target, op: Any, ctx: OperationContext, rows: int
    ) -> Sequence[Any]:
        """See `GroupedKernels`."""
        linear, act = self._basic_ops
        if op is act:
            return ()
        return SM90.describe_tiles(target, linear, ctx, rows, act)

    def fast_path(self, plan: Plan, key: PlanKey) -> LinearFastPath | None:
        """A fast path with the unfused backward of both ops."""
        return LinearFastPath.of(plan, key, *self._basic_ops)

    def forward_impl(self, ctxs: Contexts, x: Tensor, extra: ExtraTensors) -> FusedOutputs:
        """One launch; the pre-activation is stored only if a backward will read it."""
        (linear, act), ctx_act = self._basic_ops, ctxs[1]
        activated, *_ = _linear_glu(linear, act, ctxs, x, extra)
        if ctx_act.requires_grad:
            assert isinstance(activated.preact, Tensor)  # of the default kernels
            preact = restore_leading_dims(activated.preact, x)
            act.save_inputs(ctx_act, preact, *extra[1])
        return restore_leading_dims(activated.output, x), [(), ()]


class GroupedMLP(FusedOperation):
    """``GroupedLinear`` + activation + ``GroupedLinear``, forward and backward.

    The activation is in the epilogue of the first product; its backward is in that of the second
    one's data gradient, or, with FP8 products on Hopper, in the launch after it. Saves what the
    linears save and the pre-activation; the activation is computed again in the backward where the
    kernels do that.
    """

    _basic_ops: tuple[GroupedLinear, Activation, GroupedLinear]

    def __init__(self, basic_ops: Sequence[BasicOperation], kernels: GroupedKernels) -> None:
        super().__init__(basic_ops)
        fc1, act, _ = self._basic_ops
        self.kernels = kernels
        preact = "pre-activation"
        if act.cache_quantized_input:
            preact += " in FP8 with its scales"
        scales = ", scales" if act.num_extra_inputs else ""
        self.saves = f"{kernels.saves or fc1.saves}, {preact}{scales}"

    def multiplies(self, recipe: Recipe) -> str:
        """The operands of the kernels, for ``explain``."""
        return self.kernels.multiplies(recipe, *self._basic_ops)

    def describe_tiles(
        self, target: Target, op: Any, ctx: OperationContext, rows: int
    ) -> Sequence[Any]:
        """See `GroupedKernels`."""
        fc1, act, fc2 = self._basic_ops
        acts = {fc1: (act, None), fc2: (None, act)}.get(op)
        return self.kernels.describe_tiles(target, op, ctx, rows, *acts) if acts else ()

    def fast_path(self, plan: Plan, key: PlanKey) -> FastPath | None:
        """With the kernels for Hopper, also with FP8 products, as a node of its own."""
        fast_path = _FAST_PATHS.get(self.kernels)
        return None if fast_path is None else fast_path.of(plan, key, *self._basic_ops)

    def forward_impl(self, ctxs: Contexts, x: Tensor, extra: ExtraTensors) -> FusedOutputs:
        """Two launches."""
        fc1, act, fc2 = self._basic_ops
        ctx1, ctx_act, ctx2 = ctxs
        ctx1.kernels = ctx2.kernels = self.kernels
        split_sizes, *bias_scale = extra[2]
        fc2.check_delay()
        row_scale = fc2.prepare_scales(ctx2, x, *bias_scale or [None])
        output = fc2.output_buffer(ctx2, x)
        activated, call, scales = _linear_glu(fc1, act, ctxs[:2], x, extra[:2])
        preact, rows = activated
        del activated
        if act.cache_quantized_input and ctx_act.requires_grad and isinstance(preact, Tensor):
            ctx_act.preact_dtype = preact.dtype
            preact = quantize_input(preact)
        ctx2.reads_ahead = True  # that launch wrote neither group ends nor parameters
        fc2.check_alignment(split_sizes)
        y = fc2.product(
            call._replace(linear=fc2, ctx=ctx2),
            rows,
            row_scale,
            output,
            save_x=self.kernels.saves_activation(ctx2, act),
        )
        if ctx_act.requires_grad:
            ctx_act.held = hooks_hold_saved()
            ctx_act.scales_dtypes = tuple([t.dtype for t in extra[1] if t is not None])
            ends = self.kernels.preact_ends(call)
            ctx_act.save((preact, scales), ends, (0,))
        return restore_leading_dims(y, x), [(), (), ()]

    def backward_impl(self, ctxs: Contexts, dy: Tensor, dextras: ExtraTensors) -> FusedGrads:
        """FC2's data and weight gradients, the activation's, FC1's two."""
        fc1, *_ = self._basic_ops
        second = self.fc2_backward(ctxs, dy)
        dx = fc1.data_grad(second.saved, second.dpreact, dy)
        params1, extra1 = self.fc1_grads(second, second.saved.x, dy)
        dscales = [restore_leading_dims(t, dy) for t in second.dscales]
        return dx, [params1, (), second.params], [extra1, dscales, second.extra]

    def fc2_backward(self, ctxs: Contexts, grad_output: Tensor) -> FC2Backward:
        """The backward of FC2 and of the activation."""
        fc1, act, fc2 = self._basic_ops
        ctx1, ctx_act, ctx2 = ctxs
        dy = operand_rows(ctx2, grad_output)
        saved1, saved2 = fc1.restored(ctx1), fc2.restored(ctx2)
        preact, scales = ctx_act.restored()
        overwrite = not (ctx_act.held or keeps_graph())
        if isinstance(preact, ScaledMatrix) and not self.kernels.reads_quantized_preact:
            preact, overwrite = input_values(preact, ctx_act.preact_dtype), True
        operand = fc2.grad_rows(saved2, dy)
        d = self.kernels.dglu(saved1.call, saved2, act, operand.row, preact, scales, overwrite)
        x2 = saved2.x if d.output is None else d.output
        params, extra = fc2.grads(saved2, operand, x2, dy, grad_output)
        dpreact = fc1.grad_rows(saved1, d.preact)
        if d.bias is not None:
            dpreact = dpreact._replace(sums=d.bias)
        plain = d.preact if isinstance(d.preact, Tensor) else None
        dscales = tuple([d.scales.to(dtype) for dtype in ctx_act.scales_dtypes])
        return FC2Backward(dpreact, plain, dscales, params, extra, saved1)

    def fc1_grads(self, second: FC2Backward, x: Any, grad_output: Tensor) -> tuple[Grads, Grads]:
        """Gradients of FC1's parameters and extra inputs, from its input ``x``."""
        fc1, *_ = self._basic_ops
        return fc1.grads(second.saved, second.dpreact, x, second.values, grad_output)


_FAST_PATHS: dict[GroupedKernels, Any] = {SM90: MLPFastPath, SM90_FP8: Fp8MLPFastPath}


class FC2Backward(NamedTuple):
    """Results of the backward of FC2 and the activation, for that of FC1."""

    dpreact: GroupedOperand
    """The pre-activation's gradient, for FC1's products."""
    values: Tensor | None
    """The same as a tensor, where there is one."""
    dscales: tuple[Tensor, ...]
    """Gradients of the activation's scales, if it has them."""
    params: Grads
    """Gradients of FC2's parameters."""
    extra: Grads
    """Gradients of FC2's extra inputs."""
    saved: SavedLinear
    """The tensors that FC1 saved."""


MLP_CONDITIONS = (
    equal(this.fc1.num_groups, this.fc2.num_groups),
    equal(this.fc1.dtype, this.fc2.dtype),
    where(this.act.gated, True, equal(this.fc1.out_features, 2 * this.fc2.in_features)),
    where(this.act.gated, False, equal(this.fc1.out_features, this.fc2.in_features)),
    equal(this.fc1.split_sizes.source, this.fc2.split_sizes.source),
    equal(this.fc1.scale_bias, False),
    NO_OVERRIDE,
    # Its backward reads what the first two ops save, which ops without a backward do not.
    equal(this.fc1.requires_grad, this.fc2.requires_grad),
    equal(this.act.requires_grad, this.fc2.requires_grad),
)
"""Conditions of a grouped MLP for any kernels."""


@rule(*MLP_CONDITIONS, kernels=[row.for_mlp for row in KERNELS])
def grouped_mlp(
    kernels: GroupedKernels, fc1: GroupedLinear, act: Activation, fc2: GroupedLinear
) -> GroupedMLP:
    """The activation is in an epilogue, as is its backward, except with FP8 products on Hopper."""
    return GroupedMLP([fc1, act, fc2], kernels)


@rule(
    *needs_sm90(this.linear),
    equal(this.quantizes, False),
    equal(this.linear.scale_bias, False),
    one_of(this.act.glu_interleave_size, *SM90_INTERLEAVES),
    where(this.act.gated, True, multiple_of(this.linear.out_features, 2 * sm90.MULTIPLE_OF)),
    multiple_of(this.linear.out_features, 2 * this.act.glu_interleave_size),
    phase="forward",
)
def grouped_linear_glu_sm90(linear: GroupedLinear, act: Activation) -> GroupedLinearGLU:
    """The activation is in the epilogue, on the FP32 accumulators."""
    return GroupedLinearGLU([linear, act])
