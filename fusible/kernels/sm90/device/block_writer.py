"""Blocks of 64 rows between a warpgroup's registers and global memory, through shared memory."""

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, warp
from cutlass.utils import hopper_helpers as hopper

from fusible.kernels.sm90.device.parts import EPILOGUE_BARRIER, WARPGROUP
from fusible.kernels.sm90.device.stores import store_box
from fusible.kernels.sm90.device.stripes import fragment_layout, fragment_order
from fusible.kernels.sm90.spec import WARP_ROWS, WARPGROUP_ROWS

PIECE_COLUMNS = 16  # columns that one stmatrix or ldmatrix moves: 8 values of each thread


class BlockWriter:
    """How a warpgroup stores: its ring of blocks, and its threads' part in each.

    Stored in whole, a ring of ``n > 1`` blocks needs one barrier a block: the warp that stores
    waits, before the barrier of block ``i``, until the store of block ``i - n + 1`` has left shared
    memory, so that past the barrier every warp may write block ``i + 1`` over it. Stored warp by
    warp (`Spec.stored_rows`), each waits for its own stores only; of a tile of 16 rows the first
    warp has all. A single block is vacated first.
    """

    def __init__(self, spec, dtype, out_dtype, thread, warpgroup, blocks):
        self.columns, self.ring = spec.block_columns, spec.out_blocks
        self.dtype, self.thread, self.warpgroup, self.blocks = dtype, thread, warpgroup, blocks
        self.whole = spec.stored_rows == WARPGROUP_ROWS
        self.one_warp_stores = spec.tile.m == WARP_ROWS  # the others have no row of the tile
        self.warp = cute.arch.make_warp_uniform(thread >> 5)
        mma = hopper.make_trivial_tiled_mma(
            dtype,
            dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (WARPGROUP_ROWS, PIECE_COLUMNS),
        )
        if out_dtype.width == 16:
            to_shared = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), out_dtype)
        else:
            to_shared = cute.make_copy_atom(CopyUniversalOp(), out_dtype, num_bits_per_copy=64)
        self.to_shared = cute.make_tiled_copy_C(to_shared, mma)
        from_shared = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), dtype)
        self.from_shared = cute.make_tiled_copy_C(from_shared, mma)
        self.shape = mma.partition_shape_C((WARPGROUP_ROWS, PIECE_COLUMNS))
        self.stripe, self.is_narrow = spec.stripe, spec.is_narrow

    def read(self, block, piece):
        """A thread's 8 values of 16 columns of a block of 16-bit values."""
        values = cute.make_rmem_tensor(self.shape, self.dtype)
        copy = self.from_shared.get_slice(self.thread)
        source = copy.partition_S(block)[None, 0, piece]
        cute.copy(self.from_shared, source, copy.retile(values)[None, 0, 0])
        return [values[i].to(Float32) for i in range(cute.size(values))]

    def put(self, values, block, piece):
        """Write a thread's 8 values of 16 columns of a block to shared memory."""
        fragment = cute.make_rmem_tensor(self.shape, block.element_type)
        for i, value in enumerate(values):
            fragment[i] = value.to(block.element_type)
        copy = self.to_shared.get_slice(self.thread)
        target = copy.partition_D(block)[None, 0, piece]
        cute.copy(self.to_shared, copy.retile(fragment)[None, 0, 0], target)

    def read_preacts(self, block, piece):
        """`read` of pre-activations, in the order that stripes of 8 have."""
        if not self.is_narrow:
            return self.read(block, piece)
        copy, part, values = self._narrow(block, piece)
        cute.copy(copy, part, values)
        return [values[i].to(Float32) for i in fragment_order(self.stripe)]

    def put_preacts(self, values, block, piece):
        """Write what `read_preacts` has read, or its gradient, to where it was."""
        if not self.is_narrow:
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
        copy = cute.make_tiled_copy(atom, layout, (WARPGROUP_ROWS, PIECE_COLUMNS))
        part = copy.get_slice(self.thread).partition_S(block)[None, 0, piece]
        return copy, part, cute.make_rmem_tensor(part.shape, self.dtype)

    @cute.jit
    def block(self, count: cutlass.Constexpr):
        """Where the tile's ``count``-th block is put together, once it is vacant."""
        if const_expr(count >= self.ring and (not self.whole or self.ring == 1)):
            self.wait_stores(self.ring - 1)
        return self.blocks[None, None, self.warpgroup * self.ring + count % self.ring]

    @cute.jit
    def wait_stores(self, pending: cutlass.Constexpr):
        """Wait until all but ``pending`` of the stores have left shared memory."""
        if const_expr(self.whole):
            self._wait_in_first_warp(pending)
            self._barrier()
        else:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
            cute.arch.sync_warp()

    @cute.jit
    def _wait_in_first_warp(self, pending: cutlass.Constexpr):
        if self.warp == 0:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)

    def _barrier(self):
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + self.warpgroup, number_of_threads=WARPGROUP)

    @cute.jit
    def write(self, stores):
        """Store blocks that are put together.

        ``stores`` lists ``(atom, tensor, row, column, block)``.
        """
        cute.arch.fence_proxy("async.shared", space="cta")
        if const_expr(self.whole):
            if const_expr(self.ring > 1):
                self._wait_in_first_warp(self.ring - 2)
            self._barrier()
            if self.warp == 0:
                self._store(stores, WARPGROUP_ROWS, Int32(0))
        else:
            cute.arch.sync_warp()
            if const_expr(self.one_warp_stores):
                if self.warp == 0:
                    self._store(stores, WARP_ROWS, Int32(0))
            else:
                self._store(stores, WARP_ROWS, self.warp)

    def _store(self, stores, height, which):
        for atom, tensor, row, column, block in stores:
            box = (height, self.columns)
            rows = cute.local_tile(block, box, (which, 0))
            store_box(atom, tensor, box, (row + which * height, column), rows)
        cute.arch.cp_async_bulk_commit_group()
