"""Processes that a test starts."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

METHOD = "spawn" if torch.cuda.is_available() else "forkserver"
"""A process that has asked for GPUs is not forked."""
IMPORTED = ["torch._dynamo", "torch.distributed.fsdp", "pytest", "fusible"]
"""Once for all processes that a worker of pytest starts: it takes longer than what most run."""


def start(
    function: Callable[..., None], args: tuple[Any, ...], count: int, join: bool = True
) -> Any:
    """As ``torch.multiprocessing.spawn``."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    return mp.start_processes(function, args, count, join=join, start_method=METHOD)
