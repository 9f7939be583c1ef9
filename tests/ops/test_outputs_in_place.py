"""Outputs that the caller writes to, as it may to those of torch.nn's modules."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusible as fz
from fusible.testing import assume_target

SIZES = torch.tensor([3, 0, 3])


def block():
    return fz.Sequential(
        fz.TopKRouter(8, 3, 2),
        fz.Dispatch(3),
        fz.GroupedLinear(3, 8, 16, bias=False),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(3, 8, 8, bias=False),
        fz.Combine(),
    )


CASES = {
    "linear": (lambda: fz.Linear(8, 8), ()),
    "grouped": (lambda: fz.GroupedLinear(3, 8, 8), (SIZES,)),
    "norm": (lambda: fz.RMSNorm(8), ()),
    "layer norm": (lambda: fz.LayerNorm(8), ()),
    "activation": (lambda: fz.Sequential(fz.Linear(8, 8), fz.GELU()), ()),
    "dropout": (lambda: fz.Sequential(fz.Linear(8, 8), fz.Dropout(0.0)), ()),
    "block": (block, ()),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", [None, "sm90", "sm100"])
def test_a_residual_is_added_in_place(name, target):
    torch.manual_seed(0)
    make, extra = CASES[name]
    op, x = make(), torch.randn(2, 3, 8)
    results = []
    for in_place in (False, True):
        leaf = x.clone().requires_grad_()
        with assume_target(target) if target else nullcontext():
            y = op(leaf, *extra)
        y = y if isinstance(y, torch.Tensor) else y[0]
        assert y._base is None
        if in_place:
            y += leaf
            y.mul_(2)
        else:
            y = (y + leaf) * 2
        y.square().sum().backward()
        grads = [p.grad for p in op.parameters()]
        results.append([y.detach(), leaf.grad, *grads])
        op.zero_grad()
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", CASES)
def test_without_a_graph(name):
    torch.manual_seed(0)
    make, extra = CASES[name]
    op, x = make(), torch.randn(2, 3, 8, requires_grad=True)
    for run in (torch.no_grad()(op), lambda *a: checkpoint(op, *a, use_reentrant=True)):
        want, y = (run(x, *extra) for _ in range(2))
        y += x
        assert torch.equal(y, want + x)


def test_an_output_that_the_backward_reads_keeps_its_version():
    class Exp(fz.BasicOperation):
        def op_forward(self, ctx, x, **_):
            y = x.exp().view(x.shape)
            ctx.save_for_backward(y)
            return y

        def op_backward(self, ctx, dy):
            (y,) = ctx.saved_tensors
            return dy * y, ()

    y = Exp()(torch.randn(4, 8, requires_grad=True))

    def write_then_differentiate():
        y.add_(1)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="inplace"):
        write_then_differentiate()
