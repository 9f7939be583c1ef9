"""The quantized matrix product, stated once: which operand is quantized along which dimension.

With ``x`` ``[tokens, in]``, ``w`` ``[out, in]`` and ``dy`` ``[tokens, out]``:

    forward          y  = q(x) q(w)^T       reduced over in:     x row-wise,     w row-wise
    data gradient    dx = q(dy) q(w)        reduced over out:    dy row-wise,    w column-wise
    weight gradient  dw = q(dy)^T q(x)      reduced over tokens: dy column-wise, x column-wise

An op encodes each operand once, for the uses that it will need (``encode_operand``), and hands
``operand`` of both to its matrix product, which accumulates in FP32.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fusible.recipes.grouped import GroupedTensor, group_quantize
from fusible.recipes.quantizer import Quantizer
from fusible.recipes.recipe import Recipe, Role
from fusible.recipes.tensor import QuantizedTensor

Product = Literal["forward", "dgrad", "wgrad"]

_COLUMNWISE: dict[tuple[Product, Role], bool] = {
    ("forward", "input"): False,
    ("forward", "weight"): False,
    ("dgrad", "grad"): False,
    ("dgrad", "weight"): True,
    ("wgrad", "grad"): True,
    ("wgrad", "input"): True,
}


def quantizer(recipe: Recipe, role: Role, *products: Product) -> Quantizer | None:
    """Return the quantizer of the operand in ``role`` for ``products``, None in high precision."""
    fmt = recipe.format(role)
    if fmt is None:
        return None
    uses = {_use(product, role) for product in products}
    return Quantizer(fmt, rowwise=False in uses, columnwise=True in uses)


def encode_operand(
    x: Tensor,
    recipe: Recipe | None,
    role: Role,
    *products: Product,
    first_dims: Tensor | None = None,
) -> Tensor:
    """Quantize ``x`` for ``products``, its rows in groups if ``first_dims`` are given.

    A quantized one is checked and returned as it is; without a recipe so is ``x``. Raises what
    ``formats.quantize`` raises, and TypeError if ``x`` is quantized in another format than the
    recipe's for this role.
    """
    make = quantizer(recipe, role, *products) if recipe is not None and products else None
    if make is None:
        return x
    if isinstance(x, GroupedTensor):
        return _grouped(x, make)
    if isinstance(x, QuantizedTensor) or first_dims is None:
        return make(x)
    return group_quantize(x, make, first_dims.shape[0], first_dims)


def operand(x: Tensor, product: Product, role: Role, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values of ``x``, as ``encode_operand`` returned it, that ``product`` reads."""
    columnwise = _use(product, role)
    if isinstance(x, GroupedTensor | QuantizedTensor):
        return x.dequantize(dtype, columnwise=columnwise)
    return x if dtype is None else x.to(dtype)


def save_for_wgrad(x: Tensor) -> Tensor:
    """Return ``x`` with what the weight gradient needs of it: the column-wise data only."""
    if isinstance(x, QuantizedTensor) and x.columnwise_data is not None:
        column = x.encoded(columnwise=True)
        return QuantizedTensor(None, column, x.format, x.shape, x.dtype)
    if isinstance(x, GroupedTensor) and x.columnwise_data is not None:
        row = ("rowwise_data", "scale_inv", "tensor_scale")
        pieces = {name: piece for name, piece in x.pieces().items() if name not in row}
        return GroupedTensor(pieces, x.format, x.shape, x.dtype, x.uniform)
    return x


def _use(product: Product, role: Role) -> bool:
    if (product, role) not in _COLUMNWISE:
        raise ValueError(
            f"the {product} product must be given one of "
            f"{sorted(r for p, r in _COLUMNWISE if p == product)}, got role {role!r}"
        )
    return _COLUMNWISE[product, role]


def _grouped(x: GroupedTensor, make: Quantizer) -> GroupedTensor:
    if x.format is None and x.rowwise_data is not None:
        return group_quantize(x.rowwise_data, make, x.num_tensors, x.first_dims)
    if x.format != make.format:
        raise TypeError(
            f"a grouped tensor for this product must be in {make.format.name} or not quantized, "
            f"got {x!r}; quantize the original with group_quantize"
        )
    for wanted, columnwise in ((make.rowwise, False), (make.columnwise, True)):
        if wanted:
            x.encoded(columnwise=columnwise)
    return x
