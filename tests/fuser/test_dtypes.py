"""Dtypes inside a run: what ops declare of their outputs, and that plans go by it."""

import itertools
import random
from contextlib import ExitStack

import pytest
import torch
from every_op import MAKE, extra_inputs

import fusible as fz
from fusible import recipes
from fusible.fuser.op_facts import Dtypes
from fusible.kernels.sm100 import ops as sm100_ops
from fusible.testing import assume_target

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [BF16, FP16, FP32, FP64]
FEATURES, ROWS = 8, 6


@pytest.mark.parametrize("name", MAKE)
def test_ops_declare_what_they_give(name):
    """Wherever an op runs at all: each dtype of its input, extra inputs and parameters."""
    tried = 0
    for own, dtype, extra, autocast in itertools.product(DTYPES, DTYPES, DTYPES, [None, BF16]):
        op = MAKE[name](FEATURES).to(own)
        parts = op.basic_ops
        x = torch.randn(ROWS, FEATURES, dtype=dtype)
        inputs = extra_inputs(op, x, extra)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            try:
                returned = op(x, *inputs)
            except ValueError:  # of dtypes that do not go together
                continue
        tried += 1
        outputs = returned if isinstance(returned, tuple) else (returned,)
        declared = (dtype,)
        for part in parts:
            params = tuple(p.dtype for p in part.own_parameters())
            of_extra = tuple(t.dtype for t in inputs)
            declared = part.output_dtypes(Dtypes(declared[0], of_extra, params, autocast))
        assert declared == tuple(t.dtype for t in outputs), (own, dtype, extra, autocast)
    assert tried >= 16


class Widened(fz.BasicOperation):
    def formula(self, input_):
        return input_.float()


class Declared(Widened):
    def output_dtypes(self, given):
        return (torch.float32,)


def linear(dtype, **options):
    return fz.GroupedLinear(2, 64, 64, dtype=dtype, **options)


SPLITS = torch.tensor([5, 3])
ADDEND = torch.randn(8, 64)
# Ops, dtype of the input, extra inputs, autocast, and what linears compute in.
MADE_INSIDE = {
    "FP64 under autocast": ([linear(FP64)], FP64, [SPLITS], BF16, "float64"),
    "FP32 under autocast": ([linear(FP32)], FP32, [SPLITS], BF16, "bfloat16"),
    "FP64 input under autocast": ([linear(FP32)], FP64, [SPLITS], BF16, "bfloat16"),
    "FP32 after BF16": (
        [fz.AddExtraInput(), linear(FP32)], BF16, [ADDEND, SPLITS], None, "float32",
    ),
    "written into BF16": (
        [fz.AddExtraInput(in_place=True), linear(BF16)],
        FP32, [ADDEND.bfloat16(), SPLITS], None, "bfloat16",
    ),
    "swapped": ([fz.Swap(), linear(BF16)], FP32, [ADDEND.bfloat16(), SPLITS], None, "bfloat16"),
    "after an own op": ([Widened(), linear(FP32)], BF16, [SPLITS], None, "float32"),
}  # fmt: skip


@pytest.mark.parametrize("target", ["sm90", "sm100"])
@pytest.mark.parametrize("case", MADE_INSIDE)
def test_plans_go_by_what_the_op_gets(case, target):
    ops, dtype, extra, autocast, computes = MADE_INSIDE[case]
    seq = fz.Sequential(*ops)
    x = torch.randn(8, 64, dtype=dtype)
    with torch.autocast("cpu", autocast, enabled=autocast is not None), assume_target(target):
        seq(x, *[t.clone() for t in extra])
    assert seq.plan.facts[-1].dtype == computes
    assert (target in seq.plan.kernels) == (computes == "bfloat16")


class Reading(fz.BasicOperation):
    """Decides by values, so that it does not run on fake tensors."""

    def op_forward(self, ctx, input_, **_):
        return input_.float() if input_.sum().item() < 1e9 else input_

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


