"""The Hopper kernels one by one, against PyTorch's grouped product and quack's kernels.

    python benchmarks/grouped_gemm_sm90.py [--config NAME ...] [--out FILE]

All contestants of a cell run interleaved in one process; the L2 cache is flushed before each run;
CUDA events; median. quack takes part if it is installed, in its best known tile of each cell.
"""

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import measuring
import torch

from fusible.kernels import grouped
from fusible.kernels.glu import Glu

# quack's best tiles, of 36 tried for each cell: rows x columns, ping-pong or cooperative,
# cluster, dynamic scheduler. Columns: glu_keep, glu, fc2, dglu, dgrad1, wgrad1, wgrad2.
QUACK_TILES = {
    ("qwen3-30b", "balanced"): "256x128co21d 256x192co21d 128x160pp21 128x128pp12d 128x256co21 "
    "128x160pp21 128x192pp21",
    ("qwen3-30b", "skewed"): "128x128pp12 128x192pp12 192x128pp12 128x128pp12d 192x128pp12 "
    "192x128pp12d 128x192pp21d",
    ("mixtral-8x7b", "balanced"): "256x192co21d 256x128co12 128x256co21 128x128pp21d 256x192co12 "
    "192x128pp21 256x128co12d",
    ("mixtral-8x7b", "skewed"): "128x192pp12 128x128pp12 128x256co21d 128x128pp12 128x256co12 "
    "256x192co12d 256x128co12d",
    ("dsv3-ep32", "balanced"): "256x128co12d 128x256co21 128x128pp21 128x128pp21d 256x192co12 "
    "128x160pp21 128x128pp12",
    ("dsv3-ep32", "skewed"): "128x256co12 128x256co12 128x128pp12 128x128pp12 128x192pp12 "
    "128x256co21 128x128pp12",
    ("small", "balanced"): "128x128pp12 128x128pp12 128x128pp12 128x128pp12 128x128pp12 "
    "128x256co12 128x128pp21",
    ("small", "skewed"): "128x256co12 128x256co12 128x256co12 128x128pp12 128x256co12 "
    "128x128pp21 128x128pp21",
}
QUACK_COLUMNS = ("glu_keep", "glu", "fc2", "dglu", "dgrad1", "wgrad1", "wgrad2")


def fusible_calls(t: dict[str, torch.Tensor], kernels: ModuleType = grouped) -> measuring.Calls:
    """Our kernels, or another module's functions of their names."""
    ends, w1, w2, scales = t["ends"], [t["w1"]], [t["w2"]], t["scales"]
    return {
        "fc1": lambda: kernels.grouped_mm(t["x"], w1, ends),
        "glu_keep": lambda: kernels.grouped_glu(t["x"], w1, ends, scales, Glu()),
        "glu": lambda: kernels.grouped_glu(t["x"], w1, ends, scales, Glu(), None, False)[1],
        "fc2": lambda: kernels.grouped_mm(t["act"], w2, ends),
        "dglu": lambda: kernels.grouped_dglu(t["dy"], w2, ends, t["preact"], scales, Glu()),
        "dgrad1": lambda: kernels.grouped_mm(t["d_preact"], w1, ends, transpose_w=True),
        "wgrad1": lambda: kernels.grouped_wgrad(t["d_preact"], t["x"], ends),
        "wgrad2": lambda: kernels.grouped_wgrad(t["dy"], t["act"], ends),
    }


def torch_calls(t: dict[str, torch.Tensor]) -> measuring.Calls:
    """PyTorch's grouped product; it has no fused epilogues."""
    product, ends = torch.nn.functional.grouped_mm, t["ends"]
    return {
        "fc1": lambda: product(t["x"], t["w1"].mT, offs=ends),
        "fc2": lambda: product(t["act"], t["w2"].mT, offs=ends),
        "dgrad1": lambda: product(t["d_preact"], t["w1"], offs=ends),
        "wgrad1": lambda: product(t["d_preact"].mT, t["x"], offs=ends),
        "wgrad2": lambda: product(t["dy"].mT, t["act"], offs=ends),
    }


