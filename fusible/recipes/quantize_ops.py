"""The torch ops ``fusible::quantize`` and ``fusible::dequantize``, and how ops call them.

Their implementations here are the formulas of ``quantization``, on any device; ``kernels.quantize``
adds faster ones for CUDA, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible import library
from fusible.calls import is_direct, refuse_hidden_derivatives
from fusible.recipes import quantization
from fusible.recipes.formats import NumberFormat
from fusible.recipes.matrix import Operand, QuantizedMatrix, Uses, as_bytes, shapes_of
from fusible.recipes.quantization import check_arguments


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which products take their operands: FP32 on the CPU, else BF16.

    BF16 holds every value of MXFP8 (in its normal range); of the other formats it rounds.
    """
    return torch.float32 if device.type == "cpu" else torch.bfloat16


class Implementation(NamedTuple):
    """Functions that compute what the ops do, for arguments that are already checked."""

    quantize: Callable[[Tensor, Tensor | None, NumberFormat, Uses, Tensor | None], Operand]
    """Takes ``x``, the end rows of groups, the format, the outputs wanted, and the key."""
    dequantize: Callable[[QuantizedMatrix, torch.dtype], Tensor]
    """Checks the sizes of the matrix."""


def empty(
    x: Tensor, ends: Tensor | None, fmt: NumberFormat, uses: Uses, key: Tensor | None = None
) -> Operand:
    """Allocate what ``quantize`` of an implementation returns."""

    def matrix(columnwise: bool) -> QuantizedMatrix:
        groups = None if ends is None else ends.shape[0]
        data, scale, tensor_scale = shapes_of(x.shape, fmt, columnwise, groups)
        return QuantizedMatrix(
            x.new_empty(data, dtype=fmt.element.dtype),
            x.new_empty(scale, dtype=fmt.scale_dtype),
            None if tensor_scale is None else x.new_empty(tensor_scale, dtype=torch.float32),
            fmt,
            columnwise and fmt.directional,
            ends,
        )

    dtype = compute_dtype(x.device)
    return Operand(
        matrix(False) if uses.row else None,
        matrix(True) if uses.column else None,
        x.new_empty(x.shape, dtype=dtype) if uses.row_values else None,
        x.new_empty(x.shape, dtype=dtype) if uses.column_values else None,
    )


def quantize_by_formulas(
    x: Tensor, ends: Tensor | None, fmt: NumberFormat, uses: Uses, key: Tensor | None
) -> Operand:
    """Quantize by ``quantization.quantize``, whatever the device."""
    quantize, x = quantization.quantize, x.contiguous()  # as what the fake returns
    row = quantize(x, fmt, ends=ends, key=key) if uses.rowwise else None
    column = quantize(x, fmt, columnwise=True, ends=ends, key=key) if uses.columnwise else None
    return _operand(row, column, uses)


