"""Where a fuser's autograd meets the rest of PyTorch."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference as ref
import torch
import torch.nn.functional as F
from number_formats import MX, RECIPES
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusible as fz
from fusible import recipes
from fusible.testing import assume_target

SIZES = (3, 0, 4, 1)


def biased_mlp(dtype=torch.float64):
    mlp = ref.grouped_mlp(bias=True, single_grouped_bias=True, dtype=dtype)
    with torch.no_grad():
        for p in mlp.parameters():
            p.copy_(torch.randn(p.shape) / 3)
    return mlp


def case(dtype=torch.float64):
    """The grouped MLP with its inputs and its exact output and gradients."""
    mlp = biased_mlp(dtype)
    x, splits, scales = ref.grouped_mlp_inputs(SIZES, dtype=dtype)
    scales = scales.detach().to(dtype).requires_grad_()
    dy = torch.randn(x.shape, dtype=dtype)
    y, grads = ref.exact_grouped_mlp(mlp, x, SIZES, scales, dy)
    return mlp, (x, splits, scales, splits), dy, y, grads


def tensors_of(mlp, inputs):
    return [inputs[0], inputs[2], *mlp.parameters()]


def assert_exact(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)


# --- which gradients are wanted -----------------------------------------------------------------


def test_input_that_needs_no_gradient():
    mlp, (x, splits, scales, _), dy, y, exact = case()
    out = mlp(x.detach(), splits, scales, splits)
    assert_exact([out.detach()], [y])
    assert_exact(torch.autograd.grad(out, [scales, *mlp.parameters()], dy), exact[1:])


def test_only_an_extra_input_needs_a_gradient():
    mlp, (x, splits, scales, _), dy, _, exact = case()
    mlp.requires_grad_(False)
    out = mlp(x.detach(), splits, scales, splits)
    assert_exact(torch.autograd.grad(out, [scales], dy), exact[1:2])


@pytest.mark.parametrize("trainable", [0, 1, 2, 3])
def test_one_trainable_parameter(trainable):
    mlp, inputs, dy, _, exact = case()
    for i, p in enumerate(mlp.parameters()):
        p.requires_grad_(i == trainable)
    inputs = tuple(t.detach() for t in inputs)
    mlp(*inputs).backward(dy)
    for i, (p, expected) in enumerate(zip(mlp.parameters(), exact[2:], strict=True)):
        assert (p.grad is not None) == (i == trainable)
        if i == trainable:
            assert_exact([p.grad], [expected])


def test_nothing_needs_a_gradient():
    mlp, inputs, _, y, _ = case()
    mlp.requires_grad_(False)
    out = mlp(*(t.detach() for t in inputs))
    assert out.grad_fn is None
    assert_exact([out], [y])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_then_with(mode):
    mlp, inputs, dy, y, exact = case()
    for _ in range(2):
        with mode():
            out = mlp(*inputs)
            assert not out.requires_grad
            assert_exact([out], [y])
        out = mlp(*inputs)
        assert_exact(torch.autograd.grad(out, tensors_of(mlp, inputs), dy), exact)


def test_extra_outputs_without_gradients():
    op = fz.Sequential(fz.MakeExtraOutput(), fz.SiLU())
    x = torch.randn(2, 3)
    with torch.no_grad():
        y, extra = op(x)
        alone, alone_extra = op[0](x)
    assert torch.equal(extra, x)
    assert torch.equal(y, F.silu(x))
    assert torch.equal(alone, alone_extra)


def test_train_and_eval_alternate():
    mlp, inputs, dy, y, exact = case()
    for _ in range(3):
        mlp.train()
        assert_exact(torch.autograd.grad(mlp(*inputs), tensors_of(mlp, inputs), dy), exact)
        mlp.eval()
        with torch.no_grad():
            assert_exact([mlp(*inputs)], [y])


def test_parameters_frozen_between_calls():
    mlp, inputs, dy, _, exact = case()
    mlp(*inputs).backward(dy)
    ref.take_grads(*tensors_of(mlp, inputs))
    mlp[0].requires_grad_(False)
    mlp(*inputs).backward(dy)
    assert mlp[0].weight.grad is None
    assert_exact([mlp[2].weight.grad], [exact[4]])
    mlp[0].requires_grad_(True)
    ref.take_grads(*tensors_of(mlp, inputs))
    mlp(*inputs).backward(dy)
    assert_exact(ref.take_grads(*tensors_of(mlp, inputs)), exact)


# --- how often and in what order ------------------------------------------------------------------


def test_two_backward_passes():
    mlp, inputs, dy, _, exact = case()
    out = mlp(*inputs)
    tensors = tensors_of(mlp, inputs)
    assert_exact(torch.autograd.grad(out, tensors, dy, retain_graph=True), exact)
    assert_exact(
        torch.autograd.grad(out, tensors, 3 * dy, retain_graph=True), [3 * g for g in exact]
    )
    out.backward(dy, retain_graph=True)
    out.backward(dy)
    assert_exact(ref.take_grads(*tensors), [2 * g for g in exact])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward(dy)


def test_two_calls_before_their_backwards():
    """Nothing of a call is kept in the module."""
    mlp, inputs, dy, _, exact = case()
    other = (torch.randn(7, 16, dtype=torch.float64), torch.tensor([0, 7, 0, 0]))
    first = mlp(*inputs)
    second = mlp(other[0], other[1], torch.rand(7, dtype=torch.float64), other[1])
    second.sum().backward()
    ref.take_grads(*mlp.parameters())
    assert_exact(torch.autograd.grad(first, tensors_of(mlp, inputs), dy), exact)


def test_saved_tensors_are_guarded_against_writes():
    x = torch.randn(3, 4, requires_grad=True)
    h = x * 2
    y = fz.SiLU()(h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()], ids=["sum", "square"])
def test_second_derivatives_are_refused(loss):
    """Also where the incoming gradient is a constant, or only the input's path is asked for."""
    x, op = torch.randn(3, 4, requires_grad=True), fz.SiLU()
    with pytest.raises(RuntimeError, match="create_graph must be False, got True"):
        torch.autograd.grad(loss(op(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph must be False, got True"):
        torch.autograd.functional.hessian(lambda t: loss(op(t)), x)


def test_functional_call_takes_other_parameters():
    ours = fz.Sequential(fz.Linear(8, 16), fz.SiLU(), fz.Linear(16, 4))
    theirs = nn.Sequential(swap_in(ours[0]), nn.SiLU(), swap_in(ours[2]))
    x = torch.randn(6, 8)
    given = {name: torch.randn_like(p).requires_grad_() for name, p in ours.named_parameters()}
    results = []
    for module in (ours, theirs):
        y = torch.func.functional_call(module, given, (x,))
        results.append((y, *torch.autograd.grad(y.square().sum(), list(given.values()))))
    torch.testing.assert_close(*results)


def test_transforms_of_torch_func():
    op, x = fz.SiLU(), torch.randn(3, 4)
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(RuntimeError, match=r"transform of torch.func .* use torch.autograd"):
            transform(lambda t: op(t).sum())(x)
    torch.testing.assert_close(torch.func.vmap(op)(x), F.silu(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    mlp, inputs, dy, y, exact = case()
    out = checkpoint(mlp, *inputs, use_reentrant=use_reentrant)
    assert_exact([out.detach()], [y])
    out.backward(dy)
    assert_exact(ref.take_grads(*tensors_of(mlp, inputs)), exact)


def test_saved_tensor_hooks():
    """Saved tensors may be moved elsewhere and back (``save_on_cpu``, non-reentrant checkpoint)."""
    mlp, inputs, dy, _, exact = case()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (packed.append(t), t.clone())[1], lambda t: t
    ):
        out = mlp(*inputs)
    assert packed
    assert_exact(torch.autograd.grad(out, tensors_of(mlp, inputs), dy), exact)


def test_hooks_on_parameters():
    mlp, inputs, dy, _, exact = case()
    seen, accumulated = {}, []
    for name, p in mlp.named_parameters():
        p.register_hook(lambda g, name=name: seen.__setitem__(name, g.clone()))
        p.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
    inputs[0].register_hook(lambda g: 2 * g)
    mlp(*inputs).backward(dy)
    assert_exact([seen[name] for name, _ in mlp.named_parameters()], exact[2:])
    assert len(accumulated) == len(exact) - 2
    assert_exact([inputs[0].grad], [2 * exact[0]])


def test_optimizer_in_the_backward():
    """A step inside the post-accumulate hook, as memory-saving training loops do."""
    linear, x = fz.Linear(4, 4), torch.randn(5, 4)
    before = linear.weight.detach().clone()

    def step(p):
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.5)
        p.grad = None

    linear.weight.register_post_accumulate_grad_hook(step)
    linear(x).sum().backward()
    expected = before - 0.5 * torch.ones(4, 5) @ x
    torch.testing.assert_close(linear.weight.detach(), expected)


def test_same_tensor_passed_twice():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(fz.AddExtraInput()(x, x), x, torch.ones_like(x))
    assert torch.equal(dx, torch.full_like(x, 2))
    seq = fz.Sequential(fz.AddExtraInput(), fz.SiLU(), fz.AddExtraInput())

    def plain(x):
        h = x + x
        return h * ref.sigmoid(h) + x

    dy = torch.randn_like(x)
    _, (exact,) = ref.gradients(plain, [x], dy)
    assert_exact(torch.autograd.grad(seq(x, x, x), x, dy), [exact])


def test_a_parameter_as_input():
    """``linear(linear.weight)``: one tensor in two roles."""
    linear = fz.BasicLinear(4, 4, dtype=torch.float64)
    w = linear.weight
    _, (exact,) = ref.gradients(lambda w: w @ w.T, [w], torch.ones(4, 4))
    assert_exact(torch.autograd.grad(linear(w).sum(), w), [exact])


def test_expanded_gradient():
    """The gradient that ``sum`` hands back has strides of zero."""
    mlp, inputs, dy, _, _ = case()
    _, exact = ref.exact_grouped_mlp(mlp, inputs[0], SIZES, inputs[2], torch.ones_like(dy))
    assert_exact(torch.autograd.grad(mlp(*inputs).sum(), tensors_of(mlp, inputs)), exact)


def test_output_may_be_changed_in_place():
    x = torch.randn(3, 4, requires_grad=True)
    seq = fz.Sequential(fz.Linear(4, 4), fz.ConstantScale(2.0))
    expected = seq(x).detach() + 1
    y = seq(x)
    y += 1
    assert torch.equal(y.detach(), expected)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.ones(3, 4) @ seq[0].weight)


# --- autocast -----------------------------------------------------------------------------------


def swap_in(linear):
    """An nn.Linear with the same parameters."""
    theirs = nn.Linear(*linear.weight.shape[::-1])
    theirs.weight, theirs.bias = linear.weight, linear.bias
    return theirs


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ref.LOW_PRECISION)
def test_autocast_of_dense_ops_is_torchs(dtype, x_dtype, backward_inside):
    ours = fz.Sequential(fz.Linear(8, 16), fz.SiLU(), fz.Linear(16, 4))
    theirs = nn.Sequential(swap_in(ours[0]), nn.SiLU(), swap_in(ours[2]))
    x = torch.randn(6, 8).to(x_dtype).requires_grad_()
    results = []
    for module in (ours, theirs):
        with torch.autocast("cpu", dtype):
            y = module(x)
            loss = y.float().square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        results.append((y.detach(), *ref.take_grads(x, *ours.parameters())))
    assert results[0][0].dtype == dtype
    for mine, torchs in zip(*results, strict=True):
        assert mine.dtype == torchs.dtype
        torch.testing.assert_close(mine, torchs, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dtype", ref.LOW_PRECISION)
def test_autocast_of_the_grouped_mlp(dtype):
    mlp = biased_mlp(torch.float32)
    x, splits, scales = ref.grouped_mlp_inputs(SIZES)
    dy = torch.randn(x.shape).to(dtype)
    exact_y, exact = ref.exact_grouped_mlp(mlp, x, SIZES, scales, dy)
    with torch.autocast("cpu", dtype):
        y = mlp(x, splits, scales, splits)
    assert y.dtype == dtype
    ref.assert_accurate(y.detach(), exact_y, roundings=8)
    y.backward(dy)
    for grad, theirs in zip(ref.take_grads(*tensors_of(mlp, (x, 0, scales))), exact, strict=True):
        assert grad.dtype == torch.float32  # of the parameter, computed in less
        ref.assert_accurate(grad.to(dtype), theirs, roundings=8)


def test_autocast_switched_on_and_off():
    linear, x = fz.Linear(8, 8), torch.randn(4, 8)
    for _ in range(2):
        assert linear(x).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x).dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))
        assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


