"""The five grouped-GEMM wrappers of nvidia-cudnn-frontend 1.32, with its signatures, on the CPU.

What a wrapper allocates is poison until the kernel would have written it. ``current_stream``,
the scheduler's arguments, ``vector_f32`` and workspaces change no number and are not read.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fusible.testing.emulator_sm100 import kernels
from fusible.testing.emulator_sm100.kernels import Outputs


def grouped_gemm_glu_wrapper_sm100(
    a_tensor: Tensor,
    sfa_tensor: Tensor | None,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    b_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    bias_tensor: Tensor | None = None,
    b_ptrs: Tensor | None = None,
    sfb_ptrs: Tensor | None = None,
    n: int | None = None,
    b_dtype: torch.dtype | None = None,
    b_major: str = "k",
    norm_const_tensor: Tensor | None = None,
    prob_tensor: Tensor | None = None,
    acc_dtype: torch.dtype | None = None,
    c_dtype: torch.dtype | None = None,
    d_dtype: torch.dtype | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    act_func: str = "swiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    use_dynamic_sched: bool = False,
    use_single_group_runtime_offsets: bool = False,
    current_stream: Any = None,
    generate_c: bool = False,
    sf_fp8_dtype_override: str | None = None,
    *,
    scheduler_counter_tensor: Tensor | None = None,
) -> Outputs:
    """FC1 forward: C = cast(alpha A B^T + bias), D = GLU(unrounded C) * prob, quantized both ways.

    Returns c_tensor (M, N), d_tensor and d_col_tensor (M, N / 2), amax_tensor (E, 1) for a 16-bit
    block-scaled D, sfd_row_tensor, sfd_col_tensor (packed scales). ValueError if refused.
    """
    return kernels.glu(SimpleNamespace(**locals()))


def grouped_gemm_dglu_wrapper_sm100(
    a_tensor: Tensor,
    c_tensor: Tensor,
    sfa_tensor: Tensor | None,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    beta_tensor: Tensor,
    prob_tensor: Tensor | None,
    dprob_tensor: Tensor | None,
    b_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    generate_dbias: bool = False,
    b_ptrs: Tensor | None = None,
    sfb_ptrs: Tensor | None = None,
    n: int | None = None,
    b_dtype: torch.dtype | None = None,
    b_major: str = "k",
    norm_const_tensor: Tensor | None = None,
    acc_dtype: torch.dtype | None = None,
    d_dtype: torch.dtype | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    sf_fp8_dtype_override: str | None = None,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    act_func: str = "dswiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    epilogue_op: str | None = None,
    use_dynamic_sched: bool = False,
    use_single_group_runtime_offsets: bool = False,
    current_stream: Any = None,
    round_dgrad_to_input_dtype: bool = False,
    activation_tensor: Tensor | None = None,
    deterministic: bool = False,
) -> Outputs:
    """FC2 dgrad and the GLU's backward: D = dGLU(alpha^2 A B^T * prob) at beta * C, quantized.

    ``dprob_tensor`` is added to, before the multiplication with prob. Returns d_row_tensor and
    d_col_tensor (M, 2n), dprob_tensor, dbias_tensor BF16 (E, 2n, 1), amax_tensor (E, 2, 1),
    sfd_row_tensor, sfd_col_tensor. ValueError if refused.
    """
    return kernels.dglu(SimpleNamespace(**locals()))


def grouped_gemm_quant_wrapper_sm100(
    a_tensor: Tensor,
    sfa_tensor: Tensor,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    b_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    bias_tensor: Tensor | None = None,
    b_ptrs: Tensor | None = None,
    sfb_ptrs: Tensor | None = None,
    n: int | None = None,
    b_dtype: torch.dtype | None = None,
    b_major: str = "k",
    norm_const_tensor: Tensor | None = None,
    prob_tensor: Tensor | None = None,
    row_scale_tensor: Tensor | None = None,
    acc_dtype: torch.dtype | None = None,
    d_dtype: torch.dtype | None = None,
    d_tensor: Tensor | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    sf_fp8_dtype_override: str | None = None,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    use_dynamic_sched: bool = False,
    use_single_group_runtime_offsets: bool = False,
    current_stream: Any = None,
    *,
    generate_amax: bool = True,
    scheduler_counter_tensor: Tensor | None = None,
) -> Outputs:
    """A block-scaled grouped GEMM: D = alpha row_scale A B^T, times prob or plus bias * prob.

    Returns d_tensor (M, N), d_col_tensor (FP8 D only), amax_tensor (E, 1), sfd_row_tensor,
    sfd_col_tensor. ValueError if refused.
    """
    return kernels.quant(SimpleNamespace(**locals()))


def grouped_gemm_wrapper_sm100(
    a_tensor: Tensor,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    b_tensor: Tensor | None = None,
    bias_tensor: Tensor | None = None,
    b_ptrs: Tensor | None = None,
    n: int | None = None,
    b_dtype: torch.dtype | None = None,
    b_major: str = "k",
    prob_tensor: Tensor | None = None,
    acc_dtype: torch.dtype | None = None,
    c_dtype: torch.dtype | None = None,
    d_dtype: torch.dtype | None = None,
    c_tensor: Tensor | None = None,
    d_tensor: Tensor | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    vector_f32: bool = False,
    m_aligned: int = 256,
    generate_c: bool = False,
    use_dynamic_sched: bool = False,
    current_stream: Any = None,
) -> Outputs:
    """A BF16 grouped GEMM: D = alpha A B^T * prob, or alpha A B^T + bias * prob.

    Returns d_tensor and c_tensor (M, N), the latter before prob or None. ValueError if refused.
    """
    return kernels.plain(SimpleNamespace(**locals()))


def grouped_gemm_wgrad_wrapper_sm100(
    a_tensor: Tensor,
    b_tensor: Tensor,
    sfa_tensor: Tensor | None,
    sfb_tensor: Tensor | None,
    offsets_tensor: Tensor,
    output_mode: str = "dense",
    wgrad_tensor: Tensor | None = None,
    wgrad_ptrs: Tensor | None = None,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    acc_dtype: torch.dtype | None = None,
    wgrad_dtype: torch.dtype | None = None,
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    sf_fp8_dtype_override: str | None = None,
    accumulate_on_output: bool = False,
    input_order: Any = "tensor2d",
    current_stream: Any = None,
    *,
    descriptor_workspace: Tensor | None = None,
) -> Outputs:
    """Weight gradients: A[:, s:t] B[s:t] per expert, written or added, dense or behind pointers.

    Returns wgrad_tensor (E, O, I), None for pointers. ValueError if refused.
    """
    return kernels.wgrad(SimpleNamespace(**locals()))


_FEATURES: dict[Any, tuple[str, ...]] = {
    grouped_gemm_glu_wrapper_sm100: ("canonical", "bf16_canonical", "counter"),
    grouped_gemm_dglu_wrapper_sm100: ("canonical", "bf16_canonical"),
    grouped_gemm_quant_wrapper_sm100: ("canonical", "counter", "amax"),
    grouped_gemm_wgrad_wrapper_sm100: ("canonical", "bf16_canonical"),
    grouped_gemm_wrapper_sm100: ("bf16_canonical",),
}
_ATTRIBUTES = {
    "canonical": "supports_canonical_layouts",
    "bf16_canonical": "supports_bf16_canonical_layouts",
    "counter": "supports_external_scheduler_counter",
    "amax": "supports_optional_amax",
}
for _wrapper, _features in _FEATURES.items():
    vars(_wrapper).update({_ATTRIBUTES[feature]: True for feature in _features})
