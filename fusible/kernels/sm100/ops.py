"""The SM100 kernels as ``torch.library`` ops: checks, fakes, and the calls of cuDNN's front end.

Rows are in groups of whole 256 (``padding``). Operands are row-major and read in place, with scales
packed for the MMA (``recipes.layout``). Rows past the last group are not computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible import activations
from fusible.kernels import grouped
from fusible.kernels.runtime.library import define
from fusible.kernels.runtime.provider import provider
from fusible.kernels.runtime.workspaces import pointer_table
from fusible.kernels.sm100 import limits
from fusible.kernels.sm100.checks import (
    FP4,
    FP8,
    VECTOR,
    Rows,
    Weights,
    check_bias,
    check_columns,
    check_ends,
    check_layout,
    check_rows,
    check_vector,
    check_weights,
    require,
)
from fusible.kernels.sm100.launches import before_launch

logger = logging.getLogger(__name__)

_GLU = "str activation, float limit, float slope, float offset"
_PRODUCT = "Tensor? x_scales, Tensor[] w, Tensor[] w_scales, Tensor ends, Tensor? alpha"


def _define(schema: str, fake: Callable[..., Any], flops: Callable[..., int]) -> Callable[..., Any]:
    """Register what is decorated for every device: the provider's kernels know where they run."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        define(schema, fake, function, function, flops)
        return function

    return register


def _run(
    device: torch.device, wrapper: str, configuration: tuple[Any, ...], **arguments: Any
) -> Any:
    """Call the front end, which launches on the current stream of the current device.

    ``configuration`` is all that the kernel may be compiled for.
    """
    function = getattr(provider("sm100"), f"{wrapper}_wrapper_sm100")
    is_first = before_launch(device, *configuration)
    start = time.perf_counter()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        result = function(**arguments)
    if is_first:
        seconds = time.perf_counter() - start
        logger.info("compiled and launched kernel sm100 %s in %.1f s", configuration[0], seconds)
    return result


# --- arguments that all kernels share -------------------------------------------------------------


def _element(dtype: torch.dtype) -> torch.dtype:
    return torch.float4_e2m1fn_x2 if dtype == FP4 else dtype


def _as_element(t: Tensor) -> Tensor:
    return t.view(torch.float4_e2m1fn_x2) if t.dtype == FP4 else t


@cache  # one a number of groups
def _ones(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, dtype=torch.float32, device=device)


