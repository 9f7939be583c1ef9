"""Plans that run as one node without contexts give what the ops give, and take nothing else."""

import pytest
import reference as ref
import torch
from fast_paths import (
    assert_equals_the_ops,
    assert_equals_the_ops_without_gradients,
    assert_graph_may_be_kept,
    both,
    call,
    gradients,
    on_sm90,
    steps,
    with_biases,
)
from sm90_launches import is_direct

import fusible as fz

GROUPS, HIDDEN, INNER, ROWS = 4, 32, 16, 10
BF16 = torch.bfloat16


def linear(columns=HIDDEN, out=HIDDEN, **options):
    options = {"bias": False, "single_grouped_weight": True, "dtype": BF16} | options
    return fz.GroupedLinear(GROUPS, columns, out, **options)


def mlp(scale_bias=False, **options):
    fc2 = linear(INNER, scale_bias=scale_bias, **options)
    return fz.Sequential(linear(out=2 * INNER, **options), fz.ScaledSwiGLU(), fc2)


def glu(**options):
    return fz.Sequential(linear(out=2 * INNER, **options), fz.ScaledSwiGLU())


def inputs(model):
    torch.manual_seed(3)
    x = torch.randn(ROWS, HIDDEN).to(BF16).requires_grad_()
    splits, scales = torch.tensor([3, 0, 4, 1]), torch.rand(ROWS, requires_grad=True)
    given = (x, splits, scales, splits, torch.rand(ROWS).to(BF16).requires_grad_())
    return given[: 1 + model.num_extra_inputs]


BIASES = {
    "no bias": {},
    "bias": {"bias": True, "single_grouped_bias": True},
    "separate biases": {"bias": True},
}


@pytest.mark.parametrize("build", [linear, glu, mlp])
@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("frozen", ["", "inputs", "weight", "bias"])
def test_equals_the_op(build, single, bias, frozen):
    model = with_biases(build(single_grouped_weight=single, **BIASES[bias]))
    given = inputs(model)
    for name, t in [("inputs", t) for t in given[::2]] + [*model.named_parameters()]:
        if frozen and frozen in name:
            t.requires_grad_(False)
    assert_equals_the_ops(model, given)


@pytest.mark.parametrize("build", [linear, glu, mlp])
@pytest.mark.parametrize("bias", [*BIASES])
def test_equals_the_op_under_autocast_to_its_dtype(build, bias):
    model = with_biases(build(**BIASES[bias]))
    given = inputs(model)
    with torch.autocast("cpu", BF16):
        got, want = (both(model, given, prepared) for prepared in (True, False))
    ref.assert_equal(got, want)
    ref.assert_equal(got, both(model, given, True))
    with torch.autocast("cpu", torch.float16):
        assert not is_direct(call(model, given))


@pytest.mark.parametrize("build", [linear, mlp])
@pytest.mark.parametrize("bias", [*BIASES][1:])
@pytest.mark.parametrize("frozen", ["", "scales", "bias"])
def test_scaled_biases_equal_the_op_s(build, bias, frozen):
    model = with_biases(build(scale_bias=True, **BIASES[bias]))
    given = inputs(model)
    for name, t in [("scales", given[-1]), *model.named_parameters()]:
        if frozen and frozen in name:
            t.requires_grad_(False)
    assert_equals_the_ops(model, given)


TO_MAIN_GRAD = {"accumulate_into_main_grad": True}
DELAYED = {"delay_wgrad_compute": True}


@pytest.mark.parametrize("build", [linear, glu, mlp])
@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
@pytest.mark.parametrize("bias", ["no bias", "bias"])
@pytest.mark.parametrize("to", [TO_MAIN_GRAD, DELAYED, TO_MAIN_GRAD | DELAYED], ids=str)
def test_gradients_outside_of_autograd(build, single, bias, to):
    model = build(single_grouped_weight=single, **BIASES[bias], **to)
    model = with_biases(model if isinstance(model, fz.Sequential) else fz.Sequential(model))
    given = inputs(model)
    got, added = steps(model, given, True)
    want, by_ops = steps(model, given, False)
    ref.assert_equal(got, want)
    assert added == by_ops == [True if "accumulate_into_main_grad" in to else None] * len(added)


@pytest.mark.parametrize("to", [TO_MAIN_GRAD, DELAYED], ids=str)
def test_no_weight_gradients_where_only_the_input_needs_one(to):
    model = mlp(**to)
    given = inputs(model)
    got, added = steps(model, given, True, inputs=[given[0]])
    ref.assert_equal(got, steps(model, given, False, inputs=[given[0]])[0])
    assert not any(added)
    for weight in model.parameters():
        assert weight.grad is None
        assert (getattr(weight, "main_grad", torch.tensor(0.5)) == 0.5).all()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_main_grad_under_checkpointing(use_reentrant):
    model = mlp(**TO_MAIN_GRAD)
    given = inputs(model)
    got, _ = steps(model, given, True, use_reentrant)
    ref.assert_equal(got, steps(model, given, False)[0])


def test_a_weight_without_main_grad_is_an_error():
    model = mlp(**TO_MAIN_GRAD)
    given = inputs(model)
    y = call(model, given)
    assert is_direct(y)
    wanted = pytest.raises(ValueError, match="main_grad of every weight of GroupedLinear must be")
    with on_sm90(), wanted as e:
        y.backward(torch.ones_like(y))
    assert e.value.__notes__ == ["raised in Sequential.0 to Sequential.2 (GroupedMLP), backward"]


