"""The SM90 kernels as ``torch.library`` ops: schemas, fakes, checks, and the CUDA implementations.

Every check is a sentence that names the argument, what it must be, and what it is.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.kernels.sm90 import limits, tiles
from fusible.kernels.sm90.launch import launch, pointer_table
from fusible.kernels.sm90.spec import Spec, Tile, block_columns

_LIBRARY = torch.library.Library("fusible", "FRAGMENT")
_LIBRARY.define(
    "sm90_grouped_gemm(Tensor x, Tensor[] w, Tensor ends, Tensor? bias, Tensor? row_scale, "
    "bool transpose_w) -> Tensor"
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

_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}


def _require(holds: bool, sentence: str, *values) -> None:
    if not holds:
        raise ValueError(sentence.format(*values))


def _check_matrix(name: str, x: Tensor, ndim: int = 2) -> None:
    """Device, dtype, and a layout that TMA can read."""
    _require(x.ndim == ndim, "{} must have {} dimensions, got {}", name, ndim, x.ndim)
    _require(x.is_cuda, "{} must be on a CUDA device, got {}", name, x.device)
    _require(_NAMES.get(x.dtype) in limits.DTYPES, "{} must be BF16 or FP16, got {}", name, x.dtype)
    _require(
        x.shape[-1] % limits.MULTIPLE_OF == 0,
        "the last dimension of {} must be a multiple of 8, got {}",
        name,
        x.shape[-1],
    )
    _require(
        has_matrix_layout(x),
        "{} must be contiguous in its last dimension with a row pitch that is a multiple of 16 "
        "bytes, and start at a multiple of 16 bytes, got strides {} at {:#x}; call .contiguous()",
        name,
        x.stride(),
        x.data_ptr(),
    )


def has_matrix_layout(x: Tensor) -> bool:
    """Whether a matrix's memory is laid out as the kernels read it."""
    rows, columns = x.shape[-2:]
    pitch, step = x.stride()[-2:]
    return (
        (step == 1 or columns == 1)
        and ((pitch >= columns and pitch % limits.MULTIPLE_OF == 0) or rows <= 1)
        and x.data_ptr() % limits.ALIGNMENT_BYTES == 0
    )


def _pitch(x: Tensor) -> int:
    return x.stride(-2) if x.shape[-2] > 1 else x.shape[-1]


def _check_rows(name: str, vector: Tensor, rows: int, dtypes: tuple[str, ...]) -> None:
    _require(
        vector.ndim == 1 and vector.shape[0] == rows,
        "{} must have one value for each of the {} rows, got shape {}",
        name,
        rows,
        tuple(vector.shape),
    )
    _require(vector.is_contiguous(), "{} must be contiguous; call .contiguous()", name)
    _require(
        _NAMES.get(vector.dtype) in dtypes, "{} must be a float tensor, got {}", name, vector.dtype
    )


def _check_ends(ends: Tensor, groups: int, device: torch.device) -> None:
    _require(
        ends.dtype == torch.int32 and ends.is_contiguous() and ends.shape == (groups,),
        "ends must be a contiguous int32 tensor with one value for each of the {} groups, got {} "
        "of shape {}",
        groups,
        ends.dtype,
        tuple(ends.shape),
    )
    _require(ends.device == device, "ends must be on {}, got {}", device, ends.device)


