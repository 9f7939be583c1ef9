"""Every tile of the Hopper kernels over a grid of shapes, against PyTorch and quack in its tiles.

    python benchmarks/sm90_grid.py [--seconds N] [--shape NAME ...] [--quack N] [--out FILE]
    python benchmarks/sm90_grid.py --drawn FIRST LAST [...]
    python benchmarks/sm90_grid.py --fp8 [...]
    python benchmarks/sm90_grid.py --fit FILE ...
    python benchmarks/sm90_grid.py --draw FILE

Compiles on all cores, compares every tile with FP32 math, then times all contestants of a cell (a
shape and an op) in one process, in random order, with CUDA events, from a flushed L2 cache: the
median of eleven turns, of fewer for those more than 8 % slower than the best of ours or of peers.
The file is written after each shape; a summary comes last. Stops after ``--seconds``, compilation
included.

``--fp8`` measures products of FP8 operands, quantized beforehand; no peer takes part.

``--most-rows`` leaves out shapes whose groups have more rows on average, ``--inference`` those of
training.

``--drawn`` measures shapes that are drawn at random instead, from FIRST to before LAST of always
the same ones.

``--fit`` and ``--draw`` need no GPU. The former fits the model of times
(`fusible.kernels.sm90.tiles`) to such files. The latter draws a heat map of the tiles that the
model chooses now, beside the file, and prints the worst cells.
"""

import argparse
import collections
import functools
import json
import math
import multiprocessing
import os
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from grouped_gemm_sm90 import fusible_calls, quack_call, torch_calls
from measuring import (
    SPLITS,
    Config,
    environment,
    l2_flush,
    parser_of,
    pyplot,
    split_sizes,
    tensors,
    timed,
    write,
)

from fusible.kernels.glu import Glu
from fusible.kernels.grouped import definitions
from fusible.kernels.quantize.k_major import quantize_k_major
from fusible.kernels.runtime.launch import load_kernel
from fusible.kernels.sm90 import checked_products as ops
from fusible.kernels.sm90 import tiles
from fusible.kernels.sm90.spec import WARPGROUP_ROWS, Spec, Tile, block_columns
from fusible.recipes.blocks import padded_size
from fusible.recipes.formats import FP8_BLOCK, fp8_block

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from sm90_in_tile import in_tile


class Shape(NamedTuple):
    """A mixture-of-experts layer, and how its rows are split among experts."""

    name: str
    hidden: int
    inner: int
    experts: int
    rows: int
    split: str = "balanced"
    """balanced, skewed (Zipf 0.8, an eighth empty), one (all rows to one expert), random."""

    @property
    def config(self) -> Config:
        """Its sizes."""
        return Config(*self[1:5])

    def __str__(self) -> str:
        rows = f"{self.hidden}/{self.inner}/{self.experts}e/{self.rows}r"
        return f"{self.name} {rows} {self.split}"


SHAPES = [
    Shape("qwen3-next", 2048, 512, 512, 163840),
    Shape("qwen3-30b", 2048, 768, 128, 20480),
    Shape("small", 1024, 512, 64, 8192),
    Shape("qwen3-30b", 2048, 768, 128, 8, "random"),
    Shape("dsv3-ep32", 7168, 2048, 32, 6144),
    Shape("qwen3-30b", 2048, 768, 128, 131072),
    Shape("qwen3-next", 2048, 512, 512, 40960, "skewed"),
    Shape("gpt-oss", 2880, 2880, 32, 4096),
    Shape("mixtral-8x7b", 4096, 14336, 8, 1024),
    Shape("qwen3-30b", 2048, 768, 128, 64, "random"),
    Shape("qwen3-next", 2048, 512, 512, 81920, "random"),
    Shape("dsv2-lite", 2048, 1408, 64, 49152),
    Shape("olmoe", 2048, 1024, 64, 65536, "one"),
    Shape("qwen3-235b", 4096, 1536, 128, 16384, "skewed"),
    Shape("dsv3-ep8", 7168, 2048, 128, 32768),
    Shape("small", 1024, 512, 64, 8192, "skewed"),
    Shape("tiny", 1024, 512, 512, 32768, "skewed"),
    Shape("qwen3-30b", 2048, 768, 128, 256, "random"),
    Shape("mixtral-8x7b", 4096, 14336, 8, 16384, "skewed"),
    Shape("qwen3-30b", 2048, 768, 128, 131072, "skewed"),
    Shape("llama4-scout", 5120, 8192, 16, 8192, "skewed"),
    Shape("small", 1024, 512, 64, 262144),
    Shape("qwen3-next", 2048, 512, 512, 32768),
    Shape("gpt-oss", 2880, 2880, 128, 32768, "skewed"),
    Shape("dsv3-ep32", 7168, 2048, 32, 32, "random"),
    Shape("tiny", 1024, 512, 256, 49152),
    Shape("qwen3-30b", 2048, 768, 128, 16384, "skewed"),
    Shape("dsv3-ep32", 7168, 2048, 32, 32768),
    Shape("narrow", 7168, 512, 64, 12288),
    Shape("olmoe", 2048, 1024, 64, 8192),
    Shape("dsv3-ep8", 7168, 2048, 8, 16384, "one"),
    Shape("mixtral-8x7b", 4096, 14336, 8, 16, "random"),
    Shape("qwen3-235b", 4096, 1536, 128, 65536),
    Shape("qwen3-30b", 2048, 768, 128, 32768),
    Shape("wide", 4096, 4096, 4, 65536, "one"),
    Shape("dsv2-lite", 2048, 1408, 64, 6144, "skewed"),
    Shape("few", 1024, 1024, 4, 4096),
    Shape("qwen3-30b", 2048, 768, 128, 8192),
    Shape("mixtral-8x22b", 6144, 16384, 8, 4096),
    Shape("qwen3-next", 2048, 512, 512, 163840, "skewed"),
    Shape("gpt-oss", 2880, 2880, 32, 128, "random"),
    Shape("dsv3-ep32", 7168, 2048, 32, 32768, "skewed"),
    Shape("dsv2", 5120, 1536, 160, 46080, "random"),
    Shape("qwen3-30b", 2048, 768, 128, 1024, "random"),
    Shape("long", 2048, 1024, 16, 262144),
    Shape("qwen3-235b", 4096, 1536, 128, 8, "random"),
    Shape("one row", 4096, 4096, 4, 1, "random"),
    Shape("mixtral-8x7b", 4096, 14336, 8, 16384),
]
_MOST_BYTES, _MOST_OPERATIONS = 8e9, 8e12


