"""Every tile for the FP8 products of a grouped MLP on Hopper: what their tile table is made from.

    python benchmarks/sm90_fp8_tiles.py [--config NAME ...] [--runs N] [--out FILE]

Compiles the kernels on all cores, compares each tile's results with the table's choice bit for bit,
and times them interleaved with it and with the BF16 product. Operands are quantized beforehand.
Prints, for each cell, the table's time over those of the best tiles, and BF16's over the table's.
"""

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
from grouped_gemm_sm90 import CONFIGS, environment, fusible_calls, measure, tensors
from sm90_grid import compile_spec

from fusible.kernels.grouped import Glu
from fusible.kernels.quantize.k_major import quantize_k_major
from fusible.kernels.sm90 import checked_products as ops
from fusible.kernels.sm90.spec import Spec, Tile
from fusible.recipes.formats import fp8_block

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from sm90_in_tile import in_tile

KINDS = {
    "glu_keep": "glu",
    "glu": "glu",
    "fc2": "store",
    "dgrad2": "store",
    "dgrad1": "store",
    "wgrad1": "wgrad",
    "wgrad2": "wgrad",
}
BF16 = {"dgrad2": "fc1"}  # a product of the same shape, where BF16 fuses the activation's backward
_COOPERATING = ((256, 128), (128, 192), (128, 256))


def tiles_of(kind: str) -> list[Tile]:
    """Every tile worth trying."""
    clusters = (1, 2), (2, 1), (1, 1)
    found = [
        Tile(128, 128, True, *cluster, dynamic=dynamic)
        for cluster in clusters
        for dynamic in (False, True)
    ]
    found += [Tile(m, n, False, *cluster, dynamic=True) for m, n in _COOPERATING
              for cluster in clusters[:2]]  # fmt: skip
    if kind == "wgrad":
        found += [Tile(128, 128, False, *cluster, dynamic=True)
                  for cluster in clusters[:2]]  # fmt: skip
    return found


def spec_of(name: str, tile: Tile) -> Spec:
    """The kernel of a product in a tile."""
    kind = KINDS[name]
    fp8 = "float8_e4m3fn"
    spec = Spec(kind, tile, dtype=fp8, b_dtype=fp8, scaling="blocks")
    if kind == "wgrad":
        return spec._replace(scaling="rows")
    if kind == "store":
        return spec
    halves = {"activation": "swiglu", "stripe": tile.n // 2, "paired": True}
    return spec._replace(scale="float32", save_preact=name == "glu_keep", **halves)


def calls(t: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Every product as a function of its tile, None for the table's choice."""
    ends, scales, square = t["ends"], t["scales"], fp8_block(block=(128, 128))
    names = ("x", "act", "d_preact", "dy")
    both = {"rowwise": True, "columnwise": True}
    rows = {name: quantize_k_major(t[name], fp8_block(), **both, ends=ends) for name in names}
    weights = {name: quantize_k_major(t[name], square, **both) for name in ("w1", "w2")}
    padded = rows["x"].column.ends

    def mm(x: str, w: str, transposed: bool, tile: Tile | None) -> Any:
        a, b = rows[x].row, weights[w].column if transposed else weights[w].row
        with in_tile(tile):
            return ops.grouped_mm(a.data, [b.data], ends, x_scale=a.scale, w_scale=b.scale)

    def glu(keep: bool, tile: Tile | None) -> Any:
        a, b = rows["x"].row, weights["w1"].row
        with in_tile(tile):
            return ops.grouped_glu(
                a.data, [b.data], ends, scales, Glu(), None, keep, a.scale, b.scale
            )

    def wgrad(dy: str, x: str, tile: Tile | None) -> Any:
        a, b = rows[dy].column, rows[x].column
        with in_tile(tile):
            return ops.grouped_wgrad(a.data, b.data, padded, None, a.scale, b.scale)

    return {
        "glu_keep": lambda tile: glu(True, tile),
        "glu": lambda tile: glu(False, tile)[1:],
        "fc2": lambda tile: mm("act", "w2", False, tile),
        "dgrad2": lambda tile: mm("dy", "w2", True, tile),
        "dgrad1": lambda tile: mm("d_preact", "w1", True, tile),
        "wgrad1": lambda tile: wgrad("d_preact", "x", tile),
        "wgrad2": lambda tile: wgrad("dy", "act", tile),
    }


def same(got: Any, want: Any) -> bool:
    """Whether results are equal in every bit."""
    if isinstance(got, torch.Tensor):
        return torch.equal(got, want)
    return all(same(*pair) for pair in zip(got, want, strict=True))


def main() -> None:
    """Compile, check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="*", default=list(CONFIGS)[:3], choices=list(CONFIGS))
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    specs = list(dict.fromkeys(spec_of(n, t) for n, k in KINDS.items() for t in tiles_of(k)))
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        pool.map(compile_spec, specs, chunksize=1)
    print(f"{len(specs)} kernels compiled", flush=True)
    report: dict[str, Any] = {"environment": environment(), "cells": []}
    for config in options.config:
        for split in ("balanced", "skewed"):
            t = tensors(CONFIGS[config], split)
            bf16 = fusible_calls(t)
            for name, call in calls(t).items():
                want, contestants = call(None), {"table": lambda call=call: call(None)}
                for tile in tiles_of(KINDS[name]):
                    if not same(call(tile), want):
                        print(f"WRONG {config} {split} {name} in {tile}", flush=True)
                        continue
                    contestants[str(tile)] = lambda call=call, tile=tile: call(tile)
                contestants["bf16"] = bf16[BF16.get(name, name)]
                ms = measure(contestants, runs=options.runs)
                report["cells"].append({"config": config, "split": split, "op": name, "ms": ms})
                ranked = sorted((w for w in ms if w not in ("table", "bf16")), key=ms.__getitem__)
                best = "  ".join(f"{who} {ms['table'] / ms[who]:.3f}" for who in ranked[:4])
                print(
                    f"{config:14s} {split:9s} {name:9s} {ms['table']:8.4f} "
                    f"bf16 {ms['bf16'] / ms['table']:.2f}x  {best}",
                    flush=True,
                )
                if options.out:
                    options.out.write_text(json.dumps(report, indent=1) + "\n")
            del bf16, call, contestants, t, want
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
