"""Recipes, their scopes, checkpointing, and the quantized product."""

from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import pytest
import reference as ref
import torch
from number_formats import BLOCK, CURRENT, HYBRID, MX, NV, RECIPES, each_recipe
from torch.utils.checkpoint import checkpoint

import fusible as fz
from fusible import recipes
from fusible.fuser.context import OperationContext
from fusible.recipes.autocast import Forward, current_recipe
from fusible.recipes.formats import (
    E4M3,
    E5M2,
    NumberFormat,
    fp8_block,
    fp8_tensor,
    mxfp8,
    nvfp4,
)

ROW, BOTH = recipes.Uses(row=True), recipes.Uses(row=True, column=True)

# --- Recipes -------------------------------------------------------------------------------------


def test_recipes_are_values():
    assert len({recipes.MXFP8BlockScaling(), recipes.MXFP8BlockScaling(), *RECIPES.values()}) == 6
    names = [recipe.name for recipe in RECIPES.values()]
    assert names == ["mxfp8", "mxfp8", "fp8_block", "fp8_current", "nvfp4", "nvfp4"]
    with pytest.raises(AttributeError):
        MX.fp8_format = recipes.Format.E5M2


def test_formats_of_roles():
    assert MX.format("grad") == MX.format("input") == MX.format("weight") == mxfp8()
    assert HYBRID.format("grad") == mxfp8(E5M2)
    assert HYBRID.format("weight") == mxfp8()
    assert BLOCK.format("weight") == fp8_block(E4M3, (128, 128))
    assert BLOCK.format("grad") == fp8_block()
    assert CURRENT.format("input") == fp8_tensor()
    assert CURRENT.format("grad") == fp8_tensor(E5M2)
    assert NV.format("grad") == nvfp4()
    with pytest.raises(ValueError, match=r"\(1, 16\) or \(16, 16\)"):
        nvfp4((1, 32))
    assert recipes.Recipe().format("input") is None
    assert recipes.Float8BlockScaling(use_f32_scales=True).format("input").scale == "fp32"
    assert recipes.Float8CurrentScaling(use_power_2_scales=True) != CURRENT
    with pytest.raises(ValueError, match="input, weight, grad"):
        recipes.Recipe().format("output")


PARAMS = {
    "rht": {"random_hadamard_transform": ("input", "grad")},
    "stochastic_rounding": {"stochastic_rounding": ("grad",)},
    "2d_quantization": {"fp4_2d_quantization": ("weight",)},
}
"""The options of NVFP4 by TE's names: what each means, for which operands."""


@pytest.mark.parametrize("disabled", [(), *combinations(PARAMS, 1), *combinations(PARAMS, 2)])
def test_options_of_nvfp4(disabled):
    recipe = recipes.NVFP4BlockScaling(**{f"disable_{option}": True for option in disabled})
    operands = {"input": "fwd_inp", "weight": "fwd_weight", "grad": "bwd_grad"}
    for role, operand in operands.items():
        options = {
            param: role in roles
            for option, of_option in PARAMS.items()
            if option not in disabled
            for param, roles in of_option.items()
        }
        assert getattr(recipe, f"fp4_quant_{operand}") == recipes.QParams(**options)
        block = (16, 16) if options.get("fp4_2d_quantization") else (1, 16)
        made = recipes.NVFP4Quantizer(
            with_rht=options.get("random_hadamard_transform", False),
            stochastic_rounding=options.get("stochastic_rounding", False),
            with_2d_quantization=block == (16, 16),
        )
        assert made.format == recipe.format(role)
        assert made.format.block == block
    assert NV.format("input") == NV.format("weight") == NV.format("grad") == nvfp4()


def test_what_recipes_and_quantizers_refuse():
    with pytest.raises(ValueError, match="must have with_random_sign_mask True, got False"):
        recipes.NVFP4Quantizer(with_rht=True, with_random_sign_mask=False)
    recipes.NVFP4Quantizer(with_random_sign_mask=False)  # of no transform
    with pytest.raises(ValueError, match=r"hadamard must be \(1, 16\), got"):
        nvfp4((16, 16), hadamard=True)
    with pytest.raises(ValueError, match="stochastic must be E2M1, got"):
        NumberFormat("own", E4M3, (1, 32), "fp32", stochastic=True)
    with pytest.raises(TypeError, match="hadamard of NumberFormat must be a bool, got 1"):
        nvfp4(hadamard=1)
    with pytest.raises(TypeError, match=r"Format\.E4M3"):
        recipes.MXFP8BlockScaling("E4M3")


