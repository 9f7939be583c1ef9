"""Experts in FP8 on Hopper: rows are quantized while they are gathered, with the same bits."""

import copy
import weakref

import pytest
import reference as ref
import torch
from checks import Recorded, saved_tensors
from moe_experts import EXPERTS, HIDDEN, TOP_K, experts
from number_formats import BLOCK_FP8, CURRENT_FP8, each_fp8_recipe
from sm90_launches import sm90_on_cpu

import fusible as fz
from fusible.kernels import grouped, moe
from fusible.testing import assume_target

TOKENS = 150
BF16 = torch.bfloat16
GATHERED = ("moe_experts_sm90_fp8",)


def inputs(tokens=TOKENS, dtype=BF16, skewed=True):
    """Tokens, probabilities, ids (one expert without rows, some of another rank), gradient."""
    torch.manual_seed(1)
    x, dy = (torch.randn(tokens, HIDDEN).to(dtype) for _ in range(2))
    ids = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K))
    if skewed:
        ids[ids == 2] = 4
    return x.requires_grad_(), torch.rand(tokens, TOP_K).requires_grad_(), ids, dy


def apart(module):
    """Dispatch, the experts and Combine as three runs, none of which gathers."""
    dispatch, combine, mlp = module[0], module[4], fz.Sequential(*module[1:4])

    def call(x, probs, ids):
        rows, splits, scales, row_map = dispatch(x, probs, ids)
        more = [scales] * module[3].scale_bias
        y = combine(mlp(rows, splits, scales, splits, *more), row_map)
        assert mlp.plan.fired == ("grouped_mlp_sm90_fp8",)
        return y

    return call


def step(module, given, call=None, fired=GATHERED, recipe=BLOCK_FP8):
    """Output and all gradients."""
    x, probs, ids, dy = given
    with assume_target("sm90"), fz.autocast(recipe=recipe):
        y = (call or module)(x, probs, ids)
        assert call is not None or module.plan.fired == fired
    return [y.detach(), *torch.autograd.grad(y, [x, probs, *module.parameters()], dy)]


@each_fp8_recipe
@pytest.mark.parametrize("tokens", [0, 1, TOKENS, 600])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute_rows": True},
        {"bias": True},
        {"bias": True, "recompute_rows": True, "scale_bias": True},
        {"capacity_factor": 0.5},
        {"stored": ...},
        {"act": fz.ScaledClampedQGeGLU(8)},
    ],
    ids=str,
)
def test_bits_are_those_of_the_parts(options, tokens, recipe):
    if "stored" in options:
        options = {"stored": recipe}
    module, given = experts(**options), inputs(tokens)
    want = step(module, given, apart(module), recipe=recipe)
    ref.assert_same_bits(step(module, given, recipe=recipe), want)
    with torch.no_grad(), assume_target("sm90"), fz.autocast(recipe=recipe):
        assert torch.equal(module(*given[:3]), want[0])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["row_map", "split_sizes"])
def test_row_maps_and_sizes_of_another_dispatch(name, recompute):
    """Their rows are not those that this one's index names, so none are gathered."""
    parts = list(experts(bias=True, recompute_rows=recompute).children())
    outer = fz.Dispatch(EXPERTS)
    outer.set_extra_output_channel(outer.extra_output_names.index(name), "outer")
    for op in parts:
        if name in op.extra_input_names:
            op.set_extra_input_channel(op.extra_input_names.index(name), "outer")
    module = fz.Sequential(outer, *parts)
    x, probs, ids, dy = inputs(20)
    ids = ids.clamp(0, EXPERTS - 1)  # the outer one has no tail
    more = torch.rand(20 * TOP_K, 1).requires_grad_(), torch.randint(-1, EXPERTS, (20 * TOP_K, 1))
    dy = dy if name == "row_map" else torch.randn(20 * TOP_K, HIDDEN).to(BF16)

    def call(x, probs, ids):
        y, *_ = module(x, probs, ids, *more)
        assert module.plan.fired == GATHERED
        return y

    def one_by_one(x, probs, ids):
        rows, of_outer, _, map_of_outer = fz.Dispatch(EXPERTS)(x, probs, ids)
        rows, sizes, scales, row_map = fz.Dispatch(EXPERTS)(rows, *more)
        if name == "row_map":
            row_map = map_of_outer
        else:
            sizes = of_outer
        fc1, act, fc2 = [copy.deepcopy(op) for op in parts[1:4]]
        for mine, theirs in zip((fc1, fc2), (parts[1], parts[3]), strict=True):
            mine.weight, mine.bias = theirs.weight, theirs.bias
            mine.set_extra_input_channel(0, None)
        return fz.Combine()(fz.Sequential(fc1, act, fc2)(rows, sizes, scales, sizes), row_map)

    given = x, probs, ids, dy
    ref.assert_same_bits(step(module, given, call), step(module, given, one_by_one))


