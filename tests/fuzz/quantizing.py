"""The package's quantizers against the formats' definitions: whole tensors and groups of rows."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from fusible import recipes

from .build import Side, recipe
from .caller import splits
from .formats import RECIPES, Formats

TINY = 1e-30
"""The package's factors from value to element leave FP32 below; zeros stay zeros there."""


def _values(side: Side, how: str, name: str) -> Tensor:
    """Normal values, of one size or of many, some of them zero."""
    shape = side.case.shape
    x = side.random(shape, name).float()
    rng = random.Random(f"{side.case.seed}/{name}")
    if how == "sizes":
        exponents = (side.random(shape, f"{name}/s") * 4).clamp(-9, 9).int()
        x = x * torch.ldexp(torch.ones(shape), exponents)
    if how == "rows":
        x = x * torch.ldexp(torch.ones(shape[0], 1), torch.arange(shape[0])[:, None] % 20 - 10)
    if how == "sparse":
        x = torch.where(side.random(shape, f"{name}/z") > 0.5, x, torch.zeros(()))
    if how == "tiny":
        x = torch.where(side.random(shape, f"{name}/z") > 0.5, x * 10.0 ** -rng.randint(31, 43), 0)
    return x.to(side.rounded).float()


def differences(side: Side, options: dict[str, Any], name: str) -> list[str]:
    """A sentence for each use whose dequantized values are not those of the format."""
    x = _values(side, options["values"], name)
    role, grouped = options["role"], options.get("groups")
    made: recipes.Recipe = recipe(side.case)
    quantizer = recipes.Quantizer(made.format(role))
    exact = getattr(RECIPES[side.case.recipe], role)
    given = x.to(side.dtype)
    if grouped:
        sizes = splits(side, grouped, x.shape[0], name)
        quantized: Any = recipes.group_quantize(given, quantizer, grouped, sizes)
        parts = [*sizes.tolist(), x.shape[0] - int(sizes.sum())]
    else:
        quantized, parts = quantizer(given), [x.shape[0]]
    found = []
    for columnwise in (False, True):
        wanted = torch.cat([_exact(exact, part, columnwise) for part in x.double().split(parts)])
        if grouped:
            wanted[int(sizes.sum()) :] = 0
        got = quantized.dequantize(torch.float32, columnwise=columnwise)
        if not _equal(got, wanted, x):
            use = "column-wise" if columnwise else "row-wise"
            error = (got.double() - wanted).abs().max().item()
            found.append(f"values for {use} use: error {error:.3g} at up to {x.abs().max():.3g}")
    return found


def _exact(quantize: Any, part: Tensor, columnwise: bool) -> Tensor:
    if not part.numel():
        return part
    return quantize(part.t().contiguous()).t() if columnwise else quantize(part)


def _equal(got: Tensor, wanted: Tensor, x: Tensor) -> bool:
    if not x.numel() or x.abs().max() < TINY:
        return bool(got.isfinite().all() and (got[x == 0] == 0).all())
    return torch.equal(got, wanted.float())


def draw(rng: random.Random) -> tuple[tuple[int, int], str, dict[str, Any]]:
    """A shape, a recipe and the options."""
    name = rng.choice(list(RECIPES))
    formats: Formats = RECIPES[name]
    role = rng.choice(["input", "weight", "grad"])
    grouped = rng.random() < 0.4 and not (name.startswith("fp8 block") and role == "weight")
    high = 128 if name.startswith("fp8 block") and role == "weight" else 1
    shape = (
        high * rng.choice([1, 2, 3] if high > 1 else [1, 5, 31, 64, 129]),
        formats.multiple * rng.choice([1, 2, 3]),
    )
    options = {"role": role, "values": rng.choice(["plain", "sizes", "rows", "sparse", "tiny"])}
    if grouped:
        options["groups"] = rng.choice([1, 3, 8])
    return shape, name, options
