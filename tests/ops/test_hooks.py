"""Hooks of every kind on every op: they fire, the values stay, and extra tensors pass the op."""

import copy

import pytest
import reference as ref
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize, prune

import fusible as fz

TOKENS, HIDDEN, EXPERTS = 10, 8, 4
GROUPED = {"bias": False, "single_grouped_weight": True}


def moe():
    """A whole block, whose ops find each other's extra tensors by name."""
    return fz.Sequential(
        fz.TopKRouter(HIDDEN, EXPERTS, 2),
        fz.Dispatch(EXPERTS),
        fz.GroupedLinear(EXPERTS, HIDDEN, 2 * HIDDEN, **GROUPED),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(EXPERTS, HIDDEN, HIDDEN, **GROUPED),
        fz.Combine(),
    )


def dense():
    """Two residuals by channels, an extra output and an extra input of the caller's."""
    return fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "outer", output_to_caller=False),
        fz.RMSNorm(HIDDEN),
        fz.Linear(HIDDEN, 2 * HIDDEN),
        fz.MakeExtraOutput().set_extra_output_channel(0, "inner", output_to_caller=False),
        fz.GELU(),
        fz.MakeExtraOutput(),
        fz.AddExtraInput().set_extra_input_channel(0, "inner"),
        fz.AddExtraInput(),
        fz.Linear(2 * HIDDEN, HIDDEN),
        fz.AddExtraInput().set_extra_input_channel(0, "outer"),
    )


BUILD = {"moe": moe, "dense": dense}
PLACES = [(name, at) for name, build in BUILD.items() for at in range(len(build()))]


def inputs(name):
    torch.manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    if name == "moe":
        return (x,)
    return x, torch.randn(TOKENS, 2 * HIDDEN, requires_grad=True)


def results(module, given):
    """Outputs, and gradients of inputs and parameters.

    By ``.grad``: checkpoints that are reentrant know no ``autograd.grad``.
    """
    returned = module(*given)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    dys = [torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape) for y in outputs]
    torch.autograd.backward(outputs, dys)
    grads = ref.take_grads(*given, *module.parameters())
    return [*(y.detach() for y in outputs), *grads]


@pytest.fixture
def no_rules(own_fusions):
    """Ops run one by one: the same operations in the same order, whatever has hooks."""
    own_fusions.install(())


def forward(module, note):
    return module.register_forward_hook(lambda m, args, out: note(len(args), out))


def forward_with_kwargs(module, note):
    return module.register_forward_hook(
        lambda m, args, kwargs, out: note(len(args), out), with_kwargs=True
    )


def always_called(module, note):
    return module.register_forward_hook(lambda m, args, out: note(len(args), out), always_call=True)


def before_forward(module, note):
    return module.register_forward_pre_hook(lambda m, args: note(len(args), None))


def before_forward_with_kwargs(module, note):
    return module.register_forward_pre_hook(
        lambda m, args, kwargs: note(len(args), None), with_kwargs=True
    )


def backward(module, note):
    return module.register_full_backward_hook(lambda m, dx, dy: note(len(dx), None))


def before_backward(module, note):
    return module.register_full_backward_pre_hook(lambda m, dy: note(None, None))


KINDS = [
    forward,
    forward_with_kwargs,
    always_called,
    before_forward,
    before_forward_with_kwargs,
    backward,
    before_backward,
]


@pytest.mark.parametrize(("name", "at"), PLACES)
def test_every_kind_on_every_op(name, at, no_rules):
    module, given = BUILD[name](), inputs(name)
    want = results(module, given)
    number = module.num_extra_inputs, module.num_extra_outputs
    op = module[at]
    for hook in KINDS:
        seen = []
        handle = hook(op, lambda inputs, out, seen=seen: seen.append((inputs, out)))
        ref.assert_equal(results(module, given), want)
        assert (module.num_extra_inputs, module.num_extra_outputs) == number
        handle.remove()
        ((taken, out),) = seen
        if taken is not None:
            assert taken == 1 + op.num_extra_inputs
        if hook in (forward, forward_with_kwargs, always_called) and not op.is_fused_op:
            assert (len(out) if isinstance(out, tuple) else 1) == 1 + op.num_extra_outputs
    ref.assert_equal(results(module, given), want)
    assert len(seen) == 1


