"""The grouped products on any CUDA device, of BF16, FP16 and FP32, with Triton.

They serve where PyTorch's own read the sizes of groups on the host: all dtypes but BF16, and BF16
on GPUs other than SM 9.0 and 10.x. Each returns NotImplemented for other operands, and where Triton
is not installed. Triton comes with PyTorch for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NotImplementedType
from typing import Any

import torch
from torch import Tensor

from fusible import versions
from fusible.kernels.stacking import stacked

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NAMES = [str(dtype).removeprefix("torch.") for dtype in TRITON_DTYPES]


def pytorch_reads_on_device(dtype: str, sm: int) -> bool:
    """Whether PyTorch's grouped product reads sizes on the device on a GPU of SM ``sm``.

    ``_grouped_mm_cuda`` in PyTorch's ``aten/src/ATen/native/cuda/GroupedBlas.cpp``: in BF16 on
    SM 9.0 and 10.x; elsewhere it copies the end rows to the host and loops over groups.
    """
    return dtype == "bfloat16" and sm // 10 in (9, 10)


def reads_on_device(dtype: str, sm: int, has_triton: bool) -> bool:
    """Whether some grouped product reads sizes on the device: PyTorch's, or that of Triton."""
    return pytorch_reads_on_device(dtype, sm) or (has_triton and dtype in _NAMES)


def supports_dtype(dtype: torch.dtype) -> bool:
    """Whether the kernels multiply matrices of ``dtype``."""
    return dtype in TRITON_DTYPES and versions.has_triton()


def tile_options(dtype: torch.dtype, kernel: str) -> dict[str, Any]:
    """The tile of a program of a kernel, and of how many warps."""
    precision = "ieee"
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    size, warps = (64, 4) if dtype == torch.float32 else (128, 8)
    rows, depth = (64, 32) if kernel == "rows_grouped" else (32, size)
    return {
        "block_rows": rows,
        "block_columns": size,
        "block_depth": depth,
        "precision": precision,
        "num_warps": warps,
    }


def grouped_mm(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    transpose_w: bool = False,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    *,
    out: Tensor | None = None,
    zero_tail: bool = True,
    reads_ahead: bool = False,
) -> Tensor | NotImplementedType:
    """`definitions.grouped_mm`."""
    if x_scale is not None or not supports_dtype(x.dtype):
        return NotImplemented
    from fusible.kernels.grouped.device.products import rows_grouped

    weight = stacked(w).mT if transpose_w else stacked(w)
    (rows, depth), (groups, columns, _) = x.shape, weight.shape
    blocks = tile_options(x.dtype, "rows_grouped")
    down = -(-rows // blocks["block_rows"]) + groups + 1  # a group may end in a part of a tile
    across = -(-columns // blocks["block_columns"])
    out = x.new_empty(rows, columns) if out is None else out
    if out.numel() == 0:
        return out
    with torch.cuda.device_of(out):
        rows_grouped[(down * across,)](
            x, weight, ends, None if bias is None else bias.contiguous(),
            None if row_scale is None else row_scale.contiguous(), out,
            rows, groups, columns, depth, *x.stride(), *weight.stride(), *out.stride(),
            has_bias=bias is not None, has_scale=row_scale is not None,
            slots=1 << groups.bit_length(), **blocks,
        )  # fmt: skip
    return out


def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype | None = None,
    dy_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> Tensor | NotImplementedType:
    """`definitions.grouped_wgrad`."""
    if dy_scale is not None or not supports_dtype(x.dtype):
        return NotImplemented
    from fusible.kernels.grouped.device.products import reduction_grouped

    (rows, columns), (_, depth), groups = dy.shape, x.shape, ends.shape[0]
    # What Triton cannot write is rounded from FP32, as the definition's sums are.
    wide = out_dtype not in (None, *TRITON_DTYPES)
    out = dy.new_empty(groups, columns, depth, dtype=torch.float32 if wide else out_dtype)
    blocks = tile_options(x.dtype, "reduction_grouped")
    tiles = -(-columns // blocks["block_columns"]) * -(-depth // blocks["block_depth"])
    if out.numel():
        with torch.cuda.device_of(out):
            reduction_grouped[(tiles, groups)](
                dy, x, ends, out, rows, columns, depth, *dy.stride(), *x.stride(), **blocks
            )
    return out.to(out_dtype) if wide else out
