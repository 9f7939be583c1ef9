"""What ops do beside their math: caching in FP8, dropping out, writing in place, loading."""

import copy
from contextlib import nullcontext

import pytest
import reference as ref
import torch
import torch.nn.functional as F
from checks import saved_tensors
from every_op import ACTIVATIONS, NORMS, OPS, SCALED, extra_inputs, randomised
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusible as fz

UNARY = [fz.GELU, fz.QGELU, fz.ReLU, fz.SReLU, fz.SiLU]
GATED = [fz.GLU, fz.GEGLU, fz.QGEGLU, fz.ReGLU, fz.SReGLU, fz.SwiGLU, fz.ClampedSwiGLU, fz.SiTUGLU]


def grads_of(module, *inputs, dy=None):
    y = module(*inputs)
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    dy = torch.ones_like(y) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


# --- cache_quantized_input -----------------------------------------------------------------------


def test_an_input_of_fp64_is_saved_as_it_is():
    """No format has its precision."""
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    made = [
        torch.autograd.grad(fz.SReLU(cache_quantized_input=cached)(x).sum(), x)
        for cached in (False, True)
    ]
    assert torch.equal(*[dx for (dx,) in made])


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("make", [*UNARY, *GATED])
def test_a_cached_input_is_saved_in_fp8_and_only_the_gradient_sees_it(make, dtype):
    cached, plain = make(cache_quantized_input=True), make()
    x = (torch.randn(3, 4, 272) * torch.randint(-6, 2, (3, 4, 1)).exp2()).to(dtype)
    x.requires_grad_()
    with saved_tensors() as saved:
        y = cached(x)
    assert [(t.dtype, t.numel()) for t in saved] == [
        (torch.float8_e4m3fn, x.numel()), (torch.float32, 3 * 4 * 3)
    ]  # fmt: skip
    assert torch.equal(y, plain(x))
    dy = torch.randn(y.shape).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    rounded = ref.in_fp8(x.detach()).requires_grad_()
    (want,) = torch.autograd.grad(plain(rounded), rounded, dy)
    exact_dx = torch.autograd.grad(plain(x), x, dy)[0]
    torch.testing.assert_close(dx, want, rtol=2**-20, atol=2**-20)
    error = (dx - exact_dx).float().norm() / exact_dx.float().norm()
    assert error == 0 if make is fz.ReLU else 0 < error < 0.1  # of ReLU only the sign counts


@pytest.mark.parametrize(
    "make", [fz.ScaledSwiGLU, fz.ScaledSReLU, fz.ScaledClampedQGeGLU, fz.ScaledSiTUGLU]
)
def test_a_cached_input_with_scales(make):
    x = torch.randn(5, 272).bfloat16().requires_grad_()
    scales = torch.rand(5, requires_grad=True)
    y = make(cache_quantized_input=True)(x, scales)
    assert torch.equal(y, make()(x, scales))
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, scales), dy)
    rounded = ref.in_fp8(x.detach()).requires_grad_()
    want = torch.autograd.grad(make()(rounded, scales), (rounded, scales), dy)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("make", [fz.GELU, fz.SwiGLU])
def test_a_cached_input_near_the_largest_number_of_fp16(make):
    """E4M3 rounds 64000 to 65536."""
    x = torch.full((2, 4), 0.5, dtype=torch.float16)
    x[0, 0], x[1, 1] = 64000.0, -64000.0
    x.requires_grad_()
    for cached in (True, False):
        y = make(cache_quantized_input=cached)(x)
        (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 1e-3))
        assert dx.isfinite().all()


@pytest.mark.parametrize("shape", [(), (0, 8), (3, 0), (8,), (2, 2, 2, 8)])
def test_cached_inputs_of_any_shape(shape):
    x = torch.randn(shape, requires_grad=True)
    (dx,) = torch.autograd.grad(fz.SReLU(cache_quantized_input=True)(x).sum(), x)
    torch.testing.assert_close(dx, 2 * x.detach().clamp(min=0), rtol=0.07, atol=0.02)


