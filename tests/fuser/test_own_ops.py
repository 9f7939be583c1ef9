"""Ops, fused ops and rules of a user's own: each broken contract has a sentence."""

import re
from typing import NamedTuple, Optional

import pytest
import reference as ref
import torch
from checks import saved_tensors
from torch import nn

import fusible as fz
from fusible.fuser.conditions import equal, this
from fusible.fuser.context import OperationContext
from fusible.fuser.registry import registry
from fusible.fuser.rules import rule


@pytest.fixture
def own_rules():
    rules, functions = registry.rules, registry.functions
    yield
    registry.install(rules)
    registry.functions = functions


class Double(fz.BasicOperation):
    def formula(self, x):
        return 2 * x


class Affine(fz.BasicOperation):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 3.0))
        self.shift = nn.Parameter(torch.ones(8))


def train(op):
    module = fz.Sequential(fz.Linear(8, 8), op)
    module(torch.randn(4, 8)).sum().backward()


# --- ops ------------------------------------------------------------------------------------------


def parameters_in_another_order(self, x, shift, scale):
    return x * scale + shift


def parameters_of_the_module(self, x):
    return x * self.scale + self.shift


def a_parameter_too_many(self, x, scale, shift, power):
    return (x * scale + shift) ** power


def a_parameter_too_few(self, x, scale):
    return x * scale


@pytest.mark.parametrize(
    "formula", [parameters_of_the_module, a_parameter_too_many, a_parameter_too_few]
)
def test_a_formula_takes_the_parameters(formula):
    op = type("Own", (Affine,), {"formula": formula})()
    with pytest.raises(
        TypeError,
        match=r"formula of Own must take .* parameters, \(input, scale, shift\), got \(x",
    ):
        op(torch.randn(4, 8))


class OnlyForward(fz.BasicOperation):
    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return 2 * input_


class ShortSignature(fz.BasicOperation):
    def op_forward(self, ctx, x):
        return 2 * x


class MaskedFormula(fz.BasicOperation):
    num_extra_inputs = 1

    def formula(self, x, mask):
        return x * mask


@pytest.mark.parametrize(
    ("kind", "extra", "message"),
    [
        (OnlyForward, (), "OnlyForward must define op_backward with op_forward"),
        (
            ShortSignature,
            (),
            r"op_forward of ShortSignature must take \(ctx, input_, prev.*\(ctx, x",
        ),
        (MaskedFormula, (torch.ones(8),), r"got \(x, mask\); extra inputs need fuser_forward"),
    ],
)
def test_an_incomplete_op_says_what_it_lacks(kind, extra, message):
    with pytest.raises(TypeError, match=message):
        kind()(torch.randn(4, 8, requires_grad=True), *extra).sum().backward()


@pytest.mark.parametrize("name", ["pre_first_fuser_forward", "pre_fuser_forward"])
def test_a_method_that_only_transformer_engine_calls_is_refused(name):
    """The factor would be 1."""

    class Own(fz.BasicOperation):
        factor = 1

        def prepare(self, **unused):
            self.factor = 2

        def formula(self, x):
            return self.factor * x

    setattr(Own, name, Own.prepare)
    for module in (Own(), fz.Sequential(fz.Linear(8, 8), Own())):
        with pytest.raises(TypeError, match=f"{name} of Own would not be called"):
            module(torch.randn(4, 8))


def parameters_as_keywords(self, x, *, shift, scale, power=1):
    return (x * scale + shift) ** power


def all_keywords(self, x, **parameters):
    return x * parameters["scale"] + parameters["shift"]


@pytest.mark.parametrize(
    "formula", [parameters_in_another_order, parameters_as_keywords, all_keywords]
)
def test_a_formula_takes_the_parameters_by_name(formula):
    op = type("Own", (Affine,), {"formula": formula})()
    x = torch.randn(4, 8, requires_grad=True)
    y = op(x)
    assert torch.equal(y, 3 * x + 1)
    dx, dscale, dshift = torch.autograd.grad(y.sum(), [x, op.scale, op.shift])
    assert torch.equal(dx, torch.full_like(x, 3.0))
    torch.testing.assert_close(dscale, x.sum(0))
    assert torch.equal(dshift, torch.full((8,), 4.0))


