"""The context of an op: what its forward saves for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusible.fuser.backwards import Backward
from fusible.fuser.plan import GradNeeds

Tensors = Sequence[Tensor | None]
"""Extra tensors, or gradients, of one op; None where there is none."""

_ALL = GradNeeds(True, True, (), ())
_NO_KWARGS: dict[str, Any] = {}
_SEQUENCES = tuple, list  # that `OperationContext.save` looks into


class OperationContext:
    """State of one basic op between its forward and its backward.

    Ops save tensors with :meth:`save_for_backward`, or nested with :meth:`save`, and plain Python
    values as attributes (for instance ``ctx.dtype``); tensors as attributes are not supported. The
    backward gets a new context with the same values and ``saved_tensors``.

    Attributes:
        requires_grad: whether the op's backward will run.
        needs: which gradients it has to give (input, parameters, extra inputs); it may return
            None for the others.
        recipe: the recipe in force in the forward, None in high precision.
        dtype: that in which the op computes, where its forward has set it.
        autocast_dtype: the dtype of matrix products under ``torch.autocast``, None outside it.
        parameters: in the forward, the op's parameters in the order of their gradients: the very
            tensors that autograd differentiates, which the module may compute anew.
        leaves: in the backward of an op that ``accumulates_grads``, the parameters that the forward
            used, None in the place of one that is computed; never while compiling.
        collects_grads: there, whether this backward collects gradients of the op's weights, which
            those with ``inputs=`` may leave out.
        backward: there, the backward of autograd, or that in which activation checkpointing ran the
            forward again; None while compiling.
        grouped_rows: in the forward, the slots of ``to_save`` that hold rows ``[M, F]``; the
            backward reads none past ``row_ends``.
        row_ends: in the forward, the end row of each group, int32 ``[E]``.
        saved_tensors: in the backward, what the forward saved.
        to_save: in the forward, what it has saved so far.
        grad_quantizer: how the previous op wants the gradient that this one gives; None for as it
            is, and for all but the first op that a fused op covers.
        next_quantizer: in the forward, how the next op wants the output; None for as it is, and for
            all but the last op that a fused op covers.
        output_grad_quantizer: how the next op quantizes the gradient of the output, which it leaves
            to this op if this op's ``get_grad_output_quantizer`` is ``by_receiver``; None for not
            at all, and for all but the last op that a fused op covers.
        kwargs: in the forward, the keyword arguments for the op (``op_kwargs``).
        grad_input_shape: of the first op that a user's op replaces, the shape of its input.
        param_shapes: of a user's op, the shapes of its parameters; empty while compiling.
        operands: in a forward that is compiled, the inputs and parameters of the run.
        unmarked_extra: slots of the extra inputs of a user's op that need gradients, where
            ``requires_grad`` of the tensors could not say so.
        quantizes: whether the recipe quantizes operands of matrix products.
        kernels: those that the op's plan selected for it, None for its default.
        zero_tail: whether rows past the last group's end must be zero in what the op makes; False
            where a fused op covers all that could read them.
        reads_ahead: in the forward, whether the launch ahead of the op's own writes nothing that
            it may read early: parameters and group ends of a linear, the row map of ``Combine``.
        memo: in the forward, values that the ops of this one call share, by what they derive from.
        writable_extra: slots of the extra tensors that the op may write to: in the forward of its
            extra inputs, in the backward of the gradients of its extra outputs. Known where an op
            of the run needs it (``writes_extra_inputs``, ``writes_grads``), never while compiling.
        writable_grad_output: whether its backward may write to ``grad_output``, in the same cases.
        deferred: in the forward, whether an op that ``communicates`` may leave its output to be
            filled later (:func:`fusible.fuser.overlap.defer`); of a fused op, in the last context.
        complete: in the forward, fills the output that was deferred; None for no such output.
    """

    requires_grad: bool
    needs: GradNeeds
    recipe: Any
    autocast_dtype: torch.dtype | None
    parameters: Sequence[Tensor]
    leaves: Sequence[Tensor | None]
    collects_grads: bool = True
    backward: Backward | None = None
    to_save: tuple[Tensor | None, ...] = ()
    # What `save` was given, with None in the place of each tensor; None if it was not called.
    _structure: Sequence[Any] | None = None
    grouped_rows: tuple[int, ...] = ()
    row_ends: Tensor | None = None
    saved_tensors: tuple[Any, ...]
    dtype: Any = None
    grad_quantizer: Any = None
    next_quantizer: Any = None
    output_grad_quantizer: Any = None
    kwargs: dict[str, Any] = _NO_KWARGS
    grad_input_shape: torch.Size | None = None
    param_shapes: tuple[torch.Size, ...] = ()
    operands: Sequence[Tensor] = ()
    unmarked_extra: tuple[int, ...] = ()
    memo: dict[Any, Any]
    kernels: Any = None
    quantizes: bool
    zero_tail: bool = True
    reads_ahead: bool = False
    writable_extra: frozenset[int] = frozenset()
    writable_grad_output: bool = False
    deferred: bool = False
    complete: Callable[[], Any] | None = None

    if TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            """Plain Python values only."""

    def __init__(
        self,
        needs: GradNeeds = _ALL,
        recipe: Any = None,
        autocast_dtype: torch.dtype | None = None,
        parameters: Sequence[Tensor] = (),
        memo: dict[Any, Any] | None = None,
        quantizes: bool | None = None,
    ) -> None:
        self.requires_grad = needs.requires_grad
        self.needs = needs
        self.recipe = recipe
        self.autocast_dtype = autocast_dtype
        self.parameters = parameters
        self.memo = {} if memo is None else memo
        if quantizes is None:
            quantizes = recipe is not None and recipe.quantizes
        self.quantizes = quantizes

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors for the backward; called in the forward, the last call counts."""
        self.to_save, self._structure = tensors, None
        self.grouped_rows, self.row_ends = (), None

    def save(
        self, values: Sequence[Any], ends: Tensor | None = None, grouped_rows: tuple[int, ...] = ()
    ) -> None:
        """Save tensors, None and plain values, in nested tuples, named tuples and lists.

        The backward gets them by :meth:`restored`. Tensors and None become ``to_save`` in their
        order, in which ``grouped_rows`` of groups up to ``ends`` are counted. Nothing is saved if
        the backward will not run.
        """
        if not isinstance(values, _SEQUENCES):
            raise TypeError(
                f"values of ctx.save must be in a tuple or a list, got {type(values).__name__}"
            )
        if not self.requires_grad:
            return
        tensors: list[Tensor | None] = []
        self._structure = _without_tensors(values, tensors)
        self.to_save, self.grouped_rows, self.row_ends = tuple(tensors), grouped_rows, ends

    def restored(self) -> Any:
        """In the backward, what the forward gave to :meth:`save`.

        Raises:
            RuntimeError: it gave nothing to it.
        """
        if self._structure is None:
            raise RuntimeError(
                "what this backward reads must be saved by ctx.save, got ctx.save_for_backward or "
                "nothing; a fused op that replaces the forward of a linear saves by its operands()"
            )
        return _with_tensors(self._structure, iter(self.saved_tensors))

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """``torch.autocast`` as in the forward, for a backward that computes a part of it again."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device_type, self.autocast_dtype)

    def for_backward(self, saved_tensors: tuple[Tensor | None, ...]) -> OperationContext:
        """A new context for the backward, which reads the forward's values and changes none."""
        context = OperationContext.__new__(OperationContext)
        context.forward = self
        context.requires_grad = self.requires_grad
        context.needs = self.needs
        # Copied, since they have defaults, or since most backwards read them.
        context.dtype, context.grad_quantizer = self.dtype, self.grad_quantizer
        context.output_grad_quantizer = self.output_grad_quantizer
        context.recipe, context.quantizes = self.recipe, self.quantizes
        context.kernels, context.zero_tail = self.kernels, self.zero_tail
        context._structure = self._structure
        context.saved_tensors = saved_tensors
        return context

    def __getattr__(self, name: str) -> Any:
        # Called for attributes that are not found: in the backward, those set by the forward.
        if "forward" not in self.__dict__:
            raise AttributeError(f"the op's forward has set no {name!r} on its context")
        return getattr(self.forward, name)


