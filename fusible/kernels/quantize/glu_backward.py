"""The backward of an activation, quantized for FP8 products while it is computed.

``quantize_glu_backward`` is `Glu.backward` and `quantize_k_major` in one pass: the gradient of the
pre-activation is written in FP8 alone, row-wise and transposed. Where a scale covers a whole group,
that pass writes BF16 and finds the largest magnitudes, and a second one quantizes. The op's
definition is the two of them, on any device.

It can also give the activation for the product that reduces the rows, so that the forward need not
save it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import NotImplementedType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.kernels.glu import Glu
from fusible.kernels.grouped.vectors import launch_tile_sums
from fusible.kernels.quantize import k_major
from fusible.kernels.quantize.cuda import supports_matrix
from fusible.kernels.quantize.k_major import (
    KMajorOperands,
    RowsToQuantize,
    ScaledMatrix,
    elements_and_scale,
)
from fusible.kernels.quantize.saved_input import input_values
from fusible.kernels.quantize.spec import GluBackwardSpec, QuantizeSpec
from fusible.kernels.runtime.gpu import PTX_NAMES
from fusible.kernels.runtime.launch import aligned, launch
from fusible.library import define
from fusible.recipes.blocks import padded_size, with_zero_tail
from fusible.recipes.formats import BLOCKS, FP8_BLOCK, SAVED_INPUT, NumberFormat

_THREAD_COLUMNS = 8  # columns of a thread


class GluBackwardInputs(NamedTuple):
    """The inputs of the backward; see `quantize_glu_backward`."""

    dy: Tensor
    preact: Tensor
    scales: Tensor | None
    ends: Tensor
    preact_scale: Tensor | None = None
    """Of a quantized pre-activation, ``[ceil(columns / 128), rows]``."""

    def decoded(self) -> GluBackwardInputs:
        """The inputs with the pre-activation in the dtype of ``dy``."""
        if self.preact_scale is None:
            return self
        saved = ScaledMatrix(self.preact, self.preact_scale.t())
        return self._replace(preact=input_values(saved, self.dy.dtype), preact_scale=None)


class GluBackwardOptions(NamedTuple):
    """What stays the same for all inputs, and what is computed besides the gradient of scales."""

    glu: Glu
    format: NumberFormat
    act_format: NumberFormat
    """Any, without ``activation``."""
    activation: bool
    rowwise: bool
    columnwise: bool
    values: bool


class GluBackwardPieces(NamedTuple):
    """The op's outputs in their memory layout; empty where not requested.

    The first five are `k_major.KMajorPieces` of the pre-activation's gradient.
    """

    row: Tensor
    row_scale: Tensor
    column: Tensor
    column_scale: Tensor
    ends: Tensor
    dscales: Tensor
    dpreact: Tensor
    """In BF16."""
    act: Tensor
    """The activation for column-wise use, with its scales."""
    act_scale: Tensor


class GluGradients(NamedTuple):
    """The results of the backward of an activation."""

    operands: KMajorOperands
    """The pre-activation's gradient ``[rows, columns]``, rounded to BF16, then quantized."""
    scales: Tensor
    """``[rows]``, in the dtype of the scales; without rows if there are no scales."""
    values: Tensor | None
    """The pre-activation's gradient in BF16, if requested."""
    activation: Any
    """``glu(preact) * scales``, rounded to BF16, then quantized column-wise, if requested; see
    `KMajorOperands.column`. Its ends are those of the gradient, and need not be written."""


