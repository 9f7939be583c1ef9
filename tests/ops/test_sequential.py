"""Sequential: the list it is, what splits its runs, its state."""

import copy
import io
import pickle
from collections import OrderedDict

import pytest
import reference as ref
import torch
from torch import nn

import fusible as fz
from fusible.fuser.run import Run


def small(**options):
    return fz.Sequential(fz.Linear(8, 16), fz.SiLU(), fz.Linear(16, 8), **options)


def plain(mlp):
    """The same modules, with the same parameters, as torch.nn has them."""
    swap = {fz.SiLU: nn.SiLU, fz.ReLU: nn.ReLU, fz.Identity: nn.Identity}
    modules = []
    for m in mlp:
        if isinstance(m, fz.Linear):
            linear = nn.Linear(m.weight.shape[1], m.weight.shape[0])
            linear.weight, linear.bias = m.weight, m.bias
            modules.append(linear)
        elif isinstance(m, fz.Sequential):
            modules.append(plain(m))
        else:
            modules.append(swap[type(m)]() if type(m) in swap else m)
    return nn.Sequential(*modules)


def assert_same(ours, theirs, x, rtol=1e-5, atol=1e-6):
    """Equal values and gradients of the input and of every parameter of ``theirs``."""
    results = []
    for module in (ours, theirs):
        leaf = x.detach().requires_grad_()
        y = module(leaf)
        dy = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape)
        results.append((y.detach(), *torch.autograd.grad(y, [leaf, *theirs.parameters()], dy)))
    torch.testing.assert_close(*results, rtol=rtol, atol=atol)


def test_equals_nn_sequential():
    mlp = small()
    assert_same(mlp, plain(mlp), torch.randn(5, 8))


