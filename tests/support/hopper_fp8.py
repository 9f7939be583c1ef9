"""FP8 products as Hopper's tensor cores and our kernels' promotion add them, and their error bound.

An instruction adds 32 products to a running sum. A product has the exponents of its elements, added
(a subnormal element has the least exponent of its dtype). All products and the running sum are
aligned to the largest exponent among them and cut towards zero to 13 fraction bits; their sum,
which is exact, is cut to 13 fraction bits of its own. Source: Xie et al., "MMA-Sim", arXiv
2511.10909; on an H200 a product of 2^-13 beside one of 1 counts fully, one of 2^-14 not at all.

After 128 products the sum is promoted: ``total = fma(a_scale * b_scale, sum, total)`` in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.kernels.grouped import definitions
from fusible.recipes.formats import FP8_BLOCK

FRACTION_BITS = 13
DEPTH = 32  # products of an instruction
LEAST_EXPONENTS = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}
OF_ZERO = -200  # less than other exponents
UNIT = 2.0**-FRACTION_BITS
# Of a block of 128, in units: four instructions cut 32 products and a running sum each. Where one
# cuts its own sum too, that is at least twice the largest term, whose cut is half as much then.
TERMS = 4 * (DEPTH + 1)


# --- one product: a ``[M, K]``, b ``[N, K]`` of FP8, scales ``[M or N, ceil(K / 128)]`` -----------


def power_of_two(exponent: Tensor) -> Tensor:
    """``2 ** exponent`` in FP64, exactly."""
    return (exponent.long() + 1023).bitwise_left_shift(52).view(torch.float64)


def exponents(t: Tensor, least: int = -126) -> Tensor:
    """Of FP64 values; ``least`` of those below ``2 ** least``."""
    return torch.where(t == 0, OF_ZERO, (torch.frexp(t).exponent - 1).clamp(least, 127))


def cut(t: Tensor, exponent: Tensor) -> Tensor:
    """FP64 values without what lies below ``2 ** (exponent - 13)``."""
    unit = power_of_two(exponent - FRACTION_BITS)
    return (t / unit).trunc() * unit


def instructions(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Products ``[M, N, 32]`` in FP64 and their largest exponents ``[M, N]``."""
    x, y = (t.float().double() for t in (a, b))
    of_x, of_y = exponents(x, LEAST_EXPONENTS[a.dtype]), exponents(y, LEAST_EXPONENTS[b.dtype])
    for start in range(0, a.shape[1], DEPTH):
        at = slice(start, start + DEPTH)
        yield x[:, None, at] * y[:, at], (of_x[:, None, at] + of_y[:, at]).amax(-1)


def tensor_core_sum(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` by instructions alone, in FP64."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for products, largest in instructions(a, b):
        top = largest.maximum(exponents(total))
        added = cut(products, top[..., None]).sum(-1) + cut(total, top)
        total = torch.where(
            (special := products.sum(-1) + total).isfinite(), cut(added, exponents(added)), special
        )
    return total


def blocks(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Elements and scales of both operands, by 128 of the reduction."""
    for i in range(a_scale.shape[1]):
        at = slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK)
        yield a[:, at], b[:, at], a_scale[:, i, None], b_scale[:, i]


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """``a @ b.T`` with promotion, in FP32."""
    total = torch.zeros(len(a), len(b), device=a.device)
    for x, y, of_x, of_y in blocks(a, b, a_scale, b_scale):
        # The sum has 14 bits, so FP64 holds its product with a scale, and this rounds as an FMA.
        total = (total + (of_x * of_y).double() * tensor_core_sum(x, y)).float()
    return total


def bounded(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """``a @ b.T`` in FP64, a bound on the error in FP32, and a unit of it, ``[3, M, N]``.

    The bound of a block of 128 is ``4 * 33 * 2^-13 * M``, where M is the largest power of two of
    its products (``2 ** exponent``) and running sums (at or above them). The unit is ``2^-13 * M``.
    Both are times the scales and summed over the blocks, with the roundings of the promotion.
    """
    exact, bound, unit = torch.zeros(3, len(a), len(b), dtype=torch.float64, device=a.device)
    for x, y, of_x, of_y in blocks(a, b, a_scale.double(), b_scale.double()):
        running, m = torch.zeros_like(exact), torch.zeros_like(exact)
        for products, largest in instructions(x, y):
            running = running + products.sum(-1)
            m = m.maximum(power_of_two(largest.maximum(exponents(running) + 1)))
        exact = exact + of_x * of_y * running
        rounding = 2.0**-24 * ((of_x * of_y * running).abs() + exact.abs() + bound)
        of_unit = UNIT * m * (of_x * of_y).abs()
        bound, unit = bound + TERMS * of_unit + rounding, unit + of_unit + rounding
    return torch.stack([exact, bound, unit])


def rounded(exact: Tensor, bound: Tensor) -> Tensor:
    """The bound after the result is rounded to BF16."""
    return bound + 2.0**-8 * (exact.abs() + bound)


# --- grouped products, with the arguments of `fusible.kernels.grouped.definitions` ----------------


def by_rows(
    function: Callable[..., Tensor],
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
) -> Tensor:
    """``function`` of the rows of each group and its weight, and zeros for the rows of none."""
    results, start = [], 0
    for weight, of_weight, end in zip(w[0], w_scale, ends.tolist(), strict=True):
        b_scale = of_weight.repeat_interleave(FP8_BLOCK, 0)[: len(weight)]
        results.append(function(x[start:end], weight, x_scale[start:end], b_scale))
        start = end
    tail = results[0].new_zeros(*results[0].shape[:-2], len(x) - start, len(w[0][0]))
    return torch.cat([*results, tail], -2)


def by_reduction(
    function: Callable[..., Tensor],
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    dy_scale: Tensor,
    x_scale: Tensor,
) -> Tensor:
    """``function`` of what each group's weight gradient multiplies."""
    results, start = [], 0
    for end in ends.tolist():
        at, by = slice(start, end), slice(start // FP8_BLOCK, end // FP8_BLOCK)
        results.append(function(dy[at].t(), x[at].t(), dy_scale[by].t(), x_scale[by].t()))
        start = end
    return torch.stack(results, -3)


def _mm(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    *_: Any,
    x_scale: Tensor,
    w_scale: Tensor,
    **__: Any,
) -> Tensor:
    return by_rows(product, x, w, ends, x_scale, w_scale)


def grouped_mm(*args: Any, **kwargs: Any) -> Tensor:
    return _mm(*args, **kwargs).bfloat16()


def grouped_glu(*args: Any) -> tuple[Tensor, ...]:
    return tuple(t.bfloat16() for t in definitions.grouped_glu(*args, product=_mm))


def grouped_wgrad(
    dy: Tensor, x: Tensor, ends: Tensor, out_dtype: torch.dtype | None, *scales: Tensor
) -> Tensor:
    return by_reduction(product, dy, x, ends, *scales).to(out_dtype or torch.bfloat16)
