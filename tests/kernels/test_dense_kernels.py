"""Dense backwards and scaled products: ops as their definitions say, kernels compiled."""

import pytest
import torch
from checks import assert_no_spills
from number_formats import BLOCK_FP8

from fusible import formulas
from fusible.activations import UNARY
from fusible.kernels import dense, grouped
from fusible.kernels.dense import cuda, definitions
from fusible.kernels.dense.spec import MAX_FEATURES, ActivationBiasSpec, RMSNormSpec
from fusible.kernels.quantize.k_major import quantize_k_major
from fusible.kernels.runtime.launch import compile_kernel
from fusible.recipes import Float8BlockScaling, Format


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", UNARY)
def test_activation_bias_op(activation, dtype):
    dy, x = (torch.randn(6, 8).to(dtype) for _ in range(2))
    dx, dbias = dense.activation_bias_backward(dy, x, activation)
    exact_x = x.double().requires_grad_()
    y = UNARY[activation].forward(exact_x)
    (want,) = torch.autograd.grad(y, exact_x, dy.double())
    torch.testing.assert_close(dx, want.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(dbias, want.sum(0).float(), rtol=1e-5, atol=1e-5)
    torch.library.opcheck(torch.ops.fusible.activation_bias_backward.default, (dy, x, activation))


@pytest.mark.parametrize("add", [False, True])
def test_rms_norm_backward_op(add):
    dy, x, addend = (torch.randn(6, 8).bfloat16() for _ in range(3))
    gain = torch.randn(8)
    _, rstd = formulas.rms_norm(x, gain, 1e-5)
    args = (dy, x, rstd, gain, addend if add else None)
    dx, dgain = dense.rms_norm_backward(*args)
    want, want_gain = formulas.rms_norm_backward(dy, x, rstd, gain)
    assert torch.equal(dx, (want + addend * add).bfloat16())
    assert torch.equal(dgain, want_gain)
    torch.library.opcheck(torch.ops.fusible.rms_norm_backward.default, args)


def scaled_operands(rows, columns, depth, fmt=BLOCK_FP8.format):
    """FP8 operands as quantizers make them, and the end row of the only group."""
    x, w = torch.randn(rows, depth), torch.randn(1, columns, depth)
    x = quantize_k_major(x, fmt("input"), rowwise=True, columnwise=False).row
    w = quantize_k_major(w, fmt("weight"), rowwise=True, columnwise=False).row
    ends = torch.tensor([rows], dtype=torch.int32)
    return x.data, w.data[0], ends, x.scale, w.scale[0]


@pytest.mark.parametrize("sizes", [(32, 48, 512), (5, 144, 272), (0, 16, 16)], ids=str)
def test_scaled_mm(sizes):
    x, w, ends, x_scale, w_scale = args = scaled_operands(*sizes)
    rows, columns, depth = sizes
    of_x = x_scale.repeat_interleave(128, 1)[:, :depth].double()
    of_w = w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:columns, :depth].double()
    want = (x.double() * of_x) @ (w.double() * of_w).T
    torch.testing.assert_close(dense.scaled_mm(*args), want.bfloat16(), rtol=2**-7, atol=1e-4)
    assert dense.scaled_mm(*args).dtype == torch.bfloat16
    others = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(torch.ops.fusible.scaled_mm.default, args, test_utils=others)
    if rows:
        grouped_args = x, [w[None]], ends, None, None, False, None, x_scale, w_scale[None]
        assert torch.equal(dense.scaled_mm(*args), grouped.grouped_mm(*grouped_args))


def test_scaled_mm_gives_pytorch_the_layouts_that_it_reads(monkeypatch):
    """Scales ``(1, M)`` for 1x128; of 128x128, transposed, row-major with a pitch of fours."""
    monkeypatch.setattr(cuda, "_has_block_scales", lambda _: True)
    calls = []

    def product(x, w, x_scale, w_scale, *, out_dtype):
        assert x.is_contiguous()
        assert w.t().is_contiguous()
        assert x_scale.stride() == (1, x.shape[0])
        assert w_scale.t().is_contiguous()
        assert w_scale.shape[0] % 4 == 0
        assert out_dtype == torch.bfloat16
        calls.append(x.shape)
        return definitions.scaled_mm(x, w.t(), None, x_scale, w_scale.t())

    monkeypatch.setattr(torch, "_scaled_mm", product)
    x, w, ends, x_scale, w_scale = args = scaled_operands(32, 512, 1024)
    assert torch.equal(cuda.scaled_mm_pytorch(*args), definitions.scaled_mm(*args))
    # The data gradient's weight is a transposed copy, whose scales are a view.
    dy, copy, ends, dy_scale, _ = scaled_operands(32, 1024, 512)
    args = dy, copy, ends, dy_scale, w_scale.t()
    assert torch.equal(cuda.scaled_mm_pytorch(*args), definitions.scaled_mm(*args))
    assert len(calls) == 2
    for left in (
        scaled_operands(8, 512, 1024),  # rows
        scaled_operands(32, 512, 640),  # blocks
        (x, w, ends, x_scale.contiguous(), w_scale),
        scaled_operands(32, 512, 1024, Float8BlockScaling(fp8_format=Format.E5M2).format),
    ):
        assert cuda.scaled_mm_pytorch(*left) is NotImplemented

    def refuse(*_, **__):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert cuda.scaled_mm_pytorch(x, w, ends, x_scale, w_scale) is NotImplemented


@pytest.mark.parametrize(
    ("shape", "strip"), [((1, 8), 4), ((256, 1024), 4), ((4096, 4096), 28), ((99999, 8192), 128)]
)
def test_strips_of_rows(shape, strip):
    assert cuda.strip_rows(*shape, 132) == strip


KERNELS = [
    *(
        ("dense.activation_bias.activation_bias", ActivationBiasSpec(name, "bf16"))
        for name in UNARY
    ),
    ("dense.activation_bias.activation_bias", ActivationBiasSpec("gelu", "f16")),
    ("dense.rms_norm.rms_norm_backward", RMSNormSpec(8, "bf16", False)),
    ("dense.rms_norm.rms_norm_backward", RMSNormSpec(1000, "f16", True)),
    ("dense.rms_norm.rms_norm_backward", RMSNormSpec(4096, "bf16", True)),
    ("dense.rms_norm.rms_norm_backward", RMSNormSpec(MAX_FEATURES, "bf16", True)),
]


# Of each kernel one: the code is that for Hopper, which is compiled in every form.
ON_BLACKWELL = dict(KERNELS)


@pytest.mark.parametrize(
    ("kernel", "spec", "architecture"),
    [
        *[(*case, "sm_90a") for case in KERNELS],
        *[(*case, "sm_100a") for case in ON_BLACKWELL.items()],
    ],
    ids=str,
)
def test_kernels_compile_without_spills(kernel, spec, architecture, capfd):
    pytest.importorskip("cutlass")
    compile_kernel(kernel, (spec,), f"--gpu-arch {architecture} remarks{{ptx}}")
    assert_no_spills("".join(capfd.readouterr()), architecture)
