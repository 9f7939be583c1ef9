"""The grouped matrix product on Hopper: one mainloop, every epilogue.

A block is three warpgroups. The first loads: its warp 0 keeps a ring of operand stages filled by
TMA, its warp 1 a ring of pre-activation blocks where the epilogue reads them. The other two
multiply (WGMMA from shared memory, FP32 accumulators) and run the epilogue, which walks the
accumulator in blocks of 64 rows by 64 (or 32) columns: registers, shared memory, TMA store.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from fusible.kernels.sm90.device.addressing import (
    address_by_distance,
    address_rows_by_group,
    at_distance,
    group_rows,
)
from fusible.kernels.sm90.device.blocks import PIECE, BlockWriter
from fusible.kernels.sm90.device.epilogues import BACKWARD, FORWARD
from fusible.kernels.sm90.device.schedule import ReductionSchedule, RowSchedule, TileQueue
from fusible.kernels.sm90.spec import TILE_K, WARPGROUP_ROWS, Spec

_WARPGROUP = 128
_DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "float64": cutlass.Float64,
}
_MAJOR = {"k": OperandMajorMode.K, "n": OperandMajorMode.MN}
# Named barriers (0 to 2 are taken), two each: whose turn it is, in ping-pong, to multiply, and to
# read pre-activations. Without turns one warpgroup could wait for a slot's next contents while the
# other's have yet to come, and mistake those for its own.
_MULTIPLY_TURN, _PREACT_TURN = 3, 5
# Registers a thread keeps: 24 + 2 * 240 fill the file for three warpgroups.
_LOAD_REGISTERS, _MATH_REGISTERS = 24, 240


def _as_tiles(fragment, rank):
    """One instruction's fragment as ``cute.gemm`` wants it: tiled, by a single tile."""
    one = cute.make_layout(1)
    return cute.make_tensor(fragment.iterator, cute.append(fragment.layout, one, up_to_rank=rank))


