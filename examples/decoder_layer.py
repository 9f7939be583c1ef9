"""A transformer decoder layer written in ops, beside the same in plain torch.nn.

Pre-norm, SwiGLU, residual adds inside the runs: what a model built on Transformer Engine's te.ops
looks like. Attention itself is PyTorch's, between two Sequentials.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusible as fz


class DecoderLayer(nn.Module):
    """Attention and MLP, each ``x + f(norm(x))``, for x ``[batch, tokens, hidden]``."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = fz.Sequential(
            fz.MakeExtraOutput(), fz.RMSNorm(hidden), fz.Linear(hidden, 3 * hidden)
        )
        self.after_attention = fz.Sequential(fz.Linear(hidden, hidden), fz.AddExtraInput())
        self.mlp = fz.Sequential(
            fz.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
            fz.RMSNorm(hidden),
            fz.Linear(hidden, 2 * inner, bias=False),
            fz.SwiGLU(),
            fz.Linear(inner, hidden, bias=False),
            fz.AddExtraInput().set_extra_input_channel(0, "residual"),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention, then the MLP."""
        qkv, residual = self.before_attention(x)
        return self.mlp(self.after_attention(attention(qkv, self.heads), residual))


class PlainDecoderLayer(nn.Module):
    """The same in ``torch.nn``."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention, then the MLP."""
        x = x + self.out(attention(self.qkv(self.attention_norm(x)), self.heads))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def attention(qkv: Tensor, heads: int) -> Tensor:
    """Causal attention of ``[batch, tokens, 3 * hidden]``."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def take_weights(layer: DecoderLayer, plain: PlainDecoderLayer) -> None:
    """Load the plain layer's weights."""
    names = {
        "before_attention.1": "attention_norm",
        "before_attention.2": "qkv",
        "after_attention.0": "out",
        "mlp.1": "mlp_norm",
        "mlp.2": "up",
        "mlp.4": "down",
    }
    theirs = plain.state_dict()
    layer.load_state_dict(
        {
            key: theirs[f"{names[module]}.{parameter}"]
            for key in layer.state_dict()
            for module, _, parameter in [key.rpartition(".")]
        }
    )


class Model(nn.Module):
    """A byte-level language model of some decoder layers."""

    def __init__(self, layers: list[nn.Module], hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, hidden)
        self.layers = nn.Sequential(*layers)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte."""
        return self.head(self.norm(self.layers(self.embedding(tokens))))


def pair(count: int = 2, hidden: int = 64, heads: int = 4, inner: int = 128) -> tuple[Model, Model]:
    """A model of ops and one of plain modules, with equal weights."""
    plain = Model([PlainDecoderLayer(hidden, heads, inner) for _ in range(count)], hidden)
    mine = Model([DecoderLayer(hidden, heads, inner) for _ in range(count)], hidden)
    for name in ("embedding", "norm", "head"):
        getattr(mine, name).load_state_dict(getattr(plain, name).state_dict())
    for layer, other in zip(mine.layers, plain.layers, strict=True):
        take_weights(layer, other)  # type: ignore[arg-type]
    return mine, plain


def train(
    model: nn.Module, text: bytes, steps: int, batch: int = 4, length: int = 32
) -> list[float]:
    """Losses of AdamW steps on random pieces of ``text``, the same for every model."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - length, (batch,), generator=generator)
        rows = torch.stack([data[s : s + length + 1] for s in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train both on this file and print the losses side by side."""
    torch.manual_seed(0)
    text = Path(__file__).read_bytes()
    mine, plain = pair()
    x = torch.randn(2, 16, 64, requires_grad=True)
    print(fz.explain(mine.layers[0], x))
    steps = 60
    ops, modules = train(mine, text, steps), train(plain, text, steps)
    for step in (*range(0, steps, 10), steps - 1):
        print(f"step {step:3d}: ops {ops[step]:.4f}, torch.nn {modules[step]:.4f}")


if __name__ == "__main__":
    main()
