"""Each built-in fusion against its parts: a rule stays only where it is faster.

Runs each pattern with and without the rule, interleaved in one process, forward (or backward) only
where the rule is, and prints the ratio. On CUDA times are of events, with L2 flushed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from measuring import environment, l2_flush, parser_of, timed, write

import fusible as fz
from fusible.fuser.registry import registry

SHAPES = {
    "cpu": [(256, 256, 512), (1024, 512, 512)],
    "cuda": [(4096, 4096, 4096), (16384, 2048, 2048)],
}


@contextmanager
def only(*names: str) -> Iterator[None]:
    """Only the named rules are in force."""
    rules = registry.rules
    registry.install([r for r in rules if r.name in names])
    try:
        yield
    finally:
        registry.install(rules)


def cases(
    rows: int, k: int, n: int, device: str, dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    """For each rule, a call whose time it should cut."""
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    x = torch.randn(rows, k, **options)
    addend = torch.randn(rows, n, **options)
    dy = torch.randn(rows, n, **options)
    linear = fz.BasicLinear(k, n, **options)
    act = fz.Sequential(fz.Linear(k, n, **options), fz.GELU())
    add = fz.Sequential(linear, fz.AddExtraInput())
    add_in_place = fz.Sequential(linear, fz.AddExtraInput(in_place=True))
    scale_add = fz.Sequential(linear, fz.ConstantScale(0.5), fz.AddExtraInput())
    fork = fz.Sequential(fz.MakeExtraOutput(in_place=True), fz.BasicLinear(k, n, **options))
    fork[1].requires_grad_(False)
    scale = fz.Sequential(fz.BasicLinear(k, n, **options), fz.ConstantScale(0.5))
    no_grad = torch.no_grad()
    on_cuda = {}
    if device == "cuda":
        wide = addend.clone()
        bias = fz.Sequential(fz.Bias(n, **options), fz.GELU())
        norm = fz.Sequential(fz.MakeExtraOutput(), fz.RMSNorm(n, **options))
        on_cuda = {
            "backward_activation_bias": backward_of(bias, wide, (dy,)),
            "backward_add_rms_norm": backward_of(norm, wide, (dy, dy.clone())),
        }
    return {
        "linear_bias_activation": no_grad(lambda: act(x)),
        "linear_add": no_grad(lambda: add(x, addend)),
        "linear_add, in place": no_grad(lambda: add_in_place(x, addend)),
        "linear_add, scaled": no_grad(lambda: scale_add(x, addend)),
        "backward_linear_add": backward_of(fork, x, (dy, x.clone())),
        "backward_linear_scale": backward_of(scale, x, (dy,)),
        **on_cuda,
    }


def backward_of(
    module: fz.Sequential, x: torch.Tensor, dys: tuple[torch.Tensor, ...]
) -> Callable[[], Any]:
    """Forward and backward of a module; a fusion of the backward makes its difference there."""
    x = x.detach().requires_grad_()
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]

    def call() -> Any:
        y = module(x)
        return torch.autograd.grad(y, wanted, dys if len(dys) > 1 else dys[0])

    return call


def microseconds(call: Callable[[], Any], device: str, flush: torch.Tensor | None) -> float:
    """Time of one call."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - start)
    assert flush is not None
    flush.zero_()
    torch.cuda._sleep(400_000)  # the host runs ahead, so that its own time is not in the number
    milliseconds = timed(call)
    torch.cuda.synchronize()
    return 1e3 * milliseconds()


def compare(call: Callable[[], Any], name: str, device: str, repeats: int) -> tuple[float, float]:
    """Microseconds without and with the rule, alternating.

    The median on CUDA; on a CPU the least, since other processes can only add.
    """
    flush = l2_flush() if device == "cuda" else None
    times: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 * (repeats + 5)):
        fused = bool(i % 2)
        with only(*([name] if fused else [])):
            call()  # plans anew, outside the measurement
            taken = microseconds(call, device, flush)
        if i >= 10:
            times[fused].append(taken)
    typical = min if device == "cpu" else statistics.median
    return typical(times[False]), typical(times[True])


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    found = []
    for rows, k, n in SHAPES[args.device]:
        for name, call in cases(rows, k, n, args.device, dtype).items():
            apart, fused = compare(call, name.partition(",")[0], args.device, args.repeats)
            row = {"rule": name, "rows": rows, "in": k, "out": n, "apart_us": apart}
            row |= {"fused_us": fused, "speedup": apart / fused}
            found.append(row)
            print(
                f"{name:24s} {rows}x{k}x{n}: {apart:9.1f} us apart, {fused:9.1f} fused, "
                f"{apart / fused:.3f}x"
            )
    about = {"environment": environment(), "device": args.device, "dtype": str(dtype)}
    write(args.out, {**about, "results": found})


if __name__ == "__main__":
    main()
