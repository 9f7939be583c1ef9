"""Training under FSDP2 compared with training in one process: what every rank runs."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace

import process_groups
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fusible as fz
from fusible.recipes import QuantizedTensor
from fusible.recipes.sharding import is_sharded, whole
from fusible.recipes.sharding import local as local_part
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
    """Run the rules of this architecture, computed by what stands in for its kernels."""
    delay: bool = False
    """Weight gradients by ``backward_dw()``."""
    mixed: bool = False
    """Computing in BF16, with the parameters and the sums of gradients in their own dtype."""
    dispatch: bool = False
    """Experts between a Dispatch and a Combine."""
    replicas: int = 1
    """Shards in each of so many replicas (HSDP)."""

    def __str__(self) -> str:
        names = [
            name for name in ("quantized", "delay", "mixed", "dispatch") if getattr(self, name)
        ]
        layout = "single" if self.single else "separate"
        replicas = f"{self.replicas} replicas" if self.replicas > 1 else ""
        parts = (layout, self.recipe or str(self.dtype), *names, self.machine, replicas)
        return " ".join(part for part in parts if part)


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
    """Whether parameters and optimizer state are shards of the expected size."""
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
        "delay_wgrad_compute": case.delay,
    }
    recipe = recipe_of(case) if case.quantized else None
    with fz.quantized_model_init(recipe is not None, recipe):
        experts = [
            fz.GroupedLinear(GROUPS, HIDDEN, 2 * INNER, **options),
            fz.ScaledSwiGLU(32),
            fz.GroupedLinear(GROUPS, INNER, HIDDEN, **options),
        ]
    if case.dispatch:
        return fz.Sequential(fz.Dispatch(GROUPS), *experts, fz.Combine())
    return fz.Sequential(*experts)


def recipe_of(case: Case):
    return getattr(fz.recipes, case.recipe)() if case.recipe else None


def batch(step: int, rank: int, case: Case, device: str):
    """Inputs and target of one rank; often an expert has no rows there, and once the rank none."""
    g = torch.Generator().manual_seed(100 * step + rank)
    rows = 0 if step == 2 + rank else ROWS
    x, target = (torch.randn(rows, HIDDEN, generator=g).to(device, case.dtype) for _ in "xy")
    scales = torch.rand(rows, 1, generator=g).bfloat16().float().to(device)
    if case.dispatch:
        ids = torch.randint(0, GROUPS, (rows, 1), generator=g)
        ids[ids == (step + rank) % GROUPS] = -1
        return (x.requires_grad_(), scales, ids.to(device)), target
    sizes = torch.randint(0, 12, (GROUPS,), generator=g) if rows else torch.zeros(GROUPS).long()
    sizes[(step + rank) % GROUPS] = 0
    sizes = sizes.to(device)
    return (x, sizes, scales.flatten(), sizes), target


def backward(module, case: Case, inputs, target) -> None:
    recipe, device = recipe_of(case), target.device.type
    with (
        fz.autocast(enabled=recipe is not None, recipe=recipe),
        # What FSDP2 casts is cast already.
        torch.autocast(device, torch.bfloat16, enabled=case.mixed),
    ):
        y = module(*inputs)
    ((y.float() - target.float()).square().sum() / (ROWS * HIDDEN)).backward()
    if case.delay:
        for op in module:
            if isinstance(op, fz.GroupedLinear):
                op.backward_dw()


def train(case: Case, device: str, folder: str) -> Outcome:
    world = dist.get_world_size()
    shape, names = (case.replicas, world // case.replicas), ("replicas", "shards")
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    if case.replicas == 1:
        mesh = mesh["shards"]
    policy = MixedPrecisionPolicy(
        torch.bfloat16 if case.mixed else None, case.dtype if case.mixed else None
    )

    def sharded(module):
        return fully_shard(module, mesh=mesh, mp_policy=policy)

    plain = build(case, device)
    module = sharded(copy.deepcopy(plain))
    start = values(plain)
    # Parameters are read from the module: fully_shard has replaced them.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.03) for m in (module, plain)]
    for step in range(STEPS):
        backward(module, case, *batch(step, dist.get_rank(), case, device))
        of_ranks = []
        for rank in range(world):
            backward(plain, case, *batch(step, rank, case, device))
            of_ranks.append([p.grad for p in plain.parameters()])
            plain.zero_grad()
        for p, *grads in zip(plain.parameters(), *of_ranks, strict=True):
            p.grad = torch.stack(grads).sum(0) / world
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    params = list(module.parameters())
    states = [optimizers[0].state[p]["exp_avg"] for p in params]
    end = values(plain)
    return Outcome(
        difference=largest(values(module), end),
        state_difference=largest(
            [whole(s) for s in states],
            [optimizers[1].state[p]["exp_avg"] for p in plain.parameters()],
        ),
        moved=[
            not torch.equal(after, before)
            for then, now in zip(start, end, strict=True)
            for before, after in zip(by_expert(then), by_expert(now), strict=True)
        ],
        sharded=all(
            isinstance(t, DTensor) and t.to_local().shape[0] * shape[1] == t.shape[0]
            for t in (*params, *states)
        ),
        restored=restored(case, sharded, module, optimizers[0], folder),
        fired=module.plan.fired,
    )


def restored(case: Case, sharded, module, optimizer, folder: str) -> dict[str, bool]:
    """Save, and load into sharded and unsharded modules of either layout."""
    device, other = next(module.parameters()).device.type, replace(case, single=not case.single)
    same, plain = sharded(build(case, device, seed=1)), build(case, device, seed=2)
    dcp.save(module.state_dict(), checkpoint_id=f"{folder}/parameters")
    for target in (same, plain):
        state = target.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/parameters")
        target.load_state_dict(state)
    kept = plain.state_dict()
    ways = {
        "sharded": same_bits(local(same.state_dict()), local(module.state_dict())),
        "unsharded": same_values(plain, module),
    }
    for name, state in (("sharded", same.state_dict()), ("unsharded", kept)):
        for how, target in (("shards", sharded(build(other, device))), ("", build(other, device))):
            target.load_state_dict(dict(state))
            ways[f"{name} into the other layout {how}".strip()] = same_values(target, module)
    again = sharded(build(case, device))
    set_model_state_dict(again, get_model_state_dict(module))
    ways["torch's state dict"] = same_bits(local(again.state_dict()), local(module.state_dict()))
    fresh = torch.optim.AdamW(again.parameters())
    # Both take a step with lr=0 first, which quantizes anew what is stored quantized.
    dcp.save(get_optimizer_state_dict(module, optimizer), checkpoint_id=f"{folder}/optimizer")
    state = get_optimizer_state_dict(again, fresh)
    dcp.load(state, checkpoint_id=f"{folder}/optimizer")
    set_optimizer_state_dict(again, fresh, state)
    pairs = list(zip(again.parameters(), module.parameters(), strict=True))
    return ways | {
        f"optimizer's {name}": all(
            torch.equal(*(local_part(o.state[p][name]) for o, p in ((fresh, a), (optimizer, b))))
            for a, b in pairs
        )
        for name in ("exp_avg", "exp_avg_sq", "step")
    }


def local(state):
    return {name: local_part(t) for name, t in state.items()}


def same_bits(a, b) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a[name], b[name])))
        for name in a
    )


def same_values(a, b) -> bool:
    """Of two modules of either layout, sharded or not."""
    return all(
        torch.equal(t, other)
        for mine, theirs in zip(in_groups(a), in_groups(b), strict=True)
        for t, other in zip(mine, theirs, strict=True)
    )


def in_groups(module):
    """The parameters of the groups of every linear."""
    for op in module:
        for parameters in (op.weights(), op.biases()) if isinstance(op, fz.GroupedLinear) else ():
            tensors = [plain_values(p) for p in parameters]
            yield tensors[0].unbind(0) if len(tensors) == 1 else tensors


def values(module) -> list[torch.Tensor]:
    return [plain_values(p) for p in module.parameters()]


def plain_values(t):
    """A copy of all of a tensor, on every rank, dequantized."""
    t = (whole(t) if is_sharded(t) else t).detach()
    return t.dequantize() if isinstance(t, QuantizedTensor) else t.clone()


def largest(mine, theirs) -> float:
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(mine, theirs, strict=True)
    )


def by_expert(t):
    return t if t.dim() == 3 else [t]


def worker(rank: int, folder: str, device: str, cases: list[Case]) -> dict[str, Outcome]:
    seen = {}
    for case in cases:
        with assume_target(case.machine) if case.machine else nullcontext():
            seen[str(case)] = train(case, device, f"{folder}/{case}")
    return seen


def outcomes(world: int, device: str, folder, cases: list[Case]) -> dict[tuple[int, str], Outcome]:
    """Run the cases in ``world`` processes; what each rank saw, by rank and case."""
    backend = "nccl" if device == "cuda" else "gloo"
    of_ranks = process_groups.results(worker, (device, cases), world, folder, backend)
    return {(rank, case): seen for rank, of in enumerate(of_ranks) for case, seen in of.items()}
