"""Quantization in every format against a copy of the same input, on the present GPU.

    python benchmarks/quantize.py [--rows 32768] [--columns 4096] [--json FILE]

Bandwidth counts useful bytes: what is quantized is read once, elements and scales are written once
for each use. A format with one scale for the whole tensor reads the tensor twice, of which one is
counted. Dequantizing reads elements and scales and writes values. Also what a recipe costs: a
linear layer and a grouped MLP, forward and backward, against BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import measuring
import torch

import fusible as fz
from fusible import recipes
from fusible.kernels.grouped import grouped_sum
from fusible.kernels.sm100 import padding
from fusible.kernels.sm100.quantizer import QuantizeOptions, quantize_packed
from fusible.recipes.formats import NumberFormat, fp8_block, fp8_tensor, mxfp8, nvfp4
from fusible.recipes.quantize_ops import quantize_matrix

REPEATS, CALLS = 20, 10
FORMATS = {
    "mxfp8": mxfp8(),
    "fp8 1x128": fp8_block(),
    "fp8 128x128": fp8_block(block=(128, 128)),
    "fp8 tensor": fp8_tensor(),
    "nvfp4": nvfp4(),
    "nvfp4_16x16": nvfp4((16, 16)),
    "nvfp4_rht": nvfp4(hadamard=True),
    "nvfp4_rht_sr": nvfp4(hadamard=True, stochastic=True),
}
USES = {"row-wise": (True, False), "column-wise": (False, True), "both": (True, True)}
RECIPES = {
    "bf16": None,
    "mxfp8": measuring.RECIPES["mxfp8"],
    "fp8 block": measuring.RECIPES["fp8_block"],
    "fp8 current": measuring.RECIPES["fp8_current"],
    "nvfp4": measuring.RECIPES["nvfp4"],
    "nvfp4 as trained with": measuring.RECIPES["nvfp4_as_trained_with"],
}


def seconds(call: Callable[[], object], calls: int = CALLS) -> float:
    """Return the median over repeats of the time of one call, from CUDA events around ``calls``.

    Ten, so that the host runs ahead of the GPU and its time per call does not count.
    """
    times = []
    for _ in range(3):
        call()
    for _ in range(REPEATS):
        milliseconds = measuring.timed(lambda: [call() for _ in range(calls)])
        torch.cuda.synchronize()
        times.append(milliseconds() / 1e3 / calls)
    return sorted(times)[REPEATS // 2]


def copy_rate(x: torch.Tensor) -> float:
    """Bytes that a copy of a tensor reads and writes in a second."""
    return 2 * size_of([x]) / seconds(partial(torch.empty_like(x).copy_, x))


def size_of(pieces: Any) -> int:
    """Bytes of tensors."""
    return sum(t.numel() * t.itemsize for t in pieces)


def quantizers(rows: int, columns: int) -> list[dict[str, float | str]]:
    """One row per format, use, grouping and input dtype, and per dequantized operand."""
    table: list[dict[str, float | str]] = []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(rows, columns, device="cuda", dtype=dtype)
        copy = copy_rate(x)
        print(f"copy of {dtype}: {copy / 1e12:.2f} TB/s")
        for name, fmt in FORMATS.items():
            table += [_noted(case, copy) for case in _cases(x, name, fmt, dtype)]
    return table


def _cases(
    x: torch.Tensor, name: str, fmt: NumberFormat, dtype: torch.dtype
) -> list[dict[str, Any]]:
    rows, ops, spelled = x.shape[0], torch.ops.fusible, fmt.as_constants()
    equal = torch.arange(1, 129, device="cuda", dtype=torch.int32) * (rows // 128)
    ragged = torch.randint(0, rows, (127,), device="cuda", dtype=torch.int32).sort().values
    ragged = torch.cat((ragged, ragged.new_tensor([rows])))
    key = recipes.random_key(x)
    uses = USES if fmt.directional else {"one for both": (True, False)}
    groups = {"": None, ", 128 equal groups": equal, ", 128 ragged groups": ragged}
    if fmt.block is not None and not fmt.directional:
        groups = {"": None}
    out = []
    for grouping, ends in groups.items():
        for use, flags in uses.items():
            if grouping and use not in ("both", "one for both"):
                continue
            pieces = ops.quantize(x, ends, key, *spelled, *flags)
            time = seconds(partial(ops.quantize, x, ends, key, *spelled, *flags))
            out.append(_row(f"{name}, {dtype}, {use}{grouping}", size_of([x, *pieces]), time))
    if dtype != torch.bfloat16:
        return out
    for grouping, ends in groups.items():
        for columnwise in (False, True) if fmt.directional else (False,):
            uses_ = (not columnwise, columnwise)
            pieces = ops.quantize(x, ends, key, *spelled, *uses_)[3 * columnwise :][:3]
            given = [t if t.numel() else None for t in pieces]
            call = partial(ops.dequantize, *given, ends, *spelled, columnwise, dtype)
            time = seconds(call)
            use = "column-wise" if columnwise else "row-wise"
            out.append(_row(f"{name}, dequantize {use}{grouping}", size_of([x, *pieces]), time))
    return out


def placed(rows: int, columns: int) -> list[dict[str, Any]]:
    """Ragged groups into the padded layout of the SM100 kernels: as one kernel, and in parts."""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    copy, options = copy_rate(x), QuantizeOptions(rowwise=True, columnwise=True)
    table = []
    for groups in (8, 128):
        ends = torch.randint(0, rows, (groups - 1,), device="cuda", dtype=torch.int32)
        ends = torch.cat((ends.sort().values, ends.new_tensor([rows])))
        padded = padding.pad_groups(ends, rows, aligned=False)
        for name in ("mxfp8", "nvfp4"):
            given = x, FORMATS[name], ends, padded
            make = partial(quantize_packed, *given, options)
            useful = size_of([x, *make()])
            calls = {
                "one kernel": make,
                "with sums": partial(
                    quantize_packed, *given, options._replace(sums=torch.bfloat16)
                ),
                "in parts": partial(_in_parts, *given),
            }
            for what, call in calls.items():
                case = f"{name} into places, {groups} groups, {what}"
                table.append(_noted(_row(case, useful, seconds(call)), copy))
        alone = seconds(partial(grouped_sum, x, ends, None))
        table.append(_noted(_row(f"sums alone, {groups} groups", size_of([x]), alone), copy))
    return table


def _in_parts(
    x: torch.Tensor, fmt: NumberFormat, ends: torch.Tensor, padded: padding.PaddedGroups
) -> list[torch.Tensor]:
    row, column = quantize_matrix(x, fmt, rowwise=True, columnwise=True, ends=ends)
    assert row is not None
    assert column is not None
    columns = padding.packed_columns(column, padded)
    return [*padding.packed_rows(row, padded), *columns]


def _row(case: str, size: int, time: float) -> dict[str, Any]:
    return {"case": case, "us": time * 1e6, "tb_s": size / time / 1e12}


def _noted(case: dict[str, Any], copy: float) -> dict[str, Any]:
    """A row with its share of a copy's rate, printed."""
    share = case["tb_s"] * 1e12 / copy
    print(
        f"{case['case']:<56}{case['us']:>9.1f} us{case['tb_s']:>7.2f} TB/s{share:>7.0%}",
        flush=True,
    )
    return {**case, "of_copy": share}


