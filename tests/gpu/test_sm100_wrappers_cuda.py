"""cuDNN's front end on CUDA tensors, up to the launch, which a Hopper GPU refuses.

    python -m pytest -m gpu tests/gpu/test_sm100_wrappers_cuda.py -rP

Only the capability is pretended: DLPack of scales and of FP4, pointer tables, streams, occupancy
and the compiler's own checks of the arguments are real. No kernel of the front end computes
anything, so values are not looked at; the fused ops around the kernels, and our quantizers, run as
they do on Blackwell.
"""

import sys
import traceback
from contextlib import nullcontext

import pytest
import torch
from checks import graph_of, hopper, never_waiting

pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import blackwell
import cudnn
from sm100_calls import RECIPES, every_configuration, every_layout, sums_in_order

import fusible as fz
from fusible.fuser import target as targets
from fusible.testing import assume_target

pytestmark = hopper


class Wrappers:
    """The front end's wrappers, which take the GPU for a Blackwell one while they are called."""

    def __init__(self):
        self.calls = 0

    def __getattr__(self, name):
        def call(**arguments):
            self.calls += 1
            with blackwell.refusing():
                return getattr(cudnn, name)(**arguments)

        return call


def work_of(module, given, recipe, ordered):
    """A function of one forward and backward."""
    leaves = [t for t in given if t.requires_grad]
    leaves.extend(module.parameters())

    def work():
        context = fz.autocast(recipe=recipe) if recipe else nullcontext()
        with sums_in_order(ordered), context:
            y = module(*given)
            # Weights with a main_grad get no other gradient. No random numbers: the generator
            # would be left in the state that a capture gives it.
            return torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)

    return work


def walk(name, module, work):
    """What one case did: calls, kernels compiled, and what the GPU said."""
    refusals, wrappers = blackwell.REFUSALS, Wrappers()
    refusals.clear()
    with assume_target("sm100", wrappers):
        work()  # compiles
        assert (module.plan.fired + module.plan.kernels)[0].endswith("sm100")
        calls, compiled = wrappers.calls, refusals.compiled
        assert refusals.count == calls, "each call launches"
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        refusals.streams.clear()
        with torch.cuda.stream(side), never_waiting():
            work()
        assert refusals.streams <= {side.cuda_stream}
        torch.cuda.current_stream().wait_stream(side)
        before = refusals.count
        graph, _ = graph_of(work)
        assert refusals.count == before + 4 * calls, "three times before the capture, once in it"
        del graph
    torch.cuda.synchronize()
    assert torch.arange(5, device="cuda").sum().item() == 10, "the GPU still computes"
    assert bool(refusals.errors) == bool(calls)
    return f"{name:60} {calls:3} calls {compiled:3} compiled  {'; '.join(refusals.errors)}"


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("single", [True, False], ids=["dense", "pointers"])
def test_every_call_gets_as_far_as_the_launch(recipe, single):
    failed = []
    try:
        for cases in (every_configuration, every_layout):
            for name, module, given, ordered in cases(recipe, single, 4, "cuda"):
                try:
                    line = walk(name, module, work_of(module, given, recipe, ordered))
                    sys.stdout.write(line + "\n")
                except Exception:
                    failed.append(f"{name}:\n{traceback.format_exc(limit=-12)}")
    finally:  # also where a case that failed in a capture keeps the next from being made
        assert not failed, "\n".join(failed)


def test_this_gpu_is_planned_for_as_one_of_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    monkeypatch.setattr(targets, "_cuda_targets", {})
    assert targets.target_of(torch.device("cuda", 0)).sm == 100
