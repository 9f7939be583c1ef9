"""Gradients of formulas are those of the forward's evaluation, whatever changes after it."""

import copy
import random

import pytest
import reference as ref
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fusible as fz
from fusible.extend import FusedOperation, equal, register_rule, rule, this
from fusible.testing import assume_target


class Noisy(fz.BasicOperation):
    """Dropout of a scaled input, with noise on the scale."""

    def __init__(self, p=0.5):
        super().__init__()
        self.p = p
        self.w = nn.Parameter(torch.randn(8))

    def formula(self, x, w):
        return F.dropout(x * w, self.p, self.training) * torch.rand_like(w)


def reference(op, x):
    return F.dropout(x * op.w, op.p, op.training) * torch.rand_like(op.w)


@pytest.mark.parametrize("how", ["alone", "in a run", "checkpointed", "retained", "copied"])
def test_the_backward_differentiates_the_draw_of_the_forward(how):
    op = Noisy()
    module = fz.Sequential(fz.Bias(8), op, fz.ConstantScale(2.0)) if how == "in a run" else op
    for seed in range(3):
        x = torch.randn(64, 8, requires_grad=True)
        torch.manual_seed(seed)
        expected = reference(op, x) * (2 if how == "in a run" else 1)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        if how == "copied":
            module = copy.deepcopy(op)
            module.load_state_dict(op.state_dict())
        checkpointed = how == "checkpointed"
        y = checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)
        assert torch.equal(y, expected)
        assert torch.equal(torch.get_rng_state(), after)
        torch.rand(100)
        before = torch.get_rng_state()
        leaves = [x, module.w if how == "copied" else op.w]
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        found = torch.autograd.grad(y, leaves, dy, retain_graph=how == "retained")
        assert torch.equal(torch.get_rng_state(), before)
        torch.testing.assert_close(found, torch.autograd.grad(expected, [x, op.w], dy))
        if how == "retained":
            torch.testing.assert_close(torch.autograd.grad(y, leaves, dy), found)