def test_quantizers_take_the_options_that_ask_for_what_they_do():
    x = torch.randn(32, 64)
    for plain, given in (
        (recipes.MXFP8Quantizer(), fz.MXFP8Quantizer(fz.DType.kFloat8E4M3)),
        (
            recipes.NVFP4Quantizer(columnwise=False),
            fz.NVFP4Quantizer(
                fz.DType.kFloat4E2M1, True, False, with_post_rht_amax=True, nvfp4_e4m3_max=256,
                nvfp4_4over6_err_mode="MSE", amax_reduction_group=object(),
            ),
        ),
        (
            recipes.Float8CurrentScalingQuantizer(),
            fz.Float8CurrentScalingQuantizer(
                fz.DType.kFloat8E4M3, "cpu", with_amax_reduction=False
            ),
        ),
    ):  # fmt: skip
        ref.assert_same_bits(given(x).pieces(), plain(x).pieces())
    for kind, option in (
        (fz.MXFP8Quantizer, "with_2d_quantization"),
        (fz.Float8CurrentScalingQuantizer, "with_amax_reduction"),
        (fz.NVFP4Quantizer, "row_scaled_nvfp4"),
        (fz.NVFP4Quantizer, "nvfp4_use_4over6"),
    ):
        with pytest.raises(ValueError, match=f"must have {option} False, got True"):
            kind(**{option: True})
    with pytest.raises(ValueError, match=r"fp4_dtype must be torch\.float4_e2m1fn_x2, got True"):
        recipes.NVFP4Quantizer(True)


def test_quantizers_write_into_what_there_is():
    x, y = torch.randn(2, 32, 64)
    quantizer = recipes.MXFP8Quantizer(columnwise=False)
    out = quantizer(x)
    data = out.rowwise_data
    assert quantizer.quantize(y, out=out) is out
    assert out.rowwise_data is data
    ref.assert_same_bits(out.pieces(), quantizer.quantize(y).pieces())
    assert quantizer.quantize(y, dtype=torch.float16).dtype == torch.float16
    assert quantizer.update_quantized(x, out) is out
    ref.assert_same_bits(out.pieces(), quantizer(x).pieces())


@pytest.mark.parametrize(
    "transformed", [("input",), ("grad",), ("input", "grad", "weight")], ids="-".join
)
def test_a_recipe_that_transforms_one_operand_of_a_product(transformed):
    class Own(recipes.Recipe):
        def format(self, role):
            return nvfp4(hadamard=role in transformed)

    with pytest.raises(ValueError, match="those of input and grad, both or neither, and not of"):
        fz.autocast(recipe=Own())


def test_a_recipe_without_a_name_is_not_taken_for_none():
    class Own(recipes.Recipe):
        def format(self, role):
            return mxfp8()

    layer, x = fz.Linear(64, 64), torch.randn(32, 64)
    with torch.no_grad():
        with fz.autocast(recipe=MX):
            want = layer(x)
        with fz.autocast(recipe=Own()):
            got = layer(x)
    assert torch.equal(got, want)
    assert (layer.plan.recipe_name, layer.plan.fired) == ("Own", ())
    with fz.autocast(recipe=recipes.Recipe()):
        layer(x)
    assert (layer.plan.recipe_name, layer.plan.fired) == ("none", ("linear_bias_activation",))


# --- Quantizers ----------------------------------------------------------------------------------


def test_quantizers_are_constructors_over_formats():
    assert recipes.MXFP8Quantizer(torch.float8_e5m2).format == mxfp8(E5M2)
    assert recipes.Float8CurrentScalingQuantizer(device="cpu").format == fp8_tensor()
    assert recipes.Float8BlockQuantizer(block_scaling_dim=1).format == fp8_block()
    assert recipes.Float8BlockQuantizer().format == fp8_block(E4M3, (128, 128))
    assert recipes.NVFP4Quantizer().format == nvfp4()
    square = recipes.NVFP4Quantizer(with_2d_quantization=True)
    assert square.format == nvfp4((16, 16))
    current = recipes.Float8CurrentScalingQuantizer(force_pow_2_scales=True, amax_epsilon=8.0)
    assert current(torch.ones(2, 32)).scale_inv.item() == 2.0**-5  # 448 / 8 = 56, down to 32
    with pytest.raises(ValueError, match="float8_e4m3fn or"):
        recipes.MXFP8Quantizer(torch.float16)
    with pytest.raises(ValueError, match="1 or 2, got 3"):
        recipes.Float8BlockQuantizer(block_scaling_dim=3)
    assert (
        recipes.Float8CurrentScalingQuantizer(device="meta")(torch.ones(2, 32)).device.type == "cpu"
    )
    assert "mxfp8_e4m3" in repr(recipes.MXFP8Quantizer())


