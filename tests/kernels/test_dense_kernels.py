"""The dense backwards: ops as their definitions say, kernels compiled for Hopper and Blackwell."""

import pytest
import torch
from checks import assert_no_spills

from fusible import formulas
from fusible.activations import UNARY
from fusible.kernels import dense
from fusible.kernels.dense import cuda
from fusible.kernels.dense.spec import MAX_FEATURES, ActivationBiasSpec, RMSNormSpec
from fusible.kernels.runtime.launch import compile_kernel


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


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("kernel", "spec"), KERNELS, ids=str)
def test_kernels_compile_without_spills(kernel, spec, architecture, capfd):
    pytest.importorskip("cutlass")
    compile_kernel(kernel, (spec,), f"--gpu-arch {architecture} remarks{{ptx}}")
    assert_no_spills("".join(capfd.readouterr()), architecture)
