"""Tools for tests: plans of another machine, run on this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fusible.fuser.target import Target, assume
from fusible.kernels.provider import provided


@contextmanager
def assume_target(target: Target | str, provider: object | None = None) -> Iterator[Target]:
    """Plan, and run, as on ``target``, with tensors where they are.

    Args:
        target: such as ``"sm100"``.
        provider: stands in for the kernels of that architecture (a reference or an emulator). The
            real kernels otherwise, which need the real machine.
    """
    on = Target.parse(target)
    with assume(on), provided(str(on), provider):
        yield on