def test_caching_works_under_a_fused_forward_and_says_so():
    seq = fz.Sequential(fz.Linear(8, 8), fz.GELU(cache_quantized_input=True))
    x = torch.randn(4, 8, requires_grad=True)
    text = str(fz.explain(seq, x))
    assert "saves x in FP8 with its scales" in text
    assert "GELU(cache_quantized_input=True)" in text
    grads = grads_of(seq, x)
    assert seq.plan.fired[0] == "linear_bias_activation"
    seq[1] = fz.GELU()
    for got, want in zip(grads, grads_of(seq, x), strict=True):
        assert (got - want).norm() <= 0.1 * want.norm()


def test_only_scaled_srelu_takes_activation_recompute():
    op = fz.ScaledSReLU(activation_recompute_in_mlp=True)
    x, scales = torch.randn(3, 8), torch.rand(3)
    assert torch.equal(op(x, scales), fz.ScaledSReLU()(x, scales))
    assert "activation_recompute_in_mlp has no effect unfused" in str(fz.explain(op, x, scales))
    assert "no effect" not in str(fz.explain(fz.ScaledSReLU(), x, scales))
    for make in (fz.ScaledSwiGLU, fz.ScaledClampedQGeGLU, fz.ScaledSiTUGLU):
        assert make(activation_recompute_in_mlp=False) is not None
        with pytest.raises(ValueError, match="only ScaledSReLU takes it"):
            make(activation_recompute_in_mlp=True)


# --- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ref.DTYPES)
def test_dropout_is_torchs_of_the_same_seed(dtype):
    x = torch.randn(40, 50).to(dtype).requires_grad_()
    dy = torch.randn(40, 50).to(dtype)
    results = []
    for drop in (fz.Dropout(0.3), nn.Dropout(0.3)):
        torch.manual_seed(5)
        results.append(grads_of(drop, x, dy=dy))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(p):
    x = torch.randn(4, 8, requires_grad=True)
    y, dx = grads_of(fz.Dropout(p), x)
    assert torch.equal(y, (1 - p) * x)
    assert torch.equal(dx, torch.full_like(x, 1 - p))
    draws = []
    for drop in (fz.Dropout(p), nn.Dropout(p)):
        torch.manual_seed(5)
        drop(x)
        draws.append(torch.rand(3))
    assert torch.equal(*draws)  # it draws as many numbers as PyTorch's


def test_dropout_obeys_train_and_eval_call_by_call():
    seq = fz.Sequential(fz.Linear(8, 8), fz.Dropout(0.5))
    x = torch.ones(64, 8)
    for _ in range(2):
        assert (seq.train()(x) == 0).float().mean() > 0.3
        torch.testing.assert_close(seq.eval()(x), seq[0](x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_drops_the_same_elements_again(reentrant):
    seq = fz.Sequential(fz.LayerNorm(8), fz.Linear(8, 16), fz.Dropout(0.5), fz.GEGLU())
    x = torch.randn(64, 8, requires_grad=True)
    results = []
    for call in (seq, lambda x: checkpoint(seq, x, use_reentrant=reentrant)):
        torch.manual_seed(7)
        y = call(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in seq.parameters())])
        x.grad = None
        seq.zero_grad()
    ref.assert_equal(*results)


# Dynamo instantiates the autograd function itself to trace it.
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_dropout_drops_and_stops_in_evaluation():
    seq = fz.Sequential(fz.Linear(8, 8), fz.Dropout(0.5))
    compiled = torch.compile(seq, fullgraph=True, backend="aot_eager")
    x = torch.ones(64, 8, requires_grad=True)
    y = compiled(x)
    kept = y != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(y[kept], 2 * seq[0](x)[kept])
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(dx, 2 * kept.float() @ seq[0].weight)
    seq.eval()
    torch.testing.assert_close(compiled(x), seq[0](x))


