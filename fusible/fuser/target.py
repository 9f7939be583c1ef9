"""The machine a plan is for."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fusible.arguments import check_bools
from fusible.names import did_you_mean
from fusible.versions import (
    CUDA_DRIVER,
    CUDNN_FRONTEND,
    CUTLASS_DSL,
    Version,
    has_triton,
    installed,
)

_OTHERS = ("cpu", "rocm", "mps", "xpu")  # devices without kernels of ours: PyTorch's run there


@dataclass(frozen=True)
class Target:
    """The facts of a machine for rules: the device type, and the SM version of a CUDA GPU.

    ``sm`` is 10 x major + minor of the compute capability (90 for Hopper, 100 for Blackwell),
    None off CUDA. ``cudnn_frontend`` and ``cutlass_dsl`` are the versions of nvidia-cudnn-frontend
    and nvidia-cutlass-dsl; unless said, those installed here, or those that this package depends
    on. ``cuda_driver`` is the CUDA version that the GPU's driver supports, ``triton`` whether
    Triton is installed, which comes with PyTorch for CUDA. ``multiprocessors`` is their number on
    the GPU, at least 2, by default that of an H200. An AMD GPU is ``"rocm"``, which has no ``sm``
    whatever PyTorch calls its device and its capability.

    Raises:
        TypeError: an option has another type.
        ValueError: there are fewer multiprocessors.
    """

    device: str
    sm: int | None = None
    cudnn_frontend: Version | None = field(
        default_factory=lambda: installed("nvidia-cudnn-frontend") or CUDNN_FRONTEND
    )
    cutlass_dsl: Version | None = field(
        default_factory=lambda: installed("nvidia-cutlass-dsl") or CUTLASS_DSL
    )
    cuda_driver: Version | None = CUDA_DRIVER
    triton: bool = True
    multiprocessors: int = 132

    def __post_init__(self) -> None:
        check_bools("Target", triton=self.triton)
        if not isinstance(count := self.multiprocessors, int):
            raise TypeError(f"multiprocessors of Target must be an integer, got {count!r:.200}")
        if count < 2:  # as a cluster has blocks
            raise ValueError(f"multiprocessors of Target must be at least 2, got {count}")

    @classmethod
    def parse(cls, spec: Target | str) -> Target:
        """A target from its name: ``"sm90"``, ``"sm100"``, ..., ``"cpu"``, ``"rocm"``, ...

        ``"gfx942"`` and other names of AMD's architectures are ``"rocm"``.

        Raises:
            ValueError: for any other name.
        """
        if isinstance(spec, Target):
            return spec
        if spec in _OTHERS:
            return cls(spec)
        if re.fullmatch(r"gfx[0-9a-f]{3,4}", str(spec)):
            return cls("rocm")
        if match := re.fullmatch(r"sm(\d{2,3})", str(spec)):
            return cls("cuda", int(match[1]))
        known = ", ".join(f'"{name}"' for name in _OTHERS)
        names = ("sm90", "sm100", "sm103") if str(spec).startswith("sm") else _OTHERS
        raise ValueError(
            f'target must be an SM version such as "sm90" (of an H100), an architecture of AMD\'s '
            f'such as "gfx942", or one of {known}, got {spec!r}'
            f"{did_you_mean(str(spec), names)}"
        )

    @property
    def family(self) -> str:
        """The name of its kernels, ``"sm100"`` for every Blackwell GPU of SM 10.x."""
        return self.device if self.sm is None else f"sm{self.sm // 10 * 10}"

    def __str__(self) -> str:
        return self.device if self.sm is None else f"sm{self.sm}"


_assumed: Target | None = None
assumed_key: str | None = None
"""The ``repr`` of the target that ``assume`` has set, None where plans are for this machine.

A constant to torch.compile, which a Target is not.
"""
_cuda_targets: dict[torch.device, Target] = {}  # one a device


def target_of(device: torch.device) -> Target:
    """The target in force for tensors on ``device``."""
    if _assumed is not None:
        return _assumed
    if device.type != "cuda":
        return Target(device.type)
    if torch.version.hip:
        return Target("rocm")
    if device not in _cuda_targets:
        major, minor = torch.cuda.get_device_capability(device)
        packages = installed("nvidia-cudnn-frontend"), installed("nvidia-cutlass-dsl")
        count = torch.cuda.get_device_properties(device).multi_processor_count
        target = Target("cuda", 10 * major + minor, *packages, _driver(), has_triton(), count)
        _cuda_targets[device] = target
    return _cuda_targets[device]


def _driver() -> Version | None:
    """The CUDA version that the driver supports, None where there is no driver for Linux."""
    version = ctypes.c_int()  # 1000 x major + 10 x minor
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return Version(version.value // 1000, version.value % 1000 // 10)


@contextmanager
def assume(target: Target) -> Iterator[None]:
    """Make all plans in this context for ``target``."""
    global _assumed, assumed_key
    outer = _assumed, assumed_key
    _assumed, assumed_key = target, repr(target)
    try:
        yield
    finally:
        _assumed, assumed_key = outer
