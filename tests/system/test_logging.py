"""What fused and what is compiled is logged, and nothing else is said by default."""

import logging

import pytest
import torch

import fusible as fz
from fusible import logs
from fusible.kernels.runtime import cache


@pytest.fixture(autouse=True)
def _nothing_said():
    logs._log.cache_clear()


def mlp():
    return fz.Sequential(fz.Linear(4, 8), fz.GELU(), fz.Dropout(0.5))


def lines(caplog, level=logging.INFO):
    return [r.getMessage() for r in caplog.records if r.levelno >= level]


def test_a_plan_is_told_once_for_all_layers(caplog):
    x = torch.randn(3, 4)
    layers = [mlp() for _ in range(3)]
    with caplog.at_level(logging.INFO, "fusible"):
        for layer in layers:
            layer(x)
            layer(x[:1])
    assert lines(caplog) == [
        "planned BasicLinear, Bias, GELU, Dropout on cpu, recipe none, float32, training: "
        "linear_bias_activation (forward) of ops[0:3]"
    ]


def test_refusals_are_logged_at_debug(caplog):
    with caplog.at_level(logging.DEBUG, "fusible"):
        mlp()(torch.randn(3, 4, requires_grad=True))
    logged = lines(caplog, logging.DEBUG)
    refused = "backward_activation_bias not used for ops[1:3]: "
    assert any(refused in line for line in logged)


def test_refusals_are_told_when_debug_is_turned_on_later(caplog):
    for level, refused in ((logging.INFO, False), (logging.DEBUG, True), (logging.DEBUG, False)):
        caplog.clear()
        with caplog.at_level(level, "fusible"):
            mlp()(torch.randn(3, 4, requires_grad=True))
        assert any(" not used for " in line for line in lines(caplog, logging.DEBUG)) == refused


def test_nothing_is_said_by_default(capfd):
    mlp()(torch.randn(3, 4))
    assert capfd.readouterr() == ("", "")


def test_compiling_a_kernel_is_told_with_its_time(caplog, monkeypatch, tmp_path):
    pytest.importorskip("cutlass")
    monkeypatch.setattr(cache, "directory", lambda: tmp_path)
    monkeypatch.setattr(cache, "_compile_seconds", [])

    class Compiled:
        def export_to_c(self, object_file_path, function_name):
            raise OSError("full")

    with caplog.at_level(logging.DEBUG, "fusible"):
        cache.load_or_compile("sort of 8", Compiled)
    before, after, not_cached = lines(caplog, logging.INFO)
    assert before == "compiling kernel sort of 8"
    assert after == "compiled kernel sort of 8 in 0.0 s (1 so far, 0.0 s)"
    assert not_cached == "compiled kernels cannot be cached on disk: full"
