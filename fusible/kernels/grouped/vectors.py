"""Launches of kernels over vectors: end rows of groups, and sums over tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.kernels.runtime.launch import launch


def launch_group_ends(sizes: Tensor, rows: int) -> Tensor:
    """The end rows of groups, int32 ``[groups]``, of contiguous int32 or int64 ``sizes`` on a GPU.

    Negative sizes count as 0, and no end exceeds ``rows``.
    """
    ends = sizes.new_empty(sizes.shape[0], dtype=torch.int32)
    which = (_name(sizes.dtype),)
    launch("grouped.vectors.GroupEnds", which, sizes.device, sizes, ends, sizes.shape[0], rows)
    return ends


def launch_tile_sums(partials: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The sum for each row, in ``dtype``, of FP32 sums over tiles of its columns.

    ``partials`` are ``[tiles * rows]``, and added in order, so the bits are reproducible.
    """
    if partials.shape[0] == rows:
        return cast(partials, dtype)
    sums = partials.new_empty(rows, dtype=dtype)
    which, tiles = (_name(dtype),), partials.shape[0] // rows
    launch("grouped.vectors.TileSums", which, partials.device, partials, sums, tiles, rows)
    return sums


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
