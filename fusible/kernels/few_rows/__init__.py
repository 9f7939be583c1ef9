"""Grouped products of few rows on SM90, which read the weights of an inference as they are stored.

The functions have the signatures of `fusible.kernels.grouped.stored`, and return NotImplemented for
what the kernels do not support.
"""

from __future__ import annotations

import functools
from itertools import chain
from types import NotImplementedType

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.kernels.few_rows.spec import (
    MAX_ROWS,
    MMA_ROWS,
    RESIDENT,
    WARPS,
    FewRowsSpec,
    supports,
)
from fusible.kernels.glu import Glu
from fusible.kernels.runtime.gpu import capability, has_cutlass, multiprocessors
from fusible.kernels.runtime.launch import aligned, begins_aligned, launch
from fusible.kernels.runtime.workspaces import pointer_table
from fusible.kernels.sm90 import limits
from fusible.recipes.formats import NumberFormat
from fusible.recipes.stored import StoredWeights

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


def grouped_mm(
    x: Tensor,
    w: StoredWeights,
    fmt: NumberFormat,
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor | NotImplementedType:
    """`stored.grouped_mm`."""
    return _product(x, w, fmt, ends, bias, row_scale, None)


def grouped_glu(
    x: Tensor,
    w: StoredWeights,
    fmt: NumberFormat,
    ends: Tensor,
    scales: Tensor | None,
    glu: Glu,
    bias: Tensor | None = None,
) -> Tensor | NotImplementedType:
    """`stored.grouped_glu`."""
    return _product(x, w, fmt, ends, bias, scales, glu)


def _product(
    x: Tensor,
    w: StoredWeights,
    fmt: NumberFormat,
    ends: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    glu: Glu | None,
) -> Tensor | NotImplementedType:
    (rows, depth), groups, features = x.shape, ends.shape[0], w.data[0].shape[-2]
    if not (_reads(x, w, fmt, groups) and (glu is None or _has_activation(glu, features))):
        return NotImplemented
    columns = features if glu is None else features // glu.sides
    out = x.new_empty(rows, columns)
    if rows == 0:
        return out
    if glu is None and bias is None:
        scales = None  # it multiplies the bias only
    if scales is not None and scales.dtype not in _DTYPES:
        scales = cast(scales, torch.float32)
    spec = FewRowsSpec(
        fmt,
        len(w.data) > 1,
        bias is not None,
        "" if scales is None else _DTYPES[scales.dtype],
        "" if glu is None else glu.activation,
        0 if glu is None else glu.interleave,
        glu is not None and glu.sides == 2,
        *_tile(fmt, groups, rows, depth),
    )
    # A group without rows has no tiles; the rows past the last group are one more.
    tiles = (min(groups, rows) + 1) * -(-columns // spec.width)
    launch(
        "few_rows.product.product",
        (spec,),
        x.device,
        aligned(x),
        *_addresses(w, fmt, x.device),
        ends,
        None if bias is None else bias.contiguous(),
        None if scales is None else scales.contiguous(),
        out,
        rows,
        columns,
        depth,
        groups,
        *((0.0, 0.0, 0.0) if glu is None else glu[2:]),
        min(tiles, multiprocessors(x.device) * RESIDENT),
    )
    return out


def _reads(x: Tensor, w: StoredWeights, fmt: NumberFormat, groups: int) -> bool:
    """Whether the kernels read these operands, and are faster than dequantizing the weights."""
    (rows, depth), features = x.shape, w.data[0].shape[-2]
    return (
        rows <= MAX_ROWS * groups
        and _supports(x.device, x.dtype, fmt, groups, features, depth)
        and all([t.is_contiguous() for part in w for t in part])
        and all([begins_aligned(t) for t in w.data])
    )


def _has_activation(glu: Glu, features: int) -> bool:
    return limits.supports_activation(glu.activation, glu.interleave, features)


def _addresses(
    w: StoredWeights, fmt: NumberFormat, device: torch.device
) -> tuple[Tensor | None, ...]:
    """Data, scales and scales of whole matrices of one tensor; or of all, a table of these."""
    data, scale, outer = w._replace(tensor_scale=w.scale) if fmt.block is None else w
    if len(data) == 1:
        return data[0], scale[0], outer[0] if outer else None, None
    parts = [[t.data_ptr() for t in part] or [0] * len(data) for part in (data, scale, outer)]
    return None, None, None, pointer_table(tuple(chain(*parts)), device)


def _tile(fmt: NumberFormat, groups: int, rows: int, depth: int) -> tuple[int, int]:
    """``warps_across`` and ``row_tiles`` of a `FewRowsSpec`, by measurements on an H100."""
    spec = FewRowsSpec(fmt)
    chunks = -(-depth // spec.chunk)
    # A warp that divides the reduction has at least four chunks, so that loads overlap.
    across = next(n for n in (1, 2, 4) if n == 4 or chunks * n >= 4 * WARPS)
    if rows <= MMA_ROWS:
        return across, 1
    return across, 2 if rows <= MMA_ROWS * groups or spec.scales_sums else 4


@functools.lru_cache(maxsize=1024)
def _supports(
    device: torch.device, dtype: torch.dtype, fmt: NumberFormat, groups: int, *features: int
) -> bool:
    """Whether the kernels run on a device for rows of ``dtype`` and weights in ``fmt``."""
    major, minor = capability(device) if device.type == "cuda" else (0, 0)
    fits = supports(10 * major + minor, str(dtype).removeprefix("torch."), fmt, groups, *features)
    return fits and has_cutlass()
