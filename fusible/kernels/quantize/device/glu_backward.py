"""The backward of an activation, whose gradients are quantized as they are computed.

A thread has the same columns of the pre-activation's gradient as in ``k_major``, eight neighbours.
In stripes of 1, 2 and 4 gate columns it has gates and their linear columns. In stripes of whole
blocks of 128 columns a thread block takes a block of gates and that of their linear columns, whose
gradients are in shared memory until those of the gates are stored. In others, where blocks of 128
do not pair up, a thread has gates or linear columns, and reads the others as well. An activation
that is not gated has one operand. Gradients are rounded to BF16, then quantized, unless a scale
covers a whole group: then only the largest magnitudes are found, and another launch quantizes.

Where a thread block has all operands of a block of the activation, it can write that column-wise
too. It is in shared memory until the gradients are stored.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from fusible.activations import ACTIVATIONS
from fusible.kernels.device import bits
from fusible.kernels.device.activations import evaluate
from fusible.kernels.quantize.device import numbers
from fusible.kernels.quantize.device.blocks import grid_of, store_padded_ends
from fusible.kernels.quantize.device.k_major import KMajorOut, computed_anew, store_block
from fusible.kernels.quantize.device.magnitudes import largest_of_columns, over_rows
from fusible.kernels.quantize.device.quantize import (
    SHARED_PERCENT,
    raise_to_largest,
    thread_tile,
)
from fusible.kernels.quantize.spec import THREADS
from fusible.recipes.formats import FP8_BLOCK, SAVED_INPUT

_BYTES = 2  # of BF16
_ROWS = 4  # of a thread, after which addresses are computed anew
_SHARED_PERCENTS = SHARED_PERCENT, 50, 100
"""For up to three thread blocks with none, one and two `_SharedRows`, of 32 KiB each."""


class GluSource(NamedTuple):
    """What the gradients are computed from, by address."""

    dy: Int64
    """Gradient of the activation, contiguous ``[rows, features]``."""
    preact: Int64
    """Contiguous ``[rows, features]``, or ``[rows, 2 * features]`` if it is gated."""
    preact_scales: Int64
    """Of a quantized pre-activation, contiguous ``[ceil(features / 128), rows]``."""
    scales: Int64
    """FP32, of the rows."""
    glu_block: Int32
    """Distance from a gate column to its linear column; as many gates are neighbours."""
    rows: Int32
    constants: tuple


def _add(a, b):
    return bits.to_bits(bits.add(bits.to_float(a), bits.to_float(b)))


def gradients(source, tile, columns, values_out, spec):
    """Words of a thread's part of the pre-activation's gradient, zeros where there is nothing.

    Where a scale covers a whole group, one row of words of the largest magnitudes instead. Then, if
    ``spec.stages_linear_columns``, the linear columns' words, and if there is a
    ``spec.act_format``, the activation's, in shared memory. Then the FP32 bits of the gradient of
    one row's scale by the columns of its block: in the i-th of the threads that share a row, of the
    thread's i-th row.
    """
    # Each of the threads that share rows loads the scales of one row; shuffles pass them on.
    own = cute.arch.lane_idx() % spec.quantize.lanes
    live = tile.live != 0
    has_row = Int32(Boolean(own < tile.count) & live)
    if spec.scaled:
        (scale,) = bits.load(source.scales + Int64(tile.first + own) * 4, has_row, 1)
    preact_scales = []
    if spec.quantized_preact:
        for side in range(1 + spec.both_sides):
            block = (tile.column + side * source.glu_block) // FP8_BLOCK
            at = Int64(block) * Int64(source.rows) + Int64(tile.first + own)
            preact_scales += bits.load(source.preact_scales + at * 4, has_row, 1)
    first = cute.arch.lane_idx() - own
    of_row = _gates_and_linear if spec.both_sides else _one_side
    if spec.stripe:
        of_row = _sides_in_thread
    elif ACTIVATIONS[spec.activation].sides == 1:
        of_row = _only_operand
    shared = SmemAllocator() if spec.staged else None
    linears = _SharedRows(spec, shared) if spec.stages_linear_columns else None
    acts = None if spec.act_format is None else _SharedRows(spec, shared)
    rows, totals = [], []
    for r in range(spec.quantize.thread_rows):
        if r % _ROWS == 0:
            tile, columns = computed_anew(tile, columns)
        inside = Int32(Boolean(r < tile.count) & tile.in_columns & live)
        start = Int64(tile.first + r) * Int64(columns)
        row_scale = Float32(1.0)
        if spec.scaled:
            row_scale = bits.to_float(cute.arch.shuffle_sync(scale, first + r))
        factors = [
            numbers.decode_scale(cute.arch.shuffle_sync(stored, first + r), SAVED_INPUT)
            for stored in preact_scales
        ]
        operands = _Row(source, start, inside, factors, spec)
        sides, act, total = of_row(operands, tile.column, row_scale)
        packed = [bits.pack(values, spec.quantize.dtype) for values in sides]
        if spec.quantize.has_matrix_scales:
            rows = [largest_of_columns([*rows, *packed], spec.quantize.dtype)]
        else:
            rows.append(packed[0])
            if spec.stages_linear_columns:
                linears.put(r, packed[1])
        if spec.act_format is not None:
            acts.put(r, bits.pack(act, spec.quantize.dtype))
        totals.append(total)
        if spec.values:
            written = Int32(Boolean(r < tile.count) & tile.in_columns)
            for side, words in enumerate(packed):
                column = tile.column + side * source.glu_block
                bits.store(values_out + (start + Int64(column)) * _BYTES, words, written)
    totals = over_rows(totals, spec.quantize.lanes, _add) if spec.scaled else None
    return rows, linears, acts, totals


class _SharedRows:
    """Words of a thread's rows in shared memory; no other thread reads them."""

    def __init__(self, spec, allocator):
        self.words, self.rows = spec.quantize.words, spec.quantize.thread_rows
        layout = cute.make_layout((THREADS, self.words * self.rows))
        self.shared = allocator.allocate_tensor(Uint32, layout)

    def put(self, row, words):
        thread, _, _ = cute.arch.thread_idx()
        for i, word in enumerate(words):
            self.shared[thread, row * self.words + i] = word

    def get(self):
        thread, _, _ = cute.arch.thread_idx()
        return [
            [self.shared[thread, row * self.words + i] for i in range(self.words)]
            for row in range(self.rows)
        ]