def test_autocast_leaves_fp64_alone():
    linear, x = fz.Linear(4, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(linear(x), swap_in(linear)(x), rtol=1e-14, atol=1e-15)


class Product(fz.BasicOperation):
    """An op of the user's, which leaves mixed dtypes to autocast."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(8, 8))

    def formula(self, x, factor):
        return x @ factor


def test_autocast_in_the_backward_of_a_users_formula():
    ours = fz.Sequential(fz.Linear(8, 8), Product())
    x = torch.randn(6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(x)
        expected = swap_in(ours[0])(x) @ ours[1].factor
    results = [
        torch.autograd.grad(out.float().sum(), [*ours.parameters()]) for out in (y, expected)
    ]
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(*results, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("dtype", ref.LOW_PRECISION)
def test_autocast_casts_separate_parameters_of_another_dtype(dtype):
    """PyTorch's own autocast would refuse to stack them."""
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    op, x = fz.GroupedLinear(2, 8, 4, dtype=other), torch.randn(5, 8)
    with torch.autocast("cpu", dtype):
        y = op(x, [2, 3])
    cast = [p.to(dtype).double() for p in op.parameters()]
    exact = [x[:2].to(dtype).double() @ cast[0].T, x[2:].to(dtype).double() @ cast[1].T]
    assert y.dtype == dtype
    ref.assert_accurate(y.detach(), torch.cat(exact))


@pytest.mark.parametrize("recipe", [recipes.Float8CurrentScaling(), recipes.NVFP4BlockScaling()])
def test_autocast_rounds_no_dequantized_operand(recipe):
    """Under both autocasts a linear is that of a model in the lower precision, bit by bit."""
    narrow = fz.Linear(64, 32, dtype=torch.bfloat16)
    wide = fz.Linear(64, 32)
    wide.load_state_dict(narrow.state_dict())
    x = torch.randn(48, 64)
    with fz.autocast(recipe=recipe):
        expected = narrow(x.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            y = wide(x)
    assert torch.equal(y, expected)


# --- recipes and threads --------------------------------------------------------------------------


def test_recipes_change_between_calls():
    mlp, inputs, dy, y, exact = case()
    plans = []
    for recipe in (None, ref.Rows(), None, ref.Rows(64), ref.Rows()):
        with recipes.autocast(enabled=recipe is not None, recipe=recipe):
            out = mlp(*inputs)
        assert mlp.plan.recipe == recipe
        plans.append(mlp.plan)
        # A recipe nobody knows changes the plan, never the values.
        assert_exact([out.detach()], [y])
        assert_exact(torch.autograd.grad(out, tensors_of(mlp, inputs), dy), exact)
    assert plans[0] is plans[2]
    assert plans[1] is plans[4]
    assert plans[1] is not plans[3]


def test_recipe_scopes():
    assert recipes.current_recipe() is None
    with fz.autocast(recipe=ref.Rows()):
        assert recipes.current_recipe() == ref.Rows()
        with fz.autocast(enabled=False):
            assert recipes.current_recipe() is None
        with pytest.raises(KeyError), fz.autocast(recipe=ref.Rows(64)):
            raise KeyError
        assert recipes.current_recipe() == ref.Rows()
    assert recipes.current_recipe() is None


def test_threads_have_their_own_recipes():
    """Two threads, one module, two recipes: each plans and runs under its own."""
    mlp, inputs, _, y, _ = case()
    barrier = threading.Barrier(2)

    def work(recipe):
        with fz.autocast(recipe=recipe):
            for _ in range(20):
                barrier.wait(timeout=30)
                with torch.no_grad():
                    assert_exact([mlp(*inputs)], [y])
                assert recipes.current_recipe() == recipe

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, (ref.Rows(16), ref.Rows(64))))
    (run,) = mlp.parts()
    assert {key[0] for key in run._schedules} == {ref.Rows(16), ref.Rows(64)}