class Gated(fz.BasicOperation):
    """Has a weight of some size, state of all kinds, and takes half of what it gets."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16, 6, dtype=BF16))
        self.register_buffer("count", torch.zeros(()))
        self.noise = None
        self.gives = FP32

    def op_forward(self, ctx, input_, **_):
        self.count += 1
        self.noise = torch.rand_like(input_)
        a, b = (input_ @ ctx.parameters[0].T).chunk(2, -1)
        return (a * b).to(self.gives)

    def op_backward(self, ctx, grad_output):
        raise AssertionError


class AddTable(fz.BasicOperation):
    num_extra_inputs = 1
    extra_input_names = ("table",)

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        return input_ + basic_op_extra_inputs[0][0][:, None], [()]


def reasons(seq):
    return [reason for refusal in seq.plan.refusals for reason in refusal.reasons]


def test_what_an_own_op_gives_is_derived_unless_it_says():
    x = torch.randn(4, 8, dtype=BF16, requires_grad=True)
    hint = "; define output_dtypes of the op that gives it"
    for own, known in ((Widened(), "float32"), (Declared(), "float32"), (Reading(), "unknown")):
        seq = fz.Sequential(own, fz.Bias(8), fz.GELU())
        with assume_target("sm90"):
            seq(x)
        says = f"activation.dtype must be one of bfloat16, float16, got {known}"
        assert f"{says}{hint if known == 'unknown' else ''}" in reasons(seq)
    # A parametrized op computes as it did.
    linear = fz.BasicLinear(8, 8)
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", torch.nn.Identity())
    linear(torch.randn(4, 8))
    assert linear.plan.facts[0].dtype == "float32"


def test_deriving_dtypes_changes_nothing(own_fusions):
    own = Gated()
    seq = fz.Sequential(own, fz.Linear(8, 4))
    x = torch.randn(5, 6, dtype=BF16)
    held, generator = own.count, torch.get_rng_state()
    explained = fz.explain(seq, x, target="sm90")
    assert explained.plans[0].facts[1].input.dtype == "float32"
    assert torch.equal(torch.get_rng_state(), generator)
    assert own.noise is None
    assert own.count is held
    assert own.count == 0
    with torch.no_grad():
        y = seq(x)
        torch.set_rng_state(generator)
        assert torch.equal(own.noise, torch.rand_like(x))
        assert own.count == 1
        assert seq.plan.fired == ("linear_bias_activation",)
        a, b = (x @ own.weight.T).chunk(2, -1)
        torch.testing.assert_close(
            y, torch.nn.functional.linear((a * b).float(), *seq[1].parameters())
        )
        own.gives = FP64
        says = r"Gated must give torch.float32, .* got torch.float64; define its output_dtypes"
        with pytest.raises(RuntimeError, match=says):
            seq(x)


@pytest.mark.parametrize("autocast", [None, BF16])
def test_derived_dtypes_follow_autocast(autocast):
    class Product(fz.BasicOperation):
        def formula(self, input_):
            return input_ @ input_.T @ input_

    seq = fz.Sequential(Product(), fz.Bias(8), fz.GELU())
    with torch.autocast("cpu", autocast, enabled=autocast is not None), assume_target("sm90"):
        seq(torch.randn(4, 8, requires_grad=True))
    known = "float32" if autocast is None else "bfloat16"
    assert seq.plan.facts[1].input.dtype == known


def test_derived_dtypes_with_extra_inputs():
    seq = fz.Sequential(AddTable(), fz.Bias(8), fz.GELU())
    for dtype, known in ((FP32, "float32"), (torch.int64, "float32"), (FP64, "unknown")):
        with assume_target("sm90"), torch.no_grad():
            seq(torch.randn(4, 8), torch.ones(4, dtype=dtype))
        assert seq.plan.facts[1].input.dtype == known


def test_ops_that_no_rule_fits_do_not_run_on_fake_tensors():
    class Counting(fz.BasicOperation):
        calls = 0

        def formula(self, input_):
            self.calls += 1
            return input_ * 2

    op = Counting()
    with torch.no_grad():
        fz.Sequential(op, fz.SiLU())(torch.ones(3))
    assert op.calls == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_derived_dtypes_under_the_compiler():
    class ByHand(fz.BasicOperation):  # a formula is compiled by itself
        def op_forward(self, ctx, input_, **_):
            return input_.float()

        def op_backward(self, ctx, grad_output):
            return grad_output.bfloat16(), ()

    seq = fz.Sequential(ByHand(), fz.Linear(8, 8), fz.GELU())
    x = torch.randn(4, 8, dtype=BF16)
    y = torch.compile(seq, backend="aot_eager", fullgraph=True)(x)
    assert seq.plan.facts[1].input.dtype == "float32"
    assert seq.plan.fired == ("linear_bias_activation",)
    torch.testing.assert_close(y, seq(x))


def test_extra_inputs_from_inside_have_facts():
    router = fz.TopKRouter(64, 4, 2)
    seq = fz.Sequential(router, fz.Dispatch(4), fz.GroupedLinear(4, 64, 64))
    seq(torch.randn(8, 64, requires_grad=True))
    _, dispatch, linear = seq.plan.facts
    assert dispatch.probs.dtype == "float32"
    assert dispatch.probs.requires_grad
    assert dispatch.expert_ids.dtype == "int64"
    assert linear.split_sizes.dtype == "int64"
    assert linear.input.dtype == "float32"
    assert linear.input.source == "op 1"


RECIPES = [
    None,
    None,
    recipes.MXFP8BlockScaling(),
    recipes.NVFP4BlockScaling(),
    recipes.Float8BlockScaling(),
]


def random_call(seed):
    """Ops of dtypes at random, an input, extra inputs, autocast's dtype and a recipe."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    common = draw.choice([BF16, BF16, FP16, FP32, FP64])

    def dtype():
        return draw.choice([common] * 20 + DTYPES)

    def grouped(out_features=64):
        single = {"single_grouped_weight": draw.random() < 0.5}
        return fz.GroupedLinear(2, 64, out_features, dtype=dtype(), **single)

    before = [
        (fz.AddExtraInput(), [torch.randn(8, 64, dtype=dtype())]),
        (fz.RMSNorm(64, dtype=dtype()), []),
        (fz.Bias(64, dtype=dtype()), []),
        (Widened(), []),
        (fz.MakeExtraOutput(), []),
    ]
    ops, extra = [], []
    for op, given in draw.sample(before, draw.choice([0, 0, 1, 2])):
        ops.append(op)
        extra.extend(given)
    ops.append(grouped(128))
    extra.append(SPLITS)
    if draw.random() < 0.7:
        ops += [fz.ScaledSwiGLU(glu_interleave_size=32), grouped()]
        extra += [torch.rand(8, dtype=dtype()), SPLITS]
    for op in ops:
        for p in op.parameters():
            torch.nn.init.normal_(p, std=0.125)
    x = torch.randn(8, 64, dtype=dtype(), requires_grad=True)
    return ops, x, extra, draw.choice([None, None, BF16, FP16]), draw.choice(RECIPES)


