"""Sharding and all-gathering of quantized tensors, as FSDP2 does with parameters.

FSDP2 cuts a parameter along its first dimension: a 3-D weight between groups, a 2-D one between
rows, where whole blocks must stay together. It gathers what is stored, not the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusible.calls import depend_on_values
from fusible.recipes.formats import NumberFormat
from fusible.recipes.matrix import as_bytes
from fusible.recipes.wrapper import WrapperTensor, kinds_of_pieces

W = TypeVar("W", bound=WrapperTensor)


class NotStorableError(ValueError):
    """A part or a view of a quantized tensor that its format cannot hold: its values are used."""

    def __init__(
        self, q: WrapperTensor, must: str, got: object, instead: str = "call .dequantize()"
    ) -> None:
        super().__init__(f"a part or a view of {q!r} must {must}, got {got}; {instead}")


def check_rows_kept(q: WrapperTensor) -> None:
    """Raise NotStorableError unless the rows of the pieces are the rows of the tensor."""
    data = next(iter(q.pieces().values()))
    if data.shape[:-1] != q.shape[:-1]:
        raise NotStorableError(q, "be taken where its rows are", f"rows of {tuple(data.shape)}")


def has_scale_of_matrix(fmt: NumberFormat) -> bool:
    """Tell whether all rows of a matrix share a scale."""
    return fmt.block is None or fmt.has_tensor_scale


def _rows_of_pieces(q: WrapperTensor, start: int, stop: int) -> dict[str, tuple[int, int]]:
    """Return where rows ``start`` to ``stop`` are in every piece; NotStorableError if blocks break.

    The last block of the tensor may be a short one.
    """
    fmt = q.format
    assert fmt is not None  # only a grouped tensor has none
    if has_scale_of_matrix(fmt):
        instead = "store all groups as one 3-D weight, which is cut between groups, or use MXFP8"
        raise NotStorableError(q, "have all rows, which share a scale", (start, stop), instead)
    of_scales = dict(zip(("scale_inv", "columnwise_scale_inv"), fmt.block or (1, 1), strict=True))
    per = {name: of_scales.get(name, 1) for name in q.pieces()}
    whole = math.lcm(*per.values())
    if start % whole or (stop % whole and stop != q.shape[-2]):
        instead = f"use a multiple of {whole} rows for every shard"
        raise NotStorableError(q, f"have whole blocks of {whole} rows", (start, stop), instead)
    return {name: (start // count, -(-stop // count)) for name, count in per.items()}


def cut(q: W, dim: int, start: int, stop: int) -> W:
    """Return a view of entries ``start`` to ``stop`` along a dimension other than the last.

    Raises NotStorableError for the last dimension, for a part of a block of rows, and for rows that
    share a scale.
    """
    dim %= q.dim()
    stop = max(min(stop, q.shape[dim]), start)
    shape = list(q.shape)
    shape[dim] = stop - start
    if (start, stop) == (0, q.shape[dim]):
        return q.map_pieces(lambda t: t)
    if dim == q.dim() - 1:
        raise NotStorableError(q, "have all of its columns", (start, stop))
    check_rows_kept(q)
    if dim < q.dim() - 2:
        spans = dict.fromkeys(q.pieces(), (start, stop))
    else:
        spans = _rows_of_pieces(q, start, stop)
    pieces = {
        name: piece.narrow(dim, spans[name][0], spans[name][1] - spans[name][0])
        for name, piece in q.pieces().items()
    }
    return q.with_pieces(pieces, shape)


def split(q: WrapperTensor, size: int, dim: int = 0) -> list[WrapperTensor]:
    """Return views of at most ``size`` entries along ``dim``; errors as :func:`cut`."""
    return [cut(q, dim, at, at + size) for at in range(0, max(q.shape[dim], 1), size)]


def slice_(
    q: WrapperTensor,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> WrapperTensor:
    """``aten.slice`` with step 1; errors as :func:`cut`."""
    if step != 1:
        raise NotStorableError(q, "have step 1", step)
    if depend_on_values(start, stop):
        known = "be between rows that are known when it is compiled"
        raise NotStorableError(q, known, (start, stop))
    size = q.shape[dim]
    start, stop = start or 0, size if stop is None else stop
    start, stop = (at + size if at < 0 else at for at in (start, stop))
    return cut(q, dim, min(max(start, 0), size), max(stop, 0))


def new_zeros(q: WrapperTensor, size: Sequence[int], **options: Any) -> Tensor:
    """Return zeros in the format of ``q``, as many matrices or rows of it as ``cut`` could return.

    Plain ones for another dtype, rank or number of columns.
    """
    dtype, device = options.get("dtype") or q.dtype, options.get("device") or q.device
    if dtype != q.dtype or q.dim() < 2 or len(size) != q.dim() or size[-1] != q.shape[-1]:
        return torch.zeros(size, dtype=dtype, device=device)
    check_rows_kept(q)
    fmt = q.format
    assert fmt is not None  # only a grouped tensor has none
    if size[-2] != q.shape[-2]:
        _rows_of_pieces(q, 0, size[-2])  # raises
    pieces = {
        name: torch.empty(shape, dtype=piece_dtype, device=device)
        for name, (piece_dtype, shape) in kinds_of_pieces(fmt, size).items()
        if name in q.pieces()
    }
    for piece in pieces.values():
        as_bytes(piece).zero_()  # E8M0 has no zero
    return q.with_pieces(pieces, size)


# --- tensors that are shards of one, as a state dict of a sharded module holds them --------------


def is_sharded(t: Any) -> bool:
    """Whether ``t`` is a ``DTensor``, without importing that."""
    return hasattr(t, "placements")


def local(t: Any) -> Any:
    """The local part of a ``DTensor``; other tensors as they are."""
    return t.to_local() if is_sharded(t) else t


def sharded_as(t: Any, part: Tensor) -> Any:
    """A ``DTensor`` of this local part, sharded as ``t``."""
    from torch.distributed.tensor import DTensor  # there is one, so this is imported already

    return DTensor.from_local(part, t.device_mesh, t.placements, run_check=False)


def whole(t: Any) -> Tensor:
    """All of a ``DTensor`` on every rank, gathered as it is stored."""
    part = t.to_local()
    if not isinstance(part, WrapperTensor):
        return t.full_tensor()
    return part.map_pieces(
        lambda piece: sharded_as(t, piece.view(torch.uint8)).full_tensor().view(piece.dtype),
        shape=t.shape,
    )


def shard(t: Tensor, like: Any) -> Any:
    """``t``, which every rank has, sharded as ``like``, or replicated if that has other sizes."""
    from torch.distributed.tensor import Replicate

    mesh, same = like.device_mesh, t.shape == like.shape
    return shard_over(t, mesh, like.placements if same else [Replicate()] * mesh.ndim)


def shard_over(t: Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    """``t``, which every rank has, sharded over a mesh; each rank keeps a copy of its part."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, start = compute_local_shape_and_global_offset(t.shape, mesh, placements)
    part = t.detach()
    for dim, (size, at) in enumerate(zip(shape, start, strict=True)):
        if size != t.shape[dim]:
            part = part.narrow(dim, at if size else 0, size)
    return DTensor.from_local(
        part.clone(), mesh, placements, run_check=False, shape=t.shape, stride=t.stride()
    )


def mean_over_ranks(grad: Tensor, like: Any) -> Any:
    """The mean of ``grad`` over the mesh of ``like``, sharded so: what FSDP2 makes of a gradient.

    In the dtype of ``like``.
    """
    from torch.distributed.tensor import DTensor, Partial

    mesh = like.device_mesh
    share = grad.to(like.dtype) / mesh.size()
    parts = DTensor.from_local(share, mesh, [Partial()] * mesh.ndim, run_check=False)
    return parts.redistribute(placements=like.placements)
