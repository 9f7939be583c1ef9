"""Where weight gradients go: autograd, main_grad, backward_dw(); on every path, fused or not."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import reference as ref
import torch
import torch.distributed as dist
from sm90_launches import sm90_on_cpu
from torch import nn
from training_paths import (
    BF16,
    FP32,
    MX,
    PATHS,
    ROWS,
    SIZES,
    WIDTH,
    layouts,
    linears,
    paths,
    some_paths,
)

import fusible as fz
from fusible.testing import assume_target

UNFUSED = PATHS["unfused"]


def build(path, single, **options):
    torch.manual_seed(1)
    return path.build(single, **options)


def run(path, mlp, seed=2):
    """Forward and backward; the gradients of the inputs."""
    torch.manual_seed(seed)
    inputs = path.inputs()
    with path.on():
        y = mlp(*inputs)
        assert mlp.plan.fired + mlp.plan.kernels == path.fired
        y.backward(torch.randn_like(y))
    return [t.grad for t in inputs if t.requires_grad]


def weights(mlp):
    return [w for fc in linears(mlp) for w in fc.weights()]


def expected(path, single, seeds=(2,)):
    """Weight gradients and bias gradients by autograd."""
    mlp = build(path, single)
    inputs = [run(path, mlp, seed) for seed in seeds]
    return [w.grad for w in weights(mlp)], [b.grad for b in biases(mlp)], inputs


def biases(mlp):
    return [b for fc in linears(mlp) for b in fc.biases()]


def give_main_grads(mlp, dtype=FP32):
    for w in weights(mlp):
        w.main_grad = torch.randn(w.shape).to(dtype)
    return [w.main_grad.clone() for w in weights(mlp)]


def assert_close(got, want, dtype, roundings=4):
    """Within some roundings of ``dtype`` of the largest value."""
    bound = roundings * torch.finfo(dtype).eps * want.abs().max()
    assert (got.double() - want.double()).abs().max() <= bound


def coarser(*dtypes):
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


@pytest.mark.usefixtures("cpu_or_hopper")
@paths
@layouts
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_main_grad_is_added_to(path, single, dtype):
    mlp = build(path, single, accumulate_into_main_grad=True)
    before = give_main_grads(mlp, dtype)
    inputs = run(path, mlp)
    want, want_biases, want_inputs = expected(path, single)
    for w, old, grad in zip(weights(mlp), before, want, strict=True):
        assert w.grad is None
        assert_close(w.main_grad, old.double() + grad.double(), coarser(dtype, grad.dtype))
    for bias, grad in zip(biases(mlp), want_biases, strict=True):
        assert torch.equal(bias.grad, grad)
    ref.assert_equal(inputs, want_inputs[0])


@pytest.mark.usefixtures("cpu_or_hopper")
@some_paths(
    "unfused",
    "unfused mxfp8",
    "sm90",
    "sm90 experts",
    "sm90 mxfp8",
    "sm90 fp8",
    "sm100 mxfp8",
)
@pytest.mark.parametrize("dtypes", [(FP32,) * 4, (FP32, BF16, BF16, FP32)], ids=["fp32", "mixed"])
@pytest.mark.parametrize("flags", list(itertools.product([True, False], repeat=2)), ids=str)
def test_each_weight_has_its_own_flag(path, dtypes, flags):
    """Others apply the flag of the last group to all of them."""
    flags = (*flags, True, False)
    mlp = build(path, False, accumulate_into_main_grad=True)
    before = give_main_grads(mlp)
    for w, dtype, flag in zip(weights(mlp), dtypes * 2, flags * 2, strict=True):
        w.overwrite_main_grad = flag
        w.main_grad = w.main_grad.to(dtype)
        if flag:
            w.main_grad.fill_(float("nan"))
    run(path, mlp)
    want, *_ = expected(path, False)
    for w, old, grad, flag in zip(weights(mlp), before, want, flags * 2, strict=True):
        total = grad.double() + (0 if flag else old.to(w.main_grad.dtype).double())
        assert_close(w.main_grad, total, coarser(w.main_grad.dtype, grad.dtype))
    for fc, old in zip(linears(mlp), (before[1], before[5]), strict=True):  # group 1 has no rows
        got = fc.weight1.main_grad
        assert torch.equal(got, torch.zeros_like(got) if flags[1] else old.to(got.dtype))


def transpose_weights(mlp):
    """The same weights, each with the other dimension contiguous."""
    for fc in linears(mlp):
        for name, p in list(fc.named_parameters()):
            if name.startswith("weight"):
                setattr(fc, name, torch.nn.Parameter(p.detach().mT.contiguous().mT))
    return mlp


@pytest.mark.usefixtures("cpu_or_hopper")
@some_paths("unfused", "unfused mxfp8", "sm90", "sm90 experts", "sm90 mxfp8", "sm90 fp8")
@layouts
def test_gradients_have_the_layout_of_weights(path, single):
    want, *_ = expected(path, single)
    mlp = transpose_weights(build(path, single))
    grads = {}
    for fc in linears(mlp):  # what autograd is given, before it copies to the weight's layout
        own = fc.as_weight_grads
        fc.as_weight_grads = lambda dw, fc=fc, own=own: grads.setdefault(fc, own(dw))
    run(path, mlp)
    got = [grad for fc in linears(mlp) for grad in grads[fc]]
    for w, grad, other in zip(weights(mlp), got, want, strict=True):
        assert w.stride(-2) == 1
        assert grad.stride() == w.stride()
        # Sums have another order, and autograd has not rounded to the weight's dtype yet.
        assert_close(grad, other, coarser(grad.dtype, other.dtype), roundings=16)


@pytest.mark.usefixtures("cpu_or_hopper")
@some_paths(
    "unfused",
    "unfused mxfp8",
    "sm90",
    "sm90 experts",
    "sm90 mxfp8",
    "sm90 fp8",
    "sm100",
    "sm100 mxfp8",
)
@layouts
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_main_grads_of_any_layout(path, single, dtype):
    want, *_ = expected(path, single)
    for turn in (lambda t: t, lambda t: t.mT.contiguous().mT):
        mlp = transpose_weights(build(path, single, accumulate_into_main_grad=True))
        for w in weights(mlp):
            w.main_grad = turn(torch.ones(w.shape, dtype=dtype))
        run(path, mlp)
        for w, grad in zip(weights(mlp), want, strict=True):
            assert_close(w.main_grad, 1 + grad.double(), coarser(dtype, grad.dtype), roundings=16)


@layouts
def test_products_of_bf16_reach_fp32_unrounded(single):
    """The fused backward of one linear, against FP64 products of the same BF16 values."""
    options = {"single_grouped_weight": single, "dtype": BF16, "bias": False}
    op = fz.GroupedLinear(4, 32, 64, accumulate_into_main_grad=True, **options)
    for w in op.weights():
        w.main_grad = torch.zeros(w.shape)
    x, dy = torch.randn(ROWS, 32).to(BF16), torch.randn(ROWS, 64).to(BF16)
    with assume_target("sm90"):
        op(x, SIZES).backward(dy)
    assert op.plan.kernels == ("sm90",)
    got = torch.stack([w.main_grad for w in op.weights()]).view(4, 64, 32)
    for group, (dy_e, x_e) in enumerate(zip(dy[:8].split(SIZES), x[:8].split(SIZES), strict=True)):
        ref.assert_accurate(got[group], dy_e.double().t() @ x_e.double())


@pytest.mark.usefixtures("cpu_or_hopper")
@paths
def test_what_autograd_gets_instead(path):
    mlp = build(path, False, accumulate_into_main_grad=True)
    give_main_grads(mlp)
    flagged, zeroed, silent, *_ = weights(mlp)
    for w in (flagged, zeroed):
        w.grad_added_to_main_grad = False
    zeroed.zero_out_wgrad = True
    ran = []
    flagged.register_post_accumulate_grad_hook(lambda p: ran.append(p.grad_added_to_main_grad))
    run(path, mlp)
    assert ran == [True]
    assert zeroed.grad_added_to_main_grad
    assert not hasattr(silent, "grad_added_to_main_grad")
    assert (flagged.grad.shape, flagged.grad.dtype) == (flagged.shape, flagged.dtype)
    assert torch.equal(zeroed.grad, torch.zeros_like(zeroed))
    assert silent.grad is None


@pytest.mark.usefixtures("cpu_or_hopper")
def test_a_flat_main_grad_and_one_that_is_handed_out():
    """Megatron's buffers are slices of a flat one; Megatron-FSDP's change from step to step."""
    mlp = build(UNFUSED, True, accumulate_into_main_grad=True)
    flat = torch.zeros(mlp[0].weight.numel())
    mlp[0].weight.main_grad = flat
    handed = torch.zeros(mlp[2].weight.shape)
    mlp[2].weight.__fsdp_param__ = True
    mlp[2].weight.get_main_grad = lambda: handed
    run(UNFUSED, mlp)
    want, *_ = expected(UNFUSED, True)
    assert torch.equal(flat.view_as(want[0]), want[0])
    assert torch.equal(handed, want[1])
    assert mlp[2].weight.main_grad is handed


BAD = {
    "none": lambda w: None,
    "another size": lambda w: torch.zeros(3),
    "another shape, not a view": lambda w: torch.zeros(w.shape[::-1]).permute(2, 1, 0)[:, ::2],
    "FP16": lambda w: torch.zeros(w.shape, dtype=torch.float16),
    "another device": lambda w: torch.zeros(w.shape, device="meta"),
}


@pytest.mark.usefixtures("cpu_or_hopper")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", ["grouped", "dense"])
def test_a_main_grad_that_does_not_fit(bad, kind):
    if kind == "grouped":
        op = fz.GroupedLinear(2, 4, 6, single_grouped_weight=True, accumulate_into_main_grad=True)
        y = op(torch.randn(3, 4), [1, 2])
    else:
        op = fz.Linear(4, 6, accumulate_into_main_grad=True)
        y = op(torch.randn(3, 4))
    shape = tuple(op.weight.shape)
    op.weight.main_grad = BAD[bad](op.weight.expand(2, 6, 4))
    with pytest.raises(ValueError, match="main_grad of every weight") as error:
        y.sum().backward()
    assert str(shape) in str(error.value)
    assert op.weight.grad is None


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("main_dtype", [FP32, BF16])
@pytest.mark.parametrize("recipe", [None, MX])
@pytest.mark.parametrize("overwrite", [False, True])
def test_dense(dtype, main_dtype, recipe, overwrite):
    """Fused with a residual, the product's backward is another op's."""
    make = lambda **options: fz.Sequential(  # noqa: E731
        fz.MakeExtraOutput(in_place=True).set_extra_output_channel(0, "r", output_to_caller=False),
        fz.BasicLinear(32, 32, dtype=dtype, **options),
        fz.AddExtraInput().set_extra_input_channel(0, "r"),
        fz.Linear(32, 64, dtype=dtype, **options),
    )
    plain, mine = make(), make(accumulate_into_main_grad=True)
    mine.load_state_dict(plain.state_dict())
    old = []
    for op in (mine[1], mine[3]):
        op.weight.overwrite_main_grad = overwrite
        old.append(torch.randn(op.weight.shape).to(main_dtype))
        op.weight.main_grad = old[-1].clone()
    x, dy = torch.randn(32, 32).to(dtype), torch.randn(32, 64).to(dtype)
    for seq in (plain, mine):
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            seq(x.requires_grad_()).backward(dy)
    assert ("backward_linear_add" in mine.plan.fired) == (recipe is None)
    for mine_op, op, before in zip((mine[1], mine[3]), (plain[1], plain[3]), old, strict=True):
        assert mine_op.weight.grad is None
        want = op.weight.grad.double() + (0 if overwrite else before.double())
        assert_close(mine_op.weight.main_grad, want, coarser(dtype, main_dtype))
    assert torch.equal(mine[3].bias.grad, plain[3].bias.grad)


def test_where_pytorch_rounds_is_explained():
    mlp = build(UNFUSED, True, accumulate_into_main_grad=True).bfloat16()
    inputs = [
        t.bfloat16() if t.is_floating_point() else t for t in ref.grouped_mlp_inputs(hidden=WIDTH)
    ]
    inputs.append(inputs[1])
    said = "weight gradients are rounded to bfloat16 before they are added to main_grad"
    without_kernels = fz.Target(device="cuda", sm=90, cutlass_dsl=None)
    assert said in str(fz.explain(mlp, *inputs, target=without_kernels))
    assert said not in str(fz.explain(mlp, *inputs, target="sm80"))  # Triton's, in FP32
    assert said not in str(fz.explain(mlp, *inputs, target="sm90"))


# --- delayed ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cpu_or_hopper")
@paths
@layouts
def test_delayed(path, single):
    mlp = build(path, single, delay_wgrad_compute=True)
    fc1, fc2 = linears(mlp)
    assert fc1.need_backward_dw()
    assert not any(fc.need_backward_dw() for fc in linears(build(path, single)))
    assert all(w.skip_backward_post_hook for w in weights(mlp))
    assert not any(hasattr(b, "skip_backward_post_hook") for b in biases(mlp))
    called = []
    fc1.register_wgrad_accumulation_and_reduce_hooks(
        wgrad_accumulation_and_reduce_hook=lambda: called.append(fc1.weights()[0].grad)
    )
    fc1.backward_dw()  # nothing is waiting
    inputs = run(path, mlp)
    want, want_biases, (want_inputs,) = expected(path, single)
    assert all(w.grad is None for w in weights(mlp))
    ref.assert_equal((*inputs, *(b.grad for b in biases(mlp))), (*want_inputs, *want_biases))
    with path.kernels():
        for _ in range(2):  # the second time for nothing
            fc2.backward_dw()
            fc1.backward_dw()
    for w, grad in zip(weights(mlp), want, strict=True):
        assert w.grad.dtype == w.dtype
        assert torch.equal(w.grad, grad)
    assert len(called) == 1
    assert called[0] is fc1.weights()[0].grad


@pytest.mark.usefixtures("cpu_or_hopper")
@paths
def test_delayed_micro_batches(path):
    """Backwards wait in order; each call takes one."""
    mlp = build(path, True, delay_wgrad_compute=True)
    run(path, mlp, 2)
    run(path, mlp, 3)
    first, *_ = expected(path, True)
    both, *_ = expected(path, True, (2, 3))
    for fc, one, two in zip(linears(mlp), first, both, strict=True):
        for want in (one, two, two):
            with path.kernels():
                fc.backward_dw()
            assert torch.equal(fc.weight.grad, want)


@pytest.mark.usefixtures("cpu_or_hopper")
@paths
@layouts
def test_delayed_into_main_grad(path, single):
    mlp = build(path, single, delay_wgrad_compute=True, accumulate_into_main_grad=True)
    before = give_main_grads(mlp)
    weights(mlp)[0].overwrite_main_grad = True
    weights(mlp)[0].grad_added_to_main_grad = False
    run(path, mlp)
    assert weights(mlp)[0].grad_added_to_main_grad
    assert all(torch.equal(w.main_grad, old) for w, old in zip(weights(mlp), before, strict=True))
    # The flag and the buffer are those of the backward.
    del weights(mlp)[0].overwrite_main_grad
    buffers = [w.main_grad for w in weights(mlp)]
    with path.kernels():
        for fc in (*linears(mlp), linears(mlp)[0]):
            fc.backward_dw()
    want, *_ = expected(path, single)
    for buffer, old, grad in zip(buffers, before, want, strict=True):
        total = grad.double() + (0 if buffer is buffers[0] else old.double())
        assert_close(buffer, total, grad.dtype)
    assert [w.grad is None for w in weights(mlp)] == [False] + [True] * (len(buffers) - 1)


@pytest.mark.usefixtures("cpu_or_hopper")
def test_delayed_with_a_scaled_single_bias():
    """Others crash here."""
    options = {"scale_bias": True, "single_grouped_bias": True, "single_grouped_weight": True}
    op = fz.GroupedLinear(4, 8, 6, delay_wgrad_compute=True, **options)
    plain = fz.GroupedLinear(4, 8, 6, **options)
    torch.nn.init.normal_(op.bias)
    plain.load_state_dict(op.state_dict())
    x, dy = torch.randn(ROWS, 8), torch.randn(ROWS, 6)
    grads = []
    for each in (op, plain):
        scales = torch.ones(ROWS).requires_grad_()
        each(x, SIZES, scales).backward(dy)
        each.backward_dw()
        grads.append((each.weight.grad, each.bias.grad, scales.grad))
    ref.assert_equal(*grads)


@pytest.mark.usefixtures("cpu_or_hopper")
def test_a_copy_waits_for_nothing():
    mlp = build(UNFUSED, True, delay_wgrad_compute=True)
    run(UNFUSED, mlp)
    twin = copy.deepcopy(mlp)
    for fc in (twin[0], twin[2]):
        fc.weight.grad = None
        fc.backward_dw()
        assert fc.weight.grad is None
    mlp[0].backward_dw()
    assert mlp[0].weight.grad is not None


# --- which weights -------------------------------------------------------------------------------

KINDS = {
    "main": {"accumulate_into_main_grad": True},
    "delayed": {"delay_wgrad_compute": True},
    "both": {"accumulate_into_main_grad": True, "delay_wgrad_compute": True},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def with_main_grad(w):
    w = torch.nn.Parameter(w.detach().clone())
    w.main_grad = torch.zeros_like(w)
    return w


def called_with(module, weight, *inputs):
    return torch.func.functional_call(module, {"weight": weight}, inputs)


def replaced(module, weight, *inputs):
    y = module(*inputs)
    module.weight = weight
    return y


def loaded(module, weight, *inputs):
    y = module(*inputs)
    module.load_state_dict({"weight": weight}, assign=True)
    return y


def gradient_of(w, kind):
    """Of a weight whose other gradient stays as it was."""
    if kind == "delayed":
        assert not w.main_grad.any()
        return w.grad
    assert w.grad is None
    return w.main_grad


@kinds
@pytest.mark.parametrize("how", [called_with, replaced, loaded])
@pytest.mark.parametrize("machine", ["sm80", "sm90"])
def test_the_gradient_is_that_of_the_weight_that_the_forward_used(kind, how, machine):
    op = fz.GroupedLinear(2, 32, 64, bias=False, single_grouped_weight=True, dtype=BF16)
    plain, x, dy = copy.deepcopy(op), torch.randn(6, 32).to(BF16), torch.randn(6, 64).to(BF16)
    (want,) = torch.autograd.grad(plain(x, [4, 2]), plain.weight, dy)
    op = fz.GroupedLinear(
        2, 32, 64, bias=False, single_grouped_weight=True, dtype=BF16, **KINDS[kind]
    )
    op.weight = with_main_grad(plain.weight)
    mine, other = op.weight, with_main_grad(op.weight)
    used, unused = (other, mine) if how is called_with else (mine, other)
    with assume_target(machine):
        how(op, other, x, torch.tensor([4, 2])).backward(dy)
        op.backward_dw()
    assert torch.equal(gradient_of(used, kind), want)
    nothing = gradient_of(unused, kind)
    assert nothing is None or not nothing.any()


@kinds
def test_a_weight_that_is_computed_is_refused(kind):
    op = fz.GroupedLinear(2, 4, 6, bias=False, single_grouped_weight=True, **KINDS[kind])
    y = called_with(op, with_main_grad(op.weight) * 1, torch.randn(3, 4), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"GroupedLinear must be leaf tensors .* got weight c"):
        y.sum().backward()


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(
    ("kind", "first"), [("main", False), ("delayed", False), ("delayed", True), ("both", True)]
)
def test_weights_frozen_before_their_gradient_is_added_get_none(kind, first, single):
    """As from autograd, which asks when it accumulates; ``first`` is ``backward()``, if it is."""
    layout = {"bias": False, "single_grouped_weight": single}
    op, plain = (
        fz.GroupedLinear(3, 4, 6, **layout, **KINDS[kind]),
        fz.GroupedLinear(3, 4, 6, **layout),
    )
    x, dy = torch.randn(5, 4), torch.randn(5, 6)
    plain(x, [2, 1, 2]).backward(dy)
    for w in op.weights():
        w.main_grad = torch.zeros_like(w)
    y = op(x, [2, 1, 2])
    frozen, *others = op.weights()
    if first:
        y.backward(dy)
        frozen.requires_grad_(False)
    else:
        frozen.requires_grad_(False)
        y.backward(dy)
    op.backward_dw()
    nothing = gradient_of(frozen, kind)
    assert nothing is None or not nothing.any()
    for w, mine in zip(others, plain.weights()[1:], strict=True):
        torch.testing.assert_close(gradient_of(w, kind), mine.grad)


@pytest.mark.usefixtures("cpu_or_hopper")
def test_frozen_weights_are_left_alone():
    mlp = build(UNFUSED, True, delay_wgrad_compute=True, accumulate_into_main_grad=True)
    for w in weights(mlp):
        w.requires_grad_(False)
    run(UNFUSED, mlp)  # needs no main_grad
    mlp[0].backward_dw()
    assert all(w.grad is None for w in weights(mlp))


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cpu_or_hopper", "fresh_compiler")
class TestCompiled:
    @pytest.mark.parametrize(
        ("name", "single"),
        [
            ("unfused", True), ("unfused", False), ("sm90", True), ("sm90", False),
            ("sm90 experts", True), ("sm90 mxfp8", True), ("sm100 mxfp8", False),
        ],
    )  # fmt: skip
    def test_main_grad(self, name, single):
        path = PATHS[name]
        mlp = build(path, single, accumulate_into_main_grad=True, bias=False)
        compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
        inputs, dy = path.inputs(), torch.randn(ROWS, WIDTH).to(path.dtype)
        for overwrite in (False, True):
            results = []
            for call in (mlp, compiled, compiled):
                torch.manual_seed(5)
                give_main_grads(mlp)  # new tensors each time
                for w in weights(mlp):
                    w.overwrite_main_grad = overwrite
                    w.grad, w.grad_added_to_main_grad = None, False
                with path.on():
                    call(*inputs).backward(dy)
                    assert mlp.plan.fired + mlp.plan.kernels == path.fired
                for w in weights(mlp):  # a tensor of no meaning is said to be one
                    assert w.grad_added_to_main_grad or not w.grad.any()
                results.append([w.main_grad for w in weights(mlp)])
            for eager, *others in zip(*results, strict=True):
                for other in others:
                    torch.testing.assert_close(eager, other)

    def test_delayed_is_refused(self):
        op = fz.GroupedLinear(4, 8, 6, delay_wgrad_compute=True)
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match="delay_wgrad_compute of GroupedLinear must be False"):
            compiled(torch.randn(ROWS, 8), torch.tensor(SIZES))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", [None, fz.recipes.MXFP8BlockScaling()], ids=["none", "mxfp8"])
@pytest.mark.parametrize("goes", ["to autograd", "to main_grad", "delayed"])
@pytest.mark.parametrize("target", ["cpu", "sm90"])
def test_some_groups_are_frozen(target, goes, recipe, compiled):
    """The others have the gradients that they have where none is."""
    if compiled and goes == "delayed":
        pytest.skip("delayed gradients are not compiled")
    options = {
        "accumulate_into_main_grad": goes == "to main_grad",
        "delay_wgrad_compute": goes == "delayed",
    }
    whole = fz.GroupedLinear(3, 64, 64, dtype=torch.bfloat16)
    op = fz.GroupedLinear(3, 64, 64, dtype=torch.bfloat16, **options)
    op.load_state_dict(whole.state_dict())
    frozen = ("weight0", "bias1")
    for name in frozen:
        op.get_parameter(name).requires_grad_(False)
    if goes == "to main_grad":
        for name in ("weight1", "weight2"):
            op.get_parameter(name).main_grad = torch.zeros(64, 64)
    splits, results = torch.tensor([30, 0, 34]), []
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    for module in (op, whole):
        call = module
        if compiled and module is op:
            call = torch.compile(op, backend="aot_eager", fullgraph=True)
        x.grad = None
        with assume_target(target), fz.autocast(enabled=recipe is not None, recipe=recipe):
            y = call(x, splits)
            y.float().square().sum().backward()
        module.backward_dw()
        results.append([y, x.grad])
    for name, p in op.named_parameters():
        if name in frozen:
            assert p.grad is None
            continue
        in_main_grad = goes == "to main_grad" and name.startswith("weight")
        results[0].append(p.main_grad if in_main_grad else p.grad)
        results[1].append(whole.get_parameter(name).grad)
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("target", "activation", "recipe"),
    [
        ("cpu", "ScaledSwiGLU", fz.recipes.MXFP8BlockScaling()),
        ("sm90", "ScaledClampedQGeGLU", fz.recipes.MXFP8BlockScaling()),
        ("sm90", "ScaledClampedQGeGLU", None),
    ],
    ids=["mxfp8", "sm90 mxfp8", "sm90"],
)
def test_compiled_for_any_number_of_rows(recipe, activation, target, fresh_compiler):
    """With dynamic=True the numbers of formats and activations are constants all the same."""
    options = {"dtype": torch.bfloat16, "single_grouped_weight": True, "bias": False}
    options["accumulate_into_main_grad"] = True
    mlp = fz.Sequential(
        fz.GroupedLinear(2, 64, 128, **options),
        getattr(fz, activation)(),
        fz.GroupedLinear(2, 64, 64, **options),
    )
    scales, compiled = torch.rand(96), torch.compile(mlp, fullgraph=True, dynamic=True)
    for rows in (64, 96):
        x = torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=True)
        splits, found = torch.tensor([rows - 32, 32]), []
        for call in (mlp, compiled):
            for op in (mlp[0], mlp[2]):
                op.weight.main_grad = torch.zeros(op.weight.shape)
            x.grad = None
            with assume_target(target), fz.autocast(enabled=recipe is not None, recipe=recipe):
                y = call(x, splits, scales[:rows], splits)
                y.sum().backward()
            found.append((y.detach(), x.grad, mlp[0].weight.main_grad, mlp[2].weight.main_grad))
        for got, want in zip(*reversed(found), strict=True):
            # Compiled code rounds less in between, so that FP8 elements may be the next ones.
            ref.assert_near(got, want, 2**-7 if recipe is None else 2**-5)


def test_delayed_is_refused_where_it_would_be_lost(tmp_path):
    op, x, splits = fz.GroupedLinear(4, 8, 6, delay_wgrad_compute=True), *inputs_of_delayed()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y = op(x, splits)
        with pytest.raises(RuntimeError, match="must be False under compiled autograd"):
            y.sum().backward()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(op))
        with pytest.raises(RuntimeError, match="must be False in DistributedDataParallel"):
            parallel(x, splits)
        op(x, splits).sum().backward()
        op.backward_dw()
        ignored = fz.Sequential(copy.deepcopy(op), fz.Linear(6, 6))
        ignored.zero_grad()
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            ignored, [name for name, _ in ignored.named_parameters() if name.startswith("0.")]
        )
        nn.init.eye_(ignored[1].weight)
        nn.parallel.DistributedDataParallel(ignored)(x, splits).sum().backward()
        ignored[0].backward_dw()
    finally:
        dist.destroy_process_group()
    for got, want in zip(ignored[0].weights(), op.weights(), strict=True):
        assert torch.equal(got.grad, want.grad)


@some_paths("unfused bf16", "sm90", "sm90 fp8", "sm90 experts")
def test_every_path_refuses_delayed_gradients_in_data_parallel(path, monkeypatch):
    mlp = build(path, True, delay_wgrad_compute=True)
    of_mlp = [*mlp.parameters()]
    parallel = SimpleNamespace(require_backward_grad_sync=True, _module_parameters=of_mlp)
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", parallel)
    with sm90_on_cpu():  # the node without contexts, too
        with pytest.raises(RuntimeError, match="must be False in DistributedDataParallel"):
            run(path, mlp)
        # Where nothing would be reduced, nothing is lost: inference, others' weights, `no_sync`.
        mlp.eval()
        inputs = path.inputs()
        with path.on(), torch.no_grad():
            mlp(*inputs)
        mlp.train()
        parallel._module_parameters = [nn.Parameter(torch.zeros(1))]
        run(path, mlp)
        parallel._module_parameters, parallel.require_backward_grad_sync = of_mlp, False
        run(path, mlp)


def inputs_of_delayed():
    return torch.randn(ROWS, 8, requires_grad=True), torch.tensor(SIZES)
