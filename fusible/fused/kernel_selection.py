"""Which kernels run a grouped linear on a machine: conditions of each architecture's kernels.

Kernel selection is not fusion: a row here names kernels for one op, in the place of PyTorch's. The
grouped MLP's rules have the same conditions (`fusible.fused.grouped_mlp`).
"""

from __future__ import annotations

from typing import Any

from fusible.fused.sm90_fp8_kernels import SM90_FP8
from fusible.fused.sm100_kernels import SM100
from fusible.fuser.conditions import (
    Condition,
    at_least,
    at_most,
    equal,
    multiple_of,
    one_of,
    this,
    where,
)
from fusible.fuser.rules import rule
from fusible.kernels.sm90 import limits as sm90
from fusible.kernels.sm100 import limits as sm100
from fusible.ops import GroupedLinear
from fusible.ops.grouped_kernels import LIBRARY, GroupedKernels
from fusible.versions import CUDA_DRIVER, CUDNN_FRONTEND, CUTLASS_DSL

_CUTLASS = at_least(
    this.cutlass_dsl, CUTLASS_DSL, f"pip install 'nvidia-cutlass-dsl[cu13]>={CUTLASS_DSL}'"
)
_CUDNN = at_least(
    this.cudnn_frontend, CUDNN_FRONTEND, f"pip install 'nvidia-cudnn-frontend>={CUDNN_FRONTEND}'"
)
_DRIVER = at_least(this.cuda_driver, CUDA_DRIVER, "update the GPU's driver")


def needs_sm90(*linears: Any) -> tuple[Condition, ...]:
    """What the SM90 kernels need of the machine, the recipe and linears."""
    return (
        equal(this.sm, sm90.ARCHITECTURE),
        _CUTLASS,
        # Under a recipe, operands are dequantized to BF16.
        where(this.quantizes, False, one_of(linears[0].dtype, *sm90.DTYPES)),
        *_sizes(sm90.MULTIPLE_OF, *linears),
    )


def needs_sm90_fp8(*linears: Any) -> tuple[Condition, ...]:
    """What the FP8 products of SM90 need of the machine, the recipe and linears."""
    return (
        equal(this.sm, sm90.ARCHITECTURE),
        _CUTLASS,
        one_of(this.recipe, *sm90.FP8_RECIPES),
        equal(this.fp8_products, True, "pass fp8_products=True to Float8BlockScaling"),
        *_sizes(sm90.FP8_MULTIPLE_OF, *linears),
    )


def needs_sm100(*linears: Any) -> tuple[Condition, ...]:
    """What the kernels of cuDNN's front end need of the machine, the recipe and linears."""
    return (
        one_of(this.sm, *sm100.ARCHITECTURES),
        _CUDNN,
        _CUTLASS,
        _DRIVER,
        one_of(this.format.input, *sm100.FORMATS),
        equal(this.format.weight, this.format.input),
        equal(this.format.grad, this.format.input),
        equal(linears[0].dtype, sm100.DTYPE),
        *_sizes(sm100.MULTIPLE_OF, *linears),
        at_most(linears[0].num_groups, sm100.MAX_GROUPS),
    )


def _sizes(unit: int, *linears: Any) -> list[Condition]:
    sizes = [size for linear in linears for size in (linear.in_features, linear.out_features)]
    return [multiple_of(size, unit) for size in sizes]


# With an override, the backward multiplies BF16.
@rule(*needs_sm90_fp8(this.linear), equal(this.backward_override, None), phase="kernels")
def grouped_linear_sm90_fp8(linear: GroupedLinear) -> GroupedKernels:
    """All three products multiply in FP8, from rows that one launch quantizes for both uses."""
    return SM90_FP8


@rule(*needs_sm90(this.linear), phase="kernels")
def grouped_linear_sm90(linear: GroupedLinear) -> GroupedKernels:
    """One launch for all groups and the rows past them; FP16 needs no host synchronisation."""
    return LIBRARY  # whose CUDA implementation is chosen by the same limits


@rule(*needs_sm100(this.linear), phase="kernels")
def grouped_linear_sm100(linear: GroupedLinear) -> GroupedKernels:
    """One launch forward and two backward, on operands in the recipe's own format."""
    return SM100
