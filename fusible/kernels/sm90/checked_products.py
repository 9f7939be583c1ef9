"""The grouped products on SM90, of operands in any layout: checked, or copied where TMA needs it.

The functions are those of `fusible.kernels.grouped.definitions`, and return NotImplemented for
what no kernel supports. None synchronises with the host. Each calls the `WeightProducts` of its
operands' layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NotImplementedType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.kernels.glu import Glu
from fusible.kernels.sm90 import limits, tiles
from fusible.kernels.sm90.grouped_products import TENSOR_TYPES, WeightProducts, cached_products
from fusible.kernels.sm90.launch import launch_group_ends
from fusible.kernels.sm90.operands import (
    Matrices,
    as_matrix,
    as_vector,
    check_ends,
    check_matrices,
    check_tensor,
    layout,
    matrices_of,
    supports,
)
from fusible.kernels.stacking import write


def group_ends(split_sizes: Tensor, rows: int) -> Tensor | NotImplementedType:
    """The end row of each group, int32 ``[E]``, at most ``rows``; negative sizes count as 0."""
    integers = split_sizes.dtype in (torch.int64, torch.int32) and split_sizes.ndim == 1
    if not (integers and supports(split_sizes.device, torch.bfloat16)):
        return NotImplemented
    ends = torch.empty(split_sizes.shape, dtype=torch.int32, device=split_sizes.device)
    launch_group_ends(split_sizes.contiguous(), ends, rows)
    return ends


class _Operands(NamedTuple):
    """Checked rows and weights, and the launches of their products."""

    x: Tensor
    pitch: int
    w: Sequence[Tensor]
    """The tensors behind the addresses."""
    shape: tuple[int, ...]
    """``(groups, N, K)``."""
    address: int
    table: int
    products: WeightProducts


def _operands(
    name: str, x: Tensor, w: Sequence[Tensor], ends: Tensor, transpose: bool
) -> _Operands | None:
    """Checked operands and the launches of their products; None if no kernel supports them."""
    if any([type(t) not in TENSOR_TYPES for t in w]):
        return None
    products, matrices = None, None
    if len(w) == 1 or (w and supports(x.device, x.dtype, *w[0].shape[-2:])):
        matrices = matrices_of(w)
    if matrices is not None and w[0].dtype == x.dtype and w[0].device == x.device:
        products = _products(x, matrices)
    if products is None:
        if w and not supports(x.device, x.dtype, *w[0].shape[-2:]):
            return None
        w, matrices = _copied(name, x, w)
        products = _products(x, matrices)
    assert products is not None
    assert matrices is not None
    x, pitch = as_matrix(name, x)
    address, shape, _, pointers = matrices
    groups, *features = shape
    if x.shape[1] != features[not transpose]:
        raise ValueError(
            f"{name} and w must share the reduced dimension, got {x.shape[1]} and "
            f"{features[not transpose]}"
        )
    check_ends(ends, groups, x.device)
    table = 0 if pointers is None else matrices.table(x.device)
    return _Operands(x, pitch, w, shape, address, table, products)


def _copied(name: str, x: Tensor, w: Sequence[Tensor]) -> tuple[Sequence[Tensor], Matrices]:
    """A copy of checked weights as one tensor ``[E, N, K]``, which TMA reads, and its layout."""
    check_matrices("w", w, x)
    if w[0].dtype != x.dtype:
        raise ValueError(f"w must have {name}'s dtype {x.dtype}, got {w[0].dtype}")
    one = w[0].clone(memory_format=torch.contiguous_format) if len(w) == 1 else torch.stack([*w])
    one = one.view(-1, *one.shape[-2:])
    return [one], Matrices(one.data_ptr(), one.shape, one.stride())


def _products(x: Tensor, matrices: Matrices) -> WeightProducts | None:
    _, shape, strides, pointers = matrices
    many = tiles.has_many_rows(x.shape[0], shape[0])
    return cached_products(x.device, x.dtype, shape, strides, pointers is not None, many)


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
) -> Tensor | NotImplementedType:
    """`definitions.grouped_mm`, in ``out`` if given."""
    found = _operands("x", x, w, ends, transpose_w)
    if found is None:
        return NotImplemented
    x, pitch, w, (groups, *features), address, table, products = found
    shape = x.shape[0], features[transpose_w]
    if bias is not None:
        check_tensor("bias", bias, (groups, shape[1]), x)
        bias = bias.contiguous()
        row_scale = None if row_scale is None else as_vector("row_scale", row_scale, x)
    if out is not None:
        check_tensor("out", out, shape, x)
    fits = out is not None and out.is_contiguous() and out.data_ptr() % limits.ALIGNMENT_BYTES == 0
    y = out if fits else None
    y = products.forward(x, address, ends, bias, row_scale, y, transpose_w, table, pitch)
    return y if out is None or fits else out.copy_(y)


def grouped_mm_(out: Tensor, x: Tensor, *rest: Any) -> NotImplementedType | None:
    """`definitions.grouped_mm_`."""
    return None if grouped_mm(x, *rest, out=out) is not NotImplemented else NotImplemented


def grouped_glu(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    scales: Tensor | None,
    glu: Glu,
    bias: Tensor | None = None,
    save_preact: bool = True,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor] | NotImplementedType:
    """`definitions.grouped_glu`."""
    found = _operands("x", x, w, ends, False)
    if found is None or not limits.takes_glu(*glu[:2], found.shape[1]):
        return NotImplemented
    x, pitch, w, shape, address, table, products = found
    scales = None if scales is None else as_vector("scales", scales, x)
    if bias is not None:
        check_tensor("bias", bias, shape[:2], x)
        bias = bias.contiguous()
    return products.glu(x, address, ends, scales, glu, bias, save_preact, table, pitch)


def grouped_dglu(
    dy: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    preact: Tensor,
    scales: Tensor,
    glu: Glu,
    dy_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    *,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor] | NotImplementedType:
    """`definitions.grouped_dglu`."""
    found = _operands("dy", dy, w, ends, True)
    if found is None or not limits.takes_glu(*glu[:2], 2 * found.shape[2]):
        return NotImplemented
    dy, pitch, w, shape, address, table, products = found
    check_tensor("preact", preact, (dy.shape[0], 2 * shape[2]), dy)
    preact, preact_pitch = as_matrix("preact", preact)
    scales = as_vector("scales", scales, dy)
    overwrite = overwrite and preact_pitch == 0
    return products.dglu(
        dy, address, ends, preact, scales, glu, overwrite, table, pitch, preact_pitch
    )


def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype | None = None,
    dy_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> Tensor | NotImplementedType:
    """`definitions.grouped_wgrad`."""
    groups, dtype = ends.shape[0], out_dtype or x.dtype
    if dtype == x.dtype and x.shape[0]:
        found = _gradient_operands(dy, x, ends, groups)
        if found is None:
            return NotImplemented
        dy, x, products, pitches = found
        return products.wgrad(dy, x, ends, pitches=pitches)  # type: ignore[return-value]
    shape = groups, dy.shape[1], x.shape[1]
    out = x.new_empty(shape, dtype=dtype if dtype == x.dtype else torch.float32)
    made = grouped_wgrad_([out], dy, x, ends)
    return out.to(dtype) if made is not NotImplemented else made


def _gradient_operands(
    dy: Tensor, x: Tensor, ends: Tensor, groups: int
) -> tuple[Tensor, Tensor, WeightProducts, tuple[int, int]] | None:
    """``dy`` and ``x`` as TMA reads them, the launches of their products, and the row pitches.

    None if no kernel supports them.
    """
    shape = groups, dy.shape[1], x.shape[1]
    # Of the weight, only its shape matters here.
    products = _products(x, Matrices(0, shape, (shape[1] * shape[2], shape[2], 1)))
    if products is None:
        return None
    (dy, dy_pitch), (x, x_pitch) = as_matrix("dy", dy), as_matrix("x", x)
    if dy.dtype != x.dtype or dy.shape[0] != x.shape[0] or dy.device != x.device:
        raise ValueError(
            f"dy and x must share dtype, rows and device, got {dy.dtype} of {tuple(dy.shape)} on "
            f"{dy.device} and {x.dtype} of {tuple(x.shape)} on {x.device}"
        )
    check_ends(ends, groups, x.device)
    return dy, x, products, (dy_pitch, x_pitch)


def grouped_wgrad_(
    out: Sequence[Tensor],
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    accumulate: bool = False,
    dy_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> NotImplementedType | None:
    """`definitions.grouped_wgrad_`."""
    groups = out[0].shape[0] if len(out) == 1 and out[0].dim() == 3 else len(out)
    found = _gradient_operands(dy, x, ends, groups)
    if found is None:
        return NotImplemented
    dy, x, products, pitches = found
    grads, shape = matrices_of(out), (dy.shape[1], x.shape[1])
    if grads is None or out[0].device != x.device:
        check_matrices("out", out, x)
    if out[0].shape[-2:] != shape:
        raise ValueError(f"out must hold matrices of shape {shape}, got {tuple(out[0].shape)}")
    if x.shape[0] == 0:
        for one in () if accumulate else out:
            one.zero_()
    elif grads is None or not _is_writable(grads, out[0].dtype, x.dtype):
        write(out, grouped_wgrad(dy, x, ends, torch.float32), accumulate)
    else:
        products.wgrad(dy, x, ends, grads, out[0].dtype, accumulate, pitches)
    return None


def _is_writable(grads: Matrices, out_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a weight gradient of operands in ``dtype`` can be written to ``grads``."""
    found = layout(grads.shape, grads.strides, False, grads.pointers is None)
    return found is not None and found.major == "k" and out_dtype in (dtype, torch.float32)
