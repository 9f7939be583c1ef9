"""What the programs here share: shapes, operands, modules, times, memory, and written results."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fusible as fz

RESULTS = Path(__file__).parent / "results"
Calls = dict[Any, Callable[[], Any]]


class Config(NamedTuple):
    """A mixture-of-experts layer: hidden size, expert size, experts, routed rows."""

    hidden: int
    expert: int
    experts: int
    rows: int


CONFIGS = {
    "qwen3-30b": Config(2048, 768, 128, 131072),
    "mixtral-8x7b": Config(4096, 14336, 8, 16384),
    "dsv3-ep32": Config(7168, 2048, 32, 32768),
    "small": Config(1024, 512, 64, 8192),
}
TINY = Config(256, 128, 8, 512)
SPLITS = ("balanced", "skewed")
RECIPES = {
    "fp8_block": fz.recipes.Float8BlockScaling(),
    "fp8_block_decoded": fz.recipes.Float8BlockScaling(fp8_products=False),
    "mxfp8": fz.recipes.MXFP8BlockScaling(),
    "mxfp8_fp8": fz.recipes.MXFP8BlockScaling(fp8_products=True),
    "fp8_current": fz.recipes.Float8CurrentScaling(),
    "fp8_current_decoded": fz.recipes.Float8CurrentScaling(fp8_products=False),
    "nvfp4": fz.recipes.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "nvfp4_as_trained_with": fz.recipes.NVFP4BlockScaling(),
}


def under(recipe: fz.recipes.Recipe | None) -> AbstractContextManager[None]:
    """``autocast`` with a recipe, or without any."""
    return fz.autocast(enabled=recipe is not None, recipe=recipe)


# --- operands and modules -------------------------------------------------------------------------


def split_sizes(config: Config, split: str) -> list[int]:
    """Rows of each expert: all the same, or Zipf 0.8 with an eighth of the experts empty."""
    rows, experts = config.rows, config.experts
    if split == "balanced":
        return [rows // experts] * experts
    generator = torch.Generator().manual_seed(0)
    live = experts - max(experts // 8, 1)
    weights = torch.arange(1, live + 1).pow(-0.8)
    sizes = (weights / weights.sum() * rows).floor().int().tolist()
    sizes[0] += rows - sum(sizes)
    order = torch.randperm(experts, generator=generator).tolist()
    return [(sizes + [0] * (experts - live))[i] for i in order]


def tensors(config: Config, sizes: Sequence[int]) -> dict[str, Tensor]:
    """Random operands of every product of a grouped MLP whose experts have so many rows."""
    hidden, expert, experts, rows = config
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        out = torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
        return out.normal_(std=scale, generator=generator)

    ends = torch.tensor(sizes).cumsum(0).int().cuda()
    return {
        "x": normal(rows, hidden),
        "w1": normal(experts, 2 * expert, hidden, scale=hidden**-0.5),
        "w2": normal(experts, hidden, expert, scale=expert**-0.5),
        "act": normal(rows, expert),
        "preact": normal(rows, 2 * expert),
        "d_preact": normal(rows, 2 * expert),
        "dy": normal(rows, hidden),
        "scales": torch.rand(rows, device="cuda", generator=generator),
        "ends": ends,
        "starts": torch.nn.functional.pad(ends, (1, 0)),
    }


def grouped_mlp(
    hidden: int,
    expert: int,
    experts: int,
    act: fz.ops.BasicOperation | None = None,
    **options: Any,
) -> fz.Sequential:
    """FC1, an activation and FC2, in BF16 on the GPU unless ``options`` of both linears differ."""
    options = {"device": "cuda", "dtype": torch.bfloat16, "bias": False} | options
    options = {"single_grouped_weight": True} | options
    return fz.Sequential(
        fz.GroupedLinear(experts, hidden, 2 * expert, **options),
        fz.ScaledSwiGLU() if act is None else act,
        fz.GroupedLinear(experts, expert, hidden, **options),
    )


# --- time -----------------------------------------------------------------------------------------


def graph_of(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def timed(call: Callable[[], Any]) -> Callable[[], float]:
    """Enqueue a call; what returns its milliseconds on the device, once it is done."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    return lambda: start.elapsed_time(end)


