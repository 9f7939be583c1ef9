"""Inference of a MoE block with few tokens, in a CUDA graph, and its least time.

    python benchmarks/decoding.py [--model NAME ...] [--layers N] [--out FILE]

With ``--layers``, a graph runs so many blocks one after another, each with weights of its own, as
the layers of a model; times are those of one.

The least time of a block is that of reading the weights of the experts that its tokens chose, once,
at the rate at which this GPU sums up a large tensor. Compared with plain PyTorch in a graph of its
own, with blocks whose weights are stored in the formats of recipes, and with one of these under its
recipe, with FP8 products. All graphs of a cell run interleaved, each from a flushed L2 cache, timed
by CUDA events.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import RECIPES, environment, graph_of, measure, parser_of, under, write
from moe_block import Plain, Shape, fusible_block
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fusible as fz

MODELS = {
    "qwen3-30b": Shape(1, 8, 2048, 768, 128),
    "qwen3-next": Shape(1, 10, 2048, 512, 512),
    "gpt-oss-20b": Shape(1, 4, 2880, 2880, 32),
    "mixtral-8x7b": Shape(1, 2, 4096, 14336, 8),
    "llama-4-scout": Shape(1, 1, 5120, 8192, 16),
}
STORED = {
    "MXFP8": RECIPES["mxfp8"],
    "FP8 block": RECIPES["fp8_block"],
    "NVFP4": RECIPES["nvfp4_as_trained_with"],
}
UNDER_RECIPE = "FP8 products"
"""The blocks of "FP8 block", which quantize the inputs of products too."""
TOKENS = (1, 2, 4, 8, 16, 32, 64)
PROFILED = (1, 32)


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


def read_rate() -> float:
    """Bytes that the GPU reads in a microsecond."""
    source = torch.zeros(1 << 30, device="cuda")
    ms = measure({"sum": source.sum}, runs=10)["sum"]
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


def run(name: str, module: fz.Sequential, *inputs: Tensor) -> Tensor:
    """The output of a block, or of its experts."""
    with under(STORED["FP8 block"] if name == UNDER_RECIPE else None):
        return module(*inputs)


def in_turn(calls: list[Callable[[], Any]]) -> None:
    """Call each."""
    for call in calls:
        call()


def nbytes(weight: nn.Parameter) -> int:
    """Bytes of a weight, which may be stored quantized."""
    pieces = weight.pieces().values() if hasattr(weight, "pieces") else [weight]
    return sum(piece.nbytes for piece in pieces)


@torch.no_grad()
def cell(layers: dict[str, list[fz.Sequential]], shape: Shape, rate: float) -> dict[str, Any]:
    """Microseconds of a block, and of those with stored weights, with so many tokens."""
    x = torch.randn(shape.tokens, shape.hidden, device="cuda").bfloat16()
    plain = [Capturable(shape, *(block[i].weight for i in (0, 2, 4))) for block in layers["BF16"]]
    count = len(plain)
    used = [block[0](x)[2].unique().numel() for block in layers["BF16"]]
    calls = {"PyTorch": [partial(one, x) for one in plain]}
    for name, blocks in layers.items():
        calls[name] = [partial(run, name, block, x) for block in blocks]
        calls[f"{name} experts"] = []
        for block in blocks:
            _, probs, ids = block[0](x)
            rows, splits, scales, _ = block[1](x, probs, ids)
            experts = fz.Sequential(*block[2:5])
            inputs = rows, splits, scales, splits
            calls[f"{name} experts"].append(partial(run, name, experts, *inputs))
    graphs = {name: graph_of(partial(in_turn, each)) for name, each in calls.items()}
    ms = measure({name: graph.replay for name, graph in graphs.items()})
    first = {name: blocks[0] for name, blocks in layers.items()}
    bytes_of = {n: sum(nbytes(b[i].weight) for i in (2, 4)) for n, b in first.items()}
    share = sum(used) / count / shape.experts
    want = plain[0](x).float()
    off = {n: (run(n, b, x).float() - want).norm() / want.norm() for n, b in first.items()}
    found = {
        "tokens": shape.tokens,
        "layers": count,
        "experts used": sum(used) / count,
        "least": {n: round(b * share / rate, 2) for n, b in bytes_of.items()},
        "difference": {name: round(value.item(), 4) for name, value in off.items()},
        "us": {name: round(1000 * t / count, 2) for name, t in ms.items()},
    }
    if shape.tokens in PROFILED and count == 1:
        found["kernels"] = {name: kernels_of(graphs[name]) for name in layers}
    return found


def main() -> None:
    """Run every cell, print it, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--layers", type=int, default=1, help="blocks in a graph")
    options = parser.parse_args()
    rate = read_rate()
    report: dict[str, Any] = {
        "environment": environment(),
        "bytes per us": round(rate),
        "cells": [],
    }
    print(f"{rate / 1e6:.2f} TB/s. us, share of the least time, relative to BF16")
    for model in options.model:
        torch.manual_seed(0)
        blocks = [fusible_block(MODELS[model]) for _ in range(options.layers)]
        layers = {"BF16": blocks}
        for name, recipe in STORED.items():
            layers[name] = [
                fz.quantize_(copy.deepcopy(block), recipe, usage="inference") for block in blocks
            ]
        layers[UNDER_RECIPE] = layers["FP8 block"]
        for tokens in TOKENS:
            found = cell(layers, MODELS[model]._replace(tokens=tokens), rate)
            report["cells"].append({"model": model, **found})
            us, least = found["us"], found["least"]
            line = f"{model:13s} {tokens:2d} tokens {found['experts used']:3.0f} experts"
            for name in layers:
                share, ratio = least[name] / us[name], us["BF16"] / us[name]
                line += f"  {name} {us[name]:6.1f} {share:.2f} {ratio:.2f}x"
            print(f"{line}  PyTorch {us['PyTorch'] / us['BF16']:.2f}", flush=True)
            write(options.out, report, indent=None)
        del blocks, layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
