"""The grouped MLP through Sequential and autograd, against what else there is on Hopper.

    python benchmarks/grouped_mlp.py [--config NAME ...] [--shape H,I,E,M ...] [--out FILE]

Contestants: fusible fused and unfused; PyTorch's grouped_mm with a compiled activation; quack's
kernels back to back in their best known tiles (no autograd; only for the known shapes); dense
cuBLAS products of the same FLOPs. All of a cell run interleaved in one process, L2 flushed, CUDA
events, median. Writes grouped_mlp.json and a picture beside it.

    python benchmarks/grouped_mlp.py --recipe fp8_block [NAME ...]

instead measures ours in BF16 and under these recipes, with the weights quantized in every forward,
once (``reuse_quantized_weights``), and stored. Writes grouped_mlp_recipes.json and .png.
``--draw FILE`` draws either file again.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import torch
import torch.nn.functional as F
from grouped_gemm_sm90 import quack_calls
from torch import Tensor

import fusible as fz
from fusible.kernels.glu import Glu
from fusible.kernels.grouped.vectors import launch_group_ends
from fusible.kernels.sm90.grouped_products import WeightProducts
from fusible.kernels.sm90.tiles import rows_bucket
from fusible.testing import assume_target


@torch.compile(dynamic=False)
def activation(h: Tensor, prob: Tensor) -> Tensor:
    """``silu(gate) * linear * prob`` as PyTorch's users write it."""
    gate, linear = h.chunk(2, dim=-1)
    return (F.silu(gate.float()) * linear.float() * prob[:, None]).to(h.dtype)


