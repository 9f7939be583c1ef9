"""The router as ``torch.library`` ops; `definitions` and `formulas` say what they compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusible import formulas
from fusible.formulas import math_dtype
from fusible.kernels.moe import definitions, launch
from fusible.kernels.runtime.library import define


def logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` of operands of one dtype, accumulated and kept in FP32 (FP64)."""
    wide = math_dtype(x.dtype)
    if x.device.type == "cuda" and x.dtype != wide:
        y = torch.mm(x, weight.t(), out_dtype=wide)
        return y if bias is None else y + bias.to(wide)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def _route_fake(
    logits: Tensor,
    expert_bias: Tensor | None,
    top_k: int,
    score_function: str,
    normalize: bool,
    scaling_factor: float,
    groups: list[int],
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


route = define(
    "route(Tensor logits, Tensor? expert_bias, int top_k, str score_function, bool normalize, "
    "float scaling_factor, int[] groups) -> (Tensor, Tensor)",
    _route_fake,
    definitions.route,
    launch.route,
)


def _route_backward_fake(
    dprobs: Tensor,
    logits: Tensor,
    ids: Tensor,
    score_function: str,
    normalize: bool,
    scaling_factor: float,
) -> Tensor:
    return torch.empty_like(logits)


route_backward = define(
    "route_backward(Tensor dprobs, Tensor logits, Tensor ids, str score_function, bool normalize, "
    "float scaling_factor) -> Tensor",
    _route_backward_fake,
    formulas.router_probs_backward,
    launch.route_backward,
)
