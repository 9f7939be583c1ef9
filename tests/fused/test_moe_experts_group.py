"""Experts over a group of processes as one fused op, as on Hopper."""

from dataclasses import replace
from unittest import mock

import expert_parallel
import pytest
import torch
import torch.distributed as dist
from expert_parallel import Case, block, compared, results, run, tensors
from number_formats import BLOCK_FP8

import fusible as fz
from fusible.fused.grouped_mlp import GroupedMLP
from fusible.fuser import schedule
from fusible.ops import collectives
from fusible.testing import assume_target

BF16 = torch.bfloat16
FP8 = "moe_experts_sm90_fp8"


def fused(case, group, rank, processes):
    """As one process, and which rule fired."""
    with assume_target("sm90"):
        module = block(case, group, rank, processes)
        run(module, case, *tensors(case, rank, processes))
        return module.plan.fired, compared(case, group, rank, processes)


def fused_fp8(case, group, rank, processes):
    """With products in FP8, whose kernels gather rows, beside the parts one by one."""
    expert_parallel.HIDDEN, expert_parallel.INNER = 144, 320  # as FP8 kernels take them
    x, probs, ids, dy = tensors(case, rank, processes)
    module = block(case, group, rank, processes)
    made = []
    for parts in (False, True):
        with assume_target("sm90"), fz.autocast(recipe=BLOCK_FP8):
            if parts:
                rows, splits, scales, row_map, *sent = module[0](x, probs, ids)
                y = fz.Sequential(*module[1:4])(rows, splits, scales, splits)
                y = module[4](y, row_map, *sent[:2])
            else:
                y = module(x, probs, ids)[0]
                fired = module.plan.fired
        weights = [module[1].weight, module[3].weight]
        made.append([y.detach(), *torch.autograd.grad(y, [x, probs, *weights], dy)])
    return fired, list(zip(*made, strict=True))


def overlapped(case, group, rank, processes):
    """What the backward does from the return of gradients on, in order."""
    seen = []
    all_to_all, grads = dist.all_to_all_single, GroupedMLP.fc1_grads

    class Waited:
        def __init__(self, work):
            self.work = work

        def wait(self):
            seen.append("wait")
            self.work.wait()

    def begin(*args, async_op=False, **kwargs):
        seen.append("begin" if async_op else "exchange")
        work = all_to_all(*args, async_op=async_op, **kwargs)
        return Waited(work) if async_op else work

    def weight_grads(*args, **kwargs):
        seen.append("weight gradient")
        return grads(*args, **kwargs)

    with assume_target("sm90"):
        module = block(case, group, rank, processes)
        x, probs, ids, dy = tensors(case, rank, processes)
        y = module(x, probs, ids)[0]
        dist.all_to_all_single, GroupedMLP.fc1_grads = begin, weight_grads
        try:
            y.backward(dy)
        finally:
            dist.all_to_all_single, GroupedMLP.fc1_grads = all_to_all, grads
    return seen


CASES = [
    Case(send, BF16, **options)
    for send in ("rows", "tokens", "all")
    for options in (
        {},
        {"recompute": True},
        {"tokens": "uneven", "routing": "outside"},
        {"tokens": "none", "recompute": True},
        {"capacity_factor": 1.0},
        {"twice": True},
        {"checkpointed": True},
        {"dims": 3},
    )
]
# Weights of the experts' inputs, as in Llama-4, and of their outputs: without partial sums.
CASES += [
    Case("rows", BF16, **options)
    for options in (
        {"scale_input": True},
        {"scale_input": True, "recompute": True},
        {"weighted": True},
    )
]


FP8_CASES = CASES[:15] + [Case(mode, BF16, quantized_send=True) for mode in ("tokens", "all")]


@pytest.mark.parametrize(
    ("cases", "run", "rule"),
    [(CASES, fused, "moe_experts_sm90"), (FP8_CASES, fused_fp8, FP8)],
    ids=["bf16", "fp8"],
)
def test_experts_over_a_group(cases, run, rule, tmp_path):
    """Every bit of one process's (of two choices the sum has one order)."""
    for of_rank in results(2, tmp_path, cases, run):
        for case in cases:
            assert not isinstance(of_rank[str(case)], str), of_rank[str(case)]
            fired, pairs = of_rank[str(case)]
            assert fired == (rule,), case
            for made, wanted in pairs:
                torch.testing.assert_close(made, wanted, rtol=0, atol=0, msg=f"{case}")


