"""Ops, fused ops and rules of a user's own: each broken contract has a sentence."""

import re
from typing import Optional

import pytest
import torch
from torch import nn

import fusible as fz
from fusible.fuser.conditions import equal, this
from fusible.fuser.registry import registry
from fusible.fuser.rules import rule


@pytest.fixture
def own_rules():
    rules, functions = registry.rules, {p: list(f) for p, f in registry.functions.items()}
    yield
    registry.install(rules)
    registry.functions.update(functions)


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


@pytest.mark.parametrize(
    "formula", [parameters_in_another_order, parameters_of_the_module, a_parameter_too_many]
)
def test_a_formula_takes_the_parameters_in_order(formula):
    op = type("Own", (Affine,), {"formula": formula})()
    with pytest.raises(
        TypeError,
        match=r"formula of Own must take .* in the order .*, \(input, scale, shift\), got \(x",
    ):
        op(torch.randn(4, 8))


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


def test_a_backward_in_the_middle_returns_a_gradient():
    class Own(Double):
        def op_backward(self, ctx, grad_output):
            return None, ()

    with pytest.raises(RuntimeError, match="op after Bias must return the gradient of its input"):
        train(Own())


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


def test_a_forward_fusion_saves_what_its_ops_would(own_rules):
    with pytest.raises(
        RuntimeError, match="forward of Double must have saved x, parameters, got 0 tensors"
    ):
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
    with pytest.raises(ValueError, match="phase must be one of joint, forward, backward, got 'bo"):
        rule(phase="both")
    with pytest.raises(TypeError, match="needs must be conditions of"):
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
