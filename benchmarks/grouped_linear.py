"""One GroupedLinear through autograd on Hopper: forward, data gradient, weight gradient.

    python benchmarks/grouped_linear.py [--config NAME ...] [--shape H,I,E,M ...] [--out FILE]

Both linears of each grouped MLP (FC1: H to 2I, FC2: I to H). Contestants: fusible fused and
unfused; PyTorch's grouped_mm; quack's kernel in its best known tile (no autograd; only for the
known shapes); a dense cuBLAS product of the same FLOPs. All of a cell run interleaved in one
process, L2 flushed, CUDA events, median. Writes the results and a picture
beside them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import measuring
import torch
import torch.nn.functional as F
from grouped_gemm_sm90 import quack_calls
from grouped_mlp import draw, measure_cells
from torch import Tensor

import fusible as fz
from fusible.testing import assume_target

PASSES = ("forward", "dgrad", "wgrad")
TITLE = "Grouped linear"
# Input, weight, output gradient; what quack's products of the passes are called.
LINEARS = {
    "fc1": (("x", "w1", "d_preact"), ("fc1", "dgrad1", "wgrad1")),
    "fc2": (("act", "w2", "dy"), ("fc2", None, "wgrad2")),
}


class Problem:
    """One linear of a grouped MLP with its operands, and the ways to run it."""

    def __init__(self, config: measuring.Config, split: str, which: str) -> None:
        sizes, (names, _) = measuring.split_sizes(config, split), LINEARS[which]
        self.which, self.tensors = which, measuring.tensors(config, sizes)
        self.x, weight, self.dy = (self.tensors[name] for name in names)
        self.sizes = torch.tensor(sizes, device="cuda")
        groups, out_features, in_features = weight.shape
        self.linear = fz.GroupedLinear(
            groups,
            in_features,
            out_features,
            bias=False,
            device="cuda",
            dtype=torch.bfloat16,
            single_grouped_weight=True,
        )
        with torch.no_grad():
            self.linear.weight.copy_(weight)
        self.weight = self.linear.weight

    def ours(self, x: Tensor) -> Tensor:
        """By the rule of this machine."""
        return self.linear(x, self.sizes)

    def pytorch(self, x: Tensor) -> Tensor:
        """PyTorch's grouped product."""
        return F.grouped_mm(x, self.weight.mT, offs=self.sizes.cumsum(0).int())

    def ways(self, way: Callable[[Tensor], Tensor]) -> measuring.Calls:
        """Every pass of one way; the backwards are for one of the two operands."""
        x = self.x.detach().requires_grad_()
        self.weight.requires_grad_(False)
        of_x = way(x)
        self.weight.requires_grad_()
        of_weight = way(self.x)

        def gradient(y: Tensor, leaf: Tensor) -> Callable[[], Any]:
            return lambda: torch.autograd.grad(y, leaf, self.dy, retain_graph=True)

        return {
            "forward": lambda: way(self.x),
            "dgrad": gradient(of_x, x),
            "wgrad": gradient(of_weight, self.weight),
        }

    def unfused(self) -> measuring.Calls:
        """Ours as it runs on a GPU that no rule serves."""

        def within(call: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                with assume_target("sm80"):
                    return call()

            return run

        with assume_target("sm80"):
            return {what: within(call) for what, call in self.ways(self.ours).items()}

    def dense(self) -> measuring.Calls:
        """The same FLOPs with one weight for all rows, by cuBLAS."""
        x, dy, w = self.x.detach(), self.dy, self.weight.detach()[0]
        return {"forward": lambda: x @ w.T, "dgrad": lambda: dy @ w, "wgrad": lambda: dy.T @ x}

    def quack(self, name: str, split: str) -> measuring.Calls:
        """Quack's kernels."""
        calls = quack_calls(self.tensors, name, split)
        _, ops = LINEARS[self.which]
        return {what: calls[op] for what, op in zip(PASSES, ops, strict=True) if op}

    def passes(self, name: str | None, split: str) -> dict[str, measuring.Calls]:
        """Every pass, with the calls that do it."""
        ways = {
            "fused": self.ways(self.ours),
            "unfused": self.unfused(),
            "torch": self.ways(self.pytorch),
            "cublas dense": self.dense(),
        }
        if name in measuring.CONFIGS:
            with contextlib.suppress(ImportError):
                ways["quack"] = self.quack(name, split)
        return {
            what: {who: calls[what] for who, calls in ways.items() if what in calls}
            for what in PASSES
        }


def run(shapes: dict[str, measuring.Config]) -> dict[str, Any]:
    """Measure every shape."""
    report: dict[str, Any] = {"environment": measuring.environment(), "cells": []}
    for name, split, config in measuring.with_splits(shapes):
        for which in LINEARS:
            passes = Problem(config, split, which).passes(name, split)
            report["cells"] += measure_cells(f"{name} {which}", split, passes)
            del passes
            torch.cuda.empty_cache()
    tiny = Problem(measuring.TINY, "balanced", "fc1")
    report["host_us"] = {
        what: measuring.host_microseconds(
            {who: calls[who] for who in ("fused", "unfused", "torch")}
        )
        for what, calls in tiny.passes(None, "balanced").items()
    }
    return report


def main() -> None:
    """Measure, print, write and draw."""
    parser = measuring.parser_of(__doc__, "grouped_linear.json")
    measuring.add_shapes(parser)
    parser.add_argument("--redraw", action="store_true", help="only draw what was measured")
    options = parser.parse_args()
    if options.redraw:
        report = json.loads(options.out.read_text())
    else:
        report = run(measuring.shapes_of(options))
        print("host_us", json.dumps(report["host_us"], indent=1))
        measuring.write(options.out, report)
    draw(report["cells"], options.out.with_suffix(".png"), PASSES, TITLE)


if __name__ == "__main__":
    main()
