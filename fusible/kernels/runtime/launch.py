"""Compiles kernels of addresses and sizes, caches them, and launches them on the current stream.

Nothing here reads a tensor's values: group ends, scales and pointers stay on the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from fusible.kernels.runtime.cache import load_or_compile
from fusible.kernels.runtime.gpu import architecture

TENSOR_TYPES = (Tensor, torch.nn.Parameter)  # the memory of a subclass may not hold its values
_NUMBERS = int, float
_ALIGNMENT_BYTES = 16  # of addresses: the widest load of a thread


def compile_kernel(path: str, constants: Sequence[Any] = (), options: str = "") -> Any:
    """Compile the kernel at ``path``, such as ``"moe.rows.scatter"`` in ``moe/device/rows.py``.

    It is a function of numbers, of the kinds that its signature says (an Int64 for an address), the
    stream, and ``constants``; or a class, made of these, whose objects are called with the rest.
    The result is called with the numbers and a raw stream. ``options`` such as
    ``"--gpu-arch sm_100a"`` compile for a GPU that need not be there.
    """
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    package, module, name = path.split(".")
    function = getattr(import_module(f"fusible.kernels.{package}.device.{module}"), name)
    if isinstance(function, type):
        function, constants = function(*constants), ()
    parameters = inspect.signature(function).parameters
    kinds = [parameters[p].annotation for p in takewhile("stream".__ne__, parameters)]
    return cute.compile(
        function,
        *[kind(0) for kind in kinds],
        make_fake_stream(),
        *constants,
        options=f"--enable-tvm-ffi {options}",
    )


@cache
def load_kernel(path: str, constants: tuple[Any, ...], gpu: str) -> Any:
    """The kernel that `compile_kernel` makes for a GPU, such as ``"sm_90a"``.

    From memory, disk or the compiler; the ``repr`` of the constants must identify it. It is cached
    until the process ends: a captured graph may run it at any time.
    """
    name = f"{path}{constants} {gpu}"
    return load_or_compile(name, lambda: compile_kernel(path, constants, f"--gpu-arch {gpu}"))


def launch(
    path: str, constants: tuple[Any, ...], device: torch.device, *args: Tensor | float | None
) -> None:
    """Launch the kernel that `compile_kernel` makes on a device's current stream.

    Tensors go by address, None as address 0.
    """
    numbers = [
        a if type(a) in _NUMBERS else 0 if a is None else a.data_ptr()  # type: ignore[union-attr]
        for a in args
    ]
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    kernel = load_kernel(path, constants, architecture(device))
    call_on_device(device.index, kernel, (*numbers, stream))


def call_on_device(index: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call ``function``, which launches a kernel, with the device of that index current."""
    if index == torch._C._cuda_getDevice():
        function(*arguments)
        return
    with torch.cuda.device(index):
        function(*arguments)


def aligned(t: Tensor, unit: int = _ALIGNMENT_BYTES) -> Tensor:
    """``t``, or a copy, contiguous and beginning at a multiple of ``unit`` bytes."""
    if t.is_contiguous() and begins_aligned(t, unit):  # contiguous() takes longer
        return t
    return t.clone(memory_format=torch.contiguous_format)


def begins_aligned(t: Tensor, unit: int = _ALIGNMENT_BYTES) -> bool:
    """Whether ``t`` begins at a multiple of ``unit`` bytes; True of traced tensors."""
    return torch.compiler.is_compiling() or t.data_ptr() % unit == 0
