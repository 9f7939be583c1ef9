"""Compiled kernels kept on disk, for the next process."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def kept(package: Path, name: str, compile_it: Callable[[], Any]) -> Any:
    """What ``name`` stands for in the folder ``package``: from disk, else compiled and written."""
    from cutlass import cute

    path = cache_directory(package) / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.o"
    if not path.exists():
        compiled = compile_it()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written under another name first: another process may be looking.
            handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".o")
        except OSError:  # nowhere to keep it
            return compiled
        os.close(handle)
        compiled.export_to_c(object_file_path=partial, function_name="launch")
        Path(partial).replace(path)
    return cute.runtime.load_module(str(path), enable_tvm_ffi=True)["launch"]


@functools.cache
def cache_directory(package: Path) -> Path:
    """Where kernels of ``package`` are kept: a folder for each version of its code and the DSL."""
    from importlib.metadata import version

    digest = hashlib.sha256(version("nvidia-cutlass-dsl").encode())
    device = sorted((package / "device").glob("*.py"))
    shared = package.parent / "bits.py"
    for source in [shared, *device, package / "spec.py", package / "launch.py"]:
        digest.update(source.read_bytes())
    return Path.home() / ".cache" / "fusible" / package.name / digest.hexdigest()[:16]
