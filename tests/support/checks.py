"""What tests ask of kernels beside their values."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]
"""Marks of tests of the kernels that run on nothing else."""


@contextmanager
def never_waiting():
    """Refuse whatever makes the host wait for the device; afterwards the mode is as it was."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_sync_debug_mode("error")
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode):
    """Set the mode without PyTorch's warning, once a process, that it is a prototype.

    Where warnings are errors, PyTorch raises when the mode is already set.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


def _sync_debug_mode():
    return torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0


def _stream():
    """The current CUDA stream, None for the first device's default stream."""
    if not torch.cuda.is_initialized():
        return None
    stream = torch.cuda.current_stream()
    return None if stream == torch.cuda.default_stream(0) else stream


STATE = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, lambda _: torch.set_default_device(None)),
    "deterministic algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "the filling of new memory": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda fill: setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill),
    ),
    "the precision of FP32 products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "the sync debug mode": (_sync_debug_mode, _set_sync_debug_mode),
    "the CUDA stream": (
        _stream,
        lambda stream: torch.cuda.set_stream(stream or torch.cuda.default_stream(0)),
    ),
}
"""What a test may set for the whole process: how it is read, and how it is set."""


def snapshot():
    """The process's state by name."""
    return {name: get() for name, (get, _) in STATE.items()}


def restore(before):
    """Set what differs from ``before``; the names of it."""
    now = snapshot()
    changed = [name for name in STATE if now[name] != before[name]]
    for name in changed:
        STATE[name][1](before[name])
    return changed


def share_gpu_memory(kept=2**32):
    """Give the device what this process holds and does not use: other workers need it."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > kept:
        torch.cuda.empty_cache()


class Recorded(TorchDispatchMode):
    """All that ``notes(op, args)`` yields for the ops that are called."""

    def __init__(self, notes):
        super().__init__()
        self.notes, self.made = notes, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made.extend(self.notes(func, args))
        return func(*args, **(kwargs or {}))


@contextmanager
def saved_tensors():
    """A list of the tensors that are saved for a backward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        yield saved


def poison_free_memory():
    """Fill GPU memory that the next tensors get with NaN, in pieces as small as they are."""
    taken = [torch.full((2**i,), 0xFF, dtype=torch.uint8, device="cuda") for i in range(9, 26)]
    del taken


def launched(call):
    """The names of all that the device runs, kernels, copies and fills, and what the call gives."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == on_device], result


def graph_of(step):
    """A CUDA graph of ``step()``, warmed up on another stream, and what it gave when captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def assert_no_spills(report, architecture):
    """Of the assembler's report on every kernel of a compilation with ``remarks{ptx}``."""
    assert f"for '{architecture}'" in report
    used = [line for line in report.splitlines() if "spill" in line]
    assert used
    for line in used:
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line
