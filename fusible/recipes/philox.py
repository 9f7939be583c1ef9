"""Random bytes of stochastic rounding, by position: Philox4x32-10, a counter-based generator.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3. A key, int64
``[2]``, is a seed and an offset. Equal keys give equal bytes on every machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
NEIGHBOURS = 8
"""Neighbouring columns whose bytes one call gives, for both uses."""
_WORD = 0xFFFFFFFF


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Return four random words of a counter of four and a key of two, all int64 below 2^32."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product that exceeds int64 wraps; its bits are those of the unsigned one.
        low, high = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = (high >> 32 & _WORD) ^ b ^ k0, high & _WORD
        c, d = (low >> 32 & _WORD) ^ d ^ k1, low & _WORD
        k0, k1 = k0 + WEYL[0] & _WORD, k1 + WEYL[1] & _WORD
    return [a, b, c, d]


def random_bytes(key: Tensor, rows: int, columns: int, columnwise: bool) -> Tensor:
    """Return numbers from 0 to 255, int64 ``[rows, columns]``, for one use of a matrix.

    The counter is (column // 8, row, offset). Of the four words, the bytes of the first two, lowest
    first, are those of eight neighbouring columns for the row-wise use, and of the others for the
    column-wise one.
    """
    seed, offset = key.unbind()
    chunk = torch.arange((columns + NEIGHBOURS - 1) // NEIGHBOURS, device=key.device)
    row = torch.arange(rows, device=key.device)[:, None]
    row, chunk = torch.broadcast_tensors(row, chunk)
    counter = [chunk, row, offset & _WORD, offset >> 32 & _WORD]
    words = philox(counter, [seed & _WORD, seed >> 32 & _WORD])[2 * columnwise :][:2]
    shifts = torch.arange(0, 32, 8, device=key.device)
    random = torch.stack(words, -1)[..., None] >> shifts & 255
    return random.flatten(1)[:, :columns]
