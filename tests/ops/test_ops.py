"""Every basic op alone against torch.nn.functional or a closed form, forward and backward."""

import pytest
import reference as ref
import torch
from every_op import MAKE, OPS, extra_inputs, randomised
from fuzz import catalog
from torch import nn

import fusible as fz
from fusible.fuser.context import OperationContext
from fusible.fuser.plan import GradNeeds
from fusible.ops import scaled_activation

COLLECTIVE = {"AllGather", "AllReduce", "AllReduceGrad", "ReduceScatter"}  # of several processes
SHAPES = [(5, 8), (2, 3, 8), (2, 1, 3, 8)]


def test_every_op_is_in_the_tables_of_the_tests():
    bases = {"BasicOperation", "FusedOperation", "FusibleOperation", "Sequential"}
    public = {
        name
        for name in fz.ops.__all__
        if isinstance(kind := getattr(fz, name), type) and issubclass(kind, fz.FusibleOperation)
    }
    assert {type(make(8)).__name__ for make in MAKE.values()} == public - bases - COLLECTIVE
    assert catalog.KINDS.keys() >= public - bases - COLLECTIVE


@pytest.mark.parametrize("dtype", [torch.float64, *ref.DTYPES])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("make", "plain"), OPS.values(), ids=OPS)
def test_values_and_gradients(make, plain, shape, dtype):
    op = randomised(make(8).to(dtype))
    x = torch.randn(shape).to(dtype).requires_grad_()
    extra = [t.detach().to(dtype).requires_grad_() for t in extra_inputs(op, x)]
    y = op(x, *extra)
    dy = torch.randn(y.shape).to(dtype)
    tensors = [x, *extra, *op.parameters()]
    exact_y, exact = ref.gradients(plain, tensors, dy)
    grads = torch.autograd.grad(y, tensors, dy)
    assert y.dtype == dtype
    ref.assert_accurate(y.detach(), exact_y)
    for t, mine, theirs in zip(tensors, grads, exact, strict=True):
        assert mine.dtype == t.dtype
        ref.assert_accurate(mine, theirs)


@pytest.mark.parametrize(("make", "plain"), OPS.values(), ids=OPS)
def test_gradcheck(make, plain):
    op = randomised(make(8).double())
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    extra = [t.detach().double().requires_grad_() for t in extra_inputs(op, x)]
    params = list(op.parameters())
    assert torch.autograd.gradcheck(
        lambda x, *rest: op(x, *rest[: len(extra)]), (x, *extra, *params)
    )


@pytest.mark.parametrize("make", [fz.ScaledSwiGLU, fz.ScaledClampedQGeGLU, fz.ScaledSReLU])
def test_many_rows_in_pieces_give_the_same_values(make, monkeypatch):
    op = make()
    for shape in ((0, 8), (5, 8), (3, 2, 8)):
        x = torch.randn(shape).bfloat16().requires_grad_()
        scales = torch.rand(shape[:-1]).requires_grad_()
        whole = op(x, scales)
        dy = torch.randn_like(whole)
        grads = torch.autograd.grad(whole, (x, scales), dy)
        for piece in (1, 20, 24):  # elements: less than a row, two and a half, three
            monkeypatch.setattr(scaled_activation, "PIECE_ELEMENTS", piece)
            y = op(x, scales)
            dx, dscales = torch.autograd.grad(y, (x, scales), dy)
            # FP32 inside: one rounding to BF16, and a sum of up to 8 products for each scale.
            ref.assert_equal_but_for_rounding(y, whole, 1)
            ref.assert_equal_but_for_rounding(dx, grads[0], 1)
            ref.assert_equal_but_for_rounding(dscales, grads[1], 8)
        monkeypatch.undo()


