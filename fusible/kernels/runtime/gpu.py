"""Facts about a GPU and its software that kernel launches depend on."""

from __future__ import annotations

from functools import cache

import torch

from fusible.versions import CUTLASS_DSL, installed

PTX_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
"""Names of the dtypes of high precision in specs of kernels."""
MAX_INDEX = 2**31 - 2**20
"""The limit of 32-bit indices, less what a grid may run past the end."""


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Major and minor compute capability of a CUDA device; of an AMD one, which has none, zeros."""
    if torch.version.hip:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def sm_of(device: torch.device) -> int:
    """The SM of a CUDA device, such as 90; 0 of other devices."""
    major, minor = capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


@cache
def architecture(device: torch.device) -> str:
    """The architecture that kernels for a CUDA device are compiled for: ``"sm_90a"``."""
    major, minor = capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def has_cutlass() -> bool:
    """Whether nvidia-cutlass-dsl is installed, and new enough; does not import it."""
    version = installed("nvidia-cutlass-dsl")
    return version is not None and version >= CUTLASS_DSL


@cache
def runs_kernels(device: torch.device, least_sm: int) -> bool:
    """Whether a CUDA device is SM ``least_sm`` or later, and kernels can be compiled for it."""
    return capability(device) >= divmod(least_sm, 10) and has_cutlass()
