"""The grouped MLP on a Blackwell GPU: fused, unfused and PyTorch's own, under each recipe.

    python benchmarks/grouped_mlp_sm100.py [--recipe NAME ...] [--config NAME ...] [--out FILE]

Forward, and forward + backward, of FC1 + scaled SwiGLU + FC2 with ragged groups and with groups of
whole 256 rows that the caller promises (which spares the padding). All of a cell run interleaved in
one process, L2 flushed, CUDA events, median. Writes grouped_mlp_sm100.json.
"""

from __future__ import annotations

from functools import partial

import measuring
import torch
from grouped_mlp import Problem
from torch import Tensor

import fusible as fz

NAMES = ("bf16", "mxfp8", "nvfp4", "nvfp4_as_trained_with")


class RecipeProblem(Problem):
    """One grouped MLP under one recipe; PyTorch's is in BF16, with its GLU in halves."""

    def __init__(self, config: measuring.Config, recipe: str, aligned: bool) -> None:
        act = fz.ScaledSwiGLU(glu_interleave_size=32)
        super().__init__(config, "skewed", act, 256 if aligned else 1)
        self.recipe = measuring.RECIPES.get(recipe)  # None in BF16

    def fused(self) -> Tensor:
        """By the kernels of cuDNN's front end."""
        with measuring.under(self.recipe):
            return super().fused()

    def times(self) -> dict[str, dict[str, float]]:
        """Milliseconds by pass and way."""
        ways = self.contestants()
        self.fused()
        assert "grouped_mlp_sm100" in self.mlp.plan.fired, self.mlp.plan.refusals
        steps = {name: partial(self.step, way) for name, way in ways.items()}
        return {"forward": measuring.measure(ways), "forward + backward": measuring.measure(steps)}


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
                times = RecipeProblem(config, recipe, aligned).times()
                for what, ms in times.items():
                    cell = {"config": name, "recipe": recipe, "aligned": aligned, "pass": what}
                    cells.append({**cell, "ms": ms})
                    row = "  ".join(f"{way} {t:.4f}" for way, t in ms.items())
                    print(f"{name:14s} {recipe:6s} aligned={aligned!s:5s} {what:19s} {row}")
                torch.cuda.empty_cache()
    measuring.write(options.out, {"environment": measuring.environment(), "cells": cells})


if __name__ == "__main__":
    main()
