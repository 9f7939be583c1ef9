"""Experts in one op leave the rows past the last group unwritten: nothing reads what is there."""

import math

import pytest
import reference as ref
import torch
from moe_experts import EXPERTS, HIDDEN, TOP_K, experts
from number_formats import BLOCK_FP8, CURRENT_FP8
from sm90_launches import sm90_on_cpu

import fusible as fz
from fusible.fuser.context import OperationContext
from fusible.kernels import moe
from fusible.testing import assume_target

TOKENS, BF16 = 60, torch.bfloat16


def inputs():
    """Tokens, probabilities, ids of which a third are of other ranks, gradient."""
    torch.manual_seed(1)
    x, dy = (torch.randn(TOKENS, HIDDEN).to(BF16) for _ in range(2))
    ids = torch.randint(-1, EXPERTS + 2, (TOKENS, TOP_K))
    return x.requires_grad_(), torch.rand(TOKENS, TOP_K).requires_grad_(), ids, dy


@pytest.fixture
def unwritten(monkeypatch):
    """Copies of rows have NaN where they need not be written; gives which ones had."""
    counts, scatter = [], moe.scatter_rows

    def poisoned(x, row_map, weights, rows, scale, zero_tail=True):
        out, moved = scatter(x, row_map, weights, rows, scale)
        tail = torch.ones(rows, dtype=torch.bool)
        tail[row_map[row_map >= 0].long()] = False
        if not zero_tail:
            out[tail] = math.nan
            counts.append(int(tail.sum()))
        return out, moved

    def permuted(x, weights, ids, groups, capacity, rows, scale, zero_tail=True):
        row_map, *others = moe.permutation(ids, groups, capacity)
        return *poisoned(x, row_map, weights, rows, scale, zero_tail), row_map, *others

    monkeypatch.setattr(moe, "scatter_rows", poisoned)
    monkeypatch.setattr(moe, "permute_rows", permuted)
    return counts


def step(module, recipe, given, *more):
    """Output and all gradients, by the kernels of SM90 run on the CPU."""
    x, probs, ids, dy = given
    with sm90_on_cpu(), assume_target("sm90"), fz.autocast(enabled=bool(recipe), recipe=recipe):
        y = module(x, probs, ids, *more)
        y = y[0] if isinstance(y, tuple) else y
        assert module.plan.fired[0].startswith("moe_experts_sm90")
        return [y.detach(), *torch.autograd.grad(y, [x, probs, *module.parameters()], dy)]


@pytest.mark.parametrize(
    "recipe", [None, BLOCK_FP8, CURRENT_FP8], ids=["bf16", "fp8_block", "fp8_current"]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "scale_bias": True},
        {"bias": True, "recompute_rows": True},
        {"capacity_factor": 1.0},
        {"scale_input": True, "act": fz.SwiGLU()},
        {"weighted": True, "act": fz.SwiGLU()},
    ],
    ids=str,
)
def test_bits_are_those_with_zeros(options, recipe, unwritten, monkeypatch):
    module, given = experts(**options), inputs()
    got = step(module, recipe, given)
    copies = 2 + options.get("recompute_rows", False)
    if recipe is not None and not options.keys() & {"scale_input", "weighted"}:
        copies = 0  # The quantizers gather the rows.
    assert len(unwritten) == copies
    assert all(unwritten)
    unwritten.clear()
    always = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(OperationContext, "zero_tail", always)
    ref.assert_same_bits(got, step(module, recipe, given))
    assert not unwritten
    assert all(t.isfinite().all() for t in got)


def test_rows_whose_gradients_another_op_gets_are_written(unwritten):
    """Scales of another dispatch, whose backward reads the gradients of all of them."""
    parts, outer = list(experts().children()), fz.Dispatch(EXPERTS)
    outer.set_extra_output_channel(outer.extra_output_names.index("scales"), "outer")
    parts[2].set_extra_input_channel(0, "outer")
    x, probs, ids, dy = inputs()
    more = torch.rand(len(x) * TOP_K, 1), torch.randint(0, EXPERTS, (len(x) * TOP_K, 1))
    dy = torch.randn(len(x) * TOP_K, HIDDEN).to(BF16)
    got = step(fz.Sequential(outer, *parts), None, (x, probs, ids, dy), *more)
    assert not unwritten
    assert all(t.isfinite().all() for t in got)
