"""The grouped MLP on a Blackwell GPU: fused, unfused and PyTorch's own, under each recipe.

    python benchmarks/grouped_mlp_sm100.py [--recipe NAME ...] [--config NAME ...] [--out DIR]

Forward, and forward + backward, of FC1 + scaled SwiGLU + FC2 with ragged groups and with groups of
whole 256 rows that the caller promises (which spares the padding). All of a cell run interleaved in
one process, L2 flushed, CUDA events, median. Writes grouped_mlp_sm100.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from grouped_gemm_sm90 import CONFIGS, Config, environment, measure, split_sizes
from grouped_mlp import activation
from torch import Tensor
from torch.nn import functional

import fusible as fz
from fusible import recipes
from fusible.testing import assume_target

RECIPES = {
    "bf16": None,
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "nvfp4_as_trained_with": recipes.NVFP4BlockScaling(),
}


class Problem:
    """One grouped MLP under one recipe."""

    def __init__(self, config: Config, split: str, recipe: str, aligned: bool) -> None:
        hidden, inner, experts, rows = config
        self.recipe = RECIPES[recipe]
        sizes = torch.tensor(split_sizes(config, split))
        if aligned:
            sizes = (sizes + 255) // 256 * 256
            rows = int(sizes.sum())
        options = {"bias": False, "dtype": torch.bfloat16, "single_grouped_weight": True}
        self.mlp = fz.Sequential(
            fz.GroupedLinear(
                experts, hidden, 2 * inner, **options, split_alignment=256 if aligned else 1
            ),
            fz.ScaledSwiGLU(glu_interleave_size=32),
            fz.GroupedLinear(experts, inner, hidden, **options),
        ).cuda()
        self.sizes = sizes.cuda()
        self.x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
        self.scales = torch.rand(rows, device="cuda").requires_grad_()
        self.dy = torch.randn_like(self.x)
        self.leaves = (self.x, self.scales, self.mlp[0].weight, self.mlp[2].weight)

    def fused(self) -> Tensor:
        """By the kernels of cuDNN's front end."""
        with fz.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.mlp(self.x, self.sizes, self.scales, self.sizes)

    def unfused(self) -> Tensor:
        """Op by op, as on a GPU that no rule serves."""
        with assume_target("sm80"):
            return self.fused()

    def pytorch(self) -> Tensor:
        """BF16, by PyTorch's grouped products (its GLU in halves, which takes the same time)."""
        _, _, w1, w2 = self.leaves
        ends = self.sizes.cumsum(0).int()
        h = functional.grouped_mm(self.x, w1.mT, offs=ends)
        return functional.grouped_mm(activation(h, self.scales), w2.mT, offs=ends)

    def times(self) -> dict[str, dict[str, float]]:
        """Milliseconds by pass and way."""
        ways = {"fused": self.fused, "unfused": self.unfused, "torch bf16": self.pytorch}
        self.fused()
        assert "grouped_mlp_sm100" in self.mlp.plan.fired, self.mlp.plan.refusals

        def step(way: Any) -> Any:
            return lambda: torch.autograd.grad(way(), self.leaves, self.dy)

        return {
            "forward": measure(dict(ways)),
            "forward + backward": measure({name: step(way) for name, way in ways.items()}),
        }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--config", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    if torch.cuda.get_device_capability()[0] != 10:
        raise SystemExit("this benchmark needs a Blackwell GPU (SM 10.x)")
    cells = []
    for name in options.config:
        for recipe in options.recipe:
            for aligned in (False, True):
                times = Problem(CONFIGS[name], "skewed", recipe, aligned).times()
                for what, ms in times.items():
                    cell = {"config": name, "recipe": recipe, "aligned": aligned, "pass": what}
                    cells.append({**cell, "ms": ms})
                    row = "  ".join(f"{way} {t:.4f}" for way, t in ms.items())
                    print(f"{name:14s} {recipe:6s} aligned={aligned!s:5s} {what:19s} {row}")
                torch.cuda.empty_cache()
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment(), "cells": cells}
    (options.out / "grouped_mlp_sm100.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
