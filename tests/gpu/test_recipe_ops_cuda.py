"""Ops under recipes on CUDA: the CPU's values, no synchronisation, capture into graphs."""

import pytest
import reference as ref
import torch
from checks import graph_of, never_waiting
from number_formats import each_recipe
from torch import nn

import fusible as fz
from fusible import recipes

pytestmark = pytest.mark.gpu

SIZES = [37, 0, 128, 64]


def block():
    options = {"dtype": torch.bfloat16, "single_grouped_weight": True}
    return fz.Sequential(
        fz.Linear(128, 128, dtype=torch.bfloat16),
        fz.GroupedLinear(4, 128, 256, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(4, 128, 128, **options),
    )


def inputs(device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 128, generator=generator).to(device, torch.bfloat16).requires_grad_()
    scales = torch.rand(256, generator=generator).to(device)
    return x, torch.tensor(SIZES, device=device), scales


def step(module, recipe, x, splits, scales):
    """Output and gradients of one forward and backward."""
    with fz.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, splits, scales, splits)
    grads = torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()])
    return [y.detach(), *grads]


def errors(got, want):
    """Relative errors of output, input gradient, and the parameters' gradients together.

    Together, since an empty group's are zero, and a small one's are noisy.
    """
    got, want = (
        [
            t[0].cpu().float(),
            t[1].cpu().float(),
            torch.cat([g.cpu().float().flatten() for g in t[2:]]),
        ]
        for t in (got, want)
    )
    return [float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


@each_recipe
def test_values_are_those_of_the_cpu(recipe):
    module = block()
    for p in module.parameters():
        if p.dim() == 1:
            nn.init.normal_(p)
    exact = step(module, None, *inputs("cpu"))
    want = step(module, recipe, *inputs("cpu"))
    got = step(module.cuda(), recipe, *inputs("cuda"))
    # The activation between products is in BF16, and quantizing it turns its last bit into one of
    # the format, now and then; that of a tensor's maximum moves the whole tensor. So the two may
    # differ as each differs from what is not quantized, and neither is worse than the other.
    of_cpu, of_gpu = errors(want, exact), errors(got, exact)
    for between, theirs, mine in zip(errors(got, want), of_cpu, of_gpu, strict=True):
        assert mine < 1.1 * theirs
        assert between < 1.2 * theirs


@each_recipe
def test_no_step_synchronises(recipe):
    module, given = block().cuda(), inputs("cuda")
    step(module, recipe, *given)  # compiles kernels
    torch.cuda.synchronize()
    with never_waiting():
        step(module, recipe, *given)


@each_recipe
def test_a_captured_step_sees_new_weights_even_inside_a_reuse_scope(recipe):
    module, (x, splits, scales) = block().cuda(), inputs("cuda")
    with fz.reuse_quantized_weights(module):
        graph, captured = graph_of(lambda: step(module, recipe, x, splits, scales))
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.5)
        splits.copy_(torch.tensor([10, 100, 0, 90]))
    graph.replay()
    want = step(module, recipe, x, splits, scales)
    ref.assert_equal(captured, want)


@pytest.mark.parametrize("stored", [False, True])
def test_a_training_step_with_stored_weights(stored):
    recipe = recipes.MXFP8BlockScaling()
    with fz.quantized_model_init(enabled=stored, recipe=recipe):
        module = block().cuda()
    given = inputs("cuda")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        with fz.autocast(recipe=recipe):
            y = module(*given, given[1])
        loss = (y.float()[: sum(SIZES)] - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
