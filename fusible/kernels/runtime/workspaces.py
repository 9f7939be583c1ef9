"""Device memory that launches share: tables of pointers, and counters."""

import threading
from collections import OrderedDict
from collections.abc import Iterator

import torch

from fusible.caches import keep

_MAX_POINTER_TABLES = 1024
# A table, the stream that it was copied on, and the copy's end.
_pointer_tables: OrderedDict[tuple, tuple[torch.Tensor, int, torch.cuda.Event]] = OrderedDict()
# What captured CUDA graphs read at each replay, by the addresses: tables, or the pinned sources of
# those copied by a graph. Nothing tells when a graph is gone, so none is dropped; captures of the
# same weights share one.
_captured: dict[tuple, torch.Tensor] = {}
_pointer_tables_lock = threading.Lock()

# Captured launches with a counter that is zeroed ahead, for 512 KiB: 70 graphs of 100 layers with
# nine launches each. Each launch after these has a memset in its graph, of 2.4 us on an H200.
_COUNTERS = 1 << 16
_MAX_STREAMS = 256  # memory of a counter that was dropped is used again on its stream only
_stream_counters: dict[tuple[int, int], torch.Tensor] = {}
_capture_counters: dict[int, tuple[torch.Tensor, Iterator[int]]] = {}  # one a device


def zeroed_counter(index: int, stream: int) -> int:
    """Address of two int32, zero before and after each launch that counts there.

    Kernels of one stream follow each other and share theirs. A captured launch gets its own: its
    graph may be replayed concurrently with any other. Take it right before the launch: in a capture
    its memory may be given to the next tensor.
    """
    if torch._C._cuda_isCurrentStreamCapturing():
        pool, rows = _capture_counters.get(index, (None, iter(())))
        row = next(rows, None)
        if pool is None or row is None:
            return torch.zeros(2, dtype=torch.int32, device=index).data_ptr()
        return pool[row].data_ptr()
    counter = _stream_counters.get((index, stream))
    if counter is None:
        counter = torch.zeros(2, dtype=torch.int32, device=index)
        keep(_stream_counters, (index, stream), counter, _MAX_STREAMS)
        if index not in _capture_counters:
            pool = torch.zeros(_COUNTERS, 2, dtype=torch.int32, device=index)
            _capture_counters[index] = pool, iter(range(_COUNTERS))
    return counter.data_ptr()


def pointer_table(pointers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The pointers as an int64 tensor on the device, without waiting for the copy.

    A stream that another one copies for waits for that on the device. A capture does not, which
    begins with a synchronisation.
    """
    with _pointer_tables_lock:  # threads would drop each other's
        return _pointer_table(pointers, device)


def _pointer_table(pointers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    key, stream = (device.index, pointers), torch._C._cuda_getCurrentRawStream(device.index)
    capturing = torch.cuda.is_current_stream_capturing()
    if capturing and key in _captured:
        return _captured[key].to(device, non_blocking=True)
    if known := _pointer_tables.get(key):
        table, of_stream, copied = known
        _pointer_tables.move_to_end(key)
        if capturing:
            _captured[key] = table
        elif stream != of_stream:
            current = torch.cuda.current_stream(device)
            current.wait_event(copied)
            table.record_stream(current)  # which may read it when it has been dropped
        return table
    source = torch.tensor(pointers, dtype=torch.int64, device="cpu").pin_memory()
    table = source.to(device, non_blocking=True)
    if capturing:
        _captured[key] = source
        return table
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(device))
    _pointer_tables[key] = table, stream, copied
    if len(_pointer_tables) > _MAX_POINTER_TABLES:
        _pointer_tables.popitem(last=False)
    return table