def dequantize_by_formulas(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Dequantize by ``quantization.dequantize``, whatever the device."""
    matrix.check_sizes()
    return quantization.dequantize(matrix, dtype)


def _random_key(x: Tensor) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (2,), device=x.device)


_random_key_op = library.define(
    _random_key,
    lambda x: x.new_empty(2, dtype=torch.int64),
    name="random_key",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def random_key(x: Tensor) -> Tensor:
    """Return a key for stochastic rounding on ``x.device``, int64 ``[2]``: a seed and an offset.

    Drawn from PyTorch's generator of the device, on the device: ``torch.manual_seed`` repeats it,
    and so does a forward that activation checkpointing runs again; a replayed CUDA graph draws
    anew. Compiled code draws the same.
    """
    if torch.compiler.is_compiling():
        # PyTorch merges calls of equal arguments, but never two of `empty`.
        x = torch.empty(0, device=x.device)
    return _random_key_op(x)


def _quantize_op_of(implementation: Implementation) -> Callable[..., Any]:
    def quantize(
        x: Tensor,
        ends: Tensor | None,
        key: Tensor | None,
        fmt: NumberFormat,
        rowwise: bool,
        columnwise: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Data, scale and tensor scale of each use; empty where there is none."""
        check_arguments(x, ends, fmt, key)
        operand = implementation.quantize(x, ends, fmt, Uses(rowwise, columnwise), key)
        tensors = [t for use in operand[:2] for t in (use[:3] if use else (None,) * 3)]
        return tuple([x.new_empty(0) if t is None else as_bytes(t) for t in tensors])  # type: ignore[return-value]

    return quantize


def _dequantize_op_of(implementation: Implementation) -> Callable[..., Any]:
    def dequantize(
        data: Tensor,
        scale: Tensor,
        tensor_scale: Tensor | None,
        fmt: NumberFormat,
        columnwise: bool,
        ends: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """The values of the matrix whose fields come first."""
        scale = scale.view(fmt.scale_dtype) if scale.dtype == torch.uint8 else scale
        matrix = QuantizedMatrix(data, scale, tensor_scale, fmt, columnwise, ends)
        return implementation.dequantize(matrix, dtype)

    return dequantize


_on_cuda = _by_formulas = Implementation(quantize_by_formulas, dequantize_by_formulas)
_fake = Implementation(
    empty, lambda matrix, dtype: matrix.data.new_empty(matrix.shape, dtype=dtype)
)
_quantize_op = library.define(_quantize_op_of(_by_formulas), _quantize_op_of(_fake))
_dequantize_op = library.define(_dequantize_op_of(_by_formulas), _dequantize_op_of(_fake))


def implement_quantizers(implementation: Implementation) -> None:
    """Run the ops by ``implementation`` on CUDA."""
    global _on_cuda  # noqa: PLW0603 - set once, where the kernels are imported
    _on_cuda = implementation
    library.implement("quantize", _quantize_op_of(implementation))
    library.implement("dequantize", _dequantize_op_of(implementation))


def quantize_matrix(
    x: Tensor, fmt: NumberFormat, *, rowwise: bool, columnwise: bool, ends: Tensor | None = None
) -> tuple[QuantizedMatrix | None, QuantizedMatrix | None]:
    """Quantize ``x`` for row-wise and column-wise use, in one launch where a kernel can.

    A format with a scale for whole matrices needs two launches, the first for their largest
    magnitudes. One whose blocks have no direction is quantized once, returned for both uses. No
    gradient passes: the op of the quantized product defines it.
    """
    operand = quantize_for(x, fmt, Uses(rowwise, columnwise), ends)
    return operand.row, operand.column


def quantize_for(
    x: Tensor,
    fmt: NumberFormat,
    uses: Uses,
    ends: Tensor | None = None,
    key: Tensor | None = None,
) -> Operand:
    """Quantize ``x`` and dequantize the result to ``compute_dtype``, as ``uses`` asks.

    A ``stochastic`` format rounds by ``key``, or by one that is drawn here. A direct call does both
    in one launch, and writes no quantized matrix of which only the values are wanted.
    """
    refuse_hidden_derivatives("quantize", x)
    x = x.detach()
    if key is None and fmt.stochastic:
        key = random_key(x)
    if fmt.directional:
        return _quantize_for(x, fmt, uses, ends, key)
    once = Uses(uses.row or uses.column, False, uses.row_values or uses.column_values)
    matrix, _, values, _ = _quantize_for(x, fmt, once, ends, key)
    both = matrix, matrix, values, values
    wanted = [part if use else None for part, use in zip(both, uses, strict=True)]
    return Operand(*wanted)  # type: ignore[arg-type]


def _quantize_for(
    x: Tensor, fmt: NumberFormat, uses: Uses, ends: Tensor | None, key: Tensor | None
) -> Operand:
    if is_direct(x):
        check_arguments(x, ends, fmt, key)
        return _on_cuda.quantize(x, ends, fmt, uses, key)
    tensors = _quantize_op(x, ends, key, fmt, uses.rowwise, uses.columnwise)
    row, column = (
        QuantizedMatrix(
            tensors[at],
            tensors[at + 1].view(fmt.scale_dtype),
            tensors[at + 2] if fmt.has_tensor_scale else None,
            fmt,
            columnwise,
            ends,
        )
        for at, columnwise in ((0, False), (3, fmt.directional))
    )
    return _operand(row, column, uses)


def _operand(row: QuantizedMatrix | None, column: QuantizedMatrix | None, uses: Uses) -> Operand:
    """The outputs that ``uses`` asks for, from the quantized matrix of each use."""

    def values(matrix: QuantizedMatrix | None) -> Tensor:
        assert matrix is not None
        return dequantize_matrix(matrix, compute_dtype(matrix.data.device))

    return Operand(
        row if uses.row else None,
        column if uses.column else None,
        values(row) if uses.row_values else None,
        values(column) if uses.column_values else None,
    )


def dequantize_matrix(matrix: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of ``matrix``, as ``quantization.dequantize``; in one launch if it can."""
    matrix.check_dtypes()
    if is_direct(matrix.data):
        return _on_cuda.dequantize(matrix, dtype)
    data, scale, *rest = matrix
    values: Tensor = _dequantize_op(data, as_bytes(scale), *rest, dtype)
    return values
