"""Recipes by op and by pass: products by hand, with the quantizers; plans and errors."""

import gc

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import fusible as fz
from fusible import recipes
from fusible.extend import BasicOperation
from fusible.recipes import ByOp, ByPass, QuantizedTensor
from fusible.recipes.formats import nvfp4
from fusible.testing import assume_target

BF16 = torch.bfloat16
MXFP8 = recipes.MXFP8BlockScaling()
BLOCKS = recipes.Float8BlockScaling()
CURRENT = recipes.Float8CurrentScaling()
NVFP4 = recipes.NVFP4BlockScaling(
    disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
)
AS_TRAINED = recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
ONE_WEIGHT = {"bias": False, "single_grouped_weight": True}


def quantized(t, fmt, *, columnwise=False):
    made = QuantizedTensor.quantize(t.detach(), fmt, rowwise=not columnwise, columnwise=columnwise)
    return made.dequantize(torch.float32)


def linear(kind, size=128, dtype=BF16):
    if kind == "dense":
        return fz.Linear(size, size, bias=False, dtype=dtype)
    single = kind == "grouped, one weight"
    return fz.GroupedLinear(2, size, size, bias=False, dtype=dtype, single_grouped_weight=single)


def matrices(op):
    return [w for p in op.parameters() for w in (p if p.dim() == 3 else [p])]


def by_hand(x, w, dy, forward, backward):
    """Output and both gradients in FP64, of operands quantized in the formats of each pass."""
    y = (
        quantized(x, forward.format("input")).double()
        @ quantized(w, forward.format("weight")).double().T
    )
    if backward is None:
        g, wb, gw, xb = dy, w.detach(), dy, x.detach()
    else:
        g = quantized(dy, backward.format("grad"))
        wb = quantized(w, backward.format("weight"), columnwise=True)
        gw = quantized(dy, backward.format("grad"), columnwise=True)
        xb = quantized(x, backward.format("input"), columnwise=True)
    return y, g.double() @ wb.double(), gw.double().T @ xb.double()


PASSES = [
    (NVFP4, MXFP8), (MXFP8, BLOCKS), (BLOCKS, NVFP4), (CURRENT, MXFP8), (NVFP4, None),
    (AS_TRAINED, MXFP8), (MXFP8, AS_TRAINED), (AS_TRAINED, None),
]  # fmt: skip


def check_passes(forward, backward, kind, compiled):
    op = linear(kind, dtype=torch.float32)
    x, dy = torch.randn(128, 128, requires_grad=True), torch.randn(128, 128)
    sizes = [128] if kind == "dense" else [96, 32]
    call = torch.compile(op, backend="aot_eager", fullgraph=True) if compiled else op
    with fz.autocast(recipe=ByPass(forward, backward)):
        y = call(x, *[torch.tensor(sizes)][: kind != "dense"])
    y.backward(dy)
    grads = [g for p in op.parameters() for g in (p.grad if p.dim() == 3 else [p.grad])]
    at = 0
    for rows, w, dw in zip(sizes, matrices(op), grads, strict=True):
        of = slice(at, at + rows)
        at += rows
        expected = by_hand(x[of], w, dy[of], forward, backward)
        for got, want in zip((y[of], x.grad[of], dw), expected, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "grouped", "grouped, one weight"])
@pytest.mark.parametrize(("forward", "backward"), PASSES, ids=lambda r: r.name if r else "none")
def test_each_pass_multiplies_in_its_own_formats(forward, backward, kind):
    check_passes(forward, backward, kind, compiled=False)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", ["dense", "grouped"])
def test_compiled_passes(kind):
    check_passes(NVFP4, MXFP8, kind, compiled=True)