GLOBAL_KINDS = {
    torch_module.register_module_forward_hook: lambda seen: lambda m, args, out: seen.append(m),
    torch_module.register_module_forward_pre_hook: lambda seen: lambda m, args: seen.append(m),
    torch_module.register_module_full_backward_hook: lambda seen: lambda m, dx, dy: seen.append(m),
    torch_module.register_module_full_backward_pre_hook: lambda seen: lambda m, dy: seen.append(m),
}


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("register", GLOBAL_KINDS, ids=lambda f: f.__name__)
def test_hooks_of_all_modules(register, name, no_rules):
    module, given = BUILD[name](), inputs(name)
    want, seen = results(module, given), []
    handle = register(GLOBAL_KINDS[register](seen))
    try:
        ref.assert_equal(results(module, given), want)
    finally:
        handle.remove()
    assert {*seen} == {module, *module}
    assert len(seen) == 1 + len(module)
    ref.assert_equal(results(module, given), want)
    assert len(seen) == 1 + len(module)


@pytest.mark.parametrize("name", BUILD)
def test_hooks_on_all_ops(name, no_rules):
    module, given = BUILD[name](), inputs(name)
    want, seen = results(module, given), []
    for hook in KINDS:
        for op in module:
            hook(op, lambda *_: seen.append(1))
    ref.assert_equal(results(module, given), want)
    assert len(seen) == len(KINDS) * len(module)


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_nested_sequentials_with_hooks(name, size, no_rules):
    """Their ops' channels and names pass them, in both directions."""
    flat, given = BUILD[name](), inputs(name)
    want = results(flat, given)
    for start in range(len(flat) - size + 1):
        inner = flat[start : start + size]
        module = fz.Sequential(*flat[:start], fz.Sequential(inner), *flat[start + size :])
        seen = []
        hook = inner.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out))
        ref.assert_equal(results(module, given), want)
        assert len(seen) == 1
        assert module.num_extra_inputs == flat.num_extra_inputs
        hook.remove()
        module[start].register_full_backward_hook(lambda m, dx, dy, seen=seen: seen.append(dy))
        ref.assert_equal(results(module, given), want)
        assert len(seen) == 2


class Wrapped(nn.Module):
    """Passes attributes on, as wrappers of distributed training do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def checkpointed(module):
    return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


def checkpointed_reentrant(module):
    return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.REENTRANT)


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("wrap", [Wrapped, checkpointed, checkpointed_reentrant])
def test_wrapped_ops_and_sequentials(name, wrap, no_rules):
    flat, given = BUILD[name](), inputs(name)
    want = results(flat, given)
    for at, op in enumerate(flat):
        module = fz.Sequential(*flat[:at], wrap(op), *flat[at + 1 :])
        ref.assert_equal(results(module, given), want)
        module = fz.Sequential(*flat[:at], wrap(flat[at : at + 2]), *flat[at + 2 :])
        ref.assert_equal(results(module, given), want)


def test_ordinary_modules_between_what_is_wired(no_rules):
    flat, given = dense(), inputs("dense")
    want = results(flat, given)
    for at in range(len(flat) + 1):
        module = fz.Sequential(*flat[:at], nn.Identity(), *flat[at:])
        ref.assert_equal(results(module, given), want)
    block, given = moe(), inputs("moe")
    want = results(block, given)
    for at in range(len(block) + 1):
        ref.assert_equal(
            results(fz.Sequential(*block[:at], nn.Identity(), *block[at:]), given), want
        )


@pytest.mark.parametrize("nested", [False, True])
def test_sums_in_place_write_to_nothing_that_others_read(nested):
    """A tensor that the Sequential hands over is read by later ops, as inside of a run."""

    def build(in_place):
        linear = fz.Linear(HIDDEN, HIDDEN)
        ops = [
            fz.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
            linear,
            fz.AddExtraInput(in_place=in_place).set_extra_input_channel(0, "x"),
            fz.SiLU(),
            fz.AddExtraInput(in_place=in_place).set_extra_input_channel(0, "x"),
        ]
        return fz.Sequential(ops[0], fz.Sequential(*ops[1:3]), *ops[3:]) if nested else ops

    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    written, plain = (fz.Sequential(*build(in_place)) for in_place in (True, False))
    written.load_state_dict(plain.state_dict())
    want = results(plain, (x,))
    for at in range(len(written)):
        handle = written[at].register_forward_hook(lambda *_: None)
        torch.testing.assert_close(results(written, (x,)), want)
        handle.remove()


class AddInto(fz.BasicOperation):
    """A user's op that writes to its extra input where it may."""

    num_extra_inputs = 1
    writes_extra_inputs = True
    saves = "nothing"

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        addend = basic_op_extra_inputs[0][0]
        into = 0 in basic_op_ctxs[0].writable_extra
        return addend.detach().add_(input_) if into else addend + input_, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        return grad_output, [()], [(grad_output,)]


