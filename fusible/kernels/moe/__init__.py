"""Routing tokens and moving their rows as ``torch.library`` ops.

`definitions` has what they compute, in PyTorch, and `cuda` the kernels. The definitions of ops that
do the work of several are here, in terms of these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusible import formulas
from fusible.kernels.moe import cuda, definitions
from fusible.kernels.quantize.k_major import RowsToQuantize, quantize_pieces
from fusible.library import define
from fusible.recipes.formats import NumberFormat

permutation = define(definitions.permutation, cuda.permutation_outputs, [cuda.permutation])
row_sources = define(definitions.row_sources, cuda.sources_outputs, [cuda.row_sources])
scatter_rows = define(definitions.scatter_rows, cuda.scatter_outputs, [cuda.scatter_rows])
gather_sum = define(definitions.gather_sum, cuda.gather_outputs, [cuda.gather_sum])
row_dots = define(definitions.row_dots, cuda.dots_output, [cuda.row_dots])
route = define(definitions.route, cuda.route_outputs, [cuda.route])
route_backward = define(
    formulas.router_probs_backward,
    lambda dprobs, logits, *_: torch.empty_like(logits),
    [cuda.route_backward],
    name="route_backward",
)


@torch.no_grad()
def _permute_rows(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    num_groups: int,
    capacity: int | None,
    rows: int,
    scale: bool,
    *,
    zero_tail: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`permutation` of ids ``[T, k]``, and `scatter_rows` by it, of weights ``[T, k]``.

    The results of `scatter_rows`, then those of `permutation`.
    """
    row_map, sizes, ends = permutation(ids, num_groups, capacity)
    out, moved = scatter_rows(x, row_map, weights, rows, scale, zero_tail=zero_tail)
    return out, moved, row_map, sizes, ends


@torch.no_grad()
def _permute_rows_quantized(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    num_groups: int,
    capacity: int | None,
    rows: int,
    fmt: NumberFormat,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`permutation` of ids ``[T, k]``, and the tokens as rows by it, quantized.

    ``x`` is ``[T, H]``, weights ``[T, k]``, ``fmt`` of 1x128 blocks with FP32 scales. Gives
    elements ``[rows, H]`` and scales ``[ceil(H / 128), rows]``, those of zeros in the tail, weights
    ``[rows]``, zero in the tail, then the results of `permutation`. Raises ValueError for another
    format, and what `quantize_k_major` raises.
    """
    if not fmt.directional:
        raise ValueError(
            f"fmt of rows that are quantized must be of 1x128 blocks, got {fmt.name}; use "
            "permute_rows and quantize_k_major"
        )
    row_map, sizes, ends = permutation(ids, num_groups, capacity)
    index, moved = row_sources(row_map, weights, rows)
    data, scale, *_ = quantize_pieces(RowsToQuantize(x, ends, index), fmt, True, False)
    return data, scale, moved, row_map, sizes, ends


@torch.no_grad()
def _route_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert_bias: Tensor | None,
    top_k: int,
    score_function: str,
    normalize: bool,
    scaling_factor: float,
    groups: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The logits ``[T, E]`` of tokens ``x`` ``[T, H]``, and what `route` chooses by them.

    ``weight`` is ``[E, H]``, ``bias`` ``[E]``; logits are accumulated and kept in FP32 (FP64).
    """
    logits = definitions.router_logits(x, weight, bias)
    choice = top_k, score_function, normalize, scaling_factor, groups
    return logits, *route(logits, expert_bias, *choice)


# On fake tensors these run too, by the fakes of the ops that they call.
permute_rows = define(_permute_rows, _permute_rows, [cuda.permute_rows], name="permute_rows")
permute_rows_quantized = define(
    _permute_rows_quantized,
    _permute_rows_quantized,
    [cuda.permute_rows_quantized],
    name="permute_rows_quantized",
)
route_tokens = define(
    _route_tokens,
    _route_tokens,
    [cuda.route_tokens],
    lambda x, weight, *_: 2 * x.shape[0] * weight.numel(),
    name="route_tokens",
)
