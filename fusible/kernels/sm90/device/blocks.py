"""Blocks of 64 rows between a warpgroup's registers and global memory, through shared memory."""

import cutlass
from cutlass import Float32, const_expr, cute
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, cpasync, warp
from cutlass.utils import hopper_helpers as hopper

from fusible.kernels.sm90.device.addressing import at_distance
from fusible.kernels.sm90.device.schedule import group_end
from fusible.kernels.sm90.spec import WARPGROUP_ROWS

_FILLS = 8  # boxes of zeros on their way at once

WARP_ROWS = 16  # of a block of 64: a warp reads, puts together and stores its own
PIECE = 16  # columns that one stmatrix or ldmatrix moves: 8 values of each thread


class BlockWriter:
    """One warp's way out: its rows of a ring of blocks, and its threads' part in each.

    A warp waits for nothing but its own stores: no other warp touches its rows of a block.
    """

    def __init__(self, spec, dtype, out_dtype, thread, team, blocks):
        self.columns, self.ring = spec.block_columns, spec.out_blocks
        self.dtype, self.thread, self.team, self.blocks = dtype, thread, team, blocks
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

    @cute.jit
    def block(self, count: cutlass.Constexpr):
        """Where the tile's ``count``-th block is put together, once its last store has left it."""
        if const_expr(count >= self.ring):
            self.settle(self.ring - 1)
        return self.blocks[None, None, self.team * self.ring + count % self.ring]

    @cute.jit
    def settle(self, pending: cutlass.Constexpr):
        """Wait until all but ``pending`` of the warp's stores have left shared memory."""
        cute.arch.cp_async_bulk_wait_group(pending, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def write(self, stores):
        """Store the warp's rows of blocks that it has put together.

        ``stores`` lists ``(atom, tensor, row, column, block)``.
        """
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        for atom, tensor, row, column, block in stores:
            rows = cute.local_tile(block, (WARP_ROWS, self.columns), (self.warp, 0))
            box = cute.local_tile(
                cute.domain_offset((row + self.warp * WARP_ROWS, column), tensor),
                (WARP_ROWS, self.columns),
                (0, 0),
            )
            source, target = cpasync.tma_partition(
                atom,
                0,
                cute.make_layout(1),
                cute.group_modes(rows, 0, 2),
                cute.group_modes(box, 0, 2),
            )
            cute.copy(atom, source, target)
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
    box = (WARP_ROWS, spec.block_columns)
    down, across = cute.ceil_div(columns, box[0]), cute.ceil_div(problem.depth, box[1])
    for group in cutlass.range(problem.groups, unroll=1):
        start = group_end(ends, group - 1, total_rows)
        if group_end(ends, group, total_rows) <= start:
            out = output_of(spec, problem, store, group)
            for index in cutlass.range(block, down * across, blocks, unroll=1):
                offset = (index // across * box[0], index % across * box[1])
                target = cute.local_tile(cute.domain_offset(offset, out), box, (0, 0))
                source, target = cpasync.tma_partition(
                    store.atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(zeros, 0, 2),
                    cute.group_modes(target, 0, 2),
                )
                cute.copy(store.atom, source, target)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(_FILLS, read=False)
    cute.arch.cp_async_bulk_wait_group(0, read=False)


def output_of(spec, problem, store, group):
    """The output matrix of a group that the reduction is grouped by."""
    if spec.table:
        return at_distance(store.tma_tensor, problem.table[group] - problem.base)
    return store.tma_tensor[None, None, group]
