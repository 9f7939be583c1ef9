"""Experts shared among processes compared with all of them in one: what every rank runs."""

from __future__ import annotations

import process_groups
import torch
from sharded import largest, plain_values, values
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import fusible as fz
from fusible.testing import assume_target

EXPERTS, HIDDEN, INNER, TOKENS, TOP_K, STEPS = 8, 64, 32, 24, 2, 20


class Experts(nn.Module):
    """Experts for the tokens of this process, or with a mesh for those of all its processes."""

    def __init__(self, *, mesh=None, single=True, device="cpu", dtype=torch.float32, recipe=None):
        super().__init__()
        options = {
            "single_grouped_weight": single,
            "single_grouped_bias": single,
            "device": device,
            "dtype": dtype,
        }
        with fz.quantized_model_init(recipe is not None, recipe):
            self.mlp = fz.Sequential(
                fz.Dispatch(EXPERTS, process_group=mesh),
                fz.GroupedLinear(EXPERTS, HIDDEN, 2 * INNER, **options),
                fz.ScaledSwiGLU(32),
                fz.GroupedLinear(EXPERTS, INNER, HIDDEN, **options),
                fz.Combine(process_group=mesh),
            )
        if mesh is not None:
            fz.expert_parallel(self, mesh)

    def forward(self, x, probs, ids):
        y = self.mlp(x, probs, ids)
        return y[0] if isinstance(y, tuple) else y  # over a group there is the load


class Block(nn.Module):
    """A residual block with a router, so that parameters are on two meshes."""

    def __init__(self, seed=0, **options):
        super().__init__()
        torch.manual_seed(seed)
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), Experts(**options)

    def forward(self, x):
        probs, ids = self.router(x).softmax(-1).topk(TOP_K)
        return x + self.experts(x, probs, ids)


def parallel(mesh, **options):
    """A block with its experts over ``ep``, their parts over ``efsdp``; the rest over all."""
    block = Block(mesh=mesh["ep"], **options)
    fully_shard(block.experts, mesh=mesh["efsdp"])
    fully_shard(block, mesh=mesh["all"])
    for part in (block, block.experts):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    return block


def meshes(ep: int):
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
    return {"ep": mesh["ep"], "efsdp": mesh["efsdp"], "all": init_device_mesh("cpu", (world,))}


def batch(step: int, rank: int):
    g = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(TOKENS, HIDDEN, generator=g) for _ in "xy"]


def loss(block, x, y, world, recipe):
    with fz.autocast(enabled=recipe is not None, recipe=recipe):
        out = block(x)
    return (out - y).square().sum() / (world * TOKENS * HIDDEN)


def trained(ep: int, single: bool, recipe, folder: str) -> dict:
    """Train on this rank's tokens, and in one process on all; what differs, and checkpoints."""
    rank, world, mesh = dist.get_rank(), dist.get_world_size(), meshes(ep)
    options = {"single": single, "recipe": recipe}
    plain = Block(**options)
    whole = values(plain)
    block = parallel(mesh, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (block, plain)]
    norms, grads = [], 0.0
    for step in range(STEPS):
        loss(block, *batch(step, rank), world, recipe).backward()
        for other in range(world):
            loss(plain, *batch(step, other), world, recipe).backward()
        if step == 0 and single and recipe is None:
            grads = largest(
                *[[plain_values(p.grad) for p in m.parameters()] for m in (block, plain)]
            )
        norm = fz.distributed.clip_grad_norm_(block.parameters(), 0.05)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        norms.append(float((norm - expected).abs() / expected))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    layout = Block(single=True, recipe=recipe)
    layout.load_state_dict(plain.state_dict())
    found = {
        "difference": largest(values(block), values(layout)),
        "moved": not any(map(torch.equal, whole, values(plain))),
        "norms": max(norms),
        "grads": grads,
        "states": {
            type(optimizers[0].state[p]["exp_avg"]) is DTensor
            and optimizers[0].state[p]["exp_avg"].to_local().shape == p.to_local().shape
            for p in block.parameters()
        },
        "local": tuple(block.experts.mlp[1].weight.to_local().shape),
    }
    return found | checkpoints(block, optimizers[0], ep, recipe, folder)