def test_formats_that_agree_are_the_recipe_itself():
    op, x = linear("dense"), torch.randn(64, 128, dtype=BF16, requires_grad=True)

    def results(recipe):
        x.grad = op.weight.grad = None
        with fz.autocast(recipe=recipe):
            y = op(x)
        y.backward(torch.ones_like(y))
        return y.detach(), x.grad, op.weight.grad

    override = recipes.NVFP4BlockScaling(
        disable_rht=True,
        disable_stochastic_rounding=True,
        disable_2d_quantization=True,
        backward_override="high_precision",
    )
    for one, other in ((MXFP8, ByPass(MXFP8, MXFP8)), (override, ByPass(NVFP4, None))):
        assert all(map(torch.equal, results(one), results(other)))


@pytest.mark.parametrize("frozen", ["weight", "input", "both"])
def test_only_what_a_gradient_needs(frozen):
    op = linear("grouped, one weight", dtype=torch.float32)
    op.weight.requires_grad_(frozen == "input")
    x = torch.randn(64, 128, requires_grad=frozen == "weight")
    with fz.autocast(recipe=ByPass(NVFP4, MXFP8)):
        y = op(x, torch.tensor([40, 24]))
    if frozen != "both":
        y.backward(dy := torch.randn_like(y))
    for of, w, dw in zip(
        (slice(0, 40), slice(40, 64)), op.weight, op.weight.grad if frozen == "input" else [0] * 2,
        strict=True,
    ):  # fmt: skip
        expected = by_hand(x[of], w, dy[of] if frozen != "both" else y[of], NVFP4, MXFP8)
        torch.testing.assert_close(y[of].double(), expected[0], rtol=1e-5, atol=1e-5)
        if frozen == "weight":
            torch.testing.assert_close(x.grad[of].double(), expected[1], rtol=1e-5, atol=1e-5)
        if frozen == "input":
            torch.testing.assert_close(dw.double(), expected[2], rtol=1e-5, atol=1e-5)


def test_stored_weights_are_those_of_the_forward():
    recipe = ByPass(NVFP4, MXFP8)
    op = linear("dense", dtype=torch.float32)
    fz.quantize_(op, recipe, usage="training")
    assert op.weight.format == NVFP4.format("weight")
    assert op.weight.columnwise_data is None  # which no product would read
    x = torch.randn(32, 128, requires_grad=True)
    with fz.autocast(recipe=recipe):
        y = op(x)
    y.backward(dy := torch.randn_like(y))
    values = op.weight.detach().dequantize()
    expected = quantized(dy, MXFP8.format("grad")) @ quantized(
        values, MXFP8.format("weight"), columnwise=True
    )
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, quantized(x, NVFP4.format("input")) @ values.T)


def test_the_output_of_an_activation_is_not_quantized_for_one_pass_alone():
    mlp = fz.Sequential(fz.Linear(64, 128, bias=False), fz.GELU(), fz.Linear(128, 64, bias=False))
    x = torch.randn(32, 64, requires_grad=True)
    recipe = ByPass(NVFP4, MXFP8)
    with fz.autocast(recipe=recipe):
        y = mlp(x)
        hidden = mlp[1](mlp[0](x))
    y.backward(dy := torch.randn_like(y))
    expected = by_hand(hidden, mlp[2].weight, dy, NVFP4, MXFP8)
    torch.testing.assert_close(y.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mlp[2].weight.grad.double(), expected[2], rtol=1e-5, atol=1e-5)


def mlp_of(sizes=(64, 128), interleave=32):
    small, large = sizes
    options = {**ONE_WEIGHT, "dtype": BF16}
    return fz.Sequential(
        fz.GroupedLinear(2, small, large, **options),
        fz.ScaledSwiGLU(glu_interleave_size=interleave),
        fz.GroupedLinear(2, large // 2, small, **options),
    )


def step(module, recipe, *, target=None, run=None):
    """Output and all gradients of one step under a recipe."""
    x = torch.randn(64, 64, dtype=BF16, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    splits, scales = torch.tensor([40, 24]), torch.linspace(0.1, 1, 64)
    module.zero_grad()
    with assume_target(target or "cpu"), fz.autocast(recipe=recipe):
        y = (run or module)(x, splits, scales, splits)
        y.float().square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in module.parameters()]]


