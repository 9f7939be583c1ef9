"""What the kernels are given, checked as strictly as they check it, and read as FP32 matrices.

Raises ValueError with what must hold and what it got. Beyond the front end's own checks stand
those on device data that a kernel trusts: group ends, pointer tables, padding of scales.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusible.testing.emulator_sm100.formats import (
    E4M3,
    E8M0,
    FP4,
    FP8,
    bits,
    numbers,
    packed_bytes,
    poisoned,
    round_up,
    scale_numbers,
    scale_offsets,
)

ROWS = 256  # what M and every group end must be a multiple of


def need(holds: bool, sentence: str) -> None:
    """Refuse with the sentence unless the condition holds."""
    if not holds:
        raise ValueError(sentence)


def need_vector(x: Tensor | None, name: str, length: int, *dtypes: torch.dtype) -> None:
    """``x`` shall be contiguous, ``[length]``, of one of the dtypes (any, if none is given)."""
    need(x is not None, f"{name} is required")
    assert x is not None
    need(x.shape == (length,), f"{name} must have shape ({length},), got {tuple(x.shape)}")
    need(x.is_contiguous(), f"{name} must be contiguous, got strides {x.stride()}")
    need(not dtypes or x.dtype in dtypes, f"{name} must be {dtypes}, got {x.dtype}")
    need_aligned(x, name)


def need_aligned(x: Tensor, name: str, unit: int = 16) -> None:
    """The base pointer shall be a multiple of ``unit`` bytes."""
    need(x.data_ptr() % unit == 0, f"{name}'s data pointer must be {unit}-byte aligned")


def need_pitch(dtype: torch.dtype, extent: int, name: str) -> None:
    """The contiguous dimension shall hold whole units of 16 bytes."""
    unit = 128 // bits(dtype)
    need(extent % unit == 0, f"{name}: contiguous dim must be a multiple of {unit}, got {extent}")


def block_scaled(a: Tensor, sfa: Tensor | None, vec: int) -> bool:
    """Whether the operands select the block-scaled kernels, and in a format they have."""
    if a.dtype == torch.bfloat16:
        need(sfa is None, "BF16 operands take no scales, got sfa_tensor")
        need(vec == 16, f"BF16 operands forbid sf_vec_size, got {vec}")
        return False
    need(a.dtype in (FP8, FP4), f"a_tensor must be BF16, FP8 or packed FP4, got {a.dtype}")
    need(sfa is not None, "block-scaled operands need sfa_tensor")
    assert sfa is not None
    expected = (E8M0, 32) if a.dtype == FP8 else (E4M3, 16)
    got = (sfa.dtype, vec)
    need(got == expected, f"{a.dtype} needs scale dtype and block {expected}, got {got}")
    return True


def need_rows(x: Tensor, name: str, columns: int | None = None, rows: int | None = None) -> None:
    """``x`` shall be contiguous ``[M, X]``."""
    need(x.ndim == 2, f"{name} must have shape (M, X), got {tuple(x.shape)}")
    m, width = x.shape
    need(columns in (None, width), f"{name} must have {columns} columns, got {width}")
    need(rows in (None, m), f"{name} must have {rows} rows, got {m}")
    need(x.is_contiguous(), f"{name} must be contiguous, got strides {x.stride()}")
    need_pitch(x.dtype, width * (2 if x.dtype == FP4 else 1), name)
    need_aligned(x, name)


def group_ends(offsets: Tensor, experts: int, rows: int, multiple: int = ROWS) -> list[int]:
    """Cumulative end rows of the groups, which must be int32, ordered, aligned and within M."""
    need_vector(offsets, "padded_offsets", experts, torch.int32)
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    ordered = all(start <= end for start, end in zip(starts, ends, strict=True))
    need(ordered, f"group ends must not decrease, got {ends}")
    aligned = all(end % multiple == 0 for end in ends)
    need(aligned, f"group ends must be multiples of {multiple}, got {ends}")
    need(not ends or ends[-1] <= rows, f"the last group must end within {rows} rows, got {ends}")
    return ends


def groups(ends: list[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of the experts that have rows."""
    spans = zip(range(len(ends)), [0, *ends[:-1]], ends, strict=True)
    return [(e, start, end) for e, start, end in spans if end > start]


