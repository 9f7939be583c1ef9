"""The kernel that quantizes ragged groups into the SM100 layout compiles without a GPU."""

import pytest

pytest.importorskip("cutlass")

from fusible.kernels.sm100 import quantizer


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("columnwise", [True, False])
def test_it_compiles_without_spills(architecture, columnwise, capfd):
    quantizer.compiled(True, columnwise, f"--gpu-arch {architecture} remarks{{ptx}}")
    report = "".join(capfd.readouterr())
    assert f"for '{architecture}'" in report
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
