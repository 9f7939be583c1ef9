"""The example under recipes, and the benchmark that compares their training."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fusible as fz
from fusible.testing import assume_target

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # last: others have such names

import recipe_parity

moe_block = recipe_parity.moe_block
TINY = ["--hidden=128", "--layers=1", "--experts=2", "--context=16", "--batch=2", "--device=cpu"]


@pytest.fixture(scope="module")
def text():
    """Bytes with something to learn, and others to see that it was."""
    line = torch.frombuffer(bytearray(b"def train(model, text): return model\n"), dtype=torch.uint8)
    return line.repeat(40), line.repeat(10)


@pytest.mark.parametrize("name", moe_block.RECIPES)
def test_the_example_trains_under_every_recipe(name, text):
    history, plan = recipe_parity.train(name, 0, [*TINY, "--steps=12"], text)
    want, _ = recipe_parity.train("none", 0, [*TINY, "--steps=12"], text)
    first, last = history.held_out[0][1], history.held_out[-1][1]
    assert last < 0.8 * first
    assert last == pytest.approx(want.held_out[-1][1], rel=0.05)
    assert (last != want.held_out[-1][1]) == (name != "none")
    assert f"recipe {name}," in plan
    assert ("quantized operands: input" in plan) == (name != "none")
    assert moe_block.parse_options(["--recipe", name]).recipe == name
    with moe_block.under_recipe(name):
        assert fz.recipes.current_recipe() == moe_block.RECIPES[name]


def histories(*final):
    return [moe_block.History(4.7, held_out=[(0, 8.0), (5, loss)]) for loss in final]


def test_differences_are_paired_by_seed():
    rows = recipe_parity.compare(
        {
            "none": histories(1.9, 2.0, 2.1),
            "mxfp8": histories(1.919, 2.02, 2.121),  # each 1 % more
            "fp8_block": histories(1.9057, 2.01, 2.1147),  # 0.3, 0.5 and 0.7 %
            "fp8_current": histories(1.9, 2.02, 2.1),  # within the target, and no more than chance
            "nvfp4_plain": histories(1.9532, 2.056, 2.1588),  # each 2.8 %
        }
    )
    means = [row["difference_percent"] for row in rows.values()]
    assert means == pytest.approx([0, 1, 0.5, 1 / 3, 2.8])
    spreads = [row["spread_percent"] for row in rows.values()]
    assert spreads == pytest.approx([0, 0, 0.2, 3**-0.5, 0], abs=1e-9)
    assert [row["met"] for row in rows.values()] == [True, False, True, False, True]
    assert rows["fp8_block"]["differences_percent"] == pytest.approx([0.3, 0.5, 0.7])
    assert rows["mxfp8"]["curves"][1] == [(0, 8.0), (5, 2.02)]


@pytest.mark.parametrize("name", recipe_parity.FP8_PRODUCTS)
def test_fp8_products_are_needed_on_hopper(name, text, monkeypatch):
    run = 0, [*TINY, "--steps=1"], text
    with assume_target("sm90"):
        recipe_parity.train(name, *run)
        decoded = replace(recipe_parity.RECIPES[name], fp8_products=False)
        monkeypatch.setitem(recipe_parity.RECIPES, name, decoded)
        with pytest.raises(RuntimeError, match=f"products under {name} must be in FP8"):
            recipe_parity.train(name, *run)


def test_all_seeds_and_files(tmp_path, monkeypatch, capfd):
    command = ["recipe_parity", "--seeds=2", "--recipes", "mxfp8", "fp8_block", "--jobs=1"]
    small = ["--steps=2", "--machine=here", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", [*command, *TINY, *small])
    recipe_parity.main()
    found = json.loads((tmp_path / "recipe_parity_cpu.json").read_text())
    assert list(found["recipes"]) == list(found["plans"]) == ["none", "mxfp8", "fp8_block"]
    assert all(len(row["final"]) == 2 for row in found["recipes"].values())
    assert found["recipes"]["none"]["final"] != found["recipes"]["mxfp8"]["final"]
    assert (tmp_path / "recipe_parity_cpu.png").stat().st_size > 0
    printed = capfd.readouterr().out
    assert "seed 1, fp8_block: held-out" in printed
    assert "mxfp8: the experts' plan" in printed
    assert "spread" in printed
