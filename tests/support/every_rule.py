"""Every built-in rule and row of kernels, and a module for it: the table that tests go through."""

import torch
from number_formats import BLOCK_FP8, RECIPES

import fusible as fz

SIZES = [5, 0, 4, 2]
GROUPED = {"single_grouped_weight": True, "single_grouped_bias": True, "dtype": torch.bfloat16}


def dense(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def grouped_case(*ops):
    splits = torch.tensor(SIZES)
    extra = [
        splits if isinstance(op, fz.GroupedLinear) else torch.rand(12, requires_grad=True)
        for op in ops
    ]
    return fz.Sequential(*ops), (dense(12, ops[0].in_features), *extra)


def moe_case(hidden=16, inner=16, out=24, bias=True):
    experts = fz.Sequential(
        fz.Dispatch(4),
        fz.GroupedLinear(4, hidden, 2 * inner, **GROUPED),
        fz.ScaledSwiGLU(glu_interleave_size=8),
        fz.GroupedLinear(4, inner, out, bias=bias, **GROUPED),
        fz.Combine(),
    )
    ids = torch.tensor([[0, 1], [3, 9], [0, 3], [2, 0], [-1, 4], [3, 0]])
    return experts, (dense(6, hidden), torch.rand(6, 2, requires_grad=True), ids)


# rule: (a module that it takes whole and its inputs, the target)
FITS = {
    "moe_experts_sm90": (moe_case, "sm90"),
    "moe_experts_sm90_fp8": (lambda: moe_case(144, 64, 272, bias=False), "sm90"),
    "linear_bias_activation": (
        lambda: (fz.Sequential(fz.Linear(16, 8, dtype=torch.bfloat16), fz.GELU()), (dense(6, 16),)),
        "cpu",
    ),
    "linear_add": (
        lambda: (
            fz.Sequential(
                fz.BasicLinear(16, 8, dtype=torch.bfloat16),
                fz.ConstantScale(0.75),
                fz.AddExtraInput(),
            ),
            (dense(6, 16), dense(6, 8)),
        ),
        "cpu",
    ),
    "backward_linear_add": (
        lambda: (
            fz.Sequential(
                fz.MakeExtraOutput(in_place=True), fz.BasicLinear(16, 8, dtype=torch.bfloat16)
            ),
            (dense(6, 16),),
        ),
        "cpu",
    ),
    "backward_linear_scale": (
        lambda: (
            fz.Sequential(fz.BasicLinear(16, 8, dtype=torch.bfloat16), fz.ConstantScale(-1.5)),
            (dense(6, 16),),
        ),
        "cpu",
    ),
    "backward_activation_bias": (
        lambda: (
            fz.Sequential(fz.Linear(16, 8, dtype=torch.bfloat16), fz.GELU()),
            (dense(6, 16),),
        ),
        "sm90",
    ),
    "backward_add_rms_norm": (
        lambda: (
            fz.Sequential(fz.MakeExtraOutput(), fz.RMSNorm(16, dtype=torch.bfloat16)),
            (dense(6, 16),),
        ),
        "sm90",
    ),
    "grouped_mlp_sm90": (
        lambda: grouped_case(
            fz.GroupedLinear(4, 16, 32, **GROUPED),
            fz.ScaledSwiGLU(glu_interleave_size=8),
            fz.GroupedLinear(4, 16, 24, **GROUPED),
        ),
        "sm90",
    ),
    "grouped_linear_glu_sm90": (
        lambda: grouped_case(
            fz.GroupedLinear(4, 16, 32, **GROUPED), fz.ScaledClampedQGeGLU(limit=0.5)
        ),
        "sm90",
    ),
    "GroupedLinear.sm90": (
        lambda: grouped_case(fz.GroupedLinear(4, 16, 24, **GROUPED)),
        "sm90",
    ),
    "grouped_mlp_sm90 mxfp8": (
        lambda: grouped_case(
            fz.GroupedLinear(4, 64, 128, **GROUPED),
            fz.ScaledSwiGLU(),
            fz.GroupedLinear(4, 64, 96, **GROUPED),
        ),
        "sm90",
    ),
    "GroupedLinear.sm90 mxfp8": (
        lambda: grouped_case(fz.GroupedLinear(4, 64, 96, **GROUPED)),
        "sm90",
    ),
    "grouped_mlp_sm90_fp8": (
        lambda: grouped_case(
            fz.GroupedLinear(4, 144, 128, **GROUPED),
            fz.ScaledSwiGLU(),
            fz.GroupedLinear(4, 64, 272, **GROUPED),
        ),
        "sm90",
    ),
    "GroupedLinear.sm90_fp8": (
        lambda: grouped_case(fz.GroupedLinear(4, 144, 272, **GROUPED)),
        "sm90",
    ),
    "BasicLinear.sm90_fp8": (
        lambda: (
            fz.Sequential(fz.BasicLinear(144, 272, dtype=torch.bfloat16)),
            (dense(6, 144),),
        ),
        "sm90",
    ),
    "grouped_mlp_sm100": (
        lambda: grouped_case(
            fz.GroupedLinear(4, 64, 128, **GROUPED),
            fz.ScaledClampedQGeGLU(glu_interleave_size=32),
            fz.GroupedLinear(4, 64, 192, **GROUPED),
        ),
        "sm100",
    ),
    "GroupedLinear.sm100": (
        lambda: grouped_case(fz.GroupedLinear(4, 64, 192, **GROUPED)),
        "sm100",
    ),
}


def rule_of(name):
    """The rule, or row of an op's kernels, that a case is of."""
    return name.split()[0]


def used(plan):
    """The rules that fired, and the rows of kernels that were selected."""
    pairs = zip(plan.basic_ops, plan.kernel_rows, strict=True)
    return (*plan.fired, *[f"{type(op).__name__}.{row.name}" for op, row in pairs if row])


def scope_of(name):
    """The recipe that a case is under."""
    recipe = BLOCK_FP8 if rule_of(name).endswith("_fp8") else RECIPES.get(name.partition(" ")[2])
    return fz.autocast(enabled=recipe is not None, recipe=recipe)
