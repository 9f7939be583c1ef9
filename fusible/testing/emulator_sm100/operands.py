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
WIDE = (torch.bfloat16, torch.float16, torch.float32)


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
    need(a.dtype in FP8 + FP4, f"a_tensor must be BF16, FP8 or packed FP4, got {a.dtype}")
    need(sfa is not None, "block-scaled operands need sfa_tensor")
    assert sfa is not None
    expected = (E8M0, 32) if a.dtype in FP8 else (E4M3, 16)
    got = (sfa.dtype, vec)
    need(got == expected, f"{a.dtype} needs scale dtype and block {expected}, got {got}")
    return True


def rows_of(x: Tensor, name: str, columns: int | None = None, rows: int | None = None) -> Tensor:
    """``[M, X]`` of row-major ``(M, X)`` or of ``(M, X, 1)`` with strides ``(X, 1, M * X)``."""
    tall = x.ndim == 3 and x.shape[2] == 1
    legal = x.ndim == 2 or tall
    need(legal, f"{name} must have shape (M, X) or (M, X, 1), got {tuple(x.shape)}")
    m, width = x.shape[:2]
    need(columns in (None, width), f"{name} must have {columns} columns, got {width}")
    need(rows in (None, m), f"{name} must have {rows} rows, got {m}")
    expected = (width, 1, m * width)[: x.ndim]
    need(m == 0 or x.stride() == expected, f"{name} must have strides {expected}, got {x.stride()}")
    need_pitch(x.dtype, width * (2 if x.dtype in FP4 else 1), name)
    need_aligned(x, name)
    return x.as_strided((m, width), (width, 1))


