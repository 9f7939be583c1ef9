"""The SM90 kernels as ``torch.library`` ops: schemas, fakes, and the CUDA implementations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.kernels import grouped
from fusible.kernels.runtime import flops
from fusible.kernels.runtime.library import define
from fusible.kernels.runtime.workspaces import pointer_table
from fusible.kernels.sm90 import limits, tiles
from fusible.kernels.sm90.checks import (
    DTYPE_NAMES,
    Matrices,
    check_bias,
    check_ends,
    check_glu,
    check_matrix,
    check_product,
    check_rows,
    matrices_of,
)
from fusible.kernels.sm90.launch import (
    launch_group_ends,
    launch_of,
    launch_tile_sums,
)
from fusible.kernels.sm90.spec import Spec, Tile, block_columns


@functools.cache
def spec_of(
    kind: str,
    tile: Tile,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    major: str,
    table: bool,
    bias: bool = False,
    scale: torch.dtype | None = None,
    activation: str = "",
    interleave: int = 0,
    flag: bool = False,
) -> Spec:
    """The kernel for operands of these kinds; ``flag``: glu keeps, wgrad accumulates."""
    paired, stripe = False, 0
    if activation:
        # Gate and linear columns meet in a tile as two boxes far apart, or alternate in stripes.
        width = tile.n // 2 if kind == "glu" else block_columns(kind, tile, "bfloat16")
        paired = interleave == 0 or interleave % width == 0
        stripe = width if paired else interleave
    return Spec(
        kind,
        tile,
        dtype=DTYPE_NAMES[dtype],
        weight_major=major,
        table=table,
        bias=bias,
        scale=DTYPE_NAMES[scale] if scale else "",
        activation=activation,
        stripe=stripe,
        paired=paired,
        keep=kind == "glu" and flag,
        out_dtype=DTYPE_NAMES[out_dtype],
        accumulate=kind == "wgrad" and flag,
    )


def _tile(kind: str, rows: int, groups: int, *output: int) -> Tile:
    return tiles.choose(kind, tiles.has_many_rows(rows, groups), *output)


def glu_layout(interleave: int, columns: int) -> tuple[int, int]:
    """Distance from a gate column to its linear column, and where gate columns end."""
    return (interleave, 2 * columns) if interleave else (columns, columns)


def _multiply(
    kind: str,
    tile: Tile,
    x: Tensor,
    pitch: int,
    weights: Matrices,
    ends: Tensor,
    out: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    glu: tuple[str, int, bool] = ("", 0, False),
    constants: tuple[float, float, float] = (0.0, 0.0, 0.0),
    preact: tuple[int, int] = (0, 0),
    d_preact: tuple[int, int] = (0, 0),
    partials: int = 0,
) -> None:
    """Launch a product of grouped rows and weights.

    ``glu``: activation, interleave, and whether the pre-activation is kept; pre-activations are
    given as address and pitch.
    """
    address, w_pitch, group_pitch, major, _, depth, groups, pointers = weights
    dtype, device = x.dtype, x.device
    table = pointer_table(pointers, device).data_ptr() if pointers else 0
    scale = None if scales is None else scales.dtype
    rows, columns = out.shape
    start = launch_of(
        spec_of(kind, tile, dtype, dtype, major, table != 0, bias is not None, scale, *glu),
        device,
        columns,
        depth,
        groups,
        pitch,
        w_pitch,
        group_pitch,
        columns,
        preact[1],
        d_preact[1],
        glu_layout(glu[1], columns) if glu[0] else (1, 0),
        constants,
    )
    start(
        rows,
        a=x.data_ptr(),
        b=address,
        out=out.data_ptr(),
        ends=ends.data_ptr(),
        preact=preact[0],
        d_preact=d_preact[0],
        table=table,
        bias=0 if bias is None else bias.data_ptr(),
        scales=0 if scales is None else scales.data_ptr(),
        partials=partials,
    )


def group_ends(split_sizes: Tensor, rows: int) -> Tensor:
    """See `fusible.kernels.sm90.group_ends`."""
    if split_sizes.dtype not in (torch.int64, torch.int32) or split_sizes.ndim != 1:
        raise ValueError(
            "split_sizes must be an int64 or int32 tensor of 1 dimension, got "
            f"{split_sizes.dtype} of shape {tuple(split_sizes.shape)}"
        )
    ends = torch.empty(split_sizes.shape, dtype=torch.int32, device=split_sizes.device)
    launch_group_ends(split_sizes.contiguous(), ends, rows)
    return ends


def grouped_gemm(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `fusible.kernels.sm90.grouped_gemm`."""
    rows, depth, pitch = check_matrix("x", x)
    weights = matrices_of("w", w, x.device, transpose_w)
    check_product("x", x, depth, w[0], weights)
    check_ends(ends, weights.groups, x.device)
    if bias is None:
        row_scale = None  # it multiplies the bias only
    else:
        check_bias(bias, weights.groups, weights.rows, x)
        if row_scale is not None:
            check_rows("row_scale", row_scale, rows, x.device)
    if out is None:
        out = x.new_empty(rows, weights.rows)
    elif (
        out.shape != (rows, weights.rows)
        or not out.is_contiguous()
        or out.dtype != x.dtype
        or out.device != x.device
    ):
        raise ValueError(
            f"out must be a contiguous {x.dtype} tensor of shape {(rows, weights.rows)} on "
            f"{x.device}, got {out.dtype} of shape {tuple(out.shape)} with strides "
            f"{out.stride()} on {out.device}"
        )
    if rows:
        tile = tile or _tile("store", rows, weights.groups, weights.rows)
        _multiply("store", tile, x, pitch, weights, ends, out, bias, row_scale)
    return out


