"""Parameters that are computed from others: torch.nn.utils.parametrize, pruning."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import fusible as fz


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def grads(module, y):
    """The gradient of the sum of squares, by parameter."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(y.square().sum(), parameters), strict=True))


@pytest.mark.parametrize("how", ["alone", "after a call", "in a run", "compiled"])
@pytest.mark.parametrize("make", [fz.Linear, fz.BasicLinear])
def test_a_parametrized_linear(make, how, fresh_compiler):
    ours = make(8, 4)
    theirs = nn.Linear(8, 4, bias=make is fz.Linear)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 8)
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


@pytest.mark.parametrize("single", [False, True])
def test_a_parametrized_grouped_linear(single):
    op = fz.GroupedLinear(2, 8, 4, single_grouped_weight=single)
    plain = fz.GroupedLinear(2, 8, 4, single_grouped_weight=single)
    for name in ["weight"] if single else ["weight0", "weight1"]:
        getattr(plain, name).data = 2 * getattr(op, name).data
        parametrize.register_parametrization(op, name, Doubled())
    x = torch.randn(5, 8)
    y, expected = op(x, [2, 3]), plain(x, [2, 3])
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for name, p in plain.named_parameters():
        found = op.get_parameter(f"parametrizations.{name}.original" if "w" in name else name)
        torch.testing.assert_close(found.grad, 2 * p.grad if "w" in name else p.grad)


def test_a_pruned_linear():
    op, x = fz.BasicLinear(8, 4), torch.randn(5, 8)
    prune.l1_unstructured(op, "weight", 0.5)
    y = op(x)
    torch.testing.assert_close(y, F.linear(x, op.weight_orig * op.weight_mask))
    y.sum().backward()
    assert torch.equal(op.weight_orig.grad == 0, op.weight_mask == 0)
    linear = fz.Linear(8, 4)
    prune.l1_unstructured(linear, "weight", 0.5)
    with pytest.raises(AttributeError, match="prune a BasicLinear rather than a Linear"):
        linear(x)


def test_an_op_that_does_not_name_its_parameters():
    op = parametrize.register_parametrization(fz.RMSNorm(8), "weight", Doubled())
    with pytest.raises(TypeError, match=r"RMSNorm must define own_parameters for torch.nn.utils"):
        op(torch.randn(3, 8))


def test_an_op_that_cannot_run_is_no_matter_to_others_alike(fresh_compiler):
    broken, sound = fz.Sequential(fz.RMSNorm(8)), fz.Sequential(fz.RMSNorm(8))
    x = torch.randn(3, 8)
    broken(x)
    parametrize.register_parametrization(broken[0], "weight", Doubled())
    torch.testing.assert_close(torch.compile(sound, backend="aot_eager")(x), sound(x))