def test_is_an_nn_sequential():
    mlp = small()
    assert isinstance(mlp, nn.Sequential)
    assert len(mlp) == 3
    assert mlp[-1] is mlp[2]
    assert list(mlp.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [name for name, _ in mlp.named_children()] == ["0", "1", "2"]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_named_modules(kind):
    mlp = fz.Sequential(kind(up=fz.Linear(8, 16), act=fz.SiLU(), down=fz.Linear(16, 8)))
    assert list(mlp._modules) == ["up", "act", "down"]
    assert mlp.up is mlp[0]
    assert_same(mlp, plain(mlp), torch.randn(5, 8))


@pytest.mark.parametrize("kind", [list, tuple, iter, nn.Sequential])
def test_one_list_of_modules(kind):
    modules = [fz.Linear(8, 16), fz.SiLU(), fz.Linear(16, 8)]
    if kind is nn.Sequential:  # a module is one module
        assert list(fz.Sequential(kind(*modules))) != modules
        return
    mlp = fz.Sequential(kind(modules))
    assert list(mlp) == modules
    assert list(mlp._modules) == ["0", "1", "2"]
    assert_same(mlp, plain(mlp), torch.randn(5, 8))


def test_empty():
    x = torch.randn(3)
    assert fz.Sequential()(x) is x


def appended(mlp):
    mlp.append(fz.ReLU())


def extended(mlp):
    mlp.extend([fz.ReLU(), fz.Linear(8, 3)])


def inserted(mlp):
    mlp.insert(0, fz.SiLU())


def replaced(mlp):
    mlp[1] = fz.ReLU()


def deleted(mlp):
    del mlp[1]


def popped(mlp):
    mlp.pop(2)


def added_in_place(mlp):
    mlp += fz.Sequential(fz.ReLU(), fz.Linear(8, 4))


def multiplied_in_place(mlp):
    mlp *= 2


def nothing_deleted_then_appended(mlp):
    del mlp[3:]
    assert len(mlp) == 3
    mlp(torch.randn(5, 8))
    mlp.append(fz.ReLU())


@pytest.mark.parametrize(
    "change",
    [
        appended,
        extended,
        inserted,
        replaced,
        deleted,
        popped,
        added_in_place,
        multiplied_in_place,
        nothing_deleted_then_appended,
    ],
)
def test_changes_after_a_call_are_seen(change):
    mlp = fz.Sequential(fz.Linear(8, 8), fz.SiLU(), fz.Linear(8, 8))
    x = torch.randn(5, 8)
    mlp(x)
    change(mlp)
    assert_same(mlp, plain(mlp), x)


def test_change_inside_a_nested_sequential_is_seen():
    inner = small()
    outer = fz.Sequential(fz.Linear(8, 8), inner)
    x = torch.randn(5, 8)
    outer(x)
    inner[1] = fz.ReLU()
    assert_same(outer, plain(outer), x)


@pytest.mark.parametrize(
    "made",
    [
        lambda mlp: mlp[:2],
        lambda mlp: mlp + fz.Sequential(fz.ReLU()),
        lambda mlp: mlp * 2,
        lambda mlp: 2 * mlp,
    ],
    ids=["slice", "add", "mul", "rmul"],
)
def test_made_from_another(made):
    mlp = small()
    new = made(mlp)
    assert type(new) is fz.Sequential
    assert new[0] is mlp[0]
    assert_same(new, plain(new), torch.randn(5, 8))


# --- runs -------------------------------------------------------------------------------------


def kinds(sequential):
    return [len(s.ops) if isinstance(s, Run) else type(s).__name__ for s in sequential.parts()]


def test_ordinary_modules_split_runs():
    mlp = fz.Sequential(
        fz.Linear(8, 16), fz.SiLU(), nn.LayerNorm(16), fz.Linear(16, 8), nn.Tanh(), nn.Flatten(0)
    )
    assert kinds(mlp) == [3, "LayerNorm", 2, "Tanh", "Flatten"]
    assert_same(mlp, plain(mlp), torch.randn(5, 8))


def test_nested_sequentials_do_not():
    mlp = fz.Sequential(fz.Linear(8, 8), fz.Sequential(fz.SiLU(), small()), fz.ReLU())
    assert kinds(mlp) == [2 + 1 + 5 + 1]
    assert_same(mlp, plain(mlp), torch.randn(5, 8))


def test_sequential_inside_an_ordinary_module():
    class Residual(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return x + self.inner(x)

    mlp = fz.Sequential(fz.Linear(8, 8), Residual(small()), fz.SiLU())
    assert kinds(mlp) == [2, "Residual", 1]
    other = nn.Sequential(plain(mlp[:1]), Residual(plain(mlp[1].inner)), nn.SiLU())
    assert_same(mlp, other, torch.randn(5, 8))


def test_extra_inputs_go_to_their_runs():
    seq = fz.Sequential(
        fz.AddExtraInput(),
        nn.Tanh(),
        fz.Sequential(fz.ScaledSwiGLU(), fz.MakeExtraOutput()),
        nn.Tanh(),
        fz.AddExtraInput(),
    )
    assert seq.num_extra_inputs == 3
    x, a, b = torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 4)
    scales = torch.rand(4)
    y, extra = seq(x, a, scales, b)
    h = ref.swiglu(torch.tanh(x + a), scales)
    torch.testing.assert_close(extra, h)
    torch.testing.assert_close(y, torch.tanh(h) + b)


def test_one_op_in_two_places():
    linear = fz.Linear(8, 8)
    mlp = fz.Sequential(linear, fz.SiLU(), linear)
    assert_same(mlp, plain(mlp), torch.randn(5, 8))
    split = fz.Sequential(linear, nn.Tanh(), linear)
    assert_same(split, plain(split), torch.randn(5, 8))


def test_tied_weights():
    mlp = fz.Sequential(fz.Linear(8, 8), fz.SiLU(), fz.Linear(8, 8))
    mlp[2].weight = mlp[0].weight
    assert len(list(mlp.parameters())) == 3
    assert_same(mlp, plain(mlp), torch.randn(5, 8))


def test_a_new_parameter_is_used_at_once():
    mlp = small()
    x = torch.randn(5, 8)
    mlp(x)
    mlp[0].weight = nn.Parameter(torch.randn(16, 8))
    mlp[2].bias = nn.Parameter(torch.randn(8))
    assert_same(mlp, plain(mlp), x)


# --- hooks on ops -----------------------------------------------------------------------------


def test_forward_hooks_fire_and_may_replace_the_output():
    mlp = small()
    x = torch.randn(5, 8)
    mlp(x)
    seen = []
    pre = mlp[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    post = mlp[1].register_forward_hook(lambda _, args, out: out * 2)
    h = torch.nn.functional.linear(x, mlp[0].weight, mlp[0].bias)
    expected = torch.nn.functional.linear(
        2 * torch.nn.functional.silu(h), mlp[2].weight, mlp[2].bias
    )
    torch.testing.assert_close(mlp(x), expected)
    torch.testing.assert_close(seen, [h])
    assert kinds(mlp) == [2, "SiLU", 2]
    pre.remove()
    post.remove()
    assert kinds(mlp) == [5]
    assert_same(mlp, plain(mlp), x)
    assert len(seen) == 1


def test_full_backward_hooks_fire():
    mlp = small()
    x = torch.randn(5, 8, requires_grad=True)
    grads = []
    mlp[2].register_full_backward_hook(lambda _, gin, gout: grads.append((gin[0], gout[0])))
    mlp(x).sum().backward()
    ((gin, gout),) = grads
    assert torch.equal(gout, torch.ones(5, 8))
    torch.testing.assert_close(gin, torch.ones(5, 8) @ mlp[2].weight)


def test_hooks_of_a_nested_sequential_fire():
    inner = small()
    outer = fz.Sequential(inner, fz.ReLU())
    inner.register_forward_hook(lambda _, args, out: out + 1)
    x = torch.randn(5, 8)
    torch.testing.assert_close(outer(x), torch.relu(small_of(inner, x) + 1))


def small_of(mlp, x):
    return plain(mlp)(x)


# --- state ------------------------------------------------------------------------------------


def mixed():
    """Every kind of parameter."""
    return fz.Sequential(
        fz.Linear(8, 16),
        fz.SwiGLU(),
        fz.GroupedLinear(2, 8, 8),
        fz.GroupedLinear(2, 8, 8, single_grouped_weight=True, single_grouped_bias=True),
        nn.LayerNorm(8),
        fz.Bias(8),
    )


def outcome(module, x, splits):
    y = module(x, splits, splits)
    grads = torch.autograd.grad(y.square().sum(), list(module.parameters()))
    return y.detach(), grads


def copied_by_pickle(module):
    return pickle.loads(pickle.dumps(module))


def copied_by_torch_save(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, copied_by_pickle, copied_by_torch_save])
def test_copies_are_equal_and_independent(copied, called_before):
    module = mixed()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) / 3)
    x, splits = torch.randn(6, 8), torch.tensor([2, 3])
    if called_before:
        module(x, splits, splits)
    other = copied(module)
    torch.testing.assert_close(outcome(other, x, splits), outcome(module, x, splits))
    before = module(x, splits, splits)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert torch.equal(module(x, splits, splits), before)
    assert not torch.equal(other(x, splits, splits), before)