@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_other_machines_run_the_ops_and_say_why(target):
    mlp, recipe = mlp_of(), ByPass(MXFP8, BLOCKS)
    for got, want in zip(
        step(mlp, recipe, target=target), step(mlp, recipe), strict=True
    ):  # in BF16 there
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-6, atol=0.05)
    splits, x = torch.tensor([40, 24]), torch.randn(64, 64, dtype=BF16, requires_grad=True)
    with fz.autocast(recipe=recipe):
        said = fz.explain(mlp, x, splits, torch.rand(64), splits, target=target)
    assert not any(name.startswith("grouped_mlp") for name in said.fired)
    text = said.to_text(every_rule=True)
    assert "backward_override must be None, got other formats" in text
    assert "in the backward: input fp8_1x128_e4m3, weight fp8_128x128_e4m3" in text


# --- by op ---------------------------------------------------------------------------------------


def test_each_op_has_the_recipe_of_the_first_key_that_fits():
    block = fz.Sequential(fz.Linear(64, 64), fz.GELU(), fz.Linear(64, 64), fz.Linear(64, 64))
    x = torch.randn(32, 64, requires_grad=True)
    given = {block[0]: NVFP4, block[3]: None, fz.Linear: MXFP8}
    with fz.autocast(recipe=given):
        y = block(x)
    y.square().sum().backward()
    got = [y.detach(), x.grad.clone(), *[p.grad.clone() for p in block.parameters()]]
    x.grad = None
    block.zero_grad()
    h = x
    for op, recipe in zip(block, (NVFP4, None, MXFP8, None), strict=True):
        with fz.autocast(recipe is not None, recipe=recipe):
            h = op(h)
    h.square().sum().backward()
    expected = [h.detach(), x.grad, *[p.grad for p in block.parameters()]]
    assert all(map(torch.equal, got, expected))
    assert block.plan.recipe_name == "nvfp4 and mxfp8 and none"
    # The other order: the type fits all.
    with fz.autocast(recipe={fz.Linear: MXFP8, block[0]: NVFP4}):
        same = block(x)
    with fz.autocast(recipe=MXFP8):
        assert torch.equal(same, block(x))
    assert block.plan.recipe_name == "mxfp8"


def test_types_fit_subclasses_and_modules_what_is_inside():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = fz.Linear(64, 64), fz.Linear(64, 64)

        def forward(self, x):
            return self.out(self.qkv(x).relu())

    model = torch.nn.ModuleDict({"attention": Attention(), "mlp": mlp_of()})
    x, splits = torch.randn(16, 64), torch.tensor([9, 7])
    rows = x.to(BF16), splits, torch.rand(16), splits
    with fz.autocast(recipe={fz.GroupedLinear: NVFP4, model["attention"]: BLOCKS}):
        got = model["attention"](x), model["mlp"](*rows)
    with fz.autocast(recipe=BLOCKS):
        expected = [model["attention"](x)]
    with fz.autocast(recipe=NVFP4):
        expected.append(model["mlp"](*rows))
    assert all(map(torch.equal, got, expected))
    with fz.autocast(recipe={model["attention"].qkv: None, fz.FusibleOperation: MXFP8}):
        got = model["attention"](x)
    with fz.autocast(recipe=MXFP8):
        expected = model["attention"].out(model["attention"].qkv(x).relu())
        assert not torch.equal(got, expected)
    high = model["attention"].qkv(x).relu()
    with fz.autocast(recipe=MXFP8):
        assert torch.equal(got, model["attention"].out(high))


def test_a_run_with_one_recipe_is_planned_as_under_it():
    mlp = mlp_of()
    for target in ("cpu", "sm90", "sm100"):
        expected = step(mlp, MXFP8, target=target)
        fired = mlp.plan.fired
        assert all(map(torch.equal, step(mlp, {fz.GroupedLinear: MXFP8}, target=target), expected))
        assert mlp.plan.fired == fired
        assert mlp.plan.recipe == MXFP8


