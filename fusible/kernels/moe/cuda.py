"""CUDA implementations of the ops that route tokens and move rows, and their outputs.

For arguments that the kernels do not support the functions return NotImplemented, and the
definitions run, with the same bits except in dot products, logits and scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NotImplementedType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.formulas import math_dtype
from fusible.kernels.moe.spec import (
    BYTES,
    FEW_TOKENS,
    FUSED_ROUTER_TOKENS,
    MAX_GROUPS,
    PermuteSpec,
    RouteSpec,
    RouteTokensSpec,
    RowsSpec,
    SortSpec,
)
from fusible.kernels.runtime.gpu import MAX_INDEX, PTX_NAMES, capability, runs_kernels
from fusible.kernels.runtime.launch import TENSOR_TYPES, aligned, launch
from fusible.kernels.runtime.workspaces import zeroed_counter
from fusible.recipes.formats import FP8_BLOCK, NumberFormat, fp8_block

_Outputs = tuple[Any, ...] | NotImplementedType

_CLUSTER = 8  # CTAs: the largest size that every GPU with clusters supports
_MAX_TOP_K = 32
_MIN_SM = 80
_MIN_FP8_SM = 89
_FEW_VECTORS = 2**18  # of 16 bytes: what one wave of threads holds on 132 multiprocessors
_BLOCK_SCALING = fp8_block().scaling  # of the formats that the kernel quantizes to


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


def supports_row_copies(t: Tensor, row_map: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels can move rows ``t`` ``[M, H]`` by ``row_map``.

    ``others`` are weights or values of the rows, in any dtype that the kernels read.
    """
    vectors, rest = divmod(t.shape[1] * t.itemsize, BYTES)
    return (
        t.dtype in PTX_NAMES
        and rest == 0
        and row_map.numel() > 0
        and t.numel() > 0
        and row_map.shape[1] <= _MAX_TOP_K
        and row_map.shape[0] * vectors < MAX_INDEX
        and max(row_map.numel(), t.shape[0]) < MAX_INDEX
        and all([other is None or other.dtype in PTX_NAMES for other in others])
        and runs_kernels(t.device, _MIN_SM)
    )


def permutation_outputs(ids: Tensor, num_groups: int, *_: Any) -> tuple[Tensor, ...]:
    """The outputs of `permutation`, not written."""
    return (
        ids.new_empty(ids.shape, dtype=torch.int32),
        ids.new_empty(num_groups, dtype=torch.int64),
        ids.new_empty(num_groups, dtype=torch.int32),
    )


def permutation(ids: Tensor, num_groups: int, capacity: int | None) -> _Outputs:
    """`definitions.permutation`."""
    ctas = _CLUSTER if capability(ids.device)[0] in (9, 10) else 1
    choices, spec = ids.numel(), SortSpec(num_groups, ids.dtype == torch.int64, ctas)
    fits = ids.dtype in (torch.int64, torch.int32) and num_groups <= MAX_GROUPS
    if not (fits and 0 < choices <= spec.most_choices and runs_kernels(ids.device, _MIN_SM)):
        return NotImplemented
    outputs = permutation_outputs(ids, num_groups)
    sizes = choices, _most_rows(choices, capacity)
    launch("moe.placement.permutation", (spec,), ids.device, ids.contiguous(), *outputs, *sizes)
    return outputs


def _most_rows(choices: int, capacity: int | None) -> int:
    """The most rows of a group."""
    return choices if capacity is None else min(capacity, choices)


def rows_spec(t: Tensor, row_map: Tensor, weights: Tensor | None, **options: Any) -> RowsSpec:
    """The specification of a kernel that moves rows ``t``, or reads them, with ``weights``."""
    kind = {None: "", 1: "row", 2: "choice"}[None if weights is None else weights.dim()]
    vectors = t.shape[1] * t.itemsize // BYTES
    dtype = PTX_NAMES[torch.float32 if weights is None else weights.dtype]
    return RowsSpec(PTX_NAMES[t.dtype], vectors, row_map.shape[1], kind, dtype, **options)  # type: ignore[arg-type]


