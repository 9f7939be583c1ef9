"""Every op between two linears under every recipe: what it hands on quantized, and the values."""

import functools
import itertools

import pytest
import reference as ref
import torch
from every_op import ACTIVATIONS, NORMS, SCALED, SMALL, extra_inputs, randomised
from number_formats import KINDS
from torch.utils.checkpoint import checkpoint

import fusible as fz
from fusible import recipes

HANDING_ON = {**ACTIVATIONS, **SCALED, **NORMS}
BETWEEN = {**HANDING_ON, "AddExtraInput": SMALL["AddExtraInput"], "Bias": SMALL["Bias"]}
FEATURES = 256  # a gated op leaves 128, a multiple of every format's block
# Each op meets all nine pairs under its recipes.
PAIRS = list(itertools.product(ref.DTYPES, [(20,), (2, 10), (2, 2, 5)]))


def quantized(t, recipe, role, *, along):
    """The values of ``t`` ``[..., features]``, quantized as one matrix along a dimension."""
    t = t.detach().flatten(0, -2)
    fmt = recipe and recipe.format(role)
    if fmt is None:
        return t.double()
    quantizer = recipes.Quantizer(fmt, rowwise=along == 1, columnwise=along == 0)
    return quantizer(t).dequantize(torch.float32, columnwise=along == 0).double()


class Pipeline:
    """A linear, an op, and a linear after it."""

    def __init__(self, name, dtype, shape):
        op = randomised(BETWEEN[name].make(FEATURES)).to(dtype)
        first = fz.BasicLinear(128, FEATURES, dtype=dtype)
        out = 128 if "GLU" in name else FEATURES
        self.ops = fz.Sequential(first, op, fz.BasicLinear(out, 128, dtype=dtype))
        self.x = torch.randn(*shape, 128).to(dtype).requires_grad_()
        extra = extra_inputs(op, torch.empty(*shape, FEATURES, dtype=dtype))
        self.extra = [t.detach().requires_grad_() for t in extra]
        self.dy = torch.randn(*shape, 128).to(dtype)

    def run(self, recipe, call):
        """Output and all gradients."""
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            y = call()
        wanted = [self.x, *self.extra, *self.ops.parameters()]
        return [y.detach(), *torch.autograd.grad(y, wanted, self.dy)]

    def together(self):
        return self.ops(self.x, *self.extra)

    def apart(self):
        first, op, last = self.ops
        return last(op(first(self.x), *self.extra))


@pytest.mark.parametrize("recipe", KINDS)
@pytest.mark.parametrize("name", BETWEEN)
def test_an_op_between_linears(name, recipe, monkeypatch):
    """Handed on quantized or not, in training or not: the same bits, near the FP64 formula."""
    at = list(BETWEEN).index(name) + 2 * list(KINDS).index(recipe)
    recipe, handed = KINDS[recipe], []
    for dtype, shape in [PAIRS[at % 9], PAIRS[(at + 4) % 9]]:
        pipeline = Pipeline(name, dtype, shape)
        apart = pipeline.run(recipe, pipeline.apart)
        with monkeypatch.context() as patched:
            patched.setattr(fz.BasicLinear, "fuser_forward", spy_on(handed, "forward"))
            patched.setattr(fz.BasicLinear, "fuser_backward", spy_on(handed, "backward"))
            together = pipeline.run(recipe, pipeline.together)
        for mine, theirs in zip(together, apart, strict=True):
            # Without a recipe a fused sum rounds once less.
            assert recipe is None or torch.equal(mine, theirs)
        with torch.inference_mode(), fz.autocast(enabled=recipe is not None, recipe=recipe):
            assert torch.equal(pipeline.together(), together[0])
        check_against_fp64(pipeline, name, recipe, together)
    both_ways = recipe is not None and name in (*HANDING_ON, "Bias")
    assert handed.count(("forward", True)) == 2 * both_ways
    assert handed.count(("backward", True)) == 2 * both_ways


def spy_on(handed, method):
    plain = getattr(fz.BasicLinear, f"fuser_{method}")

    def spy(self, ctxs, t, **kwargs):
        handed.append((method, isinstance(t, fz.QuantizedTensor)))
        return plain(self, ctxs, t, **kwargs)

    return spy


