"""The grouped products on SM90, of operands in any layout: checked, or copied where TMA needs it.

The functions are those of `fusible.kernels.grouped.definitions`, and return NotImplemented for
what no kernel supports. None synchronises with the host. Each calls the `WeightProducts` of its
operands' layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NotImplementedType
from typing import NamedTuple

import torch
from torch import Tensor

from fusible.activations import ACTIVATIONS, GATED
from fusible.kernels.glu import Glu
from fusible.kernels.grouped.groups import checks_enabled
from fusible.kernels.grouped.vectors import launch_group_ends
from fusible.kernels.runtime.launch import TENSOR_TYPES, aligned
from fusible.kernels.sm90 import limits, tiles
from fusible.kernels.sm90.gemm_launch import NO_SCALES, OperandScales
from fusible.kernels.sm90.grouped_products import WeightProducts, cached_products
from fusible.kernels.sm90.operands import (
    Matrices,
    as_matrix,
    as_vector,
    check_ends,
    check_matrices,
    check_tensor,
    is_fp8,
    layout,
    matrices_of,
    supports,
)
from fusible.kernels.stacking import write
from fusible.recipes.formats import FP8_BLOCK, NumberFormat, value_dtype


def group_ends(split_sizes: Tensor, rows: int) -> Tensor | NotImplementedType:
    """`groups.group_ends`, but under `checking`."""
    integers = split_sizes.dtype in (torch.int64, torch.int32) and split_sizes.ndim == 1
    if checks_enabled() or not (integers and supports(split_sizes.device, torch.bfloat16)):
        return NotImplemented
    return launch_group_ends(split_sizes.contiguous(), rows)


class _Operands(NamedTuple):
    """Checked rows and weights, and the launches of their products."""

    x: Tensor
    pitch: int
    w: Sequence[Tensor]
    """The tensors behind the addresses."""
    shape: tuple[int, ...]
    """``(groups, N, K)``."""
    address: int
    table: Tensor | None
    products: WeightProducts
    scales: OperandScales = NO_SCALES


def _operands(
    name: str,
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    transpose: bool,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
) -> _Operands | None:
    """Checked operands and the launches of their products; None if no kernel supports them.

    FP8 operands have scales, and must not be transposed.
    """
    if x_scale is not None and w_scale is not None:
        return None if transpose else _scaled_operands(name, x, w, ends, x_scale, w_scale)
    if is_fp8(x.dtype) or any([type(t) not in TENSOR_TYPES for t in w]):
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
    address, shape, *_ = matrices
    groups, *features = shape
    if x.shape[1] != features[not transpose]:
        raise ValueError(
            f"{name} and w must share the reduced dimension, got {x.shape[1]} and "
            f"{features[not transpose]}"
        )
    check_ends(ends, groups, x.device)
    return _Operands(x, pitch, w, shape, address, matrices.table(x.device), products)


def _scaled_operands(
    name: str, x: Tensor, w: Sequence[Tensor], ends: Tensor, x_scale: Tensor, w_scale: Tensor
) -> _Operands | None:
    """The same of FP8 operands."""
    weight = w[0]
    if len(w) != 1 or weight.dim() != 3 or not (is_fp8(x.dtype) and is_fp8(weight.dtype)):
        return None
    groups, columns, depth = shape = weight.shape
    if not supports(x.device, x.dtype, columns, depth):
        return None
    if groups == 0 or weight.device != x.device:
        check_matrices("w", w, x)
    x, weight = aligned(x), aligned(weight)
    rows, *features = x.shape
    if features != [depth]:
        raise ValueError(f"{name} must have shape [rows, {depth}], got {tuple(x.shape)}")
    blocks = _blocks(columns), _blocks(depth)
    check_tensor(f"{name}_scale", x_scale, (rows, blocks[1]), torch.float32, x.device)
    check_tensor("w_scale", w_scale, (groups, *blocks), torch.float32, x.device)
    check_ends(ends, groups, x.device)
    for_rows, layout_of = tiles.rows_bucket(rows, groups), (shape, weight.stride(), False)
    products = cached_products(x.device, x.dtype, *layout_of, for_rows, weight.dtype)
    assert products is not None
    addresses = x_scale.data_ptr(), w_scale.data_ptr()
    scales = OperandScales(*addresses, *x_scale.stride(), *w_scale.stride())
    w = w if weight is w[0] else [weight]  # `grouped_mm` tells a copy by the list
    return _Operands(x, 0, w, shape, weight.data_ptr(), None, products, scales)


def _column_major(t: Tensor) -> Tensor:
    """A matrix, or a copy, whose columns are contiguous and begin aligned."""
    rows, columns = t.shape
    fits = t.stride() == (1, rows) and t.data_ptr() % limits.ALIGNMENT_BYTES == 0
    return t if fits and columns > 1 else aligned(t.mT).mT


def _blocks(size: int) -> int:
    return -(-size // FP8_BLOCK)


def _copied(name: str, x: Tensor, w: Sequence[Tensor]) -> tuple[Sequence[Tensor], Matrices]:
    """A copy of checked weights as one tensor ``[E, N, K]``, which TMA reads, and its layout."""
    check_matrices("w", w, x)
    if w[0].dtype != x.dtype:
        raise ValueError(f"w must have {name}'s dtype {x.dtype}, got {w[0].dtype}")
    one = w[0].clone(memory_format=torch.contiguous_format) if len(w) == 1 else torch.stack([*w])
    one = one.view(-1, *one.shape[-2:])
    return [one], Matrices(one.data_ptr(), one.shape, one.stride())


def _products(
    a: Tensor, matrices: Matrices, b_dtype: torch.dtype | None = None
) -> WeightProducts | None:
    """The launches for rows ``a``; ``b_dtype`` is the second operand's if they are FP8."""
    _, shape, strides, pointers = matrices
    rows = tiles.rows_bucket(a.shape[0], shape[0])
    return cached_products(a.device, a.dtype, shape, strides, pointers is not None, rows, b_dtype)


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
    operands = _operands("x", x, w, ends, transpose_w, x_scale, w_scale)
    if operands is None:
        return NotImplemented
    x, pitch, weights, (groups, *features), address, table, products, scales = operands
    reads_ahead = reads_ahead and weights is w  # not a copy, which has just been written
    shape, dtype = (x.shape[0], features[transpose_w]), products.value_dtype
    if bias is not None:
        check_tensor("bias", bias, (groups, shape[1]), dtype, x.device)
        bias = bias.contiguous()
        row_scale = None if row_scale is None else as_vector("row_scale", row_scale, x)
    if out is not None:
        check_tensor("out", out, shape, dtype, x.device)
        if not out.is_contiguous() or out.data_ptr() % limits.ALIGNMENT_BYTES:
            out = None
    return products.forward(
        x, address, ends, bias, row_scale, out, transpose_w, table, pitch, scales, zero_tail,
        reads_ahead=reads_ahead,
    )  # fmt: skip


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
    fmt: NumberFormat | None = None,
    quantize_preact: bool = False,
    *,
    zero_tail: bool = True,
) -> tuple[Tensor, ...] | NotImplementedType:
    """`definitions.grouped_glu`; with ``fmt`` `definitions.grouped_glu_quantized`."""
    unit = limits.MULTIPLE_OF
    if fmt is not None:
        of_blocks = fmt.scaling == limits.FP8_SCALING["input"][0]
        if not (of_blocks and limits.quantizes_activation(glu.activation, bias is not None)):
            return NotImplemented
        if quantize_preact and not glu.separates_blocks(w[0].shape[-2]):
            return NotImplemented
        unit = limits.FP8_MULTIPLE_OF  # threads store 16 quantized elements at once
    operands = _operands("x", x, w, ends, False, x_scale, w_scale)
    if x_scale is not None and glu.interleave == 0 and glu.activation in GATED:
        unit = limits.FP8_GLU_UNIT
    if operands is None or not limits.supports_activation(*glu[:2], operands.shape[1], unit):
        return NotImplemented
    x, pitch, w, shape, address, table, products, operand_scales = operands
    scales = None if scales is None else as_vector("scales", scales, x)
    if bias is not None:
        check_tensor("bias", bias, shape[:2], products.value_dtype, x.device)
        bias = bias.contiguous()
    rows, features = x.shape[0], shape[1] // glu.sides
    out: tuple[int, int] = (0, 0)
    if fmt is not None:
        quantized = x.new_empty(rows, features, dtype=fmt.element.dtype)
        act_scales = x.new_empty(-(-features // FP8_BLOCK), rows, dtype=torch.float32)
        out = quantized.data_ptr(), act_scales.data_ptr()
    preact, act, preact_scales = products.glu(
        x, address, ends, scales, glu, bias, save_preact, table, pitch, operand_scales, zero_tail,
        fmt, quantize_preact, out,
    )  # fmt: skip
    if fmt is None:
        return preact, act
    preact_scales = act_scales.new_empty(0) if preact_scales is None else preact_scales
    return preact, quantized, act_scales, preact_scales


def grouped_dglu(
    dy: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    preact: Tensor,
    scales: Tensor | None,
    glu: Glu,
    *,
    overwrite: bool = False,
    zero_tail: bool = True,
) -> tuple[Tensor, Tensor, Tensor] | NotImplementedType:
    """`definitions.grouped_dglu`."""
    operands = _operands("dy", dy, w, ends, True)
    if operands is None:
        return NotImplemented
    dy, pitch, w, shape, address, table, products, *_ = operands
    row = ACTIVATIONS.get(glu.activation)
    columns = 0 if row is None else row.sides * shape[2]
    if not limits.supports_activation(*glu[:2], columns):
        return NotImplemented
    check_tensor("preact", preact, (dy.shape[0], columns), dy.dtype, dy.device)
    preact, preact_pitch = as_matrix("preact", preact)
    scales = None if scales is None else as_vector("scales", scales, dy)
    overwrite = overwrite and preact_pitch == 0
    return products.dglu(
        dy, address, ends, preact, scales, glu, overwrite, table, pitch, preact_pitch, zero_tail
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
    groups, nominal = ends.shape[0], value_dtype(x.dtype)
    dtype = out_dtype or nominal
    if dtype == nominal and x.shape[0]:
        operands = _gradient_operands(dy, x, ends, groups, dy_scale, x_scale)
        if operands is None:
            return NotImplemented
        dy, x, products, pitches, scales, _ = operands
        # Without `out` there is a result.
        return products.wgrad(dy, x, ends, pitches=pitches, operand_scales=scales)  # type: ignore[return-value]
    shape = groups, dy.shape[1], x.shape[1]
    out = x.new_empty(shape, dtype=dtype if dtype == nominal else torch.float32)
    result = grouped_wgrad_([out], dy, x, ends, False, dy_scale, x_scale)
    return out.to(dtype) if result is not NotImplemented else result


class _GradientOperands(NamedTuple):
    """The operands of a weight gradient, as TMA reads them, and the launches of the products."""

    dy: Tensor
    x: Tensor
    products: WeightProducts
    pitches: tuple[int, int] = (0, 0)
    scales: OperandScales = NO_SCALES
    scale_tensors: tuple[Tensor, ...] = ()
    """The tensors behind the addresses of the scales, which may be copies; never read, but kept
    until the launch."""


def _gradient_operands(
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    groups: int,
    dy_scale: Tensor | None,
    x_scale: Tensor | None,
) -> _GradientOperands | None:
    """The operands of a weight gradient; None if no kernel supports them."""
    shape = groups, dy.shape[1], x.shape[1]
    scaled = dy_scale is not None and x_scale is not None
    if scaled != is_fp8(x.dtype) or (scaled and not is_fp8(dy.dtype)):
        return None
    # Of the weight, only its shape matters here.
    matrices = Matrices(0, shape, (shape[1] * shape[2], shape[2], 1))
    products = _products(dy if scaled else x, matrices, x.dtype if scaled else None)
    if products is None:
        return None
    if dy.shape[0] != x.shape[0] or dy.device != x.device or (dy.dtype != x.dtype and not scaled):
        raise ValueError(
            f"dy and x must share dtype, rows and device, got {dy.dtype} of {tuple(dy.shape)} on "
            f"{dy.device} and {x.dtype} of {tuple(x.shape)} on {x.device}"
        )
    check_ends(ends, groups, x.device)
    if not scaled:
        (dy, dy_pitch), (x, x_pitch) = as_matrix("dy", dy), as_matrix("x", x)
        return _GradientOperands(dy, x, products, (dy_pitch, x_pitch))
    assert dy_scale is not None
    assert x_scale is not None
    if x.shape[0] % FP8_BLOCK:
        raise ValueError(
            f"FP8 operands of a weight gradient must have a multiple of {FP8_BLOCK} rows, got "
            f"{x.shape[0]}; pad every group with zeros"
        )
    blocks = x.shape[0] // FP8_BLOCK
    check_tensor("dy_scale", dy_scale, (blocks, shape[1]), torch.float32, x.device)
    check_tensor("x_scale", x_scale, (blocks, shape[2]), torch.float32, x.device)
    dy, x = _column_major(dy), _column_major(x)
    if x_scale.stride(1):  # TMA reads one for each column
        x_scale = aligned(x_scale)
    (a_block, a_pitch), (b_block, b_pitch) = dy_scale.stride(), x_scale.stride()
    addresses = dy_scale.data_ptr(), x_scale.data_ptr()
    scales = OperandScales(*addresses, a_pitch, a_block, 0, b_pitch, b_block)
    return _GradientOperands(dy, x, products, (0, 0), scales, (dy_scale, x_scale))


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
    operands = _gradient_operands(dy, x, ends, groups, dy_scale, x_scale)
    if operands is None:
        return NotImplemented
    original = dy, x, ends
    dy, x, products, pitches, scales, _ = operands
    grads, shape = matrices_of(out), (dy.shape[1], x.shape[1])
    if grads is None or out[0].device != x.device:
        check_matrices("out", out, x)
    if out[0].shape[-2:] != shape:
        raise ValueError(f"out must hold matrices of shape {shape}, got {tuple(out[0].shape)}")
    if x.shape[0] == 0:
        for one in () if accumulate else out:
            one.zero_()
    elif grads is None or not _is_writable(grads, out[0].dtype, products.value_dtype):
        result = grouped_wgrad(*original, torch.float32, dy_scale, x_scale)
        write(out, result, accumulate)
    else:
        products.wgrad(dy, x, ends, grads, out[0].dtype, accumulate, pitches, scales)
    return None


def _is_writable(grads: Matrices, out_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a weight gradient of operands in ``dtype`` can be written to ``grads``."""
    of_grads = layout(grads.shape, grads.strides, False, grads.pointers is None)
    return of_grads is not None and of_grads.major == "k" and out_dtype in (dtype, torch.float32)
