"""One linear transformation per group of rows: the experts of a mixture-of-experts block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusible.arguments import check_bools
from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.fuser.plan import GradNeeds
from fusible.kernels import grouped
from fusible.ops.checks import (
    beside,
    check_features,
    check_row_scales,
    check_sizes,
    described,
    product_dtype,
)
from fusible.ops.dispatch import Dispatch
from fusible.ops.op import Grads
from fusible.ops.rows import as_2d, matrix, with_rows_of
from fusible.ops.state import State, convert_layout
from fusible.ops.weights import WeightedOperation
from fusible.ops.wgrad import grouped_gradient, is_transposed
from fusible.recipes.checkpoint_state import load_pieces
from fusible.recipes.grouped import GroupedQuantizer
from fusible.recipes.matrix import SAVED
from fusible.recipes.product import (
    Product,
    columnwise_only,
    encode_operand,
    from_columnwise,
    is_quantized,
    operand,
    values,
)
from fusible.recipes.quantize_ops import compute_dtype


class GradOperands(NamedTuple):
    """What the backward of a ``GroupedLinear`` reads."""

    dy: Tensor
    """``[rows, out_features]``."""
    rows: Any
    """``dy`` as the data gradient multiplies it, with ``weights``."""
    weights: list[Tensor]
    columns: Any
    """``dy`` as the weight gradient multiplies it, with ``x``."""
    x: Any
    ends: Any
    """End rows of the groups, ``[num_groups]``."""
    row_scale: Tensor | None
    """What multiplied the bias of each row, ``[rows]``."""


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
    dtype as ``ctx.dtype``, and as ``ctx.transposed`` whether the weights lie so. ``ends`` are the
    int32 end rows of the groups; there is one 3-D weight or ``num_groups`` 2-D ones; the bias
    ``[num_groups, out_features]`` is for the gradient of ``scales``. Under a recipe x and each
    weight are what ``columnwise_only`` gives of them, ``SAVED`` tensors, all None where no gradient
    reads them; the weights are one, unless they are stored quantized one by one.

    Under a recipe each group of rows is quantized apart. The op takes, as its input and as the
    gradient of its output, a ``GroupedTensor`` of the recipe's format whose groups are those of
    ``split_sizes``; its quantizers make one when they are given the rows of each group.

    Args:
        num_groups: number of groups.
        in_features: size of the input's last dimension.
        out_features: size of the output's last dimension.
        bias: whether to add a bias.
        device: of the parameters; PyTorch's default if None.
        dtype: FP32, FP16, BF16 or FP64; PyTorch's default if None.
        rng_state_tracker_function: returns an object whose ``fork()`` is a context manager that
            sets the random state for initialisation (Megatron's tracker).
        accumulate_into_main_grad: add each weight's gradient to its ``main_grad`` (FP32 or BF16),
            or write it there if it has ``overwrite_main_grad``, rather than give it to autograd.
            Biases keep theirs with autograd.
        single_grouped_weight: one ``weight`` rather than one per group.
        single_grouped_bias: one ``bias`` rather than one per group.
        delay_wgrad_compute: compute weight gradients in :meth:`backward_dw` rather than in
            ``backward()``, one call for every backward; those of biases come with the backward.
        scale_bias: multiply the bias by the extra input ``scales``.
        split_alignment: a promise that every split size is a multiple of it, which spares kernels
            that want whole tiles (256 rows on Blackwell) from padding the groups; checked where
            the host knows the sizes, and under ``fusible.checking()``.
        init_method: called with each group's weight to initialise it in place; by default
            Kaiming-uniform as in ``torch.nn.Linear``. Biases start at zero.

    Raises:
        TypeError: a size is no integer.
        ValueError: a size is under 1, the dtype another, or ``scale_bias`` without ``bias``; in a
            call, x does not fit the weights (features, dtype outside ``torch.autocast``, device),
            ``split_sizes`` are not ``num_groups`` integers or, where the host knows them, negative
            or of more rows than x, or some groups are frozen and others not.
    """

    num_groups: int
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
        if scale_bias and not bias:
            raise ValueError("scale_bias=True of GroupedLinear needs bias=True, got bias=False")
        self.num_extra_inputs = 2 if scale_bias else 1
        if scale_bias:
            self.saves = f"{type(self).saves}, bias"
        super().__init__(
            accumulate_into_main_grad=accumulate_into_main_grad,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.scale_bias = scale_bias
        self.split_alignment = split_alignment
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias
        self.rng_state_tracker_function = rng_state_tracker_function
        self.init_method = init_method
        sizes = "num_groups", "in_features", "out_features", "split_alignment"
        check_sizes("GroupedLinear", dtype, **{name: getattr(self, name) for name in sizes})
        self.num_weights = 1 if single_grouped_weight else num_groups
        self._make_parameters(device, dtype)
        self.reset_parameters()
        self.store_weights()

    def check_producer(self, slot: int, producer: Any) -> None:
        """Refuse the split sizes of another number of groups."""
        given = producer.num_experts if isinstance(producer, Dispatch) else self.num_groups
        if given != self.num_groups:
            raise ValueError(
                f"num_groups of GroupedLinear must be the {given} experts of the Dispatch before "
                f"it, got {self.num_groups}"
            )

    def _make_parameters(
        self, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Set the weights and biases, and their names in order."""
        self.parameter_names = (
            *self._names_of("weight", self.single_grouped_weight),
            *(self._names_of("bias", self.single_grouped_bias) if self.has_bias else ()),
        )
        shape = self.num_groups, self.out_features, self.in_features
        weight = torch.empty(shape, device=device, dtype=dtype)
        self._add_parameters("weight", weight, self.single_grouped_weight)
        if self.has_bias:
            bias = torch.empty(shape[:2], device=device, dtype=dtype)
            self._add_parameters("bias", bias, self.single_grouped_bias)

    def _names_of(self, name: str, single: bool) -> tuple[str, ...]:
        return (name,) if single else tuple(f"{name}{group}" for group in range(self.num_groups))

    def _add_parameters(self, name: str, values: Tensor, single: bool) -> None:
        # Side by side in one allocation, so that kernels can view them as one tensor; nothing
        # keeps the allocation itself, since conversions of a module replace its parameters.
        parts = (values,) if single else values.unbind(0)
        for own, value in zip(self._names_of(name, single), parts, strict=True):
            self.register_parameter(own, nn.Parameter(value))

    def reset_parameters(self) -> None:
        """Initialise the weights by ``init_method``, and the biases with zeros."""
        tracker = self.rng_state_tracker_function
        with nullcontext() if tracker is None else tracker().fork(), torch.no_grad():
            for weight in self.weights():
                self.initialize(weight, self.init_method)
        for bias in self.biases():
            nn.init.zeros_(bias)

    def notes(self, dtype: str, target: Any) -> tuple[str, ...]:
        """Says where PyTorch's own grouped product synchronises, or rounds a weight gradient."""
        if target.device != "cuda":
            return ()
        if dtype != "bfloat16":
            return (
                f"{dtype} on CUDA runs a loop over groups that reads the split sizes on the host "
                "(a synchronisation); bfloat16 does not",
            )
        if self.accumulate_into_main_grad:
            return (
                "weight gradients are rounded to bfloat16 before they are added to main_grad: "
                "PyTorch's grouped product has no FP32 output",
            )
        return ()

    def _load_from_state_dict(self, state_dict: State, prefix: str, *args: Any) -> None:
        # Quantized weights are put together from their pieces first.
        load_pieces(self, state_dict, prefix, *args[-3:])
        layouts = {"weight": self.single_grouped_weight}
        if self.has_bias:
            layouts["bias"] = self.single_grouped_bias
        for name, single in layouts.items():
            convert_layout(state_dict, prefix, name, self.num_groups, single=single)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # --- math ------------------------------------------------------------------------------------

    def get_grad_output_quantizer(self) -> Any:
        """That of the weights; by this op itself if it has a bias, whose gradients sum values."""
        made = super().get_grad_output_quantizer()
        if isinstance(made, GroupedQuantizer):
            made.by_receiver = self.has_bias
        return made

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
        """One grouped product, of quantized operands under a recipe."""
        (ctx,) = basic_op_ctxs
        x, ends, row_scale, weights = self.operands(ctx, input_, *basic_op_extra_inputs[0])
        bias = self.stacked_bias(ctx, x.dtype)
        output = self.output_buffer(ctx, input_, basic_op_kwargs[0])
        y = _product(output, x, weights, ends, bias, row_scale, False)
        return with_rows_of(cast(y, ctx.dtype), input_), [()]

    def operands(
        self,
        ctx: OperationContext,
        input_: Tensor,
        split_sizes: Tensor | None,
        scales: Tensor | None = None,
        *,
        ends_of: Callable[[Tensor, int], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Checked ``(x, ends, row_scale, weights)`` of the product, saved as the backward expects.

        ``x`` is ``[rows, in_features]``; it and the weights are in ``ctx.dtype``, which this sets,
        decoded if they are quantized. Under a recipe they are what its formats hold, decoded to
        ``compute_dtype``, and are saved encoded. ``ends_of(split_sizes, rows)`` may compute
        ``ends`` in the place of ``kernels.grouped.group_ends``.
        """
        if ctx.recipe is not None and ctx.recipe.quantizes:
            x, ends, scales = self.rows(ctx, input_, split_sizes, scales, ends_of=ends_of)
            return self._encoded(ctx, x, ends, scales)
        x, ends, scales = self.rows(ctx, values(input_), split_sizes, scales, ends_of=ends_of)
        weights = self.weights_in(ctx, ctx.dtype)
        ctx.save_for_backward(x, ends, scales, *weights, self.scaled_bias(ctx))
        return x, ends, scales, weights

    def _encoded(
        self, ctx: OperationContext, x: Tensor, ends: Tensor, scales: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Operands under a recipe: saved as it encodes them, and given as that decodes."""
        dgrad, wgrad, compute = ctx.needs.input, ctx.needs.params[0], compute_dtype(x.device)
        products: tuple[Product, ...] = ("forward", "wgrad") if wgrad else ("forward",)
        xq = encode_operand(x, ctx.recipe, "input", *products, ends=ends, at_once=("forward",))
        wqs = self.encoded_weights(ctx)
        ctx.save_for_backward(
            *columnwise_only(xq, needed=wgrad),
            ends,
            scales,
            *[t for wq in wqs for t in columnwise_only(wq, needed=dgrad)],
            self.scaled_bias(ctx),
        )
        rows = operand(xq, "forward", "input", compute)
        return rows, ends, scales, [operand(wq, "forward", "weight", compute) for wq in wqs]

    def weights_in(self, ctx: OperationContext, dtype: torch.dtype) -> list[Tensor]:
        """The weights as ordinary tensors of ``dtype``: the parameters themselves if they are."""
        weights = list(ctx.parameters[: self.num_weights])
        if is_quantized(weights[0]) or weights[0].dtype != dtype:
            return [cast(values(weight), dtype) for weight in weights]
        return weights

    def rows(
        self,
        ctx: OperationContext,
        input_: Tensor,
        split_sizes: Tensor | None,
        scales: Tensor | None = None,
        *,
        ends_of: Callable[[Tensor, int], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Checked ``(x, ends, row_scale)``; x as rows in ``ctx.dtype``, unless it is quantized."""
        self.refuse_tracing()
        check_features(input_, self.in_features, "GroupedLinear")
        scales = self.checked_scales(ctx, input_, scales)
        x = matrix(input_, ctx.dtype)
        ends = group_ends(split_sizes, x, self.num_groups, ctx.memo, ends_of)
        if self.split_alignment > 1 and split_sizes is not None:
            grouped.check_alignment(split_sizes, self.split_alignment)
        return x, ends, scales

    def checked_scales(
        self, ctx: OperationContext, input_: Tensor, scales: Tensor | None
    ) -> Tensor | None:
        """The row scales of the bias, contiguous ``[rows]``; checks all but the input's features.

        Sets ``ctx.dtype``, that of the product, and ``ctx.transposed``.
        """
        weight = ctx.parameters[0]
        ctx.dtype = product_dtype(ctx, input_, weight, "GroupedLinear")
        ctx.transposed = is_transposed(weight)
        if not self.scale_bias:
            return None
        check_row_scales(scales, input_, "GroupedLinear")
        return scales.reshape(-1).contiguous()  # type: ignore[union-attr]

    def stacked_bias(self, ctx: OperationContext, dtype: torch.dtype) -> Tensor | None:
        """The biases as one contiguous ``[num_groups, out_features]``, or None."""
        if not self.has_bias:
            return None
        biases = ctx.parameters[self.num_weights :]
        bias = biases[0] if self.single_grouped_bias else torch.stack(list(biases))
        return bias.to(dtype).contiguous()

    def scaled_bias(self, ctx: OperationContext) -> Tensor | None:
        """What :meth:`scale_grad` reads, the last tensor that is saved; after ``ctx.dtype``."""
        if not (self.scale_bias and ctx.needs.extra_inputs[1]):
            return None
        return self.stacked_bias(ctx, ctx.dtype)

    def check_plan(self, needs: GradNeeds, recipe: Any, *, backward: bool = False) -> None:
        """Also refuse groups of which some need a gradient and some do not."""
        super().check_plan(needs, recipe, backward=backward)
        count = self.num_weights
        for what, needed in (("weights", needs.params[:count]), ("biases", needs.params[count:])):
            if len(set(needed)) > 1:
                frozen = [group for group, wanted in enumerate(needed) if not wanted]
                raise ValueError(
                    f"{what} of all groups of GroupedLinear must agree in requires_grad, got False "
                    f"for groups {frozen} only; freeze all groups, or zero their gradients"
                )

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]:
        """Grouped products for the input and the weights, grouped sums for the bias."""
        (ctx,) = basic_op_ctxs
        given = self.grad_operands(ctx, grad_output)
        dx = None
        if ctx.needs.input:
            buffer = self.grad_input_buffer(ctx)
            dx = _product(buffer, given.rows, given.weights, given.ends, None, None, True)
            dx = with_rows_of(cast(dx, ctx.dtype), grad_output)
        gradient = grouped_gradient(given.columns, given.x, given.ends, ctx.transposed)
        dweights, shape = self.weight_grads(ctx, gradient), grad_output.shape[:-1]
        params, extra = self.grads(ctx, dweights, given.dy, given.ends, given.row_scale, shape)
        return dx, [params], [extra]

    def grad_operands(self, ctx: OperationContext, grad_output: Tensor) -> GradOperands:
        """What the products of the backward multiply: as it is, or as the recipe decodes it."""
        if ctx.recipe is not None and ctx.recipe.quantizes:
            return self._encoded_grad(ctx, matrix(grad_output, ctx.dtype))
        x, ends, row_scale, *weights, _ = ctx.saved_tensors
        dy = cast(as_2d(grad_output), ctx.dtype)
        return GradOperands(dy, dy, weights, dy, x, ends, row_scale)

    def _encoded_grad(self, ctx: OperationContext, dy: Tensor) -> GradOperands:
        saved, recipe, compute = ctx.saved_tensors, ctx.recipe, compute_dtype(dy.device)
        ends, row_scale = saved[SAVED : SAVED + 2]
        dgrad, wgrad = ctx.needs.input, ctx.needs.params[0]
        asked: dict[Product, bool] = {"dgrad": dgrad, "wgrad": wgrad}
        products = [product for product, needed in asked.items() if needed]
        dyq = encode_operand(dy, recipe, "grad", *products, ends=ends, at_once=products)
        rows = columns = x = None
        weights: list[Tensor] = []
        if dgrad:
            rows, fmt = operand(dyq, "dgrad", "grad", compute), recipe.format("weight")
            parts = [saved[i : i + SAVED] for i in range(SAVED + 2, len(saved) - 1, SAVED)]
            encoded = [from_columnwise(part, fmt) for part in parts]
            weights = [operand(wq, "dgrad", "weight", compute) for wq in encoded]
        if wgrad:
            columns = operand(dyq, "wgrad", "grad", compute)
            xq = from_columnwise(saved[:SAVED], recipe.format("input"))
            x = operand(xq, "wgrad", "input", compute)
        return GradOperands(values(dy), rows, weights, columns, x, ends, row_scale)

    def grads(
        self,
        ctx: OperationContext,
        dweights: Grads,
        dy: Tensor,
        ends: Tensor,
        row_scale: Tensor | None,
        shape: Sequence[int],
    ) -> tuple[Grads, Grads]:
        """Gradients of the parameters, of which those of the weights are given, and of the scales.

        ``dy`` is ``[rows, out_features]``, and ``shape`` what the leading dimensions were.
        """
        dbiases = self.bias_grads(ctx, dy, ends, row_scale)
        return (*dweights, *dbiases), (None, *self.scale_grad(ctx, dy, ends, shape))

    def divided(self, gradient: Tensor | None) -> Grads:
        """See :class:`WeightedOperation`."""
        assert gradient is not None
        return (gradient,) if self.single_grouped_weight else gradient.unbind(0)

    def bias_grads(
        self, ctx: OperationContext, dy: Tensor, ends: Tensor, row_scale: Tensor | None
    ) -> Grads:
        """Gradients of the bias parameters."""
        wanted = self.needs_bias_grads(ctx)
        return self.as_bias_grads(grouped.grouped_sum(dy, ends, row_scale) if wanted else None)

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

    def scale_grad(
        self, ctx: OperationContext, dy: Tensor, ends: Tensor, shape: Sequence[int]
    ) -> Grads:
        """``sum(dy * bias)`` over each row, zero in the tail, in a tuple; empty without scales."""
        if not self.scale_bias:
            return ()
        bias = ctx.saved_tensors[-1]
        if bias is None:
            return (None,)
        return (grouped.grouped_dots(dy, bias, ends).view(shape),)

    def extra_repr(self) -> str:
        """Sizes, and the options that are on."""
        options = ("scale_bias", "single_grouped_weight", "single_grouped_bias")
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.has_bias}"
            + "".join(f", {name}=True" for name in options if getattr(self, name))
        )


def _product(
    out: Tensor | None,
    x: Tensor,
    weights: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
) -> Tensor:
    """The grouped product ``[rows, features]``, in ``out`` ``[..., features]`` if that is given."""
    rows = None if out is None else out.view(x.shape[0], out.shape[-1])
    return grouped.grouped_mm(x, weights, ends, bias, row_scale, transpose_w, rows)


def group_ends(
    split_sizes: Tensor | None,
    x: Tensor,
    num_groups: int,
    memo: dict[Any, Any],
    ends_of: Callable[[Tensor, int], Tensor] | None = None,
) -> Tensor:
    """Int32 end rows of the groups on the device of ``x``, from their sizes.

    ``memo`` spares the ops of one call from computing them anew. ``ends_of(split_sizes, rows)``
    does so in the place of ``kernels.grouped.group_ends``.

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
    ends = beside(x, (ends_of or grouped.group_ends)(split_sizes, rows), "GroupedLinear")
    memo[split_sizes] = rows, ends
    return ends
