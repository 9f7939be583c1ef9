"""torch.compile(fullgraph=True) of every op and of the grouped MLP, and what makes it recompile."""

import copy
from functools import partial

import pytest
import reference as ref
import torch
from every_op import MAKE, extra_inputs
from every_op import OPS as EVERY_OP
from torch._dynamo.testing import CompileCounterWithBackend

import fusible as fz
from fusible.testing import assume_target

pytestmark = pytest.mark.usefixtures("fresh_compiler")

SIZES = [3, 0, 4, 1]
OPS = {
    **{name: partial(make, 8) for name, make in MAKE.items() if "in place" not in name},
    "norms": lambda: fz.Sequential(
        fz.LayerNorm(8), fz.RMSNorm(8, zero_centered_gamma=True), fz.L2Normalization()
    ),
    "fused": lambda: fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
        fz.Linear(8, 16),
        fz.SiLU(),
        fz.BasicLinear(16, 8),
        fz.AddExtraInput().set_extra_input_channel(0, "r"),
    ),
    "split by ordinary modules": lambda: fz.Sequential(
        fz.Linear(8, 8), torch.nn.LayerNorm(8), fz.Sequential(fz.GELU(), fz.Bias(8))
    ),
}


def results(call, module, inputs):
    """Outputs and gradients."""
    out = call(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    outs = [o for o in outs if o.is_floating_point()]
    tensors = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    dys = [torch.cos(torch.arange(o.numel(), dtype=o.dtype)).view(o.shape) for o in outs]
    return [*(o.detach() for o in outs), *torch.autograd.grad(outs, tensors, dys)]


def check(compiled, module, inputs, **tolerances):
    torch.testing.assert_close(
        results(compiled, module, inputs), results(module, module, inputs), **tolerances
    )


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        *[pytest.param(name, False, id=f"{name}-static") for name in OPS],
        # Options ("name, option") concern columns, not numbers of rows.
        *[pytest.param(name, True, id=f"{name}-dynamic") for name in OPS if "," not in name],
    ],
)
def test_every_op(name, dynamic):
    op = OPS[name]()
    with torch.no_grad():
        for p in op.parameters():
            p.copy_(torch.randn(p.shape))
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (10, 12) if dynamic else (10,):
        x = torch.randn(rows, 8, requires_grad=True)
        check(compiled, op, (x, *extra_inputs(op, x)))
    inputs = (x, *extra_inputs(op, x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), op(*inputs))


class Reverses(fz.BasicOperation):
    """Its output is its input; its gradient is not that of its output."""

    def op_forward(self, ctx, input_, **_):
        return input_

    def op_backward(self, ctx, grad_output):
        return -grad_output, ()


