"""Kernels over vectors: end rows of groups from their sizes, sums over tiles."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.arch import shuffle_sync, shuffle_sync_up

from fusible.kernels.device import bits
from fusible.kernels.device.dependent_launch import has_pdl, wait

_LANES = 32
_EACH = 8  # groups of a lane, whose sizes it has in flight
_THREADS = 256


class GroupEnds:
    """One warp scans group sizes of ``dtype``; negative ones count as none, ends stop at rows."""

    def __init__(self, dtype: str):
        self.dtype = bits.CUTLASS_DTYPES[dtype]

    @cute.jit
    def __call__(
        self, sizes: Int64, ends: Int64, groups: Int32, rows: Int32, stream: cuda.CUstream
    ):
        """Launch. ``sizes`` and ``ends`` are addresses of ``groups`` values."""
        self.kernel(
            bits.vector(sizes, self.dtype, groups), bits.vector(ends, Int32, groups), groups, rows
        ).launch(grid=[1, 1, 1], block=[_LANES, 1, 1], use_pdl=has_pdl(), stream=stream)

    @cute.kernel
    def kernel(self, sizes: cute.Tensor, ends: cute.Tensor, groups: Int32, rows: Int32):
        """256 groups at a time; sums that pass ``rows`` stay there, so that none can overflow.

        A lane has neighbouring groups, whose sizes it loads together.
        """
        wait()
        lane, _, _ = cute.arch.thread_idx()
        before = Int32(0)
        for base in cutlass.range(lane * _EACH, groups + lane * _EACH, _LANES * _EACH, unroll=1):
            through = cute.make_rmem_tensor((_EACH,), Int32)
            for i in cutlass.range_constexpr(_EACH):
                through[i] = Int32(0)
                if base + i < groups:
                    size = cutlass.max(sizes[base + i], self.dtype(0))
                    through[i] = Int32(cutlass.min(size, self.dtype(rows)))
            for i in cutlass.range_constexpr(1, _EACH):
                through[i] += cutlass.min(through[i - 1], rows - through[i])
            total = through[_EACH - 1]
            for step in cutlass.range_constexpr(5):
                below = shuffle_sync_up(total, 1 << step)
                if lane >= (1 << step):
                    total += cutlass.min(below, rows - total)
            ahead = shuffle_sync_up(total, 1)
            if lane == 0:
                ahead = Int32(0)
            ahead += cutlass.min(before, rows - ahead)
            for i in cutlass.range_constexpr(_EACH):
                if base + i < groups:
                    ends[base + i] = through[i] + cutlass.min(ahead, rows - through[i])
            before += cutlass.min(shuffle_sync(total, _LANES - 1), rows - before)


class TileSums:
    """Sums over the tiles of a row, always in the same order, as ``dtype``."""

    def __init__(self, dtype: str):
        self.dtype = bits.CUTLASS_DTYPES[dtype]

    @cute.jit
    def __call__(
        self, partials: Int64, sums: Int64, tiles: Int32, rows: Int32, stream: cuda.CUstream
    ):
        """Launch. ``partials`` is the address of FP32 ``[tiles, rows]``, ``sums`` of ``[rows]``."""
        matrix = cute.make_tensor(
            bits.vector(partials, Float32, rows).iterator,
            cute.make_layout((tiles, rows), stride=(Int64(rows), 1)),
        )
        self.kernel(matrix, bits.vector(sums, self.dtype, rows), tiles, rows).launch(
            grid=[cute.ceil_div(rows, _THREADS), 1, 1],
            block=[_THREADS, 1, 1],
            use_pdl=has_pdl(),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, partials: cute.Tensor, sums: cute.Tensor, tiles: Int32, rows: Int32):
        """A thread for each row."""
        wait()
        thread, _, _ = cute.arch.thread_idx()
        row = cute.arch.block_idx()[0] * _THREADS + thread
        if row < rows:
            total = Float32(0.0)
            for tile in cutlass.range(tiles, unroll=4):
                total += partials[tile, row]
            sums[row] = total.to(self.dtype)
