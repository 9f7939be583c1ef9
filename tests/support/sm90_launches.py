"""The SM90 kernels' launches run on the CPU, from the addresses and pitches that they are given."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import sm90_in_tile
import torch
from torch import Tensor

from fusible import library
from fusible.fused import fp8_fast_path
from fusible.kernels import moe
from fusible.kernels.glu import Glu
from fusible.kernels.grouped import definitions
from fusible.kernels.quantize import k_major
from fusible.kernels.quantize.glu_backward import (
    GluBackwardInputs,
    GluBackwardOptions,
    GluBackwardPieces,
    GluGradients,
    glu_backward_definition,
)
from fusible.kernels.quantize.k_major import KMajorOperands, RowsToQuantize
from fusible.kernels.runtime import gpu
from fusible.kernels.runtime import launch as runtime_launch
from fusible.kernels.sm90 import checked_products, gemm_launch, grouped_products, operands
from fusible.kernels.sm90.spec import FORWARD, Spec
from fusible.ops import grouped_fast_path
from fusible.recipes.formats import SAVED_INPUT, NumberFormat
from fusible.recipes.quantization import quantize

# The kernels' arguments: see GroupedGemm.__call__.
NAMES = (
    "a", "b", "preact", "out", "preact_out", "ends", "table", "bias", "scales", "preact_scales",
    "out_scales", "row_sums", "counter", "rows", "tail_end", "columns", "depth", "groups",
    "a_pitch", "b_pitch", "group_pitch", "preact_pitch", "out_pitch", "preact_out_pitch",
    "glu_block", "glu_columns", "limit", "alpha", "offset", "clusters", "a_scales", "b_scales",
    "a_scale_pitch", "a_scale_block", "b_scale_group", "b_scale_pitch", "b_scale_block", "stream",
)  # fmt: skip


def tensor_at(
    address: int, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
) -> Tensor:
    """The tensor that lies at an address, contiguous unless ``strides`` are given."""
    if strides is None:
        strides = tuple([math.prod(shape[i + 1 :]) for i in range(len(shape))])
    size = 1 + sum([(n - 1) * step for n, step in zip(shape, strides, strict=True)])
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def run_product(spec: Spec, *arguments: float) -> None:
    """Do what the kernel does, as the definitions do; NaN where it writes nothing."""
    k = SimpleNamespace(**dict(zip(NAMES, arguments, strict=True)))
    dtype, out_dtype = getattr(torch, spec.dtype), getattr(torch, spec.out_dtype)
    b_dtype, value_dtype = (
        getattr(torch, spec.b_dtype or spec.dtype),
        getattr(torch, spec.value_dtype),
    )
    x_scale, w_scale = scales_of(spec, k)
    assert all(
        pitch % 8 == 0
        for name, pitch in vars(k).items()
        if name.endswith("pitch") and "scale" not in name
    )
    assert not any(getattr(k, name) % 16 for name in ("a", "b", "preact", "out", "preact_out"))
    ends = tensor_at(k.ends, (k.groups,), torch.int32)
    features = k.columns * (spec.sides if spec.kind in FORWARD else 1)

    def matrices(base: int, rows: int, columns: int, strides: tuple[int, int], dtype: torch.dtype):
        if spec.table:
            assert k.table in LIVING
            starts = tensor_at(k.table, (k.groups,), torch.int64).tolist()
        else:
            starts = [base + e * k.group_pitch * dtype.itemsize for e in range(k.groups)]
        return [tensor_at(start, (rows, columns), dtype, strides) for start in starts]

    if spec.kind == "wgrad":
        by_row = not spec.is_fp8
        dy = tensor_at(k.a, (k.rows, k.columns), dtype, (k.a_pitch, 1) if by_row else (1, k.rows))
        x = tensor_at(k.b, (k.rows, k.depth), b_dtype, (k.b_pitch, 1) if by_row else (1, k.rows))
        out = matrices(k.out, k.columns, k.depth, (k.out_pitch, 1), out_dtype)
        definitions.grouped_wgrad_(out, dy, x, ends, spec.accumulate, x_scale, w_scale)
        return
    x = tensor_at(k.a, (k.rows, k.depth), dtype, (k.a_pitch, 1))
    strides = (k.b_pitch, 1) if spec.weight_major == "k" else (1, k.b_pitch)
    w = matrices(k.b, features, k.depth, strides, b_dtype)
    if spec.is_fp8:
        w = [torch.stack(w)]
    bias = tensor_at(k.bias, (k.groups, features), value_dtype) if spec.bias else None
    scales = (
        tensor_at(k.scales, (k.rows,), getattr(torch, spec.row_scale)) if spec.row_scale else None
    )
    quantized = spec.out_format
    elements = out_dtype if quantized is None else quantized.element.dtype
    out = tensor_at(k.out, (k.rows, k.columns), elements, (k.out_pitch, 1))
    interleaved = spec.sides == 2 and k.glu_columns == 2 * k.columns
    glu = Glu(spec.activation, k.glu_block if interleaved else 0, k.limit, k.alpha, k.offset)
    shape = k.rows, spec.sides * k.columns
    assert k.tail_end in (0, k.rows)
    tail = slice(int(ends[-1]), 0 if k.tail_end else None)  # of what is not written
    if spec.kind == "store":
        out.copy_(definitions.grouped_mm(x, w, ends, bias, scales, False, x_scale, w_scale))
        out[tail] = math.nan
    elif spec.kind in FORWARD:
        preact, act = definitions.grouped_glu(x, w, ends, scales, glu, bias, True, x_scale, w_scale)
        if quantized is not None:
            act, scale, *_ = quantize(act, quantized)
            scale[tail] = math.nan
            row_scales = tensor_at(k.out_scales, scale.t().shape, torch.float32)
            row_scales.copy_(scale.t())
        preact[tail] = act[tail] = math.nan
        out.copy_(act)
        if spec.quantize_preact:
            assert not spec.save_preact
            data, scale, *_ = quantize(preact, SAVED_INPUT)
            scale[tail] = math.nan
            tensor_at(k.preact_out, shape, data.dtype).copy_(data)
            tensor_at(k.preact_scales, scale.t().shape, torch.float32).copy_(scale.t())
        if spec.save_preact:
            tensor_at(k.preact_out, shape, value_dtype, (k.preact_out_pitch, 1)).copy_(preact)
    else:
        preact = tensor_at(k.preact, shape, value_dtype, (k.preact_pitch, 1))
        found = definitions.grouped_dglu(x, [one.t() for one in w], ends, preact, scales, glu)
        for made in found[: 2 if scales is None else 3]:
            made[tail] = math.nan
        tensor_at(k.preact_out, shape, value_dtype, (k.preact_out_pitch, 1)).copy_(found[0])
        out.copy_(found[1])
        assert bool(k.scales) == bool(k.rows and len(found[2]))
        if scales is None:
            return
        across = -(-k.columns // spec.tile.n)
        partials = tensor_at(k.row_sums, (across, k.rows), torch.float32)
        partials.zero_()[0].copy_(found[2])


def scales_of(spec: Spec, k: SimpleNamespace) -> tuple[Tensor | None, Tensor | None]:
    """The scales of FP8 operands, as the definitions take them."""
    if not spec.is_fp8:
        return None, None
    rows, reduced = (k.rows, k.depth) if spec.by_rows else (k.columns, k.rows)
    blocks = -(-reduced // 128)
    a = tensor_at(k.a_scales, (rows, blocks), torch.float32, (k.a_scale_pitch, k.a_scale_block))
    if not spec.by_rows and spec.b_scale_layout == "blocks":
        assert k.b_scale_group == k.b_scale_pitch == 0
        strides = k.b_scale_block, 0
        return a.t(), tensor_at(k.b_scales, (blocks, k.depth), torch.float32, strides)
    if not spec.by_rows:
        assert k.b_scale_pitch == 1
        assert k.b_scales % 16 == k.b_scale_block % 4 == 0
        strides = k.b_scale_block, 1
        return a.t(), tensor_at(k.b_scales, (blocks, k.depth), torch.float32, strides)
    features = k.columns * (spec.sides if spec.kind in FORWARD else 1)
    strides = k.b_scale_group, k.b_scale_pitch, k.b_scale_block
    shape = k.groups, -(-features // 128), blocks
    return a, tensor_at(k.b_scales, shape, torch.float32, strides)


def load_kernel(path, what, _):
    """A function that does what the kernel does."""
    if path == "sm90.gemm.GroupedGemm":
        return lambda *arguments: run_product(*what, *arguments)
    (name,) = what

    def vector_kernel(source: int, target: int, size: int, rows: int, _: int) -> None:
        if path == "grouped.vectors.GroupEnds":
            sizes = tensor_at(source, (size,), getattr(torch, name))
            ends = sizes.clamp(min=0).cumsum(0).clamp(max=rows)
            tensor_at(target, (size,), torch.int32).copy_(ends)
        else:
            sums = tensor_at(source, (size, rows), torch.float32).sum(0)
            tensor_at(target, (rows,), getattr(torch, name)).copy_(sums)

    return vector_kernel


def pointer_table(pointers: tuple[int, ...], _: torch.device) -> Tensor:
    """A table that must live until the launch: nothing else keeps that of a captured graph."""
    table = torch.tensor(pointers)
    LIVING.add(table.data_ptr())
    weakref.finalize(table, LIVING.discard, table.data_ptr())
    return table


LIVING: set[int] = set()
"""Addresses of tables."""


@contextmanager
def sm90_on_cpu() -> Iterator[list[Spec]]:
    """Let grouped products of CPU tensors be those of SM90; gives the products that were loaded."""
    loaded: list[Spec] = []

    def load(path, what, gpu):
        loaded.extend([spec for spec in what if isinstance(spec, Spec)])
        return load_kernel(path, what, gpu)

    with pytest.MonkeyPatch.context() as patch:
        load_kernels(patch, load)
        take_cpu_tensors(patch)
        try:
            yield loaded
        finally:
            forget_launches()


@contextmanager
def ops_only() -> Iterator[None]:
    """Run all plans by their ops, none by the autograd function that has no contexts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_fast_path, "is_intercepted", lambda: True)
        yield


