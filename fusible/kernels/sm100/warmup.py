"""Launches of the front end's kernels: warm-up before a capture, one stream at a time."""

from __future__ import annotations

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)

_warm: set[tuple[Any, ...]] = set()  # one a kernel that was compiled
_last_streams: dict[torch.device, torch.cuda.Stream] = {}  # one a device


def before_launch(device: torch.device, *configuration: Any) -> bool:
    """Call before a kernel of a ``configuration``, which is all that it may be compiled for.

    A compiled kernel owns scratch memory (TMA descriptors, the counter of its scheduler), so a
    launch on another stream than the last waits for that one. Inside a CUDA graph's capture nothing
    is waited for: the streams of one capture are the caller's to order.

    Returns:
        Whether this is the first launch of the configuration on a GPU, which compiles it.

    Raises:
        RuntimeError: a CUDA graph is being captured and the configuration has not run before. Its
            first call compiles, and reads the ends of the groups on the host.
    """
    if device.type != "cuda":
        return False
    key = device, *configuration  # kernels are loaded for each device
    if torch.cuda.is_current_stream_capturing():
        if key not in _warm:
            raise RuntimeError(
                "kernels for SM100 must have run once before a CUDA graph of them is captured, got "
                f"{configuration[0]} in a configuration that has not; run the module before, "
                "forward and backward, with inputs of the same dtypes and features"
            )
        return False
    first = key not in _warm
    if first:
        logger.info("compiling kernel sm100 %s, by cuDNN's front end", configuration)
        _warm.add(key)
    stream = torch.cuda.current_stream(device)
    last = _last_streams.get(device)
    if last is not None and last != stream:
        stream.wait_stream(last)
    _last_streams[device] = stream
    return first
