"""The op contract: what a basic op declares, and which ops a fused op replaces.

An op of this package defines ``forward_impl``, which a step calls: of a basic op by
``run_forward``, which returns what a fused op would. Where a user's op overrides a method of
te.ops, a step calls ``fuser_forward``, which calls ``op_forward``, and that ``forward_impl``, as
far as none is overridden. The methods of the backward do the same.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fusible.fuser.context import OperationContext
from fusible.fuser.op_facts import Dtypes
from fusible.fuser.plan import GradNeeds, Plan
from fusible.fuser.plan_key import PlanKey
from fusible.fuser.registry import is_ours
from fusible.fuser.rules import KernelRow
from fusible.fuser.run import Run
from fusible.fuser.schedule import FastPath
from fusible.fuser.tracing import WeakGroups, constant_when_traced
from fusible.fuser.user_steps import kind_of
from fusible.fuser.wiring import by_name, wire
from fusible.names import did_you_mean
from fusible.ops.channels import Channels, channels
from fusible.ops.formula_op import FormulaOp
from fusible.ops.hooks import PatchesCounted
from fusible.ops.state import ModuleState

Contexts = Sequence[OperationContext]
Grads = Sequence[Tensor | None]
ExtraTensors = Sequence[Sequence[Tensor | None]]
"""Extra inputs or outputs, or their gradients, for each basic op that a fused op covers."""
OpGrads = tuple[Tensor | None, ...]
"""The gradient of a basic op's input, then those of its parameters and extra inputs."""
FusedOutputs = tuple[Tensor, ExtraTensors]
"""The output, and for each basic op its extra outputs."""
FusedGrads = tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]
"""The gradient of the input, and for each basic op those of its parameters and extra inputs."""