def l2_flush() -> Tensor:
    """Memory whose zeroing flushes the L2 cache."""
    return torch.empty(256 << 20, dtype=torch.int8, device="cuda")


def spin_ticks(calls: Iterable[Callable[[], Any]]) -> int:
    """Clock ticks for which the GPU spins before a call, so that all of it is enqueued by then.

    At least 2 ms, and twice the host time of the slowest call. With less, a call is timed with a
    part of its host's work.
    """
    slowest = 1e-3
    for call in calls:
        call()  # compiles
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        slowest = max(slowest, time.perf_counter() - start)
        torch.cuda.synchronize()
    return int(2 * slowest * 1.75e9)  # about the GPU's clock


def measure(calls: Mapping[Any, Callable[[], Any]], runs: int = 20) -> dict[Any, float]:
    """Median milliseconds on the device of each call, interleaved, from a flushed L2 cache."""
    flush, spin, warm = l2_flush(), spin_ticks(calls.values()), 3
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for turn in range(runs + warm):
        taken = {}
        for name, call in calls.items():
            flush.zero_()
            torch.cuda._sleep(spin)
            taken[name] = timed(call)
        torch.cuda.synchronize()
        if turn >= warm:
            for name, ms in taken.items():
                times[name].append(ms())
    return {name: statistics.median(values) for name, values in times.items()}


def host_microseconds(calls: Calls, repeats: int = 200) -> dict[Any, float]:
    """Median host time of each call, interleaved, a GPU idle before each."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    warm = 20
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + warm):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            taken = time.perf_counter() - start
            if turn >= warm:
                times[name].append(1e6 * taken)
    return {name: statistics.median(values) for name, values in times.items()}


# --- memory and errors ----------------------------------------------------------------------------


def peak_mb(step: Callable[[], Any], grads: Iterable[Tensor] = ()) -> float:
    """Peak MB of a training step beside what is there before it.

    The gradients of ``grads`` are freed before, so that they are part of it.
    """
    step()  # allocates what stays
    for t in grads:
        t.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def saved_mb(
    forward: Callable[[], Any],
    beside: Iterable[Tensor],
    counts: Callable[[Tensor], bool] = lambda t: True,
) -> float:
    """MB of distinct memory that a forward saves for its backward, beside that of tensors."""
    own = {t.untyped_storage().data_ptr() for t in beside}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if counts(t) and storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = forward()
    del y
    return sum(saved.values()) / 2**20


def relative_errors(got: Iterable[Tensor], want: Iterable[Tensor]) -> list[float]:
    """Norms of differences over norms of what is wanted."""
    pairs = zip(got, want, strict=True)
    return [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs]


# --- results --------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Machine, versions and commit."""

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "absent"

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nvidia-cutlass-dsl": of("nvidia-cutlass-dsl"),
        "quack-kernels": of("quack-kernels"),
        "transformers": of("transformers"),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def parser_of(doc: str | None, out: str | None = None) -> argparse.ArgumentParser:
    """The options of a program: ``--out FILE``, by default the file of that name in `RESULTS`."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    default = None if out is None else RESULTS / out
    parser.add_argument("--out", "--json", type=Path, default=default, help="JSON file to write")
    return parser


def add_shapes(parser: argparse.ArgumentParser) -> None:
    """Add the options of `shapes_of`."""
    names = list(CONFIGS)
    parser.add_argument("--config", nargs="*", default=names, choices=names)
    parser.add_argument("--shape", nargs="*", default=[], help="hidden,expert,experts,rows")


def shapes_of(options: argparse.Namespace) -> dict[str, Config]:
    """The shapes that were asked for, by name."""
    shapes = {name: CONFIGS[name] for name in options.config}
    return shapes | {text: Config(*map(int, text.split(","))) for text in options.shape}


def with_splits(shapes: Mapping[str, Config]) -> Iterator[tuple[str, str, Config]]:
    """The name of each shape, each of `SPLITS`, and the shape."""
    for name, config in shapes.items():
        for split in SPLITS:
            yield name, split, config


def write(path: Path | None, report: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write a report, if there is where to."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=indent) + "\n")


def pyplot() -> Any:
    """Matplotlib's ``pyplot``, which draws to files."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
