"""The user's own fusions: when they are called, what they may return, that values stay the same."""

import copy

import pytest
import reference as ref
import torch
import torch.nn.functional as F

import fusible as fz
from fusible.fuser.conditions import at_least, equal, this
from fusible.fuser.rules import rule
from fusible.kernels.runtime.provider import provider
from fusible.testing import assume_target

# --- fused ops as Transformer Engine's users write them -------------------------------------------


class LinearSiLUForward(fz.FusedOperation):
    """Forward of BasicLinear + SiLU; saves what both document."""

    def __init__(self, linear, silu):
        super().__init__((linear, silu))
        self.calls = 0

    def fuser_forward(
        self,
        basic_op_ctxs,
        input_,
        *,
        basic_op_extra_inputs,
        prev_op_grad_output_quantizer,
        next_op_input_quantizer,
        basic_op_kwargs,
    ):
        self.calls += 1
        linear_ctx, silu_ctx = basic_op_ctxs
        weight = self.basic_ops[0].weight
        h = F.linear(input_, weight)
        if linear_ctx.requires_grad:
            linear_ctx.save_for_backward(input_, weight)
            linear_ctx.dtype = input_.dtype
            silu_ctx.save_for_backward(h)
            silu_ctx.dtype = h.dtype
        return F.silu(h), [(), ()]


class LinearSiLUBackward(fz.FusedOperation):
    """Backward of BasicLinear + SiLU; reads what both document."""

    def __init__(self, linear, silu):
        super().__init__((linear, silu))
        self.calls = 0

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        self.calls += 1
        x, weight = basic_op_ctxs[0].saved_tensors
        (h,) = basic_op_ctxs[1].saved_tensors
        assert basic_op_ctxs[0].dtype == basic_op_ctxs[1].dtype == h.dtype
        s = ref.sigmoid(h)
        dh = grad_output * (s + h * s * (1 - s))
        return dh @ weight, [(dh.flatten(0, -2).T @ x.flatten(0, -2),), ()], [(), ()]


class LinearSiLU(LinearSiLUForward):
    """Both, which agree on a state of their own: the sigmoid is saved in place of nothing."""

    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        y, extra = super().fuser_forward(basic_op_ctxs, input_, **kwargs)
        h = F.linear(input_, self.basic_ops[0].weight)
        basic_op_ctxs[0].save_for_backward(input_, h, ref.sigmoid(h))
        basic_op_ctxs[1].save_for_backward()
        return y, extra

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, h, s = basic_op_ctxs[0].saved_tensors
        dh = grad_output * (s + h * s * (1 - s))
        dx = dh @ self.basic_ops[0].weight
        return dx, [(dh.flatten(0, -2).T @ x.flatten(0, -2),), ()], [(), ()]


def fuse(kind):
    """A fusion function as Transformer Engine's own: a window over the list."""

    def function(ops, *, recipe, **unused):
        out = []
        for op in ops:
            out.append(op)
            if len(out) >= 2 and type(out[-2]) is fz.BasicLinear and type(op) is fz.SiLU:
                out[-2:] = [kind(*out[-2:])]
        return out

    return function


REGISTER = {
    "forward": (fz.register_forward_fusion, LinearSiLUForward),
    "backward": (fz.register_backward_fusion, LinearSiLUBackward),
    "joint": (fz.register_forward_backward_fusion, LinearSiLU),
}


def model():
    return fz.Sequential(
        fz.Linear(8, 8),
        fz.BasicLinear(8, 6),
        fz.SiLU(),
        fz.BasicLinear(6, 4),
        fz.SiLU(),
        fz.Bias(4),
    ).double()


def plain(x, w0, b0, w1, w2, b2):
    h = (x @ w0.T + b0) @ w1.T
    h = (h * ref.sigmoid(h)) @ w2.T
    return h * ref.sigmoid(h) + b2