def test_usage():
    quantizer = recipes.MXFP8Quantizer(columnwise=False)
    x = torch.randn(32, 32)
    assert not quantizer(x).has_columnwise
    quantizer.set_usage(rowwise=False, columnwise=True)
    q = quantizer(x)
    assert (q.has_rowwise, q.has_columnwise) == (False, True)
    quantizer.set_usage(rowwise=True)
    ref.assert_same_bits(quantizer(q).pieces(), quantizer(q.dequantize()).pieces())
    both = quantizer(x)
    assert quantizer(both) is both


def test_an_e5m2_tensor_is_never_read_as_e4m3():
    gradient = recipes.MXFP8Quantizer(torch.float8_e5m2)(torch.randn(32, 32))
    e4m3 = recipes.MXFP8Quantizer()
    ref.assert_same_bits(e4m3(gradient).pieces(), e4m3(gradient.dequantize()).pieces())
    with recipes.no_implicit_dequantize(), pytest.raises(NotImplementedError, match="quantizer"):
        e4m3(gradient)
    again = recipes.quantize_operand(gradient, MX, "grad", ROW)
    want = recipes.quantize_operand(gradient.dequantize(), MX, "grad", ROW)
    assert torch.equal(again.row.data.view(torch.uint8), want.row.data.view(torch.uint8))
    taken = recipes.quantize_operand(gradient, HYBRID, "grad", ROW)
    assert taken.row.data is gradient.rowwise_data


# --- Scopes --------------------------------------------------------------------------------------


def test_autocast_nests_and_switches_off():
    assert recipes.current_recipe() is None
    with recipes.autocast(recipe=MX):
        with recipes.autocast(recipe=BLOCK):
            assert recipes.current_recipe() == BLOCK
            with recipes.autocast(enabled=False):
                assert recipes.current_recipe() is None
        assert recipes.current_recipe() == MX
        with pytest.raises(RuntimeError), recipes.autocast(recipe=BLOCK):
            raise RuntimeError
        assert recipes.current_recipe() == MX
    assert recipes.current_recipe() is None
    with recipes.autocast():
        assert recipes.current_recipe() == recipes.MXFP8BlockScaling()
    with pytest.raises(TypeError, match="recipe of fusible"):
        recipes.autocast(recipe="mxfp8")


def test_autocast_is_of_the_thread():
    seen = []
    with recipes.autocast(recipe=MX):
        bound = recipes.keep_recipe(lambda: seen.append(recipes.current_recipe()))
        with ThreadPoolExecutor(1) as threads:
            for target in (lambda: seen.append(recipes.current_recipe()), bound):
                threads.submit(target).result()
    assert seen == [None, MX]


def test_one_autocast_is_entered_again():
    """In a loop, inside itself, and on two threads at once, as ``torch.autocast``."""
    scope, seen = recipes.autocast(recipe=MX), []
    for _ in range(2):
        with scope:
            with recipes.autocast(recipe=BLOCK), scope:
                assert recipes.current_recipe() == MX
            assert recipes.current_recipe() == MX
        assert recipes.current_recipe() is None
    with scope:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(scope(lambda: seen.append(recipes.current_recipe()))).result()
        assert seen == [recipes.current_recipe()] == [MX]
    assert recipes.current_recipe() is None


def test_autocast_decorates():
    scope = recipes.autocast(recipe=MX)

    def double(x):
        return x * 2 if recipes.current_recipe() == MX else x

    double.tag = "kept"
    decorated = scope(double)
    assert (decorated.__name__, decorated.tag) == ("double", "kept")
    compiled = torch.compile(lambda x: decorated(x) + double(x), fullgraph=True, backend="eager")
    for call in (compiled, lambda x: decorated(x) + double(x)):
        assert call(torch.ones(1)) == 3


LINEARS = fz.Linear(32, 32), fz.Linear(32, 32)
SCOPE = fz.autocast(recipe=MX)


