"""A compiled kernel with the arguments that do not change between calls."""

from typing import NamedTuple

import torch
from torch import Tensor

from fusible.kernels.quantize.k_major import PackedOperand
from fusible.kernels.runtime.gpu import multiprocessors
from fusible.kernels.runtime.launch import call_on_device, load_kernel
from fusible.kernels.runtime.workspaces import zeroed_counter
from fusible.kernels.sm90.spec import Spec

_GPU = "sm_90a"


class OperandScales(NamedTuple):
    """Scales of FP8 operands A and B, the last arguments of `GroupedGemm`.

    Addresses, and the distances, in scales, from one row, block of the reduction or group to the
    next.
    """

    a: int = 0
    b: int = 0
    a_pitch: int = 0
    a_block: int = 0
    b_group: int = 0
    b_pitch: int = 0
    b_block: int = 0


NO_SCALES = OperandScales()


class Launch:
    """A kernel with all its arguments but the number of rows and the addresses."""

    __slots__ = (
        "_cluster_rows", "_clusters", "_clusters_each", "_constant", "_dynamic", "_function",
        "_groups", "_index", "tiles_across",
    )  # fmt: skip

    def __init__(
        self,
        spec: Spec,
        device: torch.device,
        columns: int,
        depth: int,
        groups: int,
        a_pitch: int,
        b_pitch: int,
        b_group_pitch: int,
        out_pitch: int,
        preact_pitch: int = 0,
        preact_out_pitch: int = 0,
        glu_layout: tuple[int, int] = (1, 0),
        constants: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ) -> None:
        tile = spec.tile
        rows, width = tile.m * tile.cluster_m, spec.width * tile.cluster_n
        self._index, self._dynamic, self._groups = device.index, tile.dynamic, groups
        self._function = load_kernel("sm90.gemm.GroupedGemm", (spec,), _GPU)
        self._constant = (
            columns, depth, groups, a_pitch, b_pitch, b_group_pitch, preact_pitch, out_pitch,
            preact_out_pitch, *glu_layout, *constants,
        )  # fmt: skip
        self._clusters = multiprocessors(device) // (tile.cluster_m * tile.cluster_n)
        # Rows of the output that a cluster computes at once, 0 in a weight gradient; clusters for a
        # row of tiles, or for a group of a weight gradient.
        self._cluster_rows, self._clusters_each = rows, -(-columns // width)
        self.tiles_across = -(-columns // spec.width)
        if not spec.by_rows:
            # Every group has the same tiles; the number of rows does not change them.
            self._cluster_rows = 0
            self._clusters_each = -(-columns // rows) * -(-depth // width)

    def __call__(
        self,
        a: Tensor | PackedOperand,
        b: int,
        out: int,
        ends: Tensor | int,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
        table: Tensor | None = None,
        operand_scales: OperandScales = NO_SCALES,
        zero_tail: bool = True,
        *,
        preact: int = 0,
        preact_out: int = 0,
        preact_scales: int = 0,
        out_scales: int = 0,
        row_sums: int = 0,
    ) -> None:
        """Launch the kernel on the device's current stream, unless there are no rows.

        ``b``, ``out`` and the arguments after ``zero_tail`` are addresses, and ``ends`` may be one.
        A backward reads ``preact``; its gradient, or a forward's pre-activation, is written to
        ``preact_out``. Without ``zero_tail`` the rows past the last group are not written.
        """
        rows = a.shape[0]
        if rows == 0:
            return
        tiles, index = self._groups, self._index
        if self._cluster_rows:
            # Every group, and the rows past the last, may end in a part of a tile.
            tiles += rows // self._cluster_rows + 1
        clusters = min(self._clusters, tiles * self._clusters_each)
        stream = torch._C._cuda_getCurrentRawStream(index)  # a tenth of the public call's time
        counter = zeroed_counter(index, stream) if self._dynamic else 0
        call_on_device(index, self._function, (
            a.data_ptr(), b, preact, out, preact_out,
            ends if isinstance(ends, int) else ends.data_ptr(),
            0 if table is None else table.data_ptr(),
            0 if bias is None else bias.data_ptr(), 0 if scales is None else scales.data_ptr(),
            preact_scales, out_scales, row_sums, counter, rows, rows if zero_tail else 0,
            *self._constant, clusters, *operand_scales, stream,
        ))  # fmt: skip
