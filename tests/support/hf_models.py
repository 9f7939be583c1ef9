"""Small random models of transformers with experts, and what a training step makes of them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fusible.integrations import transformers as integration

integration.register()

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
FINE = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {  # configuration, and the gate's op
    "mixtral": ("MixtralConfig", {"intermediate_size": 48, "num_local_experts": 4}, "ScaledSwiGLU"),
    "qwen3_moe": ("Qwen3MoeConfig", {**FINE, "num_experts": 6, "head_dim": 8}, "ScaledSwiGLU"),
    "deepseek_v3": ("DeepseekV3Config", {
        **FINE, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1, "intermediate_size": 48,
    }, "ScaledSwiGLU"),
    "gpt_oss": ("GptOssConfig", {
        "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
        "sliding_window": 8,
    }, "ScaledClampedQGeGLU"),
    "glm4_moe": ("Glm4MoeConfig", {
        **FINE, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "intermediate_size": 48, "head_dim": 8,
    }, "ScaledSwiGLU"),
    "nemotron_h": ("NemotronHConfig", {
        **FINE, "n_routed_experts": 4, "layers_block_type": ["attention", "moe"], "head_dim": 8,
        "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
        "intermediate_size": 48, "num_hidden_layers": 2,
    }, "ScaledSReLU"),  # not gated
    "llama4": ("Llama4TextConfig", {
        "intermediate_size": 48, "intermediate_size_mlp": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2, "head_dim": 8, "interleave_moe_layer_step": 1,
    }, "SwiGLU"),  # whose weights multiply the experts' inputs
}  # fmt: skip


def make_model(family: str, **overrides: Any) -> nn.Module:
    torch.manual_seed(0)
    name, options, _ = FAMILIES[family]
    config = getattr(transformers, name)(**{**COMMON, **options, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="fusible")
    with torch.no_grad():  # biases of experts start at zero, weights small
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.normal_(std=0.3)
    return model


def logits_and_grads(model: nn.Module, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    model.set_experts_implementation(implementation)
    return forward_backward(model, model)


def forward_backward(model: nn.Module, call: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    ids = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(1))
    ids = ids.to(model.device)
    out = call(ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), {n: g.clone() for n, g in grads.items()}


def assert_same(got: tuple, expected: tuple) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=1e-4, atol=1e-5, msg=name)


def experts_of(model: nn.Module) -> nn.Module:
    return next(m for m in model.modules() if type(m).__name__.endswith("Experts"))
