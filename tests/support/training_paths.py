"""Every way that grouped experts run, for the tests of training: unfused, and by every fusion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import reference as ref
import torch
from number_formats import BLOCK, BLOCK_FP8, CURRENT, CURRENT_FP8, MX, NV
from torch import Tensor, nn

import fusible as fz
from fusible.recipes import Recipe
from fusible.testing import assume_target

GROUPS, WIDTH, INNER = 4, 128, 128
SIZES, ROWS = (3, 0, 4, 1), 10
FP32, BF16 = torch.float32, torch.bfloat16


def on_machine(name: str, of_cpu: str, device: str | None = None) -> AbstractContextManager:
    """The rules of a machine, with what computes the same as its kernels.

    The CPU runs what ``of_cpu`` plans; a Hopper GPU what ``"sm90"`` does, by the kernels
    themselves. The tests run on ``device``, by default the one that new tensors are on.
    """
    device = device or torch.get_default_device().type
    own = "sm90" if device == "cuda" else of_cpu
    return nullcontext() if name == own else assume_target(name)


@dataclass(frozen=True)
class Path:
    """One way; ``machine`` is whose rules run, by what computes the same as its kernels."""

    fired: tuple[str, ...] = ()
    """Names of rules, then of kernels that are selected for single ops."""
    dtype: torch.dtype = BF16
    recipe: Recipe | None = None
    machine: str = "sm80"
    stored: bool = False
    """Whether the weights are stored quantized."""
    form: str = "mlp"
    """``mlp``; ``parts``: with two tensors of split sizes, so that no rule takes it whole; or
    ``experts``: between a Dispatch and a Combine."""

    @contextmanager
    def on(self, device: str | None = None) -> Iterator[None]:
        """In force around a forward (and backward)."""
        scope = fz.autocast(enabled=self.recipe is not None, recipe=self.recipe)
        with scope, self.kernels(device):
            yield

    def kernels(self, device: str | None = None) -> AbstractContextManager:
        """Where a backward and delayed products find their kernels."""
        return on_machine(self.machine, "sm80", device)

    def build(self, single: bool = True, **options) -> fz.Sequential:
        layout = {"single_grouped_weight": single, "single_grouped_bias": single, "bias": True}
        options = {"dtype": self.dtype} | layout | options
        with fz.quantized_model_init(enabled=self.stored, recipe=self.recipe):
            mlp = ref.grouped_mlp(GROUPS, WIDTH, INNER, **options)
        mlp[1] = fz.ScaledSwiGLU(32)
        for bias in (b for fc in linears(mlp) for b in fc.biases()):
            nn.init.normal_(bias)
        if self.form == "experts":
            return fz.Sequential(fz.Dispatch(GROUPS), *mlp, fz.Combine())
        return mlp

    def inputs(self, sizes: Sequence[int] = SIZES, rows: int = ROWS) -> tuple[Tensor, ...]:
        """What the module takes; first x, which has ``rows`` rows, of which the last are unused."""
        x, splits, scales = ref.grouped_mlp_inputs(sizes, rows, WIDTH, self.dtype)
        if self.form == "experts":
            ids = torch.full((rows, 1), -1)
            ids[: sum(sizes), 0] = torch.arange(GROUPS).repeat_interleave(splits)
            return x, scales.detach()[:, None].requires_grad_(), ids
        return x, splits, scales, splits if self.form == "mlp" else splits.clone()

    def assert_equal_but_for_rounding(self, got: Tensor, want: Tensor) -> None:
        """Of what two computations give whose products may be summed in other orders.

        FC1, the activation and FC2 forward and backward are six results in a row; FP32 sums of 128
        terms count sqrt(128) each. A recipe quantizes them: a value that BF16 rounds otherwise
        turns the rounding of one in eps(BF16) / eps(format) elements, by eps(format) of its size,
        which is sqrt(eps(BF16) * eps(format)) over all, for each of the two operands.
        """
        if self.recipe is None:
            roundings = 6 * WIDTH**0.5 if self.dtype == FP32 else 6
            ref.assert_equal_but_for_rounding(got, want, roundings, self.dtype)
        else:
            eps = 2**-1 if self.recipe == NV else 2**-3
            assert got.isfinite().all()
            ref.assert_near(got, want, 2 * (eps * torch.finfo(BF16).eps) ** 0.5)


_PARTS90 = ("grouped_linear_glu_sm90", "sm90")
_RECIPE_PARTS90 = 2 * ("sm90",)

PATHS = {
    "unfused": Path(dtype=FP32),
    "unfused bf16": Path(),
    "unfused mxfp8": Path(recipe=MX),
    "sm90": Path(("grouped_mlp_sm90",), machine="sm90"),
    "sm90 parts": Path(_PARTS90, machine="sm90", form="parts"),
    "sm90 experts": Path(("moe_experts_sm90",), machine="sm90", form="experts"),
    **{
        f"sm90 {recipe.name}": Path(("grouped_mlp_sm90",), recipe=recipe, machine="sm90")
        for recipe in (MX, BLOCK, CURRENT, NV)
    },
    "sm90 fp8": Path(("grouped_mlp_sm90_fp8",), recipe=BLOCK_FP8, machine="sm90"),
    "sm90 fp8 current": Path(("grouped_mlp_sm90_fp8",), recipe=CURRENT_FP8, machine="sm90"),
    "sm90 fp8 stored": Path(
        ("grouped_mlp_sm90_fp8",), recipe=BLOCK_FP8, machine="sm90", stored=True
    ),
    "sm90 fp8 parts": Path(2 * ("sm90_fp8",), recipe=BLOCK_FP8, machine="sm90", form="parts"),
    "sm90 fp8 experts": Path(
        ("moe_experts_sm90_fp8",), recipe=BLOCK_FP8, machine="sm90", form="experts"
    ),
    "unfused mxfp8 stored": Path(recipe=MX, stored=True),
    "sm90 mxfp8 stored": Path(("grouped_mlp_sm90",), recipe=MX, machine="sm90", stored=True),
    "sm90 mxfp8 parts": Path(_RECIPE_PARTS90, recipe=MX, machine="sm90", form="parts"),
    "sm100": Path(("grouped_mlp_sm100",), machine="sm100"),
    "sm100 mxfp8": Path(("grouped_mlp_sm100",), recipe=MX, machine="sm100"),
    "sm100 mxfp8 stored": Path(("grouped_mlp_sm100",), recipe=MX, machine="sm100", stored=True),
    "sm100 nvfp4": Path(("grouped_mlp_sm100",), recipe=NV, machine="sm100"),
    "sm100 mxfp8 parts": Path(2 * ("sm100",), recipe=MX, machine="sm100", form="parts"),
}


def linears(module: nn.Module) -> list[fz.GroupedLinear]:
    return [m for m in module if isinstance(m, fz.GroupedLinear)]


paths = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
layouts = pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])


def some_paths(*names: str):
    """Of these names only, where a test takes long."""
    return pytest.mark.parametrize("path", [PATHS[name] for name in names], ids=names)
