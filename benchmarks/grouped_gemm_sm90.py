"""The Hopper kernels one by one, against PyTorch's grouped product and quack's kernels.

    python benchmarks/grouped_gemm_sm90.py [--config NAME ...] [--out FILE]

All contestants of a cell run interleaved in one process; the L2 cache is flushed before each run;
CUDA events; median. quack takes part if it is installed, in its best known tile of each cell.
"""

import argparse
import contextlib
import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusible.kernels import grouped
from fusible.kernels.grouped import Glu


class Config(NamedTuple):
    """A mixture-of-experts layer: hidden size, expert size, experts, routed rows."""

    hidden: int
    expert: int
    experts: int
    rows: int


CONFIGS = {
    "qwen3-30b": Config(2048, 768, 128, 131072),
    "mixtral-8x7b": Config(4096, 14336, 8, 16384),
    "dsv3-ep32": Config(7168, 2048, 32, 32768),
    "small": Config(1024, 512, 64, 8192),
}
# quack's best tiles, of 36 tried for each cell: rows x columns, ping-pong or cooperative,
# cluster, dynamic scheduler. Columns: glu_keep, glu, fc2, dglu, dgrad1, wgrad1, wgrad2.
QUACK_TILES = {
    ("qwen3-30b", "balanced"): "256x128co21d 256x192co21d 128x160pp21 128x128pp12d 128x256co21 "
    "128x160pp21 128x192pp21",
    ("qwen3-30b", "skewed"): "128x128pp12 128x192pp12 192x128pp12 128x128pp12d 192x128pp12 "
    "192x128pp12d 128x192pp21d",
    ("mixtral-8x7b", "balanced"): "256x192co21d 256x128co12 128x256co21 128x128pp21d 256x192co12 "
    "192x128pp21 256x128co12d",
    ("mixtral-8x7b", "skewed"): "128x192pp12 128x128pp12 128x256co21d 128x128pp12 128x256co12 "
    "256x192co12d 256x128co12d",
    ("dsv3-ep32", "balanced"): "256x128co12d 128x256co21 128x128pp21 128x128pp21d 256x192co12 "
    "128x160pp21 128x128pp12",
    ("dsv3-ep32", "skewed"): "128x256co12 128x256co12 128x128pp12 128x128pp12 128x192pp12 "
    "128x256co21 128x128pp12",
    ("small", "balanced"): "128x128pp12 128x128pp12 128x128pp12 128x128pp12 128x128pp12 "
    "128x256co12 128x128pp21",
    ("small", "skewed"): "128x256co12 128x256co12 128x256co12 128x128pp12 128x256co12 "
    "128x128pp21 128x128pp21",
}
QUACK_COLUMNS = ("glu_keep", "glu", "fc2", "dglu", "dgrad1", "wgrad1", "wgrad2")


