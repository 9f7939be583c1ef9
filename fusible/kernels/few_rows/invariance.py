"""The switch for grouped products whose bits do not depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fusible.arguments import check_bools

_invariant = False


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Give a row of a grouped linear the same bits however many rows there are beside it.

    On Hopper, forwards without gradients multiply few rows by kernels of their own, which add up
    the products of a row in another order than those for many rows. In this scope they do not.
    Training never uses these kernels. CUDA graphs keep the kernels that they were captured with.
    The switch is one for the process.

    Raises:
        TypeError: ``enabled`` is no bool.
    """
    check_bools("batch_invariant", enabled=enabled)
    global _invariant  # noqa: PLW0603 - as `fusible.checking`, one for the process
    outer, _invariant = _invariant, enabled
    try:
        yield
    finally:
        _invariant = outer


def is_batch_invariant() -> bool:
    """Whether the bits of a row must not depend on how many there are (`batch_invariant`)."""
    return _invariant
