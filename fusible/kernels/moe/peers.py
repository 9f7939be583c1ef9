"""Rows in the memories of all processes of a group, which this process reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PeerRows(NamedTuple):
    """Rows ``[processes * n, features]`` in order of rank, ``[n, features]`` in each memory."""

    parts: Sequence[Tensor]
    """The rows in each process's memory."""
    table: int
    """Device address of the table of addresses at which these memories begin; 0: there is none."""
    offset: int
    """Bytes from where a memory begins to its rows."""
    rank: int
    """The rank of this process."""
    end: Callable[[], None]
    """To be called when the last read of them is enqueued."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self.parts[0].dtype

    def copied(self) -> Tensor:
        """All rows in memory of this process's own."""
        return torch.cat(list(self.parts))

    def copy_(self, rows: Tensor) -> None:
        """Write all rows."""
        for part, own in zip(self.parts, rows.tensor_split(len(self.parts)), strict=True):
            part.copy_(own)
