"""Llama-4's mixture of experts as one Sequential, against transformers' own layer.

A token goes to one expert, times the sigmoid of its logit; a shared expert sees every token. The
layer runs with its experts in BF16, and stored in MXFP8 and in NVFP4. Prints how far each is from
transformers' layer in FP32, the bytes of a weight, and the plans for Hopper and Blackwell.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

import fusible as fz

FORMATS = {
    "BF16": None,
    "MXFP8": fz.recipes.MXFP8BlockScaling(),
    "NVFP4": fz.recipes.NVFP4BlockScaling(),
}
EXPERTS = 3, 5  # the places of the experts' linears in the block


def block(hidden: int, inner: int, experts: int, top_k: int) -> fz.Sequential:
    """The layer in BF16, from tokens ``[..., hidden]`` to the same.

    Gate and linear columns alternate in blocks of 32, which kernels of both architectures take.
    """
    options = {"bias": False, "dtype": torch.bfloat16}
    grouped = {**options, "single_grouped_weight": True}
    return fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "tokens", output_to_caller=False),
        fz.TopKRouter(
            hidden,
            experts,
            top_k,
            score_function="sigmoid",
            normalize=False,
            dtype=torch.bfloat16,
        ),
        fz.Dispatch(experts, scale_input=True),
        fz.GroupedLinear(experts, hidden, 2 * inner, **grouped),
        fz.SwiGLU(glu_interleave_size=32),
        fz.GroupedLinear(experts, inner, hidden, **grouped),
        fz.Combine(),
        fz.Swap()
        .set_extra_input_channel(0, "tokens")
        .set_extra_output_channel(0, "routed", output_to_caller=False),
        fz.Linear(hidden, 2 * inner, **options),
        fz.SwiGLU(),
        fz.Linear(inner, hidden, **options),
        fz.AddExtraInput().set_extra_input_channel(0, "routed"),
    )


@torch.no_grad()
def load(moe: fz.Sequential, layer: nn.Module) -> None:
    """Copy the weights of transformers' layer."""
    _, router, _, up, act, down, *_, shared_up, _, shared_down, _ = moe
    router.weight.copy_(layer.router.weight)
    up.weight.copy_(
        fz.interleave_glu(layer.experts.gate_up_proj.mT, act.glu_interleave_size, dim=-2)
    )
    down.weight.copy_(layer.experts.down_proj.mT)
    shared = layer.shared_expert
    shared_up.weight.copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
    shared_down.weight.copy_(shared.down_proj.weight)


def reference(hidden: int, inner: int, experts: int, top_k: int) -> nn.Module:
    """Transformers' layer in FP32 with random weights, which BF16 has as well."""
    config = Llama4TextConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
    )
    layer = Llama4TextMoe(config)
    for p in layer.parameters():
        nn.init.normal_(p, std=hidden**-0.5)
        p.data = p.data.bfloat16().float()
    return layer


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Run the layer in each format; gives the relative errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=256, help="features of an expert")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = options.hidden, options.inner, options.experts, options.top_k
    layer = reference(*sizes).to(device)
    x = torch.randn(options.tokens, options.hidden, device=device).bfloat16()
    errors = {}
    with torch.no_grad():
        want, _ = layer(x.float())
    for name, recipe in FORMATS.items():
        moe = block(*sizes).to(device)
        load(moe, layer)
        if recipe is not None:
            for place in EXPERTS:
                fz.quantize_(moe[place], recipe, usage="inference")
        weights = [moe[place].weight for place in EXPERTS]
        with torch.no_grad(), fz.autocast(enabled=recipe is not None, recipe=recipe):
            y = moe(x)
            plans = {target: fz.explain(moe, x, target=target) for target in ("sm90", "sm100")}
        errors[name] = ((y.float() - want).norm() / want.norm()).item()
        held = sum(stored_bytes(w) for w in weights) / sum(w.numel() for w in weights)
        print(f"{name}: {errors[name]:.4f} from transformers, {held:.3f} bytes a weight")
        for target, plan in plans.items():
            print(f"  {target}: {', '.join(plan.fired)}")
    print(plans["sm90"])
    return errors


def stored_bytes(weight: torch.Tensor) -> int:
    """Of a weight, quantized or not."""
    pieces = weight.pieces() if isinstance(weight, fz.QuantizedTensor) else {"": weight}
    return sum(piece.nbytes for piece in pieces.values())


if __name__ == "__main__":
    main()
