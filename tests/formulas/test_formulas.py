"""The formulas against independent statements of the same math, and their backwards."""

import functools

import pytest
import reference as ref
import torch
import torch.nn.functional as F

from fusible import formulas
from fusible.activations import GATED

SWIGLU, CLAMPED = GATED["swiglu"], GATED["clamped_qgeglu"]
SHAPES = [(12,), (5, 12), (2, 3, 12), (2, 1, 3, 12)]
LAYOUTS = [None, 1, 2, 3, 6]
GLUS = [
    pytest.param(
        *[functools.partial(f, **options) for f in (row.forward, row.backward, getattr(ref, name))],
        id=name,
    )
    for name, row, options in (
        ("swiglu", SWIGLU, {}),
        # A small limit, so that both clamps are active.
        ("clamped_qgeglu", CLAMPED, {"limit": 0.5, "alpha": 1.3, "offset": 0.25}),
        ("situglu", GATED["situglu"], {"beta1": 0.7, "beta2": 1.5}),
    )
]
UNARY = {
    "gelu": (formulas.GELU, ref.gelu),
    "qgelu": (formulas.QGELU, ref.qgelu),
    "relu": (formulas.RELU, ref.relu),
    "srelu": (formulas.SRELU, ref.srelu),
    "silu": (formulas.SILU, ref.silu),
    "sigmoid": (formulas.SIGMOID, ref.sigmoid),
}