def drawn_shapes(count: int) -> list[Shape]:
    """Shapes drawn at random, of weights and products that are not too large."""
    generator, found = random.Random(0), []
    while len(found) < count:
        hidden = generator.choice((1024, 1536, 2048, 2560, 2880, 4096, 5120, 6144, 7168))
        inner = generator.choice((512, 704, 768, 1024, 1408, 1536, 2048, 2880, 4096, 8192, 14336))
        experts = generator.choice((4, 8, 16, 32, 60, 64, 128, 160, 256, 512))
        rows = round(experts * 2 ** generator.uniform(-2, 12))
        split = generator.choice(("balanced", "random", "skewed"))
        if rows < 8 * experts:  # of which the others leave most experts without rows
            split = "random"
        bytes_, operations = 6 * experts * hidden * inner, 6 * rows * hidden * inner
        if rows and bytes_ < _MOST_BYTES and operations < _MOST_OPERATIONS:
            found.append(Shape(f"drawn {len(found)}", hidden, inner, experts, rows, split))
    return found


def rows_of_a_group(shape: Shape) -> float:
    """Average rows of a group, if as many groups as possible have rows."""
    return shape.rows / min(shape.rows, shape.experts)


OPS = ("glu_keep", "fc2", "dglu", "dgrad1", "wgrad1", "wgrad2")
INFERENCE = ("glu", "fc2")
# Of FP8 operands, whose activation's backward is no part of a product.
FP8 = ("fp8 glu_keep", "fp8 glu", "fp8 fc2", "fp8 dgrad2", "fp8 dgrad1", "fp8 wgrad1", "fp8 wgrad2")
FP8_INFERENCE = ("fp8 glu_quantized", "fp8 glu", "fp8 fc2")
_OPS_OF = {
    "glu": ("glu_keep", "glu", "glu_quantized"),
    "store": ("fc2", "dgrad1", "dgrad2"),
    "dglu": ("dglu",),
    "wgrad": ("wgrad1", "wgrad2"),
}
KINDS = {how + op: kind for kind, ops in _OPS_OF.items() for op in ops for how in ("", "fp8 ")}
FEW_ROWS = 4096  # with fewer, a shape is one of inference


def ops_of(shape: Shape, fp8: bool = False) -> tuple[str, ...]:
    """The ops measured."""
    if shape.rows < FEW_ROWS:
        return FP8_INFERENCE if fp8 else INFERENCE
    return FP8 if fp8 else OPS


def table_of(op: str) -> dict[Tile, tiles.Cost]:
    """The tiles that an op may get."""
    return (tiles.FP8_TILES if is_fp8(op) else tiles.TILES)[KINDS[op]]


def is_fp8(op: str) -> bool:
    """Whether the operands of an op are FP8."""
    return op.startswith("fp8")


