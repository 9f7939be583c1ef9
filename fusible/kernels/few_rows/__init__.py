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
    rows, depth = x.shape
    groups, features = ends.shape[0], w.data[0].shape[-2]
    sides = 1 if glu is None else glu.sides
    columns = features // sides
    if (
        rows > MAX_ROWS * groups
        or not _supports(x.device, x.dtype, fmt, groups, features, depth)
        or (glu is not None and not limits.supports_activation(*glu[:2], features))
        or not all([t.is_contiguous() for part in w for t in part])
        or not all([begins_aligned(t) for t in w.data])
    ):
        return NotImplemented
    out = x.new_empty(rows, columns)
    if rows == 0:
        return out
    if glu is None and bias is None:
        scales = None  # it multiplies the bias only
    if scales is not None and scales.dtype not in _DTYPES:
        scales = cast(scales, torch.float32)
    data, scale, outer = w._replace(tensor_scale=w.scale) if fmt.block is None else w
    table: Tensor | None = None
    if separate := len(data) > 1:
        parts = [[t.data_ptr() for t in part] or [0] * groups for part in (data, scale, outer)]
        table = pointer_table(tuple(chain(*parts)), x.device)
    spec = FewRowsSpec(
        fmt,
        separate,
        bias is not None,
        "" if scales is None else _DTYPES[scales.dtype],
        "" if glu is None else glu.activation,
        0 if glu is None else glu.interleave,
        sides == 2,
        *_tile(fmt, groups, rows, depth),
    )
    across = -(-columns // spec.width)
    tiles = (min(groups, rows) + 1) * across
    launch(
        "few_rows.product.product",
        (spec,),
        x.device,
        aligned(x),
        data[0],
        scale[0],
        outer[0] if outer else None,
        table,
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
