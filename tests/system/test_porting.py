"""Pipelines written for Transformer Engine run here, and give the FP64 values."""

from itertools import product

import porting
import pytest
import reference as ref
import torch
from number_formats import KINDS
from pairs import every_pair

import fusible as te


@pytest.mark.parametrize("group", porting.GROUPS_OF_CASES)
def test_pipelines(group):
    wrong = [f"{case}\n  {why}" for case, why in porting.outcomes(group) if why]
    assert not wrong, "\n".join(wrong)


# --- channels -------------------------------------------------------------------------------------


class TwoOutputs(te.BasicOperation):
    """An own op with two scaled extra outputs."""

    num_extra_outputs = 2

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        return input_, [(2 * input_, 3 * input_)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        for factor, grad in zip((2, 3), basic_op_grad_extra_outputs[0], strict=True):
            if grad is not None:
                grad_output = grad_output + factor * grad
        return grad_output, [()], [()]


class ScaleByExtra(te.BasicOperation):
    """An own op that multiplies by it; it may keep the gradient of the scale for itself."""

    num_extra_inputs = 1
    gives_grad = True

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        scale = basic_op_extra_inputs[0][0]
        basic_op_ctxs[0].save_for_backward(input_, scale)
        basic_op_ctxs[0].extra_input_requires_grad = scale.requires_grad
        return input_ * scale[..., None], [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        input_, scale = basic_op_ctxs[0].saved_tensors
        grad = (grad_output * input_).sum(dim=-1) if self.gives_grad else None
        return grad_output * scale[..., None], [()], [(grad,)]


class ScaleByConstant(ScaleByExtra):
    gives_grad = False


def make(name=None, public=True, op=te.MakeExtraOutput, slot=0):
    return op() if name is None else op().set_extra_output_channel(
        slot, name, output_to_caller=public)  # fmt: skip


def add(name=None, op=te.AddExtraInput):
    return op() if name is None else op().set_extra_input_channel(0, name)


def two_outputs():
    op = TwoOutputs().set_extra_output_channel(0, "internal", output_to_caller=False)
    return op.set_extra_output_channel(1, "public")


def mean(x):
    return x.square().mean(-1, keepdim=True)


CHANNELS = {
    "residual": (lambda: [make("r"), te.Bias(16), add("r")], lambda x, b: (2 * x + b, x)),
    "hidden residual": (lambda: [make("r", False), te.Bias(16), add("r")], lambda x, b: 2 * x + b),
    "unconsumed": (lambda: [make(), te.Bias(16)], lambda x, b: (x + b, x)),
    "hidden and unconsumed": (lambda: [make("r", False), te.Bias(16)], lambda x, b: x + b),
    "fan-out": (lambda: [make("r"), add("r"), add("r")], lambda x: (3 * x, x)),
    "hidden fan-out": (lambda: [make("r", False), add("r"), add("r")], lambda x: 3 * x),
    "one inside, one given": (lambda: [make("r"), add("r"), add()], lambda x, e: (2 * x + e, x)),
    "two producers": (
        lambda: [make("a"), te.ConstantScale(2), make("b"), add("b")],
        lambda x: (4 * x, x, 2 * x),
    ),
    "one hidden, one public": (
        lambda: [two_outputs(), add("internal")],
        lambda x: (3 * x, 3 * x),
    ),
    "across an ordinary module": (
        lambda: [make("r", False), torch.nn.Tanh(), te.ConstantScale(2), add("r")],
        lambda x: 2 * x.tanh() + x,
    ),
    "across Sequentials": (
        lambda: [te.Sequential(make("r", False), te.GELU()), te.Sequential(add("r"))],
        lambda x: torch.nn.functional.gelu(x, approximate="tanh") + x,
    ),
    "a fresh scale": (
        lambda: [make("s", False, ref.MakeScale), add("s", ScaleByExtra)],
        lambda x: x * mean(x),
    ),
    "without the scale's gradient": (
        lambda: [make("s", False, ref.MakeScale), add("s", ScaleByConstant)],
        lambda x: x * mean(x).detach(),
    ),
    "ordinary modules and extra tensors": (
        lambda: [
            *(torch.nn.Identity(), make(), te.Bias(16), make(), add(), make()),
            *(torch.nn.Identity(), te.Bias(16), add(), make(), add(), torch.nn.Identity()),
            *(te.Identity(), make(), te.Identity()),
        ],
        lambda x1, x2, x3, x4, b1, b2: (
            x1 + b1 + x2 + b2 + x3 + x4,
            *(x1, x1 + b1, x1 + b1 + x2, x1 + b1 + x2 + b2 + x3, x1 + b1 + x2 + b2 + x3 + x4),
        ),
    ),
}


@pytest.mark.parametrize("grads", ["of all outputs", "of the first"])
@pytest.mark.parametrize("name", CHANNELS)
def test_extra_tensors(name, grads):
    ops, plain = CHANNELS[name]
    module = te.Sequential(*ops())
    x, *extra = [torch.randn(4, 16).requires_grad_() for _ in range(1 + module.num_extra_inputs)]
    tensors = [x, *extra, *module.parameters()]
    check_outputs(module(x, *extra), plain, tensors, first=grads == "of the first")


def check_outputs(got, plain, tensors, *, first=False):
    """Outputs and gradients against a function in FP64."""
    leaves = [ref.double(t) for t in tensors]
    got, want = ([y] if isinstance(y, torch.Tensor) else y for y in (got, plain(*leaves)))
    got, want = list(got), list(want)
    for mine, theirs in zip(got, want, strict=True):
        ref.assert_accurate(mine.detach(), theirs.detach())
    number = 1 if first else len(want)
    dys = [torch.randn(y.shape) for y in want[:number]]
    mine = torch.autograd.grad(got[:number], tensors, dys, allow_unused=True)
    dys = [dy.double() for dy in dys]
    theirs = torch.autograd.grad(want[:number], leaves, dys, allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        if a is not None or b is not None:
            ref.assert_accurate(a, torch.zeros_like(a).double() if b is None else b, 8)


def test_in_place_sums_are_in_the_memory_of_the_extra_input():
    ops = te.MakeExtraOutput(in_place=True), te.Bias(16), te.AddExtraInput(in_place=True)
    module = te.Sequential(*ops, te.MakeExtraOutput(in_place=True), torch.nn.Identity())
    x, extra = torch.randn(16), torch.randn(16)
    want = x + module[1].bias + extra
    y, first, second = module(x, extra)
    assert first.data_ptr() == x.data_ptr()
    assert y.data_ptr() == second.data_ptr() == extra.data_ptr()
    assert torch.equal(y, want)


# --- own fusions ----------------------------------------------------------------------------------


ADDENDS = ["alone", "linear", "scaled"], [(8,), (1, 8), (5, 1), (2, 1, 1), ()], [False, True]


@pytest.mark.parametrize(
    ("start", "shape", "in_place", "compiled"),
    # Compilation takes half a second.
    [*product(*ADDENDS, [False]), *every_pair(product(*ADDENDS, [True]))],
)
@pytest.mark.usefixtures("fresh_compiler")  # one function is compiled for a few modules only
def test_addends_broadcast(start, shape, in_place, compiled):
    torch.manual_seed(5)
    first = {"alone": [], "linear": [te.BasicLinear(8, 8)]}
    first["scaled"] = [*first["linear"], te.ConstantScale(0.5)]
    seq = te.Sequential(*first[start], te.AddExtraInput(in_place=in_place), te.SiLU())
    x, leaf = torch.randn(2, 5, 8), torch.randn(shape)

    def ours(x, addend):
        return seq(x, addend * 1)  # no leaf

    def wanted(x, addend):
        y = x if start == "alone" else x @ seq[0].weight.t()
        return torch.nn.functional.silu((0.5 if start == "scaled" else 1.0) * y + addend)

    results = []
    if compiled:
        ours = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for run in (ours, wanted):
        given = [x.clone().requires_grad_(), leaf.clone().requires_grad_()]
        y = run(*given)
        ref.assert_equal([given[1]], [leaf])
        results.append([y, *torch.autograd.grad(y, given, torch.ones_like(y) / 3)])
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_addends_of_channels_broadcast():
    """The gradient is summed before it goes on to the op that made the addend."""
    torch.manual_seed(6)
    seq = te.Sequential(
        te.BasicLinear(8, 1),
        te.MakeExtraOutput().set_extra_output_channel(0, "gate", output_to_caller=False),
        te.BasicLinear(1, 8),
        te.AddExtraInput().set_extra_input_channel(0, "gate"),
    )
    x = torch.randn(5, 8)
    leaves = [*seq.parameters()]
    gate = x @ seq[0].weight.t()
    torch.testing.assert_close(
        torch.autograd.grad(seq(x).square().sum(), leaves),
        torch.autograd.grad((gate @ seq[2].weight.t() + gate).square().sum(), leaves),
        rtol=1e-5,
        atol=1e-4,
    )


class LinearSiLU(te.FusedOperation):
    """Linear + SiLU as Transformer Engine's tests write it."""

    def __init__(self, *, linear, silu):
        super().__init__((linear, silu))

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        weight = self.basic_ops[0].weight
        y = torch.matmul(input_, weight.T)
        context, silu = basic_op_ctxs
        context.save_for_backward(input_, weight)
        context.with_quantized_compute = False
        context.input_quantizer = context.weight_quantizer = None
        context.grad_output_quantizer = context.grad_input_quantizer = None
        context.dtype = weight.dtype
        context.input_requires_grad = context.weight_requires_grad = True
        silu.save_for_backward(y)
        silu.dtype, silu.prev_op_grad_output_quantizer = weight.dtype, None
        return torch.nn.functional.silu(y), [(), ()]


class JointLinearSiLU(te.FusedOperation):
    """The same with a backward that recomputes the product."""

    def __init__(self, *, linear, silu):
        super().__init__((linear, silu))

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        weight = self.basic_ops[0].weight
        basic_op_ctxs[0].save_for_backward(input_, weight)
        basic_op_ctxs[0].dtype = weight.dtype
        return torch.nn.functional.silu(torch.matmul(input_, weight.T)), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        x, w = basic_op_ctxs[0].saved_tensors
        y = torch.matmul(x.double(), w.double().T)
        s = torch.sigmoid(y)
        dy = grad_output.double() * s * (1 + y * (1 - s))
        dtype = basic_op_ctxs[0].dtype
        return (dy @ w.double()).to(dtype), [((dy.T @ x.double()).to(dtype),), ()], [(), ()]


class BackwardScaleLinear(te.FusedOperation):
    """The backward of a scale and a linear."""

    def __init__(self, *, scale, linear):
        super().__init__((scale, linear))

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        x, w = basic_op_ctxs[1].saved_tensors
        dx = torch.matmul(grad_output, self.basic_ops[0].scale * w)
        return dx, [(), (torch.matmul(grad_output.T, x),)], [(), ()]


class Axpy(te.FusedOperation):
    """The fused op of Transformer Engine's guide."""

    def __init__(self, scale, add):
        super().__init__((scale, add))

    def fuser_forward(self, basic_op_ctxs, input_, basic_op_extra_inputs, **unused):
        return self.basic_ops[0].scale * input_ + basic_op_extra_inputs[1][0], [(), ()]


class FusedResidual(te.FusedOperation):
    """A residual connection whose extra tensor never leaves the fused op."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        return 2 * input_ + self.basic_ops[1].bias, [(None,), (), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        return 2 * grad_output, [(), (grad_output,), ()], [(), (), (grad_output,)]


def silu_of_linear(x, w):
    return torch.nn.functional.silu(x @ w.T)


FUSIONS = {
    "forward": (
        te.register_forward_fusion,
        lambda ops: LinearSiLU(linear=ops[0], silu=ops[1]),
        lambda: [te.Linear(16, 16, bias=False), te.SiLU()],
        silu_of_linear,
    ),
    "joint": (
        te.register_forward_backward_fusion,
        lambda ops: JointLinearSiLU(linear=ops[0], silu=ops[1]),
        lambda: [te.Linear(16, 16, bias=False), te.SiLU()],
        silu_of_linear,
    ),
    "backward": (
        te.register_backward_fusion,
        lambda ops: BackwardScaleLinear(scale=ops[0], linear=ops[1]),
        lambda: [te.ConstantScale(1.5), te.Linear(16, 16, bias=False)],
        lambda x, w: 1.5 * x @ w.T,
    ),
    "forward with an extra input": (
        te.register_forward_fusion,
        lambda ops: Axpy(*ops),
        lambda: [te.ConstantScale(0.5), te.AddExtraInput()],
        lambda x, e: 0.5 * x + e,
    ),
    "forward with a channel": (
        te.register_forward_fusion,
        FusedResidual,
        CHANNELS["hidden residual"][0],
        lambda x, b: 2 * x + b,
    ),
    "joint with a channel": (
        te.register_forward_backward_fusion,
        FusedResidual,
        CHANNELS["hidden residual"][0],
        lambda x, b: 2 * x + b,
    ),
}


@pytest.mark.usefixtures("own_fusions")
@pytest.mark.parametrize("name", FUSIONS)
def test_own_fusions(name):
    register, build, ops, plain = FUSIONS[name]
    register(lambda ops, **unused: [build(ops)], prepend=True)
    module = te.Sequential(*ops())
    x, *extra = [torch.randn(4, 16).requires_grad_() for _ in range(1 + module.num_extra_inputs)]
    check_outputs(module(x, *extra), plain, [x, *extra, *module.parameters()])
    fused = type(build([op for m in module for op in m.basic_ops])).__name__
    assert fused in str(te.explain(module, x, *extra))


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", porting.RECIPES)
@pytest.mark.parametrize("final", porting.DTYPES)
@pytest.mark.parametrize("first", porting.DTYPES)
def test_modules_are_cast(first, final, recipe):
    """Stored weights keep their format; outside of a recipe the input is cast."""
    with te.quantized_model_init(enabled=recipe != "none", recipe=KINDS[recipe]):
        op = te.Linear(128, 128, bias=False, dtype=first)
    value = op.weight.to(torch.float64)
    op.to(final)
    assert isinstance(op.weight, te.QuantizedTensor) == (recipe != "none")
    assert op.weight.dtype == final
    wide = op.weight.to(torch.float64)
    ref.assert_near(wide, value, max(torch.finfo(t).eps for t in (first, final)))
    x = torch.randn(32, 128, dtype=first, requires_grad=True)
    y = op(x)
    y.backward(torch.ones_like(y))
    assert (y.dtype, x.grad.dtype, op.weight.grad.dtype) == (final, first, final)
    ref.assert_near(y.double(), x.double() @ wide.T, 4 * torch.finfo(final).eps)


@pytest.mark.parametrize("recipe", porting.QUANTIZING)
@pytest.mark.parametrize("stored", [False, True])
def test_training_and_inference_take_turns(recipe, stored):
    """Weights are written between steps; the optimizer's steps too."""
    recipe = KINDS[recipe]
    with te.quantized_model_init(enabled=stored, recipe=recipe):
        op = te.Linear(128, 128, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(op.parameters(), lr=0.25)
    for step in range(3):
        with torch.no_grad():
            op.weight.copy_(torch.empty_like(op.weight).uniform_())
            op.bias.copy_(torch.empty_like(op.bias).uniform_())
        weight = op.weight.detach().clone()
        x = torch.randn(32, 128, dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(recipe=recipe):
            y = op(x)
        with torch.inference_mode(), te.autocast(recipe=recipe):
            assert torch.equal(op(x), y), step
        y.backward(torch.randn_like(y))
        optimizer.step()
        moved = weight.to(torch.float64) - 0.25 * op.weight.grad.double()
        ref.assert_near(op.weight.detach().to(torch.float64), moved, 0.25)
        optimizer.zero_grad()


@pytest.mark.parametrize("recipe", porting.QUANTIZING)
@pytest.mark.parametrize("grouped", [False, True])
def test_weights_made_on_the_meta_device_keep_their_format(recipe, grouped):
    with te.quantized_model_init(recipe=KINDS[recipe]):
        op = te.GroupedLinear(2, 128, 128, device="meta") if grouped else te.Linear(
            128, 128, device="meta")  # fmt: skip
    op.to_empty(device="cpu")
    for part in op.basic_ops:
        part.reset_parameters()
    weights = [p for n, p in op.named_parameters() if "weight" in n]
    assert all(isinstance(w, te.QuantizedTensor) for w in weights)
    assert all(0 < w.dequantize().std() < 1 for w in weights)


# --- quantized tensors ----------------------------------------------------------------------------

OPERATIONS = {
    "negative": lambda t: -t,
    "abs": lambda t: t.abs(),
    "sum of two": lambda t: t + t,
    "product of two": lambda t: t * t,
    "with an ordinary one": lambda t: t - torch.ones(t.shape, dtype=t.dtype),
    "sine": torch.sin,
    "chunks of rows": lambda t: t.chunk(2)[1],
    "chunks of columns": lambda t: t.chunk(2, dim=-1)[1],
    "split": lambda t: t.split(32)[1],
    "index": lambda t: t[3],
    "slice": lambda t: t[5:7, 3:9],
    "unbind": lambda t: t.unbind()[2],
    "iteration": lambda t: list(t)[1],
    "matrix product": lambda t: t @ t.mT,
    "linear": lambda t: torch.nn.functional.linear(t, t),
    "transpose": lambda t: t.t(),
    "cat": lambda t: torch.cat([t, t]),
    "stack": lambda t: torch.stack([t, t]),
    "sum": lambda t: t.sum(),
    "max": lambda t: t.max(),
    "zeros_like": torch.zeros_like,
    "clone": lambda t: t.clone(),
    "view": lambda t: t.view(64, 128),
    "another view": lambda t: t.view(-1, 32),
    "flat": lambda t: t.reshape(-1),
    "contiguous": lambda t: t.contiguous(),
    "to float64": lambda t: t.to(torch.float64),
    "to float": lambda t: t.float(),
    "where": lambda t: torch.where(t > 0, t, torch.zeros_like(t)),
    "softmax": lambda t: t.softmax(-1),
    "padding": lambda t: torch.nn.functional.pad(t, (0, 3)),
}


@pytest.mark.parametrize("recipe", porting.QUANTIZING)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_quantized_tensors_are_those_of_their_values(name, recipe):
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    q = te.recipes.Quantizer(KINDS[recipe].format("input"))(x)
    got, want = OPERATIONS[name](q), OPERATIONS[name](q.dequantize())
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    # A wider nominal dtype keeps the format, whose values BF16 has rounded.
    eps = torch.finfo(torch.bfloat16 if name == "to float" else want.dtype).eps
    ref.assert_near(got.to(torch.float64), want.to(torch.float64), eps)
    leaf = q.detach().requires_grad_()
    plain = q.dequantize().requires_grad_()
    if want.dtype.is_floating_point and name != "zeros_like":
        OPERATIONS[name](leaf).to(torch.float64).square().sum().backward()
        OPERATIONS[name](plain).to(torch.float64).square().sum().backward()
        ref.assert_near(leaf.grad.to(torch.bfloat16), plain.grad, 2**-6)


IN_PLACE = {
    "add_": lambda t, other: t.add_(other),
    "sub_": lambda t, other: t.sub_(other),
    "mul_": lambda t, other: t.mul_(2),
    "copy_": lambda t, other: t.copy_(other),
    "fill_": lambda t, other: t.fill_(1.5),
    "zero_": lambda t, other: t.zero_(),
    "clamp_": lambda t, other: t.clamp_(-0.5, 0.5),
}


@pytest.mark.parametrize("recipe", porting.QUANTIZING)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operations_quantize_again(name, recipe):
    quantizer = te.recipes.Quantizer(KINDS[recipe].format("input"))
    q = quantizer(torch.randn(64, 128, dtype=torch.bfloat16))
    other, values = torch.randn(64, 128, dtype=torch.bfloat16), q.dequantize()
    assert IN_PLACE[name](q, other) is q
    IN_PLACE[name](values, other)
    assert torch.equal(q.dequantize(), quantizer(values).dequantize())


@pytest.mark.parametrize("recipe", porting.QUANTIZING)
@pytest.mark.parametrize("shape", [(1,), (311,), (7, 11), (7, 5, 3), (2, 3, 5, 3)])
def test_any_shape_quantizes(shape, recipe):
    x = torch.randn(shape)
    fmt = KINDS[recipe].format("input")
    got = te.recipes.Quantizer(fmt)(x).dequantize()
    matrices = x.reshape(-1, *(shape[-2:] if len(shape) > 1 else (1, *shape)))
    formats = recipe.replace("_", " ")
    want = torch.stack([porting.representable(t, formats, "input") for t in matrices]).view(shape)
    ref.assert_near(got, want, 1e-6)


@pytest.mark.parametrize("columnwise", [False, True])
def test_groups_quantized_before_give_the_bits_of_their_values(columnwise):
    """A dispatch that sends MXFP8 gives row-wise data alone."""
    splits, recipe = torch.tensor([32, 0, 64, 32]), KINDS["mxfp8"]
    quantizer = te.recipes.MXFP8Quantizer(columnwise=columnwise)
    given = te.recipes.group_quantize(torch.randn(128, 128).bfloat16(), quantizer, 4, splits)
    op = te.GroupedLinear(4, 128, 128, bias=False, dtype=torch.bfloat16)
    results = []
    for x in (given, given.dequantize()):
        with te.autocast(recipe=recipe):
            y = op(x, splits)
        grads = torch.autograd.grad(y, [*op.parameters()], torch.ones_like(y))
        results.append([y.detach(), *grads])
    ref.assert_equal(*results) if not columnwise else ref.assert_equal(*[r[:1] for r in results])


# --- names and arguments --------------------------------------------------------------------------

ARGUMENTS = {
    "Linear": {
        "device": None, "dtype": None, "bias": True, "tensor_parallel_mode": None,
        "tensor_parallel_group": None, "sequence_parallel": False,
        "rng_state_tracker_function": None, "accumulate_into_main_grad": False,
    },
    "BasicLinear": {
        "device": None, "dtype": None, "tensor_parallel_mode": None,
        "tensor_parallel_group": None, "sequence_parallel": False,
        "rng_state_tracker_function": None, "accumulate_into_main_grad": False,
        "userbuffers_options": None,
    },
    "Bias": {
        "device": None, "dtype": None, "tensor_parallel": False, "tensor_parallel_group": None
    },
    "GroupedLinear": {
        "bias": True, "device": None, "dtype": None, "rng_state_tracker_function": None,
        "accumulate_into_main_grad": False, "single_grouped_weight": False,
        "single_grouped_bias": False, "delay_wgrad_compute": False, "scale_bias": False,
    },
    "LayerNorm": {
        "eps": 1e-5, "device": None, "dtype": None, "zero_centered_gamma": False, "sm_margin": 0
    },
    "RMSNorm": {
        "eps": 1e-5, "device": None, "dtype": None, "zero_centered_gamma": False, "sm_margin": 0
    },
    "L2Normalization": {"eps": 1e-6, "seq_length": None, "micro_batch_size": None},
    "GELU": {"cache_quantized_input": False},
    "SwiGLU": {"cache_quantized_input": False, "glu_interleave_size": None},
    "ClampedSwiGLU": {
        "limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0, "cache_quantized_input": False,
        "glu_interleave_size": None,
    },
    "SiTUGLU": {"beta1": 4.0, "beta2": 25.0, "cache_quantized_input": False},
    "ScaledSwiGLU": {"glu_interleave_size": None, "activation_recompute_in_mlp": False},
    "ScaledSiTUGLU": {"beta1": 4.0, "beta2": 25.0, "activation_recompute_in_mlp": False},
    "ScaledClampedQGeGLU": {"limit": 7.0, "alpha": 1.702, "activation_recompute_in_mlp": False},
    "ScaledSReLU": {"activation_recompute_in_mlp": False},
    "Quantize": {"forward": True, "backward": False},
    "MakeExtraOutput": {"in_place": False},
    "AddExtraInput": {"in_place": False},
}  # fmt: skip
SIZES = {"Linear": 2, "BasicLinear": 2, "GroupedLinear": 3, "Bias": 1, "LayerNorm": 1, "RMSNorm": 1}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_ops(name):
    """Transformer Engine's with its defaults; what is kept is an attribute of that name."""
    op = getattr(te, name)(*[8] * SIZES.get(name, 0), **ARGUMENTS[name])
    if "activation_recompute_in_mlp" in ARGUMENTS[name]:
        assert op.activation_recompute_in_mlp is False


ATTRIBUTES = {
    "Linear": "weight bias basic_ops is_fused_op",
    "BasicLinear": "weight in_features out_features local_in_features local_out_features",
    "Bias": "bias local_size",
    "GroupedLinear": (
        "num_groups in_features out_features has_bias use_bias single_grouped_weight "
        "single_grouped_bias weight0 bias0 num_extra_inputs need_backward_dw backward_dw "
        "register_wgrad_accumulation_and_reduce_hooks"
    ),
    "LayerNorm": "weight bias eps zero_centered_gamma",
    "RMSNorm": "weight eps zero_centered_gamma",
    "L2Normalization": "eps",
    "ClampedSwiGLU": "limit alpha glu_linear_offset glu_interleave_size cache_quantized_input",
    "SiTUGLU": "beta1 beta2 glu_interleave_size cache_quantized_input",
    "ScaledClampedQGeGLU": "glu_interleave_size activation_recompute_in_mlp",
    "ScaledSiTUGLU": "glu_interleave_size activation_recompute_in_mlp beta1 beta2",
    "Dropout": "dropout_probability",
    "ConstantScale": "scale",
}
"""Names that users of Transformer Engine's ops read."""


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_ops(name):
    sizes = {"Dropout": (0.25,), "ConstantScale": (2.0,)}
    op = getattr(te, name)(*sizes.get(name, [8] * SIZES.get(name, 0)))
    for attribute in ATTRIBUTES[name].split():
        assert hasattr(op, attribute), attribute
    if name == "Dropout":
        assert op.dropout_probability == 0.25
    if "local_size" in ATTRIBUTES[name]:
        assert op.local_size == 8


OPTIONS = {
    "MXFP8BlockScaling": {"margin": 0, "fp8_dpa": False, "fp8_mha": False},
    "Float8CurrentScaling": {"use_power_2_scales": False, "fp8_dpa": False, "fp8_mha": False},
    "Float8BlockScaling": {
        "x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1,
        "fp8_format": te.recipes.Format.E4M3, "fp8_dpa": False, "fp8_mha": False,
    },
    "NVFP4BlockScaling": {
        "fp4_format": te.recipes.Format.E2M1, "fp8_format": te.recipes.Format.E4M3,
        "disable_rht": False, "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False, "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "none", "nvfp4_4over6_err_mode": "MSE", "fp8_dpa": False,
    },
}  # fmt: skip
for _name in ("Float8CurrentScaling", "Float8BlockScaling"):
    for _product in ("fprop", "dgrad", "wgrad"):
        OPTIONS[_name][f"fp8_gemm_{_product}"] = te.recipes.MMParams(use_split_accumulator=True)


@pytest.mark.parametrize("override", [None, "dequantized", "high_precision"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_recipes(name, override):
    recipe = getattr(te.recipes, name)(**OPTIONS[name], backward_override=override)
    assert recipe.backward_override == override
    for option, value in OPTIONS[name].items():
        assert getattr(recipe, option) == value
    same = getattr(te.recipes, name)(backward_override=override)
    assert (recipe, hash(recipe)) == (same, hash(same))
    assert te.recipes.Recipe.from_constants(recipe.as_constants()) == recipe


@pytest.mark.parametrize("power_of_two", [False, True])
def test_quantization_of_recipes(power_of_two):
    current = te.recipes.Float8CurrentScaling(use_power_2_scales=power_of_two)
    block = te.recipes.Float8BlockScaling(use_f32_scales=not power_of_two)
    for recipe in (current, block):
        for operand in ("fwd_inp", "fwd_weight", "bwd_grad"):
            params = getattr(recipe, f"fp8_quant_{operand}")
            assert params == te.recipes.QParams(power_2_scale=power_of_two)
    assert current.float8_per_tensor_scaling()
    assert not block.float8_per_tensor_scaling()
    rounded = te.recipes.QParams(random_hadamard_transform=True, stochastic_rounding=True)
    assert te.recipes.NVFP4BlockScaling().fp4_quant_bwd_grad == rounded
    with pytest.raises(TypeError, match="fp8_format must be"):
        te.recipes.Float8CurrentScaling(fp8_format=te.recipes.Format.E2M1)


NEIGHBOURS = (
    "autocast", "quantized_model_init", "fp8_autocast", "fp8_model_init", "checkpoint",
    "make_graphed_callables", "is_fp8_available", "is_mxfp8_available", "is_nvfp4_available",
    "is_fp8_block_scaling_available", "is_bf16_available", "get_default_recipe", "QuantizedTensor",
    "Quantizer", "MXFP8Quantizer", "NVFP4Quantizer", "Float8CurrentScalingQuantizer",
    "Float8BlockQuantizer", "ops",
)  # fmt: skip


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_names_beside_the_ops(name):
    assert hasattr(te, name)


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8Quantizer", "CustomRecipe"])
def test_what_is_not_offered_says_so(name):
    with pytest.raises((TypeError, AttributeError), match=name):
        getattr(te, name, getattr(te.recipes, name, None))()
