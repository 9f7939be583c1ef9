"""The quantized matrix products: which operand is quantized along which dimension.

With ``x`` ``[tokens, in]``, ``w`` ``[out, in]`` and ``dy`` ``[tokens, out]``:

    forward          y  = q(x) q(w)^T       reduced over in:     x row-wise,     w row-wise
    data gradient    dx = q(dy) q(w)        reduced over out:    dy row-wise,    w column-wise
    weight gradient  dw = q(dy)^T q(x)      reduced over tokens: dy column-wise, x column-wise

An op quantizes each operand once, for the uses that its products will read (``quantize_operand``).
A matrix product reads the ``operand_values`` of both and accumulates in FP32. It saves what the
backward reads, the column-wise use of ``x`` and of ``w``.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from fusible.arguments import check_bools
from fusible.calls import is_traced
from fusible.recipes.formats import HADAMARD, NumberFormat
from fusible.recipes.grouped import GroupedTensor
from fusible.recipes.matrix import Operand, QuantizedMatrix, Uses
from fusible.recipes.quantize_ops import dequantize_matrix, quantize_for
from fusible.recipes.quantizer import Quantizer
from fusible.recipes.recipe import Recipe, Role
from fusible.recipes.wrapper import WrapperTensor


def quantizer(recipe: Recipe, role: Role, uses: Uses) -> Quantizer | None:
    """Return the quantizer of the operand in ``role`` for ``uses``, None in high precision."""
    fmt = recipe.format(role)
    if fmt is None or recipe.backward_override == "high_precision":  # which reads the original
        return None
    if role in recipe.mixed_roles and uses.rowwise and uses.columnwise:
        return None  # each is quantized from the original
    uses = _quantized(uses, recipe)
    return Quantizer(fmt, rowwise=uses.rowwise, columnwise=uses.columnwise)


def _quantized(uses: Uses, recipe: Recipe) -> Uses:
    """The uses that are quantized: all, or, with an override, the row-wise ones of the forward."""
    if recipe.backward_override is None:
        return uses
    return Uses(row=uses.row, row_values=uses.row_values)


def backward_operand(x: Tensor, forward: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Return an operand of a backward that ``recipe.backward_override`` leaves unquantized.

    ``x`` is the input or a weight, ``forward`` the values of it that the forward has multiplied.
    """
    of_forward = recipe.backward_override == "dequantized"
    return (forward if of_forward else values(x)).to(dtype)


def quantize_operand(
    x: Tensor, recipe: Recipe, role: Role, uses: Uses, ends: Tensor | None = None
) -> Operand:
    """Quantize ``x`` ``[..., rows, columns]`` for ``uses``, its rows in groups up to ``ends``.

    Values are made in the launch that quantizes, where a kernel can. A quantized matrix of which
    only the values are read is not written, unless ``x`` has it.

    If ``x`` is quantized already, a use that it lacks is quantized from its dequantized values;
    both uses are if it is in another format than the recipe's for this role, or a view across rows.
    Raises what ``quantization.quantize`` raises, and ValueError if ``x`` has another number of
    groups.
    """
    uses = _quantized(uses, recipe)
    if role in recipe.mixed_roles and uses.rowwise and uses.columnwise:
        by_row = Uses(row=uses.row, row_values=uses.row_values)
        by_column = Uses(column=uses.column, column_values=uses.column_values)
        first, second = [quantize_operand(x, recipe, role, u, ends) for u in (by_row, by_column)]
        return Operand(first.row, second.column, first.row_values, second.column_values)
    in_backward = role == "grad" or uses.columnwise
    fmt = recipe.backward_format(role) if in_backward else recipe.format(role)
    if fmt is None:
        x = values(x)
        return Operand(row_values=x, column_values=x)
    if is_quantized(x) and not _is_stored_for(x, fmt):
        x = torch.atleast_2d(x.dequantize())
        if role != "weight":
            x = x.flatten(0, -2)  # one matrix: blocks of rows go across
    if not is_quantized(x):
        return quantize_for(x, fmt, uses, ends) if any(uses) else Operand()
    if isinstance(x, GroupedTensor) and ends is not None and x.num_tensors != ends.shape[0]:
        raise ValueError(
            f"a grouped operand must have the product's {ends.shape[0]} groups, got {x!r}"
        )
    rowwise, columnwise = uses.rowwise, uses.columnwise
    blocks_match = not (fmt.hadamard and columnwise) or _blocks_match(x, ends)
    keeps_columnwise = x.has_columnwise and blocks_match
    missing = Uses(rowwise and x.rowwise_data is None, columnwise and not keeps_columnwise)
    made = Operand()
    if any(missing):
        rows, groups = x.dequantize(), ends if x.ends is None else x.ends
        if not blocks_match:
            rows, groups = rows.reshape(-1, rows.shape[-1]), ends
        made = quantize_for(rows, fmt, missing, groups)
    return Operand(
        _checked_matrix(x, fmt, False) if rowwise and not missing.row else made.row,
        _checked_matrix(x, fmt, True) if columnwise and not missing.column else made.column,
    )