def load_kernels(patch: pytest.MonkeyPatch, load: Callable[..., Any]) -> None:
    """Let launches get their kernels from ``load``, of a path, constants and an architecture."""
    for module in (gemm_launch, runtime_launch):
        patch.setattr(module, "load_kernel", load)
    patch.setattr(runtime_launch, "architecture", lambda _: "sm_90a")


def take_cpu_tensors(patch: pytest.MonkeyPatch) -> None:
    """Let library ops run, of CPU tensors, what they run on SM90, if that is products."""
    for module in (gemm_launch, grouped_products):
        patch.setattr(module, "multiprocessors", lambda _: 132)
    patch.setattr(gemm_launch, "zeroed_counter", lambda *_: 0)
    patch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    patch.setattr(operands, "pointer_table", pointer_table)
    for module in (checked_products, grouped_products):
        patch.setattr(module, "supports", supports)
    patch.setattr(fp8_fast_path, "launch_quantize", launch_quantize)
    patch.setattr(fp8_fast_path, "launch_glu_backward", launch_glu_backward)
    patch.setattr(library, "is_direct", lambda x: not torch.compiler.is_compiling())
    for module in (gpu, moe.cuda):
        patch.setattr(module, "capability", lambda _: (0, 0))  # of all other kernels


def supports(_: torch.device, dtype: torch.dtype, *features: int) -> bool:
    """Whether the kernels take matrices."""
    return operands.limits.supports_products(90, operands.DTYPE_NAMES[dtype], *features)