# --- in place -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_an_in_place_sum_is_the_extra_input(fused):
    ops = [fz.BasicLinear(8, 8), fz.ConstantScale(0.5)] if fused else [fz.GELU()]
    mine = fz.Sequential(*ops, fz.AddExtraInput(in_place=True))
    plain = fz.Sequential(*ops, fz.AddExtraInput())
    for shape in [(3, 8), (2, 3, 8)]:
        x = torch.randn(shape, requires_grad=True)
        addend = torch.randn(shape)
        leaf = addend.clone().requires_grad_()
        into = leaf.clone()  # a leaf that requires a gradient is not written to
        want = grads_of(plain, x, addend.requires_grad_())
        y = mine(x, into)
        assert y.data_ptr() == into.data_ptr()
        torch.testing.assert_close(y, want[0])
        assert torch.equal(into, y)
        got = torch.autograd.grad(y, (x, leaf, *mine.parameters()), torch.ones_like(y))
        torch.testing.assert_close(got, want[1:])
    assert ("linear_add" in mine.plan.fired) == fused


@pytest.mark.parametrize("strided", [False, True])
def test_an_in_place_sum_into_a_slice(strided):
    mine = fz.Sequential(fz.BasicLinear(8, 8), fz.AddExtraInput(in_place=True))
    x, buffer = torch.randn(2, 3, 8), torch.randn(2, 3, 16)
    addend = buffer[..., ::2] if strided else buffer[..., :8]
    want = addend + mine[0](x)
    with torch.no_grad():
        y = mine(x, addend)
    assert y.data_ptr() == buffer.data_ptr()
    torch.testing.assert_close(buffer[..., ::2] if strided else buffer[..., :8], want)


def test_autograd_sees_a_sum_in_place():
    """What saved the extra input before the sum must not compute a gradient from it after."""
    leaf = torch.randn(3, 8, requires_grad=True)
    addend = leaf * 1
    before = addend.square().sum()
    fz.AddExtraInput(in_place=True)(torch.randn(3, 8), addend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


def test_a_sum_is_not_written_into_what_the_run_saved():
    """A tensor of the caller, or one that the run made, is left as it is."""
    x = torch.randn(3, 8, requires_grad=True)
    norm = fz.RMSNorm(8)
    seq = fz.Sequential(norm, fz.AddExtraInput(in_place=True))
    h = x * 1
    torch.testing.assert_close(seq(h, h), x + norm(x))
    assert torch.equal(h, x)
    wired = fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
        norm,
        fz.AddExtraInput(in_place=True).set_extra_input_channel(0, "r"),
    )
    for scope in (nullcontext, torch.no_grad):
        with scope():
            torch.testing.assert_close(wired(x * 1), x + norm(x))