def _unroll(t: Tensor, row_map: Tensor, processes: int) -> int:
    """`RowsSpec.unroll` for rows ``t``: one token where more would leave a GPU's threads idle."""
    vectors = row_map.shape[0] * t.shape[1] * t.itemsize // BYTES
    return 1 if processes == 1 and vectors <= _FEW_VECTORS else 4


def sources_outputs(row_map: Tensor, weights: Tensor, rows: int) -> tuple[Tensor, ...]:
    """The outputs of `row_sources`, not written."""
    return row_map.new_empty(rows), weights.new_empty(rows)


def row_sources(row_map: Tensor, weights: Tensor, rows: int) -> _Outputs:
    """`definitions.row_sources`."""
    fits = weights.dtype in PTX_NAMES and row_map.numel() < MAX_INDEX
    if not (fits and rows > 0 and runs_kernels(row_map.device, _MIN_SM)):
        return NotImplemented
    outputs = sources_outputs(row_map, weights, rows)
    dtype = PTX_NAMES[weights.dtype]
    spec = RowsSpec(dtype, 0, row_map.shape[1], "choice", dtype)
    arguments = row_map.contiguous(), weights.contiguous(), *outputs
    launch("moe.rows.sources", (spec,), row_map.device, *arguments, row_map.shape[0], rows)
    return outputs


def scatter_outputs(
    x: Tensor, row_map: Tensor, weights: Tensor | None, rows: int, *_: Any
) -> tuple[Tensor, ...]:
    """The outputs of `scatter_rows`, not written."""
    moved = x.new_empty(0)
    if weights is not None and weights.dim() == 2:
        moved = weights.new_empty(rows)
    return x.new_empty(rows, x.shape[1]), moved


def scatter_rows(
    x: Tensor | PeerRows,
    row_map: Tensor,
    weights: Tensor | None,
    rows: int,
    scale: bool,
    *,
    zero_tail: bool = True,
) -> _Outputs:
    """`definitions.scatter_rows`, also of tokens in several memories."""
    part, processes = _part(x)
    if rows == 0 or not supports_row_copies(part, row_map, weights):
        return NotImplemented
    outputs = scatter_outputs(part, row_map, weights, rows)
    unroll = _unroll(part, row_map, processes)
    spec = rows_spec(part, row_map, weights, scale=scale, unroll=unroll, processes=processes)
    address, *place = _memory_of(x)
    arguments = address, row_map.contiguous(), _contiguous(weights), *outputs
    sizes = row_map.shape[0], rows, int(zero_tail)
    launch("moe.rows.scatter", (spec,), part.device, *arguments, *sizes, *place)
    return outputs


def permutes_rows(x: Tensor, weights: Tensor, ids: Tensor, num_groups: int, rows: int) -> bool:
    """Whether one kernel sorts the choices and copies the rows: where tokens are few."""
    return (
        ids.shape[0] <= FEW_TOKENS
        and rows > 0
        and 0 < num_groups <= MAX_GROUPS
        and ids.dtype in (torch.int64, torch.int32)
        and supports_row_copies(x, ids, weights)
    )


