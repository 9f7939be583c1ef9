"""An MoE block whose experts are shared among the GPUs of one host, against what people run today.

    torchrun --nproc-per-node 2 benchmarks/expert_parallel.py [--json FILE.json]
    torchrun --nproc-per-node 2 benchmarks/expert_parallel.py --tiny          # CPUs, gloo
    python benchmarks/expert_parallel.py --draw FILE.json

First what is computed: every mode of ``Dispatch`` against one process that has all tokens and all
experts, with uneven numbers of tokens and a process without any. Then time, forward + backward in
BF16, the median over runs of the slowest process, all ways interleaved: each mode; one GPU with all
experts; torchtitan's all-to-all path written anew; each mode, and one beside a shared expert, with
exchanges replaced by local copies, so that the difference is what communication adds; the exchanges
alone; routing where one process gets 1.5 times its share; peak memory; and a stack of blocks beside
FSDP2 alone, which gathers weights instead of sending tokens. What is done is written after each
part, so a process that fails or hangs (``--limit`` seconds) leaves the parts before.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import measuring
import torch
import torch.distributed as dist
import torch.nn.functional as F
from moe_block import SHAPES, WEIGHTED, Shape, exact_block, fusible_block
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fusible as fz
from fusible.ops import dispatch, exchange
from fusible.ops.peer_memory import PeerMemory, peer_memory
from fusible.recipes.sharding import local

MODES = ("all", "tokens", "rows")
BESIDE = "all, with a shared expert"
ONE, TITAN, APART = "one GPU, all experts", "all-to-all path", ", local copies"
# Multicast over NVLink, which nothing here needs, and which containers may not allow.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
TINY = Shape(64, 4, 64, 32, 8)
SKEW = 1.5


class Setup(NamedTuple):
    """The processes, and how much to measure."""

    device: torch.device
    mesh: Any
    rank: int
    processes: int
    shape: Shape
    runs: int
    layers: int

    @property
    def on_gpu(self) -> bool:
        """Whether there is something to capture and to overlap."""
        return self.device.type == "cuda"


# --- the ways to run a block ----------------------------------------------------------------------


def ours(shape: Shape, mesh: Any, device: torch.device, **options: Any) -> fz.Sequential:
    """Router, dispatch, experts and combine; over a mesh each process holds its experts."""
    torch.manual_seed(0)
    return fusible_block(shape, device, mesh=mesh, expert_bias=True, **options)


def with_shared_expert(block: fz.Sequential, shape: Shape, device: torch.device) -> fz.Sequential:
    """A block, then a shared expert as wide as a routed one, in one run of ops."""
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "bias": False}
    return fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "tokens", output_to_caller=False),
        *block,
        fz.Swap()
        .set_extra_input_channel(0, "tokens")
        .set_extra_output_channel(0, "routed", output_to_caller=False),
        fz.Linear(shape.hidden, 2 * shape.inner, **made),
        fz.SwiGLU(),
        fz.Linear(shape.inner, shape.hidden, **made),
        fz.AddExtraInput().set_extra_input_channel(0, "routed"),
    )


def first(y: Any) -> Tensor:
    """The output without extra ones."""
    return y[0] if isinstance(y, tuple) else y


@torch.compile(dynamic=True)
def activation(gate: Tensor, linear: Tensor) -> Tensor:
    """``silu(gate) * linear``."""
    return F.silu(gate) * linear


class AllToAll(nn.Module):
    """torchtitan's path (``AllToAllTokenDispatcher`` and ``GroupedExperts`` of 0.3.0), anew.

    A row for each choice, sorted by expert; counts exchanged and read on the host; rows exchanged;
    rows sorted by local expert; grouped products, gate and linear apart, with a compiled
    activation; and all that back.
    """

    def __init__(self, block: fz.Sequential, shape: Shape, mesh: Any) -> None:
        super().__init__()
        self.shape, self.group, self.processes = shape, mesh.get_group(), mesh.size()
        weights = (local(block[i].weight).detach() for i in (0, 2, 4))
        router, both, w2 = weights
        each = router, *both.chunk(2, dim=1), w2
        self.router, self.w1, self.w3, self.w2 = (nn.Parameter(w.contiguous()) for w in each)
        self.bias = block[0].expert_bias

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        scores = F.linear(x, self.router).float().softmax(-1)
        ids = (scores + self.bias).topk(self.shape.top_k, -1, sorted=False).indices
        probs = scores.gather(-1, ids)
        return self.experts(x, probs / probs.sum(-1, keepdim=True), ids)

    def experts(self, x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
        """All after the router."""
        top_k = self.shape.top_k
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self.shape.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        both = torch.stack((counts, theirs)).view(2, self.processes, -1)
        sent, received = both.sum(-1).tolist()
        rows = all_to_all_single_autograd(x[order // top_k], received, sent, self.group)
        to = by_expert(theirs.view(self.processes, -1), sum(received))
        ends = both[1].sum(0).cumsum(0).int()
        sorted_rows = rows[to]
        gate = F.grouped_mm(sorted_rows, self.w1.mT, offs=ends)
        h = activation(gate, F.grouped_mm(sorted_rows, self.w3.mT, offs=ends))
        made = F.grouped_mm(h, self.w2.mT, offs=ends)
        back = torch.empty_like(made)
        back[to] = made
        back = all_to_all_single_autograd(back, sent, received, self.group)
        weighted = back.float() * probs.flatten()[order, None]
        y = torch.zeros(x.shape, device=x.device)
        return y.index_add(0, order // top_k, weighted).to(x.dtype)


def by_expert(counts: Tensor, total: int) -> Tensor:
    """Where rows in order of (process, expert) come from, in order of (expert, process)."""
    flat = counts.flatten()
    starts = (flat.cumsum(0) - flat).view_as(counts).t().flatten()
    lengths = counts.t().flatten()
    segment = torch.repeat_interleave(lengths, output_size=total)
    within = torch.arange(total, device=counts.device) - (lengths.cumsum(0) - lengths)[segment]
    return starts[segment] + within


class Residual(nn.Module):
    """Blocks, each ``x + block(x)``."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """The stack."""
        for block in self.blocks:
            x = x + first(block(x))
        return x


# --- exchanges by local copies, and alone ---------------------------------------------------------


class _Done:
    """Nothing to wait for."""

    def wait(self) -> None:
        """Return."""


def tiled(t: Tensor, rows: int) -> Tensor:
    """``rows`` rows of t, from the start again where it has fewer."""
    out = t.new_empty(rows, *t.shape[1:]) if len(t) else t.new_zeros(rows, *t.shape[1:])
    for start in range(0, rows if len(t) else 0, max(len(t), 1)):
        part = out[start : start + len(t)]
        part.copy_(t[: len(part)])
    return out


class OwnMemory:
    """What `PeerMemory` needs of symmetric memory, this process's own in the place of all."""

    def __init__(self, setup: Setup, nbytes: int) -> None:
        self.rank, self.world_size = setup.rank, setup.processes
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=setup.device)
        addresses = [self.memory.data_ptr()] * setup.processes
        self.table = torch.tensor(addresses, device=setup.device)
        self.buffer_ptrs_dev = self.table.data_ptr()

    def get_buffer(
        self, rank: int, shape: tuple[int, int], dtype: torch.dtype, offset: int
    ) -> Tensor:
        """Part of the memory."""
        return self.memory.view(dtype)[offset : offset + shape[0] * shape[1]].view(shape)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """Nothing to wait for."""


