"""Tools for tests: plans of another machine, run on this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fusible.fuser.target import Target, assume
from fusible.kernels.provider import provided

# What computes as another package's kernels for a family of architectures, in plain PyTorch.
_STAND_INS = {"sm100": "fusible.testing.emulator_sm100"}


@contextmanager
def assume_target(target: Target | str, provider: object | None = None) -> Iterator[Target]:
    """Plan, and run, as on ``target``, with tensors where they are.

    Args:
        target: such as ``"sm100"``.
        provider: stands in for another package's kernels for that architecture, with the same
            functions; by default what computes the same in plain PyTorch, which runs on any device.
    """
    on = Target.parse(target)
    stand_in = _STAND_INS.get(on.family) if provider is None else provider
    with assume(on), provided(on.family, stand_in):
        yield on
