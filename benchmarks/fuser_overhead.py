"""Host time of a cached Sequential call over the same formulas under plain autograd.

The grouped MLP of three ops at a tiny size on the CPU, medians of interleaved repeats. Prints a
table of microseconds and, with ``--json FILE``, writes it.

The budget is 30 us forward and 60 us forward + backward where the formulas take 120 and 330. A
machine's load and Python change the ratio of both too, so no test holds these times: the function
calls they consist of are counted in ``tests/system/test_overhead.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measuring import Calls, grouped_mlp, host_microseconds, parser_of, write
from torch import Tensor

from fusible import formulas
from fusible.kernels import grouped

GROUPS, HIDDEN, INNER, ROWS = 4, 16, 16, 8
CPU: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}


class GroupedProduct(torch.autograd.Function):
    """``x[rows of e] @ w[e].T`` as one plain autograd node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        """The product."""
        ctx.save_for_backward(x, w, ends)
        return grouped.grouped_mm(x, [w], ends, None, None, False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """Its gradients."""
        x, w, ends = ctx.saved_tensors
        dx = grouped.grouped_mm(dy, [w], ends, None, None, True)
        return dx, grouped.grouped_wgrad(dy, x, ends), None


def plain_mlp(x: Tensor, w1: Tensor, w2: Tensor, splits: Tensor, scales: Tensor) -> Tensor:
    """The three formulas, one after the other, under plain autograd."""
    ends = grouped.group_ends(splits, x.shape[0])
    hidden = formulas.gated(GroupedProduct.apply(x, w1, ends), scales, None, formulas.SILU)
    return GroupedProduct.apply(hidden, w2, ends)


def cases() -> list[Calls]:
    """What is compared, by name; those of one dictionary are measured interleaved."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, requires_grad=True)
    scales = torch.rand(ROWS, requires_grad=True)
    splits = torch.tensor([3, 0, 4, 1])
    mlp = grouped_mlp(HIDDEN, INNER, GROUPS, **CPU)
    w1, w2 = mlp[0].weight, mlp[2].weight
    many = grouped_mlp(HIDDEN, INNER, 128, single_grouped_weight=False, **CPU)
    many_splits = torch.zeros(128, dtype=torch.int64)
    many_splits[5] = ROWS
    dy = torch.ones(ROWS, HIDDEN)

    def with_grad(forward: Callable[[], Tensor], module: torch.nn.Module) -> Callable[[], None]:
        def step() -> None:
            forward().backward(dy)
            x.grad = scales.grad = None
            for p in module.parameters():
                p.grad = None

        return step

    def no_grad(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return torch.no_grad()(forward)

    def plain() -> Tensor:
        return plain_mlp(x, w1, w2, splits, scales)

    def fused() -> Tensor:
        return mlp(x, splits, scales, splits)

    def separate() -> Tensor:
        return many(x, many_splits, scales, many_splits)

    return [
        {"plain, no grad": no_grad(plain), "Sequential, no grad": no_grad(fused)},
        {"plain, forward": plain, "Sequential, forward": fused},
        {
            "plain, forward + backward": with_grad(plain, mlp),
            "Sequential, forward + backward": with_grad(fused, mlp),
        },
        {
            "128 separate weights, forward": separate,
            "128 separate weights, forward + backward": with_grad(separate, many),
        },
    ]


def measure(repeats: int) -> dict[str, float]:
    """Median microseconds, by case."""
    times: dict[str, float] = {}
    for compared in cases():
        times |= host_microseconds(compared, repeats)
    return times


def overhead(times: dict[str, float]) -> dict[str, float]:
    """What a Sequential adds to the plain formulas, in microseconds, by pass."""
    return {
        what: times[f"Sequential, {what}"] - times[f"plain, {what}"]
        for what in ("no grad", "forward", "forward + backward")
    }


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=2000, help="calls of each case")
    options = parser.parse_args()
    times = measure(options.repeats)
    for name, value in times.items():
        print(f"{name:42s} {value:8.1f} us")
    for name, value in overhead(times).items():
        print(f"added by Sequential, {name:21s} {value:8.1f} us")
    write(options.out, {"microseconds": times})


if __name__ == "__main__":
    main()
