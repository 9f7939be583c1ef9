"""A case's module of the package, and its reference."""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fusible as fz

from .cases import Case, Op
from .catalog import KINDS
from .layout import Layout, of_case


class Reference(nn.Sequential):
    """References in the order of the ops; extra tensors go where ``layout`` says."""

    def __init__(self, modules: list[nn.Module], layout: Layout) -> None:
        super().__init__(*modules)
        self.layout = layout

    def forward(self, x: Tensor, *extra: Tensor) -> Any:
        made: dict[tuple[int, int], Tensor] = {(-1, k): t for k, t in enumerate(extra)}
        for i, module in enumerate(self):
            result = module(x, *[made[source] for source in self.layout.sources[i]])
            x, *outputs = result if isinstance(result, tuple) else (result,)
            made.update({(i, slot): t for slot, t in enumerate(outputs)})
        public = [made[source] for source in self.layout.public]
        return (x, *public) if public else x


@dataclass
class Side:
    """One of the modules that a case's program is done to."""

    case: Case
    layout: Layout
    dtype: torch.dtype
    of_package: bool
    model: nn.Module

    @property
    def rounded(self) -> torch.dtype:
        """The dtype in which values are drawn, on every side."""
        return getattr(torch, self.case.dtype)

    def fresh(self) -> nn.Module:
        """A new module as at the start."""
        return make(self.case, self.layout, self.of_package, self.dtype)

    def random(self, shape: Any, name: str, scale: float = 1.0, middle: float = 0.0) -> Tensor:
        """Values that are the same on every side."""
        seed = zlib.crc32(f"{self.case.seed}/{name}".encode())
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + middle
        return values.to(self.rounded).to(self.dtype)

    def parameter(self, p: Tensor, name: str) -> Tensor:
        """Values for a parameter: sums over features keep their size, gains are near one."""
        if p.dim() > 1:
            return self.random(p.shape, name, p.shape[-1] ** -0.5)
        return self.random(p.shape, name, 0.3, float(name.endswith(("weight", "gain"))))


def sides(case: Case) -> list[Side]:
    """The package, the reference in FP64, and for narrower dtypes the reference in those."""
    layout, dtype = of_case(case), getattr(torch, case.dtype)
    made = [(True, dtype), (False, torch.float64)]
    if dtype != torch.float64:
        made.append((False, dtype))
    return [Side(case, layout, d, p, make(case, layout, p, d)) for p, d in made]


def make(case: Case, layout: Layout, of_package: bool, dtype: torch.dtype) -> nn.Module:
    """The module of one side, its parameters drawn by name."""
    if of_package:
        model: nn.Module = _of_package(case, layout, dtype)
    else:
        modules = []
        for op, shape in zip(case.ops, layout.shapes, strict=False):
            drawn = getattr(torch, case.dtype)
            module = KINDS[op.name].twin(shape, plain(op), drawn).to(of_op(op, dtype))
            if hasattr(module, "recipe"):
                module.recipe = case.recipe
            if modules and op.options.get("backward"):
                modules[-1].before_quantize = True
            modules.append(module)
        model = Reference(modules, layout)
    side = Side(case, layout, dtype, of_package, model)
    fill(side)
    return model


def _of_package(case: Case, layout: Layout, dtype: torch.dtype) -> fz.Sequential:
    modules = []
    with fz.quantized_model_init(recipe=recipe(case)) if case.stored else nullcontext():
        for op, shape in zip(case.ops, layout.shapes, strict=False):
            modules.append(KINDS[op.name].op(shape, plain(op), of_op(op, dtype)))
    for module, op, sources in zip(modules, case.ops, layout.sources, strict=True):
        for slot, channel in enumerate(op.reads):
            if channel is not None and sources[slot][0] >= 0:
                module.set_extra_input_channel(slot, channel)
        for slot, (channel, public) in enumerate(op.writes):
            if channel is not None:
                module.set_extra_output_channel(slot, channel, output_to_caller=public)
    return fz.Sequential(*modules)


def plain(op: Op) -> dict[str, Any]:
    """The options that the op itself has."""
    return {k: v for k, v in op.options.items() if k != "dtype"}


def of_op(op: Op, dtype: torch.dtype) -> torch.dtype:
    """The dtype of an op's parameters on a side of this dtype."""
    of_own = "dtype" in op.options and dtype != torch.float64
    return getattr(torch, op.options["dtype"]) if of_own else dtype


def recipe(case: Case) -> Any:
    """The package's recipe of the case's, or None."""
    r = fz.recipes
    made = {
        "mxfp8": r.MXFP8BlockScaling,
        "mxfp8 hybrid": lambda: r.MXFP8BlockScaling(fp8_format=r.Format.HYBRID),
        "fp8 block": r.Float8BlockScaling,
        "fp8 block, f32 scales": lambda: r.Float8BlockScaling(use_f32_scales=True),
        "fp8 current": r.Float8CurrentScaling,
        "nvfp4": lambda: r.NVFP4BlockScaling(
            disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
        ),
    }
    return None if case.recipe is None else made[case.recipe]()


def fill(side: Side) -> None:
    """Draw every parameter."""
    with torch.no_grad():
        for name, p in side.model.named_parameters():
            p.copy_(side.parameter(p, name))
