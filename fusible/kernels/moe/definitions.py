"""Moving rows to experts and back, and routing tokens: what the kernels equal, in PyTorch.

``ids`` ``[T, k]`` name the group of each of a token's k choices. Every choice gets a row; rows are
sorted by group, and within a group by token. What connects the two is the row map, int32
``[T, k]``: the row of each choice, or, where a choice is not computed (its id is no group, or its
group is full), ``~r``, the complement of a row r past the last group's end, which stays zero. So
every row occurs once in the map, and writing by it writes all rows; complements of rows that do not
exist are skipped.

All ops are deterministic and none synchronises: sums are taken in FP32 (FP64 for FP64) in the order
of the choices, and every element is written by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fusible import formulas
from fusible.formulas import cast, math_dtype


def permutation(
    ids: Tensor, num_groups: int, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The row map, the rows of each group (int64) and their end rows (int32).

    The integer ids may have any shape, which is that of the row map. Of each group's choices the
    first ``capacity`` are computed.
    """
    flat = ids.reshape(-1).long()
    group = torch.where((flat >= 0) & (flat < num_groups), flat, num_groups)
    counts = flat.new_zeros(num_groups + 1).scatter_add_(0, group, torch.ones_like(group))
    order = group.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device=ids.device))
    within = place - (counts.cumsum(0) - counts)[group]
    sizes = counts.clone() if capacity is None else counts.clamp(max=capacity)
    sizes[-1:].zero_()  # what belongs to no group
    ends, excess = sizes.cumsum(0), counts - sizes
    row = (ends - sizes)[group] + within
    spare = ends[-1] + (excess.cumsum(0) - excess - sizes)[group] + within
    row_map = torch.where(within < sizes[group], row, ~spare).int()
    return row_map.view(ids.shape), sizes[:-1].clone(), ends[:-1].int()


def _choices(row_map: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The choice that each row belongs to, as t * k + j, and whether it is computed."""
    flat = row_map.reshape(-1).long()
    row = torch.where(flat < 0, ~flat, flat).clamp(max=rows)
    choice = torch.zeros(rows + 1, dtype=torch.int64, device=flat.device)
    choice = choice.scatter_(0, row, torch.arange(len(flat), device=flat.device))[:rows]
    return choice, flat[choice] >= 0


def row_sources(row_map: Tensor, weights: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The token of each row, int32 ``[rows]``, and its weight.

    ``row_map`` and weights by choice are ``[T, k]``. The weights in the tail are zero.
    """
    choice, live = _choices(row_map, rows)
    moved = torch.where(live, weights.reshape(-1)[choice], 0)
    return (choice // row_map.shape[1]).int(), moved


def scatter_rows(
    x: Tensor,
    row_map: Tensor,
    weights: Tensor | None,
    rows: int,
    scale: bool,
    *,
    zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """``out[row_map[t, j]] = x[t]``, times the weight with ``scale``; zero elsewhere.

    ``x`` ``[T, H]``, ``row_map`` ``[T, k]``, weights by choice ``[T, k]`` or by row ``[rows]``.
    Also gives weights by choice as ``[rows]``, zero elsewhere (empty where there are none).
    Without ``zero_tail``, an argument of direct calls, ``out`` may be anything elsewhere.
    """
    choice, live = _choices(row_map, rows)
    out = x[choice // row_map.shape[1]]
    by_row, moved = weights, x.new_empty(0)
    if weights is not None and weights.dim() == 2:
        by_row = moved = torch.where(live, weights.reshape(-1)[choice], 0)
    if scale and by_row is not None:
        wide = math_dtype(x.dtype)
        out = cast(out.to(wide) * by_row.to(wide)[:, None], x.dtype)
    return torch.where(live[:, None], out, 0), moved


def gather_sum(
    rows: Tensor,
    row_map: Tensor,
    weights: Tensor | None,
    values: Tensor | None,
    *,
    reads_ahead: bool = False,
) -> tuple[Tensor, Tensor]:
    """``sum over j of rows[row_map[t, j]]`` (times the weight), where computed; ``[T, H]``.

    ``rows`` ``[M, H]``, weights by choice ``[T, k]`` or by row ``[M]``. Also gives ``values``
    ``[M]`` by choice, ``[T, k]``, zero where not computed (empty where there are none).
    ``reads_ahead``, an argument of direct calls, promises that the kernel ahead on the stream does
    not write ``row_map``, which may be read before it has ended.
    """
    wide = math_dtype(rows.dtype)
    live, index = row_map >= 0, row_map.clamp(min=0)
    total = rows.new_zeros(row_map.shape[0], rows.shape[1], dtype=wide)
    picked = rows.new_empty(0)
    if values is not None:
        picked = values.new_zeros(row_map.shape)
    if rows.shape[0] == 0:
        return cast(total, rows.dtype), picked
    for j in range(row_map.shape[1]):
        part = rows[index[:, j]].to(wide)
        if weights is not None:
            weight = weights[:, j] if weights.dim() == 2 else weights[index[:, j]]
            part = part * weight.to(wide)[:, None]
        total = total + torch.where(live[:, j : j + 1], part, 0)
    if values is not None:
        picked = torch.where(live, values[index], 0)
    return cast(total, rows.dtype), picked


def row_dots(rows: Tensor, x: Tensor, row_map: Tensor, by_row: bool) -> Tensor:
    """``rows[row_map[t, j]] . x[t]`` in FP32 (FP64), zero where not computed.

    ``rows`` ``[M, H]``, ``x`` ``[T, H]``; gives ``[T, k]``, or ``[M]`` with ``by_row``.
    """
    wide = math_dtype(rows.dtype)
    live, index = row_map >= 0, row_map.clamp(min=0)
    dots = rows.new_zeros(row_map.shape, dtype=wide)
    if rows.shape[0]:
        for j in range(row_map.shape[1]):
            dots[:, j] = (rows[index[:, j]].to(wide) * x.to(wide)).sum(-1)
        dots = torch.where(live, dots, 0)
    if not by_row:
        return dots
    choice, _ = _choices(row_map, rows.shape[0])
    return dots.view(-1)[choice]


def route(
    logits: Tensor,
    expert_bias: Tensor | None,
    top_k: int,
    score_function: str,
    normalize: bool,
    scaling_factor: float,
    groups: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Weights and ids ``[T, top_k]`` of the experts chosen by logits ``[T, E]``.

    ``groups`` are the last arguments of :func:`fusible.formulas.choose_experts`.
    """
    ids = formulas.choose_experts(logits, expert_bias, top_k, score_function, *groups)
    probs = formulas.router_probs(logits, ids, score_function, normalize, scaling_factor)
    return probs, ids


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` of operands of one dtype, accumulated and kept in FP32 (FP64)."""
    wide = math_dtype(x.dtype)
    if x.device.type == "cuda" and x.dtype != wide:
        y = torch.mm(x, weight.t(), out_dtype=wide)
        return y if bias is None else y + bias.to(wide)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
