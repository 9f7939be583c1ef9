"""A rule written outside of the package: ``GroupedLinear`` and ``SwiGLU`` in one launch."""

import copy

import pytest
import reference as ref
import torch

import fusible as fz
from fusible.extend import (
    FusedOperation,
    equal,
    grouped_glu,
    needs_sm90,
    register_rule,
    rule,
    this,
)
from fusible.testing import assume_target


class GroupedLinearSwiGLU(FusedOperation):
    """Forward of ``GroupedLinear`` and ``SwiGLU``; saves what these save."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        (linear, act), (ctx, ctx_act) = self.basic_ops, basic_op_ctxs
        x, weights, ends, bias, _ = linear.operands(ctx, input_, *basic_op_extra_inputs[0])
        preact, y = grouped_glu(x, weights, ends, None, act.glu, bias)
        act.save_inputs(ctx_act, preact.view(*input_.shape[:-1], -1))
        return y.view(*input_.shape[:-1], -1), [(), ()]


@rule(
    *needs_sm90(this.linear),
    equal(this.quantizes, False),
    equal(this.linear.scale_bias, False),
    phase="forward",
)
def grouped_linear_swiglu(linear: fz.GroupedLinear, act: fz.SwiGLU) -> GroupedLinearSwiGLU:
    """One pass over the pre-activation less."""
    return GroupedLinearSwiGLU([linear, act])


SPLITS = torch.tensor([5, 0, 4])


def a_module(interleave=None, dtype=torch.bfloat16, cache_quantized_input=False, **options):
    linear = fz.GroupedLinear(3, 16, 32, dtype=dtype, **options)
    for bias in linear.biases():
        torch.nn.init.normal_(bias)
    act = fz.SwiGLU(cache_quantized_input, glu_interleave_size=interleave)
    return fz.Sequential(linear, act)


def results(module, x, target):
    """The output and all gradients."""
    with assume_target(target):
        y = module(x, SPLITS)
    dy = torch.cos(torch.arange(y.numel())).bfloat16().view_as(y).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@pytest.mark.parametrize("shape", [(12, 16), (3, 4, 16)])
@pytest.mark.parametrize(
    ("interleave", "options"),
    [
        (None, {"single_grouped_weight": True, "bias": False}),
        (8, {"single_grouped_weight": True, "single_grouped_bias": True}),
        (None, {}),
    ],
)
def test_values_and_gradients_are_those_of_the_ops(interleave, options, shape, own_fusions):
    module = a_module(interleave, **options)
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    exact = results(copy.deepcopy(module).double(), ref.double(x), "cpu")
    register_rule(grouped_linear_swiglu)
    got = results(module, x, "sm90")
    assert module.plan.fired == ("grouped_linear_swiglu",)
    for mine, right in zip(got, exact, strict=True):
        ref.assert_accurate(mine, right, roundings=4)


def test_what_the_activation_saves_is_its_own_choice(own_fusions):
    x = torch.randn(12, 16, dtype=torch.bfloat16, requires_grad=True)
    module = a_module(8, cache_quantized_input=True)
    apart = results(module, x, "sm90")
    register_rule(grouped_linear_swiglu)
    together = results(module, x, "sm90")
    assert module.plan.fired == ("grouped_linear_swiglu",)
    for one, other in zip(together, apart, strict=True):
        ref.assert_equal_but_for_rounding(one, other, roundings=3)


def test_explain_says_what_is_fused_and_what_does_not_hold(own_fusions):
    register_rule(grouped_linear_swiglu)
    x = torch.randn(12, 16)
    explained = fz.explain(a_module(), x.bfloat16(), SPLITS, target="sm90")
    assert explained.fired == ("grouped_linear_swiglu",)
    assert "forward as part of GroupedLinearSwiGLU (ops[0:2])" in str(explained)
    explained = fz.explain(a_module(dtype=torch.float32), x, SPLITS, target="sm90")
    assert explained.fired == ()
    (refusal,) = [r for r in explained.refusals if r.rule is grouped_linear_swiglu]
    assert refusal.reasons == (
        "linear.dtype must be one of bfloat16, float16 where quantizes is False, got float32",
    )
