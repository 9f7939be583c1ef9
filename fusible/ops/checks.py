"""Checks of what callers hand to ops, before any kernel runs."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.fuser.context import OperationContext

DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))


def product_dtype(ctx: OperationContext, x: Tensor, weight: Tensor, who: str) -> torch.dtype:
    """The dtype of a matrix product of ``x`` with ``weight``: autocast's, or the one they share.

    Raises:
        ValueError: they differ outside autocast, live on different devices, or have dtypes that
            cannot be multiplied.
    """
    dtype, autocast_dtype = weight.dtype, ctx.autocast_dtype
    if (
        x.dtype == dtype
        and autocast_dtype is None
        and dtype in DTYPES
        and x.device == weight.device
    ):
        return dtype
    check_device(x, weight, who)
    check_dtype(x, "input", who)
    if x.dtype != dtype:
        check_dtype(weight, "weight", who)
    if autocast_dtype is not None and dtype != torch.float64:
        return autocast_dtype
    if x.dtype != dtype:
        raise ValueError(
            f"input of {who} must have the weight's dtype {dtype}, got {x.dtype}; cast one of "
            "them, or run under torch.autocast"
        )
    return dtype


def check_device(x: Tensor, param: Tensor, who: str) -> None:
    """Raise ValueError unless the input is where the parameters are."""
    if x.device != param.device:
        raise ValueError(
            f"input and parameters of {who} must be on one device, got {x.device} and "
            f"{param.device}; move one of them"
        )


def check_dtype(t: Tensor, what: str, who: str) -> None:
    """Raise ValueError unless ``t`` has a dtype that ops compute in."""
    if t.dtype not in DTYPES:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in DTYPES))
        raise ValueError(f"{what} of {who} must be one of {names}, got {t.dtype}; cast it")


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


def check_interleaved(x: Tensor, interleave: int | None, who: str) -> None:
    """Raise ValueError unless the last dimension of ``x`` is whole pairs of gate and linear."""
    unit = 2 if interleave is None else 2 * interleave
    if x.dim() == 0 or x.shape[-1] % unit:
        layout = "two halves" if interleave is None else f"blocks of {interleave}, by twos"
        raise ValueError(
            f"last dimension of the input of {who} must be a multiple of {unit} ({layout}), got "
            f"shape {tuple(x.shape)}"
        )