@pytest.mark.parametrize(("unary", "independent"), UNARY.values(), ids=UNARY)
def test_functions_of_one_element_equal_their_closed_forms(unary, independent):
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    y, (dx,) = ref.gradients(independent, [x], torch.cos(x))
    torch.testing.assert_close(unary.value(x), y, rtol=1e-12, atol=1e-14)
    _, derivative = torch.func.vjp(unary.value, x)
    for mine in (unary.backward(torch.cos(x), x), derivative(torch.cos(x))[0]):
        torch.testing.assert_close(mine, dx, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", ref.LOW_PRECISION)
@pytest.mark.parametrize(("unary", "independent"), UNARY.values(), ids=UNARY)
def test_functions_of_one_element_round_once(unary, independent, dtype):
    x, dy = torch.randn(64, 32).to(dtype), torch.randn(64, 32).to(dtype)
    y, (dx,) = ref.gradients(independent, [x], dy)
    # The slope of sigmoid is taken from its rounded value; ops use it on FP32 only.
    roundings = 8 if unary is formulas.SIGMOID else 1
    for mine, exact in ((unary.value(x), y), (unary.backward(dy, x), dx)):
        assert mine.dtype == dtype
        tolerance = roundings * torch.finfo(dtype).eps
        torch.testing.assert_close(mine.double(), exact, rtol=tolerance, atol=tolerance / 8)


@pytest.mark.parametrize(("unary", "independent"), UNARY.values(), ids=UNARY)
def test_gated_by_any(unary, independent):
    x, dy = (torch.randn(5, n, dtype=torch.float64) for n in (12, 6))
    y, (dx,) = ref.gradients(lambda x: ref.glu(independent)(x, 2), [x], dy)
    torch.testing.assert_close(formulas.gated(x, None, 2, unary), y, rtol=1e-12, atol=1e-14)
    mine, none = formulas.gated_backward(dy, x, None, 2, unary)
    assert none is None
    torch.testing.assert_close(mine, dx, rtol=1e-11, atol=1e-13)


def test_scaled_srelu():
    x, dy = (torch.randn(5, 12, dtype=torch.float64) for _ in range(2))
    scales = torch.rand(5, dtype=torch.float64)
    y, grads = ref.gradients(ref.scaled_srelu, [x, scales], dy)
    torch.testing.assert_close(formulas.scaled(x, scales, formulas.SRELU), y)
    got = formulas.scaled_backward(dy, x, scales, formulas.SRELU)
    torch.testing.assert_close(got, grads, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms_and_their_backwards(name, zero_centered):
    x, dy = (torch.randn(7, 12, dtype=torch.float64) for _ in range(2))
    params = [torch.randn(12, dtype=torch.float64) for _ in range(1 + (name == "layer_norm"))]
    formula, backward = getattr(formulas, name), getattr(formulas, f"{name}_backward")

    def independent(x, w, *b):
        return getattr(F, name)(x, (12,), 1 + w if zero_centered else w, *b, eps=1e-3)

    y, grads = ref.gradients(independent, [x, *params], dy)
    mine, *statistics = formula(x, *params, 1e-3, zero_centered)
    torch.testing.assert_close(mine, y)
    _, derivative = torch.func.vjp(lambda *a: formula(*a, 1e-3, zero_centered)[0], x, *params)
    by_hand = backward(dy, x, *statistics, params[0], zero_centered)
    for a, b, exact in zip(by_hand, derivative(dy), grads, strict=True):
        torch.testing.assert_close(a, exact, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(b, exact, rtol=1e-11, atol=1e-13)


def test_l2_normalize_and_its_backward():
    x, dy = (torch.randn(7, 12, dtype=torch.float64) for _ in range(2))
    y, (dx,) = ref.gradients(ref.l2_normalize, [x], dy)
    mine, rnorm = formulas.l2_normalize(x, 1e-6)
    torch.testing.assert_close(mine, y)
    torch.testing.assert_close(formulas.l2_normalize_backward(dy, x, rnorm), dx)


@pytest.mark.parametrize("interleave", LAYOUTS)
def test_glu_layout(interleave):
    x = torch.arange(24.0).view(2, 12)
    gate, linear = formulas.split_glu(x, interleave)
    expected = ref.halves(x, interleave)
    assert torch.equal(gate, expected[0])
    assert torch.equal(linear, expected[1])
    assert torch.equal(formulas.join_glu(gate, linear, interleave), x)


def test_interleaved_by_half_is_not_interleaved():
    x = torch.randn(4, 12, dtype=torch.float64)
    assert torch.equal(SWIGLU.forward(x, None, 6), SWIGLU.forward(x))


def test_gpt_oss_activation_equals_the_models_own_lines():
    x = torch.randn(16, 24, dtype=torch.float64) * 6
    # openai/gpt-oss, torch/model.py: swiglu(x, alpha=1.702, limit=7.0), features alternating.
    x_glu, x_linear = x[..., ::2], x[..., 1::2]
    x_glu = x_glu.clamp(min=None, max=7.0)
    x_linear = x_linear.clamp(min=-7.0, max=7.0)
    theirs = x_glu * torch.sigmoid(1.702 * x_glu) * (x_linear + 1)
    torch.testing.assert_close(CLAMPED.forward(x, None, 1), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("interleave", LAYOUTS)
@pytest.mark.parametrize(("formula", "backward", "independent"), GLUS)
def test_glu_and_its_backward(formula, backward, independent, interleave, scaled, shape):
    x = torch.randn(shape, dtype=torch.float64)
    scales = torch.rand(shape[:-1], dtype=torch.float64) if scaled else None
    dy = torch.randn(*shape[:-1], shape[-1] // 2, dtype=torch.float64)
    args = (x,) if scales is None else (x, scales)

    y, grads = ref.gradients(lambda *a: independent(*a, interleave=interleave), args, dy)
    torch.testing.assert_close(formula(*args, interleave=interleave), y, rtol=1e-12, atol=1e-14)

    by_hand = backward(dy, x, scales, interleave)
    assert (by_hand[1] is None) == (not scaled)
    _, derivative = torch.func.vjp(lambda *a: formula(*a, interleave=interleave), *args)
    for mine, theirs, exact in zip(by_hand, derivative(dy), grads, strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(mine, exact, rtol=1e-11, atol=1e-13)


def test_clamps_pass_the_gradient_at_the_limit_itself():
    x = torch.tensor([[7.0, 8.0, 1.0, 1.0, 7.0, -7.0, 7.5, -7.5]], dtype=torch.float64)
    dy = torch.ones(1, 4, dtype=torch.float64)
    _, derivative = torch.func.vjp(CLAMPED.forward, x)
    dx, _ = CLAMPED.backward(dy, x)
    torch.testing.assert_close(dx, derivative(dy)[0], rtol=1e-12, atol=1e-14)
    assert (dx[0, [0, 4, 5]] != 0).all()
    assert (dx[0, [1, 6, 7]] == 0).all()


@pytest.mark.parametrize("dtype", ref.LOW_PRECISION)
@pytest.mark.parametrize(("formula", "backward", "independent"), GLUS)
def test_low_precision_rounds_once(formula, backward, independent, dtype):
    """Arithmetic is in FP32, so only the result's own rounding remains."""
    x, dy = torch.randn(64, 32).to(dtype), torch.randn(64, 16).to(dtype)
    scales = torch.rand(64).to(dtype)
    y, (dx, dscales) = ref.gradients(independent, [x, scales], dy)
    mine = (formula(x, scales), *backward(dy, x, scales))
    for t, exact in zip(mine, (y, dx, dscales), strict=True):
        assert t.dtype == dtype
        torch.testing.assert_close(t.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradient_of_scales_has_their_dtype(dtype):
    x, dy = torch.randn(6, 8), torch.randn(6, 4)
    scales = torch.rand(6).to(dtype)
    _, dscales = SWIGLU.backward(dy, x, scales)
    assert dscales.dtype == dtype
    _, (_, exact) = ref.gradients(ref.swiglu, [x, scales], dy)
    torch.testing.assert_close(
        dscales.double(), exact, rtol=max(torch.finfo(dtype).eps, 1e-5), atol=1e-6
    )


def test_math_dtype():
    wide = {d: formulas.math_dtype(d) for d in (*ref.DTYPES, torch.float64)}
    assert wide.pop(torch.float64) == torch.float64
    assert set(wide.values()) == {torch.float32}


def test_cast_leaves_a_tensor_of_that_dtype_alone():
    x = torch.randn(3)
    assert formulas.cast(x, torch.float32) is x
    assert torch.equal(formulas.cast(x, torch.bfloat16), x.bfloat16())