class GroupedGemm:
    """The kernel that a `Spec` describes; ``cute.compile`` turns an instance into code."""

    def __init__(self, spec: Spec):
        tile = spec.tile
        self.spec, self.tile = spec, tile
        self.by_rows = spec.kind != "wgrad"
        self.dtype, self.out_dtype = _DTYPES[spec.dtype], _DTYPES[spec.out_dtype]
        self.teams = 1 if tile.pingpong else 2  # warpgroups that share a tile
        self.cluster = (tile.cluster_m, tile.cluster_n)
        self.b_parts = 2 if spec.kind == "glu" and spec.paired else 1
        self.columns = spec.block_columns

    @cute.jit
    def __call__(
        self,
        a: Int64,
        b: Int64,
        preact: Int64,
        out: Int64,
        d_preact: Int64,
        ends: Int64,
        table: Int64,
        bias: Int64,
        scales: Int64,
        partials: Int64,
        counter: Int64,
        total_rows: Int32,
        columns: Int32,
        depth: Int32,
        groups: Int32,
        a_pitch: Int64,
        b_pitch: Int64,
        b_group_pitch: Int64,
        preact_pitch: Int64,
        out_pitch: Int64,
        d_preact_pitch: Int64,
        glu_block: Int32,
        glu_columns: Int32,
        limit: Float32,
        alpha: Float32,
        offset: Float32,
        clusters: Int32,
        stream: cuda.CUstream,
    ):
        """Launch. Pointers are addresses, pitches count elements.

        Rows grouped: ``a`` [total_rows, depth], ``b`` [groups, columns, depth]. Reduction
        grouped: ``a`` [total_rows, columns], ``b`` [total_rows, depth], ``out``
        [groups, columns, depth], the group pitch being the output's. For the gated kinds
        ``columns`` counts activation columns, ``glu_block`` is the distance from a gate column
        to its linear column and ``glu_columns`` the bound of gate columns.
        """
        spec, tile = self.spec, self.tile
        tile_a, tile_b = (tile.m, TILE_K), (tile.n // self.b_parts, TILE_K)
        a_pitch, b_pitch, b_group_pitch, preact_pitch, out_pitch, d_preact_pitch = (
            cute.assume(pitch, divby=8)
            for pitch in (a_pitch, b_pitch, b_group_pitch, preact_pitch, out_pitch, d_preact_pitch)
        )

        if const_expr(self.by_rows):
            a_major, b_major = "k", spec.weight_major
            tensor_a = self._matrix(a, (total_rows, depth), (a_pitch, 1))
            weight_rows = columns * 2 if const_expr(spec.kind == "glu") else columns
            strides = (b_pitch, 1) if const_expr(b_major == "k") else (1, b_pitch)
            tensor_b = self._matrix(b, (weight_rows, depth), strides)
            tensor_b = self._per_group(tensor_b, groups, b_group_pitch)
            tensor_out = self._matrix(out, (total_rows, columns), (out_pitch, 1))
            tensor_out = address_rows_by_group(tensor_out, 0)
        else:
            a_major = b_major = "n"
            tensor_a = self._matrix(a, (columns, total_rows), (1, a_pitch))
            tensor_a = address_rows_by_group(tensor_a, 1)
            tensor_b = self._matrix(b, (depth, total_rows), (1, b_pitch))
            tensor_b = address_rows_by_group(tensor_b, 1)
            tensor_out = self._matrix(out, (columns, depth), (out_pitch, 1), self.out_dtype)
            tensor_out = self._per_group(tensor_out, groups, b_group_pitch)

        layout_a, layout_b = (
            hopper.make_smem_layout_a(self._layout_enum(major), (*mk, TILE_K), self.dtype, stages)
            for major, mk, stages in (
                (a_major, (tile.m, 1), spec.stages),
                (b_major, (tile.n // self.b_parts, 1), spec.stages * self.b_parts),
            )
        )
        layout_block = self._block_layout(self.out_dtype, 2 * spec.out_blocks)
        layout_preact = self._block_layout(self.dtype, max(2 * spec.preact_slots, 1))

        load_a = self._load(tensor_a, layout_a, tile_a, tile.cluster_n)
        load_b = self._load(tensor_b, layout_b, tile_b, tile.cluster_m)
        block = (WARPGROUP_ROWS, self.columns)
        store_op = cpasync.CopyBulkTensorTileS2GOp()
        if const_expr(spec.accumulate):
            store_op = cpasync.CopyReduceBulkTensorTileS2GOp()
        store = cpasync.make_tiled_tma_atom(store_op, tensor_out, layout_block, block)

        # Gate and linear columns are two views, so that a box of one stops before the other.
        load_preact, store_preact = None, None
        per_element = const_expr(self.dtype.width // 8)
        if const_expr(spec.kind == "dglu"):
            load_preact = tuple(
                self._load(
                    self._matrix(
                        preact + shift * per_element,
                        (total_rows, glu_columns),
                        (preact_pitch, 1),
                    ),
                    layout_preact,
                    block,
                    1,
                )
                for shift in self._shifts(glu_block)
            )
        if const_expr(spec.kind == "dglu" or spec.keep):
            store_preact = tuple(
                cpasync.make_tiled_tma_atom(
                    cpasync.CopyBulkTensorTileS2GOp(),
                    address_rows_by_group(
                        self._matrix(
                            d_preact + shift * per_element,
                            (total_rows, glu_columns),
                            (d_preact_pitch, 1),
                        ),
                        0,
                    ),
                    self._block_layout(self.dtype, 1),
                    block,
                )
                for shift in self._shifts(glu_block)
            )

        vector = cute.make_layout((groups,))
        tensor_ends = cute.make_tensor(self._pointer(Int32, ends), vector)
        tensor_table = None
        if const_expr(spec.table):
            tensor_table = cute.make_tensor(self._pointer(Int64, table), vector)
        tensor_bias = None
        if const_expr(spec.bias):
            width = columns * 2 if const_expr(spec.kind == "glu") else columns
            tensor_bias = cute.make_tensor(
                self._pointer(self.dtype, bias),
                cute.make_layout((groups, width), stride=(Int64(width), 1)),
            )
        tensor_scales = None
        if const_expr(spec.scale):
            tensor_scales = cute.make_tensor(
                self._pointer(_DTYPES[spec.scale], scales), cute.make_layout((total_rows,))
            )
        tensor_partials = None
        if const_expr(spec.kind == "dglu"):
            tiles = cute.ceil_div(columns, tile.n)
            tensor_partials = cute.make_tensor(
                self._pointer(Float32, partials),
                cute.make_layout((tiles, total_rows), stride=(Int64(total_rows), 1)),
            )

        self.kernel(
            load_a,
            load_b,
            load_preact,
            store,
            store_preact,
            tensor_ends,
            tensor_table,
            b if const_expr(self.by_rows) else out,
            tensor_bias,
            tensor_scales,
            tensor_partials,
            self._pointer(Int32, counter),
            layout_a,
            layout_b,
            layout_block,
            layout_preact,
            total_rows,
            columns,
            depth,
            groups,
            glu_block,
            (limit, alpha, offset),
        ).launch(
            grid=[clusters * tile.cluster_m * tile.cluster_n, 1, 1],
            block=[3 * _WARPGROUP, 1, 1],
            cluster=[tile.cluster_m * tile.cluster_n, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    # Host side: tensors and descriptors.

    def _pointer(self, dtype, address, align=None):
        align = align or dtype.width // 8
        return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)

    def _matrix(self, address, shape, strides, dtype=None):
        return cute.make_tensor(
            self._pointer(dtype or self.dtype, address, 16), cute.make_layout(shape, stride=strides)
        )

    def _per_group(self, matrix, groups, group_pitch):
        if self.spec.table:
            return address_by_distance(matrix)
        return cute.make_tensor(
            matrix.iterator,
            cute.make_layout((*matrix.shape, groups), stride=(*matrix.stride, group_pitch)),
        )

    def _shifts(self, glu_block):
        """Where gate and linear columns begin; where they alternate within a tile, one view."""
        return (Int64(0), Int64(glu_block)) if self.spec.paired else (Int64(0),)

    @staticmethod
    def _layout_enum(major):
        # Read as an A operand: row major is K major.
        return LayoutEnum.ROW_MAJOR if major == "k" else LayoutEnum.COL_MAJOR

    def _block_layout(self, dtype, count):
        atom = warpgroup.make_smem_layout_atom(
            hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, self.columns), dtype
        )
        return cute.tile_to_shape(atom, (WARPGROUP_ROWS, self.columns, count), order=(0, 1, 2))

    @staticmethod
    def _load(tensor, layout, box, multicast):
        op = cpasync.CopyBulkTensorTileG2SOp()
        if multicast > 1:
            op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        return cpasync.make_tiled_tma_atom(op, tensor, layout, box, multicast)

    # Device side.

    @cute.kernel
    def kernel(
        self,
        load_a: cpasync.TmaInfo,
        load_b: cpasync.TmaInfo,
        load_preact,
        store: cpasync.TmaInfo,
        store_preact,
        ends: cute.Tensor,
        table,
        base: Int64,
        bias,
        scales,
        partials,
        counter: cute.Pointer,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        layout_block: cute.ComposedLayout,
        layout_preact: cute.ComposedLayout,
        total_rows: Int32,
        columns: Int32,
        depth: Int32,
        groups: Int32,
        glu_block: Int32,
        constants,
    ):
        """One persistent block."""
        spec, tile = self.spec, self.tile
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_index = warp_index // 4
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        in_cluster = (rank % tile.cluster_m, rank // tile.cluster_m)

        @cute.struct
        class Shared:
            barriers: cute.struct.MemRange[Int64, 2 * spec.stages]
            preact_barriers: cute.struct.MemRange[Int64, max(2 * spec.preact_slots, 1)]
            queue_barriers: cute.struct.MemRange[Int64, 2 * TileQueue.SLOTS]
            queue: cute.struct.MemRange[Int32, TileQueue.SLOTS]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_b)], 1024]
            blocks: cute.struct.Align[
                cute.struct.MemRange[self.out_dtype, cute.cosize(layout_block)], 1024
            ]
            preact: cute.struct.Align[
                cute.struct.MemRange[
                    self.dtype, cute.cosize(layout_preact) if spec.preact_slots else 8
                ],
                1024,
            ]

        shared = SmemAllocator().allocate(Shared)
        shared_a = shared.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        shared_b = shared.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        blocks = shared.blocks.get_tensor(layout_block.outer, swizzle=layout_block.inner)

        if warp_index == 0:
            cpasync.prefetch_descriptor(load_a.atom)
            cpasync.prefetch_descriptor(load_b.atom)
            cpasync.prefetch_descriptor(store.atom)

        cluster_layout = cute.make_layout((1, *self.cluster, 1))
        shared_loads = tile.cluster_m + tile.cluster_n - 1
        operands = pipeline.PipelineTmaAsync.create(
            barrier_storage=shared.barriers.data_ptr(),
            num_stages=spec.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, shared_loads * self.teams * 4
            ),
            tx_count=spec.stage_bytes,
            cta_layout_vmnk=cluster_layout,
            defer_sync=True,
        )
        preacts, shared_preact = None, None
        if const_expr(spec.kind == "dglu"):
            shared_preact = shared.preact.get_tensor(
                layout_preact.outer, swizzle=layout_preact.inner
            )
            preacts = pipeline.PipelineTmaAsync.create(
                barrier_storage=shared.preact_barriers.data_ptr(),
                num_stages=spec.preact_slots,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
                tx_count=2 * spec.block_bytes,
                cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
                defer_sync=True,
            )
        queue = None
        if const_expr(tile.dynamic):
            queue = TileQueue(
                counter,
                shared.queue.data_ptr(),
                shared.queue_barriers.data_ptr(),
                10 if const_expr(spec.kind == "dglu") else 9,
                cute.size(self.cluster),
            )
            if warp_index == 0:
                queue.initialise()
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)

        first_tile = cute.arch.block_idx()[0] // cute.size(self.cluster)
        tile_step = cute.arch.grid_dim()[0] // cute.size(self.cluster)
        if const_expr(self.by_rows):
            width = tile.n // 2 if const_expr(spec.kind == "glu") else tile.n
            across = cute.ceil_div(columns, width * tile.cluster_n)
            schedule = RowSchedule(ends, total_rows, groups, across, tile.m * tile.cluster_m)
        else:
            schedule = ReductionSchedule(
                ends,
                total_rows,
                groups,
                cute.ceil_div(columns, tile.m * tile.cluster_m),
                cute.ceil_div(depth, tile.n * tile.cluster_n),
            )

        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(_LOAD_REGISTERS)
            if const_expr(tile.dynamic):  # noqa: SIM102 (decided when compiling)
                if (warp_index == 2) & (rank == 0):
                    queue.serve(schedule, first_tile, tile_step)
            if warp_index == 0:
                self.load_operands(
                    load_a, load_b, shared_a, shared_b, operands, schedule, queue, in_cluster,
                    first_tile, tile_step, groups, depth, glu_block, table, base,
                )  # fmt: skip
            if const_expr(spec.kind == "dglu"):  # noqa: SIM102 (decided when compiling)
                if warp_index == 1:
                    self.load_preacts(
                        load_preact, shared_preact, preacts, schedule, queue, in_cluster,
                        first_tile, tile_step, groups, total_rows, glu_block,
                    )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(_MATH_REGISTERS)
            self.multiply(
                thread - _WARPGROUP, warpgroup_index - 1, shared_a, shared_b, operands, blocks,
                shared_preact, preacts, schedule, queue, in_cluster, first_tile, tile_step, groups,
                depth, glu_block, table, base, store, store_preact, bias, scales, partials,
                constants,
            )  # fmt: skip

    def _steps(self, group, rows, groups, depth):
        """Pipeline stages of a tile; rows past the last group have none."""
        if const_expr(not self.by_rows):
            return cute.ceil_div(rows, TILE_K)
        return Int32(cutlass.select_(group < groups, cute.ceil_div(depth, TILE_K), Int32(0)))

    def _next_tile(self, queue, state, tile_index, tile_step):
        if self.tile.dynamic:
            return queue.next(state)
        return tile_index + tile_step, state

    def _gate_column(self, column, glu_block):
        """Where the gate of an activation column lies among gate and linear columns."""
        if const_expr(self.spec.paired):
            return (column // glu_block) * 2 * glu_block + column % glu_block
        return column * 2

    def _box(self, load, shared, tensor, tile, offset, multicast=None):
        """Partition for a TMA load of one box at ``offset``, walking the second mode."""
        count, rank = multicast or (1, 0)
        boxes = cute.local_tile(cute.domain_offset(offset, tensor), tile, (0, None))
        return cpasync.tma_partition(
            load.atom,
            rank,
            cute.make_layout(count),
            cute.group_modes(shared, 0, 2),
            cute.group_modes(boxes, 0, 2),
        )

    @cute.jit
    def load_operands(
        self, load_a, load_b, shared_a, shared_b, operands, schedule, queue, in_cluster,
        first_tile, tile_step, groups, depth, glu_block, table, base,
    ):  # fmt: skip
        """Warp 0: keep the operand stages filled."""
        spec, tile = self.spec, self.tile
        across = tile.n // 2 if const_expr(spec.kind == "glu") else tile.n
        tile_a, tile_b = (tile.m, TILE_K), (tile.n // self.b_parts, TILE_K)
        # A block loads its slice of what a row or column of the cluster shares, for all of it.
        mask_a, mask_b = 0, 0
        if const_expr(tile.cluster_n > 1):
            every = sum(1 << (n * tile.cluster_m) for n in range(tile.cluster_n))
            mask_a = cutlass.Int16(every << in_cluster[0])
        if const_expr(tile.cluster_m > 1):
            every = (1 << tile.cluster_m) - 1
            mask_b = cutlass.Int16(every << (in_cluster[1] * tile.cluster_m))

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, spec.stages)
        turn_of_queue = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, TileQueue.SLOTS
        )
        tile_index = first_tile
        schedule, valid, group, m, n, start, rows = schedule.seek(tile_index)
        while valid:
            row = (m * tile.cluster_m + in_cluster[0]) * tile.m
            column = (n * tile.cluster_n + in_cluster[1]) * across
            if const_expr(self.by_rows):
                tensor_a, offset_a = load_a.tma_tensor, (start + row, 0)
                tensor_b, offset_b = load_b.tma_tensor, (column, 0)
                weight = cutlass.min(group, groups - 1)
                if const_expr(spec.table):
                    tensor_b = at_distance(tensor_b, table[weight] - base)
                else:
                    tensor_b = tensor_b[None, None, weight]
                if const_expr(spec.kind == "glu"):
                    offset_b = (self._gate_column(column, glu_block), 0)
            else:
                tensor_a = group_rows(load_a.tma_tensor, 1, start, rows)
                tensor_b = group_rows(load_b.tma_tensor, 1, start, rows)
                offset_a, offset_b = (row, 0), (column, 0)
            to_a, from_a = self._box(
                load_a, shared_a, tensor_a, tile_a, offset_a, (tile.cluster_n, in_cluster[1])
            )
            boxes_b = [
                self._box(
                    load_b,
                    shared_b,
                    tensor_b,
                    tile_b,
                    (offset_b[0] + part * glu_block, 0),
                    (tile.cluster_m, in_cluster[0]),
                )
                for part in range(self.b_parts)
            ]
            for step in cutlass.range(self._steps(group, rows, groups, depth), unroll=1):
                operands.producer_acquire(state)
                barrier = operands.producer_get_barrier(state)
                cute.copy(
                    load_a.atom,
                    from_a[None, step],
                    to_a[None, state.index],
                    tma_bar_ptr=barrier,
                    mcast_mask=mask_a,
                )
                for part in cutlass.range_constexpr(self.b_parts):
                    to_b, from_b = boxes_b[part]
                    cute.copy(
                        load_b.atom,
                        from_b[None, step],
                        to_b[None, state.index * self.b_parts + part],
                        tma_bar_ptr=barrier,
                        mcast_mask=mask_b,
                    )
                state.advance()
            tile_index, turn_of_queue = self._next_tile(queue, turn_of_queue, tile_index, tile_step)
            schedule, valid, group, m, n, start, rows = schedule.seek(tile_index)
        # Wait until the cluster has read what this block sent, before it may exit.
        operands.producer_tail(state)

    @cute.jit
    def load_preacts(
        self, load_preact, shared_preact, preacts, schedule, queue, in_cluster,
        first_tile, tile_step, groups, total_rows, glu_block,
    ):  # fmt: skip
        """Warp 1: keep the pre-activation blocks filled, in the order the epilogue reads them."""
        spec, tile = self.spec, self.tile
        box = (WARPGROUP_ROWS, self.columns)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, spec.preact_slots)
        turn_of_queue = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, TileQueue.SLOTS
        )
        tile_index = first_tile
        schedule, valid, group, m, n, start, _ = schedule.seek(tile_index)
        while valid:
            row = start + (m * tile.cluster_m + in_cluster[0]) * tile.m
            if group >= groups:
                row = total_rows  # out of bounds: zeros for the rows past the last group
            column = (n * tile.cluster_n + in_cluster[1]) * tile.n
            for block in cutlass.range(tile.m * tile.n // (box[0] * box[1]), unroll=1):
                down, right = block // (tile.n // box[1]), block % (tile.n // box[1])
                at = self._gate_column(column + right * box[1], glu_block)
                preacts.producer_acquire(state)
                for side in cutlass.range_constexpr(2):
                    load = load_preact[side if const_expr(spec.paired) else 0]
                    shift = 0 if const_expr(spec.paired) else side * box[1]
                    to_block, from_block = self._box(
                        load,
                        shared_preact,
                        load.tma_tensor,
                        box,
                        (row + down * box[0], at + shift),
                    )
                    cute.copy(
                        load.atom,
                        from_block[None, 0],
                        to_block[None, 2 * state.index + side],
                        tma_bar_ptr=preacts.producer_get_barrier(state),
                    )
                state.advance()
            tile_index, turn_of_queue = self._next_tile(queue, turn_of_queue, tile_index, tile_step)
            schedule, valid, group, m, n, start, _ = schedule.seek(tile_index)

    @cute.jit
    def multiply(
        self, thread, team, shared_a, shared_b, operands, blocks,
        shared_preact, preacts, schedule, queue, in_cluster, first_tile, tile_step, groups,
        depth, glu_block, table, base, store, store_preact, bias, scales, partials,
        constants,
    ):  # fmt: skip
        """A consumer warpgroup: matrix products, then the epilogue, tile by tile."""
        spec, tile = self.spec, self.tile
        major_a, major_b = ("k", spec.weight_major) if const_expr(self.by_rows) else ("n", "n")
        mma = hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            _MAJOR[major_a],
            _MAJOR[major_b],
            Float32,
            (self.teams, 1, 1),
            (WARPGROUP_ROWS, tile.n),
        )
        in_team = thread % _WARPGROUP
        slice_mma = mma.get_slice(team * _WARPGROUP if const_expr(self.teams == 2) else 0)
        if const_expr(self.b_parts == 2):
            # The two halves of a stage lie next to each other: one operand.
            layout = hopper.make_smem_layout_a(
                self._layout_enum(major_b), (tile.n, 1, TILE_K), self.dtype, spec.stages
            )
            shared_b = cute.make_tensor(shared_b.iterator, layout.outer)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        fragment_a = mma.make_fragment_A(slice_mma.partition_A(shared_a))
        fragment_b = mma.make_fragment_B(slice_mma.partition_B(shared_b))
        accumulator = cute.make_rmem_tensor(mma.partition_shape_C((tile.m, tile.n)), Float32)

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, spec.stages)
        release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, spec.stages)
        slots = max(spec.preact_slots, 1)
        preact_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, slots)
        preact_release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, slots)
        if const_expr(tile.pingpong):  # noqa: SIM102 (decided when compiling)
            if team == 0:
                self._give_turn(_MULTIPLY_TURN, Int32(1))
                if const_expr(spec.kind == "dglu"):
                    self._give_turn(_PREACT_TURN, Int32(1))

        turn = Int32(0)
        turn_of_queue = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, TileQueue.SLOTS
        )
        tile_index = first_tile
        schedule, valid, group, m, n, start, rows = schedule.seek(tile_index)
        while valid:
            steps = self._steps(group, rows, groups, depth)
            mine = Boolean(True)
            if const_expr(tile.pingpong):
                mine = turn == team
            if mine:
                row = (m * tile.cluster_m + in_cluster[0]) * tile.m
                across = tile.n // 2 if const_expr(spec.kind == "glu") else tile.n
                column = (n * tile.cluster_n + in_cluster[1]) * across
                row_scales = self._row_scales(
                    scales, in_team, team, group, groups, start, rows, row
                )
                # Here, not by the first product: under the other warpgroup's products in
                # ping-pong, and the last tile's values need no registers any more.
                accumulator.fill(0.0)
                if const_expr(tile.pingpong):
                    self._take_turn(_MULTIPLY_TURN, team)
                loop = (mma, accumulator, fragment_a, fragment_b, operands, steps)
                if const_expr(self.by_rows and tile.pingpong and tile.m == 2 * WARPGROUP_ROWS):
                    # Where a group ends within the first 64 rows, the others need no products.
                    if rows - row > WARPGROUP_ROWS:
                        state, release = self._mainloop(*loop, state, release, 2)
                    else:
                        state, release = self._mainloop(*loop, state, release, 1)
                else:
                    slabs = const_expr(tile.m // (WARPGROUP_ROWS * self.teams))
                    state, release = self._mainloop(*loop, state, release, slabs)
                if const_expr(tile.pingpong):
                    # All products are issued: the other's may queue up behind them.
                    self._give_turn(_MULTIPLY_TURN, team)
                release = self._drain(operands, release, steps)
                preact_state, preact_release = self.epilogue(
                    accumulator, row_scales, in_team, team, blocks, shared_preact, preacts,
                    preact_state, preact_release, group, groups, start, rows, row, column,
                    glu_block, table, base, store, store_preact, bias, partials, constants,
                )  # fmt: skip
            else:
                if steps > 0:
                    state.advance(steps)
                    release.advance(steps)
                if const_expr(spec.kind == "dglu"):
                    skipped = Int32(tile.m * tile.n // (WARPGROUP_ROWS * self.columns))
                    preact_state.advance(skipped)
                    preact_release.advance(skipped)
            if const_expr(tile.pingpong):
                turn = 1 - turn
            tile_index, turn_of_queue = self._next_tile(queue, turn_of_queue, tile_index, tile_step)
            schedule, valid, group, m, n, start, rows = schedule.seek(tile_index)
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    def _take_turn(self, turns, team):
        cute.arch.barrier(barrier_id=turns + team, number_of_threads=2 * _WARPGROUP)

    def _give_turn(self, turns, team):
        cute.arch.barrier_arrive(barrier_id=turns + 1 - team, number_of_threads=2 * _WARPGROUP)

    @cute.jit
    def _mainloop(
        self, mma, accumulator, fragment_a, fragment_b, operands, steps, state, release,
        slabs: cutlass.Constexpr,
    ):  # fmt: skip
        """Issue a tile's products; a stage is released once those of the next one are issued.

        ``slabs``: how many times 64 rows of the warpgroup's accumulator are computed.
        """
        for step in cutlass.range(steps, unroll=1):
            operands.consumer_wait(state)
            warpgroup.fence()
            for k in cutlass.range_constexpr(cute.size(fragment_a, mode=[2])):
                for m in cutlass.range_constexpr(slabs):
                    cute.gemm(
                        mma,
                        _as_tiles(accumulator[None, m, 0], 3),
                        _as_tiles(fragment_a[None, m, k, state.index], 2),
                        _as_tiles(fragment_b[None, 0, k, state.index], 2),
                        _as_tiles(accumulator[None, m, 0], 3),
                    )
            warpgroup.commit_group()
            state.advance()
            if step > 0:
                warpgroup.wait_group(1)
                operands.consumer_release(release)
                release.advance()
        return state, release

    @cute.jit
    def _drain(self, operands, release, steps):
        """Wait for the last products of a tile."""
        warpgroup.wait_group(0)
        if steps > 0:
            operands.consumer_release(release)
            release.advance()
        return release

    # Epilogue. A thread of a warpgroup holds, of each 64 x 8 block of the accumulator, columns
    # 2 * (lane % 4) + {0, 1} of rows 16 * warp + lane // 4 + {0, 8}.

    def _row(self, in_team, team, m, half):
        """Row of the tile that a thread holds in the m-th 64 rows of its warpgroup."""
        first = (in_team // 32) * 16 + (in_team % 32) // 4 + half * 8
        if const_expr(self.teams == 2):
            first += team * WARPGROUP_ROWS
        return first + m * self.teams * WARPGROUP_ROWS

    @cute.jit
    def _row_scales(self, scales, in_team, team, group, groups, start, rows, row):
        """The scales of a thread's rows, 0 beyond the group and for the rows past all groups."""
        count = const_expr(self.tile.m // (WARPGROUP_ROWS * self.teams) * 2)
        values = cute.make_rmem_tensor((count,), Float32)
        for index in cutlass.range_constexpr(count):
            values[index] = Float32(1.0)
            if const_expr(scales is not None):
                values[index] = Float32(0.0)
                at = row + self._row(in_team, team, index // 2, index % 2)
                if (at < rows) & (group < groups):
                    values[index] = scales[start + at].to(Float32)
        return values

    @cute.jit
    def epilogue(
        self, accumulator, row_scales, in_team, team, blocks, shared_preact, preacts,
        preact_state, preact_release, group, groups, start, rows, row, column, glu_block, table,
        base, store, store_preact, bias, partials, constants,
    ):  # fmt: skip
        """Turn the accumulator into the outputs of `Spec.kind`."""
        spec, tile = self.spec, self.tile
        writer = BlockWriter(spec, self.dtype, self.out_dtype, in_team, team, blocks)
        writer.begin()
        both = None
        if const_expr(self.by_rows):
            out = group_rows(store.tma_tensor, 0, start, rows)
            if const_expr(store_preact is not None):
                both = [
                    (side.atom, group_rows(side.tma_tensor, 0, start, rows))
                    for side in store_preact
                ]
        elif const_expr(spec.table):
            out = at_distance(store.tma_tensor, table[group] - base)
        else:
            out = store.tma_tensor[None, None, group]
        out = (store.atom, out)

        if const_expr(spec.kind == "dglu" and tile.pingpong):
            self._take_turn(_PREACT_TURN, team)
        # Blocks are counted through the tile, where the count is known when compiling.
        per_slab = const_expr(self._blocks_of_slab())
        slabs = const_expr(tile.m // (WARPGROUP_ROWS * self.teams))
        for m in cutlass.range_constexpr(slabs):
            slab = row + m * self.teams * WARPGROUP_ROWS
            if const_expr(self.teams == 2):
                slab += team * WARPGROUP_ROWS
            if const_expr(spec.bias):
                self._add_bias(
                    accumulator, m, row_scales, in_team, group, groups, column, bias, glu_block
                )
            if const_expr(spec.kind in ("store", "wgrad")):
                self._store(writer, accumulator, m, out, slab, column, m * per_slab)
            elif const_expr(spec.kind == "glu"):
                self._glu(
                    writer, accumulator, m, row_scales, out, both, slab, column, glu_block,
                    constants, m * per_slab,
                )  # fmt: skip
            else:
                preact_state, preact_release = self._dglu(
                    writer, accumulator, m, row_scales, out, both, slab, column, glu_block,
                    constants, m * per_slab, m == slabs - 1, shared_preact, preacts,
                    preact_state, preact_release, partials, in_team, team, row, rows, start,
                )  # fmt: skip
        if const_expr(spec.kind == "dglu"):
            if in_team < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                if in_team == 0:
                    preacts.consumer_release(preact_release)
            preact_release.advance()
        return preact_state, preact_release

    def _blocks_of_slab(self):
        """Blocks written for each 64 rows of a warpgroup."""
        if self.spec.kind == "glu":
            kept = self.tile.n if self.spec.keep else 0
            return (kept + self.tile.n // 2) // self.columns
        return self.tile.n // self.columns

    @staticmethod
    def _value(accumulator, m, eight, i):
        """Value i of a thread in 8 columns of the accumulator: columns count first, then rows."""
        return accumulator[(i % 2, i // 2, eight), m, 0]

    def _gate(self, eight):
        """Which 8 columns hold the gates of the eight-th 8 activation columns."""
        stripe = self.spec.stripe // 8
        return eight // stripe * 2 * stripe + eight % stripe

    @cute.jit
    def _add_bias(
        self, accumulator, m, row_scales, in_team, group, groups, column, bias, glu_block
    ):
        """``accumulator += bias * scale`` (no scale where the activation is scaled)."""
        spec = self.spec
        within = 2 * (in_team % 4)
        columns = cute.size(bias, mode=[1])
        if group < groups:
            for eight in cutlass.range_constexpr(self.tile.n // 8):
                at = column + eight * 8
                if const_expr(spec.kind == "glu"):
                    at = self._gate_column(column, glu_block) + eight * 8
                    if const_expr(spec.paired and eight >= self.tile.n // 16):
                        at += glu_block - self.tile.n // 2
                for side in cutlass.range_constexpr(2):
                    value = Float32(0.0)
                    if at + within + side < columns:
                        value = bias[group, at + within + side].to(Float32)
                    for half in cutlass.range_constexpr(2):
                        scaled = value
                        if const_expr(spec.kind == "store"):
                            scaled = value * row_scales[2 * m + half]
                        accumulator[(side, half, eight), m, 0] += scaled

    def _put_accumulator(self, writer, block, accumulator, m, index):
        """Put the index-th block of the accumulator together as it is."""
        for piece in range(self.columns // PIECE):
            eight = 2 * piece + index * self.columns // 8
            values = [self._value(accumulator, m, eight + i // 4, i % 4) for i in range(8)]
            writer.put(values, block, piece)

    @cute.jit
    def _store(self, writer, accumulator, m, out, slab, column, count: cutlass.Constexpr):
        """The accumulator as it is."""
        for index in cutlass.range_constexpr(self.tile.n // self.columns):
            block = writer.block(count + index)
            self._put_accumulator(writer, block, accumulator, m, index)
            writer.write([(*out, slab, column + index * self.columns, block)])

    @cute.jit
    def _glu(
        self, writer, accumulator, m, row_scales, out, both, slab, column, glu_block, constants,
        count: cutlass.Constexpr,
    ):  # fmt: skip
        """The scaled activation; before it, if kept, the accumulator it is computed from."""
        spec = self.spec
        activation = FORWARD[spec.activation]
        half = self.tile.n // 2
        for index in cutlass.range_constexpr(half // self.columns):
            # First the two blocks that it is computed from: then their registers are free.
            if const_expr(spec.keep):
                for side in cutlass.range_constexpr(2):
                    whole = index + side * half // self.columns if spec.paired else 2 * index + side
                    block = writer.block(count)
                    self._put_accumulator(writer, block, accumulator, m, whole)
                    view = side if const_expr(spec.paired) else 0
                    at = self._gate_column(column, glu_block) + whole * self.columns - view * half
                    writer.write([(*both[view], slab, at, block)])
                    count += 1
            block = writer.block(count)
            for piece in cutlass.range_constexpr(self.columns // PIECE):
                values = [None] * 8
                for i in cutlass.range_constexpr(8):
                    eight = self._gate(2 * piece + index * self.columns // 8 + i // 4)
                    gate = self._value(accumulator, m, eight, i % 4)
                    linear = self._value(accumulator, m, eight + spec.stripe // 8, i % 4)
                    scale = row_scales[2 * m + i % 4 // 2]
                    values[i] = activation(gate, linear, constants) * scale
                writer.put(values, block, piece)
            writer.write([(*out, slab, column + index * self.columns, block)])
            count += 1

    @staticmethod
    def _put_back(writer, values, sides, pieces):
        for at, piece in values.items():
            writer.put(piece, sides[at // pieces], at % pieces)

    @cute.jit
    def _dglu(
        self, writer, accumulator, m, row_scales, out, both, slab, column, glu_block, constants,
        count: cutlass.Constexpr, last_slab: cutlass.Constexpr, shared_preact, preacts,
        preact_state, preact_release, partials, in_team, team, row, rows, start,
    ):  # fmt: skip
        """Gradients of gate, linear and scale from the accumulator, and the scaled activation."""
        spec = self.spec
        backward = BACKWARD[spec.activation]
        pieces = self.columns // PIECE
        scale_grads = [Float32(0.0), Float32(0.0)]
        for index in cutlass.range_constexpr(self.tile.n // self.columns):
            preacts.consumer_wait(preact_state)
            if const_expr(self.tile.pingpong and last_slab):  # noqa: SIM102 (decided when compiling)
                if const_expr(index == self.tile.n // self.columns - 1):
                    self._give_turn(_PREACT_TURN, team)
            # Two blocks of gate and linear columns; their gradients take their place.
            sides = [shared_preact[None, None, 2 * preact_state.index + side] for side in range(2)]
            block = writer.block(count + index)
            # The gradients can be put down at once, the activations when their block is vacant.
            all_activations = []
            for piece in cutlass.range_constexpr(pieces):
                gates = [self._gate(2 * piece + i) for i in range(2)]
                linears = [gate + spec.stripe // 8 for gate in gates]
                # 16 activation columns and their gates and linears: always two pieces of 16.
                touched = sorted({eight // 2 for eight in gates + linears})
                values = {p: writer.read(sides[p // pieces], p % pieces) for p in touched}
                activations = []
                for i in cutlass.range_constexpr(8):
                    gate, linear = gates[i // 4], linears[i // 4]
                    at_gate, at_linear = gate % 2 * 4 + i % 4, linear % 2 * 4 + i % 4
                    d_gate, d_linear, value = backward(
                        values[gate // 2][at_gate], values[linear // 2][at_linear], constants
                    )
                    eight = 2 * piece + i // 4 + index * self.columns // 8
                    gradient = self._value(accumulator, m, eight, i % 4)
                    scale = row_scales[2 * m + i % 4 // 2]
                    scale_grads[i % 4 // 2] += gradient * value
                    gradient *= scale
                    values[gate // 2][at_gate] = gradient * d_gate
                    values[linear // 2][at_linear] = gradient * d_linear
                    activations.append(value * scale)
                self._put_back(writer, values, sides, pieces)
                all_activations.append(activations)
            first = self._gate_column(column + index * self.columns, glu_block)
            stores = [(*out, slab, column + index * self.columns, block)]
            for side in cutlass.range_constexpr(2):
                view = side if spec.paired else 0
                at = first + (side - view) * self.columns
                stores.append((*both[view], slab, at, sides[side]))
            if const_expr(count + index > 0):
                writer.vacate((preacts, preact_release))
                preact_release.advance()
            for piece in cutlass.range_constexpr(pieces):
                writer.put(all_activations[piece], block, piece)
            writer.write(stores, vacated=True)
            preact_state.advance()
        for half in cutlass.range_constexpr(2):
            total = scale_grads[half]
            total += cute.arch.shuffle_sync_bfly(total, 1)
            total += cute.arch.shuffle_sync_bfly(total, 2)
            at = row + self._row(in_team, team, m, half)
            if (in_team % 4 == 0) & (at < rows):
                partials[column // self.tile.n, start + at] = total
        return preact_state, preact_release
