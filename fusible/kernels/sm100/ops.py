"""The SM100 kernels as ``torch.library`` ops: checks, fakes, and the calls of cuDNN's front end.

Rows are in groups of whole 256 (``padding``). Operands are row-major and read in place, with scales
packed for the MMA (``recipes.layout``). Rows past the last group are not computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible import activations
from fusible.kernels.glu import Glu
from fusible.kernels.runtime.provider import provider
from fusible.kernels.runtime.workspaces import pointer_table
from fusible.kernels.sm100 import limits
from fusible.kernels.sm100.checks import (
    FP4_BYTES,
    FP8,
    SCALES,
    VECTOR,
    check_aligned,
    check_contiguous,
    check_matrix,
    check_packed_scales,
    require,
)
from fusible.kernels.sm100.warmup import before_launch
from fusible.kernels.stacking import side_by_side
from fusible.library import define

logger = logging.getLogger(__name__)


class ProductOperands(NamedTuple):
    """The operands of a product of rows, scales packed for the MMA."""

    x: Tensor
    x_scales: Tensor | None
    w: Sequence[Tensor]
    w_scales: Sequence[Tensor]
    ends: Tensor
    alpha: Tensor | None
    """FP32, what multiplies the product of each group."""


class WgradOperands(NamedTuple):
    """The operands of a weight gradient, scales packed for the MMA."""

    dy: Tensor
    dy_scales: Tensor | None
    x: Tensor
    x_scales: Tensor | None
    ends: Tensor
    dy_global: Tensor | None
    x_global: Tensor | None
    """FP32 factors of each group, of FP4."""


def _run(
    device: torch.device, wrapper: str, configuration: tuple[Any, ...], **arguments: Any
) -> Any:
    """Call the front end, which launches on the current stream of the current device.

    ``configuration`` is all that the kernel may be compiled for.
    """
    function = getattr(provider(), f"{wrapper}_wrapper_sm100")
    is_first = before_launch(device, wrapper, *configuration)
    start = time.perf_counter()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        result = function(**arguments)
    if is_first:
        seconds = time.perf_counter() - start
        logger.info("compiled and launched kernel sm100 %s in %.1f s", wrapper, seconds)
    return result


# --- arguments that all kernels share -------------------------------------------------------------


def _as_element(t: Tensor) -> Tensor:
    return t.view(torch.float4_e2m1fn_x2) if t.dtype == FP4_BYTES else t


@lru_cache(maxsize=256)
def _ones(size: int, device: torch.device, stream: int) -> Tensor:
    """Cached by stream, since another stream would not wait for the fill."""
    return torch.ones(size, dtype=torch.float32, device=device)


def _ones_of(size: int, device: torch.device) -> Tensor:
    """FP32 ones, cached; those made while a CUDA graph is captured belong to the graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.ones(size, dtype=torch.float32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    with torch.inference_mode(False):
        return _ones(size, device, stream)


def _table(tensors: Sequence[Tensor]) -> Tensor:
    """The addresses as int64 on the device of the tensors."""
    pointers = tuple([t.data_ptr() for t in tensors])
    device = tensors[0].device
    if device.type == "cpu":
        return torch.tensor(pointers, dtype=torch.int64, device=device)
    return pointer_table(pointers, device)


def _weight_arguments(p: ProductOperands, n: int, n_major: bool) -> dict[str, Any]:
    w, scales, major = p.w, p.w_scales, {"b_major": "n" if n_major else "k"}
    # Matrices that were allocated side by side are a dense tensor to the kernel.
    together = w[0] if w[0].ndim == 3 else None if scales else side_by_side(w)
    if together is not None:
        dense: dict[str, Any] = {"b_tensor": _as_element(together), **major}
        return {**dense, "sfb_tensor": scales[0]} if scales else dense
    b_dtype = _as_element(w[0]).dtype
    tables: dict[str, Any] = {"b_ptrs": _table(w), "n": n, "b_dtype": b_dtype, **major}
    return {**tables, "sfb_ptrs": _table(scales)} if scales else tables


def _multiply(
    wrapper: str,
    p: ProductOperands,
    n: int,
    n_major: bool,
    configuration: tuple[Any, ...],
    **arguments: Any,
) -> Any:
    """Call the kernel of a product of rows, ``configuration`` being its options."""
    x, w = p.x, p.w
    operands = _weight_arguments(p, n, n_major)
    if x.dtype in VECTOR:
        operands |= {"sfa_tensor": p.x_scales, "sf_vec_size": VECTOR[x.dtype]}
    arguments |= {"a_tensor": _as_element(x), **operands}
    if wrapper in _MKL_WRAPPERS:
        arguments = _to_mkl(arguments, n, n_major)
    outputs = _run(
        x.device,
        wrapper,
        (x.dtype, len(w), w[0].shape, "b_tensor" in operands, n_major, *configuration),
        padded_offsets=p.ends,
        alpha_tensor=_ones_of(p.ends.shape[0], x.device) if p.alpha is None else p.alpha,
        acc_dtype=torch.float32,
        m_aligned=limits.GROUP_ROWS,
        use_dynamic_sched=True,
        **arguments,
    )
    return _from_mkl(outputs) if wrapper in _MKL_WRAPPERS else outputs


_MKL_WRAPPERS = "grouped_gemm_srelu", "grouped_gemm_dsrelu"
"""Wrappers of tensors (M, K, L), as CUTLASS orders dimensions; the others have row-major ones."""
_OF_ROWS = "a_tensor", "c_tensor", "prob_tensor", "dprob_tensor"


def _to_mkl(arguments: dict[str, Any], n: int, n_major: bool) -> dict[str, Any]:
    """Rows ``[M, X, 1]``, weights ``[N, K, E]``, scales ``[32, 4, rows / 128, 4, blocks / 4, E]``.

    Views of row-major tensors, of ``[M]`` as of ``[M, 1]``.
    """
    changed = dict(arguments)
    for name in _OF_ROWS:
        if name in arguments:
            rows = arguments[name]
            rows = rows if rows.dim() == 2 else rows[:, None]
            m, width = rows.shape
            changed[name] = rows.as_strided((m, width, 1), (width, 1, m * width))
    if "b_tensor" in arguments:
        weights = arguments["b_tensor"]
        groups = weights.shape[0]
        changed["b_tensor"] = weights.permute(2, 1, 0) if n_major else weights.permute(1, 2, 0)
        changed["sfb_tensor"] = _scale_view(arguments["sfb_tensor"], groups, n)
    changed["sfa_tensor"] = _scale_view(arguments["sfa_tensor"], 1, len(arguments["a_tensor"]))
    return changed


def _scale_view(scales: Tensor, matrices: int, rows: int) -> Tensor:
    return scales.view(matrices, -(-rows // 128), -1, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


def _from_mkl(outputs: Any) -> dict[str, Tensor | None]:
    """The outputs as the other wrappers give theirs."""
    found = dict(outputs.items())
    for name, t in found.items():
        if t is not None and t.dim() == 6:
            found[name] = t.permute(5, 2, 4, 0, 1, 3)
        elif t is not None and name.startswith(("c_", "d_")):
            found[name] = t[:, :, 0]
    return found


def _quantizing(x: Tensor) -> dict[str, Any]:
    """The arguments of a kernel with FP8 operands about its quantized outputs."""
    if x.dtype != FP8:
        return {"d_dtype": torch.bfloat16}
    one = _ones_of(1, x.device)
    return {"d_dtype": FP8, "norm_const_tensor": one, "discrete_col_sfd": True}


def _activation_kernel(glu: Glu, x: Tensor, prefix: str = "") -> tuple[str, dict[str, Any]]:
    """The wrapper of a product with an activation, and the arguments that choose the activation."""
    activation, interleave, limit, slope, offset = glu
    block = limits.INTERLEAVE if glu.sides == 2 else 0
    require(interleave == block, f"interleave must be {block}", interleave)
    supported = x.dtype in VECTOR or activation in limits.BF16_ACTIVATIONS
    require(supported, f"x must be MXFP8 or NVFP4 with {activation}", x.dtype)
    name = prefix + activations.SM100_ACTIVATIONS[activation]
    if glu.sides == 1:
        return f"grouped_gemm_{name}", {}
    wrapper, function = f"grouped_gemm_{prefix}glu", {"act_func": name}
    if activation == "swiglu":
        return wrapper, function
    if activation == "situglu":
        return wrapper, {**function, "situ_beta1": limit, "situ_beta2": slope}
    return wrapper, {
        **function,
        "linear_offset": offset,
        "geglu_alpha": slope,
        "glu_clamp_max": limit,
        "glu_clamp_min": -limit,
    }


def _checked(p: ProductOperands, n_major: bool, bias: Tensor | None = None) -> int:
    """The features that a product gives, of operands that are checked."""
    x, w, device = p.x, p.w, p.x.device
    groups = (w[0].shape[0] if w[0].ndim == 3 else len(w),)
    n, k = reversed(w[0].shape[-2:]) if n_major else w[0].shape[-2:]
    check_aligned("x", x)
    check_contiguous("ends", p.ends, torch.int32, groups, device)
    if p.alpha is not None:
        check_contiguous("alpha", p.alpha, torch.float32, groups, device)
    for i, t in enumerate(w):
        check_matrix(f"w[{i}]", t, x.dtype, w[0].shape, device)
    if w[0].ndim == 2:  # of these the front end gets the addresses
        for i, scales in enumerate(p.w_scales):
            check_packed_scales(f"w[{i}]", scales, x.dtype, n, 2 * k if x.dtype == FP4_BYTES else k)
    require(k == x.shape[1], f"x and w must share the reduced dimension {x.shape[1]}", k)
    if bias is not None:
        check_matrix("bias", bias, torch.bfloat16, (*groups, n), device)
    return n


def _numbers(x: Tensor) -> int:
    """The number of elements of ``x``."""
    return x.numel() * (2 if x.dtype == FP4_BYTES else 1)


def _forward_flops(x: Tensor, x_scales: Any, w: Sequence[Tensor], *_: Any) -> int:
    return 2 * _numbers(x) * w[0].shape[-2]


def _dgrad_flops(x: Tensor, x_scales: Any, w: Sequence[Tensor], *_: Any) -> int:
    # FP4 weights have a transposed copy for it, the others do not.
    return 2 * _numbers(x) * w[0].shape[-2 if x.dtype == FP4_BYTES else -1]


# --- what the kernels write of an activation, and of its gradient ---------------------------------


KernelOutputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Elements and packed scales for both uses, and the largest magnitudes of BF16 elements before they
were rounded, FP32 ``[groups, parts]``; empty where a kernel writes none."""


def _activated(out: Any, x: Tensor, row: str) -> KernelOutputs:
    """Outputs of a kernel, row-wise ones named ``row``, scales as the next kernel reads them."""
    if x.dtype != FP8:
        amax = out["amax_tensor"]
        return _wide(out[row], None if amax is None else amax.flatten(1))
    scales = out["sfd_row_tensor"].reshape(-1)
    column_scales = out["sfd_col_tensor"].reshape(_column_scales(*out[row].shape))
    return out[row], scales, out["d_col_tensor"], column_scales, _nothing(x)


def _wide(d: Tensor, amax: Tensor | None) -> KernelOutputs:
    """BF16 elements, of which nothing is quantized."""
    scales, column, column_scales, none = (_nothing(d) for _ in range(4))
    return d, scales, column, column_scales, none if amax is None else amax


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.float32)


def _unwritten(x: Tensor, columns: int, groups: int, parts: int) -> KernelOutputs:
    """Outputs of a kernel with operand ``x``, not written; ``amax`` is that of no rows."""
    rows = x.shape[0]
    if x.dtype != FP8:
        peaks = None
        if x.dtype == FP4_BYTES:
            peaks = x.new_full((groups, parts), -torch.inf, dtype=torch.float32)
        return _wide(x.new_empty(rows, columns, dtype=torch.bfloat16), peaks)
    d, column = (x.new_empty(rows, columns, dtype=FP8) for _ in range(2))
    scales, column_scales = (
        x.new_empty(shape, dtype=torch.float8_e8m0fnu)
        for shape in (-(-rows // 128) * -(-columns // 128) * 512, _column_scales(rows, columns))
    )
    return d, scales, column, column_scales, _nothing(x)


def _column_scales(rows: int, columns: int) -> tuple[int, int]:
    return -(-columns // 128) * 128, rows // 32


# --- forward with an activation -------------------------------------------------------------------


def _glu_outputs(p: ProductOperands, bias: Tensor | None, prob: Tensor, glu: Glu) -> Any:
    n = p.w[0].shape[-2]
    c = p.x.new_empty(p.x.shape[0], n, dtype=torch.bfloat16)
    return c, *_unwritten(p.x, n // glu.sides, p.ends.shape[0], parts=1)


def _glu(
    operands: ProductOperands, bias: Tensor | None, prob: Tensor, glu: Glu
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The first linear with the activation: BF16 ``c``, and `KernelOutputs` of ``d``.

    ``c = x @ w[e].T + bias[e]`` and ``d = glu(c) * prob``; of a gated activation, gate and linear
    features alternate in blocks of 32. ``d`` is taken from the unrounded product; of MXFP8 operands
    it is quantized for both uses, of others it is BF16. ``prob`` is FP32, one value a row.
    """
    x = operands.x
    n = _checked(operands, False, bias)
    check_contiguous("prob", prob, torch.float32, x.shape[:1], x.device)
    wrapper, arguments = _activation_kernel(glu, x)
    if len(x) == 0:
        return _glu_outputs(operands, bias, prob, glu)
    if x.dtype == torch.bfloat16:
        arguments |= {"sfa_tensor": None, "generate_c": True}
    out = _multiply(
        wrapper,
        operands,
        n,
        False,
        (bias is not None, *arguments.values()),
        **_quantizing(x),
        **arguments,
        c_dtype=torch.bfloat16,
        bias_tensor=None if bias is None else bias.t(),
        prob_tensor=prob,
    )
    return out["c_tensor"], *_activated(out, x, "d_tensor")


glu = define(_glu, _glu_outputs, flops=_forward_flops, name="sm100_glu")


# --- backward of the activation, in the data gradient of the second linear ------------------------


def _dglu_outputs(p: ProductOperands, c: Tensor, prob: Tensor, bias: bool, glu: Glu) -> Any:
    x, groups, columns = p.x, p.ends.shape[0], c.shape[1]
    dprob = x.new_zeros(x.shape[0] + 1, dtype=torch.float32)
    dbias = x.new_zeros((groups if bias else 0, columns), dtype=torch.bfloat16)
    act = _nothing(x), _nothing(x)
    if glu.sides == 1:
        d, _, column, column_scales, _ = _unwritten(x, columns, groups, parts=1)
        act = (column, column_scales) if x.dtype == FP8 else (d, _nothing(x))
    return *_unwritten(x, columns, groups, parts=glu.sides), dprob, dbias, *act


def _dglu(
    operands: ProductOperands, c: Tensor, prob: Tensor, bias: bool, glu: Glu
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``c``, as `KernelOutputs`, of ``prob`` and of the bias ``[E, N]``.

    From ``x @ w[e]``, where ``x`` is the gradient of the second linear's output, and the arguments
    and results of `glu`. That of ``prob`` has one value more, of rows in no group; without ``bias``
    the third has no rows. The last two are the activation, for the weight gradient of the second
    linear, which the kernel computes again of one that is not gated: elements quantized column-wise
    and their packed scales, or BF16; else empty.
    """
    x, n_major = operands.x, operands.x.dtype != FP4_BYTES
    n = _checked(operands, n_major)
    check_contiguous("prob", prob, torch.float32, x.shape[:1], x.device)
    columns = glu.sides * n
    check_matrix("c", c, torch.bfloat16, (x.shape[0], columns), x.device)
    wrapper, arguments = _activation_kernel(glu, x, "d")
    if len(x) == 0:
        return _dglu_outputs(operands, c, prob, bias, glu)
    if x.dtype == torch.bfloat16:
        arguments["sfa_tensor"] = None
    # One value more, the gradient of rows in no group. The kernel adds to what it finds.
    dprob = x.new_zeros(x.shape[0] + 1, dtype=torch.float32)
    orders_sums = x.dtype in VECTOR and (glu.sides == 1 or not bias)
    if orders_sums and torch.are_deterministic_algorithms_enabled():
        arguments["deterministic"] = True
    configuration = bias, *arguments.values()
    if glu.sides == 2:
        if operands.alpha is not None:  # by which the kernel multiplies twice
            operands = operands._replace(alpha=operands.alpha.sqrt())
        arguments["beta_tensor"] = _ones_of(operands.ends.shape[0], x.device)
    out = _multiply(
        wrapper,
        operands,
        n,
        n_major,
        configuration,
        **_quantizing(x),
        **arguments,
        c_tensor=c,
        prob_tensor=prob,
        dprob_tensor=dprob[:-1],
        generate_dbias=bias,
    )
    dbias = out["dbias_tensor"].flatten(1) if bias else c.new_empty(0, columns)
    return *_activated(out, x, "d_row_tensor"), dprob, dbias, *_activation_again(out, x, glu)


def _activation_again(out: Any, x: Tensor, glu: Glu) -> tuple[Tensor, Tensor]:
    if glu.sides == 2:
        return _nothing(x), _nothing(x)
    act = out["d_srelu_tensor"]
    if x.dtype != FP8:
        return act, _nothing(x)
    return act, out["sfd_col_d_srelu_tensor"].reshape(_column_scales(*act.shape))


dglu = define(_dglu, _dglu_outputs, flops=_dgrad_flops, name="sm100_dglu")


# --- plain grouped product ------------------------------------------------------------------------


def _gemm_flops(x: Tensor, x_scales: Any, w: Sequence[Tensor], *rest: Any) -> int:
    *_, transpose_w = rest
    return (_dgrad_flops if transpose_w else _forward_flops)(x, x_scales, w)


def _gemm_fake(p: ProductOperands, *rest: Any) -> Tensor:
    *_, transpose_w = rest
    n = p.w[0].shape[-1 if transpose_w and p.x.dtype != FP4_BYTES else -2]
    return p.x.new_empty(p.x.shape[0] + 1, n, dtype=torch.bfloat16)


def _gemm(
    operands: ProductOperands, bias: Tensor | None, row_scale: Tensor | None, transpose_w: bool
) -> Tensor:
    """See `fusible.kernels.sm100.products.gemm`."""
    x = operands.x
    n_major = transpose_w and x.dtype != FP4_BYTES
    rows, n = x.shape[0], _checked(operands, n_major, bias)
    if row_scale is not None:
        require(bias is not None, "row_scale must come with the bias that it scales", "no bias")
        check_contiguous("row_scale", row_scale, torch.float32, (rows,), x.device)
    out = x.new_empty(rows + 1, n, dtype=torch.bfloat16)
    out[-1].zero_()
    if rows == 0:
        return out
    configuration = bias is not None, row_scale is not None
    if x.dtype == torch.bfloat16:
        # This kernel has no form without prob, which multiplies the bias, or the product alone.
        prob = x.new_ones(rows, dtype=torch.float32) if row_scale is None else row_scale
        wrapper, arguments = "grouped_gemm", dict[str, Any](prob_tensor=prob)
    else:
        # The maximum per group that the kernel can find costs a fill and atomics.
        wrapper = "grouped_gemm_quant"
        arguments = {"prob_tensor": row_scale, "generate_amax": False}
    _multiply(
        wrapper,
        operands,
        n,
        n_major,
        configuration,
        bias_tensor=None if bias is None else bias.t(),
        d_dtype=torch.bfloat16,
        d_tensor=out[:-1],
        **arguments,
    )
    return out


gemm = define(_gemm, _gemm_fake, flops=_gemm_flops, name="sm100_gemm")


# --- weight gradient ------------------------------------------------------------------------------


def _wgrad_flops(dy: Tensor, dy_scales: Any, x: Tensor, *_: Any) -> int:
    # FP4 is transposed.
    return 2 * _numbers(dy) * x.shape[0 if x.dtype == FP4_BYTES else 1]


def _wgrad_output(p: WgradOperands, out_dtype: torch.dtype) -> Tensor:
    at = 0 if p.x.dtype == FP4_BYTES else 1
    return p.x.new_empty((p.ends.shape[0], p.dy.shape[at], p.x.shape[at]), dtype=out_dtype)


def _wgrad(operands: WgradOperands, out_dtype: torch.dtype) -> Tensor:
    """``dy[rows of e].T @ x[rows of e]`` for each group e: ``[E, N, K]``; zeros for no rows."""
    out = _wgrad_output(operands, out_dtype)
    _wgrad_([out], operands, accumulate=False)
    return out


def _wgrad_(out: Sequence[Tensor], operands: WgradOperands, accumulate: bool) -> None:
    """`wgrad` into one tensor ``[E, N, K]`` or E of ``[N, K]``, or added to them."""
    dy, dy_scales, x, x_scales, ends, *_ = operands
    rows, along = (2 * x.shape[1], 0) if x.dtype == FP4_BYTES else (x.shape[0], 1)
    groups, features = ends.shape[0], (dy.shape[along], x.shape[along])
    for name, t, scales in (("dy", dy, dy_scales), ("x", x, x_scales)):
        check_aligned(name, t)
        if t.dtype in VECTOR:
            shape = -(-t.shape[along] // 128) * 128, rows // VECTOR[t.dtype]
            check_contiguous(f"scales of {name}", scales, SCALES[t.dtype], shape, x.device)
    check_contiguous("ends", ends, torch.int32, (groups,), x.device)
    _check_grads(out, features, groups)
    if rows == 0:
        # No rows, no valid strides for the kernel: nothing is added.
        for t in () if accumulate else out:
            t.zero_()
        return
    dense = len(out) == 1 and out[0].ndim == 3
    arguments = _wgrad_arguments(operands, groups)
    if x.dtype in VECTOR:
        # One set of TMA descriptors a call: the wrapper's own would be shared by streams.
        size = 128 * (4 if dense else 5) * groups
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        arguments |= {"sf_vec_size": VECTOR[x.dtype], "descriptor_workspace": workspace}
    if dense:
        arguments |= {"wgrad_tensor": out[0]}
    else:
        arguments |= {"output_mode": "discrete", "wgrad_ptrs": _table(out)}
    _run(
        x.device,
        "grouped_gemm_wgrad",
        (x.dtype, groups, *features, out[0].dtype, accumulate, dense),
        sfa_tensor=dy_scales,
        sfb_tensor=x_scales,
        offsets_tensor=ends,
        acc_dtype=torch.float32,
        wgrad_dtype=out[0].dtype,
        accumulate_on_output=accumulate,
        **arguments,
    )


wgrad = define(_wgrad, _wgrad_output, flops=_wgrad_flops, name="sm100_wgrad")
wgrad_ = define(
    _wgrad_,
    flops=lambda out, *operands: _wgrad_flops(*operands),
    name="sm100_wgrad_",
)


def _wgrad_arguments(p: WgradOperands, groups: int) -> dict[str, Any]:
    """The operands ``[N, rows]`` and ``[rows, K]``, with the factors of FP4's groups."""
    if p.x.dtype != FP4_BYTES:
        return {"a_tensor": p.dy.t(), "b_tensor": p.x}
    factors = {"global_scale_a": p.dy_global, "global_scale_b": p.x_global}
    for name, factor in factors.items():
        check_contiguous(name, factor, torch.float32, (groups,), p.x.device)
    a, b = _as_element(p.dy), _as_element(p.x).t()
    return {"a_tensor": a, "b_tensor": b, "input_order": "tensor_ragged", **factors}


def _check_grads(out: Sequence[Tensor], shape: tuple[int, int], groups: int) -> None:
    dense, dtype = len(out) == 1 and out[0].ndim == 3, out[0].dtype
    require(dtype in (torch.bfloat16, torch.float32), "out must be BF16 or FP32", dtype)
    require(dense or len(out) == groups, f"out must be one tensor or {groups}", len(out))
    for t in out:
        check_matrix("out", t, dtype, (groups, *shape) if dense else shape, out[0].device)
