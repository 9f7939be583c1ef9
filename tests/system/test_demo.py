"""The example behind ``make demo``, at a tiny size: it learns, explains itself and draws."""

import os
import subprocess
import sys

import pytest
import torch
from scripts import EXAMPLES, ROOT, load

import fusible

EXAMPLE = EXAMPLES / "moe_block.py"
TINY = ["--hidden=32", "--layers=1", "--experts=4", "--expert-features=16"]
TINY += ["--context=32", "--batch=8", "--device=cpu"]


@pytest.fixture(scope="module")
def example(one_thread):
    return load("moe_block")


@pytest.fixture(scope="module")
def run(example, tmp_path_factory):
    """What a short run returned, its folder, and the options it had."""
    out = tmp_path_factory.mktemp("demo")
    arguments = [*TINY, "--steps=30", f"--out={out}"]
    return example.main(arguments), out, example.parse_options(arguments)


def test_the_held_out_loss_falls(run):
    history, _, _ = run
    first, *_, last = (loss for _, loss in history.held_out)
    assert history.held_out[-1][0] == 30
    assert last < 0.8 * first
    assert 4 < history.entropy < 5  # of Python sources, byte by byte
    assert history.tokens == 30 * 8 * 32
    for shares in history.usage:
        assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("step", "seconds", "done"),
    [
        (500, 30, 0.5),  # by time
        (500, 61, 1.0),
        (7, 60, 0.2),  # a slow machine goes on
        (50, 60, 0.5),
        (100, 100, 1.0),
        (7, 300, 1.0),  # not for ever
    ],
)
def test_a_run_by_time_makes_a_least_number_of_steps(example, step, seconds, done):
    options = example.parse_options(["--seconds=60"])
    assert example.part_done(options, step, seconds) == pytest.approx(done)


def test_steps_are_counted_while_it_trains(example, tmp_path, capsys):
    example.main([*TINY, "--steps=3", f"--out={tmp_path}"])
    assert "step 3, held-out " in capsys.readouterr().err


def test_it_draws_the_loss_and_the_op_graphs(run):
    _, out, _ = run
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    for name in ("op_graph", "op_graph_sm90", "op_graph_sm100"):
        drawing = (out / f"{name}.svg").read_text()
        assert drawing.startswith("<svg")
        assert "ScaledSwiGLU" in drawing


def test_equal_seeds_give_equal_losses(run, example, tmp_path):
    again = example.main([*TINY, "--steps=30", f"--out={tmp_path}"])
    assert again.held_out == run[0].held_out
    other = example.main([*TINY, "--steps=1", "--seed=1", f"--out={tmp_path}"])
    assert other.held_out[0] != again.held_out[0]


@pytest.mark.parametrize("target", [None, "sm90", "sm100"])
def test_it_prints_the_plan_that_explain_makes(example, run, target, tmp_path, capsys):
    """Whatever rules exist: the plan printed is that of the block, made here once more."""
    example.main([*TINY, "--steps=1", f"--out={tmp_path}"])
    printed = capsys.readouterr().out
    block = example.moe(hidden=32, experts=4, top_k=2, features=16)
    x = torch.zeros(8, 32, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=target is not None):
        plan = fusible.explain(block, x, target=target)
    assert str(plan) in printed
    for name in ("TopKRouter", "Dispatch", "GroupedLinear", "ScaledSwiGLU", "Combine"):
        assert name in str(plan)


def test_experts_sum_as_a_loop_over_tokens_does(example):
    block = example.moe(hidden=32, experts=4, top_k=2, features=16).double()
    x = torch.randn(50, 32, dtype=torch.float64)
    y, balance, splits = block(x)
    probabilities = torch.softmax(x @ block[0].weight.T, dim=-1)
    weights, chosen = probabilities.topk(2, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    for t in range(50):
        expected = 0
        for weight, e in zip(weights[t], chosen[t], strict=True):
            gate, linear = (block[2].weight[e] @ x[t]).chunk(2)
            act = torch.nn.functional.silu(gate) * linear
            expected = expected + weight * (block[4].weight[e] @ act)
        torch.testing.assert_close(y[t], expected, rtol=1e-9, atol=1e-9)
    counts = chosen.flatten().bincount(minlength=4)
    assert splits.tolist() == counts.tolist()
    torch.testing.assert_close(balance, 4 * (counts / 100 * probabilities.mean(0)).sum())


def test_the_text_is_split_by_file(example, tmp_path, monkeypatch):
    for i in range(20):
        (tmp_path / f"m{i:02}.py").write_text(chr(97 + i) * 3)
    for skipped in ("site-packages", "test"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "a.py").write_text("not read")
    monkeypatch.setattr(example.sysconfig, "get_path", lambda name: str(tmp_path))
    text, held_out = (bytes(t.tolist()) for t in example.read_text())
    assert held_out == b"aaakkk"
    assert text == b"".join(bytes([97 + i]) * 3 for i in range(20) if i % 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-k=9"], "--top-k must be at most --experts 8, got 9"),
        (["--hidden=100"], "--hidden must be a multiple of 32, got 100"),
        (["--device=teapot"], "teapot"),
        (["--device=mps"], "--device must be cpu or cuda, got mps"),
        (["--device=cuda:99"], "--device cuda:99 is not on this machine"),
        (["--steps=0"], "argument --steps: invalid positive int value: '0'"),
        (["--seconds=soon"], "argument --seconds: invalid positive float value: 'soon'"),
        (["--steps=5", "--seconds=5"], "not allowed with argument"),
    ],
)
def test_bad_arguments_are_named(example, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        example.parse_options(arguments)
    assert message in capsys.readouterr().err


def test_the_help_of_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--expert-features" in done.stdout
    assert "(default: 60.0)" in " ".join(done.stdout.split())