@each_fp8_recipe
def test_launches_have_the_same_bits(recipe):
    """From the addresses and pitches that the kernels get."""
    module, given = experts(), inputs()
    want = step(module, given, recipe=recipe)
    with sm90_on_cpu() as loaded:
        got = step(module, given, recipe=recipe)
    assert sorted(spec.kind for spec in loaded) == [
        "glu", "store", "store", "store", "wgrad", "wgrad",
    ]  # fmt: skip
    for mine, theirs in zip(got, want, strict=True):
        ref.assert_near(mine.float(), theirs.float(), 2 * (2**-3 * 2**-7) ** 0.5)


def uses_of(rowwise, columnwise):
    return "both" if rowwise and columnwise else "row" if rowwise else "column"


def of_rows(func, args):
    """What moves or quantizes rows: the op, its uses, and whether it gathers."""
    name = func._schema.name.removeprefix("fusible::")
    if name == "quantize_k_major" and args[0].dim() == 2:
        uses = uses_of(*args[-2:])
        yield uses if args[2] is None else f"{uses}, gathered"
    if name == "quantize_glu_backward":
        act, *uses, _ = args[-4:]
        yield uses_of(*uses) + ", activation" * act
    moves = "permute_rows", "permute_rows_quantized", "scatter_rows", "row_sources"
    if name in (*moves, "quantize", "dequantize"):
        yield name


def recorded(module, given, recipe=BLOCK_FP8):
    """What forward and backward do."""
    x, probs, ids, dy = given
    with assume_target("sm90"), fz.autocast(recipe=recipe), Recorded(of_rows) as forward:
        y = module(x, probs, ids)
    with Recorded(of_rows) as backward:
        if y.requires_grad:
            y.backward(dy)
    return forward.made, backward.made


@each_fp8_recipe
def test_rows_are_not_written_in_high_precision(recipe):
    both = ["row_sources", "both, gathered", "both"]
    assert recorded(experts(), inputs(), recipe) == (both, ["both, gathered", "both"])
    # The bias's gradients are sums of the tokens' by the same index.
    assert recorded(experts(bias=True), inputs(), recipe) == (both, ["both, gathered", "both"])
    later = ["both, gathered", "both", "column, gathered"]
    forward = ["row_sources", "row, gathered", "both"]
    assert recorded(experts(recompute_rows=True), inputs(), recipe) == (forward, later)
    rows = ["permute_rows_quantized"]  # and an epilogue quantizes the activation
    if recipe.format("input").block is None:
        rows = ["row_sources", "row, gathered", "row"]
    with torch.no_grad():
        assert recorded(experts(), inputs(), recipe) == (rows, [])


def test_what_no_gradient_reads_is_not_made():
    for recompute in (False, True):
        module = experts(recompute_rows=recompute)
        for fc in (module[1], module[3]):
            fc.weight.requires_grad_(False)
        forward = ["row_sources", "row, gathered", "row"]
        assert recorded(module, inputs()) == (forward, ["row, gathered", "row"])


def test_quantized_rows_are_freed_after_the_first_product(monkeypatch):
    kept, alive = [], []

    def quantized(*args):
        made = permute(*args)
        kept.append(weakref.ref(made[0]))
        return made

    permute, multiply = moe.permute_rows_quantized, grouped.grouped_mm
    monkeypatch.setattr(moe, "permute_rows_quantized", quantized)
    monkeypatch.setattr(
        grouped, "grouped_mm", lambda *a, **k: (alive.append(kept[0]()), multiply(*a, **k))[1]
    )
    x, probs, ids, _ = inputs(20)
    with torch.no_grad(), assume_target("sm90"), fz.autocast(recipe=BLOCK_FP8):
        experts()(x, probs, ids)
    assert alive == [None]


def saved_by(module, recipe):
    x, probs, ids, _ = inputs()
    with assume_target("sm90"), fz.autocast(recipe=recipe), saved_tensors() as saved:
        module(x, probs, ids)
    return saved