def test_gradients_are_sent_during_the_weight_gradient(tmp_path):
    case = Case("tokens", BF16)
    for of_rank in results(2, tmp_path, [case], overlapped):
        order = of_rank[str(case)]
        assert order[-5:] == ["begin", "begin", "weight gradient", "wait", "wait"], order


# --- a shared expert ------------------------------------------------------------------------------


def shared_expert(dtype):
    torch.manual_seed(3)
    hidden, inner = expert_parallel.HIDDEN, expert_parallel.INNER
    return [
        fz.Linear(hidden, 2 * inner, bias=False, dtype=dtype),
        fz.SwiGLU(),
        fz.Linear(inner, hidden, bias=False, dtype=dtype),
    ]


def beside(routed, shared, *, in_place=False):
    """Both as one run of ops, whose second branch starts from the tokens."""
    return fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "tokens", output_to_caller=False),
        *routed,
        fz.Swap()
        .set_extra_input_channel(0, "tokens")
        .set_extra_output_channel(0, "routed", output_to_caller=False),
        *shared,
        fz.AddExtraInput(in_place=in_place).set_extra_input_channel(0, "routed"),
    )


def recorded(monkeypatch, seen):
    """Note in ``seen`` when exchanges begin and are waited for, and when the shared expert runs."""

    def begin(exchange):
        def call(*args, **kwargs):
            work = exchange(*args, **kwargs)
            if work is None:
                return seen.append("exchange")
            seen.append("begin")
            wait = work.wait
            return mock.Mock(wait=lambda: (seen.append("wait"), wait()))

        return call

    def noted(what, function):
        def call(*args):
            seen.append(what)
            return function(*args)

        return call

    monkeypatch.setattr(dist, "all_to_all_single", begin(dist.all_to_all_single))
    monkeypatch.setattr(collectives, "_all_gather", begin(collectives._all_gather))
    for name, what in (("forward_impl", "shared"), ("backward_impl", "shared backward")):
        monkeypatch.setattr(fz.SwiGLU, name, noted(what, getattr(fz.SwiGLU, name)))


def with_shared_expert(case, group, rank, processes):
    """Results beside those of no overlap and of two runs, what is done in order, and the plan."""
    target, case = case.routing, replace(case, routing="random")
    x, probs, ids, dy = tensors(case, rank, processes)
    made, seen = [], []
    with assume_target(target), pytest.MonkeyPatch.context() as patch:
        for way in ("two runs", "no overlap", "overlap"):
            routed, shared = block(case, group, rank, processes), shared_expert(case.dtype)
            weights = [routed[1].weight, routed[3].weight, shared[0].weight, shared[2].weight]
            run = beside(routed, shared, in_place=case.twice)
            if way == "two runs":
                y = fz.Sequential(*shared)(x) + routed(x, probs, ids)[0]
            elif way == "no overlap":
                with mock.patch.object(schedule, "overlaps", return_value=()):
                    y = run(x, probs, ids)[0]
            else:
                plan = str(fz.explain(run, x, probs, ids))
                recorded(patch, seen)
                y = run(x, probs, ids)[0]
                seen.append("|")
            made.append([y.detach(), *torch.autograd.grad(y, [x, probs, *weights], dy)])
    return list(zip(*made, strict=True)), seen, plan


SHARED = [
    Case(send, BF16, routing=target, twice=in_place)
    for send in ("tokens", "all")
    for target, in_place in (("sm90", False), ("cpu", False), ("cpu", True))
]
# The fused experts also save the weights that multiply their inputs.
SHARED += [
    Case("tokens", BF16, routing="sm90", scale_input=True, recompute=True),
    Case("all", BF16, routing="sm90", weighted=True),
]


def test_a_shared_expert_runs_while_sums_and_gradients_are_sent(tmp_path):
    for of_rank in results(2, tmp_path, SHARED, with_shared_expert):
        for case in SHARED:
            found = of_rank[str(case)]
            assert not isinstance(found, str), found
            triples, seen, plan = found
            forward, backward = seen[: seen.index("|")], seen[seen.index("|") + 1 :]
            at = forward.index("shared")
            assert forward[at - 1 : at + 2] == ["begin", "shared", "wait"], forward
            at = backward.index("shared backward")
            assert backward[at - 1 : at + 2] == ["begin", "shared backward", "wait"], backward
            assert "its output is sent while BasicLinear, SwiGLU" in plan
            assert "its output's gradient is sent while the backward of BasicLinear, SwiGLU" in plan
            for two_runs, without, overlapping in triples:
                torch.testing.assert_close(overlapping, without, rtol=0, atol=0, msg=f"{case}")
                torch.testing.assert_close(overlapping, two_runs, rtol=0.02, atol=0.02)
