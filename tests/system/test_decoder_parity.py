"""A decoder layer and a pre-norm MLP in ops train as the same in plain torch.nn modules do."""

import pytest
import torch
import torch.nn.functional as F
from scripts import ROOT, load
from torch import nn

import fusible as fz

TEXT = (ROOT / "LICENSE").read_bytes()


@pytest.fixture(scope="module")
def example():
    return load("decoder_layer")


def mlp_pair(hidden=32, inner=64):
    """Pre-norm MLP with LayerNorm, GELU, bias and dropout-free residual."""
    plain = nn.Sequential(
        nn.LayerNorm(hidden), nn.Linear(hidden, inner), nn.GELU("tanh"), nn.Linear(inner, hidden)
    )
    mine = fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
        fz.LayerNorm(hidden),
        fz.Linear(hidden, inner),
        fz.GELU(),
        fz.Linear(inner, hidden),
        fz.AddExtraInput().set_extra_input_channel(0, "r"),
    )
    for at, module in enumerate(plain, 1):
        mine[at].load_state_dict(module.state_dict())
    return mine, plain


def losses_of(module, call, steps=30):
    torch.manual_seed(3)
    target = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 2, 32)
        loss = F.mse_loss(call(x), target(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_pre_norm_mlp_trains_as_plain_modules():
    mine, plain = mlp_pair()
    ours, theirs = losses_of(mine, mine), losses_of(plain, lambda x: x + plain(x))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert ours[-1] < 0.3 * ours[0]
    assert "linear_bias_activation" in mine.plan.fired


def test_a_decoder_layer_equals_plain_modules(example):
    torch.manual_seed(1)
    mine, plain = (m.layers[0].double() for m in example.pair(1))
    x = torch.randn(2, 16, 64, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 16, 64, dtype=torch.float64)
    results = []
    for layer in (mine, plain):
        y = layer(x)
        results.append([y, *torch.autograd.grad(y, (x, *layer.parameters()), dy)])
    # Both list norm, qkv, out, norm, up, down.
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_decoder_layers_train_to_the_same_loss(example):
    torch.manual_seed(1)
    mine, plain = example.pair()
    ours, theirs = (example.train(m, TEXT, 40) for m in (mine, plain))
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=0)
    assert ours[-1] < 0.75 * ours[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoder_layers_train_under_torch_autocast(example, dtype):
    torch.manual_seed(1)
    mine, plain = example.pair(1)
    for model in (mine, plain):
        # A scope for every step: inside one, autocast keeps the weights that it has cast.
        model.forward = torch.autocast("cpu", dtype)(model.forward)
    ours, theirs = (example.train(m, TEXT, 25) for m in (mine, plain))
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=0)


def test_decoder_layers_train_in_mxfp8(example):
    torch.manual_seed(1)
    mine, plain = example.pair(1)
    theirs = example.train(plain, TEXT, 25)
    with fz.autocast():
        ours = example.train(mine, TEXT, 25)
    torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=0)
    assert ours != theirs
