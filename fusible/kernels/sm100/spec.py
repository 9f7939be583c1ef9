"""The specification of the quantizer of ragged groups, and the work of its threads.

A thread takes ``ROWS`` by ``VECTOR`` values of BF16, all of it in registers. Sums of that many rows
are added up by ``SLICES`` warps, of which a thread takes ``SUMMED`` columns.
"""

from __future__ import annotations

from typing import NamedTuple

from fusible.recipes.formats import NumberFormat

DTYPE = "bf16"
ROWS = 32  # of a thread: one block of MXFP8, two of NVFP4
RESIDENT = 3  # groups of threads on a multiprocessor at once, which bounds a thread's registers
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
    def along(self) -> int:
        """Size of a block."""
        assert self.format.block is not None
        return self.format.block[1]

    @property
    def pairs(self) -> bool:
        """Whether a byte holds two elements: of two rows, for the column-wise use."""
        return self.format.element.per_byte == 2
