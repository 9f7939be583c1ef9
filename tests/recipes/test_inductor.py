"""What Inductor compiles on the CPU gives the bits of eager code, for every number format."""

from itertools import product

import pytest
import reference as ref
import torch
from number_formats import RECIPES
from pairs import every_pair
from torch import nn

import fusible as fz
from fusible.recipes.tensor import QuantizedTensor

OF_WEIGHTS = [kind for kind in RECIPES if kind != "mxfp8_hybrid"]
"""Recipes whose weights have a format of their own: that one's have MXFP8's."""
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))


def tensor(recipe):
    return QuantizedTensor.quantize(X, recipe.format("weight"), columnwise=True)


FUNCTIONS = {
    "clone": lambda q: q.clone(),
    "detach": lambda q: q.detach(),
    "half": lambda q: q.half(),
    "view": lambda q: q.view(1, 64, 64),
    "copy_": lambda q: q.copy_(X.t()),
    "copy_ of a quantized one": lambda q: q.copy_(q.clone()),
    "add_": lambda q: q.add_(1),
    "mul_": lambda q: q.mul_(0.3),
    "zero_": lambda q: q.zero_(),
    "write to a row": lambda q: (q[3].fill_(0.5), q)[1],
    "read": lambda q: q + 1,
    "product": lambda q: q @ q.t(),
}


@pytest.mark.parametrize("kind", OF_WEIGHTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_operation(name, kind):
    function, eager, compiled = FUNCTIONS[name], tensor(RECIPES[kind]), tensor(RECIPES[kind])
    torch._dynamo.reset()
    want = function(eager)
    got = torch.compile(function, fullgraph=True)(compiled)
    assert (type(got), got.shape, got.dtype) == (type(want), want.shape, want.dtype)
    for g, w in ((got, want), (compiled, eager)):
        if not isinstance(w, QuantizedTensor):
            torch.testing.assert_close(g, w)
            continue
        ref.assert_same_bits(g.pieces(), w.pieces())


def test_the_cache_of_compiled_code_tells_kinds_of_tensors_apart():
    """PyTorch warns where a subclass has no key of its own."""
    kinds = [tensor(recipe) for recipe in RECIPES.values() if recipe.name != "mxfp8"]
    mx = RECIPES["mxfp8"].format("weight")
    kinds += [QuantizedTensor.quantize(x, mx) for x in (X, X[:32], X.bfloat16())]
    kinds += [QuantizedTensor.quantize(X, mx).requires_grad_()]
    keys = [q._stable_hash_for_caching() for q in kinds]
    assert len(set(keys)) == len(kinds)
    for q, key in zip(kinds, keys, strict=True):
        again = q.detach().clone().requires_grad_(q.requires_grad)
        assert again._stable_hash_for_caching() == key


def test_the_cache_of_compiled_code_tells_versions_of_the_sources_apart(monkeypatch):
    q = tensor(RECIPES["mxfp8"])
    before = q._stable_hash_for_caching()
    monkeypatch.setattr("fusible.recipes.wrapper.sources_digest", lambda: "of another version")
    assert q._stable_hash_for_caching() != before


OPTIMIZERS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", OF_WEIGHTS)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_step(make, kind):
    """Its result is rounded to a nearest value; of two as near compiled code may take the other."""
    eager, compiled = (nn.Parameter(tensor(RECIPES[kind])) for _ in range(2))
    plain = nn.Parameter(eager.detach().dequantize())
    torch._dynamo.reset()
    for weight, wrap in ((eager, lambda f: f), (compiled, torch.compile), (plain, lambda f: f)):
        optimizer = make([weight])
        weight.grad = X.t().contiguous()
        wrap(lambda optimizer=optimizer: optimizer.step())()
    assert not torch.equal(compiled.dequantize(), tensor(RECIPES[kind]).dequantize())
    error, bound = ((w.dequantize() - plain).abs() for w in (compiled, eager))
    assert (error <= bound + 1e-5).all()


@pytest.mark.parametrize(
    ("foreach", "backend", "kind"),
    every_pair(product((False, True), ("eager", "aot_eager", "inductor"), OF_WEIGHTS)),
)
def test_steps_of_adamw_over_ordinary_weights(foreach, backend, kind):
    """The bits of ordinary weights that are quantized after each of AdamW's two writes.

    Eager and compiled steps differ over ordinary weights too: PyTorch's compiled AdamW computes its
    step size in FP32 tensors, the eager one in Python's doubles.
    """
    fmt, lr, decay = RECIPES[kind].format("weight"), 0.1, 0.01

    def quantized(t):
        return QuantizedTensor.quantize(t.detach(), fmt, columnwise=True)

    weight, plain = nn.Parameter(quantized(X)), nn.Parameter(quantized(X).dequantize())
    torch._dynamo.reset()
    steps = []
    for parameter, own_decay in ((weight, decay), (plain, 0)):
        optimizer = torch.optim.AdamW([parameter], lr, weight_decay=own_decay, foreach=foreach)
        steps.append(torch.compile(optimizer.step, backend=backend))
    for i in range(4):
        weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(i))
        plain.grad = weight.grad.clone()
        plain.data.copy_(quantized(plain * (1 - lr * decay)).dequantize())
        for step in steps:
            step()
        plain.data.copy_(quantized(plain).dequantize())
        assert torch.equal(weight.dequantize(), plain)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_model_of_stored_weights(kind):
    recipe = RECIPES[kind]
    with fz.quantized_model_init(recipe=recipe):
        model = fz.Sequential(fz.Linear(64, 128), fz.SwiGLU(), fz.Linear(64, 64))
    torch._dynamo.reset()
    results = []
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        x = X.clone().requires_grad_()
        with fz.autocast(recipe=recipe):
            y = run(x)
        y.square().mean().backward()
        results.append((y, x.grad, *(p.grad for p in model.parameters())))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
