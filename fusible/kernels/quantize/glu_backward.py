"""The backward of an activation, quantized for FP8 products while it is computed.

``quantize_glu_backward`` is `Glu.backward` and `quantize_k_major` in one pass: the gradient of the
pre-activation is written in FP8 alone, row-wise and transposed. Where a scale covers a whole group,
that pass writes BF16 and finds the largest magnitudes, and a second one quantizes. The op's
definition is the two of them, on any device.
"""

from __future__ import annotations

from functools import lru_cache
from types import NotImplementedType
from typing import NamedTuple

import torch
from torch import Tensor

from fusible.kernels.glu import Glu
from fusible.kernels.quantize import k_major
from fusible.kernels.quantize.cuda import supports_matrix
from fusible.kernels.quantize.k_major import KMajorOperands, RowsToQuantize
from fusible.kernels.quantize.spec import GluBackwardSpec, QuantizeSpec
from fusible.kernels.runtime.gpu import PTX_NAMES
from fusible.kernels.runtime.launch import aligned, launch
from fusible.library import define
from fusible.recipes.blocks import with_zero_tail
from fusible.recipes.formats import FP8_BLOCK, NumberFormat

_THREAD_COLUMNS = 8  # columns of a thread
_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""`k_major.KMajorPieces`, the gradient of the scales, and the values."""


class _Inputs(NamedTuple):
    """The inputs of the backward; see `quantize_glu_backward`."""

    dy: Tensor
    preact: Tensor
    scales: Tensor | None
    ends: Tensor


class GluGradients(NamedTuple):
    """The results of the backward of an activation."""

    operands: KMajorOperands
    """The pre-activation's gradient ``[rows, columns]``, rounded to BF16, then quantized."""
    scales: Tensor
    """``[rows]``, in the dtype of the scales; none without these."""
    values: Tensor | None
    """The pre-activation's gradient in BF16, if requested."""


