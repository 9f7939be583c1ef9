"""The seven grouped GEMM wrappers of nvidia-cudnn-frontend 1.32, on the CPU.

They take the arguments that ``fusible.kernels.sm100`` passes, with the front end's names and
defaults, and no others. What a wrapper allocates is poison until the kernel would have written it.
``use_dynamic_sched`` and ``descriptor_workspace`` change no number and are not read.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fusible.testing.emulator_sm100 import kernels
from fusible.testing.emulator_sm100.kernels import WrapperOutputs


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
    sf_vec_size: int = 16,
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
    generate_c: bool = False,
) -> WrapperOutputs:
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
    sf_vec_size: int = 16,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    act_func: str = "dswiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    use_dynamic_sched: bool = False,
    deterministic: bool = False,
) -> WrapperOutputs:
    """FC2 dgrad and the GLU's backward: D = dGLU(alpha^2 A B^T * prob) at beta * C, quantized.

    ``dprob_tensor`` is added to, before the multiplication with prob. Returns d_row_tensor and
    d_col_tensor (M, 2n), dprob_tensor, dbias_tensor BF16 (E, 2n, 1), amax_tensor (E, 2, 1),
    sfd_row_tensor, sfd_col_tensor. ValueError if refused.
    """
    return kernels.dglu(SimpleNamespace(**locals()))


def grouped_gemm_srelu_wrapper_sm100(
    a_tensor: Tensor,
    b_tensor: Tensor | None = None,
    sfa_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    padded_offsets: Tensor | None = None,
    alpha_tensor: Tensor | None = None,
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
    sf_vec_size: int = 16,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    use_dynamic_sched: bool = False,
) -> WrapperOutputs:
    """FC1 forward: C = cast(alpha A B^T + bias), D = max(unrounded C, 0)^2 * prob, both quantized.

    Block-scaled only. A, C, D and prob have a third dimension of 1, a dense B is (N, K, E), and
    scales are views (32, 4, rows / 128, 4, blocks / 4, E). Returns c_tensor, d_tensor and
    d_col_tensor (M, N, 1), amax_tensor (E, 1) for a 16-bit D, sfd_row_tensor, sfd_col_tensor.
    ValueError if refused.
    """
    return kernels.srelu(SimpleNamespace(**locals()))


def grouped_gemm_dsrelu_wrapper_sm100(
    a_tensor: Tensor,
    b_tensor: Tensor | None = None,
    c_tensor: Tensor | None = None,
    sfa_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    padded_offsets: Tensor | None = None,
    alpha_tensor: Tensor | None = None,
    prob_tensor: Tensor | None = None,
    dprob_tensor: Tensor | None = None,
    generate_dbias: bool = False,
    b_ptrs: Tensor | None = None,
    sfb_ptrs: Tensor | None = None,
    n: int | None = None,
    b_dtype: torch.dtype | None = None,
    b_major: str = "k",
    norm_const_tensor: Tensor | None = None,
    acc_dtype: torch.dtype | None = None,
    d_dtype: torch.dtype | None = None,
    sf_vec_size: int = 16,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    use_dynamic_sched: bool = False,
    deterministic: bool | None = None,
) -> WrapperOutputs:
    """FC2 dgrad and the backward of SReLU: D = alpha A B^T * 2 max(C, 0) * prob, quantized.

    Layouts as in `grouped_gemm_srelu_wrapper_sm100`. ``dprob_tensor`` is added to, before the
    multiplication with prob. Returns d_row_tensor, d_col_tensor (M, n, 1), d_srelu_tensor, which is
    max(C, 0)^2 * prob, column-wise if it is quantized, dprob_tensor, dbias_tensor BF16 (E, n, 1),
    amax_tensor (E, 1), sfd_row_tensor, sfd_col_tensor, sfd_col_d_srelu_tensor. ValueError if
    refused.
    """
    return kernels.dsrelu(SimpleNamespace(**locals()))


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
    prob_tensor: Tensor | None = None,
    acc_dtype: torch.dtype | None = None,
    d_dtype: torch.dtype | None = None,
    d_tensor: Tensor | None = None,
    sf_vec_size: int = 16,
    m_aligned: int = 256,
    use_dynamic_sched: bool = False,
    *,
    generate_amax: bool = True,
) -> WrapperOutputs:
    """A block-scaled grouped GEMM: D = alpha A B^T * prob, or alpha A B^T + bias * prob.

    Returns d_tensor (M, N) and amax_tensor (E, 1), None unless asked for. ValueError if refused.
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
    d_dtype: torch.dtype | None = None,
    d_tensor: Tensor | None = None,
    m_aligned: int = 256,
    use_dynamic_sched: bool = False,
) -> WrapperOutputs:
    """A BF16 grouped GEMM: D = alpha A B^T * prob, or alpha A B^T + bias * prob.

    Returns d_tensor (M, N). ValueError if refused.
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
    sf_vec_size: int = 16,
    accumulate_on_output: bool = False,
    input_order: Any = "tensor2d",
    *,
    descriptor_workspace: Tensor | None = None,
) -> WrapperOutputs:
    """Weight gradients: A[:, s:t] B[s:t] per expert, written or added, dense or behind pointers.

    Returns wgrad_tensor (E, O, I), None for pointers. ValueError if refused.
    """
    return kernels.wgrad(SimpleNamespace(**locals()))
