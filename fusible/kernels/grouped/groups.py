"""End rows of groups from their sizes, and the group of each row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fusible.arguments import check_bools
from fusible.recipes.blocks import group_of_row

_checking = False


@contextmanager
def checking(enabled: bool = True) -> Iterator[None]:
    """Verify split sizes that live on a device too, at the price of one synchronisation a call.

    Outside this scope, values on a device are never read by the host: negative sizes count as
    zero and rows beyond those given are not touched. Inside, they raise ``ValueError`` as host
    values do. The switch is one for the process.
    """
    check_bools("checking", enabled=enabled)
    global _checking  # noqa: PLW0603 - a debugging switch, one for the process
    outer, _checking = _checking, enabled
    try:
        yield
    finally:
        _checking = outer


def checks_enabled() -> bool:
    """Whether split sizes on a device are to be verified (`checking`)."""
    return _checking


def group_ends(split_sizes: Tensor, rows: int) -> Tensor:
    """First row past each group, int32 ``[E]``, from the integers ``split_sizes``.

    On a device negative sizes count as 0 and groups end at ``rows``; on the host, or under
    `checking`, they raise ValueError.
    """
    if _checking or split_sizes.device.type == "cpu":
        sizes = split_sizes.tolist()
        if min(sizes) < 0:
            group = min(range(len(sizes)), key=sizes.__getitem__)
            raise ValueError(
                f"split_sizes must not be negative, got {sizes[group]} for group {group}; "
                "give every group the number of its rows, 0 for none"
            )
        if sum(sizes) > rows:
            raise ValueError(
                f"split_sizes must sum to at most the {rows} rows of the input, got {sum(sizes)}; "
                "give as many rows as the groups hold"
            )
        return split_sizes.cumsum(0, dtype=torch.int32)
    return split_sizes.clamp(min=0).cumsum(0).clamp(max=rows).to(torch.int32)


def check_alignment(split_sizes: Tensor, alignment: int) -> None:
    """Raise ValueError for sizes that the host may see and that are not whole ``alignment``."""
    if _checking or split_sizes.device.type == "cpu":
        wrong = [size for size in split_sizes.tolist() if size % alignment]
        if wrong:
            raise ValueError(
                f"split_sizes must be multiples of {alignment}, as split_alignment promises, got "
                f"{wrong[0]}; pad the groups or do not promise it"
            )


def row_groups(ends: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Group of every row (tail rows: the last group), and whether the row is in use; no sync."""
    return group_of_row(ends, rows), torch.arange(rows, device=ends.device) < ends[-1]
