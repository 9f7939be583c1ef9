"""Gradients against FP64 autograd of an independent reference, over random ragged splits."""

import pytest
import reference as ref
import torch
from every_op import randomised
from hypothesis import given, settings
from hypothesis import strategies as st

import fusible as fz

CASES = settings(max_examples=200, deadline=None, derandomize=True, database=None)

# Ragged on purpose: empty groups are as likely as full ones, and some rows belong to no group.
splits = st.lists(st.one_of(st.just(0), st.integers(1, 5)), min_size=1, max_size=6)
unused_rows = st.integers(0, 4)
activations = st.sampled_from(["swiglu", "clamped"])
interleaves = st.sampled_from([None, 1, 2, 4])
seeds = st.integers(0, 2**31 - 1)


@st.composite
def configurations(draw):
    """Options of both linears, with a scale for the bias only where there is a bias."""
    bias = draw(st.booleans())
    return {
        "bias": bias,
        "scale_bias": bias and draw(st.booleans()),
        "single_grouped_weight": draw(st.booleans()),
        "single_grouped_bias": draw(st.booleans()),
    }


def activation(name, interleave):
    """The op and the same independently, in a range where the clamps matter."""
    if name == "swiglu":
        return fz.ScaledSwiGLU(interleave), lambda x, s: ref.swiglu(x, s, interleave)
    op = fz.ScaledClampedQGeGLU(interleave, limit=0.75)
    return op, lambda x, s: ref.clamped_qgeglu(x, s, interleave, limit=0.75)


def check(module, plain, inputs, extra, y_shape):
    """Values, and the gradient of every tensor that requires one, against the reference."""
    tensors = [*inputs, *module.parameters()]
    dy = torch.randn(y_shape, dtype=torch.float64)
    exact_y, exact = ref.gradients(plain, tensors, dy)
    y = module(*extra)
    torch.testing.assert_close(y.detach(), exact_y, rtol=1e-9, atol=1e-10)
    if y.requires_grad:
        y.backward(dy)
    for t, expected in zip(tensors, exact, strict=True):
        assert (t.grad is not None) == t.requires_grad
        if t.requires_grad:
            torch.testing.assert_close(t.grad, expected, rtol=1e-9, atol=1e-10)


@CASES
@given(
    sizes=splits,
    unused=unused_rows,
    options1=configurations(),
    options2=configurations(),
    name=activations,
    interleave=interleaves,
    frozen=st.lists(st.booleans(), min_size=7, max_size=7),
    seed=seeds,
)
def test_grouped_mlp(sizes, unused, options1, options2, name, interleave, frozen, seed):
    torch.manual_seed(seed)
    rows, groups, wide = sum(sizes) + unused, len(sizes), {"dtype": torch.float64}
    act, plain_act = activation(name, interleave)
    fc1 = fz.GroupedLinear(groups, 3, 16, **options1, **wide)
    fc2 = fz.GroupedLinear(groups, 8, 5, **options2, **wide)
    mlp = randomised(fz.Sequential(fc1, act, fc2), None)
    x = torch.randn(rows, 3, **wide, requires_grad=not frozen[0])
    scales = [torch.rand(rows, **wide, requires_grad=not frozen[i]) for i in (1, 2, 3)]
    of1 = scales[:1] if fc1.scale_bias else []
    of2 = scales[2:] if fc2.scale_bias else []
    # Whole kinds are frozen: all weights of an op or none, all biases or none.
    for op, freeze in ((fc1, frozen[3:5]), (fc2, frozen[5:7])):
        for p in op.weights():
            p.requires_grad_(not freeze[0])
        for p in op.biases():
            p.requires_grad_(not freeze[1])
    n1 = len(list(fc1.parameters()))

    def plain(x, *rest):
        s1, rest = rest[: len(of1)], rest[len(of1) :]
        s, rest = rest[0], rest[1:]
        s2, params = rest[: len(of2)], rest[len(of2) :]
        h = ref.grouped_linear(x, *ref.matrices(fc1, params[:n1], sizes), *s1)
        h = plain_act(h, s)
        return ref.grouped_linear(h, *ref.matrices(fc2, params[n1:], sizes), *s2)

    inputs = [x, *of1, scales[1], *of2]
    device_splits = torch.tensor(sizes)
    extra = (x, device_splits, *of1, scales[1], device_splits, *of2)
    check(mlp, plain, inputs, extra, (rows, 5))