def test_of_x_only_what_the_weight_gradient_reads_is_saved():
    rows, padded = TOKENS * TOP_K, (TOKENS * TOP_K + 127 * EXPERTS) // 128 * 128
    saved = saved_by(experts(), BLOCK_FP8)
    of_x = [t for t in saved if HIDDEN in t.shape and t.dim() == 2]
    fp8, scales = (torch.float8_e4m3fn, (HIDDEN, padded)), (torch.float32, (padded // 128, HIDDEN))
    assert [(t.dtype, tuple(t.shape)) for t in of_x] == [fp8, scales]
    index = [t for t in saved if t.dtype == torch.int32 and t.dim() == 1 and len(t) == rows]
    assert len({t.data_ptr() for t in index}) == 1
    saved = saved_by(experts(recompute_rows=True), BLOCK_FP8)
    of_x = [t for t in saved if HIDDEN in t.shape and t.dim() == 2]
    assert [(t.dtype, tuple(t.shape)) for t in of_x] == [(BF16, (TOKENS, HIDDEN))]


def test_saved_tensors_may_be_packed():
    for recompute in (False, True):
        module, given = experts(recompute_rows=recompute), inputs()
        want = step(module, given)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.dtype, t.contiguous().view(torch.uint8).tolist()),
            lambda packed: torch.tensor(packed[1], dtype=torch.uint8).view(packed[0]),
        )
        with hooks:
            got = step(module, given)
        ref.assert_same_bits(got, want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant):
    module, given = experts(), inputs()
    want = step(module, given)

    def call(x, probs, ids):
        return torch.utils.checkpoint.checkpoint(module, x, probs, ids, use_reentrant=reentrant)

    x, probs, ids, dy = given
    for t in (x, probs, *module.parameters()):
        t.grad = None
    with assume_target("sm90"), fz.autocast(recipe=BLOCK_FP8):
        y = call(x, probs, ids)
        y.backward(dy)
    got = [y.detach(), x.grad, probs.grad, *[p.grad for p in module.parameters()]]
    ref.assert_same_bits(got, want)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "fp32", "3-D"])
def test_tokens_and_gradients_of_any_layout(layout):
    module, (x, probs, ids, dy) = experts(), inputs()
    if layout == "transposed":
        x = x.detach().t().contiguous().t().requires_grad_()
        dy = dy.t().contiguous().t()
    elif layout == "expanded":
        dy = dy[:1].expand(TOKENS, -1)
    elif layout == "fp32":
        x = x.detach().float().requires_grad_()
    else:
        x, dy = (t.detach().view(2, -1, HIDDEN) for t in (x, dy))
        x, ids = x.requires_grad_(), ids.view(2, -1, TOP_K)
        probs = probs.detach().view(2, -1, TOP_K).requires_grad_()
    given = x, probs, ids, dy
    got, want = step(module, given), step(module, given, apart(module))
    if layout == "fp32":  # whose sums the fused experts round to BF16
        want[1] = want[1].to(BF16).float()
    ref.assert_same_bits(got, want)


def test_delayed_gradients_into_main_grads():
    for recompute in (False, True):
        *_, dw1, dw2 = step(experts(recompute_rows=recompute), inputs())
        module = experts(recompute_rows=recompute)
        for fc in (module[1], module[3]):
            fc.accumulate_into_main_grad = fc.delay_wgrad_compute = True
            fc.weight.main_grad = torch.ones(fc.weight.shape)
        x, probs, ids, dy = inputs()
        with assume_target("sm90"), fz.autocast(recipe=BLOCK_FP8):
            module(x, probs, ids).backward(dy)
        for fc, dw in ((module[1], dw1), (module[3], dw2)):
            fc.backward_dw()
            torch.testing.assert_close(fc.weight.main_grad, 1 + dw.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recompute", [False, True])
@each_fp8_recipe
def test_compiles_whole(recompute, recipe):
    module, given = experts(recompute_rows=recompute), inputs()
    want = step(module, given, recipe=recipe)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    ref.assert_same_bits(step(module, given, compiled, recipe=recipe), want)


def test_explain_says_what_is_quantized_where():
    def explained(module, recipe=BLOCK_FP8):
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            return str(fz.explain(module, *inputs()[:3], target="sm90"))

    for recipe in (BLOCK_FP8, CURRENT_FP8):
        text = explained(experts(), recipe)
        assert "MoEExperts by moe_experts_sm90_fp8, forward and backward" in text
        assert "rows of x are quantized while Dispatch copies them" in text
        assert "those of the output's gradient while Combine's backward does" in text
    assert "of x only the tokens" in explained(experts(recompute_rows=True))
    weighted = fz.Sequential(*experts()[:4], fz.Combine(weighted=True))
    text = explained(weighted)
    assert "MoEExperts by moe_experts_sm90_fp8" in text
    assert "quantized while" not in text  # rows are copied first
    assert "quantized while" not in explained(experts(), None)
