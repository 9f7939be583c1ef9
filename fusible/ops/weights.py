"""Ops that own a weight: how it is stored and quantized, and where its gradient goes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fusible.arguments import check_bools
from fusible.calls import in_compiled_autograd, may_cache, reduced_by_data_parallel
from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.fuser.module_names import named_modules
from fusible.fuser.own_recipes import own_recipe, recipe_of_ops
from fusible.fuser.plan import GradNeeds
from fusible.kernels.stacking import stacked
from fusible.ops import buffers
from fusible.ops.casting import CastingOp
from fusible.ops.grouped_kernels import GroupedOperand, LinearCall, SavedLinear
from fusible.ops.matrices import restore_leading_dims
from fusible.ops.op import FusibleOperation, Grads
from fusible.ops.operand_cache import OperandCache, counting_steps, stored_tensors
from fusible.ops.wgrad import (
    DelayedWgrad,
    WeightGradient,
    accumulate,
    dummy_wgrad,
    main_grads,
    versions_of,
)
from fusible.recipes.formats import NumberFormat
from fusible.recipes.grouped import GroupedQuantizer
from fusible.recipes.matrix import Operand, QuantizedMatrix, Uses
from fusible.recipes.mixed import ByOp, check_recipes
from fusible.recipes.model_init import (
    Usage,
    check_usage,
    current_model_init,
    quantized_model_init,
    weight_parameters,
)
from fusible.recipes.product import is_quantized, quantize_operand, quantizer, values
from fusible.recipes.quantizer import Quantizer
from fusible.recipes.recipe import Recipe, Role
from fusible.recipes.sharding import is_sharded, local, shard
from fusible.recipes.tensor import QuantizedTensor
from fusible.recipes.wrapper import attributes_of

WeightQuantizer = Callable[[list[Tensor], Recipe, torch.dtype, Uses], Any]
"""From weights, a recipe, the dtype of the products and the uses that they will read."""


class WeightedOperation(CastingOp):
    """A linear transformation: its weights are operands of quantized products.

    A subclass has ``parameter_names``, the first ``num_weights`` of them the weights, and calls
    :meth:`store_weights` when they have their first values. Its backward, and that of every fused
    op that covers it, gives the weights' gradient to :meth:`weight_grads`.
    """

    keywords = buffers.NAMES
    buffer_keywords = buffers.NAMES
    handles_autocast = True
    num_weights = 1
    has_bias = False
    num_groups: int | None = None
    """Groups of rows that are quantized apart, if any."""
    in_features: int
    out_features: int
    rng_state_tracker_function: Callable[[], Any] | None
    init_method: Callable[[Tensor], Any] | None

    # In reuse_quantized_weights: the weights as operands.
    _operand_cache: OperandCache | None = None

    def __init__(
        self, *, accumulate_into_main_grad: bool = False, delay_wgrad_compute: bool = False
    ) -> None:
        check_bools(
            type(self).__name__,
            accumulate_into_main_grad=accumulate_into_main_grad,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        super().__init__()
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delay_wgrad_compute = delay_wgrad_compute
        # Weight gradients of backwards so far, oldest first, and where each is to go.
        self._delayed: deque[DelayedWgrad] = deque()
        self._wgrad_hooks: list[Callable[[], Any]] = []

    def weights(self) -> list[Tensor]:
        """The weights as they are now; in a forward, ``ctx.parameters`` has them."""
        return list(self.own_parameters()[: self.num_weights])

    def biases(self) -> list[Tensor]:
        """The biases as they are now; in a forward, ``ctx.parameters`` has them."""
        return list(self.own_parameters()[self.num_weights :])

    def reset_parameters(self) -> None:
        """Initialise the weights by ``init_method``, and the biases with zeros."""
        tracker = self.rng_state_tracker_function
        with nullcontext() if tracker is None else tracker().fork(), torch.no_grad():
            for weight in self.weights():
                self._initialize(weight)
        for bias in self.biases():
            nn.init.zeros_(bias)

    def store_weights(self) -> None:
        """Store the weights quantized, if the op is built in ``quantized_model_init``."""
        init = current_model_init()
        if init is not None:
            self._check_sizes(init.recipe, "weight")
            self._replace_weights({})

    def check_storable(self, recipe: Recipe) -> None:
        """Raise ValueError unless `store_weights_as` can store the weights for ``recipe``."""
        self._check_sizes(recipe, "weight")
        if any([is_sharded(w) for w in self._held_weights() if w is not None]):
            raise ValueError(
                f"weights of {type(self._held_by()).__name__} must be whole to be stored "
                "quantized, got shards; call quantize_ before fully_shard or expert_parallel"
            )

    def store_weights_as(
        self, recipe: Recipe, usage: Usage | None, made: dict[Tensor, nn.Parameter]
    ) -> None:
        """Store the weights as :func:`quantize_` does; ``made`` are those stored so far, by old."""
        trained = any([w.requires_grad for w in self._held_weights() if w is not None])
        usage = usage or ("training" if trained else "inference")
        with quantized_model_init(recipe=recipe, usage=usage):
            self._replace_weights(made)

    def _replace_weights(self, made: dict[Tensor, nn.Parameter]) -> None:
        held = zip(self._weight_names(), self._held_weights(), strict=True)
        old = {name: weight for name, weight in held if weight is not None}
        new = [weight for weight in old.values() if weight not in made]
        for weight, stored in zip(new, weight_parameters([w.detach() for w in new]), strict=True):
            vars(stored).update(attributes_of(weight) | attributes_of(stored))
            stored.requires_grad_(weight.requires_grad)
            made[weight] = stored
        for name, weight in old.items():
            self.register_parameter(name, made[weight])

    def check_plan(self, needs: GradNeeds, recipe: Any, *, backward: bool = False) -> None:
        """Refuse features that do not fill the bytes of the recipe's formats."""
        if recipe is not None:
            roles: tuple[Role, ...] = ("input", "weight")
            self._check_sizes(recipe, *roles, *(("grad",) if backward and needs.input else ()))

    def _check_sizes(self, recipe: Recipe, *roles: Role) -> None:
        passes = recipe.format, recipe.backward_format
        for role, fmt in [(role, format_of(role)) for role in roles for format_of in passes]:
            size = self._columns(role)
            if fmt is not None and size % fmt.element.per_byte:
                raise ValueError(
                    f"{'out' if role == 'grad' else 'in'}_features of "
                    f"{type(self._held_by()).__name__} must be a multiple of "
                    f"{fmt.element.per_byte} for {fmt.name}, the format of its {role} under the "
                    f"recipe {recipe.name}, got {size}; make it a multiple, or build and call the "
                    "op outside of the recipe"
                )

    def _columns(self, role: Role) -> int:
        return self.out_features if role == "grad" else self.in_features

    def _initialize(self, weight: Tensor) -> None:
        """Set a weight, or each matrix of it, by ``init_method``, by default Kaiming-uniform.

        A quantized weight is initialized in high precision, then quantized. If the stack is
        sharded, every process initializes all matrices and keeps its own.
        """
        part = local(weight)
        apart = isinstance(part, QuantizedTensor) or (part is not weight and weight.dim() == 3)
        value = part.new_empty(weight.shape) if apart else weight
        for matrix in value.unbind(0) if value.dim() == 3 else (value,):
            if self.init_method is not None:
                self.init_method(matrix)
            else:
                nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
        if not apart:
            return
        value = value if part is weight else shard(value, weight)
        weight.copy_(value)
        if isinstance(part, QuantizedTensor) and part.get_high_precision_init_val() is not None:
            part.keep_high_precision_init_val(local(value))

    # --- the caller's buffers --------------------------------------------------------------------

    def output_buffer(self, ctx: OperationContext, x: Tensor) -> Tensor | None:
        """The caller's memory for the output ``[..., out_features]``, or None; after ``ctx.dtype``.

        Also remembers that for the input's gradient. Every forward that covers this op calls this
        before it computes.

        Raises:
            ValueError: a buffer that does not fit.
            RuntimeError: a buffer while compiling.
        """
        kwargs = ctx.kwargs
        if not kwargs:
            return None
        # Kept on the context, not saved: the run never reads its values, and it may be written
        # more than once. Not under torch.compile.
        ctx.grad_input = buffers.checked_buffer(kwargs, "grad_input", x.shape, ctx.dtype, x)
        shape = (*x.shape[:-1], self.out_features)
        output = buffers.checked_buffer(kwargs, "output", shape, ctx.dtype, x)
        return None if output is None else buffers.marked_written(output)

    def grad_input_buffer(self, ctx: OperationContext) -> Tensor | None:
        """The caller's memory for the input's gradient ``[..., in_features]``, or None."""
        if torch.compiler.is_compiling():
            return None
        buffer = vars(ctx.forward).get("grad_input")
        return None if buffer is None else buffers.marked_written(buffer)

    # --- gradients -------------------------------------------------------------------------------

    def weight_grads(self, ctx: OperationContext, gradient: WeightGradient) -> Grads:
        """The gradients of the weights for autograd; decides where and when they are computed.

        One for each weight: the gradients, or dummy gradients for those that are in
        ``main_grad`` (:func:`fusible.ops.wgrad.dummy_wgrad`), or None for delayed ones.

        Raises:
            ValueError: ``accumulate_into_main_grad``, and a weight has no fitting ``main_grad``; or
                gradients do not go to autograd, and a weight is computed from others.
        """
        nothing = (None,) * self.num_weights
        if not (ctx.needs.params[0] and ctx.collects_grads):
            return nothing
        if not self.accumulates_grads:
            return self.as_weight_grads(gradient.compute(None, False))
        weights, into = self._leaf_weights(ctx), None
        if self.accumulate_into_main_grad:
            into = main_grads(weights, type(self).__name__, ctx.backward)
        if self.delay_wgrad_compute:
            if in_compiled_autograd():
                raise RuntimeError(
                    f"delay_wgrad_compute of {type(self).__name__} must be False under compiled "
                    "autograd, whose backward is one graph, got True; run the backward without it"
                )
            self._drop_failed()
            held = [w is h for w, h in zip(weights, self._held_weights(), strict=True)]
            versions = versions_of(gradient.reads)
            delayed = DelayedWgrad(gradient, versions, weights, held, into, ctx.backward)
            self._delayed.append(delayed)
        else:
            assert into is not None
            into.accumulate(gradient)
        return nothing if into is None else tuple([dummy_wgrad(weight) for weight in weights])

    def _held_weights(self) -> list[Tensor | None]:
        """The tensors that the module holds now under the names of the weights."""
        held = self._held_by()._parameters
        return [held.get(name) for name in self._weight_names()]

    def _weight_names(self) -> tuple[str, ...]:
        return self.own_parameter_names()[: self.num_weights]

    def _leaf_weights(self, ctx: OperationContext) -> Sequence[Tensor]:
        """The weights that the forward used, to whose gradients this op adds in autograd's place.

        While compiling the module holds them: its backward is traced with its forward.

        Raises:
            ValueError: one is computed from others.
        """
        used = self._held_weights()
        if not torch.compiler.is_compiling():
            leaves = ctx.leaves[: self.num_weights]
            used = [
                held if leaf is None and held is not None and not held.requires_grad else leaf
                for leaf, held in zip(leaves, used, strict=True)
            ]
        names = zip(self._weight_names(), used, strict=True)
        if computed := [name for name, weight in names if weight is None]:
            raise ValueError(
                f"weights of {type(self).__name__} must be leaf tensors with "
                "accumulate_into_main_grad or delay_wgrad_compute, which do not go through "
                f"autograd, got {', '.join(computed)} computed (parametrized, pruned, a replica's)"
            )
        return used  # type: ignore[return-value]

    def as_weight_grads(self, gradient: Tensor) -> Grads:
        """A gradient of all weights as one tensor, ``[..., out, in]``, as the parameters are."""
        return (gradient.view(gradient.shape[-2:]),)

    @property
    def keeps_grads(self) -> bool:
        """Whether weight gradients are delayed."""
        return self.delay_wgrad_compute

    @property
    def accumulates_grads(self) -> bool:
        """Whether weight gradients go to ``main_grad``, or are delayed."""
        return self.accumulate_into_main_grad or self.delay_wgrad_compute

    def need_backward_dw(self) -> bool:
        """Whether weight gradients come with :meth:`backward_dw`, not with ``backward()``."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the weight gradient of the oldest backward without one, then call the hooks.

        It is added to ``main_grad``, or to ``.grad`` as ``backward()`` does it, of the weights that
        the forward used; those without ``requires_grad`` by now get none. Does nothing if no
        backward is waiting; one that an error ended does not wait.

        Raises:
            RuntimeError: what it reads was written to since that backward.
        """
        self._drop_failed()
        if not self._delayed:
            return
        delayed = self._delayed.popleft()
        delayed.check(f"{type(self).__name__}({self.extra_repr()})")
        weights = delayed.targets(self._held_weights())
        with torch.no_grad():
            if delayed.into is not None:
                delayed.into.accumulate(delayed.gradient)
            elif any([w.requires_grad for w in weights]):
                accumulate(weights, self.as_weight_grads(delayed.gradient.compute(None, False)))
        for hook in self._wgrad_hooks:
            hook()

    def _drop_failed(self) -> None:
        """Drop the oldest gradients whose backwards an error ended."""
        while self._delayed and (backward := self._delayed[0].backward) and backward.failed:
            self._delayed.popleft()

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], Any]
    ) -> None:
        """Call the hook after every :meth:`backward_dw` that computed a gradient.

        For frameworks that reduce gradients in autograd's post-accumulate hook: the weights
        have ``skip_backward_post_hook`` set.
        """
        self._wgrad_hooks.append(wgrad_accumulation_and_reduce_hook)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Tell frameworks of a weight whose gradient is delayed."""
        super().register_parameter(name, param)
        if param is not None and self.delay_wgrad_compute and name.startswith("weight"):
            param.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def check_delay(self) -> None:
        """Refuse ``delay_wgrad_compute`` where delayed gradients would be lost.

        Raises:
            RuntimeError: it is on, under torch.compile or in a ``DistributedDataParallel`` that
                reduces gradients of the weights.
        """
        if not self.delay_wgrad_compute:
            return
        name = f"delay_wgrad_compute of {type(self).__name__}"
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{name} must be False under torch.compile, whose backward is one graph, got True; "
                "call the module uncompiled"
            )
        # Without gradients the forward of a reentrant checkpoint runs, which is repeated.
        trains = self.training or torch.is_grad_enabled()
        if trains and reduced_by_data_parallel(self._held_weights()):
            raise RuntimeError(
                f"{name} must be False in DistributedDataParallel, which reduces no gradients that "
                "come after the backward, got True; use fully_shard, or let "
                "DistributedDataParallel ignore the weights and reduce them in a hook of "
                "register_wgrad_accumulation_and_reduce_hooks"
            )

    # --- operands of the products ----------------------------------------------------------------

    def input_uses(self, ctx: OperationContext) -> Uses:
        """The uses of the input: row-wise in the forward, column-wise in the weight gradient."""
        return Uses(row=True, column=ctx.needs.params[0])

    def grad_uses(self, ctx: OperationContext) -> Uses:
        """The uses of the output's gradient.

        Row-wise in the data gradient, column-wise in the weight gradient.
        """
        return Uses(row=ctx.needs.input, column=ctx.needs.params[0])

    def stacked_bias(self, ctx: OperationContext, dtype: torch.dtype) -> Tensor | None:
        """The biases that the product adds, ``[num_groups, out_features]``; None without."""
        return None

    def weights_in(self, ctx: OperationContext, dtype: torch.dtype) -> list[Tensor]:
        """The weights as ordinary tensors of ``dtype``: the parameters themselves if they are."""
        weights = list(ctx.parameters[: self.num_weights])
        if any([is_quantized(weight) or weight.dtype != dtype for weight in weights]):
            return [cast(values(weight), dtype) for weight in weights]
        return weights

    def stored_weights(self, ctx: OperationContext, dtype: torch.dtype) -> list[QuantizedMatrix]:
        """The weights as they are stored, row-wise; empty unless all are, in one format.

        Their values are those of `weights_in` where they are of this nominal ``dtype``.
        """
        matrices = []
        for w in ctx.parameters[: self.num_weights]:
            if not isinstance(w, QuantizedTensor) or not w.has_rowwise or w.dtype != dtype:
                return []
            fmt = w.format
            if torch.compiler.is_compiling() and (constants := w.format_constants):
                fmt = NumberFormat.from_constants(*constants)
            matrices.append(QuantizedMatrix(*w.tensors_of(columnwise=False), fmt))
            if matrices[-1].shape != w.shape or fmt != matrices[0].format:
                return []
        return matrices

    # --- the products ----------------------------------------------------------------------------

    def product(
        self,
        call: LinearCall,
        x: Any,
        row_scale: Tensor | None,
        output: Tensor | None,
        *,
        save_x: bool = True,
    ) -> Tensor:
        """The output ``[rows, out_features]``; saves what the backward reads."""
        kernels = call.kernels
        uses = self.input_uses(call.ctx)
        operand = kernels.prepare_rows(call, x, "input", uses if save_x else Uses(row=True))
        weights, backward_weights = kernels.weights(call)
        y = kernels.product(call, operand.row, weights, row_scale, output)
        if call.ctx.quantizes and call.ctx.recipe.backward_override is not None:
            call.ctx.quantizes = False  # for what is saved, and the backward
        self.save(call, operand.column if save_x else None, row_scale, backward_weights)
        return y

    def save(self, call: LinearCall, x: Any, row_scale: Tensor | None, weights: Any) -> None:
        """Save what the gradients read; ``x`` is `GroupedOperand.column`, or None to save none."""
        raise NotImplementedError

    def grad_rows(self, saved: SavedLinear, dy: Any) -> GroupedOperand:
        """The output's gradient for the products that will read it."""
        call = saved.call
        uses = self.grad_uses(call.ctx)
        return call.kernels.prepare_rows(call, dy, "grad", uses, saved.row_scale)

    def data_grad(
        self, saved: SavedLinear, dy: GroupedOperand, grad_output: Tensor
    ) -> Tensor | None:
        """The input's gradient with the leading dimensions of ``grad_output``, if it is needed."""
        call = saved.call
        if not call.ctx.needs.input:
            return None
        buffer = self.grad_input_buffer(call.ctx)
        dx = call.kernels.data_grad(call, dy.row, saved.weights, buffer)
        return restore_leading_dims(dx, grad_output)

    # --- quantizing ------------------------------------------------------------------------------

    def get_input_quantizer(self) -> Quantizer | None:
        """Row-wise for the forward, column-wise if the weight will need its gradient."""
        wgrad = torch.is_grad_enabled() and self._requires_grad()
        return self._quantizer("input", Uses(row=True, column=wgrad))

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """Row-wise for the data gradient, column-wise if the weight will need its gradient.

        With a bias of groups this op itself quantizes, since the bias' gradient sums values.
        """
        return self._quantizer("grad", Uses(row=True, column=self._requires_grad()))

    def _requires_grad(self) -> bool:
        """Whether the weights do, or what they are computed from."""
        return any(p.requires_grad for name in self._weight_names() for p in self.stored(name))

    def _quantizer(self, role: Role, uses: Uses) -> Quantizer | None:
        recipe = own_recipe(self)
        own = None if recipe is None else quantizer(recipe, role, uses)
        if own is not None and self._columns(role) % own.format.element.per_byte:
            return None  # the op itself refuses it, and is named
        if own is None or self.num_groups is None:
            return own
        return GroupedQuantizer(
            own.format,
            self.num_groups,
            rowwise=own.rowwise_usage,
            columnwise=own.columnwise_usage,
            by_receiver=role == "grad" and self.has_bias,
        )

    def weight_operands(
        self, ctx: OperationContext, quantize: WeightQuantizer | None = None
    ) -> Any:
        """The weights for the forward and, if it will be taken, the data gradient.

        One operand, of ``[N, K]`` or ``[E, N, K]``, or one per group where weights of groups are
        stored quantized one by one (``quantize_weights``); or what ``quantize`` makes in its place,
        once where weights are quantized once.
        """
        weights = list(ctx.parameters[: self.num_weights])
        return self.quantized_weights(weights, ctx.needs, ctx.recipe, ctx.dtype, quantize)

    def quantized_weights(
        self,
        weights: list[Tensor],
        needs: GradNeeds,
        recipe: Recipe,
        dtype: torch.dtype,
        quantize: WeightQuantizer | None,
    ) -> Any:
        """`weight_operands` of these weights, for products in ``dtype``."""
        uses = Uses(row=True, column=needs.input)
        if self._operand_cache is None or not may_cache():
            if quantize is None:
                values_once = Uses(row_values=True, column=needs.input)
                return quantize_weights(weights, recipe, dtype, values_once)
            return quantize(weights, recipe, dtype, uses)
        make = partial(quantize or quantize_weights, weights, recipe, dtype, uses)
        key = recipe, dtype, make.func
        return self._operand_cache.get(stored_tensors(weights), key, make, uses)

    def recipe_notes(self, recipe: Recipe) -> tuple[str, ...]:
        """The formats of the products' operands."""
        if not recipe.quantizes:
            return ()
        roles: tuple[Role, ...] = ("input", "weight", "grad")
        formats = {role: recipe.format(role) for role in roles}
        names = [f"{role} {fmt.name if fmt else 'as it is'}" for role, fmt in formats.items()]
        notes = [f"products of quantized operands: {', '.join(names)}"]
        later = {r: recipe.backward_format(r) for r in roles if recipe.backward_override is None}
        names = [f"{r} {f.name if f else 'as it is'}" for r, f in later.items() if f != formats[r]]
        if names:
            notes.append(f"in the backward: {', '.join(names)}, quantized from the original values")
        held = [local(w) for w in self._held_weights() if w is not None]
        if any([isinstance(w, QuantizedTensor) and not w.has_columnwise for w in held]):
            notes.append(
                "weights are stored for inference: a forward whose input needs a gradient "
                "quantizes them again column-wise; "
                'fusible.quantize_(module, usage="training") stores both'
            )
        if self._operand_cache is not None:
            again = ", and again after an update" if self._operand_cache.until_updated else ""
            notes.append(f"weights are quantized once{again}: reuse_quantized_weights")
        return tuple(notes)

    def call_notes(self, ctx: OperationContext) -> tuple[str, ...]:
        """A note if weights are computed from stored ones, as with an adapter."""
        held = [local(p) for name in self._weight_names() for p in self.stored(name)]
        used = ctx.parameters[: self.num_weights]
        if all([is_quantized(w) for w in used]) or not any([is_quantized(p) for p in held]):
            return ()
        return (
            "weights are computed from stored ones, which every forward dequantizes; the products "
            "read ordinary tensors",
        )

    def copied_state(self) -> dict[str, Any]:
        """In no scope, with no backward waiting."""
        return {**super().copied_state(), "_operand_cache": None, "_delayed": deque()}