def checkpoints(block, optimizer, ep, recipe, folder) -> dict:
    """Save, and load under every number of processes for the experts, and into one process."""
    world, same = dist.get_world_size(), {}
    model, state = get_state_dict(block, optimizer)
    dcp.save({"model": model, "optim": state}, checkpoint_id=folder)
    first, moments = values(block), moments_of(block, optimizer)
    for other in (1, 2, 4, 0):
        if other > world:
            continue
        options = {"seed": 1, "recipe": recipe}
        fresh = parallel(meshes(other), **options) if other else Block(**options)
        again = torch.optim.AdamW(fresh.parameters(), lr=0.01)
        model, state = get_state_dict(fresh, again)
        dcp.load({"model": model, "optim": state}, checkpoint_id=folder)
        set_state_dict(fresh, again, model_state_dict=model, optim_state_dict=state)
        same[f"values, {other}"] = all(map(torch.equal, values(fresh), first))
        same[f"moments, {other}"] = all(map(torch.equal, moments_of(fresh, again), moments))
    if recipe is None:  # gloo does not send FP8 elements
        full = get_model_state_dict(block, options=StateDictOptions(full_state_dict=True))
        target = Block(seed=2)
        target.load_state_dict(full)
        same["full state"] = all(map(torch.equal, values(target), first))
    source = Block(seed=3, single=False, recipe=recipe)
    part = parallel(meshes(ep), seed=1, recipe=recipe)
    part.experts.load_state_dict(source.experts.state_dict())
    wanted = Block(seed=4, recipe=recipe)
    wanted.experts.load_state_dict(source.experts.state_dict())
    same["from a whole state"] = all(map(torch.equal, values(part.experts), values(wanted.experts)))
    return {"same": same}


def moments_of(module, optimizer):
    return [
        plain_values(optimizer.state[p][name])
        for p in module.parameters()
        for name in ("exp_avg", "exp_avg_sq")
    ]


def on_meta(ep: int) -> bool:
    """Built without memory, then initialized as in one process."""
    block = Experts(device="meta", mesh=meshes(ep)["ep"])
    assert all(p.to_local().is_meta for p in block.parameters())
    block.to_empty(device="cpu")
    plain = Experts()
    for module in (block, plain):
        torch.manual_seed(7)
        for op in (module.mlp[1], module.mlp[3]):
            op.reset_parameters()
    return all(map(torch.equal, values(block), values(plain)))


def plans(ep: int) -> list:
    """The rules that fire for whole experts and for a part of them."""
    names = []
    for mesh in (None, meshes(ep)["ep"]):
        experts = Experts(dtype=torch.bfloat16, mesh=mesh)
        ids = torch.arange(32).view(16, 2) % EXPERTS
        x = torch.randn(16, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        inputs = x, torch.rand(16, 2), ids
        with assume_target("sm90"):
            experts(*inputs).float().sum().backward()
            names.append(experts.mlp.plan.fired)
            assert names[-1][0] in str(fz.explain(experts.mlp, *inputs))
        grad, groups = experts.mlp[1].weight.grad, experts.mlp[1].num_groups
        assert mesh is None or (type(grad) is DTensor and grad.to_local().shape[0] == groups)
    return names


def refusals(ep: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("a", "b"))
    twice = fz.expert_parallel(fz.GroupedLinear(EXPERTS, 8, 8), mesh["b"])
    outside = fz.expert_parallel(fz.GroupedLinear(EXPERTS, 8, 8), mesh["b"])
    fully_shard(outside, mesh=mesh["a"])
    sizes = torch.tensor([1] * (EXPERTS // ep))
    calls = {
        "two dimensions": lambda: fz.expert_parallel(fz.GroupedLinear(EXPERTS, 8, 8), mesh),
        "no experts": lambda: fz.expert_parallel(nn.Linear(2, 2), mesh["b"]),
        "uneven": lambda: fz.expert_parallel(fz.GroupedLinear(ep + 1, 8, 8), mesh["b"]),
        "twice": lambda: fz.expert_parallel(twice, mesh["b"]),
        "delayed": lambda: fz.expert_parallel(
            fz.GroupedLinear(EXPERTS, 8, 8, delay_wgrad_compute=True), mesh["b"]
        ),
        "outside": lambda: fz.GroupedLinear.__call__(without_hooks(outside), x, sizes),
    }
    x, said = torch.randn(int(sizes.sum()), 8), {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            said[name] = str(error)
    return said


def without_hooks(module):
    module._forward_pre_hooks.clear()
    assert isinstance(module, FSDPModule)
    return module


def worker(rank: int, folder: str) -> dict:
    world = dist.get_world_size()
    seen = {}
    for ep in (2, 4)[: world // 2]:
        for name, single, recipe in (
            ("single", True, None),
            ("separate", False, None),
            ("quantized", True, fz.recipes.MXFP8BlockScaling()),
        ):
            seen[ep, name] = trained(ep, single, recipe, f"{folder}/{ep} {name}")
        seen[ep, "meta"], seen[ep, "plans"] = on_meta(ep), plans(ep)
    seen["refused"] = refusals(2)
    return seen


def outcomes(world: int, folder) -> list[dict]:
    """What each of ``world`` processes saw, by rank."""
    return process_groups.results(worker, (), world, folder)
