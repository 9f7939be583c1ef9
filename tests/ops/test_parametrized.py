"""Parameters that are computed from others: parametrizations, pruning, hooks that compute them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from every_op import randomised
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import fusible as fz
from fusible.testing import assume_target

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")


class Doubled(nn.Module):
    """Twice the weight; counts its evaluations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, weight):
        self.count += 1
        return 2 * weight


class DropConnect(nn.Module):
    def forward(self, weight):
        return F.dropout(weight, 0.5)


class ByHand(fz.BasicOperation):
    """Reads its parameter from itself, in the forward."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(32))

    def op_forward(self, ctx, input_, **_):
        ctx.save_for_backward(input_, self.w)
        return input_ * self.w + 0 * self.w

    def op_backward(self, ctx, grad_output):
        x, w = ctx.saved_tensors
        return grad_output * w, ((grad_output * x).sum(0),)


class ByFormula(fz.BasicOperation):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(32))

    def formula(self, x, w):
        return x * w


def grads(module, y):
    """The gradient of the sum of squares, by parameter."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(y.square().sum(), parameters), strict=True))


def grouped(**options):
    return fz.GroupedLinear(2, 32, 32, **options)


OPS = {
    "Linear": (lambda: fz.Linear(32, 32), ("weight", "bias")),
    "BasicLinear": (lambda: fz.BasicLinear(32, 32), ("weight",)),
    "Bias": (lambda: fz.Bias(32), ("bias",)),
    "GroupedLinear": (grouped, ("weight0", "weight1", "bias0", "bias1")),
    "one weight": (
        lambda: grouped(single_grouped_weight=True, single_grouped_bias=True),
        ("weight", "bias"),
    ),
    "LayerNorm": (lambda: fz.LayerNorm(32), ("weight", "bias")),
    "RMSNorm": (lambda: fz.RMSNorm(32), ("weight",)),
    "TopKRouter": (lambda: fz.TopKRouter(32, 4, 2, bias=True), ("weight", "bias")),
    "by hand": (ByHand, ("w",)),
    "by formula": (ByFormula, ("w",)),
}


def extra_of(op):
    return ([32, 32],) if isinstance(op, fz.GroupedLinear) else ()


def output(module, op, x):
    """What depends on the parameters."""
    y = module(x, *extra_of(op))
    return y[1] if isinstance(y, tuple) else y


def gradients(y, leaves):
    weights = torch.arange(1.0, 1 + y.numel()).view(y.shape)
    return torch.autograd.grad((y * weights).sum(), leaves)


# --- one evaluation a forward ---------------------------------------------------------------------

