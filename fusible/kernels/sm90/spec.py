"""The specification of a compiled kernel: plain tuples, quick to hash, without cutlass."""

import math
from typing import NamedTuple

import torch

from fusible.kernels.sm90.limits import FP8_GLU_UNIT
from fusible.recipes.formats import FP8_BLOCK, NumberFormat, value_dtype

WARPGROUP_ROWS = 64  # rows of one WGMMA instruction
WARP_ROWS = 16  # of which each warp holds
SWIZZLE_BYTES = 128  # of a row of an operand that a pipeline stage holds
SHARED_BYTES = 227 * 1024
_BARRIER_BYTES = 1024


class Tile(NamedTuple):
    """The output tile of one thread block, and how its two consumer warpgroups share the work.

    Cooperating, each computes half of the rows of one tile; in ping-pong, they compute whole tiles
    in turn, and the epilogue of one overlaps the matrix products of the other. A cluster of
    ``cluster_m`` x ``cluster_n`` blocks loads what its tiles share once.

    A WGMMA instruction multiplies 64 rows. A tile of 16 takes as long as one of 64, but loads a
    fourth of operand A, which leaves shared memory to more stages of weights: for groups of few
    rows.
    """

    m: int
    n: int
    pingpong: bool = True
    cluster_m: int = 1
    cluster_n: int = 1
    dynamic: bool = False  # tiles are taken from a counter, not assigned beforehand
    ahead: int = 3  # `BACKWARD`: blocks of pre-activations loaded before their epilogue

    @property
    def warpgroups(self) -> int:
        """Warpgroups that share a tile."""
        return 1 if self.pingpong else 2

    @property
    def slabs(self) -> int:
        """Slabs of 64 rows of a tile that a warpgroup computes; 1 if the tile has 16 rows."""
        return -(-self.m // (WARPGROUP_ROWS * self.warpgroups))

    def width(self, kind: str) -> int:
        """Output columns; of a gated activation, those of the activation."""
        return self.n // 2 if kind == "glu" else self.n

    @property
    def is_register_bound(self) -> bool:
        """Whether a thread has more than 128 accumulator values."""
        return self.slabs * self.n > 256

    def __str__(self) -> str:
        kind = "pp" if self.pingpong else "co"
        return f"{self.m}x{self.n}{kind}{self.cluster_m}{self.cluster_n}{'d' * self.dynamic}"


def block_columns(kind: str, tile: Tile, out_dtype: str) -> int:
    """Columns of the blocks in which an epilogue writes its tile: 64, or 32.

    32 where 64 does not divide it or needs too much shared memory: an activation's backward and
    register-bound tiles are faster with more pipeline stages. Of weight gradients see `Spec`.
    """
    narrow = kind in BACKWARD or tile.is_register_bound or out_dtype == "float32"
    return 32 if narrow or tile.width(kind) % 64 else 64


FORWARD, BACKWARD = ("act", "glu"), ("dact", "dglu")  # of an activation, and of a gated one


class Spec(NamedTuple):
    """Everything that shapes a kernel's code; sizes, pointers and constants are its arguments."""

    kind: str  # store, `FORWARD`, `BACKWARD`: rows grouped; wgrad: reduction grouped
    tile: Tile
    dtype: str = "bfloat16"  # of both operands, unless b_dtype is another
    b_dtype: str = ""
    b_scale_layout: str = ""  # of FP8 operands: see `is_fp8`
    weight_major: str = "k"  # which of N and K is contiguous in the weight
    table: bool = False  # weights (wgrad: outputs) are E matrices behind a table of pointers
    bias: bool = False
    row_scale: str = ""  # dtype of the scale of each row; empty: none
    activation: str = ""
    stripe: int = 0  # neighbouring gate columns before their linear columns, within a tile
    paired: bool = False  # gate and linear columns are further apart than a tile: two boxes
    save_preact: bool = False  # `FORWARD`: the pre-activation is stored as well
    quantize_preact: bool = False  # the same, in the format `SAVED_INPUT`; with out_format
    out_format: NumberFormat | None = None  # `FORWARD`: if the output is quantized, in 1x128 blocks
    out_dtype: str = "bfloat16"
    accumulate: bool = False
    reads_ahead: bool = False  # weights and group ends are read before the kernel ahead has ended

    @property
    def is_backward(self) -> bool:
        """Whether the epilogue is an activation's backward."""
        return self.kind in BACKWARD

    @property
    def sides(self) -> int:
        """Columns of the pre-activation for one of the activation: gate and linear, or one."""
        return 2 if self.kind in ("glu", "dglu") else 1

    @property
    def is_narrow(self) -> bool:
        """Whether gate and linear columns alternate within the 8 of a matrix instruction."""
        return 0 < self.stripe < 8

    @property
    def is_fp8(self) -> bool:
        """Whether operands are FP8 with scales, each for `FP8_BLOCK` of the reduction.

        Those of operand A are one for each row. Those of operand B are one for each row too
        (``b_scale_layout`` is "rows") or one for `FP8_BLOCK` rows ("blocks").
        """
        return self.b_scale_layout != ""

    @property
    def tile_k(self) -> int:
        """Elements of the reduction that a pipeline stage holds."""
        return SWIZZLE_BYTES if self.is_fp8 else SWIZZLE_BYTES // 2

    @property
    def value_dtype(self) -> str:
        """The dtype of biases, pre-activations and activations."""
        return str(value_dtype(getattr(torch, self.dtype))).removeprefix("torch.")

    @property
    def rings(self) -> int:
        """Rings of pipeline stages: one, or one for each warpgroup.

        A warpgroup adds scaled products to its accumulator between matrix products. With stages
        of its own, in ping-pong, the other one multiplies meanwhile.
        """
        return 2 if self.is_fp8 and self.tile.pingpong else 1

    @property
    def mma_columns(self) -> int:
        """Columns of one WGMMA instruction: FP8 products need registers besides their sums."""
        return 128 if self.is_fp8 and self.tile.n > 192 else self.tile.n

    @property
    def scale_columns(self) -> int:
        """Columns of a tile that surely share a scale of operand B ("blocks").

        Where gate and linear columns lie apart, these may begin at any `FP8_GLU_UNIT`.
        """
        if self.kind == "glu" and self.paired:
            return math.gcd(self.tile.n // 2, FP8_GLU_UNIT)
        return math.gcd(self.tile.n, FP8_BLOCK)

    @property
    def by_rows(self) -> bool:
        """Whether groups divide the output's rows; else the reduction."""
        return self.kind != "wgrad"

    @property
    def a_major(self) -> str:
        """The contiguous dimension of operand A: k, the reduction, or n, its rows."""
        return "k" if self.by_rows or self.is_fp8 else "n"

    @property
    def b_major(self) -> str:
        """The same of operand B."""
        return self.weight_major if self.by_rows or self.is_fp8 else "n"

    @property
    def b_parts(self) -> int:
        """Boxes in which operand B is loaded: gate and linear columns may be far apart."""
        return 2 if self.kind == "glu" and self.paired else 1

    @property
    def width(self) -> int:
        """Output columns of a tile; of a gated activation, those of the activation."""
        return self.tile.width(self.kind)

    @property
    def block_columns(self) -> int:
        """Columns of the blocks in which an epilogue writes its tile.

        Weight gradients of 16-bit operands are faster in more blocks, of 32.
        """
        if self.kind == "wgrad" and not self.is_fp8:
            return 32
        return block_columns(self.kind, self.tile, self.out_dtype)

    @property
    def block_bytes(self) -> int:
        """Shared memory of one block: 64 rows for one warpgroup."""
        return WARPGROUP_ROWS * self.block_columns * (4 if self.out_dtype == "float32" else 2)

    @property
    def stored_rows(self) -> int:
        """Rows of a block that one store writes: 64, or the 16 of a warp.

        16 where the tile has no more, and in weight gradients with room for few blocks: two in
        FP32, and in register-bound tiles if the zeros for empty groups, as large as a store, had 64
        rows.
        """
        few_blocks = self.tile.is_register_bound or (
            self.out_dtype == "float32" and not self.is_fp8
        )
        by_warp = self.tile.m == WARP_ROWS or (self.kind == "wgrad" and few_blocks)
        return WARP_ROWS if by_warp else WARPGROUP_ROWS

    @property
    def zeroes_empty_groups(self) -> bool:
        """Whether a warp of its own writes the zeros of groups without rows (wgrad)."""
        return self.skips_empty_groups and not self.accumulate

    @property
    def skips_empty_groups(self) -> bool:
        """Whether groups without rows have no tiles (wgrad)."""
        if self.kind != "wgrad":
            return False
        return self.accumulate or not (self.table or self.out_dtype == "float32")

    @property
    def zero_bytes(self) -> int:
        """Shared memory that holds the zeros of one store."""
        return (
            self.block_bytes * self.stored_rows // WARPGROUP_ROWS if self.zeroes_empty_groups else 0
        )

    @property
    def prefetches_weights(self) -> bool:
        """Whether weights are fetched while the previous kernel ends.

        It pays where reading them is most of the work, which is where tiles are not dynamic.
        """
        static = not self.tile.dynamic and self.tile.cluster_m == 1
        return self.by_rows and static and not (self.table or self.reads_ahead)

    @property
    def can_read_ahead(self) -> bool:
        """Whether a block knows its first tile, and loads all of its weights by itself.

        Not those behind a table, which may have just been written.
        """
        tile = self.tile
        alone = not tile.dynamic and tile.cluster_m * tile.cluster_n == 1
        return self.kind == "store" and alone and not self.table

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one pipeline stage."""
        operands = (self.tile.m + self.tile.n) * SWIZZLE_BYTES
        return operands + (4 * self.tile.n if self.b_scale_layout == "rows" else 0)

    @property
    def preact_slots(self) -> int:
        """Blocks of pre-activations, of all `sides`, that a backward holds in shared memory."""
        return self.tile.ahead if self.is_backward else 0

    @property
    def prefetches_preacts(self) -> bool:
        """Whether they are fetched to the L2 cache before there is room for them.

        It pays where there is room for few, too few to hide the latency of memory.
        """
        return 0 < self.preact_slots <= 2

    @property
    def preact_blocks(self) -> int:
        """Blocks of pre-activations of a tile, each of all sides."""
        return self.tile.m * self.tile.n // (WARPGROUP_ROWS * self.block_columns)

    @property
    def _least_out_blocks(self) -> int:
        """Output blocks that a warpgroup has at least.

        4 with FP8 operands, which need fewer stages; 1 in a backward, whose gradients need none.
        """
        if self.is_fp8:
            return 4
        return 1 if self.is_backward else 2

    @property
    def stages(self) -> int:
        """Pipeline stages: what fits in shared memory with the blocks of the epilogue."""
        blocks = 2 * self._least_out_blocks + self.sides * self.preact_slots
        left = SHARED_BYTES - _BARRIER_BYTES - self.zero_bytes - blocks * self.block_bytes
        return left // self.stage_bytes // self.rings * self.rings

    @property
    def out_blocks(self) -> int:
        """Output blocks of shared memory for each warpgroup: up to 4, where room is left.

        In a backward, the warpgroup whose epilogue runs uses those of both.
        """
        if self.is_backward:
            return self._least_out_blocks
        left = SHARED_BYTES - _BARRIER_BYTES - self.zero_bytes - self.stages * self.stage_bytes
        return min(left // (2 * self.block_bytes), 4)
