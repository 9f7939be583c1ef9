"""Ops whose math is a formula: its arguments, its value, and its derivative."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fusible.formulas import vjp
from fusible.fuser.context import OperationContext
from fusible.fuser.tracing import constant_when_traced
from fusible.ops.parameters import OwnParameters


class FormulaOp(OwnParameters):
    """An op whose forward and backward are those of a formula unless it defines others."""

    num_extra_inputs: int
    num_extra_outputs: int
    saves: str
    _by_name: bool

    def formula(self, *args: Any, **kwargs: Any) -> Tensor:
        """The op's math, a pure and differentiable function ``(input, *params) -> output``."""
        raise TypeError(
            f"{type(self).__name__} must define formula, or op_forward and op_backward, or (with "
            "extra inputs or outputs) fuser_forward and fuser_backward"
        )

    def _formula_arguments(self, registered: Sequence[str]) -> list[str]:
        """The arguments of ``formula`` if it takes the parameters by name.

        It does not where it names none (``*params``, a builtin).

        Raises:
            TypeError: ``formula`` does not take its input and these parameters.
        """
        self._by_name = False
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
                f"formula of {type(self).__name__} must take its input and its parameters, "
                f"({', '.join(['input', *registered])}), got {signature}"
                f"{'; extra inputs need fuser_forward' if self.num_extra_inputs else ''}"
            ) from None
        return taken if self._by_name else []

    def formula_of(self, count: int) -> Callable[..., Tensor]:
        """``formula`` as a function of the input and ``count`` parameters in their order."""
        names = self.own_parameter_names()
        if not self._by_name:
            return self.formula
        if len(names) != count:
            names = tuple([name for name in names if self._has(name)])
        return lambda x, *params: self.formula(x, **dict(zip(names, params, strict=True)))

    def forward_impl(self, ctx: OperationContext, x: Tensor, *extra_inputs: Any) -> Any:
        """The formula, saving ``(x, *params)`` and ``ctx.dtype``."""
        self._refuse_extra_tensors("fuser_forward")
        ctx.dtype = x.dtype
        ctx.save_for_backward(x, *ctx.parameters)
        return self.formula_of(len(ctx.parameters))(x, *ctx.parameters)

    def backward_impl(
        self, ctx: OperationContext, grad_output: Tensor, *grad_extra_outputs: Any
    ) -> Any:
        """The formula's derivative by ``(x, *params)``, by evaluating it once more.

        Where a fused op ran the forward alone. A formula that nothing fuses is differentiated by
        autograd itself.
        """
        self._refuse_extra_tensors("fuser_backward")
        if self._is_forward_by_hand() or type(self).formula is FormulaOp.formula:
            raise TypeError(
                f"{type(self).__name__} must define op_backward with op_forward (fuser_backward "
                "with fuser_forward), got none"
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
            self._check_traced(shape, x.dtype, x.device)
        no_draws = nullcontext() if torch.compiler.is_compiling() else _NoDraws(type(self).__name__)
        formula = self.formula_of(len(params))
        with ctx.autocast(grad_output.device.type), no_draws:
            return vjp(formula, tensors, grad_output)

    @constant_when_traced
    def _check_traced(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Refuse a formula whose compiled backward would draw other numbers than its forward.

        Raises:
            RuntimeError: it draws, or does not run on an input of this shape.
        """
        params, op_name = self.own_parameters(), type(self).__name__
        with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            x = torch.empty(shape, dtype=dtype, device=device)
            try:
                with _NoDraws(op_name):
                    self.formula_of(len(params))(x, *params)
            except RandomFormulaError:
                raise
            except Exception as error:
                raise RuntimeError(
                    f"formula of {op_name} must run on a fake input of shape {shape} under "
                    "torch.compile, which shows whether it draws random numbers, got an error; "
                    "call the module uncompiled"
                ) from error

    def _is_forward_by_hand(self) -> bool:
        """Whether the forward may save something else than the formula's arguments."""
        return False

    def _refuse_extra_tensors(self, method: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            raise TypeError(
                f"{type(self).__name__} has {self.num_extra_inputs} extra inputs and "
                f"{self.num_extra_outputs} extra outputs, so it must override {method}"
            )


class _NoDraws(TorchDispatchMode):
    """Refuses operations that draw random numbers."""

    def __init__(self, op_name: str) -> None:
        super().__init__()
        self.op_name = op_name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomFormulaError(
                f"formula of {self.op_name} must draw no random numbers where a fusion runs its "
                "forward only, since its backward would draw others, got one that does; define "
                "op_forward and op_backward, and save what was drawn"
            )
        return func(*args, **(kwargs or {}))


class RandomFormulaError(RuntimeError):
    """A formula draws random numbers where its backward evaluates it again."""