@pytest.mark.parametrize("scales_dtype", [torch.float64, *ref.DTYPES])
@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("make", [fz.ScaledSwiGLU, fz.ScaledClampedQGeGLU])
def test_scales_of_any_float_dtype(make, dtype, scales_dtype):
    op = make()
    x = torch.randn(6, 8).to(dtype).requires_grad_()
    scales = torch.rand(6).to(scales_dtype).requires_grad_()
    dy = torch.randn(6, 4).to(dtype)
    plain = ref.swiglu if make is fz.ScaledSwiGLU else ref.clamped_qgeglu
    exact_y, exact = ref.gradients(plain, [x, scales], dy)
    y = op(x, scales)
    dx, dscales = torch.autograd.grad(y, (x, scales), dy)
    assert (y.dtype, dx.dtype, dscales.dtype) == (dtype, dtype, scales_dtype)
    ref.assert_accurate(y.detach(), exact_y)
    ref.assert_accurate(dx, exact[0])
    # The arithmetic is in FP32 also where the scales are FP64.
    narrower = dscales.to(torch.float32) if scales_dtype == torch.float64 else dscales
    ref.assert_accurate(narrower, exact[1])


def test_make_extra_output():
    op = fz.MakeExtraOutput()
    x = torch.randn(3, 4, requires_grad=True)
    y, extra = op(x)
    assert torch.equal(y, x)
    assert torch.equal(extra, x)
    (dx,) = torch.autograd.grad((y, extra), x, (torch.full((3, 4), 2.0), torch.full((3, 4), 5.0)))
    assert torch.equal(dx, torch.full((3, 4), 7.0))


@pytest.mark.parametrize("used", [0, 1])
def test_make_extra_output_of_which_one_is_used(used):
    x = torch.randn(3, 4, requires_grad=True)
    outputs = fz.MakeExtraOutput()(x)
    (outputs[used] * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 3.0))


def test_identity_gives_a_tensor_of_its_own():
    """Autograd must not see the output as the input itself."""
    x = torch.randn(3, requires_grad=True)
    y = fz.Identity()(x)
    assert y is not x
    assert y.grad_fn is not None


# --- what ops save ----------------------------------------------------------------------------


def saved_by(op, x, *extra, recipe=None):
    params = op.own_parameters()
    needs = GradNeeds(True, True, (True,) * len(params), (True,) * len(extra))
    ctx = OperationContext(needs, recipe, parameters=params)
    with torch.no_grad():  # as in a run
        y, _ = op.fuser_forward(
            [ctx],
            x,
            basic_op_extra_inputs=[extra],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[{}],
        )
    return ctx, y


@pytest.mark.parametrize("make", [fz.GELU, fz.ReLU, fz.SiLU, fz.SwiGLU])
def test_activations_save_their_input(make):
    x = torch.randn(3, 8)
    ctx, _ = saved_by(make(), x)
    assert [t is x for t in ctx.to_save] == [True]
    assert ctx.dtype == torch.float32


@pytest.mark.parametrize("make", [fz.ScaledSwiGLU, fz.ScaledClampedQGeGLU])
def test_scaled_activations_save_input_and_scales(make):
    x, scales = torch.randn(3, 8), torch.rand(3)
    ctx, _ = saved_by(make(), x, scales)
    assert [a is b for a, b in zip(ctx.to_save, (x, scales), strict=True)] == [True, True]
    assert ctx.dtype == torch.float32


def test_basic_linear_saves_input_and_weight():
    op, x = fz.BasicLinear(8, 4), torch.randn(3, 8)
    ctx, _ = saved_by(op, x)
    assert [a is b for a, b in zip(ctx.to_save, (x, op.weight), strict=True)] == [True, True]
    assert ctx.dtype == torch.float32


@pytest.mark.parametrize("single", [False, True])
def test_grouped_linear_saves_input_ends_scales_and_weights(single):
    op = fz.GroupedLinear(3, 8, 4, scale_bias=True, single_grouped_weight=single)
    x, scales = torch.randn(6, 8), torch.rand(6)
    ctx, _ = saved_by(op, x, torch.tensor([1, 2, 3]), scales)
    saved_x, ends, row_scale, *weights, bias = ctx.to_save
    assert saved_x is x
    assert ends.tolist() == [1, 3, 6]
    assert ends.dtype == torch.int32
    assert torch.equal(row_scale, scales)
    assert all(a is b for a, b in zip(weights, op.weights(), strict=True))
    assert torch.equal(bias, torch.stack(op.biases()))
    assert ctx.dtype == torch.float32
    ctx, _ = saved_by(fz.GroupedLinear(3, 8, 4), x, torch.tensor([1, 2, 3]))
    assert ctx.to_save[2] is None
    assert ctx.to_save[-1] is None


