"""Blocks of 64 rows between a warpgroup's registers and global memory, through shared memory."""

import cutlass
from cutlass import Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, cpasync, warp
from cutlass.utils import hopper_helpers as hopper

from fusible.kernels.sm90.device.addressing import at_distance, group_rows
from fusible.kernels.sm90.device.parts import gate_column
from fusible.kernels.sm90.device.schedule import group_end
from fusible.kernels.sm90.device.stripes import fragment_layout, fragment_order
from fusible.kernels.sm90.spec import WARP_ROWS, WARPGROUP_ROWS

_EPILOGUE_BARRIER = 1  # and 2: named barrier of each warpgroup's epilogue
_WARPGROUP = 128
_FILLS = 8  # stores of zeros under way at once
PIECE = 16  # columns that one stmatrix or ldmatrix moves: 8 values of each thread


class BlockWriter:
    """A warpgroup's way out: its ring of blocks, and its threads' part in each.

    Stored in whole, a ring of ``n > 1`` blocks needs one barrier a block: the warp that stores
    waits, before the barrier of block ``i``, until the store of block ``i - n + 1`` has left shared
    memory, so that past the barrier every warp may write block ``i + 1`` over it. Stored warp by
    warp (`Spec.stored_rows`), each waits for its own stores only. A single block is vacated first.
    """

    def __init__(self, spec, dtype, out_dtype, thread, team, blocks):
        self.columns, self.ring = spec.block_columns, spec.out_blocks
        self.dtype, self.thread, self.team, self.blocks = dtype, thread, team, blocks
        self.whole = spec.stored_rows == WARPGROUP_ROWS
        self.warp = cute.arch.make_warp_uniform(thread >> 5)
        mma = hopper.make_trivial_tiled_mma(
            dtype,
            dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (WARPGROUP_ROWS, PIECE),
        )
        if out_dtype.width == 16:
            to_shared = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), out_dtype)
        else:
            to_shared = cute.make_copy_atom(CopyUniversalOp(), out_dtype, num_bits_per_copy=64)
        self.to_shared = cute.make_tiled_copy_C(to_shared, mma)
        from_shared = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), dtype)
        self.from_shared = cute.make_tiled_copy_C(from_shared, mma)
        self.shape = mma.partition_shape_C((WARPGROUP_ROWS, PIECE))
        self.stripe = spec.stripe

    def read(self, block, piece):
        """A thread's 8 values of 16 columns of a block of 16-bit values."""
        values = cute.make_rmem_tensor(self.shape, self.dtype)
        copy = self.from_shared.get_slice(self.thread)
        source = copy.partition_S(block)[None, 0, piece]
        cute.copy(self.from_shared, source, copy.retile(values)[None, 0, 0])
        return [values[i].to(Float32) for i in range(cute.size(values))]

    def put(self, values, block, piece):
        """Write a thread's 8 values of 16 columns of a block to shared memory."""
        self.put_rounded(self.rounded(values, block.element_type), block, piece)

    def rounded(self, values, dtype):
        """A thread's 8 values of 16 columns as ``dtype``: 16 bits need half the registers."""
        fragment = cute.make_rmem_tensor(self.shape, dtype)
        for i, value in enumerate(values):
            fragment[i] = value.to(dtype)
        return fragment

    def put_rounded(self, fragment, block, piece):
        """`put` of values that `rounded` gave."""
        copy = self.to_shared.get_slice(self.thread)
        target = copy.partition_D(block)[None, 0, piece]
        cute.copy(self.to_shared, copy.retile(fragment)[None, 0, 0], target)

    def read_preacts(self, block, piece):
        """`read` of gates and linears, in the order that stripes of 8 have."""
        if self.stripe >= 8:
            return self.read(block, piece)
        copy, part, values = self._narrow(block, piece)
        cute.copy(copy, part, values)
        return [values[i].to(Float32) for i in fragment_order(self.stripe)]

    def put_preacts(self, values, block, piece):
        """Write what `read_preacts` has read, or its gradient, to where it was."""
        if self.stripe >= 8:
            self.put(values, block, piece)
            return
        copy, part, fragment = self._narrow(block, piece)
        for i, value in zip(fragment_order(self.stripe), values, strict=True):
            fragment[i] = value.to(self.dtype)
        cute.copy(copy, fragment, part)

    def _narrow(self, block, piece):
        """How stripes of less than 8 are copied: a thread's part of 16 columns, and as registers.

        Words of 4 or 8 bytes a thread; rows two apart meet in the same banks.
        """
        layout, columns = fragment_layout(self.stripe)
        atom = cute.make_copy_atom(
            CopyUniversalOp(), self.dtype, num_bits_per_copy=columns * self.dtype.width
        )
        copy = cute.make_tiled_copy(atom, layout, (WARPGROUP_ROWS, PIECE))
        part = copy.get_slice(self.thread).partition_S(block)[None, 0, piece]
        return copy, part, cute.make_rmem_tensor(part.shape, self.dtype)

    @cute.jit
    def block(self, count: cutlass.Constexpr):
        """Where the tile's ``count``-th block is put together, once it is vacant."""
        if const_expr(count >= self.ring and (not self.whole or self.ring == 1)):
            self.settle(self.ring - 1)
        return self.blocks[None, None, self.team * self.ring + count % self.ring]

    @cute.jit
    def settle(self, pending: cutlass.Constexpr):
        """Wait until all but ``pending`` of the stores have left shared memory."""
        if const_expr(self.whole):
            self._settle_first(pending)
            self._barrier()
        else:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
            cute.arch.sync_warp()

    @cute.jit
    def _settle_first(self, pending: cutlass.Constexpr):
        if self.warp == 0:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)

    def _barrier(self):
        cute.arch.barrier(barrier_id=_EPILOGUE_BARRIER + self.team, number_of_threads=_WARPGROUP)

    @cute.jit
    def write(self, stores):
        """Store blocks that are put together.

        ``stores`` lists ``(atom, tensor, row, column, block)``.
        """
        cute.arch.fence_proxy("async.shared", space="cta")
        if const_expr(self.whole):
            if const_expr(self.ring > 1):
                self._settle_first(self.ring - 2)
            self._barrier()
            if self.warp == 0:
                self._store(stores, WARPGROUP_ROWS, Int32(0))
        else:
            cute.arch.sync_warp()
            self._store(stores, WARP_ROWS, self.warp)

    def _store(self, stores, height, which):
        for atom, tensor, row, column, block in stores:
            box = (height, self.columns)
            rows = cute.local_tile(block, box, (which, 0))
            store_box(atom, tensor, box, (row + which * height, column), rows)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def fill_empty(
    spec: cutlass.Constexpr, problem, ends: cute.Tensor, total_rows, columns, store, zeros
):
    """Write zeros to the output matrices of groups without rows; by one warp of every block.

    Few are under way at once, so that they do not delay what the other warps wait for.
    """
    lane = cute.arch.lane_idx()
    vector = cute.make_tensor(zeros.iterator, cute.make_layout(cute.size(zeros)))
    for i in cutlass.range_constexpr(cute.size(zeros) // 32):
        vector[lane + 32 * i] = zeros.element_type(0)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    box = (spec.stored_rows, spec.block_columns)
    down, across = cute.ceil_div(columns, box[0]), cute.ceil_div(problem.depth, box[1])
    for group in cutlass.range(problem.groups, unroll=1):
        start = group_end(ends, group - 1, total_rows)
        if group_end(ends, group, total_rows) <= start:
            out = output_of(spec, problem, store, group)
            for index in cutlass.range(block, down * across, blocks, unroll=1):
                offset = (index // across * box[0], index % across * box[1])
                store_box(store.atom, out, box, offset, zeros)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(_FILLS, read=False)
    cute.arch.cp_async_bulk_wait_group(0, read=False)


@cute.jit
def store_gradients(spec: cutlass.Constexpr, problem, walk, preacts, outputs):
    """Store what the epilogue of the activation's backward puts together; by one warp."""
    tile, in_cluster, ring = spec.tile, walk.in_cluster, preacts.pipeline
    box = (WARPGROUP_ROWS, spec.block_columns)
    across = tile.n // box[1]
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, spec.preact_slots)
    read, valid, _, m, n, start, rows = walk.next(walk.begin())
    while valid:
        row = (m * tile.cluster_m + in_cluster[0]) * tile.m
        column = (n * tile.cluster_n + in_cluster[1]) * tile.n
        out = group_rows(outputs.store.tma_tensor, 0, start, rows)
        both = [group_rows(side.tma_tensor, 0, start, rows) for side in outputs.store_preact]
        for block in cutlass.range(spec.preact_blocks, unroll=1):
            cute.arch.mbarrier_wait(preacts.done + state.index, state.phase)
            down, right = row + block // across * box[0], column + block % across * box[1]
            first = gate_column(spec, right, problem.glu_block)
            store_box(outputs.store.atom, out, box, (down, right), outputs.blocks[None, None, block % 2])
            for side in cutlass.range_constexpr(2):
                view = side if const_expr(spec.paired) else 0
                store_box(
                    outputs.store_preact[view].atom,
                    both[view],
                    box,
                    (down, first + (side - view) * box[1]),
                    preacts.blocks[None, None, 2 * state.index + side],
                )
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            ring.consumer_release(state)
            state.advance()
        read, valid, _, m, n, start, rows = walk.next(read)
    cute.arch.cp_async_bulk_wait_group(0, read=False)


def store_box(atom, tensor, box, offset, source):
    """Store one box from shared memory."""
    target = cute.local_tile(cute.domain_offset(offset, tensor), box, (0, 0))
    source, target = cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(source, 0, 2),
        cute.group_modes(target, 0, 2),
    )
    cute.copy(atom, source, target)


def output_of(spec, problem, store, group):
    """The output matrix of a group that the reduction is grouped by."""
    if spec.table:
        return at_distance(store.tma_tensor, problem.table[group] - problem.base)
    return store.tma_tensor[None, None, group]
