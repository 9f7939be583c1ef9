"""What a formula's backward, which runs it once more, must find as it was: draws and buffers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusible as fz
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


def test_an_attribute_may_turn_draws_on():
    class Dropped(fz.BasicOperation):
        def __init__(self):
            super().__init__()
            self.p = 0.0

        def formula(self, x):
            return F.dropout(x, self.p) if self.training and self.p else 1 * x

    op, x = Dropped(), torch.randn(64, 8, requires_grad=True)
    assert torch.equal(torch.autograd.grad(op(x).sum(), x)[0], torch.ones_like(x))
    op.p = 0.5
    y = op(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 2.0 * (y != 0))
    op.eval()
    assert torch.equal(torch.autograd.grad(op(x).sum(), x)[0], torch.ones_like(x))
    op.train()
    y = op(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 2.0 * (y != 0))


def test_a_formula_without_draws_saves_no_state():
    class Squared(fz.BasicOperation):
        def formula(self, x):
            return x * x

    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        Squared()(torch.randn(4, 8, requires_grad=True))
    assert [t.shape for t in saved] == [(4, 8)]


def test_draws_of_another_generator_are_refused():
    class Own(fz.BasicOperation):
        def formula(self, x):
            return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(0))

    with pytest.raises(RuntimeError, match=r"formula of Own must draw .* own generators"):
        Own()(torch.randn(4, 8, requires_grad=True))


def test_compiled_draws_are_refused(fresh_compiler):
    x = torch.randn(64, 8, requires_grad=True)
    module = torch.compile(Noisy(), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="formula of Noisy must draw no random numbers under torch"):
        module(x)
    with torch.no_grad():
        assert torch.compile(Noisy(), backend="aot_eager")(x).shape == x.shape


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


def test_a_formula_that_counts_is_refused():
    class Counts(Table):
        def formula(self, x):
            self.table += 1
            return 1 * x

    with pytest.raises(TypeError, match="formula of Counts must change no buffer"):
        Counts()(torch.randn(4, 8, requires_grad=True))


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
