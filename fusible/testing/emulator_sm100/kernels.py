"""What each wrapper computes from its arguments, given as a namespace of the same names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusible.testing.emulator_sm100.formats import (
    E8M0,
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
    WIDE,
    block_scaled,
    group_ends,
    groups,
    matrix,
    memory,
    need,
    need_aligned,
    need_pitch,
    need_vector,
    output,
    pointers,
    row_vector,
    rows_of,
    scale_bytes,
    scale_output,
    tile_choice,
    weights_of,
)

BF16 = torch.bfloat16
FP32 = torch.float32


class Outputs(dict):
    """Outputs by name, in order; also unpacks like a tuple and takes an integer index."""

    def __iter__(self) -> Iterator:
        return iter(self.values())

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in FP32, whatever autocast the caller is in: no kernel knows of it."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


class Rows:
    """The checked operands of a kernel whose rows are grouped."""

    def __init__(self, call: Any, *, scaled: bool, dense_n_major: bool) -> None:
        self.call, self.scaled = call, scaled
        self.canonical = call.a_tensor.ndim == 2
        self.elements = rows_of(call.a_tensor, "a_tensor")
        self.m = len(self.elements)
        need(self.m % ROWS == 0, f"M must be divisible by {ROWS}, got {self.m}")
        self.weights = weights_of(call, scaled, dense_n_major=dense_n_major)
        self.n, self.experts = self.weights.n, self.weights.experts
        ends = group_ends(call.padded_offsets, self.experts, self.m)
        single = getattr(call, "use_single_group_runtime_offsets", False)
        legal = not single or (self.experts == 1 and scaled)
        need(legal, "use_single_group_runtime_offsets needs one block-scaled expert")
        # With it, the end of the only group is read from the shape.
        self.groups = groups([self.m] if single else ends)
        counter = getattr(call, "scheduler_counter_tensor", None)
        dynamic = scaled and call.b_tensor is not None and call.use_dynamic_sched
        need(counter is None or dynamic, "scheduler_counter_tensor needs dense dynamic scheduling")
        alpha_dtypes = WIDE if scaled else (FP32,)
        need_vector(call.alpha_tensor, "alpha_tensor", self.experts, *alpha_dtypes)
        self.alpha = call.alpha_tensor.float()
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
        dense = self.call.b_tensor is not None
        legal = WIDE if dense or not self.scaled else WIDE[:2]
        need(bias.dtype in legal, f"bias_tensor must be one of {legal}, got {bias.dtype}")
        need_aligned(bias, "bias_tensor")
        return bias.t().float()

    def per_row(self, name: str, *dtypes: torch.dtype) -> Tensor | None:
        """``[M]``, a view of an optional argument with one number per row."""
        x = getattr(self.call, name)
        return row_vector(x, name, self.m, *dtypes, canonical=self.canonical)

    def products(self) -> Iterator[tuple[int, int, int, Tensor]]:
        """(expert, first row, end row, FP32 A B^T of those rows)."""
        used = self.elements[: self.groups[-1][2] if self.groups else 0]
        if self.scaled:
            sf_dtype, vec = self.call.sfa_tensor.dtype, self.call.sf_vec_size
            a = matrix(used, self.scales, sf_dtype, vec, "SFA")
        else:
            a = used.float()
        for expert, start, end in self.groups:
            yield expert, start, end, multiplied(a[start:end], self.weights.matrix(expert).t())


class WideD:
    """D in 16 or 32 bits, with the largest magnitude of each expert if asked."""

    sfd_row = sfd_col = None

    def __init__(self, d: Tensor, d_col: Tensor | None, amax: Tensor | None) -> None:
        self.d, self.d_col, self.amax = d, d_col, amax

    def store(self, expert: int, start: int, end: int, values: Tensor) -> None:
        """Write a group's rows. D_col is allocated and not written."""
        written(self.d)[start:end] = values.to(self.d.dtype)
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

    def __init__(self, rows: Rows, d: Tensor, d_col: Tensor) -> None:
        call = rows.call
        need_vector(call.norm_const_tensor, "norm_const_tensor", 1, FP32)
        self.m, self.columns = d.shape[:2]
        self.norm, self.per_group = float(call.norm_const_tensor), call.discrete_col_sfd
        self.d, self.d_col = d, d_col
        self.sfd_row = scale_output(self.m, self.columns // 32, E8M0, rows.canonical)
        self.sfd_col = scale_output(self.columns, self.m // 32, E8M0, rows.canonical)

    def store(self, expert: int, start: int, end: int, values: Tensor) -> None:
        """Write a group's rows; blocks that pad a written atom get byte 0, as zeros do."""
        blocks, width = self.columns // 32, round_up(self.columns, 128)
        data, byte = quantized(values.unflatten(1, (blocks, 32)), self.d.dtype, self.norm)
        written(self.d)[start:end] = data.flatten(1)
        at = scale_offsets(self.m, round_up(blocks, 4))[start:end]
        written_scales(self.sfd_row)[at] = pad(byte, (0, at.shape[1] - blocks))

        tokens = (end - start) // 32
        turned = values.unflatten(0, (tokens, 32)).movedim(1, -1)
        data, byte = quantized(turned, self.d.dtype, self.norm)
        written(self.d_col)[start:end] = data.movedim(-1, 1).flatten(0, 1)
        if self.per_group:
            at = start // 32 * width + scale_offsets(width, tokens)
        else:
            at = scale_offsets(width, self.m // 32)[:, start // 32 : end // 32]
        written_scales(self.sfd_col)[at] = pad(byte, (0, width - self.columns)).t()


def written(x: Tensor) -> Tensor:
    """``[M, X]``, a view of an output in either layout."""
    return x.as_strided(x.shape[:2], (x.shape[1], 1))


def written_scales(scales: Tensor) -> Tensor:
    """The bytes of packed scales in either layout."""
    physical = scales if scales.is_contiguous() else scales.permute(5, 2, 4, 0, 1, 3)
    return physical.view(torch.uint8).view(-1)


def destination(rows: Rows, columns: int, dtype: torch.dtype, *amax: int) -> WideD | QuantizedD:
    """D of a block-scaled GLU or dGLU kernel, or of a BF16 one: which follows from its operands."""
    call = rows.call
    need_pitch(dtype, columns, "D")
    if not rows.scaled:
        need(call.norm_const_tensor is None, "BF16 operands forbid norm_const_tensor")
        need(not call.discrete_col_sfd, "BF16 operands forbid discrete_col_sfd")
        need(dtype in WIDE, f"d_dtype must be one of {WIDE}, got {dtype}")
        return WideD(output(rows.m, columns, dtype, rows.canonical), None, None)
    d, d_col = (output(rows.m, columns, dtype, rows.canonical) for _ in range(2))
    if call.a_tensor.dtype in FP8:
        need(dtype in FP8, f"FP8 operands give an FP8 D with scales, got d_dtype {dtype}")
        return QuantizedD(rows, d, d_col)
    need(call.norm_const_tensor is None, "norm_const_tensor needs an FP8 D")
    need(dtype in WIDE[:2], f"FP4 operands give a D of {WIDE[:2]}, got {dtype}")
    return WideD(d, d_col, torch.full((rows.experts, *amax), -torch.inf, dtype=torch.float32))


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


def glu(call: Any) -> Outputs:
    """`grouped_gemm_glu_wrapper_sm100`."""
    scaled = block_scaled(call.a_tensor, call.sfa_tensor, call.sf_vec_size)
    narrow = scaled and call.b_tensor is not None and call.bias_tensor is None
    tile_choice(call, n_tiles=(128, 256) if narrow and call.d_dtype not in FP8 else (256,))
    need_activation(call, scaled)
    rows = Rows(call, scaled=scaled, dense_n_major=False)
    need(rows.n % 64 == 0, f"N must be divisible by 64, 32 gates and 32 linear, got {rows.n}")
    prob = rows.per_row("prob_tensor", *(WIDE if scaled else (FP32,)))
    need(scaled or prob is not None, "prob_tensor is required for BF16 operands")
    c_dtype = call.c_dtype or BF16
    need(c_dtype in WIDE, f"c_dtype must be one of {WIDE}, got {c_dtype}")
    c = output(rows.m, rows.n, c_dtype, rows.canonical)
    d = destination(rows, rows.n // 2, call.d_dtype or BF16, 1)
    for expert, start, end, product in rows.products():
        acc = product * rows.alpha[expert]
        if rows.bias is not None:
            acc = acc + rows.bias[expert]
        written(c)[start:end] = acc.to(c_dtype)
        h = gated(*halves(acc), call)
        d.store(expert, start, end, h if prob is None else h * prob[start:end, None].float())
    return Outputs(
        c_tensor=c if scaled or call.generate_c else None,
        d_tensor=d.d,
        d_col_tensor=d.d_col,
        amax_tensor=d.amax,
        sfd_row_tensor=d.sfd_row,
        sfd_col_tensor=d.sfd_col,
    )


def need_dglu(call: Any, rows: Rows, prob: Tensor | None, dprob: Tensor | None) -> None:
    """What only the dGLU kernels ask."""
    need(rows.n % 32 == 0, f"n must be divisible by 32 (interleaved columns), got {rows.n}")
    rows_of(call.c_tensor, "c_tensor", 2 * rows.n, rows.m)
    c_dtypes = (*WIDE, *FP8) if rows.scaled else WIDE
    need(call.c_tensor.dtype in c_dtypes, f"c_tensor must be one of {c_dtypes}")
    betas = WIDE if rows.scaled else (FP32,)
    need_vector(call.beta_tensor, "beta_tensor", rows.experts, *betas)
    ignored = rows.scaled and call.act_func == "dgeglu"
    need(not ignored or bool((call.beta_tensor == 1).all()), "block-scaled dgeglu ignores beta")
    both = prob is not None and dprob is not None
    need(rows.scaled or both, "BF16 operands need prob_tensor and dprob_tensor")
    extras = call.activation_tensor is None and not call.round_dgrad_to_input_dtype
    need(extras or not rows.scaled, "activation_tensor and rounded dgrad are BF16 only")
    need(call.epilogue_op in (None, "none", "identity"), f"no epilogue_op {call.epilogue_op!r}")
    ordered = rows.scaled and not call.generate_dbias
    need(not call.deterministic or ordered, "deterministic is block-scaled only, without dbias")


def dglu(call: Any) -> Outputs:
    """`grouped_gemm_dglu_wrapper_sm100`."""
    scaled = block_scaled(call.a_tensor, call.sfa_tensor, call.sf_vec_size)
    tile_choice(call)
    need_activation(call, scaled, "d")
    n_major = call.a_tensor.dtype in FP8 or (not scaled and call.b_major == "n")
    rows = Rows(call, scaled=scaled, dense_n_major=n_major)
    prob, dprob = rows.per_row("prob_tensor", FP32), rows.per_row("dprob_tensor", FP32)
    need_dglu(call, rows, prob, dprob)
    activation = _activation_output(call, rows)
    d = destination(rows, 2 * rows.n, call.d_dtype or BF16, 2, 1)
    dbias = None
    if call.generate_dbias:
        dbias = torch.zeros(rows.experts, 2 * rows.n, 1, dtype=BF16)
    for expert, start, end, product in rows.products():
        grad = product * rows.alpha[expert] ** 2
        if call.round_dgrad_to_input_dtype:
            grad = grad.to(call.a_tensor.dtype).float()
        c = written(call.c_tensor)[start:end].float() * call.beta_tensor[expert].float()
        gate, up = halves(c)
        h = gated(gate, up, call)
        if dprob is not None:
            dprob[start:end] += (grad * h).sum(1)
        if prob is not None:
            grad, h = grad * prob[start:end, None], h * prob[start:end, None]
        if activation is not None:
            activation[start:end] = h.to(activation.dtype)
        grads = interleaved(*gated_grad(grad, gate, up, call))
        if dbias is not None:
            for tile in grads.split(128):  # BF16 atomics of one FP32 sum a tile
                dbias[expert, :, 0] += tile.sum(0).to(BF16)
        d.store(expert, start, end, grads)
    named = {} if activation is None else {"activation_tensor": call.activation_tensor}
    return Outputs(
        d_row_tensor=d.d,
        d_col_tensor=d.d_col,
        dprob_tensor=call.dprob_tensor,
        dbias_tensor=dbias,
        amax_tensor=d.amax,
        sfd_row_tensor=d.sfd_row,
        sfd_col_tensor=d.sfd_col,
        **named,
    )


def _activation_output(call: Any, rows: Rows) -> Tensor | None:
    """``[M, n]``, the caller's buffer for the recomputed activation."""
    if call.activation_tensor is None:
        return None
    dtypes = {call.c_tensor.dtype, call.d_dtype or BF16, call.activation_tensor.dtype}
    legal = call.act_func == "dgeglu" and dtypes == {BF16}
    need(legal, "activation_tensor needs dgeglu, and C, D and itself in BF16")
    need_aligned(call.activation_tensor, "activation_tensor", 32)
    return rows_of(call.activation_tensor, "activation_tensor", rows.n, rows.m)


def quant(call: Any) -> Outputs:
    """`grouped_gemm_quant_wrapper_sm100`."""
    scaled = block_scaled(call.a_tensor, call.sfa_tensor, call.sf_vec_size)
    need(scaled, "a_tensor must be block-scaled, FP8 or FP4")
    tile_choice(call)
    rows = Rows(call, scaled=True, dense_n_major=call.a_tensor.dtype in FP8)
    prob = rows.per_row("prob_tensor", *WIDE)
    if call.row_scale_tensor is not None:
        need_vector(call.row_scale_tensor, "row_scale_tensor", rows.m, FP32)
    d = _quant_d(call, rows)
    for expert, start, end, product in rows.products():
        acc = product * rows.alpha[expert]
        if call.row_scale_tensor is not None:
            acc = acc * call.row_scale_tensor[start:end, None]
        d.store(expert, start, end, with_prob(acc, rows, expert, prob, start, end))
    return Outputs(
        d_tensor=d.d,
        d_col_tensor=d.d_col,
        amax_tensor=d.amax,
        sfd_row_tensor=d.sfd_row,
        sfd_col_tensor=d.sfd_col,
    )


def with_prob(
    acc: Tensor, rows: Rows, expert: int, prob: Tensor | None, start: int, end: int
) -> Tensor:
    """``acc * prob``, or ``acc + bias * prob``: beside a bias, prob scales the bias alone."""
    weight = 1.0 if prob is None else prob[start:end, None].float()
    return acc * weight if rows.bias is None else acc + rows.bias[expert] * weight


def _quant_d(call: Any, rows: Rows) -> WideD | QuantizedD:
    dtype = call.d_dtype or BF16
    fp8 = call.a_tensor.dtype in FP8
    legal = (*WIDE[:2], *FP8) if fp8 else WIDE
    need(dtype in legal, f"d_dtype must be one of {legal}, got {dtype}")
    d = caller_output(call.d_tensor, "d_tensor", rows, dtype)
    if dtype in FP8:
        return QuantizedD(rows, d, output(rows.m, rows.n, dtype, rows.canonical))
    asked = call.generate_amax and dtype in WIDE[:2]
    return WideD(
        d, None, torch.full((rows.experts, 1), -torch.inf, dtype=torch.float32) if asked else None
    )


def caller_output(x: Tensor | None, name: str, rows: Rows, dtype: torch.dtype) -> Tensor:
    """The caller's (M, N) buffer in the layout of A, or a new one."""
    need_pitch(dtype, rows.n, name)
    if x is None:
        return output(rows.m, rows.n, dtype, rows.canonical)
    rows_of(x, name, rows.n, rows.m)
    same = x.dtype == dtype and x.ndim == rows.call.a_tensor.ndim
    need(same, f"{name} must be {dtype} in A's layout, got {x.dtype} of shape {tuple(x.shape)}")
    return x


def plain(call: Any) -> Outputs:
    """`grouped_gemm_wrapper_sm100`."""
    need(call.a_tensor.dtype == BF16, f"a_tensor must be BF16, got {call.a_tensor.dtype}")
    tile_choice(call, n_tiles=(128, 256))
    rows = Rows(call, scaled=False, dense_n_major=call.b_major == "n")
    prob = rows.per_row("prob_tensor", FP32)
    need(prob is not None, "prob_tensor is required for BF16 operands")
    c_dtype, d_dtype = call.c_dtype or BF16, call.d_dtype or BF16
    need({c_dtype, d_dtype} <= set(WIDE), f"c_dtype and d_dtype must be among {WIDE}")
    c = caller_output(call.c_tensor, "c_tensor", rows, c_dtype)
    d = caller_output(call.d_tensor, "d_tensor", rows, d_dtype)
    for expert, start, end, product in rows.products():
        acc = product * rows.alpha[expert]
        result = with_prob(acc, rows, expert, prob, start, end)
        written(d)[start:end] = result.to(d_dtype)
        # C is stored before prob multiplies the product, and after a bias took its own.
        written(c)[start:end] = (acc if rows.bias is None else result).to(c_dtype)
    return Outputs(d_tensor=d, c_tensor=c if call.generate_c else None)


def wgrad(call: Any) -> Outputs:
    """`grouped_gemm_wgrad_wrapper_sm100`."""
    scaled = block_scaled(call.a_tensor, call.sfa_tensor, call.sf_vec_size)
    tile_choice(call, n_tiles=(128, 256))
    experts = len(call.offsets_tensor)
    need(0 < experts <= 1024, f"between 1 and 1024 experts, got {experts}")
    ragged = getattr(call.input_order, "value", call.input_order) == "tensor_ragged"
    tokens = _wgrad_tokens(call, scaled, ragged)
    # Compact scales of a group are whole atoms: four blocks of tokens.
    ends = group_ends(
        call.offsets_tensor, experts, tokens, 4 * call.sf_vec_size if scaled else ROWS
    )
    shape = (call.a_tensor.shape[0], call.b_tensor.shape[1])
    dense, outputs = _wgrad_outputs(call, experts, shape)
    sides = (("a", call.a_tensor, call.sfa_tensor), ("b", call.b_tensor.t(), call.sfb_tensor))
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        a, b = (_wgrad_side(call, *side, expert, start, end, ragged) for side in sides)
        added = multiplied(a, b.t()).to(outputs[expert].dtype)
        if call.accumulate_on_output:
            outputs[expert] += added
        else:
            outputs[expert].copy_(added)
    return Outputs(wgrad_tensor=dense)


def _wgrad_tokens(call: Any, scaled: bool, ragged: bool) -> int:
    """The tokens of A (O, T) and B (T, I), whose layouts, dtypes and scales are checked."""
    a, b = call.a_tensor, call.b_tensor
    need(a.ndim == 2 and b.ndim == 2, "a_tensor and b_tensor must have 2 dimensions")
    need(a.dtype == b.dtype, f"a_tensor and b_tensor must have one dtype, got {a.dtype}, {b.dtype}")
    need(a.shape[1] == b.shape[0], f"tokens differ: {a.shape[1]} of A, {b.shape[0]} of B")
    packed = a.dtype in FP4
    need(not ragged or packed, "input_order 'tensor_ragged' is for FP4 operands")
    tokens = a.shape[1] * (2 if packed else 1)
    need(tokens % 16 == 0, f"tokens must be divisible by 16, got {tokens}")
    for name, x in (("a_tensor", a), ("b_tensor", b.t())):
        need_aligned(x, name)
        rows, width = x.shape
        token_major = x.stride() == (1, rows) and not packed
        # With zero tokens any pitch will do that 16 divides; an empty tensor's own is 1.
        pitch = x.stride(0) if width == 0 else width
        legal = token_major or x.stride() == (pitch, 1)
        need(legal, f"{name} {tuple(x.shape)} must be dense, got strides {x.stride()}")
        need(token_major or pitch % 16 == 0, f"{name}: pitch must divide by 16, got {pitch}")
        need_pitch(x.dtype, rows if token_major else pitch * (2 if packed else 1), name)
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
    """A container of packed bytes: (rows rounded up to 128, columns), or flat."""
    need(scales.dtype == dtype, f"{name} must be {dtype}, got {scales.dtype}")
    need_aligned(scales, name)
    shape = (round_up(rows, 128), columns)
    flat = scales.ndim == 1 and scales.numel() == shape[0] * shape[1]
    need(flat or scales.shape == shape, f"{name} must be {shape}, got {tuple(scales.shape)}")
    need(scales.is_contiguous(), f"{name} must be contiguous, got strides {scales.stride()}")
    pitch = flat or scales.stride(0) % 4 == 0
    need(pitch, f"{name}: row pitch must be divisible by 4, got {scales.stride(0)}")


def _wgrad_side(
    call: Any,
    side: str,
    x: Tensor,
    scales: Tensor | None,
    expert: int,
    start: int,
    end: int,
    ragged: bool,
) -> Tensor:
    """FP32 ``[rows, tokens]`` of one expert from ``x``, all tokens along its second dimension."""
    rows = x.shape[0]
    if x.dtype not in FP4:
        elements = x[:, start:end]
    elif ragged:  # one contiguous chunk per expert
        flat = x.as_strided((x.numel(),), (1,))
        elements = flat[rows * start // 2 : rows * end // 2].view(rows, (end - start) // 2)
    else:
        elements = x[:, start // 2 : end // 2]
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
    need(dtype in WIDE, f"wgrad_dtype must be one of {WIDE}, got {dtype}")
    if call.output_mode == "discrete":
        need(call.wgrad_tensor is None, "output_mode 'discrete' takes wgrad_ptrs, no wgrad_tensor")
        table = pointers(call.wgrad_ptrs, "wgrad_ptrs", experts)
        count = shape[0] * shape[1]
        return None, [memory(at, count, dtype, "wgrad_ptrs").view(shape) for at in table]
    need(call.wgrad_ptrs is None, "output_mode 'dense' forbids wgrad_ptrs")
    dense = call.wgrad_tensor
    if dense is None:
        dense = poisoned((experts, *shape), dtype)
        if call.accumulate_on_output:
            dense.zero_()
    full = (experts, *shape)
    need(dense.shape == full, f"wgrad_tensor must be {full}, got {tuple(dense.shape)}")
    need(dense.dtype in WIDE, f"wgrad_tensor must be one of {WIDE}, got {dense.dtype}")
    need(dense.is_contiguous(), f"wgrad_tensor must be contiguous, got {dense.stride()}")
    need_aligned(dense, "wgrad_tensor")
    return dense, list(dense.unbind(0))
