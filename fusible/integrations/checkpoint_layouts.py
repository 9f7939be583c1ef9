"""How published checkpoints store quantized weights, and the same bits in this package's formats.

One row of ``LAYOUTS`` for each way. In all of them the earlier one of two E2M1 numbers is in the
lower four bits of a byte, as here, and blocks are along the input features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusible.recipes.encoding import DECODERS, ENCODERS, decode_scale, divide
from fusible.recipes.formats import E2M1, E4M3, NumberFormat, fp8_block, fp8_tensor, mxfp8, nvfp4
from fusible.recipes.matrix import OperandData, QuantizedMatrix, as_bytes
from fusible.recipes.quantization import HIGH_PRECISION
from fusible.recipes.quantize_ops import dequantize_matrix
from fusible.recipes.tensor import QuantizedTensor
from fusible.recipes.wrapper import PIECES

MXFP4 = NumberFormat("mxfp4_e2m1", E2M1, (1, 32), "e8m0_up")
"""OCP MXFP4: E2M1 with one power of two per 32."""

_SCALE_DTYPES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float8_e8m0fnu: (torch.uint8, torch.float8_e8m0fnu),
    torch.float8_e4m3fn: (torch.float8_e4m3fn,),
    torch.float32: (*HIGH_PRECISION, torch.float8_e8m0fnu),
}
"""The dtypes in which checkpoints store scales, by their dtype in a format."""


@dataclass(frozen=True)
class CheckpointLayout:
    """A way to store a weight: endings of the entries' names, their dtypes and their meaning."""

    name: str
    values: str
    """Ending of the entry of the elements, ``[out, in / per_byte]``."""
    format: NumberFormat | None = None
    """The number format of the weight, bit for bit; None in high precision."""
    scale: str = ""
    """Ending of the scales, ``[out / rows of a block, in / columns of a block]``."""
    tensor_scale: str = ""
    """Ending of the FP32 scale of the matrix."""
    divides: bool = False
    """Whether scales are divided by the tensor scale, rather than multiplied."""
    in_blocks: bool = False
    """Whether the elements are ``[..., blocks, bytes of a block]``."""
    unused: tuple[str, ...] = ()
    """Endings of entries that are read by none: scales of activations, which recipes compute."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that the entry of the elements may have."""
        return HIGH_PRECISION if self.format is None else (self.format.element.dtype,)

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that the entry of the scales may have."""
        return () if self.format is None else _SCALE_DTYPES[self.format.scale_dtype]

    @property
    def endings(self) -> tuple[str, ...]:
        """The endings of the entries that there must be."""
        return (self.values, *[e for e in (self.scale, self.tensor_scale) if e])

    def read(self, entries: Mapping[str, Tensor]) -> OperandData:
        """The weight ``[..., out, in]`` of its entries, by ending.

        Raises:
            ValueError: entries whose shapes do not go together.
        """
        data, fmt = entries[self.values], self.format
        if fmt is None:
            return data
        if self.in_blocks:
            data = data.flatten(-2)
        scale, lead = entries[self.scale], data.shape[:-2]
        if fmt.scale_dtype == torch.float8_e8m0fnu:
            scale = as_bytes(scale).view(torch.float8_e8m0fnu)
        elif fmt.scale_dtype == torch.float32 and scale.dtype == torch.float8_e8m0fnu:
            scale, fmt = decode_scale(scale), replace(fmt, scale="fp32_power_of_two")
        else:
            scale = scale.to(fmt.scale_dtype)
        if fmt.block is None and scale.numel() == 1:
            scale = scale.reshape(1).expand(*lead, 1)
        outer = entries[self.tensor_scale].float() if self.tensor_scale else None
        if outer is not None:
            outer = outer.reshape(*(lead if outer.numel() > 1 else ()), 1).expand(*lead, 1)
            outer = divide(1.0, outer) if self.divides else outer
        matrix = QuantizedMatrix(data.view(fmt.element.dtype), scale, outer, fmt)
        matrix.check_sizes()
        return matrix


LAYOUTS = (
    CheckpointLayout(
        "NVFP4 of ModelOpt",
        ".weight",
        nvfp4(),
        ".weight_scale",
        ".weight_scale_2",
        unused=(".input_scale",),
    ),
    CheckpointLayout(
        "NVFP4 of compressed-tensors",
        ".weight_packed",
        nvfp4(),
        ".weight_scale",
        ".weight_global_scale",
        divides=True,
        unused=(".input_global_scale",),
    ),
    CheckpointLayout("MXFP4 of compressed-tensors", ".weight_packed", MXFP4, ".weight_scale"),
    CheckpointLayout("MXFP4 of GPT-OSS", "_blocks", MXFP4, "_scales", in_blocks=True),
    CheckpointLayout(
        "FP8 blocks of DeepSeek",
        ".weight",
        fp8_block(E4M3, (128, 128), power_of_two=False),
        ".weight_scale_inv",
    ),
    CheckpointLayout(
        "MXFP8 of compressed-tensors",
        ".weight",
        mxfp8(),
        ".weight_scale",
        unused=(".input_scale",),
    ),
    CheckpointLayout(
        "FP8 per tensor of ModelOpt and compressed-tensors",
        ".weight",
        fp8_tensor(),
        ".weight_scale",
        unused=(".input_scale",),
    ),
    CheckpointLayout("high precision", ".weight"),
    CheckpointLayout("high precision", ""),
)
"""The layouts that are known."""


def layout_of(
    checkpoint: Mapping[str, Tensor], base: str
) -> tuple[CheckpointLayout | None, list[str]]:
    """The layout of the entries of ``base``, and which of its entries are not there.

    That of the dtypes that are there; None if nothing is.
    """
    best: tuple[CheckpointLayout | None, list[str]] = None, [f"{base}.weight"]
    found = -1
    for layout in LAYOUTS:
        values = checkpoint.get(base + layout.values)
        if values is None or values.dtype not in layout.dtypes:
            continue
        there = [e for e in layout.endings if base + e in checkpoint]
        scale = checkpoint.get(base + layout.scale) if layout.scale else None
        if scale is not None and scale.dtype not in layout.scale_dtypes:
            there.remove(layout.scale)
        if len(there) > found:
            missing = [base + ending for ending in layout.endings if ending not in there]
            best, found = (layout, missing), len(there)
    return best


def matrix_of(data: Tensor, scale: Tensor) -> QuantizedMatrix:
    """The weight of these elements and scales, recognised by their dtypes and shapes.

    Raises:
        ValueError: no layout without a tensor scale has such.
    """
    if data.dtype == torch.int8:  # as DeepSeek-V4 has two E2M1 numbers
        data = data.view(torch.uint8)
    for layout in LAYOUTS:
        dtypes = data.dtype in layout.dtypes and scale.dtype in layout.scale_dtypes
        if not dtypes or layout.tensor_scale or layout.in_blocks:
            continue
        try:
            made = layout.read({layout.values: data, layout.scale: scale})
        except (ValueError, RuntimeError):
            continue
        assert isinstance(made, QuantizedMatrix)
        return made
    raise ValueError(
        f"elements and scales must be of one of LAYOUTS, got {data.dtype} of shape "
        f"{tuple(data.shape)} and {scale.dtype} of shape {tuple(scale.shape)}"
    )


def joined_weights(parts: Sequence[OperandData], interleave: int | None) -> OperandData | None:
    """Weights one below the other, or alternating in blocks of ``interleave`` rows.

    None where no tensor of their format has their values: tensor scales differ, or blocks of
    several rows would be cut.
    """
    if len(parts) == 1:
        return parts[0]
    matrices = [part for part in parts if isinstance(part, QuantizedMatrix)]
    if not matrices:
        return _rows([part for part in parts if isinstance(part, Tensor)], interleave)
    first = matrices[0]
    if len(matrices) < len(parts) or any([m.format != first.format for m in matrices]):
        return None
    across = 1 if first.format.block is None else first.format.block[0]
    cut = any([m.shape[-2] % across for m in matrices[:-1]])
    if across > 1 and (interleave is not None or cut):
        return None
    of_all = ["scale"] if first.format.block is None else []
    of_all += ["tensor_scale"] if first.format.has_tensor_scale else []
    for name in of_all:
        if not all([torch.equal(getattr(first, name), getattr(m, name)) for m in matrices[1:]]):
            return None
    scale = first.scale
    if first.format.block is not None:
        scale = _rows([m.scale for m in matrices], interleave)
    return first._replace(data=_rows([m.data for m in matrices], interleave), scale=scale)


def _rows(parts: Sequence[Tensor], interleave: int | None) -> Tensor:
    if interleave is None:
        return torch.cat(list(parts), -2)
    blocks = [part.unflatten(-2, (-1, interleave)) for part in parts]
    return torch.stack(blocks, -3).flatten(-4, -2)


def stacked_weights(parts: Sequence[OperandData]) -> OperandData:
    """Weights of one shape, layout and dtype as one with a leading dimension."""
    matrices = [part for part in parts if isinstance(part, QuantizedMatrix)]
    if not matrices:
        return torch.stack([part for part in parts if isinstance(part, Tensor)])
    outer = [m.tensor_scale for m in matrices if m.tensor_scale is not None]
    return QuantizedMatrix(
        torch.stack([m.data for m in matrices]),
        torch.stack([m.scale for m in matrices]),
        torch.stack(outer) if outer else None,
        matrices[0].format,
    )


def in_format(matrix: QuantizedMatrix, fmt: NumberFormat) -> QuantizedMatrix | None:
    """The same values in another format, exactly; None where they would be rounded.

    Scales stay. FP32 scales that are powers of two are those of a format that has only such, and
    E2M1 numbers are E4M3 and E5M2 numbers.
    """
    own = matrix.format
    if own.block != fmt.block or own.scale_dtype != fmt.scale_dtype:
        return None
    if fmt.scale == "fp32_power_of_two":
        bits = matrix.scale.view(torch.int32)  # of which normal numbers without a mantissa fit
        if not (((bits & 0x7FFFFF) == 0) & ((bits & 0x7F800000) != 0)).all():
            return None
    data = matrix.data
    if own.element != fmt.element:
        if own.element != E2M1:
            return None
        data = ENCODERS[fmt.element](DECODERS[E2M1](data))
    return matrix._replace(data=data, format=fmt)


def quantized_tensor(
    matrix: QuantizedMatrix, fmt: NumberFormat, dtype: torch.dtype
) -> QuantizedTensor:
    """The tensor of a row-wise matrix, in its format or one of the same bits."""
    pieces = {n: t for n, t in zip(PIECES, matrix[:3], strict=False) if t is not None}
    return QuantizedTensor(pieces, fmt, matrix.shape, dtype)


def decoded(data: OperandData, dtype: torch.dtype) -> Tensor:
    """The values, rounded once to ``dtype``."""
    if isinstance(data, QuantizedMatrix):
        return dequantize_matrix(data, dtype)
    return data.to(dtype)