def row_vector(
    x: Tensor | None, name: str, rows: int, *dtypes: torch.dtype, canonical: bool
) -> Tensor | None:
    """``[M]``, a view, of a per-row operand ``(M, 1, 1)``, or ``(M,)`` beside canonical rows."""
    if x is None:
        return None
    shapes = ((rows, 1, 1), (rows,)) if canonical else ((rows, 1, 1),)
    need(x.shape in shapes, f"{name} must have shape {shapes[-1]}, got {tuple(x.shape)}")
    need(rows < 2 or x.stride(0) == 1, f"{name} must be contiguous, got strides {x.stride()}")
    need(x.dtype in (dtypes or WIDE), f"{name} must be {dtypes or WIDE}, got {x.dtype}")
    need_aligned(x, name)
    return x.as_strided((rows,), (1,))


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
    """``[batches, bytes]`` of a contiguous packed buffer or its 6-D view of the MMA."""
    need_aligned(scales, name)
    atoms = (round_up(rows, 128) // 128, round_up(blocks, 4) // 4)
    if not scales.is_contiguous():
        view = (32, 4, atoms[0], 4, atoms[1], batches)
        need(scales.shape == view, f"{name} must have shape {view}, got {tuple(scales.shape)}")
        scales = scales.permute(5, 2, 4, 0, 1, 3)
        need(scales.is_contiguous(), f"{name} must be a permuted contiguous buffer")
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
class Weights:
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


def weights_of(call: Any, scaled: bool, *, dense_n_major: bool) -> Weights:
    """The weights of a call: ``(b_tensor, sfb_tensor)``, or pointers with ``n`` and ``b_dtype``."""
    dense, discrete = call.b_tensor is not None, call.b_ptrs is not None
    need(dense != discrete, "give either b_tensor or b_ptrs")
    need(call.b_major in ("k", "n"), f"b_major must be 'k' or 'n', got {call.b_major!r}")
    width = call.a_tensor.shape[1]
    k = width * (2 if call.a_tensor.dtype in FP4 else 1)
    if dense:
        need(call.n is None and call.b_dtype is None, "dense weights forbid n and b_dtype")
        elements = _dense(call, width, dense_n_major)
    else:
        elements = _discrete(call, width)
    n, experts = elements[0].shape[0], len(elements)
    need(experts <= 1024, f"at most 1024 experts, got {experts}")
    if not scaled:
        sfb = getattr(call, "sfb_tensor", None), getattr(call, "sfb_ptrs", None)
        need(sfb == (None, None), "BF16 weights take no scales")
        return Weights(n, k, elements, None, None, 0)
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
    return Weights(n, k, elements, scales, call.sfa_tensor.dtype, call.sf_vec_size)


def _dense(call: Any, width: int, n_major_is_legal: bool) -> list[Tensor]:
    """Storage elements ``[N, K]`` per expert of kernel-facing (N, K, E) or canonical (E, ., .)."""
    b = call.b_tensor
    need(b.ndim == 3, f"b_tensor must have 3 dimensions, got {b.ndim}")
    need(b.dtype == call.a_tensor.dtype, f"b_tensor must be {call.a_tensor.dtype}, got {b.dtype}")
    need_aligned(b, "b_tensor")
    if b.stride(2) == 1 and 1 not in b.stride()[:2]:
        need(b.is_contiguous(), f"canonical b_tensor must be contiguous, got {b.stride()}")
        b = b.permute(2, 1, 0) if call.b_major == "n" else b.permute(1, 2, 0)
    n, k, _ = b.shape
    need(k == width, f"b_tensor must have K = {width}, got {k}")
    n_major = b.stride() == (1, n, n * k) and (n, k) != (1, 1)
    k_major = b.stride() == (k, 1, n * k)
    need(n_major or k_major, f"b_tensor (N, K, E) must be dense along N or K, got {b.stride()}")
    need(not n_major or n_major_is_legal, "these dense weights must be K-major")
    need_pitch(b.dtype, n if n_major else k * (2 if b.dtype in FP4 else 1), "b_tensor")
    return list(b.unbind(2))


def _discrete(call: Any, width: int) -> list[Tensor]:
    """Storage elements ``[N, K]`` per expert behind ``b_ptrs``."""
    need(call.n is not None and call.b_dtype is not None, "b_ptrs needs n and b_dtype")
    same = call.b_dtype == call.a_tensor.dtype
    need(same, f"b_dtype must be {call.a_tensor.dtype}, got {call.b_dtype}")
    fp4 = call.b_dtype in FP4
    need(not fp4 or call.b_major == "k", "FP4 weights must be K-major")
    k_major = call.b_major == "k"
    extent = width * (2 if fp4 else 1) if k_major else call.n
    need_pitch(call.b_dtype, extent, "b_ptrs")
    shape = (call.n, width) if k_major else (width, call.n)
    count = shape[0] * shape[1]
    table = pointers(call.b_ptrs, "b_ptrs")
    need(len(table) > 0, "b_ptrs must not be empty")
    found = [memory(at, count, call.b_dtype, "b_ptrs").view(shape) for at in table]
    return found if k_major else [weight.t() for weight in found]


def tile_choice(call: Any, *, one_cta: bool = True, n_tiles: tuple[int, ...] = (256,)) -> None:
    """The tile, cluster and dtype arguments that every kernel shares."""
    need(call.acc_dtype in (None, torch.float32), f"acc_dtype must be FP32, got {call.acc_dtype}")
    need(getattr(call, "cd_major", "n") == "n", "cd_major must be 'n'")
    need(getattr(call, "m_aligned", ROWS) == ROWS, f"m_aligned must be {ROWS}")
    need(getattr(call, "sf_fp8_dtype_override", None) is None, "E5M3 scales need Rubin (SM107)")
    tile_m, tile_n = call.mma_tiler_mn
    legal = tile_m in ((128, 256) if one_cta else (256,)) and tile_n in n_tiles
    need(legal, f"mma_tiler_mn must be (128 | 256, {n_tiles}), got {call.mma_tiler_mn}")
    cluster = call.cluster_shape_mn or ((2, 1) if tile_m == 256 else (1, 1))
    powers = all(extent in (1, 2, 4) for extent in cluster)
    need(powers and cluster[0] % (tile_m // 128) == 0, f"no such cluster_shape_mn: {cluster}")


def output(m: int, columns: int, dtype: torch.dtype, canonical: bool) -> Tensor:
    """An unwritten ``(M, X)`` or kernel-facing ``(M, X, 1)`` output."""
    rows = poisoned((m, columns), dtype)
    return rows if canonical else rows.as_strided((m, columns, 1), (columns, 1, m * columns))


def scale_output(rows: int, blocks: int, dtype: torch.dtype, canonical: bool) -> Tensor:
    """Unwritten packed scales: the contiguous 6-D buffer, or its view of the MMA."""
    shape = (1, round_up(rows, 128) // 128, round_up(blocks, 4) // 4, 32, 4, 4)
    physical = poisoned(shape, dtype)
    return physical if canonical else physical.permute(3, 4, 1, 5, 2, 0)
