"""The table of kernels of grouped products, and what they need of a machine, a recipe and linears.

Kernel selection is not fusion: a row names kernels that run one op (`BasicOperation.kernel_rows`),
in the place of PyTorch's. The rules of grouped MLPs select theirs by the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fusible import activations
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
from fusible.fuser.rules import KernelRow
from fusible.kernels.sm90 import limits as sm90
from fusible.kernels.sm100 import limits as sm100
from fusible.ops.grouped_kernels import GroupedKernels
from fusible.ops.sm90_fp8_kernels import SM90_FP8
from fusible.ops.sm90_kernels import SM90
from fusible.ops.sm100_kernels import SM100
from fusible.versions import CUDA_DRIVER, CUDNN_FRONTEND, CUTLASS_DSL

SM90_INTERLEAVES = (None, *sm90.INTERLEAVES[1:])
"""Layouts of gate and linear columns that the SM90 kernels take: halves, or blocks of columns."""

NO_OVERRIDE = equal(this.backward_override, None)
CUTLASS = at_least(
    this.cutlass_dsl, CUTLASS_DSL, f"pip install 'nvidia-cutlass-dsl[cu13]>={CUTLASS_DSL}'"
)
_CUDNN = at_least(
    this.cudnn_frontend, CUDNN_FRONTEND, f"pip install 'nvidia-cudnn-frontend>={CUDNN_FRONTEND}'"
)
_DRIVER = at_least(this.cuda_driver, CUDA_DRIVER, "update the GPU's driver")


def needs_sm90(*linears: Any) -> tuple[Condition, ...]:
    """Conditions of the SM90 kernels on the machine, the recipe and linears."""
    return (
        equal(this.sm, sm90.ARCHITECTURE),
        CUTLASS,
        # Under a recipe, operands are dequantized to BF16.
        where(this.quantizes, False, one_of(linears[0].dtype, *sm90.DTYPES)),
        *_sizes(sm90.MULTIPLE_OF, *linears),
    )


def needs_sm90_fp8(*linears: Any) -> tuple[Condition, ...]:
    """Conditions of the FP8 products of SM90 on the machine, the recipe and linears."""
    formats = (
        one_of(this.scaling.input, *sm90.FP8_SCALING["input"]),
        one_of(this.scaling.weight, *sm90.FP8_SCALING["weight"]),
        # With an override there is none of a gradient: the backward multiplies BF16.
        where(this.backward_override, None, one_of(this.scaling.grad, *sm90.FP8_SCALING["grad"])),
    )
    return (
        equal(this.sm, sm90.ARCHITECTURE),
        CUTLASS,
        equal(this.fp8_products, True, "set fp8_products=True in the recipe"),
        *[where(this.fp8_products, True, need) for need in formats],
        NO_OVERRIDE,
        *_sizes(sm90.FP8_MULTIPLE_OF, *linears),
    )


def needs_sm100(*linears: Any) -> tuple[Condition, ...]:
    """Conditions of cuDNN's kernels on the machine, the recipe and linears."""
    return (
        one_of(this.sm, *sm100.ARCHITECTURES),
        _CUDNN,
        CUTLASS,
        _DRIVER,
        one_of(this.reduction_blocks.input, *sm100.REDUCTION_BLOCKS),
        equal(this.reduction_blocks.weight, this.reduction_blocks.input),
        equal(this.reduction_blocks.grad, this.reduction_blocks.input),
        NO_OVERRIDE,
        equal(linears[0].dtype, sm100.DTYPE),
        *_sizes(sm100.MULTIPLE_OF, *linears),
        at_most(linears[0].num_groups, sm100.MAX_GROUPS),
    )


def _sizes(unit: int, *linears: Any) -> list[Condition]:
    sizes = [size for linear in linears for size in (linear.in_features, linear.out_features)]
    return [multiple_of(size, unit) for size in sizes]


class GroupedKernelsRow(NamedTuple):
    """A row of the table: kernels of grouped products on an architecture, and what they need."""

    name: str
    kernels: GroupedKernels
    needs: Callable[..., tuple[Condition, ...]]
    """Makes the conditions on the machine, the recipe and linears."""
    glu_needs: tuple[Condition, ...]
    """Their epilogues of activations, of `fc1`, `act` and `fc2` of a grouped MLP."""
    worth: str

    @property
    def for_linear(self) -> KernelRow:
        """For `BasicOperation.kernel_rows` of a linear."""
        return KernelRow(self.name, self.kernels, self.needs(this.op), self.worth)

    @property
    def for_mlp(self) -> KernelRow:
        """For rules over a grouped MLP, `fc1`, `act` and `fc2`."""
        needs = (*self.needs(this.fc1, this.fc2), *self.glu_needs)
        return KernelRow(self.name, self.kernels, needs, self.worth)


_SM90_GLU_CONDITIONS = (
    one_of(this.act.glu_interleave_size, *SM90_INTERLEAVES),
    multiple_of(this.fc2.in_features, this.act.glu_interleave_size),
)
_INTERLEAVE_HINT = (
    "store FC1's weight and bias by fusible.interleave_glu and pass "
    f"glu_interleave_size={sm100.INTERLEAVE}"
)
SM90_FP8_ROW = GroupedKernelsRow(
    "sm90_fp8",
    SM90_FP8,
    needs_sm90_fp8,
    (
        equal(this.fc1.dtype, "bfloat16"),  # which the epilogue rounds to
        *_SM90_GLU_CONDITIONS,
        where(
            this.act.gated,
            True,
            where(
                this.act.glu_interleave_size,
                None,
                multiple_of(this.fc2.in_features, sm90.FP8_GLU_UNIT),
            ),
        ),
    ),
    "The launches multiply in FP8, on rows that one launch quantizes for both uses.",
)
SM90_ROW = GroupedKernelsRow(
    "sm90",
    SM90,  # whose CUDA implementation is chosen by the same limits
    needs_sm90,
    # Under a recipe the epilogue rounds to BF16, as operands are dequantized to.
    (where(this.quantizes, True, equal(this.fc1.dtype, "bfloat16")), *_SM90_GLU_CONDITIONS),
    "One launch a product for all groups and the rows past them.",
)
KERNELS = (
    SM90_FP8_ROW,
    SM90_ROW,
    GroupedKernelsRow(
        "sm100",
        SM100,
        needs_sm100,
        (
            one_of(this.act.activation, *activations.SM100_ACTIVATIONS),
            where(
                this.act.gated,
                True,
                equal(this.act.glu_interleave_size, sm100.INTERLEAVE, _INTERLEAVE_HINT),
            ),
            where(this.format.input, "none", one_of(this.act.activation, *sm100.BF16_ACTIVATIONS)),
            where(this.format.input, "none", one_of(this.act.clamp, None, sm100.BF16_CLAMP)),
        ),
        "The products multiply in the recipe's own format, in BF16 without a recipe.",
    ),
)
"""In order of priority."""