def check_against_fp64(pipeline, name, recipe, results):
    """The op and the products around it, each from its own inputs in FP64."""
    first, op, last = pipeline.ops
    y, dx, *grads = results
    dextra, (dfirst, *dop, dlast) = grads[: len(pipeline.extra)], grads[len(pipeline.extra) :]
    with fz.autocast(enabled=recipe is not None, recipe=recipe), torch.no_grad():
        before = first(pipeline.x)
        after = op(before, *pipeline.extra)

    def q(t, role, along):
        return quantized(t, recipe, role, along=along)

    dy, rows = pipeline.dy, lambda t: t.flatten(0, -2)
    ref.assert_accurate(rows(y), q(after, "input", 1) @ q(last.weight, "weight", 1).mT, 12)
    ref.assert_accurate(dlast, q(dy, "grad", 0).mT @ q(after, "input", 0), 12)
    dafter = (q(dy, "grad", 1) @ q(last.weight, "weight", 0)).to(y.dtype).view(after.shape)
    tensors = [before, *pipeline.extra, *op.parameters()]
    exact_after, exact = ref.gradients(BETWEEN[name].plain, tensors, dafter)
    ref.assert_accurate(after, exact_after)
    for mine, theirs in zip((*dextra, *dop), exact[1:], strict=True):
        ref.assert_accurate(mine, theirs, 8)
    if recipe is None:
        ref.assert_accurate(rows(dx), rows(exact[0]) @ first.weight.detach().double(), 8)
        ref.assert_accurate(dfirst, rows(exact[0]).mT @ rows(pipeline.x.detach()).double(), 8)


@pytest.mark.parametrize("recipe", KINDS)
def test_quantize_changes_nothing_but_when(recipe):
    """Before a linear and behind it, for any number of dimensions."""
    recipe = KINDS[recipe]
    linear = fz.BasicLinear(128, 128)
    asked = fz.Sequential(fz.Quantize(), linear, fz.Quantize(forward=False, backward=True))
    for shape in [(128,), (20, 128), (2, 10, 128), (2, 2, 5, 128)]:
        x, dy = torch.randn(shape, requires_grad=True), torch.randn(shape)
        results = []
        for module in (linear, asked):
            with fz.autocast(enabled=recipe is not None, recipe=recipe):
                y = module(x)
            results.append((y.detach(), *torch.autograd.grad(y, (x, linear.weight), dy)))
        ref.assert_equal(*results)


def test_no_use_is_handed_on_that_no_product_reads():
    linear = fz.BasicLinear(64, 64)
    seen = []
    plain = fz.BasicLinear.op_forward

    def spy(self, ctx, x, **kwargs):
        seen.append((x.has_rowwise, x.columnwise_data is not None))
        return plain(self, ctx, x, **kwargs)

    seq = fz.Sequential(fz.RMSNorm(64), linear)
    with pytest.MonkeyPatch.context() as patched, fz.autocast():
        patched.setattr(fz.BasicLinear, "op_forward", spy)
        seq(torch.randn(32, 64))
        linear.requires_grad_(False)
        seq(torch.randn(32, 64))
        with torch.no_grad():
            seq(torch.randn(32, 64))
    assert seen == [(True, True), (True, False), (True, False)]


def mlp():
    return fz.Sequential(
        *(fz.RMSNorm(64), fz.Linear(64, 128), fz.SwiGLU(), fz.Linear(64, 64)),
        *(fz.GELU(cache_quantized_input=True), fz.BasicLinear(64, 64)),
    )


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", ["checkpointed", "compiled"])
def test_the_same_bits_checkpointed_and_compiled(way):
    seq, x = mlp(), torch.randn(2, 16, 64, requires_grad=True)
    if way == "compiled":
        again = torch.compile(seq, fullgraph=True, backend="aot_eager")
    else:
        again = functools.partial(checkpoint, seq, use_reentrant=False)
    results = []
    for call in (seq, again):
        with fz.autocast(recipe=KINDS["mxfp8"]):
            y = call(x)
        results.append([y, *torch.autograd.grad(y.sin().sum(), (x, *seq.parameters()))])
    ref.assert_equal(*results)