def memory(address: int, count: int, dtype: torch.dtype, name: str) -> Tensor:
    """``count`` storage elements at a CPU address that a pointer table holds."""
    need(address != 0 and address % 16 == 0, f"{name}: entries must be non-null, 16-byte aligned")
    buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype)


def pointers(table: Tensor | None, name: str, length: int | None = None) -> list[int]:
    """Addresses of a pointer table: int64, one-dimensional, contiguous."""
    need(table is not None, f"{name} is required")
    assert table is not None
    shape = tuple(table.shape)
    need(table.dtype == torch.int64 and table.ndim == 1, f"{name} must be int64 (E,), got {shape}")
    need(table.is_contiguous(), f"{name} must be contiguous")
    need(length in (None, len(table)), f"{name} must have {length} entries, got {len(table)}")
    return table.tolist()


def scale_bytes(scales: Tensor, name: str, batches: int, rows: int, blocks: int) -> Tensor:
    """``[batches, bytes]`` of contiguous packed scales."""
    need_aligned(scales, name)
    need(scales.is_contiguous(), f"{name} must be contiguous, got strides {scales.stride()}")
    count = batches * packed_bytes(rows, blocks)
    need(scales.numel() == count, f"{name} must hold {count} packed bytes, got {scales.numel()}")
    return scales.view(torch.uint8).reshape(batches, -1)


def matrix(elements: Tensor, packed: Tensor, dtype: torch.dtype, vec: int, name: str) -> Tensor:
    """FP32 ``[rows, K]`` of elements times block scales along K, from one packed region."""
    values = numbers(elements)
    rows, k = values.shape
    blocks = math.ceil(k / vec)
    padding = packed[scale_offsets(rows, round_up(blocks, 4))[:, blocks:]]
    # The tensor core multiplies the padding with zeros, and zero times NaN is NaN.
    finite = not scale_numbers(padding, dtype).isnan().any()
    need(finite, f"{name}: scales that pad the blocks to four must be finite, got NaN")
    scales = scale_numbers(packed[scale_offsets(rows, blocks)], dtype)
    return values * scales.repeat_interleave(vec, dim=1)[:, :k]


@dataclass(frozen=True)
class WeightsOperand:
    """One ``[N, K]`` matrix per expert, dense or behind pointers, with or without block scales."""

    n: int
    k: int
    elements: list[Tensor]
    scales: list[Tensor] | None
    scale_dtype: torch.dtype | None
    vec: int

    @property
    def experts(self) -> int:
        """How many."""
        return len(self.elements)

    def matrix(self, expert: int) -> Tensor:
        """FP32 ``[N, K]``."""
        if self.scales is None:
            return self.elements[expert].float()
        assert self.scale_dtype is not None
        return matrix(self.elements[expert], self.scales[expert], self.scale_dtype, self.vec, "SFB")


def weights_of(call: Any, scaled: bool) -> WeightsOperand:
    """The weights of a call: ``(b_tensor, sfb_tensor)``, or pointers with ``n`` and ``b_dtype``."""
    dense, discrete = call.b_tensor is not None, call.b_ptrs is not None
    need(dense != discrete, "give either b_tensor or b_ptrs")
    need(call.b_major in ("k", "n"), f"b_major must be 'k' or 'n', got {call.b_major!r}")
    packed = call.a_tensor.dtype == FP4
    n_major = call.b_major == "n"
    need(not packed or not n_major, "FP4 weights must be K-major")
    width = call.a_tensor.shape[1]
    k = width * (2 if packed else 1)
    stored = _dense(call) if dense else _discrete(call, width)
    elements = [weight.t() for weight in stored] if n_major else stored
    n, depth = elements[0].shape
    experts = len(elements)
    need(depth == width, f"b_tensor must have K = {width}, got {depth}")
    need_pitch(call.a_tensor.dtype, n if n_major else k, "b_tensor" if dense else "b_ptrs")
    need(experts <= 1024, f"at most 1024 experts, got {experts}")
    if not scaled:
        sfb = getattr(call, "sfb_tensor", None), getattr(call, "sfb_ptrs", None)
        need(sfb == (None, None), "BF16 weights take no scales")
        return WeightsOperand(n, k, elements, None, None, 0)
    blocks = math.ceil(k / call.sf_vec_size)
    if dense:
        need(call.sfb_tensor is not None, "dense block-scaled weights need sfb_tensor")
        same = call.sfb_tensor.dtype == call.sfa_tensor.dtype
        need(same, f"sfb_tensor must be {call.sfa_tensor.dtype}, got {call.sfb_tensor.dtype}")
        scales = list(scale_bytes(call.sfb_tensor, "sfb_tensor", experts, n, blocks))
    else:
        table = pointers(call.sfb_ptrs, "sfb_ptrs", experts)
        count = packed_bytes(n, blocks)
        scales = [memory(at, count, torch.uint8, "sfb_ptrs") for at in table]
    return WeightsOperand(n, k, elements, scales, call.sfa_tensor.dtype, call.sf_vec_size)


