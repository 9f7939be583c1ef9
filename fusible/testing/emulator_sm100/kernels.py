"""What each wrapper computes from its arguments, given as a namespace of the same names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusible.testing.emulator_sm100.formats import (
    FP4,
    FP8,
    packed_bytes,
    poisoned,
    quantized,
    round_up,
    scale_offsets,
)
from fusible.testing.emulator_sm100.gated import gated, gated_grad, halves, interleaved
from fusible.testing.emulator_sm100.operands import (
    ROWS,
    block_scaled,
    group_ends,
    groups,
    matrix,
    memory,
    need,
    need_aligned,
    need_pitch,
    need_rows,
    need_vector,
    physical_scales,
    pointers,
    row_major,
    scale_bytes,
    scale_output,
    scale_view,
    unit_last,
    weights_of,
)

BF16 = torch.bfloat16
FP32 = torch.float32
GRADS = (BF16, FP32)  # of weight gradients

WrapperOutputs = dict[str, Tensor | None]


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in FP32, whatever autocast the caller is in: no kernel knows of it."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


class RowsOperand:
    """The checked operands of a kernel whose rows are grouped."""

    def __init__(self, call: Any, *, scaled: bool) -> None:
        self.call, self.scaled = call, scaled
        need(call.acc_dtype in (None, FP32), f"acc_dtype must be FP32, got {call.acc_dtype}")
        need(call.m_aligned == ROWS, f"m_aligned must be {ROWS}, got {call.m_aligned}")
        need_rows(call.a_tensor, "a_tensor")
        self.m = len(call.a_tensor)
        need(self.m % ROWS == 0, f"M must be divisible by {ROWS}, got {self.m}")
        self.weights = weights_of(call, scaled)
        self.n, self.experts = self.weights.n, self.weights.experts
        self.groups = groups(group_ends(call.padded_offsets, self.experts, self.m))
        need_vector(call.alpha_tensor, "alpha_tensor", self.experts, FP32)
        self.bias = self._bias(getattr(call, "bias_tensor", None))
        if scaled:
            blocks = math.ceil(self.weights.k / call.sf_vec_size)
            self.scales = scale_bytes(call.sfa_tensor, "sfa_tensor", 1, self.m, blocks)[0]

    def _bias(self, bias: Tensor | None) -> Tensor | None:
        """FP32 ``[E, N]`` of a bias (N, E) with strides (1, N)."""
        if bias is None:
            return None
        shape = (self.n, self.experts)
        need(bias.shape == shape, f"bias_tensor must be {shape}, got {tuple(bias.shape)}")
        strided = bias.stride(0) == 1 and (self.experts == 1 or bias.stride(1) == self.n)
        need(strided, f"bias_tensor must have strides {(1, self.n)}, got {bias.stride()}")
        need(bias.dtype == BF16, f"bias_tensor must be BF16, got {bias.dtype}")
        need_aligned(bias, "bias_tensor")
        return bias.t().float()

    def need_per_row(self, name: str) -> None:
        """The argument shall have one FP32 number per row."""
        need_vector(getattr(self.call, name), name, self.m, FP32)

    def products(self) -> Iterator[tuple[int, int, int, Tensor]]:
        """(expert, first row, end row, FP32 A B^T of those rows)."""
        used = self.call.a_tensor[: self.groups[-1][2] if self.groups else 0]
        if self.scaled:
            sf_dtype, vec = self.call.sfa_tensor.dtype, self.call.sf_vec_size
            a = matrix(used, self.scales, sf_dtype, vec, "SFA")
        else:
            a = used.float()
        for expert, start, end in self.groups:
            yield expert, start, end, multiplied(a[start:end], self.weights.matrix(expert).t())


class WideD:
    """D in BF16, with the largest magnitude of each expert if asked."""

    sfd_row = sfd_col = None

    def __init__(self, d: Tensor, d_col: Tensor | None, amax: Tensor | None) -> None:
        self.d, self.d_col, self.amax = d, d_col, amax

    def store(self, expert: int, start: int, end: int, values: Tensor) -> None:
        """Write a group's rows. D_col is allocated and not written."""
        self.d[start:end] = values.to(self.d.dtype)
        if self.amax is not None:
            parts = halves(values) if self.amax.ndim == 3 else (values,)
            peaks = torch.stack([largest(part) for part in parts])
            self.amax[expert] = torch.maximum(self.amax[expert], peaks.view_as(self.amax[expert]))