class _Parts:
    """``x * w * table * plain * factor``, then dropout; all but x and w read from the module."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(8) + 1)
        self.register_buffer("table", torch.rand(8) + 1)
        self.plain = torch.rand(8) + 1
        self.options = {"factor": 3.0}
        self.drop = nn.Dropout(0.0)

    def formula(self, x, w):
        noise = 1.0 if len(x) < 16 else torch.rand_like(x) + random.random()
        y = x * w * self.table * self.plain * self.options["factor"] * noise
        return self.drop(y) if self.training else y * 0.5


class Changeable(_Parts, fz.BasicOperation):
    """As an op."""


class Plain(_Parts, nn.Module):
    """As an ordinary module: the reference."""

    def forward(self, x):
        return self.formula(x, self.w)


def _rebind_buffer(m):
    m.table = torch.zeros(8)


def _set_data(m):
    m.table.data = torch.zeros(8)


def _assign_state(m):
    m.load_state_dict({"w": torch.zeros(8), "table": torch.zeros(8)}, assign=True)


def _set_plain(m):
    m.plain = torch.zeros(8)


def _set_option(m):
    m.options["factor"] = 0.0


def _replace_parameter(m):
    m.w = nn.Parameter(torch.zeros(8))


def _drop(m):
    m.drop.p = 0.5


CHANGES = [
    _rebind_buffer,
    _set_data,
    _assign_state,
    _set_plain,
    _set_option,
    _replace_parameter,
    nn.Module.eval,
    _drop,
]


def _both(module, x, dy, change, how):
    """Output and gradients, ``change`` being made to the module before its backward."""
    random.seed(0)
    torch.manual_seed(0)
    w = module.w
    if how == "functional":
        y = torch.func.functional_call(module, {"table": torch.full((8,), 3.0)}, (x,))
    elif how == "offloaded":
        with torch.autograd.graph.save_on_cpu():
            y = module(x)
    else:
        y = module(x)
    change(module)
    return y, *torch.autograd.grad(y, [x, w], dy)


@pytest.mark.parametrize("how", ["plain", "functional", "offloaded"])
@pytest.mark.parametrize("before", [None, _drop])
@pytest.mark.parametrize("rows", [4, 32])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_before_the_backward_does_not_reach_it(change, rows, before, how):
    plain, op = Plain(), Changeable()
    op.load_state_dict(plain.state_dict())
    op.plain = plain.plain
    for module in (plain, op):  # called before, so that nothing is known from the first call only
        module(torch.randn(4, 8, requires_grad=True)).sum().backward()
        if before is not None:
            before(module)
    x, dy = torch.randn(rows, 8, requires_grad=True), torch.randn(rows, 8)
    ref.assert_equal(_both(op, x, dy, change, how), _both(plain, x, dy, change, how))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_formulas(reentrant):
    op, plain = Changeable(), Plain()
    op.load_state_dict(plain.state_dict())
    op.plain = plain.plain
    for module in (op, plain):
        module.drop.p = 0.5
    x, results = torch.randn(4, 8, requires_grad=True), []
    for module in (op, plain):
        torch.manual_seed(0)
        y = checkpoint(module, x, use_reentrant=reentrant)
        x.grad = None
        (y * y.detach()).sum().backward()
        results.append((y, x.grad, module.w.grad))
    ref.assert_equal(*results)


class Twisted(fz.BasicOperation):
    def formula(self, x):
        return torch.sin(x) * x.exp()


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("each_alone", [False, True])
def test_a_checkpoint_of_formulas_recomputes_once(each_alone, retained):
    """Not once more for the backward of each formula."""
    ops = [Twisted() for _ in range(3)]
    body = nn.Sequential(*ops) if each_alone else fz.Sequential(*ops)
    x, calls = torch.randn(4, 8, dtype=torch.float64, requires_grad=True), []

    def block(x):
        calls.append(1)
        return body(x)

    y = checkpoint(block, x, use_reentrant=False)
    if retained:
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    (got,) = torch.autograd.grad(y.sum(), x)
    assert len(calls) == 2 + retained
    (want,) = torch.autograd.grad(body(x).sum(), x)
    torch.testing.assert_close(got, want)


def test_tensors_of_a_formula_are_packed_and_come_back():
    x, packed = torch.randn(4, 8, dtype=torch.float64, requires_grad=True), []

    def pack(t):
        packed.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.clone()):
        y = Twisted()(x)
    (got,) = torch.autograd.grad(y.sum(), x)
    assert packed
    torch.testing.assert_close(got, (x.exp() * (torch.cos(x) + torch.sin(x))).detach())


def test_a_checkpoint_keeps_no_tensor_of_a_formula():
    class Wide(fz.BasicOperation):
        def formula(self, x):
            inner = x.exp()
            kept.append(inner.untyped_storage())
            return inner.sin()

    kept = []
    y = checkpoint(Wide(), torch.randn(4, 8, requires_grad=True), use_reentrant=False)
    first = kept[0]
    before = first._weak_ref()
    del first
    kept.clear()
    assert torch.UntypedStorage._expired(before)
    y.sum().backward()
    torch.UntypedStorage._free_weak_ref(before)


def test_a_second_backward_needs_retain_graph():
    class Squared(fz.BasicOperation):
        def formula(self, x):
            return x * x

    x = torch.randn(4, 8, requires_grad=True)
    y = Squared()(x)
    for retain in (True, False):
        assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=retain)[0], 2 * x)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(y.sum(), x)


def test_formulas_that_do_not_read_or_return_their_input():
    class Same(fz.BasicOperation):
        def formula(self, x):
            return x

    class Constant(fz.BasicOperation):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def formula(self, x, w):
            return torch.ones_like(x)

    x = torch.randn(4, 8, requires_grad=True)
    assert torch.equal(torch.autograd.grad((3 * Same()(x)).sum(), x)[0], torch.full((4, 8), 3.0))
    module = fz.Sequential(fz.Bias(8), Constant(), fz.ConstantScale(2.0))
    y = module(x)
    assert not y.requires_grad
    assert torch.equal(y, torch.full((4, 8), 2.0))


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("input_needs", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_other_tensors_that_require_gradients_get_them(input_needs, mode, fresh_compiler):
    class Reads(fz.BasicOperation):
        def __init__(self):
            super().__init__()
            self.others = [torch.ones(8), torch.rand(8)]

        def formula(self, x):
            return x * self.others[0] + self.others[1]

    op, plain = Reads(), fz.Linear(8, 8)
    module = fz.Sequential(op, plain)
    if mode == "compiled":
        module = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 8, requires_grad=input_needs)
    module(x).sum().backward()  # when they need none
    leaf = torch.rand(8, requires_grad=True)
    op.others[:] = nn.Parameter(torch.rand(8)), leaf * 2
    plain.zero_grad()
    module(x).square().sum().backward()
    found = [op.others[0].grad, leaf.grad, plain.weight.grad]
    y = F.linear(x * op.others[0] + leaf * 2, plain.weight, plain.bias)
    expected = torch.autograd.grad(y.square().sum(), [op.others[0], leaf, plain.weight])
    torch.testing.assert_close(found, [*expected])


# --- as ordinary modules --------------------------------------------------------------------------


class Rounded(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class _Normed:
    """Batch normalization with buffers of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def formula(self, x):
        return F.batch_norm(x, self.mean, self.var, training=True, momentum=0.5)