class FusibleOperation(ModuleState, PatchesCounted):
    """An operation that the fuser can place: a basic op, or a fused one that replaces several."""

    num_extra_inputs: int = 0
    saves: str = ""
    handles_autocast: bool = False
    """Whether it computes in ``ctx.autocast_dtype`` by itself, with ``torch.autocast`` off around
    it: PyTorch's casts would narrow what it keeps wide."""

    __slots__ = ("_run",)
    slot_values: ClassVar[Mapping[str, Any]] = {"_run": None}
    _run: Run | None  # this op alone, once it was called so

    def __init__(self) -> None:
        super().__init__()
        _operations.add([type(self)], self)

    is_fused_op: ClassVar[bool]
    """Whether this op replaces one or more basic ops."""

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """The basic ops that this op covers, in order."""
        raise TypeError(f"{type(self).__name__} must be a BasicOperation or a FusedOperation")

    def get_input_quantizer(self) -> Any:
        """How this op wants its input quantized under the recipe in force, or None.

        Asked, as for the other quantizers, when a plan is made, with gradients enabled as in the
        plan's calls.
        """
        return None

    def get_grad_output_quantizer(self) -> Any:
        """How this op wants its output's gradient quantized under the recipe in force, or None."""
        return None

    def get_output_quantizer(self) -> Any:
        """How this op quantizes its output where no op of the run follows it, or None."""
        return None

    def get_grad_input_quantizer(self) -> Any:
        """How this op quantizes its input's gradient for the caller or a neighbour, or None."""
        return None

    @property
    def keeps_grads(self) -> bool:
        """Whether it reads gradients after its backward has returned."""
        return any(op.keeps_grads for op in self.basic_ops)

    @property
    def writes_grads(self) -> bool:
        """Whether its backward writes to gradients that its contexts call writable."""
        return False

    def forward_impl(self, *args: Any) -> Any:
        """Forward, without what of te.ops' signature most ops do not read; of this package's ops.

        Quantizers and keyword arguments are the contexts' (``grad_quantizer``, ``next_quantizer``,
        ``kwargs``). A basic op takes ``(ctx, x, *extra_inputs)`` and returns the output, or with
        extra outputs ``(output, *extra_outputs)``. A fused op takes ``(contexts, x,
        extra_inputs)`` and returns ``(output, extra_outputs)``, for each basic op a sequence.
        """
        raise TypeError(f"{type(self).__name__} does not define fuser_forward")

    def backward_impl(self, *args: Any) -> Any:
        """Backward; see ``forward_impl``.

        A basic op takes ``(ctx, grad_output, *grad_extra_outputs)`` and returns ``(grad_input,
        *grads of parameters, *grads of extra inputs)``, or the first alone if it has no others. A
        fused op takes ``(contexts, grad_output, grad_extra_outputs)`` and returns ``(grad_input,
        grads of parameters, grads of extra inputs)``, for each basic op a sequence.
        """
        raise TypeError(f"{type(self).__name__} does not define fuser_backward")

    def _fuser_forward(self, ctxs: Contexts, x: Tensor, extra: ExtraTensors) -> FusedOutputs:
        """The result of :meth:`fuser_forward`, whose other arguments the contexts have."""
        return self.forward_impl(ctxs, x, extra)

    def _fuser_backward(self, ctxs: Contexts, dy: Tensor, extra: ExtraTensors) -> FusedGrads:
        """The result of :meth:`fuser_backward`."""
        return self.backward_impl(ctxs, dy, extra)

    def uses_impl(self, direction: Literal["forward", "backward"]) -> bool:
        """Whether nothing overrides the methods of te.ops, which call the ``impl`` of this one."""
        return not _overrides(self, f"fuser_{direction}", f"op_{direction}")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: ExtraTensors,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> FusedOutputs:
        """Forward of the basic ops covered, one entry in every list for each of them.

        An extra input that another of these ops produces arrives as None; an extra output that
        nothing outside them needs may be None.

        Returns:
            The output, and for each basic op its extra outputs.
        """
        basic_op_ctxs[0].grad_quantizer = prev_op_grad_output_quantizer
        basic_op_ctxs[-1].next_quantizer = next_op_input_quantizer
        for ctx, kwargs in zip(basic_op_ctxs, basic_op_kwargs, strict=True):
            ctx.kwargs = kwargs
        return self._fuser_forward(basic_op_ctxs, input_, basic_op_extra_inputs)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Grads],
    ) -> FusedGrads:
        """Backward of the basic ops covered.

        Gradients of extra outputs are None where nothing flows back.

        Returns:
            The input's gradient, and for each basic op those of its parameters (in the order of
            ``own_parameters``) and of its extra inputs; None where there is none or it is not
            needed (``ctx.needs``). The fuser casts them to the dtypes of what they belong to.
        """
        return self._fuser_backward(basic_op_ctxs, grad_output, basic_op_grad_extra_outputs)

    @property
    def communicates(self) -> bool:
        """Whether other processes send its output, and its gradient is sent to them.

        Its forward may then leave the output to be filled later, where its last context is
        ``deferred`` (:func:`fusible.fuser.overlap.defer`), and it has :meth:`begin_sending`.
        """
        return False

    def begin_sending(self, ctxs: Contexts, grad_output: Tensor) -> None:
        """Begin to send the gradient of its output, which its backward with ``ctxs`` gets later."""
        raise TypeError(f"{type(self).__name__} does not define begin_sending")

    def on_failure(self) -> None:
        """Called when a run with this op failed; unfinished exchanges will not be ended."""

    def notes(self, dtype: str, target: Any) -> tuple[str, ...]:
        """Sentences that ``explain`` prints of a fused op on a target.

        Of a basic op: where no fusion covers it and none of its ``kernel_rows`` applies.
        """
        return ()

    def default_kernels(self, dtype: str, target: Any) -> str:
        """What runs a basic op where no row of ``kernel_rows`` applies, for ``explain``."""
        return "the op's default"

    def fast_path(self, plan: Plan, key: PlanKey) -> FastPath | None:
        """A faster path for a plan whose forward is this op alone, or None.

        Asked once for each plan. The backward is this op's too, or that of its basic ops.
        """
        return None

    def forward(self, input: Tensor, *extra_inputs: Any, **kwargs: Any) -> Any:
        """Run this op alone: the caller gives all its extra inputs, and gets all extra outputs.

        Args:
            input: the input.
            *extra_inputs: in order.
            **kwargs: extra inputs by name; others go to its only basic op.

        Raises:
            ValueError: a wrong number of extra inputs, or keyword arguments that the op does not
                take.
        """
        if torch.compiler.is_compiling():
            self._trace_capture()
        elif self._run is None:
            self._run = _alone(self)
        run: Run = self._run  # type: ignore[assignment]
        if not kwargs:
            return run(input, *extra_inputs)
        names = run.wiring.names
        if named := {name: kwargs.pop(name) for name in [*kwargs] if name in names}:
            extra_inputs = by_name(names, extra_inputs, named, type(self).__name__)
        if kwargs:
            self._check_kwargs(kwargs)
        return run(input, *extra_inputs, kwargs=[kwargs] if kwargs else None)

    def _check_kwargs(self, kwargs: dict[str, Any]) -> None:
        if len(self.basic_ops) != 1:
            parts = " + ".join(type(op).__name__ for op in self.basic_ops)
            raise ValueError(
                f"keyword arguments must be for one basic op, got {sorted(kwargs)} for "
                f"{type(self).__name__}, which is {parts}"
            )
        op = self.basic_ops[0]
        check_kwargs(op, kwargs, map(op.extra_input_name, range(op.num_extra_inputs)))

    @constant_when_traced
    def _trace_capture(self) -> None:
        for op in (self, *_operations.others([type(self)], self)):
            if op._run is None and channels(op.basic_ops) == channels(self.basic_ops):
                op._run = _alone(op)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last call of this op alone; None before the first."""
        return None if self._run is None else self._run.plan

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _operations.add([type(self)], self)


_operations: WeakGroups[FusibleOperation] = WeakGroups()


_BY_HAND = "forward_impl", "op_forward", "fuser_forward"
"""The methods of a forward that is not a formula."""
_NEVER_CALLED = "pre_first_fuser_forward", "pre_fuser_forward"
"""Methods that Transformer Engine's fuser calls before an op's forward, and this one does not."""


def _overrides(op: FusibleOperation, *methods: str) -> bool:
    """Whether an op itself, or its class, has one of the methods of `BasicOperation` anew."""
    kind, own = type(op), vars(op)
    defaults = {name: getattr(BasicOperation, name) for name in methods}
    return any(name in own or getattr(kind, name, d) is not d for name, d in defaults.items())


def _alone(op: FusibleOperation) -> Run:
    """A run of the basic ops of one op that is called by itself."""
    return Run(op.basic_ops, wiring=wire(op.basic_ops, alone=True))


class BasicOperation(Channels, FormulaOp, FusibleOperation):
    """One operation with its parameters and default behaviour; always able to run alone.

    A subclass defines :meth:`formula` and nothing else, or ``op_forward`` and ``op_backward`` by
    hand; with extra inputs or outputs it overrides ``fuser_forward`` and ``fuser_backward``. Every
    op documents what it saves for the backward, because forward-only fusions must save the same.

    Attributes:
        num_extra_inputs: number of extra tensor inputs.
        num_extra_outputs: number of extra tensor outputs.
        fact_names: attributes (integers, booleans, names) that conditions of fusion rules may
            read; frozen, like channels, once a run captures the op.
        extra_input_names: what conditions call the extra inputs. Without a channel, an extra input
            comes from the nearest earlier extra output of its name in the run, else from the
            caller.
        extra_output_names: names under which later ops find the extra outputs; in the order of
            the slots, or empty.
        parameter_names: the names of the parameters, in the order in which the backward returns
            their gradients. None for the arguments of ``formula`` that have their names, else for
            the order of first registration, then those of modules inside, as ``"inner.weight"``.
        keywords: names of the keyword arguments that a call may give the op. None for those of
            its ``op_forward``, and for any where it has a ``fuser_forward`` of its own.
        buffer_keywords: those that are the caller's memory for results; it must overlap nothing
            that the run reads.
        kernel_rows: which kernels may run the op, in order of priority. Where no fusion covers
            it, ``ctx.kernels`` are those of the first row whose conditions hold, else None.
        saves: what the op saves for its backward, as ``explain`` prints it.
        passes_input: whether its first extra output is its input, which it does not read.
        computes_as: set by a subclass that has the math of a built-in op and differs only in where
            its parameters are from: that op, for which fusion rules take it. Not inherited.
    """

    is_fused_op = False
    num_extra_outputs: int = 0
    fact_names: ClassVar[tuple[str, ...]] = ()
    extra_input_names: ClassVar[tuple[str, ...]] = ()
    extra_output_names: tuple[str, ...] = ()
    parameter_names: tuple[str, ...] | None = None
    keywords: ClassVar[tuple[str, ...] | None] = None
    buffer_keywords: ClassVar[tuple[str, ...]] = ()
    kernel_rows: ClassVar[tuple[KernelRow, ...]] = ()
    saves: str = "x, parameters"
    passes_input: ClassVar[bool] = False

    # The module that this op is a part of, and that holds its parameters (a weak reference).
    __slots__ = ("_holder",)
    slot_values: ClassVar[Mapping[str, Any]] = {**FusibleOperation.slot_values, "_holder": None}
    _holder: weakref.ref[nn.Module] | None

    def __init__(self) -> None:
        super().__init__()
        self._registered = {}
        self._names = None
        self._by_name = False
        self.extra_input_channels = [None] * self.num_extra_inputs
        self.extra_output_channels = [(None, True)] * self.num_extra_outputs
        self._frozen = False

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """The op itself."""
        return (self,)

    @property
    def keeps_grads(self) -> bool:
        """Whether it reads gradients after its backward has returned."""
        return False

    def params_needed(self, require_grad: tuple[bool, ...]) -> tuple[bool, ...]:
        """The parameters whose gradients it computes, of those which require one."""
        return require_grad

    @property
    def accumulates_grads(self) -> bool:
        """Whether it adds to its parameters' gradients itself, for which its context has them."""
        return False

    @property
    def writes_extra_inputs(self) -> bool:
        """Whether its forward writes to extra inputs that its context calls writable."""
        return False

    def copied_state(self) -> dict[str, Any]:
        """Not frozen, with lists of channels of its own."""
        state = {**super().copied_state(), "_frozen": False, "_names": None}
        for held in ("_registered", "extra_input_channels", "extra_output_channels"):
            state[held] = copy.copy(state[held])
        return state

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The attributes that its ``repr`` and ``explain`` show."""
        return self.fact_names

    def extra_repr(self) -> str:
        """The shown attributes that are set, and not off."""
        own = [(name, vars(self).get(name)) for name in self.shown_names]
        return ", ".join(f"{n}={v!r}" for n, v in own if v is not None and v is not False)

    # --- what the fuser reads --------------------------------------------------------------------

    def freeze(self) -> dict[str, Any]:
        """The op's facts, which with its channels stay as they are from now on.

        Called when a run captures the op, since plans rely on both.
        """
        self._frozen = True
        self._check_formula()
        for name in _NEVER_CALLED:
            if hasattr(type(self), name):
                raise TypeError(
                    f"{name} of {type(self).__name__} would not be called, got an op that defines "
                    "it; do its work in op_forward or fuser_forward"
                )
        self._names = self._find_names()
        facts = {}
        for name in self.fact_names:
            try:
                facts[name] = getattr(self, name)
            except Exception as error:
                error.add_note(f"raised by {name} of {type(self).__name__}, one of its fact_names")
                raise
        return facts

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.fact_names and self.__dict__.get("_frozen"):
            raise RuntimeError(
                f"{name} of {type(self).__name__} must be set before the op first runs: plans rely "
                "on it; make a new op"
            )
        super().__setattr__(name, value)

    def check_producer(self, slot: int, producer: Any) -> None:
        """Raise ValueError if an extra input cannot be what an earlier op gives for it."""

    def check_plan(self, needs: GradNeeds, recipe: Any, *, backward: bool = False) -> None:
        """Raise ValueError if this op cannot run a plan: its gradients, or sizes under its recipe.

        ``backward``: also for what only the backward would refuse.
        """

    def extra_input_name(self, slot: int) -> str:
        """The name of an extra input in conditions."""
        names = self.extra_input_names
        return names[slot] if slot < len(names) else f"extra_input{slot}"

    def output_dtypes(self, given: Dtypes) -> tuple[torch.dtype | None, ...]:
        """The dtypes of the output and of the extra outputs, None for what is not known.

        Asked when a plan is made: by default the output has the input's. Where a user's op defines
        its math and not this, planning runs its forward on fake tensors and takes their dtypes; if
        it does not run on these, they are not known, and rules that read them do not fire.
        """
        return (given.input, *(None,) * self.num_extra_outputs)

    def call_notes(self, ctx: OperationContext) -> tuple[str, ...]:
        """Sentences that ``explain`` prints of what a forward decided, from its context."""
        return ()

    def recipe_notes(self, recipe: Any) -> tuple[str, ...]:
        """Sentences that ``explain`` prints of what a recipe does to this op."""
        return ()

    @property
    def is_formula(self) -> bool:
        """Whether :meth:`formula` is all that the op defines of its math."""
        by_hand = _overrides(self, *_BY_HAND, "backward_impl", "op_backward", "fuser_backward")
        return not by_hand and _overrides(self, "formula")

    def _is_forward_by_hand(self) -> bool:
        return _overrides(self, "op_forward", "fuser_forward")

    def _check_formula(self) -> None:
        """Raise TypeError for a formula below methods by hand, which would run instead of it."""
        classes = type(self).__mro__
        classes = classes[: classes.index(BasicOperation)]
        defining = [c for c in classes if {"formula", *_BY_HAND} & vars(c).keys()]
        by_hand = [c for c in defining if {*_BY_HAND} & vars(c).keys()]
        if by_hand and defining[0] not in by_hand and not is_ours(defining[0]):
            base = defining[0].__mro__[1].__name__
            raise TypeError(
                f"{type(self).__name__} must override op_forward and op_backward, or fuser_forward "
                f"and fuser_backward, as the math of {base} is written by hand, got formula, which "
                "would not be called"
            )

    def _returns_grads(self) -> bool:
        return _overrides(self, "op_backward", "fuser_backward")

    def _formula_arguments(self, registered: Sequence[str]) -> list[str]:
        """See :class:`FormulaOp`; an op by hand has no formula."""
        if not _overrides(self, *_BY_HAND) and type(self).formula is not BasicOperation.formula:
            return super()._formula_arguments(registered)
        self._by_name = False
        self._check_op_forward()
        return []

    def _check_op_forward(self) -> None:
        """Raise TypeError if ``op_forward`` does not take what ``fuser_forward`` gives it."""
        if type(self).fuser_forward is not BasicOperation.fuser_forward:
            return
        signature = inspect.signature(self.op_forward)
        quantizers = "prev_op_grad_output_quantizer", "next_op_input_quantizer"
        try:
            signature.bind_partial(None, None, **dict.fromkeys(quantizers))
        except TypeError:
            raise TypeError(
                f"op_forward of {type(self).__name__} must take (ctx, input_, "
                f"{', '.join(quantizers)}), got {signature}"
            ) from None

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Forward of an op without extra tensors; by default ``forward_impl``."""
        ctx.grad_quantizer = prev_op_grad_output_quantizer
        ctx.next_quantizer = next_op_input_quantizer
        ctx.kwargs = kwargs
        return self.forward_impl(ctx, input_)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Grads]:
        """Backward, ``(grad_input, grad_params)``; by default ``backward_impl``."""
        grad_input, (grad_params,), _ = self.run_backward([ctx], grad_output, [()])
        return grad_input, grad_params

    def run_forward(self, ctxs: Contexts, x: Tensor, extra: ExtraTensors) -> FusedOutputs:
        """The result of :meth:`fuser_forward`, by ``forward_impl``."""
        returned = self.forward_impl(ctxs[0], x, *extra[0])
        if not self.num_extra_outputs:
            return returned, [()]
        output, *extra_outputs = returned
        return output, [extra_outputs]

    def run_backward(self, ctxs: Contexts, dy: Tensor, extra: ExtraTensors) -> FusedGrads:
        """The result of :meth:`fuser_backward`, by ``backward_impl``."""
        returned = self.backward_impl(ctxs[0], dy, *extra[0])
        if not isinstance(returned, tuple):
            return returned, [()], [()]
        count = 1 + len(ctxs[0].needs.params)
        return returned[0], [returned[1:count]], [returned[count:]]

    def _fuser_forward(self, ctxs: Contexts, x: Tensor, extra: ExtraTensors) -> FusedOutputs:
        if self.num_extra_inputs or self.num_extra_outputs:
            return self.run_forward(ctxs, x, extra)
        (ctx,) = ctxs
        output = self.op_forward(
            ctx,
            x,
            prev_op_grad_output_quantizer=ctx.grad_quantizer,
            next_op_input_quantizer=ctx.next_quantizer,
            **ctx.kwargs,
        )
        return output, [()]

    def _fuser_backward(self, ctxs: Contexts, dy: Tensor, extra: ExtraTensors) -> FusedGrads:
        if self.num_extra_inputs or self.num_extra_outputs:
            return self.run_backward(ctxs, dy, extra)
        grads = self.op_backward(ctxs[0], dy)
        if not isinstance(grads, tuple | list) or len(grads) != 2:
            raise TypeError(
                f"op_backward of {type(self).__name__} must return (grad_input, grad_params), got "
                f"{kind_of(grads)}"
            )
        grad_input, grad_params = grads
        return grad_input, [tuple(grad_params)], [()]


