"""What is fixed when the kernels that move rows are compiled."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
"""PTX names of the dtypes that the kernels take."""

BYTES = 16  # moved at once by a thread


class RowsSpec(NamedTuple):
    """Rows of one width and dtype, and what is done with them."""

    dtype: str
    vectors: int
    """16-byte pieces of a row."""
    top_k: int
    weights: Literal["", "choice", "row"] = ""
    """Whether there is a weight for each choice, for each row, or none."""
    weight_dtype: str = "f32"
    scale: bool = False
    """Scatter: multiply by the weights."""
    values: str = ""
    """Gather: dtype of one value a row that is handed to its choice, if any."""

    @property
    def per_vector(self) -> int:
        """Numbers in 16 bytes."""
        return BYTES // (4 if self.dtype == "f32" else 2)


class RouteSpec(NamedTuple):
    """A router's choice, as ``routing.route`` names its arguments."""

    experts: int
    top_k: int
    sigmoid: bool
    normalize: bool
    scaling_factor: float
    biased: bool = False
    groups: tuple[int, int, int] = (1, 1, 2)
    """Number of groups, how many are kept, how many scores make a group's worth."""
