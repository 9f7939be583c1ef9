"""Compares MXFP8 quantization with torchao's ``to_mx`` over a million random blocks.

    python benchmarks/compare_torchao.py

Needs torchao (0.18 was compared), which the project does not depend on. Prints, for each rule and
element type, the blocks that differ, sorted by what they have in common.
"""

from __future__ import annotations

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from fusible.recipes.formats import E4M3, E5M2, mxfp8
from fusible.recipes.quantization import quantize

BLOCKS, CHUNK = 1_000_000, 100_000
RULES = {"up": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}


def inputs(kind: str, seed: int) -> torch.Tensor:
    """Return blocks of 32: normal, of every magnitude FP32 has, or any bits at all."""
    generator = torch.Generator().manual_seed(seed)
    shape = (CHUNK, 32)
    if kind == "bits":
        bits = torch.randint(-(2**31), 2**31, shape, generator=generator)
        return bits.to(torch.int32).view(torch.float32)
    x = torch.randn(shape, generator=generator)
    if kind == "wide":
        x = x * 2.0 ** torch.randint(-140, 120, (CHUNK, 1), generator=generator)
    return x


def causes(x: torch.Tensor, byte: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a block has that rules may treat differently, the first that holds counts."""
    amax = x.float().abs().amax(1)
    return {
        "NaN in the block": amax.isnan(),
        "Inf in the block": amax.isinf(),
        "our scale is byte 0": byte == 0,
        "amax is an FP32 denormal": (amax > 0) & (amax < 2.0**-126),
        "anything else": torch.ones_like(amax, dtype=torch.bool),
    }


def main() -> None:
    """Print one line per rule, element, input kind and cause of difference."""
    for rule, mode in RULES.items():
        for element in (E4M3, E5M2):
            for kind, dtype in (
                ("normal", torch.bfloat16),
                ("wide", torch.bfloat16),
                ("normal", torch.float32),
                ("wide", torch.float32),
                ("bits", torch.float32),
            ):
                counts: dict[str, list[int]] = {}
                for seed in range(BLOCKS // CHUNK):
                    x = inputs(kind, seed).to(dtype)
                    mine = quantize(x, mxfp8(element, rule))  # type: ignore[arg-type]
                    scale, data = to_mx(x, element.dtype, 32, mode)
                    byte = mine.scale.view(torch.uint8).flatten()
                    theirs = scale.view(torch.uint8).flatten()
                    same_data = mine.data.view(torch.uint8) == data.view(torch.uint8).view(x.shape)
                    scales, elements = byte != theirs, ~same_data.all(1)
                    left = scales | elements
                    for cause, holds in causes(x, byte).items():
                        mask = left & holds
                        n = counts.setdefault(cause, [0, 0])
                        n[0] += int((mask & scales).sum())
                        n[1] += int((mask & elements).sum())
                        left = left & ~holds
                seen = "; ".join(
                    f"{c}: {s} scales, {e} data" for c, (s, e) in counts.items() if s or e
                )
                print(f"{rule:<6}{element.name} {kind:<7}{dtype}: {seen or 'no difference'}")


if __name__ == "__main__":
    main()
