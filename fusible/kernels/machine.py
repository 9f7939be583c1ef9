"""What launches ask of a GPU and its software, and how kernels of plain arguments are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from fusible.fuser.target import CUTLASS_DSL, installed


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Major and minor compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def has_cutlass() -> bool:
    """Whether nvidia-cutlass-dsl is installed, and new enough; does not import it."""
    version = installed("nvidia-cutlass-dsl")
    return version is not None and version >= CUTLASS_DSL


def compile_plain(
    function: Callable[..., Any], kinds: Sequence[Any], spec: Any, options: str
) -> Any:
    """Compile ``function(*numbers, stream, spec)`` for numbers of ``kinds`` (Int64 for addresses).

    What it gives is called with the numbers and a raw stream. ``options`` such as
    ``"--gpu-arch sm_100a"`` compile for a GPU that need not be there.
    """
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    return cute.compile(
        function,
        *[kind(0) for kind in kinds],
        make_fake_stream(),
        spec,
        options=f"--enable-tvm-ffi {options}",
    )
