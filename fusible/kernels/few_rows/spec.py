"""What is fixed when a kernel for few rows is compiled, and how its threads share a tile."""

from __future__ import annotations

from typing import NamedTuple

from fusible.kernels.sm90 import limits
from fusible.recipes.formats import E2M1, E4M3, NumberFormat

WARPS = 8
THREADS = 32 * WARPS
MMA_ROWS = 8  # of x that one matrix instruction multiplies
WARP_FEATURES = 32  # rows of the weight that a warp multiplies: two instructions of 16
RESIDENT = 2  # blocks that a multiprocessor has registers for
STAGES = {1: 3, 2: 3, 4: 1}
"""`FewRowsSpec.stages` of weights of 16 bits by ``row_tiles``: what the registers hold."""
MAX_GROUPS = 1024
_MAX_OFFSET = 1 << 31  # in a group's weight, in 32 rows of x, and in the biases: 32 bits
_SHARED_BYTES = 228 * 1024
_LOAD_BYTES = 16  # of a thread, of one row of the weight
_ITEM_BYTES = 2  # of a number of rows, biases and the output
_MAX_READ_BYTES = 220 * 10**6

ELEMENTS = (E4M3, E2M1)


class FewRowsSpec(NamedTuple):
    """A product of few rows a group with weights as they are stored, and an activation."""

    format: NumberFormat | None
    """Of the weights; None: they are of ``dtype``."""
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
    stages: int = 1
    """Times that a thread loads words of weights of 16 bits before it multiplies the first."""
    dtype: str = "bf16"
    """PTX name of that of rows, biases and the output; with a format it is BF16."""

    @property
    def vector(self) -> int:
        """Numbers of a row of the weight that a thread loads at once."""
        if self.format is None:
            return _LOAD_BYTES // _ITEM_BYTES
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
        """Of the memory that shared memory and the L1 cache divide."""
        sums = self.warps_along * MMA_ROWS * self.row_tiles * self.pitch
        words = sums + MAX_GROUPS + 1 + WARPS
        return -(-100 * RESIDENT * (4 * words + 1024) // _SHARED_BYTES)

    @property
    def scales_values(self) -> bool:
        """Whether elements are multiplied by their scales, in BF16, which is exact."""
        return self.format is not None and not self.format.scale.startswith("fp32")

    @property
    def scales_sums(self) -> bool:
        """Whether sums of a block of the reduction are multiplied by the scale, in FP32."""
        if self.format is None or self.scales_values:
            return False
        return self.format.block is not None

    @property
    def outer_scale(self) -> bool:
        """Whether a whole matrix has an FP32 scale."""
        if self.format is None:
            return False
        return self.format.has_tensor_scale or self.format.block is None

    @property
    def scales_of_thread(self) -> int:
        """Scales of the numbers that a thread loads at once."""
        if not self.scales_values:
            return 1
        assert self.format is not None
        assert self.format.block is not None
        return max(self.vector // self.format.block[1], 1)


def max_rows(fmt: NumberFormat) -> int:
    """Rows of a group, on average, up to which dequantizing the weights first is not faster."""
    return 32 if FewRowsSpec(fmt).scales_sums else 64


def divided_rows(groups: int, features: int, depth: int) -> int:
    """Rows up to which a product with 16-bit weights is faster here than by the TMA kernels.

    One row a group on average, which read at most 220 MB of weights if no two have the same group.
    By measurements on an H100.
    """
    return min(groups, _MAX_READ_BYTES // (features * depth * _ITEM_BYTES))


def supports_format(fmt: NumberFormat) -> bool:
    """Whether the kernels read weights of a format: in E4M3 or E2M1, with scales of some blocks.

    Blocks of FP32 scales hold all that a warp loads at once, others a thread's part, or half of it.
    """
    if fmt.element not in ELEMENTS:
        return False
    if fmt.block is None:
        return fmt.scale.startswith("fp32")
    spec = FewRowsSpec(fmt)
    if spec.scales_sums:
        return fmt.block[1] % spec.chunk == 0
    return fmt.block[1] in (spec.vector, 2 * spec.vector, spec.vector // 2)


def supports(
    sm: int, dtype: str, fmt: NumberFormat | None, groups: int, features: int, depth: int
) -> bool:
    """Whether the kernels run on ``sm`` for rows of ``dtype`` and weights of these sizes.

    ``fmt`` is the format of the weights, None for ``dtype``.
    """
    if fmt is None:
        fits, row_bytes = dtype in limits.DTYPES, depth * _ITEM_BYTES
    else:
        fits, row_bytes = dtype == "bfloat16" and supports_format(fmt), depth
    return (
        sm == limits.ARCHITECTURE
        and fits
        and 0 < groups <= MAX_GROUPS
        and min(features, depth) > 0
        and features % limits.MULTIPLE_OF == 0
        and depth % FewRowsSpec(fmt).vector == 0
        and max(features * row_bytes, features * groups, depth * 64) < _MAX_OFFSET
    )
