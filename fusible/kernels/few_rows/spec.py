"""Compile-time parameters of a kernel for few rows, and how its threads share a tile."""

from __future__ import annotations

import functools
from typing import NamedTuple

from fusible.kernels.sm90 import limits
from fusible.recipes.formats import E2M1, E4M3, NumberFormat

WARPS = 8
THREADS = 32 * WARPS
MMA_ROWS = 8  # of x that one matrix instruction multiplies
WARP_FEATURES = 32  # rows of the weight that a warp multiplies: two instructions of 16
RESIDENT = 2  # blocks that a multiprocessor has registers for
MAX_GROUPS = 1024
_MAX_OFFSET = 1 << 31  # in a group's weight, in 32 rows of x, and in the biases: 32 bits
_SHARED_BYTES = 228 * 1024
_LOAD_BYTES = 16  # of a thread, of one row of the weight

STORED_ELEMENTS = (E4M3, E2M1)


class FewRowsSpec(NamedTuple):
    """A product of few rows a group with weights as they are stored, and an activation.

    Rows, biases and the output are BF16.
    """

    format: NumberFormat
    """The format of the weights."""
    table: bool = False
    """Weights of groups lie apart, at the addresses of a table."""
    bias: bool = False
    scale: str = ""
    """PTX name of the scale of each row, of the bias or of the activation; empty: none."""
    activation: str = ""
    interleave: int = 0
    gated: bool = False
    warps_across: int = 1
    """Warps of a block that lie side by side; the others divide the reduction."""
    row_tiles: int = 4
    """Rows that are multiplied at once, in instructions of 8: 1, 2 or 4."""

    @property
    def vector(self) -> int:
        """Numbers of a row of the weight that a thread loads at once."""
        return _LOAD_BYTES * self.format.element.per_byte

    @property
    def chunk(self) -> int:
        """Numbers of a row of the weight that a warp loads at once: four threads."""
        return 4 * self.vector

    @property
    def width(self) -> int:
        """Output columns of a tile."""
        features = WARP_FEATURES * self.warps_across
        return features // 2 if self.gated else features

    @property
    def warps_along(self) -> int:
        """Warps that divide the reduction."""
        return WARPS // self.warps_across

    @property
    def pitch(self) -> int:
        """Distance of rows of sums in shared memory: twice it is 8 banks past a multiple of 32."""
        return WARP_FEATURES * self.warps_across + 4

    @property
    def shared_percent(self) -> int:
        """The share of shared memory in the memory that it divides with the L1 cache."""
        sums = self.warps_along * MMA_ROWS * self.row_tiles * self.pitch
        words = sums + MAX_GROUPS + 1 + WARPS
        return -(-100 * RESIDENT * (4 * words + 1024) // _SHARED_BYTES)

    @property
    def scales_values(self) -> bool:
        """Whether elements are multiplied by their scales, in BF16, which is exact."""
        return not self.format.scale.startswith("fp32")

    @property
    def scales_sums(self) -> bool:
        """Whether sums of a block of the reduction are multiplied by the scale, in FP32."""
        return not self.scales_values and self.format.block is not None

    @property
    def outer_scale(self) -> bool:
        """Whether a whole matrix has an FP32 scale."""
        return self.format.has_tensor_scale or self.format.block is None

    @property
    def scales_of_thread(self) -> int:
        """Scales of the numbers that a thread loads at once."""
        if not self.scales_values:
            return 1
        assert self.format.block is not None
        return max(self.vector // self.format.block[1], 1)


@functools.lru_cache(maxsize=64)
def max_rows(fmt: NumberFormat) -> int:
    """The most rows a group, on average, for which these kernels are at least as fast as
    dequantizing first.
    """
    return 32 if FewRowsSpec(fmt).scales_sums else 64


def reads_format(fmt: NumberFormat) -> bool:
    """Whether the kernels read weights of a format: in E4M3 or E2M1, with scales of some blocks.

    Blocks of FP32 scales hold all that a warp loads at once, others a thread's part, or half of it.
    """
    if fmt.element not in STORED_ELEMENTS:
        return False
    if fmt.block is None:
        return fmt.scale.startswith("fp32")
    spec = FewRowsSpec(fmt)
    if spec.scales_sums:
        return fmt.block[1] % spec.chunk == 0
    return fmt.block[1] in (spec.vector, 2 * spec.vector, spec.vector // 2)


def supports_weights(
    sm: int, dtype: str, fmt: NumberFormat, groups: int, features: int, depth: int
) -> bool:
    """Whether the kernels run on ``sm`` for rows of ``dtype`` and weights of these sizes."""
    return (
        sm == limits.ARCHITECTURE
        and dtype == "bfloat16"
        and reads_format(fmt)
        and 0 < groups <= MAX_GROUPS
        and min(features, depth) > 0
        and features % limits.MULTIPLE_OF == 0
        and depth % FewRowsSpec(fmt).vector == 0
        and max(features * depth, features * groups, depth * 64) < _MAX_OFFSET
    )
