"""``GroupedTensor``: matrices of the same columns in one buffer, with their sizes on the device.

Nothing here reads a size on the host except ``split_into_quantized_tensors``, which says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusible.calls import is_traced
from fusible.recipes.blocks import check_per_group, group_starts
from fusible.recipes.formats import NumberFormat
from fusible.recipes.quantizer import Quantizer
from fusible.recipes.tensor import QuantizedTensor
from fusible.recipes.tensor_dispatch import DispatchedTensor, implicit_values
from fusible.recipes.wrapper import PIECES, WrapperTensor, quantized_pieces


class GroupedTensor(WrapperTensor, DispatchedTensor):
    """``num_tensors`` matrices one after the other: ``[rows, columns]``, quantized or not.

    ``ends`` (int64 ``[groups]``) has their cumulative end rows, on the tensor's device. Rows past
    the last group belong to none. A tensor that is not quantized (``format`` None) has
    ``rowwise_data`` only. Of ``uniform`` groups it is known, without reading the device, that all
    have the same number of rows.
    """

    ends: Tensor

    @property
    def num_tensors(self) -> int:
        """The number of groups."""
        return self.ends.shape[0]

    @property
    def first_dims(self) -> Tensor:
        """The rows of each group, int64 ``[groups]``, on the tensor's device."""
        return self.ends - group_starts(self.ends)

    @property
    def tensor_offsets(self) -> Tensor:
        """Where each group begins, and the last one ends, in elements: int64 ``[groups + 1]``."""
        return functional.pad(self.ends * self.shape[1], (1, 0))

    @property
    def logical_shape(self) -> tuple[int, int]:
        """``(rows, columns)`` of all groups together."""
        rows, columns = self.shape
        return rows, columns

    def split_into_quantized_tensors(self) -> tuple[Tensor, ...]:
        """Return a view of every group; waits for the device unless the groups are uniform."""
        if self.uniform:
            rows = [self.shape[0] // self.num_tensors] * self.num_tensors
        else:
            rows = self.first_dims.tolist()
        along = 1 if self.format is None or self.format.block is None else self.format.block[1]
        members, row, block = [], 0, 0
        for group, count in enumerate(rows):
            blocks = -(-count // along)
            members.append(self._view_of(group, (row, count), (block, blocks)))
            row, block = row + count, block + blocks
        return tuple(members)

    def _view_of(self, group: int, rows: tuple[int, int], blocks: tuple[int, int]) -> Tensor:
        if self.format is None:
            assert self.rowwise_data is not None
            return self.rowwise_data.narrow(0, *rows)
        spans = dict.fromkeys(("tensor_scale", "columnwise_tensor_scale"), (group, 1))
        spans["columnwise_scale_inv"] = blocks
        if self.format.block is None:
            spans["scale_inv"] = group, 1
        views = {
            name: piece.narrow(0, *spans.get(name, rows))
            for name, piece in self.pieces().items()
            if name in PIECES
        }
        return QuantizedTensor(views, self.format, (rows[1], self.shape[1]), self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what is known without reading the device."""
        name = self.format.name if self.format else "not quantized"
        return (
            f"GroupedTensor({self.num_tensors} tensors, {tuple(self.shape)}, {name}, "
            f"dtype={self.dtype}, device='{self.device}')"
        )


torch.serialization.add_safe_globals([GroupedTensor])  # torch.load reads it


def group(x: Tensor, num_groups: int, first_dims: Tensor | None = None) -> GroupedTensor:
    """Declare the rows of ``x`` ``[rows, columns]`` to be ``num_groups`` matrices.

    ``first_dims`` (int32 or int64 ``[num_groups]``, on ``x.device``) are their rows; without it
    they are equal. Shares memory with ``x``.
    """
    pieces = {"rowwise_data": x, "ends": _end_rows(x, num_groups, first_dims)}
    return GroupedTensor(pieces, None, x.shape, x.dtype, first_dims is None)


def _end_rows(x: Tensor, num_groups: int, first_dims: Tensor | None) -> Tensor:
    if x.ndim != 2:
        raise ValueError(f"rows to group must be a 2-D tensor, got shape {tuple(x.shape)}")
    if first_dims is None:
        if num_groups < 1 or x.shape[0] % num_groups:
            raise ValueError(
                f"rows must be a multiple of num_groups={num_groups} to be equal groups, "
                f"got {x.shape[0]}; pass first_dims"
            )
        rows = x.shape[0] // num_groups
        first_dims = torch.full((num_groups,), rows, dtype=torch.int64, device=x.device)
    check_per_group("first_dims", first_dims, x.device, num_groups)
    if x.is_cpu and not is_traced():  # elsewhere the host would have to wait
        rows_of_groups = first_dims.tolist()
        if min(rows_of_groups, default=0) < 0 or sum(rows_of_groups) > x.shape[0]:
            raise ValueError(
                f"first_dims must not be negative, and sum to at most the {x.shape[0]} rows, got "
                f"{rows_of_groups}"
            )
    return first_dims.to(torch.int64).cumsum(0)


def group_quantize(
    x: Tensor, quantizer: Quantizer, num_groups: int, first_dims: Tensor | None = None
) -> GroupedTensor:
    """Quantize the groups of ``x`` as ``group`` finds them, each with its own scales.

    Groups need no padding: column-wise blocks restart at each. Raises what
    ``quantization.quantize`` raises, and ValueError for 128x128 blocks.
    """
    ends, fmt = _end_rows(x, num_groups, first_dims), quantizer.format
    uses = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    pieces = quantized_pieces(x, fmt, **uses, ends=ends)
    return GroupedTensor(pieces | {"ends": ends}, fmt, x.shape, x.dtype, first_dims is None)


class GroupedQuantizer(Quantizer):
    """Quantizes each of ``num_groups`` groups of rows separately, for a grouped op."""

    def __init__(
        self,
        format: NumberFormat,
        num_groups: int,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        by_receiver: bool = False,
    ) -> None:
        super().__init__(format, rowwise=rowwise, columnwise=columnwise, by_receiver=by_receiver)
        self.num_groups = num_groups

    def __call__(  # type: ignore[override]
        self, x: Tensor, first_dims: Tensor | None = None
    ) -> GroupedTensor:
        """Quantize ``x`` as ``group_quantize`` with ``first_dims``, the rows of each group.

        A tensor that already is in this format, in as many groups, for these uses, is returned as
        it is; of any other quantized one the values are quantized, in its own groups. Raises
        ValueError for one in another number of groups, and without ``first_dims``.
        """
        if isinstance(x, GroupedTensor) and x.format is not None:
            if x.num_tensors != self.num_groups:
                raise ValueError(
                    f"a tensor for this quantizer must have {self.num_groups} groups, got {x!r}"
                )
            if self._holds(x):
                return x
            first_dims = x.first_dims
        if first_dims is None:
            raise ValueError(
                f"first_dims must be the rows of each of the {self.num_groups} groups, got None; "
                "pass the split sizes of the grouped op"
            )
        if isinstance(x, GroupedTensor):
            x = implicit_values("a quantizer of another format", x)
        return group_quantize(x, self, self.num_groups, first_dims)


def group_dequantize(g: GroupedTensor, dtype: torch.dtype | None = None) -> GroupedTensor:
    """Return the grouped tensor of the values of ``g``, not quantized."""
    values = g.dequantize(dtype)
    pieces = {"rowwise_data": values, "ends": g.ends}
    return GroupedTensor(pieces, None, g.shape, values.dtype, g.uniform)