def outcome(seed, target):
    """Outputs and gradients, or the error; and what fired."""
    ops, x, extra, autocast, recipe = random_call(seed)
    seq = fz.Sequential(*ops)
    with ExitStack() as stack:
        stack.enter_context(assume_target(target))
        stack.enter_context(torch.autocast("cpu", autocast, enabled=autocast is not None))
        stack.enter_context(fz.autocast(enabled=recipe is not None, recipe=recipe))
        try:
            y = seq(x, *extra)
            y = y[0] if isinstance(y, tuple) else y
            grads = torch.autograd.grad(y, [x, *seq.parameters()], torch.ones_like(y))
        except (TypeError, ValueError, RuntimeError) as error:
            return error, ()
    return [y, *grads], seq.plan.fired + seq.plan.kernels


BOUND = {None: 2**-5, "fp8_block": 2**-4, "mxfp8": 2**-2, "nvfp4": 2**-2}


@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_nothing_fuses_that_its_kernels_then_refuse(target, own_fusions, monkeypatch):
    """Dtypes at random: what raises or runs as the basic ops does so fused, with their values."""
    rules, fused = own_fusions.rules, 0
    for seed in range(80):
        mine, fired = outcome(seed, target)
        own_fusions.rules = ()
        own_fusions.version += 1
        with monkeypatch.context() as patch:
            for kind in (fz.GroupedLinear, fz.BasicLinear):
                patch.setattr(kind, "kernel_rows", ())
            plain, _ = outcome(seed, target)
        own_fusions.rules = rules
        own_fusions.version += 1
        fused += bool(fired)
        if isinstance(plain, Exception):
            assert str(mine) == str(plain), seed
            continue
        recipe = random_call(seed)[-1]
        bound = BOUND[None if recipe is None else recipe.name]
        for a, b in zip(mine, plain, strict=True):
            assert a.dtype == b.dtype, seed
            error, size = (a.double() - b.double()).norm(), b.double().norm()
            assert error <= bound * size + 1e-6, (seed, fired)
    assert fused >= 20


