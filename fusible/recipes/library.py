"""The torch ops of quantization: one call for row-wise and column-wise use, one for values.

Their implementations here are the formulas of ``formats``, on any device; ``fusible.kernels`` adds
faster ones for CUDA, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.calls import is_direct
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

Uses = tuple[Encoded | None, Encoded | None]
"""Encodings for row-wise and for column-wise use, None where there are none.

The ops spell them out in six tensors, of which those that are not there are empty.
"""


class Implementation(NamedTuple):
    """Functions that do what the ops do, of arguments that need no check."""

    quantize: Callable[[Tensor, Tensor | None, NumberFormat, bool, bool], Uses]
    """Takes ``x``, ``ends``, the format, and whether there are row-wise and column-wise uses."""
    dequantize: Callable[[Encoded, Tensor | None, NumberFormat, bool, torch.dtype], Tensor]
    """Takes what is encoded, ``ends``, the format, whether it is column-wise, and a dtype."""


def empty(
    x: Tensor, ends: Tensor | None, fmt: NumberFormat, rowwise: bool, columnwise: bool
) -> Uses:
    """Allocate what ``quantize`` of an implementation returns."""
    *lead, rows, columns = x.shape
    matrices = lead if ends is None else []
    data = *lead, rows, columns // fmt.element.per_byte
    whole = (*matrices, 1) if ends is None else tuple(ends.shape)
    across, along = fmt.block or (1, 1)
    row_scale = (*lead, rows // across, columns // along) if fmt.block else whole
    blocks = column_block_bound(rows, 1 if ends is None else ends.shape[0], along)
    col_scale = *lead, blocks, columns

    def encoded(scale: tuple[int, ...]) -> Encoded:
        return Encoded(
            x.new_empty(data, dtype=fmt.element.dtype),
            x.new_empty(scale, dtype=fmt.scale_dtype),
            x.new_empty(whole, dtype=torch.float32) if fmt.has_tensor_scale else None,
        )

    return encoded(row_scale) if rowwise else None, encoded(col_scale) if columnwise else None


def quantize_by_formulas(
    x: Tensor, ends: Tensor | None, fmt: NumberFormat, rowwise: bool, columnwise: bool
) -> Uses:
    """Quantize by ``formats.quantize``, whatever the device."""
    row, column = (
        formats.quantize(x, fmt, columnwise=use, ends=ends) if wanted else None
        for wanted, use in ((rowwise, False), (columnwise, True))
    )
    return row, column


def dequantize_by_formulas(
    encoded: Encoded,
    ends: Tensor | None,
    fmt: NumberFormat,
    columnwise: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize by ``formats.dequantize``, whatever the device."""
    return formats.dequantize(encoded, fmt, dtype, columnwise=columnwise, ends=ends)


def _empty_values(
    encoded: Encoded, ends: Tensor | None, fmt: NumberFormat, columnwise: bool, dtype: torch.dtype
) -> Tensor:
    *lead, columns = encoded.data.shape
    return encoded.data.new_empty(*lead, columns * fmt.element.per_byte, dtype=dtype)


def check_quantize(
    x: Tensor, ends: Tensor | None, fmt: NumberFormat, rowwise: bool, columnwise: bool
) -> None:
    """Raise the errors of ``fusible::quantize``, which are those of `formats.quantize`."""
    check_ends(x, fmt, ends)
    for wanted, use in ((rowwise, False), (columnwise, True)):
        if wanted:
            check_input(x, fmt, use)


def _ops_of(implementation: Implementation) -> dict[str, Callable[..., Any]]:
    """An implementation as functions of what the ops take, with the format spelled."""

    def quantize(x: Tensor, ends: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        *spelled, rowwise, columnwise = rest
        given = x, ends, NumberFormat.from_spelled(*spelled), rowwise, columnwise
        check_quantize(*given)
        pieces = [t for use in implementation.quantize(*given) for t in use or (None,) * 3]
        return tuple([x.new_empty(0) if t is None else t for t in pieces])

    def dequantize(
        data: Tensor, scale: Tensor, tensor_scale: Tensor | None, ends: Tensor | None, *rest: Any
    ) -> Tensor:
        *spelled, columnwise, dtype = rest
        fmt, encoded = NumberFormat.from_spelled(*spelled), Encoded(data, scale, tensor_scale)
        return implementation.dequantize(encoded, ends, fmt, columnwise, dtype)

    return {"quantize": quantize, "dequantize": dequantize}


_implementations: dict[str, Implementation] = {}


def implement(key: str, implementation: Implementation) -> None:
    """Run the ops by ``implementation`` for a dispatch key, such as ``"CUDA"``."""
    for name, function in _ops_of(implementation).items():
        _library.impl(name, function, key)
    _implementations[key] = implementation


implement("CompositeExplicitAutograd", Implementation(quantize_by_formulas, dequantize_by_formulas))
for _name, _fake in _ops_of(Implementation(empty, _empty_values)).items():
    torch.library.register_fake(f"fusible::{_name}", _fake, lib=_library)


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
    if is_direct(x):
        check_quantize(x, ends, fmt, *uses)
        row, column = _implementations["CUDA"].quantize(x, ends, fmt, *uses)
    else:
        pieces = torch.ops.fusible.quantize.default(x, ends, *fmt.spelled(), *uses)
        row, column = (
            Encoded(data, scale, tensor_scale if fmt.has_tensor_scale else None) if wanted else None
            for wanted, (data, scale, tensor_scale) in zip(
                uses, (pieces[:3], pieces[3:]), strict=True
            )
        )
    if not fmt.directional:
        return row if rowwise else None, row if columnwise else None
    return row, column


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
    if is_direct(encoded.data):
        return _implementations["CUDA"].dequantize(encoded, ends, fmt, columnwise, dtype)
    dequantize = torch.ops.fusible.dequantize.default
    return dequantize(*encoded, ends, *fmt.spelled(), columnwise, dtype)
