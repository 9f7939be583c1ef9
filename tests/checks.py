"""What tests ask of kernels beside their values."""

from contextlib import contextmanager

import pytest
import torch

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
    """Refuse whatever makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
