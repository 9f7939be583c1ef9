"""The op contract: what a basic op declares, and what a fused op stands for."""

from __future__ import annotations

import copy
import inspect
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from fusible.arguments import check_bools
from fusible.fuser.context import OperationContext
from fusible.fuser.flow import Dtypes
from fusible.fuser.node import kind_of
from fusible.fuser.plan import GradNeeds, Plan
from fusible.fuser.run import Run
from fusible.fuser.schedule import Direct
from fusible.fuser.tracing import WeakGroups, constant_when_traced
from fusible.fuser.wiring import by_name, wire
from fusible.names import did_you_mean
from fusible.ops.derivative import Described, check_traced, reevaluated
from fusible.ops.state import (
    State,
    attributes_kept,
    deepcopy_with_attributes,
    quantized_converted,
)
from fusible.recipes.state import prepare_load, save_pieces

Grads = Sequence[Tensor | None]
ExtraTensors = Sequence[Sequence[Tensor | None]]
"""Extra inputs or outputs, or their gradients, for each basic op that a fused op covers."""
FusedGrads = tuple[Tensor | None, Sequence[Grads], Sequence[Grads]]
"""The gradient of the input, and for each basic op those of its parameters and extra inputs."""


class _Patches:
    """How often what a call of some module runs was set on the module itself."""

    count = 0


patches = _Patches()
_CALLED = ("forward", "_compiled_call_impl")


class PatchesCounted(nn.Module):
    """A module that counts its patches: ``module.forward = ...`` and ``module.compile()``."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLED:
            patches.count += 1
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in _CALLED:
            patches.count += 1
        super().__delattr__(name)


HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
"""What a call of a module fires."""


def why_called(module: nn.Module) -> str | None:
    """Why a call of ``module`` does more than its class's ``forward``; None if it does not."""
    for name, words in HOOKS.items():
        if getattr(module, name):
            return f"has {words}"
    if module._compiled_call_impl is not None:
        return "is compiled by itself"
    return "has a forward of its own" if "forward" in vars(module) else None