@pytest.mark.parametrize("fused", [False, True])
def test_a_sum_in_place_of_no_rows(fused):
    """Empty tensors have one address, and share nothing."""
    seq = fz.Sequential(fz.BasicLinear(8, 8) if fused else fz.RMSNorm(8))
    seq.append(fz.AddExtraInput(in_place=True))
    x, addend = torch.zeros(0, 8, requires_grad=True), torch.zeros(0, 8)
    y = seq(x, addend)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 8)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_does_not_add_twice(fused, reentrant):
    op = fz.BasicLinear(8, 8) if fused else fz.GELU()
    seq = fz.Sequential(op, fz.AddExtraInput(in_place=True))
    x, addend = torch.randn(3, 8, requires_grad=True), torch.zeros(3, 8)
    y = checkpoint(seq, x, addend, use_reentrant=reentrant)
    once = addend.clone()
    with pytest.raises(RuntimeError, match=r"in_place=False inside|modified by an inplace"):
        y.sum().backward()
    assert torch.equal(addend, once)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_autograd_gives_are_not_written_to(fused):
    module = fz.BasicLinear(8, 8) if fused else fz.GELU()
    x = torch.randn(4, 8, requires_grad=True)
    dy, dbranch = torch.randn(4, 8), torch.randn(4, 8)
    for in_place in (False, True):
        seq = fz.Sequential(fz.MakeExtraOutput(in_place=in_place), module)
        y, branch = seq(x)
        given = dbranch.clone()
        (dx,) = torch.autograd.grad((y, branch), x, (dy, given))
        (through,) = torch.autograd.grad(module(x), x, dy)
        torch.testing.assert_close(dx, dbranch + through)
        assert torch.equal(given, dbranch)
    assert ("backward_linear_add" in seq.plan.fired) == fused


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_cannot_be_written_to(fused):
    """One gradient for both outputs, and one that is a single element expanded."""
    module = fz.BasicLinear(8, 8) if fused else fz.GELU()
    seq = fz.Sequential(fz.MakeExtraOutput(in_place=True), module)
    x = torch.randn(4, 8, requires_grad=True)
    (through,) = torch.autograd.grad(module(x).sum(), x)
    y, branch = seq(x)
    (dx,) = torch.autograd.grad((y + branch).sum(), x)
    torch.testing.assert_close(dx, through + 1)
    y, branch = seq(x)
    dy = torch.randn(4, 8)
    (dx,) = torch.autograd.grad((y + branch), x, dy.clone())
    (through,) = torch.autograd.grad(module(x), x, dy)
    torch.testing.assert_close(dx, through + dy)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_sums_in_place():
    seq = fz.Sequential(
        fz.MakeExtraOutput(in_place=True), fz.BasicLinear(8, 8), fz.AddExtraInput(in_place=True)
    )
    compiled = torch.compile(seq, fullgraph=True, backend="aot_eager")
    x, addend = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    results = []
    for call in (seq, compiled):
        y, branch = call(x, addend.clone())
        results.append([y.detach(), *torch.autograd.grad((y, branch), x, [torch.ones(4, 8)] * 2)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


# --- autocast, dtypes, devices -------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ACTIVATIONS, *SCALED, *NORMS, "Dropout, in evaluation"])
def test_autocast_gives_outputs_its_dtype_and_gradients_their_own(name):
    op = randomised(OPS[name].make(8))
    x = torch.randn(6, 8, requires_grad=True)
    extra = extra_inputs(op, x)
    with torch.autocast("cpu", torch.bfloat16):
        y = op(x, *extra)
    dy = torch.randn(y.shape).bfloat16()
    tensors = [x.detach().bfloat16(), *extra, *op.parameters()]
    exact_y, exact = ref.gradients(OPS[name].plain, tensors, dy)
    assert y.dtype == torch.bfloat16
    ref.assert_accurate(y.detach(), exact_y)
    for t, want in zip([x, *extra, *op.parameters()], exact, strict=True):
        (grad,) = torch.autograd.grad(y, t, dy, retain_graph=True)
        assert grad.dtype == torch.float32
        ref.assert_accurate(grad.bfloat16(), want)


@pytest.mark.parametrize("name", NORMS)
def test_norms_return_the_weights_dtype(name):
    """Weights in FP32 beside BF16 activations is what many models have; FP32 comes out."""
    op = randomised(OPS[name].make(8))
    x = torch.randn(6, 8).bfloat16().requires_grad_()
    dtype = torch.float32 if [*op.parameters()] else torch.bfloat16
    dy = torch.randn(6, 8, dtype=dtype)
    y, dx, *grads = grads_of(op, x, dy=dy)
    exact_y, exact = ref.gradients(OPS[name].plain, [x, *op.parameters()], dy)
    assert y.dtype == dtype
    assert dx.dtype == torch.bfloat16
    ref.assert_accurate(y, exact_y)
    ref.assert_accurate(dx, exact[0])
    for p, grad, want in zip(op.parameters(), grads, exact[1:], strict=True):
        assert grad.dtype == p.dtype == torch.float32
        ref.assert_accurate(grad, want, 8)


@pytest.mark.parametrize("shape", [(2, 8), (3, 2, 8)])
def test_norms_over_several_dimensions(shape):
    x = torch.randn(4, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    for make, plain in ((fz.LayerNorm, F.layer_norm), (fz.RMSNorm, F.rms_norm)):
        op = randomised(make(shape, dtype=torch.float64))
        got = grads_of(op, x)
        y = plain(x, shape, *op.parameters(), eps=1e-5)
        want = torch.autograd.grad(y, (x, *op.parameters()), torch.ones_like(y))
        torch.testing.assert_close(got, (y, *want))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OPS)
def test_an_op_cast_after_its_first_call(name, dtype):
    op = randomised(OPS[name].make(8))
    x = torch.randn(6, 8)
    extra = extra_inputs(op, x)
    op(x, *extra)
    op.to(dtype)
    x, extra = x.to(dtype), [t.detach().to(dtype) for t in extra]
    exact, _ = ref.gradients(OPS[name].plain, [x, *extra, *op.parameters()], op(x, *extra))
    ref.assert_accurate(op(x, *extra).detach(), exact)


LAYER = {
    "LayerNorm": lambda **o: fz.LayerNorm(8, **o),
    "RMSNorm": lambda **o: fz.RMSNorm((2, 4), zero_centered_gamma=True, **o),
    "Linear": lambda **o: fz.Linear(8, 6, **o),
    "BasicLinear": lambda **o: fz.BasicLinear(8, 6, **o),
    "Bias": lambda **o: fz.Bias(8, **o),
    "GroupedLinear": lambda **o: fz.GroupedLinear(2, 8, 6, **o),
}


@pytest.mark.parametrize("name", LAYER)
def test_meta_then_to_empty_then_reset_is_construction(name):
    torch.manual_seed(1)
    built = LAYER[name]()
    op = LAYER[name](device="meta")
    assert all(p.is_meta for p in op.parameters())
    op.to_empty(device="cpu")
    for p in op.parameters():
        nn.init.constant_(p, float("nan"))
    torch.manual_seed(1)
    op.reset_parameters()
    assert list(op.state_dict()) == list(built.state_dict())
    ref.assert_equal(op.parameters(), built.parameters())
    x, splits = torch.randn(3, 2, 4) if name == "RMSNorm" else torch.randn(3, 8), [2, 1]
    splits = [splits] if name == "GroupedLinear" else []
    assert torch.equal(op(x, *splits), built(x, *splits))


def test_norms_start_as_the_identity():
    x = F.layer_norm(torch.randn(4, 8), (8,), eps=0)
    for make in (fz.LayerNorm, fz.RMSNorm):
        for zero_centered in (False, True):
            op = make(8, eps=0, zero_centered_gamma=zero_centered)
            assert torch.equal(op.weight, torch.full((8,), 0.0 if zero_centered else 1.0))
            torch.testing.assert_close(op(x), x)


@pytest.mark.parametrize("name", OPS)
def test_an_inference_loop(name):
    op = randomised(OPS[name].make(8))
    x = torch.randn(6, 8)
    extra = [t.detach() for t in extra_inputs(op, x)]
    want = op(x, *extra)
    with torch.inference_mode():
        for _ in range(3):
            y = op(x, *extra)
            assert torch.equal(y, want)
            op(op(x, *extra).view(x.shape) if y.shape == x.shape else x, *extra)
    assert torch.equal(op(x, *extra), want)  # training may follow


# --- state dicts ---------------------------------------------------------------------------------


def test_state_dicts_with_transformer_engines_names():
    """``te.ops.Linear`` saves by basic op, and every op an ``_extra_state``."""
    make = lambda: fz.Sequential(  # noqa: E731
        fz.RMSNorm(8), fz.Linear(8, 16), fz.SwiGLU(), fz.Linear(8, 8, bias=False), fz.LayerNorm(8)
    )
    model, empty = make(), torch.empty(0, dtype=torch.uint8)
    theirs = {
        "0.weight": torch.randn(8),
        "0._extra_state": empty,
        "1.basic_ops.0.weight": torch.randn(16, 8),
        "1.basic_ops.0._extra_state": empty,
        "1.basic_ops.1.bias": torch.randn(16),
        "1.basic_ops.1._extra_state": empty,
        "2._extra_state": empty,
        "3.basic_ops.0.weight": torch.randn(8, 8),
        "3.basic_ops.0._extra_state": empty,
        "4.weight": torch.randn(8),
        "4.bias": torch.randn(8),
        "4._extra_state": empty,
    }
    given = dict(theirs)
    for target in (model, copy.deepcopy(make())):
        target.load_state_dict(theirs, strict=True)
        assert theirs.keys() == given.keys()  # what was passed is not changed
        mine = target.state_dict()
        want = {
            k.replace("basic_ops.0.", "").replace("basic_ops.1.", ""): v for k, v in theirs.items()
        }
        want = {k: v for k, v in want.items() if "_extra_state" not in k}
        assert mine.keys() == want.keys()
        assert all(torch.equal(mine[k], want[k]) for k in want)
    # There twice, of another op, of another name.
    for key in ("1.weight", "1.basic_ops.7.weight", "1.basic_ops.0.bias", "1.basic_ops.1.foo"):
        with pytest.raises(RuntimeError, match=r"Unexpected key.*basic_ops"):
            model.load_state_dict({**theirs, key: torch.zeros(16, 8)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**theirs, "0.gamma": torch.ones(8)})


class Counting(fz.Identity):
    """A user's op with an extra state of its own."""

    calls = 0

    def get_extra_state(self):
        return torch.tensor(self.calls)

    def set_extra_state(self, state):
        self.calls = int(state)


def test_the_extra_state_of_ones_own_op_is_kept():
    op = Counting()
    op.calls = 3
    other = Counting()
    other.load_state_dict(op.state_dict())
    assert other.calls == 3


@pytest.mark.parametrize("op", [fz.Linear, fz.BasicLinear])
def test_initialised_by_the_users_method(op):
    made = op(3, 4, init_method=lambda w: w.fill_(2.0), dtype=torch.bfloat16)
    assert torch.equal(made.weight, torch.full((4, 3), 2.0, dtype=torch.bfloat16))
    with torch.no_grad():
        made.weight.zero_()
    made.reset_parameters()
    assert torch.equal(made.weight, torch.full((4, 3), 2.0, dtype=torch.bfloat16))


def test_a_sum_into_the_input_that_an_op_saves_is_a_new_tensor():
    seq = fz.Sequential(fz.Linear(8, 8), fz.AddExtraInput(in_place=True))
    x = torch.randn(4, 8, requires_grad=True)
    a = x * 1
    before = a.detach().clone()
    grads = torch.autograd.grad(seq(a, a).square().sum(), [x, *seq.parameters()])
    assert torch.equal(a, before)
    y = torch.nn.functional.linear(x, seq[0].weight, seq[0].bias) + x
    want = torch.autograd.grad(y.square().sum(), [x, *seq.parameters()])
    for one, other in zip(grads, want, strict=True):
        torch.testing.assert_close(one, other)


def test_a_sum_is_written_to_the_caller_s_tensor_that_an_earlier_part_has_read():
    x, t = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    seq = fz.Sequential(fz.AddExtraInput(), torch.nn.Identity(), fz.AddExtraInput(in_place=True))
    want = x + t + t
    y = seq(x, t, t)
    assert torch.equal(t, want)
    assert torch.equal(y, want)
