"""FlopCounterMode counts what the formulas of matrix products say, fused or not."""

import subprocess
import sys

import pytest
import torch
from number_formats import BLOCK_FP8, CURRENT, KINDS
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fusible as fz
from fusible.kernels.sm100.limits import GROUP_ROWS
from fusible.recipes.blocks import padded_size
from fusible.testing import assume_target

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 64, 128, 256, 4, 2
GROUPED = {"bias": False, "dtype": torch.bfloat16}


def counted(function, *, fused: bool = False) -> int:
    """What the mode counts; the hooks that it sets on all modules let nothing fuse."""
    with FlopCounterMode(display=False) as counter:
        if fused:
            counter.mod_tracker.__exit__()
        function()
        if fused:
            counter.mod_tracker.__enter__()
    return counter.get_total_flops()


def block(single):
    options = {**GROUPED, "single_grouped_weight": single}
    return fz.Sequential(
        fz.TopKRouter(HIDDEN, EXPERTS, TOP_K, dtype=torch.bfloat16),
        fz.Dispatch(EXPERTS),
        fz.GroupedLinear(EXPERTS, HIDDEN, 2 * INNER, **options),
        fz.ScaledSwiGLU(glu_interleave_size=32),
        fz.GroupedLinear(EXPERTS, INNER, HIDDEN, **options),
        fz.Combine(),
    )


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("recipe", [*KINDS.values(), BLOCK_FP8], ids=[*KINDS, "fp8_products"])
@pytest.mark.parametrize("target", ["cpu", "sm90", "sm100"])
def test_a_moe_block_counts_as_its_closed_form(target, recipe, single):
    moe = block(single)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with assume_target(target), fz.autocast(enabled=recipe is not None, recipe=recipe):
        forward = counted(lambda: moe(x), fused=True)
        assert target == "sm100" or counted(lambda: moe(x)) == forward
        y = moe(x).float().sum()
        backward = counted(y.backward)
    rows = TOKENS * TOP_K
    fused_on_sm100 = "grouped_mlp_sm100" in moe.plan.fired
    assert fused_on_sm100 == (target == "sm100" and (not recipe or "block" not in recipe.name)
                              and recipe is not CURRENT)  # fmt: skip
    if fused_on_sm100:
        rows = padded_size(rows, EXPERTS, GROUP_ROWS)
    router, mlp = 2 * TOKENS * HIDDEN * EXPERTS, 2 * HIDDEN * (2 * INNER + INNER)
    reduced = rows
    if target == "sm90" and recipe is BLOCK_FP8:  # rows of FP8 weight gradients
        reduced = (rows + 127 * EXPERTS) // 128 * 128
    assert forward == router + rows * mlp
    assert backward == 2 * router + (rows + reduced) * mlp


def test_a_dense_linear_by_fp8_products_counts_as_its_closed_form():
    linear = fz.Linear(HIDDEN, INNER, dtype=torch.bfloat16)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with assume_target("sm90"), fz.autocast(recipe=BLOCK_FP8):
        assert counted(lambda: linear(x), fused=True) == 2 * TOKENS * HIDDEN * INNER
        y = linear(x).float().sum()
        assert linear.plan.kernels == ("sm90_fp8",)
        assert counted(y.backward) == 2 * (TOKENS + 128) * HIDDEN * INNER


def test_gradients_that_nobody_needs_are_not_counted():
    linear = fz.GroupedLinear(4, 16, 24, single_grouped_weight=True, bias=False)
    x, splits = torch.randn(10, 16), torch.tensor([5, 0, 3, 2])
    y = linear(x, splits).sum()
    assert counted(y.backward) == 2 * 10 * 16 * 24  # the weights' alone


def test_weight_gradients_added_to_main_grad_are_counted():
    linear = fz.GroupedLinear(
        4, 16, 24, single_grouped_weight=True, bias=False, accumulate_into_main_grad=True
    )
    linear.weight.main_grad = torch.zeros(4, 24, 16)
    x, splits = torch.randn(10, 16), torch.tensor([5, 0, 3, 2])
    y = linear(x, splits).sum()
    assert counted(y.backward) == 2 * 10 * 16 * 24


@pytest.mark.parametrize("target", ["cpu", "sm90"])
def test_dense_ops_count_as_torch_linear(target):
    x = torch.randn(6, 16, requires_grad=True)
    mlp = fz.Sequential(
        fz.MakeExtraOutput(in_place=True).set_extra_output_channel(0, "x", output_to_caller=False),
        fz.BasicLinear(16, 32),
        fz.Bias(32),
        fz.GELU(),
        fz.BasicLinear(32, 16),
        fz.ConstantScale(0.5),
        fz.AddExtraInput().set_extra_input_channel(0, "x"),
    )
    with assume_target(target):
        assert counted(lambda: mlp(x)) == counted(lambda: mlp(x), fused=True) == 2 * 2 * 6 * 16 * 32
        assert {"linear_bias_activation", "linear_add"} <= set(mlp.plan.fired)
        y = mlp(x).sum()
        assert counted(y.backward) == 4 * 2 * 6 * 16 * 32


def test_the_count_of_a_traced_block_on_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        moe = block(True)
        x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        total = counted(lambda: moe(x).float().sum().backward())
    rows = TOKENS * TOP_K
    assert total == 3 * (2 * TOKENS * HIDDEN * EXPERTS + 2 * rows * HIDDEN * 3 * INNER)


def test_every_op_that_multiplies_is_registered():
    """By name: those of products, the activations that are their epilogue or input, the router."""
    products = {
        name.removeprefix("fusible::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fusible::")
        and any(part in name for part in ("_mm", "_gemm", "wgrad", "glu", "route_tokens"))
        and not name.startswith("fusible::quantize_")
    }
    known = {op.__name__ for op in flop_registry if str(op).startswith("fusible.")}
    assert products == known
    assert len(known) == 15


def test_it_matters_not_which_is_imported_first():
    """In the process of these tests fusible is, in another one PyTorch's counter."""
    imported = [*sys.modules]
    assert imported.index("fusible.flops") < imported.index("torch.utils.flop_counter")
    code = (
        "import torch, torch.utils.flop_counter, fusible as fz\n"
        "linear = fz.GroupedLinear(1, 2, 3, bias=False)\n"
        "with torch.utils.flop_counter.FlopCounterMode(display=False) as count:\n"
        "    linear(torch.ones(5, 2), [5])\n"
        "print(count.get_total_flops())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["60"]
