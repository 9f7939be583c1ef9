"""Each rule of the SM100 wrappers, broken alone, is refused.

That the front end accepts what the emulator accepts, `test_sm100_cudnn` shows for every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sm100_operands import BF16, E4M3, E8M0, F8, FP4, addresses, flat
from test_sm100_emulator import bf16_call, in_kernel_layout, mxfp8_call, nvfp4_call, per_row
from torch import Tensor

from fusible.testing import emulator_sm100 as emulator

ENDS = [0, 256]
M, N, K = 512, 128, 128
KEPT: list[Tensor] = []  # what pointer tables point to


def kept(x: Tensor) -> Tensor:
    KEPT.append(x)
    return x


def base(wrapper: str, kind: str = "mxfp8") -> dict[str, Any]:
    """Arguments that the wrapper accepts."""
    if wrapper == "wgrad":
        return wgrad(kind)
    make = {"mxfp8": mxfp8_call, "nvfp4": nvfp4_call, "bf16": bf16_call}[kind]
    call = make(M, N, K, ENDS)[0]
    call["prob_tensor"] = torch.ones(M)
    if kind == "mxfp8" and wrapper != "quant":
        call |= {"norm_const_tensor": torch.ones(1), "d_dtype": F8}
    if kind == "bf16" and wrapper in ("glu", "dglu"):
        call["sfa_tensor"] = None
    if wrapper == "dglu":
        call |= {"c_tensor": torch.randn(M, 2 * N).to(BF16), "beta_tensor": torch.ones(2)}
        call["dprob_tensor"] = torch.zeros(M)
    if wrapper in ("quant", "plain"):
        call["d_tensor"] = torch.zeros(M, N, dtype=BF16)
    if wrapper in ("srelu", "dsrelu"):
        call = in_kernel_layout(call) | {"prob_tensor": per_row(torch.ones(M))}
    if wrapper == "dsrelu":
        c = torch.randn(M, N).to(BF16).as_strided((M, N, 1), (N, 1, M * N))
        call |= {"c_tensor": c, "dprob_tensor": per_row(torch.zeros(M))}
    return call


def wgrad(kind: str = "mxfp8") -> dict[str, Any]:
    """Arguments that the weight gradient accepts."""
    tokens, o, i = M, 128, 64
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    if kind == "bf16":
        a, b = torch.randn(tokens, o).to(BF16).t(), torch.randn(tokens, i).to(BF16)
        return {"a_tensor": a, "b_tensor": b, "sfa_tensor": None, "sfb_tensor": None,
                "offsets_tensor": offsets,
                "wgrad_tensor": torch.zeros(2, o, i, dtype=BF16)}  # fmt: skip
    dtype, vec = (E8M0, 32) if kind == "mxfp8" else (E4M3, 16)
    scales = [torch.full((128, tokens // vec), 120, dtype=torch.uint8).view(dtype) for _ in "ab"]
    call = {"sfa_tensor": scales[0], "sfb_tensor": scales[1], "offsets_tensor": offsets,
            "wgrad_tensor": torch.zeros(2, o, i, dtype=BF16)}  # fmt: skip
    if kind == "mxfp8":
        a, b = torch.randn(tokens, o).to(F8).t(), torch.randn(tokens, i).to(F8)
        return call | {"a_tensor": a, "b_tensor": b, "sf_vec_size": 32}
    a, b = (torch.zeros(w, tokens // 2, dtype=torch.uint8).view(FP4) for w in (o, i))
    return call | {"a_tensor": a, "b_tensor": b.t(), "input_order": "tensor_ragged",
                   "global_scale_a": torch.ones(2), "global_scale_b": torch.ones(2)}  # fmt: skip


def run(wrapper: str, call: dict[str, Any]) -> Any:
    name = (
        "grouped_gemm_wrapper_sm100"
        if wrapper == "plain"
        else f"grouped_gemm_{wrapper}_wrapper_sm100"
    )
    return getattr(emulator, name)(**call)


def shifted(x: Tensor) -> Tensor:
    """The same, at an address that is 16-byte aligned no more."""
    storage = torch.empty(x.numel() * x.itemsize + 16, dtype=torch.uint8)
    unit = storage[x.itemsize :][: x.numel() * x.itemsize].view(x.dtype) if x.itemsize < 16 else x
    moved = unit.as_strided(x.shape, x.stride())
    moved.view(torch.uint8).copy_(x.view(torch.uint8)) if x.is_contiguous() else moved.copy_(x)
    assert moved.data_ptr() % 16
    return moved


def discrete(call: dict[str, Any]) -> dict[str, Any]:
    """The weights of a call, behind pointers."""
    b, sfb = call["b_tensor"], call.get("sfb_tensor")
    if call["a_tensor"].dim() == 3:  # as the SReLU wrappers take it
        b, sfb = b.permute(2, 0, 1), sfb.permute(5, 2, 4, 0, 1, 3)
    tables = {"b_tensor": None, "b_ptrs": addresses(kept(b)), "n": b.shape[1], "b_dtype": b.dtype}
    if sfb is not None:
        tables |= {"sfb_tensor": None, "sfb_ptrs": addresses(kept(sfb))}
    return call | tables


def change(**new: Any) -> Callable[[dict], dict]:
    """Replace arguments; a callable value is applied to the old one."""

    def apply(call: dict) -> dict:
        return call | {k: v(call[k]) if callable(v) else v for k, v in new.items()}

    return apply


def offsets(*ends: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(ends, dtype=dtype)


def rows_of_128(call: dict) -> dict:
    """The same call with M = 384."""
    cut = {k: call[k][:384] for k in ("a_tensor", "prob_tensor")}
    return call | cut | {"sfa_tensor": flat(call["sfa_tensor"])[: 3 * 512].view(E8M0)}


def of_depth(make: Callable, k: int) -> Callable[[dict], dict]:
    """The same call with another reduced dimension."""
    return lambda call: call | make(M, N, k, ENDS)[0]


def nan_padding(call: dict) -> dict:
    """K = 96 has three blocks of scales; the fourth, padding, holds NaN."""
    call |= mxfp8_call(M, N, 96, ENDS)[0]
    call["sfa_tensor"].view(torch.uint8)[..., 3] = 255
    return call


ANY = [  # (wrappers, kind, change, sentence)
    ("glu dglu quant", "mxfp8", change(padded_offsets=offsets(128, 256)), "multiples of 256"),
    ("glu dglu plain", "bf16", change(padded_offsets=offsets(128, 256)), "multiples of 256"),
    ("glu dglu quant", "mxfp8", change(padded_offsets=offsets(256, 0)), "not decrease"),
    ("glu dglu quant", "mxfp8", change(padded_offsets=offsets(256, 1024)), "within 512"),
    ("glu dglu quant", "mxfp8", change(padded_offsets=lambda x: x.long()), "int32"),
    ("glu dglu plain", "bf16", change(padded_offsets=lambda x: x.long()), "int32"),
    ("glu dglu quant", "mxfp8", change(padded_offsets=offsets(0, 0, 256)), r"shape \(2,\)"),
    ("glu dglu quant", "mxfp8", change(alpha_tensor=torch.ones(3)), r"shape \(2,\)"),
    ("glu dglu plain", "bf16", change(alpha_tensor=torch.ones(2, dtype=BF16)), "alpha_tensor"),
    ("glu dglu quant", "mxfp8", change(m_aligned=128), "m_aligned"),
    ("glu quant", "mxfp8", rows_of_128, "divisible by 256"),
    ("glu dglu quant", "mxfp8", change(a_tensor=lambda x: x[None]), "shape"),
    ("glu quant", "mxfp8", change(a_tensor=lambda x: x[:, :64]), "strides"),
    ("glu dglu quant", "mxfp8", change(a_tensor=shifted), "16-byte aligned"),
    (
        "glu dglu quant",
        "mxfp8",
        change(a_tensor=lambda x: x.view(torch.uint8).view(FP4)),
        "scale dtype",
    ),
    ("glu dglu quant", "mxfp8", change(a_tensor=lambda x: x.float()), "BF16, FP8 or packed FP4|bl"),
    ("glu dglu quant", "mxfp8", change(sf_vec_size=16), "scale dtype and block"),
    ("glu dglu quant", "mxfp8", change(sfa_tensor=lambda x: x.view(E4M3)), "scale dtype"),
    ("glu dglu quant", "mxfp8", change(sfa_tensor=lambda x: x[:, :2]), "packed bytes"),
    ("glu dglu quant", "mxfp8", change(sfb_tensor=lambda x: flat(x)[:-512]), "sfb_tensor"),
    ("glu dglu quant", "mxfp8", change(sfb_tensor=None), "sfb_tensor"),
    ("glu dglu quant", "mxfp8", change(b_tensor=None), "either b_tensor or b_ptrs"),
    ("glu dglu quant", "mxfp8", change(n=N), "forbid n"),
    ("glu dglu quant", "mxfp8", change(b_tensor=lambda x: x[:, :, :96].contiguous()), "K ="),
    ("glu dglu quant", "mxfp8", change(b_tensor=lambda x: x.view(torch.float8_e5m2)), "b_tensor"),
    ("glu dglu quant", "mxfp8", change(b_tensor=lambda x: x.mT), "contiguous"),
    ("glu dglu quant", "mxfp8", change(b_tensor=shifted), "16-byte aligned"),
    ("glu dglu quant", "mxfp8", change(acc_dtype=BF16), "acc_dtype"),
    (
        "glu dglu quant",
        "mxfp8",
        change(prob_tensor=torch.ones(M, 1)),
        "prob_tensor must have shape",
    ),
    ("glu dglu plain", "bf16", change(prob_tensor=None), "prob_tensor"),
    ("glu dglu plain", "bf16", change(prob_tensor=lambda x: x.to(BF16)), "prob_tensor must be"),
    ("glu quant", "mxfp8", nan_padding, "must be finite"),
    ("glu dglu quant", "nvfp4", of_depth(nvfp4_call, 48), "a_tensor: .* multiple of 32"),
    ("glu dglu plain", "bf16", of_depth(bf16_call, 12), "a_tensor: .* multiple of 8"),
    ("glu dglu", "bf16", change(norm_const_tensor=torch.ones(1)), "needs an FP8 D"),
    ("glu dglu", "bf16", change(discrete_col_sfd=True), "needs an FP8 D"),
    ("glu dglu", "bf16", change(sf_vec_size=32), "forbid sf_vec_size"),
    ("glu dglu", "bf16", change(sfa_tensor=torch.ones(1)), "take no scales"),
    ("glu quant", "mxfp8", change(bias_tensor=torch.ones(2, N).to(BF16)), "bias_tensor must be"),
    ("glu quant", "mxfp8", change(bias_tensor=torch.ones(N, 2).to(BF16)), "strides"),
    ("plain", "bf16", change(bias_tensor=torch.ones(N, 2).to(BF16)), "strides"),
    ("glu dglu quant", "nvfp4", change(sf_vec_size=32), "scale dtype and block"),
]
OWN = [
    ("glu", "mxfp8", change(norm_const_tensor=None), "norm_const_tensor is required"),
    ("glu", "nvfp4", change(norm_const_tensor=torch.ones(1)), "needs an FP8 D"),
    ("glu", "mxfp8", change(d_dtype=None), "FP8 D with scales"),
    ("glu", "mxfp8", change(act_func="dswiglu"), "act_func"),
    ("glu", "bf16", change(act_func="situglu"), "block-scaled only"),
    ("glu", "bf16", change(act_func="geglu", geglu_alpha=1.0), "alpha 1.702"),
    ("glu", "mxfp8", change(act_func="situglu", situ_beta1=0.0), "positive"),
    ("glu", "mxfp8", change(c_dtype=F8), "c_dtype"),
    ("glu", "mxfp8", change(b_tensor=lambda x: x.mT.contiguous(), b_major="n"), "K-major"),
    ("dglu", "mxfp8", change(norm_const_tensor=None), "norm_const_tensor is required"),
    ("dglu", "mxfp8", change(d_dtype=BF16), "FP8 D with scales"),
    ("dglu", "mxfp8", change(prob_tensor=lambda x: x.to(BF16)), "prob_tensor must be"),
    ("dglu", "mxfp8", change(dprob_tensor=lambda x: x.to(BF16)), "dprob_tensor must be"),
    ("dglu", "bf16", change(dprob_tensor=None), "dprob_tensor is required"),
    ("dglu", "mxfp8", change(c_tensor=lambda x: x[:, :N]), "columns|strides"),
    ("dglu", "mxfp8", change(c_tensor=lambda x: x.double()), "c_tensor must be"),
    ("dglu", "mxfp8", change(beta_tensor=torch.ones(3)), "beta_tensor"),
    ("dglu", "mxfp8", change(act_func="dgeglu", beta_tensor=torch.zeros(2)), "ignores beta"),
    ("dglu", "mxfp8", change(act_func="swiglu"), "act_func"),
    ("dglu", "mxfp8", change(generate_dbias=True, deterministic=True), "deterministic"),
    ("dglu", "nvfp4", change(b_tensor=lambda x: x.mT.contiguous(), b_major="n"), "K-major"),
    ("srelu dsrelu", "mxfp8", change(a_tensor=lambda x: x[..., 0]), r"must be \(M, X, 1\)"),
    ("srelu dsrelu", "mxfp8", change(a_tensor=lambda x: x.as_strided(x.shape, (K, 1, 1))), "stri"),
    ("srelu dsrelu", "mxfp8", change(prob_tensor=torch.ones(M)), r"must be \(M, X, 1\)"),
    ("srelu dsrelu", "mxfp8", change(prob_tensor=None), "prob_tensor is required"),
    ("srelu dsrelu", "mxfp8", change(sfa_tensor=lambda x: x.permute(5, 2, 4, 0, 1, 3)), "a view"),
    ("srelu dsrelu", "mxfp8", change(sfb_tensor=None), "sfb_tensor is required"),
    ("srelu dsrelu", "mxfp8", change(b_tensor=lambda x: x.permute(2, 0, 1)), "contiguous"),
    ("srelu dsrelu", "mxfp8", change(norm_const_tensor=None), "norm_const_tensor is required"),
    ("srelu dsrelu", "mxfp8", change(d_dtype=None), "FP8 D with scales"),
    ("srelu dsrelu", "mxfp8", change(sfa_tensor=None), "block-scaled"),
    ("srelu", "mxfp8", change(c_dtype=F8), "c_dtype"),
    ("dsrelu", "mxfp8", change(c_tensor=lambda x: x[..., 0]), r"c_tensor must be \(M, X, 1\)"),
    ("dsrelu", "mxfp8", change(c_tensor=lambda x: x.double()), "c_tensor must be BF16"),
    ("dsrelu", "mxfp8", change(dprob_tensor=None), "dprob_tensor is required"),
    ("quant", "mxfp8", change(d_dtype=F8), "d_dtype"),
    ("quant", "mxfp8", change(d_tensor=torch.ones(M, N)), "d_tensor must be"),
    ("quant", "mxfp8", change(d_tensor=torch.ones(N, M).to(BF16).t()), "contiguous"),
    ("plain", "bf16", change(d_dtype=F8), "d_dtype"),
    ("plain", "bf16", change(a_tensor=lambda x: x.half()), "BF16"),
    ("wgrad", "mxfp8", change(offsets_tensor=offsets(64, 256)), "multiples of 128"),
    ("wgrad", "mxfp8", change(offsets_tensor=offsets(256, 0)), "not decrease"),
    ("wgrad", "mxfp8", change(offsets_tensor=offsets(0, 1024)), "within 512"),
    ("wgrad", "mxfp8", change(offsets_tensor=offsets(0, 256, dtype=torch.int64)), "int32"),
    ("wgrad", "mxfp8", change(sfa_tensor=lambda x: x[:64]), "sfa_tensor must be"),
    ("wgrad", "mxfp8", change(sfb_tensor=lambda x: x.mT), "sfb_tensor must be"),
    ("wgrad", "mxfp8", change(sfb_tensor=lambda x: x.view(E4M3)), "sfb_tensor must be"),
    ("wgrad", "mxfp8", change(sfb_tensor=None), "sfb_tensor"),
    ("wgrad", "mxfp8", change(a_tensor=lambda x: x[:, ::2]), "tokens differ"),
    ("wgrad", "mxfp8", change(b_tensor=lambda x: x[:, ::2]), "dense"),
    ("wgrad", "mxfp8", change(b_tensor=lambda x: x.view(torch.float8_e5m2)), "one dtype"),
    ("wgrad", "mxfp8", change(global_scale_a=torch.ones(2)), "FP4"),
    ("wgrad", "nvfp4", change(global_scale_a=None), "global_scale_a"),
    ("wgrad", "mxfp8", change(input_order="tensor_ragged"), "input_order"),
    ("wgrad", "nvfp4", change(input_order="tensor2d"), "input_order"),
    ("wgrad", "mxfp8", change(output_mode="sparse"), "output_mode"),
    ("wgrad", "mxfp8", change(wgrad_tensor=None), "needs wgrad_tensor"),
    ("wgrad", "mxfp8", change(output_mode="discrete", wgrad_tensor=None), "wgrad_ptrs is required"),
    ("wgrad", "mxfp8", change(wgrad_ptrs=offsets(0, 0)), "forbids wgrad_ptrs"),
    ("wgrad", "mxfp8", change(wgrad_dtype=F8), "wgrad_dtype"),
    ("wgrad", "mxfp8", change(wgrad_tensor=torch.ones(2, 64, 128).to(BF16).mT), "contiguous"),
    ("wgrad", "mxfp8", change(wgrad_tensor=torch.ones(2, 128, 32)), "wgrad_tensor must be"),
    ("wgrad", "bf16", change(offsets_tensor=offsets(128, 256)), "multiples of 256"),
    ("wgrad", "bf16", change(sfb_tensor=torch.ones(1)), "take no scales"),
    ("wgrad", "bf16", change(sf_vec_size=32), "forbid sf_vec_size"),
]  # fmt: skip
POINTERS = [
    (change(b_ptrs=lambda x: x.int()), "int64"),
    (change(b_ptrs=lambda x: torch.stack((x, x), 1)[:, 0]), "contiguous"),
    (change(b_ptrs=lambda x: x + 8), "16-byte aligned"),
    (change(b_ptrs=lambda x: x * 0), "non-null"),
    (change(sfb_ptrs=lambda x: x[:1]), "2 entries"),
    (change(sfb_ptrs=None), "sfb_ptrs is required"),
    (change(b_ptrs=lambda x: x[:1].repeat(1025)), "at most 1024 experts"),
    (change(n=None), "needs n"),
    (change(b_dtype=torch.float8_e5m2), "b_dtype must be"),
    (change(b_major="m"), "b_major"),
    (change(n=N + 8, b_major="n"), "multiple of 16"),
]
CASES = [
    (wrapper, kind, changed, sentence)
    for wrappers, kind, changed, sentence in (*ANY, *OWN)
    for wrapper in wrappers.split()
]


@pytest.mark.parametrize(("wrapper", "kind", "changed", "sentence"), CASES)
def test_each_broken_rule_is_refused(
    wrapper: str, kind: str, changed: Callable, sentence: str
) -> None:
    call = changed(base(wrapper, kind))
    with pytest.raises(ValueError, match=sentence):
        run(wrapper, call)


@pytest.mark.parametrize(("changed", "sentence"), POINTERS)
def test_each_broken_rule_of_pointer_tables_is_refused(changed: Callable, sentence: str) -> None:
    call = changed(discrete(base("quant")))
    with pytest.raises(ValueError, match=sentence):
        run("quant", call)


@pytest.mark.parametrize(
    ("wrapper", "kind"),
    [
        *[(w, kind) for w in ("glu", "dglu", "wgrad") for kind in ("mxfp8", "nvfp4", "bf16")],
        ("quant", "mxfp8"),
        ("quant", "nvfp4"),
        ("plain", "bf16"),
        *[(w, kind) for w in ("srelu", "dsrelu") for kind in ("mxfp8", "nvfp4")],
    ],
)
def test_nothing_is_refused_where_no_rule_is_broken(wrapper: str, kind: str) -> None:
    run(wrapper, base(wrapper, kind))
    if wrapper != "wgrad":
        run(wrapper, discrete(base(wrapper, kind)))
