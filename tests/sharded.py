"""Training under FSDP2 beside training in one process: what every rank runs."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fusible as fz
from fusible.kernels import reference
from fusible.recipes import QuantizedTensor
from fusible.testing import assume_target

GROUPS, HIDDEN, INNER, ROWS, STEPS = 4, 64, 64, 48, 20


@dataclass(frozen=True)
class Case:
    """One training."""

    single: bool = True
    recipe: str = ""
    quantized: bool = False
    dtype: torch.dtype = torch.float32
    machine: str = ""
    """Run the rules of this architecture, computed by the reference of its kernels."""

    def __str__(self) -> str:
        layout = "single" if self.single else "separate"
        stored = " stored quantized" if self.quantized else ""
        return f"{layout} {self.recipe or self.dtype}{stored} {self.machine}".strip()


@dataclass
class Outcome:
    """What one rank saw."""

    difference: float
    """Largest difference of any parameter from single-process training, over the largest value."""
    state_difference: float
    """The same of the optimizer's state."""
    moved: list[bool]
    """Whether each expert of each grouped weight has other values than at the start."""
    sharded: bool
    """Whether parameters and optimizer state are shards of half the size."""
    restored: dict[str, bool]
    """Which ways through a checkpoint gave the same bits."""
    fired: tuple[str, ...]


def build(case: Case, device: str, seed: int = 0) -> fz.Sequential:
    torch.manual_seed(seed)
    options = {
        "device": device,
        "dtype": case.dtype,
        "single_grouped_weight": case.single,
        "single_grouped_bias": case.single,
    }
    recipe = recipe_of(case) if case.quantized else None
    with fz.quantized_model_init(recipe is not None, recipe):
        return fz.Sequential(
            fz.GroupedLinear(GROUPS, HIDDEN, 2 * INNER, **options),
            fz.ScaledSwiGLU(),
            fz.GroupedLinear(GROUPS, INNER, HIDDEN, **options),
        )


def recipe_of(case: Case):
    return getattr(fz.recipes, case.recipe)() if case.recipe else None


def batch(step: int, rank: int, case: Case, device: str):
    """Input, sizes, scales and target of one rank; often an expert has no rows there."""
    g = torch.Generator().manual_seed(100 * step + rank)
    sizes = torch.randint(0, 12, (GROUPS,), generator=g)
    sizes[(step + rank) % GROUPS] = 0
    x, target = (torch.randn(ROWS, HIDDEN, generator=g).to(device, case.dtype) for _ in "xy")
    scales = torch.rand(ROWS, generator=g).to(device)
    return x, sizes.to(device), scales, target


def loss_of(module, case: Case, x, sizes, scales, target):
    recipe = recipe_of(case)
    with fz.autocast(recipe=recipe) if recipe else nullcontext():
        y = module(x, sizes, scales, sizes)
    return (y.float() - target.float()).square().mean()


def train(case: Case, mesh, device: str, folder: str) -> Outcome:
    rank, world = mesh.get_rank(), mesh.size()
    plain = build(case, device)
    module = copy.deepcopy(plain)
    start = values(plain)
    fully_shard(module, mesh=mesh)
    resharded = fully_shard(build(case, device, seed=1), mesh=mesh)
    # Parameters are read from the module: fully_shard has replaced them.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.03) for m in (module, plain)]
    for step in range(STEPS):
        loss_of(module, case, *batch(step, rank, case, device)).backward()
        of_ranks = [
            torch.autograd.grad(
                loss_of(plain, case, *batch(step, r, case, device)), list(plain.parameters())
            )
            for r in range(world)
        ]
        for p, *grads in zip(plain.parameters(), *of_ranks, strict=True):
            p.grad = torch.stack(grads).sum(0) / world
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    params = list(module.parameters())
    halves = [p.to_local().shape[0] * world == p.shape[0] for p in params]
    states = [optimizers[0].state[p]["exp_avg"] for p in params]
    halves += [
        isinstance(s, DTensor) and s.to_local().shape == p.to_local().shape
        for s, p in zip(states, params, strict=True)
    ]
    end = values(plain)
    return Outcome(
        difference=largest(full(p, mesh) for p in params)(end),
        state_difference=largest(full(s, mesh) for s in states)(
            [optimizers[1].state[p]["exp_avg"] for p in plain.parameters()]
        ),
        moved=[
            not torch.equal(after, before)
            for then, now in zip(start, end, strict=True)
            for before, after in zip(by_expert(then), by_expert(now), strict=True)
        ],
        sharded=all(halves),
        restored=restored(
            mesh, module, optimizers[0], resharded, build(case, device, seed=2), folder
        ),
        fired=module.plan.fired,
    )


