"""CUDA implementations of the ops that route tokens and move rows.

cutlass is imported at the first launch. What the kernels do not take runs by the definitions, which
give the same bits but for dot products and scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible import formulas
from fusible.kernels.moe import definitions
from fusible.kernels.moe.spec import BYTES, DTYPES, MAX_GROUPS, RouteSpec, RowsSpec, SortSpec
from fusible.kernels.runtime.gpu import capability, has_cutlass
from fusible.kernels.runtime.launch import aligned, compile_kernel, launch
from fusible.versions import CUTLASS_DSL

_CLUSTER = 8  # CTAs: the largest size that every GPU with clusters supports
_MAX_TOP_K = 32
_INDEX = 2**31 - 2**20  # what 32-bit indices reach, with room for a grid's end


def why_not(t: Tensor, row_map: Tensor, *others: Tensor | None) -> str | None:
    """Say why the kernels cannot move rows ``t`` ``[M, H]``, or None if they can."""
    checks = {
        f"dtype must be bfloat16, float16 or float32, got {t.dtype}": t.dtype in DTYPES,
        f"rows must be of a multiple of {BYTES} bytes, got {t.shape[1]} of {t.itemsize}": (
            t.shape[1] * t.itemsize % BYTES == 0
        ),
        "there must be tokens, choices and features": row_map.numel() > 0 and t.numel() > 0,
        f"choices must be at most {_MAX_TOP_K}, got {row_map.shape[1]}": (
            row_map.shape[1] <= _MAX_TOP_K
        ),
        "rows and row map must be countable in 32 bits": (
            row_map.shape[0] * t.shape[1] * t.itemsize // BYTES < _INDEX
            and max(row_map.numel(), t.shape[0]) < _INDEX
        ),
        "weights must be bfloat16, float16 or float32": all(
            [o is None or o.dtype in DTYPES for o in others]
        ),
        **_machine(t.device),
    }
    return next((sentence for sentence, holds in checks.items() if not holds), None)


def _machine(device: torch.device) -> dict[str, bool]:
    return {
        "the GPU must be SM80 or later": capability(device) >= (8, 0),
        f"nvidia-cutlass-dsl must be at least {CUTLASS_DSL}": has_cutlass(),
    }


def compiled(kernel: str, spec: RowsSpec | RouteSpec | SortSpec, options: str = "") -> Any:
    """Compile the kernel of that name in one of ``device``'s modules.

    The functions there say what it is given. ``options`` such as ``"--gpu-arch sm_100a"`` compile
    for a GPU that need not be there.
    """
    from cutlass import Int32, Int64

    from fusible.kernels.moe.device import bias, placement, router, rows

    functions = {
        "route": (router.route, [Int64] * 4 + [Int32]),
        "route_backward": (router.route_backward, [Int64] * 4 + [Int32]),
        "permutation": (placement.permutation, [Int64] * 4 + [Int32] * 2),
        "scatter": (rows.scatter, [Int64] * 5 + [Int32] * 2),
        "gather": (rows.gather, [Int64] * 6 + [Int32]),
        "dots": (rows.dots, [Int64] * 4 + [Int32] * 2),
        "group_sums": (bias.group_sums, [Int64] * 4 + [Int32]),
        "group_dots": (bias.group_dots, [Int64] * 4 + [Int32] * 2),
    }
    function, kinds = functions[kernel]
    return compile_kernel(function, kinds, (spec,), options)


def _sortrows_spec(ids: Tensor, num_groups: int) -> SortSpec:
    ctas = _CLUSTER if capability(ids.device)[0] in (9, 10) else 1
    return SortSpec(num_groups, ids.dtype == torch.int64, ctas)


def permutation(
    ids: Tensor, num_groups: int, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`definitions.permutation`, by a kernel where it supports the arguments."""
    choices, spec = ids.numel(), _sortrows_spec(ids, num_groups)
    fits = ids.dtype in (torch.int64, torch.int32) and num_groups <= MAX_GROUPS
    if not (fits and 0 < choices <= spec.most_choices and all(_machine(ids.device).values())):
        return definitions.permutation(ids, num_groups, capacity)
    ids = ids.contiguous()
    row_map = torch.empty_like(ids, dtype=torch.int32)
    sizes = ids.new_empty(num_groups, dtype=torch.int64)
    ends = ids.new_empty(num_groups, dtype=torch.int32)
    most = choices if capacity is None else min(capacity, choices)
    given = ids, row_map, sizes, ends, choices, most
    launch(compiled, ("permutation", spec), ids.device, *given)
    return row_map, sizes, ends


def rows_spec(t: Tensor, row_map: Tensor, weights: Tensor | None, **options: Any) -> RowsSpec:
    """The kernel that moves rows ``t``, or reads them with ``weights``."""
    kind = {None: "", 1: "row", 2: "choice"}[None if weights is None else weights.dim()]
    vectors = t.shape[1] * t.itemsize // BYTES
    dtype = DTYPES[torch.float32 if weights is None else weights.dtype]
    return RowsSpec(DTYPES[t.dtype], vectors, row_map.shape[1], kind, dtype, **options)  # type: ignore[arg-type]