def problem(op: str, shape: Shape) -> tuple[int, int, int, int]:
    """Rows, groups, columns and depth of an op, as `tiles.choose` takes them."""
    _, hidden, inner, experts, rows, _ = shape
    if is_fp8(op) and KINDS[op] == "wgrad":  # of operands with room for padding of every group
        rows = padded_size(rows, experts, FP8_BLOCK)
    columns, depth = {
        "glu_keep": (inner, hidden),
        "glu": (inner, hidden),
        "glu_quantized": (inner, hidden),
        "fc2": (hidden, inner),
        "dglu": (inner, hidden),
        "dgrad2": (inner, hidden),
        "dgrad1": (hidden, 2 * inner),
        "wgrad1": (2 * inner, hidden),
        "wgrad2": (hidden, inner),
    }[op.removeprefix("fp8 ")]
    return rows, experts, columns, depth


def chosen(op: str, shape: Shape, sms: int = 132) -> Tile:
    """The tile that an op gets."""
    rows, groups, columns, depth = problem(op, shape)
    rows, major = tiles.rows_bucket(rows, groups), "n" if op in ("dglu", "dgrad1") else "k"
    options = {"fp8": is_fp8(op), "quantized": op.endswith("quantized")}
    return tiles.choose(KINDS[op], rows, groups, columns, depth, sms, major, **options)


# --- tiles ----------------------------------------------------------------------------------------

# Rows and columns, ping-pong (p) or cooperating (c), clusters; d: taken from a counter.
_GRID = {
    "16x64p": ("11", "11d"),
    "16x128p": ("11", "11d"),
    "64x64p": ("11", "12", "12d"),
    "64x128p": ("11", "12", "12d"),
    "64x256p": ("12", "12d"),
    "128x128p": ("11", "12", "21", "11d", "12d", "21d"),
    "128x160p": ("12d", "21d"),
    "128x192p": ("12d", "21d"),
    "192x128p": ("12", "12d", "21d"),
    "256x128c": ("12d", "21d"),
    "128x256c": ("12d", "21d"),
}
_WGRAD = {
    "64x256p": ("11d",),
    "128x128p": ("12", "11d", "12d", "21d"),
    "128x192p": ("12", "12d", "21d"),
    "192x128p": ("12", "12d", "21d"),
    "256x128c": ("12d", "21d"),
    "128x256c": ("12d", "21d"),
}
_FP8 = {
    "16x64p": ("11",),
    "16x128p": ("11",),
    "16x256p": ("11",),
    "64x64p": ("11",),
    "64x128p": ("11", "12", "12d"),
    "64x256p": ("11", "12d"),
    "128x128p": ("11", "12", "21", "12d", "21d"),
    "256x128c": ("12d", "21d"),
    "128x256c": ("12d", "21d"),
}
_AHEAD = {(64, 64): (4,), (64, 128): (5,), (128, 128): (3, 5), (128, 192): (2,)}


def tile_of(text: str) -> Tile:
    """The tile that `label` calls ``text``."""
    shape, _, ahead = text.partition("/")
    size, dynamic = shape.removesuffix("d"), shape.endswith("d")
    rows, rest = size.split("x")
    kind, clusters = rest[-4:-2], rest[-2:]
    columns = int(rest[:-4])
    return Tile(
        int(rows),
        columns,
        kind == "pp",
        int(clusters[0]),
        int(clusters[1]),
        dynamic,
        int(ahead or 3),
    )


def label(kind: str, tile: Tile) -> str:
    """What a tile is called in the report."""
    return f"{tile}/{tile.ahead}" if kind == "dglu" else str(tile)


@functools.cache
def tiles_of(op: str) -> list[Tile]:
    """Every tile measured for an op: those of the grid and those that may be chosen."""
    found, kind = list(table_of(op)), KINDS[op]
    grid = _FP8 if is_fp8(op) else _WGRAD if kind == "wgrad" else _GRID
    for shape, clusters in grid.items():
        for cluster in clusters:
            tile = tile_of(f"{shape[:-1]}{'pp' if shape[-1] == 'p' else 'co'}{cluster}")
            narrow = kind == "glu" and tile.n // 2 % 32
            if narrow or (kind == "wgrad" and tile.m < WARPGROUP_ROWS):
                continue
            aheads = _AHEAD.get((tile.m, tile.n), ()) if kind == "dglu" else (3,)
            found += [tile._replace(ahead=ahead) for ahead in aheads]
    if op.endswith("quantized"):
        found = [tile for tile in found if tile.width(kind) == FP8_BLOCK]
    return list(dict.fromkeys(found))


