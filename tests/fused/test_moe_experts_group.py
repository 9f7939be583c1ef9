"""Experts over a group of processes as one fused op, as on Hopper."""

import expert_parallel
import torch
import torch.distributed as dist
from expert_parallel import Case, block, compared, results, run, tensors
from number_formats import BLOCK_FP8

import fusible as fz
from fusible.fused.grouped_mlp import GroupedMLP
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
    all_to_all, grads = dist.all_to_all_single, GroupedMLP.first_grads

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
        dist.all_to_all_single, GroupedMLP.first_grads = begin, weight_grads
        try:
            y.backward(dy)
        finally:
            dist.all_to_all_single, GroupedMLP.first_grads = all_to_all, grads
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


FP8_CASES = CASES[:15] + [Case(mode, BF16, quantized_send=True) for mode in ("tokens", "all")]


def test_experts_over_a_group(tmp_path):
    """Every bit of one process's (of two choices the sum has one order)."""
    for of_rank in results(2, tmp_path, CASES, fused):
        for case in CASES:
            assert not isinstance(of_rank[str(case)], str), of_rank[str(case)]
            fired, pairs = of_rank[str(case)]
            assert fired == ("moe_experts_sm90",), case
            for made, wanted in pairs:
                torch.testing.assert_close(made, wanted, rtol=0, atol=0, msg=f"{case}")


def test_fp8_products_over_a_group(tmp_path):
    for of_rank in results(2, tmp_path, FP8_CASES, fused_fp8):
        for case in FP8_CASES:
            assert not isinstance(of_rank[str(case)], str), of_rank[str(case)]
            fired, pairs = of_rank[str(case)]
            assert fired == (FP8,), case
            for made, wanted in pairs:
                torch.testing.assert_close(made, wanted, rtol=0, atol=0, msg=f"{case}")


def test_gradients_travel_during_the_weight_gradient(tmp_path):
    case = Case("tokens", BF16)
    for of_rank in results(2, tmp_path, [case], overlapped):
        order = of_rank[str(case)]
        assert order[-5:] == ["begin", "begin", "weight gradient", "wait", "wait"], order