def restored(mesh, module, optimizer, resharded, plain, folder: str) -> dict[str, bool]:
    """Save, and load into a sharded module and an unsharded one."""
    dcp.save(module.state_dict(), checkpoint_id=f"{folder}/parameters")
    for other in (resharded, plain):
        state = other.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/parameters")
        other.load_state_dict(state)
    whole = {
        name: full(t.view(torch.uint8) if t.element_size() == 1 else t, mesh)  # gloo has no FP8
        if isinstance(t, DTensor)
        else t
        for name, t in module.state_dict().items()
    }
    ways = {
        "sharded": same_bits(local(resharded.state_dict()), local(module.state_dict())),
        "unsharded": same_bits(plain.state_dict(), whole),
    }
    fresh = torch.optim.AdamW(resharded.parameters())
    # Takes a step with lr=0 first, which quantizes anew what is stored quantized.
    set_optimizer_state_dict(resharded, fresh, get_optimizer_state_dict(module, optimizer))
    pairs = zip(resharded.parameters(), module.parameters(), strict=True)
    moments = [
        (fresh.state[a]["exp_avg_sq"].to_local(), optimizer.state[b]["exp_avg_sq"].to_local())
        for a, b in pairs
    ]
    return ways | {"optimizer": all(torch.equal(a, b) for a, b in moments)}


def local(state):
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in state.items()}


def same_bits(a, b) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a[name], b[name])))
        for name in a
    )


def values(module) -> list[torch.Tensor]:
    return [plain_values(p.detach()).clone() for p in module.parameters()]


def plain_values(t):
    return t.dequantize() if isinstance(t, QuantizedTensor) else t


def full(t: DTensor, mesh) -> torch.Tensor:
    """All of a tensor that is sharded along its first dimension."""
    local = plain_values(t.to_local().detach()).contiguous()
    parts = [torch.empty_like(local) for _ in range(mesh.size())]
    dist.all_gather(parts, local, group=mesh.get_group())
    return torch.cat(parts)


def largest(mine):
    mine = list(mine)

    def difference(theirs):
        return max(
            float((a.double() - b.double()).abs().max() / b.double().abs().max())
            for a, b in zip(mine, theirs, strict=True)
        )

    return difference


def by_expert(t):
    return t if t.dim() == 3 else [t]


def worker(rank: int, world: int, device: str, store: str, cases: list[Case], out) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    options = {"device_id": torch.device("cuda", rank)} if device == "cuda" else {}
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, **options
    )
    mesh = init_device_mesh(device, (world,))
    try:
        for case in cases:
            machine = case.machine
            with assume_target(machine, reference) if machine else nullcontext():
                out.put((rank, str(case), train(case, mesh, device, f"{store} of {case}")))
    finally:
        dist.destroy_process_group()


def outcomes(world: int, device: str, folder, cases: list[Case]) -> dict[tuple[int, str], Outcome]:
    """Run the cases in ``world`` processes; what each rank saw, by rank and case."""
    out = mp.get_context("spawn").SimpleQueue()
    args = (world, device, str(folder / "store"), cases, out)
    processes = mp.spawn(worker, args, nprocs=world, join=False)
    seen = {}
    while len(seen) < world * len(cases):
        if out.empty():
            if processes.join(timeout=0.05) and out.empty():
                break
            continue
        rank, case, outcome = out.get()
        seen[rank, case] = outcome
    while not processes.join():
        pass
    return seen
