"""What a pool of saved rows costs and gains in a captured step of several layers.

    python benchmarks/saved_rows.py [--layers N] [--factor F ...] [--out FILE]

Each layer is a grouped MLP of qwen3-30b's sizes on 65536 rows, in memory for ``factor`` times as
many, as a process of expert parallelism has them. Forward and backward are one CUDA graph, with and
without the pool: milliseconds of a replay, interleaved, and the memory that the graph took.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import torch
from measuring import environment, grouped_mlp, measure, parser_of, write

import fusible as fz

HIDDEN, INNER, EXPERTS, ROWS = 2048, 768, 128, 65536


def make_layers(count: int) -> list[fz.Sequential]:
    """Grouped MLPs; their weights share memory, which is not what is measured."""
    return [grouped_mlp(HIDDEN, INNER, EXPERTS, fz.SwiGLU())] * count


def captured(
    layers: list[fz.Sequential], factor: int, pool: fz.SavedRowsPool | None
) -> tuple[torch.cuda.CUDAGraph, int]:
    """The graph of a step, and the bytes that it took."""
    x = torch.randn(factor * ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    splits = torch.full((EXPERTS,), ROWS // EXPERTS, device="cuda")
    dy, leaves = torch.randn_like(x), [x, *layers[0].parameters()]

    def forward() -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer(y, splits, splits)
        return y

    def step() -> None:
        with nullcontext() if pool is None else pool:
            y = forward()
        torch.autograd.grad(y, leaves, dy)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before, graph = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, torch.cuda.memory_reserved() - before


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--factor", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(), "layers": options.layers, "cells": []}
    for factor in options.factor:
        layers = make_layers(options.layers)
        pool = fz.SavedRowsPool(options.layers * ROWS * (HIDDEN + 2 * INNER) * 2)
        graphs, taken = {}, {}
        for name, of in (("plain", None), ("pool", pool)):
            graphs[name], taken[name] = captured(layers, factor, of)
        ms = measure({name: graph.replay for name, graph in graphs.items()}, runs=10)
        assert not pool.overflowed()
        cell = {"factor": factor, "ms": ms, "bytes": taken, "pool_bytes": pool.peak_bytes()}
        report["cells"].append(cell)
        total = taken["pool"] + pool.peak_bytes()
        print(
            f"memory for {factor} x the rows: {ms['plain']:.2f} ms and "
            f"{taken['plain'] / 2**30:.2f} GiB, with a pool {ms['pool']:.2f} ms "
            f"({ms['pool'] / ms['plain']:.3f}) and {total / 2**30:.2f} GiB "
            f"({total / taken['plain']:.2f})",
            flush=True,
        )
        del graphs, layers, pool
        gc.collect()
        torch.cuda.empty_cache()
    write(options.out, report)


if __name__ == "__main__":
    main()
