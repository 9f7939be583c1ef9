"""Train a small transformers model with mixture-of-experts layers, its experts run by fusible.

A random Qwen3-MoE reads Python's own sources byte by byte. The model, its parameters and its
checkpoints are transformers' own; ``--experts eager`` trains the same model without fusible.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from moe_block import byte_entropy, read_text, windows
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

import fusible
from fusible.integrations import transformers as integration

CONTEXT, BATCH = 64, 8


def make_model(experts: str) -> PreTrainedModel:
    """A small random model over bytes."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        output_router_logits=True,  # adds the load-balancing loss
        router_aux_loss_coef=0.01,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, experts_implementation=experts)


@torch.no_grad()
def held_out_bits(model: PreTrainedModel, rows: torch.Tensor) -> float:
    """Bits per byte on ``rows`` ``[batch, context + 1]``."""
    logits = model(rows[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    return loss.item() / math.log(2)


def explain_experts(model: PreTrainedModel, target: str) -> fusible.Explanation:
    """How the layers' experts would run in BF16 training on ``target``."""
    tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.int64, device=model.device)
    with torch.autocast(model.device.type, torch.bfloat16):
        return fusible.explain(model.model, tokens, target=target)


def train(model: PreTrainedModel, steps: int) -> tuple[float, float]:
    """Held-out bits per byte before and after ``steps`` steps of AdamW."""
    training, held_out = read_text()
    random = torch.Generator().manual_seed(0)
    starts = torch.linspace(0, len(held_out) - CONTEXT - 1, 4 * BATCH).long()
    test = windows(held_out, starts, CONTEXT, model.device)
    print(f"entropy of single bytes: {byte_entropy(held_out):.3f} bits")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before, start = held_out_bits(model, test), time.perf_counter()
    for step in range(1, steps + 1):
        places = torch.randint(len(training) - CONTEXT, (BATCH,), generator=random)
        rows = windows(training, places, CONTEXT, model.device)
        loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 5) == 0:
            speed = step * BATCH * CONTEXT / (time.perf_counter() - start)
            print(
                f"step {step:4d}: held-out {held_out_bits(model, test):.3f} bits per byte, "
                f"{speed:,.0f} tokens/s"
            )
    return before, held_out_bits(model, test)


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Train, and say how the experts ran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", default="fusible", help="experts_implementation of the model")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    integration.register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(options.experts).to(device)
    losses = train(model, options.steps)
    if options.experts == "fusible":
        print(explain_experts(model, "sm90"))
    return losses


if __name__ == "__main__":
    main()
