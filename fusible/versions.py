"""Versions of the packages that kernels come from, installed and needed, and of these sources."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple


class Version(NamedTuple):
    """The first two numbers of a package's version."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@cache
def installed(package: str) -> Version | None:
    """The version of a package on this machine, None if it is not installed."""
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version(package))
    except metadata.PackageNotFoundError:
        return None
    return Version(int(found[1]), int(found[2])) if found else None


@cache
def has_triton() -> bool:
    """Whether Triton is installed, under any package's name; does not import it."""
    return importlib.util.find_spec("triton") is not None


# What pip installs with this package on Linux, for a machine that is not this one.
CUDNN_FRONTEND = Version(1, 32)
CUTLASS_DSL = Version(4, 8)
# What the front end's kernels need, and what a GPU that is not here is taken to have.
CUDA_DRIVER = Version(13, 0)


def source_files() -> list[Path]:
    """Every file that a kernel, or an op on quantized tensors, may depend on; a superset."""
    package = Path(__file__).parent
    return [
        path
        for pattern in ("*.py", "kernels/**/*.py", "recipes/**/*.py")
        for path in sorted(package.glob(pattern))
    ]


@cache
def sources_digest() -> str:
    """The digest by which caches on disk tell versions of the sources apart."""
    digest = hashlib.sha256()
    for source in source_files():
        digest.update(source.read_bytes())
    return digest.hexdigest()