@pytest.mark.parametrize("target", ["cpu", "sm90", "sm100"])
def test_nothing_is_fused_over_two_recipes(target):
    mlp = mlp_of()
    given = {mlp[0]: MXFP8, mlp[2]: NVFP4}
    got = step(mlp, given, target=target)
    assert not any(name.startswith("grouped_mlp") for name in mlp.plan.fired)
    for g, want in zip(got, step(mlp, given), strict=True):
        torch.testing.assert_close(g.float(), want.float(), rtol=2**-5, atol=0.1)
    splits, x = torch.tensor([40, 24]), torch.randn(64, 64, dtype=BF16, requires_grad=True)
    with fz.autocast(recipe=given):
        said = fz.explain(mlp, x, splits, torch.rand(64), splits, target=target)
    text = said.to_text(every_rule=True)
    assert "its ops must run under one recipe, got mxfp8 and nvfp4" in text
    assert "input mxfp8_e4m3, weight mxfp8_e4m3, grad mxfp8_e4m3" in text
    assert "input nvfp4, weight nvfp4, grad nvfp4" in text
    with pytest.raises(fz.NotFused, match="must run under one recipe"):
        step(fz.Sequential(*mlp, require=["grouped_mlp"]), given, target=target)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_mapping_that_compiled_code_makes():
    module, x = fz.Sequential(fz.Linear(32, 32), fz.GELU(), fz.Linear(32, 32)), torch.randn(8, 32)

    def call(x):
        with fz.autocast(recipe={fz.Linear: MXFP8}):
            return module(x)

    compiled = CompileCounter()
    function = torch.compile(call, backend=compiled, fullgraph=True)
    got = function(x)  # before eager code has made an equal one
    assert torch.equal(got, call(x))
    for other in (fz.BasicLinear, fz.Bias):
        with fz.autocast(recipe={other: NVFP4}):
            module(x)
        function(x)
    assert compiled.frame_count == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_of_a_run_have_their_own_recipes(reentrant):
    """The formula is a part of the run by itself."""

    class Squared(BasicOperation):
        def formula(self, input):
            return torch.relu(input).square()

    module, x = fz.Sequential(fz.Linear(32, 32), Squared(), fz.Linear(32, 32)), torch.randn(64, 32)
    by_op, dy = {module[0]: MXFP8, module[2]: AS_TRAINED}, torch.randn(64, 32)

    def gradients(call):
        module.zero_grad()
        given = x.clone().requires_grad_()
        with fz.autocast(recipe=by_op):
            y = call(given)
        y.backward(dy)
        return [given.grad, *[p.grad.clone() for p in module.parameters()]]

    want = gradients(module)
    got = gradients(lambda x: checkpoint(module, x, use_reentrant=reentrant))
    assert all(map(torch.equal, got, want))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_and_checkpointed():
    mlp = mlp_of(interleave=None)
    expected = step(mlp, {mlp[0]: NVFP4, mlp[2]: MXFP8})
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # a mapping made anew is the same recipe
        got = step(mlp, {mlp[0]: NVFP4, mlp[2]: MXFP8}, run=compiled)
        assert all(map(torch.equal, got, expected))
    with torch.compiler.set_stance("fail_on_recompile"):
        step(mlp, {mlp[0]: NVFP4, mlp[2]: MXFP8}, run=compiled)
    other = step(mlp, {mlp[0]: MXFP8, mlp[2]: NVFP4})
    got = step(mlp, {mlp[0]: MXFP8, mlp[2]: NVFP4}, run=compiled)
    assert all(map(torch.equal, got, other))
    assert not torch.equal(got[0], expected[0])
    again = mlp_of(interleave=None)
    again.load_state_dict(mlp.state_dict())
    for reentrant in (False, True):
        got = step(
            again,
            {again[0]: NVFP4, again[2]: MXFP8},
            run=lambda *args, r=reentrant: checkpoint(again, *args, use_reentrant=r),
        )
        assert all(map(torch.equal, got, expected))


