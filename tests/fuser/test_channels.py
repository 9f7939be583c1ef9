"""Extra tensors wired inside a run by name."""

import copy

import pytest
import reference as ref
import torch

import fusible as fz


def fork(channel="branch", **options):
    return fz.MakeExtraOutput().set_extra_output_channel(0, channel, **options)


def join(channel="branch"):
    return fz.AddExtraInput().set_extra_input_channel(0, channel)


class Router(fz.BasicOperation):
    """Two extra outputs of different kinds: ``cos(x)`` and how many rows there are."""

    num_extra_outputs = 2

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        (ctx,) = basic_op_ctxs
        ctx.save_for_backward(input_)
        return input_.sin(), [(input_.cos(), torch.tensor([input_.shape[0]]))]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (x,) = basic_op_ctxs[0].saved_tensors
        dcos, _ = basic_op_grad_extra_outputs[0]
        dx = grad_output * x.cos()
        return dx if dcos is None else dx - dcos * x.sin(), [()], [()]


def test_residual_block():
    """A residual block: x + f(x), as one run of ops without any extra input."""
    block = fz.Sequential(
        fork(output_to_caller=False), fz.Linear(8, 8), fz.SiLU(), fz.BasicLinear(8, 8), join()
    ).double()
    assert block.num_extra_inputs == 0
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(5, 8, dtype=torch.float64)

    def plain(x, w1, b1, w2):
        h = x @ w1.T + b1
        return x + (h * ref.sigmoid(h)) @ w2.T

    tensors = [x, *block.parameters()]
    y = block(x)
    exact_y, exact = ref.gradients(plain, tensors, dy)
    torch.testing.assert_close(y.detach(), exact_y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(y, tensors, dy), tuple(exact), rtol=1e-11, atol=1e-12
    )


@pytest.mark.parametrize("to_caller", [False, True])
def test_fan_out_sums_gradients(to_caller):
    seq = fz.Sequential(fork(output_to_caller=to_caller), fz.SiLU(), join(), fz.SiLU(), join())
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def plain(x):
        h = x * ref.sigmoid(x) + x
        return h * ref.sigmoid(h) + x

    out = seq(x)
    assert isinstance(out, tuple) == to_caller
    y = out[0] if to_caller else out
    dy, dbranch = torch.randn(2, 4, 3, dtype=torch.float64)
    exact_y, (exact,) = ref.gradients(plain, [x], dy)
    torch.testing.assert_close(y.detach(), exact_y, rtol=1e-12, atol=1e-13)
    if to_caller:
        assert torch.equal(out[1], x)
        exact = exact + dbranch
    (dx,) = torch.autograd.grad(out, x, (dy, dbranch) if to_caller else dy)
    torch.testing.assert_close(dx, exact, rtol=1e-12, atol=1e-13)


def test_order_of_extra_outputs_and_inputs():
    seq = fz.Sequential(
        fz.MakeExtraOutput(),
        fz.AddExtraInput(),
        fork("hidden", output_to_caller=False),
        fz.ConstantScale(2.0),
        fork("shown"),
        fz.AddExtraInput(),
        join("hidden"),
        join("shown"),
        fz.MakeExtraOutput(),
    )
    assert seq.num_extra_inputs == 2
    x, a, b = torch.randn(3, 2, 2)
    y, first, shown, last = seq(x, a, b)
    torch.testing.assert_close(first, x)
    torch.testing.assert_close(shown, 2 * (x + a))
    torch.testing.assert_close(y, 2 * (x + a) + b + (x + a) + 2 * (x + a))
    torch.testing.assert_close(last, y)


@pytest.mark.parametrize("grad", [False, True])
def test_one_of_two_outputs_is_an_integer(grad):
    """Integer outputs carry no gradient, and do not disturb those that do."""
    op = Router()
    op.set_extra_output_channel(0, "cos", output_to_caller=False)
    seq = fz.Sequential(op, fz.SiLU(), fz.AddExtraInput().set_extra_input_channel(0, "cos"))
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=grad)
    y, rows = seq(x)
    assert rows.tolist() == [4]
    assert not rows.requires_grad

    def plain(x):
        return torch.sin(x) * ref.sigmoid(torch.sin(x)) + torch.cos(x)

    dy = torch.randn(4, 3, dtype=torch.float64)
    exact_y, (exact,) = ref.gradients(plain, [x], dy)
    torch.testing.assert_close(y.detach(), exact_y, rtol=1e-12, atol=1e-13)
    if grad:
        torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], exact, rtol=1e-12, atol=1e-13)