def broken_by_call(x):
    with fz.autocast(recipe=MX):
        y = LINEARS[0](x)
        torch._dynamo.graph_break()
        return LINEARS[1](y)


def broken_by_value(x):
    with fz.autocast(recipe=MX):
        y = LINEARS[0](x)
        y.sum().item()
        return LINEARS[1](y)


def broken_within_two(x):
    with fz.autocast(recipe=NV), fz.autocast(recipe=MX):
        y = LINEARS[0](x)
        torch._dynamo.graph_break()
        return LINEARS[1](y)


def broken_behind(x):
    for _ in range(2):
        with fz.autocast(recipe=MX):
            y = LINEARS[1](LINEARS[0](x))
        torch._dynamo.graph_break()
    return y


def made_outside(x):
    with SCOPE:
        return LINEARS[1](LINEARS[0](x))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("outer", [None, NV], ids=["alone", "inside another"])
@pytest.mark.parametrize(
    "function", [broken_by_call, broken_by_value, broken_within_two, broken_behind, made_outside]
)
def test_a_scope_in_compiled_code_that_breaks_the_graph(function, outer):
    x = torch.randn(64, 32)
    with torch.no_grad(), fz.autocast(enabled=outer is not None, recipe=outer):
        want, after = function(x), LINEARS[0](x)
        compiled = torch.compile(function, backend="eager")
        for _ in range(2):
            assert torch.equal(compiled(x), want)
            assert torch.equal(LINEARS[0](x), after)
    assert current_recipe() is None


def test_a_compiled_graph_follows_the_recipe():
    def step(x):
        recipe = recipes.current_recipe()
        return x * {"mxfp8": 2, "fp8_block": 3}.get(recipe.name, 0) if recipe else x

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    x = torch.ones(1)
    assert compiled(x) == 1
    for recipe, factor in ((MX, 2), (BLOCK, 3), (MX, 2)):
        with recipes.autocast(recipe=recipe):
            assert compiled(x) == factor
        assert compiled(x) == 1

    def scoped(x):
        with recipes.autocast(recipe=MX):
            x = step(x)
        return step(x)

    assert torch.compile(scoped, fullgraph=True, backend="eager")(x) == 2


# --- Checkpointing -------------------------------------------------------------------------------


class Rounds(torch.nn.Module):
    """Multiplies by itself in the recipe's numbers and notes which recipe each forward had."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.known = set()

    def forwards(self):
        return self.known

    def forward(self, x):
        recipe = recipes.current_recipe(self)
        self.seen.append(recipe)
        self.known.add(Forward(recipe, torch.is_grad_enabled()))
        q = x if recipe is None else recipe_values(x, recipe)
        return (q.detach() * x).sin()


def recipe_values(x, recipe):
    quantized = recipes.quantize_operand(x, recipe, "input", ROW)
    return recipes.operand_values(quantized)


def gradient(model, call, recipe, *, backward_scope=None, thread=False):
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with recipes.autocast(recipe=recipe):
        y = call(model, x)

    def backward():
        with recipes.autocast(enabled=backward_scope is not None, recipe=backward_scope):
            y.sum().backward()

    if thread:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(backward).result()
    else:
        backward()
    return x.grad


def plain(model, x):
    return model(x)


def nonreentrant(model, x):
    return checkpoint(model, x, use_reentrant=False)


def reentrant(model, x):
    return checkpoint(model, x, use_reentrant=True)


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("backward_scope", [None, BLOCK])
@pytest.mark.parametrize("call", [nonreentrant, reentrant])
@each_recipe
def test_checkpoint_repeats_the_forward_under_its_own_recipe(recipe, call, backward_scope, thread):
    want = gradient(Rounds(), plain, recipe)
    model = Rounds()
    got = gradient(model, call, recipe, backward_scope=backward_scope, thread=thread)
    assert model.seen == [recipe, recipe]
    assert torch.equal(got, want)


@pytest.mark.parametrize("call", [nonreentrant, reentrant])
def test_checkpoint_of_a_function_that_opens_its_own_scope(call):
    model = Rounds()

    def function(x):
        with recipes.autocast(recipe=BLOCK):
            return model(x)

    gradient(function, call, MX)
    assert model.seen == [BLOCK, BLOCK]


def test_nested_checkpoints():
    model = Rounds()
    got = gradient(lambda x: nonreentrant(model, x), nonreentrant, MX)
    assert set(model.seen) == {MX}
    assert torch.equal(got, gradient(Rounds(), plain, MX))


def test_evaluation_under_another_recipe_does_not_confuse_a_checkpoint():
    model = Rounds()
    with torch.no_grad():
        model(torch.ones(32, 128))
    gradient(model, nonreentrant, MX)
    assert model.seen == [None, MX, MX]


class RunAgain(torch.autograd.Function):
    """A checkpoint as other libraries have it."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, dy)
        return None, x.grad


