"""The grouped products of nvidia-cudnn-frontend, tested for the features that the ops ask for.

Importing this imports ``cudnn``. A version says what to expect; what is there is looked at here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import cudnn

from fusible.versions import CUDNN_FRONTEND

# Marks and arguments that came after the wrappers themselves, with the version that brought them.
_CANONICAL = {"supports_canonical_layouts": "1.32", "supports_bf16_canonical_layouts": "1.32"}
_FEATURES = {
    "grouped_gemm_glu_wrapper_sm100": {**_CANONICAL, "geglu_alpha": "1.24", "generate_c": "1.27"},
    "grouped_gemm_dglu_wrapper_sm100": {**_CANONICAL, "deterministic": "1.31"},
    "grouped_gemm_quant_wrapper_sm100": {
        "supports_canonical_layouts": "1.31",
        "supports_optional_amax": "1.31",
        "d_tensor": "1.26",
    },
    "grouped_gemm_wgrad_wrapper_sm100": {
        **_CANONICAL, "input_order": "1.24", "descriptor_workspace": "1.30",
    },
    "grouped_gemm_wrapper_sm100": {"supports_bf16_canonical_layouts": "1.32"},
}  # fmt: skip


def tested(package: Any, name: str) -> Callable[..., Any]:
    """The wrapper ``name`` of ``package``.

    Raises:
        RuntimeError: it is not there, or lacks a feature.
    """
    wrapper = getattr(package, name, None)
    known = set() if wrapper is None else {*inspect.signature(wrapper).parameters}
    lacking = [
        f"{feature} (since {since})"
        for feature, since in _FEATURES[name].items()
        if feature not in known and not getattr(wrapper, feature, False)
    ]
    if lacking:
        raise RuntimeError(
            f"{name} of nvidia-cudnn-frontend must have {', '.join(_FEATURES[name])}, got version "
            f"{getattr(package, '__version__', 'unknown')} without {', '.join(lacking)}; "
            f"install nvidia-cudnn-frontend >= {CUDNN_FRONTEND}"
        )
    assert wrapper is not None  # what is not there has no feature
    return wrapper


grouped_gemm_glu_wrapper_sm100 = tested(cudnn, "grouped_gemm_glu_wrapper_sm100")
grouped_gemm_dglu_wrapper_sm100 = tested(cudnn, "grouped_gemm_dglu_wrapper_sm100")
grouped_gemm_quant_wrapper_sm100 = tested(cudnn, "grouped_gemm_quant_wrapper_sm100")
grouped_gemm_wgrad_wrapper_sm100 = tested(cudnn, "grouped_gemm_wgrad_wrapper_sm100")
grouped_gemm_wrapper_sm100 = tested(cudnn, "grouped_gemm_wrapper_sm100")
