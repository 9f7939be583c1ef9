"""Compiled kernels, kept in memory and on disk, and how one is started from PyTorch.

Nothing here reads a tensor's values: group ends, scales and pointers stay on the device.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from fusible.caches import keep
from fusible.kernels.cache import kept
from fusible.kernels.machine import multiprocessors
from fusible.kernels.plain import call
from fusible.kernels.sm90.spec import Spec

_MAX_POINTER_TABLES = 1024
# A table, the stream that it was copied on, and the copy's end.
_pointer_tables: OrderedDict[tuple, tuple[torch.Tensor, int, torch.cuda.Event]] = OrderedDict()
# What captured CUDA graphs read at each replay, by the addresses: tables, or the pinned sources of
# those copied by a graph. Nothing tells when a graph is gone, so none is dropped; captures of the
# same weights share one.
_captured: dict[tuple, torch.Tensor] = {}
_pointer_tables_lock = threading.Lock()


def compile_spec(spec: Spec, options: str = "") -> Any:
    """Compile a kernel for ``sm_90a``, with more compiler ``options``; needs no GPU.

    Raises:
        ValueError: a tile of the activation's backward is not ping-pong.
    """
    if spec.kind == "dglu" and not spec.tile.pingpong:
        raise ValueError(
            "a tile of dglu must be ping-pong, as the warpgroups' epilogues take turns, got "
            f"{spec.tile}; pass pingpong=True"
        )
    from cutlass import Float32, Int32, Int64

    from fusible.kernels.sm90.device.gemm import GroupedGemm

    # Addresses, sizes, pitches, GLU layout, constants, grid: see GroupedGemm.__call__.
    kinds = [Int64] * 11 + [Int32] * 4 + [Int64] * 6 + [Int32] * 2 + [Float32] * 3 + [Int32]
    return _compile(GroupedGemm(spec), kinds, options)


def compile_group_ends(dtype: str, options: str = "") -> Any:
    """Compile the scan of group sizes of ``dtype``, as `compile_spec`."""
    return _compile_vector_kernel("GroupEnds", dtype, options)


def compile_tile_sums(dtype: str, options: str = "") -> Any:
    """Compile the sums over tiles that become ``dtype``, as `compile_spec`."""
    return _compile_vector_kernel("TileSums", dtype, options)


def _compile_vector_kernel(name: str, dtype: str, options: str) -> Any:
    from cutlass import Int32, Int64

    from fusible.kernels.sm90.device import vectors

    return _compile(getattr(vectors, name)(dtype), [Int64, Int64, Int32, Int32], options)


def _compile(function: Any, kinds: list[Any], options: str) -> Any:
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    options = f"--enable-tvm-ffi --gpu-arch sm_90a {options}"
    arguments = [kind(0) for kind in kinds]
    return cute.compile(function, *arguments, make_fake_stream(), options=options)


# Kernels are kept as long as the process: a captured graph may run each at any time.
@functools.cache
def kernel(spec: Spec) -> Any:
    """The compiled kernel of a spec: from memory, disk or the compiler."""
    return kept(f"sm90 {spec}", functools.partial(compile_spec, spec))


@functools.cache
def _group_ends(dtype: torch.dtype) -> Any:
    name = str(dtype).removeprefix("torch.")
    return kept(f"sm90 group_ends {name}", functools.partial(compile_group_ends, name))


@functools.cache
def _tile_sums(dtype: torch.dtype) -> Any:
    name = str(dtype).removeprefix("torch.")
    return kept(f"sm90 tile_sums {name}", functools.partial(compile_tile_sums, name))


class Start:
    """A kernel with all its arguments but the number of rows and the addresses."""

    __slots__ = (
        "_across", "_clusters", "_constant", "_dynamic", "_function", "_groups", "_index", "_rows",
    )  # fmt: skip

    def __init__(
        self,
        spec: Spec,
        device: torch.device,
        columns: int,
        depth: int,
        groups: int,
        a_pitch: int,
        b_pitch: int,
        b_group_pitch: int,
        out_pitch: int,
        preact_pitch: int = 0,
        d_preact_pitch: int = 0,
        glu_layout: tuple[int, int] = (1, 0),
        constants: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ) -> None:
        tile = spec.tile
        rows, width = tile.m * tile.cluster_m, spec.width * tile.cluster_n
        self._index, self._dynamic, self._groups = device.index, tile.dynamic, groups
        self._function = kernel(spec)
        self._constant = (
            columns, depth, groups, a_pitch, b_pitch, b_group_pitch, preact_pitch, out_pitch,
            d_preact_pitch, *glu_layout, *constants,
        )  # fmt: skip
        self._clusters = multiprocessors(device) // (tile.cluster_m * tile.cluster_n)
        # Rows of the output that a cluster computes at once, and how many clusters lie across.
        self._rows, self._across = rows, -(-columns // width)
        if not spec.by_rows:
            # Every group has the same tiles; the number of rows does not change them.
            self._rows, self._across = 0, -(-columns // rows) * -(-depth // width)

    def __call__(
        self,
        total_rows: int,
        a: int,
        b: int,
        out: int,
        ends: int,
        *,
        preact: int = 0,
        d_preact: int = 0,
        table: int = 0,
        bias: int = 0,
        scales: int = 0,
        partials: int = 0,
    ) -> None:
        """Start the kernel on the device's current stream."""
        tiles, index = self._groups, self._index
        if self._rows:
            # Every group, and the rows past the last, may end in a part of a tile.
            tiles += total_rows // self._rows + 1
        clusters = min(self._clusters, tiles * self._across)
        stream = torch._C._cuda_getCurrentRawStream(index)  # a tenth of the public call's time
        counter = tile_counter(index, stream) if self._dynamic else 0
        call(index, self._function, (
            a, b, preact, out, d_preact, ends, table, bias, scales, partials, counter,
            total_rows, *self._constant, clusters, stream,
        ))  # fmt: skip


start_of = functools.lru_cache(maxsize=4096)(Start)
"""A :class:`Start`, made once for the same arguments."""


def launch_group_ends(sizes: torch.Tensor, ends: torch.Tensor, rows: int) -> None:
    """Write the groups' end rows on the device's current stream."""
    _launch(_group_ends(sizes.dtype), sizes, ends, sizes.shape[0], rows)


def launch_tile_sums(partials: torch.Tensor, sums: torch.Tensor) -> None:
    """Add up FP32 sums of tiles, ``[tiles * rows]``, on the device's current stream."""
    rows = sums.shape[0]
    _launch(_tile_sums(sums.dtype), partials, sums, partials.shape[0] // rows, rows)


def _launch(function: Any, source: torch.Tensor, target: torch.Tensor, *sizes: int) -> None:
    index = target.device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    call(index, function, (source.data_ptr(), target.data_ptr(), *sizes, stream))


_COUNTERS = 4096  # captured launches that need no memset of their own
_MAX_STREAMS = 256  # memory of a counter that was dropped is used again on its stream only
_stream_counters: dict[tuple[int, int], torch.Tensor] = {}
_capture_counters: dict[int, tuple[torch.Tensor, Iterator[int]]] = {}  # one a device


def tile_counter(index: int, stream: int) -> int:
    """Address of two zero integers for a kernel's `TileQueue`, which leaves them zero.

    Kernels of one stream follow each other and share theirs. A captured launch gets its own: its
    graph may be replayed beside anything.
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
