"""Experts in FP8 by Hopper's kernels: rows are quantized while they are gathered."""

import copy

import pytest
import reference as ref
import torch
from checks import graph_of, hopper, launched, never_waiting, poison_free_memory
from number_formats import BLOCK_FP8, each_fp8_recipe

import fusible as fz
from fusible.testing import assume_target

pytestmark = hopper

TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 500, 4, 8, 272, 320
BF16 = torch.bfloat16
# A value that BF16 rounds otherwise turns the rounding of some quantized ones, of two operands.
NEAR = 2 * (2**-3 * 2**-7) ** 0.5


def experts(hidden=HIDDEN, inner=INNER, bias=False, recompute=False, capacity=None):
    """Dispatch to Combine, on the CPU."""
    torch.manual_seed(0)
    options = {"dtype": BF16, "single_grouped_weight": True, "single_grouped_bias": True}
    module = fz.Sequential(
        fz.Dispatch(EXPERTS, recompute_rows=recompute, capacity_factor=capacity),
        fz.GroupedLinear(EXPERTS, hidden, 2 * inner, bias=bias, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(EXPERTS, inner, hidden, bias=bias, **options),
        fz.Combine(),
    )
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) / 8)
    return module


def inputs(tokens=TOKENS, hidden=HIDDEN, seed=1):
    """Tokens, probabilities, ids (one expert without rows, some of another rank), gradient."""
    torch.manual_seed(seed)
    x, dy = (torch.randn(tokens, hidden).to(BF16) for _ in range(2))
    ids = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K))
    ids[ids == 2] = 4
    return x, torch.rand(tokens, TOP_K), ids, dy


def apart(module):
    """Dispatch, the experts and Combine as three runs, none of which gathers."""
    dispatch, combine, mlp = module[0], module[4], fz.Sequential(*module[1:4])

    def call(x, probs, ids):
        rows, splits, scales, row_map = dispatch(x, probs, ids)
        return combine(mlp(rows, splits, scales, splits), row_map)

    return call


def step(module, x, probs, ids, dy, call=None, recipe=BLOCK_FP8):
    """Output and all gradients, where the module is."""
    device = next(module.parameters()).device
    x, probs, ids, dy = (t.detach().to(device) for t in (x, probs, ids, dy))
    leaves = [x.requires_grad_(), probs.requires_grad_(), *module.parameters()]
    with assume_target("sm90"), fz.autocast(recipe=recipe):
        y = (call or module)(x, probs, ids)
        assert call is not None or module.plan.fired == ("moe_experts_sm90_fp8",)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute": True},
        {"bias": True},
        {"capacity": 0.5},
        {"hidden": 2880, "inner": 2880},
        {"hidden": 16, "inner": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, TOKENS, 3000])
@each_fp8_recipe
def test_bits_are_those_of_the_parts(options, tokens, recipe):
    module = experts(**options).cuda()
    given = inputs(tokens, options.get("hidden", HIDDEN))
    poison_free_memory()
    ref.assert_same_bits(
        step(module, *given, recipe=recipe), step(module, *given, apart(module), recipe=recipe)
    )


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"recompute": True}], ids=str)
@each_fp8_recipe
def test_kernels_equal_the_definitions(options, recipe):
    module, given = experts(**options), inputs()
    want = step(module, *given, recipe=recipe)
    got = step(copy.deepcopy(module).cuda(), *given, recipe=recipe)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        ref.assert_near(mine.cpu().float(), theirs.float(), NEAR)


@each_fp8_recipe
def test_no_launch_moves_rows_in_high_precision(recipe):
    """The launches of the MLP, and four: row map, sources, the sums forward and backward."""
    module, given = experts().cuda(), [t.cuda() for t in inputs()]
    step(module, *given, recipe=recipe)
    with never_waiting():
        step(module, *given, recipe=recipe)
    names, _ = launched(lambda: step(module, *given, recipe=recipe))
    parts, _ = launched(lambda: step(module, *given, apart(module), recipe=recipe))
    assert len(names) <= len(parts) - 1, (names, parts)
    assert not any("scatter" in name for name in names), names


@each_fp8_recipe
def test_a_captured_graph_follows_new_ids(recipe):
    module = experts().cuda()
    x, probs, ids, dy = [t.cuda() for t in inputs()]
    for t in (x, probs):
        t.requires_grad_()

    def call():
        with fz.autocast(recipe=recipe):
            y = module(x, probs, ids)
        return [y, *torch.autograd.grad(y, [x, probs, *module.parameters()], dy)]

    graph, captured = graph_of(call)
    for seed in range(4):
        with torch.no_grad():
            for mine, new in zip((x, probs, ids, dy), inputs(seed=seed), strict=True):
                mine.copy_(new)
        graph.replay()
        replayed = [t.detach().clone() for t in captured]
        ref.assert_same_bits(replayed, step(module, x, probs, ids, dy, recipe=recipe))


@each_fp8_recipe
def test_bitwise_over_10_runs(recipe):
    module, given = experts().cuda(), inputs(3000)
    first = step(module, *given, recipe=recipe)
    for _ in range(10):
        ref.assert_same_bits(step(module, *given, recipe=recipe), first)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled():
    module, given = experts().cuda(), inputs()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    ref.assert_same_bits(step(module, *given, compiled), step(module, *given))
