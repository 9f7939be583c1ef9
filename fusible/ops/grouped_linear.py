"""One linear transformation per group of rows: the experts of a mixture-of-experts block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusible.arguments import check_bools, described
from fusible.fuser.context import OperationContext
from fusible.fuser.plan import Plan
from fusible.fuser.plan_key import PlanKey
from fusible.kernels import few_rows, grouped
from fusible.kernels.grouped import portable
from fusible.kernels.sm90 import limits
from fusible.ops.casting import format_of_grad, quantized_values
from fusible.ops.dispatch import Dispatch
from fusible.ops.grouped_fast_path import LinearFastPath
from fusible.ops.grouped_kernels import GroupedOperand, LinearCall, SavedLinear, kernels_of
from fusible.ops.inputs import (
    check_features,
    check_row_scales,
    check_sizes,
    on_device_of,
    product_dtype,
    wrong_shape,
)
from fusible.ops.kernel_rows import KERNELS
from fusible.ops.matrices import matrix, restore_leading_dims, source_of
from fusible.ops.op import Grads, OpGrads
from fusible.ops.state import State, convert_layout
from fusible.ops.weights import WeightedOperation
from fusible.ops.wgrad import is_column_major
from fusible.recipes.checkpoint_state import load_pieces
from fusible.recipes.product import is_quantized, values
from fusible.recipes.sharding import is_sharded, shard_over
from fusible.recipes.tensor import stack
from fusible.versions import CUTLASS_DSL


class GroupedLinear(WeightedOperation):
    """``x[rows of e] @ weight[e].T + bias[e]`` for x ``[..., in_features]`` sorted by group.

    Extra inputs: ``split_sizes``, integers ``[num_groups]``, the number of rows of each group (on
    the device, or on the CPU, or a list, which is moved to the device once a call); with
    ``scale_bias`` also ``scales``, one floating value per row, which multiplies the bias. Rows
    past the last group give zero output and zero gradient; an empty group's gradients are zero.

    Split sizes on a device are never read by the host: negative ones count as zero, and groups are
    cut off at the last row. ``fusible.checking()`` verifies them, with a synchronisation.

    Parameters: ``weight`` ``[num_groups, out_features, in_features]`` (and ``bias``
    ``[num_groups, out_features]``), the recommended form, or ``weight0`` ... of
    ``[out_features, in_features]`` (``bias0`` ... of ``[out_features]``), one per group.

    Saves ``(x, ends, row_scale or None, *weights, bias or None)`` in the dtype of the product, that
    dtype as ``ctx.dtype``, and as ``ctx.column_major`` whether the weights are column-major.
    ``ends`` are the int32 end rows of the groups; there is one 3-D weight or ``num_groups`` 2-D
    ones, or None if no gradient reads them; the bias ``[num_groups, out_features]`` is for the
    gradient of ``scales``. Under a recipe x and each weight are the tensors of a
    ``QuantizedMatrix``; weights count as one unless stored quantized one by one. A fused op that
    replaces the forward saves by :meth:`operands`.

    Under a recipe each group of rows is quantized apart. The op takes, as its input and as the
    gradient of its output, a ``GroupedTensor`` of the recipe's format whose groups are those of
    ``split_sizes``; its quantizers make one when they are given the rows of each group.

    Other arguments as in :class:`BasicLinear`.

    Args:
        num_groups: number of groups.
        bias: whether to add a bias, which starts at zero.
        accumulate_into_main_grad: as in :class:`BasicLinear`, for the weight of each group.
            Gradients of biases go to autograd.
        single_grouped_weight: one ``weight`` rather than one per group.
        single_grouped_bias: one ``bias`` rather than one per group.
        delay_wgrad_compute: compute weight gradients in :meth:`backward_dw` rather than in
            ``backward()``, one call for every backward; those of biases come with the backward.
        scale_bias: multiply the bias by the extra input ``scales``; no effect without ``bias``.
        split_alignment: a promise that every split size is a multiple of it, which spares kernels
            that want whole tiles (256 rows on Blackwell) from padding the groups; checked where
            the host knows the sizes, and under ``fusible.checking()``.
        init_method: called with each group's weight to initialise it in place.

    Raises:
        TypeError: a size is no integer.
        ValueError: a size is under 1, or the dtype another; in a call, x does not fit the weights
            (features, device), ``split_sizes`` are not ``num_groups`` integers or, where the host
            knows them, negative or of more rows than x.
    """

    num_groups: int
    kernel_rows = tuple(row.for_linear for row in KERNELS)
    extra_input_names = ("split_sizes", "scales")
    saves = "x, end rows of the groups, row scales, weights"
    fact_names = (
        "num_groups",
        "in_features",
        "out_features",
        "has_bias",
        "scale_bias",
        "single_grouped_weight",
        "single_grouped_bias",
        "split_alignment",
        "accumulate_into_main_grad",
        "delay_wgrad_compute",
    )

    def __init__(  # noqa: PLR0913 - Transformer Engine's signature
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
        split_alignment: int = 1,
        init_method: Callable[[Tensor], Any] | None = None,
    ) -> None:
        check_bools(
            "GroupedLinear",
            bias=bias,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            scale_bias=scale_bias,
        )
        scale_bias = scale_bias and bias
        self.num_extra_inputs = 2 if scale_bias else 1
        if scale_bias:
            self.saves = f"{type(self).saves}, bias"
        super().__init__(
            accumulate_into_main_grad=accumulate_into_main_grad,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self.num_groups = num_groups
        self.in_features, self.out_features = in_features, out_features
        self.rng_state_tracker_function = rng_state_tracker_function
        self.init_method = init_method
        self.has_bias = self.use_bias = bias
        self.scale_bias = scale_bias
        self.split_alignment = split_alignment
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias
        sizes = "num_groups", "in_features", "out_features", "split_alignment"
        check_sizes("GroupedLinear", dtype, **{name: getattr(self, name) for name in sizes})
        self.num_weights = 1 if single_grouped_weight else num_groups
        self._make_parameters(device, dtype)
        self.reset_parameters()
        self.store_weights()

    def check_producer(self, slot: int, producer: Any) -> None:
        """Refuse the split sizes of another number of groups."""
        experts = producer.local_experts if isinstance(producer, Dispatch) else self.num_groups
        if experts != self.num_groups:
            raise ValueError(
                f"num_groups of GroupedLinear must be the {experts} experts of the Dispatch before "
                f"it, got {self.num_groups}"
            )

    def _make_parameters(
        self, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Set the weights and biases, and their names in order."""
        self.parameter_names = ()
        shape = self.num_groups, self.out_features, self.in_features
        for name, single in self._layouts().items():
            size = shape[:2] if name == "bias" else shape
            values = torch.empty(size, device=device, dtype=dtype)
            self.parameter_names += self._add_parameters(name, values, single)

    def _add_parameters(self, name: str, values: Tensor, single: bool) -> tuple[str, ...]:
        """Register the parts of ``values``, or the whole of it; returns their names."""
        # Side by side in one allocation, so that kernels can view them as one tensor; nothing
        # keeps the allocation itself, since conversions of a module replace its parameters.
        parts = {name: values}
        if not single:
            parts = {f"{name}{group}": part for group, part in enumerate(values.unbind(0))}
        for own, value in parts.items():
            self.register_parameter(own, nn.Parameter(value))
        return tuple(parts)

    def _layouts(self) -> dict[str, bool]:
        """The kinds of parameters, and whether one of a kind is that of all groups."""
        layouts = {"weight": self.single_grouped_weight}
        return {**layouts, "bias": self.single_grouped_bias} if self.has_bias else layouts

    def check_shardable(self, mesh: Any) -> None:
        """Raise ValueError unless :meth:`shard_experts` can share the experts."""
        processes, op = mesh.size(), f"GroupedLinear({self.extra_repr()})"
        if self.expert_processes is not None or self._frozen:
            raise ValueError(
                f"experts of {op} must be shared among processes once, before the first call, got "
                f"{'a second time' if self.expert_processes else 'a call before'}; make a new op"
            )
        if self.num_groups % processes:
            raise ValueError(
                f"num_groups of {op} must be a multiple of the {processes} processes of the mesh, "
                f"got {self.num_groups}"
            )
        if self.accumulates_grads:
            raise ValueError(
                f"gradients of {op} must go to autograd for experts shared among processes, got "
                "accumulate_into_main_grad or delay_wgrad_compute; leave them out"
            )
        for parameters in (self.weights(), self.biases()):
            if any([is_sharded(p) for p in parameters]):
                raise ValueError(
                    f"parameters of {op} must be whole, got shards; call expert_parallel before "
                    "fully_shard"
                )
            if len({p.requires_grad for p in parameters}) > 1:
                raise ValueError(
                    f"parameters of {op} must all be trained or all frozen, since they become one, "
                    "got both"
                )

    @torch.no_grad()
    def shard_experts(self, mesh: Any) -> None:
        """Keep the parameters of the experts of this process of a mesh, as ``DTensor``."""
        from torch.distributed.tensor import Shard

        layouts, held = self._layouts(), (self.weights(), self.biases())
        for old in self.own_parameter_names():
            del self._parameters[old], self._registered[old]
        for (name, single), own in zip(layouts.items(), held, strict=False):
            part = shard_over(own[0] if single else stack(own), mesh, [Shard(0)])
            self.register_parameter(name, nn.Parameter(part, own[0].requires_grad))
        self.single_grouped_weight, self.num_weights = True, 1
        self.single_grouped_bias = self.single_grouped_bias or self.has_bias
        self.parameter_names = tuple(layouts)
        self.expert_processes = mesh.size()
        self.num_groups //= mesh.size()

    def default_kernels(self, dtype: str, target: Any) -> str:
        """Those that the library ops choose: SM90's, PyTorch's, or Triton's."""
        sm = target.sm or 0
        has_dsl = target.cutlass_dsl is not None and target.cutlass_dsl >= CUTLASS_DSL
        if has_dsl and limits.supports_products(sm, dtype, self.in_features, self.out_features):
            return "sm90"  # the row was refused because the op is of a subclass
        by_pytorch = target.device != "cuda" or portable.pytorch_reads_on_device(dtype, sm)
        by_triton = not by_pytorch and portable.reads_on_device(dtype, sm, target.triton)
        return "Triton's" if by_triton else "PyTorch's"

    def notes(self, dtype: str, target: Any) -> tuple[str, ...]:
        """Says where a grouped product synchronises, or rounds a weight gradient."""
        if target.device != "cuda":
            return ()
        sm = target.sm or 0
        if not portable.reads_on_device(dtype, sm, target.triton):
            others = "bfloat16, float16 and float32 do not" if target.triton else "install triton"
            return (
                f"{dtype} on {target} runs a loop over groups that reads the split sizes on the "
                f"host (a synchronisation); {others}",
            )
        if self.accumulate_into_main_grad and portable.pytorch_reads_on_device(dtype, sm):
            return (
                "weight gradients are rounded to bfloat16 before they are added to main_grad: "
                "PyTorch's grouped product has no FP32 output",
            )
        return ()

    def call_notes(self, ctx: OperationContext) -> tuple[str, ...]:
        """How stored weights are read without a recipe."""
        notes = super().call_notes(ctx)
        if ctx.quantizes or not any([is_quantized(w) for w in ctx.parameters]):
            return notes
        stored = self.stored_weights(ctx, ctx.dtype)
        sizes = self.num_groups, self.out_features, self.in_features
        by_kernels = few_rows.note(ctx.dtype, stored[0].format, *sizes) if stored else None
        return (*notes, by_kernels or "every forward dequantizes the stored weights")

    def _load_from_state_dict(self, state_dict: State, prefix: str, *args: Any) -> None:
        # Quantized weights are put together from their pieces first.
        load_pieces(self, state_dict, prefix, *args[-3:])
        groups = self.num_groups * (self.expert_processes or 1)
        for name, single in self._layouts().items():
            convert_layout(state_dict, prefix, name, groups, args[-1], single=single)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # --- math ------------------------------------------------------------------------------------

    def fast_path(self, plan: Plan, key: PlanKey) -> LinearFastPath | None:
        """With the default kernels, as a node of its own."""
        return LinearFastPath.of(plan, key, self)

    def forward_impl(self, ctx: OperationContext, x: Tensor, *extra: Tensor | None) -> Tensor:
        """One grouped product, of quantized operands under a recipe."""
        call, rows, row_scale = self.prepare_input(ctx, x, *extra)
        output = self.output_buffer(ctx, x)
        return restore_leading_dims(self.product(call, rows, row_scale, output), x)

    def save(self, call: LinearCall, x: Any, row_scale: Tensor | None, weights: Any) -> None:
        """See :class:`WeightedOperation`."""
        kernels, _, ctx, ends, groups = call
        scaled_bias = self.scale_bias and ctx.needs.extra_inputs[1]  # for the scales' gradient
        bias = self.stacked_bias(ctx, ctx.dtype) if scaled_bias else None
        x = x if ctx.needs.params[0] else None
        weights = weights if ctx.needs.input else None
        saves_rows = kernels.saves_input and not ctx.quantizes
        saved = x, ends, row_scale, groups, weights, bias
        ctx.save(saved, ends, (0,) if saves_rows else ())

    def restored(self, ctx: OperationContext) -> SavedLinear:
        """What :meth:`save` saved, as the products of the backward read it."""
        x, ends, row_scale, groups, weights, _ = ctx.restored()
        call = LinearCall(kernels_of(ctx), self, ctx, ends, groups)
        return SavedLinear(call, x, row_scale, weights)

    def prepare_input(
        self,
        ctx: OperationContext,
        input_: Tensor,
        split_sizes: Tensor | None,
        scales: Tensor | None = None,
    ) -> tuple[LinearCall, Tensor, Tensor | None]:
        """The call, ``x`` as rows in ``ctx.dtype`` or quantized as it is, and row scales; checked.

        The call is by the kernels in the context.
        """
        self.check_delay()
        check_features(input_, self.in_features, "GroupedLinear")
        scales = self.prepare_scales(ctx, input_, scales)
        x = operand_rows(ctx, input_)
        ends = ends_of_groups(split_sizes, x, self.num_groups, ctx.memo)
        self.check_alignment(split_sizes)
        kernels = kernels_of(ctx)
        groups = kernels.groups(self, ends, x.shape[0])
        return LinearCall(kernels, self, ctx, ends, groups), x, scales

    def operands(
        self, ctx: OperationContext, input_: Tensor, *extra: Tensor | None
    ) -> tuple[Tensor, list[Tensor], Tensor, Tensor | None, Tensor | None]:
        """The checked ``(x, weights, ends, bias, row_scale)`` of `fusible.extend.grouped_mm`.

        Saved as the backward expects, for a fused op that replaces the forward. Without a recipe.
        """
        call, x, row_scale = self.prepare_input(ctx, input_, *extra)
        weights = self.weights_in(ctx, ctx.dtype)
        self.save(call, x, row_scale, weights)
        return x, weights, call.ends, self.stacked_bias(ctx, ctx.dtype), row_scale

    def check_alignment(self, split_sizes: Tensor | None) -> None:
        """Check the promise of ``split_alignment`` where the host may read the sizes."""
        if self.split_alignment > 1 and split_sizes is not None:
            grouped.check_alignment(split_sizes, self.split_alignment)

    def prepare_scales(
        self, ctx: OperationContext, input_: Tensor, scales: Tensor | None
    ) -> Tensor | None:
        """The row scales of the bias, contiguous ``[rows]``; checks all but the input's features.

        Sets ``ctx.dtype``, that of the product, and ``ctx.column_major``.
        """
        self._check_shapes(ctx.parameters)
        weight = ctx.parameters[0]
        ctx.dtype = product_dtype(ctx, input_, weight, "GroupedLinear")
        ctx.column_major = is_column_major(weight)
        if not self.scale_bias:
            return None
        check_row_scales(scales, input_, "GroupedLinear")
        return scales.reshape(-1).contiguous()  # type: ignore[union-attr]

    def _check_shapes(self, parameters: Sequence[Tensor]) -> None:
        weight, groups = (self.out_features, self.in_features), self.num_groups
        shapes: list[tuple[int, ...]] = (
            [(groups, *weight)] if self.single_grouped_weight else [weight] * groups
        )
        if self.has_bias:
            bias = weight[:1]
            shapes += [(groups, *bias)] if self.single_grouped_bias else [bias] * groups
        for i, (parameter, shape) in enumerate(zip(parameters, shapes, strict=True)):
            if parameter.shape != shape:
                raise wrong_shape(self.own_parameter_names()[i], parameter, shape, "GroupedLinear")

    def stacked_bias(self, ctx: OperationContext, dtype: torch.dtype) -> Tensor | None:
        """See :class:`WeightedOperation`; contiguous."""
        if not self.has_bias:
            return None
        biases = ctx.parameters[self.num_weights :]
        bias = biases[0] if self.single_grouped_bias else torch.stack(list(biases))
        return bias.to(dtype).contiguous()

    def params_needed(self, require_grad: tuple[bool, ...]) -> tuple[bool, ...]:
        """All weights' (or biases') if any is needed: one launch computes all groups."""
        weights, biases = require_grad[: self.num_weights], require_grad[self.num_weights :]
        return (any(weights),) * len(weights) + (any(biases),) * len(biases)

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        """Grouped products for the input and the weights, grouped sums for the bias."""
        dy = operand_rows(ctx, grad_output)
        saved = self.restored(ctx)
        operand = self.grad_rows(saved, dy)
        dx = self.data_grad(saved, operand, grad_output)
        params, extra = self.grads(saved, operand, saved.x, dy, grad_output)
        return dx, *params, *extra

    def grads(
        self,
        saved: SavedLinear,
        dy: GroupedOperand,
        x: Any,
        dy_matrix: Tensor | None,
        grad_output: Tensor,
    ) -> tuple[Grads, Grads]:
        """Gradients of the parameters and of the extra inputs, from the products' operands.

        ``dy_matrix`` is the output's gradient ``[rows, out_features]``, None if ``dy.sums`` has
        what the bias needs of it and no scale multiplies the bias.
        """
        call, ends = saved.call, saved.call.ends
        ctx = call.ctx
        dweights: Grads = (None,) * self.num_weights
        if ctx.needs.params[0]:
            dweights = self.weight_grads(ctx, call.kernels.weight_grad(call, dy.column, x))
        sums_rows = dy.sums is None and dy_matrix is not None and self.needs_bias_grads(ctx)
        scaled_bias = ctx.saved_tensors[-1] if self.scale_bias else None
        dbias, dscales = dy.sums, None
        if sums_rows or scaled_bias is not None:
            assert dy_matrix is not None
            dy_values, index = source_of(values(dy_matrix))
            fmt = format_of_grad(ctx, by_group=True)
            if fmt is not None:
                dy_values = quantized_values(dy_values, fmt, ends)
            if sums_rows:
                dbias = grouped.grouped_sum(dy_values, ends, saved.row_scale, index)
            if scaled_bias is not None:
                dscales = grouped.grouped_dots(dy_values, scaled_bias, ends, index)
                dscales = dscales.view(grad_output.shape[:-1])
        extra = (dscales,) if self.scale_bias else ()
        return (*dweights, *self.as_bias_grads(dbias)), (None, *extra)

    def as_weight_grads(self, gradient: Tensor) -> Grads:
        """See :class:`WeightedOperation`."""
        return (gradient,) if self.single_grouped_weight else gradient.unbind(0)

    def needs_bias_grads(self, ctx: OperationContext) -> bool:
        """Whether there are biases, and they need gradients."""
        return self.has_bias and ctx.needs.params[-1]

    def as_bias_grads(self, dbias: Tensor | None) -> Grads:
        """``dbias`` ``[num_groups, out_features]``, if it was needed, as the parameters have it."""
        if not self.has_bias:
            return ()
        if dbias is None:
            return (None,) * (1 if self.single_grouped_bias else self.num_groups)
        return (dbias,) if self.single_grouped_bias else dbias.unbind(0)

    def extra_repr(self) -> str:
        """Sizes, and the options that are on."""
        options = ("scale_bias", "single_grouped_weight", "single_grouped_bias")
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.has_bias}"
            + "".join(f", {name}=True" for name in options if getattr(self, name))
        )