def _is_stored_for(x: WrapperTensor, fmt: NumberFormat) -> bool:
    """Whether a tensor is stored in this format, in the rows of its shape."""
    data = x.columnwise_data if x.rowwise_data is None else x.rowwise_data
    return (
        data is not None
        and x.format_constants == fmt.as_constants()
        and data.shape[-1] * fmt.element.per_byte == x.shape[-1]
    )


def _blocks_match(x: WrapperTensor, ends: Tensor | None) -> bool:
    """Whether blocks of rows begin in ``x`` where they do in a product with groups up to ``ends``.

    Both operands of a weight gradient must be transformed by ``recipes.hadamard`` in the same ones.
    Raises ValueError on the CPU if both have groups, of other sizes; elsewhere nothing reads these.
    """
    if (x.ends is None) != (ends is None):
        return False
    if x.ends is None or ends is None:
        data = x.rowwise_data if x.columnwise_data is None else x.columnwise_data
        assert data is not None
        return data.dim() == 2 or x.shape[-2] % HADAMARD == 0  # else quantized matrix by matrix
    if x.device.type == "cpu" and not is_traced():
        own, of_product = (t.clamp(max=x.shape[0]).tolist() for t in (x.ends, ends))
        if own != of_product:
            raise ValueError(
                "the groups of a quantized operand must be those of the product, whose weight "
                f"gradient transforms both alike, got end rows {own} for {of_product}; quantize it "
                "with the same split sizes, or pass its values"
            )
    return True


def _checked_matrix(x: WrapperTensor, fmt: NumberFormat, columnwise: bool) -> QuantizedMatrix:
    tensors = x.tensors_of(columnwise=columnwise)
    matrix = QuantizedMatrix(*tensors, fmt, columnwise and fmt.directional, x.ends)
    matrix.check_sizes()
    return matrix


def operand_values(
    x: Operand, dtype: torch.dtype = torch.float32, *, columnwise: bool = False
) -> Tensor:
    """Return the values of ``x``, which was quantized for this use."""
    check_bools("operand_values", columnwise=columnwise)
    data = x.data_for(columnwise=columnwise)
    if isinstance(data, Tensor):
        return data.to(dtype)
    if data is None:
        raise ValueError(
            "an operand must be quantized for the use in which it is read, got one without "
            f"{'column' if columnwise else 'row'}-wise data; name the use in quantize_operand"
        )
    return dequantize_matrix(data, dtype)


def is_quantized(x: Tensor) -> TypeGuard[WrapperTensor]:
    """Return whether ``x`` is a quantized or grouped tensor of this package."""
    return isinstance(x, WrapperTensor)


def values(x: Tensor) -> Tensor:
    """Return ``x`` as an ordinary tensor, dequantized if it is quantized."""
    return x.dequantize() if is_quantized(x) else x
