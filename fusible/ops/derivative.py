"""The derivative of a formula whose forward a fusion ran: by evaluating it once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Formula = Callable[..., Tensor]


def reevaluated(
    formula: Formula, tensors: Sequence[Tensor], grad_output: Tensor, who: str
) -> list[Tensor | None]:
    """The gradients of all ``tensors`` by evaluating ``formula`` once more.

    Raises:
        RuntimeError: the formula draws random numbers, which would be others.
    """
    with _no_draws(who):
        output, derivative = torch.func.vjp(formula, *tensors)  # type: ignore[misc]
    return [*derivative(grad_output.to(output.dtype))]


def _no_draws(who: str) -> AbstractContextManager[Any]:
    return nullcontext() if torch.compiler.is_compiling() else _NoDraws(who)


class _NoDraws(TorchDispatchMode):
    """Refuses operations that draw random numbers."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomFormulaError(
                f"formula of {self.who} must draw no random numbers where a fusion runs its "
                "forward only, since its backward would draw others, got one that does; define "
                "op_forward and op_backward, and save what was drawn"
            )
        return func(*args, **(kwargs or {}))


class RandomFormulaError(RuntimeError):
    """A formula draws random numbers where its backward evaluates it again."""


Described = tuple[tuple[int, ...], torch.dtype, torch.device]


def check_traced(formula: Formula, tensors: Sequence[Described], who: str) -> None:
    """Refuse a formula whose compiled backward would draw other random numbers than its forward.

    Raises:
        RuntimeError: it draws, or does not run on tensors of these shapes.
    """
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in tensors]
        try:
            with _NoDraws(who):
                formula(*made)
        except RandomFormulaError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"formula of {who} must run on an input of shape {tensors[0][0]} under "
                "torch.compile, to see whether it draws random numbers, got an error; call the "
                "module uncompiled"
            ) from error
