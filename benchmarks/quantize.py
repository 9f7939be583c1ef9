"""MXFP8 quantization against a copy of the same input, on the present GPU.

    python benchmarks/quantize.py [--rows 32768] [--columns 4096] [--json FILE]

Bandwidth counts useful bytes: the input once, elements and scales once for each use.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

import fusible.kernels.quantize  # noqa: F401  adds the CUDA implementation of the op

REPEATS, CALLS = 20, 10


def seconds(call: Callable[[], object]) -> float:
    """Return the median over repeats of the time of one call, from CUDA events around ten.

    Ten, so that the host runs ahead of the GPU and its time per call does not count.
    """
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / CALLS)
    return sorted(times)[REPEATS // 2]


def measure(rows: int, columns: int) -> list[dict[str, float | str]]:
    """Return one row per case: useful bytes, time, bandwidth, share of the copy's bandwidth."""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(x)
    groups = torch.arange(1, 129, device="cuda", dtype=torch.int32) * (rows // 128)
    ragged = torch.randint(0, rows, (127,), device="cuda", dtype=torch.int32).sort().values
    ragged = torch.cat((ragged, ragged.new_tensor([rows])))
    n = x.numel()

    def op(ends: torch.Tensor | None, row: bool, column: bool) -> Callable[[], object]:
        return lambda: torch.ops.fusible.quantize_mxfp8(x, ends, False, True, row, column)

    cases: list[tuple[str, float, Callable[[], object]]] = [
        ("copy", 4 * n, lambda: target.copy_(x)),
        ("row-wise", n * (3 + 1 / 32), op(None, True, False)),
        ("column-wise", n * (3 + 1 / 32), op(None, False, True)),
        ("row-wise + column-wise", n * (4 + 2 / 32), op(None, True, True)),
        ("both, 128 equal groups", n * (4 + 2 / 32), op(groups, True, True)),
        ("both, 128 ragged groups", n * (4 + 2 / 32), op(ragged, True, True)),
    ]
    out: list[dict[str, float | str]] = []
    copy = 0.0
    for name, size, call in cases:
        time = seconds(call)
        copy = copy or size / time
        out.append(
            {
                "case": name,
                "us": time * 1e6,
                "tb_s": size / time / 1e12,
                "of_copy": size / time / copy,
            }
        )
    return out


def main() -> None:
    """Print the table and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = measure(args.rows, args.columns)
    print(f"{torch.cuda.get_device_name()}, {args.rows} x {args.columns} bfloat16")
    for row in table:
        print(
            f"{row['case']:<26}{row['us']:>9.1f} us{row['tb_s']:>8.2f} TB/s{row['of_copy']:>7.0%}"
        )
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
