"""Inference of a MoE block with few tokens, in a CUDA graph, and its least time.

    python benchmarks/decoding.py [--model NAME ...] [--out FILE]

The least time of a block is that of reading the weights of the experts that its tokens chose, once,
at the rate at which this GPU sums up a large tensor. Compared with plain PyTorch in a graph of its
own; all graphs of a cell run interleaved, each from a flushed L2 cache, timed by CUDA events.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from grouped_gemm_sm90 import environment
from grouped_gemm_sm90 import measure as measure_in_turn
from moe_block import Plain, Shape, fusible_block
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fusible as fz

MODELS = {
    "qwen3-30b": Shape(1, 8, 2048, 768, 128),
    "qwen3-next": Shape(1, 10, 2048, 512, 512),
    "gpt-oss-20b": Shape(1, 4, 2880, 2880, 32),
    "mixtral-8x7b": Shape(1, 2, 4096, 14336, 8),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64)


class Capturable(Plain):
    """Plain PyTorch, with experts' rows counted without waiting for the device."""

    def dispatch(self, x: Tensor, probs: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        """Rows by expert, their weights, their ends, and the order."""
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        rows = x.index_select(0, order // self.shape.top_k)
        counts = torch.zeros(self.shape.experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        return rows, probs.flatten()[order], counts.cumsum(0).int(), order


def graph_of(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def read_rate() -> float:
    """Bytes that the GPU reads in a microsecond."""
    source = torch.zeros(1 << 30, device="cuda")
    ms = measure_in_turn({"sum": source.sum}, runs=10)["sum"]
    return source.nbytes / ms / 1e3


def kernels_of(graph: torch.cuda.CUDAGraph) -> list[tuple[str, float]]:
    """The kernels of a graph with the microseconds of each, in order, of one replay."""
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            graph.replay()
            torch.cuda.synchronize()
    except RuntimeError as why:  # a machine without CUPTI
        return [(str(why)[:60], 0.0)]
    events = sorted(found.events(), key=lambda event: event.time_range.start)
    return [(e.name[:60], e.device_time) for e in events if e.device_time > 0]


@torch.no_grad()
def cell(block: fz.Sequential, shape: Shape, rate: float) -> dict[str, Any]:
    """Microseconds of a block with so many tokens."""
    x = torch.randn(shape.tokens, shape.hidden, device="cuda").bfloat16()
    router, w1, w2 = (block[i].weight for i in (0, 2, 4))
    plain, experts = Capturable(shape, router, w1, w2), fz.Sequential(*block[2:5])
    _, probs, ids = block[0](x)
    rows, splits, scales, _ = block[1](x, probs, ids)
    off = (block(x).float() - plain(x).float()).norm() / plain(x).float().norm()
    used = ids.unique().numel()
    graphs = {
        "block": graph_of(lambda: block(x)),
        "experts": graph_of(lambda: experts(rows, splits, scales, splits)),
        "torch": graph_of(lambda: plain(x)),
    }
    ms = measure_in_turn({name: graph.replay for name, graph in graphs.items()})
    least = used * (w1[0].nbytes + w2[0].nbytes) / rate
    return {
        "tokens": shape.tokens,
        "experts used": used,
        "difference": round(off.item(), 4),
        "least": round(least, 2),
        "us": {name: round(1000 * t, 2) for name, t in ms.items()},
        "kernels": {name: kernels_of(graph) for name, graph in graphs.items()},
    }


def main() -> None:
    """Run every cell, print it, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    rate = read_rate()
    report = {"environment": environment(), "bytes per us": round(rate), "cells": []}
    print(f"{rate / 1e6:.2f} TB/s. share of the least time: block, experts; torch / block")
    for model in options.model:
        torch.manual_seed(0)
        block = fusible_block(MODELS[model])
        with torch.no_grad():
            for i in (0, 2, 4):
                block[i].weight.normal_(std=block[i].weight.shape[-1] ** -0.5)
        for tokens in TOKENS:
            found = cell(block, MODELS[model]._replace(tokens=tokens), rate)
            report["cells"].append({"model": model, **found})
            us, least = found["us"], found["least"]
            print(
                f"{model:12s} {tokens:2d} tokens {found['experts used']:3d} experts"
                f" {us['block']:7.1f} us  {least / us['block']:.2f} {least / us['experts']:.2f}"
                f"  {us['torch'] / us['block']:.2f}x  off {found['difference']}",
                flush=True,
            )
            if options.out:
                options.out.write_text(json.dumps(report) + "\n")
        del block
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
