"""Machines that plans are made for: names, software, and GPUs that are not NVIDIA's."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import reference as ref
import torch

import fusible as fz
from fusible.fuser import target as targets
from fusible.kernels.runtime import gpu
from fusible.kernels.runtime.provider import use_provider
from fusible.kernels.sm100 import ops, warmup
from fusible.kernels.sm100.checks import FP4_BYTES, address_unit
from fusible.kernels.sm100.padding import PaddedGroups, packed_rows
from fusible.recipes.formats import nvfp4
from fusible.recipes.quantize_ops import quantize_matrix
from fusible.testing import assume_target
from fusible.versions import Version

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize("name", ["rocm", "gfx942", "gfx90a", "mps", "xpu", "cpu"])
def test_other_devices_run_pytorch(name):
    mlp = ref.grouped_mlp(dtype=torch.bfloat16)
    inputs = ref.grouped_mlp_inputs(dtype=torch.bfloat16)
    plan = fz.explain(mlp, *inputs, inputs[1], target=name).plans[0]
    assert plan.fired == ()
    assert plan.target.sm is None
    assert str(plan.target) == ("rocm" if name.startswith("gfx") else name)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r'"cpu", "rocm", "mps", "xpu", got .rocn.; did you mean'):
        fz.Target.parse("rocn")
    with pytest.raises(ValueError, match=r'"sm90" \(of an H100\), .* got .h100.$'):
        fz.Target.parse("h100")


class Driver:
    """Of CUDA 12.9."""

    @staticmethod
    def cuDriverGetVersion(version):  # noqa: N802 - the driver's name
        version._obj.value = 12090


def test_a_machine_without_a_driver(monkeypatch):
    def missing(_):
        raise OSError

    monkeypatch.setattr(targets.ctypes, "CDLL", missing)
    assert targets._driver() is None


@pytest.fixture
def pretended(monkeypatch):
    """A GPU of capability 9.0 whose driver supports CUDA 12.9."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    properties = SimpleNamespace(multi_processor_count=78)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(targets.ctypes, "CDLL", lambda _: Driver)
    monkeypatch.setattr(targets, "_cuda_targets", {})
    gpu.capability.cache_clear()
    yield monkeypatch
    gpu.capability.cache_clear()


def test_an_amd_gpu_is_never_taken_for_hopper(pretended):
    assert targets.target_of(GPU).sm == 90
    assert targets.target_of(GPU).multiprocessors == 78
    pretended.setattr(torch.version, "hip", "7.0")
    assert targets.target_of(GPU) == fz.Target("rocm")
    assert gpu.capability(GPU) == (0, 0)


def test_the_driver_is_a_fact_with_a_reason(pretended):
    assert targets.target_of(GPU).cuda_driver == Version(12, 9)
    linear = ref.grouped_mlp(dtype=torch.bfloat16)[0]
    x, splits, _ = ref.grouped_mlp_inputs(dtype=torch.bfloat16)
    old = fz.Target("cuda", 100, cuda_driver=Version(12, 9))
    (plan,) = fz.explain(linear, x, splits, target=old).plans
    reasons = [r for refusal in plan.refusals for r in refusal.reasons]
    assert "cuda_driver must be at least 13.0, got 12.9; update the GPU's driver" in reasons


@pytest.mark.parametrize("sm", [101, 107, 110, 120])
def test_blackwell_is_what_the_kernels_are_for(sm):
    linear = ref.grouped_mlp(dtype=torch.bfloat16)[0]
    x, splits, _ = ref.grouped_mlp_inputs(dtype=torch.bfloat16)
    (plan,) = fz.explain(linear, x, splits, target=f"sm{sm}").plans
    reasons = [r for refusal in plan.refusals for r in refusal.reasons]
    assert f"sm must be one of 100, 103, got {sm}" in reasons


def test_each_device_is_warmed_up(monkeypatch):
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace())
    monkeypatch.setattr(warmup, "_warm", set())
    monkeypatch.setattr(warmup, "_last_streams", {})
    warmup.before_launch(GPU, "gemm", 1)
    capturing = True
    warmup.before_launch(GPU, "gemm", 1)
    with pytest.raises(RuntimeError, match="must have run once before a CUDA graph"):
        warmup.before_launch(torch.device("cuda", 1), "gemm", 1)


def test_a_compilation_is_logged_at_the_first_launch_of_a_configuration(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(warmup, "_warm", set())
    monkeypatch.setattr(warmup, "_last_streams", {})
    kernels = SimpleNamespace(grouped_gemm_wrapper_sm100=lambda: None)
    logged = []
    with use_provider(kernels), caplog.at_level(logging.INFO, "fusible"):
        for device, size in ((GPU, 1), (GPU, 1), (GPU, 2), (torch.device("cuda", 1), 1), (CPU, 3)):
            caplog.clear()
            ops._run(device, "grouped_gemm", (size,))
            logged.append(sum("compiled and launched" in m for m in caplog.messages))
    assert logged == [1, 0, 1, 1, 0]


def test_weights_side_by_side_are_a_configuration_of_their_own(monkeypatch):
    seen = []
    monkeypatch.setattr(ops, "before_launch", lambda _, *configuration: seen.append(configuration))
    module = fz.Sequential(
        fz.GroupedLinear(2, 64, 128, dtype=torch.bfloat16, bias=False),
        fz.ScaledSwiGLU(glu_interleave_size=32),
        fz.GroupedLinear(2, 64, 64, dtype=torch.bfloat16, bias=False),
    )
    x = torch.randn(10, 64, dtype=torch.bfloat16, requires_grad=True)
    splits = torch.tensor([4, 6])
    for apart in (False, True):
        if apart:
            for linear in (module[0], module[2]):
                for name, w in list(linear.named_parameters()):
                    setattr(linear, name, torch.nn.Parameter(w.detach().clone()))
        with assume_target("sm100"):
            module(x, splits, torch.rand(10), splits).sum().backward()
    half = len(seen) // 2
    together, alone = seen[:half], seen[half:]
    for mine, other in zip(together, alone, strict=True):
        assert (mine == other) == (mine[0] == "grouped_gemm_wgrad"), mine[0]


def test_fp4_elements_begin_where_the_kernels_read_them():
    row, _ = quantize_matrix(torch.randn(256, 64), nvfp4(), rowwise=True, columnwise=False)
    room = torch.empty(row.data.numel() + 64, dtype=FP4_BYTES)
    start = -room.data_ptr() % 32 + 16
    moved = room[start : start + row.data.numel()].view(row.data.shape).copy_(row.data)
    places = PaddedGroups(torch.tensor([256], dtype=torch.int32), None, 256)
    data, _ = packed_rows(row._replace(data=moved), places)
    assert address_unit(data.dtype) == 32
    assert data.data_ptr() % 32 == 0
    assert torch.equal(data, row.data)
