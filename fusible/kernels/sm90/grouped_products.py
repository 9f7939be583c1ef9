"""The SM90 grouped products with a weight of one layout: the only module that
constructs `Launch` objects.

Nothing here checks or copies an operand; `checked_products` does, for operands of any layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.kernels.glu import Glu
from fusible.kernels.grouped.vectors import launch_tile_sums
from fusible.kernels.quantize.k_major import PackedOperand
from fusible.kernels.runtime.gpu import multiprocessors
from fusible.kernels.runtime.launch import TENSOR_TYPES
from fusible.kernels.sm90 import limits, tiles
from fusible.kernels.sm90.gemm_launch import NO_SCALES, Launch, OperandScales
from fusible.kernels.sm90.operands import (
    DTYPE_NAMES,
    Matrices,
    is_fp8,
    is_row_scale,
    layout,
    supports,
)
from fusible.kernels.sm90.spec import BACKWARD, FORWARD, Spec, Tile, block_columns
from fusible.recipes.formats import FP8_BLOCK, SAVED_INPUT, NumberFormat, value_dtype


class WeightProducts:
    """The products with a weight ``[groups, N, K]``, of operands that are already checked.

    Rows are ``[rows, K]`` and ``[rows, N]``, contiguous unless their pitch is given, at least one;
    scales are contiguous, one for each. ``w`` is the weight's address, ``table`` holds those of its
    matrices if these are not evenly spaced. Each method is one launch, `dglu` with one more for its
    sums, and equals the function of `fusible.kernels.grouped` of that name.

    Args:
        device: of the weight.
        dtype: of all matrices; FP8 operands give BF16.
        shape: ``(groups, N, K)``.
        strides: in elements.
        separate: whether the matrices are behind a table.
        rows: for which the tiles are chosen: see `tiles.rows_bucket`.
        b_dtype: of FP8 weights, or of the second operand of a weight gradient, if another.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        separate: bool,
        rows: int,
        b_dtype: torch.dtype | None = None,
    ) -> None:
        self._device, self._separate = device, separate
        self._rows_bucket, self._multiprocessors = rows, multiprocessors(device)
        self._is_fp8 = is_fp8(dtype)
        # Of what is neither operand: outputs, biases, pre-activations.
        self.value_dtype = value_dtype(dtype)
        self._a_dtype = DTYPE_NAMES[dtype]
        self._b_dtype = DTYPE_NAMES[b_dtype or dtype] if self._is_fp8 else ""
        self._groups, self._columns, self._depth = shape
        self._layouts = [layout(shape, strides, turned, not separate) for turned in (False, True)]
        # One launch for each combination of arguments, as they are passed.
        self._rows_launch = functools.cache(self._make_rows_launch)
        self._wgrad_launch = functools.cache(self._make_wgrad_launch)

    def _make_rows_launch(
        self,
        kind: str,
        transpose: bool = False,
        bias: bool = False,
        scale: torch.dtype | None = None,
        glu: Glu | None = None,
        save_preact: bool = False,
        pitch: int = 0,
        preact_pitch: int = 0,
        out_format: NumberFormat | None = None,
        quantize_preact: bool = False,
        reads_ahead: bool = False,
    ) -> Launch:
        """The launch of a product of rows; ``scale`` is the dtype of the scales of rows."""
        if scale is not None and not is_row_scale(scale):
            raise ValueError(f"scales must be a float tensor, got {scale}")
        weight = self._layouts[transpose]
        assert weight is not None  # checked by `cached_products`
        sides = 1 if glu is None else glu.sides
        columns = weight.rows // sides if kind in FORWARD else weight.rows
        sizes = self._rows_bucket, self._groups, columns, weight.depth, self._multiprocessors
        needed = weight.major, glu, bias, self._is_fp8, out_format is not None
        tile = tiles.choose(kind, *sizes, *needed)
        paired, stripe = (False, 0) if glu is None else _stripes(kind, tile, glu)
        spec = Spec(
            kind, tile, dtype=self._a_dtype, b_dtype=self._b_dtype,
            b_scale_layout="blocks" if self._is_fp8 else "", weight_major=weight.major,
            table=self._separate, bias=bias, row_scale=DTYPE_NAMES[scale] if scale else "",
            activation="" if glu is None else glu.activation, stripe=stripe, paired=paired,
            save_preact=save_preact and not quantize_preact,
            quantize_preact=save_preact and quantize_preact,
            out_format=out_format, out_dtype=DTYPE_NAMES[self.value_dtype],
        )  # fmt: skip
        spec = spec._replace(reads_ahead=reads_ahead and spec.can_read_ahead)
        return Launch(
            spec, self._device, columns, weight.depth, self._groups,
            a_pitch=pitch or weight.depth, b_pitch=weight.pitch, b_group_pitch=weight.group_pitch,
            out_pitch=columns,
            preact_pitch=preact_pitch or sides * columns if kind in BACKWARD else 0,
            preact_out_pitch=0 if glu is None else sides * columns,
            glu_layout=(1, 0) if glu is None else _glu_layout(glu, columns),
            constants=(0.0, 0.0, 0.0) if glu is None else glu[2:],
        )  # fmt: skip

    def _make_wgrad_launch(
        self,
        columns: int,
        depth: int,
        pitches: tuple[int, int],
        out: tuple[tuple[int, ...], torch.dtype, bool] | None,
        accumulate: bool,
        same_scale: bool,
    ) -> Launch:
        """The launch of a weight gradient.

        ``out`` are strides, dtype and whether matrices are separate. With ``same_scale`` the
        columns of FP8 operand B share the scale of a block of rows.
        """
        dense = (columns * depth, depth, 1), self.value_dtype, False
        strides, out_dtype, separate = out or dense
        sizes = self._rows_bucket, self._groups, columns, depth, self._multiprocessors
        spec = Spec(
            "wgrad", tiles.choose("wgrad", *sizes, fp8=self._is_fp8),
            dtype=self._a_dtype, b_dtype=self._b_dtype,
            b_scale_layout=("blocks" if same_scale else "rows") if self._is_fp8 else "",
            table=separate, out_dtype=DTYPE_NAMES[out_dtype], accumulate=accumulate,
        )  # fmt: skip
        return Launch(
            spec, self._device, columns, depth, self._groups, a_pitch=pitches[0] or columns,
            b_pitch=pitches[1] or depth, b_group_pitch=strides[0], out_pitch=strides[1],
        )  # fmt: skip

    def forward(
        self,
        x: Tensor | PackedOperand,
        w: int,
        ends: Tensor,
        bias: Tensor | None = None,
        row_scale: Tensor | None = None,
        out: Tensor | None = None,
        transpose_w: bool = False,
        table: Tensor | None = None,
        pitch: int = 0,
        operand_scales: OperandScales = NO_SCALES,
        zero_tail: bool = True,
        reads_ahead: bool = False,
    ) -> Tensor:
        """`grouped_mm`, into a contiguous ``out`` if there is one."""
        if bias is None:
            row_scale = None  # it multiplies the bias only
        scale = None if row_scale is None else row_scale.dtype
        launch = self._rows_launch(
            "store", transpose_w, bias is not None, scale, pitch=pitch, reads_ahead=reads_ahead
        )
        y = out
        if y is None:
            columns = self._depth if transpose_w else self._columns
            y = x.new_empty(x.shape[0], columns, dtype=self.value_dtype)
        launch(x, w, y.data_ptr(), ends, bias, row_scale, table, operand_scales, zero_tail)
        return y

    def glu(
        self,
        x: Tensor | PackedOperand,
        w: int,
        ends: Tensor,
        scales: Tensor | None,
        glu: Glu,
        bias: Tensor | None = None,
        save_preact: bool = True,
        table: Tensor | None = None,
        pitch: int = 0,
        operand_scales: OperandScales = NO_SCALES,
        zero_tail: bool = True,
        out_format: NumberFormat | None = None,
        quantize_preact: bool = False,
        out: tuple[int, int] = (0, 0),
    ) -> tuple[Tensor, Any, Tensor | None]:
        """`grouped_glu`; with ``out_format`` `grouped_glu_quantized`.

        A quantized activation is written to ``out``, the addresses of its elements and scales.
        Gives the pre-activation, the activation or None (if it is in ``out``), and the
        pre-activation's scales or None.
        """
        scale, kind = None if scales is None else scales.dtype, FORWARD[glu.sides - 1]
        launch = self._rows_launch(
            kind, False, bias is not None, scale, glu, save_preact, pitch,
            out_format=out_format, quantize_preact=quantize_preact,
        )  # fmt: skip
        rows, columns, dtype = x.shape[0], self._columns, self.value_dtype
        kept = rows if save_preact else 0
        of_preact = SAVED_INPUT.element.dtype if quantize_preact else dtype
        preact, preact_scales = x.new_empty(kept, columns, dtype=of_preact), None
        if quantize_preact:
            preact_scales = x.new_empty(-(-columns // FP8_BLOCK), kept, dtype=torch.float32)
        act = None
        if out_format is None:
            act = x.new_empty(rows, columns // glu.sides, dtype=dtype)
            out = act.data_ptr(), 0
        launch(
            x, w, out[0], ends, bias, scales, table, operand_scales, zero_tail,
            preact_out=preact.data_ptr(),
            preact_scales=0 if preact_scales is None else preact_scales.data_ptr(),
            out_scales=out[1],
        )  # fmt: skip
        return preact, act, preact_scales

    def dglu(
        self,
        dy: Tensor,
        w: int,
        ends: Tensor,
        preact: Tensor,
        scales: Tensor | None,
        glu: Glu,
        overwrite: bool = False,
        table: Tensor | None = None,
        pitch: int = 0,
        preact_pitch: int = 0,
        zero_tail: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`grouped_dglu`; ``overwrite`` is for a contiguous pre-activation."""
        scale = None if scales is None else scales.dtype
        kind = BACKWARD[glu.sides - 1]
        launch = self._rows_launch(
            kind, True, scale=scale, glu=glu, pitch=pitch, preact_pitch=preact_pitch
        )
        rows = dy.shape[0]
        # A block of pre-activations is read once, by the warps that then write its gradient.
        d_preact = preact if overwrite else torch.empty_like(preact)
        act = dy.new_empty(rows, self._depth)
        sums = 0 if scales is None else launch.tiles_across
        partials = dy.new_empty(sums * rows, dtype=torch.float32)
        operands = dy, w, act.data_ptr(), ends, None, scales, table, NO_SCALES, zero_tail
        launch(
            *operands,
            preact=preact.data_ptr(),
            preact_out=d_preact.data_ptr(),
            row_sums=partials.data_ptr(),
        )
        dscales = partials if scales is None else launch_tile_sums(partials, rows, scales.dtype)
        return d_preact, act, dscales

    def wgrad(
        self,
        a: Tensor | PackedOperand,
        b: Tensor | PackedOperand,
        ends: Tensor | int,
        out: Matrices | None = None,
        out_dtype: torch.dtype | None = None,
        accumulate: bool = False,
        pitches: tuple[int, int] = (0, 0),
        operand_scales: OperandScales = NO_SCALES,
    ) -> Tensor | None:
        """`grouped_wgrad`, of ``dy`` and ``x``, or the other way round for its transpose.

        With ``out`` of ``out_dtype``, `grouped_wgrad_`.
        """
        columns, depth, into = a.shape[1], b.shape[1], None
        if out is not None:
            into = out.strides, out_dtype, out.pointers is not None
        same_scale = operand_scales.b_pitch == 0
        launch = self._wgrad_launch(columns, depth, pitches, into, accumulate, same_scale)
        if out is not None:
            address, table, dw = out.address, out.table(self._device), None
        else:
            dw = a.new_empty(self._groups, columns, depth, dtype=self.value_dtype)
            address, table = dw.data_ptr(), None
        launch(a, b.data_ptr(), address, ends, None, None, table, operand_scales)
        return dw


def _stripes(kind: str, tile: Tile, glu: Glu) -> tuple[bool, int]:
    """Whether gate and linear columns are loaded as two boxes, and the columns of a stripe."""
    if glu.sides == 1:
        return False, 0
    interleave = glu.interleave
    width = tile.width(kind) if kind == "glu" else block_columns(kind, tile, "bfloat16")
    paired = interleave == 0 or interleave % width == 0
    return paired, width if paired else interleave


def _glu_layout(glu: Glu, columns: int) -> tuple[int, int]:
    """Distance from a gate column to its linear column, and where gate columns end."""
    if glu.sides == 1:
        return 1, columns
    return (glu.interleave, 2 * columns) if glu.interleave else (columns, columns)


# --- products of given operands -------------------------------------------------------------------

DenseOperand = tuple[Sequence[Tensor], tuple[int, ...], int]
"""An operand in one piece of memory: the tensors, the shape of each, and how many bytes after one
the next begins."""


def can_read_in_place(
    operands: Sequence[DenseOperand], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the launches read operands where they lie."""
    for tensors, shape, step in operands:
        for t in tensors:
            if not (
                type(t) in TENSOR_TYPES
                and t.shape == shape
                and t.is_contiguous()
                and t.dtype == dtype
                and t.device == device
            ):
                return False
        first = tensors[0].data_ptr()
        if first % limits.ALIGNMENT_BYTES:
            return False
        if step:
            stop = first + step * len(tensors)
            if [t.data_ptr() for t in tensors] != [*range(first, stop, step)]:
                return False
    return True


ProductsByRows = Callable[[int], WeightProducts]
"""Gives the products for a number of rows."""


def products_by_rows(
    device: torch.device,
    dtype: torch.dtype,
    groups: int,
    columns: int,
    depth: int,
    b_dtype: torch.dtype | None = None,
) -> ProductsByRows | None:
    """The products with contiguous weights of one shape; None if the kernels support none."""
    if not supports(device, dtype, columns, depth):
        return None
    layout_of = (groups, columns, depth), (columns * depth, depth, 1), False

    @functools.cache
    def for_bucket(rows: int) -> WeightProducts:
        products = cached_products(device, dtype, *layout_of, rows, b_dtype)
        assert products is not None  # since it is supported
        return products

    return lambda rows: for_bucket(tiles.rows_bucket(rows, groups))


def scales_by_row(x: PackedOperand, w_scale: Tensor) -> OperandScales:
    """Those of FP8 rows, row-wise, and weights."""
    (_, a_scale, _), layout = x.addresses(), x.layout
    of_rows = layout.scale_pitch, layout.scale_block
    return OperandScales(a_scale, w_scale.data_ptr(), *of_rows, *w_scale.stride())


@functools.lru_cache(maxsize=1024)
def cached_products(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    separate: bool,
    rows: int,
    b_dtype: torch.dtype | None = None,
) -> WeightProducts | None:
    """The products with weights of this layout, None if the kernels do not support it."""
    readable = shape[0] > 0 and layout(shape, strides, False, not separate) is not None
    if not (readable and supports(device, dtype, *shape[1:])):
        return None
    return WeightProducts(device, dtype, shape, strides, separate, rows, b_dtype)