def _ones_of(size: int, device: torch.device) -> Tensor:
    """FP32 ones, cached; those made while a CUDA graph is captured belong to the graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.ones(size, dtype=torch.float32, device=device)
    with torch.inference_mode(False):
        return _ones(size, device)


def _table(tensors: list[Tensor]) -> Tensor:
    """The addresses as int64 on the device of the tensors."""
    pointers = tuple([t.data_ptr() for t in tensors])
    device = tensors[0].device
    if device.type == "cpu":
        return torch.tensor(pointers, dtype=torch.int64, device=device)
    return pointer_table(pointers, device)


def _weight_arguments(
    w: list[Tensor], scales: list[Tensor], weights: Weights, n_major: bool
) -> dict[str, Any]:
    major = {"b_major": "n" if n_major else "k"}
    # Matrices that were allocated side by side are a dense tensor to the kernel.
    together = w[0] if weights.dense else None if scales else grouped.side_by_side(w)
    if together is not None:
        dense: dict[str, Any] = {"b_tensor": _as_element(together), **major}
        return {**dense, "sfb_tensor": scales[0]} if scales else dense
    tables: dict[str, Any] = {"b_ptrs": _table(w), "n": weights.n, **major}
    tables["b_dtype"] = _element(w[0].dtype)
    return {**tables, "sfb_ptrs": _table(scales)} if scales else tables


def _common(
    x: Tensor, x_scales: Tensor | None, ends: Tensor, alpha: Tensor | None, groups: int
) -> dict[str, Any]:
    """The operand A and the arguments common to every kernel over rows."""
    alpha = _ones_of(groups, x.device) if alpha is None else alpha
    common = {
        "a_tensor": _as_element(x),
        "padded_offsets": ends,
        "alpha_tensor": alpha,
        "acc_dtype": torch.float32,
        "m_aligned": limits.GROUP_ROWS,
        "use_dynamic_sched": True,
    }
    if x.dtype in VECTOR:
        common |= {"sfa_tensor": x_scales, "sf_vec_size": VECTOR[x.dtype]}
    return common


def _quantizing(x: Tensor) -> dict[str, Any]:
    """The arguments of a kernel with FP8 operands about its quantized outputs."""
    if x.dtype != FP8:
        return {"d_dtype": torch.bfloat16}
    one = _ones_of(1, x.device)
    return {"d_dtype": FP8, "norm_const_tensor": one, "discrete_col_sfd": True}


def _glu_arguments(
    activation: str, limit: float, slope: float, offset: float, dtype: torch.dtype, prefix: str = ""
) -> dict[str, Any]:
    require(
        activation in activations.SM100,
        f"activation must be one of {', '.join(activations.SM100)}",
        activation,
    )
    function = {"act_func": prefix + activations.SM100[activation]}
    if activation == "swiglu":
        return function
    require(
        dtype != torch.bfloat16 or (limit, slope) == limits.BF16_GEGLU,
        f"limit and alpha of clamped_qgeglu must be {limits.BF16_GEGLU} with BF16 operands",
        (limit, slope),
    )
    return {
        **function,
        "linear_offset": offset,
        "geglu_alpha": slope,
        "glu_clamp_max": limit,
        "glu_clamp_min": -limit,
    }


def _operands(
    x: Tensor,
    x_scales: Tensor | None,
    w: list[Tensor],
    w_scales: list[Tensor],
    ends: Tensor,
    alpha: Tensor | None,
    n_major: bool,
) -> tuple[Rows, Weights]:
    rows = check_rows("x", x, x_scales)
    weights = check_weights(w, w_scales, rows, x.device, n_major)
    check_ends(ends, weights.groups, rows.rows, x.device)
    if alpha is not None:
        check_vector("alpha", alpha, weights.groups, x.device)
    return rows, weights


def _numbers(x: Tensor) -> int:
    """How many ``x`` holds."""
    return x.numel() * (2 if x.dtype == FP4 else 1)


def _forward_flops(x: Tensor, x_scales: Tensor | None, w: list[Tensor], *_: Any) -> int:
    return 2 * _numbers(x) * w[0].shape[-2]


def _dgrad_flops(x: Tensor, x_scales: Tensor | None, w: list[Tensor], *_: Any) -> int:
    # FP4 weights are stored anew for it, the others as they were.
    return 2 * _numbers(x) * w[0].shape[-2 if x.dtype == FP4 else -1]


# --- what the kernels write of an activation, and of its gradient ---------------------------------


class _Activated(NamedTuple):
    """Elements and packed scales for both uses; empty where a kernel writes none."""

    d: Tensor
    scales: Tensor
    column: Tensor
    column_scales: Tensor
    amax: Tensor
    """FP32 ``[groups, parts]`` of BF16 elements, before they were rounded."""


def _activated(out: Any, x: Tensor, row: str, column: str) -> _Activated:
    """Outputs of a kernel, named ``row`` and ``column``, scales as the next kernel reads them."""
    none = _nothing(x)
    if x.dtype != FP8:
        amax = out["amax_tensor"]
        return _Activated(out[row], *none[:3], none[3] if amax is None else amax.flatten(1))
    scales = out["sfd_row_tensor"].reshape(-1)
    shape = _column_scales(*out[row].shape)
    return _Activated(out[row], scales, out[column], out["sfd_col_tensor"].reshape(shape), none[3])


def _nothing(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def empty() -> Tensor:
        return x.new_empty(0, dtype=torch.float32)

    return empty(), empty(), empty(), empty()


def _unwritten(x: Tensor, columns: int, groups: int, parts: int) -> _Activated:
    """The like for operand ``x``, not written; ``amax`` is that of no rows."""
    none, rows = _nothing(x), x.shape[0]
    if x.dtype != FP8:
        shape = (groups, parts) if x.dtype == FP4 else (0,)
        amax = x.new_full(shape, -torch.inf, dtype=torch.float32)
        d = x.new_empty(rows, columns, dtype=torch.bfloat16)
        return _Activated(d, *none[:3], amax)
    d, column = (x.new_empty(rows, columns, dtype=FP8) for _ in range(2))
    scales, column_scales = (
        x.new_empty(shape, dtype=torch.float8_e8m0fnu)
        for shape in (-(-rows // 128) * -(-columns // 128) * 512, _column_scales(rows, columns))
    )
    return _Activated(d, scales, column, column_scales, none[3])


def _column_scales(rows: int, columns: int) -> tuple[int, int]:
    return -(-columns // 128) * 128, rows // 32


# --- forward with a gated activation --------------------------------------------------------------


def _glu_outputs(x: Tensor, n: int, groups: int) -> tuple[Tensor, ...]:
    c = x.new_empty(x.shape[0], n, dtype=torch.bfloat16)
    return c, *_unwritten(x, n // 2, groups, parts=1)


def _glu_fake(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, w, _, ends, *_ = rest
    return _glu_outputs(x, w[0].shape[-2], ends.shape[0])


@_define(
    f"sm100_glu(Tensor x, {_PRODUCT}, Tensor? bias, Tensor prob, {_GLU}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _glu_fake,
    _forward_flops,
)
def glu(
    x: Tensor,
    x_scales: Tensor | None,
    w: list[Tensor],
    w_scales: list[Tensor],
    ends: Tensor,
    alpha: Tensor | None,
    bias: Tensor | None,
    prob: Tensor,
    activation: str,
    limit: float,
    slope: float,
    offset: float,
) -> tuple[Tensor, ...]:
    """See `fusible.kernels.sm100.glu`."""
    rows, weights = _operands(x, x_scales, w, w_scales, ends, alpha, n_major=False)
    check_bias(bias, weights, x.device)
    check_vector("prob", prob, rows.rows, x.device)
    arguments = _glu_arguments(activation, limit, slope, offset, x.dtype)
    if rows.rows == 0:
        return _glu_outputs(x, weights.n, weights.groups)
    if x.dtype == torch.bfloat16:
        arguments |= {"sfa_tensor": None, "generate_c": True}
    operands = _weight_arguments(w, w_scales, weights, n_major=False)
    dense = "b_tensor" in operands
    out = _run(
        x.device,
        "grouped_gemm_glu",
        ("glu", x.dtype, weights, dense, bias is not None, *arguments.values()),
        **_common(x, x_scales, ends, alpha, weights.groups),
        **operands,
        **_quantizing(x),
        **arguments,
        c_dtype=torch.bfloat16,
        bias_tensor=None if bias is None else bias.t(),
        prob_tensor=prob,
    )
    return out["c_tensor"], *_activated(out, x, "d_tensor", "d_col_tensor")


# --- backward of the activation, in the data gradient of the second linear ------------------------


def _dglu_outputs(x: Tensor, n: int, groups: int, bias: bool) -> tuple[Tensor, ...]:
    dprob = x.new_zeros(x.shape[0] + 1, dtype=torch.float32)
    dbias = x.new_zeros((groups if bias else 0, 2 * n), dtype=torch.bfloat16)
    return *_unwritten(x, 2 * n, groups, parts=2), dprob, dbias


def _dglu_fake(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, _, _, ends, _, c, _, bias, *_ = rest
    return _dglu_outputs(x, c.shape[1] // 2, ends.shape[0], bias)


@_define(
    f"sm100_dglu(Tensor x, {_PRODUCT}, Tensor c, Tensor prob, bool bias, {_GLU}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dglu_fake,
    _dgrad_flops,
)
def dglu(
    x: Tensor,
    x_scales: Tensor | None,
    w: list[Tensor],
    w_scales: list[Tensor],
    ends: Tensor,
    alpha: Tensor | None,
    c: Tensor,
    prob: Tensor,
    bias: bool,
    activation: str,
    limit: float,
    slope: float,
    offset: float,
) -> tuple[Tensor, ...]:
    """See `fusible.kernels.sm100.dglu`."""
    n_major = x.dtype != FP4
    rows, weights = _operands(x, x_scales, w, w_scales, ends, alpha, n_major)
    check_vector("prob", prob, rows.rows, x.device)
    _check_preactivation(c, (rows.rows, 2 * weights.n))
    arguments = _glu_arguments(activation, limit, slope, offset, x.dtype, "d")
    if rows.rows == 0:
        return _dglu_outputs(x, weights.n, weights.groups, bias)
    if x.dtype == torch.bfloat16:
        arguments["sfa_tensor"] = None
    # One value more, the gradient of rows in no group. The kernel adds to what it finds.
    dprob = x.new_zeros(rows.rows + 1, dtype=torch.float32)
    if x.dtype in VECTOR and not bias and torch.are_deterministic_algorithms_enabled():
        arguments["deterministic"] = True
    operands = _weight_arguments(w, w_scales, weights, n_major)
    out = _run(
        x.device,
        "grouped_gemm_dglu",
        ("dglu", x.dtype, weights, "b_tensor" in operands, bias, *arguments.values()),
        # The kernel multiplies by alpha twice.
        **_common(x, x_scales, ends, None if alpha is None else alpha.sqrt(), weights.groups),
        **operands,
        **_quantizing(x),
        **arguments,
        c_tensor=c,
        beta_tensor=_ones_of(weights.groups, x.device),
        prob_tensor=prob,
        dprob_tensor=dprob[:-1],
        generate_dbias=bias,
    )
    dbias = out["dbias_tensor"].flatten(1) if bias else c.new_empty(0, 2 * weights.n)
    return *_activated(out, x, "d_row_tensor", "d_col_tensor"), dprob, dbias


def _check_preactivation(c: Tensor, shape: tuple[int, int]) -> None:
    require(
        c.dtype == torch.bfloat16 and c.shape == shape,
        f"c must be BF16 of shape {shape}, the pre-activation",
        f"{c.dtype} of shape {tuple(c.shape)}",
    )
    check_layout("c", c)


# --- plain grouped product ------------------------------------------------------------------------


def _gemm_flops(x: Tensor, x_scales: Tensor | None, w: list[Tensor], *rest: Any) -> int:
    *_, transpose_w = rest
    return (_dgrad_flops if transpose_w else _forward_flops)(x, x_scales, w)


def _gemm_fake(x: Tensor, x_scales: Tensor | None, w: list[Tensor], *rest: Any) -> Tensor:
    *_, transpose_w = rest
    n = w[0].shape[-1 if transpose_w and x.dtype != FP4 else -2]
    return x.new_empty(x.shape[0] + 1, n, dtype=torch.bfloat16)


@_define(
    f"sm100_gemm(Tensor x, {_PRODUCT}, Tensor? bias, Tensor? row_scale, bool transpose_w) "
    "-> Tensor",
    _gemm_fake,
    _gemm_flops,
)
def gemm(
    x: Tensor,
    x_scales: Tensor | None,
    w: list[Tensor],
    w_scales: list[Tensor],
    ends: Tensor,
    alpha: Tensor | None,
    bias: Tensor | None,
    row_scale: Tensor | None,
    transpose_w: bool,
) -> Tensor:
    """See `fusible.kernels.sm100.gemm`."""
    n_major = transpose_w and x.dtype != FP4
    rows, weights = _operands(x, x_scales, w, w_scales, ends, alpha, n_major)
    check_bias(bias, weights, x.device)
    if row_scale is not None:
        require(bias is not None, "row_scale must come with the bias that it scales", "no bias")
        check_vector("row_scale", row_scale, rows.rows, x.device)
    out = x.new_empty(rows.rows + 1, weights.n, dtype=torch.bfloat16)
    out[-1].zero_()
    if rows.rows == 0:
        return out
    arguments = {
        **_common(x, x_scales, ends, alpha, weights.groups),
        **_weight_arguments(w, w_scales, weights, n_major),
        "bias_tensor": None if bias is None else bias.t(),
        "d_dtype": torch.bfloat16,
        "d_tensor": out[:-1],
    }
    scaled = row_scale is not None
    dense = "b_tensor" in arguments
    configuration = "gemm", x.dtype, weights, dense, bias is not None, scaled, n_major
    if x.dtype == torch.bfloat16:
        # This kernel has no form without prob, which multiplies the bias, or the product alone.
        prob = x.new_ones(rows.rows, dtype=torch.float32) if row_scale is None else row_scale
        _run(x.device, "grouped_gemm", configuration, **arguments, prob_tensor=prob)
    else:
        # The maximum per group that the kernel can find costs a fill and atomics.
        arguments |= {"prob_tensor": row_scale, "generate_amax": False}
        _run(x.device, "grouped_gemm_quant", configuration, **arguments)
    return out


# --- weight gradient ------------------------------------------------------------------------------

_WGRAD = (
    "Tensor dy, Tensor? dy_scales, Tensor x, Tensor? x_scales, Tensor ends, Tensor? dy_global, "
    "Tensor? x_global"
)


def _wgrad_flops(
    dy: Tensor, dy_scales: Tensor | None, x: Tensor, x_scales: Tensor | None, *_: Any
) -> int:
    # FP4 is transposed.
    return 2 * _numbers(dy) * x.shape[0 if x.dtype == FP4 else 1]


def _wgrad_into_flops(out: list[Tensor], *operands: Any) -> int:
    return _wgrad_flops(*operands)


def _wgrad_fake(
    dy: Tensor,
    dy_scales: Tensor | None,
    x: Tensor,
    x_scales: Tensor | None,
    ends: Tensor,
    *rest: Any,
) -> Tensor:
    *_, out_dtype = rest
    at = 0 if x.dtype == FP4 else 1
    return x.new_empty((ends.shape[0], dy.shape[at], x.shape[at]), dtype=out_dtype)


@_define(f"sm100_wgrad({_WGRAD}, ScalarType out_dtype) -> Tensor", _wgrad_fake, _wgrad_flops)
def wgrad(
    dy: Tensor,
    dy_scales: Tensor | None,
    x: Tensor,
    x_scales: Tensor | None,
    ends: Tensor,
    dy_global: Tensor | None,
    x_global: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `fusible.kernels.sm100.wgrad`."""
    out = _wgrad_fake(dy, dy_scales, x, x_scales, ends, dy_global, x_global, out_dtype)
    wgrad_([out], dy, dy_scales, x, x_scales, ends, dy_global, x_global, accumulate=False)
    return out