def largest(values: Tensor) -> Tensor:
    """The largest magnitude; a thread takes 32 columns of a row, and one NaN hides all of them."""
    padded = pad(values.abs(), (0, -values.shape[1] % 32))
    of_threads = padded.unflatten(1, (-1, 32)).amax(-1)
    return of_threads.nan_to_num(0.0, torch.inf).amax()


class QuantizedD:
    """D in FP8 along rows and along columns, with packed scales of both."""

    amax = None

    def __init__(self, rows: RowsOperand, d: Tensor, d_col: Tensor) -> None:
        call = rows.call
        need_vector(call.norm_const_tensor, "norm_const_tensor", 1, FP32)
        self.m, self.columns = d.shape[:2]
        self.norm, self.per_group = float(call.norm_const_tensor), call.discrete_col_sfd
        self.d, self.d_col = d, d_col
        self.sfd_row = scale_output(self.m, self.columns // 32)
        self.sfd_col = scale_output(self.columns, self.m // 32)

    def store(self, expert: int, start: int, end: int, values: Tensor) -> None:
        """Write a group's rows; blocks that pad a written atom get byte 0, as zeros do."""
        blocks, width = self.columns // 32, round_up(self.columns, 128)
        data, byte = quantized(values.unflatten(1, (blocks, 32)), self.norm)
        self.d[start:end] = data.flatten(1)
        at = scale_offsets(self.m, round_up(blocks, 4))[start:end]
        self.sfd_row.view(torch.uint8).view(-1)[at] = pad(byte, (0, at.shape[1] - blocks))

        tokens = (end - start) // 32
        turned = values.unflatten(0, (tokens, 32)).movedim(1, -1)
        data, byte = quantized(turned, self.norm)
        self.d_col[start:end] = data.movedim(-1, 1).flatten(0, 1)
        if self.per_group:
            at = start // 32 * width + scale_offsets(width, tokens)
        else:
            at = scale_offsets(width, self.m // 32)[:, start // 32 : end // 32]
        self.sfd_col.view(torch.uint8).view(-1)[at] = pad(byte, (0, width - self.columns)).t()


def destination(rows: RowsOperand, columns: int, *amax: int) -> WideD | QuantizedD:
    """D of a GLU or dGLU kernel, which its operands decide."""
    call = rows.call
    dtype = call.d_dtype or BF16
    need_pitch(dtype, columns, "D")
    if rows.scaled and call.a_tensor.dtype == FP8:
        need(dtype == FP8, f"FP8 operands give an FP8 D with scales, got d_dtype {dtype}")
        d, d_col = (poisoned((rows.m, columns), FP8) for _ in range(2))
        return QuantizedD(rows, d, d_col)
    need(dtype == BF16, f"BF16 and FP4 operands give a BF16 D, got d_dtype {dtype}")
    need(call.norm_const_tensor is None, "norm_const_tensor needs an FP8 D")
    need(not call.discrete_col_sfd, "discrete_col_sfd needs an FP8 D")
    d = poisoned((rows.m, columns), BF16)
    if not rows.scaled:
        return WideD(d, None, None)
    return WideD(d, poisoned((rows.m, columns), BF16), no_peaks(rows.experts, *amax))


def no_peaks(*shape: int) -> Tensor:
    """Largest magnitudes of no rows."""
    return torch.full(shape, -torch.inf, dtype=FP32)


def need_activation(call: Any, scaled: bool, prefix: str = "") -> None:
    """The activation shall be one of the kernel's, with parameters it takes."""
    names = [prefix + name for name in ("swiglu", "geglu", "situglu")]
    need(call.act_func in names, f"act_func must be one of {names}, got {call.act_func!r}")
    if call.act_func == names[1] and not scaled and not prefix:
        fixed = (call.geglu_alpha, call.glu_clamp_max, call.glu_clamp_min) == (1.702, 7.0, -7.0)
        need(fixed, "the BF16 kernel's geglu has alpha 1.702 and clamps at -7 and 7")
    if call.act_func == names[2]:
        need(scaled, f"{names[2]} is block-scaled only")
        finite = all(math.isfinite(b) and b > 0 for b in (call.situ_beta1, call.situ_beta2))
        need(finite, "situ_beta1 and situ_beta2 must be finite and positive")


def glu(call: Any) -> WrapperOutputs:
    """`grouped_gemm_glu_wrapper_sm100`."""
    scaled = block_scaled(call.a_tensor, call.sfa_tensor, call.sf_vec_size)
    need_activation(call, scaled)
    need(call.b_major == "k", "weights must be K-major")
    rows = RowsOperand(call, scaled=scaled)
    need(rows.n % 64 == 0, f"N must be divisible by 64, 32 gates and 32 linear, got {rows.n}")
    rows.need_per_row("prob_tensor")
    need(call.c_dtype in (None, BF16), f"c_dtype must be BF16, got {call.c_dtype}")
    c = poisoned((rows.m, rows.n), BF16)
    d = destination(rows, rows.n // 2, 1)
    for expert, start, end, product in rows.products():
        acc = product * call.alpha_tensor[expert]
        if rows.bias is not None:
            acc = acc + rows.bias[expert]
        c[start:end] = acc.to(BF16)
        d.store(expert, start, end, gated(*halves(acc), call) * call.prob_tensor[start:end, None])
    return {
        "c_tensor": c if scaled or call.generate_c else None,
        "d_tensor": d.d,
        "d_col_tensor": d.d_col,
        "amax_tensor": d.amax,
        "sfd_row_tensor": d.sfd_row,
        "sfd_col_tensor": d.sfd_col,
    }


def need_dglu(call: Any, rows: RowsOperand) -> None:
    """What only the dGLU kernels ask."""
    need(rows.n % 32 == 0, f"n must be divisible by 32 (interleaved columns), got {rows.n}")
    need_rows(call.c_tensor, "c_tensor", 2 * rows.n, rows.m)
    need(call.c_tensor.dtype == BF16, f"c_tensor must be BF16, got {call.c_tensor.dtype}")
    rows.need_per_row("prob_tensor")
    rows.need_per_row("dprob_tensor")
    need_vector(call.beta_tensor, "beta_tensor", rows.experts, FP32)
    ignored = rows.scaled and call.act_func == "dgeglu"
    need(not ignored or bool((call.beta_tensor == 1).all()), "block-scaled dgeglu ignores beta")
    ordered = rows.scaled and not call.generate_dbias
    need(not call.deterministic or ordered, "deterministic is block-scaled only, without dbias")


def dglu(call: Any) -> WrapperOutputs:
    """`grouped_gemm_dglu_wrapper_sm100`."""
    scaled = block_scaled(call.a_tensor, call.sfa_tensor, call.sf_vec_size)
    need_activation(call, scaled, "d")
    rows = RowsOperand(call, scaled=scaled)
    need_dglu(call, rows)
    d = destination(rows, 2 * rows.n, 2, 1)
    dbias = None
    if call.generate_dbias:
        dbias = torch.zeros(rows.experts, 2 * rows.n, 1, dtype=BF16)
    for expert, start, end, product in rows.products():
        grad = product * call.alpha_tensor[expert] ** 2
        gate, up = halves(call.c_tensor[start:end].float() * call.beta_tensor[expert])
        call.dprob_tensor[start:end] += (grad * gated(gate, up, call)).sum(1)
        grad = grad * call.prob_tensor[start:end, None]
        grads = interleaved(*gated_grad(grad, gate, up, call))
        if dbias is not None:
            for tile in grads.split(128):  # BF16 atomics of one FP32 sum a tile
                dbias[expert, :, 0] += tile.sum(0).to(BF16)
        d.store(expert, start, end, grads)
    return {
        "d_row_tensor": d.d,
        "d_col_tensor": d.d_col,
        "dprob_tensor": call.dprob_tensor,
        "dbias_tensor": dbias,
        "amax_tensor": d.amax,
        "sfd_row_tensor": d.sfd_row,
        "sfd_col_tensor": d.sfd_col,
    }


def srelu(given: Any) -> WrapperOutputs:
    """`grouped_gemm_srelu_wrapper_sm100`."""
    call = _row_major_call(given, (), ("prob_tensor",))
    rows = RowsOperand(call, scaled=True)
    rows.need_per_row("prob_tensor")
    need(call.c_dtype in (None, BF16), f"c_dtype must be BF16, got {call.c_dtype}")
    c = poisoned((rows.m, rows.n), BF16)
    d = destination(rows, rows.n, 1)
    for expert, start, end, product in rows.products():
        acc = product * call.alpha_tensor[expert]
        if rows.bias is not None:
            acc = acc + rows.bias[expert]
        c[start:end] = acc.to(BF16)
        d.store(expert, start, end, positive(acc) ** 2 * call.prob_tensor[start:end, None])
    return {
        "c_tensor": unit_last(c),
        "d_tensor": unit_last(d.d),
        "d_col_tensor": None if d.sfd_col is None else unit_last(d.d_col),
        "amax_tensor": d.amax,
        "sfd_row_tensor": scale_view(d.sfd_row),
        "sfd_col_tensor": scale_view(d.sfd_col),
    }


def dsrelu(given: Any) -> WrapperOutputs:
    """`grouped_gemm_dsrelu_wrapper_sm100`."""
    call = _row_major_call(given, ("c_tensor",), ("prob_tensor", "dprob_tensor"))
    rows = RowsOperand(call, scaled=True)
    rows.need_per_row("prob_tensor")
    need_rows(call.c_tensor, "c_tensor", rows.n, rows.m)
    need(call.c_tensor.dtype == BF16, f"c_tensor must be BF16, got {call.c_tensor.dtype}")
    rows.need_per_row("dprob_tensor")
    d = destination(rows, rows.n, 1)
    again = destination(rows, rows.n, 1)
    dbias = torch.zeros(rows.experts, rows.n, 1, dtype=BF16) if call.generate_dbias else None
    for expert, start, end, product in rows.products():
        grad = product * call.alpha_tensor[expert]
        relu, prob = positive(call.c_tensor[start:end].float()), call.prob_tensor[start:end, None]
        call.dprob_tensor[start:end] += (grad * relu**2).sum(1)
        grads = grad * relu * 2 * prob
        if dbias is not None:
            for tile in grads.split(128):  # BF16 atomics of one FP32 sum a tile
                dbias[expert, :, 0] += tile.sum(0).to(BF16)
        d.store(expert, start, end, grads)
        again.store(expert, start, end, relu**2 * prob)
    return {
        "d_row_tensor": unit_last(d.d),
        "d_col_tensor": unit_last(d.d_col),
        "d_srelu_tensor": unit_last(again.d if again.sfd_col is None else again.d_col),
        "dprob_tensor": given.dprob_tensor,
        "dbias_tensor": dbias,
        "amax_tensor": d.amax,
        "sfd_row_tensor": scale_view(d.sfd_row),
        "sfd_col_tensor": scale_view(d.sfd_col),
        "sfd_col_d_srelu_tensor": scale_view(again.sfd_col),
    }


def positive(x: Tensor) -> Tensor:
    """``x`` where it is above zero, else zero, of NaN too."""
    return torch.where(x > 0, x, 0.0)


def _row_major_call(given: Any, matrices: Sequence[str], vectors: Sequence[str]) -> Any:
    """The call of an SReLU wrapper with its tensors as the other wrappers take them."""
    scaled = block_scaled(given.a_tensor, given.sfa_tensor, given.sf_vec_size)
    need(scaled, "a_tensor must be block-scaled, FP8 or FP4")
    call = SimpleNamespace(**vars(given))
    for name in ("a_tensor", *matrices):
        setattr(call, name, row_major(getattr(given, name), name))
    for name in vectors:
        setattr(call, name, row_major(getattr(given, name), name)[:, 0])
    call.sfa_tensor = physical_scales(given.sfa_tensor, "sfa_tensor")
    b = given.b_tensor
    if b is not None:
        need(b.ndim == 3, f"b_tensor must have 3 dimensions, got {b.ndim}")
        call.b_tensor = b.permute(2, 1, 0) if call.b_major == "n" else b.permute(2, 0, 1)
        call.sfb_tensor = physical_scales(given.sfb_tensor, "sfb_tensor")
    return call


def quant(call: Any) -> WrapperOutputs:
    """`grouped_gemm_quant_wrapper_sm100`."""
    scaled = block_scaled(call.a_tensor, call.sfa_tensor, call.sf_vec_size)
    need(scaled, "a_tensor must be block-scaled, FP8 or FP4")
    amax = _gemm(call, scaled=True, with_amax=call.generate_amax)
    return {"d_tensor": call.d_tensor, "amax_tensor": amax}


def plain(call: Any) -> WrapperOutputs:
    """`grouped_gemm_wrapper_sm100`."""
    need(call.a_tensor.dtype == BF16, f"a_tensor must be BF16, got {call.a_tensor.dtype}")
    need(call.prob_tensor is not None, "prob_tensor is required for BF16 operands")
    _gemm(call, scaled=False, with_amax=False)
    return {"d_tensor": call.d_tensor}


def _gemm(call: Any, *, scaled: bool, with_amax: bool) -> Tensor | None:
    """Write D; returns the largest magnitude of each expert, if asked."""
    rows = RowsOperand(call, scaled=scaled)
    if call.prob_tensor is not None:
        rows.need_per_row("prob_tensor")
    need(call.d_dtype in (None, BF16), f"d_dtype must be BF16, got {call.d_dtype}")
    need_rows(call.d_tensor, "d_tensor", rows.n, rows.m)
    need(call.d_tensor.dtype == BF16, f"d_tensor must be BF16, got {call.d_tensor.dtype}")
    d = WideD(call.d_tensor, None, no_peaks(rows.experts, 1) if with_amax else None)
    for expert, start, end, product in rows.products():
        acc = product * call.alpha_tensor[expert]
        weight = 1.0 if call.prob_tensor is None else call.prob_tensor[start:end, None]
        # Beside a bias, prob scales the bias alone.
        acc = acc * weight if rows.bias is None else acc + rows.bias[expert] * weight
        d.store(expert, start, end, acc)
    return d.amax


def wgrad(call: Any) -> WrapperOutputs:
    """`grouped_gemm_wgrad_wrapper_sm100`."""
    scaled = block_scaled(call.a_tensor, call.sfa_tensor, call.sf_vec_size)
    need(call.acc_dtype in (None, FP32), f"acc_dtype must be FP32, got {call.acc_dtype}")
    experts = len(call.offsets_tensor)
    need(0 < experts <= 1024, f"between 1 and 1024 experts, got {experts}")
    tokens = _wgrad_tokens(call, scaled)
    # Compact scales of a group are whole atoms: four blocks of tokens.
    ends = group_ends(
        call.offsets_tensor, experts, tokens, 4 * call.sf_vec_size if scaled else ROWS
    )
    shape = (call.a_tensor.shape[0], call.b_tensor.shape[1])
    dense, outputs = _wgrad_outputs(call, experts, shape)
    sides = (("a", call.a_tensor, call.sfa_tensor), ("b", call.b_tensor.t(), call.sfb_tensor))
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        a, b = (_wgrad_side(call, *side, expert, start, end) for side in sides)
        added = multiplied(a, b.t()).to(outputs[expert].dtype)
        if call.accumulate_on_output:
            outputs[expert] += added
        else:
            outputs[expert].copy_(added)
    return {"wgrad_tensor": dense}


def _wgrad_tokens(call: Any, scaled: bool) -> int:
    """The tokens of A (O, T) and B (T, I), whose layouts, dtypes and scales are checked."""
    a, b = call.a_tensor, call.b_tensor
    need(a.ndim == 2 and b.ndim == 2, "a_tensor and b_tensor must have 2 dimensions")
    need(a.dtype == b.dtype, f"a_tensor and b_tensor must have one dtype, got {a.dtype}, {b.dtype}")
    need(a.shape[1] == b.shape[0], f"tokens differ: {a.shape[1]} of A, {b.shape[0]} of B")
    packed = a.dtype == FP4
    order = "tensor_ragged" if packed else "tensor2d"
    need(call.input_order == order, f"input_order of {a.dtype} must be {order!r}")
    tokens = a.shape[1] * (2 if packed else 1)
    need(tokens % 16 == 0, f"tokens must be divisible by 16, got {tokens}")
    for name, x in (("a_tensor", a), ("b_tensor", b.t())):
        need_aligned(x, name)
        dense = (x if packed else x.t()).is_contiguous()
        need(dense, f"{name} {tuple(x.shape)} must be dense, got strides {x.stride()}")
        need_pitch(x.dtype, tokens if packed else x.shape[0], name)
    scales = (call.sfb_tensor, call.global_scale_a, call.global_scale_b)
    if not scaled:
        need(scales == (None, None, None), "BF16 operands take no scales")
        return tokens
    need(call.sfb_tensor is not None, "block-scaled operands need sfb_tensor")
    if packed:
        for name in ("global_scale_a", "global_scale_b"):
            need_vector(getattr(call, name), name, len(call.offsets_tensor), FP32)
    else:
        need(scales[1:] == (None, None), "global scales are for FP4 operands")
    columns = round_up(math.ceil(tokens / call.sf_vec_size), 4)
    _wgrad_scales(call.sfa_tensor, "sfa_tensor", a.shape[0], columns, call.sfa_tensor.dtype)
    _wgrad_scales(call.sfb_tensor, "sfb_tensor", b.shape[1], columns, call.sfa_tensor.dtype)
    return tokens


def _wgrad_scales(scales: Tensor, name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    """A container of packed bytes: (rows rounded up to 128, columns)."""
    need(scales.dtype == dtype, f"{name} must be {dtype}, got {scales.dtype}")
    need_aligned(scales, name)
    shape = (round_up(rows, 128), columns)
    need(scales.shape == shape, f"{name} must be {shape}, got {tuple(scales.shape)}")
    need(scales.is_contiguous(), f"{name} must be contiguous, got strides {scales.stride()}")


def _wgrad_side(
    call: Any, side: str, x: Tensor, scales: Tensor | None, expert: int, start: int, end: int
) -> Tensor:
    """FP32 ``[rows, tokens]`` of one expert from ``x``, all tokens along its second dimension."""
    rows = x.shape[0]
    if x.dtype == FP4:  # one contiguous chunk per expert
        chunk = x.reshape(-1)[rows * start // 2 : rows * end // 2]
        elements = chunk.view(rows, (end - start) // 2)
    else:
        elements = x[:, start:end]
    if scales is None:
        return elements.float()
    vec = call.sf_vec_size
    base = round_up(rows, 128) * start // vec
    count = packed_bytes(rows, (end - start) // vec)
    packed = scales.view(torch.uint8).view(-1)[base : base + count]
    values = matrix(elements, packed, scales.dtype, vec, f"sf{side}_tensor")
    factor = getattr(call, f"global_scale_{side}")
    return values if factor is None else values * factor[expert]


def _wgrad_outputs(
    call: Any, experts: int, shape: tuple[int, int]
) -> tuple[Tensor | None, list[Tensor]]:
    """The dense gradient, or None, and where the gradient of each expert lies."""
    need(call.output_mode in ("dense", "discrete"), f"no output_mode {call.output_mode!r}")
    dtype = call.wgrad_dtype or BF16
    need(dtype in GRADS, f"wgrad_dtype must be one of {GRADS}, got {dtype}")
    if call.output_mode == "discrete":
        need(call.wgrad_tensor is None, "output_mode 'discrete' takes wgrad_ptrs, no wgrad_tensor")
        table = pointers(call.wgrad_ptrs, "wgrad_ptrs", experts)
        count = shape[0] * shape[1]
        return None, [memory(at, count, dtype, "wgrad_ptrs").view(shape) for at in table]
    need(call.wgrad_ptrs is None, "output_mode 'dense' forbids wgrad_ptrs")
    dense = call.wgrad_tensor
    need(dense is not None, "output_mode 'dense' needs wgrad_tensor")
    full = (experts, *shape)
    need(dense.shape == full, f"wgrad_tensor must be {full}, got {tuple(dense.shape)}")
    need(dense.dtype == dtype, f"wgrad_tensor must be {dtype}, got {dense.dtype}")
    need(dense.is_contiguous(), f"wgrad_tensor must be contiguous, got {dense.stride()}")
    need_aligned(dense, "wgrad_tensor")
    return dense, list(dense.unbind(0))
