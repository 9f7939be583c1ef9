"""Pretrain a Qwen3-MoE-like language model over bytes, with expert parallelism and FSDP2.

    python examples/pretrain_moe.py                                    # one process
    torchrun --nproc_per_node=4 examples/pretrain_moe.py --ep 4 ...    # four, that share experts

Each of N processes holds 1 / ep of the experts; FSDP2 shards these over N / ep processes, all else
over N. --batch is of all processes together, --steps includes those before a resume. A second run
with the same --checkpoint goes on where the first one stopped, also with another N or ep.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW
from tqdm import tqdm

import fusible as fz

RECIPES = {
    "none": None,
    "mxfp8": fz.recipes.MXFP8BlockScaling(),
    "fp8_block": fz.recipes.Float8BlockScaling(),
    "nvfp4": fz.recipes.NVFP4BlockScaling(),
}
# FLOP/s of dense BF16, from data sheets; on other devices no MFU is shown.
PEAK = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12, "NVIDIA B200": 2250e12}
SIZES = {
    "steps": 300, "layers": 2, "hidden": 128, "heads": 4, "kv-heads": 2, "head-size": 32, "seed": 0,
    "ep": 1, "experts": 8, "top-k": 2, "inner": 96, "sequence": 128, "batch": 16, "save-every": 100,
}  # fmt: skip
VOCABULARY, SHOW_EVERY = 256, 10


class Layer(nn.Module):
    """Attention, then experts, each ``x + f(norm(x))``, for x ``[batch, sequence, hidden]``."""

    def __init__(self, args: argparse.Namespace, ep: DeviceMesh) -> None:
        super().__init__()
        hidden, experts, size = args.hidden, args.experts, args.head_size
        self.heads = (args.heads, args.kv_heads, args.kv_heads)
        qkv = fz.Linear(hidden, sum(self.heads) * size, bias=False)
        self.qkv = fz.Sequential(fz.MakeExtraOutput(), fz.RMSNorm(hidden), qkv)
        self.q_norm, self.k_norm = fz.RMSNorm(size), fz.RMSNorm(size)
        out = fz.Linear(args.heads * size, hidden, bias=False)
        self.out = fz.Sequential(out, fz.AddExtraInput())
        router = fz.TopKRouter(hidden, experts, args.top_k, expert_bias=True)
        self.route = fz.Sequential(fz.MakeExtraOutput(), fz.RMSNorm(hidden), router)
        dispatch = fz.Dispatch(experts, process_group=ep, receive_factor=args.receive_factor)
        load = dispatch.extra_output_names.index("load")
        dispatch.set_extra_output_channel(load, "load")  # which the caller gets too
        options = {"bias": False, "single_grouped_weight": True}
        self.experts = fz.Sequential(
            dispatch,
            fz.GroupedLinear(experts, hidden, 2 * args.inner, **options),
            fz.ScaledSwiGLU(),
            fz.GroupedLinear(experts, args.inner, hidden, **options),
            fz.Combine(process_group=ep),
            fz.AddExtraInput(),
        )
        fz.expert_parallel(self.experts, ep)

    def forward(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output, and how many of this process's choices each expert got."""
        qkv, residual = self.qkv(x)
        q, k, v = qkv.unflatten(-1, (sum(self.heads), -1)).split(self.heads, dim=2)
        q, k = rotate(self.q_norm(q), angles), rotate(self.k_norm(k), angles)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = self.out(y.transpose(1, 2).flatten(2), residual)
        x, residual, probs, expert_ids = self.route(x)
        return self.experts(x, probs, expert_ids, residual)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) of x ``[batch, sequence, heads, size]``."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Model(nn.Module):
    """Logits of the next byte, for bytes ``[batch, sequence]``."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__()
        world = dist.get_world_size()
        everyone = init_device_mesh(device.type, (world,))
        shape, names = (world // args.ep, args.ep), ("efsdp", "ep")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        self.layers = nn.ModuleList()
        with device:
            self.embedding = nn.Embedding(VOCABULARY, args.hidden)
            for _ in range(args.layers):  # made whole, then cut: the same values in any number
                layer = Layer(args, mesh["ep"])
                fully_shard(layer.experts, mesh=mesh["efsdp"], mp_policy=policy)
                self.layers.append(fully_shard(layer, mesh=everyone, mp_policy=policy))
            self.norm = fz.RMSNorm(args.hidden)
            self.head = nn.Linear(args.hidden, VOCABULARY, bias=False)
            frequencies = 1e6 ** -torch.arange(0, 1, 2 / args.head_size)
            angles = torch.outer(torch.arange(args.sequence), frequencies)
            self.register_buffer("angles", angles, persistent=False)
        fully_shard(self, mesh=everyone, mp_policy=policy)
        for part in self.modules():
            if isinstance(part, FSDPModule):  # gradients are sums; the loss is a mean over all
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and how many choices the experts of each layer got, ``[layers, experts]``."""
        x, loads = self.embedding(tokens), []
        for layer in self.layers:
            x, load = layer(x, self.angles)
            loads.append(load)
        return self.head(self.norm(x)), torch.stack(loads)


