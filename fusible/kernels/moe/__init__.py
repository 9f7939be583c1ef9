"""Routing tokens and moving their rows as ``torch.library`` ops.

`definitions` has what they compute, in PyTorch, and `cuda` the kernels.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fusible import formulas
from fusible.formulas import math_dtype
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
gather_sum = define(definitions.gather_sum, cuda.gather_outputs, [cuda.gather_sum])
row_dots = define(definitions.row_dots, cuda.dots_output, [cuda.row_dots])
route = define(definitions.route, cuda.route_outputs, [cuda.route])
route_backward = define(
    formulas.router_probs_backward,
    lambda dprobs, logits, *_: torch.empty_like(logits),
    [cuda.route_backward],
    name="route_backward",
)


def logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` of operands of one dtype, accumulated and kept in FP32 (FP64)."""
    wide = math_dtype(x.dtype)
    if x.device.type == "cuda" and x.dtype != wide:
        y = torch.mm(x, weight.t(), out_dtype=wide)
        return y if bias is None else y + bias.to(wide)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
