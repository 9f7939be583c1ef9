"""The dense backwards' kernels, and the rules that use them, against FP64 on CUDA."""

import pytest
import reference as ref
import torch
import torch.nn.functional as F

import fusible as fz
from fusible import formulas
from fusible.activations import UNARY
from fusible.kernels import dense
from fusible.kernels.dense import cuda, definitions
from fusible.kernels.dense.spec import MAX_FEATURES

pytestmark = pytest.mark.gpu

ROWS = [1, 3, 4, 31, 33, 129, 1000, 9001]
DTYPES = [torch.bfloat16, torch.float16]


def tensors(count, *shape, dtype, scale=1.0):
    return [(torch.randn(shape, device="cuda") * scale).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [8, 248, 264, 4096])
@pytest.mark.parametrize("activation", UNARY)
def test_activation_bias(activation, columns, dtype):
    for rows in ROWS:
        dy, x = tensors(2, rows, columns, dtype=dtype, scale=2.0)
        assert cuda.supports_rows(x, dy)
        dx, dbias = dense.activation_bias_backward(dy, x, activation)
        exact, exact_sum = definitions.activation_bias_backward(dy.double(), x.double(), activation)
        ref.assert_accurate(dx, exact, 2)
        assert dbias.dtype == torch.float32
        largest = exact.abs().sum(0).max()
        assert (dbias.double() - exact_sum).abs().max() <= 1e-5 * largest
        again = dense.activation_bias_backward(dy, x, activation)
        assert torch.equal(again[0], dx)
        assert torch.equal(again[1], dbias)


@pytest.mark.parametrize("activation", UNARY)
def test_activation_bias_of_extreme_values(activation):
    x = torch.tensor([0.0, -0.0, 1e-30, 90.0, -90.0, 3e38, -3e38, float("nan")], device="cuda")
    x = x.bfloat16().expand(4, 8)
    dy = torch.ones_like(x)
    dx, _ = dense.activation_bias_backward(dy, x, activation)
    want, _ = UNARY[activation].backward(dy.float(), x.float())
    finite = want.isfinite() & (x.abs() < 1e38)
    torch.testing.assert_close(dx[finite].float(), want[finite], rtol=1e-2, atol=1e-2)
    assert torch.equal(dx[:, 7].isnan(), want[:, 7].isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("features", [8, 72, 256, 1000, 2048, 4096, 5120, MAX_FEATURES])
def test_rms_norm_backward(features, add, dtype):
    for rows in ROWS:
        dy, x, addend = tensors(3, rows, features, dtype=dtype)
        gain = torch.randn(features, device="cuda")
        _, rstd = formulas.rms_norm(x, gain, 1e-5)
        given = addend if add else None
        dx, dgain = dense.rms_norm_backward(dy, x, rstd, gain, given)
        wide = [t.double() for t in (dy, x, rstd, gain)]
        exact, exact_gain = definitions.rms_norm_backward(*wide, addend.double() if add else None)
        ref.assert_accurate(dx, exact, 2)
        assert (dgain.double() - exact_gain).abs().max() <= 1e-5 * rows**0.5 * 4
        again = dense.rms_norm_backward(dy, x, rstd, gain, given)
        assert torch.equal(again[0], dx)
        assert torch.equal(again[1], dgain)


def test_strided_gradients():
    dy, x = tensors(2, 64, 128, dtype=torch.bfloat16)
    gain = torch.randn(128, device="cuda")
    _, rstd = formulas.rms_norm(x, gain, 1e-5)
    for strided in (
        dy.t().contiguous().t(),
        dy[:, :1].expand(64, 128),
        dy.flatten()[1:].new_ones(64, 129)[:, 1:],
    ):
        mine = dense.rms_norm_backward(strided, x, rstd, gain, strided)
        want = dense.rms_norm_backward(strided.contiguous(), x, rstd, gain, strided.clone())
        ref.assert_equal(mine, want)
        mine = dense.activation_bias_backward(strided, x, "gelu")
        want = dense.activation_bias_backward(strided.contiguous(), x, "gelu")
        ref.assert_equal(mine, want)


@pytest.mark.parametrize("recipe", [None, fz.recipes.MXFP8BlockScaling()], ids=["none", "mxfp8"])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("make", [fz.GELU, fz.QGELU, fz.ReLU, fz.SReLU, fz.SiLU])
def test_the_rule_of_activation_and_bias(make, cached, recipe):
    options = {"device": "cuda", "dtype": torch.bfloat16}
    seq = fz.Sequential(fz.Linear(64, 128, **options), make(cached), fz.Linear(128, 64, **options))
    x = torch.randn(2, 50, 64, **options).requires_grad_()
    with fz.autocast(enabled=recipe is not None, recipe=recipe):
        y = seq(x)
        hidden = seq[0](x.detach())
    dy = torch.randn_like(y)
    y.backward(dy)
    assert "backward_activation_bias" in seq.plan.fired
    if recipe is None and not cached:
        dh = (dy @ seq[2].weight).double()
        exact, _ = UNARY[make.__name__.lower()].backward(dh, hidden.double())
        ref.assert_accurate(seq[0].bias.grad, exact.flatten(0, 1).sum(0), 8)
        ref.assert_accurate(x.grad, exact @ seq[0].weight.double(), 8)
    else:
        assert torch.isfinite(x.grad).all()
        assert seq[0].bias.grad.abs().sum() > 0


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("branch", ["used", "unused", "wider"])
def test_the_rule_of_residual_and_rms_norm(branch, zero_centered):
    dtype = torch.float32 if branch == "wider" else torch.bfloat16
    seq = fz.Sequential(
        fz.MakeExtraOutput(),
        fz.RMSNorm(256, device="cuda", dtype=dtype, zero_centered_gamma=zero_centered),
    )
    torch.nn.init.normal_(seq[1].weight)
    x = torch.randn(3, 70, 256, device="cuda", dtype=dtype, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=branch == "wider"):
        y, extra = seq(x)
    dy, dextra = torch.randn_like(y), torch.randn_like(extra)
    used = (y, extra) if branch != "unused" else (y,)
    dx, dweight = torch.autograd.grad(used, (x, seq[1].weight), (dy, dextra)[: len(used)])
    exact_x, weight = x.detach().double().requires_grad_(), seq[1].weight.detach().double()
    weight.requires_grad_()
    exact_y = F.rms_norm(exact_x, (256,), 1 + weight if zero_centered else weight, 1e-5)
    exact_used = (exact_y, exact_x)[: len(used)]
    want = torch.autograd.grad(
        exact_used, (exact_x, weight), [d.double() for d in (dy, dextra)][: len(used)]
    )
    assert "backward_add_rms_norm" in seq.plan.fired
    ref.assert_accurate(dx.bfloat16(), want[0], 6)
    ref.assert_accurate(dweight.bfloat16(), want[1], 6)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("features", [64, 4096, 16384])
def test_norms(name, zero_centered, features, dtype):
    """PyTorch's kernels, ours and the formulas: whichever serves."""
    op = getattr(fz, name)(features, device="cuda", dtype=dtype, zero_centered_gamma=zero_centered)
    for p in op.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(70, features, device="cuda", dtype=dtype, requires_grad=True)
    y = op(x)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, (x, *op.parameters()), dy)
    plain = ref.layer_norm if name == "LayerNorm" else ref.rms_norm

    def exact(x, w, *b):
        return plain(x, 1 + w if zero_centered else w, *b)

    exact_y, want = ref.gradients(exact, [x, *op.parameters()], dy)
    ref.assert_accurate(y.detach(), exact_y, 6)
    for mine, theirs in zip(grads, want, strict=True):
        ref.assert_accurate(mine, theirs, 16)