def quantize_glu_backward(
    dy: Tensor,
    preact: Tensor | ScaledMatrix,
    scales: Tensor | None,
    ends: Tensor,
    glu: Glu,
    fmt: NumberFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    values: bool = False,
    act_format: NumberFormat | None = None,
) -> GluGradients:
    """Gradients of ``glu(preact) * scales``, that of ``preact`` for FP8 products.

    ``dy`` is ``[rows, features]``, ``preact`` ``[rows, features]``, or ``[rows, 2 * features]`` of
    a gated activation, both BF16, or ``preact`` rows quantized in the format `SAVED_INPUT`;
    ``scales`` ``[rows]`` or None, ``ends`` the end rows of the groups, ``fmt`` of 1x128 blocks or
    of whole matrices, and so is ``act_format``, that of the activation ``glu(preact) * scales`` if
    it is requested, column-wise. Raises what `quantize_k_major` raises, and ValueError for other
    shapes.
    """
    preact, preact_scale = elements_and_scale(preact)
    rows, columns = preact.shape
    of_scales = (rows,) if scales is None else tuple(scales.shape)
    if dy.shape != (rows, columns // glu.sides) or of_scales != (rows,):
        raise ValueError(
            f"dy must be ({rows}, {columns // glu.sides}) and scales ({rows},) for a "
            f"pre-activation of shape {tuple(preact.shape)}, got {tuple(dy.shape)} and {of_scales}"
        )
    stored_scale = None if preact_scale is None else preact_scale.t()
    inputs = GluBackwardInputs(dy, preact, scales, ends, stored_scale)
    wanted = act_format is not None, rowwise, columnwise, values
    return glu_gradients(inputs, GluBackwardOptions(glu, fmt, act_format or fmt, *wanted))


def glu_gradients(inputs: GluBackwardInputs, options: GluBackwardOptions) -> GluGradients:
    """`quantize_glu_backward` by the op."""
    _, fmt, act_format, activation, rowwise, columnwise, values = options
    made = GluBackwardPieces(*glu_backward_pieces(inputs, *options))
    operands = k_major.as_operands(made[:5], fmt, rowwise, columnwise, True)
    act = None
    if activation:
        act = k_major.column_matrix(made.act, made.act_scale, made.ends, act_format)
    return GluGradients(operands, made.dscales, made.dpreact if values else None, act)


def writes_activation(glu: Glu, columns: int, *formats: NumberFormat) -> bool:
    """Whether the kernel can quantize the activation too, given the formats of both results.

    Both must be of 1x128 blocks, and gate and linear columns, of ``columns``, in stripes of whole
    blocks. Otherwise the definition runs if the activation is requested.
    """
    return glu.separates_blocks(columns) and all([fmt.block == BLOCKS[0] for fmt in formats])


@torch.no_grad()
def glu_backward_definition(
    inputs: GluBackwardInputs,
    glu: Glu,
    fmt: NumberFormat,
    act_format: NumberFormat,
    activation: bool,
    rowwise: bool,
    columnwise: bool,
    values: bool,
) -> GluBackwardPieces:
    """The definition of the op."""
    dy, preact, scales, ends, _ = inputs.decoded()
    dpreact, dscales = glu.backward(dy, preact, scales)
    dpreact = with_zero_tail(dpreact, ends)
    dscales = dy.new_empty(0) if dscales is None else with_zero_tail(dscales, ends)
    rounded = RowsToQuantize(dpreact, ends)
    pieces = k_major.definition(rounded, fmt, rowwise, columnwise)
    act = glu.forward(preact, scales) if activation else dy  # of the same shape
    of_act = k_major.definition(RowsToQuantize(act, ends), act_format, False, activation)
    dpreact = dpreact if values else dpreact.new_empty(0)
    return GluBackwardPieces(*pieces, dscales, dpreact, *of_act[2:4])


def _outputs(inputs: GluBackwardInputs, *options: Any) -> GluBackwardPieces:
    """Allocate what the op returns."""
    dy, preact, scales, ends, _ = inputs
    _, fmt, act_format, activation, rowwise, columnwise, values = options
    pieces = k_major.outputs(RowsToQuantize(preact, ends), fmt, rowwise, columnwise)
    dpreact = dy.new_empty(preact.shape if values else (0,))
    dscales = dy.new_empty(0) if scales is None else torch.empty_like(scales)
    act = dy.new_empty(0, dtype=act_format.element.dtype), dy.new_empty(0, dtype=torch.float32)
    if activation:  # of the shape of `dy`
        act = k_major.padded_columns(dy, dy.shape[1], dy.shape[0], ends.shape[0], act_format)
    return GluBackwardPieces(*pieces, dscales, dpreact, *act)


def _cuda(inputs: GluBackwardInputs, *constants: Any) -> GluBackwardPieces | NotImplementedType:
    dy, preact, scales, ends, preact_scale = inputs
    options = GluBackwardOptions(*constants)
    glu, fmt, act_format, activation, *_ = options
    columns = preact.shape[1]
    rows = RowsToQuantize(dy, ends)  # of the dtype of the gradient that is quantized
    k_major.check(rows, fmt)
    if activation:
        k_major.check(rows, act_format)
        if not writes_activation(glu, columns, fmt, act_format):
            return NotImplemented
    stripe = glu.stripe(columns)
    fits = (
        dy.dtype == torch.bfloat16
        and preact.dtype == (dy.dtype if preact_scale is None else SAVED_INPUT.element.dtype)
        and (fmt.directional or fmt.block is None)
        and (stripe in (1, 2, 4) or stripe % _THREAD_COLUMNS == 0)
        and supports_matrix(preact, dy.dtype, ends)
    )
    if not fits:
        return NotImplemented
    scale = None if preact_scale is None else preact_scale.contiguous()
    inputs = GluBackwardInputs(aligned(dy), aligned(preact), scales, ends, scale)
    made = _outputs(inputs, *options)
    values = made.dpreact if options.values else None
    of_act = made.act, made.act_scale
    return made._replace(dscales=_launch(inputs, options, made[:5], values, of_act))


def launch_glu_backward(inputs: GluBackwardInputs, options: GluBackwardOptions) -> GluGradients:
    """`quantize_glu_backward` by its kernels, of aligned operands that these support, unchecked."""
    dy, preact, _, ends, _ = inputs
    _, fmt, act_format, activation, rowwise, columnwise, writes_values = options
    rows = RowsToQuantize(preact, ends)
    operands, pieces = k_major.packed_outputs(rows, fmt, rowwise, columnwise)
    values = torch.empty_like(preact, dtype=dy.dtype) if writes_values else None
    rows = RowsToQuantize(dy, ends)  # of the shape of the activation
    (_, act), of_act = k_major.packed_outputs(rows, act_format, False, activation)
    dscales = _launch(inputs, options, pieces, values, of_act[2:4])
    return GluGradients(operands, dscales, values, act)


def _launch(
    inputs: GluBackwardInputs,
    options: GluBackwardOptions,
    gradient: Sequence[Tensor | int],
    values: Tensor | None,
    act: Sequence[Tensor | int],
) -> Tensor:
    """Write the results; gives the gradient of the scales.

    ``gradient`` are `KMajorPieces` of the pre-activation's gradient, ``act`` elements and scales of
    the activation's column-wise use: tensors, or addresses.
    """
    glu, fmt, _, _, rowwise, columnwise, _ = options
    columns = inputs.preact.shape[1]
    stripe, by_block = glu.stripe(columns), glu.separates_blocks(columns)
    # The kernel reads quantized pre-activations where a thread block has whole blocks of each side.
    if not by_block:
        inputs = inputs.decoded()
    dy, preact, scales, ends, preact_scale = inputs
    rows, groups, amax = preact.shape[0], len(ends), None
    if fmt.block is None:
        amax = preact.new_zeros(groups, dtype=torch.int32)
        if values is None:
            values = torch.empty_like(preact, dtype=dy.dtype)
    blocks = 0 if scales is None else -(-columns // FP8_BLOCK) >> (by_block and glu.sides == 2)
    of_rows = None if scales is None else scales.float().contiguous()
    partials = dy.new_empty(blocks * rows, dtype=torch.float32)
    constants = _kernel(options, columns, ends.dtype, scales is not None, preact_scale is not None)
    sizes = rows, columns, groups, padded_size(rows, groups, FP8_BLOCK), stripe
    addresses = dy, preact, preact_scale, of_rows, ends, amax, *gradient, partials, values, *act
    launch("quantize.glu_backward.quantize", constants, dy.device, *addresses, *sizes, *glu[2:])
    dscales = partials if scales is None else launch_tile_sums(partials, rows, scales.dtype)
    if values is not None and amax is not None and (rowwise or columnwise):
        rounded = RowsToQuantize(values, ends)
        k_major.launch_pieces(rounded, fmt, rowwise, columnwise, gradient, amax)
    return dscales


@lru_cache(maxsize=1024)
def _kernel(
    options: GluBackwardOptions,
    columns: int,
    ends: torch.dtype,
    scaled: bool,
    quantized_preact: bool,
) -> tuple[GluBackwardSpec]:
    """The kernel's constant; where a scale covers a whole group it writes high precision only."""
    glu, fmt, act_format, activation, rowwise, columnwise, values = options
    if fmt.block is None:
        activation, rowwise, columnwise, values = False, False, False, True
    wide, dtype = ends == torch.int64, PTX_NAMES[torch.bfloat16]
    quantize = QuantizeSpec(fmt, dtype, True, wide, rowwise, columnwise, k_major=True)
    stripe = glu.stripe(columns)
    both_sides = glu.sides == 2 and glu.separates_blocks(columns)
    narrow = stripe if stripe < _THREAD_COLUMNS else 0
    of_act = act_format if activation else None
    more = values, both_sides, of_act, quantized_preact
    return (GluBackwardSpec(quantize, glu.activation, scaled, narrow, *more),)


glu_backward_pieces = define(
    glu_backward_definition, _outputs, [_cuda], name="quantize_glu_backward"
)