def quantize_glu_backward(
    dy: Tensor,
    preact: Tensor,
    scales: Tensor | None,
    ends: Tensor,
    glu: Glu,
    fmt: NumberFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    values: bool = False,
) -> GluGradients:
    """Gradients of ``glu(preact) * scales``, that of ``preact`` for FP8 products.

    ``dy`` is ``[rows, features]``, ``preact`` ``[rows, features]``, or ``[rows, 2 * features]`` of
    a gated activation, both BF16, ``scales`` ``[rows]`` or None, ``ends`` the end rows of the
    groups, ``fmt`` of 1x128 blocks or of whole matrices. Raises what `quantize_k_major` raises, and
    ValueError for other shapes.
    """
    rows, columns = preact.shape
    of_scales = (rows,) if scales is None else tuple(scales.shape)
    if dy.shape != (rows, columns // glu.sides) or of_scales != (rows,):
        raise ValueError(
            f"dy must be ({rows}, {columns // glu.sides}) and scales ({rows},) for a "
            f"pre-activation of shape {tuple(preact.shape)}, got {tuple(dy.shape)} and {of_scales}"
        )
    uses = rowwise, columnwise
    results = _op(_Inputs(dy, preact, scales, ends), glu, fmt, *uses, values)
    operands = k_major.as_operands(results[:5], fmt, *uses, True)
    return GluGradients(operands, results[5], results[6] if values else None)


@torch.no_grad()
def _definition(
    inputs: _Inputs, glu: Glu, fmt: NumberFormat, rowwise: bool, columnwise: bool, values: bool
) -> _Results:
    """The definition of the op."""
    dy, preact, scales, ends = inputs
    dpreact, dscales = glu.backward(dy, preact, scales)
    dpreact = with_zero_tail(dpreact, ends)
    dscales = preact.new_empty(0) if dscales is None else with_zero_tail(dscales, ends)
    pieces = k_major.definition(RowsToQuantize(dpreact, ends), fmt, rowwise, columnwise)
    return *pieces, dscales, dpreact if values else dpreact.new_empty(0)


def _outputs(
    inputs: _Inputs, glu: Glu, fmt: NumberFormat, rowwise: bool, columnwise: bool, values: bool
) -> _Results:
    """Allocate what the op returns."""
    _, preact, scales, ends = inputs
    pieces = k_major.outputs(RowsToQuantize(preact, ends), fmt, rowwise, columnwise)
    dpreact = preact.new_empty(preact.shape if values else (0,))
    dscales = preact.new_empty(0) if scales is None else torch.empty_like(scales)
    return *pieces, dscales, dpreact


def _cuda(
    inputs: _Inputs, glu: Glu, fmt: NumberFormat, rowwise: bool, columnwise: bool, values: bool
) -> _Results | NotImplementedType:
    dy, preact, scales, ends = inputs
    k_major.check(RowsToQuantize(preact, ends), fmt)
    stripe = glu.interleave or preact.shape[1] // glu.sides
    fits = (
        dy.dtype == preact.dtype == torch.bfloat16
        and (fmt.directional or fmt.block is None)
        and (stripe in (1, 2, 4) or stripe % _THREAD_COLUMNS == 0)
        and supports_matrix(preact, preact.dtype, ends)
    )
    if not fits:
        return NotImplemented
    inputs = _Inputs(aligned(dy), aligned(preact), scales, ends)
    if fmt.block is not None:
        return _launch(inputs, glu, fmt, (rowwise, columnwise), values)
    amax = preact.new_zeros(len(ends), dtype=torch.int32)
    results = _launch(inputs, glu, fmt, (False, False), True, amax)
    pieces, dscales, dpreact = results[:5], results[5], results[6]
    if rowwise or columnwise:
        rounded = RowsToQuantize(dpreact, ends)
        pieces = k_major.launch_quantize(rounded, fmt, rowwise, columnwise, amax)
    return *pieces, dscales, dpreact if values else preact.new_empty(0)


def _launch(
    inputs: _Inputs,
    glu: Glu,
    fmt: NumberFormat,
    uses: tuple[bool, bool],
    values: bool,
    amax: Tensor | None = None,
) -> _Results:
    """The kernel, of aligned operands; with ``amax`` it finds the groups' largest magnitudes.

    ``uses`` are whether it quantizes row-wise and column-wise.
    """
    dy, preact, scales, ends = inputs
    rows, columns = preact.shape
    pieces = k_major.outputs(RowsToQuantize(preact, ends), fmt, *uses)
    dpreact = preact.new_empty(preact.shape if values else (0,))
    stripe = glu.interleave or columns // glu.sides
    paired = glu.sides == 2 and stripe % FP8_BLOCK == 0
    blocks, dscales = -(-columns // FP8_BLOCK) >> paired, preact.new_empty(0)
    of_rows = dscales if scales is None else scales.float().contiguous()
    partials = preact.new_empty(0 if scales is None else blocks, rows, dtype=torch.float32)
    which = glu.activation, scales is not None, stripe, values, paired
    constants = _kernel(fmt, ends.dtype, *uses, *which)
    sizes = rows, columns, len(ends), pieces[2].shape[-1], stripe
    addresses = dy, preact, of_rows, ends, amax, *pieces, partials, dpreact
    launch("quantize.glu_backward.quantize", constants, dy.device, *addresses, *sizes, *glu[2:])
    if scales is not None:
        dscales = partials.sum(0).to(scales.dtype)
    return *pieces, dscales, dpreact


@lru_cache(maxsize=1024)
def _kernel(
    fmt: NumberFormat,
    ends: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    activation: str,
    scaled: bool,
    stripe: int,
    values: bool,
    paired: bool,
) -> tuple[GluBackwardSpec]:
    wide, dtype = ends == torch.int64, PTX_NAMES[torch.bfloat16]
    quantize = QuantizeSpec(fmt, dtype, True, wide, rowwise, columnwise, k_major=True)
    narrow = stripe if stripe < _THREAD_COLUMNS else 0
    return (GluBackwardSpec(quantize, activation, scaled, narrow, values, paired),)


_op = define(_definition, _outputs, [_cuda], name="quantize_glu_backward")