class Halves(fz.BasicOperation):
    """Two views of one tensor."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        left, right = (2 * input_).chunk(2, -1)
        return left, [(right,)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        right = basic_op_grad_extra_outputs[0][0]
        return torch.cat([2 * grad_output, 2 * right], -1), [()], [()]


class Casts(fz.BasicOperation):
    def op_forward(self, ctx, input_, **_):
        y = 2 * input_
        return y.to(y.dtype)

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output, ()


class OutputsAndViews(torch.nn.Module):
    """What a run is given and returns, and views of them all."""

    def __init__(self, earlier, run):
        super().__init__()
        self.earlier, self.run = earlier, fz.Sequential(run)

    def forward(self, x):
        x = self.earlier(x)
        outs = self.run(x)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return x.view(-1), x, *outs, *[t.reshape(-1) for t in outs]


@pytest.mark.parametrize("earlier", [torch.nn.Identity, torch.nn.Tanh, fz.ReLU, Reverses])
@pytest.mark.parametrize(
    "make",
    [
        *(fz.Identity, fz.MakeExtraOutput, fz.GELU, Reverses, Halves, Casts),
        lambda: fz.Sequential(fz.GELU(), fz.MakeExtraOutput(), Reverses()),
    ],
)
def test_outputs_with_views_of_them(make, earlier):
    block, x = OutputsAndViews(earlier(), make()), torch.randn(10, 8, requires_grad=True)
    check(torch.compile(block, backend="aot_eager", fullgraph=True), block, (x,))


def test_inductor_returns_no_tensor_twice():
    """It would take the gradients of both for those of the last."""
    run = fz.Sequential(Reverses(), fz.MakeExtraOutput(), Reverses())
    block, x = OutputsAndViews(torch.nn.Tanh(), run), torch.randn(10, 8, requires_grad=True)
    check(torch.compile(block, fullgraph=True), block, (x,))


DYNAMIC = {
    "activation, linear": lambda: fz.Sequential(fz.GELU(), fz.Linear(8, 6)),
    "sum, linear": lambda: fz.Sequential(fz.AddExtraInput(), fz.Linear(8, 6)),
    "an op of a user": lambda: fz.Sequential(fz.GELU(), Eight()),
}


class Eight(fz.BasicOperation):
    def op_forward(self, ctx, input_, **_):
        assert input_.shape[-1] == 8
        return 2 * input_

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output, ()


@pytest.mark.parametrize("name", DYNAMIC)
def test_sizes_that_a_forward_makes_constants(name):
    module = DYNAMIC[name]()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (10, 12):
        inputs = [
            torch.randn(rows, 8, requires_grad=True) for _ in range(1 + module.num_extra_inputs)
        ]
        check(compiled, module, inputs)


@pytest.mark.parametrize("target", ["sm90", "cpu"])
def test_experts_with_dynamic_sizes(target):
    options = {"dtype": torch.bfloat16, "single_grouped_weight": True}
    experts = fz.Sequential(
        fz.Dispatch(4),
        fz.GroupedLinear(4, 64, 128, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(4, 64, 64, **options),
        fz.Combine(),
    )
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True, dynamic=True)
    with assume_target(target):
        for rows in (10, 12):
            x = torch.randn(rows, 64).bfloat16().requires_grad_()
            scores, ids = (
                torch.rand(rows, 2).requires_grad_(),
                torch.arange(2 * rows).view(-1, 2) % 5,
            )
            check(compiled, experts, (x, scores, ids - 1))
        assert experts.plan.fired == (("moe_experts_sm90",) if target == "sm90" else ())


@pytest.mark.parametrize("name", ["fused", "split by ordinary modules"])
def test_rows_of_three_dimensions(name):
    op = OPS[name]()
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, length in ((4, 5), (3, 7)):
        check(compiled, op, (torch.randn(batch, length, 8, requires_grad=True),))


@pytest.mark.parametrize("name", [*EVERY_OP, "GroupedLinear"])
def test_two_runs_in_one_dynamic_graph(name):
    """Python numbers that are a function's defaults must not become inputs of the second one."""
    ops, x = (MAKE[name](8), MAKE[name](8)), torch.randn(6, 8)
    extra = extra_inputs(ops[0], x)

    def call(x):
        return sum([op(t, *extra).square().sum() for op, t in zip(ops, (x, x * 2), strict=True)])

    grads = []
    for run in (torch.compile(call, backend="eager", dynamic=True), call):
        leaf = x.clone().requires_grad_()
        run(leaf).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_every_activation_in_one_run():
    seq = fz.Sequential(
        *(fz.QGELU(), fz.SReLU(), fz.Linear(8, 32), fz.GEGLU(), fz.GLU(), fz.Linear(8, 32)),
        *(fz.ClampedSwiGLU(limit=0.5), fz.ReGLU(), fz.Linear(8, 32), fz.SiTUGLU(), fz.QGEGLU()),
        *(fz.Linear(8, 16), fz.SReGLU(), fz.GELU(cache_quantized_input=True)),
    )
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    check(compiled, seq, (torch.randn(10, 8, requires_grad=True),))


