"""How far a result may be from the reference.

FP64 results: ``ROUNDINGS * eps * largest`` where ``largest`` is the largest magnitude of all that
the step gave, since whole gradients cancel. ROUNDINGS covers pipelines of up to ten ops with sums
of up to some hundred terms.

Narrower results: the reference is also run in their dtype by plain PyTorch, and its error against
FP64 says how much rounding matters here. Where it overflows, a fused op need not: such a tensor is
only asked to be finite where PyTorch's is. Allowed are FACTOR times that error and ROUNDINGS
roundings of the largest value of the tensor. For 16-bit results both are root mean squares, since
rounding moves single elements over the kinks of ReLU and of clamps, and the error is at least the
typical one of all tensors of the step, since that of a small tensor may be small by luck; a sum of
few elements that cancels may besides be off by a rounding of its terms, divided by the number of
its elements, over which luck evens out. Under a recipe, where rounding moves some operands to the
next number of their format, results may also differ by FLIPS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case

ROUNDINGS = {torch.float64: 1e5, torch.float32: 64, torch.bfloat16: 4, torch.float16: 8}
FACTOR = 8
FLIPS = {"nvfp4": 0.04}
FLIPS_FP8 = 0.01
"""A wrong direction of quantization is 3 % in E4M3, and 10 % in E2M1."""
NARROW_FLIPS = 4
FLIPPED_NVFP4 = 0.15
"""Of more than one linear in NVFP4: one flip may move the scale of the next one's whole tensor, and
two roundings of everything to E2M1, each off by 9 %, differ by 13 %."""
CANCELLED = 16 * torch.finfo(torch.float32).eps
"""Times the largest value of the step: what FP32 leaves of a gradient that is zero."""

Values = Mapping[str, Tensor | None]


def differences(case: Case, got: Values, exact: Values, plain: Values | None) -> list[str]:
    """A sentence for each value of ``got`` that is not the reference's."""
    found = []
    if got.keys() != exact.keys():
        missing, more = sorted(exact.keys() - got.keys()), sorted(got.keys() - exact.keys())
        found.append(f"lacks {missing}, has {more}")
    largest = max([_largest(t) for t in exact.values()], default=0.0)
    bound = Bound(case, largest, _typical_error(exact, plain or {}))
    for name in got.keys() & exact.keys():
        low = None if plain is None else plain[name]
        if sentence := _difference(got[name], exact[name], low, bound):
            found.append(f"{name}: {sentence}")
    return sorted(found)


@dataclass(frozen=True)
class Bound:
    """What of a case decides how far results may be off."""

    case: Case
    largest: float
    typical: float

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype of the arithmetic."""
        return getattr(torch, self.case.autocast or self.case.dtype)

    @property
    def flips(self) -> float:
        """Of a recipe; more operands are moved where they are rounded to 16 bits before."""
        if self.case.recipe is None:
            return 0.0
        if self.case.recipe == "nvfp4" and sum("Linear" in op.name for op in self.case.ops) > 1:
            return FLIPPED_NVFP4 * (2 if self.dtype.itemsize == 2 else 1)
        narrow = NARROW_FLIPS if self.dtype.itemsize == 2 else 1
        return FLIPS.get(self.case.recipe, FLIPS_FP8) * narrow

    def holds(self, got: Tensor, exact: Tensor, plain: Tensor | None) -> tuple[bool, str]:
        """Whether it does, and the numbers."""
        error = (got.double() - exact).nan_to_num()
        dtype = self.dtype
        eps = torch.finfo(dtype).eps * ROUNDINGS[dtype]
        if plain is None:
            size, bound = _maximum(error), eps * max(self.largest, 1e-300)
        else:
            norm = _root_mean_square if dtype.itemsize == 2 or self.flips else _maximum
            lowered, usual = norm((plain.double() - exact).nan_to_num()), norm(exact.nan_to_num())
            if norm is _root_mean_square:
                lowered = max(lowered, self.typical * usual)
            size, bound = norm(error), FACTOR * lowered + (eps + self.flips) * usual
            bound += torch.finfo(got.dtype).smallest_normal + CANCELLED * self.largest
            if dtype.itemsize == 2:  # whose means over few elements are small by luck
                bound += torch.finfo(dtype).eps * self.largest / got.numel()
        return size <= bound, f"error {size:.3g} over {bound:.3g} at up to {_largest(exact):.3g}"


def _difference(
    got: Tensor | None, exact: Tensor | None, plain: Tensor | None, bound: Bound
) -> str | None:
    if got is None or exact is None:
        nothing = _largest(exact if got is None else got) == 0
        return None if nothing else f"is {_kind(got)}, must be {_kind(exact)}"
    if got.shape != exact.shape:
        return f"has shape {tuple(got.shape)}, must have {tuple(exact.shape)}"
    if plain is not None and got.dtype != plain.dtype and not bound.case.autocast:
        return f"has dtype {got.dtype}, must have {plain.dtype}"
    if exact.is_floating_point():
        return _error(got, exact.double(), plain, bound) if got.numel() else None
    return None if torch.equal(got, exact.to(got.dtype)) else f"is {got}, must be {exact}"


def _error(got: Tensor, exact: Tensor, plain: Tensor | None, bound: Bound) -> str | None:
    finite = (exact if plain is None else plain).isfinite()
    overflows = bool((exact.isfinite() & ~finite).any())
    if (finite & ~got.isfinite()).any() or not (overflows or torch.equal(got.isfinite(), finite)):
        return f"has {int((~got.isfinite()).sum())} values that are not finite, must have others"
    if overflows:  # so that nothing says how much rounding matters
        return None
    holds, numbers = bound.holds(got, exact, plain)
    return None if holds else numbers


def _typical_error(exact: Values, plain: Values) -> float:
    """The median of the relative errors of all tensors."""
    errors = [
        _root_mean_square((low.double() - exact[n].double()).nan_to_num(0.0, 0.0, 0.0))
        / _root_mean_square(exact[n].double().nan_to_num())
        for n, low in plain.items()
        if low is not None and exact.get(n) is not None and _largest(exact[n]) > 0
    ]
    return sorted(errors)[len(errors) // 2] if errors else 0.0


def _kind(t: Tensor | None) -> str:
    return "None" if t is None else f"up to {_largest(t):.3g}"


def _largest(t: Tensor | None) -> float:
    if t is None or not t.numel() or not t.is_floating_point():
        return 0.0
    return t.abs().nan_to_num(0.0, 0.0, 0.0).max().item()


def _maximum(t: Tensor) -> float:
    return t.abs().max().item()


def _root_mean_square(t: Tensor) -> float:
    return t.square().mean().sqrt().item()
