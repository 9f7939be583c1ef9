"""The cache on disk of compiled kernels, for later processes."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusible.logs import log_once
from fusible.versions import sources_digest

logger = logging.getLogger(__name__)

_one_at_a_time = threading.RLock()  # the compiler is not made for threads
_compile_seconds: list[float] = []  # of each kernel that this process compiled


def load_or_compile(name: str, compile_it: Callable[[], Any]) -> Any:
    """The kernel called ``name``: read from disk, else compiled and written there."""
    from cutlass import cute

    with _one_at_a_time:
        path = directory() / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.o"
        problem = _problem(path)
        if problem is None and path.exists():
            logger.debug("reading kernel %s from %s", name, path)
        else:
            compiled = _compiled(name, compile_it)
            if problem is not None:
                log_once(
                    logger,
                    logging.WARNING,
                    "compiled kernels are not cached on disk, where others could replace them: %s; "
                    "make the directory yours alone (chmod go-w), to compile each once",
                    problem,
                )
                return compiled
            if not _write(compiled, path):
                return compiled
        return cute.runtime.load_module(str(path), enable_tvm_ffi=True)["launch"]


def _write(compiled: Any, path: Path) -> bool:
    """Write a kernel to its file; False if there is no place for it."""
    try:
        # Under another name first: another process may be looking.
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".o")
    except OSError:
        return False
    os.close(handle)
    partial = Path(name)
    try:
        compiled.export_to_c(object_file_path=name, function_name="launch")
        partial.chmod(0o600)
        partial.replace(path)
    except OSError as error:  # a full disk, a quota
        text = "compiled kernels cannot be cached on disk: %s"
        log_once(logger, logging.WARNING, text, str(error))
        partial.unlink(missing_ok=True)
        return False
    return True


def _compiled(name: str, compile_it: Callable[[], Any]) -> Any:
    """The kernel, compiled, and a line about it before and after."""
    logger.info("compiling kernel %s", name)
    start = time.perf_counter()
    kernel = compile_it()
    _compile_seconds.append(time.perf_counter() - start)
    logger.info(
        "compiled kernel %s in %.1f s (%d so far, %.1f s)",
        name,
        _compile_seconds[-1],
        len(_compile_seconds),
        sum(_compile_seconds),
    )
    return kernel


def _problem(path: Path) -> str | None:
    """Why a kernel must not be cached at ``path``: somebody else could write it. None if not.

    What is read from there runs as this user. Makes its folder, for this user alone.
    """
    try:
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The directories of symbolic links, and those of their targets.
        real = Path(os.path.realpath(path))
        for place in dict.fromkeys((real, *real.parents, *path.parents)):
            if place.exists() and (problem := _writable_by_others(place, real)):
                return problem
    except OSError as error:
        return f"{path.parent} cannot be used ({error})"
    return None


def _writable_by_others(place: Path, kernel: Path) -> str | None:
    """Who may write ``place``, part of the path of a kernel, besides this user and root."""
    status = place.stat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"{place} belongs to user {status.st_uid}"
    open_to_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    # In a folder with the sticky bit, such as /tmp, nobody replaces what belongs to another.
    sticky = status.st_mode & stat.S_ISVTX and place not in (kernel, kernel.parent)
    if open_to_others and not sticky:
        return f"{place} can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


@functools.cache
def directory() -> Path:
    """The directory of cached kernels, one for each version of the sources and of the compiler.

    And for each kind of processor: the files hold the code of the launch as well.
    """
    from importlib.metadata import version

    versions = version("nvidia-cutlass-dsl") + platform.machine() + sources_digest()
    digest = hashlib.sha256(versions.encode())
    return Path.home() / ".cache" / "fusible" / digest.hexdigest()[:16]
