"""Grouped products of few rows on SM90, which read the weights of an inference as they are stored.

The functions have the signatures of `definitions.grouped_mm_stored` and `grouped_glu_stored`, and
return NotImplemented for what the kernels do not support, and where dequantizing the weights is
faster.
"""

from __future__ import annotations

import functools
from itertools import chain
from types import NotImplementedType

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.kernels.few_rows.spec import (
    MMA_ROWS,
    RESIDENT,
    WARPS,
    FewRowsSpec,
    max_rows,
    supports_weights,
)
from fusible.kernels.glu import Glu
from fusible.kernels.runtime.gpu import PTX_NAMES, has_cutlass, multiprocessors, sm_of
from fusible.kernels.runtime.launch import aligned, launch
from fusible.kernels.runtime.workspaces import pointer_table
from fusible.kernels.sm90 import limits
from fusible.kernels.sm90.operands import DTYPE_NAMES, as_vector, check_ends, check_tensor
from fusible.recipes.formats import NumberFormat
from fusible.recipes.matrix import shapes_of
from fusible.recipes.stored import StoredWeights

_SCALE_ALIGNMENT = 4  # bytes: the widest load of a scale


def grouped_mm_stored(
    x: Tensor,
    w: StoredWeights,
    fmt: NumberFormat,
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    glu: Glu | None = None,
) -> Tensor | NotImplementedType:
    """`definitions.grouped_mm_stored`; with ``glu`` `grouped_glu_stored`, of those scales."""
    groups, features, depth = shape = _shape(w, fmt)
    activated = glu is None or limits.supports_activation(glu.activation, glu.interleave, features)
    if not (activated and _reads(x, w, fmt, shape)):
        return NotImplemented
    rows, columns = x.shape[0], features if glu is None else features // glu.sides
    if glu is None and bias is None:
        row_scale = None  # it multiplies the bias only
    bias, row_scale = _checked(x, w, fmt, shape, ends, bias, row_scale)
    out = x.new_empty(rows, columns)
    if rows == 0:
        return out
    spec = FewRowsSpec(
        fmt,
        len(w.data) > 1,
        bias is not None,
        "" if row_scale is None else PTX_NAMES[row_scale.dtype],
        "" if glu is None else glu.activation,
        0 if glu is None else glu.interleave,
        glu is not None and glu.sides == 2,
        *_tile(fmt, groups, rows, depth),
    )
    # A group without rows has no tiles; the rows past the last group are one more.
    tiles = (min(groups, rows) + 1) * -(-columns // spec.width)
    blocks = min(tiles, multiprocessors(x.device) * RESIDENT)
    tensors = aligned(x), *_addresses(w, fmt, x.device), ends, bias, row_scale, out
    sizes, constants = (rows, columns, depth, groups), (0.0, 0.0, 0.0) if glu is None else glu[2:]
    launch("few_rows.product.product", (spec,), x.device, *tensors, *sizes, *constants, blocks)
    return out


def grouped_glu_stored(
    x: Tensor,
    w: StoredWeights,
    fmt: NumberFormat,
    ends: Tensor,
    scales: Tensor | None,
    glu: Glu,
    bias: Tensor | None = None,
) -> Tensor | NotImplementedType:
    """`definitions.grouped_glu_stored`."""
    return grouped_mm_stored(x, w, fmt, ends, bias, scales, glu)


def _checked(
    x: Tensor,
    w: StoredWeights,
    fmt: NumberFormat,
    shape: tuple[int, int, int],
    ends: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """The bias and the scales of rows, contiguous; ValueError for operands that do not fit."""
    groups, features, depth = shape
    if x.shape[1] != depth:
        raise ValueError(f"x must have {depth} columns, as the weights, got {x.shape[1]}")
    wanted = shapes_of((*w.data[0].shape[:-1], depth), fmt)
    for name, part, size in zip(w._fields, w, wanted, strict=True):
        count = 0 if size is None else len(w.data)
        if len(part) != count or any([t.shape != size or t.device != x.device for t in part]):
            raise ValueError(
                f"{name} of weights in {fmt.name} must be {count} tensors of shape {size} on "
                f"{x.device}, got {[(tuple(t.shape), str(t.device)) for t in part]!s:.200}"
            )
    check_ends(ends, groups, x.device)
    if bias is not None:
        check_tensor("bias", bias, (groups, features), x.dtype, x.device)
        bias = bias.contiguous()
    if scales is not None:
        scales = as_vector("scales", scales, x)
        scales = scales if scales.dtype in PTX_NAMES else cast(scales, torch.float32)
    return bias, scales


def _shape(w: StoredWeights, fmt: NumberFormat) -> tuple[int, int, int]:
    """Groups, rows and columns of the weights."""
    first = w.data[0]
    groups = first.shape[0] if first.dim() == 3 else len(w.data)
    return groups, first.shape[-2], first.shape[-1] * fmt.element.per_byte


def _reads(x: Tensor, w: StoredWeights, fmt: NumberFormat, shape: tuple[int, int, int]) -> bool:
    """Whether the kernels read these operands, and are faster than dequantizing the weights."""
    return (
        x.shape[0] <= max_rows(fmt) * shape[0]
        and _supports(x.device, x.dtype, fmt, *shape)
        and all([t.is_contiguous() for part in w for t in part])
        and not any([t.data_ptr() % limits.ALIGNMENT_BYTES for t in w.data])
        and not any([t.data_ptr() % _SCALE_ALIGNMENT for t in w.scale])
    )


def _addresses(
    w: StoredWeights, fmt: NumberFormat, device: torch.device
) -> tuple[Tensor | None, ...]:
    """Data, scales and scales of whole matrices of one tensor, and no table of the addresses.

    Of several the table ``[3, E]`` alone. Where a matrix has one scale, that is the third.
    """
    data, scale, outer = w._replace(tensor_scale=w.scale) if fmt.block is None else w
    if len(data) == 1:
        return data[0], scale[0], outer[0] if outer else None, None
    parts = [[t.data_ptr() for t in part] or [0] * len(data) for part in (data, scale, outer)]
    return None, None, None, pointer_table(tuple(chain(*parts)), device)


@functools.lru_cache(maxsize=1024)
def _tile(fmt: NumberFormat, groups: int, rows: int, depth: int) -> tuple[int, int]:
    """``warps_across`` and ``row_tiles`` of a `FewRowsSpec`, by measurements on an H100."""
    spec = FewRowsSpec(fmt)
    chunks = -(-depth // spec.chunk)
    # A warp has at least four chunks of the reduction, so that loads overlap, if it is that long.
    across = next(n for n in (1, 2, 4) if n == 4 or chunks * n >= 4 * WARPS)
    if rows <= MMA_ROWS:
        return across, 1
    # Sums of blocks need registers of their own.
    return across, 2 if rows <= MMA_ROWS * groups or spec.scales_sums else 4


def note(dtype: torch.dtype, fmt: NumberFormat, groups: int, *features: int) -> str | None:
    """What `explain` says of these kernels; None if they do not support such weights anywhere."""
    sm, name = limits.ARCHITECTURE, DTYPE_NAMES.get(dtype, "")
    if not supports_weights(sm, name, fmt, groups, *features):
        return None
    return (
        f"on SM {sm / 10}, forwards without gradients multiply up to {max_rows(fmt)} rows a group "
        "on average by weights as they are stored; others dequantize them"
    )


@functools.lru_cache(maxsize=1024)
def _supports(
    device: torch.device, dtype: torch.dtype, fmt: NumberFormat, groups: int, *features: int
) -> bool:
    """Whether the kernels run on a device for rows of ``dtype`` and weights in ``fmt``."""
    name = DTYPE_NAMES.get(dtype, "")
    return supports_weights(sm_of(device), name, fmt, groups, *features) and has_cutlass()
