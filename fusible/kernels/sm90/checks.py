"""What the SM90 kernels are given, checked before any of them runs: a sentence for each fact.

A call's checks are part of its host time: each is one `if`, and its sentence is put together only
to be raised.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusible.calls import is_traced
from fusible.kernels.sm90 import limits

DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}


def check_matrix(name: str, x: Tensor) -> tuple[int, int, int]:
    """Rows, columns and row pitch of a matrix that TMA can read."""
    if x.ndim != 2:
        raise ValueError(f"{name} must have 2 dimensions, got {x.ndim}")
    if not x.is_cuda:
        raise ValueError(f"{name} must be on a CUDA device, got {x.device}")
    if DTYPE_NAMES.get(x.dtype) not in limits.DTYPES:
        raise ValueError(f"{name} must be BF16 or FP16, got {x.dtype}")
    rows, columns = x.shape
    if columns % limits.MULTIPLE_OF:
        raise ValueError(
            f"the last dimension of {name} must be a multiple of {limits.MULTIPLE_OF}, "
            f"got {columns}"
        )
    if not _is_readable(x):
        raise ValueError(
            f"{name} must be contiguous in its last dimension with a row pitch that is a multiple "
            f"of {limits.ALIGNMENT_BYTES} bytes, and start at such a multiple, got strides "
            f"{x.stride()} at {x.data_ptr():#x}; call .contiguous()"
        )
    return rows, columns, x.stride(0) if rows > 1 else columns  # a single row may have any pitch


def _is_readable(x: Tensor) -> bool:
    if x.data_ptr() % limits.ALIGNMENT_BYTES:
        return False
    if x.is_contiguous():
        return x.shape[-1] % limits.MULTIPLE_OF == 0 or x.shape[-2] <= 1
    *groups, rows, columns = x.shape
    *spacing, pitch, step = x.stride()
    if groups and groups[0] > 1 and (spacing[0] <= 0 or spacing[0] % limits.MULTIPLE_OF):
        return False
    return step == 1 and (rows <= 1 or (pitch >= columns and pitch % limits.MULTIPLE_OF == 0))


def has_matrix_layout(x: Tensor) -> bool:
    """Whether memory of matrices ``[..., rows, columns]`` is laid out as the kernels read it.

    A contiguous copy is. Addresses are not known where calls are traced, and only contiguous
    memory counts.
    """
    return x.is_contiguous() if is_traced() else _is_readable(x)


def takes_wgrad(out: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether `grouped_wgrad_` of operands in ``dtype`` can write to ``out``."""
    first = out[0]
    return (
        first.dtype in (dtype, torch.float32)
        and (first.dim() == 2 or first.stride(0) % limits.MULTIPLE_OF == 0)
        and all([t.stride() == first.stride() and has_matrix_layout(t) for t in out])
    )


