"""Caller's buffers for output and input gradient: the same bits, in the caller's memory."""

from contextlib import nullcontext
from functools import partial

import pytest
import reference as ref
import torch
from training_paths import BF16, FP32, MX, PATHS, ROWS, SIZES

import fusible as fz
from fusible.kernels import grouped
from fusible.testing import assume_target

WIDTH = 32
FORMS = {name: path for name, path in PATHS.items() if path.form != "experts"}


def dense():
    return fz.Sequential(fz.BasicLinear(WIDTH, WIDTH), fz.SiLU(), fz.BasicLinear(WIDTH, WIDTH))


MODULES = {
    "one": lambda: fz.Sequential(fz.GroupedLinear(4, WIDTH, WIDTH)),
    "two": lambda: fz.Sequential(fz.GroupedLinear(4, WIDTH, 64), fz.GroupedLinear(4, 64, WIDTH)),
    "dense": dense,
    "scaled": lambda: fz.Sequential(
        fz.BasicLinear(WIDTH, WIDTH), fz.ConstantScale(0.5), fz.BasicLinear(WIDTH, WIDTH)
    ),
}


def run(module, scope, x, extra, op_kwargs=None):
    """Output, gradient of x, and gradients of the parameters, which are then forgotten."""
    torch.manual_seed(3)
    x = x.detach().requires_grad_()
    with scope():
        y = module(x, *extra, op_kwargs=op_kwargs)
        y.backward(torch.randn(y.shape).to(y.dtype))
    return y, x.grad, *ref.take_grads(*module.parameters())


def assert_same_bits(module, scope, x, *extra):
    """With the caller's buffers and without, twice: nothing of them stays with autograd."""
    want = run(module, scope, x, extra)
    output, grad_input = torch.full_like(want[0], float("nan")), torch.full_like(x, float("nan"))
    kwargs = {len(module) - 1: {"output": output}}
    kwargs.setdefault(0, {})["grad_input"] = grad_input
    for _ in range(2):
        y, dx, *dparams = run(module, scope, x, extra, kwargs)
        assert y.data_ptr() == output.data_ptr()
        assert not output.requires_grad
        ref.assert_equal((y, dx, *dparams, output, grad_input), (*want, *want[:2]))