@pytest.mark.parametrize("single", [True, False], ids=["single", "separate"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_grouped_mlp(backend, dynamic, single):
    if backend == "inductor" and not single and dynamic:
        pytest.skip("inductor sees the same graph as for the other three")
    mlp = ref.grouped_mlp(single_grouped_weight=single, bias=True)
    compiled = torch.compile(mlp, backend=backend, fullgraph=True, dynamic=dynamic)
    for sizes, rows in (([3, 0, 4, 1], 10), ([0, 0, 0, 12], 12)) if dynamic else ((SIZES, 10),):
        x, splits, scales = ref.grouped_mlp_inputs(sizes, rows)
        check(compiled, mlp, (x, splits, scales, splits))


def test_where_a_default_device_is_set(default_device):
    """Dynamo then traces what PyTorch's methods are written with, and knows less of it."""
    experts = ref.grouped_mlp(hidden=8, inner=8)
    experts[1] = fz.ScaledSwiGLU(glu_interleave_size=4)
    router = fz.TopKRouter(8, 4, 2, num_groups=2, top_groups=1, expert_bias=True, z_loss=True)
    block = fz.Sequential(router, fz.Dispatch(4), *experts, fz.Combine())
    default_device("cpu")
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    check(compiled, block, (torch.randn(10, 8, requires_grad=True),))


@pytest.mark.parametrize("name", ["Linear", "fused", "ScaledSwiGLU"])
def test_inductor(name):
    op = OPS[name]()
    compiled = torch.compile(op, backend="inductor", fullgraph=True)
    x = torch.randn(10, 8, requires_grad=True)
    check(compiled, op, (x, *extra_inputs(op, x)))


def counted(module, **options):
    counter = CompileCounterWithBackend("aot_eager")
    return counter, torch.compile(module, backend=counter, fullgraph=True, **options)


def test_changed_splits_never_recompile():
    mlp = ref.grouped_mlp()
    counter, compiled = counted(mlp)
    for sizes in ([3, 0, 4, 1], [0, 0, 0, 0], [10, 0, 0, 0], [1, 2, 3, 4], [0, 5, 0, 5]):
        x, splits, scales = ref.grouped_mlp_inputs(sizes, 10)
        check(compiled, mlp, (x, splits, scales, splits))
    assert counter.frame_count == 1


def test_changed_rows_recompile_once():
    mlp = ref.grouped_mlp()
    counter, compiled = counted(mlp)
    for rows in (8, 9, 10, 17, 33, 64, 100):
        x, splits, scales = ref.grouped_mlp_inputs(SIZES, rows)
        check(compiled, mlp, (x, splits, scales, splits))
    assert counter.frame_count == 2  # the second graph is for any number of rows


def test_changed_features_recompile_once():
    seq = fz.Sequential(fz.ConstantScale(2.0), fz.SiLU(), fz.AddExtraInput())
    counter, compiled = counted(seq)
    for features in (8, 9, 10, 17, 33, 64, 100):
        x, y = (torch.randn(4, features, requires_grad=True) for _ in range(2))
        check(compiled, seq, (x, y))
    assert counter.frame_count == 2  # the second graph is for any last dimension


def test_rows_declared_dynamic_compile_once():
    mlp = ref.grouped_mlp()
    counter, compiled = counted(mlp)
    for rows in (8, 9, 50):
        x, splits, scales = ref.grouped_mlp_inputs(SIZES, rows)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(scales, 0)
        check(compiled, mlp, (x, splits, scales, splits))
    assert counter.frame_count == 1


def test_scales_of_any_rows_in_two_dimensions():
    op = fz.ScaledSwiGLU()
    counter, compiled = counted(op)
    for rows in (4, 5, 6, 7):
        x = torch.randn(2, rows, 8, requires_grad=True)
        check(compiled, op, (x, torch.rand(2, rows, requires_grad=True)))
    assert counter.frame_count == 2


def test_train_and_eval_alternate():
    mlp = ref.grouped_mlp()
    counter, compiled = counted(mlp)
    inputs = ref.grouped_mlp_inputs(SIZES)
    inputs = (*inputs, inputs[1])
    for _ in range(4):
        mlp.train()
        check(compiled, mlp, inputs)
        mlp.eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), mlp(*inputs))
    assert counter.frame_count <= 3  # training, evaluation, and at most one for the flag itself


