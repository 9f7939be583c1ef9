"""The grouped matrix product on Hopper: one mainloop, every epilogue.

A thread block is three warpgroups. Warp 0 of the first loads operands into a ring of stages by
TMA; warp 1 loads a second ring (`Spec.rings`) or pre-activations; warp 2 of a cluster's first block
finds tiles; warp 3 stores a backward's gradients, or the zeros of empty groups. The other two
warpgroups multiply (WGMMA from shared memory, FP32 accumulators) and run the epilogue, which walks
the accumulator in blocks of 64 rows by 64 (or 32) columns: registers, shared memory, TMA store. A
quantized activation goes from registers to global memory.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from fusible.kernels.device.bits import CUTLASS_DTYPES
from fusible.kernels.device.dependent_launch import wait
from fusible.kernels.sm90.device.addressing import address_by_distance, address_rows_by_group
from fusible.kernels.sm90.device.loads import load_operands, load_preacts, prefetch_weights
from fusible.kernels.sm90.device.parts import (
    WARPGROUP,
    Operands,
    Outputs,
    Preacts,
    Problem,
    Scales,
    TileReader,
)
from fusible.kernels.sm90.device.products import multiply, operand_layout
from fusible.kernels.sm90.device.stores import fill_empty, store_gradients
from fusible.kernels.sm90.device.tile_scheduler import BAND, TileQueue, TileScheduler
from fusible.kernels.sm90.spec import FORWARD, WARP_ROWS, WARPGROUP_ROWS, Spec
from fusible.recipes.formats import FP8_BLOCK

# Registers a thread keeps: 24 + 2 * 240 fill the file for three warpgroups.
_LOAD_REGISTERS, _MATH_REGISTERS = 24, 240


class GroupedGemm:
    """The kernel that a `Spec` describes; ``cute.compile`` turns an instance into code."""

    def __init__(self, spec: Spec):
        if spec.is_backward and not spec.tile.pingpong:
            raise ValueError(
                f"a tile of {spec.kind} must be ping-pong, as the warpgroups' epilogues take "
                f"turns, got {spec.tile}; pass pingpong=True"
            )
        if spec.tile.m % (WARPGROUP_ROWS * spec.tile.warpgroups):
            forward = spec.kind in ("store", *FORWARD)
            if not (forward and spec.tile.m == WARP_ROWS and spec.tile.pingpong):
                raise ValueError(
                    f"a tile must have a multiple of 64 rows for each warpgroup that shares it, or "
                    f"16 in ping-pong in a forward, got {spec.tile} of {spec.kind}; pass other rows"
                )
        if spec.reads_ahead and not spec.can_read_ahead:
            raise ValueError(
                "only a plain product of weights without a table, in tiles that are "
                f"neither dynamic nor of clusters, can read ahead, got {spec}; pass "
                "reads_ahead=False"
            )
        if spec.stages < 2 * spec.rings:
            raise ValueError(
                "a ring of the pipeline must have two stages, as one is released when the next has "
                f"arrived, got {spec.stages} for {spec.rings} rings of {spec}; pass a smaller tile"
            )
        self.spec, self.tile = spec, spec.tile
        names = spec.dtype, spec.b_dtype or spec.dtype, spec.value_dtype, spec.out_dtype
        dtypes = [CUTLASS_DTYPES[name] for name in names]
        self.dtype, self.b_dtype, self.value_dtype, self.out_dtype = dtypes
        self.cluster = (spec.tile.cluster_m, spec.tile.cluster_n)
        self.block = (WARPGROUP_ROWS, spec.block_columns)
        self.stored = (spec.stored_rows, spec.block_columns)

    @cute.jit
    def __call__(
        self,
        a: Int64,
        b: Int64,
        preact: Int64,
        out: Int64,
        preact_out: Int64,
        ends: Int64,
        table: Int64,
        bias: Int64,
        scales: Int64,
        preact_scales: Int64,
        out_scales: Int64,
        row_sums: Int64,
        counter: Int64,
        total_rows: Int32,
        tail_end: Int32,
        columns: Int32,
        depth: Int32,
        groups: Int32,
        a_pitch: Int64,
        b_pitch: Int64,
        b_group_pitch: Int64,
        preact_pitch: Int64,
        out_pitch: Int64,
        preact_out_pitch: Int64,
        glu_block: Int32,
        glu_columns: Int32,
        limit: Float32,
        alpha: Float32,
        offset: Float32,
        clusters: Int32,
        a_scales: Int64,
        b_scales: Int64,
        a_scale_pitch: Int64,
        a_scale_block: Int64,
        b_scale_group: Int64,
        b_scale_pitch: Int64,
        b_scale_block: Int64,
        stream: cuda.CUstream,
    ):
        """Launch. Pointers are addresses, pitches count elements.

        Rows grouped: ``a`` [total_rows, depth], ``b`` [groups, columns, depth]. Reduction
        grouped: ``a`` [total_rows, columns], ``b`` [total_rows, depth], ``out``
        [groups, columns, depth], the group pitch being the output's. Rows from the last group's end
        to ``tail_end`` get zero output; others past it are not written. For the gated kinds
        ``columns`` counts activation columns, ``glu_block`` is the distance from a gate column
        to its linear column and ``glu_columns`` the bound of gate columns. A backward reads
        ``preact`` and writes its gradient to ``preact_out``; a forward writes the pre-activation
        there. ``row_sums`` [tiles across, total_rows] are a backward's sums for the gradients of
        scales. If ``out`` or ``preact_out`` is quantized, its elements are contiguous and its
        scales, ``out_scales`` or ``preact_scales``, are [columns / 128, total_rows].

        FP8 operands are contiguous along the reduction; where it is grouped they are ``a``
        [columns, total_rows] and ``b`` [depth, total_rows], contiguous, and groups end at multiples
        of 128 rows. For the k-th 128 of the reduction, row ``i`` of A has the scale ``a_scales[i *
        a_scale_pitch + k * a_scale_block]``. So has row ``j`` of B where `Spec.b_scale_layout` is
        "rows", with pitch 1; where it is "blocks" ``b_scales[g * b_scale_group + j // 128 *
        b_scale_pitch + k * b_scale_block]`` in group ``g``, or in all if the reduction is grouped.
        """
        spec, tile = self.spec, self.tile
        a_pitch, b_pitch = (
            cute.assume(p, divby=128 // self.dtype.width) for p in (a_pitch, b_pitch)
        )
        # The pitch of groups is the weight's, or the output's.
        unit = 128 // self.dtype.width if const_expr(spec.by_rows) else 8
        b_group_pitch = cute.assume(b_group_pitch, divby=unit)
        preact_pitch, out_pitch, preact_out_pitch = (
            cute.assume(pitch, divby=8) for pitch in (preact_pitch, out_pitch, preact_out_pitch)
        )
        if const_expr(spec.by_rows):
            tensor_a = self._matrix(a, (total_rows, depth), (a_pitch, 1))
            weight_rows = columns * 2 if const_expr(spec.kind == "glu") else columns
            strides = (b_pitch, 1) if const_expr(spec.b_major == "k") else (1, b_pitch)
            tensor_b = self._matrix(b, (weight_rows, depth), strides, self.b_dtype)
            tensor_b = self._per_group(tensor_b, groups, b_group_pitch)
            tensor_out = self._matrix(out, (total_rows, columns), (out_pitch, 1), self.value_dtype)
            tensor_out = address_rows_by_group(tensor_out, 0)
        else:
            tensor_out = self._matrix(out, (columns, depth), (out_pitch, 1), self.out_dtype)
            tensor_out = self._per_group(tensor_out, groups, b_group_pitch)
        if const_expr(not spec.by_rows and spec.is_fp8):
            pitch = cute.assume(Int64(total_rows), divby=FP8_BLOCK)
            tensor_a = self._matrix(a, (columns, total_rows), (pitch, 1))
            tensor_b = self._matrix(b, (depth, total_rows), (pitch, 1), self.b_dtype)
        elif const_expr(not spec.by_rows):
            tensor_a = self._matrix(a, (columns, total_rows), (1, a_pitch))
            tensor_a = address_rows_by_group(tensor_a, 1)
            tensor_b = self._matrix(b, (depth, total_rows), (1, b_pitch))
            tensor_b = address_rows_by_group(tensor_b, 1)

        part = tile.n // spec.b_parts
        layout_a = operand_layout(spec, spec.a_major, tile.m, self.dtype)
        layout_b = operand_layout(spec, spec.b_major, part, self.b_dtype, spec.b_parts)
        layout_scales = cute.make_layout((tile.n, 1, spec.stages), stride=(1, tile.n, tile.n))
        layout_block = self._block_layout(self.out_dtype, 2 * spec.out_blocks)
        layout_preact = self._block_layout(self.value_dtype, max(spec.sides * spec.preact_slots, 1))

        # Gate and linear columns are two views, so that a box of one stops before the other.
        load_preact, store_preact = None, None
        if const_expr(spec.is_backward):
            load_preact = tuple(
                self._load(view, layout_preact, self.block, 1)
                for view in self._views(preact, glu_block, (total_rows, glu_columns), preact_pitch)
            )
        if const_expr(spec.is_backward or spec.save_preact):
            store_preact = tuple(
                cpasync.make_tiled_tma_atom(
                    cpasync.CopyBulkTensorTileS2GOp(),
                    address_rows_by_group(view, 0),
                    self._rows_layout(self.value_dtype),
                    self.stored,
                )
                for view in self._views(
                    preact_out, glu_block, (total_rows, glu_columns), preact_out_pitch
                )
            )
        store_op = cpasync.CopyBulkTensorTileS2GOp()
        if const_expr(spec.accumulate):
            store_op = cpasync.CopyReduceBulkTensorTileS2GOp()

        scales_of_operands, load_scales = None, None
        if const_expr(spec.is_fp8):
            blocks = cute.ceil_div(depth if spec.by_rows else total_rows, FP8_BLOCK)
            a_rows = total_rows if const_expr(spec.by_rows) else columns
            of_a = self._tensor(Float32, a_scales, (a_rows, blocks), (a_scale_pitch, a_scale_block))
            of_b = None
            if const_expr(spec.b_scale_layout == "rows"):
                pitch = cute.assume(b_scale_block, divby=4)
                of_columns = self._matrix(b_scales, (depth, blocks), (1, pitch), Float32)
                load_scales = self._load(of_columns, layout_scales, (tile.n, 1), 1)
            else:
                b_rows = weight_rows if const_expr(spec.by_rows) else depth
                across = cute.ceil_div(b_rows, FP8_BLOCK)
                of_b = self._tensor(
                    Float32,
                    b_scales,
                    (groups, across, blocks),
                    (b_scale_group, b_scale_pitch, b_scale_block),
                )
            scales_of_operands = Scales(of_a, of_b)

        bias_columns = columns * 2 if const_expr(spec.kind == "glu") else columns
        tiles = cute.ceil_div(columns, tile.n)
        self.kernel(
            self._load(tensor_a, layout_a, (tile.m, spec.tile_k), tile.cluster_n),
            self._load(tensor_b, layout_b, (part, spec.tile_k), tile.cluster_m),
            load_scales,
            scales_of_operands,
            load_preact,
            cpasync.make_tiled_tma_atom(
                store_op, tensor_out, self._rows_layout(self.out_dtype), self.stored
            )
            if const_expr(spec.out_format is None)
            else None,
            store_preact,
            self._tensor(Int32, ends, (groups,)),
            self._tensor(Int64, table, (groups,)) if const_expr(spec.table) else None,
            b if const_expr(spec.by_rows) else out,
            self._rows(self.value_dtype, bias, groups, bias_columns)
            if const_expr(spec.bias)
            else None,
            self._tensor(CUTLASS_DTYPES[spec.row_scale], scales, (total_rows,))
            if const_expr(spec.row_scale)
            else None,
            self._rows(Float32, row_sums, tiles, total_rows)
            if const_expr(spec.is_backward and spec.row_scale != "")
            else None,
            (out, out_scales) if const_expr(spec.out_format is not None) else None,
            (preact_out, preact_scales) if const_expr(spec.quantize_preact) else None,
            self._pointer(Int32, counter),
            layout_a,
            layout_b,
            layout_scales,
            layout_block,
            layout_preact,
            total_rows,
            tail_end,
            columns,
            depth,
            groups,
            glu_block,
            (limit, alpha, offset),
        ).launch(
            grid=[clusters * tile.cluster_m * tile.cluster_n, 1, 1],
            block=[3 * WARPGROUP, 1, 1],
            cluster=[tile.cluster_m * tile.cluster_n, 1, 1],
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    # Host side: tensors and descriptors.

    def _pointer(self, dtype, address, align=None):
        align = align or dtype.width // 8
        return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)

    def _tensor(self, dtype, address, shape, strides=None, align=None):
        layout = cute.make_layout(shape, stride=strides)
        return cute.make_tensor(self._pointer(dtype, address, align), layout)

    def _rows(self, dtype, address, rows, width):
        """Rows of values, side by side."""
        return self._tensor(dtype, address, (rows, width), (Int64(width), 1))

    def _matrix(self, address, shape, strides, dtype=None):
        return self._tensor(dtype or self.dtype, address, shape, strides, 16)

    def _per_group(self, matrix, groups, group_pitch):
        if self.spec.table:
            return address_by_distance(matrix)
        return cute.make_tensor(
            matrix.iterator,
            cute.make_layout((*matrix.shape, groups), stride=(*matrix.stride, group_pitch)),
        )

    def _views(self, address, glu_block, shape, pitch):
        """Gate columns and linear columns; where they alternate within a tile, one view of both."""
        shifts = (Int64(0), Int64(glu_block)) if self.spec.paired else (Int64(0),)
        dtype = self.value_dtype
        return [
            self._matrix(address + shift * (dtype.width // 8), shape, (pitch, 1), dtype)
            for shift in shifts
        ]

    def _block_atom(self, dtype):
        return warpgroup.make_smem_layout_atom(
            hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, self.block[1]), dtype
        )

    def _block_layout(self, dtype, count):
        return cute.tile_to_shape(self._block_atom(dtype), (*self.block, count), order=(0, 1, 2))

    def _rows_layout(self, dtype):
        return cute.tile_to_shape(self._block_atom(dtype), self.stored, order=(0, 1))

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
        load_scales,
        operand_scales,
        load_preact,
        store: cpasync.TmaInfo | None,
        store_preact,
        ends: cute.Tensor,
        table,
        base: Int64,
        bias,
        scales,
        partials,
        quantized,
        quantized_preact,
        counter: cute.Pointer,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        layout_scales: cute.Layout,
        layout_block: cute.ComposedLayout,
        layout_preact: cute.ComposedLayout,
        total_rows: Int32,
        tail_end: Int32,
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
            preact_barriers: cute.struct.MemRange[Int64, max(3 * spec.preact_slots, 1)]
            queue_barriers: cute.struct.MemRange[Int64, 2 * TileQueue.SLOTS]
            queue: cute.struct.Align[
                cute.struct.MemRange[Int32, TileQueue.SLOTS * TileQueue.WORDS], 16
            ]
            scales: cute.struct.Align[
                cute.struct.MemRange[
                    Float32, cute.cosize(layout_scales) if load_scales is not None else 4
                ],
                128,
            ]
            # Without pre-activations or zeros, 16 unused bytes, which fit in the room counted for
            # barriers.
            preact: cute.struct.Align[
                cute.struct.MemRange[
                    self.value_dtype,
                    cute.cosize(layout_preact) if spec.preact_slots else spec.zero_bytes // 2 or 8,
                ],
                1024 if spec.preact_slots or spec.zero_bytes else 16,
            ]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_a)], 1024]
            # Behind operand A: see `_instruction_rows`.
            b: cute.struct.Align[cute.struct.MemRange[self.b_dtype, cute.cosize(layout_b)], 1024]
            blocks: cute.struct.Align[
                cute.struct.MemRange[self.out_dtype, cute.cosize(layout_block)], 1024
            ]

        shared = SmemAllocator().allocate(Shared)
        if warp_index == 0:
            cpasync.prefetch_descriptor(load_a.atom)
            cpasync.prefetch_descriptor(load_b.atom)
            if const_expr(store is not None):
                cpasync.prefetch_descriptor(store.atom)

        cluster_layout = cute.make_layout((1, *self.cluster, 1))
        shared_loads = tile.cluster_m + tile.cluster_n - 1
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=shared.barriers.data_ptr(),
            num_stages=spec.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, shared_loads * tile.warpgroups * 4
            ),
            tx_count=spec.stage_bytes,
            cta_layout_vmnk=cluster_layout,
            defer_sync=True,
        )
        operands = Operands(
            load_a,
            load_b,
            load_scales,
            shared.a.get_tensor(layout_a.outer, swizzle=layout_a.inner),
            shared.b.get_tensor(layout_b.outer, swizzle=layout_b.inner),
            shared.scales.get_tensor(layout_scales) if load_scales is not None else None,
            ring,
        )
        preacts = None
        if const_expr(spec.is_backward):
            preact_ring = pipeline.PipelineTmaAsync.create(
                barrier_storage=shared.preact_barriers.data_ptr(),
                num_stages=spec.preact_slots,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
                tx_count=spec.sides * spec.block_bytes,
                cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
                defer_sync=True,
            )
            preacts = Preacts(
                load_preact,
                shared.preact.get_tensor(layout_preact.outer, swizzle=layout_preact.inner),
                preact_ring,
                shared.preact_barriers.data_ptr() + spec.preact_slots,
                shared.preact_barriers.data_ptr() + 2 * spec.preact_slots,
            )
            if warp_index == 1:
                with cute.arch.elect_one():
                    for slot in cutlass.range_constexpr(spec.preact_slots):
                        cute.arch.mbarrier_init(preacts.done + slot, 4)
        # Warps that multiply; that load operands, or load and store pre-activations.
        loading = spec.rings + 2 * spec.is_backward
        queue = TileQueue(
            counter,
            shared.queue.data_ptr(),
            shared.queue_barriers.data_ptr(),
            tile.dynamic,
            8 + loading,
            cute.size(self.cluster),
        )
        if warp_index == 0:
            queue.initialise()
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)
        if const_expr(spec.by_rows):
            tiles_across = cute.ceil_div(columns, spec.width * tile.cluster_n)
            tiles_down = Int32(0)
        else:
            tiles_across = cute.ceil_div(depth, tile.n * tile.cluster_n)
            tiles_down = cute.ceil_div(columns, tile.m * tile.cluster_m)
        problem = Problem(total_rows, columns, depth, groups, glu_block, table, base)
        first_tile = cute.arch.block_idx()[0] // cute.size(self.cluster)
        tiles = TileReader(queue, in_cluster)
        blocks = shared.blocks.get_tensor(layout_block.outer, swizzle=layout_block.inner)
        zeros = cute.make_tensor(
            cute.recast_ptr(shared.preact.data_ptr(), dtype=self.out_dtype),
            self._rows_layout(self.out_dtype).outer,
        )
        outputs = Outputs(
            store, store_preact, blocks, bias, scales, partials, quantized, quantized_preact,
            constants,
        )  # fmt: skip

        # What is above runs under the end of the kernel before, whose results each role waits for.
        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(_LOAD_REGISTERS)
            if const_expr(spec.prefetches_weights):  # noqa: SIM102 (decided when compiling)
                if warp_index == 0:
                    prefetch_weights(spec, problem, operands, first_tile, in_cluster, tiles_across)
            if const_expr(not spec.reads_ahead):
                wait()
            if (warp_index == 2) & (rank == 0):
                tile_rows = tile.m * tile.cluster_m if const_expr(spec.by_rows) else 0
                scheduler = TileScheduler(
                    ends, total_rows, tail_end, groups, tiles_across, tiles_down, tile_rows,
                    spec.skips_empty_groups, BAND // tile.cluster_m,
                )  # fmt: skip
                queue.send_tiles(
                    scheduler, first_tile, cute.arch.grid_dim()[0] // cute.size(self.cluster)
                )
            if const_expr(spec.rings == 2):
                if warp_index < 2:
                    load_operands(spec, problem, tiles, operands, warp_index)
            elif warp_index == 0:
                load_operands(spec, problem, tiles, operands, Int32(0))
            if const_expr(spec.is_backward):
                if warp_index == 1:
                    load_preacts(spec, problem, tiles, preacts)
                elif warp_index == 3:
                    store_gradients(spec, problem, tiles, preacts, outputs)
            if const_expr(spec.zeroes_empty_groups):  # noqa: SIM102 (decided when compiling)
                if warp_index == 3:
                    fill_empty(spec, problem, ends, total_rows, columns, store, zeros)
        else:
            cute.arch.setmaxregister_increase(_MATH_REGISTERS)
            cute.arch.griddepcontrol_wait()
            multiply(
                spec, problem, tiles, operands, operand_scales, preacts, outputs,
                thread - WARPGROUP, warpgroup_index - 1,
            )  # fmt: skip
