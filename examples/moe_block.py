"""Train a small byte-level language model with mixture-of-experts blocks on Python's own sources.

A block's router, dispatch, experts and combine are one ``fusible.Sequential`` of six ops, which the
fuser plans for the machine at hand; the example prints that plan, and those for Hopper and
Blackwell.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import fusible

mpl.use("Agg")
from matplotlib import pyplot as plt

RECIPES = {
    "none": None,
    "mxfp8": fusible.recipes.MXFP8BlockScaling(),
    "fp8_block": fusible.recipes.Float8BlockScaling(),
    "fp8_current": fusible.recipes.Float8CurrentScaling(),
    "nvfp4": fusible.recipes.NVFP4BlockScaling(),
}
VOCABULARY, HEAD_SIZE = 256, 32
LOOKS = 12  # at the held-out text, over a run
STEPS_AT_LEAST, TIMES_AT_MOST = 100, 5  # of a run by time: its steps, and that many times its time
BALANCE = 0.01  # weight of the load-balancing loss
# Not prose or programs of the library: other packages, tests, tables of characters and topics.
SKIPPED = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "__pycache__")
)


def moe(hidden: int, experts: int, top_k: int, features: int) -> fusible.Sequential:
    """Routes every token to its ``top_k`` best experts and sums what they say, by weight.

    The ops find each other's extra tensors by name. Nothing here reads a tensor on the host: the
    sizes of the groups stay on the device.

    Returns:
        From tokens ``[..., hidden]`` the same shape, the load-balancing loss, and how many rows
        each expert got.
    """
    dispatch = fusible.Dispatch(experts)
    dispatch.set_extra_output_channel(0, "rows of experts")  # also given to the caller
    options = {"bias": False, "single_grouped_weight": True}
    return fusible.Sequential(
        fusible.TopKRouter(hidden, experts, top_k, load_balancing_loss=True),
        dispatch,
        fusible.GroupedLinear(experts, hidden, 2 * features, **options),
        fusible.ScaledSwiGLU(),
        fusible.GroupedLinear(experts, features, hidden, **options),
        fusible.Combine(),
    )


class Attention(nn.Module):
    """Causal self-attention with rotary positions (arXiv 2104.09864)."""

    def __init__(self, hidden: int, context: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        half = HEAD_SIZE // 2
        angles = torch.outer(torch.arange(context), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """``x`` ``[batch, heads, context, head size]`` turned by the angles of its positions."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes ``[batch, context, hidden]`` along the context."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, HEAD_SIZE))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = self.rotate(q).to(v.dtype), self.rotate(k).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then experts, each added to its normalised input's residual."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        hidden = options.hidden
        self.attention_norm, self.moe_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention = Attention(hidden, options.context)
        self.moe = moe(hidden, options.experts, options.top_k, options.expert_features)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The block's output, the experts' rows, the balancing loss."""
        x = x + self.attention(self.attention_norm(x))
        y, balance, splits = self.moe(self.moe_norm(x))
        return x + y, splits, balance


class LanguageModel(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, options.hidden)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.hidden)
        self.head = nn.Linear(options.hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, rows per expert ``[layers, experts]``, and the mean balancing loss."""
        x = self.embedding(tokens)
        splits, balances = [], []
        for block in self.blocks:
            x, of_block, balance = block(x)
            splits.append(of_block)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(splits), torch.stack(balances).mean()


def read_text(*more: Path) -> tuple[Tensor, Tensor]:
    """The standard library's sources as bytes: training text, and every tenth file held out.

    ``more`` are other folders with sources.
    """
    files = [
        file
        for root in (Path(sysconfig.get_path("stdlib")), *more)
        for file in sorted(root.rglob("*.py"))
        if not SKIPPED & set(file.relative_to(root).parts)
    ]
    held_out = b"".join(f.read_bytes() for f in files[::10])
    training = b"".join(f.read_bytes() for i, f in enumerate(files) if i % 10)
    return tuple(torch.frombuffer(bytearray(b), dtype=torch.uint8) for b in (training, held_out))


def byte_entropy(text: Tensor) -> float:
    """Bits per byte of the best code that looks at one byte at a time."""
    p = text.bincount(minlength=VOCABULARY).double() / len(text)
    return -torch.xlogy(p, p).sum().item() / math.log(2)


def windows(text: Tensor, starts: Tensor, context: int, device: torch.device) -> Tensor:
    """``[len(starts), context + 1]`` bytes from ``starts`` on, as int64 on ``device``."""
    rows = text[starts[:, None] + torch.arange(context + 1)]
    return rows.to(device).long()


