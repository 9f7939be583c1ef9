"""The SM90 kernels as ``torch.library`` ops: schemas, fakes, checks, and the CUDA implementations.

Every check is a sentence that names the argument, what it must be, and what it is.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusible.formulas import cast
from fusible.kernels.sm90 import limits, tiles
from fusible.kernels.sm90.launch import (
    launch_group_ends,
    launch_tile_sums,
    pointer_table,
    prepared,
)
from fusible.kernels.sm90.spec import Spec, Tile, block_columns

_LIBRARY = torch.library.Library("fusible", "FRAGMENT")
_LIBRARY.define("sm90_group_ends(Tensor split_sizes, SymInt rows) -> Tensor")
_LIBRARY.define(
    "sm90_grouped_gemm(Tensor x, Tensor[] w, Tensor ends, Tensor? bias, Tensor? row_scale, "
    "bool transpose_w) -> Tensor"
)
_LIBRARY.define(
    "sm90_grouped_gemm_(Tensor(a!) out, Tensor x, Tensor[] w, Tensor ends, Tensor? bias, "
    "Tensor? row_scale, bool transpose_w) -> ()"
)
_LIBRARY.define(
    "sm90_grouped_gemm_glu(Tensor x, Tensor[] w, Tensor ends, Tensor? bias, Tensor scales, "
    "str activation, int interleave, float limit, float alpha, float offset, bool store_preact) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define(
    "sm90_grouped_gemm_dglu(Tensor dy, Tensor[] w, Tensor ends, Tensor preact, Tensor scales, "
    "str activation, int interleave, float limit, float alpha, float offset) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "sm90_grouped_wgrad(Tensor dy, Tensor x, Tensor ends, ScalarType? out_dtype) -> Tensor"
)
_LIBRARY.define(
    "sm90_grouped_wgrad_(Tensor(a!)[] out, Tensor dy, Tensor x, Tensor ends, bool accumulate) -> ()"
)

_INPUTS = (torch.bfloat16, torch.float16)
_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}


# A call's checks are part of its host time: each is one `if`, and its sentence is put together only
# to be raised.


def _check_matrix(name: str, x: Tensor) -> tuple[int, int, int]:
    """Rows, columns and row pitch of a matrix that TMA can read."""
    if x.ndim != 2:
        raise ValueError(f"{name} must have 2 dimensions, got {x.ndim}")
    if not x.is_cuda:
        raise ValueError(f"{name} must be on a CUDA device, got {x.device}")
    if x.dtype not in _INPUTS:
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


def is_traced() -> bool:
    """Whether tensors may stand for others: under ``torch.compile``, export and dispatch modes."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_transformed() -> bool:
    """Whether ``torch.func`` transforms what runs."""
    return torch._C._are_functorch_transforms_active()


def is_direct(x: Tensor) -> bool:
    """Whether nothing but an op's own function would run, which can then be called at once.

    PyTorch's dispatcher takes 8 us of host time for an op written in Python. It is needed where
    calls are traced, transformed, intercepted or recorded for a gradient.
    """
    return not (
        is_traced()
        or torch.is_grad_enabled()
        or is_transformed()
        or type(x) is not Tensor
        or not x.is_cuda
    )


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
    if _NAMES.get(dtype) not in limits.SCALE_DTYPES:
        raise ValueError(f"{name} must be a float tensor, got {dtype}")


def _check_rows(name: str, vector: Tensor, rows: int, device: torch.device) -> None:
    if vector.device != device:
        raise ValueError(f"{name} must be on {device}, got {vector.device}")
    check_scale(name, vector.dtype)
    if vector.shape != (rows,) or not vector.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous with one value for each of the {rows} rows, "
            f"got shape {tuple(vector.shape)} with strides {vector.stride()}"
        )


def _check_ends(ends: Tensor, groups: int, device: torch.device) -> None:
    if ends.dtype != torch.int32 or ends.shape != (groups,) or not ends.is_contiguous():
        raise ValueError(
            f"ends must be a contiguous int32 tensor with one value for each of the {groups} "
            f"groups, got {ends.dtype} of shape {tuple(ends.shape)}"
        )
    if ends.device != device:
        raise ValueError(f"ends must be on {device}, got {ends.device}")


def _check_bias(bias: Tensor, groups: int, columns: int, x: Tensor) -> None:
    if bias.shape != (groups, columns) or bias.dtype != x.dtype or not bias.is_contiguous():
        raise ValueError(
            f"bias must be a contiguous {x.dtype} tensor of shape {(groups, columns)}, "
            f"got {bias.dtype} of shape {tuple(bias.shape)}"
        )
    if bias.device != x.device:
        raise ValueError(f"bias must be on {x.device}, got {bias.device}")


