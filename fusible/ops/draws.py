"""Random numbers that a formula draws: found when it first runs, repeated in its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fusible.ops.checks import capturing


class Draws(TorchDispatchMode):
    """Finds whether random numbers are drawn inside."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and note whether it draws."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found = True
            if kwargs.get("generator") is not None:
                raise RuntimeError(
                    f"formula of {self.who} must draw random numbers from PyTorch's own "
                    "generators, whose state its backward restores, got another generator; define "
                    "op_forward and op_backward"
                )
        return func(*args, **kwargs)


def states(device: torch.device, who: str) -> tuple[Tensor, ...]:
    """The states of the generators that a formula on ``device`` draws from.

    Raises:
        RuntimeError: a CUDA graph is being captured, whose replays draw anew.
    """
    if device.type != "cuda":
        return (torch.get_rng_state(),)
    if capturing():
        raise RuntimeError(
            f"formula of {who} must not draw random numbers while a CUDA graph is captured, since "
            "its backward restores the generator's state, which a replay cannot; define "
            "op_forward and op_backward, and save what was drawn"
        )
    return torch.get_rng_state(), torch.cuda.get_rng_state(device)


@contextmanager
def restored(saved: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """With the generators as they were when ``saved``; afterwards they go on as if never used."""
    if not saved:
        yield
        return
    with torch.random.fork_rng([device] if len(saved) > 1 else [], device_type="cuda"):
        torch.set_rng_state(saved[0].cpu())
        if len(saved) > 1:
            torch.cuda.set_rng_state(saved[1].cpu(), device)
        yield


Described = tuple[tuple[int, ...], torch.dtype, torch.device]


def found_in(formula: Callable[..., Any], tensors: Sequence[Described], who: str) -> bool:
    """Whether ``formula`` draws random numbers for tensors such as these, without running it.

    Raises:
        RuntimeError: it does not run on tensors of these shapes.
    """
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in tensors]
        draws = Draws(who)
        try:
            with draws:
                formula(*made)
        except Exception as error:
            raise RuntimeError(
                f"formula of {who} must run on an input of shape {tensors[0][0]} under "
                "torch.compile, to see whether it draws random numbers, got an error; call the "
                "module once uncompiled before"
            ) from error
    return draws.found