@dataclass
class History:
    """What a training run did; losses are in bits per byte, as ``(step, loss)``."""

    entropy: float
    training: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    usage: list[list[float]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def look(
        self, step: int, losses: Sequence[Tensor], held_out: float, usage: list[list[float]]
    ) -> None:
        """Note the losses since the last look, and what the held-out text says."""
        if losses:
            self.training.append((step, torch.stack(losses).mean().item()))
        self.held_out.append((step, held_out))
        self.usage = usage

    def summary(self) -> str:
        """The last held-out loss and the speed so far."""
        speed = f", {self.tokens / self.seconds:,.0f} tokens/s" if self.tokens else ""
        return f"held-out {self.held_out[-1][1]:.3f} bits/byte{speed}"


def part_done(options: argparse.Namespace, step: int, seconds: float) -> float:
    """How much of a run is done: by steps if their number was given, else by time.

    A slow machine gets more time than was asked for, until it has made a least number of steps.
    """
    if options.steps:
        return step / options.steps
    time_passed = seconds / options.seconds
    part = min(time_passed, step / STEPS_AT_LEAST)
    return min(max(part, time_passed / TIMES_AT_MOST), 1.0)


def precision(device: torch.device) -> AbstractContextManager:
    """BF16 matrix products on CUDA, FP32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def under_recipe(name: str) -> AbstractContextManager:
    """The experts' products in the number format of that name."""
    recipe = RECIPES[name]
    return fusible.autocast(enabled=recipe is not None, recipe=recipe)


def bits(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bits per byte on ``rows`` ``[batch, context + 1]``, rows per expert, balancing loss."""
    with precision(rows.device):
        logits, splits, balance = model(rows[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
    return loss / math.log(2), splits, balance


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Tensor]) -> tuple[float, list[list[float]]]:
    """Held-out bits per byte, and each expert's share of the rows in each layer."""
    losses, splits, _ = zip(*(bits(model, rows) for rows in batches), strict=True)
    rows = torch.stack(splits).sum(dim=0).double()
    return torch.stack(losses).mean().item(), (rows / rows.sum(dim=1, keepdim=True)).tolist()


def learning_rate(done: float, peak: float) -> float:
    """A short linear warm-up, then a cosine down to a twentieth."""
    return peak * min(done / 0.03 + 0.02, 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2, 1.0)


def train(model: nn.Module, text: Tensor, held_out: Tensor, options: argparse.Namespace) -> History:
    """Train ``model`` on random windows of ``text``; looks at ``held_out`` now and then."""
    device, context, batch = options.device, options.context, options.batch
    history = History(byte_entropy(held_out))
    random = torch.Generator().manual_seed(options.seed)
    starts = torch.linspace(0, len(held_out) - context - 1, 4 * batch).long().split(batch)
    batches = [windows(held_out, s, context, device) for s in starts]
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    losses: list[Tensor] = []
    step, done, next_look = 0, 0.0, 0
    start = time.perf_counter()
    with tqdm(total=100, bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}") as bar:
        while True:
            if done * LOOKS >= next_look:
                next_look = int(done * LOOKS) + 1
                history.look(step, losses, *evaluate(model, batches))
                history.seconds = time.perf_counter() - start
                history.tokens = step * batch * context
                losses.clear()
            if done >= 1:
                return history
            places = torch.randint(len(text) - context, (batch,), generator=random)
            rate = learning_rate(done, options.learning_rate)
            rows = windows(text, places, context, device)
            losses.append(train_step(model, optimizer, rate, rows))
            step += 1
            done = part_done(options, step, time.perf_counter() - start)
            bar.set_postfix_str(f"step {step}, {history.summary()}", refresh=False)
            bar.update(100 * done - bar.n)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rate: float, rows: Tensor
) -> Tensor:
    """One step on ``rows`` ``[batch, context + 1]``; the bits per byte, left on the device."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss, _, balance = bits(model, rows)
    (loss * math.log(2) + BALANCE * balance).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def explain_block(
    model: LanguageModel, options: argparse.Namespace, target: str | None
) -> fusible.Explanation:
    """How the first MoE block runs in training: here, or in BF16 on another machine."""
    device = options.device
    with precision(device) if target is None else torch.autocast(device.type, torch.bfloat16):
        x = torch.zeros(options.batch, options.context, options.hidden, device=device)
        return fusible.explain(model.blocks[0].moe, x.requires_grad_(), target=target)


def plot(history: History, path: Path) -> None:
    """The loss curve, as a PNG."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(*zip(*history.training, strict=True), label="training (mean since the last point)")
    axes.plot(*zip(*history.held_out, strict=True), label="held-out", marker=".")
    axes.axhline(history.entropy, color="gray", linestyle="--", label="entropy of single bytes")
    axes.set(xlabel="step", ylabel="loss (bits per byte)", ylim=(0, None))
    axes.set_title("Byte-level language model with MoE blocks, Python's standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(history: History) -> None:
    """Print what the training came to."""
    (_, first), (steps, _) = history.held_out[0], history.held_out[-1]
    print(
        f"\n{steps} steps in {history.seconds:.1f} s: {history.summary()} ({first:.3f} untrained)"
    )
    print(f"entropy of its bytes taken one by one: {history.entropy:.3f} bits/byte")
    print("share of rows per expert, held-out text:")
    for layer, shares in enumerate(history.usage):
        print(f"  layer {layer}: " + " ".join(f"{share:5.1%}" for share in shares))


def positive(kind: type) -> type:
    """An argument type: a positive number of ``kind``."""

    def parse(words: str) -> float:
        value = kind(words)
        if not 0 < value < math.inf:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"  # argparse names it in its message
    return parse


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The checked options; exits with a message for the user if they cannot be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    count, number = positive(int), positive(float)
    add = parser.add_argument
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds",
        type=number,
        default=60.0,
        help="train for this long (evaluations included); longer where that is less than "
        f"{STEPS_AT_LEAST} steps, at most {TIMES_AT_MOST} times as long",
    )
    length.add_argument(
        "--steps", type=count, help="train this many steps instead; repeatable on the CPU"
    )
    add("--hidden", type=count, default=128, help=f"features of a token, times {HEAD_SIZE}")
    add("--layers", type=count, default=2, help="blocks of attention and experts")
    add("--experts", type=count, default=8, help="experts in a block")
    add("--top-k", type=count, default=2, help="experts for each token")
    add("--expert-features", type=count, default=128, help="features inside an expert")
    add("--context", type=count, default=128, help="bytes in a training window")
    add("--batch", type=count, default=16, help="windows in a step")
    add("--learning-rate", type=number, default=4e-3, help="highest learning rate")
    add("--recipe", choices=RECIPES, default="none", help="number format of the experts' products")
    add("--device", default="auto", help='"cpu", "cuda", "cuda:1", ...; "auto" takes CUDA if any')
    add("--seed", type=int, default=0, help="of the parameters and of the order of the text")
    add("--out", type=Path, default=Path("out"), help="folder for the loss curve and the op graph")
    options = parser.parse_args(arguments)
    if options.top_k > options.experts:
        parser.error(f"--top-k must be at most --experts {options.experts}, got {options.top_k}")
    if options.hidden % HEAD_SIZE:
        parser.error(f"--hidden must be a multiple of {HEAD_SIZE}, got {options.hidden}")
    try:
        options.device = pick_device(options.device)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    return options


def pick_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: it is neither a CPU nor a CUDA device of this machine.
        RuntimeError: it is no device name at all.
    """
    gpus = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {name}")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ValueError(f"--device {name} is not on this machine, which has {gpus} CUDA GPUs")
    return device


def main(arguments: Sequence[str] | None = None) -> History:
    """Read, explain, train, draw."""
    options = parse_options(arguments)
    text, held_out = read_text()
    torch.manual_seed(options.seed)
    model = LanguageModel(options).to(options.device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(text):,} bytes of Python's standard library, {len(held_out):,} more held out")
    print(f"{parameters:,} parameters on {options.device}")
    options.out.mkdir(parents=True, exist_ok=True)
    with under_recipe(options.recipe):
        for target in (None, "sm90", "sm100"):
            explanation = explain_block(model, options, target)
            where = "on this machine" if target is None else f"in BF16 on {target}"
            print(f"\nan MoE block {where}\n{explanation}", flush=True)
            suffix = "" if target is None else f"_{target}"
            explanation.to_svg(options.out / f"op_graph{suffix}.svg")
        history = train(model, text, held_out, options)
    report(history)
    plot(history, options.out / "loss.png")
    print(f"the loss curve and the op graphs are in {options.out}")
    return history


if __name__ == "__main__":
    main()