def test_own_ops_write_to_nothing_that_others_read():
    def build(add, *between):
        return fz.Sequential(
            fz.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
            *between,
            fz.ConstantScale(2.0),
            add.set_extra_input_channel(0, "x"),
            fz.AddExtraInput().set_extra_input_channel(0, "x"),
        )

    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    want = results(build(fz.AddExtraInput()), (x,))
    for between in ((), (nn.Identity(),)):
        torch.testing.assert_close(results(build(AddInto(), *between), (x,)), want)


def test_outputs_that_hooks_replace():
    block, (x,) = moe(), inputs("moe")
    router, dispatch, up, act, down, combine = block

    def by_hand(change_probs, change_rows):
        y, probs, ids = router(x)
        rows, sizes, scales, row_map = dispatch(y, change_probs(probs), ids)
        rows = down(act(change_rows(up(rows, sizes)), scales), sizes)
        return combine(rows, row_map)

    want = by_hand(lambda p: p / 2, lambda r: r + 1)
    router.register_forward_hook(lambda m, args, out: (out[0], out[1] / 2, out[2]))
    up.register_forward_hook(lambda m, args, out: out + 1)
    torch.testing.assert_close(block(x), want)


def test_inputs_that_hooks_replace():
    block, (x,) = moe(), inputs("moe")
    want = moe_with_scales(block, x, lambda s: 3 * s)
    block[3].register_forward_pre_hook(lambda m, args: (args[0], 3 * args[1]))
    torch.testing.assert_close(block(x), want)


def moe_with_scales(block, x, change):
    router, dispatch, up, act, down, combine = block
    rows, sizes, scales, row_map = dispatch(*router(x))
    return combine(down(act(up(rows, sizes), change(scales)), sizes), row_map)


def test_gradients_that_hooks_replace():
    block, (x,) = moe(), inputs("moe")
    want = results(block, (x,))
    block[5].register_full_backward_pre_hook(lambda m, dy: (2 * dy[0],))
    for got, once in zip(results(block, (x,))[1:], want[1:], strict=True):
        assert torch.equal(got, 2 * once)


def test_an_output_that_a_hook_leaves_out():
    block, (x,) = moe(), inputs("moe")
    block[1].register_forward_hook(lambda m, args, out: out[0])
    said = "call of Dispatch, which has a forward hook, must return its output and 3 extra outputs"
    with pytest.raises(TypeError, match=said):
        block(x)


