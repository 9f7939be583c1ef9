"""Host time of a small grouped MLP, in BF16 and with FP8 products, on Hopper.

    python benchmarks/host_time.py [--turns N] [--out FILE]

Microseconds in which the host issues a forward with its backward, and an inference, as one autograd
node that calls the kernels, and by the ops. All cases take turns; a turn times three calls behind a
synchronisation, after one that is not timed. Prints medians, also relative to BF16's.
"""

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from measuring import RECIPES, environment, grouped_mlp, parser_of, under, write

import fusible as fz

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from sm90_launches import ops_only

GROUPS, HIDDEN, INNER, ROWS = 8, 1024, 512, 1024
CASES: dict[str, dict[str, Any]] = {
    "BF16": {},
    "BF16, one tensor of biases": {"bias": True, "single_grouped_bias": True},
    "BF16, a bias for each expert": {"bias": True},
    "BF16, a weight for each expert": {"single_grouped_weight": False},
    "BF16, main_grad": {"accumulate_into_main_grad": True},
    "FP8 block, weights stored": {"recipe": RECIPES["fp8_block"], "stored": True},
    "FP8 block, quantized in every forward": {"recipe": RECIPES["fp8_block"]},
    "FP8 block, main_grad": {"recipe": RECIPES["fp8_block"], "accumulate_into_main_grad": True},
    "FP8 current, weights stored": {"recipe": RECIPES["fp8_current"], "stored": True},
    "MXFP8 by FP8 products, weights stored": {
        "recipe": RECIPES["mxfp8_fp8"],
        "stored": True,
    },
}


def calls_of(recipe: Any = None, stored: bool = False, **options: Any) -> dict[str, Callable]:
    """A forward with its backward, and an inference."""
    with fz.quantized_model_init(enabled=stored, recipe=recipe):
        mlp = grouped_mlp(HIDDEN, INNER, GROUPS, **options)
    parameters = list(mlp.parameters())
    for parameter in parameters:
        main_grad = torch.zeros(parameter.shape, device="cuda")
        parameter.main_grad = main_grad  # type: ignore[attr-defined]
    x, dy = (torch.randn(ROWS, HIDDEN, device="cuda").bfloat16() for _ in range(2))
    scales = torch.rand(ROWS, device="cuda", requires_grad=True)
    splits = torch.full((GROUPS,), ROWS // GROUPS, device="cuda")
    x.requires_grad_()

    def forward() -> torch.Tensor:
        with under(recipe):
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
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()
    report = measure(options.turns)
    for name, times in report.items():
        columns = [
            f"{what} {us:6.0f} {us / report['BF16'][what.split()[0]]:.2f}x"
            for what, us in times.items()
        ]
        print(f"{name:40s} {'  '.join(columns)}")
    write(options.out, {"environment": environment(), "us": report})


if __name__ == "__main__":
    main()
