"""The small examples: what they print and learn; ``make demo`` has tests of its own."""

import pytest
import reference as ref
import torch
from scripts import EXAMPLES, load

import fusible as fz

pytestmark = pytest.mark.usefixtures("one_thread")


def test_custom_fusion(own_fusions, capsys):
    example = load("custom_fusion")
    mlp = example.main()
    printed = capsys.readouterr().out
    assert "ScaledSquaredReLU" in printed
    x = torch.randn(8, 64, requires_grad=True)
    leaves = [x, *mlp.parameters()]
    y = mlp(x)
    dy = torch.randn_like(y)
    assert "scaled_squared_relu" in mlp.plan.fired

    def plain(x, w1, b1, w2, b2):
        return torch.relu(x @ w1.T + b1) ** 2 * 0.5 @ w2.T + b2

    exact_y, exact = ref.gradients(plain, leaves, dy)
    ref.assert_accurate(y.detach(), exact_y, roundings=16)
    for mine, theirs in zip(torch.autograd.grad(y, leaves, dy), exact, strict=True):
        ref.assert_accurate(mine, theirs, roundings=16)
    # A refusal has its reason, and the op alone gives the same.
    double = mlp.double()
    assert "input.dtype must be one of float32, bfloat16, got float64" in str(
        fz.explain(double, x.double())
    )
    torch.testing.assert_close(double(x.double()).float(), y)
    with pytest.raises(ValueError, match="a rule's name must be new, got 'scaled_squared_relu'"):
        fz.register_rule(example.scaled_squared_relu)
    text = (EXAMPLES / "custom_fusion.py").read_text()
    code = [
        line for line in text.splitlines() if line.strip() and not line.startswith(('"""', "#"))
    ]
    assert len(code) <= 40


def test_llama4(capsys):
    pytest.importorskip("transformers")
    sizes = ["--hidden=64", "--inner=64", "--experts=4", "--top-k=2", "--tokens=48"]
    errors = load("llama4_moe").main(sizes)
    printed = capsys.readouterr().out
    assert errors["BF16"] < 0.01 < errors["MXFP8"] < 0.1 < errors["NVFP4"] < 0.3
    for held in ("2.000 bytes", "1.031 bytes", "0.505 bytes"):
        assert held in printed
    assert "sm90: moe_experts_sm90" in printed
    assert printed.count("sm100: grouped_mlp_sm100") == len(errors)


def test_shared_expert(capsys):
    example = load("shared_expert")
    losses, load_shares = example.main(["--steps=60"])
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert load_shares.max() < 3 / example.EXPERTS
    assert "Combine" in capsys.readouterr().out
    moe = example.block().double()
    x = torch.randn(9, example.HIDDEN, dtype=torch.float64)
    y, rows = moe(x)
    assert rows.sum() == 9 * example.TOP_K
    *_, probs, ids = moe[example.ROUTER](x)
    w1, w2 = moe[3].weight, moe[5].weight
    for t in range(9):
        want = ref.swiglu(x[t] @ moe[8].weight.T) @ moe[10].weight.T
        for p, e in zip(probs[t], ids[t], strict=True):
            want = want + p * (w2[e] @ ref.swiglu(w1[e] @ x[t]))
        torch.testing.assert_close(y[t], want)
