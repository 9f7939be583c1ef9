"""Checks of what callers hand to ops, before any kernel runs."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def compute_dtype(x: Tensor, weight: Tensor, who: str) -> torch.dtype:
    """The dtype of a matrix product of ``x`` with ``weight``: autocast's, or the one they share.

    Raises:
        ValueError: they differ outside autocast, live on different devices, or cannot be
            multiplied in the dtype of the weight.
    """
    if x.device != weight.device:
        raise ValueError(
            f"input and parameters of {who} must be on one device, got {x.device} and "
            f"{weight.device}; move one of them"
        )
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(
            f"input and weight of {who} must be one of {names}, got {x.dtype} and {weight.dtype}; "
            "cast them"
        )
    device = x.device.type
    if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    if x.dtype != weight.dtype:
        raise ValueError(
            f"input of {who} must have the weight's dtype {weight.dtype}, got {x.dtype}; cast one "
            "of them, or run under torch.autocast"
        )
    return weight.dtype


def check_features(x: Tensor, features: int, who: str) -> None:
    """Raise ValueError unless the last dimension of ``x`` has ``features`` features."""
    if x.dim() == 0 or x.shape[-1] != features:
        raise ValueError(
            f"input of {who} must have {features} features in its last dimension, got shape "
            f"{tuple(x.shape)}"
        )


def refuse(option: str, who: str, instead: str) -> ValueError:
    """The error for an option that is not offered yet."""
    return ValueError(f"{option} must be False in {who} for now, got True; {instead}")
