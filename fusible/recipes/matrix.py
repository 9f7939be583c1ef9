"""A matrix in a number format, and the operand of matrix products.

Named tuples of plain tensors, which autograd saves, hooks move and torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusible.recipes.blocks import column_block_bound
from fusible.recipes.formats import NumberFormat


def as_bytes(piece: Tensor) -> Tensor:
    """Return the bytes of E8M0 numbers, a view, and other tensors as they are.

    Compiled code copies scales as bytes, since Inductor cannot copy E8M0 numbers on a CPU.
    """
    return piece.view(torch.uint8) if piece.dtype == torch.float8_e8m0fnu else piece


class QuantizedMatrix(NamedTuple):
    """Data and scales of ``[..., rows, columns]`` for one use, row-wise or column-wise.

    Operands of the SM100 kernels have the layout of these (``kernels.sm100.padding``).
    """

    data: Tensor
    """Elements, in the input's layout: ``[..., rows, columns / per_byte]``."""
    scale: Tensor
    """Factors from element to value. Row-wise ``[rows, columns / B]``, column-wise ``[blocks,
    columns]``, two-dimensional blocks ``[rows / B, columns / B]``, whole matrices ``[1]``, groups
    ``[groups]``; leading dimensions stay."""
    tensor_scale: Tensor | None
    """FP32 factor of all scales, ``[1]`` or ``[groups]``, where the format has one."""
    format: NumberFormat
    columnwise: bool = False
    """Whether blocks are along the columns; False where blocks have no direction."""
    ends: Tensor | None = None
    """Cumulative end rows of the groups, each quantized separately, ``[groups]``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        *lead, columns = self.data.shape
        return (*lead, columns * self.format.element.per_byte)

    def check_dtypes(self) -> None:
        """Raise TypeError unless the tensors have the dtypes of the format."""
        wanted = (self.format.element.dtype, self.format.scale_dtype)
        got = (self.data.dtype, self.scale.dtype)
        if wanted != got:
            raise TypeError(
                f"data and scales of {self.format.name} must be {wanted[0]} and {wanted[1]}, "
                f"got {got[0]} and {got[1]}; use the format the tensor was quantized in"
            )

    def check_sizes(self, groups: int | None = None) -> None:
        """Raise ValueError unless the scales have the shape and the device that the data require.

        ``groups`` is the number of groups, by default that of ``ends``.
        """
        data, scale, tensor_scale, fmt = self[:4]
        if groups is None and self.ends is not None:
            groups = self.ends.shape[0]
        if data.dim() < 2 or (groups is not None and data.dim() != 2):
            raise ValueError(
                f"data of {fmt.name} must be of matrices, got shape {tuple(data.shape)}"
            )
        shape, *wanted = shapes_of(self.shape, fmt, self.columnwise, groups)
        got = [tuple(scale.shape), None if tensor_scale is None else tuple(tensor_scale.shape)]
        if got != wanted:
            raise ValueError(
                f"scales and tensor scales of {fmt.name} data of shape {shape} must be of shape "
                f"{wanted[0]} and {wanted[1]}, got {got[0]} and {got[1]}; quantize the original "
                "again"
            )
        for tensor in (scale, tensor_scale):
            if tensor is not None and tensor.device != data.device:
                raise ValueError(
                    f"scales must be on {data.device}, as the data, got {tensor.device}"
                )
        if tensor_scale is not None and tensor_scale.dtype != torch.float32:
            raise ValueError(f"tensor scales must be torch.float32, got {tensor_scale.dtype}")


def shapes_of(
    shape: Sequence[int], fmt: NumberFormat, columnwise: bool = False, groups: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """Return the shapes of data, scales and tensor scales of ``shape`` ``[..., rows, columns]``.

    Of ``groups`` of rows, if given. The last blocks may be short. Fewer dimensions are one row;
    elements fill whole bytes.
    """
    *lead, rows, columns = (1,) * (2 - len(shape)) + tuple(shape)
    columns += -columns % fmt.element.per_byte
    across, along = fmt.block or (1, 1)
    whole = (*lead, 1) if groups is None else (groups,)
    if fmt.block is None:
        scale = whole
    elif columnwise and fmt.directional:
        scale = (*lead, column_block_bound(rows, groups or 1, along), columns)
    else:
        scale = (*lead, -(-rows // across), -(-columns // along))
    data = (*lead, rows, columns // fmt.element.per_byte)
    return data, scale, whole if fmt.has_tensor_scale else None


class Uses(NamedTuple):
    """The uses of an operand: for each, whether the quantized matrix, its values or both are read.

    Row-wise by products that reduce the columns, column-wise by those that reduce the rows. Values
    are in ``compute_dtype``.
    """

    row: bool = False
    column: bool = False
    row_values: bool = False
    column_values: bool = False

    @property
    def rowwise(self) -> bool:
        """Whether there is a row-wise use."""
        return self.row or self.row_values

    @property
    def columnwise(self) -> bool:
        """Whether there is a column-wise use."""
        return self.column or self.column_values


class Operand(NamedTuple):
    """An operand of matrix products: for each use quantized, as values, or both.

    An operand in high precision has its values for both uses.
    """

    row: QuantizedMatrix | None = None
    column: QuantizedMatrix | None = None
    row_values: Tensor | None = None
    column_values: Tensor | None = None

    def data_for(self, *, columnwise: bool) -> OperandData | None:
        """Return what a product reads for one use: the values if there are any, or the matrix."""
        if columnwise:
            return self.column if self.column_values is None else self.column_values
        return self.row if self.row_values is None else self.row_values


OperandData = QuantizedMatrix | Tensor
"""An operand for one use: the quantized matrix, or values."""
