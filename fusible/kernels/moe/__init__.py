"""Routing tokens and moving their rows as ``torch.library`` ops.

`definitions` has what they compute, in PyTorch, and `cuda` the kernels.
"""

from __future__ import annotations

from functools import partial

import torch

from fusible import formulas
from fusible.kernels.moe import cuda, definitions
from fusible.library import define

permutation = define(definitions.permutation, cuda.permutation_outputs, [cuda.permutation])
row_sources = define(definitions.row_sources, cuda.sources_outputs, [cuda.row_sources])
scatter_rows = define(definitions.scatter_rows, cuda.scatter_outputs, [cuda.scatter_rows])
permute_rows = define(
    definitions.permute_rows,
    cuda.permute_outputs,
    [
        cuda.permute_rows,
        partial(definitions.permute_rows, sort=permutation, copy=scatter_rows),
    ],
)
permute_rows_quantized = define(
    definitions.permute_rows_quantized,
    cuda.permute_rows_quantized_outputs,
    [
        cuda.permute_rows_quantized,
        partial(definitions.permute_rows_quantized, sort=permutation, sources=row_sources),
    ],
)
gather_sum = define(definitions.gather_sum, cuda.gather_outputs, [cuda.gather_sum])
row_dots = define(definitions.row_dots, cuda.dots_output, [cuda.row_dots])
route = define(definitions.route, cuda.route_outputs, [cuda.route])
route_tokens = define(
    definitions.route_tokens,
    cuda.route_tokens_outputs,
    [cuda.route_tokens, partial(definitions.route_tokens, choose=route)],
    lambda x, weight, *_: 2 * x.shape[0] * weight.numel(),
)
route_backward = define(
    formulas.router_probs_backward,
    lambda dprobs, logits, *_: torch.empty_like(logits),
    [cuda.route_backward],
    name="route_backward",
)