def check_kwargs(
    op: BasicOperation, kwargs: dict[str, Any], extra_inputs: Iterable[str] = ()
) -> None:
    """Raise ValueError for keyword arguments that the op does not take.

    Here, since a fusion that covers the op may not read them. ``extra_inputs`` are names that it
    takes as well.
    """
    names = op.keywords
    if torch.compiler.is_compiling():
        return
    if names is None:
        if type(op).fuser_forward is not BasicOperation.fuser_forward:
            return
        parameters: list[inspect.Parameter] = []
        if type(op).op_forward is not BasicOperation.op_forward:
            parameters = list(inspect.signature(op.op_forward).parameters.values())[4:]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        names = tuple(p.name for p in parameters)
    if unknown := sorted(set(kwargs) - set(names)):
        known = [*names, *extra_inputs]
        instead = "; copy the result: buffer.copy_(y)" if unknown[0] == "output" else ""
        raise ValueError(
            f"keyword arguments of {type(op).__name__} must be among {known or 'none'}, "
            f"got {unknown}{did_you_mean(unknown[0], known)}{instead}"
        )


class FusedOperation(FusibleOperation):
    """A faster way to run some basic ops; holds no state of its own.

    Made by fusion rules and functions. A Sequential that is given one of a user's class holds its
    basic ops, which run fused only where the plan of a call says so.
    """

    is_fused_op = True
    holds_parameters = False
    """Whether its own parameters are those of the basic ops."""

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__()
        self._basic_ops = tuple(basic_ops)
        # One may be put in a module, whose optimizer finds the parameters.
        if not (self.holds_parameters or is_ours(type(self))):
            self._modules["basic_ops"] = nn.ModuleList(self._basic_ops)
        self.num_extra_inputs = sum(op.num_extra_inputs for op in self._basic_ops)
        self.handles_autocast = any(op.handles_autocast for op in self._basic_ops)

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """The basic ops that this op replaces, in order."""
        return self._basic_ops
