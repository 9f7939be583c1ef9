"""Every tile for every product of a grouped MLP on Hopper: what the tile table was made from.

    python benchmarks/sm90_tiles.py [--config NAME ...] [--runs N] [--out FILE]

Compiles the kernels on all cores, compares each tile's results with the table's choice, and times
them interleaved with it and with quack, if installed. Prints, for each cell, how much slower the
table's tile is than the best.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
from grouped_gemm_sm90 import CONFIGS, environment, measure, quack_calls, tensors

from fusible.kernels.grouped import Glu
from fusible.kernels.runtime.launch import load_kernel
from fusible.kernels.sm90 import checked_products as ops
from fusible.kernels.sm90.spec import Spec, Tile, block_columns

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from sm90_in_tile import in_tile

KINDS = {
    "glu_keep": "glu",
    "glu": "glu",
    "fc2": "store",
    "dglu": "dglu",
    "dgrad1": "store",
    "wgrad1": "wgrad",
    "wgrad2": "wgrad",
}
# Rows, columns, ping-pong. Two warpgroups hold at most 256 x 192 values beside an epilogue's own.
_SHAPES = (
    (128, 128, True),
    (128, 160, True),
    (128, 192, True),
    (192, 128, True),
    (128, 256, False),
    (256, 128, False),
    (256, 192, False),
)
# Tiles of dglu, and how many pre-activation blocks they may hold.
_AHEAD = {(128, 128): (3, 4, 5, 6), (128, 192): (2,)}


def tiles_of(kind: str) -> list[Tile]:
    """Every tile worth trying: those that fit, in clusters of two, or of one and four."""
    found = []
    for m, n, pingpong in _SHAPES:
        if (kind == "glu" and n // 2 % 32) or (kind == "dglu" and (m, n) not in _AHEAD):
            continue
        clusters = [(1, 2), (2, 1)] + [(1, 1), (2, 2)] * ((m, n) == (128, 128))
        for cluster_m, cluster_n in clusters:
            for dynamic in (False, True):
                for ahead in _AHEAD[m, n] if kind == "dglu" else (3,):
                    found.append(Tile(m, n, pingpong, cluster_m, cluster_n, dynamic, ahead))
    return found


def label(kind: str, tile: Tile) -> str:
    """What a tile is called in the report."""
    return f"{tile}/{tile.ahead}" if kind == "dglu" else str(tile)


def spec_of(name: str, tile: Tile) -> Spec:
    """The kernel of a product in a tile."""
    kind = KINDS[name]
    major = "n" if name in ("dglu", "dgrad1") else "k"
    if kind not in ("glu", "dglu"):
        return Spec(kind, tile, weight_major=major)
    stripe = tile.n // 2 if kind == "glu" else block_columns(kind, tile, "bfloat16")
    return Spec(
        kind,
        tile,
        weight_major=major,
        scale="float32",
        activation="swiglu",
        stripe=stripe,
        paired=True,
        save_preact=name == "glu_keep",
    )


def calls(t: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Every product as a function of its tile, None for the table's choice."""
    ends, scales = t["ends"], t["scales"]
    w1, w2 = [t["w1"]], [t["w2"]]

    def wgrad(dy: torch.Tensor, x: torch.Tensor, tile: Tile | None) -> torch.Tensor:
        out = x.new_empty(len(ends), dy.shape[1], x.shape[1])
        with in_tile(tile):
            ops.grouped_wgrad_([out], dy, x, ends)
        return out

    def glu(keep: bool, tile: Tile | None) -> Any:
        with in_tile(tile):
            return ops.grouped_glu(t["x"], w1, ends, scales, Glu(), None, keep)

    def mm(x: torch.Tensor, w: list[torch.Tensor], transpose: bool, tile: Tile | None) -> Any:
        with in_tile(tile):
            return ops.grouped_mm(x, w, ends, None, None, transpose)

    def dglu(tile: Tile | None) -> Any:
        with in_tile(tile):
            return ops.grouped_dglu(t["dy"], w2, ends, t["preact"], scales, Glu())

    return {
        "glu_keep": lambda tile: glu(True, tile),
        "glu": lambda tile: glu(False, tile)[1:],
        "fc2": lambda tile: mm(t["act"], w2, False, tile),
        "dglu": dglu,
        "dgrad1": lambda tile: mm(t["d_preact"], w1, True, tile),
        "wgrad1": lambda tile: wgrad(t["d_preact"], t["x"], tile),
        "wgrad2": lambda tile: wgrad(t["dy"], t["act"], tile),
    }


def check(name: str, tile: Tile, got: Any, want: Any) -> None:
    """Raise unless a tile's results are those of the table's choice, but for rounding."""
    pairs = [(got, want)] if isinstance(got, torch.Tensor) else list(zip(got, want, strict=True))
    for one, other in pairs:
        error = ((one.float() - other.float()).norm() / other.float().norm()).item()
        if not error < 4e-3:
            raise RuntimeError(f"{name} in {tile} is off by {error:.1e}")


def compile_one(spec: Spec) -> None:
    """Compile a kernel, or find it on disk."""
    load_kernel("sm90.gemm.GroupedGemm", (spec,), "sm_90a")


def main() -> None:
    """Compile, check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    specs = list(dict.fromkeys(spec_of(n, t) for n, k in KINDS.items() for t in tiles_of(k)))
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        pool.map(compile_one, specs, chunksize=1)
    print(f"{len(specs)} kernels compiled", flush=True)
    cells = []
    for config in options.config:
        for split in ("balanced", "skewed"):
            t = tensors(CONFIGS[config], split)
            quack: dict[str, Any] = {}
            with contextlib.suppress(ImportError):
                quack = quack_calls(t, config, split)
            for name, call in calls(t).items():
                kind, want = KINDS[name], call(None)
                contestants = {"table": lambda call=call: call(None)}
                for tile in tiles_of(kind):
                    check(name, tile, call(tile), want)
                    contestants[label(kind, tile)] = lambda call=call, tile=tile: call(tile)
                if name in quack:
                    contestants["quack"] = quack[name]
                ms = measure(contestants, runs=options.runs)
                cells.append({"config": config, "split": split, "op": name, "ms": ms})
                ranked = sorted((w for w in ms if w not in ("table", "quack")), key=ms.__getitem__)
                best = "  ".join(f"{who} {ms['table'] / ms[who]:.3f}" for who in ranked[:4])
                print(f"{config:14s} {split:9s} {name:9s} {ms['table']:8.4f}  {best}", flush=True)
    if options.out:
        report = {"environment": environment(), "cells": cells}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
