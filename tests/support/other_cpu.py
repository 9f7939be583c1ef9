"""Products and sums that round as another CPU's might: ``pytest --other-cpu``.

A CPU chooses how to sum by dtype, shape, layout and address, and where a row lies among the others.
Here every element of a product or sum is rounded up or down by a hash of just these, unless the
sum is exact; of a function like exp, by a hash of the layout and the value. So what holds for any
CPU holds here: the same operation on the same layout gives the same bits. What another operation,
layout or number of rows gives differs in about half of the elements, so a test that asserts equal
bits of those fails, on whichever machine it runs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
_library = None


def use() -> None:
    """From now on, in this process."""
    global _library  # noqa: PLW0603 (a library's registrations last as long as it does)
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that its own kernels are replaced
        for name, function in _KERNELS.items():
            _library.impl(name, _quiet(function), "CPU")


def is_nearest() -> bool:
    """Whether results are rounded to the nearest, as they are but for `use`."""
    return _library is None


def _quiet(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Without NumPy's warnings of overflow: infinity is a value."""

    @functools.wraps(function)
    def kernel(*args: Any, **options: Any) -> Tensor:
        with np.errstate(all="ignore"):
            return function(*args, **options)

    return kernel


# --- rounding -------------------------------------------------------------------------------------


def _round(value: np.ndarray, dtype: torch.dtype, places: np.ndarray, *of: Tensor) -> Tensor:
    """``value``, in FP64, rounded up or down, by its places and the layout of the operands.

    What FP32 holds is taken for an exact sum, which every CPU rounds to the nearest.
    """
    inexact = (value.astype(np.float32) != value) & np.isfinite(value)
    unit = np.ldexp(1.0, np.frexp(value)[1] - 1) * torch.finfo(dtype).eps
    step = unit * _directions(places, _layout(of)) * (1.0 if dtype == torch.float64 else 0.49)
    return _tensor(np.where(inexact, value + step, value), dtype)


def _tensor(value: np.ndarray, dtype: torch.dtype) -> Tensor:
    """``value`` in memory of PyTorch: NumPy's lies at other multiples of 16 bytes at each call."""
    return torch.from_numpy(value).to(dtype, copy=True)


def _layout(tensors: Sequence[Tensor]) -> int:
    """A number that differs with dtype, shape, strides and alignment."""
    return hash(tuple((t.element_size(), t.shape, t.stride(), t.data_ptr() % 64) for t in tensors))


def _directions(places: np.ndarray, key: int) -> np.ndarray:
    """1 or -1 for each place."""
    mixed = (places.astype(np.uint64) + np.uint64(key % 2**63)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x1B873593)
    return (mixed >> np.uint64(40)) % np.uint64(2) * 2.0 - 1


def _positions(value: np.ndarray) -> np.ndarray:
    return np.arange(value.size).reshape(value.shape)


def _double(t: Tensor) -> np.ndarray:
    return t.detach().to(torch.float64).numpy()


# --- kernels --------------------------------------------------------------------------------------


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype not in FLOATS:  # integers
        return _tensor(np.asarray(a.numpy() @ b.numpy()), a.dtype)
    value = np.asarray(_double(a) @ _double(b))
    return _round(value, a.dtype, _positions(value), a, b)


def _add_matmul(
    addend: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    value = alpha * (_double(a) @ _double(b))
    if beta:
        value = value + beta * _double(addend)
    return _round(value, a.dtype, _positions(value), addend, a, b)


def _sum(
    x: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    out = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    array = _double(x) if out in FLOATS else x.detach().to(out).numpy()
    value = np.asarray(array.sum(axis=tuple(dim) if dim else None, keepdims=keepdim))
    if out not in FLOATS:
        return _tensor(value, out)
    return _round(value, out, _positions(value), x)


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    value = _double(x)
    value = np.exp(value - value.max(axis=dim, keepdims=True, initial=-np.inf))
    value = np.asarray(value / value.sum(axis=dim, keepdims=True))
    dtype = torch.float32 if half_to_float else x.dtype
    return _round(value, dtype, value.view(np.int64), x)


def _elementwise(exact: Callable[[np.ndarray], Any]) -> Callable[[Tensor], Tensor]:
    """A function whose vector code and scalar code round otherwise."""

    def kernel(x: Tensor) -> Tensor:
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        value = np.asarray(exact(_double(x)))
        return _round(value, dtype, value.view(np.int64), x)

    return kernel


def _sigmoid(x: np.ndarray) -> Any:
    return 1 / (1 + np.exp(-x))


def _out(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def into(*args: Tensor, out: Tensor, **options: Any) -> Tensor:
        result = function(*args, **options)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return into


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def onto(self: Tensor, *args: Tensor, **options: Any) -> Tensor:
        return self.copy_(function(self, *args, **options))

    return onto


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _add_matmul),
    "exp": _elementwise(np.exp),
    "tanh": _elementwise(np.tanh),
    "sigmoid": _elementwise(_sigmoid),
    "silu": _elementwise(lambda x: x * _sigmoid(x)),
}
_WITHOUT_IN_PLACE = {"mm", "bmm", "mv", "dot"}
_KERNELS = {
    **_FUNCTIONS,
    **{f"{name}.out": _out(function) for name, function in _FUNCTIONS.items()},
    **{f"{n}_": _in_place(f) for n, f in _FUNCTIONS.items() if n not in _WITHOUT_IN_PLACE},
    "_softmax": _softmax,
    "sum": lambda x, *, dtype=None: _sum(x, dtype=dtype),
    "sum.dim_IntList": _sum,
    "sum.IntList_out": _out(_sum),
}