def split_sizes(config: Config, split: str) -> list[int]:
    """Rows of each expert: all the same, or Zipf 0.8 with an eighth of the experts empty."""
    rows, experts = config.rows, config.experts
    if split == "balanced":
        return [rows // experts] * experts
    generator = torch.Generator().manual_seed(0)
    live = experts - max(experts // 8, 1)
    weights = torch.arange(1, live + 1).pow(-0.8)
    sizes = (weights / weights.sum() * rows).floor().int().tolist()
    sizes[0] += rows - sum(sizes)
    order = torch.randperm(experts, generator=generator).tolist()
    return [(sizes + [0] * (experts - live))[i] for i in order]


def tensors(config: Config, split: str) -> dict[str, torch.Tensor]:
    """Random operands of every product of a grouped MLP, forward and backward."""
    hidden, expert, experts, rows = config

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale

    ends = torch.tensor(split_sizes(config, split)).cumsum(0).int().cuda()
    return {
        "x": random(rows, hidden),
        "w1": random(experts, 2 * expert, hidden, scale=hidden**-0.5),
        "w2": random(experts, hidden, expert, scale=expert**-0.5),
        "act": random(rows, expert),
        "preact": random(rows, 2 * expert),
        "d_preact": random(rows, 2 * expert),
        "dy": random(rows, hidden),
        "scales": torch.rand(rows, device="cuda"),
        "ends": ends,
        "starts": torch.nn.functional.pad(ends, (1, 0)),
    }


def fusible_calls(t: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Our kernels."""
    ends, scales = t["ends"], t["scales"]
    return {
        "fc1": lambda: grouped.grouped_mm(t["x"], [t["w1"]], ends),
        "glu_keep": lambda: grouped.grouped_glu(t["x"], [t["w1"]], ends, scales, Glu()),
        "glu": lambda: grouped.grouped_glu(
            t["x"], [t["w1"]], ends, scales, Glu(), save_preact=False
        ),
        "fc2": lambda: grouped.grouped_mm(t["act"], [t["w2"]], ends),
        "dglu": lambda: grouped.grouped_dglu(t["dy"], [t["w2"]], ends, t["preact"], scales, Glu()),
        "dgrad1": lambda: grouped.grouped_mm(t["d_preact"], [t["w1"]], ends, transpose_w=True),
        "wgrad1": lambda: grouped.grouped_wgrad(t["d_preact"], t["x"], ends),
        "wgrad2": lambda: grouped.grouped_wgrad(t["dy"], t["act"], ends),
    }


def torch_calls(t: dict[str, torch.Tensor]) -> dict[str, Any]:
    """PyTorch's grouped product; it has no fused epilogues."""
    product, ends = torch.nn.functional.grouped_mm, t["ends"]
    return {
        "fc1": lambda: product(t["x"], t["w1"].mT, offs=ends),
        "fc2": lambda: product(t["act"], t["w2"].mT, offs=ends),
        "dgrad1": lambda: product(t["d_preact"], t["w1"], offs=ends),
        "wgrad1": lambda: product(t["d_preact"].mT, t["x"], offs=ends),
        "wgrad2": lambda: product(t["dy"].mT, t["act"], offs=ends),
    }


def quack_call(
    t: dict[str, torch.Tensor], op: str, tile: str, outputs: dict[str, Any] | None = None
) -> Any:
    """One of quack's kernels in a tile such as 128x192pp12d, into tensors made beforehand.

    ``outputs`` keeps these for calls of the same op in other tiles.
    """
    from quack import gemm_interface
    from quack.gemm_config import GemmConfig

    dynamic = tile.endswith("d")
    m, rest = tile.rstrip("d").split("x")
    n, cluster = rest[:-4], rest[-2:]
    config = GemmConfig(
        tile_m=int(m),
        tile_n=int(n),
        pingpong="pp" in rest,
        is_dynamic_persistent=dynamic,
        cluster_m=int(cluster[0]),
        cluster_n=int(cluster[1]),
        device_capacity=9,
    )
    how = {"dynamic_scheduler": dynamic, "config": config}
    outputs = {} if outputs is None else outputs

    def like(name: str) -> torch.Tensor:
        if name not in outputs:
            outputs[name] = torch.empty_like(t[name])
        return outputs[name]

    if op in ("glu_keep", "glu"):
        preact, out = like("preact") if op == "glu_keep" else None, like("act")
        how |= {"activation": "swiglu", "cu_seqlens_m": t["starts"], "tuned": False}
        run = gemm_interface._gemm_act_call
        return lambda: run(t["x"], t["w1"].mT, preact, out, None, None, **how)
    if op == "dglu":
        dx, out = like("preact"), like("act")
        how |= {"activation": "swiglu", "cu_seqlens_m": t["starts"], "tuned": False}
        how |= {"colvec_scale": t["scales"], "colvec_reduce": True}
        run = gemm_interface._gemm_dact_call
        return lambda: run(t["dy"], t["w2"], t["preact"], dx, out, **how)
    a, b, out, by = {
        "fc1": (t["x"], t["w1"].mT, "preact", "cu_seqlens_m"),
        "fc2": (t["act"], t["w2"].mT, "x", "cu_seqlens_m"),
        "dgrad1": (t["d_preact"], t["w1"], "x", "cu_seqlens_m"),
        "wgrad1": (t["d_preact"].mT, t["x"], "w1", "cu_seqlens_k"),
        "wgrad2": (t["dy"].mT, t["act"], "w2", "cu_seqlens_k"),
    }[op]
    into, how = like(out), how | {by: t["starts"]}
    return lambda: gemm_interface.gemm_tuned.fn(a, b, into, **how)


def quack_calls(t: dict[str, torch.Tensor], name: str, split: str) -> dict[str, Any]:
    """Quack's kernels in their best known tiles."""
    tiles = dict(zip(QUACK_COLUMNS, QUACK_TILES[name, split].split(), strict=True))
    tiles["fc1"] = tiles["glu_keep"]
    return {op: quack_call(t, op, tile) for op, tile in tiles.items()}


_TICKS_PER_SECOND = 1.75e9  # of the GPU's clock, about


def spin_ticks(calls: Iterable[Callable[[], Any]]) -> int:
    """Clock ticks for which the GPU spins before a call, so that all of it is enqueued by then.

    At least 2 ms, and twice the host time of the slowest call. With less, a call is timed with a
    part of its host's work.
    """
    slowest = 1e-3
    for call in calls:
        call()  # compiles
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        slowest = max(slowest, time.perf_counter() - start)
        torch.cuda.synchronize()
    return int(2 * slowest * _TICKS_PER_SECOND)


def measure(calls: Mapping[Any, Callable[[], Any]], runs: int = 20) -> dict[Any, float]:
    """Median milliseconds on the device of each call, interleaved, from a flushed L2 cache."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times: dict[Any, list[float]] = {name: [] for name in calls}
    spin = spin_ticks(calls.values())
    events = []
    warm = 3
    for turn in range(runs + warm):
        for name, call in calls.items():
            flush.zero_()
            torch.cuda._sleep(spin)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            if turn >= warm:
                events.append((name, start, end))
        torch.cuda.synchronize()
    for name, start, end in events:
        times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def flops(config: Config, op: str) -> float:
    """Floating-point operations of the matrix product."""
    second = op in ("fc2", "dglu", "wgrad2")
    return 2.0 * config.rows * config.hidden * config.expert * (1 if second else 2)


def environment() -> dict[str, str]:
    """Machine, versions and commit."""
    from importlib.metadata import PackageNotFoundError, version

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "absent"

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nvidia-cutlass-dsl": of("nvidia-cutlass-dsl"),
        "quack-kernels": of("quack-kernels"),
        "transformers": of("transformers"),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    """Run every cell and print, for each, our time over the best peer's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    cells = []
    print(f"{'config':14s} {'split':9s} {'op':9s} {'ms':>8s} {'TFLOP/s':>8s}  torch   quack")
    for name in options.config:
        for split in ("balanced", "skewed"):
            config = CONFIGS[name]
            operands = tensors(config, split)
            contestants = {"fusible": fusible_calls(operands), "torch": torch_calls(operands)}
            with contextlib.suppress(ImportError):
                contestants["quack"] = quack_calls(operands, name, split)
            for op in contestants["fusible"]:
                calls = {who: ops[op] for who, ops in contestants.items() if op in ops}
                times = measure(calls)
                ours = times["fusible"]
                rates = {w: flops(config, op) / t / 1e9 for w, t in times.items()}
                cells.append(
                    {"config": name, "split": split, "op": op, "ms": times, "tflops": rates}
                )
                ratios = "  ".join(
                    f"{times[who] / ours:5.3f}x" if who in times else "   -  "
                    for who in ("torch", "quack")
                )
                print(
                    f"{name:14s} {split:9s} {op:9s} {ours:8.4f} {rates['fusible']:8.0f}  {ratios}"
                )
    if options.out:
        report = {"environment": environment(), "cells": cells}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