def quack_call(
    t: dict[str, torch.Tensor], op: str, tile: str, outputs: dict[str, Any] | None = None
) -> Callable[[], Any]:
    """One of quack's kernels in a tile such as 128x192pp12d, into tensors made beforehand.

    ``outputs`` keeps these for calls of the same op in other tiles.
    """
    from quack import gemm_interface
    from quack.gemm_config import GemmConfig

    dynamic = tile.endswith("d")
    m, rest = tile.rstrip("d").split("x")
    n, cluster = rest[:-4], rest[-2:]
    config = GemmConfig(
        tile_m=int(m),
        tile_n=int(n),
        pingpong="pp" in rest,
        is_dynamic_persistent=dynamic,
        cluster_m=int(cluster[0]),
        cluster_n=int(cluster[1]),
        device_capacity=9,
    )
    how = {"dynamic_scheduler": dynamic, "config": config}
    outputs = {} if outputs is None else outputs

    def like(name: str) -> torch.Tensor:
        if name not in outputs:
            outputs[name] = torch.empty_like(t[name])
        return outputs[name]

    if op in ("glu_keep", "glu"):
        preact, out = like("preact") if op == "glu_keep" else None, like("act")
        how |= {"activation": "swiglu", "cu_seqlens_m": t["starts"], "tuned": False}
        run = gemm_interface._gemm_act_call
        return lambda: run(t["x"], t["w1"].mT, preact, out, None, None, **how)
    if op == "dglu":
        dx, out = like("preact"), like("act")
        how |= {"activation": "swiglu", "cu_seqlens_m": t["starts"], "tuned": False}
        how |= {"colvec_scale": t["scales"], "colvec_reduce": True}
        run = gemm_interface._gemm_dact_call
        return lambda: run(t["dy"], t["w2"], t["preact"], dx, out, **how)
    a, b, out, by = {
        "fc1": (t["x"], t["w1"].mT, "preact", "cu_seqlens_m"),
        "fc2": (t["act"], t["w2"].mT, "x", "cu_seqlens_m"),
        "dgrad1": (t["d_preact"], t["w1"], "x", "cu_seqlens_m"),
        "wgrad1": (t["d_preact"].mT, t["x"], "w1", "cu_seqlens_k"),
        "wgrad2": (t["dy"].mT, t["act"], "w2", "cu_seqlens_k"),
    }[op]
    into, how = like(out), how | {by: t["starts"]}
    return lambda: gemm_interface.gemm_tuned.fn(a, b, into, **how)


def quack_calls(t: dict[str, torch.Tensor], name: str, split: str) -> measuring.Calls:
    """Quack's kernels in their best known tiles."""
    tiles = dict(zip(QUACK_COLUMNS, QUACK_TILES[name, split].split(), strict=True))
    tiles["fc1"] = tiles["glu_keep"]
    return {op: quack_call(t, op, tile) for op, tile in tiles.items()}


def flops(config: measuring.Config, op: str) -> float:
    """Floating-point operations of the matrix product."""
    second = op in ("fc2", "dglu", "wgrad2")
    return 2.0 * config.rows * config.hidden * config.expert * (1 if second else 2)


def main() -> None:
    """Run every cell and print, for each, our time over the best peer's."""
    parser = measuring.parser_of(__doc__)
    measuring.add_shapes(parser)
    options = parser.parse_args()
    cells = []
    print(f"{'config':14s} {'split':9s} {'op':9s} {'ms':>8s} {'TFLOP/s':>8s}  torch   quack")
    for name, split, config in measuring.with_splits(measuring.shapes_of(options)):
        operands = measuring.tensors(config, measuring.split_sizes(config, split))
        contestants = {"fusible": fusible_calls(operands), "torch": torch_calls(operands)}
        if name in measuring.CONFIGS:
            with contextlib.suppress(ImportError):
                contestants["quack"] = quack_calls(operands, name, split)
        for op in contestants["fusible"]:
            ms = measuring.measure({who: ops[op] for who, ops in contestants.items() if op in ops})
            rates = {who: flops(config, op) / t / 1e9 for who, t in ms.items()}
            cells.append({"config": name, "split": split, "op": op, "ms": ms, "tflops": rates})
            ratios = "  ".join(
                f"{ms[who] / ms['fusible']:5.3f}x" if who in ms else "   -  "
                for who in ("torch", "quack")
            )
            ours, rate = ms["fusible"], rates["fusible"]
            print(f"{name:14s} {split:9s} {op:9s} {ours:8.4f} {rate:8.0f}  {ratios}")
    measuring.write(options.out, {"environment": measuring.environment(), "cells": cells})


if __name__ == "__main__":
    main()