def launch_quantize(
    source: RowsToQuantize, fmt: NumberFormat, *, rowwise: bool, columnwise: bool
) -> KMajorOperands:
    """`k_major.launch_quantize`, by the definition."""
    pieces = k_major.definition(source, fmt, rowwise, columnwise)
    operands, addresses = k_major.packed_outputs(source, fmt, rowwise, columnwise)
    store_at(addresses, pieces)
    return operands


def launch_glu_backward(inputs: GluBackwardInputs, options: GluBackwardOptions) -> GluGradients:
    """`glu_backward.launch_glu_backward`, by the definition."""
    _, fmt, act_format, activation, rowwise, columnwise, values = options
    made = GluBackwardPieces(*glu_backward_definition(inputs, *options))
    rows = RowsToQuantize(inputs.preact, inputs.ends)
    operands, addresses = k_major.packed_outputs(rows, fmt, rowwise, columnwise)
    store_at(addresses, made[:5])
    act = None
    if activation:
        rows = RowsToQuantize(inputs.dy, inputs.ends)
        (_, act), addresses = k_major.packed_outputs(rows, act_format, False, True)
        store_at(addresses, (*made[:2], made.act, made.act_scale, made.ends))
    return GluGradients(operands, made.dscales, made.dpreact if values else None, act)


def store_at(addresses: Sequence[int], pieces: Sequence[Tensor]) -> None:
    """Write tensors to addresses, those that are not 0."""
    for address, piece in zip(addresses, pieces, strict=True):
        if address:
            tensor_at(address, tuple(piece.shape), piece.dtype).copy_(piece)


def forget_launches() -> None:
    """Drop the launches that were made of kernels that are none."""
    grouped_products.cached_products.cache_clear()
    sm90_in_tile.launches_of.cache_clear()


def is_direct(y: Tensor) -> bool:
    """Whether a plan of one op gave ``y`` by the autograd function that has no contexts."""
    return type(y.grad_fn).__name__ == "_FastPathFunctionBackward"
