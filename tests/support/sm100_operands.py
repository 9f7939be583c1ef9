"""Operands of the SM100 wrappers for tests, quantized and packed independently of fusible."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

F8, E8M0, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float32
FP4, E4M3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def packed(scales: Tensor) -> Tensor:
    """(batch, rows, blocks) bytes in atoms of 128 x 4: (batch, R, C, 32, 4, 4)."""
    batch, rows, blocks = scales.shape
    padded = torch.zeros(batch, -(-rows // 128) * 128, -(-blocks // 4) * 4, dtype=torch.uint8)
    padded[:, :rows, :blocks] = scales.view(torch.uint8)
    return (
        padded.view(batch, padded.shape[1] // 128, 4, 32, padded.shape[2] // 4, 4)
        .permute(0, 1, 4, 3, 2, 5)
        .contiguous()
    )


def flat(scales: Tensor) -> Tensor:
    """The bytes of packed scales."""
    return scales.view(torch.uint8).view(-1)


def per_group(scales: Tensor, ends: list[int], vec: int = 32) -> Tensor:
    """Compact regions of (rows, token blocks), one per group, in a container for wgrad."""
    rows, blocks = scales.shape
    starts = [0, *ends[:-1]]
    parts = [
        flat(packed(scales[None, :, s // vec : t // vec]))
        for s, t in zip(starts, ends, strict=True)
    ]
    container = torch.zeros(-(-rows // 128) * 128, -(-blocks // 4) * 4, dtype=torch.uint8)
    joined = torch.cat(parts)
    container.view(-1)[: len(joined)] = joined
    return container


def mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 data and scale bytes (..., K / 32) along the last dimension; 2^ceil(log2(amax / 448))."""
    blocks = x.float().unflatten(-1, (-1, 32))
    fraction, exponent = torch.frexp(blocks.abs().amax(-1) / 448)
    power = torch.where(fraction == 0.5, exponent - 1, exponent)
    power = torch.where(fraction == 0, -127, power).clamp(-127, 127)
    data = (blocks * torch.ldexp(torch.ones(power.shape), -power)[..., None]).flatten(-2)
    return data.clamp(-448, 448).to(F8), (power + 127).to(torch.uint8)


def mxfp8_numbers(data: Tensor, scales: Tensor) -> Tensor:
    """FP64 values of `mxfp8`."""
    ones = torch.ones(scales.shape, dtype=torch.float64)
    powers = torch.ldexp(ones, scales.int() - 127)
    return data.double() * powers.repeat_interleave(32, -1)


def columnwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Data as ``x`` lies, and scale bytes (..., columns, rows / 32), quantized down the columns."""
    data, scales = mxfp8(x.mT)
    return data.mT.contiguous(), scales


def random_fp4(*shape: int) -> tuple[Tensor, Tensor]:
    """Packed FP4 (..., K / 2), low nibble first, and its FP64 values (..., K)."""
    codes = torch.randint(0, 16, shape)
    values = E2M1.double()[codes % 8] * torch.where(codes < 8, 1.0, -1.0)
    low, high = codes[..., ::2], codes[..., 1::2]
    return (low + 16 * high).to(torch.uint8).view(FP4), values


def random_e4m3(*shape: int) -> Tensor:
    """Positive E4M3 scales about 1."""
    return (torch.rand(shape) + 0.5).to(E4M3)


def largest_of_groups(d: Tensor, sizes: Sequence[int], parts: int) -> Tensor:
    """(groups, parts) as a GLU kernel gives them of D, whose parts take turns of 32 columns.

    A thread takes 32 columns of a row, and one NaN hides the others; -inf for no rows.
    """
    threads = d.float().abs().unflatten(1, (-1, parts, 32)).amax(-1).nan_to_num(0.0, torch.inf)
    found = torch.full((len(sizes), parts), -torch.inf, device=d.device)
    for of_group, rows in zip(found, threads[: sum(sizes)].split(list(sizes)), strict=True):
        if len(rows):
            of_group.copy_(rows.amax((0, 1)))
    return found


def addresses(matrices: Tensor) -> Tensor:
    """A pointer table over the first dimension."""
    return torch.tensor([matrix.data_ptr() for matrix in matrices])
