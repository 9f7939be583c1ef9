"""The torch ops of quantization: one call for row-wise and column-wise use, one for values.

Their implementations here are the formulas of ``formats``, on any device; ``fusible.kernels`` adds
faster ones for CUDA, with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.recipes import formats
from fusible.recipes.blocks import column_block_bound
from fusible.recipes.formats import Encoded, NumberFormat, check_encoded, check_ends, check_input

_FORMAT = "str name, str element, int[] block, str scale_kind, float amax_epsilon"
_library = torch.library.Library("fusible", "FRAGMENT")
_library.define(
    f"quantize(Tensor x, Tensor? ends, {_FORMAT}, bool rowwise, bool columnwise) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "dequantize(Tensor data, Tensor scale, Tensor? tensor_scale, Tensor? ends, "
    f"{_FORMAT}, bool columnwise, ScalarType dtype) -> Tensor"
)

Pieces = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Data, scales and tensor scales, row-wise and column-wise; empty where there are none."""


def empty_pieces(
    x: Tensor, ends: Tensor | None, fmt: NumberFormat, rowwise: bool, columnwise: bool
) -> Pieces:
    """Allocate what ``fusible::quantize`` returns."""
    *lead, rows, columns = x.shape
    matrices = lead if ends is None else []
    data = *lead, rows, columns // fmt.element.per_byte
    whole = (*matrices, 1) if ends is None else tuple(ends.shape)
    across, along = fmt.block or (1, 1)
    row_scale = (*lead, rows // across, columns // along) if fmt.block else whole
    blocks = column_block_bound(rows, 1 if ends is None else ends.shape[0], along)
    col_scale = *lead, blocks, columns

    def pieces(wanted: bool, scale: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        top = whole if wanted and fmt.has_tensor_scale else (0,)
        return (
            x.new_empty(data if wanted else (0,), dtype=fmt.element.dtype),
            x.new_empty(scale if wanted else (0,), dtype=fmt.scale_dtype),
            x.new_empty(top, dtype=torch.float32),
        )

    return *pieces(rowwise, row_scale), *pieces(columnwise, col_scale)


def quantize_by_formulas(
    x: Tensor, ends: Tensor | None, fmt: NumberFormat, rowwise: bool, columnwise: bool
) -> Pieces:
    """Quantize by ``formats.quantize``, whatever the device."""
    pieces = list(empty_pieces(x, ends, fmt, False, False))
    for wanted, use, start in ((rowwise, False, 0), (columnwise, True, 3)):
        if wanted:
            encoded = formats.quantize(x, fmt, columnwise=use, ends=ends)
            got = [t for t in encoded if t is not None]
            pieces[start : start + len(got)] = got
    return tuple(pieces)  # type: ignore[return-value]


# The last arguments of the ops are a format, spelled, and how it is used.


def _quantize(x: Tensor, ends: Tensor | None, *rest: Any) -> Pieces:
    *spelled, rowwise, columnwise = rest
    fmt = NumberFormat.from_spelled(*spelled)
    check_quantize(x, ends, fmt, rowwise, columnwise)
    return quantize_by_formulas(x, ends, fmt, rowwise, columnwise)


def _quantize_fake(x: Tensor, ends: Tensor | None, *rest: Any) -> Pieces:
    *spelled, rowwise, columnwise = rest
    fmt = NumberFormat.from_spelled(*spelled)
    check_quantize(x, ends, fmt, rowwise, columnwise)
    return empty_pieces(x, ends, fmt, rowwise, columnwise)


def check_quantize(
    x: Tensor, ends: Tensor | None, fmt: NumberFormat, rowwise: bool, columnwise: bool
) -> None:
    """Raise the errors of ``fusible::quantize``, which are those of `formats.quantize`."""
    check_ends(x, fmt, ends)
    for wanted, use in ((rowwise, False), (columnwise, True)):
        if wanted:
            check_input(x, fmt, use)


def _dequantize(
    data: Tensor, scale: Tensor, tensor_scale: Tensor | None, ends: Tensor | None, *rest: Any
) -> Tensor:
    *spelled, columnwise, dtype = rest
    fmt, encoded = NumberFormat.from_spelled(*spelled), Encoded(data, scale, tensor_scale)
    return formats.dequantize(encoded, fmt, dtype, columnwise=columnwise, ends=ends)


def _dequantize_fake(
    data: Tensor, scale: Tensor, tensor_scale: Tensor | None, ends: Tensor | None, *rest: Any
) -> Tensor:
    *spelled, _, dtype = rest
    per_byte = NumberFormat.from_spelled(*spelled).element.per_byte
    return data.new_empty(*data.shape[:-1], data.shape[-1] * per_byte, dtype=dtype)


_library.impl("quantize", _quantize, "CompositeExplicitAutograd")
_library.impl("dequantize", _dequantize, "CompositeExplicitAutograd")
torch.library.register_fake("fusible::quantize", _quantize_fake, lib=_library)
torch.library.register_fake("fusible::dequantize", _dequantize_fake, lib=_library)


def encode(
    x: Tensor, fmt: NumberFormat, *, rowwise: bool, columnwise: bool, ends: Tensor | None = None
) -> tuple[Encoded | None, Encoded | None]:
    """Quantize ``x`` for row-wise and column-wise use, in one launch where a kernel can.

    A format with a scale for whole matrices takes two launches, the first for their largest
    magnitudes. One whose blocks have no direction is encoded once, returned for both uses. No
    gradient passes: what the gradient of a quantized product is, its op decides.
    """
    x = x.detach()
    uses = (rowwise, columnwise) if fmt.directional else (rowwise or columnwise, False)
    pieces = torch.ops.fusible.quantize(x, ends, *fmt.spelled(), *uses)

    def encoded(data: Tensor, scale: Tensor, tensor_scale: Tensor) -> Encoded:
        return Encoded(data, scale, tensor_scale if fmt.has_tensor_scale else None)

    row = encoded(*pieces[:3]) if uses[0] else None
    if not fmt.directional:
        return row if rowwise else None, row if columnwise else None
    return row, encoded(*pieces[3:]) if columnwise else None


def decode(
    encoded: Encoded,
    fmt: NumberFormat,
    dtype: torch.dtype,
    *,
    columnwise: bool,
    ends: Tensor | None = None,
) -> Tensor:
    """Return the values of ``encoded``, as ``formats.dequantize``; in one launch where it can."""
    check_encoded(encoded, fmt)
    columnwise = columnwise and fmt.directional
    return torch.ops.fusible.dequantize(*encoded, ends, *fmt.spelled(), columnwise, dtype)