def test_keyword_arguments_go_to_ops_with_hooks():
    x, out, dx = torch.randn(3, 8, requires_grad=True), torch.empty(3, 8), torch.empty(3, 8)
    ops = fz.BasicLinear(8, 8), fz.SiLU(), fz.BasicLinear(8, 8)
    seen = []

    def kwargs_of(m, args, kwargs):
        seen.append(sorted(kwargs))

    for module in (fz.Sequential(*ops), fz.Sequential(ops[0], fz.Sequential(*ops[1:]))):
        hooked = [ops[0], ops[2] if len(module) == 3 else module[1]]
        handles = [m.register_forward_pre_hook(kwargs_of, with_kwargs=True) for m in hooked]
        y = module(x, op_kwargs={0: {"grad_input": dx}, ops[2]: {"output": out}})
        assert y.data_ptr() == out.data_ptr()
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert grad.data_ptr() == dx.data_ptr()
        for handle in handles:
            handle.remove()
    assert seen == [["grad_input"], ["output"], ["grad_input"], ["op_kwargs"]]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("hook", KINDS)
def test_every_kind_on_a_part_of_a_linear(hook, at, no_rules):
    linear, given = fz.Linear(HIDDEN, HIDDEN), inputs("moe")
    for module in (linear, fz.Sequential(fz.GELU(), linear), nn.Sequential(linear)):
        want, seen = results(module, given), []
        handle = hook(linear.basic_ops[at], lambda inputs, out, seen=seen: seen.append(inputs))
        ref.assert_equal(results(module, given), want)
        handle.remove()
        assert len(seen) == 1
        ref.assert_equal(results(module, given), want)
        assert len(seen) == 1


def test_what_a_part_of_a_linear_does_when_called():
    linear, (x,) = fz.Linear(HIDDEN, HIDDEN), inputs("moe")
    module = fz.Sequential(fz.GELU(), linear)
    product = nn.functional.gelu(x, approximate="tanh") @ linear.weight.t()
    torch.testing.assert_close(module(x), product + linear.bias)
    first, second = linear.basic_ops
    handle = first.register_forward_hook(lambda m, args, out: 2 * out)
    torch.testing.assert_close(module(x), 2 * product + linear.bias)
    assert "BasicLinear at Sequential.1 has a forward hook" in str(fz.explain(module, x))
    linear(x)
    assert len(linear.plan.basic_ops) == 2
    handle.remove()
    old = second.forward
    second.forward = lambda x: -old(x)
    torch.testing.assert_close(module(x), -(product + linear.bias))
    for _ in range(3):
        torch.testing.assert_close(linear(x), -(x @ linear.weight.t() + linear.bias))
    del second.forward
    torch.testing.assert_close(module(x), product + linear.bias)
    first.register_forward_hook(lambda m, args, out: None)
    with pytest.raises(ValueError, match="keyword arguments must be for one basic op"):
        linear(x, output=x)


def test_a_compiled_part_of_a_linear_is_called_every_time():
    linear, (x,), calls = fz.Linear(HIDDEN, HIDDEN), inputs("moe"), []
    want = linear(x)

    def backend(graph, example):
        return lambda *args: calls.append(args) or graph(*args)

    linear.basic_ops[1].compile(backend=backend)
    for n in range(3):
        with torch.no_grad():
            torch.testing.assert_close(linear(x), want)
        assert len(calls) == 1 + n


def test_the_plan_of_a_linear_is_of_its_last_call():
    linear, (x,) = fz.Linear(HIDDEN, HIDDEN), inputs("moe")
    second = linear.basic_ops[1]
    linear(x)
    second.forward = lambda x: 0 * x
    alone = linear._run.plan
    assert linear.plan is alone
    torch.testing.assert_close(linear(x), torch.zeros_like(x))
    assert linear.plan is linear.basic_ops[0].plan
    del second.forward
    assert linear.plan is linear.basic_ops[0].plan
    linear(x)
    assert linear.plan is alone
    handle = second.register_forward_hook(lambda m, args, out: None)
    assert linear.plan is alone
    linear(x)
    handle.remove()
    assert linear.plan is not alone
    linear(x)
    assert linear.plan is alone


def test_the_plan_of_a_compiled_linear_is_of_its_last_call():
    linear, (x,) = fz.Linear(HIDDEN, HIDDEN), inputs("moe")
    linear.basic_ops[0].register_forward_hook(lambda m, args, out: 2 * out)
    want = 2 * (x @ linear.weight.t()) + linear.bias
    compiled = torch.compile(linear, fullgraph=True, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), want)
        assert linear.plan is not linear._run.plan


