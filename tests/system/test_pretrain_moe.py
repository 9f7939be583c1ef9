"""``examples/pretrain_moe.py`` through torchrun on two processes, compared with one process."""

import json
import math
import shutil
import sys

import pytest
import torch
from scripts import EXAMPLES, load, torchrun
from torch import distributed as dist

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo"),
    pytest.mark.usefixtures("one_thread"),  # as torchrun gives each process
]
EXAMPLE = EXAMPLES / "pretrain_moe.py"
STEPS, SAVED = 24, 12
SIZES = ("--device=cpu", "--hidden=64", "--inner=64", "--sequence=64", "--batch=8")
RUN = (*SIZES, f"--steps={STEPS}", f"--save-every={SAVED}")


@pytest.fixture(scope="module")
def example():
    return load("pretrain_moe")


def two_processes(folder, *arguments):
    """What each step gave, and what was printed."""
    printed = torchrun(EXAMPLE, *RUN, f"--out={folder}", *arguments)
    return json.loads((folder / "pretrain_moe.json").read_text()), printed


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A run whose processes share the experts, with its folders and what it printed."""
    folder = tmp_path_factory.mktemp("shared")
    history, printed = two_processes(folder, "--ep=2", f"--checkpoint={folder / 'saved'}")
    shutil.rmtree(folder / "saved" / f"step_{STEPS:06d}")  # as if it had been stopped before
    return history, printed, folder


def differences(history, other):
    return [abs(a[0] - b[0]) for a, b in zip(history, other, strict=True)]


def test_loss_falls(shared):
    history, printed, folder = shared
    losses = [loss for loss, _ in history]
    # Of bytes drawn evenly it is log(256); untrained, a little more.
    assert abs(losses[0] - math.log(256)) < 0.3
    assert sum(losses[-4:]) / 4 < 0.65 * losses[0]
    assert all(1 <= load <= 4 for _, load in history)  # top-2 of 8 experts
    for part in (f"{STEPS}/{STEPS}", f"loss {losses[-1]:.3f}, ", " tokens/s", "ep: 2"):
        assert part in printed
    assert "Warning" not in printed
    assert "sequential all_reduce" not in printed
    assert (folder / "pretrain_moe.png").read_bytes()[:4] == b"\x89PNG"


def test_resumed_run_has_the_losses_of_an_uninterrupted_one(shared):
    history, _, folder = shared
    again, _ = two_processes(folder, "--ep=2", f"--checkpoint={folder / 'saved'}")
    assert again == history


def test_one_process_has_the_losses_of_two(shared, example, tmp_path):
    """Of the same windows; from the first step on, and from the checkpoint of two processes.

    Two processes sum in another order: a few units in the last place of an FP32 loss, 2.4e-7 from 2
    to 4. One token with another expert would make 1e-4 of it.
    """
    history, _, folder = shared
    assert max(differences(history, example.main([*RUN, f"--out={tmp_path}"]))) < 5e-6
    saved = shutil.copytree(folder / "saved", tmp_path / "saved")
    for step in set(saved.iterdir()) - {saved / f"step_{SAVED:06d}"}:
        shutil.rmtree(step)
    resumed = example.main([*RUN, f"--out={tmp_path}", f"--checkpoint={saved}"])
    assert resumed[:SAVED] == history[:SAVED]
    assert max(differences(history, resumed)) < 5e-6
    assert sorted(path.name for path in saved.iterdir()) == ["step_000012", "step_000024"]


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block", "nvfp4"])
def test_recipes(example, tmp_path, recipe):
    runs = [
        example.main([*SIZES, "--steps=4", f"--recipe={name}", f"--out={tmp_path}"])
        for name in ("none", recipe)
    ]
    gaps = differences(*runs)
    # Rounding of 2^-4 and, in NVFP4, of 2^-2 moves the loss, but not by much.
    assert 0 < max(gaps) < 0.1
    assert runs[1][-1][0] < runs[1][0][0]


def test_flops_of_a_token(example):
    """Every product of a step, as PyTorch counts those of attention and linears."""
    args = example.parse([*SIZES, "--layers=1", "--experts=4", "--top-k=3"])
    started = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **started)
    try:
        counted = example.flops_per_token(example.Model(args, torch.device("cpu")), args)
    finally:
        dist.destroy_process_group()
    hidden, heads, kv, size, inner, sequence = 64, 4, 2, 32, 64, 64
    attention = hidden * (heads + 2 * kv) * size + heads * size * hidden
    experts = 4 * hidden + 3 * 3 * hidden * inner  # the router; three experts of three products
    norms = 3 * hidden + 2 * size
    scores = 2 * heads * size * (sequence / 2)  # and the sum of values; half is masked
    assert counted == 3 * 2 * (attention + experts + norms + 256 * hidden + scores)


def test_without_matplotlib(example, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    example.plot([[5.0, 1.0]], "title", tmp_path / "plot.png")
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 300
