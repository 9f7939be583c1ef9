"""Number formats and the quantized product, in FP64 from their specifications.

Elements are rounded by exponent and step (OCP MX 1.0, section 5.3; round to nearest even,
saturating); scales as ``docs/recipes.md`` has them. Where the package documents FP32 arithmetic,
each result is rounded to FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Element(NamedTuple):
    """A floating-point format of few bits."""

    mantissa: int
    smallest: int
    """The exponent of the smallest normal number."""
    largest: float


E4M3 = Element(3, -6, 448.0)
E5M2 = Element(2, -14, 57344.0)
E2M1 = Element(1, 0, 6.0)


def rounded(x: Tensor, element: Element) -> Tensor:
    """The nearest numbers of ``element``, ties to even."""
    exponent = torch.frexp(x).exponent - 1
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=element.smallest) - element.mantissa)
    return (torch.round(x / step) * step).clamp(-element.largest, element.largest)


def fp32(x: Tensor) -> Tensor:
    """FP64 rounded to FP32."""
    return x.float().double()


def _power_of_two(x: Tensor, up: bool) -> Tensor:
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - ((mantissa == 0.5).int() if up else 1)
    return torch.ldexp(torch.ones_like(x), exponent)


def _blocks(x: Tensor, size: tuple[int, int] | None) -> Tensor:
    """The largest magnitude of the block of each element, of the last of a line perhaps a part."""
    rows, columns = x.shape
    high, wide = (max(rows, 1), max(columns, 1)) if size is None else size
    padded = torch.zeros(-(-rows // high) * high, -(-columns // wide) * wide, dtype=x.dtype)
    padded[:rows, :columns] = x.abs()
    tiled = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    most = tiled.amax((1, 3), keepdim=True) if tiled.numel() else tiled
    return most.expand_as(tiled).reshape(padded.shape)[:rows, :columns]


def mxfp8(x: Tensor, element: Element) -> Tensor:
    """One power of two for each 32 along the rows, rounded up."""
    scale = _power_of_two(_blocks(x, (1, 32)) / element.largest, up=True)
    scale = scale.clamp(2.0**-127, 2.0**127)
    return rounded(x / scale, element) * scale


def fp8_scaled(x: Tensor, element: Element, size: tuple[int, int] | None, power: bool) -> Tensor:
    """One FP32 scale for each block, or for all."""
    most = _blocks(x, size)
    factor = fp32(element.largest / most).clamp(max=torch.finfo(torch.float32).max)
    factor = torch.where(most == 0, 1.0, factor)
    factor = _power_of_two(factor, up=False) if power else factor
    return rounded(fp32(x * factor), element) * fp32(1 / factor)


def nvfp4(x: Tensor) -> Tensor:
    """E2M1 with an E4M3 scale for each 16 along the rows, and an FP32 scale for all."""
    whole = fp32(_blocks(x, None) / (6 * 448)).clamp(min=2.0**-126)
    block = rounded(fp32(fp32(_blocks(x, (1, 16)) / 6) / whole), E4M3)
    scale = fp32(block * whole)
    factor = torch.where(block == 0, 0.0, fp32(1 / scale))
    return rounded(fp32(x * factor), E2M1) * scale


Quantizer = Callable[[Tensor], Tensor]


class Formats(NamedTuple):
    """Of a recipe: how operands are quantized along their rows, and which sizes fit."""

    input: Quantizer
    weight: Quantizer
    grad: Quantizer
    multiple: int


def _fp8(element: Element, size: tuple[int, int] | None, power: bool) -> Quantizer:
    return lambda x: fp8_scaled(x, element, size, power)


RECIPES: dict[str, Formats] = {
    "mxfp8": Formats(*[lambda x: mxfp8(x, E4M3)] * 3, 32),
    "mxfp8 hybrid": Formats(*[lambda x: mxfp8(x, E4M3)] * 2, lambda x: mxfp8(x, E5M2), 32),
    "fp8 block": Formats(
        _fp8(E4M3, (1, 128), True), _fp8(E4M3, (128, 128), True), _fp8(E4M3, (1, 128), True), 128
    ),
    "fp8 block, f32 scales": Formats(
        _fp8(E4M3, (1, 128), False), _fp8(E4M3, (128, 128), False), _fp8(E4M3, (1, 128), False), 128
    ),
    "fp8 current": Formats(
        _fp8(E4M3, None, False), _fp8(E4M3, None, False), _fp8(E5M2, None, False), 8
    ),
    "nvfp4": Formats(nvfp4, nvfp4, nvfp4, 16),
}


class QuantizedLinear(torch.autograd.Function):
    """``x @ w.T`` of operands that are quantized along the sum of each product.

    Quantized and multiplied in FP64; results have the dtype of ``x``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.recipe = recipe
        formats = RECIPES[recipe]
        return (formats.input(x.double()) @ formats.weight(w.double()).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        formats = RECIPES[ctx.recipe]
        d, wide_x, wide_w = dy.double(), x.double(), w.double()
        dx = formats.grad(d) @ formats.weight(wide_w.t().contiguous()).t()
        dw = formats.grad(d.t().contiguous()) @ formats.input(wide_x.t().contiguous()).t()
        return dx.to(x.dtype), dw.to(w.dtype), None


class QuantizedGradient(torch.autograd.Function):
    """``y + bias``, whose gradient is quantized: the bias, or that of each row, has its values.

    The product before quantizes the gradient itself, along the sums of its own backward.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, recipe: str) -> Tensor:
        ctx.recipe, ctx.of_rows = recipe, bias.dim() > 1
        return y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        rows = dy.double().reshape(-1, dy.shape[-1])
        if rows.numel():
            rows = RECIPES[ctx.recipe].grad(rows)
        return dy, (rows if ctx.of_rows else rows.sum(0)).to(dy.dtype), None


def linear(x: Tensor, w: Tensor, recipe: str | None) -> Tensor:
    """``x @ w.T`` for x ``[..., in]``, under a recipe."""
    if recipe is None:
        return torch.matmul(x, w.t())
    if torch.is_autocast_enabled("cpu"):
        x, w = x.to(torch.get_autocast_dtype("cpu")), w.to(torch.get_autocast_dtype("cpu"))
    rows = x.reshape(-1, x.shape[-1])
    y = QuantizedLinear.apply(rows, w, recipe)
    return y.reshape(*x.shape[:-1], w.shape[0])
