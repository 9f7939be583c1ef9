"""What ``torch.compile`` should know of planning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def constant_when_traced(function: F) -> F:
    """Run a method for real while tracing, and take its result as a constant.

    Methods only: torch 2.11 takes no module as an argument of such a function.

    ``torch.compiler.assume_constant_result`` without importing the compiler, which takes seconds:
    it sets the same mark.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def keeps_graph() -> bool:
    """Whether what the running backward reads may be read again (``retain_graph``).

    Always so where it is traced: the compiler decides about memory itself.
    """
    if torch.compiler.is_compiling():
        return True
    return torch._C._autograd._get_current_graph_task_keep_graph()