def permute_rows(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    num_groups: int,
    capacity: int | None,
    rows: int,
    scale: bool,
    *,
    zero_tail: bool = True,
    fmt: NumberFormat | None = None,
) -> _Outputs:
    """The op `permute_rows`, for few tokens; with ``fmt`` `permute_rows_quantized`."""
    if not permutes_rows(x, weights, ids, num_groups, rows):
        return NotImplemented
    features, dtype = x.shape[1], fmt.element.dtype if fmt else x.dtype
    data, moved = x.new_empty(rows, features, dtype=dtype), weights.new_empty(rows)
    others = moved, *permutation_outputs(ids, num_groups)
    scale_of_data = None
    if fmt:
        scale_of_data = x.new_empty(-(-features // FP8_BLOCK), rows, dtype=torch.float32)
    of_rows = rows_spec(x, ids, weights, scale=scale)
    spec = PermuteSpec(of_rows, num_groups, ids.dtype == torch.int64, fmt)
    arguments = aligned(x), weights.contiguous(), ids.contiguous(), data, scale_of_data, *others
    sizes = ids.shape[0], rows, _most_rows(ids.numel(), capacity), int(zero_tail)
    launch("moe.permuted_rows.permute_rows", (spec,), x.device, *arguments, *sizes)
    return (data, scale_of_data, *others) if fmt else (data, *others)


def permute_rows_quantized(
    x: Tensor, weights: Tensor, ids: Tensor, num_groups: int, capacity: Any, rows: int, fmt: Any
) -> _Outputs:
    """The op `permute_rows_quantized`, for few tokens."""
    fits = x.dtype == torch.bfloat16 and fmt.scaling == _BLOCK_SCALING
    if not (fits and runs_kernels(x.device, _MIN_FP8_SM)):
        return NotImplemented
    return permute_rows(x, weights, ids, num_groups, capacity, rows, False, fmt=fmt)


def gather_outputs(
    rows: Tensor, row_map: Tensor, weights: Tensor | None, values: Tensor | None
) -> tuple[Tensor, ...]:
    """The outputs of `gather_sum`, not written."""
    sums = rows.new_empty(row_map.shape[0], rows.shape[1])
    return sums, _picked_output(rows, row_map, values)


def _picked_output(rows: Tensor, row_map: Tensor, values: Tensor | None) -> Tensor:
    return rows.new_empty(0) if values is None else values.new_empty(row_map.shape)


def gather_sum(
    rows: Tensor,
    row_map: Tensor,
    weights: Tensor | None,
    values: Tensor | None,
    out: PeerRows | None = None,
    *,
    reads_ahead: bool = False,
) -> _Outputs:
    """`definitions.gather_sum`, also into ``out``, rows in several memories."""
    if not supports_row_copies(rows, row_map, weights, values):
        return NotImplemented
    sums: Tensor | PeerRows
    if out is None:
        sums, picked = gather_outputs(rows, row_map, weights, values)
    else:
        sums, picked = out, _picked_output(rows, row_map, values)
    of_values = "" if values is None else PTX_NAMES[values.dtype]
    # Of many tokens it would take registers, and a block waits for others, not for its row map.
    ahead = reads_ahead and row_map.shape[0] <= FEW_TOKENS and row_map.is_contiguous()
    processes = _part(sums)[1]
    options = {"unroll": _unroll(rows, row_map, processes), "processes": processes}
    spec = rows_spec(rows, row_map, weights, values=of_values, reads_ahead=ahead, **options)
    inputs = aligned(rows), row_map.contiguous(), _contiguous(weights), _contiguous(values)
    address, *place = _memory_of(sums)
    arguments = *inputs, address, picked, row_map.shape[0], *place
    launch("moe.rows.gather", (spec,), rows.device, *arguments)
    return sums, picked


def _part(rows: Tensor | PeerRows) -> tuple[Tensor, int]:
    """Rows in one memory, and the number of memories."""
    return (rows, 1) if isinstance(rows, Tensor) else (rows.parts[rows.rank], len(rows.parts))


def _memory_of(rows: Tensor | PeerRows) -> tuple[Tensor | int, int, int]:
    """The address of rows or of the table of memories, the offset in each, and the rank."""
    if isinstance(rows, Tensor):
        return aligned(rows), 0, 0
    return rows.table, rows.offset, rows.rank


def dots_output(rows: Tensor, x: Tensor, row_map: Tensor, by_row: bool) -> Tensor:
    """The output of `row_dots`, not written."""
    shape = rows.shape[:1] if by_row else row_map.shape
    return rows.new_empty(shape, dtype=math_dtype(rows.dtype))


def row_dots(rows: Tensor, x: Tensor, row_map: Tensor, by_row: bool) -> Tensor | NotImplementedType:
    """`definitions.row_dots`."""
    if rows.dtype != x.dtype or not supports_row_copies(rows, row_map):
        return NotImplemented
    out = dots_output(rows, x, row_map, by_row)
    spec = rows_spec(rows, row_map, out if by_row else None)
    arguments = aligned(rows), aligned(x), row_map.contiguous(), out, x.shape[0], rows.shape[0]
    launch("moe.rows.dots", (spec,), rows.device, *arguments)
    return out


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _supports_router(
    tokens: int, experts: int, device: torch.device, top_k: int, groups: int = 1
) -> bool:
    """Whether the router's kernels support FP32 logits ``[tokens, experts]``."""
    fits = experts <= MAX_GROUPS and top_k <= _MAX_TOP_K and groups <= 32
    return fits and 0 < tokens * max(experts, 32) < MAX_INDEX and runs_kernels(device, _MIN_SM)


def route_outputs(logits: Tensor, expert_bias: Any, top_k: int, *_: Any) -> tuple[Tensor, ...]:
    """The outputs of `route`, not written."""
    shape = logits.shape[0], top_k
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def route(logits: Tensor, expert_bias: Tensor | None, top_k: int, *options: Any) -> _Outputs:
    """`definitions.route`."""
    tokens, experts = logits.shape
    fits = logits.dtype == torch.float32
    if not (fits and _supports_router(tokens, experts, logits.device, top_k, options[-1][0])):
        return NotImplemented
    outputs = route_outputs(logits, expert_bias, top_k)
    spec = _route_spec(experts, top_k, options, expert_bias is not None)
    arguments = logits.contiguous(), _float(expert_bias), *outputs, tokens
    launch("moe.router.route", (spec,), logits.device, *arguments)
    return outputs


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


def _route_spec(
    experts: int, top_k: int, options: Sequence[Any], biased: bool = False
) -> RouteSpec:
    score_function, normalize, scaling_factor, *groups = options
    choice = top_k, score_function == "sigmoid", normalize, scaling_factor
    return RouteSpec(experts, *choice, biased, *map(tuple, groups))


def route_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert_bias: Tensor | None,
    top_k: int,
    *options: Any,
) -> _Outputs:
    """The op `route_tokens`, for few tokens."""
    if x.shape[0] > FUSED_ROUTER_TOKENS:
        return NotImplemented
    (tokens, features), experts = x.shape, weight.shape[0]
    vectors, rest = divmod(features * x.itemsize, BYTES)
    fits = x.dtype in PTX_NAMES and rest == 0
    # What the product and the sum of the definition would refuse.
    fits = fits and weight.shape == (experts, features) and weight.dtype == x.dtype
    fits = fits and (bias is None or (bias.shape == (experts,) and bias.dtype in PTX_NAMES))
    for t in (weight, *([] if bias is None else [bias])):
        fits = fits and type(t) in TENSOR_TYPES and t.device == x.device
    if not (fits and _supports_router(tokens, experts, x.device, top_k, options[-1][0])):
        return NotImplemented
    logits = x.new_empty(tokens, experts, dtype=torch.float32)
    outputs = logits, *route_outputs(logits, None, top_k)
    inputs = aligned(x), aligned(weight), _contiguous(bias), _float(expert_bias)
    of_bias = "" if bias is None else PTX_NAMES[bias.dtype]
    route_spec = _route_spec(experts, top_k, options, expert_bias is not None)
    spec = RouteTokensSpec(route_spec, PTX_NAMES[x.dtype], vectors, of_bias)
    counter = zeroed_counter(x.device.index, torch._C._cuda_getCurrentRawStream(x.device.index))
    launch("moe.router.route_tokens", (spec,), x.device, *inputs, *outputs, counter, tokens)
    return outputs


def route_backward(
    dprobs: Tensor, logits: Tensor, ids: Tensor, *options: Any
) -> Tensor | NotImplementedType:
    """`formulas.router_probs_backward`."""
    (tokens, experts), top_k = logits.shape, ids.shape[1]
    fits = logits.dtype == torch.float32
    if not (fits and _supports_router(tokens, experts, logits.device, top_k)):
        return NotImplemented
    dprobs, logits = dprobs.float().contiguous(), logits.contiguous()
    dlogits = torch.empty_like(logits)
    spec = _route_spec(experts, top_k, options)
    arguments = dprobs, logits, ids.contiguous(), dlogits, tokens
    launch("moe.router.route_backward", (spec,), logits.device, *arguments)
    return dlogits
