"""Bytes to numbers and back: elements, block scales, and where packed scales lie.

Block scales are packed in atoms of 128 rows by 4 blocks, 512 bytes each (cuBLAS' 32x4x4 layout).
"""

from __future__ import annotations

import torch
from torch import Tensor

FP4 = torch.float4_e2m1fn_x2
FP8 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
E4M3 = torch.float8_e4m3fn

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST = 448.0  # of E4M3


def bits(dtype: torch.dtype) -> int:
    """Bits of one logical element."""
    return 4 if dtype == FP4 else 8 * dtype.itemsize


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below ``number``."""
    return -(-number // multiple) * multiple


def numbers(elements: Tensor) -> Tensor:
    """FP32 values; packed FP4 gives two along its last dimension, the low nibble first."""
    if elements.dtype != FP4:
        return elements.float()
    packed = elements.view(torch.uint8)
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32)
    return table[nibbles.long()]


def scale_numbers(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 values of scale bytes: 2^(byte - 127) for E8M0, 255 is NaN."""
    if dtype != E8M0:
        return scales.view(dtype).float()
    pattern = torch.where(scales == 0, 0x400000, scales.int() << 23)
    return pattern.to(torch.int32).view(torch.float32).masked_fill(scales == 255, torch.nan)


def scale_offsets(rows: int, blocks: int) -> Tensor:
    """Byte of the scale of each row and block, ``[rows, blocks]``, in one packed region."""
    row = torch.arange(rows)[:, None]
    block = torch.arange(blocks)[None, :]
    atom = (row // 128) * (round_up(blocks, 4) // 4) + block // 4
    return atom * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4


def packed_bytes(rows: int, blocks: int) -> int:
    """Bytes of a packed region, whole atoms."""
    return round_up(rows, 128) * round_up(blocks, 4)


def quantized(values: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """FP8 elements and E8M0 bytes of FP32 blocks ``[..., block]``: scales rounded up, RNE data.

    The byte is the exponent of ``amax / limit * norm`` rounded up to a power of two, saturating
    at 254; zero gives byte 0, NaN gives 255.
    """
    scale = values.abs().amax(-1) * torch.tensor(1 / _LARGEST) * norm
    pattern = scale.view(torch.int32)
    exponent, mantissa = (pattern >> 23) & 255, pattern & 0x7FFFFF
    tiny = (exponent == 0) & (mantissa <= 0x400000)
    byte = exponent + ((mantissa != 0) & (exponent < 254) & ~tiny).int()
    byte = byte.clamp_max(254).masked_fill(scale.isnan(), 255).to(torch.uint8)
    data = values * (norm / scale_numbers(byte, E8M0)).unsqueeze(-1)
    # Beyond the largest, cvt.satfinite saturates; torch below 2.13 makes NaN.
    return data.clamp(-_LARGEST, _LARGEST).to(FP8), byte


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that no kernel has written: 0xFF bytes, which are NaN in every floating dtype."""
    count = torch.Size(shape).numel()
    return torch.full((count * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype).view(shape)