def scatter_rows(
    x: Tensor, row_map: Tensor, weights: Tensor | None, rows: int, scale: bool
) -> tuple[Tensor, Tensor]:
    """`definitions.scatter_rows`, by a kernel where it supports the arguments."""
    if rows == 0 or why_not(x, row_map, weights) is not None:
        return definitions.scatter_rows(x, row_map, weights, rows, scale)
    x, row_map = aligned(x), row_map.contiguous()
    weights = None if weights is None else weights.contiguous()
    out = x.new_empty(rows, x.shape[1])
    spec = rows_spec(x, row_map, weights, scale=scale)
    moved = x.new_empty(0)
    if weights is not None and spec.weights == "choice":
        moved = weights.new_empty(rows)
    launch(compiled, ("scatter", spec), x.device, x, row_map, weights, out, moved, x.shape[0], rows)
    return out, moved


def gather_sum(
    rows: Tensor, row_map: Tensor, weights: Tensor | None, values: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`definitions.gather_sum`, by a kernel where it supports the arguments."""
    if why_not(rows, row_map, weights, values) is not None:
        return definitions.gather_sum(rows, row_map, weights, values)
    rows, row_map = aligned(rows), row_map.contiguous()
    weights = None if weights is None else weights.contiguous()
    tokens = row_map.shape[0]
    out = rows.new_empty(tokens, rows.shape[1])
    picked, kind = rows.new_empty(0), ""
    if values is not None:
        values, kind = values.contiguous(), DTYPES[values.dtype]
        picked = values.new_empty(row_map.shape)
    spec = rows_spec(rows, row_map, weights, values=kind)
    launch(
        compiled, ("gather", spec), rows.device, rows, row_map, weights, values, out, picked, tokens
    )
    return out, picked


def row_dots(rows: Tensor, x: Tensor, row_map: Tensor, by_row: bool) -> Tensor:
    """`definitions.row_dots`, by a kernel where it supports the arguments."""
    if rows.dtype != x.dtype or why_not(rows, row_map) is not None:
        return definitions.row_dots(rows, x, row_map, by_row)
    rows, x, row_map = aligned(rows), aligned(x), row_map.contiguous()
    out = rows.new_empty(rows.shape[:1] if by_row else row_map.shape, dtype=torch.float32)
    spec = rows_spec(rows, row_map, out if by_row else None)
    launch(compiled, ("dots", spec), rows.device, rows, x, row_map, out, x.shape[0], rows.shape[0])
    return out


def _routes(logits: Tensor, top_k: int, groups: int = 1) -> bool:
    """Whether the router's kernels take the logits."""
    tokens, experts = logits.shape
    fits = experts <= MAX_GROUPS and top_k <= _MAX_TOP_K and groups <= 32
    fits = fits and logits.dtype == torch.float32 and 0 < tokens * max(experts, 32) < _INDEX
    return fits and all(_machine(logits.device).values())


def route(
    logits: Tensor,
    expert_bias: Tensor | None,
    top_k: int,
    score_function: str,
    normalize: bool,
    scaling_factor: float,
    groups: list[int],
) -> tuple[Tensor, Tensor]:
    """`definitions.route`, by a kernel where it supports the arguments."""
    if not _routes(logits, top_k, groups[0]):
        return definitions.route(
            logits, expert_bias, top_k, score_function, normalize, scaling_factor, groups
        )
    tokens, experts = logits.shape
    logits = logits.contiguous()
    bias = None if expert_bias is None else expert_bias.float().contiguous()
    probs = logits.new_empty(tokens, top_k)
    ids = logits.new_empty(tokens, top_k, dtype=torch.int64)
    sigmoid, biased = score_function == "sigmoid", bias is not None
    number, kept, summed = groups
    spec = RouteSpec(
        experts, top_k, sigmoid, normalize, scaling_factor, biased, (number, kept, summed)
    )
    launch(compiled, ("route", spec), logits.device, logits, bias, probs, ids, tokens)
    return probs, ids


def route_backward(
    dprobs: Tensor,
    logits: Tensor,
    ids: Tensor,
    score_function: str,
    normalize: bool,
    scaling_factor: float,
) -> Tensor:
    """`formulas.router_probs_backward`, by a kernel where it supports the arguments."""
    top_k = ids.shape[1]
    if not _routes(logits, top_k):
        options = score_function, normalize, scaling_factor
        return formulas.router_probs_backward(dprobs, logits, ids, *options)
    dprobs, logits = dprobs.float().contiguous(), logits.contiguous()
    dlogits = torch.empty_like(logits)
    sigmoid = score_function == "sigmoid"
    spec = RouteSpec(logits.shape[1], top_k, sigmoid, normalize, scaling_factor)
    given = dprobs, logits, ids.contiguous(), dlogits, logits.shape[0]
    launch(compiled, ("route_backward", spec), logits.device, *given)
    return dlogits
