"""``Quantize`` at every place: what it gives its neighbours, the caller and autograd."""

from contextlib import nullcontext

import pytest
import torch
from number_formats import KINDS

import fusible as fz
from fusible.recipes import QuantizedTensor, no_implicit_dequantize
from fusible.testing import assume_target

RECIPES = {name: recipe for name, recipe in KINDS.items() if recipe is not None}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=[*RECIPES])


def values(t):
    return t.dequantize() if isinstance(t, QuantizedTensor | fz.GroupedTensor) else t


def representable(t, fmt):
    return QuantizedTensor.quantize(t.detach(), fmt, rowwise=True, columnwise=False).dequantize()


class Sizes(fz.BasicOperation):
    """Makes the sizes of two groups."""

    num_extra_outputs = 1
    extra_output_names = ("split_sizes",)

    def fuser_forward(self, contexts, x, **unused):
        return x, [(torch.tensor([40, 24]),)]

    def fuser_backward(self, contexts, dy, **unused):
        return dy, [()], [()]


class Rounded(torch.autograd.Function):
    """The values of a quantized tensor, and of a quantized gradient."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.format = backward
        return x.clone() if forward is None else representable(x, forward)

    @staticmethod
    def backward(ctx, dy):
        return dy if ctx.format is None else representable(dy, ctx.format), None, None


@each_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("forward", [False, True])
def test_alone_it_returns_quantized_tensors(forward, backward, dtype, recipe):
    op = fz.Quantize(forward, backward)
    x = torch.randn(32, 128, dtype=dtype, requires_grad=True)
    dy = torch.randn(32, 128, dtype=dtype)
    with fz.autocast(recipe=recipe):
        y = op(x)
    y.backward(dy)
    assert isinstance(y, QuantizedTensor) == forward
    assert isinstance(x.grad, QuantizedTensor) == backward
    want = representable(x, recipe.format("input")) if forward else x
    assert torch.equal(values(y), want)
    want = representable(dy, recipe.format("grad")) if backward else dy
    assert torch.equal(values(x.grad), want)
    assert y.dtype == x.grad.dtype == dtype


def test_without_a_recipe_it_is_the_identity():
    x, dy = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)
    y = fz.Quantize(True, True)(x)
    y.backward(dy)
    assert torch.equal(y, x)
    assert torch.equal(x.grad, dy)


# What is before Quantize and after it; none of these reads quantized tensors.
PLACES = {
    "activations": ([fz.GELU], [fz.SiLU]),
    "bias and norm": ([lambda: fz.Bias(128)], [lambda: fz.RMSNorm(128)]),
    "before a scale": ([], [lambda: fz.ConstantScale(2.0), fz.GELU]),
    "after a reshape": ([lambda: fz.Reshape((32, 128))], [fz.Identity, fz.ReLU]),
    "twice": ([fz.GELU, lambda: fz.Quantize(True, True)], [fz.GELU]),
}


@pytest.mark.usefixtures("fresh_compiler")
@each_recipe
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("place", PLACES)
def test_neighbours_that_read_values_get_them(place, mode, recipe):
    before, after = [[make() for make in makers] for makers in PLACES[place]]
    seq = fz.Sequential(*before, fz.Quantize(True, True), *after)
    call = torch.compile(seq, backend="aot_eager", fullgraph=True) if mode == "compiled" else seq
    x, dy = torch.randn(32, 128, requires_grad=True), torch.randn(32, 128)
    leaves = [x, *seq.parameters()]
    with fz.autocast(recipe=recipe), no_implicit_dequantize():
        got = call(x)
        grads = [values(g) for g in torch.autograd.grad(got, leaves, dy)]
    want = x
    for op in before:
        want = op(want)  # outside of the recipe, where Quantize is the identity
    if place == "twice":
        want = Rounded.apply(want, recipe.format("input"), recipe.format("grad"))
    want = Rounded.apply(want, recipe.format("input"), recipe.format("grad"))
    for op in after:
        want = op(want)
    bound = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, want, **bound)
    torch.testing.assert_close(grads, torch.autograd.grad(want, leaves, dy), **bound)


def for_both_uses(t, fmt):
    """Values for row-wise and for column-wise use, in FP64."""
    q = QuantizedTensor.quantize(t.detach(), fmt, rowwise=True, columnwise=True)
    return [q.dequantize(columnwise=columnwise).double() for columnwise in (False, True)]


@pytest.mark.usefixtures("fresh_compiler")
@each_recipe
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("shape", [(48, 128), (2, 20, 128)], ids=["matrix", "3-D"])
def test_a_gradient_behind_a_linear_with_a_bias_is_quantized_once(shape, mode, recipe):
    linear = fz.Linear(128, 256)
    seq = fz.Sequential(linear, fz.Quantize(True, True))
    call = torch.compile(seq, backend="aot_eager", fullgraph=True) if mode == "compiled" else seq
    x, dy = torch.randn(*shape, requires_grad=True), torch.randn(*shape[:-1], 256)
    with fz.autocast(recipe=recipe), no_implicit_dequantize():
        y = call(x)
        dx, dw, db = torch.autograd.grad(y, [x, linear.weight, linear.bias], dy)
    row, column = for_both_uses(dy.view(-1, 256), recipe.format("grad"))
    _, x_column = for_both_uses(x.view(-1, 128), recipe.format("input"))
    _, w_column = for_both_uses(linear.weight, recipe.format("weight"))
    bound = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(dx.view(-1, 128).double(), row @ w_column, **bound)
    torch.testing.assert_close(dw.double(), column.T @ x_column, **bound)
    torch.testing.assert_close(db.double(), row.sum(0), **bound)


def grouped_values(t, fmt, sizes):
    """Values of groups quantized apart, for row-wise use, in FP64."""
    groups = fz.recipes.group_quantize(t, fz.recipes.Quantizer(fmt), len(sizes), sizes)
    return groups.dequantize().double()


@pytest.mark.usefixtures("fresh_compiler")
@each_recipe
@pytest.mark.parametrize("mode", ["eager", "compiled", "sm100", "sm90"])
@pytest.mark.parametrize("scaled", [False, True], ids=["bias", "scaled bias"])
@pytest.mark.parametrize("mlp", [False, True], ids=["linear", "mlp"])
def test_a_grouped_bias_sums_the_quantized_gradient(mlp, scaled, mode, recipe):
    """Of each group apart, once; as that of a ``Linear`` does, in a fused MLP too."""
    sizes = torch.tensor([64, 0, 48])
    fc2 = fz.GroupedLinear(3, 128, 256, dtype=torch.bfloat16, scale_bias=scaled)
    for bias in fc2.biases():
        torch.nn.init.normal_(bias)
    ops, extra = [fc2], [sizes]
    x = torch.randn(128, 128, dtype=torch.bfloat16, requires_grad=True)
    scales = torch.rand(128, requires_grad=True)
    if scaled:
        extra.append(scales)
    if mlp:
        fc1 = fz.GroupedLinear(3, 128, 256, dtype=torch.bfloat16, bias=False)
        ops, extra = (
            [fc1, fz.ScaledSwiGLU(glu_interleave_size=32), fc2],
            [sizes, torch.rand(128), *extra],
        )
    seq = fz.Sequential(*ops, fz.Quantize(True, True, num_groups=3))
    call = torch.compile(seq, backend="aot_eager", fullgraph=True) if mode == "compiled" else seq
    dy = (torch.randn(128, 256) * torch.rand(128, 1).exp2()).bfloat16()
    target = assume_target(mode) if mode.startswith("sm") else nullcontext()
    with target, fz.autocast(recipe=recipe):
        y = call(x, *extra, sizes)
        leaves = [*fc2.biases(), *([scales] if scaled else [])]
        grads = torch.autograd.grad(y, leaves, dy)
    rows = grouped_values(dy, recipe.format("grad"), sizes)[: sizes.sum()]
    scale = scales.detach().double()[: len(rows), None] if scaled else 1
    sums = [group.sum(0) for group in (rows * scale).split(sizes.tolist())]
    # One rounding of the sum to BF16, two where it was summed in FP32 and added.
    for got, want in zip(grads[:3], sums, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2**-10)
    if scaled:
        of_rows = torch.cat([b.expand(n, -1) for b, n in zip(fc2.biases(), sizes, strict=True)])
        want = (rows * of_rows.double()).sum(1)
        torch.testing.assert_close(grads[-1][: len(rows)].double(), want, rtol=1e-4, atol=1e-4)
        assert not grads[-1][len(rows) :].any()


@each_recipe
def test_a_bias_beside_groups_sums_what_was_quantized_in_groups(recipe):
    sizes, bias = torch.tensor([40, 24]), fz.Bias(128)
    seq = fz.Sequential(bias, fz.Quantize(False, True, num_groups=2))
    x, dy = torch.randn(64, 128, requires_grad=True), torch.randn(64, 128)
    dy[40:] *= 64
    with fz.autocast(recipe=recipe):
        dx, db = torch.autograd.grad(seq(x, sizes), [x, bias.bias], dy)
    want = grouped_values(dy, recipe.format("grad"), sizes)
    assert torch.equal(values(dx).double(), want)
    torch.testing.assert_close(db.double(), want.sum(0), rtol=1e-5, atol=1e-4)


@each_recipe
def test_another_sequential_takes_what_one_returns(recipe):
    first = fz.Sequential(fz.Linear(128, 128), fz.Quantize(True, True))
    second = fz.Sequential(fz.Quantize(True, True), fz.Linear(128, 128))
    whole = fz.Sequential(first[0], fz.Quantize(True, True), second[1])
    x = torch.randn(32, 128, requires_grad=True)
    leaves = [x, *whole.parameters()]
    results = []
    for call in (lambda t: second(first(t)), whole):
        with fz.autocast(recipe=recipe), no_implicit_dequantize():
            y = call(x)
            results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(values(got), values(want))


def test_another_recipe_and_none_take_the_values():
    first, second = fz.Sequential(fz.GELU(), fz.Quantize()), fz.Linear(128, 128)
    x = torch.randn(32, 128)
    with fz.autocast(recipe=KINDS["mxfp8"]):
        q = first(x)
    assert isinstance(q, QuantizedTensor)
    assert torch.equal(second(q), second(q.dequantize()))
    with fz.autocast(recipe=KINDS["fp8_block"]):
        assert torch.equal(second(q), second(q.dequantize()))


def test_a_gradient_is_added_to_a_quantized_one():
    op, x = fz.Quantize(False, True), torch.randn(32, 128, requires_grad=True)
    for _ in range(2):
        with fz.autocast(recipe=KINDS["mxfp8"]):
            op(x).backward(torch.ones_like(x))
    assert torch.equal(values(x.grad), torch.full_like(x, 2.0).detach())


@pytest.mark.usefixtures("fresh_compiler")
@each_recipe
def test_compiled_it_returns_a_quantized_tensor(recipe):
    """With and without history; its gradient may be quantized or not."""
    op = fz.Sequential(fz.ReLU(), fz.Quantize())
    x, dy = torch.randn(2, 32, 128, requires_grad=True), torch.randn(2, 32, 128)
    results = []
    for call in (op, torch.compile(op, backend="aot_eager", fullgraph=True)):
        with fz.autocast(recipe=recipe):
            y = call(x)
            with torch.no_grad():
                quantized = [y, call(x)]
        assert all(isinstance(q, QuantizedTensor) for q in quantized)
        pieces = [p.view(torch.uint8) for q in quantized for p in q.pieces().values()]
        grads = dy, fz.recipes.Quantizer(recipe.format("grad"))(dy)
        received = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in grads]
        (of_values,) = torch.autograd.grad(y.dequantize().square().sum(), x)
        results.append([*pieces, *map(values, received), of_values])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("first", [fz.ReLU, torch.nn.Identity])
@each_recipe
def test_compiled_it_returns_a_grouped_tensor(recipe, first):
    op, sizes = fz.Sequential(first(), fz.Quantize(num_groups=3)), torch.tensor([40, 0, 20])
    x, dy = torch.randn(64, 128, requires_grad=True), torch.randn(64, 128)
    results = []
    for call in (op, torch.compile(op, backend="aot_eager", fullgraph=True)):
        with fz.autocast(recipe=recipe):
            y = call(x, sizes)
            with torch.no_grad():
                grouped = [y, call(x, sizes)]
        assert all(isinstance(g, fz.GroupedTensor) for g in grouped)
        pieces = [p for g in grouped for p in g.pieces().values()]
        (grad,) = torch.autograd.grad(y, x, dy)
        results.append([*(p.view(torch.uint8) if p.itemsize == 1 else p for p in pieces), grad])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@each_recipe
def test_rows_in_groups_that_are_no_matrix_are_rounded(compiled, recipe):
    """And those of groups whose sizes an op of the compiled run makes."""
    sizes = torch.tensor([40, 24])
    op = fz.Sequential(fz.Quantize(backward=True, num_groups=2))
    of_run = fz.Sequential(Sizes(), fz.Quantize(num_groups=2))
    if compiled:
        both = [torch.compile(f, backend="aot_eager", fullgraph=True) for f in (op, of_run)]
        op, of_run = both
    x, dy = torch.randn(64, 128), torch.randn(64, 128)
    three = x.view(4, 16, 128).requires_grad_()
    with fz.autocast(recipe=recipe):
        y = op(three, sizes)
        mine = of_run(x)
    (grad,) = torch.autograd.grad(y, three, dy.view(4, 16, 128))
    want, want_grad = (
        fz.recipes.group_quantize(t, fz.recipes.Quantizer(recipe.format(role)), 2, sizes)
        for t, role in ((x, "input"), (dy, "grad"))
    )
    assert isinstance(mine, torch.Tensor if compiled else fz.GroupedTensor)
    for got, expected in ((y, want), (grad, want_grad), (values(mine), want)):
        assert torch.equal(got.reshape(64, 128), expected.dequantize())


@pytest.mark.usefixtures("fresh_compiler")
@each_recipe
def test_compiled_runs_take_it(recipe):
    """In the same graph, in which the format of the tensor is no constant."""
    first = fz.Sequential(fz.ReLU(), fz.Quantize())
    second = fz.Sequential(fz.BasicLinear(128, 64), fz.Bias(64))

    def function(x):
        return second(first(x))

    x = torch.randn(32, 128, requires_grad=True)
    results = []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        with fz.autocast(recipe=recipe):
            y = call(x)
        results.append((y, *torch.autograd.grad(y.sum(), [x, *second.parameters()])))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_clones_have_ordinary_gradients():
    leaf = torch.nn.Parameter(fz.recipes.MXFP8Quantizer()(torch.randn(64, 64)))

    def function(t):
        t = t.clone()
        assert isinstance(t.detach(), QuantizedTensor)
        return t, t.detach().dequantize() * 2

    y, twice = torch.compile(function, backend="aot_eager", fullgraph=True)(leaf)
    assert torch.equal(twice, 2 * leaf.dequantize())
    (y.dequantize() * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full((64, 64), 3.0))


def test_a_grouped_linear_without_groups_takes_the_values():
    linear, splits = fz.GroupedLinear(2, 64, 64), torch.tensor([32, 32])
    x = torch.randn(64, 64)
    with fz.autocast(recipe=KINDS["mxfp8"]):
        got = fz.Sequential(fz.Quantize(), linear)(x, splits)
        fmt = KINDS["mxfp8"].format("input")
        assert torch.equal(got, linear(representable(x, fmt), splits))
        ends = fz.Sequential(fz.GELU(), fz.Quantize(num_groups=2))(x, splits)
    assert isinstance(ends, fz.GroupedTensor)
    assert ends.num_tensors == 2
    want = representable(torch.nn.functional.gelu(x, approximate="tanh"), fmt)
    torch.testing.assert_close(ends.dequantize(), want, rtol=1e-5, atol=1e-5)


BF16_LINEAR = {"dtype": torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("casts", ["weight", "autocast"])
@each_recipe
def test_what_a_linear_casts_first_is_quantized_after_the_cast(recipe, casts, dtype):
    """By the op before as by the linear itself; and the gradient that the op after it gives."""
    options = {} if casts == "autocast" else BF16_LINEAR
    before, after = fz.GELU(), fz.RMSNorm(64, dtype=torch.float32)
    module = fz.Sequential(before, fz.Linear(64, 64, **options), after)
    x = torch.randn(64, 64, dtype=dtype, requires_grad=True)
    results = []
    for call in (module, lambda x: after(module[1](before(x)))):
        with fz.autocast(recipe=recipe), torch.autocast("cpu", enabled=casts == "autocast"):
            y = call(x)
        grads = torch.autograd.grad(y.sum(), [x, *module.parameters()])
        results.append([y, *grads])
    for together, apart in zip(*results, strict=True):
        assert together.dtype == apart.dtype
        assert torch.equal(together, apart)


@pytest.mark.parametrize("backward", [False, True])
@each_recipe
def test_an_explicit_quantize_before_a_linear_that_casts(recipe, backward):
    """It quantizes from its own dtype, once for both products, as where the ops run one by one."""
    quantize = fz.Quantize(forward=True, backward=backward)
    linear = fz.Linear(64, 64, bias=False, **BF16_LINEAR)
    module, x = fz.Sequential(quantize, linear), torch.randn(64, 64, requires_grad=True)
    results = []
    for call in (module, lambda x: linear(quantize(x))):
        torch.manual_seed(1)  # of stochastic rounding
        with fz.autocast(recipe=recipe):
            y = call(x)
        results.append([y, *torch.autograd.grad(y.sum(), [x, linear.weight])])
    for together, apart in zip(*results, strict=True):
        assert torch.equal(values(together), values(apart))


@each_recipe
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100"])
@pytest.mark.parametrize("quantized", ["input", "gradient"])
def test_a_grouped_linear_of_three_dimensions(recipe, target, quantized):
    """What arrives quantized is quantized again, as rows."""
    torch.manual_seed(0)
    sizes = torch.tensor([40, 0, 24])
    linear = fz.GroupedLinear(3, 64, 32, bias=True, dtype=torch.bfloat16)
    x = torch.randn(2, 32, 64, dtype=torch.bfloat16)
    dy = torch.randn(2, 32, 32, dtype=torch.bfloat16)
    op = fz.Sequential(fz.Quantize(), torch.nn.Identity(), linear)
    if quantized == "gradient":
        op = fz.Sequential(linear, torch.nn.Identity(), fz.Quantize(False, True))
    results = []
    bound = 0.3 if "NVFP4" in type(recipe).__name__ else 0.1
    for one in (linear, op):
        with assume_target(target), fz.autocast(recipe=recipe):
            y = one(x, sizes)
        y.backward(dy)
        results.append([y.detach(), *[p.grad for p in linear.parameters()]])
        linear.zero_grad()
    for plain, got in zip(*results, strict=True):
        assert got.shape == plain.shape
        assert (got.float() - plain.float()).norm() <= bound * plain.float().norm()
