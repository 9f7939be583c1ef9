"""Rows to experts and back as ``torch.library`` ops; `definitions` says what they compute."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.formulas import math_dtype
from fusible.kernels.moe import definitions, launch
from fusible.kernels.runtime.library import define


def _permutation_fake(
    ids: Tensor, num_groups: int, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        ids.new_empty(ids.shape, dtype=torch.int32),
        ids.new_empty(num_groups, dtype=torch.int64),
        ids.new_empty(num_groups, dtype=torch.int32),
    )


permutation = define(
    "permutation(Tensor ids, int num_groups, SymInt? capacity) -> (Tensor, Tensor, Tensor)",
    _permutation_fake,
    definitions.permutation,
    launch.permutation,
)


def _scatter_rows_fake(
    x: Tensor, row_map: Tensor, weights: Tensor | None, rows: int, scale: bool
) -> tuple[Tensor, Tensor]:
    moved = x.new_empty(0)
    if weights is not None and weights.dim() == 2:
        moved = weights.new_empty(rows)
    return x.new_empty(rows, x.shape[1]), moved


scatter_rows = define(
    "scatter_rows(Tensor x, Tensor row_map, Tensor? weights, SymInt rows, bool scale) -> "
    "(Tensor, Tensor)",
    _scatter_rows_fake,
    definitions.scatter_rows,
    launch.scatter_rows,
)


def _gather_sum_fake(
    rows: Tensor, row_map: Tensor, weights: Tensor | None, values: Tensor | None
) -> tuple[Tensor, Tensor]:
    picked = rows.new_empty(0) if values is None else values.new_empty(row_map.shape)
    return rows.new_empty(row_map.shape[0], rows.shape[1]), picked


gather_sum = define(
    "gather_sum(Tensor rows, Tensor row_map, Tensor? weights, Tensor? values) -> (Tensor, Tensor)",
    _gather_sum_fake,
    definitions.gather_sum,
    launch.gather_sum,
)


def _row_dots_fake(rows: Tensor, x: Tensor, row_map: Tensor, by_row: bool) -> Tensor:
    shape = rows.shape[:1] if by_row else row_map.shape
    return rows.new_empty(shape, dtype=math_dtype(rows.dtype))


row_dots = define(
    "row_dots(Tensor rows, Tensor x, Tensor row_map, bool by_row) -> Tensor",
    _row_dots_fake,
    definitions.row_dots,
    launch.row_dots,
)
