"""End rows of the groups from their sizes."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.arch import shuffle_sync, shuffle_sync_up

_LANES = 32
_DTYPES = {"int32": cutlass.Int32, "int64": cutlass.Int64}


class GroupEnds:
    """One warp scans group sizes of ``dtype``; negative ones count as none, ends stop at rows."""

    def __init__(self, dtype: str):
        self.dtype = _DTYPES[dtype]

    @cute.jit
    def __call__(
        self, sizes: Int64, ends: Int64, groups: Int32, rows: Int32, stream: cuda.CUstream
    ):
        """Launch. ``sizes`` and ``ends`` are addresses of ``groups`` values."""
        self.kernel(
            *(
                cute.make_tensor(
                    cute.make_ptr(
                        dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8
                    ),
                    cute.make_layout((groups,)),
                )
                for dtype, address in ((self.dtype, sizes), (Int32, ends))
            ),
            groups,
            rows,
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
