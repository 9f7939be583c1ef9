"""Inputs of ops: checks before any kernel runs, and the device of split sizes."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fusible.arguments import described
from fusible.calls import capturing
from fusible.fuser.context import OperationContext
from fusible.fuser.op_facts import autocast_to

FLOAT_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
_DTYPE_NAMES = ", ".join(sorted(str(d).removeprefix("torch.") for d in FLOAT_DTYPES))


def product_dtype(ctx: OperationContext, x: Tensor, weight: Tensor, op_name: str) -> torch.dtype:
    """The dtype of a matrix product of ``x`` with ``weight``: autocast's, or the weight's."""
    dtype, autocast_dtype = weight.dtype, ctx.autocast_dtype
    if (
        x.dtype == dtype
        and autocast_dtype is None
        and dtype in FLOAT_DTYPES
        and x.device == weight.device
    ):
        return dtype
    check_device(x, weight, op_name)
    check_dtype(x, "input", op_name)
    if x.dtype != dtype:
        check_dtype(weight, "weight", op_name)
    return autocast_to(dtype, autocast_dtype)


def check_device(x: Tensor, param: Tensor, op_name: str) -> None:
    """Raise ValueError unless the input is where the parameters are."""
    if x.device != param.device:
        raise ValueError(
            f"input and parameters of {op_name} must be on one device, got {x.device} and "
            f"{param.device}; move one of them"
        )


def wrong_shape(name: str, parameter: Tensor, shape: tuple[int, ...], op_name: str) -> ValueError:
    """The error of a parameter that has been replaced by one without the op's sizes."""
    return ValueError(
        f"{name} of {op_name} must have shape {shape}, got {tuple(parameter.shape)}; make an op of "
        "the other sizes"
    )


def on_device_of(x: Tensor, sizes: Tensor, op_name: str) -> Tensor:
    """``sizes``, or their end rows, on the device of the rows ``x``, copied there if needed."""
    if sizes.device == x.device:
        return sizes
    if not torch.compiler.is_compiling() and capturing():
        raise RuntimeError(
            f"split_sizes of {op_name} must be on {x.device} while a CUDA graph is captured, got "
            f"{sizes.device}; move them there before, since a replay would copy what their "
            "host memory holds by then"
        )
    return sizes.to(x.device, non_blocking=True)


def check_dtype(t: Tensor, what: str, op_name: str) -> None:
    """Raise ValueError unless ``t`` has a dtype that ops compute in."""
    if t.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{what} of {op_name} must be one of {_DTYPE_NAMES}, got {t.dtype}; cast it"
        )


def check_features(x: Tensor, features: int, op_name: str) -> None:
    """Raise ValueError unless the last dimension of ``x`` has ``features`` features."""
    if x.dim() == 0 or x.shape[-1] != features:
        raise ValueError(
            f"input of {op_name} must have {features} features in its last dimension, got shape "
            f"{tuple(x.shape)}"
        )
    if x.is_nested:
        raise nested_input(op_name)


def nested_input(op_name: str) -> ValueError:
    """The error for a nested tensor, which has no view as rows."""
    return ValueError(
        f"input of {op_name} must be a tensor of rows, got a nested tensor; pass x.values()"
    )


def check_sizes(op_name: str, dtype: torch.dtype | None = None, **sizes: Any) -> None:
    """Check what parameters are made of: sizes, and a dtype that ops compute in (None: default).

    Raises:
        TypeError: a size is no integer.
        ValueError: one is under 1, or the dtype is another.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"{name} of {op_name} must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"{name} of {op_name} must be at least 1, got {size}")
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype of {op_name} must be one of {_DTYPE_NAMES}, got {dtype}")


def check_interleaved(x: Tensor, interleave: int | None, op_name: str) -> None:
    """Raise ValueError unless the last dimension of ``x`` is whole pairs of gate and linear."""
    unit = 2 if interleave is None else 2 * interleave
    if x.dim() == 0 or x.shape[-1] % unit:
        layout = "two halves" if interleave is None else f"blocks of {interleave}, by twos"
        raise ValueError(
            f"last dimension of the input of {op_name} must be a multiple of {unit} ({layout}), "
            f"got shape {tuple(x.shape)}"
        )


def check_row_scales(scales: Tensor | None, x: Tensor, op_name: str) -> Tensor:
    """``scales``; ValueError unless it has one floating value per row of ``x``, on its device."""
    if (
        scales is not None
        and scales.is_floating_point()
        and scales.shape == x.shape[:-1]
        and scales.device == x.device
    ):
        return scales
    raise ValueError(
        f"scales of {op_name} must be a floating tensor of shape {tuple(x.shape[:-1])} on "
        f"{x.device}, one value for each row of the input, got {described(scales)}"
    )
