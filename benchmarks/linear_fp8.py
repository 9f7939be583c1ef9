"""A dense linear in BF16, with FP8 products and with dequantized operands, on a Hopper GPU.

Device time of CUDA graphs in one process, in turns, weights quantized in every forward; and of the
forward's product alone, quantized beforehand: ours, PyTorch's and in BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import RECIPES, environment, graph_of, measure, parser_of, under, write

import fusible as fz
from fusible.kernels.dense import cuda
from fusible.kernels.quantize.k_major import quantize_k_major

SHAPES = [  # rows, in, out
    (8192, 4096, 4096),
    (8192, 4096, 14336),
    (8192, 14336, 4096),
    (16384, 2048, 6144),
    (2048, 4096, 4096),
    (8192, 7168, 2048),
    (4096, 8192, 8192),
]
FP8 = RECIPES["fp8_block"]
WAYS = {"bf16": None, "fp8": FP8, "dequantized": RECIPES["fp8_block_decoded"]}
REPLAYS = 4


def calls_of(rows: int, features: int, out: int) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    linear = fz.Linear(features, out, bias=False, **options)
    x = torch.randn(rows, features, **options).requires_grad_()
    dy = torch.randn(rows, out, **options)

    def inference(recipe: Any) -> Any:
        with under(recipe), torch.no_grad():
            return linear(x)

    def step(recipe: Any) -> Any:
        with under(recipe):
            y = linear(x)
        return torch.autograd.grad(y, [x, linear.weight], dy)

    calls = {
        f"{run.__name__} {name}": partial(run, recipe)
        for run in (inference, step)
        for name, recipe in WAYS.items()
    }
    weight, ends = linear.weight.detach(), torch.full((1,), rows, dtype=torch.int32, device="cuda")
    uses = {"rowwise": True, "columnwise": False}
    of_x = quantize_k_major(x.detach(), FP8.format("input"), **uses).row
    of_w = quantize_k_major(weight, FP8.format("weight"), **uses).row
    given = of_x.data, of_w.data, ends, of_x.scale, of_w.scale
    ours, theirs = cuda.scaled_mm_grouped(*given), cuda.scaled_mm_pytorch(*given)
    assert torch.equal(ours, theirs)
    return {
        **calls,
        "product fp8": lambda: cuda.scaled_mm_grouped(*given),
        "product torch": lambda: cuda.scaled_mm_pytorch(*given),
        "product bf16": lambda: torch.nn.functional.linear(x.detach(), weight),
    }


def replay(graph: torch.cuda.CUDAGraph) -> None:
    """Several times, of which the L2 cache is flushed before the first."""
    for _ in range(REPLAYS):
        graph.replay()


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    cases = []
    for rows, features, out in SHAPES:
        calls = calls_of(rows, features, out)
        graphs = {name: partial(replay, graph_of(call)) for name, call in calls.items()}
        ms = {name: t / REPLAYS for name, t in measure(graphs, options.rounds).items()}
        cases.append({"rows": rows, "in": features, "out": out, "ms": ms})
        print(rows, features, out, {name: round(value, 3) for name, value in ms.items()})
    write(options.out, {"environment": environment(), "cases": cases})


if __name__ == "__main__":
    main()
