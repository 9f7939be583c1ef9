"""References: a ``torch.nn`` module for each op, written from its documented math.

Each has the parameters of the op under the same names, so that whatever is done to a module of the
package (pruning, parametrization, copies, ...) is done to its reference by the same code. They
know nothing of the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .formats import QuantizedGradient, linear

# --- activations ----------------------------------------------------------------------------------


def gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


def qgelu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-1.702 * x))


def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


def srelu(x: Tensor) -> Tensor:
    return relu(x) * relu(x)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


UNARY = {"GELU": gelu, "QGELU": qgelu, "ReLU": relu, "SReLU": srelu, "SiLU": silu}
GATES = {
    "GLU": sigmoid,
    "GEGLU": gelu,
    "QGEGLU": qgelu,
    "ReGLU": relu,
    "SReGLU": srelu,
    "SwiGLU": silu,
}


def halves(x: Tensor, interleave: int | None) -> tuple[Tensor, Tensor]:
    """Gate and linear features, found one by one from their position."""
    features = x.shape[-1]
    block = interleave or features // 2
    gate = [i for i in range(features) if (i // block) % 2 == 0]
    linear = [i for i in range(features) if (i // block) % 2 == 1]
    return x[..., gate], x[..., linear]


def clamped(x: Tensor, interleave=None, limit=7.0, alpha=1.702, offset=1.0) -> Tensor:
    g, up = halves(x, interleave)
    g = torch.where(g > limit, limit, g)
    up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return g * sigmoid(alpha * g) * (up + offset)


def situ(x: Tensor, interleave=None, beta1=4.0, beta2=25.0) -> Tensor:
    g, up = halves(x, interleave)
    return beta1 * torch.tanh(g / beta1) * sigmoid(g) * beta2 * torch.tanh(up / beta2)


def gated(x: Tensor, interleave: int | None = None, *, gate: Callable[[Tensor], Tensor]) -> Tensor:
    g, up = halves(x, interleave)
    return gate(g) * up


GLU_UNITS = {name: partial(gated, gate=gate) for name, gate in GATES.items()}


class Function(nn.Module):
    """An op without parameters: ``function(x, *extra_inputs)``."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(x, *extra)


class Dropout(nn.Module):
    """The draws of ``torch.nn.functional.dropout`` in ``drawn`` dtype."""

    def __init__(self, p: float, drawn: torch.dtype) -> None:
        super().__init__()
        self.p, self.drawn = p, drawn

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x * 1
        kept = F.dropout(torch.ones_like(x, dtype=self.drawn), self.p) != 0
        return torch.where(kept, x / (1 - self.p) if self.p < 1 else x * 0, torch.zeros_like(x))


# --- dense ----------------------------------------------------------------------------------------