def test_backward_in_another_thread():
    mlp, inputs, dy, _, exact = case()
    out = mlp(*inputs)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(out.backward, dy).result()
    assert_exact(ref.take_grads(*tensors_of(mlp, inputs)), exact)


def frozen_mlp():
    mlp = biased_mlp().requires_grad_(False)
    x, splits, scales = [t.detach() for t in ref.grouped_mlp_inputs(SIZES, dtype=torch.float64)]
    return x, lambda x: mlp(x, splits, scales.double(), splits)


# PyTorch's forward-mode autograd scripts functions at its first use.
scripts = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


@scripts
def test_forward_mode_through_library_ops_is_refused():
    """Where nothing needs a gradient; the tangent would be zero."""
    x, call = frozen_mlp()
    match = r"inputs of \w+ must have no tangents .* reverse mode"
    with pytest.raises(RuntimeError, match=match):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=match):
            call(dual)


@scripts
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("grad_enabled", [True, False])
def test_forward_mode_under_a_recipe_is_refused(recipe, grad_enabled):
    """Where nothing needs a gradient; the tangent would be lost where operands are quantized."""
    layer, x = fz.Linear(32, 32).requires_grad_(False), torch.randn(32, 32)

    def call(x):
        with fz.autocast(recipe=recipe):
            return layer(x)

    match = r"inputs of quantize must have no tangents .* reverse mode"
    with torch.set_grad_enabled(grad_enabled), pytest.raises(RuntimeError, match=match):
        torch.func.jvp(call, (x,), (x,))
    call(x)