def test_formulas_and_quantizes_of_other_recipes_in_a_run():
    class Halved(fz.BasicOperation):
        def formula(self, x):
            return x / 2

    block = fz.Sequential(
        fz.Linear(64, 64), Halved(), fz.GELU(), fz.Quantize(backward=True), fz.Linear(64, 64)
    )
    x = torch.randn(32, 64, requires_grad=True)
    with fz.autocast(recipe={block[0]: MXFP8, block[3]: MXFP8, block[4]: NVFP4}):
        y = block(x)
        h = block[2](block[1](block[0](x)))
    h = quantized(h, MXFP8.format("input"))
    expected = (
        quantized(h, NVFP4.format("input")) @ quantized(block[4].weight, NVFP4.format("weight")).T
    )
    torch.testing.assert_close(y, expected + block[4].bias)
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_by_op_and_by_pass():
    block = fz.Sequential(fz.Linear(64, 64, bias=False), fz.Linear(64, 64, bias=False))
    x = torch.randn(32, 64, requires_grad=True)
    with fz.autocast(recipe={block[0]: ByPass(NVFP4, MXFP8), block[1]: BLOCKS}):
        y = block(x)
    y.backward(torch.ones_like(y))
    got = [x.grad, *[p.grad for p in block.parameters()]]
    x.grad = None
    block.zero_grad()
    with fz.autocast(recipe=ByPass(NVFP4, MXFP8)):
        h = block[0](x)
    with fz.autocast(recipe=BLOCKS):
        y = block[1](h)
    y.backward(torch.ones_like(y))
    assert all(map(torch.equal, got, [x.grad, *[p.grad for p in block.parameters()]]))


def test_the_experts_of_a_model_of_transformers():
    pytest.importorskip("transformers")
    from hf_models import make_model

    model, ids = make_model("mixtral"), torch.arange(22).view(2, 11)
    layers = [layer.mlp.experts for layer in model.model.layers]

    def logits(recipe):
        with fz.autocast(recipe=recipe), torch.no_grad():
            return model(ids, use_cache=False).logits

    second = logits({layers[1]: MXFP8})
    assert torch.equal(logits({fz.GroupedLinear: MXFP8}), logits(MXFP8))
    assert torch.equal(logits({layers[0]: None, model: MXFP8}), second)
    assert not torch.equal(logits(MXFP8), second)


def test_weights_are_stored_by_op():
    mlp = mlp_of()
    fz.quantize_(mlp, {mlp[0]: NVFP4, mlp[2]: None}, usage="inference")
    assert mlp[0].weight.format == NVFP4.format("weight")
    assert not isinstance(mlp[2].weight, QuantizedTensor)
    fz.quantize_(mlp, {mlp[2]: MXFP8})
    assert mlp[0].weight.format == NVFP4.format("weight")
    assert mlp[2].weight.format == MXFP8.format("weight")
    splits = torch.tensor([9, 7])
    rows = torch.randn(16, 64, dtype=BF16), splits, torch.rand(16), splits
    with fz.autocast(recipe={mlp[0]: NVFP4, mlp[2]: MXFP8}), torch.no_grad():
        with recipes.no_implicit_dequantize():
            y = mlp(*rows)
        with fz.reuse_quantized_weights(mlp):
            assert torch.equal(mlp(*rows), y)


def test_the_quantizers_of_an_op_are_those_of_its_recipe():
    block = fz.Sequential(fz.Linear(64, 64), fz.Linear(64, 64))
    with fz.autocast(recipe={block[0]: NVFP4, fz.Linear: MXFP8}):
        formats = [op.basic_ops[0].get_input_quantizer().format for op in block]
    assert formats == [NVFP4.format("input"), MXFP8.format("input")]