class Linear(nn.Module):
    recipe: str | None = None
    before_quantize = False
    """Whether ``Quantize(backward=True)`` follows."""

    def __init__(self, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.register_parameter("bias", nn.Parameter(torch.empty(n_out)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        y = linear(x.to(weight.dtype), weight, self.recipe)
        if bias is not None and self.before_quantize:
            return QuantizedGradient.apply(y, bias, self.recipe)
        return y if bias is None else y + bias


class Bias(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias.to(x.dtype)


class Norm(nn.Module):
    """Layer norm with a bias, root mean square norm without one."""

    def __init__(self, size: int, eps: float, zero_centered: bool, bias: bool) -> None:
        super().__init__()
        self.eps, self.shift, self.centered = eps, float(zero_centered), bias
        self.weight = nn.Parameter(torch.empty(size))
        self.register_parameter("bias", nn.Parameter(torch.empty(size)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias  # each once: parametrizations count
        dtype = weight.dtype
        x = x.to(dtype)
        if self.centered:
            x = x - x.mean(-1, keepdim=True)
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * (self.shift + weight)
        return (y if bias is None else y + bias).to(dtype)


class Affine(nn.Module):
    """Of the fuzzer's own op: ``sin(x) * gain * factor + shift``."""

    factor = 1.0

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(size))
        self.shift = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * (self.gain * self.factor) + self.shift


class Inner(nn.Module):
    """Of the fuzzer's own op with a module inside: ``x + tanh(x @ w.T)``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Noisy(nn.Module):
    """Of the fuzzer's own op that draws: ``x * gain * u``, u uniform."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain * torch.rand(x.shape).to(x.dtype)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


# --- grouped --------------------------------------------------------------------------------------


class GroupedLinear(nn.Module):
    """Group by group; rows past the last group are zero."""

    recipe: str | None = None
    before_quantize = False
    """As of ``Linear``."""

    def __init__(self, groups, n_in, n_out, bias, single_weight, single_bias, scale_bias) -> None:
        super().__init__()
        self.groups, self.scale_bias = groups, scale_bias
        self.has_bias, self.single = bias, {"weight": single_weight, "bias": single_bias}
        self._add("weight", (n_out, n_in))
        if bias:
            self._add("bias", (n_out,))

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        if self.single[name]:
            self.register_parameter(name, nn.Parameter(torch.empty(self.groups, *shape)))
            return
        for g in range(self.groups):
            self.register_parameter(f"{name}{g}", nn.Parameter(torch.empty(shape)))

    def _all(self, name: str) -> list[Tensor]:
        if self.single[name]:
            return list(getattr(self, name).unbind(0))
        return [getattr(self, f"{name}{g}") for g in range(self.groups)]

    def forward(self, x: Tensor, splits: Tensor, scales: Tensor | None = None) -> Tensor:
        weights = self._all("weight")
        biases = self._all("bias") if self.has_bias else []
        rows = x.reshape(-1, x.shape[-1]).to(weights[0].dtype)
        parts, start = [], 0
        for g, size in enumerate(splits.tolist()):
            stop = min(start + max(size, 0), len(rows))
            y = linear(rows[start:stop], weights[g], self.recipe)
            if biases:
                of_rows = biases[g].expand_as(y)
                if self.scale_bias:
                    of_rows = (scales.reshape(-1)[start:stop, None] * of_rows).to(y.dtype)
                if self.before_quantize:
                    y = QuantizedGradient.apply(y, of_rows, self.recipe)
                else:
                    y = y + of_rows
            parts.append(y)
            start = stop
        tail = (rows[start:, :1] * 0).expand(len(rows) - start, weights[0].shape[0])
        y = torch.cat([*parts, torch.zeros_like(tail)])
        return y.reshape(*x.shape[:-1], y.shape[-1])


# --- mixture of experts ---------------------------------------------------------------------------


class TopKRouter(nn.Module):
    """Scores, a choice by sorting, weights; ``margin`` is how far the choice was from another."""

    def __init__(self, hidden: int, options: dict) -> None:
        super().__init__()
        self.options = options
        experts = options["num_experts"]
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(experts)) if options.get("bias") else None
        )
        load = torch.zeros(experts) if options.get("expert_bias") else None
        self.register_buffer("expert_bias", load)
        self.margin = math.inf

    def _apply(self, fn, recurse: bool = True):
        load = self.expert_bias
        super()._apply(fn, recurse)
        if load is not None:
            self.expert_bias = load  # FP32 whatever the module is converted to
        return self

    def _scores(self, logits: Tensor) -> Tensor:
        if self.options["score_function"] == "softmax":
            e = torch.exp(logits - logits.max(-1, keepdim=True).values.detach())
            return e / e.sum(-1, keepdim=True)
        return sigmoid(logits)

    def _choose(self, logits: Tensor) -> Tensor:
        k, groups = self.options["top_k"], self.options.get("num_groups") or 1
        ranked = self._scores(logits).detach()
        if self.expert_bias is not None:
            ranked = ranked + self.expert_bias.to(ranked.dtype)
        if groups > 1:
            by_group = ranked.reshape(*ranked.shape[:-1], groups, -1)
            best = by_group.sort(-1, descending=True).values[..., : self.options["group_top"]]
            worth, order = best.sum(-1).sort(-1, descending=True)
            kept = self.options["top_groups"]
            if kept < groups:
                self._note(worth[..., kept - 1] - worth[..., kept])
            allowed = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, order[..., :kept], True)
            by_group = by_group.masked_fill(~allowed[..., None], -math.inf)
            ranked = by_group.reshape(ranked.shape)
        values, order = ranked.sort(dim=-1, descending=True, stable=True)
        if values.shape[-1] > 1:
            self._note(
                values[..., :k] - values[..., 1 : k + 1]
                if k < values.shape[-1]
                else values[..., : k - 1] - values[..., 1:k]
            )
        return order[..., :k]

    def _note(self, gaps: Tensor) -> None:
        if gaps.numel():
            self.margin = min(self.margin, gaps.min().item())

    def forward(self, x: Tensor):
        self.margin = math.inf
        weight, bias, options = self.weight, self.bias, self.options
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = torch.matmul(x.to(wide), weight.to(wide).t())
        if bias is not None:
            logits = logits + bias.to(wide)
        ids = self._choose(logits)
        scores = self._scores(logits)
        probs = torch.gather(scores, -1, ids)
        if options.get("normalize", True):
            probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
        probs = probs * options.get("scaling_factor", 1.0)
        outputs = [probs, ids]
        experts = logits.shape[-1]
        if options.get("load_balancing_loss"):
            share = F.one_hot(ids.reshape(-1), experts).to(logits.dtype).sum(0)
            share = share / max(ids.numel(), 1)
            s = scores / (scores.sum(-1, keepdim=True) + 1e-20)
            mean = s.reshape(-1, experts).sum(0) / max(s.numel() // experts, 1)
            outputs.append(experts * (share * mean).sum())
        if options.get("z_loss"):
            z = torch.logsumexp(logits, -1).reshape(-1)
            outputs.append((z * z).sum() / max(z.numel(), 1))
        return (x * 1, *outputs)


class Dispatch(nn.Module):
    """A loop over experts, then over the choices in order."""

    def __init__(self, options: dict) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor, probs: Tensor, ids: Tensor):
        experts, factor = self.options["num_experts"], self.options.get("capacity_factor")
        k = ids.shape[-1]
        flat_ids = ids.reshape(-1).tolist()
        choices = len(flat_ids)
        capacity = choices
        total = choices
        if factor is not None:
            capacity = math.ceil(round(factor * choices / experts, 9))
            total = min(choices, experts * capacity)
        place = [-1] * choices
        sizes, order = [], []
        for e in range(experts):
            mine = [c for c in range(choices) if flat_ids[c] == e][:capacity]
            for c in mine:
                place[c] = len(order)
                order.append(c)
            sizes.append(len(mine))
        tokens, weights = x.reshape(-1, x.shape[-1]), probs.reshape(-1)
        source = torch.tensor(order, dtype=torch.long)
        rows, scales = tokens[source // k], weights[source]
        unused = total - len(order)
        if self.options.get("scale_input"):
            rows = rows * scales[:, None].to(rows.dtype)
        rows = torch.cat([rows, rows.new_zeros(unused, rows.shape[-1])])
        scales = torch.cat([scales, scales.new_zeros(unused)])
        splits = torch.tensor(sizes)
        row_map = torch.tensor(place, dtype=torch.int32).reshape(ids.shape)
        if self.options.get("scale_input"):
            return rows, splits, row_map
        return rows, splits, scales, row_map


class Combine(nn.Module):
    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.weighted = weighted

    def forward(self, rows: Tensor, row_map: Tensor, scales: Tensor | None = None) -> Tensor:
        if self.weighted:
            rows = rows * scales[:, None].to(rows.dtype)
        at = row_map.long()
        if not len(rows):
            return rows.new_zeros(*at.shape[:-1], rows.shape[-1]) + rows.sum()
        chosen = torch.where((at >= 0)[..., None], rows[at.clamp(min=0)], 0.0)
        return chosen.sum(-2)


# --- small functions ------------------------------------------------------------------------------


def identity(x: Tensor) -> Tensor:
    return x * 1


def quantize(x: Tensor, *splits: Tensor) -> Tensor:
    """It says where a neighbour's operand is quantized, and changes nothing else.

    The neighbour knows that what it sums for a bias is quantized (``Linear.before_quantize``).
    """
    return x * 1


def times(x: Tensor, factor: float) -> Tensor:
    return x * factor


def reshape(x: Tensor, to: tuple[int, ...]) -> Tensor:
    return x.reshape(to)


def add(x: Tensor, addend: Tensor) -> Tensor:
    return x + addend


def fork(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 1, x * 1


def swap(x: Tensor, incoming: Tensor) -> tuple[Tensor, Tensor]:
    return incoming * 1, x * 1


def scaled(x: Tensor, scales: Tensor, unit: Callable[..., Tensor]) -> Tensor:
    return unit(x) * scales.to(x.dtype)[..., None]