def check(seq, x):
    dy = torch.randn(*x.shape[:-1], 4, dtype=x.dtype)
    tensors = [x, *seq.parameters()]
    exact_y, exact = ref.gradients(plain, tensors, dy)
    y = seq(x)
    torch.testing.assert_close(y.detach(), exact_y, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.autograd.grad(y, tensors, dy), exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "phases", [("forward",), ("backward",), ("forward", "backward"), ("joint",)], ids="+".join
)
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
def test_used_and_equal(phases, shape, own_fusions):
    for phase in phases:
        register, kind = REGISTER[phase]
        register(fuse(kind))
    seq, x = model(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    check(seq, x)
    for phase in ("forward", "backward"):
        ops = [type(op) for op in getattr(seq.plan, f"{phase}_ops")]
        kind = LinearSiLU if phases == ("joint",) else REGISTER[phase][1]
        fused = phase in phases or phases == ("joint",)
        assert ops.count(kind) == (2 if fused else 0)
    with torch.no_grad():
        torch.testing.assert_close(
            seq(x.detach()), plain(x.detach(), *seq.parameters()).detach(), rtol=1e-12, atol=1e-13
        )


def counting(function, calls):
    def counted(ops, *, recipe, **unused):
        calls.append((tuple(ops), recipe))
        return function(ops, recipe=recipe)

    return counted


def test_called_once_per_run_recipe_and_gradient_requirements(own_fusions):
    calls = []
    fz.register_forward_fusion(op_fusion_func=counting(fuse(LinearSiLUForward), calls))
    seq, x = model(), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    for rows in (5, 5, 3, 1, 0):
        seq(x[:rows])
    ops = tuple(part for op in seq for part in op.basic_ops)
    assert calls == [(ops, None)]
    for target in (None, "cpu", "sm90", "sm100"):
        fz.explain(seq, x, target=target)
    assert len(calls) == 1

    with torch.no_grad():  # other gradient requirements
        seq(x)
        seq(x[:2])
    assert len(calls) == 2
    seq(x.detach())
    assert len(calls) == 3
    for _ in range(2):  # another recipe
        with fz.autocast(recipe=ref.Rows()):
            seq(x)
    assert len(calls) == 4
    assert calls[-1] == (ops, ref.Rows())
    other = model()  # another run
    other(x)
    assert len(calls) == 5


def test_explained_first_and_called_after_is_one_call(own_fusions):
    calls = []
    fz.register_forward_backward_fusion(counting(fuse(LinearSiLU), calls))
    seq, x = model(), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    for target in ("sm100", "sm90", "cpu"):
        explained = fz.explain(seq, x, target=target)
        assert "LinearSiLU by " in str(explained)
    check(seq, x)
    assert len(calls) == 1


def test_the_same_fused_op_serves_every_call(own_fusions):
    fz.register_forward_fusion(fuse(LinearSiLUForward))
    seq, x = model(), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        seq(x)
    assert [op.calls for op in seq.plan.forward_ops if type(op) is LinearSiLUForward] == [3, 3]


def test_registered_later_is_used(own_fusions):
    seq, x = model(), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    seq(x)
    before = seq.plan
    fz.register_forward_fusion(fuse(LinearSiLUForward))
    check(seq, x)
    assert seq.plan is not before
    assert any(type(op) is LinearSiLUForward for op in seq.plan.forward_ops)


def test_prepend_orders_users_functions(own_fusions):
    order = []

    def named(name):
        def function(ops, *, recipe):
            order.append(name)
            return ops

        return function

    fz.register_forward_fusion(named("first registered"))
    fz.register_forward_fusion(named("second"))
    fz.register_forward_fusion(named("prepended"), prepend=True)
    fz.register_forward_backward_fusion(named("joint"))
    fz.register_backward_fusion(named("backward"))
    fz.Sequential(fz.SiLU())(torch.randn(2))
    assert order == ["joint", "prepended", "first registered", "second", "backward"]


def test_before_the_built_in_rules(own_fusions):
    """Linear + SiLU would be one of ours, all three ops of it."""
    seq = fz.Sequential(fz.Linear(8, 4), fz.SiLU())
    x = torch.randn(3, 8, requires_grad=True)
    seq(x)
    assert seq.plan.fired == ("linear_bias_activation",)

    class BiasSiLU(fz.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            h = input_ + self.basic_ops[0].bias
            basic_op_ctxs[1].save_for_backward(h)
            basic_op_ctxs[1].dtype = h.dtype
            return F.silu(h), [(), ()]

    fz.register_forward_fusion(lambda ops, *, recipe: [ops[0], BiasSiLU(ops[1:])])
    expected = F.silu(F.linear(x, *seq[0].parameters()))
    torch.testing.assert_close(seq(x), expected)
    assert seq.plan.fired == ("<lambda>",)
    assert [len(op.basic_ops) for op in seq.plan.forward_ops] == [1, 2]
    assert [len(op.basic_ops) for op in seq.plan.backward_ops] == [1, 1, 1]


def test_gets_the_recipe(own_fusions):
    def only_under_rows(ops, *, recipe):
        return fuse(LinearSiLUForward)(ops, recipe=recipe) if recipe == ref.Rows() else ops

    fz.register_forward_fusion(only_under_rows)
    seq, x = model(), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    for recipe, fused in ((None, 0), (ref.Rows(), 2), (ref.Rows(8), 0), (None, 0), (ref.Rows(), 2)):
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            check(seq, x)
        assert sum(type(op) is LinearSiLUForward for op in seq.plan.forward_ops) == fused


# --- what may not be returned -----------------------------------------------------------------


@pytest.mark.parametrize("register", [r for r, _ in REGISTER.values()], ids=REGISTER)
@pytest.mark.parametrize(
    "wrong",
    [
        lambda ops, recipe=None: ops[1:],
        lambda ops, recipe=None: ops[::-1],
        lambda ops, recipe=None: [*ops, ops[0]],
        lambda ops, recipe=None: [ops[0], fz.SiLU(), *ops[2:]],
        lambda ops, recipe=None: [LinearSiLUForward(ops[2], ops[1]), *ops[2:]],
        lambda ops, recipe=None: [],
    ],
    ids=["too few", "reversed", "too many", "another op", "fused in another order", "none"],
)
def test_lists_that_do_not_cover_the_ops(register, wrong, own_fusions):
    register(wrong)
    seq = fz.Sequential(fz.BasicLinear(4, 4), fz.SiLU(), fz.Bias(4))
    with pytest.raises(RuntimeError, match="must return ops that cover exactly") as error:
        seq(torch.randn(2, 4))
    assert "given ['BasicLinear', 'SiLU', 'Bias'], got " in str(error.value)
    got = [type(op).__name__ for op in wrong(list(seq))]
    assert f"got {got}" in str(error.value)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_joint_fusions_stay(phase, own_fusions):
    def take_apart(ops, *, recipe):
        return [part for op in ops for part in op.basic_ops]

    fz.register_forward_backward_fusion(fuse(LinearSiLU))
    REGISTER[phase][0](take_apart)
    with pytest.raises(RuntimeError, match=r"LinearSiLU was made by a joint fusion.*leave it in"):
        model()(torch.randn(2, 8, dtype=torch.float64))


def test_fused_op_with_the_wrong_number_of_gradients(own_fusions):
    class Wrong(LinearSiLUBackward):
        def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
            dx, _, extra = super().fuser_backward(basic_op_ctxs, grad_output, **kwargs)
            return dx, [(), ()], extra

    fz.register_backward_fusion(fuse(Wrong))
    y = model()(torch.randn(2, 8, dtype=torch.float64))
    with pytest.raises(
        RuntimeError, match=r"backward of Wrong must return .* \[1, 0\] and .* got \[0, 0\]"
    ):
        y.sum().backward()


def test_fused_op_with_the_wrong_number_of_extra_outputs(own_fusions):
    class Wrong(LinearSiLUForward):
        def fuser_forward(self, *args, **kwargs):
            return super().fuser_forward(*args, **kwargs)[0], [()]

    fz.register_forward_fusion(fuse(Wrong))
    with pytest.raises(RuntimeError, match=r"Wrong must return .* of lengths \[0, 0\], got \[0\]"):
        model()(torch.randn(2, 8, dtype=torch.float64))


# --- kernels of another machine ---------------------------------------------------------------


class ScaledTwice(fz.FusedOperation):
    """Two constant scales as one kernel of SM100."""

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        first, second = self.basic_ops
        return provider().scale(input_, first.scale * second.scale), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        first, second = self.basic_ops
        dx = provider().scale(grad_output, first.scale * second.scale)
        return dx, [(), ()], [(), ()]


@rule(at_least(this.sm, 100), equal(this.dtype, "bfloat16"))
def scaled_twice(first: fz.ConstantScale, second: fz.ConstantScale) -> ScaledTwice:
    """One pass in place of two."""
    return ScaledTwice([first, second])


class Kernels:
    """Stands in for the kernels of an architecture, and counts its launches."""

    def __init__(self):
        self.launches = 0

    def scale(self, x, factor):
        self.launches += 1
        return x * factor


def test_assume_target_runs_a_foreign_plan_through_a_provider(own_fusions):
    own_fusions.install((scaled_twice, *own_fusions.rules))
    seq = fz.Sequential(fz.ConstantScale(2.0), fz.ConstantScale(3.0))
    x = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    expected = seq(x).detach()
    assert seq.plan.fired == ()
    (refusal,) = seq.plan.refusals
    assert refusal.reasons == ("sm must be at least 100, got None",)

    kernels = Kernels()
    with assume_target("sm100", kernels) as target:
        assert str(target) == "sm100"
        y = seq(x)
        assert kernels.launches == 1
        assert seq.plan.fired == ("scaled_twice",)
        assert str(seq.plan.target) == "sm100"
        y.sum().backward()
        assert kernels.launches == 2
    torch.testing.assert_close(y.detach(), expected)
    assert torch.equal(x.grad, torch.full_like(x, 6))

    seq(x)  # this machine again
    assert seq.plan.fired == ()
    assert kernels.launches == 2


def test_assume_target_without_kernels_plans_all_the_same(own_fusions):
    own_fusions.install((scaled_twice,))
    seq = fz.Sequential(fz.ConstantScale(2.0), fz.ConstantScale(3.0))
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    assert fz.explain(seq, x, target="sm100").fired == ("scaled_twice",)
    with assume_target("sm90"):
        torch.testing.assert_close(seq(x), 6 * x)
        assert [r.reasons for r in seq.plan.refusals] == [("sm must be at least 100, got 90",)]


def test_assumed_targets_nest_and_end(own_fusions):
    own_fusions.install((scaled_twice,))
    seq = fz.Sequential(fz.ConstantScale(2.0), fz.ConstantScale(3.0))
    x = torch.randn(2, dtype=torch.bfloat16)

    def target():
        seq(x)
        return str(seq.plan.target)

    def failing():
        with assume_target("sm100", Kernels()):
            assert target() == "sm100"
            raise KeyError

    with assume_target("cpu"):
        with pytest.raises(KeyError):
            failing()
        assert target() == "cpu"
    assert target() == "cpu"


@pytest.mark.parametrize("target", ["sm100", "sm103"])
def test_blackwell_gpus_share_their_kernels(target):
    """By default those of the cudnn package, imported when they are first asked for."""
    kernels = Kernels()
    with assume_target(target, kernels):
        assert provider() is kernels
    pytest.importorskip("cudnn")
    names = "grouped_gemm", "grouped_gemm_glu", "grouped_gemm_dglu", "grouped_gemm_quant"
    for name in (*names, "grouped_gemm_wgrad"):
        assert callable(getattr(provider(), f"{name}_wrapper_sm100"))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_fused_op_in_a_sequential_stands_for_its_basic_ops(compiled):
    """Whose parameters an optimizer finds, and a state dict by Transformer Engine's names."""
    parts = fz.BasicLinear(8, 8).double(), fz.SiLU()
    seq = fz.Sequential(LinearSiLUForward(*parts), fz.Bias(8, dtype=torch.float64))
    assert [*seq.state_dict()] == ["0.basic_ops.0.weight", "1.bias"]
    call = torch.compile(seq, backend="aot_eager", fullgraph=True) if compiled else seq
    x = torch.randn(5, 8, dtype=torch.float64)
    weight = parts[0].weight.detach().clone().requires_grad_()
    call(x).square().sum().backward()
    F.silu(F.linear(x, weight)).square().sum().backward()
    torch.testing.assert_close(parts[0].weight.grad, weight.grad, rtol=1e-12, atol=1e-12)
    torch.optim.SGD(seq.parameters(), 0.5).step()
    copied = copy.deepcopy(seq)
    expected = F.silu(F.linear(x, weight - 0.5 * weight.grad)) + seq[1].bias
    torch.testing.assert_close(copied(x), expected, rtol=1e-12, atol=1e-12)