def test_threads_that_call_a_linear_first():
    """A thread that has counted the patches has read the hooks too."""
    (x,) = inputs("moe")

    class Interrupted(fz.Linear):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name in ("_patches", "_unpatched"):
                torch.testing.assert_close(self(x), x @ self.weight.t() + self.bias)  # a thread's
                interrupted.append(name)

    interrupted = []
    linear = Interrupted(HIDDEN, HIDDEN)
    assert linear.state_dict().keys() == {"weight", "bias"}
    torch.testing.assert_close(linear(x), x @ linear.weight.t() + linear.bias)
    assert interrupted


@pytest.mark.parametrize("surgery", ["prune", "parametrize"])
def test_a_part_of_a_linear_is_pruned_or_parametrized(surgery):
    linear, (x,) = fz.Linear(HIDDEN, HIDDEN), inputs("moe")
    ordinary = nn.Linear(HIDDEN, HIDDEN)
    ordinary.load_state_dict(linear.state_dict())
    linear(x)
    mask = torch.arange(HIDDEN * HIDDEN).view(HIDDEN, HIDDEN) % 3 > 0
    for of in (linear.basic_ops[0], ordinary):
        if surgery == "prune":
            prune.custom_from_mask(of, "weight", mask)
        else:
            parametrize.register_parametrization(of, "weight", nn.Tanh())
    assert linear.state_dict().keys() == ordinary.state_dict().keys()
    for module in (linear, fz.Sequential(fz.Identity(), linear)):
        got, want = results(module, (x,)), results(ordinary, (x,))
        torch.testing.assert_close(got[:2], want[:2])
        grads = [
            dict(zip([n for n, _ in of.named_parameters()], of_all[2:], strict=True))
            for of, of_all in ((linear, got), (ordinary, want))
        ]
        torch.testing.assert_close(*grads)
    if surgery == "parametrize":
        torch.testing.assert_close(copy.deepcopy(linear)(x), ordinary(x))


def test_hooks_of_a_nested_sequential_after_its_first_call(no_rules):
    ops = list(moe())
    inner = fz.Sequential(*ops[2:5])
    module, given = fz.Sequential(*ops[:2], inner, ops[5]), inputs("moe")
    want = results(module, given)
    for hook in KINDS:
        seen = []
        handle = hook(inner, lambda inputs, out, seen=seen: seen.append(inputs))
        ref.assert_equal(results(module, given), want)
        handle.remove()
        ref.assert_equal(results(module, given), want)
        assert len(seen) == 1


def test_a_hook_that_is_always_called():
    """Also when the op raises, and when another hook does, as on an ordinary module."""
    module, seen = fz.Sequential(fz.Linear(8, 8), fz.SwiGLU(), fz.Linear(4, 8)), []
    module(torch.randn(3, 8))
    module[2].register_forward_hook(lambda m, args, out: seen.append(out), always_call=True)
    cut = module[1].register_forward_hook(lambda m, args, out: out[..., :3])
    with pytest.raises(ValueError, match="must have 4 features"):
        module(torch.randn(3, 8))
    assert seen == [None]
    cut.remove()

    def fail(m, args):
        raise ArithmeticError("of a hook")

    failing = module[2].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="of a hook"):
        module(torch.randn(3, 8))
    assert seen == [None, None]
    failing.remove()
    y = module(torch.randn(3, 8))
    assert torch.equal(seen[2], y)


def test_the_mode_of_one_op_with_and_without_hooks():
    drop = fz.Dropout(1.0)
    fork = fz.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False)
    module = fz.Sequential(fork, drop, fz.AddExtraInput().set_extra_input_channel(0, "x"))
    x = torch.randn(3, 8)
    for _ in range(2):
        assert torch.equal(module(x), x)
        drop.eval()
        assert torch.equal(module(x), 2 * x)
        module.train()
        assert torch.equal(module(x), x)
        module.eval()
        assert torch.equal(module(x), 2 * x)
        module.train()
        drop.register_forward_hook(lambda m, args, out: None)