@pytest.fixture
def defaults_to_bfloat16():
    """PyTorch's default dtype as serving code sets it."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("recipe", [None, fz.recipes.MXFP8BlockScaling()], ids=["none", "mxfp8"])
@pytest.mark.parametrize("target", ["cpu", "sm90", "sm100"])
def test_the_default_dtype_changes_nothing(target, recipe, request):
    """FP32 ones, scales and sums of kernels are FP32 whatever tensors are made as."""
    options = {"bias": False, "single_grouped_weight": True, "dtype": torch.bfloat16}
    mlp = fz.Sequential(
        fz.GroupedLinear(2, 64, 128, **options),
        fz.ScaledSwiGLU(glu_interleave_size=32),
        fz.GroupedLinear(2, 64, 64, **options),
    )
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    splits, scales = torch.tensor([40, 20]), torch.rand(64, requires_grad=True)
    leaves = (x, scales, *mlp.parameters())

    def step():
        with assume_target(target), fz.autocast(enabled=recipe is not None, recipe=recipe):
            y = mlp(x, splits, scales, splits)
            return y, *torch.autograd.grad(y.float().square().sum(), leaves)

    expected = step()
    request.getfixturevalue("defaults_to_bfloat16")
    sm100_ops._ones.cache_clear()
    for got, want in zip(step(), expected, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_deriving_dtypes_leaves_plain_attributes_and_autocasts_cache():
    class Counts(fz.BasicOperation):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8, 8))
            self.calls = 0

        def op_forward(self, ctx, input_, **_):
            self.calls += 1
            self.first = self.calls == 1
            return input_ @ self.weight

        def op_backward(self, ctx, grad_output):
            raise AssertionError

    own, x = Counts(), torch.randn(4, 8)
    module = fz.Sequential(own, fz.Bias(8), fz.GELU())
    with torch.autocast("cpu", BF16):
        fz.explain(module, x)
        own.calls = 0
        y = module(x)
        expected = torch.nn.functional.gelu(x @ own.weight, approximate="tanh")
    assert own.calls == 1
    assert own.first
    assert type(y) is torch.Tensor
    torch.testing.assert_close(y.float(), expected.float(), rtol=2**-6, atol=2**-6)


def test_what_does_not_run_on_fake_tensors_is_not_logged(caplog):
    hidden = torch.nn.Linear(12, 12)

    class Hidden(fz.BasicOperation):
        def formula(self, x):
            return hidden(x)

    x = torch.randn(4, 12)
    y = fz.Sequential(Hidden(), fz.Bias(12), fz.GELU())(x)
    torch.testing.assert_close(y, torch.nn.functional.gelu(hidden(x), approximate="tanh"))
    assert not [r for r in caplog.records if r.name.startswith("torch")]


MLP_OPTIONS = {"bias": False, "single_grouped_weight": True, "dtype": BF16}
CASTING = {
    "BasicLinear": ([lambda: fz.BasicLinear(64, 32, dtype=BF16)], 0),
    "Linear": ([lambda: fz.Linear(64, 32, dtype=BF16), fz.GELU], 0),
    "LayerNorm": ([lambda: fz.LayerNorm(64, dtype=BF16)], 0),
    "RMSNorm": ([lambda: fz.RMSNorm(64, dtype=BF16)], 0),
    "grouped": ([lambda: linear(BF16), lambda: linear(BF16)], 2),
    "mlp": (
        [
            lambda: fz.GroupedLinear(2, 64, 128, **MLP_OPTIONS),
            lambda: fz.ScaledSwiGLU(glu_interleave_size=32),
            lambda: fz.GroupedLinear(2, 64, 64, **MLP_OPTIONS),
        ],
        3,
    ),
}


@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling()], ids=["none", "mxfp8"])
@pytest.mark.parametrize(
    ("target", "given", "compiled"),
    [
        *[(target, given, False) for target in ("cpu", "sm90", "sm100") for given in (FP32, FP16)],
        ("sm90", FP32, True),  # compiled for one target: the cast comes before all kernels
    ],
    ids=str,
)
@pytest.mark.parametrize("case", CASTING)
def test_an_input_is_cast_to_the_weights_dtype(case, given, recipe, target, compiled, request):
    """As te.ops does: the values of a cast before the op, which autograd differentiates."""
    if compiled:
        request.getfixturevalue("fresh_compiler")
    makers, num_extra = CASTING[case]
    ops = fz.Sequential(*[make() for make in makers])
    x = torch.randn(64, 64).to(given).requires_grad_()
    scales = torch.rand(64, requires_grad=True)
    splits = torch.tensor([40, 20])
    extra = (splits, scales, splits) if num_extra == 3 else (splits,) * num_extra

    def step(cast, run):
        with assume_target(target), fz.autocast(enabled=recipe is not None, recipe=recipe):
            y = run(cast(x), *extra)
            leaves = [x, *ops.parameters(), *[t for t in extra if t.requires_grad]]
            return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]

    got = step(lambda t: t, torch.compile(ops, backend="aot_eager") if compiled else ops)
    assert got[0].dtype == BF16
    assert got[1].dtype == given
    fired = ops.plan.fired + ops.plan.kernels
    for a, b in zip(got, step(lambda t: t.to(BF16), ops), strict=True):
        assert a.dtype == b.dtype
        if compiled:
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)
        else:
            assert torch.equal(a, b)
    assert fired == ops.plan.fired + ops.plan.kernels
    said = f"casts its input from {str(given).removeprefix('torch.')} to bfloat16"
    with fz.autocast(enabled=recipe is not None, recipe=recipe):
        assert said in str(fz.explain(ops, x, *extra, target=target))
