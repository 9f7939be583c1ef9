"""The emulator of the SM100 wrappers against references from unpacked operands."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from sm100_operands import (
    BF16,
    E4M3,
    E8M0,
    F8,
    FP4,
    FP32,
    addresses,
    columnwise,
    flat,
    mxfp8,
    mxfp8_numbers,
    packed,
    per_group,
    random_e4m3,
    random_fp4,
)
from torch import Tensor

from fusible.testing import emulator_sm100 as emulator

NAMES = list(emulator.__all__)
ONE = torch.ones(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def grouped(x: Tensor, w: Tensor, ends: list[int]) -> Tensor:
    """FP64 x w[e]^T, rows of no group left out."""
    spans = pairwise([0, *ends])
    return torch.cat([x[s:t].double() @ w[e].double().t() for e, (s, t) in enumerate(spans)])


def owner(ends: list[int]) -> Tensor:
    """The expert of each row."""
    return torch.repeat_interleave(
        torch.arange(len(ends)), torch.tensor(ends).diff(prepend=torch.zeros(1, dtype=int))
    )


def activation(x: Tensor, name: str, offset: float = 1.0) -> Tensor:
    """The gated activations as the front end documents them, over blocks of 32 columns."""
    gate, up = x.unflatten(-1, (-1, 2, 32)).unbind(-2)
    gate, up = gate.flatten(-2), up.flatten(-2)
    if name == "geglu":
        # Not clamp, whose gradient at the limit itself is zero since torch 2.14.
        gate = torch.where(gate > 7, 7.0, gate)
        up = torch.where(up.abs() > 7, up.sign() * 7, up)
        return (up + offset) * gate * torch.sigmoid(1.702 * gate)
    if name == "situglu":
        return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    return F.silu(gate) * up


# Signatures.


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_the_front_ends_by_name_and_default(name: str) -> None:
    """The front end has more, which the product does not pass: unknown here, they raise."""
    cudnn = pytest.importorskip("cudnn")

    def defaults(function: object) -> dict:
        parameters = inspect.signature(function).parameters.values()
        return {p.name: getattr(p.default, "value", p.default) for p in parameters}

    ours, theirs = defaults(getattr(emulator, name)), defaults(getattr(cudnn, name))
    assert ours.items() <= theirs.items()
    required = {name for name, default in theirs.items() if default is inspect.Parameter.empty}
    assert required <= ours.keys()


# Scale layout, against CuTe's layout algebra.


@pytest.mark.parametrize(("rows", "blocks"), [(256, 8), (192, 6), (40, 3), (1, 1), (384, 12)])
def test_scale_layout_is_cutes(rows: int, blocks: int) -> None:
    from fusible.testing.emulator_sm100.formats import scale_offsets

    counted = (torch.arange(rows * blocks) % 251).to(torch.uint8).view(1, rows, blocks)
    physical = packed(counted)
    here = physical.view(-1)[scale_offsets(rows, blocks)]
    assert torch.equal(here, counted[0])
    assert scale_offsets(rows, blocks).tolist() == cute_offsets(rows, blocks)


def test_column_scales_of_one_region_are_cutes() -> None:
    """What kernels use for columns without discrete_col_sfd: tokens along the packed blocks."""
    from fusible.testing.emulator_sm100.formats import scale_offsets

    assert scale_offsets(192, 8).tolist() == cute_offsets(192, 8, columns=True)


def cute_offsets(rows: int, blocks: int, *, columns: bool = False) -> list[list[int]]:
    """What cutlass' own helpers say, evaluated by CuTe while it traces for no device."""
    pytest.importorskip("cutlass")
    import cutlass.utils.blockscaled_layout as blockscaled
    from cutlass import cute
    from cutlass.cute.nvgpu import OperandMajorMode

    def layout() -> object:
        if not columns:
            return blockscaled.tile_atom_to_shape_SF((rows, blocks * 32, 1), 32)
        chunk = blockscaled.BlockScaledBasicChunk(32, OperandMajorMode.MN).layout
        return cute.tile_to_shape(chunk, (blocks * 32, rows, 1), (1, 2, 3))

    def offset(packing: object, row: int, token: int) -> int:
        return packing((token, row, 0) if columns else (row, token, 0))

    found = []

    @cute.jit
    def trace() -> None:
        packing = layout()
        found.extend([offset(packing, r, 32 * b) for b in range(blocks)] for r in range(rows))

    cute.compile(trace)
    return [[int(offset) for offset in line] for line in found]