RECIPES = {"none": None, "mxfp8": fz.recipes.MXFP8BlockScaling()}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", ["alone", "in a run", "without gradients", "for sm90"])
@pytest.mark.parametrize("what", OPS)
def test_one_evaluation_a_forward_and_none_in_the_backward(what, how, recipe):
    make, names = OPS[what]
    op = randomised(make())
    module = fz.Sequential(fz.SiLU(), op, fz.ConstantScale(2.0)) if how == "in a run" else op
    counters = [Doubled() for _ in names]
    for name, counter in zip(names, counters, strict=True):
        parametrize.register_parametrization(op, name, counter, unsafe=True)
        counter.count = 0
    x = torch.randn(64, 32, requires_grad=True)
    target = assume_target("sm90" if how == "for sm90" else "cpu")
    with target, fz.autocast(RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        for call in (1, 2):
            with torch.set_grad_enabled(how != "without gradients"):
                y = output(module, op, x)
            assert [counter.count for counter in counters] == [call] * len(names)
            if y.requires_grad:
                gradients(y, [x, *op.parameters()])
                assert [counter.count for counter in counters] == [call] * len(names)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("what", OPS)
def test_a_parametrized_op_is_the_plain_op_of_what_it_computes(what, recipe):
    make, names = OPS[what]
    plain = randomised(make())
    op = copy.deepcopy(plain)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(2)
    for name in names:
        parametrize.register_parametrization(op, name, Doubled())
    found, expected = (
        torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) for _ in "ab"
    )
    with fz.autocast(RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        y = output(op, op, found.requires_grad_())
        wanted = output(plain, plain, expected.requires_grad_())
        leaves = [op.get_parameter(f"parametrizations.{name}.original") for name in names]
        got = gradients(y, [found, *leaves])
        of_plain = gradients(wanted, [expected, *[getattr(plain, name) for name in names]])
    assert torch.equal(y, wanted)
    torch.testing.assert_close(got, [of_plain[0], *[2 * g for g in of_plain[1:]]])


@pytest.mark.parametrize("what", OPS)
def test_compiled_with_a_parametrization(what, fresh_compiler):
    make, names = OPS[what]
    op = randomised(make())
    for name in names:
        parametrize.register_parametrization(op, name, Doubled())
    x = torch.randn(64, 32)
    extra = [torch.tensor(e) for e in extra_of(op)]
    expected, y = op(x, *extra), torch.compile(op, fullgraph=True, backend="aot_eager")(x, *extra)
    if isinstance(y, tuple):
        expected, y = expected[1], y[1]
    torch.testing.assert_close(y, expected)
    leaves = list(op.parameters())
    torch.testing.assert_close(gradients(y, leaves), gradients(expected, leaves))


@pytest.mark.parametrize("what", [what for what in OPS if what not in ("TopKRouter", "Bias")])
def test_the_gradient_is_that_of_the_very_product(what):
    """The mask that DropConnect draws for the output is that of the gradient."""
    make, names = OPS[what]
    op = randomised(make())
    for name in names:
        if name not in ("bias", "bias0", "bias1"):
            parametrize.register_parametrization(op, name, DropConnect())
    for seed in range(4):
        x = torch.ones(64, 32, requires_grad=True)
        torch.manual_seed(seed)
        y = output(op, op, x)
        (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        bump = torch.zeros_like(x)
        bump[0] = 0.25
        torch.manual_seed(seed)
        moved = output(op, op, x.detach() + bump)
        if not isinstance(op, fz.LayerNorm | fz.RMSNorm):  # linear in their input
            torch.testing.assert_close((moved - y).sum(), (dx * bump).sum(), rtol=1e-4, atol=1e-4)
        for leaf in op.parameters():
            (dw,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
            torch.manual_seed(seed)
            with torch.no_grad():
                leaf.add_(0.25)
            moved = output(op, op, x.detach())
            with torch.no_grad():
                leaf.sub_(0.25)
            torch.testing.assert_close((moved - y).sum(), 0.25 * dw.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["alone", "in a run"])
def test_spectral_norm_follows_torch_nn(how):
    ours, theirs = fz.Linear(32, 32), nn.Linear(32, 32)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(64, 32)
    for linear in (ours, theirs):
        torch.manual_seed(0)
        parametrizations.spectral_norm(linear)
    module = fz.Sequential(ours, fz.SiLU()) if how == "in a run" else ours
    reference = nn.Sequential(theirs, nn.SiLU()) if how == "in a run" else theirs
    both = [(m, torch.optim.SGD(m.parameters(), 0.1)) for m in (module, reference)]
    for _ in range(5):
        for m, optimizer in both:
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("how", ["alone", "after a call", "in a run", "compiled"])
@pytest.mark.parametrize("make", [fz.Linear, fz.BasicLinear])
def test_a_parametrized_linear(make, how, fresh_compiler):
    ours = make(32, 4)
    theirs = nn.Linear(32, 4, bias=make is fz.Linear)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(64, 32)
    call = fz.Sequential(ours, fz.SiLU()) if how == "in a run" else ours
    if how == "after a call":
        ours(x)
    for linear in (ours, theirs):
        parametrizations.weight_norm(linear)
        parametrize.register_parametrization(linear, "weight", Doubled())
    if how == "compiled":
        call = torch.compile(ours, fullgraph=True, backend="aot_eager")
    expected = theirs(x)
    expected = F.silu(expected) if how == "in a run" else expected
    y = call(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grads(ours, y), grads(theirs, expected))


def test_a_part_of_a_linear_is_fused_though_it_is_parametrized():
    linear = fz.Linear(32, 32)
    counter = Doubled()
    parametrize.register_parametrization(linear, "weight", counter)
    module = fz.Sequential(linear, fz.SiLU())
    counter.count = 0
    module(torch.randn(3, 32))
    assert module.plan.fired == ("linear_bias_activation",)
    assert counter.count == 1


def test_a_copy_of_a_parametrized_op():
    op = parametrize.register_parametrization(fz.Linear(32, 4), "weight", Doubled())
    x = torch.randn(64, 32)
    made = copy.deepcopy(op)
    with torch.no_grad():
        op.parametrizations.weight.original.zero_()
    torch.testing.assert_close(made(x), F.linear(x, made.weight, made.bias))
    assert made.weight.any()


@pytest.mark.parametrize("option", ["accumulate_into_main_grad", "delay_wgrad_compute"])
def test_gradients_that_go_past_autograd_need_a_parameter(option):
    op = grouped(**{option: True})
    prune.identity(op, "weight0")
    y = op(torch.randn(64, 32), [32, 32])
    with pytest.raises(ValueError, match=r"leaf tensors .* got weight0 computed"):
        y.sum().backward()


# --- pruning, norms that are hooks, registration anew ---------------------------------------------


def weights_of(names):
    return [name for name in names if name[0] == "w"]


@pytest.mark.parametrize("what", OPS)
def test_a_pruned_op(what):
    make, names = OPS[what]
    op = randomised(make())
    plain = copy.deepcopy(op)
    masks = {name: (torch.rand(getattr(op, name).shape) > 0.5).float() for name in names}
    for name, mask in masks.items():
        prune.custom_from_mask(op, name, mask)
    with torch.no_grad():
        for name, mask in masks.items():
            getattr(plain, name).mul_(mask)
    x = torch.randn(64, 32)
    y, expected = output(op, op, x), output(plain, plain, x)
    assert torch.equal(y, expected)
    found = gradients(y, [getattr(op, f"{name}_orig") for name in names])
    wanted = gradients(expected, [getattr(plain, name) for name in names])
    for got, want, mask in zip(found, wanted, masks.values(), strict=True):
        assert torch.equal(got, want * mask)


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("called", [False, True])
def test_a_norm_that_is_a_hook(norm, called):
    ours, theirs = randomised(fz.Linear(32, 32)), nn.Linear(32, 32)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(64, 32)
    if called:
        ours(x)
    for linear in (ours, theirs):
        torch.manual_seed(0)
        norm(linear)
    y, expected = ours(x), theirs(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grads(ours, y), grads(theirs, expected))


def deleted(op, name):
    value = getattr(op, name).detach().clone()
    delattr(op, name)
    setattr(op, name, nn.Parameter(value))


def pruned_for_good(op, name):
    prune.identity(op, name)
    prune.remove(op, name)


def parametrized_for_a_while(op, name):
    parametrize.register_parametrization(op, name, nn.Identity())
    parametrize.remove_parametrizations(op, name)


def normed_for_a_while(op, name):
    if op.get_parameter(name).dim() > 1:
        nn.utils.weight_norm(op, name)
        nn.utils.remove_weight_norm(op, name)


class Affine(fz.BasicOperation):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(32))
        self.b = nn.Parameter(torch.randn(32))


class AffineFormula(Affine):
    def formula(self, x, a, b):
        return x * a + b


class AffineByPlace(Affine):
    def formula(self, x, *params):
        return x * params[0] + params[1]


class AffineByHand(Affine):
    def op_forward(self, ctx, input_, **_):
        a, b = ctx.parameters
        ctx.save_for_backward(input_, a)
        return input_ * a + b

    def op_backward(self, ctx, grad_output):
        x, a = ctx.saved_tensors
        return grad_output * a, ((grad_output * x).sum(0), grad_output.sum(0))


AFFINES = {
    kind.__name__: (kind, ("a", "b")) for kind in (AffineFormula, AffineByPlace, AffineByHand)
}
SURGERY = [deleted, pruned_for_good, parametrized_for_a_while, normed_for_a_while]


@pytest.mark.parametrize("surgery", SURGERY)
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("what", [*OPS, *AFFINES])
def test_registration_anew_changes_no_order(what, called, surgery):
    make, names = {**OPS, **AFFINES}[what]
    op = randomised(make())
    plain, x = copy.deepcopy(op), torch.randn(64, 32)
    if called:
        output(op, op, x)
    surgery(op, names[0])
    y, expected = output(op, op, x), output(plain, plain, x)
    torch.testing.assert_close(y, expected)
    found = gradients(y, [getattr(op, name) for name in names])
    wanted = gradients(expected, [getattr(plain, name) for name in names])
    torch.testing.assert_close(found, wanted)


def test_a_parameter_may_become_a_tensor_that_another_network_makes():
    op = AffineFormula()
    a, b = op.a.detach().clone().requires_grad_(), op.b.detach().clone()
    op(torch.randn(64, 32))
    del op.a, op.b
    op.a, op.b = 2 * a, nn.Parameter(b)
    x = torch.randn(64, 32)
    y = op(x)
    torch.testing.assert_close(y, x * 2 * a + b)
    da, db = torch.autograd.grad(y.sum(), [a, op.b])
    torch.testing.assert_close(da, 2 * x.sum(0))
    torch.testing.assert_close(db, torch.full((32,), 64.0))


def test_names_like_those_that_pytorch_registers_may_be_an_ops_own():
    class Gated(fz.BasicOperation):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(32))
            self.w_g = nn.Parameter(torch.randn(32))

        def formula(self, x, w, w_g):
            return x * w * w_g

    op, x = Gated(), torch.randn(64, 32)
    dw, dw_g = torch.autograd.grad(op(x).sum(), [op.w, op.w_g])
    torch.testing.assert_close(dw, x.sum(0) * op.w_g)
    torch.testing.assert_close(dw_g, x.sum(0) * op.w)


def test_an_op_that_cannot_run_does_not_affect_equal_ops(fresh_compiler):
    broken, sound = fz.Sequential(fz.RMSNorm(32)), fz.Sequential(fz.RMSNorm(32))
    x = torch.randn(3, 32)
    broken(x)
    del broken[0].weight
    torch.testing.assert_close(torch.compile(sound, backend="aot_eager")(x), sound(x))
