"""The epilogues: what becomes of an accumulator, in blocks of 64 rows by 64 (or 32) columns.

A thread of a warpgroup holds, of each 64 x 8 block of the accumulator, columns
``2 * (lane % 4) + {0, 1}`` of rows ``16 * warp + lane // 4 + {0, 8}``.
"""

import cutlass
from cutlass import Float32, Int32, const_expr, cute, pipeline

from fusible.kernels.device import bits
from fusible.kernels.device.activations import evaluate
from fusible.kernels.sm90.device.addressing import group_rows
from fusible.kernels.sm90.device.block_writer import PIECE_COLUMNS, BlockWriter
from fusible.kernels.sm90.device.parts import (
    PREACT_TURN,
    Outputs,
    Preacts,
    Problem,
    TileCoord,
    behind,
    gate_column,
    pass_turn,
    row_in_tile,
    wait_turn,
)
from fusible.kernels.sm90.device.quantized_rows import store_quantized
from fusible.kernels.sm90.device.stores import output_of
from fusible.kernels.sm90.device.stripes import to_stripes_of_8
from fusible.kernels.sm90.spec import FORWARD, WARPGROUP_ROWS, Spec
from fusible.recipes.formats import SAVED_INPUT


class Epilogue:
    """One warpgroup's epilogue: turns its accumulator into the outputs of `Spec.kind`."""

    def __init__(
        self,
        spec: Spec,
        problem: Problem,
        preacts: Preacts | None,
        outputs: Outputs,
        dtype,
        thread: Int32,
        warpgroup: Int32,
    ):
        self.spec, self.tile, self.columns = spec, spec.tile, spec.block_columns
        self.problem, self.preacts, self.outputs = problem, preacts, outputs
        self.dtype, self.thread, self.warpgroup = dtype, thread, warpgroup

    def preact_state(self):
        """Where reading pre-activations begins."""
        slots = max(self.spec.preact_slots, 1)
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, slots)

    @cute.jit
    def output_scales(self, coord: TileCoord):
        """The scales of a thread's rows, 0 beyond the group and for the rows past all groups."""
        scales = self.outputs.scales
        values = cute.make_rmem_tensor((2 * self.tile.slabs,), Float32)
        for index in cutlass.range_constexpr(2 * self.tile.slabs):
            values[index] = Float32(1.0)
            if const_expr(scales is not None):
                values[index] = Float32(0.0)
                at = coord.row + self._row(index // 2, index % 2)
                if (at < coord.rows) & (coord.group < self.problem.groups):
                    values[index] = scales[coord.start + at].to(Float32)
        return values

    @cute.jit
    def write(self, accumulator, output_scales, coord: TileCoord, preact_state):
        """Write a tile."""
        spec, out_blocks = self.spec, self.outputs.blocks
        writer = BlockWriter(
            spec, self.dtype, out_blocks.element_type, self.thread, self.warpgroup, out_blocks
        )
        if const_expr(spec.is_backward):
            preact_state = self._write_backward(
                writer, accumulator, output_scales, coord, preact_state
            )
        else:
            self._write_product(writer, accumulator, output_scales, coord)
        return preact_state

    @cute.jit
    def _write_product(self, writer, accumulator, output_scales, coord: TileCoord):
        """Write a tile of any kind but a backward."""
        spec, tile = self.spec, self.tile
        writer.wait_stores(0)
        out, preact_targets = self._targets(coord)
        write_slab = self._write_slab
        # Blocks are counted through the tile, where the count is known when compiling.
        per_slab = const_expr(self._blocks_of_slab())
        for m in cutlass.range_constexpr(tile.slabs):
            slab = coord.row + m * tile.warpgroups * WARPGROUP_ROWS
            if const_expr(tile.warpgroups == 2):
                slab += self.warpgroup * WARPGROUP_ROWS
            count = const_expr(m * per_slab)
            if const_expr(spec.kind == "wgrad"):
                self._store(writer, accumulator, m, out, slab, coord, count)
            elif slab < coord.rows:
                write_slab(
                    writer, accumulator, m, output_scales, out, preact_targets, slab, coord, count
                )

    @cute.jit
    def _write_backward(self, writer, accumulator, output_scales, coord: TileCoord, preact_state):
        """Put the blocks of a backward's tile together, where `store_gradients` takes them."""
        write_slab = self._backward_slab
        wait_turn(PREACT_TURN, self.warpgroup)
        if coord.row >= coord.rows:  # there are none
            pass_turn(PREACT_TURN, self.warpgroup)
        for m in cutlass.range_constexpr(self.tile.slabs):
            if coord.row + m * WARPGROUP_ROWS < coord.rows:
                preact_state = write_slab(
                    writer, accumulator, m, output_scales, coord, preact_state
                )
        return preact_state

    @cute.jit
    def _write_slab(
        self, writer, accumulator, m, output_scales, out, preact_targets, slab, coord: TileCoord,
        count: cutlass.Constexpr,
    ):  # fmt: skip
        """Write 64 rows of a product of grouped rows."""
        if const_expr(self.spec.bias):
            self._add_bias(accumulator, m, output_scales, coord)
        if const_expr(self.spec.out_format is not None):
            self._quantize(
                writer, accumulator, m, output_scales, preact_targets, slab, coord, count
            )
        elif const_expr(self.spec.kind in FORWARD):
            self._activate(
                writer, accumulator, m, output_scales, out, preact_targets, slab, coord, count
            )
        else:
            self._store(writer, accumulator, m, out, slab, coord, count)

    def _targets(self, coord):
        """Where the output and, if there are any, the gate and linear columns are written."""
        store, out, preact_targets = self.outputs.store, None, None
        if self.spec.by_rows:
            if store is not None:
                out = store.atom, group_rows(store.tma_tensor, 0, coord.start, coord.rows)
            if self.outputs.store_preact is not None:
                preact_targets = [
                    (view.atom, group_rows(view.tma_tensor, 0, coord.start, coord.rows))
                    for view in self.outputs.store_preact
                ]
        else:
            out = store.atom, output_of(self.spec, self.problem, store, coord.group)
        return out, preact_targets

    def _row(self, m, half):
        return row_in_tile(self.spec, self.thread, self.warpgroup, m, half)

    def _blocks_of_slab(self):
        """Blocks written for each 64 rows of a warpgroup, but for a backward's."""
        columns = self.tile.n if self.spec.save_preact else 0
        if self.spec.out_format is None:
            columns += self.spec.width
        return columns // self.columns

    @staticmethod
    def _value(accumulator, m, group8, i):
        """Value i of a thread in 8 columns of the accumulator: columns count first, then rows."""
        return accumulator[(i % 2, i // 2, group8), m, 0]

    def _sides(self, group8):
        """Which 8-column groups of the accumulator hold the gates and the linear columns of the
        activation's 8-column group ``group8``.

        Narrower stripes lie in the same 16 columns as stripes of 8 would. Of an activation that is
        not gated, the group itself.
        """
        if self.spec.sides == 1:
            return (group8,)
        stripe = max(self.spec.stripe // 8, 1)
        gate = group8 // stripe * 2 * stripe + group8 % stripe
        return gate, gate + stripe

    def _operands(self, accumulator, m, group8):
        """A thread's values of each side for the activation's 8-column group ``group8``, 4 each."""
        sides = [
            [self._value(accumulator, m, side, i) for i in range(4)] for side in self._sides(group8)
        ]
        if self.spec.is_narrow:
            return to_stripes_of_8(*sides, self.spec.stripe, self.thread)
        return sides

    @cute.jit
    def _add_bias(self, accumulator, m, output_scales, coord: TileCoord):
        """``accumulator += bias * scale`` (no scale where the activation is scaled)."""
        spec, bias, glu_block = self.spec, self.outputs.bias, self.problem.glu_block
        within = 2 * (self.thread & 3)
        columns = cute.size(bias, mode=[1])
        if coord.group < self.problem.groups:
            for group8 in cutlass.range_constexpr(self.tile.n // 8):
                at = coord.column + group8 * 8
                if const_expr(spec.kind == "glu"):
                    at = gate_column(spec, coord.column, glu_block) + group8 * 8
                    if const_expr(spec.paired and group8 >= self.tile.n // 16):
                        at += glu_block - self.tile.n // 2
                for parity in cutlass.range_constexpr(2):
                    value = Float32(0.0)
                    if at + within + parity < columns:
                        value = bias[coord.group, at + within + parity].to(Float32)
                    for half in cutlass.range_constexpr(2):
                        scaled = value
                        if const_expr(spec.kind == "store"):
                            scaled = value * output_scales[2 * m + half]
                        accumulator[(parity, half, group8), m, 0] += scaled

    def _put_accumulator(self, writer, block, accumulator, m, index):
        """Put the index-th block of the accumulator together as it is."""
        for piece in range(self.columns // PIECE_COLUMNS):
            group8 = 2 * piece + index * self.columns // 8
            values = [self._value(accumulator, m, group8 + i // 4, i % 4) for i in range(8)]
            writer.put(values, block, piece)

    @cute.jit
    def _store(self, writer, accumulator, m, out, slab, coord: TileCoord, count: cutlass.Constexpr):
        """The accumulator as it is."""
        for index in cutlass.range_constexpr(self.tile.n // self.columns):
            block = writer.block(count + index)
            self._put_accumulator(writer, block, accumulator, m, index)
            writer.write([(*out, slab, coord.column + index * self.columns, block)])

    @cute.jit
    def _activate(
        self, writer, accumulator, m, output_scales, out, preact_targets, slab, coord: TileCoord,
        count: cutlass.Constexpr,
    ):  # fmt: skip
        """The scaled activation; before it, if kept, the accumulator it is computed from."""
        write_block, wait_stores = self._activated_block, writer.wait_stores
        blocks = const_expr(1 + self.spec.sides * self.spec.save_preact)
        for index in cutlass.range_constexpr(self.spec.width // self.columns):
            column = coord.column + index * self.columns
            # Besides work it saves registers: the compiler begins no block before its turn.
            if column < self.problem.columns:
                write_block(
                    writer, accumulator, m, output_scales, out, preact_targets, slab, coord, index,
                    count + index * blocks,
                )  # fmt: skip
            else:
                wait_stores(0)  # blocks are left out: the next may reuse any earlier memory

    @cute.jit
    def _activated_block(
        self, writer, accumulator, m, output_scales, out, preact_targets, slab, coord: TileCoord,
        index: cutlass.Constexpr, count: cutlass.Constexpr,
    ):  # fmt: skip
        """A block of activation columns, after the blocks that it is computed from."""
        if const_expr(self.spec.save_preact):
            self._store_preact(writer, accumulator, m, preact_targets, slab, coord, index, count)
        block = writer.block(count + (self.spec.sides if self.spec.save_preact else 0))
        for piece in cutlass.range_constexpr(self.columns // PIECE_COLUMNS):
            group8 = const_expr(2 * piece + index * self.columns // 8)
            values = [
                value
                for j in range(2)
                for value in self._activations(accumulator, m, output_scales, group8 + j)
            ]
            writer.put(values, block, piece)
        writer.write([(*out, slab, coord.column + index * self.columns, block)])

    def _activations(self, accumulator, m, output_scales, group8):
        """A thread's 4 scaled values of the activation's 8-column group ``group8``."""
        values = []
        for i, of_column in enumerate(zip(*self._operands(accumulator, m, group8), strict=True)):
            value, _ = evaluate(self.spec.activation, of_column, self.outputs.constants)
            values.append(value * output_scales[2 * m + i // 2])
        return values

    @cute.jit
    def _store_preact(
        self, writer, accumulator, m, preact_targets, slab, coord: TileCoord,
        index: cutlass.Constexpr, count: cutlass.Constexpr,
    ):  # fmt: skip
        """The blocks of the accumulator of which the index-th block of activations is computed."""
        spec, sides, half_columns = self.spec, self.spec.sides, self.tile.n // 2
        for side in cutlass.range_constexpr(sides):
            whole = sides * index + side
            if const_expr(spec.paired):
                whole = index + side * half_columns // self.columns
            block = writer.block(count + side)
            self._put_accumulator(writer, block, accumulator, m, whole)
            view = side if const_expr(spec.paired) else 0
            at = gate_column(spec, coord.column, self.problem.glu_block)
            at += whole * self.columns - view * half_columns
            writer.write([(*preact_targets[view], slab, at, block)])

    @cute.jit
    def _quantize(
        self, writer, accumulator, m, output_scales, preact_targets, slab, coord: TileCoord,
        count: cutlass.Constexpr,
    ):  # fmt: skip
        """Quantize the scaled activation, rounded to BF16.

        The accumulator is stored as it is with ``save_preact``, or quantized too.
        """
        spec, problem, rows = self.spec, self.problem, ([], [])
        store_preact, wait_stores = self._store_preact, writer.wait_stores
        for index in cutlass.range_constexpr(spec.width // self.columns):
            if const_expr(spec.save_preact):
                if coord.column + index * self.columns < problem.columns:
                    at = const_expr(count + index * spec.sides)
                    store_preact(writer, accumulator, m, preact_targets, slab, coord, index, at)
                else:
                    wait_stores(0)  # blocks are left out: the next may reuse any earlier memory
            for i in cutlass.range_constexpr(self.columns // 8):
                group8 = const_expr(index * self.columns // 8 + i)
                values = self._activations(accumulator, m, output_scales, group8)
                for half in cutlass.range_constexpr(2):
                    rows[half].extend(bits.pack(values[2 * half : 2 * half + 2], "bf16"))
        if const_expr(self.tile.m < WARPGROUP_ROWS):  # the other rows are of the next tile
            coord = coord._replace(rows=cutlass.min(coord.rows, coord.row + self.tile.m))
        act, preact = self.outputs.quantized, self.outputs.quantized_preact
        for half in cutlass.range_constexpr(2):
            row = coord.row + self._row(m, half)
            of_act = problem.columns, coord.column, problem, coord, row
            store_quantized(rows[half], spec.out_format, act, *of_act)
            if const_expr(spec.quantize_preact):
                gate = gate_column(spec, coord.column, problem.glu_block)
                for side in cutlass.range_constexpr(spec.sides):
                    words = self._words(accumulator, m, half, side)
                    first = gate + side * problem.glu_block
                    of_side = problem.columns * spec.sides, first, problem, coord, row
                    store_quantized(words, SAVED_INPUT, preact, *of_side)

    def _words(self, accumulator, m, half, side):
        """The accumulator's columns of a side in one of a thread's rows, rounded to BF16.

        Of an activation's only operand, or of gate and linear columns that lie apart.
        """
        groups = self.spec.width // 8
        values = [
            self._value(accumulator, m, side * groups + group8, 2 * half + i)
            for group8 in range(groups)
            for i in range(2)
        ]
        return bits.pack(values, "bf16")

    @cute.jit
    def _backward_slab(
        self,
        writer,
        accumulator,
        m: cutlass.Constexpr,
        output_scales,
        coord: TileCoord,
        preact_state,
    ):
        """64 rows: gradients of the pre-activation and the scale, and the scaled activation."""
        spec, ring, vacated = self.spec, self.preacts.pipeline, self.preacts.vacated
        blocks, act_blocks = const_expr(self.tile.n // self.columns), 2 * spec.out_blocks
        scale_grads = [Float32(0.0), Float32(0.0)]
        for index in cutlass.range_constexpr(blocks):
            ring.consumer_wait(preact_state)
            if const_expr(index == blocks - 1):  # noqa: SIM102 (decided when compiling)
                if (m == self.tile.slabs - 1) | (
                    coord.row + (m + 1) * WARPGROUP_ROWS >= coord.rows
                ):
                    pass_turn(PREACT_TURN, self.warpgroup)
            # Blocks of gate and of linear columns; their gradients take their place.
            sides = [
                self.preacts.blocks[None, None, spec.sides * preact_state.index + side]
                for side in range(spec.sides)
            ]
            # A block of activations is vacated with the slot whose gradients were stored with it.
            if const_expr(spec.preact_slots > act_blocks):
                stored = behind(preact_state, act_blocks)
                cute.arch.mbarrier_wait(vacated + stored.index, stored.phase)
            act = self.outputs.blocks[None, None, (m * blocks + index) % act_blocks]
            for piece in cutlass.range_constexpr(self.columns // PIECE_COLUMNS):
                self._backward(
                    writer, accumulator, m, output_scales, sides, act, index, piece, scale_grads
                )
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.preacts.done + preact_state.index)
            preact_state.advance()
        if const_expr(spec.row_scale != ""):
            self._sum_up(scale_grads, m, coord)
        return preact_state

    def _backward(
        self, writer, accumulator, m, output_scales, sides, act, index, piece, scale_grads
    ):
        """16 scaled activation columns; the pre-activation's gradients, put where that was.

        Adds to the gradients of a thread's two scales.
        """
        pieces = self.columns // PIECE_COLUMNS
        column_groups = [self._sides(2 * piece + i) for i in range(2)]
        # 16 activation columns and their gates and linears: always two pieces of 16.
        touched = sorted({group8 // 2 for groups in column_groups for group8 in groups})
        values = {p: writer.read_preacts(sides[p // pieces], p % pieces) for p in touched}
        activations = []
        for i in range(8):
            places = [(group8 // 2, group8 % 2 * 4 + i % 4) for group8 in column_groups[i // 4]]
            operands = [values[at][place] for at, place in places]
            value, slopes = evaluate(self.spec.activation, operands, self.outputs.constants)
            group8 = 2 * piece + i // 4 + index * self.columns // 8
            gradient = self._value(accumulator, m, group8, i % 4)
            scale = output_scales[2 * m + i % 4 // 2]
            scale_grads[i % 4 // 2] += gradient * value
            gradient *= scale
            for (at, place), slope in zip(places, slopes, strict=True):
                values[at][place] = gradient * slope
            activations.append(value * scale)
        for at, part in values.items():
            writer.put_preacts(part, sides[at // pieces], at % pieces)
        writer.put(activations, act, piece)

    @cute.jit
    def _sum_up(self, scale_grads, m, coord: TileCoord):
        """Sum a row's gradients of its scale over the four threads that hold it."""
        partials, tile = self.outputs.partials, coord.column // self.tile.n
        tiles = cute.size(partials, mode=[0])
        for half in cutlass.range_constexpr(2):
            total = scale_grads[half]
            total += cute.arch.shuffle_sync_bfly(total, 1)
            total += cute.arch.shuffle_sync_bfly(total, 2)
            at = coord.row + self._row(m, half)
            # A cluster across an odd number of tiles has a block past the last column.
            if ((self.thread & 3) == 0) & (at < coord.rows) & (tile < tiles):
                partials[tile, coord.start + at] = total