def operand_rows(ctx: OperationContext, t: Tensor) -> Tensor:
    """``t`` as rows in ``ctx.dtype``; under a recipe a quantized one as it is, if it is rows."""
    return matrix(t if ctx.quantizes and len(t.shape) == 2 else values(t), ctx.dtype)


def ends_of_groups(
    split_sizes: Tensor | None, x: Tensor, num_groups: int, memo: dict[Any, Any]
) -> Tensor:
    """Int32 end rows of the groups on the device of ``x``, from their sizes.

    ``memo`` holds them for the other ops of the call.

    Raises:
        ValueError: the sizes are not ``num_groups`` integers, or (where the host can see them)
            negative or of more rows than ``x`` has.
        RuntimeError: they are on the host while a CUDA graph is captured.
    """
    rows = x.shape[0]
    known_rows, known = memo.get(split_sizes, (None, None))
    if known_rows == rows and known.shape[0] == num_groups:
        return known
    if (
        split_sizes is None
        or split_sizes.dtype not in (torch.int64, torch.int32)
        or split_sizes.shape != (num_groups,)
    ):
        raise ValueError(
            f"split_sizes of GroupedLinear must be an int64 or int32 tensor of shape "
            f"({num_groups},), the rows of each group, got {described(split_sizes)}"
        )
    device = x.device
    if split_sizes.device != device and split_sizes.device.type != "cpu":
        raise ValueError(
            f"split_sizes of GroupedLinear must be on {device} with the input, or on the CPU, "
            f"got {split_sizes.device}; move them"
        )
    ends = on_device_of(x, grouped.group_ends(split_sizes, rows), "GroupedLinear")
    memo[split_sizes] = rows, ends
    return ends