@cache
def own_memory(setup: Setup) -> PeerMemory:
    """For the exchanges of a block's tokens."""
    shape = setup.shape
    width = 4 * (shape.hidden + shape.top_k)
    own = OwnMemory(setup, setup.processes * shape.tokens * width + (1 << 20))
    return PeerMemory(own.memory, own, 0)


@contextmanager
def local_copies(setup: Setup) -> Iterator[None]:
    """Every exchange gives what this process sends to itself, in the place of all processes."""

    def all_gather(t: Tensor, group: Any) -> Tensor:
        return tiled(t, len(t) * dist.get_world_size(group))

    def begin_all_gather(t: Tensor, group: Any, begin: bool) -> tuple[Tensor, Any]:
        return all_gather(t, group), _Done()

    def all_to_all(
        t: Tensor, group: Any, sent: Any, received: Any, begin: bool = False
    ) -> tuple[Tensor, Any]:
        processes, rank = dist.get_world_size(group), dist.get_rank(group)
        own = t.tensor_split(processes)[rank] if sent is None else t.split(list(sent))[rank]
        if received is None:
            return tiled(own, len(t)), _Done()
        return torch.cat([tiled(own, rows) for rows in received]), _Done()

    memory = own_memory(setup) if setup.on_gpu else None
    with (
        mock.patch.multiple(
            exchange,
            all_gather=all_gather,
            begin_all_gather=begin_all_gather,
            _all_to_all=all_to_all,
            _memory_for=mock.Mock(return_value=memory),
        ),
        mock.patch.object(dispatch, "peer_memory", return_value=memory),
    ):
        yield