def test_dropout_on_cuda_is_torchs():
    x = torch.randn(64, 128, device="cuda", requires_grad=True)
    results = []
    for drop in (fz.Dropout(0.3), torch.nn.Dropout(0.3)):
        torch.manual_seed(1)
        y = drop(x)
        results.append((y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_sums_in_place_on_cuda():
    options = {"device": "cuda", "dtype": torch.bfloat16}
    seq = fz.Sequential(
        fz.BasicLinear(64, 64, **options), fz.ConstantScale(0.5), fz.AddExtraInput(in_place=True)
    )
    x, addend = torch.randn(32, 64, **options), torch.randn(32, 64, **options)
    exact = 0.5 * (x.double() @ seq[0].weight.double().mT) + addend.double()
    with torch.no_grad():
        y = seq(x, addend)
    assert y.data_ptr() == addend.data_ptr()
    ref.assert_accurate(y, exact.detach(), 2)


@pytest.mark.parametrize("make", [fz.GELU, fz.ReLU, fz.SiLU])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_linear_bias_activation_in_inference(make, dtype):
    seq = fz.Sequential(fz.Linear(128, 72, device="cuda", dtype=dtype), make())
    torch.nn.init.normal_(seq[0].bias)
    x = torch.randn(2, 33, 128, device="cuda", dtype=dtype)
    rows = x.double() @ seq[0].weight.double().mT + seq[0].bias.double()
    plain = {"GELU": lambda t: F.gelu(t, approximate="tanh"), "ReLU": F.relu, "SiLU": F.silu}
    with torch.inference_mode():
        y = seq(x)
    ref.assert_accurate(y, plain[make.__name__](rows).detach(), 6)
    assert seq.plan.fired == ("linear_bias_activation",)


def test_capture_in_a_graph():
    options = {"device": "cuda", "dtype": torch.bfloat16}
    seq = fz.Sequential(
        fz.MakeExtraOutput(), fz.RMSNorm(128, **options), fz.Linear(128, 128, **options), fz.SiLU()
    )
    x = torch.randn(64, 128, **options).requires_grad_()

    def step():
        y, extra = seq(x)
        return torch.autograd.grad((y, extra), (x, *seq.parameters()), (y.detach(), extra.detach()))

    for _ in range(2):
        want = step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    torch.cuda.synchronize()
    assert {"backward_activation_bias", "backward_add_rms_norm"} <= set(seq.plan.fired)
    ref.assert_equal(got, want)