class Route(fz.BasicOperation):
    """As a router: gives split sizes and scales for the rows it passes on."""

    num_extra_outputs = 2

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        basic_op_ctxs[0].save_for_backward(input_)
        splits = torch.tensor([input_.shape[0] - 1, 0, 1])
        return input_, [(splits, torch.sigmoid(input_.sum(-1)))]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (x,) = basic_op_ctxs[0].saved_tensors
        probs = torch.sigmoid(x.sum(-1))
        dprobs = basic_op_grad_extra_outputs[0][1]
        return grad_output + (dprobs * probs * (1 - probs))[:, None], [()], [()]


def test_router_feeds_the_grouped_mlp():
    route = Route()
    route.set_extra_output_channel(0, "splits", output_to_caller=False)
    route.set_extra_output_channel(1, "probs", output_to_caller=False)
    options = {"bias": False, "single_grouped_weight": True, "dtype": torch.float64}
    moe = fz.Sequential(
        route,
        fz.GroupedLinear(3, 4, 12, **options).set_extra_input_channel(0, "splits"),
        fz.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        fz.GroupedLinear(3, 6, 4, **options).set_extra_input_channel(0, "splits"),
    )
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)

    def plain(x, w1, w2):
        probs = ref.sigmoid(x.sum(-1))
        h = ref.swiglu(ref.grouped_linear(x, w1, [5, 0, 1]), probs)
        return ref.grouped_linear(h, w2, [5, 0, 1])

    tensors = [x, moe[1].weight, moe[3].weight]
    dy = torch.randn(6, 4, dtype=torch.float64)
    exact_y, exact = ref.gradients(plain, tensors, dy)
    y = moe(x)
    torch.testing.assert_close(y.detach(), exact_y, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(
        torch.autograd.grad(y, tensors, dy), tuple(exact), rtol=1e-11, atol=1e-12
    )


# --- errors -----------------------------------------------------------------------------------


def test_unknown_channel():
    seq = fz.Sequential(fork("there"), join("missing"))
    with pytest.raises(ValueError, match=r"'missing' of op 1 .*produced by an earlier .*'there'"):
        seq(torch.randn(2, 2))


def test_producer_after_its_consumer():
    seq = fz.Sequential(join("late"), fork("late"))
    with pytest.raises(ValueError, match=r"'late' of op 0 .*earlier, got op 1 .*move the producer"):
        seq(torch.randn(2, 2))


def test_two_producers():
    seq = fz.Sequential(fork("same"), fork("same"), join("same"))
    with pytest.raises(ValueError, match=r"'same' must have one producer, got .*0 .*1 .*rename"):
        seq(torch.randn(2, 2))


@pytest.mark.parametrize("name", ["", 3, b"x", ("a",)])
def test_bad_names(name):
    message = "channel must be a non-empty string or None, got"
    with pytest.raises(ValueError, match=message):
        fz.AddExtraInput().set_extra_input_channel(0, name)
    with pytest.raises(ValueError, match=message):
        fz.MakeExtraOutput().set_extra_output_channel(0, name)


@pytest.mark.parametrize("index", [-1, 1, 7])
def test_bad_slots(index):
    message = f"must be at least 0 and under 1 for .*, got {index}"
    with pytest.raises(IndexError, match=message):
        fz.AddExtraInput().set_extra_input_channel(index, "a")
    with pytest.raises(IndexError, match=message):
        fz.MakeExtraOutput().set_extra_output_channel(index, "a")
    with pytest.raises(IndexError, match="under 0"):
        fz.SiLU().set_extra_input_channel(0, "a")


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_output_to_caller_is_a_bool(value):
    with pytest.raises(TypeError, match=r"output_to_caller .*must be a bool, got"):
        fork(output_to_caller=value)


def test_bindings_are_frozen_once_captured():
    forked, joined = fork(), join()
    seq = fz.Sequential(forked, joined)
    joined.set_extra_input_channel(0, "other")
    joined.set_extra_input_channel(0, "branch")  # still free
    x = torch.randn(2, 2)
    seq(x)
    for rebind in (
        lambda: joined.set_extra_input_channel(0, None),
        lambda: forked.set_extra_output_channel(0, "other"),
    ):
        with pytest.raises(RuntimeError, match=r"must be bound before .* build a new Sequential"):
            rebind()
    torch.testing.assert_close(seq(x)[0], 2 * x)


def test_a_copy_is_free_again():
    seq = fz.Sequential(fork(), fz.SiLU(), join())
    x = torch.randn(2, 2)
    seq(x)
    other = copy.deepcopy(seq)
    other[0].set_extra_output_channel(0, "branch", output_to_caller=False)
    torch.testing.assert_close(other(x), seq(x)[0])


def test_none_gives_a_channel_back_to_the_caller():
    forked, joined = fork(output_to_caller=False), join()
    forked.set_extra_output_channel(0, None)
    joined.set_extra_input_channel(0, None)
    seq = fz.Sequential(forked, joined)
    x, a = torch.randn(2, 2, 2)
    y, extra = seq(x, a)
    torch.testing.assert_close(y, x + a)
    torch.testing.assert_close(extra, x)


class Forgets(fz.FusedOperation):
    """Gives None where an extra output is asked for."""

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return input_, [(None,) * op.num_extra_outputs for op in self.basic_ops]


@pytest.mark.parametrize("needed_by", ["caller", "a later op"])
def test_fused_op_without_a_needed_output(own_fusions, needed_by):
    fz.register_forward_fusion(lambda ops, *, recipe: [Forgets(ops[:2]), *ops[2:]])
    ops = [fork(output_to_caller=needed_by == "caller"), fz.SiLU()]
    if needed_by != "caller":
        ops.append(join())
    seq = fz.Sequential(*ops)
    message = r"Forgets must return extra output 0 of op 0 \(MakeExtraOutput\).* got None"
    with pytest.raises(RuntimeError, match=message):
        seq(torch.randn(2, 2))


def test_fused_op_without_an_output_that_only_it_uses(own_fusions):
    """Gives x + x, of which the fused op keeps the branch to itself."""

    class Doubles(fz.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
            assert [list(of_op) for of_op in basic_op_extra_inputs] == [[], [None]]
            return 2 * input_, [(None,), ()]

    fz.register_forward_fusion(lambda ops, *, recipe: [Doubles(ops[:2]), *ops[2:]])
    seq = fz.Sequential(fork(output_to_caller=False), join(), fz.ConstantScale(3.0))
    x = torch.randn(2, 2, requires_grad=True)
    y = seq(x)
    torch.testing.assert_close(y, 6 * x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 2), 6.0))


