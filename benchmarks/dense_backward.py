"""Our one-pass backwards against PyTorch's kernels one after the other, on a GPU.

Activation + bias: its backward, and the sum over rows. RMS norm + residual: PyTorch's fused norm
backward, and the sum with the branch's gradient. Interleaved in one process, L2 flushed, BF16; a
copy of one tensor shows what the memory can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measuring import environment, measure, parser_of, write

import fusible  # noqa: F401 - registers the kernels
from fusible import formulas
from fusible.activations import UNARY
from fusible.kernels import dense

SHAPES = [(256, 1024), (4096, 4096), (16384, 2048), (16384, 5120), (32768, 8192)]


def cases(rows: int, features: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """For each pass, PyTorch's kernels and ours."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    dy, x, branch = (torch.randn(rows, features, **options) for _ in range(3))
    weight = torch.randn(features, **options)
    gain, (_, rstd) = weight.float(), formulas.rms_norm(x, weight, 1e-5)

    def apart(name: str) -> Callable[[], Any]:
        def call() -> Any:
            dx, _ = UNARY[name].backward(dy, x)
            return dx, dx.sum(0)

        return call

    def norm_apart() -> Any:
        dx, dweight = torch.ops.aten._fused_rms_norm_backward(
            dy, x, [features], rstd, weight, [True, True]
        )
        return dx + branch, dweight

    found: dict[str, dict[str, Callable[[], Any]]] = {
        name: {
            "torch": apart(name),
            "ours": lambda name=name: dense.activation_bias_backward(dy, x, name),
        }
        for name in ("gelu", "relu", "silu")
    }
    found["rms_norm"] = {
        "torch": norm_apart,
        "ours": lambda: dense.rms_norm_backward(dy, x, rstd, gain, branch),
    }
    found["copy"] = {"torch": lambda: branch.copy_(x)}
    return found


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    found = []
    for rows, features in SHAPES:
        for name, calls in cases(rows, features).items():
            ms = measure(calls, options.repeats)
            medians = {who: 1e3 * t for who, t in ms.items()}
            found.append({"pass": name, "rows": rows, "features": features, **medians})
            ratio = f", {medians['torch'] / medians['ours']:.2f}x" if "ours" in medians else ""
            print(f"{name:10s} {rows}x{features}: {medians} us{ratio}")
    write(options.out, {"environment": environment(), "results": found})


if __name__ == "__main__":
    main()