def of_an_optional_parameter(self, x, scale, shift=None):
    return x * scale if shift is None else x * scale + shift


def test_a_parameter_may_come_later():
    op, x = type("Own", (Affine,), {"formula": of_an_optional_parameter})(), torch.randn(4, 8)
    op.shift = None
    assert torch.equal(op(x), 3 * x)
    op.shift = nn.Parameter(torch.ones(8))
    y = op(x)
    assert torch.equal(y, 3 * x + 1)
    assert torch.equal(torch.autograd.grad(y.sum(), op.shift)[0], torch.full((8,), 4.0))
    op.shift = None
    assert torch.equal(op(x), 3 * x)


class WithAModule(Affine):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)


class ByFormula(WithAModule):
    def formula(self, x, scale, shift):
        return self.inner(x) * scale + shift


class ByHand(WithAModule):
    parameter_names = ("scale", "shift")

    def op_forward(self, ctx, input_, **_):
        return self.inner(input_)

    def op_backward(self, ctx, grad_output):
        return grad_output @ self.inner.weight, (None, None)


class MoreThanItsBase(fz.RMSNorm):
    def __init__(self):
        super().__init__(8)
        self.extra = nn.Parameter(torch.ones(8))


@pytest.mark.parametrize("kind", [ByFormula, ByHand, MoreThanItsBase])
def test_no_parameter_is_left_without_a_gradient(kind):
    with pytest.raises(
        TypeError, match=r"must return the gradients of all .* got (extra|inner.weight).*name them"
    ):
        kind()(torch.randn(4, 8))


class ReturnsThem(WithAModule):
    def op_forward(self, ctx, input_, **_):
        _, _, weight, bias = ctx.parameters
        ctx.save_for_backward(input_, weight)
        return nn.functional.linear(input_, weight, bias)

    def op_backward(self, ctx, grad_output):
        x, weight = ctx.saved_tensors
        return grad_output @ weight, (None, None, grad_output.t() @ x, grad_output.sum(0))


class ScaledByHand(fz.BasicOperation):
    """Its backward gives the gradient of the scale as ``of`` makes it."""

    parameter_names = ("scale",)

    def __init__(self, of):
        super().__init__()
        self.scale, self.of = nn.Parameter(torch.rand(8)), of

    def op_forward(self, ctx, input_, **_):
        ctx.save_for_backward(input_)
        return input_ * ctx.parameters[0]

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output, (self.of(grad_output * x),)


@pytest.mark.parametrize("of", [lambda g: g.sum(0)[:4], lambda g: g.sum(), lambda g: g.t()])
def test_a_gradient_of_a_parameter_has_its_shape(of):
    seq = fz.Sequential(fz.Linear(8, 8), ScaledByHand(of))
    y = seq(torch.randn(3, 8))
    sentence = (
        "the backward of ScaledByHand must return a gradient of parameter 0 in its shape, (8,), or "
        "one that sums to it, got"
    )
    with pytest.raises(RuntimeError, match=re.escape(sentence)) as error:
        y.sum().backward()
    assert "Sequential.1 (ScaledByHand), backward" in error.value.__notes__[0]


@pytest.mark.parametrize("of", [lambda g: g.sum(0), lambda g: g, lambda g: None])
def test_a_gradient_of_a_parameter_may_be_left_for_autograd_to_sum(of):
    seq = fz.Sequential(fz.Linear(8, 8), ScaledByHand(of))
    x = torch.randn(3, 8)
    seq(x).sum().backward()
    want = None if of(x) is None else seq[0](x).sum(0)
    torch.testing.assert_close(seq[1].scale.grad, want)


def test_an_op_by_hand_returns_the_gradients_of_a_module_inside():
    op, x = ReturnsThem(), torch.randn(4, 8)
    grads = torch.autograd.grad(op(x).sum(), [*op.inner.parameters()])
    torch.testing.assert_close(
        grads, torch.autograd.grad(op.inner(x).sum(), [*op.inner.parameters()])
    )


def of_nothing_at_all(self):
    return self.scale