def _check_product(name: str, x: Tensor, depth: int, w: Tensor, weights: "_Matrices") -> None:
    if w.dtype != x.dtype:
        raise ValueError(f"w must have {name}'s dtype {x.dtype}, got {w.dtype}")
    if depth != weights.depth:
        raise ValueError(
            f"{name} and w must share the reduced dimension, got {depth} and {weights.depth}"
        )


class _Matrices(NamedTuple):
    """E matrices [rows, depth], wherever they lie."""

    address: int
    pitch: int
    group_pitch: int
    major: str  # which dimension is contiguous: n (rows) or k (depth)
    rows: int
    depth: int
    groups: int
    pointers: tuple[int, ...]  # empty: the matrices are evenly spaced by group_pitch elements


def _matrices(name: str, w: Sequence[Tensor], device: torch.device, transpose: bool) -> _Matrices:
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
        return _Matrices(address, *layout(name, shape, strides, transpose), ())
    pointers = _pointers(name, w)
    # Matrices that were allocated side by side are a dense tensor to the kernel.
    groups, size = len(w), first.element_size()
    step = pointers[1] - address if groups > 1 else first.numel() * size
    evenly = step > 0 and pointers == tuple(range(address, address + groups * step, step))
    if evenly and step % (limits.MULTIPLE_OF * size) == 0:
        pointers = ()
    shape, strides = (groups, *shape), (step // size, *strides)
    return _Matrices(address, *layout(name, shape, strides, transpose, not pointers), pointers)


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
    """Fields of `_Matrices` from ``pitch`` to ``groups``; ``spaced`` if there is a group pitch."""
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


def _check_glu(activation: str, interleave: int, columns: int) -> None:
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
        dtype=_NAMES[dtype],
        weight_major=major,
        table=table,
        bias=bias,
        scale=_NAMES[scale] if scale else "",
        activation=activation,
        stripe=stripe,
        paired=paired,
        keep=kind == "glu" and flag,
        out_dtype=_NAMES[out_dtype],
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
    weights: _Matrices,
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
    """Start a product of grouped rows and weights.

    ``glu``: activation, interleave, and whether the pre-activation is kept; pre-activations are
    given as address and pitch.
    """
    address, w_pitch, group_pitch, major, _, depth, groups, pointers = weights
    dtype, device = x.dtype, x.device
    table = pointer_table(pointers, device).data_ptr() if pointers else 0
    scale = None if scales is None else scales.dtype
    rows, columns = out.shape
    start = prepared(
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
    x, w, ends, bias, row_scale, transpose_w, tile: Tile | None = None, out: Tensor | None = None
) -> Tensor:
    """See `fusible.kernels.sm90.grouped_gemm`."""
    rows, depth, pitch = _check_matrix("x", x)
    weights = _matrices("w", w, x.device, transpose_w)
    _check_product("x", x, depth, w[0], weights)
    _check_ends(ends, weights.groups, x.device)
    if bias is None:
        row_scale = None  # it multiplies the bias only
    else:
        _check_bias(bias, weights.groups, weights.rows, x)
        if row_scale is not None:
            _check_rows("row_scale", row_scale, rows, x.device)
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


def grouped_gemm_(out, x, w, ends, bias, row_scale, transpose_w) -> None:
    """`grouped_gemm` into ``out``."""
    _check_matrix("out", out)
    grouped_gemm(x, w, ends, bias, row_scale, transpose_w, out=out)


def grouped_gemm_glu(
    x, w, ends, bias, scales, activation, interleave, limit, alpha, offset, store_preact,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `fusible.kernels.sm90.grouped_gemm_glu`."""
    rows, depth, pitch = _check_matrix("x", x)
    weights = _matrices("w", w, x.device, transpose=False)
    columns = weights.rows // 2
    _check_product("x", x, depth, w[0], weights)
    if columns % limits.MULTIPLE_OF:
        raise ValueError(
            f"w must have as many gate as linear rows, a multiple of {limits.MULTIPLE_OF} each, "
            f"got {weights.rows} together"
        )
    _check_glu(activation, interleave, columns)
    _check_ends(ends, weights.groups, x.device)
    _check_rows("scales", scales, rows, x.device)
    if bias is not None:
        _check_bias(bias, weights.groups, weights.rows, x)
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
    dy, w, ends, preact, scales, activation, interleave, limit, alpha, offset,
    tile: Tile | None = None, overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `fusible.kernels.sm90.grouped_gemm_dglu`."""
    rows, depth, pitch = _check_matrix("dy", dy)
    device = dy.device
    weights = _matrices("w", w, device, transpose=True)
    columns = weights.rows
    _check_product("dy", dy, depth, w[0], weights)
    *preact_shape, preact_pitch = _check_matrix("preact", preact)
    if preact_shape != [rows, 2 * columns] or preact.dtype != dy.dtype or preact.device != device:
        raise ValueError(
            f"preact must be a {dy.dtype} tensor of shape {(rows, 2 * columns)} on {device}, "
            f"got {preact.dtype} of shape {tuple(preact.shape)} on {preact.device}"
        )
    _check_glu(activation, interleave, columns)
    _check_ends(ends, weights.groups, device)
    _check_rows("scales", scales, rows, device)
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


def sum_up(partials: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The scales' gradients in ``dtype`` from dglu's sums over each tile of columns.

    A tile is summed in registers, and tiles are added in order: always the same bits.
    """
    if partials.shape[0] == rows:
        return cast(partials, dtype)
    sums = partials.new_empty(rows, dtype=dtype)
    launch_tile_sums(partials, sums)
    return sums


def grouped_wgrad(dy, x, ends, out_dtype) -> Tensor:
    """See `fusible.kernels.sm90.grouped_wgrad`."""
    shape = (ends.shape[0], dy.shape[1], x.shape[1])
    out = x.new_empty(shape, dtype=out_dtype or x.dtype)
    grouped_wgrad_([out], dy, x, ends, accumulate=False)
    return out


def grouped_wgrad_(out, dy, x, ends, accumulate, tile: Tile | None = None) -> None:
    """See `fusible.kernels.sm90.grouped_wgrad_`."""
    rows, columns, dy_pitch = _check_matrix("dy", dy)
    x_rows, depth, x_pitch = _check_matrix("x", x)
    device = x.device
    if dy.dtype != x.dtype or rows != x_rows or dy.device != device:
        raise ValueError(
            f"dy and x must share dtype, rows and device, got {dy.dtype} of {tuple(dy.shape)} on "
            f"{dy.device} and {x.dtype} of {tuple(x.shape)} on {device}"
        )
    grads = _matrices("out", out, device, transpose=False)
    if out[0].dtype not in (x.dtype, torch.float32):
        raise ValueError(f"out must be {x.dtype} or FP32, got {out[0].dtype}")
    if (grads.rows, grads.depth) != (columns, depth) or grads.major != "k":
        raise ValueError(
            f"out must hold matrices of shape {(columns, depth)}, contiguous in the last "
            f"dimension, got {tuple(out[0].shape)} with strides {out[0].stride()}"
        )
    _check_ends(ends, grads.groups, device)
    if rows == 0:
        if not accumulate:
            for one in out:
                one.zero_()
        return
    tile = tile or _tile("wgrad", rows, grads.groups, depth, columns)
    table = pointer_table(grads.pointers, device).data_ptr() if grads.pointers else 0
    start = prepared(
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


def _features(w: list[Tensor], transpose: bool) -> int:
    return w[0].shape[-1 if transpose else -2]


def _fake_ends(split_sizes, rows):
    return split_sizes.new_empty(split_sizes.shape, dtype=torch.int32)


def _fake_gemm(x, w, ends, bias, row_scale, transpose_w):
    return x.new_empty(x.shape[0], _features(w, transpose_w))


def _fake_gemm_(out, x, w, ends, bias, row_scale, transpose_w):
    return None


def _fake_glu(x, w, ends, bias, scales, activation, interleave, limit, alpha, offset, store_preact):
    features = _features(w, transpose=False)
    preact = x.new_empty(x.shape[0] if store_preact else 0, features)
    return preact, x.new_empty(x.shape[0], features // 2)


def _fake_dglu(dy, w, ends, preact, scales, activation, interleave, limit, alpha, offset):
    features = _features(w, transpose=True)
    return (
        dy.new_empty(dy.shape[0], 2 * features),
        dy.new_empty(dy.shape[0], features),
        torch.empty_like(scales),
    )


def _fake_wgrad(dy, x, ends, out_dtype):
    return x.new_empty((ends.shape[0], dy.shape[1], x.shape[1]), dtype=out_dtype or x.dtype)


def _fake_wgrad_(out, dy, x, ends, accumulate):
    return None


for _name, _implementation, _fake in (
    ("sm90_group_ends", group_ends, _fake_ends),
    ("sm90_grouped_gemm", grouped_gemm, _fake_gemm),
    ("sm90_grouped_gemm_", grouped_gemm_, _fake_gemm_),
    ("sm90_grouped_gemm_glu", grouped_gemm_glu, _fake_glu),
    ("sm90_grouped_gemm_dglu", grouped_gemm_dglu, _fake_dglu),
    ("sm90_grouped_wgrad", grouped_wgrad, _fake_wgrad),
    ("sm90_grouped_wgrad_", grouped_wgrad_, _fake_wgrad_),
):
    _LIBRARY.impl(_name, _implementation, "CUDA")
    torch.library.register_fake(f"fusible::{_name}", _fake, lib=_LIBRARY)
