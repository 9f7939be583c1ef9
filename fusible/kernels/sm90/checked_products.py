"""The grouped products on SM90, of operands in any layout: checked, or copied where TMA needs it.

The functions are those of `fusible.kernels.grouped`; a ``tile`` is for tests and measurements. None
synchronises with the host. Each calls the `WeightProducts` of its operands' layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusible.kernels.glu import Glu
from fusible.kernels.sm90 import limits, tiles
from fusible.kernels.sm90.checks import (
    Matrices,
    as_matrix,
    as_vector,
    check_ends,
    check_tensor,
    layout,
    matrices_of,
)
from fusible.kernels.sm90.grouped_products import WeightProducts, cached_products
from fusible.kernels.sm90.launch import launch_group_ends
from fusible.kernels.sm90.spec import Tile
from fusible.kernels.stacking import write


def group_ends(split_sizes: Tensor, rows: int) -> Tensor:
    """First row past each group, int32 ``[E]``; negative sizes count as 0, the last is ``rows``."""
    if split_sizes.dtype not in (torch.int64, torch.int32) or split_sizes.ndim != 1:
        raise ValueError(
            "split_sizes must be an int64 or int32 tensor of 1 dimension, got "
            f"{split_sizes.dtype} of shape {tuple(split_sizes.shape)}"
        )
    ends = torch.empty(split_sizes.shape, dtype=torch.int32, device=split_sizes.device)
    launch_group_ends(split_sizes.contiguous(), ends, rows)
    return ends


class _Operands(NamedTuple):
    """Checked rows and weights, and the launches of their products."""

    x: Tensor
    pitch: int
    w: Sequence[Tensor]
    """The tensors behind the addresses of ``matrices``."""
    matrices: Matrices
    products: WeightProducts


def _operands(
    name: str, x: Tensor, w: Sequence[Tensor], ends: Tensor, transpose: bool, tile: Tile | None
) -> _Operands:
    x, pitch = as_matrix(name, x)
    matrices = matrices_of("w", w, x.device)
    if w[0].dtype != x.dtype:
        raise ValueError(f"w must have {name}'s dtype {x.dtype}, got {w[0].dtype}")
    if matrices is None:
        # The copy of one tensor is at an address of its own, also where it was contiguous.
        one = (
            w[0].clone(memory_format=torch.contiguous_format) if len(w) == 1 else torch.stack([*w])
        )
        one = one.view(-1, *one.shape[-2:])
        w, matrices = [one], Matrices(one.data_ptr(), tuple(one.shape), one.stride(), 0)
    groups, *features = matrices.shape
    if x.shape[1] != features[not transpose]:
        raise ValueError(
            f"{name} and w must share the reduced dimension, got {x.shape[1]} and "
            f"{features[not transpose]}"
        )
    check_ends(ends, groups, x.device)
    return _Operands(x, pitch, w, matrices, _products(x, matrices, tile))


def _products(x: Tensor, matrices: Matrices, tile: Tile | None) -> WeightProducts:
    many = tiles.has_many_rows(x.shape[0], matrices.shape[0])
    kind = x.device, x.dtype, matrices.shape, matrices.strides, matrices.table != 0, many, tile
    return cached_products(*kind) or WeightProducts(*kind)  # raises, naming what is not supported


def grouped_mm(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """See `fusible.kernels.grouped.grouped_mm`."""
    x, pitch, w, matrices, products = _operands("x", x, w, ends, transpose_w, tile)
    shape = x.shape[0], matrices.shape[2 if transpose_w else 1]
    if bias is not None:
        check_tensor("bias", bias, (matrices.shape[0], shape[1]), x)
        bias = bias.contiguous()
        row_scale = None if row_scale is None else as_vector("row_scale", row_scale, x)
    if out is not None:
        check_tensor("out", out, shape, x)
    fits = out is not None and out.is_contiguous() and out.data_ptr() % limits.ALIGNMENT_BYTES == 0
    y = out if fits else None
    if shape[0]:
        address, *_, table = matrices
        y = products.forward(x, address, ends, bias, row_scale, y, transpose_w, table, pitch)
    elif y is None:
        y = x.new_empty(shape)
    assert y is not None
    return y if out is None or fits else out.copy_(y)


def grouped_mm_(
    out: Tensor,
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
) -> None:
    """`grouped_mm` into ``out``."""
    grouped_mm(x, w, ends, bias, row_scale, transpose_w, out)


def grouped_glu(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    scales: Tensor | None,
    glu: Glu,
    bias: Tensor | None,
    save_preact: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fusible.kernels.grouped.grouped_glu`."""
    x, pitch, w, matrices, products = _operands("x", x, w, ends, False, tile)
    groups, features, _ = matrices.shape
    _check_glu(glu, features)
    scales = None if scales is None else as_vector("scales", scales, x)
    if bias is not None:
        check_tensor("bias", bias, (groups, features), x)
        bias = bias.contiguous()
    if x.shape[0] == 0:
        return x.new_empty(0, features), x.new_empty(0, features // 2)
    address, *_, table = matrices
    return products.glu(x, address, ends, scales, glu, bias, save_preact, table, pitch)


def _check_glu(glu: Glu, features: int) -> None:
    """A gated activation that the kernels have, of so many gate and linear columns."""
    if not limits.takes_glu(glu.activation, glu.interleave, features):
        raise ValueError(
            f"activation must be one of {', '.join(limits.ACTIVATIONS)}, and interleave 0 (halves) "
            f"or a power of two up to {limits.INTERLEAVES[-1]}, of as many gate as linear columns, "
            f"a multiple of {limits.MULTIPLE_OF} and of interleave each, got {glu.activation!r}, "
            f"{glu.interleave} and {features} columns together"
        )


def grouped_dglu(
    dy: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    preact: Tensor,
    scales: Tensor,
    glu: Glu,
    overwrite: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fusible.kernels.grouped.grouped_dglu`."""
    dy, pitch, w, matrices, products = _operands("dy", dy, w, ends, True, tile)
    rows, columns = dy.shape[0], matrices.shape[2]
    check_tensor("preact", preact, (rows, 2 * columns), dy)
    preact, preact_pitch = as_matrix("preact", preact)
    _check_glu(glu, 2 * columns)
    scales = as_vector("scales", scales, dy)
    if rows == 0:
        return dy.new_empty(0, 2 * columns), dy.new_empty(0, columns), torch.empty_like(scales)
    address, *_, table = matrices
    overwrite = overwrite and preact_pitch == 0
    return products.dglu(
        dy, address, ends, preact, scales, glu, overwrite, table, pitch, preact_pitch
    )


def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `fusible.kernels.grouped.grouped_wgrad`."""
    groups, dtype = ends.shape[0], out_dtype or x.dtype
    if dtype == x.dtype and x.shape[0]:
        dy, x, products, pitches = _gradient_operands(dy, x, ends, groups, None)
        return products.wgrad(dy, x, ends, pitches=pitches)  # type: ignore[return-value]
    shape = groups, dy.shape[1], x.shape[1]
    out = x.new_empty(shape, dtype=dtype if dtype == x.dtype else torch.float32)
    grouped_wgrad_([out], dy, x, ends, False)
    return out.to(dtype)


def _gradient_operands(
    dy: Tensor, x: Tensor, ends: Tensor, groups: int, tile: Tile | None
) -> tuple[Tensor, Tensor, WeightProducts, tuple[int, int]]:
    """What a weight gradient multiplies, as TMA reads it, the launches, and the row pitches."""
    (dy, dy_pitch), (x, x_pitch) = as_matrix("dy", dy), as_matrix("x", x)
    if dy.dtype != x.dtype or dy.shape[0] != x.shape[0] or dy.device != x.device:
        raise ValueError(
            f"dy and x must share dtype, rows and device, got {dy.dtype} of {tuple(dy.shape)} on "
            f"{dy.device} and {x.dtype} of {tuple(x.shape)} on {x.device}"
        )
    check_ends(ends, groups, x.device)
    shape = groups, dy.shape[1], x.shape[1]
    # Only the gradients' shape counts.
    like = Matrices(0, shape, (shape[1] * shape[2], shape[2], 1), 0)
    return dy, x, _products(x, like, tile), (dy_pitch, x_pitch)


def grouped_wgrad_(
    out: Sequence[Tensor],
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    accumulate: bool,
    tile: Tile | None = None,
) -> None:
    """See `fusible.kernels.grouped.grouped_wgrad_`."""
    groups = out[0].shape[0] if len(out) == 1 and out[0].dim() == 3 else len(out)
    grads = matrices_of("out", out, x.device)
    dy, x, products, pitches = _gradient_operands(dy, x, ends, groups, tile)
    shape = dy.shape[1], x.shape[1]
    if out[0].shape[-2:] != shape:
        raise ValueError(f"out must hold matrices of shape {shape}, got {tuple(out[0].shape)}")
    if x.shape[0] == 0:
        for one in () if accumulate else out:
            one.zero_()
    elif grads is None or not _is_writable(grads, out[0].dtype, x.dtype):
        write(out, grouped_wgrad(dy, x, ends, torch.float32), accumulate)
    else:
        products.wgrad(dy, x, ends, grads, out[0].dtype, accumulate, pitches)


def _is_writable(grads: Matrices, out_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a weight gradient of operands in ``dtype`` can be written to ``grads``."""
    found = layout(grads.shape, grads.strides, False, grads.table == 0)
    return found is not None and found.major == "k" and out_dtype in (dtype, torch.float32)