def test_a_copy_of_a_linear_trains_its_own_parameters():
    linear = fz.Linear(4, 4)
    linear(torch.randn(2, 4))
    other = copy.deepcopy(linear)
    other(torch.randn(2, 4)).sum().backward()
    assert linear.weight.grad is None
    assert other.weight.grad is not None
    assert other.basic_ops[0].weight is other.weight
    assert other.basic_ops[1].bias is other.bias


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(assign):
    source, target = mixed(), mixed()
    x, splits = torch.randn(6, 8), torch.tensor([2, 3])
    target(x, splits, splits)
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    old = list(target.parameters())
    target.load_state_dict(state, assign=assign)
    torch.testing.assert_close(outcome(target, x, splits), outcome(source, x, splits))

    # The parameters that the module has now are the ones that train.
    assert all((new is was) != assign for new, was in zip(target.parameters(), old, strict=True))
    before = target(x, splits, splits)
    before.square().sum().backward()
    torch.optim.SGD(target.parameters(), lr=0.1).step()
    assert all(p.grad is not None for p in target.parameters())
    assert not torch.equal(target(x, splits, splits), before)


def test_meta_device_then_real():
    with torch.device("meta"):
        module = mixed()
    assert all(p.is_meta for p in module.parameters())
    out = module(torch.empty(6, 8, device="meta"), *[torch.empty(2, device="meta").long()] * 2)
    assert out.shape == (6, 8)
    assert out.is_meta
    module.to_empty(device="cpu")
    torch.manual_seed(5)
    for op in module:
        if hasattr(op, "reset_parameters"):
            op.reset_parameters()
    torch.manual_seed(5)
    expected = mixed()
    x, splits = torch.randn(6, 8), torch.tensor([2, 3])
    torch.testing.assert_close(outcome(module, x, splits), outcome(expected, x, splits))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_changed_after_a_call(dtype):
    module = mixed()
    never_called = copy.deepcopy(module).to(dtype)
    x, splits = torch.randn(6, 8), torch.tensor([2, 3])
    before = module(x, splits, splits)
    module.to(dtype)
    y, grads = outcome(module, x.to(dtype), splits)
    assert {t.dtype for t in (y, *grads)} == {dtype}
    expected = outcome(never_called, x.to(dtype), splits)
    torch.testing.assert_close((y, grads), expected, rtol=0, atol=0)
    if dtype == torch.float64:
        torch.testing.assert_close(y.float(), before, rtol=1e-5, atol=1e-5)


def test_require():
    x = torch.randn(3, 8)
    mlp = small(require=["linear_bias_activation"])
    mlp(x)
    assert "linear_bias_activation" in mlp.plan.fired
    for longer in (mlp + fz.Sequential(fz.Identity()), fz.Sequential() + mlp, mlp + mlp, mlp * 2):
        assert longer.require == mlp.require
    with pytest.raises(ValueError, match=r"must be one of .*linear_add.*, got 'nothing'"):
        small(require=["nothing"])
    with pytest.raises(fz.NotFused, match="linear_add is required but no run of ops fits its"):
        small(require=["linear_add"])(x)


def test_modules_are_appended_in_place():
    first, second = fz.Linear(4, 4), fz.GELU()
    model = same = fz.Sequential(first)
    model += [second]
    assert model is same
    assert list(model) == [first, second]
    x = torch.randn(2, 4)
    assert torch.equal(model(x), second(first(x)))


def test_a_buffer_for_an_op_that_comes_twice_is_refused():
    linear = fz.BasicLinear(8, 8)
    model = fz.Sequential(linear, fz.GELU(), linear)
    with pytest.raises(ValueError, match="must be once in its Sequential, got BasicLinear 2 times"):
        model(torch.randn(2, 8), op_kwargs={-1: {"output": torch.empty(2, 8)}})


def test_lists_are_numbers_of_the_host():
    op = fz.GroupedLinear(2, 8, 8)
    x = torch.randn(4, 8)
    want = op(x, [1, 3])
    with torch.device("meta"):
        assert torch.equal(op(x, [1, 3]), want)