def test_a_checkpoint_of_another_library():
    model = fz.Sequential(fz.Linear(64, 64), fz.GELU(), fz.Linear(64, 64))
    x, dy = torch.randn(32, 64).requires_grad_(), torch.randn(32, 64)

    def gradients(call):
        x.grad = None
        model.zero_grad()
        with fz.autocast(recipe=MX):
            y = call(x)
        y.backward(dy)
        return [x.grad, *[p.grad.clone() for p in model.parameters()]]

    want = gradients(fz.Sequential(*model))
    for _ in range(2):
        ref.assert_equal(gradients(lambda x: RunAgain.apply(model, x)), want)
    with torch.no_grad(), fz.autocast(recipe=NV):
        model(x)
    ref.assert_equal(gradients(lambda x: RunAgain.apply(model, x)), want)


def test_a_module_that_runs_in_backward_only_follows_the_scope():
    model = Rounds()

    gradient(ref.in_backward(model), plain, MX, backward_scope=BLOCK)
    assert model.seen == [BLOCK]


@pytest.mark.parametrize("call", [nonreentrant, reentrant])
def test_a_module_run_under_several_recipes_says_so_and_keep_recipe_helps(call):
    model = Rounds()
    gradient(model, plain, BLOCK)
    with torch.no_grad(), recipes.autocast(recipe=BLOCK):
        model(torch.ones(32, 128))
    with pytest.raises(RuntimeError, match=r"under several \(fp8_block, mxfp8\).*keep_recipe"):
        gradient(model, call, MX)
    model.seen.clear()
    gradient(model, lambda m, x: call(recipes.keep_recipe(m), x), MX)
    assert model.seen == [MX, MX]


def test_a_checkpoints_context_keeps_the_recipe():
    model, options = Rounds(), {"use_reentrant": False, "context_fn": recipes.recipe_context_fn}
    for recipe in (BLOCK, MX):
        model.seen.clear()
        gradient(model, lambda m, x: checkpoint(m, x, **options), recipe, backward_scope=NV)
        assert model.seen == [recipe, recipe]


# --- The product ---------------------------------------------------------------------------------


def exact_products(x, w, dy, recipe):
    """Return the three products from the formats alone, each operand along its reduction."""

    def along(t, role, dim):
        fmt = recipe.format(role)
        columnwise = dim == 0
        quantizer = recipes.Quantizer(fmt, rowwise=not columnwise, columnwise=columnwise)
        return quantizer(t).dequantize(torch.float32, columnwise=columnwise)

    y = along(x, "input", 1) @ along(w, "weight", 1).mT
    dx = along(dy, "grad", 1) @ along(w, "weight", 0)
    dw = along(dy, "grad", 0).mT @ along(x, "input", 0)
    return y, dx, dw


def saved_and_restored(x):
    ctx = OperationContext()
    ctx.save(x.data_for(columnwise=True))
    assert len(ctx.to_save) == 4
    return recipes.Operand(column=ctx.for_backward(ctx.to_save).restored())


@each_recipe
def test_operands_of_the_three_products(recipe):
    x, w, dy = torch.randn(64, 128), torch.randn(256, 128), torch.randn(64, 256)
    xq = recipes.quantize_operand(x, recipe, "input", BOTH)
    wq = recipes.quantize_operand(w, recipe, "weight", BOTH)
    dyq = recipes.quantize_operand(dy, recipe, "grad", BOTH)
    read = recipes.operand_values
    y = read(xq) @ read(wq).mT
    saved_x, saved_w = saved_and_restored(xq), saved_and_restored(wq)
    dx = read(dyq) @ read(saved_w, columnwise=True)
    dw = read(dyq, columnwise=True).mT @ read(saved_x, columnwise=True)
    want_y, want_dx, want_dw = exact_products(x, w, dy, recipe)
    ref.assert_equal((y, dx), (want_y, want_dx))
    if recipe.format("input").hadamard:  # the sum of the same products, in another order
        torch.testing.assert_close(dw, want_dw, rtol=0, atol=1e-6 * float(want_dw.abs().max()))
    else:
        assert torch.equal(dw, want_dw)
    exact = (x @ w.mT, dy @ w, dy.mT @ x)
    bound = 0.2 if recipe.name == "nvfp4" else 0.08
    for got, want in zip((y, dx, dw), exact, strict=True):
        assert float((got - want).norm() / want.norm()) < bound