def _pair(formula):
    """An op of a formula ``(self, x)`` or of a class with one, and the module of the same."""
    shared = formula
    if not isinstance(formula, type):
        shared = type("Shared", (), {"formula": formula})
    op = type("Formula", (shared, fz.BasicOperation), {})
    return op, type("Reference", (shared, nn.Module), {"forward": lambda s, x: s.formula(x)})


FORMULAS = {
    "itself": lambda s, x: x,
    "a view": lambda s, x: x.view(8, -1).t().reshape(x.shape)[:3],
    "sine": lambda s, x: x.sin(),
    "rounded": lambda s, x: Rounded.apply(x * 3),
    "normed": _Normed,
    "checkpointed": lambda s, x: checkpoint(lambda t: t.exp().sin(), x, use_reentrant=False),
    "checkpointed, reentrant": lambda s, x: checkpoint(torch.sin, x * 2, use_reentrant=True),
    "hooked": lambda s, x: (y := x * 2, y.register_hook(lambda g: 3 * g))[0] + 1,
}


def _in_place(module, x):
    y = module(x * 1)
    y.mul_(2.0)
    return y


def _input_in_place(module, x):
    given = x * 1
    y = module(given)
    given.mul_(3.0)
    return y


def _selective(module, x):
    def policy(ctx, op, *args, **kwargs):
        saves = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(
        module,
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )


def _compiled(module, x):
    return torch.compile(module, backend="aot_eager")(x)


CALLS = {
    "plain": lambda module, x: module(x),
    "output in place": _in_place,
    "input in place": _input_in_place,
    "checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "checkpoint, selective": _selective,
    "compiled": _compiled,
}


def _stepped(make, formula_kind, call):
    """Output, gradients and buffers of a step, or the kind of error that PyTorch raises."""
    torch.manual_seed(0)
    first, last = formula_kind(), formula_kind()
    module = make(first, nn.Linear(8, 8), last)
    x = torch.randn(4, 8, requires_grad=True)
    try:
        y = call(module, x)
        (y * y.detach()).sum().backward()
    except RuntimeError as error:
        return str(error)[:40]
    return y, x.grad, *[p.grad for p in module.parameters()], *module.buffers()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, of hooks and checkpoints
def test_formulas_are_as_ordinary_modules(formula, call, fresh_compiler):
    op, reference = _pair(FORMULAS[formula])
    expected = _stepped(nn.Sequential, reference, CALLS[call])
    found = _stepped(fz.Sequential, op, CALLS[call])
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


