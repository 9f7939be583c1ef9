"""Linear and GroupedLinear under recipes: values, what is saved, scopes, stored weights."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference as ref
import torch
from checks import Recorded, saved_tensors
from number_formats import BLOCK, CURRENT, HYBRID, MX, NV, each_recipe
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import fusible as fz
from fusible import recipes
from fusible.recipes.formats import E5M2, mxfp8

SIZES = [5, 0, 40, 16]


def q(t, recipe, role, *, along):
    """The values of ``t`` quantized along a dimension, from the quantizers alone."""
    quantizer = recipes.Quantizer(recipe.format(role), rowwise=along == 1, columnwise=along == 0)
    return quantizer(t).dequantize(torch.float32, columnwise=along == 0)


def products(x, w, dy, recipe):
    y = q(x, recipe, "input", along=1) @ q(w, recipe, "weight", along=1).mT
    dx = q(dy, recipe, "grad", along=1) @ q(w, recipe, "weight", along=0)
    dw = q(dy, recipe, "grad", along=0).mT @ q(x, recipe, "input", along=0)
    return y, dx, dw


def run(module, recipe, *inputs):
    with fz.autocast(enabled=recipe is not None, recipe=recipe):
        return module(*inputs)


def close(got, want, units=4):
    """Equal but for the order of FP32 sums, or one rounding of a shorter dtype."""
    got, want = got.detach(), want.detach()
    bound = units * torch.finfo(got.dtype).eps * float(want.abs().max())
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=max(bound, 1e-30))


def trained(module, recipe, *inputs):
    """The output of a step, and the gradients of its inputs that need one and of parameters."""
    leaves = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    y = run(module, recipe, *inputs)
    y.square().sum().backward()
    return [y, *[leaf.grad for leaf in leaves]]


def uses_of(func, args):
    """The uses, (row-wise, column-wise), of every quantization."""
    if func is torch.ops.fusible.quantize.default:
        yield args[-2:]


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_recipe
def test_linear_is_the_three_quantized_products(recipe, dtype):
    linear = fz.Linear(128, 256, dtype=dtype)
    nn.init.normal_(linear.bias)
    x = torch.randn(3, 32, 128, dtype=dtype, requires_grad=True)
    dy = torch.randn(3, 32, 256, dtype=dtype)
    y = run(linear, recipe, x)
    y.backward(dy)
    rows, drows = x.detach().flatten(0, 1), dy.flatten(0, 1)
    want_y, want_dx, want_dw = products(rows, linear.weight.detach(), drows, recipe)
    want_y = want_y.to(dtype) + linear.bias.detach()
    assert y.dtype == x.grad.dtype == dtype
    close(y.flatten(0, 1), want_y)
    close(x.grad.flatten(0, 1), want_dx)
    # Terms of transformed operands are larger than the sums.
    close(linear.weight.grad, want_dw, 16 if recipe.format("grad").hadamard else 4)
    close(linear.bias.grad, drows.sum(0))


@pytest.mark.parametrize("single", [True, False])
@each_recipe
def test_grouped_linear_quantizes_each_group_apart(recipe, single):
    op = fz.GroupedLinear(
        4, 128, 256, scale_bias=True, single_grouped_weight=single, single_grouped_bias=single
    )
    for p in op.parameters():
        nn.init.normal_(p)
    x = torch.randn(70, 128)
    x[sum(SIZES) :] = float("nan")  # rows of no group must not reach any scale
    x.requires_grad_()
    scales = torch.rand(70, requires_grad=True)
    dy = torch.randn(70, 256)
    y = run(op, recipe, x, torch.tensor(SIZES), scales)
    y.backward(dy)
    weights = [w.detach() for w in (op.weight if single else op.weights())]
    biases = [b.detach() for b in (op.bias if single else op.biases())]
    dws = op.weight.grad if single else [w.grad for w in op.weights()]
    start = 0
    for group, size in enumerate(SIZES):
        mine = slice(start, start + size)
        start += size
        if size == 0:
            assert not dws[group].any()
            continue
        want = products(x.detach()[mine], weights[group], dy[mine], recipe)
        bias = scales.detach()[mine, None] * biases[group]
        for got, exact in zip((y[mine], x.grad[mine], dws[group]), want, strict=True):
            close(got, exact + bias if got is y[mine] or exact is want[0] else exact)
        close(scales.grad[mine], (dy[mine] * biases[group]).sum(-1))
    assert not y[start:].any()
    assert not x.grad[start:].any()


def test_the_gradient_of_hybrid_is_e5m2():
    """A gradient that E4M3 cannot hold: it must neither overflow nor be read as E4M3."""
    linear = fz.BasicLinear(32, 32)
    x = torch.randn(32, 32, requires_grad=True)
    dy = torch.zeros(32, 32)
    dy[:, 0], dy[:, 1] = 57344.0, 2.0**-14  # 2^30 apart: a range that only E5M2 has in one block
    run(linear, HYBRID, x).backward(dy)
    weight = q(linear.weight.detach(), HYBRID, "weight", along=0)
    assert HYBRID.format("grad") == mxfp8(E5M2)
    close(x.grad, dy @ weight)
    assert q(dy, HYBRID, "grad", along=1)[0, 1] == 2.0**-14
    assert q(dy, MX, "grad", along=1)[0, 1] == 0


@each_recipe
def test_a_block_of_ops_trains_close_to_high_precision(recipe):
    mlp = fz.Sequential(
        fz.GroupedLinear(4, 128, 256, single_grouped_weight=True, bias=False),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(4, 128, 128, single_grouped_weight=True, bias=False),
    )
    x, splits = torch.randn(70, 128, requires_grad=True), torch.tensor(SIZES)
    results = []
    for used in (None, recipe):
        results.append(trained(mlp, used, x, splits, torch.ones(70), splits))
        assert mlp.plan.recipe == used
    bound = 0.45 if recipe.name == "nvfp4" else 0.12
    for got, want in zip(results[1][1:], results[0][1:], strict=True):
        assert 0 < float((got - want).norm() / want.norm()) < bound


def test_a_recipe_in_high_precision_changes_nothing():
    linear, x = fz.Linear(6, 4), torch.randn(5, 6)
    # Which adds the bias to the product, or within it: sums of seven terms.
    got, want = run(linear, recipes.Recipe(), x), run(linear, None, x)
    ref.assert_equal_but_for_rounding(got, want, roundings=3)


def test_torch_autocast_gives_operands_their_dtype_before_they_are_quantized():
    linear = fz.BasicLinear(64, 32)
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(linear, MX, x)
    y.backward(torch.ones_like(y))
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == linear.weight.grad.dtype == torch.float32
    short = (t.detach().bfloat16() for t in (x, linear.weight))
    want = products(*short, torch.ones(32, 32), MX)
    for got, exact in zip((y, x.grad, linear.weight.grad), want, strict=True):
        close(got.bfloat16(), exact)


def test_what_cannot_be_quantized_says_so():
    with pytest.raises(ValueError, match=r"multiple of 2 for nvfp4, .* got 47"):
        run(fz.Linear(47, 32), NV, torch.randn(8, 47))
    with pytest.raises(TypeError, match=r"float32, bfloat16 or float16, got torch\.float64"):
        run(fz.Linear(64, 32, dtype=torch.float64), MX, torch.randn(8, 64, dtype=torch.float64))


@each_recipe
def test_no_rows_one_row_and_no_memory(recipe):
    linear, grouped = fz.Linear(128, 128), fz.GroupedLinear(2, 128, 128)
    row = torch.randn(128)
    assert torch.equal(run(linear, recipe, row), run(linear, recipe, row[None])[0])
    none = torch.empty(0, 128, requires_grad=True)
    assert run(linear, recipe, none).shape == (0, 128)
    run(grouped, recipe, none, torch.tensor([0, 0])).sum().backward()
    assert none.grad.shape == (0, 128)
    assert not any(p.grad.any() for p in grouped.parameters())
    meta = fz.Sequential(linear, grouped).to("meta")
    x = torch.empty(64, 128, device="meta", requires_grad=True)
    run(meta, recipe, x, torch.empty(2, dtype=torch.int64, device="meta")).sum().backward()
    assert x.grad.shape == (64, 128)


# --- what is saved -------------------------------------------------------------------------------


def test_activations_are_saved_quantized_and_for_one_use():
    linear = fz.BasicLinear(128, 64, dtype=torch.bfloat16)
    x = torch.randn(32, 128, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors() as saved:
        run(linear, MX, x)
    assert [(t.dtype, tuple(t.shape)) for t in saved] == [
        (torch.float8_e4m3fn, (32, 128)),
        (torch.float8_e8m0fnu, (1, 128)),
        (torch.float8_e4m3fn, (64, 128)),
        (torch.float8_e8m0fnu, (2, 128)),
    ]


def test_saved_operands_can_be_moved_away():
    linear = fz.Linear(64, 32)
    linear.load_state_dict({"weight": torch.ones(32, 64).cumsum(0), "bias": torch.ones(32)})
    x = torch.linspace(-1, 1, 64 * 8).view(8, 64).requires_grad_()
    with save_on_cpu():
        moved = trained(linear, MX, x)
    ref.assert_equal(moved, trained(linear, MX, x))


@pytest.mark.parametrize("grouped", [False, True])
def test_no_use_is_quantized_that_no_product_reads(grouped):
    op = fz.GroupedLinear(1, 32, 32, bias=False) if grouped else fz.BasicLinear(32, 32)
    splits = (torch.tensor([32]),) if grouped else ()
    x = torch.randn(32, 32)
    row, column, both = (True, False), (False, True), (True, True)

    def uses(*, train, input_grad, weight_grad):
        op.requires_grad_(weight_grad)
        inputs = x.clone().requires_grad_(input_grad)
        with Recorded(uses_of) as launches, torch.set_grad_enabled(train):
            y = run(op, MX, inputs, *splits)
            if train:
                y.backward(torch.ones(32, 32))
        return launches.made

    assert uses(train=True, input_grad=True, weight_grad=True) == [both, both, both]
    assert uses(train=True, input_grad=True, weight_grad=False) == [row, both, row]
    assert uses(train=True, input_grad=False, weight_grad=True) == [both, row, column]
    assert uses(train=False, input_grad=True, weight_grad=True) == [row, row]


def test_changing_a_stored_weight_between_forward_and_backward_is_noticed():
    with fz.quantized_model_init(recipe=MX):
        linear = fz.BasicLinear(32, 32)
    y = run(linear, MX, torch.randn(32, 32, requires_grad=True))
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- reuse ---------------------------------------------------------------------------------------


def weighted(grouped):
    """An op of 32 to 32 features and a call of it on fixed rows."""
    op = fz.GroupedLinear(2, 32, 32) if grouped else fz.Linear(32, 32)
    x = torch.randn(32, 32)
    splits = (torch.tensor([20, 12]),) if grouped else ()
    return op, lambda: run(op, MX, x, *splits)


def first_weight(op):
    return op.weight0 if isinstance(op, fz.GroupedLinear) else op.weight


@pytest.mark.parametrize("grouped", [False, True])
def test_weights_are_quantized_once_inside_the_scope(grouped):
    op, call = weighted(grouped)
    want = call()
    with fz.reuse_quantized_weights(nn.ModuleList([op])), Recorded(uses_of) as launches:
        results = [call() for _ in range(3)]
    assert len(launches.made) == 3 + 1  # inputs, and one weight
    assert all(torch.equal(y, want) for y in results)
    with torch.no_grad():
        first_weight(op).data.add_(1)
    assert not torch.equal(call(), want)  # nothing is left of the scope


@pytest.mark.parametrize("grouped", [False, True])
def test_a_change_through_data_is_seen_outside_the_scope_only(grouped):
    op, call = weighted(grouped)
    want = call()
    with fz.reuse_quantized_weights(op):
        call()
        first_weight(op).data.add_(1)
        assert torch.equal(call(), want)  # the promise was broken: old values
    changed = call()
    assert not torch.equal(changed, want)
    first_weight(op).data.sub_(1)
    assert not torch.equal(call(), changed)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_replaced_parameter_is_seen_inside_the_scope(grouped):
    """As FSDP2 does, whose gathered weight is another parameter than the shard."""
    op, call = weighted(grouped)
    want = call()
    name = "weight0" if grouped else "weight"
    with fz.reuse_quantized_weights(op):
        assert torch.equal(call(), want)
        shard = getattr(op, name)
        setattr(op, name, nn.Parameter(shard.detach() + 1))
        gathered = call()
        assert not torch.equal(gathered, want)
        setattr(op, name, shard)
        assert torch.equal(call(), want)


def test_scopes_nest_and_training_follows_inference_inside():
    op, call = weighted(False)
    x = torch.randn(32, 32, requires_grad=True)
    for _ in range(2):
        run(op, MX, x).square().sum().backward()
    want, op.weight.grad = op.weight.grad, None
    with fz.reuse_quantized_weights(op):
        with torch.inference_mode(), fz.reuse_quantized_weights(op):
            inferred = call()
        with Recorded(uses_of) as launches:
            assert torch.equal(call(), inferred)
            for _ in range(2):
                run(op, MX, x).square().sum().backward()
    # Three inputs, two gradients, and the weight once more, now for the data gradient too.
    assert len(launches.made) == 3 + 2 + 1
    assert torch.equal(op.weight.grad, want)


def test_a_copy_made_inside_a_scope_is_outside_of_it():
    op, _ = weighted(False)
    x = torch.randn(32, 32)
    with fz.reuse_quantized_weights(op):
        run(op, MX, x)
        other = copy.deepcopy(op)
    other.weight.data.zero_()
    assert torch.equal(run(other, MX, x), other.bias.expand(32, 32))


def test_a_scope_without_weights_changes_nothing():
    x = torch.randn(4, 32)
    with fz.reuse_quantized_weights(fz.GELU()) as op:
        inside = fz.GELU()(x)
    assert op is None
    assert torch.equal(inside, fz.GELU()(x))


# --- stored quantized ----------------------------------------------------------------------------


def build(kind):
    if kind == "linear":
        return fz.Linear(128, 128)
    return fz.GroupedLinear(4, 128, 128, single_grouped_weight=kind == "single")


def inputs_of(kind):
    x = torch.randn(70, 128, requires_grad=True)
    return (x,) if kind == "linear" else (x, torch.tensor(SIZES))


each_kind = pytest.mark.parametrize("kind", ["linear", "single", "separate"])


@each_kind
@each_recipe
def test_weights_stored_quantized_compute_what_weights_quantized_on_the_way_do(recipe, kind):
    with fz.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        stored = build(kind)
    plain = build(kind)
    with torch.no_grad():
        for mine, theirs in zip(plain.parameters(), stored.parameters(), strict=True):
            if isinstance(theirs, fz.QuantizedTensor):
                mine.copy_(theirs.get_high_precision_init_val())
                theirs.clear_high_precision_init_val()
                assert theirs.get_high_precision_init_val() is None
            else:
                mine.copy_(theirs)
    assert sum(isinstance(p, fz.QuantizedTensor) for p in stored.parameters()) == (
        4 if kind == "separate" else 1
    )
    inputs = inputs_of(kind)
    results = [trained(module, recipe, *inputs) for module in (stored, plain)]
    for a, b in zip(*results, strict=True):
        close(a, b)
        assert a.dtype == torch.float32


@each_kind
def test_stored_weights_train_and_are_saved_as_plain_tensors(kind):
    with fz.quantized_model_init(recipe=MX):
        op = build(kind)
    optimizer = torch.optim.AdamW(op.parameters(), lr=0.05)
    inputs, losses = inputs_of(kind), []
    for _ in range(5):
        loss = (run(op, MX, *inputs)[: sum(SIZES)] - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    file = io.BytesIO()
    torch.save(op.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(type(t) is torch.Tensor for t in state.values())
    with fz.quantized_model_init(recipe=MX):
        same = build(kind)
    same.load_state_dict(state)
    plain = build(kind)
    plain.load_state_dict(state)
    want = run(op, MX, *inputs)
    assert torch.equal(run(same, MX, *inputs), want)
    assert torch.equal(run(plain, MX, *inputs), want)


@each_kind
def test_stored_weights_work_without_a_recipe_and_under_another(kind):
    with fz.quantized_model_init(recipe=MX):
        op = build(kind)
    plain = build(kind)
    with torch.no_grad():
        for mine, theirs in zip(plain.parameters(), op.parameters(), strict=True):
            mine.copy_(theirs.dequantize() if isinstance(theirs, fz.QuantizedTensor) else theirs)
    inputs = inputs_of(kind)
    for recipe in (None, NV):  # whose values another recipe quantizes again
        ref.assert_equal(*[trained(module, recipe, *inputs) for module in (op, plain)])


# --- quantized tensors as inputs -----------------------------------------------------------------


@each_recipe
def test_quantized_inputs_give_what_the_ops_quantize_themselves(recipe):
    linear, x = fz.Linear(128, 128), torch.randn(64, 128)
    given = recipes.Quantizer(recipe.format("input"))(x)
    ref.assert_equal(trained(linear, recipe, given), trained(linear, recipe, x))


@each_recipe
def test_grouped_inputs_give_what_the_op_quantizes_itself(recipe):
    op, x, splits = fz.GroupedLinear(4, 128, 128), torch.randn(70, 128), torch.tensor(SIZES)
    quantizer = recipes.Quantizer(recipe.format("input"))
    want = trained(op, recipe, x, splits)
    for value in (recipes.group_quantize(x, quantizer, 4, splits), recipes.group(x, 4, splits)):
        ref.assert_equal(trained(op, recipe, value, splits), want)


@each_recipe
def test_quantized_inputs_are_explained(recipe):
    quantizer, x = recipes.Quantizer(recipe.format("input")), torch.randn(70, 128)
    splits = torch.tensor(SIZES)
    grouped = recipes.group_quantize(x, quantizer, 4, splits)
    for module, *inputs in (
        (fz.Linear(128, 128), quantizer(x)),
        (fz.GroupedLinear(4, 128, 128), grouped, splits),
    ):
        with fz.autocast(recipe=recipe):
            assert f"recipe {recipe.name}" in str(fz.explain(module, *inputs))


def test_quantized_inputs_are_dequantized_where_there_is_no_recipe():
    given = recipes.MXFP8Quantizer()(torch.randn(64, 64))
    linear = fz.Linear(64, 32)
    want = nn.functional.linear(given.dequantize(), linear.weight, linear.bias)
    close(linear(given), want)
    grouped = fz.GroupedLinear(1, 64, 32)
    want = nn.functional.linear(given.dequantize(), grouped.weight0, grouped.bias0)
    close(grouped(given, torch.tensor([64])), want)


def test_an_e5m2_input_is_never_read_as_e4m3():
    given = recipes.MXFP8Quantizer(torch.float8_e5m2)(torch.randn(64, 64))
    op = fz.Linear(64, 32)
    assert torch.equal(run(op, MX, given), run(op, MX, given.dequantize()))


@pytest.mark.parametrize("grouped", [False, True])
def test_a_module_in_fp64_holds_the_values(grouped):
    with fz.quantized_model_init(recipe=MX):
        module = fz.GroupedLinear(2, 64, 64) if grouped else fz.Linear(64, 64)
    want = [p.detach().to(torch.float64) for p in module.parameters()]
    module.double()
    for p, values in zip(module.parameters(), want, strict=True):
        assert type(p) is nn.Parameter
        assert torch.equal(p, values)
    extra = (torch.tensor([3, 5]),) if grouped else ()
    assert module(torch.randn(8, 64, dtype=torch.float64), *extra).dtype == torch.float64


@pytest.mark.parametrize("made_inside", [False, True])
def test_a_stored_weight_in_inference_mode(made_inside):
    """Evaluation saves, moves and looks at weights as anything else does."""
    with torch.inference_mode(made_inside), fz.quantized_model_init(recipe=MX):
        module = fz.GroupedLinear(2, 64, 64, single_grouped_weight=True)
    with torch.inference_mode():
        dequantized = module.weight.dequantize()
        state = module.state_dict()
        assert torch.equal(module.weight.detach().dequantize(), dequantized)
        assert torch.equal(module.weight.reshape(1, 2, 64, 64).dequantize()[0], dequantized)
        module.load_state_dict(state)
        module.to(torch.bfloat16)
        assert isinstance(module.weight, fz.QuantizedTensor)
        assert module.weight.dtype == torch.bfloat16
        assert torch.equal(module.weight.dequantize().float(), dequantized)
    assert module.weight.is_inference() == made_inside


def test_a_stored_weight_that_was_replaced_by_an_ordinary_one():
    with fz.quantized_model_init(recipe=MX):
        op = fz.GroupedLinear(2, 32, 32, bias=False)
    x, sizes = torch.randn(12, 32), [5, 7]
    new = torch.randn(32, 32)
    with fz.autocast(recipe=MX):
        before = op(x, torch.tensor(sizes))
        op.weight1 = nn.Parameter(new)
        after = op(x, torch.tensor(sizes))
    assert torch.equal(after[:5], before[:5])
    wanted = q(x[5:], MX, "input", along=1) @ q(new, MX, "weight", along=1).mT
    torch.testing.assert_close(after[5:], wanted)


def test_copies_of_ops_have_no_gradients():
    with fz.quantized_model_init(recipe=MX):
        op = fz.BasicLinear(32, 32)
    op(torch.randn(4, 32)).sum().backward()
    assert op.weight.grad is not None
    assert copy.deepcopy(op).weight.grad is None


# --- Quantize ------------------------------------------------------------------------------------


@each_recipe
def test_quantize_passes_on_what_its_neighbours_would_have_made(recipe):
    first, second = fz.BasicLinear(128, 128), fz.BasicLinear(128, 128)
    plain = fz.Sequential(first, second)
    explicit = fz.Sequential(first, fz.Quantize(forward=True, backward=True), second)
    x = torch.randn(64, 128, requires_grad=True)
    ref.assert_equal(trained(explicit, recipe, x), trained(plain, recipe, x))
    assert torch.equal(explicit(x), plain(x))  # without a recipe it is the identity


@each_recipe
def test_quantize_passes_on_groups(recipe):
    first, second = (fz.GroupedLinear(4, 128, 128, bias=False) for _ in range(2))
    plain = fz.Sequential(first, second)
    explicit = fz.Sequential(
        fz.Quantize(num_groups=4), first, fz.Quantize(True, True, num_groups=4), second
    )
    x, splits = torch.randn(70, 128, requires_grad=True), torch.tensor(SIZES)
    want = trained(plain, recipe, x, splits, splits)
    ref.assert_equal(trained(explicit, recipe, x, *[splits] * 4), want)
    assert torch.equal(explicit(x, *[splits] * 4), plain(x, splits, splits))  # without a recipe


def test_quantize_between_groups_asks_for_their_rows():
    x, splits = torch.randn(70, 128), torch.tensor(SIZES)
    linear = fz.GroupedLinear(4, 128, 128)
    with pytest.raises(ValueError, match=r"first_dims must be of shape \(4,\), got \(3,\)"):
        run(fz.Sequential(fz.Quantize(num_groups=3), linear), MX, x, splits[:3], splits)


def test_a_grouped_linear_says_how_it_wants_tensors():
    linear, x, splits = fz.GroupedLinear(4, 128, 128), torch.randn(70, 128), torch.tensor(SIZES)
    assert linear.get_input_quantizer() is None
    with fz.autocast(recipe=HYBRID):
        of_input, of_grad = linear.get_input_quantizer(), linear.get_grad_output_quantizer()
        linear.requires_grad_(False)
        frozen = linear.get_input_quantizer(), linear.get_grad_output_quantizer()
    assert (of_input.rowwise_usage, of_input.columnwise_usage) == (
        of_grad.rowwise_usage,
        of_grad.columnwise_usage,
    )
    assert of_input.columnwise_usage
    assert not any(q.columnwise_usage for q in frozen)
    assert of_input.format == HYBRID.format("input")
    assert of_grad.format == HYBRID.format("grad")
    g = of_input(x, splits)
    assert of_input(g) is g
    assert torch.equal(of_input(recipes.group(x, 4, splits), splits).dequantize(), g.dequantize())
    assert torch.equal(of_grad(g).dequantize(), of_grad(g.dequantize(), splits).dequantize())
    assert of_grad(g).format == of_grad.format
    with pytest.raises(ValueError, match="must have 4 groups"):
        of_input(recipes.group_quantize(x, recipes.MXFP8Quantizer(), 2))
    both = of_input(frozen[0](x, splits))
    assert both.columnwise_data is not None
    assert torch.equal(both.dequantize(), g.dequantize())
    with pytest.raises(
        ValueError, match=r"first_dims must be the rows of each of the 4 groups, got None"
    ):
        of_input(x)


def test_quantize_asks_for_the_uses_that_will_be_read():
    second = fz.BasicLinear(32, 32)
    block = fz.Sequential(fz.Identity(), fz.Quantize(), second)
    x = torch.randn(32, 32)
    for frozen, uses in ((False, (True, True)), (True, (True, False))):
        second.requires_grad_(not frozen)
        with Recorded(uses_of) as launches:
            run(block, MX, x)
        assert launches.made[0] == uses


# --- recomputed forwards -------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [None, BLOCK])
@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["linear", "single"])
def test_a_checkpoint_repeats_the_forward_under_its_recipe(kind, reentrant, thread, scope):
    module, inputs = fz.Sequential(build(kind)), inputs_of(kind)
    grads = []
    for wrap in (False, True):
        module.zero_grad()
        inputs[0].grad = None
        with fz.autocast(recipe=NV):
            y = checkpoint(module, *inputs, use_reentrant=reentrant) if wrap else module(*inputs)

        def backward(y=y):
            with fz.autocast(enabled=scope is not None, recipe=scope):
                y.square().sum().backward()

        if thread:
            with ThreadPoolExecutor(1) as threads:
                threads.submit(backward).result()
        else:
            backward()
        grads.append([t.grad for t in (inputs[0], *module.parameters())])
    assert module.plan.recipe == NV
    ref.assert_equal(*grads)


def test_evaluation_under_another_recipe_does_not_confuse_the_usual_checkpoint():
    module, x = fz.Sequential(fz.Linear(32, 32)), torch.randn(32, 32, requires_grad=True)
    with torch.no_grad():
        module(x)
    with fz.autocast(recipe=MX):
        y = checkpoint(module, x, use_reentrant=False)
    y.sum().backward()
    assert module.plan.recipe == MX


@pytest.mark.parametrize("reentrant", [False, True])
def test_several_recipes_need_keep_recipe(reentrant):
    module, x = fz.Sequential(fz.Linear(32, 32)), torch.randn(32, 32, requires_grad=True)
    module(x)
    with torch.no_grad():
        module(x)
    with fz.autocast(recipe=MX):
        y = checkpoint(module, x, use_reentrant=reentrant)
        kept = checkpoint(fz.keep_recipe(module), x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match=r"Run\(BasicLinear, Bias\).*mxfp8, no recipe.*keep_rec"):
        y.sum().backward()
    kept.sum().backward()
    assert module.plan.recipe == MX


def test_a_forward_inside_a_backward_of_its_own_follows_the_scope():
    module = fz.Sequential(fz.Linear(32, 32))

    def under_a_recipe(dy):
        with fz.autocast(recipe=MX):
            return module(dy)

    module(torch.randn(32, 32))
    copied = ref.in_backward(under_a_recipe)
    copied(torch.randn(32, 32, requires_grad=True)).sum().backward()
    assert module.plan.recipe == MX


# --- compile, threads, explain -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "stored", "dynamic"),
    [
        *[
            (recipe, stored, None)
            for recipe in (MX, BLOCK, CURRENT, NV)
            for stored in (False, True)
        ],
        (MX, True, True),
        (BLOCK, False, True),
        (NV, False, True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_compiled_blocks_equal_eager_ones(recipe, stored, dynamic, fresh_compiler):
    """For any number of rows, without the second half, whose code takes as long to compile."""
    splits, scales = torch.tensor(SIZES), torch.rand(70)
    with fz.quantized_model_init(stored, recipe=recipe):
        linear = fz.Linear(128, 128)
        ops, extra = [linear, fz.GroupedLinear(4, 128, 256, single_grouped_weight=True)], [splits]
        if not dynamic:
            ops += [fz.ScaledSwiGLU(), fz.GroupedLinear(4, 128, 128)]
            extra += [scales, splits]
    mlp = fz.Sequential(*ops)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    x = torch.randn(70, 128, requires_grad=True)
    ref.assert_equal(trained(compiled, recipe, x, *extra), trained(mlp, recipe, x, *extra))


def test_compiled_code_follows_the_recipe(fresh_compiler):
    linear, x = fz.Linear(32, 32), torch.randn(32, 32)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    want = {recipe: run(linear, recipe, x) for recipe in (None, MX, HYBRID, NV)}
    for recipe in (None, MX, NV, MX, None, HYBRID):
        assert torch.equal(run(compiled, recipe, x), want[recipe])

    def scoped(x):
        with fz.autocast(recipe=NV):
            return linear(x)

    assert torch.equal(torch.compile(scoped, fullgraph=True, backend="aot_eager")(x), want[NV])


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_compiled_code_takes_quantized_tensors(dynamic, fresh_compiler):
    with fz.quantized_model_init(recipe=MX):
        linear = fz.Linear(32, 32)
    x, quantizer = torch.randn(32, 32), recipes.MXFP8Quantizer()
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    again = torch.compile(quantizer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(again(quantizer(x)).dequantize(), quantizer(x).dequantize())
    for value in (x, quantizer(x)):
        ref.assert_equal(*[trained(module, MX, value) for module in (linear, compiled)])


def test_compiled_code_ignores_the_scope(fresh_compiler):
    op, _ = weighted(False)
    x = torch.randn(32, 32)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    with fz.reuse_quantized_weights(op):
        run(op, MX, x)
        run(compiled, MX, x)
        op.weight.data.zero_()
        assert torch.equal(run(compiled, MX, x), op.bias.expand(32, 32))


def test_threads_have_recipes_of_their_own():
    linear, x = fz.Linear(32, 32), torch.randn(32, 32)
    want = {recipe: run(linear, recipe, x) for recipe in (None, MX, NV)}

    def work(recipe):
        for _ in range(20):
            assert torch.equal(run(linear, recipe, x), want[recipe])

    with ThreadPoolExecutor(len(want)) as threads:
        list(threads.map(work, want))


def test_explain_says_which_formats_the_products_have():
    mlp = fz.Sequential(fz.Linear(32, 32), fz.GELU())
    with fz.autocast(recipe=HYBRID):
        text = str(fz.explain(mlp, torch.randn(4, 32)))
    assert "recipe mxfp8" in text
    assert (
        "products of quantized operands: input mxfp8_e4m3, weight mxfp8_e4m3, grad mxfp8_e5m2"
        in text
    )
    assert "quantized" not in str(fz.explain(mlp, torch.randn(4, 32)))


@each_recipe
@pytest.mark.parametrize("scale_bias", [False, True])
def test_gradients_of_a_bias_are_of_the_gradient_that_was_quantized(recipe, scale_bias):
    """As in te.ops. ``Quantize`` changes no other gradient: products read what it was before."""
    torch.manual_seed(0)
    linear = fz.GroupedLinear(3, 128, 128, scale_bias=scale_bias)
    torch.nn.init.normal_(linear.bias0)
    plain, splits = fz.Sequential(linear), torch.tensor([128, 0, 128])
    after = fz.Quantize(False, True, num_groups=3)
    between = fz.Sequential(linear, after)
    x, dy = torch.randn(256, 128, requires_grad=True), torch.randn(256, 128)
    scales = [torch.rand(256, requires_grad=True)] if scale_bias else []
    wanted = [x, *linear.weights(), *scales, *linear.biases()]
    quantizer = fz.recipes.Quantizer(recipe.format("grad"))
    values = fz.recipes.group_quantize(dy, quantizer, 3, splits).dequantize()
    with fz.autocast(recipe=recipe):
        expected = torch.autograd.grad(plain(x, splits, *scales), wanted, dy)
        got = torch.autograd.grad(between(x, splits, *scales, splits), wanted, dy)
    ref.assert_equal(got[:4], expected[:4])
    # Sums of the gradient's values, as the linear alone has them in high precision.
    sums = torch.autograd.grad(plain(x, splits, *scales), wanted[4:], values)
    ref.assert_equal(got[4:], sums)
    if not scale_bias:
        summed = torch.stack([values[:128].sum(0), dy[:0].sum(0), values[128:].sum(0)])
        torch.testing.assert_close(torch.stack(got[-3:]), summed)


@each_recipe
def test_quantized_inputs_viewed_across_rows_are_read_as_values(recipe):
    given = fz.recipes.Quantizer(recipe.format("input"))(torch.randn(64, 64)).view(-1)
    for view in (given, given.view(128, 32), given.view(2, 16, 128)):
        linear = fz.Linear(view.shape[-1], 32)
        assert torch.equal(run(linear, recipe, view), run(linear, recipe, view.dequantize()))
