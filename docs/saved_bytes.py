"""Write the table of bytes saved for the backward into docs/training.md, by running the ops."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import tables
import torch
from measuring import grouped_mlp as mlp_of
from measuring import saved_mb, under

import fusible as fz
from fusible.ops import grouped_kernels
from fusible.testing import assume_target

PAGE = Path(__file__).parent / "training.md"
BEGIN, END = tables.markers("saved bytes")
HIDDEN, EXPERT, GROUPS, ROWS = 512, 256, 2, 256
RECIPES: dict[str, fz.recipes.Recipe | None] = {
    "none (BF16)": None,
    "MXFP8": fz.recipes.MXFP8BlockScaling(),
    "FP8 block": fz.recipes.Float8BlockScaling(),
    "FP8 current": fz.recipes.Float8CurrentScaling(),
    "NVFP4": fz.recipes.NVFP4BlockScaling(),
}


def grouped_mlp(device: str = "cpu", interleave: int | None = 32) -> fz.Sequential:
    """The grouped MLP; SM100's kernels need stripes of 32 gate and linear columns."""
    return mlp_of(HIDDEN, EXPERT, GROUPS, fz.ScaledSwiGLU(interleave), device=device)


def saved(module: fz.Sequential, recipe: fz.recipes.Recipe | None, rows: int) -> int:
    """Bytes of distinct memory that one forward of ``rows`` tokens saves, beside parameters."""
    device = next(module.parameters()).device
    x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    splits = torch.tensor([rows // GROUPS] * GROUPS, device=device)
    scales = torch.rand(rows, device=device, requires_grad=True)

    with under(recipe):
        mb = saved_mb(lambda: module(x, splits, scales, splits), module.parameters())
    return round(2**20 * mb)


def row(
    name: str, recipe: fz.recipes.Recipe | None, machine: str, interleave: int | None = 32
) -> list[str] | None:
    """One row of the table; None where no rule of that machine fuses the whole."""
    module = grouped_mlp(interleave=interleave)
    unfused = machine == "unfused"
    with (
        assume_target("sm80" if unfused else machine),
        # As on CUDA; on the CPU recipes dequantize to FP32.
        patch.object(grouped_kernels, "compute_dtype", lambda device: torch.bfloat16),
    ):
        per_token, fixed = per_token_and_fixed(module, recipe)
    plan = module.plan
    assert plan is not None
    joint = [rule for rule in plan.fired if "_mlp_" in rule]
    if not unfused and not joint:
        return None
    how = "unfused" if unfused else f"`{joint[0]}`"
    if interleave is None:
        how += ", gate and linear columns in halves"
    per_value = per_token / (HIDDEN + 3 * EXPERT)
    return [name, how, f"{per_token:,.0f}", f"{per_value:.2f}", f"{fixed / 2**20:.1f}"]


def per_token_and_fixed(
    module: fz.Sequential, recipe: fz.recipes.Recipe | None
) -> tuple[float, float]:
    """Bytes saved for each token, and those that do not grow with the tokens."""
    few, many = (saved(module, recipe, n * ROWS) for n in (1, 2))
    per_token = (many - few) / ROWS
    return per_token, few - per_token * ROWS


def table() -> str:
    """Every recipe, unfused and by each rule that fuses it."""
    columns = ["recipe", "run as", "bytes per token"]
    columns += ["per value of x, pre-activation, activation", "MiB in any case"]
    rows = []
    for name, recipe in RECIPES.items():
        for machine in ("unfused", "sm90", "sm100"):
            if cells := row(name, recipe, machine):
                rows.append(cells)
        if name == "FP8 block":  # whose backward computes the activation again in this layout
            rows.append(row(name, recipe, "sm90", None) or [])
    return tables.markdown(columns, rows)


if __name__ == "__main__":
    text = tables.with_table(PAGE.read_text(encoding="utf-8"), "saved bytes", table())
    PAGE.write_text(text, encoding="utf-8")