def test_frozen_between_calls():
    seq = OPS["fused"]()
    _, compiled = counted(seq)
    x = torch.randn(10, 8, requires_grad=True)
    check(compiled, seq, (x,))
    seq[1].requires_grad_(False)
    check(compiled, seq, (x,))
    seq.requires_grad_(False)
    check(compiled, seq, (x,))
    seq.requires_grad_(True)
    check(compiled, seq, (x.detach(),))


def test_autocast_switches():
    seq = fz.Sequential(fz.Linear(8, 8), fz.SiLU())
    counter, compiled = counted(seq)
    x = torch.randn(10, 8, requires_grad=True)
    for _ in range(2):
        check(compiled, seq, (x,))
        assert compiled(x).dtype == torch.float32
        for dtype in ref.LOW_PRECISION:
            with torch.autocast("cpu", dtype):
                check(compiled, seq, (x,))
                assert compiled(x).dtype == dtype
    assert counter.frame_count == 3


class Doubled(fz.FusedOperation):
    """Under the tests' recipe, twice the values: so that it shows which plan was compiled."""

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return 2 * input_ * self.basic_ops[0].scale, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        return 2 * grad_output * self.basic_ops[0].scale, [()], [()]


def test_recipe_switches(own_fusions):
    def fuse(ops, *, recipe):
        return [Doubled(ops)] if isinstance(recipe, ref.Rows) else ops

    fz.register_forward_backward_fusion(fuse)
    seq = fz.Sequential(fz.ConstantScale(3.0))
    counter, compiled = counted(seq)
    x = torch.ones(4, requires_grad=True)
    for _ in range(2):
        for recipe, factor in ((None, 3), (ref.Rows(), 6), (ref.Rows(64), 6)):
            with fz.autocast(enabled=recipe is not None, recipe=recipe):
                y = compiled(x)
                assert torch.equal(y, factor * torch.ones(4))
                (dx,) = torch.autograd.grad(y.sum(), x)
                assert torch.equal(dx, factor * torch.ones(4))
    assert counter.frame_count <= 3


def test_channels_and_extra_outputs():
    seq = fz.Sequential(
        fz.MakeExtraOutput().set_extra_output_channel(0, "r"),
        fz.Linear(8, 8),
        fz.MakeExtraOutput(),
        fz.AddExtraInput().set_extra_input_channel(0, "r"),
    )
    _, compiled = counted(seq)
    check(compiled, seq, (torch.randn(10, 8, requires_grad=True),))


def test_same_tensor_twice_and_tied_weights():
    seq = fz.Sequential(fz.AddExtraInput(), fz.Linear(8, 8), fz.SiLU(), fz.Linear(8, 8))
    seq[3].weight = seq[1].weight
    _, compiled = counted(seq)
    x = torch.randn(10, 8, requires_grad=True)
    check(compiled, seq, (x, x))


def test_a_function_that_calls_a_sequential():
    """The fuser inside a larger graph."""
    mlp = ref.grouped_mlp()

    def function(x, splits, scales):
        return torch.sin(x) + mlp(2 * x, splits, scales.sigmoid(), splits)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x, splits, scales = ref.grouped_mlp_inputs(SIZES)
    mine, plain = (results(f, mlp, (x, splits, scales)) for f in (compiled, function))
    torch.testing.assert_close(mine, plain)


