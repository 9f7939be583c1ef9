"""Compile-time parameters of the kernels of the dense backwards."""

from __future__ import annotations

from typing import NamedTuple

import torch

NORM_DTYPES = torch.bfloat16, torch.float16
MIN_SM = 80  # BF16 arithmetic
VECTOR = 8  # neighbouring columns of a thread: 16 bytes
MAX_FEATURES = 8192  # of a norm: 512 threads, each with two vectors of a row


class ActivationBiasSpec(NamedTuple):
    """The kernel of an activation's backward with the sum for a bias."""

    activation: str
    dtype: str


class RMSNormSpec(NamedTuple):
    """The kernel of an RMS norm's backward; with ``add``, a residual's gradient is added."""

    features: int
    dtype: str
    add: bool

    @property
    def vectors(self) -> int:
        """Vectors of a thread in every row."""
        return -(-self.features // (VECTOR * self.threads))

    @property
    def threads(self) -> int:
        """Threads to a row, each with up to two vectors."""
        return -(-self.features // (64 * VECTOR)) * 32

    @property
    def resident(self) -> int:
        """CTAs on a multiprocessor, which have 512 threads together."""
        return max(1, 512 // self.threads)