# --- extra inputs by name ------------------------------------------------------------------------


def experts_and_inputs():
    options = {"bias": False, "single_grouped_weight": True}
    experts = fz.Sequential(
        fz.GroupedLinear(4, 8, 16, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(4, 8, 8, **options),
    )
    return experts, torch.randn(10, 8), torch.tensor([3, 0, 5, 2]), torch.rand(10)


def test_extra_inputs_by_name():
    experts, x, sizes, scales = experts_and_inputs()
    want = experts(x, sizes, scales, sizes)
    assert torch.equal(experts(x, split_sizes=sizes, scales=scales), want)
    assert torch.equal(experts(x, scales=scales, split_sizes=sizes.tolist()), want)
    handle = experts[1].register_forward_hook(lambda *_: None)
    assert torch.equal(experts(x, split_sizes=sizes, scales=scales), want)
    handle.remove()
    up, act, down = experts
    y = down(act(up(x, split_sizes=sizes), scales=scales), split_sizes=sizes)
    assert torch.equal(y, want)
    out = torch.empty(10, 8)
    assert (
        down(act(up(x, sizes), scales), split_sizes=sizes, output=out).data_ptr() == out.data_ptr()
    )
    assert torch.equal(out, want)
    rest = fz.Sequential(act, down)
    assert torch.equal(rest(up(x, sizes), scales, split_sizes=sizes), want)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            lambda s, p: ((s,), {"split_sizes": s, "scales": p}),
            "'split_sizes' .* given once, got it",
        ),
        (lambda s, p: ((), {"split_sizes": s}), "must be all of .* 'scales' is missing"),
        (
            lambda s, p: ((s,), {"scales": p}),
            r"got 1 by position and \['scales'\] by name; 'split_",
        ),
        (
            lambda s, p: ((), {"split_size": s, "scales": p}),
            "'split_size'; did you mean 'split_sizes'",
        ),
        (
            lambda s, p: ((s, p, s), {"bias": s}),
            r"among its extra inputs \['split_sizes', 'scales'\]",
        ),
    ],
)
def test_names_that_do_not_fit(given, said):
    experts, x, sizes, scales = experts_and_inputs()
    args, kwargs = given(sizes, scales)
    with pytest.raises(ValueError, match=said):
        experts(x, *args, **kwargs)


def test_names_for_an_op_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"among \['output', 'grad_input', 'split_sizes'\].* did you"
    ):
        fz.GroupedLinear(2, 8, 8)(torch.randn(3, 8), split_size=[1, 2])
    with pytest.raises(ValueError, match="must be given once"):
        fz.GroupedLinear(2, 8, 8)(torch.randn(3, 8), [1, 2], split_sizes=[1, 2])


@pytest.mark.usefixtures("fresh_compiler")
def test_extra_inputs_by_name_compiled():
    experts, x, sizes, scales = experts_and_inputs()
    want = experts(x, sizes, scales, sizes)
    for module, args in ((experts, {"scales": scales}), (experts[0], {})):
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        got = compiled(x, split_sizes=sizes, **args)
        torch.testing.assert_close(got, want if module is experts else module(x, sizes))
