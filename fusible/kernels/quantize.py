"""MXFP8 quantization and group offsets on CUDA: when the kernels serve, and their compiled forms.

Importing this module adds CUDA implementations to ``fusible::quantize_mxfp8`` and
``fusible::group_offsets``; cutlass is imported at the first launch.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusible.recipes.grouped import group_offsets
from fusible.recipes.library import Pieces, empty_pieces, mxfp8_format, quantize_mxfp8

_library = torch.library.Library("fusible", "IMPL")


def why_not(x: Tensor, ends: Tensor | None) -> str | None:
    """Say why the kernel cannot take ``x``, or None if it can; the formulas give the same bits."""
    pointer = x.data_ptr() % 16 if x.numel() else 0
    checks = {
        f"dtype must be bfloat16, got {x.dtype}": x.dtype == torch.bfloat16,
        f"columns must be a multiple of 32, got {x.shape[1]}": x.shape[1] % 32 == 0,
        "rows must be contiguous and begin at 16 bytes": (
            x.stride(1) == 1 and x.stride(0) % 8 == 0 and pointer == 0
        ),
        "ends must be contiguous int32 or int64": ends is None
        or (ends.is_contiguous() and ends.dtype in (torch.int32, torch.int64)),
        "the GPU must be SM89 or later": _capability(x.device) >= (8, 9),
        "nvidia-cutlass-dsl must be installed": _has_cutlass(),
    }
    return next((sentence for sentence, holds in checks.items() if not holds), None)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _has_cutlass() -> bool:
    return importlib.util.find_spec("cutlass") is not None


@cache
def compiled(
    config: tuple[Any, ...], ends_dtype: torch.dtype, architecture: str | None = None
) -> Any:
    """Compile the kernel for ``quantize_device.Config(*config)``.

    ``architecture`` ("sm_90a", "sm_100a") compiles for a GPU that need not be there; None for the
    present one. Called with x, ends, row-wise data and scales, column-wise data and scales; data
    and scales as bytes.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from fusible.kernels import quantize_device

    def matrix(dtype: Any, columns: Any, pitch: Any) -> Any:
        shape = (cute.sym_int(), columns)
        return make_fake_tensor(dtype, shape, stride=(pitch, 1), assumed_align=16)

    x = matrix(cutlass.BFloat16, cute.sym_int(divisibility=32), cute.sym_int64(divisibility=8))
    kind = cutlass.Int64 if ends_dtype == torch.int64 else cutlass.Int32
    ends = make_fake_tensor(kind, (cute.sym_int(),), stride=(1,))
    out = [matrix(cutlass.Uint8, cute.sym_int(), cute.sym_int64()) for _ in range(4)]
    return cute.compile(
        quantize_device.quantize,
        x,
        ends,
        *out,
        quantize_device.Config(*config),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=_options(architecture),
    )


def _cuda(
    x: Tensor, ends: Tensor | None, e5m2: bool, round_up: bool, rowwise: bool, columnwise: bool
) -> Pieces:
    if why_not(x, ends) is not None:
        return quantize_mxfp8(x, ends, e5m2, round_up, rowwise, columnwise)
    groups = None if ends is None else len(ends)
    pieces = empty_pieces(x, groups, e5m2, rowwise, columnwise)
    if x.numel() == 0 or not (rowwise or columnwise):
        return tuple(p.view(torch.uint8).zero_().view(p.dtype) for p in pieces)  # type: ignore[return-value]
    fmt = mxfp8_format(e5m2, round_up)
    config = (
        fmt.element.name,
        fmt.element.max,
        fmt.element.max_exponent,
        round_up,
        ends is not None,
        rowwise,
        columnwise,
    )
    given = [p.view(torch.uint8) for p in pieces]
    # What is not asked for is never touched; any tensor of the right kind stands in.
    given = given if rowwise else [*given[2:], *given[2:]]
    given = given if columnwise else [*given[:2], *given[:2]]
    ends = _no_ends(x.device) if ends is None else ends
    with torch.cuda.device(x.device):
        compiled(config, ends.dtype)(x, ends, *given)
    return pieces


@cache
def _no_ends(device: torch.device) -> Tensor:
    """Stand in for the ends of a tensor without groups; never read."""
    return torch.empty(1, dtype=torch.int32, device=device)


@cache
def compiled_offsets(dtype: torch.dtype, architecture: str | None = None) -> Any:
    """Compile the offsets kernel; called with first_dims, offsets, ends, columns."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from fusible.kernels import quantize_device

    kind = cutlass.Int64 if dtype == torch.int64 else cutlass.Int32
    return cute.compile(
        quantize_device.group_offsets,
        make_fake_tensor(kind, (cute.sym_int(),), stride=(1,)),
        *(make_fake_tensor(cutlass.Int64, (cute.sym_int(),), stride=(1,)) for _ in range(2)),
        cutlass.Int64(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=_options(architecture),
    )


def _options(architecture: str | None) -> str:
    return "--enable-tvm-ffi" + (f" --gpu-arch {architecture}" if architecture else "")


def _cuda_offsets(first_dims: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    integers = first_dims.dtype in (torch.int32, torch.int64)
    if not (integers and first_dims.is_contiguous() and _has_cutlass()):
        return group_offsets(first_dims, columns)
    offsets = first_dims.new_empty(first_dims.shape[0] + 1, dtype=torch.int64)
    ends = first_dims.new_empty(first_dims.shape[0], dtype=torch.int64)
    with torch.cuda.device(first_dims.device):
        compiled_offsets(first_dims.dtype)(first_dims, offsets, ends, columns)
    return offsets, ends


_library.impl("quantize_mxfp8", _cuda, "CUDA")
_library.impl("group_offsets", _cuda_offsets, "CUDA")