def quantize_weights(
    weights: list[Tensor], recipe: Recipe, dtype: torch.dtype, uses: Uses
) -> list[Operand]:
    """Weights for ``uses``: one operand, or one for each if some are stored quantized.

    Then matrices take the place of values.
    """
    if any([isinstance(w, QuantizedTensor) for w in weights]):  # some may have been replaced
        operands = [w if isinstance(w, QuantizedTensor) else cast(w, dtype) for w in weights]
        matrices = Uses(uses.rowwise, uses.columnwise)
        return [quantize_operand(w, recipe, "weight", matrices) for w in operands]
    weight = stack_weights(weights, dtype)
    return [quantize_operand(weight, recipe, "weight", uses)]


def stack_weights(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The only weight, or ``[E, N, K]`` of one per group, which is a copy unless they abut."""
    # The address of a traced tensor is not known.
    stack = torch.stack if torch.compiler.is_compiling() else stacked
    return cast(weights[0] if len(weights) == 1 else stack(weights), dtype)


_Module = TypeVar("_Module", bound=nn.Module)


def quantize_(
    module: _Module,
    recipe: Recipe | Mapping[Any, Recipe | None] | None = None,
    *,
    usage: Usage | None = None,
) -> _Module:
    """Store the weights of all ops in ``module`` in the recipe's weight format; returns ``module``.

    As in ``quantized_model_init``, by default of ``MXFP8BlockScaling()``; a mapping gives recipes
    by op, as in ``autocast``. ``usage`` says whether the column-wise form is stored too,
    ``"training"``, or the row-wise one alone, ``"inference"``; None is ``"inference"`` for frozen
    weights and ``"training"`` for others. Weights that are stored in the format already keep their
    bits: only the column-wise form comes or goes. Values of those in another format are quantized,
    with the error of both. Each weight becomes a new parameter, and weights that shared one still
    do: make an optimizer afterwards. Computed weights (parametrized) and modules that are no ops of
    fusible, transformers' experts among them, are left alone.

    Raises:
        TypeError: ``recipe`` is none of ``fusible.recipes``.
        ValueError: ``usage`` is neither; a weight is sharded, or its columns do not fill the bytes
            of the format; there is no op with weights. Nothing is changed then.
    """
    recipe = check_recipes("quantize_", True, recipe)
    if usage is not None:
        check_usage("quantize_", usage)
    ops = weighted_ops(module.modules())
    if not ops:
        raise ValueError(
            f"module of quantize_ must have linears of fusible, got {type(module).__name__} without"
        )
    own = [recipe_of_ops(recipe, (op,)) if isinstance(recipe, ByOp) else recipe for op in ops]
    stored = [(op, r) for op, r in zip(ops, own, strict=True) if r is not None]
    for op, its_recipe in stored:
        op.check_storable(its_recipe)
    made: dict[Tensor, nn.Parameter] = {}
    for op, its_recipe in stored:
        op.store_weights_as(its_recipe, usage, made)
    return module


def reuse_quantized_weights(
    module: nn.Module, *, until_updated: bool = False
) -> AbstractContextManager[None]:
    """Quantize each weight of ``module``'s ops once inside, rather than in every forward.

    A promise that the weights do not change inside, for gradient accumulation or inference: changed
    values are not noticed, a parameter replaced by another one is. Ignored while compiling and
    while a CUDA graph is captured, which would bake the values in. The operands are freed at
    the end.

    With ``until_updated`` weights may change inside, and are quantized again then: enter it once,
    around the training loop. The promise is that they change in no other way than

    - by an operation that PyTorch's version counter sees (``Tensor._version``), such as ``copy_``,
      ``load_state_dict`` and the steps of ordinary optimizers, or an assignment of other memory to
      ``.data``;
    - in the ``step`` of any ``torch.optim.Optimizer``, fused ones and those of master weights
      included, or after it and before the next forward.

    Not seen are, outside of a step, writes to ``.data``, through other tensors of the same memory
    (of a buffer that was assigned to ``.data``), through pointers or by ``torch._foreach``
    functions on CUDA, communication into the weights' memory, and replays of a CUDA graph that
    writes them. Weights that are computed (parametrized), or that inference mode made, are
    quantized in every forward. FSDP2 must hold shards when it is entered, not gathered parameters:
    those are filled again unseen, and are quantized again if their shards change.
    """
    check_bools("reuse_quantized_weights", until_updated=until_updated)
    return _reusing(module, until_updated)


@contextmanager
def _reusing(module: nn.Module, until_updated: bool) -> Iterator[None]:
    ops = weighted_ops(m for _, m in named_modules(module))
    outer = {op: op._operand_cache for op in ops}
    for op in ops:
        if op._operand_cache is None:  # else the outer scope's cache stays in use
            shards = [p for p in op._held_weights() if p is not None and is_sharded(p)]
            op._operand_cache = OperandCache(until_updated, shards)
    try:
        with counting_steps() if until_updated else nullcontext():
            yield
    finally:
        for op, reused in outer.items():
            op._operand_cache = reused


def weighted_ops(modules: Iterable[nn.Module]) -> list[WeightedOperation]:
    """The ops among ``modules``, and parts of them, that have weights, each once."""
    parts = [op for m in modules if isinstance(m, FusibleOperation) for op in m.basic_ops]
    return list(dict.fromkeys([op for op in parts if isinstance(op, WeightedOperation)]))