def test_plans_outlive_a_hook():
    module, (x,) = moe(), inputs("moe")
    module(x)
    plan = module.plan
    for _ in range(20):
        handle = module[2].register_forward_hook(lambda *_: None)
        module(x)
        assert module.plan is not plan
        handle.remove()
        assert module.plan is plan


@pytest.mark.parametrize("wrap", [checkpointed, checkpointed_reentrant])
def test_a_hook_between_a_checkpointed_forward_and_its_backward(wrap):
    """The forward runs again under its recipe, which its run has recorded."""
    torch.manual_seed(0)
    module = fz.Sequential(fz.Linear(64, 64), fz.GELU(), fz.Linear(64, 64))
    grads = []
    for hooked in (False, True):
        x = torch.linspace(-2, 2, 32 * 64).view(32, 64).requires_grad_()
        with fz.autocast(recipe=fz.recipes.MXFP8BlockScaling()):
            y = wrap(module)(x)
            if hooked:
                handle = module[1].register_forward_hook(lambda *_: None)
                module(x)
                handle.remove()
        module.zero_grad()
        y.sum().backward()
        grads.append([p.grad for p in module.parameters()])
    for with_hook, without in zip(*grads, strict=True):
        assert torch.equal(with_hook, without)


def test_a_hook_removed_while_it_runs():
    module, (x,) = moe(), inputs("moe")
    want, seen = module(x), []

    def once(m, args, out):
        seen.append(1)
        handle.remove()

    handle = module[3].register_forward_hook(once)
    for _ in range(2):
        torch.testing.assert_close(module(x), want)
    assert seen == [1]


def test_a_forward_that_is_replaced():
    """As libraries that move weights in and out of the GPU do."""
    module, (x,) = dense()[1:3], inputs("moe")
    want = module(x)
    linear = module[1]
    old = linear.forward
    linear.forward = lambda *args, **kwargs: 2 * old(*args, **kwargs)
    torch.testing.assert_close(module(x), 2 * want)
    del linear.forward
    torch.testing.assert_close(module(x), want)

    class Negated(fz.GELU):
        def forward(self, x):
            return -super().forward(x)

    ops = fz.Linear(8, 8), Negated()
    torch.testing.assert_close(fz.Sequential(*ops)(x), ops[1](ops[0](x)))


@pytest.mark.parametrize("called", ["alone", "in a Sequential"])
def test_a_subclass_with_its_own_forward_and_parameters(called):
    class Lora(fz.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.down, self.up = torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(2, 8)

        def forward(self, x):
            return super().forward(x) + self.up(self.down(x))

    lora, x = Lora(), torch.randn(5, 8, requires_grad=True)
    module = lora if called == "alone" else fz.Sequential(lora, fz.GELU())
    got = module(x)
    linear = torch.nn.functional.linear
    want = linear(x, lora.weight, lora.bias) + lora.up(lora.down(x))
    want = want if called == "alone" else torch.nn.functional.gelu(want, approximate="tanh")
    torch.testing.assert_close(got, want)
    leaves = x, *lora.parameters()
    assert len(leaves) == 6
    of = torch.randn(5, 8)
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves, of), torch.autograd.grad(want, leaves, of)
    )


def test_a_subclass_with_its_own_forward_and_bias():
    class Biased(fz.Linear):
        def __init__(self):
            super().__init__(8, 8, bias=False)
            self.bias = torch.nn.Parameter(torch.randn(8))

        def forward(self, x):
            return super().forward(x) + self.bias

    linear, x = Biased(), torch.randn(5, 8)
    got = linear(x)
    torch.testing.assert_close(got, torch.nn.functional.linear(x, linear.weight, linear.bias))
    (dbias,) = torch.autograd.grad(got.sum(), linear.bias)
    assert torch.equal(dbias, torch.full((8,), 5.0))


