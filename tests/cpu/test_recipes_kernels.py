"""The quantizer's kernels compile for Hopper and Blackwell on a machine with no GPU."""

import pytest
import torch

pytest.importorskip("cutlass")

from fusible.kernels import quantize

CONFIGS = [
    ("e4m3", 448.0, 8, True, False, True, True),
    ("e4m3", 448.0, 8, True, True, True, True),
    ("e5m2", 57344.0, 15, False, True, False, True),
    ("e5m2", 57344.0, 15, True, False, True, False),
]


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("config", CONFIGS)
def test_the_quantizer_compiles_without_spills(config, architecture, capfd):
    quantize.compiled(config, torch.int32, architecture + " remarks{ptx}")
    report = "".join(capfd.readouterr())
    assert f"for '{architecture}'" in report
    assert "0 bytes spill stores, 0 bytes spill loads" in report


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_offsets_kernel_compiles(dtype):
    quantize.compiled_offsets(dtype, "sm_90a")
    quantize.compiled_offsets(dtype, "sm_100a")
