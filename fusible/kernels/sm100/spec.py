"""What is fixed when the quantizer of ragged groups is compiled, and what its threads take.

A thread takes ``rows`` by ``VECTOR`` values of BF16, all of it in registers. Sums of that many rows
are added up by blocks of threads that take ``SUMMED_COLUMNS`` columns in ``SLICES`` slices.
"""

from __future__ import annotations

from typing import NamedTuple

from fusible.recipes.rows import NumberFormat

DTYPE = "bf16"
VECTOR, WORDS = 8, 4  # columns of a thread, and registers of a row of them
SUMMED_COLUMNS, SLICES = 32, 16


class PlacedSpec(NamedTuple):
    """A kernel from BF16 to ``format``, whose scales lie as the MMA reads them."""

    format: NumberFormat
    rowwise: bool
    columnwise: bool
    sums: bool
    """Also the sums of a thread's rows in each column,"""
    scaled: bool
    """each row times a scale of its own."""
    fp4_instruction: bool
    """The GPU converts to FP4 by itself."""

    @property
    def rows(self) -> int:
        """Rows of a thread: one block of MXFP8, two of NVFP4."""
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
