"""The example under recipes, and the benchmark that compares their training."""

import sys
from pathlib import Path

import pytest
import torch

import fusible as fz

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

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


def test_differences_are_of_means_and_judged_by_target_or_spread():
    rows = recipe_parity.compare(
        {
            "none": histories(1.99, 2.01),
            "mxfp8": histories(2.0, 2.03),
            "fp8_block": histories(2.02, 2.04),
            "nvfp4": histories(2.05, 2.05),
        }
    )
    assert rows["none"]["baseline_spread_percent"] == pytest.approx(1.0)
    differences = [rows[name]["difference_percent"] for name in rows]
    assert differences == pytest.approx([0, 0.75, 1.5, 2.5])
    assert [row["met"] for row in rows.values()] == [True, True, False, True]
    assert rows["mxfp8"]["curves"][1] == [(0, 8.0), (5, 2.03)]
