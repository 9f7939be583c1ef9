"""Grouped products of few rows on SM90, in an inference: warps divide the reduction.

The functions have the signatures of `fusible.kernels.grouped.stored`, whose weights they read as
they are stored, and of `fusible.kernels.grouped.inference`. They return NotImplemented for what the
kernels do not support, and where dequantizing the weights, or the kernels for many rows, are
faster. These have other bits; under `batch_invariant` they run in any case.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from types import NotImplementedType
from typing import NamedTuple

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.kernels.few_rows.invariance import is_batch_invariant
from fusible.kernels.few_rows.spec import (
    MMA_ROWS,
    RESIDENT,
    STAGES,
    WARPS,
    FewRowsSpec,
    divided_rows,
    max_rows,
    supports,
)
from fusible.kernels.glu import Glu
from fusible.kernels.runtime.gpu import has_cutlass, multiprocessors, sm_of
from fusible.kernels.runtime.launch import aligned, launch
from fusible.kernels.runtime.workspaces import pointer_table
from fusible.kernels.sm90 import limits
from fusible.kernels.sm90.operands import (
    DTYPE_NAMES,
    TENSOR_TYPES,
    as_vector,
    check_ends,
    check_tensor,
    matrices_of,
)
from fusible.recipes.formats import NumberFormat
from fusible.recipes.matrix import shapes_of
from fusible.recipes.stored import StoredWeights

_SCALE_ALIGNMENT = 4  # bytes: the widest load of a scale
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


def inference_mm(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    *,
    zero_tail: bool = True,
) -> Tensor | NotImplementedType:
    """`inference.grouped_mm`; the tail is zero in any case."""
    return _plain_product(x, w, ends, bias, row_scale, None)


def inference_glu(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    scales: Tensor | None,
    glu: Glu,
    bias: Tensor | None = None,
    *,
    zero_tail: bool = True,
) -> Tensor | NotImplementedType:
    """`inference.grouped_glu`; the tail is zero in any case."""
    return _plain_product(x, w, ends, bias, scales, glu)


class _Weights(NamedTuple):
    """Weights as a kernel reads them."""

    format: NumberFormat | None
    """None: they have the dtype of the rows."""
    shape: tuple[int, int, int]
    """Groups, rows and columns."""
    addresses: tuple[Tensor | int | None, ...]
    """Of data, scales, scales of whole matrices, and of a table of these: see `product`."""
    table: bool = False
    """Whether the table has the addresses, and not the others."""


def _product(
    x: Tensor,
    w: StoredWeights,
    fmt: NumberFormat,
    ends: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    glu: Glu | None,
) -> Tensor | NotImplementedType:
    """A product with stored weights."""
    shape = _shape(w, fmt)
    if not (_reads(x, w, fmt) and (glu is None or _has_activation(glu, shape[1]))):
        return NotImplemented
    bias, scales = _checked(x, w, fmt, ends, bias, _read_scales(scales, bias, glu))
    weights = _Weights(fmt, shape, _addresses(w, fmt, x.device), len(w.data) > 1)
    return _launched(x, weights, ends, bias, scales, glu)


def _plain_product(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    glu: Glu | None,
) -> Tensor | NotImplementedType:
    """A product with weights of the rows' dtype, where dividing the reduction is faster."""
    weights = _plain_weights(x, w)
    if weights is None or not (glu is None or _has_activation(glu, weights.shape[1])):
        return NotImplemented
    given = x, weights.shape, ends, bias, _read_scales(scales, bias, glu)
    return _launched(x, weights, ends, *_checked_operands(*given), glu)


def _plain_weights(x: Tensor, w: Sequence[Tensor]) -> _Weights | None:
    """Weights of the rows' dtype, None if the kernels do not read them or others are faster."""
    if is_batch_invariant() or x.dim() != 2 or not w:
        return None
    first = w[0]
    groups = first.shape[0] if first.dim() == 3 else len(w)
    features, depth = first.shape[-2:]
    if 0 in first.shape or not (
        x.shape[0] <= divided_rows(groups, features, depth)
        and _supports(x.device, x.dtype, None, groups, features, depth)
        and all([type(t) in TENSOR_TYPES for t in w])
        and first.dtype == x.dtype
        and first.device == x.device
    ):
        return None
    found = matrices_of(w)
    if found is None or found.strides[1:] != (depth, 1):
        return None
    shape = groups, features, depth
    if found.pointers is not None:
        table = pointer_table(found.pointers, x.device)
        return _Weights(None, shape, (None, None, None, table), True)
    if groups > 1 and found.strides[0] != features * depth:
        return None
    return _Weights(None, shape, (found.address, None, None, None))


def _read_scales(scales: Tensor | None, bias: Tensor | None, glu: Glu | None) -> Tensor | None:
    """The scales of rows, None where there is nothing that they multiply."""
    return None if glu is None and bias is None else scales


