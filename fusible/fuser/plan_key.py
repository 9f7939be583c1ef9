"""The plan key: what the plan of a call may depend on."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.fuser.plan import TensorFacts, dtype_name
from fusible.fuser.target import Target


class PlanKey(NamedTuple):
    """All that a plan may depend on in one call but the ops' own frozen facts; hashable."""

    recipe: Any
    autocast_dtype: torch.dtype | None
    grad_enabled: bool
    device: torch.device
    assumed: str | None
    registry_version: int
    sources: tuple[int, ...]  # the first place of each input among these: equal for the same tensor
    inputs: tuple[tuple[torch.dtype, torch.device, bool], ...]  # with their ``requires_grad``
    features: tuple[int | None, ...]
    """The features of each input that a rule reads them of, else None; empty if none does."""
    param_counts: tuple[int, ...]  # of each op
    param_dtypes: tuple[torch.dtype, ...]
    params_require_grad: tuple[bool, ...]

    def of_params(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        """The values of all parameters, by op."""
        return [values[own] for own in slices(0, self.param_counts)]

    def facts(self, target: Target) -> list[TensorFacts]:
        """The facts of the inputs; for a target with a GPU, of tensors on that GPU."""
        features = self.features or (None,) * len(self.inputs)
        return [
            TensorFacts(
                dtype_name(dtype),
                "cpu" if device.type == "cpu" else target.device,
                size,
                requires_grad,
                source,
            )
            for (dtype, device, requires_grad), size, source in zip(
                self.inputs, features, self.sources, strict=True
            )
        ]


def first_places(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The index of the first tensor that is the same, for each of the tensors."""
    if torch.compiler.is_compiling():  # which does not know ids
        places: dict[Tensor, int] = {}
        return tuple([places.setdefault(t, i) for i, t in enumerate(tensors)])
    ids = list(map(id, tensors))
    return tuple(map(ids.index, ids))


def slices(start: int, counts: Iterable[int]) -> tuple[slice, ...]:
    """Consecutive slices of these lengths."""
    return tuple([slice(*ends) for ends in pairwise(accumulate(counts, initial=start))])


def fix_features(inputs: Sequence[Tensor]) -> None:
    """Make the last sizes constants where they are traced, which ops compare with their own.

    torch 2.11 cannot trace an autograd function in which a symbolic size becomes a constant.
    """
    for t in inputs:
        if t.dim() > 1:
            operator.index(t.shape[-1])