def test_a_checkpoint_evaluates_each_formula_twice():
    evaluations = []

    class Counted(fz.BasicOperation):
        def formula(self, x):
            evaluations.append(self)
            return x.sin()

    module = fz.Sequential(*[Counted() for _ in range(8)])
    x = torch.randn(4, 8, requires_grad=True)
    checkpoint(module, x, use_reentrant=False).sum().backward()
    assert len(evaluations) == 16


def test_an_op_after_an_integer_output():
    class Largest(fz.BasicOperation):
        def formula(self, x):
            return x.argmax(-1)

    class Embedding(fz.BasicOperation):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 3))

        def formula(self, x, weight):
            return F.embedding(x, weight)

    module, x = fz.Sequential(fz.Linear(8, 8), Largest(), Embedding()), torch.randn(5, 8)
    module(x).sum().backward()
    counts = torch.bincount(module[0](x).argmax(-1), minlength=8).float()
    assert torch.equal(module[2].weight.grad, counts[:, None].expand(8, 3))
    assert module[0].weight.grad is None


def test_the_plan_and_explain_join_the_runs_between_formulas():
    op, _ = _pair(FORMULAS["sine"])
    module = fz.Sequential(fz.Linear(8, 8), fz.GELU(), op(), fz.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    module(x).sum().backward()
    assert [type(o).__name__ for o in module.plan.basic_ops] == [
        "BasicLinear", "Bias", "GELU", "Formula", "BasicLinear", "Bias",
    ]  # fmt: skip
    (plan,) = fz.explain(module, x).plans
    assert repr(plan) == repr(module.plan)
    assert str(plan.refusals) == str(module.plan.refusals)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_under_a_recipe(reentrant):
    op, _ = _pair(FORMULAS["sine"])
    recipe = fz.recipes.MXFP8BlockScaling()
    torch.manual_seed(0)
    module = fz.Sequential(fz.Linear(32, 32), op(), fz.Linear(32, 32))
    x, grads = torch.randn(32, 32, requires_grad=True), []
    for call in (module, lambda t: checkpoint(module, t, use_reentrant=reentrant)):
        with fz.autocast(recipe=recipe):
            y = call(x)
        y.square().sum().backward()
        grads.append([t.grad for t in (x, *module.parameters())])
        x.grad = None
        module.zero_grad()
        assert module.plan.recipe == recipe
    ref.assert_equal(*grads)


@pytest.mark.parametrize("enabled", [False, True])
def test_sums_in_place_around_formulas(enabled):
    op, _ = _pair(FORMULAS["sine"])
    x, t = torch.randn(4, 8), torch.randn(4, 8)
    first = fz.AddExtraInput(in_place=True)
    with torch.set_grad_enabled(enabled):
        before = t.clone()
        y = fz.Sequential(first, op(), fz.AddExtraInput())(x, t, t)
        torch.testing.assert_close(y, (x + before).sin() + before)
        assert torch.equal(t, before)
        module = fz.Sequential(fz.MakeExtraOutput(), op(), fz.AddExtraInput(in_place=True))
        y, extra = module(x, x)
        torch.testing.assert_close(y, x.sin() + x)
        assert torch.equal(extra, x)
        y, extra = module(x, t.clone())
        assert torch.equal(y, x.sin() + t)
        assert torch.equal(extra, x)


def test_required_rules_beside_formulas(own_fusions):
    class Fused(FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            return torch.relu(input_) * 2.0, [(), ()]

    @rule(equal(this.a.input.requires_grad, value=False))
    def without_gradients(a: fz.ReLU, s: fz.ConstantScale) -> Fused:
        """Nothing."""
        return Fused([a, s])

    register_rule(without_gradients)
    op, _ = _pair(FORMULAS["sine"])
    ops = [op(), fz.ReLU(), fz.ConstantScale(2.0)]
    module = fz.Sequential(*ops, require=["without_gradients"])
    x = torch.randn(4, 8)
    assert torch.equal(module(x), torch.relu(x.sin()) * 2)
    assert module.plan.fired == ("without_gradients",)
    with pytest.raises(fz.NotFused, match="requires_grad must be False, got True"):
        module(x.requires_grad_())


def test_a_formula_at_two_places_of_which_one_is_fused(own_fusions):
    class Squared(fz.BasicOperation):
        def formula(self, x):
            return x * x

    class Fused(FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            basic_op_ctxs[0].save_for_backward(input_)
            return input_ * input_ * 0.5, [(), ()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **_):
            return basic_op_ctxs[0].saved_tensors[0] * grad_output, [(), ()], [(), ()]

    @rule()
    def half_square(a: Squared, s: fz.ConstantScale) -> Fused:
        """Nothing."""
        return Fused([a, s])

    register_rule(half_square)
    op, x = Squared(), torch.randn(4, 8, requires_grad=True)
    module = fz.Sequential(op, fz.ConstantScale(0.5), op, require=["half_square"])
    (found,) = torch.autograd.grad(module(x).sum(), x)
    assert module.plan.fired == ("half_square",)
    torch.testing.assert_close(found, x.detach() ** 3)


def test_a_checkpointed_channel_that_is_added_to_in_place():
    op, _ = _pair(FORMULAS["sine"])
    make, add = fz.MakeExtraOutput(), fz.AddExtraInput(in_place=True)
    make.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    module = fz.Sequential(make, op(), add, fz.ConstantScale(2.0))
    x = torch.randn(4, 8, requires_grad=True)
    checkpoint(module, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x.detach().cos() + 1))


def test_a_dtype_that_follows_the_mode_behind_a_fusion():
    class Widens(fz.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            return input_ * 2 if self.training else (input_ * 2).double()

        def op_backward(self, ctx, grad_output):
            return (grad_output * 2).float(), ()

    module, x = fz.Sequential(fz.Linear(8, 8), Widens(), fz.ConstantScale(0.5)), torch.randn(4, 8)
    assert module(x).dtype == torch.float32
    module.eval()
    torch.testing.assert_close(module(x), F.linear(x, module[0].weight, module[0].bias).double())


def test_a_formula_returns_one_tensor():
    op, _ = _pair(lambda s, x: (x, x))
    with pytest.raises(TypeError, match=r"formula of Formula must return one tensor, got \(a"):
        fz.Sequential(fz.Bias(8), op())(torch.randn(4, 8, requires_grad=True))


def test_a_formula_of_one_op_alone():
    op, x = fz.BasicOperation(), torch.randn(4, 8, requires_grad=True)
    op.factor = torch.tensor(2.0)
    op.formula = lambda t: t * op.factor
    y = op(x)
    op.factor = torch.tensor(0.0)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((4, 8), 2.0))


def test_draws_of_another_generator():
    class Own(fz.BasicOperation):
        def formula(self, x):
            return x * torch.rand(x.shape, generator=generator)

    generator, x = torch.Generator().manual_seed(0), torch.randn(4, 8, requires_grad=True)
    (found,) = torch.autograd.grad(Own()(x).sum(), x)
    assert torch.equal(found, torch.rand(4, 8, generator=torch.Generator().manual_seed(0)))


def test_a_formula_that_counts_does_so_once():
    class Counts(Table):
        def formula(self, x):
            self.table += 1
            return x * self.table.clone()

    op, x = Counts(), torch.randn(4, 8, requires_grad=True)
    table = op.table.clone()
    (found,) = torch.autograd.grad(op(x).sum(), x)
    assert torch.equal(op.table, table + 1)
    assert torch.equal(found, (table + 1).expand(4, 8))


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_fusion_of_the_forward_alone_takes_no_formula_that_draws(
    how, own_fusions, fresh_compiler
):
    class Fused(fz.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            basic_op_ctxs[0].save_for_backward(input_, *basic_op_ctxs[0].parameters)
            return input_ * 1, [()]

    fz.register_forward_fusion(
        lambda ops, *, recipe: [Fused([op]) if isinstance(op, Noisy) else op for op in ops]
    )
    op = Noisy()
    call = torch.compile(op, backend="aot_eager", fullgraph=True) if how == "compiled" else op
    with pytest.raises(Exception, match="formula of Noisy must draw no random numbers"):
        call(torch.randn(4, 8, requires_grad=True)).sum().backward()


class RandomByPython(fz.BasicOperation):
    def formula(self, x):
        return x * (1 + random.random())


class DropsManyRows(fz.BasicOperation):
    def formula(self, x):
        return F.dropout(x, 0.5) if len(x) > 16 else 2 * x


class DrawsAndScales(fz.BasicOperation):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(8) + 1)

    def formula(self, x, w):
        return F.dropout(x * w, 0.5)


@pytest.mark.parametrize("kind", [RandomByPython, DropsManyRows, DrawsAndScales])
@pytest.mark.parametrize("how", ["alone", "in a block", "nested"])
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # random.random, so:
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_formula_draws_once(how, kind, fresh_compiler):
    op = kind()
    if how == "alone":
        module, factor = op, 1.0
    else:
        make, add = fz.MakeExtraOutput(), fz.AddExtraInput()
        make.set_extra_output_channel(0, "residual", output_to_caller=False)
        add.set_extra_input_channel(0, "residual")
        inner = [make, op, add]
        inner = inner if how == "in a block" else [fz.Sequential(*inner)]
        module, factor = fz.Sequential(fz.ConstantScale(3.0), *inner, fz.ConstantScale(2.0)), 6.0
    x = torch.rand(64, 8).add_(1).requires_grad_()
    compiled = torch.compile(module, fullgraph=kind is not RandomByPython, backend="aot_eager")
    for rows in (x[:8], x, x[:32]):
        leaf = rows.detach().requires_grad_()
        y = compiled(leaf)
        found, *dw = torch.autograd.grad(y.sum(), [leaf, *op.parameters()])
        y, leaf = y.detach(), leaf.detach()
        torch.testing.assert_close(found, y / leaf)  # all are linear in x
        if dw:
            drawn = y / factor - (0 if how == "alone" else 3 * leaf / factor * 2)
            torch.testing.assert_close(dw[0], factor * (drawn / op.w.detach()).sum(0))


def test_compiled_draws_beside_fusion_functions(own_fusions, fresh_compiler):
    fz.register_forward_fusion(lambda ops, *, recipe: ops)
    x = torch.rand(64, 8).add_(1).requires_grad_()
    module = fz.Sequential(fz.ConstantScale(2.0), DrawsAndScales())
    y = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], y.detach() / x.detach())


