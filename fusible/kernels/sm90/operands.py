"""Operands of the SM90 kernels: their layouts, copies of what TMA cannot read, and checks.

A call's checks are part of its host time: each is one `if`, and its message is built only when it
is raised.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusible.kernels.runtime.gpu import has_cutlass, sm_of
from fusible.kernels.runtime.workspaces import pointer_table
from fusible.kernels.sm90 import limits

DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}


@functools.lru_cache(maxsize=4096)
def supports(device: torch.device, dtype: torch.dtype, *features: int) -> bool:
    """Whether the kernels run on a device for matrices of ``dtype`` and these features."""
    name = DTYPE_NAMES.get(dtype, "")
    return limits.supports_products(sm_of(device), name, *features) and has_cutlass()


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether operands of ``dtype`` have scales."""
    return DTYPE_NAMES.get(dtype) in limits.FP8_DTYPES


def as_matrix(name: str, x: Tensor) -> tuple[Tensor, int]:
    """``[rows, features]`` as TMA reads it, or a copy, and its row pitch, 0 if contiguous."""
    if x.ndim != 2:
        raise ValueError(f"{name} must have 2 dimensions, got {x.ndim}")
    if x.data_ptr() % limits.ALIGNMENT_BYTES == 0:
        if x.is_contiguous():
            return x, 0
        pitch, step = x.stride()
        if step == 1 and pitch >= x.shape[1] and pitch % limits.MULTIPLE_OF == 0:
            return x, pitch
    return x.clone(memory_format=torch.contiguous_format), 0


def is_row_scale(dtype: torch.dtype) -> bool:
    """Whether the kernels read scales of rows of ``dtype``."""
    return DTYPE_NAMES.get(dtype) in limits.ROW_SCALE_DTYPES


def as_vector(name: str, vector: Tensor, x: Tensor) -> Tensor:
    """``vector``, which must have one value for each row of ``x``, contiguous."""
    if vector.shape != x.shape[:1] or vector.device != x.device:
        raise ValueError(
            f"{name} must have one value for each of the {x.shape[0]} rows, on {x.device}, got "
            f"shape {tuple(vector.shape)} on {vector.device}"
        )
    return vector.contiguous()


def check_ends(ends: Tensor, groups: int, device: torch.device) -> None:
    """Raise ValueError unless ``ends`` is the end row of each group."""
    if (
        ends.dtype != torch.int32
        or ends.shape != (groups,)
        or not ends.is_contiguous()
        or ends.device != device
    ):
        raise ValueError(
            f"ends must be a contiguous int32 tensor with one value for each of the {groups} "
            f"groups on {device}, got {ends.dtype} of shape {tuple(ends.shape)} on {ends.device}"
        )


def check_tensor(
    name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError unless ``t`` has that shape and dtype and is on that device."""
    if t.shape != shape or t.dtype != dtype or t.device != device:
        raise ValueError(
            f"{name} must be a {dtype} tensor of shape {shape} on {device}, "
            f"got {t.dtype} of shape {tuple(t.shape)} on {t.device}"
        )


class Matrices(NamedTuple):
    """E matrices of one shape and layout: evenly spaced, or each at its own address."""

    address: int
    """The address of the first matrix."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    pointers: tuple[int, ...] | None = None
    """The addresses of all; None if they are evenly spaced."""

    def table(self, device: torch.device) -> Tensor | None:
        """A table of the matrices' addresses, None if they are evenly spaced.

        To be kept until the launch: in a captured graph nothing else keeps its memory.
        """
        return None if self.pointers is None else pointer_table(self.pointers, device)


def matrices_of(w: Sequence[Tensor]) -> Matrices | None:
    """One ``[E, N, K]`` tensor or E of ``[N, K]``, or None if TMA cannot address them."""
    first = w[0]
    shape, strides, address = first.shape, first.stride(), first.data_ptr()
    if len(w) == 1 and len(shape) == 3:
        return None if address % limits.ALIGNMENT_BYTES else Matrices(address, shape, strides)
    dtype, groups = first.dtype, len(w)
    if (
        len(shape) != 2
        or address % limits.ALIGNMENT_BYTES
        or not all([one.shape == shape and one.dtype == dtype for one in w])
        or not all(
            [one.is_contiguous() for one in w]
            if first.is_contiguous()
            else [one.stride() == strides for one in w]
        )
    ):
        return None
    pointers = tuple([one.data_ptr() for one in w])
    # Matrices that were allocated side by side are a dense tensor to the kernel.
    size = first.element_size()
    step = pointers[1] - address if groups > 1 else first.numel() * size
    spaced = step > 0 and step % (limits.MULTIPLE_OF * size) == 0
    if spaced and pointers == tuple(range(address, address + groups * step, step)):
        return Matrices(address, (groups, *shape), (step // size, *strides))
    if any([pointer % limits.ALIGNMENT_BYTES for pointer in pointers]):
        return None
    return Matrices(address, (groups, *shape), (0, *strides), pointers)


def check_matrices(name: str, w: Sequence[Tensor], x: Tensor) -> None:
    """Raise ValueError unless ``w`` are equal matrices on the device of ``x``."""
    if not w or w[0].shape[0] == 0:
        raise ValueError(f"{name} must have at least one group")
    first, groups = w[0], len(w)
    if first.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, got {first.device}")
    for one in w:
        if one.ndim != 2 and not (one.ndim == 3 and groups == 1):
            raise ValueError(
                f"{name} must be one tensor [E, N, K] or E tensors [N, K], got {groups} "
                f"of {one.ndim} dimensions"
            )
        if one.shape != first.shape or one.dtype != first.dtype:
            raise ValueError(f"the {groups} tensors of {name} must share shape and dtype")


class MatrixLayout(NamedTuple):
    """How TMA reads E matrices ``[rows, depth]``."""

    pitch: int
    group_pitch: int
    major: str
    """The contiguous dimension: n (rows) or k (depth)."""
    rows: int
    depth: int


@functools.lru_cache(maxsize=4096)
def layout(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    transpose: bool = False,
    spaced: bool = True,
) -> MatrixLayout | None:
    """The layout of ``[E, N, K]``, None if TMA cannot read it.

    ``transpose`` exchanges N and K; without ``spaced`` the matrices are behind a table.
    """
    groups, rows, depth = shape
    group_pitch, row_step, depth_step = strides
    if transpose:
        rows, depth, row_step, depth_step = depth, rows, depth_step, row_step
    major, pitch, width = ("k", row_step, depth) if depth_step == 1 else ("n", depth_step, rows)
    apart = groups == 1 or not spaced or group_pitch > 0
    if (
        1 not in (row_step, depth_step)
        or pitch < width
        or not apart
        or any([size % limits.MULTIPLE_OF for size in (pitch, rows, depth)])
        or (spaced and groups > 1 and group_pitch % limits.MULTIPLE_OF)
    ):
        return None
    if spaced and groups == 1:  # its step is any, but TMA has one
        group_pitch = pitch * (rows if major == "k" else depth)
    return MatrixLayout(pitch, group_pitch, major, rows, depth)
