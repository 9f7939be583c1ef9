"""Grouped products of few rows with stored weights: every tile, and dequantizing the weights first.

    python benchmarks/few_rows.py [--model NAME ...] [--out FILE]

Both products of a grouped MLP without gradients, in CUDA graphs that run interleaved, each from a
flushed L2 cache. Printed is the time relative to BF16's of the tile that `few_rows` chooses, that
of the fastest one, and that of dequantizing, which is what happens beyond `max_rows`.
"""

import itertools
from typing import Any
from unittest import mock

import torch
from decoding import MODELS
from measuring import environment, graph_of, measure, parser_of, write
from torch import Tensor

from fusible.kernels import few_rows, grouped
from fusible.kernels.few_rows.spec import FewRowsSpec
from fusible.kernels.glu import Glu
from fusible.recipes.formats import NumberFormat, fp8_block, mxfp8, nvfp4
from fusible.recipes.stored import StoredWeights
from fusible.recipes.tensor import QuantizedTensor

FORMATS = {
    "MXFP8": mxfp8(),
    "FP8 block": fp8_block(block=(128, 128)),
    "NVFP4 1x16": nvfp4(),
    "NVFP4": nvfp4((16, 16)),
}
TOKENS = (1, 4, 16, 64, 256, 1024)
TILES = list(itertools.product((1, 2, 4), (1, 2, 4)))


@torch.no_grad()
def times(
    x: Tensor, weight: Tensor, fmt: NumberFormat, ends: Tensor, scales: Tensor | None
) -> dict[str, float]:
    """Microseconds of a product in each way; with ``scales`` that of an activation."""
    w = StoredWeights.of([QuantizedTensor.quantize(weight, fmt).matrix()])

    def base() -> Any:
        if scales is not None:
            return grouped.grouped_glu(x, [weight], ends, scales, Glu(), None, False)
        return grouped.grouped_mm(x, [weight], ends)

    def call() -> Any:
        if scales is not None:
            return grouped.grouped_glu_stored(x, w, fmt, ends, scales, Glu())
        return grouped.grouped_mm_stored(x, w, fmt, ends)

    rows = x.shape[0]
    graphs = {"BF16": graph_of(base)}
    with mock.patch.object(few_rows, "max_rows", return_value=0):
        graphs["dequantized"] = graph_of(call)
    with mock.patch.object(few_rows, "max_rows", return_value=rows):
        graphs["chosen"] = graph_of(call)
        for tile in TILES:
            if tile[1] > 1 and (rows <= 8 or (tile[1] == 4 and FewRowsSpec(fmt).scales_sums)):
                continue
            with mock.patch.object(few_rows, "_tile", return_value=tile):
                graphs[str(tile)] = graph_of(call)
    ms = measure({n: graph.replay for n, graph in graphs.items()}, runs=10)
    return {n: round(1000 * t, 2) for n, t in ms.items()}


def cell(weights: list[Tensor], tokens: int, top_k: int) -> list[dict[str, Any]]:
    """Both products with so many tokens, a row for each product and format."""
    experts = len(weights[0])
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k, 1).indices.flatten()
    ends = torch.bincount(ids, minlength=experts).cumsum(0).int()
    found = []
    for product, weight in zip(("fc1", "fc2"), weights, strict=True):
        x = torch.randn(len(ids), weight.shape[2], device="cuda").bfloat16()
        scales = torch.rand(len(ids), device="cuda") if product == "fc1" else None
        for name, fmt in FORMATS.items():
            us = times(x, weight, fmt, ends, scales)
            found.append({"tokens": tokens, "product": product, "format": name, "us": us})
    return found


def main() -> None:
    """Run every cell, print it, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(), "cells": []}
    regrets = []
    for model in options.model:
        shape = MODELS[model]
        torch.manual_seed(0)
        sizes = (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)
        weights = [
            torch.randn(shape.experts, *size, device="cuda", dtype=torch.bfloat16) * size[1] ** -0.5
            for size in sizes
        ]
        for tokens in TOKENS:
            rows = cell(weights, tokens, shape.top_k)
            report["cells"] += [{"model": model, **row} for row in rows]
            line = f"{model:13s} {tokens:4d} tokens"
            for row in rows:
                us = row["us"]
                best = min(t for n, t in us.items() if n.startswith("("))
                regrets.append(us["chosen"] / best)
                ratios = [us[n] / us["BF16"] for n in ("chosen", "dequantized")]
                label = f"{row['product']} {row['format']}"
                line += f" | {label} {ratios[0]:.2f} {best / us['BF16']:.2f} {ratios[1]:.2f}"
            print(line, flush=True)
            write(options.out, report, indent=None)
    regrets.sort()
    print(
        f"chosen over best tile: median {regrets[len(regrets) // 2]:.3f}, worst {regrets[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