def _dense(call: Any) -> list[Tensor]:
    """Storage elements of each expert, as they lie in contiguous ``b_tensor``."""
    b = call.b_tensor
    need(call.n is None and call.b_dtype is None, "dense weights forbid n and b_dtype")
    need(b.ndim == 3, f"b_tensor must have 3 dimensions, got {b.ndim}")
    need(b.dtype == call.a_tensor.dtype, f"b_tensor must be {call.a_tensor.dtype}, got {b.dtype}")
    need_aligned(b, "b_tensor")
    need(b.is_contiguous(), f"b_tensor must be contiguous, got {b.stride()}")
    return list(b.unbind(0))


def _discrete(call: Any, width: int) -> list[Tensor]:
    """Storage elements of each expert, as they lie behind ``b_ptrs``."""
    need(call.n is not None and call.b_dtype is not None, "b_ptrs needs n and b_dtype")
    same = call.b_dtype == call.a_tensor.dtype
    need(same, f"b_dtype must be {call.a_tensor.dtype}, got {call.b_dtype}")
    shape = (call.n, width) if call.b_major == "k" else (width, call.n)
    table = pointers(call.b_ptrs, "b_ptrs")
    need(len(table) > 0, "b_ptrs must not be empty")
    count = call.n * width
    return [memory(at, count, call.b_dtype, "b_ptrs").view(shape) for at in table]


def scale_output(rows: int, blocks: int) -> Tensor:
    """Unwritten packed E8M0 scales."""
    shape = (1, round_up(rows, 128) // 128, round_up(blocks, 4) // 4, 32, 4, 4)
    return poisoned(shape, E8M0)


def row_major(t: Tensor | None, name: str) -> Tensor:
    """Rows ``[M, X]`` of a tensor (M, X, 1)."""
    need(t is not None, f"{name} is required")
    assert t is not None
    need(t.ndim == 3 and t.shape[2] == 1, f"{name} must be (M, X, 1), got {tuple(t.shape)}")
    m, x, _ = t.shape
    strides = (x, 1, m * x)
    need(t.stride() == strides, f"{name} must have strides {strides}, got {t.stride()}")
    return t[:, :, 0]


def unit_last(rows: Tensor | None) -> Tensor:
    """What `row_major` took."""
    assert rows is not None
    m, x = rows.shape
    return rows.as_strided((m, x, 1), (x, 1, m * x))


def physical_scales(view: Tensor | None, name: str) -> Tensor:
    """Packed scales as they lie, of their view (32, 4, rows / 128, 4, blocks / 4, E)."""
    need(view is not None, f"{name} is required")
    assert view is not None
    is_view = view.ndim == 6 and (*view.shape[:2], view.shape[3]) == (32, 4, 4)
    need(is_view, f"{name} must be a view (32, 4, _, 4, _, E), got {tuple(view.shape)}")
    return view.permute(5, 2, 4, 0, 1, 3)


def scale_view(physical: Tensor | None) -> Tensor | None:
    """What `physical_scales` took."""
    return None if physical is None else physical.permute(3, 4, 1, 5, 2, 0)
