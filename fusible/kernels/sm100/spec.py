"""The specification of the quantizer of ragged groups, and the work of its threads.

A thread takes ``rows`` by ``VECTOR`` values of BF16, all of it in registers. Sums of that many rows
are added up by ``SLICES`` warps, of which a thread takes ``SUMMED`` columns.
"""

from __future__ import annotations

from typing import NamedTuple

from fusible.recipes.formats import NumberFormat

DTYPE = "bf16"
VECTOR, WORDS = 8, 4  # columns of a thread, and registers of a row of them
SUMMED, SLICES = 4, 8


class PackedQuantizeSpec(NamedTuple):
    """A kernel from BF16 to ``format``, whose scales are in the layout of the MMA."""

    format: NumberFormat
    rowwise: bool
    columnwise: bool
    sums: bool
    """The sums of each column over a thread's rows are written too."""
    scaled: bool
    """In the sums, each row is multiplied by a scale of its own."""
    fp4_instruction: bool
    """The GPU has an instruction that converts to FP4."""

    @property
    def rows(self) -> int:
        """Rows of a thread: one block of MXFP8, two of NVFP4.

        An H200, which converts to FP4 in many steps, is faster with 16 (403 against 577 us at
        32768 x 4096); where one instruction does it, a longer store is worth more.
        """
        return 32

    @property
    def along(self) -> int:
        """Size of a block."""
        assert self.format.block is not None
        return self.format.block[1]

    @property
    def pairs(self) -> bool:
        """Whether a byte holds two elements: of two rows, for the column-wise use."""
        return self.format.element.per_byte == 2

    @property
    def resident(self) -> int:
        """Groups of threads on a multiprocessor at once, which bounds a thread's registers."""
        return 3 if self.rows == 32 else 5