def test_what_an_op_of_a_user_reads_needs_a_gradient():
    """Its forward is called, but not its operation differentiated by autograd."""

    class Gained(fz.BasicLinear):
        def __init__(self):
            super().__init__(8, 8)
            self.gain = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            return super().forward(x)

        def forward_impl(self, ctx, x, *extra):
            return self.gain * super().forward_impl(ctx, x, *extra)

    with pytest.raises(TypeError, match="must return the gradients of all its parameters"):
        Gained()(torch.randn(5, 8))


@pytest.mark.usefixtures("fresh_compiler")
class TestCompiled:
    @pytest.mark.parametrize("which", ["linear", "activation", "nested"])
    def test_a_forward_that_is_replaced_after_compiling(self, which):
        nested = fz.Sequential(fz.GELU())
        module, x = fz.Sequential(fz.Linear(8, 8), fz.ReLU(), nested), torch.randn(5, 8)
        compiled = torch.compile(module, backend="eager")
        compiled(x)
        op = {"linear": module[0], "activation": module[1], "nested": nested[0]}[which]
        op.forward = lambda x: 7 * x
        got = compiled(x)
        torch.testing.assert_close(got, module(x))

    def test_forward_hooks_on_parts_of_a_linear(self):
        linear, (x,) = fz.Linear(HIDDEN, HIDDEN), inputs("moe")
        for part in linear.basic_ops:
            part.register_forward_hook(lambda m, args, out: 2 * out)
        for module in (linear, fz.Sequential(linear, fz.GELU())):
            torch._dynamo.reset()
            compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(results(compiled, (x,)), results(module, (x,)))

    @pytest.mark.parametrize("name", BUILD)
    def test_forward_hooks(self, name):
        module, given = BUILD[name](), inputs(name)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        for at in (1, 2, 3):
            torch._dynamo.reset()  # torch does not guard hooks
            handles = [
                module[at].register_forward_hook(lambda m, args, out: None),
                module[at].register_forward_pre_hook(lambda m, args: (2 * args[0], *args[1:])),
            ]
            torch.testing.assert_close(results(compiled, given), results(module, given))
            for handle in handles:
                handle.remove()
        torch._dynamo.reset()
        torch.testing.assert_close(results(compiled, given), results(module, given))

    @pytest.mark.parametrize("name", BUILD)
    def test_hooks_that_come_and_go(self, name):
        module, given = BUILD[name](), inputs(name)
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
            for _ in range(2):
                torch.testing.assert_close(results(compiled, given), results(module, given))
                handle = module[2].register_forward_pre_hook(
                    lambda m, args: (2 * args[0], *args[1:])
                )
                torch.testing.assert_close(results(compiled, given), results(module, given))
                handle.remove()

    def test_nested_sequentials_with_hooks(self):
        flat, (x,) = moe(), inputs("moe")
        inner = flat[1:4]
        module = fz.Sequential(flat[0], inner, *flat[4:])
        inner.register_forward_hook(lambda m, args, out: (out[0] + 1, *out[1:]))
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(results(compiled, (x,)), results(module, (x,)))

    def test_checkpoints_inside(self):
        flat, (x,) = moe(), inputs("moe")
        module = fz.Sequential(flat[0], checkpointed(flat[1:4]), *flat[4:])
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(results(compiled, (x,)), results(module, (x,)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", BUILD)
def test_fully_sharded_op_by_op(name, nested, mesh, no_rules):
    plain, given = BUILD[name](), inputs(name)
    module = copy.deepcopy(plain)
    if nested:
        module = fz.Sequential(*module[:2], fz.Sequential(*module[2:5]), *module[5:])
    for op in [m for m in module.modules() if isinstance(m, fz.ops.FusibleOperation)]:
        if next(op.parameters(), None) is not None:
            fully_shard(op, mesh=mesh)
    if nested:
        fully_shard(module[2], mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, module)]
    for _ in range(3):
        outs = []
        for m, optimizer in zip((plain, module), optimizers, strict=True):
            out = m(*given)
            y = out[0] if isinstance(out, tuple) else out
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            outs.append(y.detach())
        ref.assert_equal(*[[out] for out in outs])
    full = [p.full_tensor() for p in module.parameters()]
    ref.assert_equal(full, plain.parameters())