def _launched(
    x: Tensor,
    weights: _Weights,
    ends: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    glu: Glu | None,
) -> Tensor:
    """A product of checked operands."""
    fmt, (groups, features, depth), addresses, table = weights
    rows, columns = x.shape[0], features if glu is None else features // glu.sides
    out = x.new_empty(rows, columns)
    if rows == 0:
        return out
    tile = _tile(fmt, groups, rows, depth)
    spec = FewRowsSpec(
        fmt,
        table,
        bias is not None,
        "" if scales is None else _DTYPES[scales.dtype],
        "" if glu is None else glu.activation,
        0 if glu is None else glu.interleave,
        glu is not None and glu.sides == 2,
        *tile,
        1 if fmt is not None else STAGES[tile[1]],
        _DTYPES[x.dtype],
    )
    # A group without rows has no tiles; the rows past the last group are one more.
    tiles = (min(groups, rows) + 1) * -(-columns // spec.width)
    launch(
        "few_rows.product.product",
        (spec,),
        x.device,
        aligned(x),
        *addresses,
        ends,
        bias,
        scales,
        out,
        rows,
        columns,
        depth,
        groups,
        *((0.0, 0.0, 0.0) if glu is None else glu[2:]),
        min(tiles, multiprocessors(x.device) * RESIDENT),
    )
    return out


def _checked(
    x: Tensor,
    w: StoredWeights,
    fmt: NumberFormat,
    ends: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """`_checked_operands`; ValueError also for stored weights that do not fit."""
    shape = _shape(w, fmt)
    checked = _checked_operands(x, shape, ends, bias, scales)
    wanted = shapes_of((*w.data[0].shape[:-1], shape[2]), fmt)
    for name, part, of_part in zip(w._fields, w, wanted, strict=True):
        count = 0 if of_part is None else len(w.data)
        if len(part) != count or any([t.shape != of_part or t.device != x.device for t in part]):
            raise ValueError(
                f"{name} of weights in {fmt.name} must be {count} tensors of shape {of_part} on "
                f"{x.device}, got {[(tuple(t.shape), str(t.device)) for t in part]!s:.200}"
            )
    return checked


def _checked_operands(
    x: Tensor,
    shape: tuple[int, int, int],
    ends: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """The bias and the scales of rows, contiguous; ValueError for operands that do not fit."""
    groups, features, depth = shape
    if x.shape[1] != depth:
        raise ValueError(f"x must have {depth} columns, as the weights, got {x.shape[1]}")
    check_ends(ends, groups, x.device)
    if bias is not None:
        check_tensor("bias", bias, (groups, features), x.dtype, x.device)
        bias = bias.contiguous()
    if scales is not None:
        scales = as_vector("scales", scales, x)
        scales = scales if scales.dtype in _DTYPES else cast(scales, torch.float32)
    return bias, scales


def _shape(w: StoredWeights, fmt: NumberFormat) -> tuple[int, int, int]:
    """Groups, rows and columns of the weights."""
    first = w.data[0]
    groups = first.shape[0] if first.dim() == 3 else len(w.data)
    return groups, first.shape[-2], first.shape[-1] * fmt.element.per_byte


def _reads(x: Tensor, w: StoredWeights, fmt: NumberFormat) -> bool:
    """Whether the kernels read these operands, and are faster than dequantizing the weights."""
    shape = _shape(w, fmt)
    return (
        not is_batch_invariant()
        and x.shape[0] <= max_rows(fmt) * shape[0]
        and _supports(x.device, x.dtype, fmt, *shape)
        and all([t.is_contiguous() for part in w for t in part])
        and not any([t.data_ptr() % limits.ALIGNMENT_BYTES for t in w.data])
        and not any([t.data_ptr() % _SCALE_ALIGNMENT for t in w.scale])
    )


def _has_activation(glu: Glu, features: int) -> bool:
    return limits.supports_activation(glu.activation, glu.interleave, features)


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


def _tile(fmt: NumberFormat | None, groups: int, rows: int, depth: int) -> tuple[int, int]:
    """``warps_across`` and ``row_tiles`` of a `FewRowsSpec`, by measurements on an H100."""
    spec = FewRowsSpec(fmt)
    chunks = -(-depth // spec.chunk)
    # A warp has at least four chunks of the reduction, so that loads overlap, if it is that long.
    across = next(n for n in (1, 2, 4) if n == 4 or chunks * n >= 4 * WARPS)
    if rows <= MMA_ROWS:
        return across, 1
    # Sums of blocks need registers of their own.
    return across, 2 if rows <= MMA_ROWS * groups or spec.scales_sums else 4


@functools.lru_cache(maxsize=1024)
def _supports(
    device: torch.device, dtype: torch.dtype, fmt: NumberFormat | None, groups: int, *features: int
) -> bool:
    """`spec.supports` on a device."""
    name = DTYPE_NAMES.get(dtype, "")
    return supports(sm_of(device), name, fmt, groups, *features) and has_cutlass()
