"""MoE blocks over processes beside one process that holds all tokens and all experts."""

from __future__ import annotations

import tempfile
import traceback
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import process_groups
import torch
import torch.distributed as dist
from torch import Tensor

import fusible as fz
from fusible.ops.peer_memory import PeerMemory
from fusible.recipes import quantization

EXPERTS, HIDDEN, INNER = 8, 64, 32


@dataclass(frozen=True)
class Case:
    """One forward and backward."""

    send: str | None = "rows"
    dtype: torch.dtype = torch.float32
    recipe: str = ""
    top_k: int = 2
    tokens: str = "even"
    """How many each process has: "even", "many", "uneven", or "none" on the first one."""
    routing: str = "random"
    """"random", all to experts of the "last" process, or some "outside" of the experts."""
    scale_input: bool = False
    weighted: bool = False
    recompute: bool = False
    capacity_factor: float | None = None
    max_tokens: int | None = None
    quantized_send: bool = False
    dims: int = 2
    twice: bool = False
    """The backward, with ``retain_graph``."""
    checkpointed: bool = False

    def __str__(self) -> str:
        default = Case()
        given = [
            f"{n}={v}" for n, v in vars(self).items() if n != "send" and v != getattr(default, n)
        ]
        return ", ".join([str(self.send), *given])


def tokens_of(case: Case, rank: int) -> int:
    if case.tokens == "many":
        return 700
    if case.tokens == "uneven":
        return 5 + 7 * rank
    return 0 if case.tokens == "none" and rank == 0 else 16


def tensors(case: Case, rank: int, processes: int) -> list[Tensor]:
    """Tokens, weights of choices, ids and the gradient of the output."""
    g = torch.Generator().manual_seed(17 + rank)
    shape = (tokens_of(case, rank),) if case.dims == 2 else (tokens_of(case, rank) // 4, 4)
    x, dy = (torch.randn(*shape, HIDDEN, generator=g).to(case.dtype) for _ in "xy")
    ids = torch.rand(*shape, EXPERTS, generator=g).argsort(-1)[..., : case.top_k]
    if case.routing == "last":
        local = EXPERTS // processes
        ids = (
            EXPERTS - local + torch.rand(*shape, local, generator=g).argsort(-1)[..., : case.top_k]
        )
    if case.routing == "outside":
        ids = torch.where(torch.rand(ids.shape, generator=g) < 0.3, EXPERTS + 3, ids)
        ids = torch.where(torch.rand(ids.shape, generator=g) < 0.2, -1, ids)
    probs = torch.rand(ids.shape, generator=g)
    return [x.requires_grad_(), probs.requires_grad_(), ids, dy]


def experts(case: Case, first: int, count: int) -> list[fz.BasicOperation]:
    g = torch.Generator().manual_seed(5)
    made = []
    for out, inside in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        linear = fz.GroupedLinear(
            count, inside, out, bias=False, single_grouped_weight=True, dtype=case.dtype
        )
        every = torch.randn(EXPERTS, out, inside, generator=g) / inside**0.5
        with torch.no_grad():
            linear.weight.copy_(every[first : first + count])
        made.append(linear)
    act = fz.ScaledSwiGLU() if not (case.scale_input or case.weighted) else fz.SwiGLU()
    return [made[0], act, made[1]]


def block(case: Case, group, rank: int, processes: int) -> fz.Sequential:
    count = EXPERTS // processes
    of_group = {"process_group": group, "send": case.send, "max_tokens": case.max_tokens}
    sends = {"quantized_send": case.quantized_send and group is not None}
    if group is None:
        of_group = {}
    return fz.Sequential(
        fz.Dispatch(
            EXPERTS,
            scale_input=case.scale_input,
            recompute_rows=case.recompute,
            capacity_factor=case.capacity_factor,
            **of_group,
            **sends,
        ),
        *experts(case, rank * count, count),
        fz.Combine(weighted=case.weighted, process_group=group, **sends),
    )


def run(module: fz.Sequential, case: Case, x: Tensor, probs: Tensor, ids: Tensor, dy: Tensor):
    """Output, and gradients of tokens, weights of choices and both weights of experts."""
    recipe = getattr(fz.recipes, case.recipe)() if case.recipe else None
    with fz.autocast(enabled=recipe is not None, recipe=recipe):
        if case.checkpointed:
            y = torch.utils.checkpoint.checkpoint(module, x, probs, ids, use_reentrant=False)
        else:
            y = module(x, probs, ids)
    if isinstance(y, tuple):
        y = y[0]
    weights = [module[1].weight, module[3].weight]
    if case.twice:
        torch.autograd.grad(y, [x, probs, *weights], dy, retain_graph=True)
    return [y.detach(), *torch.autograd.grad(y, [x, probs, *weights], dy)]


class SharedFiles:
    """What `PeerMemory` needs of symmetric memory, of files that processes of one host share."""

    buffer_ptrs_dev = 0

    def __init__(self, group, rank: int, processes: int, nbytes: int) -> None:
        self.group, self.rank, self.world_size = group, rank, processes
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder, 0, group)
        files = [f"{folder[0]}/{i}" for i in range(processes)]
        made = {"shared": True, "size": nbytes, "dtype": torch.uint8}
        self.memories = [torch.from_file(file, **made) for file in files]

    def get_buffer(self, rank: int, shape, dtype: torch.dtype, offset: int) -> Tensor:
        memory = self.memories[rank].view(dtype)
        return memory[offset : offset + shape[0] * shape[1]].view(shape)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        dist.barrier(self.group)