@contextmanager
def recorded(calls: list[Callable[[], Any]]) -> Iterator[None]:
    """Keep each exchange as a call that repeats it."""

    def repeating(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            # Those that are begun are repeated one after the other.
            calls.append(
                lambda: function(*args[:-1], False) if args[-1] is True else function(*args)
            )
            return function(*args)

        return call

    names = ("all_gather", "begin_all_gather", "_all_to_all")
    wrapped = {name: repeating(getattr(exchange, name)) for name in names}
    with mock.patch.multiple(exchange, **wrapped):
        yield


# --- what is computed -----------------------------------------------------------------------------

NAMES = ("y", "dx", "dprobs", "dW1", "dW2")


Experts = Callable[[Tensor, Tensor, Tensor], Any]


def ours_from_dispatch(*made: Any, **options: Any) -> tuple[Experts, list[Tensor]]:
    """:func:`ours` without the router, and the weights of its experts."""
    block = ours(*made, **options)
    return fz.Sequential(*block[1:]), [block[2].weight, block[4].weight]


def step_of(experts: Experts, weights: list[Tensor], given: list[Tensor]) -> list[Tensor]:
    """Output and gradients of tokens, of their choices' weights and of the experts."""
    x, probs, ids, dy = given
    x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
    y = first(experts(x, probs, ids))
    grads = torch.autograd.grad(y, [x, probs, *weights], dy)
    return [local(t.detach()) for t in (y, *grads)]


def given_tokens(setup: Setup, rank: int, tokens: int, seed: int = 0) -> list[Tensor]:
    """Tokens, weights of choices, ids and the output's gradient of one process."""
    g = torch.Generator(setup.device).manual_seed(1000 * seed + rank)
    shape = setup.shape
    x, dy = (
        torch.randn(tokens, shape.hidden, generator=g, device=setup.device).bfloat16() for _ in "xy"
    )
    # Experts of the first process are chosen more often.
    scores = torch.rand(tokens, shape.experts, generator=g, device=setup.device)
    scores[:, : shape.experts // setup.processes] += 0.1
    probs, ids = scores.topk(shape.top_k)
    return [x, probs / probs.sum(-1, keepdim=True), ids, dy]


def error(a: Tensor, b: Tensor) -> float:
    """The norm of the difference, relative to b's."""
    norm = b.double().norm()
    return ((a.double() - b.double()).norm() / (norm if norm else 1)).item() if b.numel() else 0.0


def correctness(setup: Setup, report: dict[str, Any]) -> None:
    """Each mode against one process that has all tokens, which is compared with FP32."""
    shape, processes = setup.shape, setup.processes
    many = shape.tokens // 8
    cases = {
        "even": [many] * processes,
        "uneven": [many // 3 + 1] + [many] * (processes - 1),
        "none on the first": [0] + [many] * (processes - 1),
    }
    whole = ours_from_dispatch(shape, None, setup.device)
    block = ours(shape, setup.mesh, setup.device)
    peer = AllToAll(block, shape, setup.mesh)
    for case, counts in cases.items():
        tokens = [given_tokens(setup, r, n) for r, n in enumerate(counts)]
        want = step_of(*whole, [torch.cat(of) for of in zip(*tokens, strict=True)])
        experts = shape.experts // processes
        splits = [counts] * 3 + [[experts] * processes] * 2
        want = [t.split(n)[setup.rank] for t, n in zip(want, splits, strict=True)]
        for mode in MODES:
            # Where no host reads sizes, processes with fewer tokens are padded.
            options = {"max_tokens": many} if mode == "all" and case != "even" else {}
            made = ours_from_dispatch(shape, setup.mesh, setup.device, send=mode, **options)
            got = step_of(*made, tokens[setup.rank])
            compare(setup, report, (mode, case), got, want)
        weights = [peer.w1, peer.w3, peer.w2]
        *got, dw1, dw3, dw2 = step_of(peer.experts, weights, tokens[setup.rank])
        got += [torch.cat((dw1, dw3), 1), dw2]
        compare(setup, report, (TITAN, case), got, want)
    report["correctness"]["one process against FP32"] = against_fp32(setup)


def compare(
    setup: Setup, report: dict[str, Any], of: tuple[str, str], got: list[Tensor], want: list[Tensor]
) -> None:
    """Note the largest errors of all processes, and a failure where one is too large."""
    way, case = of
    pairs = list(zip(got, want, strict=True))
    numbers = [[error(a, b), float(not torch.equal(a, b))] for a, b in pairs]
    found = over_processes(torch.tensor(numbers), setup).tolist()
    cell = {
        name: {"error": e, "same bits": not d} for name, (e, d) in zip(NAMES, found, strict=True)
    }
    report.setdefault("correctness", {}).setdefault(way, {})[case] = cell
    # Partial sums are rounded to BF16, of which half a unit is 2e-3 to 4e-3.
    bound = 2e-3 if way == "rows" else 1e-2
    for name in NAMES:
        if not cell[name]["error"] <= bound:
            report["failures"].append(f"{way}, {case}: {name} differs, {cell[name]}")


def against_fp32(setup: Setup) -> float:
    """The largest error of output and gradients of the block of one process."""
    whole = ours(setup.shape, None, setup.device)
    x, *_, dy = given_tokens(setup, 0, min(setup.shape.tokens, 512))
    leaves = [x.requires_grad_(), *(whole[i].weight for i in (0, 2, 4))]
    y = first(whole(x))
    got = [y, *torch.autograd.grad(y, leaves, dy)]
    exact = [t.detach().float().requires_grad_() for t in leaves]
    y = exact_block(setup.shape.top_k, *exact)
    want = [y, *torch.autograd.grad(y, exact, dy.float())]
    return max(error(a, b) for a, b in zip(got, want, strict=True))


def over_processes(t: Tensor, setup: Setup) -> Tensor:
    """The largest of all processes, elementwise."""
    t = t.to(setup.device, torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.cpu()


# --- time -----------------------------------------------------------------------------------------


def measure(setup: Setup, calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Milliseconds of each call: the median over runs of the slowest process, interleaved.

    On GPUs the processes start together, with the host ahead of the device; ``host`` is what the
    host needs to launch a call, or waits in it.
    """
    flush = torch.empty((256 << 20) if setup.on_gpu else 1, dtype=torch.int8, device=setup.device)
    ready, taken, host = torch.zeros(1, device=setup.device), [], []
    for turn in range(setup.runs + 2):
        events = []
        for call in calls.values():
            flush.zero_()
            if setup.on_gpu:
                torch.cuda._sleep(15_000_000)
            dist.all_reduce(ready)
            events.append(timed(setup, call))
        if setup.on_gpu:
            torch.cuda.synchronize()
        if turn >= 2:
            taken.append([finish() for finish, _ in events])
            host.append([ms for _, ms in events])
    slowest = over_processes(torch.tensor([taken, host]), setup)
    medians = slowest.median(1).values.tolist()
    return {
        name: {"ms": ms, "host": of_host} for name, ms, of_host in zip(calls, *medians, strict=True)
    }


def timed(setup: Setup, call: Callable[[], Any]) -> tuple[Callable[[], float], float]:
    """What gives the milliseconds on the device, once it is done, and those of the host."""
    begun, finish = time.perf_counter(), None
    if setup.on_gpu:
        finish = measuring.timed(call)
    else:
        call()
    ms = 1e3 * (time.perf_counter() - begun)
    return finish or (lambda: ms), ms


class Step:
    """Forward and backward of a block on this process's tokens."""

    def __init__(
        self, setup: Setup, module: nn.Module, leaves: list[Tensor], x: Tensor, dy: Tensor
    ) -> None:
        self.setup, self.module, self.leaves, self.x, self.dy = setup, module, leaves, x, dy

    def __call__(self) -> None:
        """One step, without old gradients."""
        for t in (self.x, *self.leaves):
            t.grad = None
        first(self.module(self.x)).backward(self.dy)

    def apart(self) -> None:
        """One step that exchanges nothing with other processes."""
        with local_copies(self.setup):
            self()


def tokens_of(setup: Setup, tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens and the output's gradient of this process."""
    x, _, _, dy = given_tokens(setup, setup.rank, tokens, seed=7)
    return x.requires_grad_(), dy


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {"send": "all"},
    "all, receive_factor 1.25": {"send": "all", "receive_factor": 1.25},
    "all, recompute_rows": {"send": "all", "recompute_rows": True},
    "all, by NCCL": {"send": "all", "symmetric_memory": False},
    "tokens": {"send": "tokens"},
    "rows": {"send": "rows"},
}


class Ways:
    """All ways to run one block, on the same tokens and weights."""

    def __init__(self, setup: Setup) -> None:
        x, dy = tokens_of(setup, setup.shape.tokens)
        self.setup, self.x = setup, x
        alone = ours(setup.shape, None, setup.device)
        self.steps = {ONE: Step(setup, alone, list(alone.parameters()), x, dy)}
        block = None
        for name, options in OPTIONS.items():
            made = ours(setup.shape, setup.mesh, setup.device, **options)
            for i in (0, 2, 4) if block is not None else ():
                made[i].weight = block[i].weight  # one copy of the weights
            block = made if block is None else block
            self.steps[name] = Step(setup, made, list(block.parameters()), x, dy)
        titan = AllToAll(block, setup.shape, setup.mesh)
        self.steps[TITAN] = Step(setup, titan, list(titan.parameters()), x, dy)
        blocks = [step.module for step in self.steps.values() if step.module is not titan]
        self.biases = [made[0].expert_bias for made in blocks]
        # The same ops in another run.
        both = with_shared_expert(block, setup.shape, setup.device)
        self.steps[BESIDE] = Step(setup, both, list(both.parameters()), x, dy)

    def skew(self) -> float:
        """Bias the first process's experts until it gets 1.5 times its share of the choices."""
        setup, router = self.setup, self.steps[ONE].module[0]
        experts = setup.shape.experts // setup.processes
        low, high, share = 0.0, 1.0, 0.0
        for _ in range(20):
            middle = (low + high) / 2
            for bias in self.biases:
                bias[:experts] = middle
            with torch.no_grad():
                chosen = (router(self.x)[2] < experts).double().mean()
            dist.all_reduce(chosen)
            share = chosen.item()  # of P processes: the mean times P
            low, high = (middle, high) if share < SKEW else (low, middle)
        return share

    def calls(self, *names: str) -> dict[str, Callable[[], Any]]:
        """The steps, and each mode's without exchanges."""
        chosen = {name: self.steps[name] for name in names or self.steps}
        apart = {name + APART: s.apart for name, s in chosen.items() if name in (*MODES, BESIDE)}
        return {**chosen, **apart}

    def wire(self) -> dict[str, dict[str, float]]:
        """Milliseconds of each mode's exchanges alone; by memory, of copies of other's tokens."""
        setup, shape = self.setup, self.setup.shape
        calls: dict[str, Callable[[], Any]] = {}
        memory = peer_memory(setup.mesh.get_group(), setup.device)
        if memory is not None:
            assert memory.begin(setup.shape.tokens * setup.shape.hidden * 2)
            memory.end()
            parts = memory.rows((shape.tokens, shape.hidden), torch.bfloat16).parts
            calls["all"] = lambda: [
                part.clone() for part in (*parts[: setup.rank], *parts[setup.rank + 1 :]) * 4
            ]
        for name in MODES if memory is None else MODES[1:]:
            exchanges: list[Callable[[], Any]] = []
            with recorded(exchanges):
                self.steps[name]()
            calls[name] = lambda some=exchanges: [call() for call in some]
        return measure(self.setup, calls)

    def peaks(self) -> dict[str, float]:
        """Peak MB of a step beyond tokens, weights and gradients, where it needs most."""
        peaks = []
        for step in self.steps.values():
            peaks.append(measuring.peak_mb(step))
            for t in step.leaves:
                t.grad = None
        most = over_processes(torch.tensor(peaks), self.setup).tolist()
        return dict(zip(self.steps, most, strict=True))


def blocks(setup: Setup, report: dict[str, Any]) -> None:
    """Every way with balanced and with skewed routing, exchanges alone, and memory."""
    ways = Ways(setup)
    plan = fz.explain(ways.steps["all"].module, ways.x)
    report["fused"] = list(plan.fired)
    report["block"] = measure(setup, ways.calls())
    report["wire"] = ways.wire()
    if setup.on_gpu:
        report["peak_mb"] = ways.peaks()
    report["skew"] = {"of the mean": ways.skew()}
    report["skew"]["block"] = measure(setup, ways.calls(ONE, *MODES, TITAN))
    ms = {name: cell["ms"] for name, cell in report["block"].items()}
    skewed = {name: cell["ms"] for name, cell in report["skew"]["block"].items()}
    report["ratios"] = {
        name: {
            "share of one GPU's speed": ms[ONE] / ms[name],
            "times the all-to-all path's": ms[TITAN] / ms[name],
            "added by communication, ms": ms[name] - ms[name + APART],
            "exposed, of its wire time": (ms[name] - ms[name + APART]) / report["wire"][name]["ms"],
            "skewed, of the hottest process's compute": skewed[name] / skewed[name + APART],
        }
        for name in MODES
    }
    report["ratios"]["all"]["added beside a shared expert, ms"] = ms[BESIDE] - ms[BESIDE + APART]


def stacks(setup: Setup, report: dict[str, Any]) -> None:
    """Milliseconds of a block in a stack, experts shared or weights gathered by FSDP2."""
    shape, layers = setup.shape, setup.layers
    shared = Residual([ours(shape, setup.mesh, setup.device) for _ in range(layers)])
    alone, gathered = (
        Residual([ours(shape, None, setup.device) for _ in range(layers)]) for _ in range(2)
    )
    for block in gathered.blocks:
        fully_shard(block, mesh=setup.mesh)
    fully_shard(gathered, mesh=setup.mesh)
    found: dict[int, dict[str, float]] = {}
    for tokens in (shape.tokens // 4, shape.tokens):
        x, dy = tokens_of(setup, tokens)
        steps: dict[str, Callable[[], Any]] = {
            name: Step(setup, stack, list(stack.parameters()), x, dy)
            for name, stack in ((ONE, alone), ("experts shared", shared), ("FSDP2", gathered))
        }
        ms = measure(setup, steps)
        found[tokens] = {name: cell["ms"] / layers for name, cell in ms.items()}
    report["stack"] = {"layers": layers, "ms a block": found}
    (few, a), (many, b) = ((n, cell["FSDP2"] - cell["experts shared"]) for n, cell in found.items())
    crosses = few + (many - few) * a / (a - b) if a != b else None
    # Times are near to linear in the number of tokens.
    report["stack"]["equal at tokens"] = crosses if crosses is None or crosses > 0 else None


# --- all of it ------------------------------------------------------------------------------------


def run(setup: Setup, path: Path | None, limit: float) -> dict[str, Any]:
    """Every part while there is time, and its results written by the first process."""
    begun = time.monotonic()
    machine, sizes = measuring.environment(), setup.shape._asdict()
    report: dict[str, Any] = {"environment": machine, "processes": setup.processes, "sizes": sizes}
    report |= {"seconds": {}, "failures": []}
    for part in (correctness, blocks, stacks):
        left = torch.tensor([limit - (time.monotonic() - begun)], device=setup.device)
        dist.broadcast(left, 0)  # all processes go on, or none
        if left.item() < 0.15 * limit:
            report["failures"].append(f"{part.__name__}: no time left")
            break
        start = time.monotonic()
        try:
            part(setup, report)
        except Exception:
            report["failures"].append(f"{part.__name__}: {traceback.format_exc()}")
            print(f"process {setup.rank}: {report['failures'][-1]}", flush=True)
        report["seconds"][part.__name__] = time.monotonic() - start
        if setup.rank == 0:
            print(f"{part.__name__}: {report['seconds'][part.__name__]:.0f} s", flush=True)
        if setup.on_gpu:
            torch.cuda.empty_cache()
        if setup.rank == 0:
            measuring.write(path, report)
    return report


def table(report: dict[str, Any]) -> str:
    """The results, short."""
    lines = [f"{report['environment']['gpu']} x {report['processes']}, {report['sizes']}"]
    for mode, cases in report.get("correctness", {}).items():
        if isinstance(cases, dict):
            cells = [c for case in cases.values() for c in case.values()]
            same = sum(c["same bits"] for c in cells)
            worst = max(c["error"] for c in cells)
            lines.append(f"{mode:>8}: {same} of {len(cells)} with the same bits, error {worst:.1e}")
        else:
            lines.append(f"{mode}: {cases:.1e}")
    skewed = report.get("skew", {}).get("block", {})
    for name, cell in report.get("block", {}).items():
        extra = f"; skewed {skewed[name]['ms']:.2f}" if name in skewed else ""
        peak = report.get("peak_mb", {}).get(name)
        extra += "" if peak is None else f"; peak {peak:.0f} MB"
        lines.append(f"{name:>30} {cell['ms']:7.2f} ms, host {cell['host']:6.2f}{extra}")
    for name, ratios in report.get("ratios", {}).items():
        wire = report["wire"][name]["ms"]
        shown = "; ".join(f"{what} {value:.2f}" for what, value in ratios.items())
        lines.append(f"{name:>8}: wire {wire:.2f} ms; {shown}")
    lines.append(f"stack: {report.get('stack')}")
    lines += [f"FAILED {failure}" for failure in report["failures"]]
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> None:
    """Time by way: compute, and what communication adds to it."""
    plt = measuring.pyplot()
    figure, both = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    titles = {"balanced": report["block"], "hottest process 1.5x": report["skew"]["block"]}
    for axes, (title, cells) in zip(both, titles.items(), strict=True):
        names = [name for name in (ONE, *MODES, TITAN) if name in cells]
        compute = [cells.get(name + APART, cells[name])["ms"] for name in names]
        added = [cells[name]["ms"] - ms for name, ms in zip(names, compute, strict=True)]
        axes.bar(names, compute, 0.6, label="with exchanges replaced by local copies")
        axes.bar(names, added, 0.6, bottom=compute, label="added by communication")
        axes.set_title(title)
        axes.tick_params(axis="x", labelrotation=15, labelsize=8)
    both[0].set_ylabel("ms, forward + backward")
    both[0].legend(fontsize=8)
    sizes, gpu = report["sizes"], report["environment"]["gpu"]
    figure.suptitle(
        f"An MoE block on {report['processes']} x {gpu}: {sizes['experts']} experts, top-"
        f"{sizes['top_k']}, hidden {sizes['hidden']}, {sizes['tokens']} tokens a process, BF16"
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure and print, or draw."""
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--tiny", action="store_true", help="few tokens, on CPUs")
    parser.add_argument("--shape", default="qwen3-30b", choices=WEIGHTED)
    parser.add_argument("--limit", type=float, default=240, help="seconds, then it ends")
    parser.add_argument("--draw", type=Path, help="only draw this file's results beside it")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.draw.read_text()), args.draw.with_suffix(".png"))
        return
    faulthandler.dump_traceback_later(args.limit + 30, exit=True)  # if a device never answers
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    options: dict[str, Any] = {}
    if args.tiny:
        torch.set_num_threads(1)
        torch.compiler.set_stance("force_eager")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        options["device_id"] = device
    os.environ.update(NO_MULTICAST)
    timeout = datetime.timedelta(seconds=min(90, args.limit))
    dist.init_process_group("gloo" if args.tiny else "nccl", timeout=timeout, **options)
    mesh = init_device_mesh(device.type, (processes,))
    shape, runs, layers = (TINY, 1, 2) if args.tiny else (SHAPES[args.shape], 12, 4)
    path = args.out
    if path is None and not args.tiny:
        path = Path(os.environ.get("OUT", "benchmarks/results")) / "expert_parallel.json"
    setup = Setup(device, mesh, rank, processes, shape, runs, layers)
    report = run(setup, path, args.limit)
    if rank == 0:
        print(table(report), flush=True)
    failed = over_processes(torch.tensor([len(report["failures"])]), setup)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(int(bool(failed.item())))  # PyTorch's threads may abort while the interpreter ends


if __name__ == "__main__":
    main()