def flops_per_token(model: Model, args: argparse.Namespace) -> float:
    """Forward and backward: 6 for each weight that a token meets, and causal attention."""
    experts = sum(p.numel() for layer in model.layers for p in layer.experts.parameters())
    others = sum(p.numel() for p in model.parameters()) - experts - model.embedding.weight.numel()
    attention = args.layers * args.heads * args.head_size * args.sequence
    return 6 * (others + experts * args.top_k / args.experts + attention)


def read_text() -> Tensor:
    """The modules of Python's standard library, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """A process's windows ``[n, sequence + 1]``; those of all depend on nothing but the step."""
    random = torch.Generator().manual_seed(args.seed << 32 | step)
    starts = torch.randint(len(text) - args.sequence, (args.batch,), generator=random)
    mine = starts.chunk(dist.get_world_size())[dist.get_rank()]
    return text[mine[:, None] + torch.arange(args.sequence + 1)].long()


def train_step(model: Model, optimizer: AdamW, rows: Tensor, recipe: str) -> Tensor:
    """One step: the loss of all processes, and the busiest expert's load over the mean load."""
    with fz.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        logits, loads = model(rows[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
    loss = loss / dist.get_world_size()
    loss.backward()
    fz.distributed.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    dist.all_reduce(loads)
    for layer, load in zip(model.layers, loads, strict=True):
        layer.route[-1].update_expert_bias(load, rate=0.01)
    return torch.stack((loss, (loads.amax(1) / loads.float().mean(1)).max()))


def state_of(model: Model, optimizer: AdamW, history: list[list[float]]) -> dict:
    """What a checkpoint holds; tensors are those of the model and the optimizer."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "history": history}


def resume(model: Model, optimizer: AdamW, folder: Path) -> list[list[float]]:
    """Load the newest complete checkpoint of a folder; what its steps gave, [] without one."""
    saved = sorted(path.parent for path in folder.glob("step_*/.metadata"))  # is written last
    if not saved:
        return []
    state = state_of(model, optimizer, [])  # takes a step without effect, which the load undoes
    dcp.load(state, checkpoint_id=saved[-1])
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **parts)
    return state["history"]


def train(model: Model, args: argparse.Namespace) -> tuple[list[list[float]], str]:
    """Train to the last step; what each step gave, and the last one and the speed in words."""
    by_mesh: dict[DeviceMesh, list[nn.Parameter]] = {}
    for p in model.parameters():  # a group for each, as a fused update takes tensors of one mesh
        by_mesh.setdefault(p.device_mesh, []).append(p)
    groups = [{"params": params} for params in by_mesh.values()]
    optimizer = AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    history = resume(model, optimizer, args.checkpoint) if args.checkpoint else []
    text, device, quiet = read_text(), model.angles.device, dist.get_rank() > 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    fastest = PEAK.get(name, 0) * dist.get_world_size() / flops_per_token(model, args)
    form = "{l_bar}{bar}| step {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
    bar = tqdm(total=args.steps, initial=len(history), disable=quiet, bar_format=form)
    given, speeds, start, shown = [], [], time.perf_counter(), "no step was left"
    for step in range(len(history), args.steps):
        warm = (step + 1) / (1 + args.steps / 20)
        rate = args.lr * min(warm, 0.55 + 0.45 * math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = batch(text, step, args).to(device)
        given.append(train_step(model, optimizer, rows, args.recipe))
        done = step + 1
        saving = args.checkpoint and (done == args.steps or done % args.save_every == 0)
        if saving or done == args.steps or len(given) == SHOW_EVERY:
            history += torch.stack(given).tolist()  # here alone the host waits for the device
            speeds.append(len(given) * args.batch * args.sequence / (time.perf_counter() - start))
            speed = statistics.median(speeds[1:] or speeds)  # the first few steps compile
            mfu = f", MFU {speed / fastest:.1%}" if fastest else ""
            shown = f"loss {history[-1][0]:.3f}, {speed:,.0f} tokens/s{mfu}"
            bar.set_postfix_str(shown, refresh=False)
            bar.update(len(given))
            given.clear()
            if saving:
                folder = args.checkpoint / f"step_{done:06d}"
                dcp.save(state_of(model, optimizer, history), checkpoint_id=folder)
            start = time.perf_counter()
    bar.close()
    return history, shown


def plot(history: list[list[float]], title: str, path: Path) -> None:
    """The loss of each step and its running mean; below, how even the experts' loads were."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No plot, since matplotlib is missing: pip install matplotlib")
        return
    losses, loads = zip(*history, strict=True)
    steps = range(1, len(losses) + 1)
    width = max(1, len(losses) // 20)
    means = [statistics.fmean(losses[max(0, n - width) : n]) for n in steps]
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    above.plot(steps, losses, alpha=0.35, linewidth=1, label="each step")
    above.plot(steps, means, color="C0", label=f"mean of the last {width}")
    above.set(ylabel="loss (nats per byte)", title=title)
    above.legend()
    below.plot(steps, loads, color="C1", linewidth=1)
    below.set(xlabel="step", ylabel="busiest expert's\nload / mean", ylim=(1, None))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add, gpu = parser.add_argument, torch.cuda.is_available()
    for name, default in SIZES.items():
        add(f"--{name}", type=int, default=default, help="default: %(default)s")
    add("--lr", type=float, default=3e-3, help="highest learning rate, 3e-3")
    add("--receive-factor", type=float, help="see fusible.Dispatch")
    add("--recipe", choices=RECIPES, default="none", help="formats of the layers' products")
    add("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu", help="BF16, FP32")
    add("--checkpoint", type=Path, help="folder to save to, and to go on from")
    add("--out", type=Path, default=Path("out"), help="folder for pretrain_moe.png and .json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[list[float]]:
    """Join the other processes, train, draw; the loss and the load of each step."""
    args = parse(arguments)
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    started = {} if dist.is_torchelastic_launched() else alone  # by torchrun, or by itself
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", **started)
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % args.ep or args.batch % world:
        raise SystemExit(f"--ep must divide the {world} processes, and these --batch")
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    history, shown = train(Model(args, device), args)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        title = f"{args.experts} experts, top-{args.top_k}, processes: {world}, ep: {args.ep}"
        print(f"{title}: {shown}")
        (args.out / "pretrain_moe.json").write_text(json.dumps(history))
        plot(history, title, args.out / "pretrain_moe.png")
    dist.destroy_process_group()
    return history


if __name__ == "__main__":
    main()
    time.sleep(1)  # PyTorch aborts a process that ends while gloo still frees its last tensors