class FusibleOperation(PatchesCounted):
    """An operation that the fuser can place: a basic op, or a fused one that stands for several."""

    num_extra_inputs: int = 0
    saves: str = ""
    casts_itself: bool = False
    """Whether it computes in ``ctx.autocast_dtype`` by itself, with ``torch.autocast`` off around
    it: PyTorch's casts would narrow what it keeps wide."""

    # A slot, so that what copies ``__dict__`` (replicas) does not run the original's ops.
    __slots__ = ("_run",)
    _run: Run | None  # this op alone, once it was called so

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An object with nothing in its slot."""
        made = super().__new__(cls)
        object.__setattr__(made, "_run", None)
        return made

    def __init__(self) -> None:
        super().__init__()
        _operations.add([type(self)], self)

    @property
    def is_fused_op(self) -> bool:
        """Whether this op stands for one or more basic ops."""
        raise TypeError(f"{type(self).__name__} must be a BasicOperation or a FusedOperation")

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """The basic ops that this op covers, in order."""
        raise TypeError(f"{type(self).__name__} must be a BasicOperation or a FusedOperation")

    def get_input_quantizer(self) -> Any:
        """How this op wants its input quantized under the recipe in force, or None.

        Asked when a plan is made, with gradients enabled as in the plan's calls.
        """
        return None

    def get_grad_output_quantizer(self) -> Any:
        """How this op wants its output's gradient quantized under the recipe in force, or None.

        Asked when a plan is made, as :meth:`get_input_quantizer`.
        """
        return None

    @property
    def keeps_grads(self) -> bool:
        """Whether it reads gradients after its backward has returned."""
        return any(op.keeps_grads for op in self.basic_ops)

    @property
    def writes_grads(self) -> bool:
        """Whether its backward writes to gradients that its contexts call writable."""
        return False

    def forward_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Forward; see :class:`BasicOperation` and :class:`FusedOperation`."""
        raise TypeError(f"{type(self).__name__} does not define fuser_forward")

    def backward_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Backward; see :class:`BasicOperation` and :class:`FusedOperation`."""
        raise TypeError(f"{type(self).__name__} does not define fuser_backward")

    def run_forward(
        self,
        contexts: Sequence[OperationContext],
        x: Tensor,
        extra_inputs: ExtraTensors,
    ) -> Any:
        """What :meth:`fuser_forward` returns, by :meth:`forward_impl`."""
        return self.forward_impl(contexts, x, extra_inputs)

    def run_backward(
        self,
        contexts: Sequence[OperationContext],
        grad_output: Tensor,
        grad_extra_outputs: Sequence[Grads],
    ) -> Any:
        """What :meth:`fuser_backward` returns, by :meth:`backward_impl`."""
        return self.backward_impl(contexts, grad_output, grad_extra_outputs)

    def _called_forward(
        self,
        contexts: Sequence[OperationContext],
        x: Tensor,
        extra_inputs: ExtraTensors,
    ) -> Any:
        """What :meth:`fuser_forward` calls: an overriding ``op_forward``, or the ``impl``."""
        return self.run_forward(contexts, x, extra_inputs)

    def _called_backward(
        self,
        contexts: Sequence[OperationContext],
        grad_output: Tensor,
        grad_extra_outputs: Sequence[Grads],
    ) -> Any:
        """What :meth:`fuser_backward` calls: an overriding ``op_backward``, or the ``impl``."""
        return self.run_backward(contexts, grad_output, grad_extra_outputs)

    def uses_impl(self, direction: Literal["forward", "backward"]) -> bool:
        """Whether nothing overrides the methods of te.ops, which call the ``impl`` of this one."""
        return not _overrides(self, FusibleOperation, f"fuser_{direction}")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: ExtraTensors,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Tensor, ExtraTensors]:
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
        return self._called_forward(basic_op_ctxs, input_, basic_op_extra_inputs)

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
        return self._called_backward(basic_op_ctxs, grad_output, basic_op_grad_extra_outputs)

    def direct(self, backward: FusibleOperation, needs: Sequence[GradNeeds]) -> Direct | None:
        """A shorter way to run a plan of this op alone, ``backward`` being its backward, or None.

        Asked once for each plan, in high precision and outside of autocast.
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
        if self._run is None:
            self._run = _alone(self)
        for other in _operations.others([type(self)], self):
            if other._run is None and channels(other.basic_ops) == channels(self.basic_ops):
                other._run = _alone(other)

    @property
    def plan(self) -> Plan | None:
        """What the last call of this op alone ran as; None before the first."""
        return None if self._run is None else self._run.plan

    # --- state -----------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with attributes_kept(self), quantized_converted(self, fn):
            super()._apply(fn, recurse)
        return self

    # No hooks of state dicts, which belong to one module: copies would run the original's.
    def _save_to_state_dict(self, destination: State, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_pieces(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: State, prefix: str, *args: Any) -> None:
        if type(self).set_extra_state is nn.Module.set_extra_state:
            # Transformer Engine's ops save their quantizers' state, of which there is none here.
            state_dict.pop(f"{prefix}_extra_state", None)
        prepare_load(self, state_dict, prefix, *args)
        with attributes_kept(self):
            super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy_with_attributes(self, memo)

    def __getstate__(self) -> dict[str, Any]:
        return self.copied_state()

    def copied_state(self) -> dict[str, Any]:
        """The attributes of a copy, which no run has captured yet."""
        return {**self.__dict__}

    def copied(self) -> Self:
        """``copy.copy`` of this op, also where PyTorch refuses to pickle it (parametrized)."""
        made = type(self).__new__(type(self))
        made.__setstate__(self.copied_state())
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _operations.add([type(self)], self)


_operations: WeakGroups[FusibleOperation] = WeakGroups()


def _overrides(op: FusibleOperation, base: type, *methods: str) -> bool:
    """Whether an op itself, or a class that it derives from ``base``, has one of the methods."""
    kind, own = type(op), vars(op)
    return any(name in own or getattr(kind, name) is not getattr(base, name) for name in methods)


def stored(module: nn.Module, name: str) -> list[Tensor]:
    """What a parameter of ``module`` is computed from, without computing it, or itself."""
    parametrized: Any = module._modules.get("parametrizations", {})
    if name in parametrized:
        return [p for _, p in _named_parameters(parametrized[name])]
    found = getattr(module, name, None)
    return [] if found is None else [found]


def _alone(op: FusibleOperation) -> Run:
    """A run of what one op, called by itself, stands for."""
    return Run(op.basic_ops, wiring=wire(op.basic_ops, alone=True))


def channels(ops: Iterable[Any]) -> list[Any]:
    """The channels of all ops."""
    return [(op.extra_input_channels, op.extra_output_channels) for op in ops]


class BasicOperation(FusibleOperation):
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
            the order of first registration. One of a module inside is named ``"inner.weight"``.
        keywords: names of the keyword arguments that a call may give the op. None for those of
            its ``op_forward``, and for any where it has a ``fuser_forward`` of its own.
        buffer_keywords: those that are the caller's memory for results; it must overlap nothing
            that the run reads.
        saves: what the op saves for its backward, as ``explain`` prints it.
        computes_as: set by a subclass that has the math of a built-in op and differs only in where
            its parameters are from: that op, for which fusion rules take it. Not inherited.
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    fact_names: ClassVar[tuple[str, ...]] = ()
    extra_input_names: ClassVar[tuple[str, ...]] = ()
    extra_output_names: tuple[str, ...] = ()
    parameter_names: tuple[str, ...] | None = None
    keywords: ClassVar[tuple[str, ...] | None] = None
    buffer_keywords: ClassVar[tuple[str, ...]] = ()
    saves: str = "x, parameters"

    # The module that this op is a part of, and that holds its parameters (a weak reference).
    __slots__ = ("_holder",)
    _holder: weakref.ref[nn.Module] | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An object with nothing in its slot."""
        made = super().__new__(cls)
        object.__setattr__(made, "_holder", None)
        return made

    def __init__(self) -> None:
        super().__init__()
        # Names of parameters in the order of first registration, which ``_parameters`` loses.
        self._registered: dict[str, None] = {}
        # What a run that has captured the op reads.
        self._names: tuple[str, ...] | None = None
        self._by_name = False
        self.extra_input_channels: list[str | None] = [None] * self.num_extra_inputs
        self.extra_output_channels: list[tuple[str | None, bool]] = [
            (None, True)
        ] * self.num_extra_outputs
        self._frozen = False

    @property
    def is_fused_op(self) -> bool:
        """False: a basic op stands for itself."""
        return False

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """The op itself."""
        return (self,)

    @property
    def keeps_grads(self) -> bool:
        """Whether it reads gradients after its backward has returned."""
        return False

    @property
    def accumulates_grads(self) -> bool:
        """Whether it adds to its parameters' gradients itself, for which its context has them."""
        return False

    @property
    def writes_extra_inputs(self) -> bool:
        """Whether its forward writes to extra inputs that its context calls writable."""
        return False

    def copied_state(self) -> dict[str, Any]:
        """See :class:`FusibleOperation`."""
        made = {**super().copied_state(), "_frozen": False, "_names": None}
        for held in ("_registered", "extra_input_channels", "extra_output_channels"):
            made[held] = copy.copy(made[held])
        return made

    # --- parameters ------------------------------------------------------------------------------

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Also note the order of first registration."""
        is_source = self._is_source(name, param)
        super().register_parameter(name, param)
        if not is_source:
            self._registered.setdefault(name)
            if self._frozen:
                self._names = self._find_names()

    def _is_source(self, name: str, param: nn.Parameter | None) -> bool:
        """Whether PyTorch registers a parameter from which it will compute another one.

        Pruning, and the weight and spectral norms that are hooks, register it while the other is
        this very tensor or has just been deleted.
        """
        of, _, kind = name.rpartition("_")
        if kind not in ("orig", "g", "v") or of not in self._registered:
            return False
        return of not in self._parameters or self._parameters[of] is param

    def own_parameter_names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order in which gradients are returned."""
        return self._find_names() if self._names is None else self._names

    def own_parameters(self) -> tuple[Tensor, ...]:
        """The parameters as PyTorch resolves their names now; gradients come in this order.

        A parametrization is evaluated. In a forward, ``ctx.parameters`` has them.

        Raises:
            AttributeError: one of ``parameter_names`` is missing.
        """
        names = self.own_parameter_names()
        if not names:
            return ()
        own = self._parameters if self._holder is None else self._held_by()._parameters
        if tuple(own) == names:
            values: tuple[Any, ...] = tuple(own.values())
        else:
            values = tuple(
                [self._value(name) if own.get(name) is None else own[name] for name in names]
            )
        if self.parameter_names is None:
            return tuple([value for value in values if value is not None])
        return values

    def _value(self, name: str) -> Any:
        """What ``getattr`` gives for a parameter that is computed, or None if there is none."""
        if self.parameter_names is None and not self._has(name):
            return None
        value = operator.attrgetter(name)(self._computing(name))
        if value is None:
            raise AttributeError(f"{name} of {type(self).__name__} must be a tensor, got None")
        return value

    def _has(self, name: str) -> bool:
        """Whether there is a parameter that was registered once, and may be computed now."""
        if self._parameters.get(name) is not None or self.__dict__.get(name) is not None:
            return True
        parametrized: Any = self._modules.get("parametrizations", ())
        return name in parametrized

    def stored(self, name: str) -> list[Tensor]:
        """What a parameter is computed from, without computing it: by default itself."""
        return stored(self._computing(name), name)

    def _held_by(self) -> nn.Module:
        """The module whose attributes the parameters are."""
        return self if self._holder is None else self._holder() or self

    def _computing(self, name: str) -> nn.Module:
        """The module that computes a parameter: this part if it is pruned or parametrized."""
        is_own = name in self.__dict__ or hasattr(type(self), name)
        return self if is_own else self._held_by()

    # --- what the fuser reads --------------------------------------------------------------------

    def freeze(self) -> dict[str, Any]:
        """The op's facts, which with its channels stay as they are from now on.

        Called when a run captures the op, since plans rely on both.
        """
        self._frozen = True
        self._names = self._find_names()
        return {name: getattr(self, name) for name in self.fact_names}

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
        """What conditions call an extra input."""
        names = self.extra_input_names
        return names[slot] if slot < len(names) else f"extra_input{slot}"

    def output_dtypes(self, given: Dtypes) -> tuple[torch.dtype | None, ...]:
        """The dtypes of the output and of the extra outputs, None for what is not known.

        Asked when a plan is made: by default the output has the input's. Where a user's op defines
        its math and not this, planning runs its forward on fake tensors and takes their dtypes; if
        it does not run on these, they are not known, and rules that read them do not fire.
        """
        return (given.input, *(None,) * self.num_extra_outputs)

    def notes(self, dtype: str, target: Any) -> tuple[str, ...]:
        """Sentences that ``explain`` prints when this op runs unfused on a target."""
        return ()

    def recipe_notes(self, recipe: Any) -> tuple[str, ...]:
        """Sentences that ``explain`` prints of what a recipe does to this op."""
        return ()

    # --- math ------------------------------------------------------------------------------------

    def formula(self, *args: Any, **kwargs: Any) -> Tensor:
        """The op's math, a pure and differentiable function ``(input, *params) -> output``."""
        raise TypeError(
            f"{type(self).__name__} must define formula, or op_forward and op_backward, or (with "
            "extra inputs or outputs) fuser_forward and fuser_backward"
        )

    @property
    def is_formula(self) -> bool:
        """Whether :meth:`formula` is all that the op defines of its math."""
        methods = [f"{by}_{way}" for by in ("op", "fuser") for way in ("forward", "backward")]
        by_hand = _overrides(self, BasicOperation, *methods, "forward_impl", "backward_impl")
        return not by_hand and _overrides(self, BasicOperation, "formula")

    def _find_names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order in which they are given and have gradients.

        Raises:
            TypeError: the gradient of a parameter would be lost, since neither ``parameter_names``
                nor ``formula`` has it, or it is that of a module inside.
        """
        if type(self).own_parameters is not BasicOperation.own_parameters:
            return tuple(self._registered)
        registered = [name for name in self._registered if self._has(name)]
        names = self.parameter_names
        if names is None:
            taken = self._formula_arguments(registered)
            known = [name for name in taken if name in self._registered]
            names = tuple(dict.fromkeys((*known, *self._registered)))
        inner = [name for name, _ in _named_parameters(self) if "." in name]
        inner = [name for name in inner if not name.startswith("parametrizations.")]
        lost = [name for name in (*registered, *inner) if name not in {*names}]
        if lost:
            raise TypeError(
                f"{type(self).__name__} must return the gradients of all its parameters, got "
                f"{', '.join(lost)} beside ({', '.join(names)}); define op_forward and "
                "op_backward, and name them in parameter_names, or register them in the op itself"
            )
        return names

    def _formula_arguments(self, registered: Sequence[str]) -> list[str]:
        """The arguments of ``formula`` if it takes the parameters by name.

        It does not where it names none (``*params``, a builtin), nor has an op by hand a formula.

        Raises:
            TypeError: ``formula`` does not take its input and these parameters.
        """
        kind, base = type(self), BasicOperation
        by_hand = any(
            getattr(kind, name) is not getattr(base, name)
            for name in ("forward_impl", "op_forward", "fuser_forward")
        )
        self._by_name = False
        if by_hand or kind.formula is base.formula:
            self._check_op_forward()
            return []
        try:
            signature = inspect.signature(self.formula)
        except ValueError:  # of a builtin function, which has none
            return []
        arguments = [*signature.parameters.values()][1:]
        taken = [p.name for p in arguments if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        named = any(name in taken for name in registered)
        self._by_name = named or any(p.kind is p.VAR_KEYWORD for p in arguments)
        try:
            if self._by_name:
                signature.bind(None, **dict.fromkeys(registered))
            else:
                signature.bind(None, *registered)
        except TypeError:
            raise TypeError(
                f"formula of {kind.__name__} must take its input and its parameters, "
                f"({', '.join(['input', *registered])}), got {signature}"
                f"{'; extra inputs need fuser_forward' if self.num_extra_inputs else ''}"
            ) from None
        return taken if self._by_name else []

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

    def formula_of(self, count: int) -> Callable[..., Tensor]:
        """``formula`` as a function of the input and ``count`` parameters in their order."""
        names = self.own_parameter_names()
        if not self._by_name:
            return self.formula
        if len(names) != count:
            names = tuple([name for name in names if self._has(name)])
        return partial(_by_name, self.formula, names)

    def forward_impl(self, ctx: OperationContext, x: Tensor, *extra_inputs: Any) -> Any:
        """Forward; by default the formula, saving ``(x, *params)`` and ``ctx.dtype``.

        Returns:
            The output; with extra outputs ``(output, *extra_outputs)``.
        """
        self._refuse_extra_tensors("fuser_forward")
        ctx.dtype = x.dtype
        ctx.save_for_backward(x, *ctx.parameters)
        return self.formula_of(len(ctx.parameters))(x, *ctx.parameters)

    def backward_impl(
        self, ctx: OperationContext, grad_output: Tensor, *grad_extra_outputs: Any
    ) -> Any:
        """Backward; by default the formula's derivative.

        That is of ``(x, *params)``, by evaluating the formula once more: where a fused op ran the
        forward alone. A formula that nothing fuses is differentiated by autograd itself.

        Returns:
            ``(grad_input, *grads of parameters, *grads of extra inputs)``, or the first alone if
            the op has neither.
        """
        self._refuse_extra_tensors("fuser_backward")
        kind, base = type(self), BasicOperation
        if kind.formula is base.formula and kind.op_forward is not base.op_forward:
            raise TypeError(
                f"{type(self).__name__} must define op_backward beside op_forward, got none"
            )
        saved, count = ctx.saved_tensors, 1 + len(ctx.needs.params)
        if len(saved) < count:
            raise RuntimeError(
                f"the forward of {type(self).__name__} must have saved {self.saves}, got "
                f"{len(saved)} tensors; a forward fusion saves what each of its ops would"
            )
        x, *params = tensors = saved[:count]
        if torch.compiler.is_compiling():
            # Constants: the number of rows may be symbolic, so it is any.
            shape = (*[4] * (x.dim() - 1), operator.index(x.shape[-1])) if x.dim() else ()
            shapes = [shape, *[tuple(p.shape) for p in params]]
            described = [(s, t.dtype, t.device) for s, t in zip(shapes, tensors, strict=True)]
            self._check_traced(tuple(described))
        formula = self.formula_of(len(params))
        with ctx.autocast(grad_output.device.type):
            grads = reevaluated(formula, tensors, grad_output, type(self).__name__)
        return tuple(grads)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Forward of an op without extra tensors; by default :meth:`forward_impl`."""
        ctx.grad_quantizer = prev_op_grad_output_quantizer
        ctx.next_quantizer = next_op_input_quantizer
        ctx.kwargs = kwargs
        return self.forward_impl(ctx, input_)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Grads]:
        """Backward, ``(grad_input, grad_params)``; by default :meth:`backward_impl`."""
        grad_input, (grad_params,), _ = self.run_backward([ctx], grad_output, [()])
        return grad_input, grad_params

    @constant_when_traced
    def _check_traced(self, tensors: tuple[Described, ...]) -> None:
        check_traced(self.formula_of(len(tensors) - 1), tensors, type(self).__name__)

    def run_forward(
        self,
        contexts: Sequence[OperationContext],
        x: Tensor,
        extra_inputs: ExtraTensors,
    ) -> tuple[Tensor, ExtraTensors]:
        """See :class:`FusibleOperation`."""
        returned = self.forward_impl(contexts[0], x, *extra_inputs[0])
        if not self.num_extra_outputs:
            return returned, [()]
        output, *extra_outputs = returned
        return output, [extra_outputs]

    def run_backward(
        self,
        contexts: Sequence[OperationContext],
        grad_output: Tensor,
        grad_extra_outputs: Sequence[Grads],
    ) -> FusedGrads:
        """See :class:`FusibleOperation`."""
        returned = self.backward_impl(contexts[0], grad_output, *grad_extra_outputs[0])
        if not isinstance(returned, tuple):
            return returned, [()], [()]
        count = 1 + len(contexts[0].needs.params)
        return returned[0], [returned[1:count]], [returned[count:]]

    def uses_impl(self, direction: Literal["forward", "backward"]) -> bool:
        """See :class:`FusibleOperation`."""
        return not _overrides(self, BasicOperation, f"fuser_{direction}", f"op_{direction}")

    def _called_forward(
        self,
        contexts: Sequence[OperationContext],
        x: Tensor,
        extra_inputs: ExtraTensors,
    ) -> tuple[Tensor, ExtraTensors]:
        if self.num_extra_inputs or self.num_extra_outputs:
            return self.run_forward(contexts, x, extra_inputs)
        (ctx,) = contexts
        output = self.op_forward(
            ctx,
            x,
            prev_op_grad_output_quantizer=ctx.grad_quantizer,
            next_op_input_quantizer=ctx.next_quantizer,
            **ctx.kwargs,
        )
        return output, [()]

    def _called_backward(
        self,
        contexts: Sequence[OperationContext],
        grad_output: Tensor,
        grad_extra_outputs: Sequence[Grads],
    ) -> FusedGrads:
        if self.num_extra_inputs or self.num_extra_outputs:
            return self.run_backward(contexts, grad_output, grad_extra_outputs)
        grads = self.op_backward(contexts[0], grad_output)
        if not isinstance(grads, tuple | list) or len(grads) != 2:
            raise TypeError(
                f"op_backward of {type(self).__name__} must return (grad_input, grad_params), got "
                f"{kind_of(grads)}"
            )
        grad_input, grad_params = grads
        return grad_input, [tuple(grad_params)], [()]

    def _refuse_extra_tensors(self, method: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            raise TypeError(
                f"{type(self).__name__} has {self.num_extra_inputs} extra inputs and "
                f"{self.num_extra_outputs} extra outputs, so it must override {method}"
            )

    # --- channels --------------------------------------------------------------------------------

    def set_extra_input_channel(self, index: int, channel: str | None) -> BasicOperation:
        """Feed an extra input from the channel that an earlier op of the same run produces.

        None undoes it. Returns the op.

        Raises:
            IndexError: there is no such extra input.
            ValueError: the name is not a non-empty string; unknown, late and duplicate producers
                are found when the run is captured.
            RuntimeError: a run has captured this op already.
        """
        self._check_channel("extra input", index, self.num_extra_inputs, channel)
        self.extra_input_channels[index] = channel
        return self

    def set_extra_output_channel(
        self, index: int, channel: str | None, *, output_to_caller: bool = True
    ) -> BasicOperation:
        """Send an extra output down a channel, to any number of later ops of the same run.

        Their gradients are summed. ``output_to_caller=False`` hides the output from the caller;
        None removes the channel and shows it again. Returns the op.

        Raises:
            TypeError: ``output_to_caller`` is not a bool; and as :meth:`set_extra_input_channel`.
        """
        check_bools("set_extra_output_channel", output_to_caller=output_to_caller)
        self._check_channel("extra output", index, self.num_extra_outputs, channel)
        self.extra_output_channels[index] = (channel, channel is None or output_to_caller)
        return self

    def _check_channel(self, what: str, index: int, count: int, channel: str | None) -> None:
        name = type(self).__name__
        if not 0 <= index < count:
            raise IndexError(
                f"index of the {what} must be at least 0 and under {count} for {name}, got {index}"
            )
        if channel is not None and not (isinstance(channel, str) and channel):
            raise ValueError(f"channel must be a non-empty string or None, got {channel!r}")
        if self._frozen:
            raise RuntimeError(
                f"channels of {name} must be bound before it first runs: a run of ops has captured "
                "them; bind the channels of a new op and build a new Sequential"
            )


def _by_name(
    formula: Callable[..., Tensor], names: Sequence[str], input_: Tensor, *params: Tensor
) -> Tensor:
    return formula(input_, **dict(zip(names, params, strict=True)))


def check_kwargs(
    op: BasicOperation, kwargs: dict[str, Any], extra_inputs: Iterable[str] = ()
) -> None:
    """Raise ValueError for keyword arguments that the op does not take.

    Here, since a fusion that covers the op may not ask for them. ``extra_inputs`` are names that it
    takes beside them.
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
        raise ValueError(
            f"keyword arguments of {type(op).__name__} must be among {known or 'none'}, "
            f"got {unknown}{did_you_mean(unknown[0], known)}{_copied(unknown[0])}"
        )


def _copied(name: str) -> str:
    """What to do in place of a caller's buffer for the output."""
    return "; copy the result: buffer.copy_(y)" if name == "output" else ""


class FusedOperation(FusibleOperation):
    """A faster way to run some basic ops; holds no state of its own.

    Made by fusion rules and functions, not by users, and no part of the module tree.
    """

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__()
        # A tuple, which nn.Module does not register: the parameters stay with the basic ops.
        self._basic_ops = tuple(basic_ops)
        self.num_extra_inputs = sum(op.num_extra_inputs for op in self._basic_ops)
        self.casts_itself = any(op.casts_itself for op in self._basic_ops)

    @property
    def is_fused_op(self) -> bool:
        """True."""
        return True

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        """The basic ops that this op stands for, in order."""
        return self._basic_ops


def _named_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """``module.named_parameters()``, also of a replica of ``torch.nn.DataParallel``.

    A replica holds them as attributes.
    """
    return [
        (f"{path}.{name}" if path else name, p)
        for path, part in module.named_modules()
        for name, p in {**part._parameters, **vars(part).get("_former_parameters", {})}.items()
        if p is not None
    ]
