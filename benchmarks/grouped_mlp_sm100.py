"""The grouped MLP on a Blackwell GPU: fused, unfused and PyTorch's own, under each recipe.

    python benchmarks/grouped_mlp_sm100.py [--recipe NAME ...] [--config NAME ...] [--out FILE]

Forward, and forward + backward, of FC1 + scaled SwiGLU + FC2 with ragged groups and with groups of
whole 256 rows that the caller promises (which spares the padding). All of a cell run interleaved in
one process, L2 flushed, CUDA events, median. Writes grouped_mlp_sm100.json.
"""

from __future__ import annotations

from typing import Any

import measuring
import torch
from grouped_mlp import activation
from torch import Tensor
from torch.nn import functional

import fusible as fz
from fusible.testing import assume_target

NAMES = ("bf16", "mxfp8", "nvfp4", "nvfp4_as_trained_with")


class Problem:
    """One grouped MLP under one recipe."""

    def __init__(self, config: measuring.Config, split: str, recipe: str, aligned: bool) -> None:
        hidden, inner, experts, rows = config
        self.recipe = measuring.RECIPES.get(recipe)  # None in BF16
        sizes = torch.tensor(measuring.split_sizes(config, split))
        if aligned:
            sizes = (sizes + 255) // 256 * 256
            rows = int(sizes.sum())
        act, alignment = fz.ScaledSwiGLU(glu_interleave_size=32), 256 if aligned else 1
        self.mlp = measuring.grouped_mlp(hidden, inner, experts, act, split_alignment=alignment)
        self.sizes = sizes.cuda()
        self.x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
        self.scales = torch.rand(rows, device="cuda").requires_grad_()
        self.dy = torch.randn_like(self.x)
        self.leaves = (self.x, self.scales, self.mlp[0].weight, self.mlp[2].weight)

    def fused(self) -> Tensor:
        """By the kernels of cuDNN's front end."""
        with measuring.under(self.recipe):
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
            "forward": measuring.measure(dict(ways)),
            "forward + backward": measuring.measure(
                {name: step(way) for name, way in ways.items()}
            ),
        }


def main() -> None:
    """Measure, print and write."""
    parser = measuring.parser_of(__doc__, "grouped_mlp_sm100.json")
    measuring.add_shapes(parser)
    parser.add_argument("--recipe", nargs="*", default=NAMES, choices=NAMES)
    options = parser.parse_args()
    if torch.cuda.get_device_capability()[0] != 10:
        raise SystemExit("this benchmark needs a Blackwell GPU (SM 10.x)")
    cells = []
    for name, config in measuring.shapes_of(options).items():
        for recipe in options.recipe:
            for aligned in (False, True):
                times = Problem(config, "skewed", recipe, aligned).times()
                for what, ms in times.items():
                    cell = {"config": name, "recipe": recipe, "aligned": aligned, "pass": what}
                    cells.append({**cell, "ms": ms})
                    row = "  ".join(f"{way} {t:.4f}" for way, t in ms.items())
                    print(f"{name:14s} {recipe:6s} aligned={aligned!s:5s} {what:19s} {row}")
                torch.cuda.empty_cache()
    measuring.write(options.out, {"environment": measuring.environment(), "cells": cells})


if __name__ == "__main__":
    main()
