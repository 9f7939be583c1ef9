"""Dense linear transformation: ``BasicLinear``, ``Bias`` and their pair ``Linear``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fusible.arguments import check_bools
from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.fuser.own_recipes import own_recipe
from fusible.fuser.plan import Plan, joined
from fusible.fuser.registry import is_ours
from fusible.fuser.tracing import constant_when_traced
from fusible.ops.casting import apply_quantizer, format_of_grad, quantized_values
from fusible.ops.collectives import AllGather, AllReduce, AllReduceGrad, ReduceScatter, all_reduce
from fusible.ops.grouped_kernels import LinearCall, SavedLinear, kernels_of
from fusible.ops.hooks import HOOKS, patches, why_called
from fusible.ops.inputs import (
    check_device,
    check_dtype,
    check_features,
    check_sizes,
    product_dtype,
    wrong_shape,
)
from fusible.ops.kernel_rows import SM90_FP8_ROW
from fusible.ops.matrices import matrix, restore_leading_dims
from fusible.ops.op import BasicOperation, FusedOperation, OpGrads
from fusible.ops.state import State
from fusible.ops.weights import WeightedOperation
from fusible.ops.wgrad import dense_gradient, is_column_major
from fusible.recipes.product import values
from fusible.recipes.quantizer import Quantizer


class BasicLinear(WeightedOperation):
    """``x @ weight.T`` for x ``[..., in_features]``, weight ``[out_features, in_features]``.

    The input is cast to the weight's dtype, that of ``torch.autocast`` inside it, which the output
    has too.

    Saves ``(x, weight)`` in the dtype of the product, and that as ``ctx.dtype``. Under a recipe
    they are operands of the kernels (:meth:`save`).

    Args:
        in_features: size of the input's last dimension.
        out_features: size of the output's last dimension.
        device: of the weight; PyTorch's default if None.
        dtype: FP32, FP16, BF16 or FP64; PyTorch's default if None.
        rng_state_tracker_function: returns an object whose ``fork()`` is a context manager that
            sets the random state for initialisation (Megatron's tracker).
        init_method: called with the weight to initialise it in place; by default
            ``kaiming_uniform_(a=sqrt(5))``, as ``torch.nn.Linear``.
        accumulate_into_main_grad: add the weight's gradient to ``weight.main_grad`` (FP32 or BF16),
            or write it there if ``weight.overwrite_main_grad``, rather than give it to autograd.
        tensor_parallel_mode, userbuffers_options: must be None; :class:`Linear` is tensor-parallel.
        tensor_parallel_group, sequence_parallel: have no effect without the mode.

    Raises:
        TypeError: a size is no integer.
        ValueError: a size is under 1, the dtype another, or an option that must be None; in a call,
            x has other features or is elsewhere.
    """

    fact_names = (
        "in_features",
        "out_features",
        "accumulate_into_main_grad",
        "delay_wgrad_compute",
    )
    parameter_names = ("weight",)
    kernel_rows = (SM90_FP8_ROW.for_linear,)  # all rows as one group
    saves = "x, weight"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: None = None,
    ) -> None:
        check_bools("BasicLinear", sequence_parallel=sequence_parallel)
        check_sizes("BasicLinear", dtype, in_features=in_features, out_features=out_features)
        if tensor_parallel_mode is not None:
            raise ValueError(
                "tensor_parallel_mode of BasicLinear must be None, got "
                f"{tensor_parallel_mode!r}; use Linear(..., bias=False), which composes it of "
                "collectives and a BasicLinear"
            )
        if userbuffers_options is not None:
            raise ValueError(
                "userbuffers_options of BasicLinear must be None, got "
                f"{userbuffers_options!r:.200}; userbuffers are not offered: leave them out, the "
                "values are the same"
            )
        super().__init__(accumulate_into_main_grad=accumulate_into_main_grad)
        # Also those of this process, as Transformer Engine names them.
        self.in_features = self.local_in_features = in_features
        self.out_features = self.local_out_features = out_features
        self.rng_state_tracker_function = rng_state_tracker_function
        self.init_method = init_method
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )
        self.reset_parameters()
        self.store_weights()

    def forward_impl(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """``x @ weight.T``, of quantized operands under a recipe."""
        if not ctx.quantizes:
            x, weight = self.operands(ctx, input_)
            output = self.output_buffer(ctx, input_)
            return F.linear(x, weight) if output is None else _write_product(output, x, weight.t())
        self._check(ctx, input_)
        ctx.column_major = is_column_major(ctx.parameters[0])
        output = self.output_buffer(ctx, input_)
        rows = matrix(input_, ctx.dtype)
        y = self.product(self._call(ctx, rows), rows, None, output)
        return restore_leading_dims(y, input_)

    def default_kernels(self, dtype: str, target: Any) -> str:
        """PyTorch's."""
        return "PyTorch's"

    def operands(self, ctx: OperationContext, input_: Tensor) -> tuple[Tensor, Tensor]:
        """The checked input and weight in the product's dtype, saved if the backward reads them.

        Without a recipe; quantized ones are dequantized.
        """
        self._check(ctx, input_)
        weight = cast(values(ctx.parameters[0]), ctx.dtype)
        x = cast(values(input_), ctx.dtype)
        needs = ctx.needs
        ctx.save_for_backward(x if needs.params[0] else None, weight if needs.input else None)
        return x, weight

    def _check(self, ctx: OperationContext, input_: Tensor) -> None:
        op_name = "BasicLinear" if self._holder is None else "Linear"
        check_features(input_, self.in_features, op_name)
        weight, shape = ctx.parameters[0], (self.out_features, self.in_features)
        if weight.shape != shape:
            raise wrong_shape("weight", weight, shape, op_name)
        ctx.dtype = product_dtype(ctx, input_, weight, op_name)

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        """``dy @ weight`` and ``dy.T @ x``, of quantized operands under a recipe."""
        if ctx.quantizes:
            return self._quantized_backward(ctx, grad_output)
        weight = ctx.saved_tensors[1]
        dy = cast(grad_output, ctx.dtype)
        dx = None
        if ctx.needs.input:
            buffer = self.grad_input_buffer(ctx)
            dx = dy @ weight if buffer is None else _write_product(buffer, dy, weight)
        return dx, *self.weight_grads(ctx, dense_gradient(dy, ctx.saved_tensors[0]))

    def _quantized_backward(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        rows = matrix(grad_output, ctx.dtype)
        call = self._call(ctx, rows)
        x, weights = ctx.restored()
        saved = SavedLinear(call, x, None, weights)
        dy = self.grad_rows(saved, rows)
        dx = self.data_grad(saved, dy, grad_output)
        if not ctx.needs.params[0]:
            return dx, None
        return dx, *self.weight_grads(ctx, call.kernels.weight_grad(call, dy.column, x))

    def save(self, call: LinearCall, x: Any, row_scale: Tensor | None, weights: Any) -> None:
        """See :class:`WeightedOperation`."""
        needs = call.ctx.needs
        call.ctx.save((x if needs.params[0] else None, weights if needs.input else None))

    def _call(self, ctx: OperationContext, rows: Tensor) -> LinearCall:
        kernels = kernels_of(ctx)
        return LinearCall(kernels, self, ctx, kernels.single_group(rows), None)


def _write_product(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for a ``[..., K]`` and b ``[K, N]``, in ``out``."""
    with torch.no_grad():
        torch.mm(a.reshape(-1, a.shape[-1]), b, out=out.view(-1, b.shape[1]))
    return out


class Bias(BasicOperation):
    """``x + bias`` for x ``[..., size]``, bias ``[size]``. Saves nothing.

    Args:
        size: of the input's last dimension.
        device: of the bias; PyTorch's default if None.
        dtype: of the bias; PyTorch's default if None.
        tensor_parallel: hold the part of the bias that is this process's, for the part of the
            features that it has.
        tensor_parallel_group: the processes that share the bias; all if None.
        summed_over: the process group over whose processes the gradient is summed, for one bias
            that each of them adds to other rows; None for no sum.

    Raises:
        TypeError: the size is no integer.
        ValueError: it is under 1, or the dtype is none that ops compute in; in a call, x has other
            features or is elsewhere.
    """

    fact_names = ("size",)
    parameter_names = ("bias",)
    saves = "nothing"

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
        summed_over: Any = None,
    ) -> None:
        check_sizes("Bias", dtype, size=size)
        check_bools("Bias", tensor_parallel=tensor_parallel)
        super().__init__()
        if tensor_parallel:
            size = _per_process(size, dist.get_world_size(tensor_parallel_group), "size", "Bias")
        self.size = self.local_size = size  # in tensor parallelism this process's part
        self.summed_over = summed_over
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros."""
        nn.init.zeros_(self.bias)

    def forward_impl(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """``x + bias`` in the dtype of ``x``."""
        check_features(input_, self.size, "Bias")
        check_dtype(input_, "input", "Bias")
        (bias,) = ctx.parameters
        if bias.shape != (self.size,):
            raise wrong_shape("bias", bias, (self.size,), "Bias")
        check_device(input_, bias, "Bias")
        return apply_quantizer(values(input_) + cast(bias, input_.dtype), ctx.next_quantizer)

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The quantizer; this op itself quantizes, since its bias gradient sums values."""
        recipe = own_recipe(self)
        fmt = None if recipe is None else recipe.format("grad")
        return None if fmt is None else Quantizer(fmt, by_receiver=True)

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        """``dy``, and its sum over rows, both of the values of a ``dy`` that is quantized."""
        dy = values(grad_output)
        fmt = format_of_grad(ctx, by_group=False)
        if fmt is not None:
            dy = quantized_values(grad_output, fmt)
        dbias = None
        if ctx.needs.params[0]:
            dbias = self.bias_grad(dy.reshape(-1, self.size).sum(0))
        if not ctx.needs.input:
            return None, dbias
        quantizer = ctx.grad_quantizer
        if quantizer is None or getattr(quantizer, "by_receiver", False):
            return dy, dbias
        return apply_quantizer(grad_output, quantizer), dbias  # not dy: it would be quantized twice

    def bias_grad(self, dbias: Tensor) -> Tensor:
        """The bias' gradient from this process's sum over rows."""
        return dbias if self.summed_over is None else all_reduce(dbias, self.summed_over)


class Linear(FusedOperation):
    """``x @ weight.T + bias``, a drop-in replacement for ``torch.nn.Linear``.

    Runs as ``BasicLinear`` and ``Bias``, which fusion rules see; ``weight`` and ``bias`` are this
    module's own parameters. Other arguments as in :class:`BasicLinear`.

    Tensor-parallel, it holds the part of the weight that is this process's. ``"column"`` divides
    the output features (weight ``[out_features / P, in_features]``, bias ``[out_features / P]``):
    every process gets the same input and gives its part of the output. ``"row"`` divides the input
    features (weight ``[out_features, in_features / P]``): every process gives the same output, to
    which the one bias, ``[out_features]`` and the same everywhere, is added after the sum.

    Args:
        tensor_parallel_mode: None, "column" or "row".
        tensor_parallel_group: the processes that share the layer; all if None.
        sequence_parallel: what all processes would hold alike, the input of "column" and the output
            of "row", is divided among them along its first dimension.

    Raises:
        ValueError: another mode, or features that P processes cannot share equally.
        RuntimeError: tensor-parallel without ``torch.distributed`` initialized.
    """

    holds_parameters = True
    weight: nn.Parameter
    bias: nn.Parameter | None

    # `_unpatched`: the count of patches at which no part was patched, and the hooks of the parts,
    # in one tuple so that threads see both. `_called_parts`: whether the last call called the
    # parts. Copies start anew.
    __slots__ = ("_called_parts", "_unpatched")
    slot_values: ClassVar[Mapping[str, Any]] = {
        **FusedOperation.slot_values,
        "_called_parts": False,
        "_unpatched": (-1, ()),
    }
    _unpatched: tuple[int, Sequence[Any]]
    _called_parts: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        check_bools("Linear", bias=bias, sequence_parallel=sequence_parallel)
        before, after, processes = _collectives(
            tensor_parallel_mode, tensor_parallel_group, sequence_parallel
        )
        column, row = tensor_parallel_mode == "column", tensor_parallel_mode == "row"
        linear = BasicLinear(
            _per_process(in_features, processes, "in_features") if row else in_features,
            _per_process(out_features, processes, "out_features") if column else out_features,
            device=device,
            dtype=dtype,
            rng_state_tracker_function=rng_state_tracker_function,
            init_method=init_method,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        parts: list[BasicOperation] = [*before, linear, *after]
        if bias:
            group = tensor_parallel_group or (dist.group.WORLD if row else None)
            summed_over = group if row and sequence_parallel and processes > 1 else None
            parts.append(
                Bias(linear.out_features, device=device, dtype=dtype, summed_over=summed_over)
            )
        super().__init__(parts)
        self.in_features, self.out_features = in_features, out_features
        self.tensor_parallel_mode = tensor_parallel_mode
        for part in parts:
            self._parameters.update(part._parameters)
            self._attach(part)
        if not bias:
            self.register_parameter("bias", None)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse a bias that neither a part nor a user's forward would add."""
        parts = vars(self).get("_basic_ops", ())  # none while they are made
        added = not parts or isinstance(parts[-1], Bias) or not is_ours(type(self).forward)
        if name == "bias" and param is not None and not added:
            raise TypeError(
                "bias of a Linear that was made with bias=False must be None, got "
                f"{type(param).__name__}; make it with bias=True"
            )
        super().register_parameter(name, param)

    def _attach(self, part: BasicOperation) -> BasicOperation:
        """Let a part read the parameters of this module."""
        # Share the dictionaries, so that no assignment (load_state_dict(assign=True), FSDP2,
        # to_empty) separates them; parametrized values are read through `_holder`.
        for held in ("_parameters", "_modules", "_buffers"):
            part.__dict__[held] = self.__dict__[held]
        part._holder = weakref.ref(self)
        return part

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """The parts."""
        first = self._basic_ops[0]
        if first._holder is None or first._holder() is not self:  # of what this is a copy of
            self._basic_ops = tuple(self._attach(part.copied()) for part in self._basic_ops)
        elif first._parameters is not self._parameters:
            self._basic_ops = tuple(map(self._attach, self._basic_ops))
        return self._basic_ops

    def forward(self, input: Tensor, *extra_inputs: Any, **kwargs: Any) -> Any:
        """Run the parts as one, or call them one by one where a part has hooks or the like."""
        count, hooks = self._unpatched
        is_known = count == patches.count and not torch.compiler.is_compiling()
        calls_parts = not (is_known and not any(hooks)) and self._calls_parts()
        self._note_call(calls_parts)
        if not calls_parts:
            return super().forward(input, *extra_inputs, **kwargs)
        if kwargs:
            self._check_kwargs(kwargs)
        for part in self.basic_ops:
            input = part(input, *extra_inputs, **kwargs)
        return input

    @property
    def plan(self) -> Plan | None:
        """The plan of the last call of this op alone; None before the first."""
        if not self._called_parts:
            return super().plan
        return joined([part.plan for part in self.basic_ops if part.plan is not None])

    def _calls_parts(self) -> bool:
        """Whether a call of a part does more than the part's own forward."""
        if torch.compiler.is_compiling():
            self._trace_capture()  # which makes a copy's parts, if need be
            return any([why_called(part) for part in self.basic_ops])
        count = patches.count
        hooks = [getattr(part, name) for part in self.basic_ops for name in HOOKS]
        calls_parts = any([why_called(part) for part in self.basic_ops])
        if not calls_parts:
            self._unpatched = count, hooks
        return calls_parts

    @constant_when_traced
    def _note_call(self, calls_parts: bool) -> None:
        if calls_parts is not self._called_parts:
            self._called_parts = calls_parts

    def _load_from_state_dict(self, state_dict: State, prefix: str, *args: Any) -> None:
        # Transformer Engine saves parameters, and quantizers' states, under the ops it is made of.
        start = f"{prefix}basic_ops."
        for number, name in enumerate(("weight", "bias")):
            if prefix + name not in state_dict and f"{start}{number}.{name}" in state_dict:
                state_dict[prefix + name] = state_dict.pop(f"{start}{number}.{name}")
        for key in [key for key in state_dict if key.startswith(start)]:
            if key.endswith("._extra_state"):
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def reset_parameters(self) -> None:
        """Initialise the weight by ``init_method``, and the bias with zeros."""
        for part in self.basic_ops:
            if isinstance(part, BasicLinear | Bias):
                part.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes."""
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={self.bias is not None}"
        mode = self.tensor_parallel_mode
        return text if mode is None else f"{text}, tensor_parallel_mode={mode!r}"


def _collectives(
    mode: str | None, group: Any, sequence_parallel: bool
) -> tuple[list[BasicOperation], list[BasicOperation], int]:
    """The ops before and after the product, and the number of processes."""
    if mode is None:
        return [], [], 1
    if mode == "column":
        before = AllGather(group) if sequence_parallel else AllReduceGrad(group)
        return [before], [], dist.get_world_size(group)
    if mode == "row":
        after = ReduceScatter(group) if sequence_parallel else AllReduce(group)
        return [], [after], dist.get_world_size(group)
    raise ValueError(f'tensor_parallel_mode must be None, "column" or "row", got {mode!r}')


def _per_process(features: int, processes: int, what: str, op_name: str = "Linear") -> int:
    if features % processes:
        raise ValueError(
            f"{what} of a tensor-parallel {op_name} must be a multiple of its {processes} "
            f"processes, got {features}"
        )
    return features // processes