class _Row:
    """A thread's part of the operands in one row.

    ``factors`` are those of a quantized pre-activation's gates, or only operand, and linears.
    """

    def __init__(self, source, start, inside, factors, spec):
        self.source, self.start, self.inside = source, start, inside
        self.factors, self.spec = factors, spec

    def dy(self, offset, count):
        """``count`` numbers of the activation's gradient from the ``offset``-th on."""
        return self._load(self.source.dy, offset, count)

    def preact(self, column, side=0):
        """The thread's numbers of the pre-activation from a column on.

        Quantized ones are elements times powers of two, which need no rounding to BF16.
        """
        source, count, at = self.source, self.spec.quantize.vector, self.start + Int64(column)
        if not self.spec.quantized_preact:
            return self._load(source.preact, at, count)
        words, factor = bits.load(source.preact + at, self.inside, count // 4), self.factors[side]
        return [value * factor for value in numbers.unpack_elements(words, SAVED_INPUT)]

    def _load(self, address, offset, count):
        words = bits.load(address + offset * _BYTES, self.inside, count * _BYTES // 4)
        return bits.unpack(words, self.spec.quantize.dtype)


def _act_column(column, glu_block):
    """The activation's column of a gate column, in stripes."""
    return column - column // glu_block // 2 * glu_block


# Each of these gives, of one row of a thread: the gradients of each operand; the activation, or
# None where the thread block has only some operands of it; bits of the gradient of the row's scale.


def _only_operand(row, column, row_scale):
    """Of an activation's only operand."""
    source, spec = row.source, row.spec
    dy = row.dy(row.start + Int64(column), spec.quantize.vector)
    values, act, total = [], [], Float32(0.0)
    for gradient, operand in zip(dy, row.preact(column), strict=True):
        value, (slope,) = evaluate(spec.activation, (operand,), source.constants)
        total = total + gradient * value
        values.append(gradient * row_scale * slope)
        act.append(value * row_scale)
    return [values], act, bits.to_bits(total)


def _sides_in_thread(row, column, row_scale):
    """Of neighbouring gate and linear columns."""
    source, spec = row.source, row.spec
    stripe = spec.stripe
    dy = row.dy((row.start + Int64(column)) // 2, spec.quantize.vector // 2)
    preact = row.preact(column)
    values, total = [None] * len(preact), Float32(0.0)
    for i, gradient in enumerate(dy):
        gate = i // stripe * 2 * stripe + i % stripe
        pair = preact[gate], preact[gate + stripe]
        value, of_pair = evaluate(spec.activation, pair, source.constants)
        total = total + gradient * value
        values[gate], values[gate + stripe] = [gradient * row_scale * of for of in of_pair]
    return [values], None, bits.to_bits(total)


def _gates_and_linear(row, gate, row_scale):
    """Of gates from column ``gate`` on and of their linear columns, in stripes of at least 8."""
    source, spec = row.source, row.spec
    block = source.glu_block
    dy = row.dy(row.start // 2 + Int64(_act_column(gate, block)), spec.quantize.vector)
    gates, linears = row.preact(gate), row.preact(gate + block, side=1)
    of_gates, of_linears, act, total = [], [], [], Float32(0.0)
    for gradient, *pair in zip(dy, gates, linears, strict=True):
        value, (d_gate, d_linear) = evaluate(spec.activation, pair, source.constants)
        total = total + gradient * value
        of_gates.append(gradient * row_scale * d_gate)
        of_linears.append(gradient * row_scale * d_linear)
        act.append(value * row_scale)
    return [of_gates, of_linears], act, bits.to_bits(total)


def _one_side(row, column, row_scale):
    """Of gates, or of linear columns, which leave their scale's gradient to the gates."""
    block = row.source.glu_block
    is_linear = column // block % 2
    sides, _, total = _gates_and_linear(row, column - is_linear * block, row_scale)
    values = [
        bits.to_float(bits.select(is_linear, bits.to_bits(of_linear), bits.to_bits(of_gate)))
        for of_gate, of_linear in zip(*sides, strict=True)
    ]
    return [values], None, bits.select(is_linear, 0, total)


def first_chunk(pair, glu_block, spec):
    """The chunk of 128 columns of gates of the ``pair``-th chunk of the activation's columns."""
    chunks = glu_block // spec.quantize.rows
    return pair // chunks * 2 * chunks + pair % chunks


def quantize_gradients(source, tile, rows, columns, amax, out, act_out, partials, values, spec):
    """Scales, elements and, if wanted, values of a thread's rows; partial sums of their scales'.

    Or instead of scales and elements the largest magnitudes, where these cover whole groups. With
    ``spec.act_format`` scales and elements of the activation, to ``act_out``.
    """
    words, linears, acts, total = gradients(source, tile, columns, values, spec)
    tile, columns = computed_anew(tile, columns)
    own = cute.arch.lane_idx() % spec.quantize.lanes
    if spec.scaled:
        width = spec.quantize.lanes * spec.quantize.vector
        column = _act_column(tile.column, source.glu_block) if spec.both_sides else tile.column
        at = Int64(column // width) * Int64(rows) + Int64(tile.first + own)
        inside = Boolean(own < tile.count) & (tile.column // width * width < columns)
        bits.store(partials + at * 4, [total], Int32(inside))
    if spec.quantize.has_matrix_scales:
        raise_to_largest(amax + Int64(tile.group) * 4, words, spec.quantize.dtype)
    else:
        store_block(words, tile, rows, columns, rows, out, spec.quantize)
        if spec.stages_linear_columns:
            tile, columns = computed_anew(tile, columns)
            at = tile._replace(column=tile.column + source.glu_block)
            store_block(linears.get(), at, rows, columns, rows, out, spec.quantize)
        if spec.act_format is not None:
            at, features = computed_anew(tile, columns)
            if spec.both_sides:
                at = at._replace(column=_act_column(at.column, source.glu_block))
                features = features // 2
            store_block(acts.get(), at, rows, features, rows, act_out, spec.quantize_act)


@cute.kernel
def _quantize(
    dy: Int64,
    preact: Int64,
    preact_scales: Int64,
    scales: Int64,
    ends: Int64,
    amax: Int64,
    row_data: Int64,
    row_scale: Int64,
    col_data: Int64,
    col_scale: Int64,
    padded_ends: Int64,
    partials: Int64,
    values: Int64,
    act_data: Int64,
    act_scale: Int64,
    rows: Int32,
    columns: Int32,
    groups: Int32,
    col_pitch: Int32,
    glu_block: Int32,
    limit: Float32,
    alpha: Float32,
    offset: Float32,
    chunks: Int32,
    spec: cutlass.Constexpr,
):
    cta, _, _ = cute.arch.block_idx()
    block = cta // chunks
    chunk = cta - block * chunks
    if cutlass.const_expr(spec.both_sides):
        chunk = first_chunk(chunk, glu_block, spec)
    tile = thread_tile(block, chunk, rows, columns, groups, rows, ends, spec.quantize)
    quantize = spec.quantize
    if cutlass.const_expr(not quantize.has_matrix_scales):
        if (cta == 0) & (padded_ends != Int64(0)):
            store_padded_ends(ends, padded_ends, groups, rows, quantize.rows, quantize.wide_ends)
    if tile.rows > 0:
        constants = limit, alpha, offset
        source = GluSource(dy, preact, preact_scales, scales, glu_block, rows, constants)
        out = KMajorOut(row_data, row_scale, col_data, col_scale, col_pitch)
        act_out = out._replace(col_data=act_data, col_scale=act_scale)
        given = source, tile, rows, columns, amax, out, act_out, partials, values
        quantize_gradients(*given, spec)


@cute.jit
def quantize(
    dy: Int64,
    preact: Int64,
    preact_scales: Int64,
    scales: Int64,
    ends: Int64,
    amax: Int64,
    row_data: Int64,
    row_scale: Int64,
    col_data: Int64,
    col_scale: Int64,
    padded_ends: Int64,
    partials: Int64,
    values: Int64,
    act_data: Int64,
    act_scale: Int64,
    rows: Int32,
    columns: Int32,
    groups: Int32,
    col_pitch: Int32,
    glu_block: Int32,
    limit: Float32,
    alpha: Float32,
    offset: Float32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch over the gradient ``[rows, columns]`` of the pre-activation: addresses and sizes.

    ``col_pitch`` is the distance of columns in the transposed elements, ``partials`` FP32
    ``[ceil(columns / 128), rows]``, with half as many if ``spec.both_sides``; ``act`` is the
    activation.
    """
    blocks, chunks = grid_of(rows, columns, groups, rows, spec.quantize)
    if cutlass.const_expr(spec.both_sides):
        chunks = chunks // 2
    _quantize(
        dy, preact, preact_scales, scales, ends, amax, row_data, row_scale, col_data, col_scale,
        padded_ends, partials, values, act_data, act_scale, rows, columns, groups, col_pitch,
        glu_block, limit, alpha, offset, chunks, spec,
    ).launch(
        grid=[blocks * chunks, 1, 1], block=[THREADS, 1, 1], stream=stream,
        min_blocks_per_mp=spec.resident,
        preferred_smem_carveout=_SHARED_PERCENTS[spec.staged],
    )  # fmt: skip
