"""Experts modules of transformers on a GPU in BF16: fusible against every other implementation.

    python benchmarks/transformers_experts.py [--out FILE] [CASE ...]

Forward without gradients, forward and backward (gradients are freed before, not added up), and peak
memory of the latter beside parameters and inputs. Interleaved in one process, L2 flushed before
every run, device time by CUDA events, medians; random ids and weights. ``batched_mm`` copies the
weight of every row, and runs where tokens are few.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from measuring import environment, measure, parser_of, peak_mb, write
from torch import Tensor, nn

from fusible.integrations import transformers as integration

WAYS = ("fusible", "grouped_mm", "batched_mm", "eager")
ROWS_OF_BATCHED_MM = 512


class Case(NamedTuple):
    """The experts of a published model at its full width, and what one layer of them is given."""

    model: str  # transformers' name of its folder, and of its configuration
    config: str
    sizes: dict[str, int]  # where they differ from the configuration's defaults
    tokens: int
    top_k: int


QWEN3 = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
CASES = {
    "qwen3-30b": Case("qwen3_moe", "Qwen3MoeConfig", QWEN3, 16384, 8),
    "mixtral-8x7b": Case("mixtral", "MixtralConfig", {}, 8192, 2),
    "gpt-oss-20b": Case("gpt_oss", "GptOssConfig", {"num_local_experts": 32}, 4096, 4),
    "gpt-oss-120b": Case("gpt_oss", "GptOssConfig", {"num_local_experts": 128}, 16384, 4),
    # The experts of one rank of four.
    "deepseek-v3": Case("deepseek_v3", "DeepseekV3Config", {"n_routed_experts": 64}, 4096, 8),
    "gpt-oss-20b, decoding": Case("gpt_oss", "GptOssConfig", {"num_local_experts": 32}, 32, 4),
    "qwen3-30b, decoding": Case("qwen3_moe", "Qwen3MoeConfig", QWEN3, 32, 8),
}


def build(case: Case) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]:
    """The experts module with random weights, and its inputs."""
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**case.sizes)
    folder = importlib.import_module(f"transformers.models.{case.model}.modeling_{case.model}")
    experts_class = next(
        value
        for name, value in vars(folder).items()
        if name.endswith(("Experts", "NaiveMoe")) and value.__module__ == folder.__name__
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            experts = experts_class(config)
            for p in experts.parameters():
                nn.init.normal_(p, std=0.02)
            x = torch.randn(case.tokens, config.hidden_size, requires_grad=True)
            ids = torch.rand(case.tokens, experts.num_experts, dtype=torch.float32)
            weights = torch.rand(case.tokens, case.top_k, requires_grad=True)
    finally:
        torch.set_default_dtype(default)
    return experts, (x, ids.topk(case.top_k).indices, weights)


def passes(
    experts: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], way: str
) -> dict[str, Callable[[], Any]]:
    """What is measured of one implementation."""
    x, _, weights = inputs
    dy = torch.randn_like(x)

    def call() -> Tensor:
        experts.config._experts_implementation = way
        return experts(*inputs)

    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    def both() -> None:
        experts.zero_grad(set_to_none=True)
        x.grad = weights.grad = None
        call().backward(dy)

    return {"forward": forward, "forward + backward": both}


def compare(case: Case) -> dict[str, Any]:
    """Milliseconds and peak memory of every implementation."""
    experts, inputs = build(case)
    few = case.tokens * case.top_k <= ROWS_OF_BATCHED_MM
    ways = {way: passes(experts, inputs, way) for way in WAYS if way != "batched_mm" or few}
    leaves = [inputs[0], inputs[2], *experts.parameters()]
    result: dict[str, Any] = {**case._asdict(), "ms": {}}
    for name in ("forward", "forward + backward"):
        result["ms"][name] = measure({way: made[name] for way, made in ways.items()}, runs=10)
    result["peak_mb"] = {
        way: peak_mb(made["forward + backward"], leaves) for way, made in ways.items()
    }
    result["rules"] = experts._fusible_block.mlp.plan.fired
    return result


def lines(name: str, result: dict[str, Any]) -> list[str]:
    """The table of a case: milliseconds, their ratio to ours, peak memory."""
    rows = [f"{name}: {result['tokens']} tokens, top {result['top_k']}, {result['rules']}"]
    for way, peak in result["peak_mb"].items():
        cells = []
        for of_way in result["ms"].values():
            cells.append(f"{of_way[way]:8.2f} ms {of_way[way] / of_way['fusible']:6.2f}x")
        ratio = result["peak_mb"]["fusible"] / peak
        rows.append(f"  {way:11s}{' | '.join(cells)} | {peak:7.0f} MB, ours {ratio:.2f} of it")
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__, "transformers_experts.json")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    options = parser.parse_args()
    integration.register()
    report: dict[str, Any] = {"environment": environment(), "cases": {}}
    for name in options.cases or CASES:
        report["cases"][name] = compare(CASES[name])
        print("\n".join(lines(name, report["cases"][name])), flush=True)
        torch.cuda.empty_cache()
        write(options.out, report)


if __name__ == "__main__":
    main()
