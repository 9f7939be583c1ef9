"""What a test sets for its process is as it was after the test, whatever happens in the test."""

import warnings

import checks
import pytest
import torch


@pytest.fixture
def sync_debug(monkeypatch):
    """The calls of CUDA's sync debug mode, without CUDA: they warn after the mode is set."""
    modes = [0]

    def set_mode(mode):
        modes.append({"default": 0, "warn": 1, "error": 2}.get(mode, mode))
        warnings.warn("Synchronization debug mode is a prototype feature and", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return modes


def test_waiting_is_refused_only_inside(sync_debug):
    with checks.never_waiting():
        assert sync_debug[-1] == 2
    assert sync_debug[-1] == 0
    with pytest.raises(KeyError), checks.never_waiting():
        raise KeyError
    assert sync_debug[-1] == 0
    sync_debug.append(1)
    with checks.never_waiting():
        assert sync_debug[-1] == 2
    assert sync_debug[-1] == 1


OTHERWISE = {
    "the default dtype": torch.float64,
    "the default device": torch.device("meta"),
    "deterministic algorithms": 1,
    "the filling of new memory": False,
    "the precision of FP32 products": "high",
    "the number of threads": torch.get_num_threads() + 1,
    "the grad mode": False,
    "anomaly detection": True,
    "the sync debug mode": 2,
    "the CUDA stream": "another",
}
SETTERS = {name: set_ for name, (_, set_) in checks.STATE.items()} | {
    "the default device": torch.set_default_device
}


@pytest.mark.parametrize("name", checks.STATE)
def test_is_restored(name, sync_debug, monkeypatch):
    streams = ["default"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: "default")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    before = checks.snapshot()
    SETTERS[name](OTHERWISE[name])
    assert checks.snapshot()[name] == OTHERWISE[name]
    assert checks.restore(before) == [name]
    assert checks.snapshot() == before
    assert checks.restore(before) == []
