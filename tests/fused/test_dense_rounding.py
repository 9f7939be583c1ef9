"""Dense fusions round their results once on every machine: sums between ops are in FP32."""

import other_cpu
import pytest
import torch

import fusible as fz

FEATURES = 64


def assert_rounded_once(got, exact):
    """Within half a unit in the last place of ``exact``, and what FP32 sums differ by."""
    # To the nearest; the CPU of `pytest --other-cpu` rounds up or down.
    units = 0.5 if other_cpu.is_nearest() else 1.0
    rounding = units * exact.abs() * torch.finfo(got.dtype).eps
    assert ((got.double() - exact).abs() <= rounding + 2e-5 * exact.abs().max()).all()


def results(make, dtype, names, compiled, features=FEATURES):
    """Output and gradients of a module, and of it in FP64."""
    module = fz.Sequential(*make()).to(dtype)
    exact = fz.Sequential(*make()).double()
    exact.load_state_dict({k: v.double() for k, v in module.state_dict().items()})
    x = torch.randn(32, features, dtype=dtype)
    extra = [30 * torch.randn(32, features, dtype=dtype)] * module.num_extra_inputs
    dys = [torch.randn(32, features, dtype=dtype), 30 * torch.randn(32, features, dtype=dtype)]
    made = []
    for m, wide in ((module, dtype), (exact, torch.float64)):
        call = m
        if compiled and m is module:
            call = torch.compile(m, backend="aot_eager", fullgraph=True)
        given = [t.detach().to(wide).requires_grad_() for t in (x, *extra)]
        outputs = call(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = torch.autograd.grad(outputs, given, [dy.to(wide) for dy in dys[: len(outputs)]])
        made.append([*outputs, *grads])
    assert set(names) <= set(module.plan.fired)
    return made


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("in_place", [False, True])
def test_linear_scale_add(in_place, scale, dtype, compiled):
    def make():
        torch.manual_seed(0)
        scales = [] if scale is None else [fz.ConstantScale(scale)]
        return [fz.BasicLinear(FEATURES, FEATURES), *scales, fz.AddExtraInput(in_place=in_place)]

    if in_place:
        module = fz.Sequential(*make()).to(dtype)
        x = torch.randn(32, FEATURES, dtype=dtype)
        addend = 30 * torch.randn(32, FEATURES, dtype=dtype)
        exact = x.double() @ module[0].weight.double().T
        exact = addend.double() + (scale or 1.0) * exact
        call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
        with torch.no_grad():
            assert_rounded_once(call(x, addend), exact)
        assert module.plan.fired == ("linear_add",)
        return
    got, want = results(make, dtype, ["linear_add"], compiled)
    for a, b in zip(got, want, strict=True):
        assert_rounded_once(a, b)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", [FEATURES, 19])
def test_residual_and_rms_norm(features, dtype, compiled):
    """The gradients of the branch and of the norm's input are added before they are rounded."""
    got, want = results(
        lambda: [fz.MakeExtraOutput(), fz.RMSNorm(features)],
        dtype,
        ["backward_add_rms_norm"],
        compiled,
        features,
    )
    for a, b in zip(got, want, strict=True):
        assert_rounded_once(a, b)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_gradients_sum_what_is_not_rounded_yet(dtype, compiled):
    module = fz.Sequential(fz.Bias(FEATURES, dtype=dtype), fz.GELU())
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    x, dy = torch.randn(512, FEATURES, dtype=dtype), torch.randn(512, FEATURES, dtype=dtype)
    x.requires_grad_()
    (got,) = torch.autograd.grad(call(x), [module[0].bias], dy)
    assert module.plan.fired == ("backward_activation_bias",)
    wide = x.detach().double().requires_grad_()  # the bias is zero
    y = torch.nn.functional.gelu(wide, approximate="tanh")
    (exact,) = torch.autograd.grad(y, [wide], dy.double())
    assert_rounded_once(got, exact.sum(0))
