"""Weights of groups as they are stored in a number format, as arguments of ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fusible.recipes.formats import NumberFormat
from fusible.recipes.matrix import QuantizedMatrix, as_bytes
from fusible.recipes.quantize_ops import dequantize_matrix


class StoredWeights(NamedTuple):
    """One weight ``[E, N, K]`` or E of ``[N, K]``, row-wise: tensors of `QuantizedMatrix`."""

    data: Sequence[Tensor]
    scale: Sequence[Tensor]
    """The scales; E8M0 scales as bytes."""
    tensor_scale: Sequence[Tensor]
    """Empty in formats without."""

    @staticmethod
    def of(matrices: Sequence[QuantizedMatrix]) -> StoredWeights:
        """The tensors of matrices of one format."""
        outer = [m.tensor_scale for m in matrices if m.tensor_scale is not None]
        return StoredWeights(
            [m.data for m in matrices], [as_bytes(m.scale) for m in matrices], outer
        )

    def values(self, fmt: NumberFormat, like: Tensor) -> list[Tensor]:
        """The weights in the dtype of ``like``."""
        outer: Sequence[Tensor | None] = self.tensor_scale or [None] * len(self.data)
        return [
            dequantize_matrix(
                QuantizedMatrix(data, scale.view(fmt.scale_dtype), of_all, fmt), like.dtype
            )
            for data, scale, of_all in zip(self.data, self.scale, outer, strict=True)
        ]