def grouped_gemm_(
    out: Tensor,
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
) -> None:
    """`grouped_gemm` into ``out``."""
    check_matrix("out", out)
    grouped_gemm(x, w, ends, bias, row_scale, transpose_w, out=out)


def grouped_gemm_glu(
    x: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None,
    scales: Tensor,
    activation: str,
    interleave: int,
    limit: float,
    alpha: float,
    offset: float,
    store_preact: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fusible.kernels.sm90.grouped_gemm_glu`."""
    rows, depth, pitch = check_matrix("x", x)
    weights = matrices_of("w", w, x.device, transpose=False)
    columns = weights.rows // 2
    check_product("x", x, depth, w[0], weights)
    if columns % limits.MULTIPLE_OF:
        raise ValueError(
            f"w must have as many gate as linear rows, a multiple of {limits.MULTIPLE_OF} each, "
            f"got {weights.rows} together"
        )
    check_glu(activation, interleave, columns)
    check_ends(ends, weights.groups, x.device)
    check_rows("scales", scales, rows, x.device)
    if bias is not None:
        check_bias(bias, weights.groups, weights.rows, x)
    preact = x.new_empty(rows if store_preact else 0, weights.rows)
    out = x.new_empty(rows, columns)
    if rows:
        wide = tiles.takes_wide(weights.major, interleave, bias is not None)
        tile = tile or _tile("glu", rows, weights.groups, columns, 0, wide)
        _multiply(
            "glu",
            tile,
            x,
            pitch,
            weights,
            ends,
            out,
            bias,
            scales,
            (activation, interleave, store_preact),
            (limit, alpha, offset),
            d_preact=((preact if store_preact else out).data_ptr(), weights.rows),
        )
    return preact, out


def grouped_gemm_dglu(
    dy: Tensor,
    w: Sequence[Tensor],
    ends: Tensor,
    preact: Tensor,
    scales: Tensor,
    activation: str,
    interleave: int,
    limit: float,
    alpha: float,
    offset: float,
    tile: Tile | None = None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fusible.kernels.sm90.grouped_gemm_dglu`."""
    rows, depth, pitch = check_matrix("dy", dy)
    device = dy.device
    weights = matrices_of("w", w, device, transpose=True)
    columns = weights.rows
    check_product("dy", dy, depth, w[0], weights)
    *_, preact_pitch = check_matrix("preact", preact)
    _check_preactivation(preact, (rows, 2 * columns), dy)
    check_glu(activation, interleave, columns)
    check_ends(ends, weights.groups, device)
    check_rows("scales", scales, rows, device)
    # A block of pre-activations is read once, by the warps that then write its gradient.
    d_preact = preact if overwrite else dy.new_empty(rows, 2 * columns)
    act = dy.new_empty(rows, columns)
    if rows == 0:
        return d_preact, act, torch.empty_like(scales)
    tile = tile or _tile("dglu", rows, weights.groups, columns)
    across = -(-columns // tile.n)
    partials = dy.new_empty(across * rows, dtype=torch.float32)
    _multiply(
        "dglu",
        tile,
        dy,
        pitch,
        weights,
        ends,
        act,
        None,
        scales,
        (activation, interleave, False),
        (limit, alpha, offset),
        (preact.data_ptr(), preact_pitch),
        (d_preact.data_ptr(), preact_pitch if overwrite else 2 * columns),
        partials.data_ptr(),
    )
    return d_preact, act, sum_up(partials, rows, scales.dtype)


def _check_preactivation(preact: Tensor, shape: tuple[int, int], dy: Tensor) -> None:
    if preact.shape != shape or preact.dtype != dy.dtype or preact.device != dy.device:
        raise ValueError(
            f"preact must be a {dy.dtype} tensor of shape {shape} on {dy.device}, "
            f"got {preact.dtype} of shape {tuple(preact.shape)} on {preact.device}"
        )


def sum_up(partials: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The scales' gradients in ``dtype`` from dglu's sums over each tile of columns.

    A tile is summed in registers, and tiles are added in order: always the same bits.
    """
    if partials.shape[0] == rows:
        return cast(partials, dtype)
    sums = partials.new_empty(rows, dtype=dtype)
    launch_tile_sums(partials, sums)
    return sums


def grouped_wgrad(dy: Tensor, x: Tensor, ends: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """See `fusible.kernels.sm90.grouped_wgrad`."""
    shape = (ends.shape[0], dy.shape[1], x.shape[1])
    out = x.new_empty(shape, dtype=out_dtype or x.dtype)
    grouped_wgrad_([out], dy, x, ends, accumulate=False)
    return out


def grouped_wgrad_(
    out: Sequence[Tensor],
    dy: Tensor,
    x: Tensor,
    ends: Tensor,
    accumulate: bool,
    tile: Tile | None = None,
) -> None:
    """See `fusible.kernels.sm90.grouped_wgrad_`."""
    rows, columns, dy_pitch = check_matrix("dy", dy)
    x_rows, depth, x_pitch = check_matrix("x", x)
    device = x.device
    if dy.dtype != x.dtype or rows != x_rows or dy.device != device:
        raise ValueError(
            f"dy and x must share dtype, rows and device, got {dy.dtype} of {tuple(dy.shape)} on "
            f"{dy.device} and {x.dtype} of {tuple(x.shape)} on {device}"
        )
    grads = matrices_of("out", out, device, transpose=False)
    _check_gradients(out[0], grads, (columns, depth), x.dtype)
    check_ends(ends, grads.groups, device)
    if rows == 0:
        if not accumulate:
            for one in out:
                one.zero_()
        return
    tile = tile or _tile("wgrad", rows, grads.groups, depth, columns)
    table = pointer_table(grads.pointers, device).data_ptr() if grads.pointers else 0
    start = launch_of(
        spec_of("wgrad", tile, x.dtype, out[0].dtype, "k", table != 0, flag=accumulate),
        device,
        columns,
        depth,
        grads.groups,
        dy_pitch,
        x_pitch,
        grads.group_pitch,
        grads.pitch,
    )
    start(
        rows,
        a=dy.data_ptr(),
        b=x.data_ptr(),
        out=grads.address,
        ends=ends.data_ptr(),
        table=table,
    )


def _check_gradients(
    out: Tensor, grads: Matrices, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    if out.dtype not in (dtype, torch.float32):
        raise ValueError(f"out must be {dtype} or FP32, got {out.dtype}")
    if (grads.rows, grads.depth) != shape or grads.major != "k":
        raise ValueError(
            f"out must hold matrices of shape {shape}, contiguous in the last dimension, got "
            f"{tuple(out.shape)} with strides {out.stride()}"
        )


def _nothing(*_: object) -> None:
    """The fake of an op that only writes to what it is given."""


def _fake_gemm(x: Tensor, w: list[Tensor], *rest: Any) -> Tensor:
    *_, transpose_w = rest
    return x.new_empty(x.shape[0], w[0].shape[-1 if transpose_w else -2])


def _fake_glu(x: Tensor, w: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    *_, store_preact = rest
    rows, features = x.shape[0], w[0].shape[-2]
    return x.new_empty(rows if store_preact else 0, features), x.new_empty(rows, features // 2)


def _fake_dglu(
    dy: Tensor, w: list[Tensor], ends: Tensor, preact: Tensor, scales: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    rows, features = dy.shape[0], w[0].shape[-1]
    return (
        dy.new_empty(rows, 2 * features),
        dy.new_empty(rows, features),
        torch.empty_like(scales),
    )


def _glu_flops(x: Tensor, w: list[Tensor], *_: object) -> int:
    return flops.product(x, w, False)


def _dglu_flops(dy: Tensor, w: list[Tensor], *_: object) -> int:
    return flops.product(dy, w, True)


def _fake_wgrad(dy: Tensor, x: Tensor, ends: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return x.new_empty((ends.shape[0], dy.shape[1], x.shape[1]), dtype=out_dtype or x.dtype)


define(
    "sm90_group_ends(Tensor split_sizes, SymInt rows) -> Tensor",
    grouped.group_ends_fake,
    cuda=group_ends,
)
define(
    "sm90_grouped_gemm(Tensor x, Tensor[] w, Tensor ends, Tensor? bias, Tensor? row_scale, "
    "bool transpose_w) -> Tensor",
    _fake_gemm,
    cuda=grouped_gemm,
    flops=flops.product,
)
define(
    "sm90_grouped_gemm_(Tensor(a!) out, Tensor x, Tensor[] w, Tensor ends, Tensor? bias, "
    "Tensor? row_scale, bool transpose_w) -> ()",
    _nothing,
    cuda=grouped_gemm_,
    flops=flops.product_into,
)
define(
    "sm90_grouped_gemm_glu(Tensor x, Tensor[] w, Tensor ends, Tensor? bias, Tensor scales, "
    "str activation, int interleave, float limit, float alpha, float offset, bool store_preact) "
    "-> (Tensor, Tensor)",
    _fake_glu,
    cuda=grouped_gemm_glu,
    flops=_glu_flops,
)
define(
    "sm90_grouped_gemm_dglu(Tensor dy, Tensor[] w, Tensor ends, Tensor preact, Tensor scales, "
    "str activation, int interleave, float limit, float alpha, float offset) "
    "-> (Tensor, Tensor, Tensor)",
    _fake_dglu,
    cuda=grouped_gemm_dglu,
    flops=_dglu_flops,
)
define(
    "sm90_grouped_wgrad(Tensor dy, Tensor x, Tensor ends, ScalarType? out_dtype) -> Tensor",
    _fake_wgrad,
    cuda=grouped_wgrad,
    flops=flops.wgrad,
)
define(
    "sm90_grouped_wgrad_(Tensor(a!)[] out, Tensor dy, Tensor x, Tensor ends, bool accumulate) "
    "-> ()",
    _nothing,
    cuda=grouped_wgrad_,
    flops=flops.wgrad_into,
)
