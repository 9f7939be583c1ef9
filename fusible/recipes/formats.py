"""Number formats as frozen rows: everything else about a format is derived from its row.

A new format is a new row. Quantizers, kernels, checkpoints and plans read its element, its block
and its kind of scale, never its name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from fusible.arguments import check_bools


@dataclass(frozen=True)
class Element:
    """How one number is stored. ``max`` is the largest finite magnitude."""

    name: str
    max: float
    max_exponent: int
    """Exponent of ``max``: floor(log2(max))."""
    dtype: torch.dtype
    per_byte: int = 1
    """Numbers in one item of ``dtype``; the earlier one is in the lower bits."""


E4M3 = Element("e4m3", 448.0, 8, torch.float8_e4m3fn)
E5M2 = Element("e5m2", 57344.0, 15, torch.float8_e5m2)
# torch.float4_e2m1fn_x2 supports too few operations; it is a view of these bytes at a kernel.
E2M1 = Element("e2m1", 6.0, 2, torch.uint8, per_byte=2)
HADAMARD = 16
"""Neighbouring numbers of a column that a Hadamard transform mixes."""
E4M3_OVERFLOW = 464.0  # larger values would round to 480, which E4M3 does not have
ELEMENTS = {element.name: element for element in (E4M3, E5M2, E2M1)}

ScaleName = Literal["e8m0_up", "e8m0_floor", "fp32", "fp32_power_of_two", "e4m3"]

SCALE_DTYPES: dict[ScaleName, torch.dtype] = {
    "e8m0_up": torch.float8_e8m0fnu,
    "e8m0_floor": torch.float8_e8m0fnu,
    "fp32": torch.float32,
    "fp32_power_of_two": torch.float32,
    "e4m3": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class NumberFormat:
    """``element`` numbers sharing one ``scale`` per ``block``; a value is element times scale.

    ``block`` is (across, along) the reduction of the matrix product, so (1, 32) is 32 columns of a
    row used row-wise and 32 rows of a column used column-wise; None is the whole matrix.
    """

    name: str
    element: Element
    block: tuple[int, int] | None
    scale: ScaleName
    amax_epsilon: float = 0.0
    """Lower bound of the largest magnitude from which an FP32 scale is computed."""
    hadamard: bool = False
    """The column-wise form is that of ``recipes.hadamard.transform`` of the values."""
    stochastic: bool = False
    """Elements are rounded up or down at random (``recipes.philox``), not to the nearest."""
    scale_dtype: torch.dtype = field(init=False, repr=False, compare=False)
    has_tensor_scale: bool = field(init=False, repr=False, compare=False)
    """Whether a second, FP32 scale covers each matrix or group."""
    directional: bool = field(init=False, repr=False, compare=False)
    """Whether row-wise and column-wise use need two different sets of numbers."""
    _epsilon: str = field(init=False, repr=False, compare=False)
    """``amax_epsilon`` as an op takes it; with dynamic=True compiled numbers are variables."""

    def __post_init__(self) -> None:
        check_bools("NumberFormat", hadamard=self.hadamard, stochastic=self.stochastic)
        if not isinstance(self.element, Element):
            raise TypeError(
                f"element of {self.name} must be an Element, such as recipes.formats.E4M3, "
                f"got {self.element!r}"
            )
        if self.scale not in SCALE_DTYPES:
            raise ValueError(
                f"scale of {self.name} must be one of {', '.join(SCALE_DTYPES)}, got {self.scale!r}"
            )
        across, along = self.block or (1, 2)
        if along < 2 or along & (along - 1) or across not in (1, along):
            raise ValueError(
                f"block of {self.name} must be None, (1, n) or (n, n) for a power of two n, "
                f"got {self.block}"
            )
        # Fields, not properties: every call reads them several times.
        object.__setattr__(self, "scale_dtype", SCALE_DTYPES[self.scale])
        object.__setattr__(self, "has_tensor_scale", self.scale == "e4m3")
        object.__setattr__(self, "directional", bool(self.block) and across != along)
        if self.block is None and self.has_tensor_scale:
            raise ValueError(
                f"a format with tensor scales must have blocks, got {self}; use an FP32 scale"
            )
        if self.hadamard and self.block != (1, HADAMARD):
            raise ValueError(f"block of a format with hadamard must be (1, {HADAMARD}), got {self}")
        if self.stochastic and self.element is not E2M1:
            raise ValueError(f"element of a format with stochastic must be E2M1, got {self}")
        if not 0 <= self.amax_epsilon < math.inf:
            raise ValueError(f"amax_epsilon must be finite and not negative, got {self}")
        object.__setattr__(self, "_epsilon", repr(float(self.amax_epsilon)))

    def __hash__(self) -> int:
        """Of the name: every launch looks up its kernel by the format."""
        return hash(self.name)

    @property
    def scaling(self) -> str:
        """Return in words how elements and scales are stored, whatever their values mean."""
        shape = "matrix" if self.block is None else "{}x{}".format(*self.block)
        scale = str(self.scale_dtype).removeprefix("torch.")
        return f"fp{8 // self.element.per_byte} with one {scale} scale per {shape}"

    @property
    def reduction_blocks(self) -> str:
        """Return in words what a product reads along its reduction, whatever made the numbers."""
        size = "matrix" if self.block is None else self.block[1]
        return f"{self.element.name} with one {self.scale} scale per {size}"

    def as_constants(self) -> tuple[str, str, list[int], ScaleName, str, bool, bool]:
        """Return the row as arguments of a torch op."""
        block = [] if self.block is None else list(self.block)
        options = self._epsilon, self.hadamard, self.stochastic
        return self.name, self.element.name, block, self.scale, *options

    @staticmethod
    def from_constants(
        name: str,
        element: str,
        block: Sequence[int],
        scale: str,
        amax_epsilon: str,
        hadamard: bool,
        stochastic: bool,
    ) -> NumberFormat:
        """Undo ``as_constants``; KeyError or ValueError for an element or scale not known."""
        across_along = (int(block[0]), int(block[1])) if block else None
        options = float(amax_epsilon), hadamard, stochastic
        return NumberFormat(name, ELEMENTS[element], across_along, scale, *options)  # type: ignore[arg-type]


FP8_BLOCK = 128
"""Elements along a dimension that share an FP32 scale."""
BLOCKS = (1, FP8_BLOCK), (FP8_BLOCK, FP8_BLOCK)
"""Blocks of FP8 elements with an FP32 scale each, by number of dimensions."""


def value_dtype(elements: torch.dtype) -> torch.dtype:
    """Return the dtype of products of such elements: theirs, or BF16 of FP8 ones."""
    return torch.bfloat16 if elements in (E4M3.dtype, E5M2.dtype) else elements


def mxfp8(element: Element = E4M3, rounding: Literal["up", "floor"] = "up") -> NumberFormat:
    """Describe OCP MXFP8: one power of two per 32; ``rounding`` is that of the scale.

    "up", the rule of Transformer Engine and cuDNN, saturates no element; "floor" is the rule of the
    OCP MX specification, section 6.3, which saturates those above ``element.max`` times the scale.
    """
    if rounding not in ("up", "floor"):
        raise ValueError(f'rounding must be "up" or "floor", got {rounding!r}')
    suffix = "" if rounding == "up" else "_floor"
    scale: ScaleName = "e8m0_up" if rounding == "up" else "e8m0_floor"
    return NumberFormat(f"mxfp8_{element.name}{suffix}", element, (1, 32), scale)


def fp8_block(
    element: Element = E4M3,
    block: tuple[int, int] = BLOCKS[0],
    power_of_two: bool = True,
    amax_epsilon: float = 0.0,
) -> NumberFormat:
    """Describe FP8 with an FP32 scale per 1x128 or 128x128."""
    if block not in BLOCKS:
        raise ValueError(f"block must be (1, 128) or (128, 128), got {block}")
    name = f"fp8_{block[0]}x{block[1]}_{element.name}"
    return NumberFormat(name, element, block, _fp32_scale(power_of_two), amax_epsilon)


def fp8_tensor(
    element: Element = E4M3, power_of_two: bool = False, amax_epsilon: float = 0.0
) -> NumberFormat:
    """Describe FP8 with one FP32 scale per tensor, from the tensor itself (current scaling)."""
    name = f"fp8_tensor_{element.name}"
    return NumberFormat(name, element, None, _fp32_scale(power_of_two), amax_epsilon)


def nvfp4(
    block: tuple[int, int] = (1, 16), *, hadamard: bool = False, stochastic: bool = False
) -> NumberFormat:
    """Describe NVFP4: one E4M3 scale per 1x16 or 16x16, one FP32 scale per tensor, amax / 2688.

    2688 is the largest element times the largest scale, 6 * 448. With ``hadamard`` the column-wise
    form, of blocks of 1x16, is that of the transformed values, ``stochastic`` rounds at random.
    """
    if block not in ((1, 16), (16, 16)):
        raise ValueError(f"block must be (1, 16) or (16, 16), got {block}")
    options = {"16x16": block[0] > 1, "rht": hadamard, "sr": stochastic}
    name = "_".join(["nvfp4", *[option for option, on in options.items() if on]])
    return NumberFormat(name, E2M1, block, "e4m3", hadamard=hadamard, stochastic=stochastic)


def _fp32_scale(power_of_two: bool) -> ScaleName:
    check_bools("an FP8 format", power_of_two=power_of_two)
    return "fp32_power_of_two" if power_of_two else "fp32"


SAVED_INPUT = fp8_block()
"""That in which activations with ``cache_quantized_input`` save it (arXiv 2412.19437, 3.3.3)."""