def test_users_fused_op(own_fusions):
    class Both(fz.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            basic_op_ctxs[0].save_for_backward(input_)
            return torch.sin(input_), [(), ()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **_):
            (x,) = basic_op_ctxs[0].saved_tensors
            return grad_output * torch.cos(x), [(), ()], [(), ()]

    fz.register_forward_backward_fusion(lambda ops, *, recipe: [Both(ops)])
    seq = fz.Sequential(fz.SiLU(), fz.GELU())
    _, compiled = counted(seq)
    x = torch.randn(5, requires_grad=True)
    y = compiled(x)
    torch.testing.assert_close(y.detach(), torch.sin(x.detach()))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.cos(x.detach()))


class CastToItsOwn(fz.ops.BasicOperation):
    """Gives what a cast returned that had nothing to do."""

    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return (input_ * 2).to(input_.dtype)

    def op_backward(self, ctx, grad_output):
        return grad_output * 2, ()


def test_an_output_that_a_cast_returned_unchanged():
    op, x = CastToItsOwn(), torch.randn(3, requires_grad=True)
    torch.compile(op, fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_modules_changed_after_compilation():
    seq = fz.Sequential(fz.Linear(8, 8), fz.SiLU())
    _, compiled = counted(seq)
    x = torch.randn(10, 8, requires_grad=True)
    check(compiled, seq, (x,))
    seq[1] = fz.ReLU()
    check(compiled, seq, (x,))
    seq.append(fz.Bias(8))
    check(compiled, seq, (x,))
    seq[0].weight = torch.nn.Parameter(torch.randn(8, 8))
    check(compiled, seq, (x,))


def test_a_copy_that_is_compiled_before_its_first_call():
    seq = copy.deepcopy(fz.Sequential(fz.Linear(8, 8), fz.SiLU()))
    _, compiled = counted(seq)
    check(compiled, seq, (torch.randn(10, 8, requires_grad=True),))


class Layer(torch.nn.Module):
    """One of many: ops alone and in a Sequential."""

    def __init__(self):
        super().__init__()
        self.alone = fz.Linear(16, 16)
        self.mlp = ref.grouped_mlp(dtype=torch.bfloat16)

    def forward(self, x, splits, scales):
        return x + self.mlp(self.alone(x).bfloat16(), splits, scales, splits)


@pytest.mark.parametrize("target", ["cpu", "sm90"])
def test_layers_compiled_one_by_one_share_their_code(target):
    """As models of many layers are compiled; the ninth would be refused for its recompilations."""
    counter = CompileCounterWithBackend("aot_eager")
    x, splits, scales = ref.grouped_mlp_inputs()
    layers = [Layer() for _ in range(10)]
    copies = copy.deepcopy(layers)
    for layer in layers:
        layer.compile(fullgraph=True, backend=counter)
    with assume_target(target):
        for layer, eager in zip(layers, copies, strict=True):
            leaves = x, scales
            results = []
            for module in (layer, eager):
                y = module(x, splits, scales)
                grads = torch.autograd.grad(y.sum(), (*leaves, *module.parameters()))
                results.append((y, *grads))
            torch.testing.assert_close(*results)
        assert layers[-1].mlp.plan.fired == copies[-1].mlp.plan.fired
    assert counter.frame_count == 1


class Unreadable(fz.BasicLinear):
    """Its parameters may be ones that no call could read."""

    broken = False

    def stored(self, name):
        if self.broken:
            raise ValueError("no weight")
        return super().stored(name)


def test_an_unreadable_module_of_the_same_ops_is_no_concern():
    broken, whole = [fz.Sequential(Unreadable(8, 8)) for _ in range(2)]
    x = torch.randn(3, 8)
    broken(x)
    broken[0].broken = True
    torch.testing.assert_close(torch.compile(whole, backend="aot_eager")(x), whole(x))


def test_plan_of_a_compiled_module_is_readable():
    seq = fz.Sequential(fz.Linear(8, 8), fz.SiLU())
    _, compiled = counted(seq)
    compiled(torch.randn(10, 8))
    assert seq.plan.fired == ("linear_bias_activation",)


@pytest.mark.parametrize("dynamic", [False, True])
def test_export(dynamic):
    mlp = ref.grouped_mlp().requires_grad_(False)
    x, splits, scales = (t.detach() for t in ref.grouped_mlp_inputs(SIZES))
    rows = torch.export.Dim("rows", min=2, max=1024)
    shapes = {"input": {0: rows}, "extra_inputs": (None, {0: rows}, None)}
    exported = torch.export.export(
        mlp, (x, splits, scales, splits), dynamic_shapes=shapes if dynamic else None
    )
    given = (x, splits, scales)
    if dynamic:
        given = tuple(t.detach() for t in ref.grouped_mlp_inputs([0, 9, 0, 5], 15))
    y = exported.module()(given[0], given[1], given[2], given[1])
    torch.testing.assert_close(y, mlp(given[0], given[1], given[2], given[1]))


def test_export_beside_a_module_of_the_same_ops():
    """Its own op runs on fake tensors for the plan, which the graph must not record."""

    class Scale(fz.BasicOperation):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.randn(8))

        def formula(self, x, scale):
            return x * scale

    module, _other = [fz.Sequential(fz.Linear(8, 8), Scale()) for _ in range(2)]
    x = torch.randn(4, 8)
    exported = torch.export.export(module, (x,))
    assert torch.equal(exported.module()(x), module(x))


