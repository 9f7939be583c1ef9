"""A fixed set of cases of every kind, and what the fuzzer itself promises."""

import re
from pathlib import Path

import pytest
import torch

from fusible import activations, formulas

from .cases import Action, Case, InvalidError, Op, from_json
from .execute import Outcome, run
from .generate import GENERATORS, case_of
from .shrink import shrunk

SEED, CHUNK = 0, 20
CASES = {
    "pipeline": 80,
    "surgery": 100,
    "quantizers": 60,
    "recipes": 60,
    "experts": 60,
    "compiled": 6,
    "inductor": 1,
}
"""About a minute of one core."""

REFUSALS = (
    "the caller's 'output' must (share no memory|be a contiguous)",
    "AddExtraInput must have in_place=False inside torch.utils.checkpoint",
    "must be leaf tensors with accumulate_into_main_grad or delay_wgrad",
    "Inner must return the gradients of all its parameters",
)
"""What plain PyTorch would run and the package refuses, as documented."""


def chunks():
    return [
        pytest.param(kind, start, id=f"{kind}-{start}")
        for kind in GENERATORS
        for start in range(0, CASES[kind], CHUNK)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "start"), chunks())
def test_cases(kind, start):
    wrong = []
    for number in range(start, min(start + CHUNK, CASES[kind])):
        _, case = case_of(SEED, number, [kind])
        outcome = run(case)
        documented = any(re.search(pattern, outcome.text) for pattern in REFUSALS)
        if outcome.kind == "failed" or (outcome.kind == "refused" and not documented):
            line = f"python -m tests.fuzz --seed {SEED} --kind {kind} --case {number}"
            wrong.append(f"{line}\n  {outcome.kind}: {outcome.text}")
    assert not wrong, "\n".join(wrong)


def test_cases_are_what_their_seed_says():
    for number in range(20):
        _, case = case_of(3, number)
        assert case_of(3, number)[1] == case
        assert from_json(case.to_json()).to_json() == case.to_json()
    assert case_of(3, 0)[1] != case_of(4, 0)[1]


def test_references_know_nothing_of_the_package():
    for name in ("references.py", "formats.py"):
        assert "fusible" not in (Path(__file__).parent / name).read_text(encoding="utf-8")


def test_a_wrong_formula_is_found_and_shrunk(monkeypatch):
    def wrong(dy, x):
        return 1.001 * torch.ops.aten.silu_backward(dy, x)

    row = activations.ActivationFormula(formulas.SILU._replace(backward=wrong))
    monkeypatch.setitem(activations.ACTIVATIONS, "silu", row)
    ops = Op("Bias"), Op("SiLU"), Op("Linear", {"out": 6, "bias": True}), Op("Identity")
    step = Action("step", {"x": "view", "grads": "flat"})
    case = Case(ops, (2, 3, 4), (step, Action("deepcopy"), step), dtype="float32")
    outcome = run(case)
    assert outcome.kind == "failed"
    assert "gradient of x" in outcome.text
    smallest = shrunk(case, outcome)
    assert [op.name for op in smallest.ops] == ["SiLU"]
    assert smallest.program == (Action("step"),)


def test_a_pipeline_that_makes_no_sense_is_no_failure():
    with pytest.raises(InvalidError):
        run(Case((Op("SwiGLU"),), (2, 3)))


def test_outcomes_of_one_cause_have_one_label():
    one, other = (Outcome("failed", f"0 step: output 0: error {e} over 1e-9") for e in (0.1, 2.0))
    assert one.label == other.label
