"""Host time of a small grouped MLP, in BF16 and by FP8 products, on Hopper.

    python benchmarks/host_time.py [--turns N] [--out FILE]

Microseconds in which the host issues a forward with its backward, and an inference, as one autograd
node that calls the kernels, and by the ops. All cases take turns; a turn times three calls behind a
synchronisation, after one that is not timed. Prints medians, also relative to BF16's.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from grouped_gemm_sm90 import environment

import fusible as fz
from fusible.recipes import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from sm90_launches import ops_only

GROUPS, HIDDEN, INNER, ROWS = 8, 1024, 512, 1024
CASES: dict[str, dict[str, Any]] = {
    "BF16": {},
    "BF16, a bias for each expert": {"bias": True},
    "BF16, a weight for each expert": {"single_grouped_weight": False},
    "BF16, main_grad": {"accumulate_into_main_grad": True},
    "FP8 block, weights stored": {"recipe": Float8BlockScaling(), "stored": True},
    "FP8 block, quantized in every forward": {"recipe": Float8BlockScaling()},
    "FP8 block, main_grad": {"recipe": Float8BlockScaling(), "accumulate_into_main_grad": True},
    "FP8 current, weights stored": {"recipe": Float8CurrentScaling(), "stored": True},
    "MXFP8 by FP8 products, weights stored": {
        "recipe": MXFP8BlockScaling(fp8_products=True),
        "stored": True,
    },
}


def calls_of(recipe: Any = None, stored: bool = False, **options: Any) -> dict[str, Callable]:
    """A forward with its backward, and an inference."""
    options = {"bias": False, "single_grouped_weight": True} | options
    options |= {"dtype": torch.bfloat16, "device": "cuda"}
    with fz.quantized_model_init(enabled=stored, recipe=recipe):
        mlp = fz.Sequential(
            fz.GroupedLinear(GROUPS, HIDDEN, 2 * INNER, **options),
            fz.ScaledSwiGLU(),
            fz.GroupedLinear(GROUPS, INNER, HIDDEN, **options),
        )
    parameters = list(mlp.parameters())
    for parameter in parameters:
        parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
    x, dy = (torch.randn(ROWS, HIDDEN, device="cuda").bfloat16() for _ in range(2))
    scales = torch.rand(ROWS, device="cuda", requires_grad=True)
    splits = torch.full((GROUPS,), ROWS // GROUPS, device="cuda")
    x.requires_grad_()

    def forward() -> torch.Tensor:
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            return mlp(x, splits, scales, splits)

    def step() -> None:
        forward().backward(dy)
        for t in (x, scales, *parameters):
            t.grad = None

    return {"step": step, "inference": torch.no_grad()(forward)}


def measure(turns: int) -> dict[str, dict[str, float]]:
    """Median microseconds by case, then by pass, and "by the ops"."""
    cases = {name: calls_of(**options) for name, options in CASES.items()}
    times: dict[str, dict[str, list[float]]] = {name: {} for name in cases}
    for turn in range(turns + 5):
        for name, calls in cases.items():
            for path, scope in (("", nullcontext), (" by the ops", ops_only)):
                for what, call in calls.items():
                    with scope():
                        call()
                        torch.cuda.synchronize()
                        start = time.perf_counter()
                        for _ in range(3):
                            call()
                        taken = (time.perf_counter() - start) / 3e-6
                    torch.cuda.synchronize()
                    if turn >= 5:
                        times[name].setdefault(what + path, []).append(taken)
    return {
        name: {what: round(statistics.median(of), 1) for what, of in by_what.items()}
        for name, by_what in times.items()
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    report = measure(options.turns)
    for name, times in report.items():
        columns = [
            f"{what} {us:6.0f} {us / report['BF16'][what.split()[0]]:.2f}x"
            for what, us in times.items()
        ]
        print(f"{name:40s} {'  '.join(columns)}")
    if options.out:
        cells = {"environment": environment(), "us": report}
        options.out.write_text(json.dumps(cells, indent=1) + "\n")


if __name__ == "__main__":
    main()
