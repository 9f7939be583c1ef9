"""A training step of the grouped MLP on a GPU: host time and launches, with and without graphs.

    python benchmarks/training_step.py [--out FILE]

Forward, backward and AdamW (capturable). Three ways to issue it: eagerly; with forward and backward
as graphs (``torch.cuda.make_graphed_callables``); all of it as one graph. Host time is that of
issuing a step, the device idle before; device time that of the step, by CUDA events, the L2 cache
flushed before; both medians of interleaved turns. Launches are calls of the CUDA runtime that start
work, as PyTorch's profiler sees them: kernels, copies, fills, graphs.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from grouped_gemm_sm90 import CONFIGS, Config, environment, measure, split_sizes
from grouped_mlp import graphed, host_microseconds
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fusible as fz
from fusible.testing import assume_target

SHAPES = {"tiny": Config(256, 128, 8, 512), "small": CONFIGS["small"]}
# Recipe, and the machine whose rules are used if not this one's.
PATHS = {
    "bf16 fused": (None, None),
    "bf16 unfused": (None, "sm80"),
    "mxfp8": (fz.recipes.MXFP8BlockScaling(), None),
    "fp8 block": (fz.recipes.Float8BlockScaling(), None),
}


@contextmanager
def path(name: str) -> Iterator[None]:
    """A recipe, and whose rules."""
    recipe, machine = PATHS[name]
    with (
        fz.autocast(enabled=recipe is not None, recipe=recipe),
        assume_target(machine) if machine else nullcontext(),
    ):
        yield


def build(config: Config) -> fz.Sequential:
    """The grouped MLP with single weights in BF16."""
    options = {"device": "cuda", "dtype": torch.bfloat16, "bias": False}
    options["single_grouped_weight"] = True
    return fz.Sequential(
        fz.GroupedLinear(config.experts, config.hidden, 2 * config.expert, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(config.experts, config.expert, config.hidden, **options),
    )


def inputs(config: Config) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, split sizes, scales, gradient of the output."""
    x, dy = (
        torch.randn(config.rows, config.hidden, device="cuda", dtype=torch.bfloat16) for _ in "ab"
    )
    scales = torch.rand(config.rows, device="cuda").requires_grad_()
    splits = torch.tensor(split_sizes(config, "skewed"), device="cuda")
    return x.requires_grad_(), splits, scales, dy


def training_step(name: str, module: nn.Module, given: tuple[Tensor, ...]) -> Callable[[], None]:
    """Forward, backward and optimizer of one module."""
    x, splits, scales, dy = given
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, capturable=True, fused=True)

    def step() -> None:
        with path(name):
            module(x, splits, scales, splits).backward(dy)
        optimizer.step()
        optimizer.zero_grad()
        x.grad = scales.grad = None

    return step


def ways(name: str, config: Config) -> dict[str, Callable[[], None]]:
    """The ways to issue a step of one path."""
    given, module = inputs(config), build(config)
    x, splits, scales, _ = given
    two_graphs = copy.deepcopy(module)
    with path(name):
        torch.cuda.make_graphed_callables(two_graphs, (x, splits, scales, splits))
    return {
        "eager": training_step(name, copy.deepcopy(module), given),
        "graphed module": training_step(name, two_graphs, given),
        "one graph": graphed(training_step(name, module, given)),
    }


def launches(step: Callable[[], None]) -> int:
    """How often a step asks the CUDA runtime to start something."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    starts = ("Launch", "Memcpy", "Memset")
    return sum(
        event.count
        for event in profiled.key_averages()
        if event.key.startswith(("cuda", "cu")) and any(word in event.key for word in starts)
    )


def run() -> dict[str, Any]:
    """Measure every shape, path and way."""
    report: dict[str, Any] = {"environment": environment(), "steps": []}
    for shape, config in SHAPES.items():
        for name in PATHS:
            steps = ways(name, config)
            host, device = host_microseconds(steps), measure(steps)
            for way, step in steps.items():
                row = {
                    "shape": shape,
                    "path": name,
                    "way": way,
                    "host_us": host[way],
                    "device_us": 1e3 * device[way],
                    "launches": launches(step),
                }
                report["steps"].append(row)
                print(
                    f"{shape:6s} {name:13s} {way:15s} host {row['host_us']:7.0f} us, "
                    f"device {row['device_us']:7.0f} us, {row['launches']:4d} launches",
                    flush=True,
                )
            del steps
            torch.cuda.empty_cache()
    return report


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/training_step.json"))
    options = parser.parse_args()
    report = run()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
