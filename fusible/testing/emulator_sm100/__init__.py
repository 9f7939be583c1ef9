"""The SM100 grouped GEMMs of nvidia-cudnn-frontend, emulated on the CPU for tests.

Written from the wrappers' contracts, a second opinion on the fused op: it shares no code with
what packs operands and scales for the kernels. It reads packed, swizzled operands, computes in
FP32, and is as strict as the front end's checks and as what its kernels take for granted. Of what
the front end takes, it takes what ``fusible.kernels.sm100`` passes.
"""

from fusible.testing.emulator_sm100.wrappers import (
    grouped_gemm_dglu_wrapper_sm100,
    grouped_gemm_dsrelu_wrapper_sm100,
    grouped_gemm_glu_wrapper_sm100,
    grouped_gemm_quant_wrapper_sm100,
    grouped_gemm_srelu_wrapper_sm100,
    grouped_gemm_wgrad_wrapper_sm100,
    grouped_gemm_wrapper_sm100,
)

__all__ = [
    "grouped_gemm_dglu_wrapper_sm100",
    "grouped_gemm_dsrelu_wrapper_sm100",
    "grouped_gemm_glu_wrapper_sm100",
    "grouped_gemm_quant_wrapper_sm100",
    "grouped_gemm_srelu_wrapper_sm100",
    "grouped_gemm_wgrad_wrapper_sm100",
    "grouped_gemm_wrapper_sm100",
]