@pytest.mark.parametrize("build", [linear, glu, mlp])
@pytest.mark.parametrize("bias", BIASES)
def test_without_gradients(build, bias):
    model = with_biases(build(**BIASES[bias]))
    given = inputs(model)
    assert_equals_the_ops_without_gradients(model, given)


@pytest.mark.parametrize("build", [linear, glu, mlp])
def test_retain_graph(build):
    model = build()
    given = inputs(model)
    assert_graph_may_be_kept(model, given)


def test_only_scales_that_need_a_gradient():
    """Then the linear has no backward, and saves nothing."""
    model = glu()
    x, splits, scales = inputs(model)
    model.requires_grad_(False)
    given = x.detach(), splits, scales
    y = call(model, given)
    assert not is_direct(y)
    (got,) = gradients(model, given, y)
    (want,) = gradients(model, given, call(model, given, False), False)
    assert torch.equal(got, want)


def test_differentiating_twice_is_refused():
    model = mlp()
    given = inputs(model)
    y = call(model, given)
    dy = torch.ones_like(y, requires_grad=True)
    with on_sm90(), pytest.raises(RuntimeError, match="create_graph must be"):
        torch.autograd.grad(y, given[0], dy, create_graph=True)


def test_saved_tensors_may_come_back_laid_out_otherwise():
    model = mlp()
    given = inputs(model)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.detach().mT.contiguous() if t.dim() > 1 else t,
        lambda t: t.mT if t.dim() > 1 else t,
    ):
        y = call(model, given)
    assert is_direct(y)
    got = gradients(model, given, y)
    for one, other in zip(got, both(model, given, False)[1:], strict=True):
        # Two products and an activation, all in BF16: the gradient of FP32 scales comes from them.
        ref.assert_equal_but_for_rounding(one, other, roundings=3, dtype=BF16)


def test_a_parameter_that_was_replaced_is_trained():
    model = linear()
    given = inputs(model)
    call(model, given)
    model.weight = torch.nn.Parameter(torch.randn_like(model.weight))
    assert_equals_the_ops(model, given)


def transposed():
    model = linear()
    model.weight = torch.nn.Parameter(model.weight.detach().mT.contiguous().mT)
    return model


def apart():
    """Its biases are in memory one by one, as after ``load_state_dict(assign=True)``."""
    model = with_biases(linear(bias=True))
    for name in ("bias0", "bias2"):
        setattr(model, name, torch.nn.Parameter(getattr(model, name).detach().clone()))
    return model


def out_of_order():
    """Its weights are in one piece of memory, the last one first."""
    model = linear(single_grouped_weight=False)
    memory = torch.stack([getattr(model, f"weight{e}").detach() for e in range(GROUPS)]).flip(0)
    for e, part in enumerate(memory.unbind(0)):
        setattr(model, f"weight{GROUPS - 1 - e}", torch.nn.Parameter(part))
    return model


class Wrapped(torch.Tensor):
    """A subclass, whose memory may not hold its values."""


def strided(t):
    return torch.stack([t, t], -1)[..., 0]


def unaligned(t):
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


@pytest.mark.parametrize(
    ("build", "change"),
    [
        (lambda: linear(split_alignment=2), lambda x, s: (x, torch.tensor([2, 4, 0, 2]))),
        (transposed, None),
        (apart, None),
        (out_of_order, None),
        (linear, lambda x, splits: (x[None], splits)),
        (linear, lambda x, splits: (strided(x), splits)),
        (linear, lambda x, splits: (unaligned(x), splits)),
        (linear, lambda x, splits: (x[:0], splits * 0)),
        (linear, lambda x, splits: (x, strided(splits))),
        (linear, lambda x, splits: (x, splits.as_subclass(Wrapped))),
        (mlp, lambda x, a, scales, b: (x, a, strided(scales), b)),
        (glu, lambda x, splits, scales: (x, splits, scales.as_subclass(Wrapped))),
    ],
    ids=[
        "alignment", "transposed", "apart", "order", "3-D", "strided x",
        "unaligned x", "no rows", "strided sizes", "sizes of a subclass", "strided scales",
        "scales of a subclass",
    ],
)  # fmt: skip
def test_calls_that_it_does_not_support_run_the_op_path(build, change):
    model = build()
    given = inputs(model)
    given = given if change is None else change(*given)
    got = call(model, given)
    assert not is_direct(got)
    ref.assert_equal_elsewhere([got], [call(model, given, prepared=False)])


def test_buffers_of_the_caller_and_checks_go_the_op_s_way():
    model = mlp()
    given, out = inputs(model), torch.empty(ROWS, HIDDEN, dtype=BF16)
    want = call(model, given)
    assert is_direct(want)
    got = call(model, given, op_kwargs={2: {"output": out}})
    assert not is_direct(got)
    assert torch.equal(out, want)
    with fz.checking():
        assert not is_direct(call(model, given))


def test_bad_input_has_its_error():
    model = mlp()
    x, splits, scales, _ = inputs(model)
    call(model, (x, splits, scales, splits))  # the plan is known by now
    with pytest.raises(ValueError, match="split_sizes of GroupedLinear must be"):
        call(model, (x, splits[:3], scales, splits[:3]))
    with pytest.raises(ValueError, match="scales of ScaledSwiGLU must be"):
        call(model, (x, splits, scales[:4], splits))
    with pytest.raises(ValueError, match="input of GroupedLinear must have 32 features"):
        call(model, (x[:, :16], splits, scales, splits))