@each_recipe
def test_grouped_operands_are_those_of_each_group(recipe):
    sizes = torch.tensor([5, 0, 43, 16])
    ends = sizes.cumsum(0)
    x = torch.randn(70, 128)
    both = recipes.quantize_operand(x, recipe, "input", BOTH, ends=ends)
    quantizer = recipes.Quantizer(recipe.format("input"))
    grouped = recipes.group_quantize(x, quantizer, 4, sizes)
    again = recipes.quantize_operand(grouped, recipe, "input", BOTH, ends=ends)
    late = recipes.quantize_operand(recipes.group(x, 4, sizes), recipe, "input", ROW, ends=ends)
    saved = saved_and_restored(both)
    for columnwise, tensor in (
        (False, both),
        (True, saved),
        (False, again),
        (True, again),
        (False, late),
    ):
        values = recipes.operand_values(tensor, columnwise=columnwise)
        use = recipes.Uses(row=not columnwise, column=columnwise)
        start = 0
        for size in sizes.tolist():
            if size:
                part = recipes.quantize_operand(x[start : start + size], recipe, "input", use)
                want = recipes.operand_values(part, columnwise=columnwise)
                assert torch.equal(values[start : start + size], want)
            start += size
        assert not values[start:].any()
    with pytest.raises(ValueError, match="must have the product's 3 groups"):
        recipes.quantize_operand(grouped, recipe, "input", ROW, ends=ends[:3])


def test_a_recipe_in_high_precision_keeps_operands_as_they_are():
    x = torch.randn(3, 5, dtype=torch.float64)
    kept = recipes.quantize_operand(x, recipes.Recipe(), "input", BOTH)
    assert recipes.operand_values(kept, torch.float64) is x
    assert kept.data_for(columnwise=True) is x


def test_a_saved_operand_has_no_row_wise_data_to_misread():
    xq = recipes.quantize_operand(torch.randn(32, 32), MX, "input", BOTH)
    with pytest.raises(ValueError, match="without row-wise data; name the use"):
        recipes.operand_values(saved_and_restored(xq))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("has", ["row", "column"])
def test_a_use_that_an_operand_lacks_is_made_of_its_values(has, grouped):
    quantizer = recipes.MXFP8Quantizer(rowwise=has == "row", columnwise=has == "column")
    x, ends = torch.randn(96, 32), torch.tensor([32, 96])
    sizes = ends.diff(prepend=torch.tensor([0]))
    q = recipes.group_quantize(x, quantizer, 2, sizes) if grouped else quantizer(x)
    own = {name: piece.clone() for name, piece in q.pieces().items()}
    ends = q.ends
    got = recipes.quantize_operand(q, MX, "input", BOTH, ends=ends)
    both = recipes.quantize_operand(q.dequantize(), MX, "input", BOTH, ends=ends)
    kept = q.rowwise_data if has == "row" else q.columnwise_data
    assert getattr(got, has).data is kept
    other = "column" if has == "row" else "row"
    ref.assert_same_bits(getattr(got, other)[:2], getattr(both, other)[:2])
    ref.assert_same_bits(q.pieces(), own)


def test_a_missing_recipe_names_its_substitute():
    from fusible.recipes import DelayedScaling

    with pytest.raises(TypeError, match=r"its scales .*Float8CurrentScaling"):
        DelayedScaling(margin=0)


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.MXFP8BlockScaling(fp8_products=True),
        recipes.ByPass(recipes.MXFP8BlockScaling(fp8_products=True), None),
    ],
    ids=["mxfp8", "by pass"],
)
def test_the_recipe_of_fp8_products_is_made_once(recipe):
    """Every call asks for it, several times."""
    made = recipe.of_fp8_products
    assert made is recipe.of_fp8_products
    assert made.format("weight") == fp8_block(block=(128, 128))
    assert made.of_fp8_products == made
