"""Layouts of gate and linear features before a gated activation: halves or blocks."""

from __future__ import annotations

from torch import Tensor

from fusible.formulas import join_glu, split_glu


def interleave_glu(t: Tensor, size: int = 32, *, dim: int) -> Tensor:
    """Reorder features from two halves, gate then linear, to alternating blocks of ``size``.

    For the weight ``[..., out_features, in_features]`` (``dim=-2``) and the bias ``[...,
    out_features]`` (``dim=-1``) of a linear before a gated activation, which from then on has
    ``glu_interleave_size=size``. A copy of the same values; :func:`deinterleave_glu` undoes it.

    Raises:
        ValueError: ``size`` is not positive, or the dimension is no multiple of ``2 * size``.
    """
    return join_glu(*_gate_and_linear(t, size, dim, None), size).movedim(-1, dim).contiguous()


def deinterleave_glu(t: Tensor, size: int = 32, *, dim: int) -> Tensor:
    """Undo :func:`interleave_glu`: from alternating blocks of ``size`` to two halves."""
    return join_glu(*_gate_and_linear(t, size, dim, size), None).movedim(-1, dim).contiguous()


def _gate_and_linear(
    t: Tensor, size: int, dim: int, interleave: int | None
) -> tuple[Tensor, Tensor]:
    if size < 1 or t.shape[dim] % (2 * size):
        raise ValueError(
            "features to reorder must be a multiple of twice the block, a positive size, got "
            f"{t.shape[dim]} features in dimension {dim} of {tuple(t.shape)} and size={size}"
        )
    return split_glu(t.movedim(dim, -1), interleave)