def shared_memory(group, rank: int, processes: int, nbytes: int = 1 << 20) -> PeerMemory:
    files = SharedFiles(group, rank, processes, nbytes)
    files.memories[rank].fill_(255)
    dist.barrier(group)
    return PeerMemory(files.memories[rank], files, 1000)


def on(device: str, given: list[Tensor]) -> list[Tensor]:
    """The tensors of :func:`tensors` on a device, as leaves of autograd."""
    return [t.detach().to(device).requires_grad_(t.requires_grad) for t in given]


def compared(
    case: Case, group, rank: int, processes: int, device: str = "cpu"
) -> list[tuple[Tensor, Tensor]]:
    """What this process computes of a case, beside its part of what one process does."""
    given = on(device, tensors(case, rank, processes))
    mine = run(block(case, group, rank, processes).to(device), case, *given)
    wanted = alone(replace(case, send=None, max_tokens=None), processes, device)[rank]
    return [(a.reshape(b.shape), b) for a, b in zip(mine, wanted, strict=True)]


@cache
def alone(case: Case, processes: int, device: str) -> list[list[Tensor]]:
    """Of each process, its part of what one process computes, however tokens are sent."""
    of_ranks = [tensors(case, r, processes) for r in range(processes)]
    whole = [torch.cat([t[i].detach().flatten(0, -2) for t in of_ranks]) for i in range(4)]
    if case.quantized_send:  # what arrives, quantized before in one process
        recipe = getattr(fz.recipes, case.recipe)()
        for i, role in ((0, "input"), (3, "grad")):
            made = quantization.quantize(whole[i], recipe.format(role))
            whole[i] = quantization.dequantize(made, case.dtype)
    whole[:2] = [t.requires_grad_() for t in whole[:2]]
    results = run(block(case, None, 0, 1).to(device), case, *on(device, whole))
    sizes = [[t[0].shape[:-1].numel() for t in of_ranks]] * 3 + [EXPERTS // processes] * 2
    parts = [t.split(size) for t, size in zip(results, sizes, strict=True)]
    return [list(of_rank) for of_rank in zip(*parts, strict=True)]


def run_cases(rank: int, folder: str, cases, run_case) -> dict:
    """What a process sees of every case, or the error."""
    group = dist.group.WORLD
    seen = {}
    for case in cases:
        try:
            seen[str(case)] = run_case(case, group, rank, dist.get_world_size(group))
        except Exception:
            seen[str(case)] = traceback.format_exc()
    return seen


def results(count: int, folder: Path, cases, run_case, timeout=None, backend="gloo") -> list[dict]:
    """What every process saw of every case, by rank; started once for all cases."""
    args = (list(cases), run_case)
    return process_groups.results(run_cases, args, count, folder, backend, timeout)