def _check_bias(bias: Tensor, groups: int, columns: int, x: Tensor) -> None:
    _require(
        bias.shape == (groups, columns) and bias.is_contiguous() and bias.dtype == x.dtype,
        "bias must be a contiguous {} tensor of shape {}, got {} of shape {}",
        x.dtype,
        (groups, columns),
        bias.dtype,
        tuple(bias.shape),
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


def _matrices(name: str, w: list[Tensor], like: Tensor, transpose: bool) -> _Matrices:
    """Read one [E, N, K] tensor or E of [N, K]; ``transpose`` exchanges N and K."""
    first = w[0]
    dense = len(w) == 1 and first.ndim == 3
    _require(
        dense or all(one.ndim == 2 for one in w),
        "{} must be one tensor [E, N, K] or E tensors [N, K], got {} of {} dimensions",
        name,
        len(w),
        first.ndim,
    )
    rows, depth = first.shape[-2:]
    row_step, depth_step = first.stride()[-2:]
    if transpose:
        rows, depth, row_step, depth_step = depth, rows, depth_step, row_step
    major = "k" if depth_step == 1 else "n"
    pitch = row_step if major == "k" else depth_step
    _require(
        (row_step == 1 or depth_step == 1)
        and pitch % limits.MULTIPLE_OF == 0
        and rows % limits.MULTIPLE_OF == 0
        and depth % limits.MULTIPLE_OF == 0,
        "{} must be contiguous in one of its last two dimensions, with a pitch and sizes that are "
        "multiples of 8, got shape {} with strides {}; call .contiguous()",
        name,
        tuple(first.shape),
        first.stride(),
    )
    _require(
        first.device == like.device, "{} must be on {}, got {}", name, like.device, first.device
    )
    pointers: tuple[int, ...] = ()
    if dense:
        address, groups, group_pitch = first.data_ptr(), first.shape[0], first.stride(0)
        aligned = address % limits.ALIGNMENT_BYTES == 0
        aligned = aligned and group_pitch % limits.MULTIPLE_OF == 0
    else:
        groups = len(w)
        shape, strides, dtype = first.shape, first.stride(), first.dtype
        _require(
            all(one.shape == shape and one.stride() == strides and one.dtype == dtype for one in w),
            "the {} tensors of {} must share shape, strides and dtype",
            groups,
            name,
        )
        pointers = tuple(one.data_ptr() for one in w)
        address = pointers[0]
        aligned = all(pointer % limits.ALIGNMENT_BYTES == 0 for pointer in pointers)
        # Matrices that were allocated side by side are a dense tensor to the kernel.
        step = pointers[1] - address if groups > 1 else rows * depth * first.element_size()
        group_pitch = step // first.element_size()
        if step > 0 and all(p == address + i * step for i, p in enumerate(pointers)):
            pointers = ()
    _require(aligned, "each matrix of {} must start at a multiple of 16 bytes", name)
    return _Matrices(address, pitch, group_pitch, major, rows, depth, groups, pointers)


def _table(matrices: _Matrices, device: torch.device) -> int:
    return pointer_table(matrices.pointers, device).data_ptr() if matrices.pointers else 0


def _glu_fit(interleave: int, kind: str, tile: Tile) -> dict[str, Any]:
    """How gate and linear columns meet in a tile: two boxes apart, or alternating in stripes."""
    width = tile.n // 2 if kind == "glu" else block_columns(kind, tile, "bfloat16")
    if interleave == 0 or interleave % width == 0:
        return {"paired": True, "stripe": width}
    return {"paired": False, "stripe": interleave}


def _check_glu(activation: str, interleave: int, columns: int) -> None:
    _require(
        activation in limits.ACTIVATIONS,
        "activation must be one of {}, got {!r}",
        ", ".join(limits.ACTIVATIONS),
        activation,
    )
    _require(
        interleave == 0
        or (
            interleave >= limits.MIN_INTERLEAVE
            and interleave & (interleave - 1) == 0
            and columns % interleave == 0
        ),
        "interleave must be 0 (halves) or a power of two, at least 8, that divides the {} "
        "activation columns, got {}",
        columns,
        interleave,
    )


def grouped_gemm(x, w, ends, bias, row_scale, transpose_w, tile: Tile | None = None) -> Tensor:
    """See `fusible.kernels.sm90.grouped_gemm`."""
    _check_matrix("x", x)
    weights = _matrices("w", w, x, transpose_w)
    rows = x.shape[0]
    _require(x.dtype == w[0].dtype, "w must have x's dtype {}, got {}", x.dtype, w[0].dtype)
    _require(
        x.shape[1] == weights.depth,
        "x and w must share the reduced dimension, got {} and {}",
        x.shape[1],
        weights.depth,
    )
    _check_ends(ends, weights.groups, x.device)
    scale = ""
    if bias is not None:
        _check_bias(bias, weights.groups, weights.rows, x)
        if row_scale is not None:
            _check_rows("row_scale", row_scale, rows, limits.SCALE_DTYPES)
            scale = _NAMES[row_scale.dtype]
    out = x.new_empty(rows, weights.rows)
    if rows == 0:
        return out
    tile = tile or tiles.choose("store", rows, weights.groups, weights.rows)
    name = _NAMES[x.dtype]
    launch(
        Spec(
            "store",
            tile,
            dtype=name,
            out_dtype=name,
            weight_major=weights.major,
            table=bool(weights.pointers),
            bias=bias is not None,
            scale=scale,
        ),
        x.device,
        a=x.data_ptr(),
        b=weights.address,
        out=out.data_ptr(),
        ends=ends.data_ptr(),
        table=_table(weights, x.device),
        bias=0 if bias is None else bias.data_ptr(),
        scales=row_scale.data_ptr() if scale else 0,
        total_rows=rows,
        columns=weights.rows,
        depth=weights.depth,
        groups=weights.groups,
        a_pitch=_pitch(x),
        b_pitch=weights.pitch,
        b_group_pitch=weights.group_pitch,
        out_pitch=weights.rows,
    )
    return out


def grouped_gemm_glu(
    x, w, ends, bias, scales, activation, interleave, limit, alpha, offset, store_preact,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `fusible.kernels.sm90.grouped_gemm_glu`."""
    _check_matrix("x", x)
    weights = _matrices("w", w, x, transpose=False)
    rows, columns = x.shape[0], weights.rows // 2
    _require(x.dtype == w[0].dtype, "w must have x's dtype {}, got {}", x.dtype, w[0].dtype)
    _require(
        x.shape[1] == weights.depth,
        "x and w must share the reduced dimension, got {} and {}",
        x.shape[1],
        weights.depth,
    )
    _require(
        weights.rows % (2 * limits.MULTIPLE_OF) == 0,
        "w must have an even number of rows for gate and linear, each a multiple of 8, got {}",
        weights.rows,
    )
    _check_glu(activation, interleave, columns)
    _check_ends(ends, weights.groups, x.device)
    _check_rows("scales", scales, rows, limits.SCALE_DTYPES)
    if bias is not None:
        _check_bias(bias, weights.groups, weights.rows, x)
    preact = x.new_empty(rows if store_preact else 0, weights.rows)
    out = x.new_empty(rows, columns)
    if rows == 0:
        return preact, out
    # 192 columns hold whole stripes of up to 32, and pay where there is more to write.
    wide = store_preact and weights.major == "k" and interleave <= 32
    wide = wide and bias is None
    tile = tile or tiles.choose("glu", rows, weights.groups, columns, wide)
    name = _NAMES[x.dtype]
    launch(
        Spec(
            "glu",
            tile,
            dtype=name,
            out_dtype=name,
            weight_major=weights.major,
            table=bool(weights.pointers),
            bias=bias is not None,
            scale=_NAMES[scales.dtype],
            activation=activation,
            **_glu_fit(interleave, "glu", tile),
            keep=store_preact,
        ),
        x.device,
        a=x.data_ptr(),
        b=weights.address,
        out=out.data_ptr(),
        d_preact=preact.data_ptr() if store_preact else out.data_ptr(),
        ends=ends.data_ptr(),
        table=_table(weights, x.device),
        bias=0 if bias is None else bias.data_ptr(),
        scales=scales.data_ptr(),
        total_rows=rows,
        columns=columns,
        depth=weights.depth,
        groups=weights.groups,
        a_pitch=_pitch(x),
        b_pitch=weights.pitch,
        b_group_pitch=weights.group_pitch,
        out_pitch=columns,
        d_preact_pitch=weights.rows,
        **_glu_layout(interleave, columns),
        constants=(limit, alpha, offset),
    )
    return preact, out


def _glu_layout(interleave: int, columns: int) -> dict[str, int]:
    """Distance from a gate column to its linear column, and where gate columns end."""
    if interleave == 0:
        return {"glu_block": columns, "glu_columns": columns}
    return {"glu_block": interleave, "glu_columns": 2 * columns}


def grouped_gemm_dglu(
    dy, w, ends, preact, scales, activation, interleave, limit, alpha, offset,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `fusible.kernels.sm90.grouped_gemm_dglu`."""
    _check_matrix("dy", dy)
    _check_matrix("preact", preact)
    weights = _matrices("w", w, dy, transpose=True)
    rows, columns = dy.shape[0], weights.rows
    _require(
        dy.dtype == w[0].dtype == preact.dtype,
        "dy, w and preact must share a dtype, got {}, {} and {}",
        dy.dtype,
        w[0].dtype,
        preact.dtype,
    )
    _require(
        dy.shape[1] == weights.depth,
        "dy and w must share the reduced dimension, got {} and {}",
        dy.shape[1],
        weights.depth,
    )
    _require(
        preact.shape == (rows, 2 * columns),
        "preact must have shape {}, got {}",
        (rows, 2 * columns),
        tuple(preact.shape),
    )
    _check_glu(activation, interleave, columns)
    _check_ends(ends, weights.groups, dy.device)
    _check_rows("scales", scales, rows, limits.SCALE_DTYPES)
    d_preact, act = dy.new_empty(rows, 2 * columns), dy.new_empty(rows, columns)
    if rows == 0:
        return d_preact, act, torch.empty_like(scales)
    tile = tile or tiles.choose("dglu", rows, weights.groups, columns)
    partials = dy.new_empty(-(-columns // tile.n), rows, dtype=torch.float32)
    name = _NAMES[dy.dtype]
    launch(
        Spec(
            "dglu",
            tile,
            dtype=name,
            out_dtype=name,
            weight_major=weights.major,
            table=bool(weights.pointers),
            scale=_NAMES[scales.dtype],
            activation=activation,
            **_glu_fit(interleave, "dglu", tile),
        ),
        dy.device,
        a=dy.data_ptr(),
        b=weights.address,
        preact=preact.data_ptr(),
        out=act.data_ptr(),
        d_preact=d_preact.data_ptr(),
        ends=ends.data_ptr(),
        table=_table(weights, dy.device),
        scales=scales.data_ptr(),
        partials=partials.data_ptr(),
        total_rows=rows,
        columns=columns,
        depth=weights.depth,
        groups=weights.groups,
        a_pitch=_pitch(dy),
        b_pitch=weights.pitch,
        b_group_pitch=weights.group_pitch,
        preact_pitch=_pitch(preact),
        out_pitch=columns,
        d_preact_pitch=2 * columns,
        **_glu_layout(interleave, columns),
        constants=(limit, alpha, offset),
    )
    # One tile of columns sums in registers; tiles are added in order: always the same bits.
    d_scales = partials[0] if partials.shape[0] == 1 else partials.sum(0)
    return d_preact, act, d_scales.to(scales.dtype)


def grouped_wgrad(dy, x, ends, out_dtype) -> Tensor:
    """See `fusible.kernels.sm90.grouped_wgrad`."""
    shape = (ends.shape[0], dy.shape[1], x.shape[1])
    out = x.new_empty(shape, dtype=out_dtype or x.dtype)
    grouped_wgrad_([out], dy, x, ends, accumulate=False)
    return out


def grouped_wgrad_(out, dy, x, ends, accumulate, tile: Tile | None = None) -> None:
    """See `fusible.kernels.sm90.grouped_wgrad_`."""
    _check_matrix("dy", dy)
    _check_matrix("x", x)
    rows = x.shape[0]
    _require(
        dy.dtype == x.dtype and dy.shape[0] == rows,
        "dy and x must share dtype and rows, got {} of {} and {} of {}",
        dy.dtype,
        tuple(dy.shape),
        x.dtype,
        tuple(x.shape),
    )
    _require(
        out[0].dtype in (x.dtype, torch.float32),
        "out must be {} or FP32, got {}",
        x.dtype,
        out[0].dtype,
    )
    grads = _matrices("out", out, x, transpose=False)
    columns, depth = dy.shape[1], x.shape[1]
    _require(
        (grads.rows, grads.depth) == (columns, depth) and grads.major == "k",
        "out must hold matrices of shape {}, contiguous in the last dimension, got {}",
        (columns, depth),
        (grads.rows, grads.depth),
    )
    _check_ends(ends, grads.groups, x.device)
    if rows == 0:
        if not accumulate:
            for one in out:
                one.zero_()
        return
    tile = tile or tiles.choose("wgrad", rows, grads.groups, depth)
    launch(
        Spec(
            "wgrad",
            tile,
            dtype=_NAMES[x.dtype],
            out_dtype=_NAMES[out[0].dtype],
            table=bool(grads.pointers),
            accumulate=accumulate,
        ),
        x.device,
        a=dy.data_ptr(),
        b=x.data_ptr(),
        out=grads.address,
        ends=ends.data_ptr(),
        table=_table(grads, x.device),
        total_rows=rows,
        columns=columns,
        depth=depth,
        groups=grads.groups,
        a_pitch=_pitch(dy),
        b_pitch=_pitch(x),
        b_group_pitch=grads.group_pitch,
        out_pitch=grads.pitch,
    )


def _features(w: list[Tensor], transpose: bool) -> int:
    return w[0].shape[-1 if transpose else -2]


def _fake_gemm(x, w, ends, bias, row_scale, transpose_w):
    return x.new_empty(x.shape[0], _features(w, transpose_w))


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
    ("sm90_grouped_gemm", grouped_gemm, _fake_gemm),
    ("sm90_grouped_gemm_glu", grouped_gemm_glu, _fake_glu),
    ("sm90_grouped_gemm_dglu", grouped_gemm_dglu, _fake_dglu),
    ("sm90_grouped_wgrad", grouped_wgrad, _fake_wgrad),
    ("sm90_grouped_wgrad_", grouped_wgrad_, _fake_wgrad_),
):
    _LIBRARY.impl(_name, _implementation, "CUDA")
    torch.library.register_fake(f"fusible::{_name}", _fake, lib=_LIBRARY)
