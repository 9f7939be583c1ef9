"""Tools for tests: plans of another machine, run on this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fusible.fuser.target import Target, assume
from fusible.kernels.runtime.provider import use_provider


@contextmanager
def assume_target(target: Target | str, provider: object | None = None) -> Iterator[Target]:
    """Plan, and run, as on ``target``, with tensors where they are.

    Args:
        target: such as ``"sm100"``.
        provider: replaces the kernels of another package for that architecture, with the same
            functions; by default an emulator in plain PyTorch, which runs on any device.
    """
    on = Target.parse(target)
    if provider is None and on.family == "sm100":
        provider = "fusible.testing.emulator_sm100"
    with assume(on), use_provider(provider):
        yield on