def moved():
    block = fz.Sequential(fz.Dispatch(3), fz.ScaledSReLU(), fz.Combine())
    return lambda x, ids, probs: block(x, probs, ids)[0]


def routed():
    router = fz.TopKRouter(8, 3, 2).requires_grad_(False)
    return lambda x, *_: router(x)[1]


def quantized():
    linear = fz.Linear(8, 32).requires_grad_(False)

    def call(x, *_):
        with fz.autocast(recipe=MX):
            return linear(x)

    return call


@pytest.mark.filterwarnings("ignore:.*There is a performance drop:UserWarning")
@pytest.mark.parametrize("make", [moved, routed, quantized])
def test_gradients_through_vmap_are_refused(make):
    """What vmap passes on does not tell that it needs a gradient, which would be lost."""
    x, ids, probs = torch.randn(2, 5, 8), torch.randint(0, 3, (2, 5, 2)), torch.rand(2, 5, 2)
    call = make()

    def batched(x):
        return torch.vmap(call)(x, ids, probs).square().sum()

    match = r"inputs of \w+ must not require gradients"
    with pytest.raises(RuntimeError, match=match):
        batched(x.clone().requires_grad_())
    with pytest.raises(RuntimeError, match=match):
        torch.func.grad(batched)(x)


@pytest.mark.parametrize("recipe", [None, MX], ids=["none", "mxfp8"])
def test_gradients_inside_of_compiled_transforms_are_refused(recipe):
    """They would be zero."""
    linear, x = fz.Linear(32, 32), torch.randn(4, 32)

    def loss(x):
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            return linear(x).square().sum()

    compiled = torch.compile(torch.func.grad(loss), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="must not need gradients inside a"):
        compiled(x)


