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
from fusible.recipes.formats import (
    Encoded,
    NumberFormat,
    check_encoded,
    check_ends,
    check_input,
    check_sizes,
    shapes_of,
)

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


class Wanted(NamedTuple):
    """What is made of a tensor for its row-wise and for its column-wise use."""

    row: bool
    column: bool
    row_values: bool = False
    """What decoding to ``compute_dtype`` gives."""
    column_values: bool = False

    @property
    def rowwise(self) -> bool:
        """Whether there is a row-wise use."""
        return self.row or self.row_values

    @property
    def columnwise(self) -> bool:
        """Whether there is a column-wise use."""
        return self.column or self.column_values


class Quantized(NamedTuple):
    """What was ``Wanted`` of a tensor, None where that was not."""

    row: Encoded | None
    column: Encoded | None
    row_values: Tensor | None = None
    column_values: Tensor | None = None


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which products take their operands: FP32 on the CPU, else BF16.

    BF16 holds every value of MXFP8 (in its normal range); of the other formats it rounds.
    """
    return torch.float32 if device.type == "cpu" else torch.bfloat16


class Implementation(NamedTuple):
    """Functions that do what the ops do, of arguments that need no check."""

    quantize: Callable[[Tensor, Tensor | None, NumberFormat, Wanted], Quantized]
    """Takes ``x``, ``ends``, the format, and what is wanted."""
    dequantize: Callable[[Encoded, Tensor | None, NumberFormat, bool, torch.dtype], Tensor]
    """Takes what is encoded, whose sizes it checks, ``ends``, the format, whether it is
    column-wise, and a dtype."""


def empty(x: Tensor, ends: Tensor | None, fmt: NumberFormat, wanted: Wanted) -> Quantized:
    """Allocate what ``quantize`` of an implementation returns."""

    def encoded(columnwise: bool) -> Encoded:
        groups = None if ends is None else ends.shape[0]
        data, scale, tensor_scale = shapes_of(x.shape, fmt, columnwise, groups)
        return Encoded(
            x.new_empty(data, dtype=fmt.element.dtype),
            x.new_empty(scale, dtype=fmt.scale_dtype),
            None if tensor_scale is None else x.new_empty(tensor_scale, dtype=torch.float32),
        )

    dtype = compute_dtype(x.device)
    return Quantized(
        encoded(False) if wanted.row else None,
        encoded(True) if wanted.column else None,
        x.new_empty(x.shape, dtype=dtype) if wanted.row_values else None,
        x.new_empty(x.shape, dtype=dtype) if wanted.column_values else None,
    )


def quantize_by_formulas(
    x: Tensor, ends: Tensor | None, fmt: NumberFormat, wanted: Wanted
) -> Quantized:
    """Quantize by ``formats.quantize``, whatever the device."""
    row = formats.quantize(x, fmt, ends=ends) if wanted.rowwise else None
    column = formats.quantize(x, fmt, columnwise=True, ends=ends) if wanted.columnwise else None
    return _of_encodings(row, column, fmt, wanted, ends)


def dequantize_by_formulas(
    encoded: Encoded,
    ends: Tensor | None,
    fmt: NumberFormat,
    columnwise: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize by ``formats.dequantize``, whatever the device."""
    check_sizes(encoded, fmt, columnwise, None if ends is None else ends.shape[0])
    return formats.dequantize(encoded, fmt, dtype, columnwise=columnwise, ends=ends)


def _empty_values(
    encoded: Encoded, ends: Tensor | None, fmt: NumberFormat, columnwise: bool, dtype: torch.dtype
) -> Tensor:
    *lead, columns = encoded.data.shape
    return encoded.data.new_empty(*lead, columns * fmt.element.per_byte, dtype=dtype)


def _check(x: Tensor, ends: Tensor | None, fmt: NumberFormat, wanted: Wanted) -> None:
    """Raise the errors of ``fusible::quantize``, which are those of `formats.quantize`."""
    check_ends(x, fmt, ends)
    if wanted.rowwise:
        check_input(x, fmt, False)
    if wanted.columnwise:
        check_input(x, fmt, True)


def _ops_of(implementation: Implementation) -> dict[str, Callable[..., Any]]:
    """An implementation as functions of what the ops take, with the format as constants."""

    def quantize(x: Tensor, ends: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        *constants, rowwise, columnwise = rest
        fmt, wanted = NumberFormat.from_constants(*constants), Wanted(rowwise, columnwise)
        _check(x, ends, fmt, wanted)
        made = implementation.quantize(x, ends, fmt, wanted)
        pieces = [t for use in (made.row, made.column) for t in use or (None,) * 3]
        return tuple([x.new_empty(0) if t is None else t for t in pieces])

    def dequantize(
        data: Tensor, scale: Tensor, tensor_scale: Tensor | None, ends: Tensor | None, *rest: Any
    ) -> Tensor:
        *constants, columnwise, dtype = rest
        fmt, encoded = NumberFormat.from_constants(*constants), Encoded(data, scale, tensor_scale)
        return implementation.dequantize(encoded, ends, fmt, columnwise, dtype)

    return {"quantize": quantize, "dequantize": dequantize}


_implementations: dict[str, Implementation] = {}  # one a dispatch key


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
    made = quantize_as(x, fmt, Wanted(rowwise, columnwise), ends)
    return made.row, made.column


def quantize_as(
    x: Tensor, fmt: NumberFormat, wanted: Wanted, ends: Tensor | None = None
) -> Quantized:
    """`encode`, and `decode` of that to ``compute_dtype``: called directly, in the same launch.

    An encoding that only its values are wanted of is then not written.
    """
    x = x.detach()
    if fmt.directional:
        return _quantize_as(x, fmt, wanted, ends)
    once = Wanted(wanted.row or wanted.column, False, wanted.row_values or wanted.column_values)
    encoded, _, values, _ = _quantize_as(x, fmt, once, ends)
    return Quantized(
        encoded if wanted.row else None,
        encoded if wanted.column else None,
        values if wanted.row_values else None,
        values if wanted.column_values else None,
    )


def _quantize_as(x: Tensor, fmt: NumberFormat, wanted: Wanted, ends: Tensor | None) -> Quantized:
    if is_direct(x):
        _check(x, ends, fmt, wanted)
        return _implementations["CUDA"].quantize(x, ends, fmt, wanted)
    op, uses = torch.ops.fusible.quantize.default, (wanted.rowwise, wanted.columnwise)
    pieces = op(x, ends, *fmt.as_constants(), *uses)
    row, column = (
        Encoded(data, scale, tensor_scale if fmt.has_tensor_scale else None)
        for data, scale, tensor_scale in (pieces[:3], pieces[3:])
    )
    return _of_encodings(row, column, fmt, wanted, ends)


def _of_encodings(
    row: Encoded | None,
    column: Encoded | None,
    fmt: NumberFormat,
    wanted: Wanted,
    ends: Tensor | None,
) -> Quantized:
    """What is wanted, from the encoding for each use that there is."""

    def values(encoded: Encoded | None, columnwise: bool) -> Tensor:
        assert encoded is not None
        dtype = compute_dtype(encoded.data.device)
        return decode(encoded, fmt, dtype, columnwise=columnwise, ends=ends)

    return Quantized(
        row if wanted.row else None,
        column if wanted.column else None,
        values(row, False) if wanted.row_values else None,
        values(column, True) if wanted.column_values else None,
    )


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
    return dequantize(*encoded, ends, *fmt.as_constants(), columnwise, dtype)