@pytest.mark.usefixtures("cpu_or_hopper")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("leading", [(), (2,)], ids=["2-D", "3-D"])
def test_same_bits_in_the_callers_memory(name, leading):
    path = FORMS[name]
    module, (x, splits, scales, again) = path.build(), path.inputs()
    x, scales = (t.detach().reshape(*leading, -1, *t.shape[1:]) for t in (x, scales))
    assert_same_bits(module, path.on, x, splits, scales, again)
    assert module.plan.fired + module.plan.kernels == path.fired


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("shape", [(32, WIDTH), (2, 16, WIDTH)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("recipe", [None, MX])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_same_bits_of_ops_in_a_row(kind, shape, recipe, dtype):
    module, x = MODULES[kind]().to(dtype), torch.randn(shape).to(dtype)
    scope = partial(fz.autocast, enabled=recipe is not None, recipe=recipe)
    splits = [torch.tensor(SIZES)] * {"one": 1, "two": 2}.get(kind, 0)
    assert_same_bits(module, scope, x, *splits)


@pytest.mark.usefixtures("cpu_or_hopper")
def test_an_op_called_alone_and_without_gradients():
    op = fz.GroupedLinear(4, WIDTH, 8)
    x, output = torch.randn(ROWS, WIDTH), torch.full((ROWS, 8), float("nan"))
    with torch.no_grad():
        y = op(x, SIZES, output=output)
    assert y.data_ptr() == output.data_ptr()
    assert torch.equal(output, op(x, SIZES))
    assert torch.equal(output[8:], torch.zeros(2, 8))


@pytest.mark.usefixtures("cpu_or_hopper")
def test_no_rows():
    op = fz.GroupedLinear(4, WIDTH, 8)
    x, output = torch.empty(0, WIDTH, requires_grad=True), torch.empty(0, 8)
    op(x, [0] * 4, output=output, grad_input=torch.empty(0, WIDTH)).sum().backward()
    assert x.grad.shape == (0, WIDTH)
    assert all(not p.grad.any() for p in op.parameters())


BAD = {
    "shape": (lambda x: {"output": x.new_empty(ROWS, 7)}, r"shape \(10, 8\) .* got .*\(10, 7\)"),
    "leading shape": (lambda x: {"output": x.new_empty(2, 5, 8)}, r"got .*\(2, 5, 8\)"),
    "dtype": (lambda x: {"grad_input": x.bfloat16()}, "float32 .* got .*bfloat16"),
    "device": (lambda x: {"output": torch.empty(ROWS, 8, device="meta")}, r"on c\w+.* on meta"),
    "strides": (lambda x: {"output": x.new_empty(8, ROWS).t()}, r"contiguous .* strides \(1, 10\)"),
    "no tensor": (lambda x: {"output": [1.0]}, "got list"),
    "gradient": (
        lambda x: {"output": x.new_empty(ROWS, 8, requires_grad=True)},
        r"buffer\.detach\(\)",
    ),
    "the input itself": (lambda x: {"grad_input": x}, "share no memory with the input"),
    "part of the input": (
        lambda x: {"output": x.view(-1)[80:160].view(ROWS, 8)},
        "share no memory",
    ),
    "another name": (
        lambda x: {"out": x.new_empty(ROWS, 8)},
        r"among \['output', 'grad_input'.*\], got \['out'\]; did you mean 'output'\?",
    ),
}


@pytest.mark.usefixtures("cpu_or_hopper")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", ["grouped", "dense", "sm90"])
def test_a_buffer_that_does_not_fit(bad, kind):
    op = fz.BasicLinear(WIDTH, 8) if kind == "dense" else fz.GroupedLinear(4, WIDTH, 8)
    x, (make, said) = torch.zeros(ROWS, WIDTH), BAD[bad]
    kwargs = make(x)
    before = {name: t.clone() for name, t in kwargs.items() if isinstance(t, torch.Tensor)}
    with (
        assume_target("sm90") if kind == "sm90" else nullcontext(),
        pytest.raises(ValueError, match=said),
    ):
        op(x, *([] if kind == "dense" else [SIZES]), **kwargs)
    for name, t in before.items():
        assert t.is_meta or torch.equal(kwargs[name].nan_to_num(), t.nan_to_num())


@pytest.mark.usefixtures("cpu_or_hopper")
def test_a_gradient_in_the_way():
    op = fz.GroupedLinear(4, WIDTH, WIDTH)
    dy = torch.randn(ROWS, WIDTH)
    y = op(torch.randn(ROWS, WIDTH, requires_grad=True), SIZES, grad_input=dy)
    with pytest.raises(ValueError, match="share no memory with the output's gradient"):
        y.backward(dy)


def silently(*args, out, **options):
    """A product that autograd does not see being written, as a kernel's."""
    grouped.definitions.grouped_mm(*args, out=out.data, **options)
    return out


@pytest.mark.usefixtures("cpu_or_hopper")
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_an_output_that_is_still_needed(dtype, monkeypatch):
    """Written a second time before its first use in a backward: seen, not silently wrong."""
    op, output = fz.GroupedLinear(4, WIDTH, 8, dtype=dtype), torch.empty(ROWS, 8, dtype=dtype)
    x = torch.zeros(ROWS, WIDTH, dtype=dtype)
    if x.device.type == "cpu":
        monkeypatch.setattr(grouped, "_grouped_mm", silently)
    with assume_target("sm90") if x.device.type == "cpu" else nullcontext():
        first = op(x, SIZES, output=output).square().sum()
        op(x + 1, SIZES, output=output)
        assert op.plan.kernels == (("sm90",) if dtype == BF16 else ())
        with pytest.raises(RuntimeError, match="modified inplace"):
            first.backward()


@pytest.mark.usefixtures("cpu_or_hopper")
@pytest.mark.parametrize("machine", ["sm80", "sm90"])
def test_only_at_the_ends_of_a_run(machine):
    """Whether the ops are fused or not."""
    mlp = ref.grouped_mlp(4, WIDTH, 64, dtype=BF16)
    x, splits, scales = ref.grouped_mlp_inputs(SIZES, ROWS, WIDTH, BF16)
    inner = torch.empty(ROWS, 128, dtype=BF16)
    with assume_target(machine):
        for kwargs in ({0: {"output": inner}}, {mlp[2]: {"grad_input": inner}}):
            with pytest.raises(
                ValueError, match="op of a run, here GroupedLinear, got it for anot"
            ):
                mlp(x, splits, scales, splits, op_kwargs=kwargs)


@pytest.mark.usefixtures("cpu_or_hopper", "fresh_compiler")
@pytest.mark.parametrize("name", ["output", "grad_input"])
def test_refused_while_compiling(name):
    op = fz.GroupedLinear(4, WIDTH, WIDTH)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    x = torch.zeros(ROWS, WIDTH)
    with pytest.raises(Exception, match=f"must not give '{name}' under torch.compile"):
        compiled(x, torch.tensor(SIZES), **{name: torch.empty(ROWS, WIDTH)})


def overlapping(mlp, x, scales):
    """Memory that the run reads, by how the error calls it."""
    return {
        "the input": x.detach().view(-1),
        "extra input 1": scales.detach().view(-1),
        "weight of op 2": mlp[2].weight.detach().view(-1),
        "bias of op 0": mlp[0].bias.detach().view(-1),
        "grad of weight of op 2": mlp[2].weight.grad.view(-1),
        "main_grad of weight of op 0": mlp[0].weight.main_grad.view(-1),
    }


@pytest.mark.parametrize("what", [
    "the input", "extra input 1", "weight of op 2", "bias of op 0", "grad of weight of op 2",
    "main_grad of weight of op 0",
])  # fmt: skip
@pytest.mark.parametrize("name", ["output", "grad_input"])
@pytest.mark.parametrize("machine", ["sm80", "sm90"])
def test_a_buffer_that_overlaps_what_the_run_reads(machine, name, what):
    """By one element: refused before anything is written; right behind it, fine."""
    mlp = ref.grouped_mlp(
        4, WIDTH, 64, dtype=BF16, bias=True, single_grouped_bias=True, single_grouped_weight=True
    )
    size = ROWS * WIDTH
    arenas = []

    def moved(t):
        arenas.append(torch.zeros(size + t.numel(), dtype=t.dtype))
        arenas[-1][size:].copy_(t.detach().view(-1))
        return arenas[-1][size:].view(t.shape)

    x, splits, scales = ref.grouped_mlp_inputs(SIZES, ROWS, WIDTH, BF16)
    x, scales = moved(x).requires_grad_(), moved(scales.bfloat16()).requires_grad_()
    for p in mlp.parameters():
        p.data = moved(p)
    mlp[2].weight.grad, mlp[0].weight.main_grad = (
        moved(torch.zeros_like(mlp[i].weight)) for i in (2, 0)
    )
    memory = overlapping(mlp, x, scales)[what]
    op = mlp[2] if name == "output" else mlp[0]
    bad = memory.as_strided((ROWS, WIDTH), (WIDTH, 1), memory.storage_offset() - size + 1)
    good = memory.as_strided((ROWS, WIDTH), (WIDTH, 1), memory.storage_offset() - size)
    before = [arena.clone() for arena in arenas]
    with assume_target(machine):
        with pytest.raises(ValueError, match=f"'{name}' must share no memory with {what}"):
            mlp(x, splits, scales, splits, op_kwargs={op: {name: bad}})
        ref.assert_equal(arenas, before)
        mlp(x, splits, scales, splits, op_kwargs={op: {name: good}})


def test_two_buffers_that_overlap():
    op, buffer = fz.BasicLinear(WIDTH, WIDTH), torch.empty(ROWS, WIDTH)
    with pytest.raises(ValueError, match="'grad_input' must share no memory with the caller's 'ou"):
        op(torch.randn(ROWS, WIDTH), output=buffer, grad_input=buffer)


def test_buffers_of_two_runs_that_overlap():
    ops = fz.BasicLinear(WIDTH, WIDTH), torch.nn.ReLU(), fz.BasicLinear(WIDTH, WIDTH)
    seq = fz.Sequential(*ops)
    buffer = torch.empty(ROWS + 1, WIDTH)
    given = {0: {"output": buffer[1:]}, 2: {"output": buffer[:-1]}}
    with pytest.raises(ValueError, match="'output' must share no memory with the caller's 'output"):
        seq(torch.randn(ROWS, WIDTH), op_kwargs=given)


@pytest.mark.parametrize("name", ["output", "grad_input"])
@pytest.mark.parametrize("split", [False, True], ids=["one run", "two runs"])
def test_a_buffer_over_what_another_run_reads(name, split):
    """A hook or an ordinary module makes two runs of one; what is refused does not depend on it."""
    seq = fz.Sequential(
        fz.BasicLinear(WIDTH, WIDTH), fz.AddExtraInput(), fz.BasicLinear(WIDTH, WIDTH)
    )
    if split:
        seq[1].register_forward_hook(lambda *_: None)
        seq.append(torch.nn.Linear(WIDTH, WIDTH))
    x, extra = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    weights = [torch.zeros(ROWS + WIDTH, WIDTH) for _ in range(4)]
    for op, weight in zip(seq[::2], weights, strict=False):
        op.weight.data = weight[:WIDTH]
    if split:
        seq[3].weight.data = weights[2][:WIDTH]
    op = seq[2] if name == "output" else seq[0]
    read = {
        "the input": x.data,
        "extra input 0": extra.data,
        "weight of op 0": weights[0][:ROWS],
        "weight of op 2": weights[1][:ROWS],
        **({"weight of op 3": weights[2][:ROWS]} if split else {}),
    }
    for what, buffer in read.items():
        with pytest.raises(ValueError, match=f"'{name}' must share no memory with {what}"):
            seq(x, extra, op_kwargs={op: {name: buffer}})
    seq(x, extra, op_kwargs={op: {name: weights[0][WIDTH:]}}).sum().backward()


def grad_of(module, x, *buffers):
    """Of ``module(x, *op_kwargs)`` by x; the buffers are for the ops' ``grad_input``."""
    given = [{} if b is None else {"grad_input": b} for b in buffers]
    (grad,) = torch.autograd.grad(module(x, *given).square().sum(), x)
    return grad


class TestOneGradInputForTwoOps:
    ops = fz.BasicLinear(WIDTH, WIDTH), fz.BasicLinear(WIDTH, WIDTH)

    def parallel(self, x, first, second):
        h = x * 2
        return self.ops[0](h, **first) + self.ops[1](h, **second).square()

    def chained(self, x, first, second):
        return self.ops[1](torch.relu(self.ops[0](x, **first)), **second)

    def through_an_op(self, x, first, second):
        return self.ops[1](fz.SiLU()(self.ops[0](x, **first)), **second)

    def leaves(self, x, first, second):
        return self.ops[0](x, **first) + self.ops[1](x, **second).square()

    def test_gradients_that_meet(self):
        """The sum is taken when both are there: neither may lie in the other's place."""
        x, b = torch.randn(ROWS, WIDTH, requires_grad=True), torch.empty(2, ROWS, WIDTH)
        with pytest.raises(ValueError, match="the gradient that another op has returned in its bu"):
            grad_of(self.parallel, x, b[0], b[0])
        want = grad_of(self.parallel, x, None, None)
        assert torch.equal(grad_of(self.parallel, x, b[0], b[1]), want)

    @pytest.mark.parametrize("form", ["chained", "through_an_op"])
    def test_one_after_the_other(self, form):
        """What is not read any more is written to, also in the next backward."""
        x, b = torch.randn(ROWS, WIDTH, requires_grad=True), torch.empty(ROWS, WIDTH)
        want = grad_of(getattr(self, form), x, None, None)
        kept = [grad_of(getattr(self, form), x, b, b) for _ in range(2)]
        assert torch.equal(kept[0], want)
        assert torch.equal(kept[1], want)

    @pytest.mark.parametrize("kind", ["dense", "grouped"])
    def test_of_a_leaf_over_two_backwards(self, kind):
        """Its ``.grad`` is no buffer, which the second one would write before it adds to it."""
        op = fz.BasicLinear(WIDTH, WIDTH) if kind == "dense" else fz.GroupedLinear(1, WIDTH, WIDTH)
        extra = [] if kind == "dense" else [[ROWS]]
        x, b = torch.randn(ROWS, WIDTH, requires_grad=True), torch.empty(ROWS, WIDTH)
        first, second = torch.randn(2, ROWS, WIDTH)
        want = sum(torch.autograd.grad(op(x, *extra), x, dy)[0] for dy in (first, second))
        op(x, *extra, grad_input=b).backward(first)
        op(x, *extra, grad_input=b).backward(second)
        torch.testing.assert_close(x.grad, want)
        assert x.grad.data_ptr() != b.data_ptr()
        (grad,) = torch.autograd.grad(op(x, *extra, grad_input=b), x, first)
        assert grad.data_ptr() == b.data_ptr()
        with pytest.raises(ValueError, match="the gradient that another op has returned in its bu"):
            self.leaves(x, {"grad_input": b}, {"grad_input": b}).sum().backward()


def test_a_gradient_that_another_input_gets():
    """The sum's gradient is returned as it is: nothing may be written there."""
    seq = fz.Sequential(fz.BasicLinear(WIDTH, WIDTH), fz.AddExtraInput())
    x, extra = (torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(2))
    dy = torch.randn(ROWS, WIDTH)
    y = seq(x, extra, op_kwargs={0: {"grad_input": dy}})
    with pytest.raises(ValueError, match="share no memory with the output's gradient"):
        y.backward(dy)
