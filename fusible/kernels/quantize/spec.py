"""Compile-time parameters of a quantizer's kernel, and how threads are laid over a matrix.

A thread owns ``vector`` neighbouring columns of ``thread_rows`` rows, all of it in registers. The
threads of a block of rows stand side by side, and where the block has more rows than a thread
takes, in ``parts`` below one another, one part to a warp or more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fusible.kernels.runtime.gpu import PTX_NAMES
from fusible.recipes.formats import FP8_BLOCK, NumberFormat
from fusible.recipes.quantize_ops import compute_dtype

THREADS = 128
VALUES = PTX_NAMES[compute_dtype(torch.device("cuda"))]
"""The PTX name of the dequantized values that a quantizer writes besides."""

PIECE_ROWS = 16
"""Neighbouring rows whose bytes fill the widest store of a thread, where columns are contiguous."""

_WHOLE_MATRIX_ROWS = 32  # at a time, where a block is a whole matrix
_INPUT_WORDS = 128  # registers that hold a thread's part of the input
_DEQUANTIZED_ROWS = 16


def supports_format(fmt: NumberFormat) -> bool:
    """Whether the kernels support the blocks and scales of a format.

    Whole matrices have FP32 scales. Other blocks have at least as many rows or columns as a
    thread dequantizes, and at most those of a warp. Transformed elements are FP4.
    """
    if fmt.block is None:
        return fmt.scale_dtype == torch.float32
    along = fmt.block[1]
    fits = _DEQUANTIZED_ROWS <= along <= THREADS // fmt.element.per_byte
    return fits and not (fmt.hadamard and fmt.element.per_byte == 1)


class QuantizeSpec(NamedTuple):
    """A kernel from high precision to ``format``; blocks without direction are row-wise only."""

    format: NumberFormat
    dtype: str
    """PTX name of the input's type."""
    grouped: bool
    """Groups end where a tensor on the device says, else all have ``matrix_rows`` rows."""
    wide_ends: bool
    """The ends are int64, else int32."""
    rowwise: bool
    columnwise: bool
    row_values: bool = False
    """The dequantized row-wise elements are written, whether these are or not."""
    col_values: bool = False
    k_major: bool = False
    """Elements for column-wise use are transposed, in padded groups; no values are written."""
    gathered: bool = False
    """An index says which row of the input each row is; with ``k_major``."""

    @property
    def rows(self) -> int:
        """Rows of a block, which a group of threads takes at once."""
        if self.format.block is None:
            return FP8_BLOCK if self.k_major else _WHOLE_MATRIX_ROWS
        return self.format.block[1]

    @property
    def vector(self) -> int:
        """Neighbouring columns of a thread; their elements fill whole words."""
        narrow = self.dtype == "f32" and self.format.element.per_byte == 1
        return 4 if narrow else 8

    @property
    def words(self) -> int:
        """Registers for one row of a thread."""
        return self.vector if self.dtype == "f32" else self.vector // 2

    @property
    def thread_rows(self) -> int:
        """Rows of a thread."""
        if self.k_major:  # as many as make a block of all threads
            return self.rows // THREADS * self.lanes
        return min(self.rows, _INPUT_WORDS // self.words)

    @property
    def parts(self) -> int:
        """Threads below one another."""
        return self.rows // self.thread_rows

    @property
    def resident(self) -> int:
        """Groups of threads on a multiprocessor at once, which bounds a thread's registers."""
        if self.k_major:
            return 3 if self.dtype == "f32" else 4
        if self.format.hadamard or self.format.stochastic:
            return 2
        if self.format.element.per_byte == 2:
            return 2 if self.dtype == "f32" or self.rows > 16 else 3
        return 2 if self.format.directional and (self.row_values or self.col_values) else 3

    @property
    def has_matrix_scales(self) -> bool:
        """Whether a scale covers a whole matrix, whose largest magnitude is found first."""
        return self.format.block is None or self.format.has_tensor_scale

    @property
    def lanes(self) -> int:
        """Threads side by side that share a row of a block."""
        return self.rows // self.vector


class GluBackwardSpec(NamedTuple):
    """A kernel that computes the backward of an activation and quantizes its gradients.

    Where a scale covers a whole group it finds the largest magnitudes instead.
    """

    quantize: QuantizeSpec
    activation: str
    scaled: bool
    """The output is multiplied by one scale per row, whose gradient is computed too."""
    stripe: int
    """Neighbouring gate columns before their linear columns, if fewer than a thread has; else 0."""
    values: bool
    """The gradients are written in high precision too."""
    both_sides: bool = False
    """Stripes are whole blocks of columns: a thread block takes gates and linear columns."""
    act_format: NumberFormat | None = None
    """The format of 1x128 blocks in which the activation is written too, column-wise.

    Only if ``both_sides``, or of an activation that is not gated, and without scales of whole
    groups.
    """
    quantized_preact: bool = False
    """The pre-activation is in the format `SAVED_INPUT`.

    Only if ``both_sides``, or of an activation that is not gated.
    """

    @property
    def stages_linear_columns(self) -> bool:
        """Whether gradients of linear columns are in shared memory before they are stored."""
        return self.both_sides and not self.quantize.has_matrix_scales

    @property
    def staged(self) -> int:
        """Blocks in shared memory: gradients of linear columns, and the activation."""
        return self.stages_linear_columns + (self.act_format is not None)

    @property
    def quantize_act(self) -> QuantizeSpec:
        """How the activation is quantized."""
        assert self.act_format is not None
        return self.quantize._replace(format=self.act_format, rowwise=False, columnwise=True)

    @property
    def resident(self) -> int:
        """Groups of threads on a multiprocessor at once, which bounds a thread's registers."""
        both = self.quantize.rowwise and self.quantize.columnwise
        return 3 if both and self.activation == "swiglu" and not self.values else 2


class DequantizeSpec(NamedTuple):
    """A kernel from ``format`` to high precision, of data for one of its uses."""

    format: NumberFormat
    dtype: str
    """PTX name of the output's type."""
    grouped: bool
    wide_ends: bool
    columnwise: bool

    @property
    def rows(self) -> int:
        """Rows of a block, which a group of threads takes at once."""
        along = self.format.block[1] if self.format.block is not None else _WHOLE_MATRIX_ROWS
        return max(along, _DEQUANTIZED_ROWS)

    @property
    def vector(self) -> int:
        """Neighbouring columns of a thread."""
        return 8

    @property
    def thread_rows(self) -> int:
        """Rows of a thread."""
        return _DEQUANTIZED_ROWS

    @property
    def parts(self) -> int:
        """Threads below one another."""
        return self.rows // self.thread_rows