# The whole MLP in MXFP8: the six calls.

ENDS, M, WIDTH, HIDDEN, OUT = [256, 256, 768], 1024, 192, 96 * 2, 128


def mlp_tensors() -> list[Tensor]:
    """Input, both weights and biases, prob, the output's gradient."""
    torch.manual_seed(0)
    experts = len(ENDS)
    return [
        torch.randn(M, WIDTH),
        torch.randn(experts, 2 * HIDDEN, WIDTH) / WIDTH**0.5,
        torch.randn(experts, OUT, HIDDEN) / HIDDEN**0.5,
        torch.randn(experts, 2 * HIDDEN).to(BF16),
        torch.randn(experts, OUT).to(BF16),
        torch.rand(M) + 0.5,
        torch.randn(M, OUT),
    ]


def mlp(*, dense: bool = True) -> dict[str, Tensor]:
    """Outputs and gradients of FC1 (+ bias), SwiGLU * prob, FC2 (+ bias * prob)."""
    experts, end = len(ENDS), ENDS[-1]
    x, w1, w2, bias1, bias2, prob, dy = mlp_tensors()

    offsets, ones = torch.tensor(ENDS, dtype=torch.int32), torch.ones(experts)
    same = {"padded_offsets": offsets, "alpha_tensor": ones, "sf_vec_size": 32}
    quantized = {"norm_const_tensor": ONE, "d_dtype": F8, "discrete_col_sfd": True}

    def buffer(columns: int) -> Tensor:
        return torch.full((M, columns), torch.nan, dtype=BF16)

    keep = []  # what pointer tables point to

    def rows(t: Tensor) -> tuple[Tensor, Tensor]:
        data, scales = mxfp8(t)
        return data, packed(scales[None]).view(E8M0)

    def weight(w: Tensor, *, columns: bool) -> dict:
        data, scales = columnwise(w) if columns else mxfp8(w)
        physical = packed(scales)
        keep.extend((data, physical))
        n = w.shape[2] if columns else w.shape[1]
        major = "n" if columns else "k"
        if not dense:
            tables = {"b_ptrs": addresses(data), "sfb_ptrs": addresses(physical)}
            return {**tables, "n": n, "b_dtype": F8, "b_major": major}
        return {"b_tensor": data, "sfb_tensor": physical.view(E8M0), "b_major": major}

    a, sfa = rows(x)
    fc1 = emulator.grouped_gemm_glu_wrapper_sm100(
        a_tensor=a, sfa_tensor=sfa, **same, **weight(w1, columns=False), bias_tensor=bias1.t(),
        prob_tensor=prob, **quantized,
    )  # fmt: skip
    fc2 = emulator.grouped_gemm_quant_wrapper_sm100(
        a_tensor=fc1["d_tensor"], sfa_tensor=fc1["sfd_row_tensor"], **same,
        **weight(w2, columns=False), bias_tensor=bias2.t(), prob_tensor=prob,
        d_tensor=buffer(OUT), generate_amax=False,
    )  # fmt: skip
    a, sfa = rows(dy)
    dfc2 = emulator.grouped_gemm_dglu_wrapper_sm100(
        a_tensor=a, c_tensor=fc1["c_tensor"], sfa_tensor=sfa, **same, beta_tensor=ones,
        prob_tensor=prob, dprob_tensor=torch.zeros(M), generate_dbias=True,
        **weight(w2, columns=True), **quantized,
    )  # fmt: skip
    dfc1 = emulator.grouped_gemm_quant_wrapper_sm100(
        a_tensor=dfc2["d_row_tensor"], sfa_tensor=dfc2["sfd_row_tensor"], **same,
        **weight(w1, columns=True), d_tensor=buffer(WIDTH), generate_amax=False,
    )  # fmt: skip

    def wgrad(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor) -> Tensor:
        o, i = a.shape[1], b.shape[1]
        containers = (c.view(E8M0).view(-(-w // 128) * 128, -1) for c, w in ((sfa, o), (sfb, i)))
        dw = torch.full((experts, o, i), torch.nan, dtype=BF16)
        pointers = {"output_mode": "discrete", "wgrad_ptrs": addresses(dw)}
        emulator.grouped_gemm_wgrad_wrapper_sm100(
            a.t(), b, *containers, offsets, sf_vec_size=32,
            **({"wgrad_tensor": dw} if dense else pointers),
        )  # fmt: skip
        return dw

    def columns(t: Tensor) -> tuple[Tensor, Tensor]:
        data, scales = columnwise(t)
        return data, per_group(scales, ENDS)

    got = {
        "y": fc2["d_tensor"],
        "dx": dfc1["d_tensor"],
        "dprob": dfc2["dprob_tensor"],
        "dbias1": dfc2["dbias_tensor"].view(experts, -1),
        "dw1": wgrad(dfc2["d_col_tensor"], flat(dfc2["sfd_col_tensor"]), *columns(x)),
        "dw2": wgrad(*columns(dy), fc1["d_col_tensor"], flat(fc1["sfd_col_tensor"])),
    }
    for name in ("y", "dx"):
        assert got[name][end:].isnan().all(), "rows of no group are never written"
        got[name] = got[name][:end]
    assert not got["dprob"][end:].any()
    return got


def mlp_reference() -> dict[str, Tensor]:
    """The same by FP32 autograd."""
    *leaves, dy = mlp_tensors()
    leaves = [t.float().requires_grad_() for t in leaves]
    x, w1, w2, bias1, bias2, prob = leaves
    outputs = []
    for e, (s, t) in enumerate(pairwise([0, *ENDS])):
        h = activation(x[s:t] @ w1[e].t() + bias1[e], "swiglu") * prob[s:t, None]
        # What prob gets through FC2's bias is not the dGLU kernel's to add.
        outputs.append(h @ w2[e].t() + bias2[e] * prob[s:t, None].detach())
    y = torch.cat(outputs)
    y.backward(dy[: ENDS[-1]])
    return {
        "y": y.detach(), "dx": x.grad[: ENDS[-1]], "dprob": prob.grad, "dbias1": bias1.grad,
        "dw1": w1.grad, "dw2": w2.grad,
    }  # fmt: skip


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def dense_mlp() -> dict[str, Tensor]:
    return mlp()


def test_six_calls_of_the_mlp_agree_with_autograd_within_quantization(
    dense_mlp: dict[str, Tensor],
) -> None:
    expected = mlp_reference()
    for name, value in dense_mlp.items():
        assert value.isfinite().all(), name
        assert relative(value, expected[name]) < 0.07, name
    # The empty expert's weight gradients are zeros, not what the memory held.
    assert not dense_mlp["dw1"][1].any()
    assert not dense_mlp["dw2"][1].any()


def test_pointers_give_the_same_bits(dense_mlp: dict[str, Tensor]) -> None:
    for name, value in mlp(dense=False).items():
        assert torch.equal(value, dense_mlp[name]), name


# Each kernel's values.


def mxfp8_call(m: int, n: int, k: int, ends: list[int]) -> tuple[dict, Tensor, Tensor]:
    """Operands of a row-grouped kernel, and the FP64 matrices that they stand for."""
    a, sa = mxfp8(torch.randn(m, k) * torch.rand(m, 1) * 4)
    b, sb = mxfp8(torch.randn(len(ends), n, k) / k**0.5)
    call = {
        "a_tensor": a, "sfa_tensor": packed(sa[None]).view(E8M0),
        "padded_offsets": torch.tensor(ends, dtype=torch.int32),
        "alpha_tensor": torch.rand(len(ends)) + 0.5,
        "b_tensor": b, "sfb_tensor": packed(sb).view(E8M0), "sf_vec_size": 32,
    }  # fmt: skip
    return call, mxfp8_numbers(a, sa), mxfp8_numbers(b, sb)


def nvfp4_call(m: int, n: int, k: int, ends: list[int]) -> tuple[dict, Tensor, Tensor]:
    a, av = random_fp4(m, k)
    b, bv = random_fp4(len(ends), n, k)
    sa, sb = random_e4m3(m, k // 16), random_e4m3(len(ends), n, k // 16)
    call = {
        "a_tensor": a, "sfa_tensor": packed(sa[None]).view(E4M3),
        "padded_offsets": torch.tensor(ends, dtype=torch.int32),
        "alpha_tensor": torch.rand(len(ends)) / k,
        "b_tensor": b, "sfb_tensor": packed(sb).view(E4M3),
    }  # fmt: skip
    wide = (s.double().repeat_interleave(16, -1) for s in (sa, sb))
    return call, *(v * s for v, s in zip((av, bv), wide, strict=True))


def bf16_call(m: int, n: int, k: int, ends: list[int]) -> tuple[dict, Tensor, Tensor]:
    a, b = torch.randn(m, k).to(BF16), (torch.randn(len(ends), n, k) / k**0.5).to(BF16)
    call = {
        "a_tensor": a, "padded_offsets": torch.tensor(ends, dtype=torch.int32),
        "alpha_tensor": torch.rand(len(ends)) + 0.5, "b_tensor": b,
        "prob_tensor": torch.rand(m) + 0.5,
    }  # fmt: skip
    return call, a.double(), b.double()


CALLS = {"mxfp8": mxfp8_call, "nvfp4": nvfp4_call, "bf16": bf16_call}
SHAPE = (768, 192, 160, [256, 256, 512])


def kinds_and_activations(prefix: str) -> list[tuple[str, str]]:
    """The BF16 kernels have no SiTU-GLU."""
    acts = ("swiglu", "geglu", "situglu")
    return [(k, prefix + act) for k in CALLS for act in acts if (k, act) != ("bf16", "situglu")]


def unpacked(d: Tensor, scales: Tensor, rows: int) -> Tensor:
    """FP64 values of the first rows of row-quantized output."""
    m, columns = d.shape
    byte = scales.view(torch.uint8).permute(0, 1, 4, 3, 2, 5).reshape(m, -1)[:rows, : columns // 32]
    return mxfp8_numbers(d[:rows], byte)


@pytest.mark.parametrize(("kind", "act"), kinds_and_activations(""))
def test_glu_values(kind: str, act: str) -> None:
    call, a, b = CALLS[kind](*SHAPE)
    m, n, _, ends = SHAPE
    end, expert = ends[-1], owner(ends)
    prob = torch.rand(m) + 0.5
    bias = torch.randn(len(ends), n).to(BF16)
    extra = {"d_dtype": F8, "norm_const_tensor": ONE} if kind == "mxfp8" else {"generate_c": True}
    scales = {"sfa_tensor": None} if kind == "bf16" else {}
    done = emulator.grouped_gemm_glu_wrapper_sm100(**{
        **call, **scales, **extra, "prob_tensor": prob, "act_func": act,
        "bias_tensor": bias.t(),
    })  # fmt: skip
    c = grouped(a, b, ends) * call["alpha_tensor"].double()[expert, None] + bias[expert].double()
    h = activation(c, act) * prob[:end, None].double()
    torch.testing.assert_close(done["c_tensor"][:end].double(), c, rtol=0.004, atol=1e-4)
    if kind == "mxfp8":
        got = unpacked(done["d_tensor"], done["sfd_row_tensor"], end)
        assert relative(got, h) < 0.04
    else:
        got = done["d_tensor"][:end]
        torch.testing.assert_close(got.double(), h, rtol=0.004, atol=1e-4)
    if kind == "nvfp4":
        peaks = torch.stack([h[expert == e].abs().amax() if e != 1 else -torch.tensor(torch.inf)
                             for e in range(3)])  # fmt: skip
        torch.testing.assert_close(done["amax_tensor"][:, 0], peaks.float())


def test_mxfp8_output_is_quantized_from_unrounded_values_in_both_directions() -> None:
    call, a, b = mxfp8_call(512, 64, 64, [256, 512])
    done = emulator.grouped_gemm_glu_wrapper_sm100(
        **call,
        prob_tensor=ONE.expand(512).clone(),
        d_dtype=F8,
        norm_const_tensor=ONE,
        discrete_col_sfd=True,
    )
    c = grouped(a, b, [256, 512]) * call["alpha_tensor"].double()[owner([256, 512]), None]
    h = activation(c, "swiglu").float()
    data, scales = mxfp8(h)
    # FP32 sums differ in the last bits, so a few values may round the other way.
    assert (done["d_tensor"].float() != data.float()).float().mean() < 1e-3
    assert (flat(done["sfd_row_tensor"]) != flat(packed(scales[None]))).float().mean() < 1e-3
    data, scales = columnwise(h)
    assert (done["d_col_tensor"].float() != data.float()).float().mean() < 1e-3
    regions = per_group(scales, [256, 512]).view(-1)
    assert (flat(done["sfd_col_tensor"]) != regions).float().mean() < 1e-3


@pytest.mark.parametrize(("kind", "act"), kinds_and_activations("d"))
def test_dglu_values(kind: str, act: str) -> None:
    m, n, _, ends = SHAPE
    end, expert = ends[-1], owner(ends)
    call, a, b = CALLS[kind](*SHAPE)
    c = (2 * torch.randn(m, 2 * n)).to(BF16)
    prob, before = torch.rand(m) + 0.5, torch.randn(m)
    dprob = before.clone()
    extra = {"d_dtype": F8, "norm_const_tensor": ONE} if kind == "mxfp8" else {}
    scales = {"sfa_tensor": None} if kind == "bf16" else {}
    done = emulator.grouped_gemm_dglu_wrapper_sm100(**{
        **call, **scales, **extra, "c_tensor": c, "beta_tensor": torch.ones(3),
        "prob_tensor": prob, "dprob_tensor": dprob, "act_func": act,
        "generate_dbias": True,
    })  # fmt: skip
    dh = grouped(a, b, ends) * call["alpha_tensor"].double()[expert, None] ** 2
    pre = c[:end].double().requires_grad_()
    weight = prob[:end].double().requires_grad_()
    (activation(pre, act[1:]) * weight[:, None]).backward(dh)
    assert done["dprob_tensor"] is dprob
    added = dprob[:end] - before[:end]
    torch.testing.assert_close(added.double(), weight.grad, rtol=1e-4, atol=1e-3)
    assert torch.equal(dprob[end:], before[end:])
    dbias = torch.zeros(3, 2 * n, dtype=torch.float64).index_add_(0, expert, pre.grad)
    assert relative(done["dbias_tensor"][:, :, 0], dbias) < 0.005
    assert not done["dbias_tensor"][1].any()
    if kind == "mxfp8":
        got = unpacked(done["d_row_tensor"], done["sfd_row_tensor"], end)
        assert relative(got, pre.grad) < 0.04
    else:
        got = done["d_row_tensor"][:end]
        assert relative(got, pre.grad) < 0.003
    if kind == "nvfp4":
        halves = pre.grad.unflatten(1, (-1, 2, 32))[expert == 2].abs().amax((0, 1, 3))
        torch.testing.assert_close(done["amax_tensor"][2, :, 0], halves.float())


def in_kernel_layout(call: dict) -> dict:
    """Operands as the SReLU wrappers take them."""

    def rows(t: Tensor) -> Tensor:
        m, x = t.shape
        return t.as_strided((m, x, 1), (x, 1, m * x))

    scales = {name: call[name].permute(3, 4, 1, 5, 2, 0) for name in ("sfa_tensor", "sfb_tensor")}
    b = call["b_tensor"].permute(1, 2, 0)
    return {**call, **scales, "a_tensor": rows(call["a_tensor"]), "b_tensor": b}


def per_row(t: Tensor) -> Tensor:
    return t.as_strided((len(t), 1, 1), (1, 1, len(t)))


def physical(view: Tensor) -> Tensor:
    """Scales as they lie, of the kernels' view."""
    return view.permute(5, 2, 4, 0, 1, 3)


def column_numbers(d: Tensor, scales: Tensor, ends: list[int]) -> Tensor:
    """FP64 values of the groups' rows, of column-wise output with the scales of each group."""
    width, start, found, at = -(-d.shape[1] // 128) * 128, 0, [], 0
    for end in ends:
        blocks = (end - start) // 32
        count = width * -(-blocks // 4) * 4
        region = flat(scales)[at : at + count].view(width // 128, -1, 32, 4, 4)
        byte = region.permute(0, 3, 2, 1, 4).reshape(width, -1)[: d.shape[1], :blocks]
        found.append(mxfp8_numbers(d[start:end].mT.contiguous(), byte).mT)
        start, at = end, at + count
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_srelu_values(kind: str) -> None:
    call, a, b = CALLS[kind](*SHAPE)
    m, n, _, ends = SHAPE
    end, expert = ends[-1], owner(ends)
    prob, bias = torch.rand(m) + 0.5, torch.randn(len(ends), n).to(BF16)
    quantized = {"d_dtype": F8, "norm_const_tensor": ONE, "discrete_col_sfd": True}
    done = emulator.grouped_gemm_srelu_wrapper_sm100(
        **in_kernel_layout(call),
        **(quantized if kind == "mxfp8" else {}),
        prob_tensor=per_row(prob),
        bias_tensor=bias.t(),
    )
    c = grouped(a, b, ends) * call["alpha_tensor"].double()[expert, None] + bias[expert].double()
    h = c.clamp(min=0) ** 2 * prob[:end, None].double()
    got_c, d = done["c_tensor"][..., 0], done["d_tensor"][..., 0]
    torch.testing.assert_close(got_c[:end].double(), c, rtol=0.004, atol=1e-4)
    if kind == "nvfp4":
        torch.testing.assert_close(d[:end].double(), h, rtol=0.004, atol=1e-4)
        torch.testing.assert_close(done["amax_tensor"][2, 0], h[expert == 2].amax().float())
        assert done["amax_tensor"][1, 0] == -torch.inf
        return
    assert relative(unpacked(d, physical(done["sfd_row_tensor"]), end), h) < 0.04
    columns = done["d_col_tensor"][..., 0], physical(done["sfd_col_tensor"])
    assert relative(column_numbers(*columns, ends), h) < 0.04


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_dsrelu_values(kind: str) -> None:
    """Alpha once; the activation again, of the rounded pre-activation."""
    call, a, b = CALLS[kind](*SHAPE)
    m, n, _, ends = SHAPE
    end, expert = ends[-1], owner(ends)
    c, prob, before = (2 * torch.randn(m, n)).to(BF16), torch.rand(m) + 0.5, torch.randn(m)
    dprob = before.clone()
    quantized = {"d_dtype": F8, "norm_const_tensor": ONE, "discrete_col_sfd": True}
    done = emulator.grouped_gemm_dsrelu_wrapper_sm100(
        **in_kernel_layout(call),
        **(quantized if kind == "mxfp8" else {}),
        c_tensor=c.as_strided((m, n, 1), (n, 1, m * n)),
        prob_tensor=per_row(prob),
        dprob_tensor=per_row(dprob),
        generate_dbias=True,
    )
    dh = grouped(a, b, ends) * call["alpha_tensor"].double()[expert, None]
    pre = c[:end].double().requires_grad_()
    weight = prob[:end].double().requires_grad_()
    h = pre.relu() ** 2 * weight[:, None]
    h.backward(dh)
    added = dprob[:end] - before[:end]
    torch.testing.assert_close(added.double(), weight.grad, rtol=1e-4, atol=1e-3)
    assert torch.equal(dprob[end:], before[end:])
    dbias = torch.zeros(3, n, dtype=torch.float64).index_add_(0, expert, pre.grad)
    assert relative(done["dbias_tensor"][:, :, 0], dbias) < 0.005
    d, again = done["d_row_tensor"][..., 0], done["d_srelu_tensor"][..., 0]
    if kind == "nvfp4":
        assert relative(d[:end], pre.grad) < 0.003
        assert relative(again[:end], h.detach()) < 0.003
        assert done["amax_tensor"].shape == (3, 1)
        return
    assert relative(unpacked(d, physical(done["sfd_row_tensor"]), end), pre.grad) < 0.04
    columns = done["d_col_tensor"][..., 0], physical(done["sfd_col_tensor"])
    assert relative(column_numbers(*columns, ends), pre.grad) < 0.04
    columns = again, physical(done["sfd_col_d_srelu_tensor"])
    assert relative(column_numbers(*columns, ends), h.detach()) < 0.04


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_quant_values(kind: str, with_bias: bool) -> None:
    """Beside a bias, prob multiplies the bias alone."""
    m, n, _, ends = SHAPE
    end, expert = ends[-1], owner(ends)
    call, a, b = CALLS[kind](*SHAPE)
    prob = torch.rand(m) + 0.5
    bias = torch.randn(3, n).to(BF16)
    buffer = torch.full((m, n), 7.0, dtype=BF16)
    done = emulator.grouped_gemm_quant_wrapper_sm100(
        **call, prob_tensor=prob, d_tensor=buffer, bias_tensor=bias.t() if with_bias else None
    )
    alpha = call["alpha_tensor"].double()[expert, None]
    expected = grouped(a, b, ends) * alpha
    weight = prob[:end, None].double()
    expected = expected + bias[expert].double() * weight if with_bias else expected * weight
    assert done["d_tensor"] is buffer
    torch.testing.assert_close(buffer[:end].double(), expected, rtol=0.004, atol=1e-4)
    assert (buffer[end:] == 7).all()
    peak = expected[expert == 2].abs().amax().float()
    torch.testing.assert_close(done["amax_tensor"][2, 0], peak)
    assert done["amax_tensor"][1, 0] == -torch.inf
    silent = emulator.grouped_gemm_quant_wrapper_sm100(**call, d_tensor=buffer, generate_amax=False)
    assert silent["amax_tensor"] is None


@pytest.mark.parametrize("with_bias", [False, True])
def test_bf16_grouped_gemm_values(with_bias: bool) -> None:
    _, n, _, ends = SHAPE
    end, expert = ends[-1], owner(ends)
    call, a, b = bf16_call(*SHAPE)
    bias = torch.randn(3, n).to(BF16)
    buffer = torch.full((SHAPE[0], n), 7.0, dtype=BF16)
    done = emulator.grouped_gemm_wrapper_sm100(
        **call, bias_tensor=bias.t() if with_bias else None, d_tensor=buffer
    )
    product = grouped(a, b, ends) * call["alpha_tensor"].double()[expert, None]
    weight = call["prob_tensor"][:end, None].double()
    expected = product + bias[expert].double() * weight if with_bias else product * weight
    assert done["d_tensor"] is buffer
    torch.testing.assert_close(buffer[:end].double(), expected, rtol=0.004, atol=1e-4)
    assert (buffer[end:] == 7).all()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_nvfp4_wgrad_values(dtype: torch.dtype) -> None:
    o, i, ends, tokens = 192, 128, [64, 64, 320], 384
    starts = [0, *ends[:-1]]
    (a, av), (b, bv) = random_fp4(o, tokens), random_fp4(i, tokens)
    sa, sb = random_e4m3(o, tokens // 16), random_e4m3(i, tokens // 16)
    a, b = (
        torch.cat([
            *(x[:, s // 2 : t // 2].reshape(-1) for s, t in zip(starts, ends, strict=True)),
            x[:, ends[-1] // 2 :].reshape(-1),
        ]).view(FP4).view(x.shape)
        for x in (a.view(torch.uint8), b.view(torch.uint8))
    )  # fmt: skip
    global_a, global_b = torch.rand(3), torch.rand(3)
    start = torch.randn(3, o, i).to(dtype)
    out = start.clone()
    done = emulator.grouped_gemm_wgrad_wrapper_sm100(
        a, b.t(), per_group(sa, ends, 16).view(E4M3), per_group(sb, ends, 16).view(E4M3),
        torch.tensor(ends, dtype=torch.int32), wgrad_tensor=out, wgrad_dtype=dtype,
        global_scale_a=global_a, global_scale_b=global_b, accumulate_on_output=True,
        input_order="tensor_ragged",
    )  # fmt: skip
    assert done["wgrad_tensor"] is out
    left, right = (v * s.double().repeat_interleave(16, 1) for v, s in ((av, sa), (bv, sb)))
    for e, (s, t) in enumerate(zip(starts, ends, strict=True)):
        product = left[:, s:t] @ right[:, s:t].t() * (global_a[e] * global_b[e]).double()
        expected = start[e].double() + product
        torch.testing.assert_close(out[e].double(), expected, rtol=0.01, atol=0.05)
    assert torch.equal(out[1], start[1]), "an empty expert adds nothing"


def test_bf16_wgrad_values() -> None:
    a, b = torch.randn(768, 96).to(BF16), torch.randn(768, 64).to(BF16)
    ends = torch.tensor([256, 256, 512], dtype=torch.int32)
    dw = torch.full((3, 96, 64), torch.nan)
    emulator.grouped_gemm_wgrad_wrapper_sm100(
        a.t(), b, None, None, ends, wgrad_tensor=dw, wgrad_dtype=FP32
    )
    torch.testing.assert_close(dw[2], a[256:512].float().t() @ b[256:512].float())
    assert not dw[1].any()
