"""Experts modules of transformers on CUDA in BF16: fusible against grouped_mm, and peak memory.

Interleaved in one process, L2 flushed before every run, medians of 15; random ids and weights.
"""

from __future__ import annotations

import statistics

import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fusible.integrations import transformers as integration

WAYS = ("fusible", "grouped_mm")
QWEN3 = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
# experts module, configuration, tokens, experts of a token
CASES: list[tuple[type[nn.Module], PretrainedConfig, int, int]] = [
    (Qwen3MoeExperts, Qwen3MoeConfig(**QWEN3), 16384, 8),
    (MixtralExperts, MixtralConfig(), 8192, 2),
    (GptOssExperts, GptOssConfig(num_local_experts=32), 4096, 4),
]


def measure(
    experts: nn.Module, way: str, inputs: tuple[Tensor, ...], flush: Tensor
) -> tuple[float, float]:
    """Milliseconds of the forward, and of forward and backward."""
    experts.config._experts_implementation = way
    flush.zero_()
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    y = experts(*inputs)
    middle.record()
    y.backward(inputs[0].detach())
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(middle), begin.elapsed_time(end)


def compare(experts_class: type[nn.Module], config: PretrainedConfig, tokens: int, k: int) -> str:
    """One row of the table: times, ratios and peak memory above what lies there already."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        experts = experts_class(config).to(torch.bfloat16)
        for p in experts.parameters():
            nn.init.normal_(p, std=0.02)
        x = torch.randn(tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.rand(tokens, experts.num_experts).topk(k).indices
        weights = torch.rand(tokens, k, dtype=torch.bfloat16, requires_grad=True)
        flush = torch.empty(64 << 20, dtype=torch.int32)
    inputs = x, ids, weights
    runs: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in range(17):
        for way in WAYS:
            taken = measure(experts, way, inputs, flush)
            if turn > 1:
                runs[way].append(taken)
    peaks = {}
    for way in WAYS:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        measure(experts, way, inputs, flush)
        peaks[way] = (torch.cuda.max_memory_allocated() - before) / 2**20
    times = {way: [statistics.median(t) for t in zip(*runs[way], strict=True)] for way in WAYS}
    (forward, both), (their_forward, their_both) = (times[way] for way in WAYS)
    return (
        f"{experts_class.__name__}: forward {forward:.2f} ms, {their_forward / forward:.2f}x; "
        f"forward + backward {both:.2f} ms, {their_both / both:.2f}x; "
        f"peak {peaks['fusible'] / peaks['grouped_mm']:.2f}x"
    )


if __name__ == "__main__":
    integration.register()
    for case in CASES:
        print(compare(*case), flush=True)
        torch.cuda.empty_cache()
