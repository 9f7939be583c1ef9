"""The quantized matrix product, stated once: which operand is quantized along which dimension.

With ``x`` ``[tokens, in]``, ``w`` ``[out, in]`` and ``dy`` ``[tokens, out]``:

    forward          y  = q(x) q(w)^T       reduced over in:     x row-wise,     w row-wise
    data gradient    dx = q(dy) q(w)        reduced over out:    dy row-wise,    w column-wise
    weight gradient  dw = q(dy)^T q(x)      reduced over tokens: dy column-wise, x column-wise

An op encodes each operand once, for the products that will read it (``encode_operand``), hands
``operand`` of both to its matrix product, which accumulates in FP32, and saves what the backward
reads, which is column-wise of ``x`` and of ``w`` (``columnwise_only``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor

from fusible.recipes.formats import Encoded, NumberFormat, check_sizes
from fusible.recipes.grouped import GroupedTensor
from fusible.recipes.library import Wanted, decode, quantize_as
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


class Operand(NamedTuple):
    """An operand as plain tensors, which autograd saves, hooks move and torch.compile traces.

    ``plain`` has the values where they are not quantized, ``row`` and ``column`` the encodings for
    each use (one for both in a format without direction), ``ends`` the end rows of the groups that
    were quantized apart.
    """

    format: NumberFormat | None
    row: Encoded | None = None
    column: Encoded | None = None
    plain: Tensor | None = None
    ends: Tensor | None = None
    row_values: Tensor | None = None
    """What ``operand`` gives of the encoding for this use, which then need not be there."""
    column_values: Tensor | None = None


SAVED = 4
"""The number of tensors that ``columnwise_only`` gives of one operand."""

Saved = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def quantizer(recipe: Recipe, role: Role, *products: Product) -> Quantizer | None:
    """Return the quantizer of the operand in ``role`` for ``products``, None in high precision."""
    fmt = recipe.format(role)
    if fmt is None:
        return None
    rowwise, columnwise = _uses(role, products)
    return Quantizer(fmt, rowwise=rowwise, columnwise=columnwise)


def encode_operand(
    x: Tensor,
    recipe: Recipe,
    role: Role,
    *products: Product,
    ends: Tensor | None = None,
    at_once: Sequence[Product] = (),
) -> Operand:
    """Quantize ``x`` ``[..., rows, columns]`` for ``products``, its rows in groups up to ``ends``.

    Of those ``at_once`` nothing will be asked for but ``operand``, in ``compute_dtype``, which is
    made in the launch that encodes where a kernel can.

    A quantized ``x`` is taken as it is. Raises what ``formats.quantize`` raises, TypeError if ``x``
    is quantized in another format than the recipe's for this role, and ValueError if it lacks a use
    or is of another number of groups.
    """
    fmt = recipe.format(role)
    if isinstance(x, GroupedTensor) and x.format is None and x.rowwise_data is not None:
        x = x.rowwise_data
    if fmt is None:
        return Operand(None, plain=values(x))
    if not is_quantized(x):
        if not products:
            return Operand(fmt)
        encoded = _uses(role, [product for product in products if product not in at_once])
        wanted = Wanted(*encoded, *_uses(role, at_once))
        row, column, *decoded = quantize_as(x, fmt, wanted, ends)
        return Operand(fmt, row, column, None, ends, *decoded)
    # By constants, whose integers may be symbolic where this is traced.
    if x.format is None or x.format.as_constants() != fmt.as_constants():
        raise TypeError(
            f"the {role} of a product under {recipe.name} must be in {fmt.name} or not quantized, "
            f"got {x!r}; quantize the original"
        )
    rowwise, columnwise = _uses(role, products)
    row = x.encoded() if rowwise else None
    column = x.encoded(columnwise=True) if columnwise else None
    groups = x.num_tensors if isinstance(x, GroupedTensor) else None
    for use, along_rows in ((row, False), (column, True)):
        if use is not None:
            check_sizes(use, fmt, along_rows, groups)
    return Operand(fmt, row, column, ends=_ends_of(x, ends))


def operand(x: Operand, product: Product, role: Role, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of ``x``, encoded for ``product`` among others, that it reads."""
    if x.format is None:
        assert x.plain is not None
        return x.plain.to(dtype)
    columnwise = _use(product, role)
    decoded = x.column_values if columnwise else x.row_values
    if decoded is not None:
        return decoded.to(dtype)
    encoded = x.column if columnwise else x.row
    if encoded is None:
        raise ValueError(
            f"the {role} of the {product} product must be encoded for it, got an operand without "
            f"{'column' if columnwise else 'row'}-wise data; name the product in encode_operand"
        )
    return decode(encoded, x.format, dtype, columnwise=columnwise, ends=x.ends)


def columnwise_only(x: Operand, *, needed: bool = True) -> Saved:
    """Return what the gradients read of an input or a weight: data, scale, tensor scale, ends.

    None where there is none, and everywhere if it is not ``needed``; the values and three None if
    they are not quantized.
    """
    if not needed:
        return None, None, None, None
    if x.format is None:
        return x.plain, None, None, None
    assert x.column is not None
    return *x.column, x.ends


def from_columnwise(saved: Sequence[Tensor | None], fmt: NumberFormat | None) -> Operand:
    """Undo ``columnwise_only`` for the column-wise use."""
    data, scale, tensor_scale, ends = saved
    if fmt is None:
        return Operand(None, plain=data)
    assert data is not None
    assert scale is not None
    return Operand(fmt, column=Encoded(data, scale, tensor_scale), ends=ends)


_QUANTIZED = GroupedTensor, QuantizedTensor


def is_quantized(x: Tensor) -> TypeGuard[GroupedTensor | QuantizedTensor]:
    """Tell whether ``x`` is one of the tensors of this package, which ops take apart."""
    return isinstance(x, _QUANTIZED)


def values(x: Tensor) -> Tensor:
    """Return ``x`` as an ordinary tensor, decoded if it is quantized."""
    return x.dequantize() if is_quantized(x) else x


def _uses(role: Role, products: Sequence[Product]) -> tuple[bool, bool]:
    uses = {_use(product, role) for product in products}
    return False in uses, True in uses


def _use(product: Product, role: Role) -> bool:
    if (product, role) not in _COLUMNWISE:
        raise ValueError(
            f"the {product} product must be given one of "
            f"{sorted(r for p, r in _COLUMNWISE if p == product)}, got role {role!r}"
        )
    return _COLUMNWISE[product, role]


def _ends_of(x: GroupedTensor | QuantizedTensor, ends: Tensor | None) -> Tensor | None:
    """The groups of a quantized tensor itself: one quantized as a whole has none."""
    if isinstance(x, QuantizedTensor):
        return None
    if ends is not None and x.num_tensors != ends.shape[0]:
        raise ValueError(
            f"a grouped operand must have the product's {ends.shape[0]} groups, got {x!r}"
        )
    return x.ends