def _without_tensors(values: Sequence[Any], tensors: list[Tensor | None]) -> Any:
    """The values with None in the place of tensors, which are appended, as is each None."""
    parts: list[Any] = []
    for value in values:
        part = value
        if value is None or isinstance(value, Tensor):
            tensors.append(value)
            part = None
        elif isinstance(value, _SEQUENCES) and value:
            part = _without_tensors(value, tensors)
        parts += (part,)  # no call, which append is
    return parts if type(values) is list else _like(values, parts)


def _with_tensors(structure: Sequence[Any], tensors: Iterator[Tensor | None]) -> Any:
    """Undo `_without_tensors`."""
    parts: list[Any] = []
    for part in structure:
        value = part
        if part is None:
            value = next(tensors)
        elif isinstance(part, _SEQUENCES) and part:
            value = _with_tensors(part, tensors)
        parts += (value,)
    return parts if type(structure) is list else _like(structure, parts)


def _like(values: Sequence[Any], parts: list[Any]) -> Any:
    """The parts as a tuple, a list, a named tuple or a size, as ``values`` are."""
    kind: Any = type(values)
    if kind is tuple:
        return tuple(parts)
    # Of the value: Dynamo of torch 2.11 does not trace `hasattr` of a class.
    return kind(*parts) if hasattr(values, "_fields") else kind(parts)


def call_fuser_forward(
    op: Any, contexts: list[OperationContext], x: Tensor, extra_inputs: Sequence[Tensors]
) -> Any:
    """Call ``op.fuser_forward`` with quantizers and keyword arguments of the contexts."""
    return op.fuser_forward(
        contexts,
        x,
        basic_op_extra_inputs=extra_inputs,
        prev_op_grad_output_quantizer=contexts[0].grad_quantizer,
        next_op_input_quantizer=contexts[-1].next_quantizer,
        basic_op_kwargs=[context.kwargs for context in contexts],
    )


def call_fuser_backward(
    op: Any, contexts: list[OperationContext], grad_output: Tensor, grad_extra: Sequence[Tensors]
) -> Any:
    """Call ``op.fuser_backward``."""
    return op.fuser_backward(contexts, grad_output, basic_op_grad_extra_outputs=grad_extra)
