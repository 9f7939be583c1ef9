"""A DeepSeek-V3 style block as one Sequential: routed experts, a shared expert, no balancing loss.

The router takes sigmoid scores, chooses experts within groups, and keeps the load even by a bias
that moves a little after every step. Trains on a task that needs experts: each token must be
multiplied by the matrix of its kind. Prints the loss, the load and the plan.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

import fusible as fz

HIDDEN, EXPERTS, TOP_K, FEATURES, KINDS = 32, 16, 2, 32, 8
ROUTER, DISPATCH = 1, 2  # their places in the block


def block() -> fz.Sequential:
    """From tokens ``[..., HIDDEN]`` the same, and the rows that each expert got.

    A run of ops is one line, so the second branch starts by a swap: the tokens come back from their
    channel, and what the experts said waits in its own until it is added.
    """
    grouped = {"bias": False, "single_grouped_weight": True}
    dispatch = fz.Dispatch(EXPERTS)
    dispatch.set_extra_output_channel(0, "load")  # to later ops as always, and to the caller
    return fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "tokens", output_to_caller=False),
        fz.TopKRouter(
            HIDDEN,
            EXPERTS,
            TOP_K,
            score_function="sigmoid",
            num_groups=4,
            top_groups=2,
            expert_bias=True,
        ),
        dispatch,
        fz.GroupedLinear(EXPERTS, HIDDEN, 2 * FEATURES, **grouped),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(EXPERTS, FEATURES, HIDDEN, **grouped),
        fz.Combine(),
        fz.Swap()
        .set_extra_input_channel(0, "tokens")
        .set_extra_output_channel(0, "routed", output_to_caller=False),
        fz.Linear(HIDDEN, 2 * FEATURES, bias=False),
        fz.SwiGLU(),
        fz.Linear(FEATURES, HIDDEN, bias=False),
        fz.AddExtraInput().set_extra_input_channel(0, "routed"),
    )


def batch(centres: Tensor, matrices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens around the centre of their kind, and each one's product with its kind's matrix."""
    kind = torch.randint(KINDS, (512,), generator=generator)
    x = centres[kind] + torch.randn(512, HIDDEN, generator=generator)
    return x, torch.einsum("tij,tj->ti", matrices[kind], x)


def main(arguments: list[str] | None = None) -> tuple[list[float], Tensor]:
    """Train; gives the losses and the experts' mean load over the last quarter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    generator = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)
    moe = block()
    centres = 2 * torch.randn(KINDS, HIDDEN, generator=generator)
    matrices = torch.randn(KINDS, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    optimizer = torch.optim.AdamW(moe.parameters(), lr=3e-3, weight_decay=0)
    losses, load = [], torch.zeros(EXPERTS)
    for step in range(options.steps):
        x, target = batch(centres, matrices, generator)
        y, rows = moe(x)
        loss = F.mse_loss(y, target) / target.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        moe[ROUTER].update_expert_bias(rows, rate=2e-2)
        losses.append(loss.item())
        if step >= 3 * options.steps // 4:
            load += rows / rows.sum()
        if step % 50 == 0:
            print(f"step {step}: unexplained variance {losses[-1]:.3f}")
    load /= load.sum()
    print("share of rows per expert: " + " ".join(f"{share:.1%}" for share in load.tolist()))
    print(fz.explain(moe, x.requires_grad_()))
    return losses, load


if __name__ == "__main__":
    main()