def test_a_formula_takes_an_input():
    op = type("Own", (fz.BasicOperation,), {"formula": of_nothing_at_all})()
    with pytest.raises(TypeError, match=r"formula of Own must take its input .*, got \(\)"):
        op(torch.randn(4, 8))


def test_a_formula_may_be_a_builtin_function():
    op = type("Own", (fz.BasicOperation,), {"formula": staticmethod(torch.tanh)})()
    x = torch.randn(4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(op(x).sum(), x)
    assert torch.equal(op(x), x.tanh())
    torch.testing.assert_close(grad, 1 - x.tanh() ** 2)


def renamed(self, x, factor, addend, power=1):
    return (x * factor + addend) ** power


def starred(self, x, *parameters):
    return x * parameters[0] + parameters[1]


@pytest.mark.parametrize("formula", [renamed, starred])
def test_a_formula_may_call_them_as_it_likes(formula):
    x = torch.randn(4, 8)
    op = type("Own", (Affine,), {"formula": formula})()
    assert torch.equal(op(x), 3 * x + 1)


RETURNS = {
    "two outputs": (lambda x: (x, x), "must return its output, one tensor, .*got .(a tensor, a t"),
    "no output": (lambda x: None, r"must return its output, one tensor, .*got .None, \[\(\)\]"),
}


@pytest.mark.parametrize("what", RETURNS)
def test_a_forward_returns_a_tensor(what):
    function, sentence = RETURNS[what]

    class Own(fz.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            return function(input_)

    with pytest.raises(TypeError, match=sentence.replace(".(", r".\(")):
        Own()(torch.randn(2, 3))


@pytest.mark.parametrize("rows", [2, 4])
def test_a_backward_returns_two_things(rows):
    class Own(Double):
        def op_backward(self, ctx, grad_output):
            return grad_output

    x = torch.randn(rows, 8, requires_grad=True)  # two rows would pass for two things
    with pytest.raises(TypeError, match=r"op_backward of Own must return .*, got a tensor"):
        Own()(x).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_in_the_middle_may_return_none(compiled, dtype):
    """It is zero, of the shape of the op's input, for the ops before; others get theirs."""

    class FirstRows(fz.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            return input_.detach()[:2]

        def op_backward(self, ctx, grad_output):
            return None, ()

    torch.manual_seed(7)
    before = fz.Linear(8, 8, dtype=dtype), fz.SiLU()
    seq = fz.Sequential(*before, FirstRows(), fz.GELU(), fz.BasicLinear(8, 4, dtype=dtype))
    call = torch.compile(seq, backend="aot_eager", fullgraph=True) if compiled else seq
    x = torch.randn(5, 8, dtype=dtype, requires_grad=True)
    call(x).sum().backward()
    for t in (x, *before[0].parameters()):
        torch.testing.assert_close(t.grad, torch.zeros_like(t))
    got, seq[-1].weight.grad = seq[-1].weight.grad, None
    seq[3:](seq[:2](x).detach()[:2]).sum().backward()
    torch.testing.assert_close(got, seq[-1].weight.grad)


class ScaleBy(fz.BasicOperation):
    """Multiplies by what it is given; ``asks`` says how it learns whether to give a gradient."""

    num_extra_inputs = 1

    def __init__(self, asks):
        super().__init__()
        self.asks = asks

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        ((scale,),), (ctx,) = basic_op_extra_inputs, basic_op_ctxs
        if self.asks == "the tensors":
            ctx.wanted = input_.requires_grad, scale.requires_grad
        else:
            ctx.wanted = ctx.needs.input, self.asks == "the context" and ctx.needs.extra_inputs[0]
        ctx.save_for_backward(input_, scale)
        return input_ * scale.unsqueeze(-1), [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        x, scale = basic_op_ctxs[0].saved_tensors
        wants_input, wants_scale = basic_op_ctxs[0].wanted
        dx = grad_output * scale.unsqueeze(-1) if wants_input else None
        return dx, [()], [((grad_output * x).sum(-1) if wants_scale else None,)]


@pytest.mark.parametrize("asks", ["the tensors", "the context", "nothing"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("parts", ["one run", "nested", "hooked"])
def test_a_gradient_to_an_earlier_op_is_given_or_zero(asks, compiled, parts):
    """Inside a run tensors say what needs a gradient; None for an extra input is zero."""
    torch._dynamo.reset()
    x = torch.randn(5, 8, requires_grad=True)
    producer, consumer = ref.MakeScale(), ScaleBy(asks)
    producer.set_extra_output_channel(0, "scale", output_to_caller=False)
    consumer.set_extra_input_channel(0, "scale")
    ops = [fz.Bias(8), producer, fz.ConstantScale(2.0), consumer]
    module = fz.Sequential(*ops[:2], fz.Sequential(*ops[2:])) if parts == "nested" else None
    module = module or fz.Sequential(*ops)
    if parts == "hooked":
        module[2].register_forward_hook(lambda *_: None)
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    if compiled and asks != "the context" and parts != "hooked" and torch.__version__ < "2.13":
        with pytest.raises(Exception, match=r"must return the gradient of"):
            call(x).sum().backward()
        return
    call(x).sum().backward()
    want = x.detach().requires_grad_()
    scale = want.square().mean(-1, keepdim=True)
    (2 * want * (scale.detach() if asks == "nothing" else scale)).sum().backward()
    torch.testing.assert_close(x.grad, want.grad)


# --- fused ops and rules --------------------------------------------------------------------------


class Fused(fz.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return 2 * self.basic_ops[1].scale * input_, [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        return 2 * self.basic_ops[1].scale * grad_output, [(), ()], [(), ()]


class Returns(Fused):
    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return 2 * self.basic_ops[1].scale * input_


class ReturnsInBackward(Fused):
    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        return 2 * self.basic_ops[1].scale * grad_output, [(), ()]


def call_with(build, phase="joint"):
    def own(double: Double, scale: fz.ConstantScale):
        return build(double, scale)

    fz.register_rule(rule(phase=phase)(own))
    train(fz.Sequential(Double(), fz.ConstantScale(3.0)))


BUILDS = {
    "of fewer ops": (
        lambda a, b: Fused([a]),
        "own must build a fused op of ['Double', 'ConstantScale'], in this order, got Fused of "
        "['Double']",
    ),
    "of ops in another order": (
        lambda a, b: Fused([b, a]),
        "in this order, got Fused of ['ConstantScale', 'Double']",
    ),
    "nothing": (lambda a, b: None, "got NoneType of []"),
    "one whose forward returns a tensor": (
        lambda a, b: Returns([a, b]),
        "the forward of Returns must return its output, one tensor, and the extra outputs",
    ),
    "one whose backward returns two things": (
        lambda a, b: ReturnsInBackward([a, b]),
        "the backward of ReturnsInBackward must return the gradient of its input, and for each",
    ),
}


@pytest.mark.parametrize("what", BUILDS)
def test_what_a_rule_builds(what, own_rules):
    build, sentence = BUILDS[what]
    with pytest.raises((TypeError, RuntimeError), match=re.escape(sentence)):
        call_with(build)


def test_an_error_in_a_rule_s_function_names_the_rule(own_rules):
    with pytest.raises(ZeroDivisionError) as error:
        call_with(lambda a, b: 1 / 0)
    assert error.value.__notes__ == ["in the function of rule own"]


def test_a_forward_fusion_saves_what_its_ops_would(own_rules):
    sentence = r"forward of Fused must save .* \[1, 0\] tensors \(Double: x.*\), got \[0, 0\]"
    with pytest.raises(RuntimeError, match=sentence):
        call_with(lambda a, b: Fused([a, b]), phase="forward")


def bare(double, scale):
    return Fused([double, scale])


def of_numbers(double: Double, scale: float):
    return Fused([double, scale])


def of_nothing():
    return Fused([])


def of_what_may_be_absent(double: Double | None):
    return Fused([double])


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (bare, "parameter double of bare must be annotated with the types of ops"),
        (of_numbers, "parameter scale of of_numbers must be annotated .* got <class 'float'>"),
        (of_nothing, r"of_nothing must take an op that is not optional, got \[\]"),
        (of_what_may_be_absent, r"must take an op that is not optional, got \['double'\]"),
    ],
)
def test_a_rules_signature_is_a_pattern(function, sentence):
    with pytest.raises(TypeError, match=sentence):
        rule()(function)


def test_a_rules_arguments():
    with pytest.raises(ValueError, match="one of joint, forward, backward, got 'both'"):
        rule(phase="both")
    with pytest.raises(TypeError, match="needs of a rule must be a tuple of conditions made by"):
        rule(equal(this.recipe, "none"), lambda site: True)


def test_an_optional_op_in_either_spelling():
    @rule()
    def old(double: Double, scale: Optional[fz.ConstantScale]):  # noqa: UP045
        """As typing spells it."""

    @rule()
    def new(double: Double, scale: fz.ConstantScale | None):
        """As the language does."""

    assert old.pattern == new.pattern


@pytest.mark.parametrize("returned", [None, [1, 2]])
def test_a_fusion_function_returns_ops(returned, own_rules):
    def own(ops, *, recipe):
        return returned

    fz.register_forward_fusion(own)
    with pytest.raises(TypeError, match=r"the fusion .*own must return ops, got"):
        train(Double())


# --- subclasses of the package's ops --------------------------------------------------------------


class DoubledGELU(fz.GELU):
    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return 2 * super().op_forward(
            ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer
        )

    def op_backward(self, ctx, grad_output):
        grad_input, grad_params = super().op_backward(ctx, 2 * grad_output)
        assert len(grad_params) == 0
        return grad_input, grad_params


class DoubledLinear(fz.BasicLinear):
    def fuser_forward(self, basic_op_ctxs, input_, **given):
        output, extra = super().fuser_forward(basic_op_ctxs, input_, **given)
        return 2 * output, extra

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        return super().fuser_backward(
            basic_op_ctxs, 2 * grad_output, basic_op_grad_extra_outputs=basic_op_grad_extra_outputs
        )


class DoubledScaledSwiGLU(fz.ScaledSwiGLU):
    def fuser_forward(self, basic_op_ctxs, input_, **given):
        output, extra = super().fuser_forward(basic_op_ctxs, input_, **given)
        return 2 * output, extra

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        return super().fuser_backward(basic_op_ctxs, 2 * grad_output, **given)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("make", "extra"),
    [
        (lambda kind: (kind or DoubledGELU)(), ()),
        (lambda kind: (kind or DoubledLinear)(16, 16), ()),
        (lambda kind: (kind or DoubledScaledSwiGLU)(), (torch.rand(6),)),
    ],
)
def test_a_subclass_overrides_the_methods_of_te_ops(make, extra, compiled):
    op = make(None)
    plain = make(type(op).__mro__[1])
    plain.load_state_dict(op.state_dict())
    x = torch.randn(6, 16, requires_grad=True)
    results = []
    for module, factor in ((fz.Sequential(op), 1), (fz.Sequential(plain), 2)):
        call = torch.compile(module, fullgraph=True, backend="eager") if compiled else module
        y = factor * call(x, *extra)
        leaves = [x, *module.parameters()]
        results.append((y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)))
    torch.testing.assert_close(*results)


def test_methods_patched_on_one_op_are_called(monkeypatch):
    op, x = fz.GELU(), torch.randn(3, 4, requires_grad=True)
    plain_forward, plain_backward = op.op_forward, op.fuser_backward
    monkeypatch.setattr(op, "op_forward", lambda *args, **given: 2 * plain_forward(*args, **given))
    monkeypatch.setattr(
        op, "fuser_backward", lambda ctxs, dy, **given: plain_backward(ctxs, 2 * dy, **given)
    )
    y, expected = op(x), 2 * fz.GELU()(x)
    torch.testing.assert_close(y, expected)
    grads = [torch.autograd.grad(t.sum(), x) for t in (y, expected)]
    torch.testing.assert_close(*grads)


class Pair(NamedTuple):
    first: torch.Tensor | None
    count: int
    second: torch.Tensor | None = None


class SavesAStructure(fz.BasicOperation):
    """Its backward reads nested values, of which autograd saves the tensors alone."""

    def op_forward(self, ctx, input_, **_):
        ctx.save([Pair(input_, input_.shape[0]), (None, [2 * input_, "a"]), (), input_.shape])
        return input_**2

    def op_backward(self, ctx, grad_output):
        [pair, (none, [double, name]), nothing, shape] = ctx.restored()
        assert type(pair) is Pair
        assert (pair.second, none, name, nothing) == (None, None, "a", ())
        assert shape == grad_output.shape
        return grad_output * (double + pair.first * (pair.count - grad_output.shape[0])), ()


@pytest.mark.parametrize("dynamic", [None, False, True], ids=["eager", "static", "dynamic"])
def test_an_op_saves_a_structure(dynamic):
    op = fz.Sequential(SavesAStructure())
    call = op
    if dynamic is not None:
        call = torch.compile(op, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(rows, 4, requires_grad=True)
        with saved_tensors() as saved:
            y = call(x)
        if dynamic is None:
            ref.assert_equal(saved, [x, 2 * x])
        y.backward(torch.ones_like(y))
        torch.testing.assert_close(x.grad, 2 * x.detach())


def test_an_op_saves_a_number_of_rows_that_no_guard_may_read():
    op = fz.Sequential(SavesAStructure())
    x = torch.randn(3, 4, requires_grad=True)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    torch.compile(op, backend="aot_eager", fullgraph=True)(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_the_last_call_that_saves_counts():
    x, ctx = torch.randn(2), OperationContext()
    with pytest.raises(TypeError, match="must be in a tuple or a list, got Tensor"):
        ctx.save(x)
    ctx.save((x, [2 * x]))
    ctx.save_for_backward(x)
    with pytest.raises(RuntimeError, match="must be saved by"):
        ctx.for_backward(ctx.to_save).restored()


def test_te_ops_calls_of_the_packages_ops_give_lists_by_op():
    op = fz.Dispatch(2)
    ctx = OperationContext()
    ids = torch.tensor([[0], [1], [1]])
    y, (extra,) = op.fuser_forward(
        [ctx],
        torch.ones(3, 4),
        basic_op_extra_inputs=[(torch.ones(3, 1), ids)],
        prev_op_grad_output_quantizer=None,
        next_op_input_quantizer=None,
        basic_op_kwargs=[{}],
    )
    assert y.shape == (3, 4)
    assert extra[0].tolist() == [1, 2]
    assert len(extra) == op.num_extra_outputs
    backward = ctx.for_backward(ctx.to_save)
    dx, params, grads = op.fuser_backward(
        [backward], torch.ones(3, 4), basic_op_grad_extra_outputs=[(None, torch.ones(3), None)]
    )
    assert torch.equal(dx, torch.ones(3, 4))
    assert list(map(len, params)) == [0]
    assert torch.equal(grads[0][0], torch.ones(3, 1))
    assert grads[0][1] is None


class HalfByHand(fz.BasicOperation):
    def formula(self, x):
        return x.square()

    def op_forward(self, ctx, x, prev_op_grad_output_quantizer, next_op_input_quantizer):
        y = x.square()
        ctx.save_for_backward(y)
        return y


def test_a_formula_is_no_backward_of_a_forward_by_hand():
    x = torch.tensor([3.0], requires_grad=True)
    y = HalfByHand()(x)
    with pytest.raises(TypeError, match="HalfByHand must define op_backward with op_forward"):
        y.backward()
    assert HalfByHand()(x.detach()) == 9


class ByHandBelow(HalfByHand):
    def op_backward(self, ctx, dy):
        return 6 * dy, ()


@pytest.mark.parametrize("base", [fz.GELU, fz.RMSNorm, ByHandBelow])
def test_a_formula_does_not_override_methods_by_hand(base):
    class Doubled(base):
        def formula(self, x, *params):
            return 2 * x

    op = Doubled(4) if base is fz.RMSNorm else Doubled()
    with pytest.raises(
        TypeError, match=f"Doubled must override op_forward.* math of {base.__name__} is"
    ):
        op(torch.ones(3, 4))


def test_a_linear_whose_operands_were_not_saved_by_it_is_named():
    linear = fz.GroupedLinear(2, 4, 4, bias=False, single_grouped_weight=True)
    context = OperationContext()
    context.save_for_backward(torch.zeros(5, 4), torch.tensor([2, 5]), None, linear.weight, None)
    backward = context.for_backward(context.to_save)
    with pytest.raises(RuntimeError, match=r"must be saved by ctx.save, .* by its operands\(\)"):
        linear.restored(backward)