@scripts
def test_forward_mode_is_refused_in_compiled_code():
    op, sizes = fz.GroupedLinear(2, 8, 8).requires_grad_(False), torch.tensor([2, 4])
    x = torch.randn(6, 8)

    def tangent(x, v):
        return torch.func.jvp(lambda t: op(t, sizes), (x,), (v,))[1]

    # Tracing ends before it in torch 2.11, which does not know dispatch keys, and since 2.14.
    refused = r"inputs of \w+ must have no tangents|torch.DispatchKey|RecursionError"
    with pytest.raises(RuntimeError, match=refused):
        torch.compile(tangent, backend="eager")(x, torch.ones_like(x))


@scripts
def test_forward_mode_beside_library_ops():
    """Of tensors that they do not read, and through ops that are PyTorch's own operations."""
    x, call = frozen_mlp()
    y, tangent = torch.func.jvp(lambda t: t * call(x), (x,), (torch.ones_like(x),))
    torch.testing.assert_close((y, tangent), (x * call(x), call(x)))
    linear = fz.Linear(8, 4, dtype=torch.float64).requires_grad_(False)
    t = torch.randn(3, 8, dtype=torch.float64)
    _, tangent = torch.func.jvp(linear, (t,), (torch.ones_like(t),))
    torch.testing.assert_close(tangent, torch.ones_like(t) @ linear.weight.T)