def spec_of(op: str, tile: Tile) -> Spec:
    """The kernel of an op in a tile."""
    kind, spec = KINDS[op], Spec(KINDS[op], tile)
    if op in ("dglu", "dgrad1"):
        spec = spec._replace(weight_major="n")
    if is_fp8(op):
        e4m3, scales = "float8_e4m3fn", "rows" if kind == "wgrad" else "blocks"
        spec = spec._replace(dtype=e4m3, b_dtype=e4m3, b_scale_layout=scales)
    if kind not in ("glu", "dglu"):
        return spec
    stripe = tile.n // 2 if kind == "glu" else block_columns(kind, tile, "bfloat16")
    layout = {"stripe": stripe, "paired": True, "save_preact": op.endswith("glu_keep")}
    if op.endswith("quantized"):
        spec = spec._replace(out_format=fp8_block())
    return spec._replace(row_scale="float32", activation="swiglu", **layout)


# --- compilation ----------------------------------------------------------------------------------

# quack's tiles, from those its autotuner tries for groups of rows or of the reduction.
QUACK_TILES = (
    *("128x128pp12", "128x192pp12", "256x128co12", "128x128pp21", "128x256co21", "256x192co12"),
    *("192x128pp12", "128x160pp12", "128x192pp21", "256x128co21", "128x128pp12d", "128x256co12"),
    *("256x192co21", "128x160pp21", "192x128pp21", "128x192pp12d", "256x160co12", "256x128co12d"),
    *("256x160co21", "128x224co12", "128x224co21", "128x128pp21d"),
)


def compile_spec(spec: Spec) -> None:
    """Compile one of our kernels, or find it on disk."""
    load_kernel("sm90.gemm.GroupedGemm", (spec,), "sm_90a")


@functools.cache
def _little() -> dict[str, torch.Tensor]:
    return operands(Shape("little", 512, 512, 2, 512))


def compile_quack(op: str, tile: str) -> str:
    """Compile one of quack's kernels to its cache on disk; what went wrong, if anything."""
    try:
        quack_call(_little(), op, tile)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{op} {tile}: {type(error).__name__}: {error}"[:200]
    return ""


def quack_tiles(made: dict[tuple[str, str], Future]) -> tuple[dict[str, list[str]], list[str]]:
    """Of each op the tiles whose kernels were made, and what went wrong with others."""
    found: dict[str, list[str]] = {op: [] for op, _ in made}
    failed = []
    for (op, tile), future in made.items():
        try:
            why = future.result()
        except Exception as error:  # a process that ended
            why = f"{op} {tile}: {error}"
        if why:
            failed.append(why)
        else:
            found[op].append(tile)
    return found, failed


# --- operands and calls ---------------------------------------------------------------------------