def test_a_fused_op_of_another_machine_compiles_as_one_graph():
    mlp = ref.grouped_mlp(dtype=torch.bfloat16)
    x, splits, scales = ref.grouped_mlp_inputs(dtype=torch.bfloat16)
    leaves = (x, scales, *mlp.parameters())
    with assume_target("sm90"):
        want = mlp(x, splits, scales, splits)
        assert mlp.plan.fired == ("grouped_mlp_sm90",)
        dy = torch.randn_like(want)
        grads = torch.autograd.grad(want, leaves, dy)
        got = torch.compile(mlp, fullgraph=True, backend="aot_eager")(x, splits, scales, splits)
        assert torch.equal(got, want)
        ref.assert_equal(torch.autograd.grad(got, leaves, dy), grads)


@pytest.mark.parametrize("where", ["compiled", "backward inside"])
@pytest.mark.parametrize(
    "recipe", [None, fz.recipes.MXFP8BlockScaling()], ids=["no recipe", "mxfp8"]
)
def test_backwards_run_outside_of_autocast(recipe, where):
    """Traced with their forward, or called inside: gradients of FP32 weights are not rounded."""
    torch.manual_seed(0)
    module = fz.Sequential(fz.Linear(64, 64, bias=False), fz.GELU())
    x, dy = torch.randn(96, 64), torch.randn(96, 64).bfloat16()
    results = []
    for inside in (False, True):
        call = (
            torch.compile(module, backend="aot_eager") if inside and where == "compiled" else module
        )
        with torch.autocast("cpu", torch.bfloat16):
            with fz.autocast(enabled=recipe is not None, recipe=recipe):
                y = call(x)
            if inside and where != "compiled":
                results += torch.autograd.grad(y, module.parameters(), dy)
        if len(results) < 1 + inside:
            results += torch.autograd.grad(y, module.parameters(), dy)
    assert torch.equal(*results)
    assert recipe is None or not torch.equal(results[0], results[0].bfloat16().float())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("factor", [0.75, 1.0, 2.0])
def test_export_of_a_block_with_capacity(factor, strict):
    """For any number of tokens up to a bound."""
    block = fz.Sequential(
        fz.TopKRouter(16, 4, 2),
        fz.Dispatch(4, capacity_factor=factor),
        fz.GroupedLinear(4, 16, 16),
        fz.Combine(weighted=True),
    )
    rows = torch.export.Dim("rows", min=2, max=100)
    given = (torch.randn(10, 16),)
    exported = torch.export.export(block, given, dynamic_shapes=({0: rows},), strict=strict)
    for count in (2, 7, 100):
        x = torch.randn(count, 16)
        torch.testing.assert_close(exported.module()(x), block(x))
