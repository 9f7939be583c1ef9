"""The kernels that quantize ragged groups into the SM100 layout compile without a GPU."""

import pytest
from checks import assert_no_spills

pytest.importorskip("cutlass")

from fusible.kernels.runtime.launch import compile_kernel
from fusible.kernels.sm100 import limits
from fusible.kernels.sm100.spec import PackedQuantizeSpec

MXFP8, NVFP4 = limits.QUANTIZED
SPECS = {
    "mxfp8": PackedQuantizeSpec(MXFP8, True, True, False, False, False),
    "mxfp8 and scaled sums": PackedQuantizeSpec(MXFP8, True, True, True, True, False),
    "nvfp4 and sums": PackedQuantizeSpec(NVFP4, True, True, True, False, False),
}


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("spec", SPECS)
def test_it_compiles(architecture, spec, capfd):
    spec = SPECS[spec]._replace(fp4_instruction=architecture == "sm_100a")
    compile_kernel("sm100.quantize.quantize", (spec,), f"--gpu-arch {architecture} remarks{{ptx}}")
    if spec.format is MXFP8 or spec.fp4_instruction:
        assert_no_spills("".join(capfd.readouterr()), architecture)


@pytest.mark.parametrize("wide", [True, False])
def test_the_sum_compiles(wide):
    compile_kernel("sm100.quantize.sum_blocks", (32, wide), "--gpu-arch sm_100a")