class Problem:
    """One grouped MLP with its operands, and the ways to run it."""

    def __init__(
        self,
        config: measuring.Config,
        split: str,
        act: fz.ops.BasicOperation | None = None,
        alignment: int = 1,
    ) -> None:
        """The rows of each expert are rounded up to ``alignment``."""
        sizes = [-(-n // alignment) * alignment for n in measuring.split_sizes(config, split)]
        hidden, inner, experts, _ = config
        self.split = split
        self.t = measuring.tensors(config._replace(rows=max(config.rows, sum(sizes))), sizes)
        self.sizes = torch.tensor(sizes, device="cuda")
        self.x = self.t["x"].requires_grad_()
        self.prob = self.t["scales"].requires_grad_()
        self.dy = self.t["dy"]
        options = {"split_alignment": alignment}
        self.mlp = measuring.grouped_mlp(hidden, inner, experts, act, **options)
        with torch.no_grad():
            self.mlp[0].weight.copy_(self.t["w1"])
            self.mlp[2].weight.copy_(self.t["w2"])
        self.w1, self.w2 = self.mlp[0].weight, self.mlp[2].weight
        self.leaves = (self.x, self.prob, self.w1, self.w2)

    def fused(self) -> Tensor:
        """Ours."""
        return self.mlp(self.x, self.sizes, self.prob, self.sizes)

    def unfused(self) -> Tensor:
        """Ours as it runs on a GPU that no rule serves."""
        with assume_target("sm80"):
            return self.fused()

    def pytorch(self) -> Tensor:
        """PyTorch's grouped products around a compiled activation."""
        ends = self.sizes.cumsum(0).int()
        h = F.grouped_mm(self.x, self.w1.mT, offs=ends)
        return F.grouped_mm(activation(h, self.prob), self.w2.mT, offs=ends)

    def contestants(self) -> dict[str, Callable[[], Tensor]]:
        """Ways to run the forward under autograd."""
        return {"fused": self.fused, "unfused": self.unfused, "torch": self.pytorch}

    def step(self, forward: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        """Forward and backward; gives the output and every gradient."""
        y = forward()
        return (y, *torch.autograd.grad(y, self.leaves, self.dy))

    def dense(self) -> measuring.Calls:
        """The matrix products alone, with one weight for all rows, by cuBLAS."""
        t, (w1, w2) = self.t, (self.t["w1"][0], self.t["w2"][0])

        def forward() -> None:
            t["x"].detach() @ w1.T
            t["act"] @ w2.T

        def both() -> None:
            forward()
            t["dy"] @ w2, t["d_preact"] @ w1
            t["d_preact"].T @ t["x"].detach(), t["dy"].T @ t["act"]

        return {"forward": forward, "forward + backward": both}

    def quack(self, name: str) -> measuring.Calls:
        """Fused kernels of quack, one after the other."""
        k = quack_calls({key: v.detach() for key, v in self.t.items()}, name, self.split)

        def run(*ops: str) -> Callable[[], None]:
            return lambda: [k[op]() for op in ops]  # type: ignore[func-returns-value]

        backward = ("dglu", "dgrad1", "wgrad1", "wgrad2")
        return {
            "forward": run("glu_keep", "fc2"),
            "inference": run("glu", "fc2"),
            "forward + backward": run("glu_keep", "fc2", *backward),
        }

    def passes(self, name: str | None) -> dict[str, measuring.Calls]:
        """Every pass, with the calls that do it."""
        ways = self.contestants()
        passes: dict[str, measuring.Calls] = {
            "inference": {who: torch.no_grad()(way) for who, way in ways.items()},
            "forward": dict(ways),
            "forward + backward": {who: (lambda w=way: self.step(w)) for who, way in ways.items()},
        }
        peers = {"cublas dense": self.dense()}
        if name in measuring.CONFIGS:
            with contextlib.suppress(ImportError):
                peers["quack"] = self.quack(name)
        for who, calls in peers.items():
            for what, call in calls.items():
                passes[what][who] = call
        return passes


class Idle(torch.autograd.Function):
    """A node that does nothing: what PyTorch's autograd takes by itself."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, *leaves: Tensor) -> Tensor:
        """Saves and returns what is there."""
        ctx.save_for_backward(*leaves)
        return like.view_as(like)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gives the leaves for their gradients."""
        return (None, *ctx.saved_tensors)


def host_phases(problem: Problem) -> dict[str, float]:
    """Microseconds of the parts of forward + backward: autograd alone, and the launches alone."""
    x, prob, w1, w2 = (t.detach() for t in problem.leaves)
    rows, dy, like = x.shape[0], problem.dy, torch.empty_like(problem.dy)

    with torch.no_grad():
        for_rows = rows_bucket(rows, w1.shape[0])
        first, second = [
            WeightProducts(w.device, w.dtype, w.shape, w.stride(), False, for_rows)
            for w in (w1, w2)
        ]
        at1, at2 = w1.data_ptr(), w2.data_ptr()

    def autograd() -> None:
        torch.autograd.grad(Idle.apply(like, *problem.leaves), problem.leaves, dy)

    @torch.no_grad()
    def launches() -> None:
        ends = launch_group_ends(problem.sizes, rows)
        preact, hidden, _ = first.glu(x, at1, ends, prob, Glu())
        second.forward(hidden, at2, ends)
        d_preact, hidden, _ = second.dglu(dy, at2, ends, preact, prob, Glu(), overwrite=True)
        second.wgrad(dy, hidden, ends)
        first.wgrad(d_preact, x, ends)
        first.forward(d_preact, at1, ends, transpose_w=True)

    return measuring.host_microseconds({"autograd": autograd, "launches": launches})


def memory(problem: Problem, forward: Callable[[], Tensor]) -> dict[str, float]:
    """MB saved for the backward beside inputs and weights, and peak MB over forward + backward."""
    saved = measuring.saved_mb(forward, (problem.w1, problem.w2, problem.prob))
    return {"saved_mb": saved, "peak_mb": measuring.peak_mb(partial(problem.step, forward))}


def exact(problem: Problem) -> list[Tensor]:
    """Output and gradients by FP32 math, expert by expert."""
    leaves = [t.detach().float().requires_grad_() for t in problem.leaves]
    x, prob, w1, w2 = leaves
    parts, start = [], 0
    for e, size in enumerate(problem.sizes.tolist()):
        rows = slice(start, start + size)
        gate, linear = (x[rows] @ w1[e].T).chunk(2, -1)
        parts.append((F.silu(gate) * linear * prob[rows, None]) @ w2[e].T)
        start += size
    y = torch.cat(parts)
    return [y.detach(), *torch.autograd.grad(y, leaves, problem.dy.float())]


def errors(problem: Problem) -> dict[str, list[float]]:
    """Relative error of output, dx, dprob, dw1, dw2, by contestant."""
    want = exact(problem)
    ways = problem.contestants()
    return {who: measuring.relative_errors(problem.step(way), want) for who, way in ways.items()}


_SCOPES = contextlib.ExitStack()


def recipe_ways(
    module: fz.Sequential, names: Sequence[str]
) -> dict[str, tuple[fz.Sequential, Any]]:
    """A module and the recipe of a call, in BF16 and under recipes, for each way with weights.

    They are quantized in every forward, once, or stored quantized.
    """
    ways: dict[str, tuple[fz.Sequential, Any]] = {"bf16": (module, None)}
    for name in names:
        recipe, reused = measuring.RECIPES[name], copy.deepcopy(module)
        _SCOPES.enter_context(fz.reuse_quantized_weights(reused))  # for good
        stored = copy.deepcopy(module)
        for fc in [op for op in stored if isinstance(op, fz.GroupedLinear)]:
            with fz.quantized_model_init(recipe=recipe):
                fc.store_weights()
        modules = {"": module, ", weights reused": reused, ", weights stored": stored}
        ways |= {f"{name}{how}": (mlp, recipe) for how, mlp in modules.items()}
    return ways


def recipe_passes(problem: Problem, names: Sequence[str]) -> dict[str, measuring.Calls]:
    """Forward alone and both passes, in BF16 and under recipes."""
    ways = recipe_ways(problem.mlp, names)

    def forward(mlp: fz.Sequential, recipe: Any) -> Tensor:
        with measuring.under(recipe):
            return mlp(problem.x, problem.sizes, problem.prob, problem.sizes)

    def both(mlp: fz.Sequential, recipe: Any) -> tuple[Tensor, ...]:
        leaves = problem.x, problem.prob, *mlp.parameters()
        return torch.autograd.grad(forward(mlp, recipe), leaves, problem.dy)

    for who, way in ways.items():
        forward(*way)
        print(f"{who}: {', '.join(way[0].plan.fired + way[0].plan.kernels)}")
    return {
        "inference": {who: partial(torch.no_grad()(forward), *way) for who, way in ways.items()},
        "forward + backward": {who: partial(both, *way) for who, way in ways.items()},
    }


def run_recipes(shapes: dict[str, measuring.Config], names: Sequence[str]) -> dict[str, Any]:
    """Measure every shape under recipes, with the times relative to BF16."""
    report: dict[str, Any] = {"environment": measuring.environment(), "cells": []}
    for name, split, config in measuring.with_splits(shapes):
        for what, calls in recipe_passes(Problem(config, split), names).items():
            ms = measuring.measure(calls)
            faster = {who: ms["bf16"] / t for who, t in ms.items()}
            report["cells"].append(
                {"config": name, "split": split, "pass": what, "ms": ms, "faster": faster}
            )
            times = "  ".join(f"{who} {t:.4f} ({faster[who]:.2f}x)" for who, t in ms.items())
            print(f"{name:14s} {split:9s} {what:19s} {times}", flush=True)
        del calls
        torch.cuda.empty_cache()
    return report


PASSES, TITLE = ("inference", "forward", "forward + backward"), "Grouped MLP"
PEERS = {"torch": "PyTorch", "quack": "quack"}


def draw(cells: list[dict[str, Any]], path: Path, passes: Sequence[str], what: str) -> None:
    """Time of each peer over ours, per shape; in a CUDA graph where that was measured."""
    plt = measuring.pyplot()
    times = {(c["config"], c["split"], c["pass"]): c["ms"] for c in cells}
    labels = list(dict.fromkeys((config, split) for config, split, _ in times))
    figure, panels = plt.subplots(
        len(PEERS), sharex=True, figsize=(max(11, 0.9 * len(labels)), 7), layout="constrained"
    )
    for axes, (peer, title) in zip(panels, PEERS.items(), strict=True):
        for i, name in enumerate(passes):
            given = [times.get((*la, f"{name}, graph"), times[*la, name]) for la in labels]
            ratios = {
                j + 0.27 * (i - 1): ms[peer] / ms["fused"]
                for j, ms in enumerate(given)
                if peer in ms
            }
            bars = axes.bar(list(ratios), list(ratios.values()), 0.25, label=name)
            within = {"label_type": "center", "color": "white", "fontsize": 8, "rotation": 90}
            axes.bar_label(bars, fmt="%.2f", **within)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylabel(f"time of {title} / ours")
    panels[0].set_ylim(top=1.12 * panels[0].get_ylim()[1])  # room for the legend
    panels[0].legend(ncols=3, fontsize=8, loc="upper right")
    graphed = {(config, split) for config, split, name in times if name.endswith(", graph")}
    lines = [[*config.split(), split] for config, split in labels]
    lines = [
        [*li, "(graph)"] if la in graphed else li for la, li in zip(labels, lines, strict=True)
    ]
    panels[-1].set_xticks(range(len(labels)), map("\n".join, lines), fontsize=8)
    figure.suptitle(f"{what}, BF16, one NVIDIA H200: higher is better")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_recipes(report: dict[str, Any], path: Path) -> None:
    """BF16's time over that under each recipe, per shape, with weights as given and stored."""
    plt = measuring.pyplot()
    times = {(c["config"], c["split"], c["pass"]): c["ms"] for c in report["cells"]}
    labels = list(dict.fromkeys(key[:2] for key in times))
    passes = list(dict.fromkeys(key[2] for key in times))
    names = [name for name in measuring.RECIPES if name in next(iter(times.values()))]
    figure, panels = plt.subplots(
        len(passes), sharex=True, figsize=(max(11, 1.3 * len(labels)), 7), layout="constrained"
    )
    for axes, what in zip(panels, passes, strict=True):
        for i, name in enumerate(names):
            for how, shade in (("", 0.45), (", weights stored", 1.0)):
                place = 2 * i + bool(how) - len(names) + 0.5
                every = [times[*label, what] for label in labels]
                ratios = [
                    ms.get(f"bf16 beside {name}", ms.get("bf16")) / ms[name + how] for ms in every
                ]
                at = [j + 0.9 / len(names) / 2 * place for j in range(len(labels))]
                bars = axes.bar(
                    at, ratios, 0.42 / len(names), label=name + how, color=f"C{i}", alpha=shade
                )
                axes.bar_label(bars, fmt="%.2f", fontsize=7, rotation=90, padding=2)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylabel(f"{what}: time in BF16 / ours")
        axes.set_ylim(top=1.15 * axes.get_ylim()[1])
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, ncols=len(names), fontsize=8, loc="outside lower center")
    panels[-1].set_xticks(range(len(labels)), map("\n".join, labels), fontsize=8)
    figure.suptitle(
        f"{TITLE} under FP8 recipes, one {report['environment']['gpu']}: higher is better"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def measure_cells(
    config: str, split: str, passes: dict[str, measuring.Calls]
) -> list[dict[str, Any]]:
    """Measure and print every pass of a shape, with the best peer's time over ours."""
    cells = []
    for what, calls in passes.items():
        ms = measuring.measure(calls)
        best = min(t for who, t in ms.items() if who in PEERS) / ms["fused"]
        cell = {"config": config, "split": split, "pass": what, "ms": ms, "best_peer": best}
        cells.append(cell)
        times = "  ".join(f"{who} {t:.4f}" for who, t in ms.items())
        print(f"{config:14s} {split:9s} {what:19s} {best:.3f}x  {times}", flush=True)
    return cells


def run(shapes: dict[str, measuring.Config]) -> dict[str, Any]:
    """Measure every shape."""
    report: dict[str, Any] = {"environment": measuring.environment(), "cells": [], "memory": {}}
    for name, split, config in measuring.with_splits(shapes):
        problem = Problem(config, split)
        passes = problem.passes(name)
        if name == "small":
            for what in ("forward", "forward + backward"):
                passes[f"{what}, graph"] = {
                    who: measuring.graph_of(call).replay
                    for who, call in passes[what].items()
                    if who != "unfused"
                }
        report["cells"] += measure_cells(name, split, passes)
        if split == "balanced":
            report["memory"][name] = {
                who: memory(problem, way) for who, way in problem.contestants().items()
            }
        if name in ("qwen3-30b", "small"):
            report.setdefault("errors", {})[f"{name} {split}"] = errors(problem)
        del problem, passes
        torch.cuda.empty_cache()
    tiny = Problem(measuring.TINY, "balanced")
    report["host_us"] = {
        what: measuring.host_microseconds({who: calls[who] for who in tiny.contestants()})
        for what, calls in tiny.passes(None).items()
    }
    report["host_us"]["phases"] = host_phases(tiny)
    return report


def draw_report(report: dict[str, Any], path: Path) -> None:
    """Draw what `run` or `run_recipes` measured."""
    if "memory" in report:
        draw(report["cells"], path, PASSES, TITLE)
    else:
        draw_recipes(report, path)


def main() -> None:
    """Measure, print, write and draw."""
    parser = measuring.parser_of(__doc__)
    measuring.add_shapes(parser)
    parser.add_argument("--recipe", nargs="+", default=[], choices=list(measuring.RECIPES))
    parser.add_argument("--draw", type=Path, help="only draw this file's results beside it")
    options = parser.parse_args()
    if options.draw:
        report = json.loads(options.draw.read_text())
        draw_report(report, options.draw.with_suffix(".png"))
        return
    shapes = measuring.shapes_of(options)
    if options.recipe:
        name, report = "grouped_mlp_recipes.json", run_recipes(shapes, options.recipe)
    else:
        name, report = "grouped_mlp.json", run(shapes)
        for key in ("host_us", "memory", "errors"):
            print(key, json.dumps(report.get(key), indent=1, default=str))
    out = options.out or measuring.RESULTS / name
    measuring.write(out, report)
    draw_report(report, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
