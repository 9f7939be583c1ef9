"""The quantized matrix products: which operand is quantized along which dimension.

With ``x`` ``[tokens, in]``, ``w`` ``[out, in]`` and ``dy`` ``[tokens, out]``:

    forward          y  = q(x) q(w)^T       reduced over in:     x row-wise,     w row-wise
    data gradient    dx = q(dy) q(w)        reduced over out:    dy row-wise,    w column-wise
    weight gradient  dw = q(dy)^T q(x)      reduced over tokens: dy column-wise, x column-wise

An op quantizes each operand once, for the products that will read it (``quantize_operand``). Its
matrix product reads the ``operand_values`` of both and accumulates in FP32. It saves what the
backward reads, the column-wise use of ``x`` and of ``w`` (``saved_data``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeGuard

import torch
from torch import Tensor

from fusible.calls import is_traced
from fusible.recipes.formats import HADAMARD, NumberFormat
from fusible.recipes.grouped import GroupedTensor
from fusible.recipes.matrix import Operand, QuantizedMatrix, Uses
from fusible.recipes.quantize_ops import dequantize_matrix, quantize_for
from fusible.recipes.quantizer import Quantizer
from fusible.recipes.recipe import Recipe, Role
from fusible.recipes.wrapper import WrapperTensor

ProductKind = Literal["forward", "dgrad", "wgrad"]

_COLUMNWISE: dict[tuple[ProductKind, Role], bool] = {
    ("forward", "input"): False,
    ("forward", "weight"): False,
    ("dgrad", "grad"): False,
    ("dgrad", "weight"): True,
    ("wgrad", "grad"): True,
    ("wgrad", "input"): True,
}


def quantizer(recipe: Recipe, role: Role, *products: ProductKind) -> Quantizer | None:
    """Return the quantizer of the operand in ``role`` for ``products``, None in high precision."""
    fmt = recipe.format(role)
    if fmt is None or recipe.backward_override == "high_precision":  # which reads the original
        return None
    if role in recipe.mixed_roles and len(set(products)) > 1:  # which quantize the original apart
        return None
    rowwise, columnwise = _uses(role, _quantized(products, recipe))
    return Quantizer(fmt, rowwise=rowwise, columnwise=columnwise)


def _quantized(products: Sequence[ProductKind], recipe: Recipe) -> Sequence[ProductKind]:
    """The products of ``products`` whose operands are quantized: all, or the forward alone."""
    return products if recipe.backward_override is None else [p for p in products if p == "forward"]


def backward_operand(x: Tensor, forward: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Return an operand of a backward that ``recipe.backward_override`` leaves unquantized.

    ``x`` is the input or a weight, ``forward`` the values of it that the forward has multiplied.
    """
    of_forward = recipe.backward_override == "dequantized"
    return (forward if of_forward else values(x)).to(dtype)


def quantize_operand(
    x: Tensor,
    recipe: Recipe,
    role: Role,
    *products: ProductKind,
    ends: Tensor | None = None,
    as_values: Sequence[ProductKind] = (),
) -> Operand:
    """Quantize ``x`` ``[..., rows, columns]`` for ``products``, its rows in groups up to ``ends``.

    Products ``as_values`` read only the values in ``compute_dtype``: these are made in the launch
    that quantizes, where a kernel can, and the quantized matrix is not written.

    If ``x`` is quantized already, a use that it lacks is quantized from its dequantized values;
    both uses are if it is in another format than the recipe's for this role, or a view across rows.
    Raises what ``quantization.quantize`` raises, and ValueError if ``x`` has another number of
    groups.
    """
    products = tuple(_quantized(products, recipe))
    later = tuple([product for product in products if product != "forward"])
    fmt = recipe.backward_format(role) if later else recipe.format(role)
    if later and len(later) < len(products) and role in recipe.mixed_roles:
        first = quantize_operand(x, recipe, role, "forward", ends=ends, as_values=as_values)
        second = quantize_operand(x, recipe, role, *later, ends=ends, as_values=as_values)
        return Operand(first.row, second.column, first.row_values, second.column_values)
    if fmt is None:
        x = values(x)
        return Operand(row_values=x, column_values=x)
    if is_quantized(x) and not _is_stored_for(x, fmt):
        x = torch.atleast_2d(x.dequantize())
        if role != "weight":
            x = x.flatten(0, -2)  # one matrix: blocks of rows go across
    if not is_quantized(x):
        if not products:
            return Operand()
        quantized = _uses(role, [product for product in products if product not in as_values])
        return quantize_for(x, fmt, Uses(*quantized, *_uses(role, as_values)), ends)
    if isinstance(x, GroupedTensor) and ends is not None and x.num_tensors != ends.shape[0]:
        raise ValueError(
            f"a grouped operand must have the product's {ends.shape[0]} groups, got {x!r}"
        )
    rowwise, columnwise = _uses(role, products)
    has_columnwise = x.columnwise_data is not None or not fmt.directional
    blocks_match = not (fmt.hadamard and columnwise) or _blocks_match(x, ends)
    keeps_columnwise = has_columnwise and blocks_match
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
    x: Operand, product: ProductKind, role: Role, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the values that ``product`` reads of ``x``, which was quantized for it."""
    columnwise = _use(product, role)
    data = x.data_for(columnwise=columnwise)
    if isinstance(data, Tensor):
        return data.to(dtype)
    if data is None:
        raise ValueError(
            f"the {role} of the {product} product must be quantized for it, got an operand without "
            f"{'column' if columnwise else 'row'}-wise data; name the product in quantize_operand"
        )
    return dequantize_matrix(data, dtype)


def is_quantized(x: Tensor) -> TypeGuard[WrapperTensor]:
    """Return whether ``x`` is a quantized or grouped tensor of this package."""
    return isinstance(x, WrapperTensor)


def values(x: Tensor) -> Tensor:
    """Return ``x`` as an ordinary tensor, dequantized if it is quantized."""
    return x.dequantize() if is_quantized(x) else x


def _uses(role: Role, products: Sequence[ProductKind]) -> tuple[bool, bool]:
    uses = {_use(product, role) for product in products}
    return False in uses, True in uses


def _use(product: ProductKind, role: Role) -> bool:
    if (product, role) not in _COLUMNWISE:
        raise ValueError(
            f"the operand's role in the {product} product must be one of "
            f"{sorted(r for p, r in _COLUMNWISE if p == product)}, got role {role!r}"
        )
    return _COLUMNWISE[product, role]