def sizes_of(shape: Shape) -> list[int]:
    """Rows of each expert."""
    experts, rows, split = shape.experts, shape.rows, shape.split
    if split in SPLITS:
        return split_sizes(shape.config, split)
    if split == "one":
        return [rows if e == experts // 2 else 0 for e in range(experts)]
    generator = torch.Generator().manual_seed(0)
    if rows <= experts:  # experts of a token differ
        of_row = torch.randperm(experts, generator=generator)[:rows]
    else:
        of_row = torch.randint(experts, (rows,), generator=generator)
    return torch.bincount(of_row, minlength=experts).tolist()


def operands(shape: Shape) -> dict[str, torch.Tensor]:
    """Random operands of every op."""
    return tensors(shape.config, sizes_of(shape))


def quantized(t: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The operands of `FP8` ops, by rows and by columns."""
    both = {"rowwise": True, "columnwise": True}
    found: dict[str, Any] = {name: t[name] for name in ("ends", "scales")}
    for name in ("x", "act", "d_preact", "dy"):
        found[name] = quantize_k_major(t[name], fp8_block(), **both, ends=t["ends"])
    for name in ("w1", "w2"):
        found[name] = quantize_k_major(t[name], fp8_block(block=(128, 128)), **both)
    return found


def _fp8_call(module: Any, q: dict[str, Any], op: str) -> Any:
    """The result of an op of `FP8`."""
    if op.endswith(("wgrad1", "wgrad2")):
        dy, x = ("d_preact", "x") if op.endswith("1") else ("dy", "act")
        a, b = q[dy].column, q[x].column
        return module.grouped_wgrad(a.data, b.data, a.ends, None, a.scale, b.scale)
    x, w, use = {
        "fp8 fc2": ("act", "w2", "row"),
        "fp8 dgrad2": ("dy", "w2", "column"),
        "fp8 dgrad1": ("d_preact", "w1", "column"),
    }.get(op, ("x", "w1", "row"))
    a, b = q[x].row, getattr(q[w], use)
    if KINDS[op] == "store":
        return module.grouped_mm(a.data, [b.data], q["ends"], x_scale=a.scale, w_scale=b.scale)
    keep = op.endswith("keep")
    options = q["scales"], Glu(), None, keep, a.scale, b.scale
    if op.endswith("quantized"):
        multiply = getattr(module, "grouped_glu_quantized", module.grouped_glu)
        return multiply(a.data, [b.data], q["ends"], *options, fp8_block())[1:]
    return module.grouped_glu(a.data, [b.data], q["ends"], *options)[not keep :]


def call(module: Any, t: dict[str, torch.Tensor], op: str) -> Any:
    """The result of an op, by the kernels or by their definitions."""
    if is_fp8(op):
        return _fp8_call(module, t, op)
    return fusible_calls(t, module)[op]()


def in_a_tile(t: dict[str, torch.Tensor], op: str, tile: Tile) -> Any:
    """The result of an op in a tile."""
    with in_tile(tile):
        return call(ops, t, op)


def error(op: str, got: Any, want: Any) -> torch.Tensor:
    """The largest relative error, on the device; of large tensors, from a part of their rows."""
    if op.endswith("quantized"):
        got, want = (
            data.float() * scale.t().repeat_interleave(FP8_BLOCK, 1)[:, : data.shape[1]]
            for data, scale in (got, want)
        )
    pairs = [(got, want)] if isinstance(got, torch.Tensor) else zip(got, want, strict=True)
    found = []
    for one, other in pairs:
        step = max(one.numel() // (1 << 24), 1)
        is_, should = one[::step].float(), other[::step].to(one.device).float()
        found.append((is_ - should).norm() / should.norm().clamp(min=1e-30))
    return torch.stack(found).max()


# Just under, at and just over one to four times 64 rows; empty; one row.
_CHECKED = (127, 0, 128, 129, 1, 191, 192, 0, 193, 63, 64, 65, 255, 256, 257, 300)
_TOLERANCE = {"fp8 glu_quantized": 0.02}
"""By op, 4e-3 of others: sums that differ little may give neighbouring FP8 numbers."""


Task = tuple[str, Tile]
"""An op in a tile."""


def check_in_process(tasks: list[Task], begun: Any, results: Any) -> None:
    """Compare results with FP32 math; announce each task, then send what is wrong, if anything."""
    shape = Shape("checked", 336, 320, len(_CHECKED), sum(_CHECKED))
    t = operands(shape)
    t["ends"] = torch.tensor(_CHECKED).cumsum(0).int().cuda()
    wide = {k: v.cpu() if k in ("ends", "starts") else v.cpu().float() for k, v in t.items()}
    q, wants = quantized(t) if any(is_fp8(op) for op, _ in tasks) else {}, {}
    for op, tile in tasks:
        begun.value += 1
        try:
            if op not in wants:
                wants[op] = call(definitions, q if is_fp8(op) else wide, op)
            off = error(op, in_a_tile(q if is_fp8(op) else t, op, tile), wants[op]).item()
            results.put("" if off < _TOLERANCE.get(op, 4e-3) else f"off by {off:.1e}")
        except Exception as why:
            results.put(f"{type(why).__name__}: {why}")


def check_all(tasks: list[Task], context: Any) -> dict[Task, str]:
    """The tasks whose results are not those of FP32 math, and why.

    They run in a process of their own: a kernel that waits for ever ends only with its process.
    """
    wrong: dict[Task, str] = {}
    while tasks:
        begun, results = context.Value("i", 0), context.Queue()
        process = context.Process(target=check_in_process, args=(tasks, begun, results))
        process.start()
        done = 0
        try:
            for op, tile in tasks:
                if why := results.get(timeout=60 if done == 0 else 20):
                    wrong[op, tile] = why
                done += 1
        except queue.Empty:
            wrong[tasks[done]] = f"no result ({begun.value - done} begun)"
            done += 1
            process.kill()
        process.join()
        tasks = tasks[done:]
    return wrong


# --- times ----------------------------------------------------------------------------------------

_KEPT = 1.25, 1.08  # times as long as the best of ours, or of peers
_ALL, _MANY, _TURNS = 2, 5, 11  # turns: of all contestants, of those within each of `_KEPT`
_ORDER = random.Random(0)
_CLOCK = 2_000  # cycles of a microsecond, at most


def race(calls: dict[str, Callable[[], Any]], flush: torch.Tensor) -> dict[str, float]:
    """Milliseconds on the device of each call, the median of its turns.

    Each turn has another order, drawn at random, so that none always runs after the same one.
    """
    left = dict(calls)
    for name, run in calls.items():
        try:
            run()
        except Exception as why:  # a peer's tile that does not take the shape
            if not is_peer(name):
                raise
            print(f"{name}: {type(why).__name__}: {why}"[:160], flush=True)
            del left[name]
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in left}
    host = 200.0 * len(left)  # microseconds in which a turn is enqueued: no call waits for it
    for turn in range(1, _TURNS + 1):
        taken, begin = {}, time.perf_counter()
        torch.cuda._sleep(int(1.2 * host * _CLOCK))
        for name in _ORDER.sample(list(left), len(left)):
            flush.zero_()
            taken[name] = timed(left[name])
        host = 1e6 * (time.perf_counter() - begin)
        torch.cuda.synchronize()
        for name, milliseconds in taken.items():
            times[name].append(milliseconds())
        if turn < _ALL:
            continue
        least = {name: min(values) for name, values in times.items()}
        limit = {
            peer: _KEPT[turn >= _MANY]
            * min((t for name, t in least.items() if is_peer(name) == peer), default=0)
            for peer in (False, True)
        }
        left = {name: run for name, run in left.items() if least[name] <= limit[is_peer(name)]}
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {name: float(f"{t:.5g}") for name, t in medians.items()}


def is_peer(name: str) -> bool:
    """Whether a contestant is not ours."""
    return name.startswith(("torch", "quack"))


def measure_shape(
    shape: Shape,
    fp8: bool,
    wrong: Container[Task],
    quack: dict[str, list[str]],
    flush: torch.Tensor,
) -> list[dict]:
    """The cells of a shape, without tiles whose results are wrong."""
    cells = []
    t = quantized(operands(shape)) if fp8 else operands(shape)
    torchs = {} if fp8 else torch_calls(t)
    for op in ops_of(shape, fp8):
        every = [one for one in tiles_of(op) if (op, one) not in wrong]
        calls = {label(KINDS[op], one): functools.partial(in_a_tile, t, op, one) for one in every}
        want = in_a_tile(t, op, every[0])
        errors = {name: error(op, run(), want) for name, run in calls.items()}
        del want
        for name, off in errors.items():
            if not off.item() < _TOLERANCE.get(op, 4e-3):
                print(f"{shape}, {op} in {name} is off by {off.item():.1e}", flush=True)
                del calls[name]
        if op in torchs:
            calls["torch"] = torchs[op]
        out: dict[str, Any] = {}
        for one in quack.get(op, ()):
            calls[f"quack {one}"] = quack_call(t, op, one, out)
        ms = race(calls, flush)
        cells.append({"shape": shape, "op": op, "ms": ms})
        del calls, out
    return cells


# --- reports --------------------------------------------------------------------------------------


def split(cell: dict) -> tuple[dict[str, float], dict[str, float]]:
    """Times of our tiles, and of peers."""
    peers = {name: ms for name, ms in cell["ms"].items() if is_peer(name)}
    return {name: ms for name, ms in cell["ms"].items() if name not in peers}, peers


def is_judged(cell: dict) -> bool:
    """Whether the model can know a cell: not a weight gradient of one group that has all rows."""
    return not ("wgrad" in cell["op"] and Shape(*cell["shape"]).split == "one")


def regret_of(cell: dict) -> tuple[float, str]:
    """How much longer than the best tile the one that the model chooses now takes, and which it is.

    Of a tile that was not measured, that of the worst.
    """
    ours, _ = split(cell)
    op, shape = cell["op"], Shape(*cell["shape"])
    now = label(KINDS[op], chosen(op, shape))
    return ours.get(now, max(ours.values())) / min(ours.values()) - 1, now


def report(cells: Iterable[dict]) -> None:
    """Print what the choices cost and how the kernels compare with peers, the worst cells first."""
    regrets, ratios = [], []
    for cell in cells:
        (ours, peers), name = split(cell), f"{Shape(*cell['shape'])} {cell['op']}"
        (regret, now), best = regret_of(cell), min(ours, key=ours.__getitem__)
        regrets.append((regret, f"{name}: {now}, best {best} {ours[best]:.4f} ms"))
        if peers:
            peer = min(peers, key=peers.__getitem__)
            ratio = peers[peer] / ours[best]
            ratios.append((ratio / (1 + regret), ratio, f"{name}: {peer}"))
    regrets.sort(reverse=True)
    within = sum(regret <= 0.05 for regret, _ in regrets)
    print(f"regret at most 5 % in {within} of {len(regrets)} cells; the worst:")
    for regret, name in regrets[:12]:
        print(f"  {100 * regret:5.1f} %  {name}")
    ratios.sort()
    behind = sum(ratio < 1 for ratio, *_ in ratios)
    print(
        f"slower than the best peer in {behind} of {len(ratios)} cells; peer / ours, chosen, best:"
    )
    for with_chosen, with_best, name in ratios[:12]:
        print(f"  {with_chosen:.3f} {with_best:.3f}  {name}")


def draw(found: dict[str, Any], path: Path) -> None:
    """Heat maps, by shape and op: times of our best tile and of peers over the chosen tile's."""
    plt = pyplot()
    from matplotlib import colors

    cells = found["cells"]
    environments = [found[key] for key in found if key.startswith("environment")]
    gpus = ", few rows ".join(one["gpu"] for one in environments)
    shapes = list(dict.fromkeys(str(Shape(*cell["shape"])) for cell in cells))
    ops = list(dict.fromkeys(cell["op"] for cell in cells))
    titles = "our best tile", "best of quack's tiles", "PyTorch"
    maps = torch.full((len(titles), len(shapes), len(ops)), math.nan)
    for cell in cells:
        (ours, peers), (regret, _) = split(cell), regret_of(cell)
        best = min(ours.values())
        quack = [ms for name, ms in peers.items() if name.startswith("quack")]
        times = best, min(quack, default=math.nan), peers.get("torch", math.nan)
        row, column = shapes.index(str(Shape(*cell["shape"]))), ops.index(cell["op"])
        maps[:, row, column] = torch.tensor(times) / (best * (1 + regret))
    figure, panels = plt.subplots(
        1, len(titles), sharey=True, figsize=(15, 2 + 0.24 * len(shapes)), layout="constrained"
    )
    scale = colors.LogNorm(0.75, 1 / 0.75)
    dtype = "FP8" if is_fp8(ops[0]) else "BF16"
    for axes, title, values in zip(panels, titles, maps, strict=True):
        image = axes.imshow(values, aspect="auto", cmap="RdYlGn", norm=scale)
        for row, column in values.isfinite().nonzero().tolist():
            text = f"{values[row, column]:.2f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7)
        axes.set_title(f"{title} / chosen tile", fontsize=10)
        axes.set_xticks(range(len(ops)), ops, fontsize=8)
    panels[0].set_yticks(range(len(shapes)), shapes, fontsize=7)
    figure.colorbar(image, ax=panels, fraction=0.02, ticks=[0.75, 1, 1.33], format="%.2f")
    figure.suptitle(
        f"Time relative to the tile that the model chooses, {dtype}, {gpus}: above 1 it is faster"
    )
    figure.savefig(path, dpi=90)
    plt.close(figure)


def fit(cells: list[dict], steps: int) -> None:
    """Fit the costs of tiles and the model's constants to measured times; print them.

    By gradient descent: on the regret of a choice at random, likelier the shorter the expected
    time, and on the errors of the logarithms of times, within a cell and as a whole.
    """
    fitted = _Fitted([cell for cell in cells if is_judged(cell)])
    optimizer = torch.optim.Adam(fitted.parameters, 0.05)
    for step in range(steps):
        left = 1 - step / steps
        optimizer.param_groups[0]["lr"] = 0.05 * (0.1 + 0.9 * left)
        loss = fitted.loss(0.006 + 0.03 * left)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(fitted)


class _Fitted:
    """Times of cells by tile, and the logarithms of what is fitted to them."""

    def __init__(self, cells: list[dict]) -> None:
        by_tile = collections.defaultdict(list)
        for i, cell in enumerate(cells):
            kind, shape = KINDS[cell["op"]], Shape(*cell["shape"])
            rows, groups, *rest = problem(cell["op"], shape)
            sizes = tiles.rows_bucket(rows, groups), groups, *rest
            for name, ms in split(cell)[0].items():
                by_tile[kind, is_fp8(cell["op"]), tile_of(name)].append((i, *sizes, ms))
        self.count, start, cells_of, times, may = len(cells), [], [], [], []
        self.sizes: dict[tuple[str, bool, Tile], torch.Tensor] = {}
        for (kind, fp8, tile), found in by_tile.items():
            cell, *sizes, ms = torch.tensor(found, dtype=torch.float64).T
            self.sizes[kind, fp8, tile] = torch.stack(sizes)
            cells_of.append(cell.long())
            times.append(1000 * ms)
            table = (tiles.FP8_TILES if fp8 else tiles.TILES)[kind]
            start.append(table.get(tile, (tile.m * tile.n / 45, 2000, 1500)))
            may.append(torch.full(cell.shape, tile in table))
        self.cell, self.times, self.may = (torch.cat(each) for each in (cells_of, times, may))
        self.costs = torch.tensor(start, dtype=torch.float64).log().requires_grad_()
        self.shared = torch.tensor(tiles.MEASURED, dtype=torch.float64).log().requires_grad_()
        self.parameters, self.start = [self.costs], self.costs.detach().clone()
        if not all(fp8 for _, fp8, _ in self.sizes):  # FP8 products have the constants of BF16's
            self.parameters.append(self.shared)

    def loss(self, temperature: float) -> torch.Tensor:
        """What is minimised; ``temperature``: the relative time within which choices are alike."""
        constants = tiles.Constants(*self.shared.exp())
        expected = torch.cat([
            tiles.microseconds(
                kind, tile, rows, groups, columns, depth, 132, fp8,
                tiles.Cost(*cost.exp()), constants,
            )
            for ((kind, fp8, tile), (rows, groups, columns, depth)), cost in zip(
                self.sizes.items(), self.costs, strict=True
            )
        ]).log()  # fmt: skip
        best = torch.full((self.count,), math.inf, dtype=torch.float64)
        best = best.scatter_reduce(0, self.cell, self.times, "amin")[self.cell]
        scores = torch.where(self.may, -expected / temperature, -math.inf)
        most = torch.full((self.count,), -math.inf, dtype=torch.float64)
        most = most.scatter_reduce(0, self.cell, scores.detach(), "amax")
        chance = (scores - most[self.cell]).exp()
        chance = chance / self._sums(chance)[self.cell]
        regret = self._sums(chance * (self.times / best - 1).clamp(max=0.5))
        near = (self.times < 1.6 * best).double()
        error, count = near * (expected - self.times.log()), self._sums(near)
        mean = self._sums(error) / count
        apart = self._sums(near * (error - mean[self.cell]) ** 2) / count
        moved = 0.001 * ((self.costs - self.start) ** 2).mean()
        return (regret + 0.3 * apart + 0.3 * mean**2).mean() + moved

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.count, dtype=torch.float64).index_add(0, self.cell, values)

    def __str__(self) -> str:
        """The costs of each tile, and the constants."""
        lines = [
            f"{'fp8 ' * fp8}{kind} {label(kind, tile)}: "
            f"{tiles.Cost(*[float(f'{c:.3g}') for c in cost])}"
            for (kind, fp8, tile), cost in zip(self.sizes, self.costs.exp().tolist(), strict=True)
        ]
        return "\n".join([*lines, str(tiles.Constants(*self.shared.exp().tolist()))])


def parse_options() -> argparse.Namespace:
    """The options of a run."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--shape", nargs="*", default=[s.name for s in SHAPES])
    parser.add_argument("--quack", type=int, default=12, help="how many of quack's tiles")
    parser.add_argument("--drawn", type=int, nargs=2, help="shapes drawn at random")
    parser.add_argument("--most-rows", type=float, default=math.inf, help="of a group on average")
    parser.add_argument("--inference", action="store_true", help="only shapes of few rows")
    parser.add_argument("--fp8", action="store_true", help="products of FP8 operands")
    parser.add_argument("--fit", type=Path, nargs="*", help="JSON files to fit the model to")
    parser.add_argument("--steps", type=int, default=1500, help="of --fit")
    parser.add_argument("--draw", type=Path, help="JSON file to draw and to report")
    return parser.parse_args()


def main() -> None:
    """Compile, check, time, write and print."""
    begin = time.monotonic()
    options = parse_options()
    if options.draw:
        found = json.loads(options.draw.read_text())
        draw(found, options.draw.with_suffix(".png"))
        report(found["cells"])
        return
    if options.fit:
        cells = [cell for file in options.fit for cell in json.loads(file.read_text())["cells"]]
        fit(cells, options.steps)
        return
    measured: dict[str, Any] = {"environment": environment(), "cells": []}
    every = (*FP8, *FP8_INFERENCE) if options.fp8 else (*OPS, *INFERENCE)
    if options.inference:
        every = FP8_INFERENCE if options.fp8 else INFERENCE
    tasks = [(op, tile) for op in dict.fromkeys(every) for tile in tiles_of(op)]
    specs = {spec_of(*task) for task in tasks}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        ours = [pool.submit(compile_spec, spec) for spec in specs]
        theirs = {
            (op, tile): pool.submit(compile_quack, op, tile)
            for tile in QUACK_TILES[: options.quack]
            for op in dict.fromkeys(every)
            if not options.fp8
        }
        for one in ours:
            one.result()
        print(f"{time.monotonic() - begin:.0f} s: {len(specs)} kernels compiled", flush=True)
        wrong = check_all(tasks, context)
        print(f"{time.monotonic() - begin:.0f} s: {len(tasks)} compared with FP32 math; "
              f"{len(wrong)} wrong", flush=True)  # fmt: skip
        for (op, tile), why in wrong.items():
            print(f"  {op} {tile}: {why}")
        quack, failed = quack_tiles(theirs)
    print(f"{time.monotonic() - begin:.0f} s: quack's kernels; {len(failed)} failed", flush=True)
    for why in failed[:4]:
        print(f"  {why}")
    flush = l2_flush()
    shapes = [shape for shape in SHAPES if shape.name in options.shape]
    if options.drawn:
        first, last = options.drawn
        shapes = drawn_shapes(last)[first:]
    shapes = [shape for shape in shapes if rows_of_a_group(shape) <= options.most_rows]
    if options.inference:
        shapes = [shape for shape in shapes if shape.rows < FEW_ROWS]
    for shape in shapes:
        if time.monotonic() - begin > options.seconds:
            break
        measured["cells"] += measure_shape(shape, options.fp8, wrong, quack, flush)
        torch.cuda.empty_cache()
        print(f"{time.monotonic() - begin:.0f} s: {shape}", flush=True)
        write(options.out, measured, indent=None)
    report(measured["cells"])


if __name__ == "__main__":
    main()
