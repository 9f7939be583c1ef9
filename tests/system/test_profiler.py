"""Profilers show which op, or fused op, ran: a range each, forward and backward."""

import re

import pytest
import reference as ref
import torch
from sm90_launches import is_direct, sm90_on_cpu
from torch.profiler import profile

import fusible as fz
from fusible.fuser import node
from fusible.testing import assume_target


def ranges(function, profiler=profile):
    with profiler() as p:
        function()
    events = p.events() if profiler is profile else p.function_events
    return [e for e in events if re.fullmatch(r"fusible::.* (for|back)ward", e.name)]


def names(function, **options):
    return [e.name for e in ranges(function, **options)]


def model():
    return fz.Sequential(
        fz.Linear(8, 16),
        fz.GELU(),
        torch.nn.Identity(),
        fz.Sequential(fz.Linear(16, 16), fz.SiLU()),
    )


EXPECTED = [
    "fusible::LinearBiasActivation [0:2] forward",
    "fusible::LinearBiasActivation [3.0 to 3.1] forward",
    "fusible::SiLU [3.1] backward",
    "fusible::Bias [3.0] backward",
    "fusible::BasicLinear [3.0] backward",
    "fusible::GELU [1] backward",
    "fusible::Bias [0] backward",
    "fusible::BasicLinear [0] backward",
]


@pytest.mark.parametrize("profiler", [profile, torch.autograd.profiler.profile])
def test_a_training_step(profiler):
    seq, x = model(), torch.randn(3, 8, requires_grad=True)
    assert names(lambda: seq(x).sum().backward(), profiler=profiler) == EXPECTED
    with torch.no_grad():
        assert names(lambda: seq(x), profiler=profiler) == EXPECTED[:2]


def test_ranges_hold_what_runs_in_them():
    linear, x = fz.BasicLinear(8, 16), torch.randn(3, 8, requires_grad=True)
    forward, backward = ranges(lambda: linear(x).sum().backward())
    assert (forward.name, backward.name) == (
        "fusible::BasicLinear forward",
        "fusible::BasicLinear backward",
    )
    assert inside(forward).count("aten::addmm") + inside(forward).count("aten::mm") == 1
    assert inside(backward).count("aten::mm") == 2


def inside(event):
    return [name for e in event.cpu_children for name in (e.name, *inside(e))]


def test_names_of_modules_are_their_places():
    seq = fz.Sequential({"up": fz.BasicLinear(8, 8), "act": fz.SiLU()})
    assert names(lambda: seq(torch.ones(2, 8))) == [
        "fusible::BasicLinear [up] forward",
        "fusible::SiLU [act] forward",
    ]


def test_the_fused_experts():
    block = fz.Sequential(
        fz.TopKRouter(16, 4, 2, dtype=torch.bfloat16),
        fz.Dispatch(4),
        fz.GroupedLinear(4, 16, 32, bias=False, dtype=torch.bfloat16),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(4, 16, 16, bias=False, dtype=torch.bfloat16),
        fz.Combine(),
    )
    x = torch.randn(3, 16, dtype=torch.bfloat16, requires_grad=True)
    with assume_target("sm90"):
        found = names(lambda: block(x).sum().backward())
    assert [re.sub(r"::\w+", "::", name) for name in found] == [
        "fusible:: [0] forward",
        "fusible:: [1:6] forward",
        "fusible:: [1:6] backward",
        "fusible:: [0] backward",
    ]


def direct_call():
    """A grouped MLP planned as one op for Hopper."""
    module = ref.grouped_mlp(hidden=32, dtype=torch.bfloat16)
    x, splits, scales = ref.grouped_mlp_inputs(hidden=32, dtype=torch.bfloat16)
    with assume_target("sm90"), sm90_on_cpu():
        return module(x, splits, scales, splits)


@pytest.mark.parametrize("grad", [True, False])
def test_a_plan_of_one_op_without_contexts(grad):
    def step():
        y = direct_call()
        if grad:
            assert is_direct(y)
            with assume_target("sm90"):
                y.sum().backward()

    with torch.set_grad_enabled(grad):
        passes = ["forward", "backward"] if grad else ["forward"]
        assert names(step) == [f"fusible::GroupedMLP [0:3] {p}" for p in passes]


def test_without_a_profiler_nothing_is_wrapped(monkeypatch):
    monkeypatch.setattr(node, "record_function", None)
    seq, x = model(), torch.randn(3, 8, requires_grad=True)
    seq(x).sum().backward()
    direct_call()


def test_compiled_code_runs_under_a_profiler(fresh_compiler):
    seq, x = model(), torch.randn(3, 8, requires_grad=True)
    compiled = torch.compile(seq, fullgraph=True, backend="aot_eager")
    expected = seq(x)
    with profile():
        y = compiled(x)
        y.sum().backward()
    torch.testing.assert_close(y, expected)
    assert names(lambda: compiled(x).sum().backward()) == []


def test_explaining_under_a_profiler():
    seq, x = model(), torch.randn(3, 8)
    with profile():
        plan = fz.explain(seq, x)
    assert plan.fired == ("linear_bias_activation",) * 2
