"""Compile-time parameters of the kernels that move rows."""

from __future__ import annotations

from typing import Literal, NamedTuple

from fusible.recipes.formats import NumberFormat

BYTES = 16  # moved at once by a thread
ROWS_THREADS = 128  # of a CTA that moves rows
PERMUTE_THREADS = 256  # of one that sorts and copies rows of few tokens
FEW_TOKENS = 64
"""Tokens up to which the sort and the copy are one launch: every CTA counts all choices."""


class RowsSpec(NamedTuple):
    """Rows of one width and dtype, and what is done with them."""

    dtype: str
    vectors: int
    """16-byte pieces of a row."""
    top_k: int
    weights: Literal["", "choice", "row"] = ""
    """Whether there is a weight for each choice, for each row, or none."""
    weight_dtype: str = "f32"
    scale: bool = False
    """Scatter: multiply by the weights."""
    values: str = ""
    """Gather: dtype of one value for each row, copied to the row's choice; empty: none."""
    indexed: bool = False
    """Sums and dots of groups: an index says which row of the matrix each row is."""
    reads_ahead: bool = False
    """Gather: whether the row map is read before the kernel ahead has ended."""
    unroll: int = 4
    """Scatter, gather: tokens that a thread has in flight."""
    processes: int = 1
    """Scatter, gather: in whose memories the tokens are, equally many in each."""

    @property
    def per_vector(self) -> int:
        """Numbers in 16 bytes."""
        return BYTES // (4 if self.dtype == "f32" else 2)


class RouteSpec(NamedTuple):
    """A router's choice, as ``definitions.route`` names its arguments."""

    experts: int
    top_k: int
    sigmoid: bool
    normalize: bool
    scaling_factor: float
    biased: bool = False
    groups: tuple[int, int, int] = (1, 1, 2)
    """The number of groups, how many are kept, and how many of a group's best scores are summed."""


ROUTER_WARPS = 8  # of a CTA that chooses experts

FUSED_ROUTER_TOKENS = ROUTER_WARPS
"""The most tokens whose logits and choice are one launch: each has a warp."""


class RouteTokensSpec(NamedTuple):
    """A router's product and choice for few tokens, of one width and dtype."""

    route: RouteSpec
    dtype: str
    vectors: int
    """16-byte pieces of a token."""
    bias: str = ""
    """Dtype of the bias of the logits; empty: none."""

    @property
    def warps(self) -> int:
        """Warps of a CTA: enough to load a row at once, but few where rows are wide."""
        warps = -(-self.vectors // 32)
        return warps if ROUTER_WARPS < warps <= 12 else ROUTER_WARPS


MAX_GROUPS = 1024
"""The most experts that the router and the sort support."""

GROUP_BITS = MAX_GROUPS.bit_length()
"""Bits, of 31, that hold a choice's group, or that it has none; the others hold its number."""


class SortSpec(NamedTuple):
    """A sort by group, as ``definitions.permutation`` names its arguments."""

    groups: int
    wide: bool
    """Ids are int64, or else int32."""
    ctas: int
    """CTAs of the cluster; 1 for a GPU without clusters."""

    @property
    def warps(self) -> int:
        """Warps of a CTA, each with counters of its own in shared memory."""
        return 32 if self.groups <= 512 else 16

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    @property
    def most_choices(self) -> int:
        """Choices that can be counted."""
        return (self.ctas * self.warps) << (31 - GROUP_BITS)


class PermuteSpec(NamedTuple):
    """A sort by group and the copy of the rows, as ``permute_rows``, of few tokens."""

    rows: RowsSpec
    groups: int
    wide: bool
    """Ids are int64, or else int32."""
    out_format: NumberFormat | None = None
    """The rows are quantized, in this format of 1x128 blocks."""

    @property
    def padded_choices(self) -> int:
        """Numbers in shared memory for the choices of `FEW_TOKENS`: as many for each thread."""
        return -(-FEW_TOKENS * self.rows.top_k // PERMUTE_THREADS) * PERMUTE_THREADS