@pytest.mark.parametrize(
    "make",
    [
        fz.Identity,
        fz.AddExtraInput,
        fz.MakeExtraOutput,
        lambda: fz.ConstantScale(2.0),
        lambda: fz.Bias(8),
        lambda: fz.Reshape((8, 3)),
    ],
)
def test_small_ops_save_nothing(make):
    op, x = make(), torch.randn(3, 8)
    ctx, _ = saved_by(op, x, *[x] * op.num_extra_inputs)
    assert ctx.to_save == ()


# --- parameters -------------------------------------------------------------------------------


def test_linear_is_nn_linear():
    ours, theirs = fz.Linear(6, 4), nn.Linear(6, 4)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight", "bias"]
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 6)
    torch.testing.assert_close(ours(x), theirs(x))
    assert list(fz.Linear(6, 4, bias=False).state_dict()) == ["weight"]
    assert fz.Linear(6, 4, bias=False).bias is None
    with_same_seed = []
    for make in (fz.Linear, nn.Linear):
        torch.manual_seed(1)
        with_same_seed.append(make(6, 4).weight)
    assert torch.equal(*with_same_seed)
    assert torch.equal(fz.Linear(6, 4).bias, torch.zeros(4))


class Tracker:
    """As Megatron's: forks into a random state of its own."""

    def __init__(self):
        self.forks = 0

    def fork(self):
        self.forks += 1
        return torch.random.fork_rng(devices=[])


def test_random_state_tracker():
    tracker = Tracker()
    before = torch.get_rng_state()
    fz.Linear(4, 4, rng_state_tracker_function=lambda: tracker)
    fz.GroupedLinear(2, 4, 4, rng_state_tracker_function=lambda: tracker)
    assert tracker.forks == 2
    assert torch.equal(torch.get_rng_state(), before)


class Cube(fz.BasicOperation):
    """Defines its formula and nothing else."""

    def formula(self, input_):
        return input_**3


class Stretch(fz.BasicOperation):
    """A formula with parameters."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor([0.5, -1.0], dtype=torch.float64))

    def formula(self, input_, a, b):
        return torch.sin(a * input_) + b


@pytest.mark.parametrize("make", [Cube, Stretch])
def test_an_op_of_a_formula_alone(make):
    op = make()
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *params: op(x), (x, *op.parameters()))
    torch.testing.assert_close(op(x), op.formula(x, *op.parameters()))


def test_frozen_parameter_of_a_formula():
    op = Stretch()
    op.a.requires_grad_(False)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    op(x).sum().backward()
    assert op.a.grad is None
    assert torch.equal(op.b.grad, torch.full((2,), 4.0, dtype=torch.float64))
    torch.testing.assert_close(x.grad, op.a * torch.cos(op.a * x.detach()))


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (fz.Identity(), "Identity()"),
        (fz.ConstantScale(0.0), "ConstantScale(scale=0.0)"),
        (fz.AddExtraInput(), "AddExtraInput()"),
        (fz.AddExtraInput(in_place=True), "AddExtraInput(in_place=True)"),
        (fz.SwiGLU(), "SwiGLU()"),
        (
            fz.ClampedSwiGLU(limit=2.0),
            "ClampedSwiGLU(limit=2.0, alpha=1.702, glu_linear_offset=1.0)",
        ),
        (fz.BasicLinear(2, 3), "BasicLinear(in_features=2, out_features=3)"),
        (fz.RMSNorm((2, 3)), "RMSNorm(normalized_shape=(2, 3), features=6, eps=1e-05)"),
    ],
)
def test_an_ops_text_has_its_facts(op, text):
    assert repr(op) == text
