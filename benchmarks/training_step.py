"""A training step of the grouped MLP on a GPU: host time and launches, with and without graphs.

    python benchmarks/training_step.py [--out FILE]

Forward, backward and AdamW (capturable). Three ways to issue it: eagerly; with forward and backward
as graphs (``torch.cuda.make_graphed_callables``); all of it as one graph. Host time is that of
issuing a step, the device idle before; device time that of the step, by CUDA events, the L2 cache
flushed before; both medians of interleaved turns. Launches are calls of the CUDA runtime that start
work, as PyTorch's profiler sees them: kernels, copies, fills, graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import measuring
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fusible.testing import assume_target

SHAPES = {"tiny": measuring.TINY, "small": measuring.CONFIGS["small"]}
# Recipe, and the machine whose rules are used if not this one's.
PATHS = {
    "bf16 fused": (None, None),
    "bf16 unfused": (None, "sm80"),
    "mxfp8": (measuring.RECIPES["mxfp8"], None),
    "fp8 block": (measuring.RECIPES["fp8_block"], None),
}


@contextmanager
def path(name: str) -> Iterator[None]:
    """A recipe, and whose rules."""
    recipe, machine = PATHS[name]
    with measuring.under(recipe), assume_target(machine) if machine else nullcontext():
        yield


def inputs(config: measuring.Config) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, split sizes, scales, gradient of the output."""
    x, dy = (
        torch.randn(config.rows, config.hidden, device="cuda", dtype=torch.bfloat16) for _ in "ab"
    )
    scales = torch.rand(config.rows, device="cuda").requires_grad_()
    splits = torch.tensor(measuring.split_sizes(config, "skewed"), device="cuda")
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


def ways(name: str, config: measuring.Config) -> measuring.Calls:
    """The ways to issue a step of one path."""
    given, module = (
        inputs(config),
        measuring.grouped_mlp(config.hidden, config.expert, config.experts),
    )
    x, splits, scales, _ = given
    two_graphs = copy.deepcopy(module)
    with path(name):
        torch.cuda.make_graphed_callables(two_graphs, (x, splits, scales, splits))
    return {
        "eager": training_step(name, copy.deepcopy(module), given),
        "graphed module": training_step(name, two_graphs, given),
        "one graph": measuring.graph_of(training_step(name, module, given)).replay,
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
    report: dict[str, Any] = {"environment": measuring.environment(), "steps": []}
    for shape, config in SHAPES.items():
        for name in PATHS:
            steps = ways(name, config)
            host, device = measuring.host_microseconds(steps), measuring.measure(steps)
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
    options = measuring.parser_of(__doc__, "training_step.json").parse_args()
    measuring.write(options.out, run())


if __name__ == "__main__":
    main()