def test_a_compiled_formula_with_a_buffer(fresh_compiler):
    op, x = Table(), torch.randn(64, 8, requires_grad=True)
    y = torch.compile(op, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, x * op.table)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], op.table.expand(64, 8))


class Table(fz.BasicOperation):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(8))

    def formula(self, x):
        return x * self.table


def test_a_buffer_that_changes_before_the_backward_is_noticed():
    op, x = Table(), torch.randn(4, 8, requires_grad=True)
    y = op(x)
    op.table.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- what other backwards read --------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "sm90"])
@pytest.mark.parametrize("single", [False, True])
def test_the_scaled_bias_is_saved(single, target):
    op = fz.GroupedLinear(2, 32, 32, scale_bias=True, single_grouped_bias=single)
    for bias in op.biases():
        bias.data.normal_()
    x, scales = torch.randn(64, 32), torch.rand(64, requires_grad=True)
    with assume_target(target):
        (expected,) = torch.autograd.grad(op(x, [32, 32], scales).sum(), scales)
        y = op(x, [32, 32], scales)
        with torch.no_grad():
            for bias in op.biases():
                bias.add_(1)
        if single:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:  # what was saved is the biases' stack, a copy
            torch.testing.assert_close(torch.autograd.grad(y.sum(), scales)[0], expected)
