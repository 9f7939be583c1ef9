"""How long an MoE block takes whose experts are shared among GPUs: on paper.

    python benchmarks/expert_parallel_model.py

From the time of the block on one H200 (results/moe_block.json), that of the weight gradient behind
which one exchange is hidden (results/gathered_loads.json) and the bandwidth of exchanges on one
host (results/exchange_h200.json). That between hosts is an assumption: a 400 Gb/s link for each
GPU. Choices are balanced and independent of each other; nothing else runs. docs/expert_parallel.md
has the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results"
IN_HOST, BETWEEN_HOSTS = 8, 50.0  # GPUs; GB/s a GPU, assumed


class Measured(NamedTuple):
    """Milliseconds of qwen3-30b's block on one GPU, and GB/s of exchanges in a host."""

    step: float
    weight_gradient: float
    bandwidth: dict[str, float]

    @classmethod
    def read(cls) -> Measured:
        """From the results."""
        block, loads, exchanges = (
            json.loads((RESULTS / f"{name}.json").read_text())
            for name in ("moe_block", "gathered_loads", "exchange_h200")
        )
        (wgrad,) = {
            cell["ms"]["rows in order"]
            for cell in loads["cells"]
            if (cell["config"], cell["split"], cell["op"]) == WEIGHT_GRADIENT
        }
        step = block["shapes"]["qwen3-30b"]["passes"]["forward + backward"]["ms"]["fusible"]
        return cls(step, wgrad, exchanges["GB/s"]["all_to_all_single, 256 MB"])


WEIGHT_GRADIENT = ("qwen3-30b", "random", "fc1 weight gradient")
TOKENS, TOP_K, HIDDEN, INNER, EXPERTS = 16384, 8, 2048, 768, 128
WEIGHTS = 3 * EXPERTS * HIDDEN * INNER * 2 / 1e9  # GB in BF16


class Estimate(NamedTuple):
    """A step where GPUs share the experts in groups; GB and milliseconds."""

    sent: float
    """What a process sends in one of the four exchanges."""
    wire: float
    """All four."""
    step: float
    share: float
    """Of one GPU's speed with as many tokens and all experts."""
    gathered: float
    """A step with FSDP2 alone."""


def sent_to(processes: int, mode: str, tokens: int) -> float:
    """GB that a process sends to each other one in an exchange."""
    reached = 1.0 if mode == "all" else 1 - (1 - 1 / processes) ** TOP_K
    copies = TOP_K / processes if mode == "rows" else reached
    return copies * tokens * HIDDEN * 2 / 1e9


def bandwidth(measured: Measured, processes: int) -> float:
    """GB/s in a host."""
    return measured.bandwidth["2" if processes == 2 else "4"]


def gather_ms(measured: Measured, gpus: int) -> float:
    """Milliseconds to gather all weights: parts between hosts, then the whole in each host."""
    here = min(gpus, IN_HOST)
    hosts = gpus // here
    inside = WEIGHTS * (here - 1) / here / bandwidth(measured, here)
    between = WEIGHTS / here * (hosts - 1) / hosts / BETWEEN_HOSTS
    return 1e3 * max(inside, between)


def estimate(
    measured: Measured, gpus: int, processes: int, mode: str, tokens: int = TOKENS
) -> Estimate:
    """A step of so many tokens a GPU where ``processes`` share the experts.

    Three exchanges wait, and of the fourth what is longer than FC1's weight gradient. FSDP2 gathers
    weights twice and sums gradients once, over the other GPUs the parts of a group, or alone all of
    them; that is hidden as far as a step lasts.
    """
    scale = tokens / TOKENS
    compute, hides = scale * measured.step, scale * measured.weight_gradient
    here, others = min(processes, IN_HOST), gpus // processes
    each = sent_to(processes, mode, tokens)
    inside = each * (here - 1) / bandwidth(measured, here)
    wire = 1e3 * max(inside, each * (processes - here) / BETWEEN_HOSTS)
    parts = 3e3 * WEIGHTS / processes * (others - 1) / others / BETWEEN_HOSTS
    step = max(compute + 3 * wire + max(0.0, wire - hides), parts)
    alone = max(compute, 3 * gather_ms(measured, gpus))
    return Estimate(each * (processes - 1), 4 * wire, step, compute / step, alone)


LAYOUTS = (
    (2, 2, "all"),
    (4, 4, "all"),
    (8, 8, "all"),
    (8, 8, "tokens"),
    (16, 8, "tokens"),
    (16, 16, "tokens"),
    (64, 8, "tokens"),
    (64, 64, "tokens"),
)
COLUMNS = (
    "GPUs, experts shared among",
    "`send`",
    "experts' weights a GPU, MB",
    "sent in an exchange, MB",
    "four exchanges, ms",
    "step, ms (of one GPU's speed)",
    "FSDP2 alone, ms",
    "4096 tokens: step, ms",
    "FSDP2 alone, ms",
)


def rows() -> Iterator[tuple[str, ...]]:
    """The estimates, as cells of `COLUMNS`."""
    measured = Measured.read()
    for gpus, processes, mode in LAYOUTS:
        many, few = (estimate(measured, gpus, processes, mode, n) for n in (TOKENS, 4096))
        yield (
            f"{gpus}, {processes}",
            f'`"{mode}"`',
            f"{1e3 * WEIGHTS / processes:.0f}",
            f"{1e3 * many.sent:.0f}",
            f"{many.wire:.1f}",
            f"{many.step:.1f} ({many.share:.2f})",
            f"{many.gathered:.1f}",
            f"{few.step:.1f}",
            f"{few.gathered:.1f}",
        )


if __name__ == "__main__":
    for row in (COLUMNS, *rows()):
        print(" | ".join(row))