def saved_sizes(call):
    """The elements of the tensors that a call saves, and its outputs."""
    sizes = []

    def pack(t):
        sizes.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return sizes


SPLITS = torch.tensor([20, 0, 30, 14])
LINEARS = {
    "Linear": (lambda: fz.Linear(24, 40), ()),
    "GroupedLinear": (lambda: fz.GroupedLinear(4, 24, 40), (SPLITS,)),
    "single": (lambda: fz.GroupedLinear(4, 24, 40, single_grouped_weight=True), (SPLITS,)),
    "router": (lambda: fz.TopKRouter(24, 40, 2), ()),
}


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(("make", "extra"), LINEARS.values(), ids=LINEARS)
def test_a_linear_saves_what_its_backward_reads(make, extra, frozen):
    """With frozen weights no input, for an input without gradient no weight, as torch.nn."""
    op = make().requires_grad_(not frozen)
    x = torch.randn(64, 24, requires_grad=frozen)
    weights = [p for p in op.parameters() if p.dim() > 1]
    sizes = saved_sizes(lambda: op(x, *extra))
    assert (x.numel() in sizes) == (not frozen)
    assert (weights[0].numel() in sizes) == frozen
    y = op(x, *extra)
    y = y[1] if isinstance(y, tuple) else y
    with torch.no_grad():  # of what is not saved, before the backward
        for changed in [x.detach()] if frozen else weights:
            changed.mul_(0)
    y.sum().backward()
    assert x.grad is not None if frozen else all(w.grad is not None for w in weights)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("machine", ["cpu", "sm90"])
def test_gradients_of_an_input_through_frozen_experts(machine, recompute):
    """Those of the same experts with weights that train, and less is saved."""
    torch.manual_seed(0)
    kind = {"dtype": torch.bfloat16, "bias": False}
    module = fz.Sequential(
        fz.TopKRouter(64, 4, 2, dtype=torch.bfloat16),
        fz.Dispatch(4, recompute_rows=recompute),
        fz.GroupedLinear(4, 64, 64, **kind),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(4, 32, 64, **kind),
        fz.Combine(),
    )
    x = torch.randn(96, 64, dtype=torch.bfloat16, requires_grad=True)
    with assume_target(machine):
        grads, sizes = [], []
        for trains in (True, False):
            module[2].requires_grad_(trains)
            sizes.append(sum(saved_sizes(lambda: module(x))))
            grads.append(torch.autograd.grad(module(x).float().square().sum(), x)[0])
    assert torch.equal(*grads)
    rows = x.shape[0] if recompute else 2 * x.shape[0]
    assert sizes[0] - sizes[1] >= rows * 64


@pytest.mark.parametrize(
    "ops",
    [
        [fz.Reshape((8, 4)), fz.AddExtraInput()],
        [fz.Reshape((8, 4)), fz.Bias(4), fz.AddExtraInput()],
        [fz.AddExtraInput(), fz.Reshape((4, 8)), fz.AddExtraInput()],
    ],
    ids=["reshape", "bias", "two"],
)
def test_gradients_of_leaves_share_no_memory(ops):
    model = fz.Sequential(*ops, fz.SiLU())
    x = torch.randn(4, 8, requires_grad=True)
    (shape,) = [op.shape for op in ops if isinstance(op, fz.Reshape)]
    extra = [torch.randn(shape, requires_grad=True) for _ in range(model.num_extra_inputs)]
    leaves = [x, *extra, *model.parameters()]
    once = torch.autograd.grad(model(x, *extra).sum(), leaves)
    steps = 3
    for _ in range(steps):
        model(x, *extra).sum().backward()
    for leaf, grad in zip(leaves, once, strict=True):
        torch.testing.assert_close(leaf.grad, steps * grad)


def test_dummy_gradients_are_no_nan_in_anomaly_detection():
    linear = fz.Linear(64, 64, bias=False, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.zeros(64, 64)
    linear.weight.grad_added_to_main_grad = False
    x, fills = torch.randn(3, 64), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        with torch.autograd.set_detect_anomaly(True):
            linear(x).sum().backward()
    finally:
        torch.use_deterministic_algorithms(fills)
    torch.testing.assert_close(linear.weight.main_grad, x.sum(0).expand(64, 64))