def _wgrad_fake_(*_: object) -> None:
    return None


@_define(
    f"sm100_wgrad_(Tensor(a!)[] out, {_WGRAD}, bool accumulate) -> ()",
    _wgrad_fake_,
    _wgrad_into_flops,
)
def wgrad_(
    out: list[Tensor],
    dy: Tensor,
    dy_scales: Tensor | None,
    x: Tensor,
    x_scales: Tensor | None,
    ends: Tensor,
    dy_global: Tensor | None,
    x_global: Tensor | None,
    accumulate: bool,
) -> None:
    """See `fusible.kernels.sm100.wgrad_`."""
    left, right = check_columns("dy", dy, dy_scales), check_columns("x", x, x_scales)
    require(
        (left.rows, left.dtype) == (right.rows, right.dtype),
        "dy and x must share rows and dtype",
        f"{left.rows} of {left.dtype} and {right.rows} of {right.dtype}",
    )
    groups = ends.shape[0]
    check_ends(ends, groups, left.rows, x.device)
    _check_grads(out, (left.depth, right.depth), groups)
    if left.rows == 0:
        # No rows, no valid strides for the kernel: nothing is added.
        for t in () if accumulate else out:
            t.zero_()
        return
    arguments = _wgrad_operands(dy, x, dy_global, x_global, groups)
    if x.dtype in VECTOR:
        arguments |= {"sf_vec_size": VECTOR[x.dtype], "descriptor_workspace": _workspace(out, x)}
    dense = len(out) == 1 and out[0].ndim == 3
    if dense:
        arguments |= {"wgrad_tensor": out[0]}
    else:
        arguments |= {"output_mode": "discrete", "wgrad_ptrs": _table(out)}
    features = left.depth, right.depth
    _run(
        x.device,
        "grouped_gemm_wgrad",
        ("wgrad", x.dtype, groups, *features, out[0].dtype, accumulate, dense),
        sfa_tensor=dy_scales,
        sfb_tensor=x_scales,
        offsets_tensor=ends,
        acc_dtype=torch.float32,
        wgrad_dtype=out[0].dtype,
        accumulate_on_output=accumulate,
        **arguments,
    )


