"""Memory that the processes of a group on one host read and write directly.

It is PyTorch's symmetric memory (``torch.distributed._symmetric_memory``, CUDA backend). Kernels
then move rows between processes themselves, and a barrier on the device takes the place of a
collective.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fusible.kernels.moe.cuda import PeerRows

_ALIGNMENT = 256  # bytes, of what an exchange places one after the other
_GRANULE = 1 << 21  # bytes of a page of device memory


class PeerMemory:
    """Equally many bytes of each process of a group, for one exchange at a time.

    An exchange is: `begin`, writes, `ready`, reads, `end`. All processes must begin the same
    exchanges in the same order, as they must call collectives.

    Args:
        memory: symmetric memory of this process, in bytes.
        handle: that its rendezvous gave.
        timeout_ms: after which a barrier fails whose other processes do not come.
    """

    def __init__(self, memory: Tensor, handle: Any, timeout_ms: int) -> None:
        self._memory, self._handle, self._timeout_ms = memory, handle, timeout_ms
        self.nbytes, self.rank, self.processes = memory.nbytes, handle.rank, handle.world_size
        self._stream: torch.cuda.Stream | None = None
        self._used = 0  # bytes of the present exchange
        self._in_use = False
        self.abandoned = False
        """Whether an exchange began that will not end, so that no other can begin."""

    def begin(self, nbytes: int) -> bool:
        """Begin an exchange of so many bytes, if they fit and no other exchange has begun.

        What is then enqueued runs after all processes have ended the exchange before.
        """
        if self._in_use or nbytes > self.nbytes:
            return False
        self._in_use, self._used = True, 0
        self._follow_last_stream()
        self.ready()
        return True

    def ready(self) -> None:
        """Enqueue a barrier: later reads see what all processes have written."""
        self._handle.barrier(0, self._timeout_ms)

    def end(self) -> None:
        """The exchange's last read is enqueued."""
        self._in_use = False

    def on_failure(self) -> None:
        """An op failed, perhaps in an exchange, whose barriers other processes may wait at.

        `reserve` makes other memory then: a process that did not fail could take the barriers of
        the next exchange for those of this one.
        """
        self.abandoned = self._in_use

    def rows(self, shape: tuple[int, int], dtype: torch.dtype) -> PeerRows:
        """Rows ``[n, features]`` in every process's memory, after what the exchange has placed."""
        offset = self._place(shape[0] * shape[1] * dtype.itemsize)
        return self._rows_at(offset, shape, dtype)

    def slots(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[PeerRows, Tensor]:
        """The memory where this process writes rows ``[n, features]`` for each, and where it reads.

        That is what all have written for it, ``[processes * n, features]`` in order of rank.
        """
        size = shape[0] * shape[1] * dtype.itemsize
        offset = self._place(self.processes * size)
        own = self._view(self.rank, (self.processes * shape[0], shape[1]), dtype, offset)
        return self._rows_at(offset + self.rank * size, shape, dtype), own

    def _rows_at(self, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> PeerRows:
        parts = [self._view(rank, shape, dtype, offset) for rank in range(self.processes)]
        return PeerRows(parts, self._handle.buffer_ptrs_dev, offset, self.rank, self.end)

    def _place(self, nbytes: int) -> int:
        offset, self._used = self._used, self._used + aligned_bytes(nbytes)
        return offset

    def _view(self, rank: int, shape: tuple[int, int], dtype: torch.dtype, offset: int) -> Tensor:
        return self._handle.get_buffer(rank, shape, dtype, offset // dtype.itemsize)

    def _follow_last_stream(self) -> None:
        """Run after what another stream did with the memory, unless one of the two is captured."""
        if not self._memory.is_cuda:
            return
        stream, last = torch.cuda.current_stream(self._memory.device), self._stream
        capturing = torch.cuda.is_current_stream_capturing()
        if last is not None and last != stream:
            with torch.cuda.stream(last):
                captured = torch.cuda.is_current_stream_capturing()
            if captured == capturing:
                stream.wait_stream(last)
        self._stream = stream
        if capturing:
            _captured.add(self)


def aligned_bytes(nbytes: int) -> int:
    """The bytes that a part of an exchange takes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


_captured: set[PeerMemory] = set()
"""Memories that graphs use, which may be replayed until the process ends."""
_memories: WeakKeyDictionary[Any, dict[torch.device, PeerMemory | str]] = WeakKeyDictionary()


def reserved(group: Any, device: torch.device) -> PeerMemory | str | None:
    """The result of `reserve` for a group on a device; None if it was not called yet."""
    return _memories.get(group, {}).get(device)


def peer_memory(group: Any, device: torch.device) -> PeerMemory | None:
    """The memory that `reserve` made for a group on a device."""
    memory = reserved(group, device)
    return memory if isinstance(memory, PeerMemory) and not torch.compiler.is_compiling() else None


def reserve(group: Any, device: torch.device, nbytes: int) -> PeerMemory | str:
    """The memory of a group for exchanges of ``nbytes``, or why there is none.

    All processes of the group must ask for it alike. The first time, where more is needed than
    before, and after an op failed in an exchange, they wait for each other and for their devices.
    """
    if torch.compiler.is_compiling():
        return "torch.compile traces the call"
    found = reserved(group, device)
    if isinstance(found, str) or (found and found.nbytes >= nbytes and not found.abandoned):
        return found
    if torch.cuda.is_current_stream_capturing():
        return "there was no memory of this size before the call was captured"
    memory = _make(group, device, -(-nbytes // _GRANULE) * _GRANULE)
    _memories.setdefault(group, {})[device] = memory
    return memory


def on_failure(group: Any) -> None:
    """Call :meth:`PeerMemory.on_failure` of the memories of a group; of None there are none."""
    for found in () if group is None else _memories.get(group, {}).values():
        if isinstance(found, PeerMemory):
            found.on_failure()


def _make(group: Any, device: torch.device, nbytes: int) -> PeerMemory | str:
    backend = group._get_backend(device)
    if backend.name() != "nccl":
        return "the group's backend is not NCCL"
    boot = Path("/proc/sys/kernel/random/boot_id")  # of this host, or container
    host = socket.gethostname(), boot.read_text().strip() if boot.exists() else ""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    hosts, gpus = zip(*all_said(group, (host, gpu)), strict=True)
    if len(set(hosts)) > 1:
        return "the processes are on several hosts"
    if len(set(gpus)) < len(gpus):
        return "several processes share a GPU"
    timeout_ms = int(backend.options._timeout.total_seconds() * 1000)
    torch.cuda.synchronize(device)  # what still uses the memory before
    memory: PeerMemory | str
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory

        own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        memory = PeerMemory(own, symmetric_memory.rendezvous(own, group), timeout_ms)
    except (ImportError, RuntimeError) as error:
        memory = f"PyTorch's symmetric memory failed: {str(error).splitlines()[0]}"
    failures = [why for why in all_said(group, memory if isinstance(memory, str) else "") if why]
    return failures[0] if failures else memory


def all_said(group: Any, said: Any) -> list[Any]:
    """The objects of all processes, in order of rank."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, said, group=group)
    return gathered