@CASES
@given(
    sizes=splits,
    unused=unused_rows,
    options=configurations(),
    needs=st.lists(st.booleans(), min_size=4, max_size=4),
    seed=seeds,
)
def test_grouped_linear(sizes, unused, options, needs, seed):
    torch.manual_seed(seed)
    rows, wide = sum(sizes) + unused, {"dtype": torch.float64}
    op = randomised(fz.GroupedLinear(len(sizes), 3, 4, **options, **wide), None)
    x = torch.randn(rows, 3, **wide, requires_grad=needs[0])
    scales = [torch.rand(rows, **wide, requires_grad=needs[1])] if op.scale_bias else []
    for p in op.weights():
        p.requires_grad_(needs[2])
    for p in op.biases():
        p.requires_grad_(needs[3])

    def plain(x, *rest):
        s, params = rest[: len(scales)], rest[len(scales) :]
        return ref.grouped_linear(x, *ref.matrices(op, params, sizes), *s)

    check(op, plain, [x, *scales], (x, torch.tensor(sizes), *scales), (rows, 4))


# One dense run of every other op, in an order that random choices make.
DENSE = {
    "linear": (lambda: fz.Linear(8, 8), lambda h, w, b: h @ w.T + b, 2),
    "basic": (lambda: fz.BasicLinear(8, 8), lambda h, w: h @ w.T, 1),
    "bias": (lambda: fz.Bias(8), lambda h, b: h + b, 1),
    "gelu": (fz.GELU, lambda h: torch.nn.functional.gelu(h, approximate="tanh"), 0),
    "silu": (fz.SiLU, lambda h: h * ref.sigmoid(h), 0),
    "relu": (fz.ReLU, lambda h: torch.where(h > 0, h, 0), 0),
    "scale": (lambda: fz.ConstantScale(0.7), lambda h: 0.7 * h, 0),
    "identity": (fz.Identity, lambda h: h, 0),
    "widen, gate": (
        lambda: fz.Sequential(fz.BasicLinear(8, 16), fz.SwiGLU(glu_interleave_size=2)),
        lambda h, w: ref.swiglu(h @ w.T, None, 2),
        1,
    ),
    "reshape": (
        lambda: fz.Sequential(fz.Reshape((-1, 4)), fz.SiLU(), fz.Reshape((-1, 8))),
        lambda h: h * ref.sigmoid(h),
        0,
    ),
    "add": (fz.AddExtraInput, None, 0),
    "fork": (fz.MakeExtraOutput, None, 0),
}


@CASES
@given(
    names=st.lists(st.sampled_from(sorted(DENSE)), min_size=1, max_size=6),
    frozen=st.lists(st.booleans(), min_size=14, max_size=14),
    seed=seeds,
)
def test_random_runs_of_dense_ops(names, frozen, seed):
    """Whatever fuses in a random run, values and gradients are those of the ops one by one."""
    torch.manual_seed(seed)
    seq = randomised(fz.Sequential(*(DENSE[name][0]() for name in names)).double(), None)
    for p, freeze in zip(seq.parameters(), frozen[1:], strict=False):
        p.requires_grad_(not freeze)
    wide = {"dtype": torch.float64}
    x = torch.randn(3, 8, **wide, requires_grad=not frozen[0])
    addends = [torch.randn(3, 8, **wide, requires_grad=f) for f in frozen[: names.count("add")]]

    def plain(x, *rest):
        extra, params = list(rest[: len(addends)]), list(rest[len(addends) :])
        outputs, h = [], x
        for name in names:
            if name == "add":
                h = h + extra.pop(0)
            elif name == "fork":
                outputs.append(h)
            else:
                _, formula, count = DENSE[name]
                h = formula(h, *params[:count])
                params = params[count:]
        return torch.cat([h, *outputs])

    def module(*inputs):
        out = seq(*inputs)
        return torch.cat(out) if isinstance(out, tuple) else out

    module.parameters = seq.parameters
    check(module, plain, [x, *addends], (x, *addends), (3 * (1 + names.count("fork")), 8))


@pytest.mark.parametrize(
    "test", [test_grouped_mlp, test_grouped_linear, test_random_runs_of_dense_ops]
)
def test_at_least_200_cases_each(test):
    """The number of cases is part of what these tests promise."""
    assert test._hypothesis_internal_use_settings.max_examples >= 200