def _step(module: Any, recipe: Any, inputs: tuple[torch.Tensor, ...], dy: torch.Tensor) -> None:
    with measuring.under(recipe):
        y = module(*inputs)
    torch.autograd.backward(y, dy)


def modules() -> list[dict[str, float | str]]:
    """Forward and backward of two modules under every recipe, over BF16's time."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    experts, tokens, hidden, inner = 32, 16384, 2048, 1024
    sizes = torch.full((experts,), tokens // experts, device="cuda")
    probs = torch.rand(tokens, device="cuda")
    mlp = measuring.grouped_mlp(hidden, inner, experts)
    cases: dict[str, tuple[Any, int, tuple[torch.Tensor, ...]]] = {
        "linear 4096 x 4096, 8192 rows": (fz.Linear(4096, 4096, bias=False, **options), 4096, ()),
        f"MLP of {experts} experts, {hidden} x {inner}, {tokens} rows": (
            mlp, hidden, (sizes, probs, sizes),
        ),
    }  # fmt: skip
    table: list[dict[str, float | str]] = []
    for name, (module, width, extra) in cases.items():
        rows = tokens if extra else 8192
        x = torch.randn(rows, width, requires_grad=True, **options)
        dy = torch.randn_like(x)
        base = 0.0
        for label, recipe in RECIPES.items():
            time = seconds(partial(_step, module, recipe, (x, *extra), dy), 3)
            base = base or time
            table.append({"case": f"{name}, {label}", "us": time * 1e6, "over_bf16": time / base})
            print(f"{name}, {label:<14}{time * 1e6:>9.0f} us{time / base:>7.2f} x", flush=True)
    return table


def main() -> None:
    """Print the tables and write them as JSON if asked."""
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--columns", type=int, default=4096)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {args.rows} x {args.columns}")
    table = {
        "environment": measuring.environment(),
        "placed": placed(args.rows, args.columns),
        "quantizers": quantizers(args.rows, args.columns),
        "modules": modules(),
    }
    measuring.write(args.out, table)


if __name__ == "__main__":
    main()
