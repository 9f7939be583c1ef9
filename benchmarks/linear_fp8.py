"""A dense linear in BF16, by FP8 products and by dequantized operands, on a Hopper GPU.

Device time of CUDA graphs in one process, in turns, weights quantized in every forward; and of the
forward's product alone, quantized beforehand: ours, PyTorch's and in BF16.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fusible as fz
from fusible.kernels.dense import cuda
from fusible.kernels.quantize.k_major import quantize_k_major
from fusible.recipes import Float8BlockScaling

SHAPES = [  # rows, in, out
    (8192, 4096, 4096),
    (8192, 4096, 14336),
    (8192, 14336, 4096),
    (16384, 2048, 6144),
    (2048, 4096, 4096),
    (8192, 7168, 2048),
    (4096, 8192, 8192),
]
FP8 = Float8BlockScaling()
RECIPES = {"bf16": None, "fp8": FP8, "dequantized": Float8BlockScaling(fp8_products=False)}


def calls_of(rows: int, features: int, out: int) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    linear = fz.Linear(features, out, bias=False, **options)
    x = torch.randn(rows, features, **options).requires_grad_()
    dy = torch.randn(rows, out, **options)

    def inference(recipe: Any) -> Any:
        with fz.autocast(enabled=recipe is not None, recipe=recipe), torch.no_grad():
            return linear(x)

    def step(recipe: Any) -> Any:
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            y = linear(x)
        return torch.autograd.grad(y, [x, linear.weight], dy)

    calls = {
        f"{run.__name__} {name}": lambda run=run, recipe=recipe: run(recipe)
        for run in (inference, step)
        for name, recipe in RECIPES.items()
    }
    weight, ends = linear.weight.detach(), torch.full((1,), rows, dtype=torch.int32, device="cuda")
    uses = {"rowwise": True, "columnwise": False}
    of_x = quantize_k_major(x.detach(), FP8.format("input"), **uses).row
    of_w = quantize_k_major(weight, FP8.format("weight"), **uses).row
    given = of_x.data, of_w.data, ends, of_x.scale, of_w.scale
    ours, theirs = cuda.scaled_mm_grouped(*given), cuda.scaled_mm_pytorch(*given)
    assert torch.equal(ours, theirs)
    return {
        **calls,
        "product fp8": lambda: cuda.scaled_mm_grouped(*given),
        "product torch": lambda: cuda.scaled_mm_pytorch(*given),
        "product bf16": lambda: torch.nn.functional.linear(x.detach(), weight),
    }


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of a call that ran before."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, flush: torch.Tensor, replays: int = 4) -> float:
    """Of one replay."""
    flush.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / replays


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    flush = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
    cases = []
    for rows, features, out in SHAPES:
        graphs = {name: captured(call) for name, call in calls_of(rows, features, out).items()}
        taken: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(args.rounds):
            for name, graph in graphs.items():
                taken[name].append(milliseconds(graph, flush))
        ms = {name: statistics.median(of) for name, of in taken.items()}
        cases.append({"rows": rows, "in": features, "out": out, "ms": ms})
        print(rows, features, out, {name: round(value, 3) for name, value in ms.items()})
    if args.json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.json.write_text(json.dumps({"environment": about, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
