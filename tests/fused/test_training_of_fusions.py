"""Every built-in fusion with weights takes what its parts take: main grads, delays, buffers."""

import copy

import pytest
import reference as ref
import torch
from every_op import randomised
from every_rule import FITS, rule_of, scope_of, used
from training_paths import on_machine

import fusible as fz
from fusible.ops.weights import WeightedOperation

pytestmark = pytest.mark.usefixtures("cpu_or_hopper")


def ops_of(module):
    return [op for part in module for op in part.basic_ops]


def weighted(module):
    return [op for op in ops_of(module) if isinstance(op, WeightedOperation)]


def holders(module):
    """What holds the weights: the op itself, or the Linear that it is part of."""
    return [part for part in module for op in part.basic_ops if isinstance(op, WeightedOperation)]


NAMES = [name for name, (make, _) in FITS.items() if weighted(make()[0])]


def prepared(name):
    module, inputs = FITS[name][0]()
    return randomised(module, 1 / 3), inputs


def run(name, module, inputs, **options):
    """Output, and the gradients of the inputs; those of the parameters accumulate."""
    copies = {t: t.detach().clone().requires_grad_(t.requires_grad) for t in inputs}
    inputs = [copies[t] for t in inputs]  # the same tensor where it was the same
    torch.manual_seed(1)
    with on_machine(FITS[name][1], "cpu"), scope_of(name):
        out = module(*inputs, **options)
        outs = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(outs, [torch.randn(o.shape).to(o.dtype) for o in outs])
        for op in weighted(module):
            op.backward_dw()
    assert rule_of(name) in used(module.plan)
    return [*(o.detach() for o in outs), *(t.grad for t in inputs if t.requires_grad)]


@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("name", NAMES)
def test_main_grads(name, delay):
    plain, inputs = prepared(name)
    module = copy.deepcopy(plain)
    want = run(name, plain, inputs)
    for op in weighted(module):
        op.accumulate_into_main_grad = True
        op.delay_wgrad_compute = delay and isinstance(op, fz.GroupedLinear)
    start = [torch.randn(holder.weight.shape) for holder in holders(module)]
    for holder, old in zip(holders(module), start, strict=True):
        holder.weight.main_grad = old.clone()
    ref.assert_equal(run(name, module, inputs), want)
    for mine, theirs, old in zip(holders(module), holders(plain), start, strict=True):
        assert mine.weight.grad is None
        total = old.double() + theirs.weight.grad.double()
        bound = 4 * torch.finfo(torch.bfloat16).eps * total.abs().max()
        assert (mine.weight.main_grad - total).abs().max() <= bound
        assert not torch.equal(mine.weight.main_grad, old)


@pytest.mark.parametrize("name", NAMES)
def test_delayed(name):
    plain, inputs = prepared(name)
    grouped = [op for op in weighted(plain) if isinstance(op, fz.GroupedLinear)]
    if not grouped:
        return  # only grouped linears delay
    module = copy.deepcopy(plain)
    for op in weighted(module):
        op.delay_wgrad_compute = True
    ref.assert_equal(run(name, module, inputs), run(name, plain, inputs))
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("name", NAMES)
def test_buffers(name):
    module, inputs = prepared(name)
    want = run(name, copy.deepcopy(module), inputs)
    ops, kwargs, buffers = ops_of(module), {}, []
    outs = len(want) - sum(t.requires_grad for t in inputs)
    for which, op, like in (("output", ops[-1], 0), ("grad_input", ops[0], outs)):
        if isinstance(op, WeightedOperation):
            buffers.append((torch.full_like(want[like], float("nan")), want[like]))
            kwargs.setdefault(op, {})[which] = buffers[-1][0]
    if isinstance(module[0], fz.Linear):  # its parts are no modules of the Sequential's
        kwargs, buffers = {}, []
    got = run(name, module, inputs, op_kwargs=kwargs)
    for mine, theirs in [*zip(got, want, strict=True), *buffers]:
        assert torch.equal(mine, theirs)