def test_equal_mappings_are_one_recipe_and_modules_are_not_kept():
    a, b = fz.Linear(4, 4), fz.Linear(4, 4)
    one, two = ByOp({a: MXFP8, fz.Linear: None}), ByOp({a: MXFP8, fz.Linear: None})
    assert one == two
    assert hash(one) == hash(two)
    assert one != ByOp({b: MXFP8, fz.Linear: None})
    assert one != ByOp({fz.Linear: None, a: MXFP8})
    assert repr(one) == "ByOp({Linear: MXFP8BlockScaling(), Linear: None})"
    of_types = ByOp({fz.GroupedLinear: ByPass(NVFP4, MXFP8), fz.Linear: None})
    for mapping in (one, of_types):
        assert recipes.Recipe.from_constants(mapping.as_constants()) == mapping
    nested = ByPass(NVFP4, MXFP8)
    assert recipes.Recipe.from_constants(nested.as_constants()) == nested
    assert recipes.Recipe.from_constants(ByPass(NVFP4, None).as_constants()) == ByPass(NVFP4, None)
    gone = []
    a.register_buffer("witness", torch.zeros(1))
    import weakref

    weakref.finalize(a, gone.append, True)
    del a
    gc.collect()
    assert gone == [True]
    assert "NoneType" in repr(one)
    ByOp({b: MXFP8})  # a new one drops those whose modules are gone
    with pytest.raises(RuntimeError, match="call autocast"):
        recipes.Recipe.from_constants(one.as_constants())


WRONG = {
    "no keys": (lambda: {}, ValueError, "must have keys, got none"),
    "a name": (lambda: {"mlp": MXFP8}, TypeError, r"keys .* must be types of ops .* got 'mlp'"),
    "another class": (
        lambda: {torch.nn.Linear: MXFP8},
        TypeError,
        r"keys .* got <class 'torch\.nn",
    ),
    "a value": (lambda: {fz.Linear: "mxfp8"}, TypeError, "values .* got 'mxfp8'"),
    "nested": (lambda: {fz.Linear: ByOp({fz.Linear: MXFP8})}, TypeError, "values .* got ByOp"),
}


@pytest.mark.parametrize(("make", "error", "says"), WRONG.values(), ids=WRONG)
def test_wrong_mappings(make, error, says):
    with pytest.raises(error, match=says):
        fz.autocast(recipe=make())
    with pytest.raises(error, match=says):
        fz.quantize_(fz.Linear(4, 4), make())


def test_wrong_passes():
    override = recipes.MXFP8BlockScaling(backward_override="dequantized")
    for given in ((None, MXFP8), ("mxfp8", MXFP8), (ByPass(MXFP8, None), MXFP8)):
        with pytest.raises(TypeError, match="forward of ByPass must be a recipe"):
            ByPass(*given)
    with pytest.raises(TypeError, match=r"backward of ByPass must be a recipe .* or None, got"):
        ByPass(MXFP8, ByOp({fz.Linear: MXFP8}))
    for given in ((override, MXFP8), (MXFP8, override)):
        with pytest.raises(ValueError, match=r"must have no backward_override.*pass backward=None"):
            ByPass(*given)
    op = fz.Linear(65, 64)
    with fz.autocast(recipe=ByPass(MXFP8, NVFP4)), pytest.raises(ValueError, match="multiple of 2"):
        op(torch.randn(4, 65))
    with pytest.raises(TypeError, match="recipe of quantized_model_init must be a recipe"):
        fz.quantized_model_init(recipe={fz.Linear: MXFP8})


class OneSided(recipes.Recipe):
    """Transforms one operand of the weight gradient alone, which gives wrong numbers."""

    def format(self, role):
        return nvfp4(hadamard=role == "input")


@pytest.mark.parametrize("given", [OneSided(), {fz.Linear: OneSided()}, ByPass(MXFP8, OneSided())])
def test_one_transformed_operand_is_refused(given):
    with pytest.raises(ValueError, match="formats with hadamard must be those of input and grad"):
        fz.autocast(recipe=given)
    with fz.autocast(recipe=ByPass(OneSided(), MXFP8)):  # which no product transforms
        fz.Linear(64, 64)(torch.randn(32, 64)).sum().backward()