def _wgrad_operands(
    dy: Tensor, x: Tensor, dy_global: Tensor | None, x_global: Tensor | None, groups: int
) -> dict[str, Any]:
    """The operands ``[N, rows]`` and ``[rows, K]``, with the factors of FP4's groups."""
    if x.dtype != FP4:
        return {"a_tensor": dy.t(), "b_tensor": x}
    factors = {"global_scale_a": dy_global, "global_scale_b": x_global}
    for name, factor in factors.items():
        check_vector(name, factor, groups, x.device)
    a, b = _as_element(dy), _as_element(x).t()
    return {"a_tensor": a, "b_tensor": b, "input_order": "tensor_ragged", **factors}


def _check_grads(out: list[Tensor], shape: tuple[int, int], groups: int) -> None:
    dense = len(out) == 1 and out[0].ndim == 3
    wanted = [(groups, *shape)] if dense else [shape] * groups
    require(
        [tuple(t.shape) for t in out] == wanted,
        f"out must be one tensor {(groups, *shape)} or {groups} of {shape}",
        [tuple(t.shape) for t in out],
    )
    for t in out:
        require(
            t.dtype in (torch.bfloat16, torch.float32) and t.dtype == out[0].dtype,
            "out must be BF16 or FP32 throughout",
            t.dtype,
        )
        check_layout("out", t)


def _workspace(out: list[Tensor], x: Tensor) -> Tensor:
    """Memory for TMA descriptors, one set per call: the default one would be shared by streams."""
    sets = 4 if len(out) == 1 and out[0].ndim == 3 else 5
    groups = out[0].shape[0] if sets == 4 else len(out)
    return torch.empty(128 * sets * groups, dtype=torch.uint8, device=x.device)