def check_scale(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless the kernels read scales of ``dtype``."""
    if DTYPE_NAMES.get(dtype) not in limits.SCALE_DTYPES:
        raise ValueError(f"{name} must be a float tensor, got {dtype}")


def check_rows(name: str, vector: Tensor, rows: int, device: torch.device) -> None:
    """One value for each row."""
    if vector.device != device:
        raise ValueError(f"{name} must be on {device}, got {vector.device}")
    check_scale(name, vector.dtype)
    if vector.shape != (rows,) or not vector.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous with one value for each of the {rows} rows, "
            f"got shape {tuple(vector.shape)} with strides {vector.stride()}"
        )


def check_ends(ends: Tensor, groups: int, device: torch.device) -> None:
    """The end row of each group."""
    if ends.dtype != torch.int32 or ends.shape != (groups,) or not ends.is_contiguous():
        raise ValueError(
            f"ends must be a contiguous int32 tensor with one value for each of the {groups} "
            f"groups, got {ends.dtype} of shape {tuple(ends.shape)}"
        )
    if ends.device != device:
        raise ValueError(f"ends must be on {device}, got {ends.device}")


def check_bias(bias: Tensor, groups: int, columns: int, x: Tensor) -> None:
    """One value for each group and column, in the dtype of ``x``."""
    if bias.shape != (groups, columns) or bias.dtype != x.dtype or not bias.is_contiguous():
        raise ValueError(
            f"bias must be a contiguous {x.dtype} tensor of shape {(groups, columns)}, "
            f"got {bias.dtype} of shape {tuple(bias.shape)}"
        )
    if bias.device != x.device:
        raise ValueError(f"bias must be on {x.device}, got {bias.device}")


def check_product(name: str, x: Tensor, depth: int, w: Tensor, weights: Matrices) -> None:
    """Rows and weights that can be multiplied."""
    if w.dtype != x.dtype:
        raise ValueError(f"w must have {name}'s dtype {x.dtype}, got {w.dtype}")
    if depth != weights.depth:
        raise ValueError(
            f"{name} and w must share the reduced dimension, got {depth} and {weights.depth}"
        )


class Matrices(NamedTuple):
    """E matrices [rows, depth], wherever they lie."""

    address: int
    pitch: int
    group_pitch: int
    major: str  # which dimension is contiguous: n (rows) or k (depth)
    rows: int
    depth: int
    groups: int
    pointers: tuple[int, ...]  # empty: the matrices are evenly spaced by group_pitch elements


def matrices_of(name: str, w: Sequence[Tensor], device: torch.device, transpose: bool) -> Matrices:
    """Read one [E, N, K] tensor or E of [N, K]; ``transpose`` exchanges N and K."""
    if not w or w[0].shape[0] == 0:
        raise ValueError(f"{name} must have at least one group")
    first = w[0]
    if first.device != device:
        raise ValueError(f"{name} must be on {device}, got {first.device}")
    shape, strides, address = first.shape, first.stride(), first.data_ptr()
    if len(w) == 1 and len(shape) == 3:
        if address % limits.ALIGNMENT_BYTES:
            raise ValueError(_misaligned(name))
        return Matrices(address, *layout(name, shape, strides, transpose), ())
    pointers = _pointers(name, w)
    # Matrices that were allocated side by side are a dense tensor to the kernel.
    groups, size = len(w), first.element_size()
    step = pointers[1] - address if groups > 1 else first.numel() * size
    evenly = step > 0 and pointers == tuple(range(address, address + groups * step, step))
    if evenly and step % (limits.MULTIPLE_OF * size) == 0:
        pointers = ()
    together = (groups, *shape), (step // size, *strides)
    return Matrices(address, *layout(name, *together, transpose, not pointers), pointers)


def _misaligned(name: str) -> str:
    return f"each matrix of {name} must start at a multiple of {limits.ALIGNMENT_BYTES} bytes"


def _pointers(name: str, w: Sequence[Tensor]) -> tuple[int, ...]:
    """Addresses of separate matrices that differ in nothing else."""
    groups, shape, strides, dtype = len(w), w[0].shape, w[0].stride(), w[0].dtype
    for one in w:
        if one.ndim != 2:
            raise ValueError(
                f"{name} must be one tensor [E, N, K] or E tensors [N, K], got {groups} "
                f"of {one.ndim} dimensions"
            )
        if one.shape != shape or one.stride() != strides or one.dtype != dtype:
            raise ValueError(f"the {groups} tensors of {name} must share shape, strides and dtype")
    pointers = tuple([one.data_ptr() for one in w])
    if any([pointer % limits.ALIGNMENT_BYTES for pointer in pointers]):
        raise ValueError(_misaligned(name))
    return pointers


@functools.lru_cache(maxsize=4096)
def layout(
    name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    transpose: bool,
    spaced: bool = True,
) -> tuple[int, int, str, int, int, int]:
    """Fields of `Matrices` from ``pitch`` to ``groups``; ``spaced`` if there is a group pitch."""
    groups, rows, depth = shape
    group_pitch, row_step, depth_step = strides
    if transpose:
        rows, depth, row_step, depth_step = depth, rows, depth_step, row_step
    major, pitch = ("k", row_step) if depth_step == 1 else ("n", depth_step)
    if (
        not (row_step == 1 or depth_step == 1)
        or pitch % limits.MULTIPLE_OF
        or rows % limits.MULTIPLE_OF
        or depth % limits.MULTIPLE_OF
    ):
        raise ValueError(
            f"{name} must be contiguous in one of its last two dimensions, with a pitch and sizes "
            f"that are multiples of {limits.MULTIPLE_OF}, got shape {tuple(shape)} with "
            f"strides {strides}; call .contiguous()"
        )
    if spaced and groups > 1 and (group_pitch <= 0 or group_pitch % limits.MULTIPLE_OF):
        raise ValueError(_misaligned(name))
    return pitch, group_pitch, major, rows, depth, groups


def check_glu(activation: str, interleave: int, columns: int) -> None:
    """A gated activation that the kernels have, of so many columns."""
    if activation not in limits.ACTIVATIONS:
        raise ValueError(
            f"activation must be one of {', '.join(limits.ACTIVATIONS)}, got {activation!r}"
        )
    power_of_two = interleave >= 0 and interleave & (interleave - 1) == 0
    if not power_of_two or (interleave and columns % interleave):
        raise ValueError(
            f"interleave must be 0 (halves) or a power of two that divides the {columns} "
            f"activation columns, got {interleave}"
        )
