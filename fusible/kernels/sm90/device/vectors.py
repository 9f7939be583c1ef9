"""Kernels over vectors: end rows of groups from their sizes, sums over tiles."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.arch import shuffle_sync, shuffle_sync_up

from fusible.kernels.sm90.device.parts import DTYPES

_LANES = 32
_THREADS = 256


def _vector(dtype, address, size):
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout((size,)))


class GroupEnds:
    """One warp scans group sizes of ``dtype``; negative ones count as none, ends stop at rows."""

    def __init__(self, dtype: str):
        self.dtype = DTYPES[dtype]

    @cute.jit
    def __call__(
        self, sizes: Int64, ends: Int64, groups: Int32, rows: Int32, stream: cuda.CUstream
    ):
        """Launch. ``sizes`` and ``ends`` are addresses of ``groups`` values."""
        self.kernel(
            _vector(self.dtype, sizes, groups), _vector(Int32, ends, groups), groups, rows
        ).launch(grid=[1, 1, 1], block=[_LANES, 1, 1], use_pdl=True, stream=stream)

    @cute.kernel
    def kernel(self, sizes: cute.Tensor, ends: cute.Tensor, groups: Int32, rows: Int32):
        """32 groups at a time; sums that pass ``rows`` stay there, so that none can overflow."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        lane, _, _ = cute.arch.thread_idx()
        before = Int32(0)
        for base in cutlass.range(0, groups, _LANES, unroll=1):
            group = base + lane
            end = Int32(0)
            if group < groups:
                size = cutlass.max(sizes[group], self.dtype(0))
                end = Int32(cutlass.min(size, self.dtype(rows)))
            for step in cutlass.range_constexpr(5):
                below = shuffle_sync_up(end, 1 << step)
                if lane >= (1 << step):
                    end += cutlass.min(below, rows - end)
            end += cutlass.min(before, rows - end)
            if group < groups:
                ends[group] = end
            before = shuffle_sync(end, _LANES - 1)


class TileSums:
    """Sums over the tiles of a row, always in the same order, as ``dtype``."""

    def __init__(self, dtype: str):
        self.dtype = DTYPES[dtype]

    @cute.jit
    def __call__(
        self, partials: Int64, sums: Int64, tiles: Int32, rows: Int32, stream: cuda.CUstream
    ):
        """Launch. ``partials`` is the address of FP32 ``[tiles, rows]``, ``sums`` of ``[rows]``."""
        matrix = cute.make_tensor(
            _vector(Float32, partials, rows).iterator,
            cute.make_layout((tiles, rows), stride=(Int64(rows), 1)),
        )
        self.kernel(matrix, _vector(self.dtype, sums, rows), tiles, rows).launch(
            grid=[cute.ceil_div(rows, _THREADS), 1, 1],
            block=[_THREADS, 1, 1],
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, partials: cute.Tensor, sums: cute.Tensor, tiles: Int32, rows: Int32):
        """A thread for each row."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        row = cute.arch.block_idx()[0] * _THREADS + thread
        if row < rows:
            total = Float32(0.0)
            for tile in cutlass.range(tiles, unroll=4):
                total += partials[tile, row]
            sums[row] = total.to(self.dtype)
