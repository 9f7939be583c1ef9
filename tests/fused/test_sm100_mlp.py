"""The SM100 fused ops on the emulator of their kernels: values, gradients, and what they refuse."""

import copy
from contextlib import nullcontext

import pytest
import reference as ref
import torch
from number_formats import MX, NV, NV_RHT_2D

import fusible as fz
from fusible import recipes
from fusible.fused import RULES
from fusible.kernels.sm100 import products
from fusible.ops import sm100_kernels
from fusible.recipes.formats import mxfp8, nvfp4
from fusible.recipes.grouped import group_quantize
from fusible.recipes.matrix import Operand
from fusible.recipes.quantization import dequantize, quantize
from fusible.recipes.quantize_ops import quantize_matrix
from fusible.testing import assume_target
from fusible.testing import emulator_sm100 as emulator
from fusible.versions import Version

BF16 = torch.bfloat16
MXFP8, NVFP4 = MX, NV
RECIPES = {"bf16": None, "mxfp8": MXFP8, "nvfp4": NVFP4, "nvfp4_rht_2d": NV_RHT_2D}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
SINGLE = {"single_grouped_weight": True, "single_grouped_bias": True}
HIDDEN, INNER, OUT = 128, 64, 192

# rows of x, rows of the groups
SPLITS = {
    "ragged": (60, [20, 0, 33]),
    "whole tiles": (768, [256, 0, 512]),
    "around a tile": (800, [255, 257, 256]),
    "all empty": (5, [0, 0, 0]),
    "no tokens": (0, [0, 0, 0]),
    "one group": (70, [70]),
    "one group, no tokens": (0, [0]),
}


def under(recipe):
    return nullcontext() if recipe is None else fz.autocast(recipe=recipe)


def mlp(groups, act=None, **options):
    options = {"dtype": BF16, **SINGLE, **options}
    fc2 = options.pop("fc2", {})
    act = act or fz.ScaledSwiGLU(glu_interleave_size=32)
    module = fz.Sequential(
        fz.GroupedLinear(groups, HIDDEN, INNER * (1 + act.gated), **options),
        act,
        fz.GroupedLinear(groups, INNER, OUT, **{**options, **fc2}),
    )
    return filled(module)


def filled(module):
    """Parameters of few bits, whose products and sums are exact in FP32."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(few_bits(*p.shape))
    return module


def few_bits(*shape):
    return torch.randint(-6, 7, shape) / 8


def inputs(rows, sizes, scales_dtype=torch.float32):
    x = few_bits(rows, HIDDEN).to(BF16).requires_grad_()
    scales = (1 + torch.randint(0, 8, (rows,))).div(8).to(scales_dtype).requires_grad_()
    splits = torch.tensor(sizes)
    return x, splits, scales, splits


def run(module, given, recipe, target="sm100", wanted=None, provider=None):
    """Output and gradients of all that need one; the upstream gradient is of few bits too."""
    wanted = wanted or [t for t in (*given, *module.parameters()) if t.requires_grad]
    machine = nullcontext() if target is None else assume_target(target, provider)
    with machine, under(recipe):
        y = module(*given)
        torch.manual_seed(1)
        return [y.detach(), *torch.autograd.grad(y, wanted, few_bits(*y.shape).to(BF16))]


@each_recipe
def test_transposed_weights(recipe):
    """As GPT-OSS stores them: the same bits."""
    module, given = mlp(3), inputs(*SPLITS["ragged"])
    want = run(module, given, recipe)
    for fc in (module[0], module[2]):
        fc.weight = torch.nn.Parameter(fc.weight.detach().mT.contiguous().mT)
    ref.assert_equal(run(module, given, recipe), want)
    assert module.plan.fired == ("grouped_mlp_sm100",)


def off(t):
    """The same values, not at a multiple of 16 bytes."""
    return torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view(t.shape)


@pytest.mark.parametrize("single", [True, False])
@each_recipe
@pytest.mark.parametrize("splits", ["ragged", "whole tiles"])
def test_operands_that_begin_anywhere(recipe, splits, single):
    """The kernels read from multiples of 16 bytes."""
    options = {"single_grouped_weight": single, "single_grouped_bias": single}
    module, (x, splits, scales, _) = mlp(3, **options), inputs(*SPLITS[splits])
    given = x, splits, scales, splits
    want = run(module, given, recipe)
    for fc in (module[0], module[2]):
        for name, parameter in list(fc.named_parameters()):
            setattr(fc, name, torch.nn.Parameter(off(parameter)))
    moved = off(x).requires_grad_(), splits, off(scales).requires_grad_(), splits
    ref.assert_equal(run(module, moved, recipe), want)
    assert module.plan.fired == ("grouped_mlp_sm100",)


@each_recipe
@pytest.mark.parametrize("splits", ["ragged", "whole tiles", "all empty", "no tokens"])
def test_pre_activations_in_a_pool(recipe, splits):
    """They are of padded groups."""
    module, given = mlp(3), inputs(*SPLITS[splits])
    want, pool = run(module, given, recipe), fz.SavedRowsPool(1 << 20, "cpu")
    with pool:
        got = run(module, given, recipe)
    ref.assert_equal(got, want)
    assert module.plan.fired == ("grouped_mlp_sm100",)
    padded = sum(-(-size // 256) * 256 for size in SPLITS[splits][1])
    assert pool.peak_bytes() == padded * 4 * INNER


# --- what the kernels say they compute, from unpadded, unpacked operands --------------------------


class Rounded:
    """The values that products read, by a recipe: quantized by group along their reductions."""

    def __init__(self, recipe, ends):
        self.recipe, self.ends = recipe, ends

    def __call__(self, x, role, *, columnwise=False, rows=True):
        """Rows of groups, or a stack of weights."""
        fmt = None if self.recipe is None else self.recipe.format(role)
        if fmt is None:
            return x.float()
        ends = self.ends if rows else None
        return dequantize(quantize(x, fmt, columnwise=columnwise, ends=ends))

    def output(self, h):
        """What a kernel quantizes is its FP32; what it leaves to be quantized is BF16."""
        mxfp8 = self.recipe is not None and self.recipe.name == "mxfp8"
        return h if mxfp8 else h.bfloat16()


def by_group(ends, *operands):
    start = 0
    for group, end in enumerate(ends.tolist()):
        yield group, slice(start, end)
        start = end


def explained(module, given, recipe):
    """The result of ``run``, step by step."""
    _, act, _ = module
    x, splits, scales, *_ = (t.detach() for t in given)
    ends = splits.cumsum(0).int()
    q = Rounded(recipe, ends)
    interleave = act.glu_interleave_size
    w1, b1, w2, b2 = (p.detach() for p in module.parameters())

    def product(a, w, bias=None, transposed=False):
        y = a.new_zeros(len(a), w.shape[2 if transposed else 1])
        for group, rows in by_group(ends):
            y[rows] = a[rows] @ (w[group] if transposed else w[group].T)
            if bias is not None:
                y[rows] += bias[group].float()
        return y

    def wgrad(dy, a):
        parts = [dy[rows].T @ a[rows] for _, rows in by_group(ends)]
        return torch.stack(parts).bfloat16()

    live = (torch.arange(len(x)) < ends[-1])[:, None]
    acc = product(q(x, "input"), q(w1, "weight", rows=False), b1)
    c = acc.bfloat16()

    def activated(preact):
        return q.output(ref_glu(act, preact, interleave) * scales[:, None].float() * live)

    h = activated(acc)
    w2_rows = q(w2, "weight", rows=False)
    y = product(q(h, "input"), w2_rows, b2).bfloat16()

    torch.manual_seed(1)
    dy = few_bits(*y.shape).to(BF16) * live
    w2_columns = q(w2, "weight", columnwise=True, rows=False)
    dh = product(q(dy, "grad"), w2_columns, transposed=True)
    leaf = c.float().requires_grad_()
    plain = ref_glu(act, leaf, interleave)
    dscales = (dh * plain.detach()).sum(-1)
    (dc,) = torch.autograd.grad(plain, leaf, dh * scales[:, None].float())
    db1 = torch.stack([dc[rows].sum(0) for _, rows in by_group(ends)]).bfloat16()
    db2 = torch.stack([dy[rows].float().sum(0) for _, rows in by_group(ends)]).bfloat16()
    dc = q.output(dc)
    w1_columns = q(w1, "weight", columnwise=True, rows=False)
    dx = product(q(dc, "grad"), w1_columns, transposed=True).bfloat16()
    dw1 = wgrad(q(dc, "grad", columnwise=True), q(x * live, "input", columnwise=True))
    if not act.gated:  # computed again, from what was saved
        h = activated(c.float())
    dw2 = wgrad(q(dy, "grad", columnwise=True), q(h, "input", columnwise=True))
    return [y, dx, dscales.to(scales.dtype), dw1, db1, dw2, db2]


def ref_glu(act, x, interleave):
    if isinstance(act, fz.ScaledSwiGLU):
        return ref.swiglu(x, None, interleave)
    if isinstance(act, fz.ScaledSReLU):
        return x.relu() ** 2
    options = act.glu.options
    if isinstance(act, fz.ScaledSiTUGLU):
        return ref.situglu(x, None, interleave, **options)
    return ref.clamped_qgeglu(x, None, interleave, **options)


ACTS = {
    "swiglu": lambda: fz.ScaledSwiGLU(glu_interleave_size=32),
    "geglu": lambda: fz.ScaledClampedQGeGLU(glu_interleave_size=32),
    "situglu": lambda: fz.ScaledSiTUGLU(glu_interleave_size=32, beta1=1.5, beta2=3.0),
    "srelu": fz.ScaledSReLU,
}
BF16_ACTS = ("swiglu", "geglu")
NAMES = ("y", "dx", "dscales", "dw1", "db1", "dw2", "db2")


@pytest.mark.parametrize(
    ("recipe", "act"),
    [(recipe, act) for recipe in RECIPES.values() for act in ACTS if recipe or act in BF16_ACTS],
)
@pytest.mark.parametrize("splits", SPLITS)
def test_values_are_those_of_the_formats(recipe, act, splits):
    rows, sizes = SPLITS[splits]
    module, given = mlp(len(sizes), ACTS[act]()), inputs(rows, sizes)
    randomize(module, given)
    mine = run(module, given, recipe)
    assert module.plan.fired == ("grouped_mlp_sm100",)
    for name, a, b in zip(NAMES, mine, explained(module, given, recipe), strict=True):
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        assert a.isfinite().all(), name
        # A last bit of FP32 may turn a rounding to fewer. The kernel sums db1 in BF16.
        assert distance(a, b) <= 2 ** (-7 if name == "db1" else -9), name
    no_tokens(mine, rows, sizes)


@pytest.mark.parametrize(
    ("recipe", "plain", "scaled"),
    [
        *[(recipe, fz.SwiGLU, fz.ScaledSwiGLU) for recipe in RECIPES.values()],
        *[(recipe, fz.ClampedSwiGLU, fz.ScaledClampedQGeGLU) for recipe in RECIPES.values()],
        *[(recipe, fz.SiTUGLU, fz.ScaledSiTUGLU) for recipe in RECIPES.values() if recipe],
        *[(recipe, fz.SReLU, fz.ScaledSReLU) for recipe in RECIPES.values() if recipe],
    ],
)
def test_without_scales_is_bitwise_with_ones(recipe, plain, scaled):
    rows, sizes = SPLITS["ragged"]
    options = {"glu_interleave_size": 32} if scaled.gated else {}
    module, (x, splits, scales, _) = mlp(3, scaled(**options)), inputs(rows, sizes)
    ones = torch.ones_like(scales)
    wanted = [x, *module.parameters()]
    want = run(module, (x, splits, ones, splits), recipe, wanted=wanted)
    other = fz.Sequential(module[0], plain(**options), module[2])
    ref.assert_equal(run(other, (x, splits, splits), recipe, wanted=wanted), want)
    assert other.plan.fired == ("grouped_mlp_sm100",)


def test_nvfp4_with_default_options():
    """Gradients are rounded stochastically: repeated by the seed, near those rounded to nearest."""
    rows, sizes = SPLITS["around a tile"]
    module, given = mlp(len(sizes)), inputs(rows, sizes)
    randomize(module, given)

    def seeded(recipe, seed):
        torch.manual_seed(seed)
        with assume_target("sm100"), under(recipe):
            y = module(*given)
            wanted = [t for t in (*given, *module.parameters()) if t.requires_grad]
            return [y.detach(), *torch.autograd.grad(y, wanted, torch.ones_like(y))]

    full = recipes.NVFP4BlockScaling()
    first = seeded(full, 0)
    assert module.plan.fired == ("grouped_mlp_sm100",)
    ref.assert_equal(seeded(full, 0), first)
    nearest = seeded(NV_RHT_2D, 0)
    assert torch.equal(first[0], nearest[0])
    for name, a, b in zip(NAMES[1:], first[1:], nearest[1:], strict=True):
        assert distance(a, b) < 0.25, name
    assert not torch.equal(seeded(full, 1)[1], first[1])


def distance(a, b):
    """Relative, over all values."""
    error, size = (a.float() - b.float()).norm(), b.float().norm()
    return 0.0 if error == 0 else (error / size).item()


def randomize(module, given):
    with torch.no_grad():
        for t in (*module.parameters(), given[0], given[2]):
            t.normal_(std=0.5)


@pytest.mark.parametrize("act", ACTS)
def test_mxfp8_is_bitwise_what_the_formats_say(act):
    """Products of few bits are exact in FP32, in any order of summation."""
    rows, sizes = SPLITS["around a tile"]
    module, given = mlp(len(sizes), ACTS[act]()), inputs(rows, sizes)
    mine, theirs = run(module, given, MXFP8), explained(module, given, MXFP8)
    exact = [i for i, name in enumerate(NAMES) if name not in ("dscales", "db1")]
    ref.assert_equal_elsewhere(*[{NAMES[i]: t[i] for i in exact} for t in (mine, theirs)])


def no_tokens(results, rows, sizes):
    """Exact zeros for rows of no group and for groups of no rows."""
    y, dx, dscales, *grads = results
    for t in (y, dx, dscales):
        assert not t[sum(sizes) :].any()
    empty = [group for group, size in enumerate(sizes) if size == 0]
    for t in grads:
        assert not t[empty].any()


def unfused(own_fusions, module, given, recipe):
    own_fusions.install(())
    alone = copy.deepcopy(module)
    result = run(alone, given, recipe, target="cpu")
    assert alone.plan.fired == ()
    own_fusions.install(RULES)
    return result


# The unfused activation is rounded to BF16 before it is quantized, and so is its gradient: half an
# ulp of BF16, which turns some roundings to few bits, now and then that of a block's scale. These
# sums are not exact, so that the products before them may be rounded otherwise by as much.
# A rounding of one row turns those of 16 that are transformed together.
DIFFERENCE = {None: 2 * 2**-7, MXFP8: 2**-4, NVFP4: 2**-4, NV_RHT_2D: 2**-3}


@each_recipe
@pytest.mark.parametrize("splits", ["ragged", "around a tile", "one group", "all empty"])
def test_differs_from_unfused_by_one_rounding(recipe, splits, own_fusions):
    rows, sizes = SPLITS[splits]
    module, given = mlp(len(sizes)), inputs(rows, sizes)
    randomize(module, given)
    plain = unfused(own_fusions, module, given, recipe)
    fused = run(module, given, recipe)
    for mine, theirs in zip(fused, plain, strict=True):
        assert mine.dtype == theirs.dtype
        assert distance(mine, theirs) <= DIFFERENCE[recipe]
    no_tokens(fused, rows, sizes)


@each_recipe
def test_separate_weights_are_bitwise_the_single_one(recipe):
    """Matrices anywhere in memory, read through tables of addresses."""
    rows, sizes = SPLITS["ragged"]
    module, given = mlp(3), inputs(rows, sizes)
    whole = run(module, given, recipe)
    store = nullcontext() if recipe is None else fz.quantized_model_init(recipe=recipe)
    with store:
        apart = mlp(3, single_grouped_weight=False)
    with torch.no_grad():
        for i, fc in ((0, apart[0]), (2, apart[2])):
            fc.bias.copy_(module[i].bias)
            for group, w in enumerate(module[i].weight):
                if recipe is None:
                    # Not side by side: each in a memory of its own.
                    setattr(fc, f"weight{group}", torch.nn.Parameter(w.clone()))
                else:
                    getattr(fc, f"weight{group}").copy_(w)
    y, dx, dscales, *params = run(apart, given, recipe)
    assert apart.plan.fired == ("grouped_mlp_sm100",)
    ref.assert_equal([y, dx, dscales], whole[:3])
    grads = dict(zip([n for n, _ in apart.named_parameters()], params, strict=True))
    for at, i in ((3, 0), (5, 2)):
        weights = torch.stack([grads[f"{i}.weight{group}"] for group in range(3)])
        assert torch.equal(weights, whole[at])
        assert torch.equal(grads[f"{i}.bias"], whole[at + 1])


class Recorded:
    """The emulator, and what was asked of it."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        function = getattr(emulator, name)

        def call(**arguments):
            self.calls.append((name, arguments))
            return function(**arguments)

        return call


@pytest.mark.parametrize("fmt", [mxfp8(), nvfp4()], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(3, 128, 64), (2, 256, 192), (384, 128)])
def test_weights_in_one_pass_are_those_quantized_and_then_packed(fmt, shape):
    w = torch.randn(shape, dtype=BF16)
    operand = Operand(*quantize_matrix(w, fmt, rowwise=True, columnwise=True))
    (theirs,) = products.pack_weights([operand])
    for a, b in zip(products.quantize_packed_weights(w, fmt, True)[:2], theirs[:2], strict=True):
        for mine, other in ((a.data, b.data), (a.scale, b.scale)):
            assert torch.equal(mine.view(torch.uint8).flatten(), other.view(torch.uint8).flatten())
        if b.tensor_scale is not None:
            assert torch.equal(a.tensor_scale.flatten(), b.tensor_scale.flatten())


def test_discrete_weights_are_pointers():
    module, given = mlp(3, single_grouped_weight=False), inputs(*SPLITS["ragged"])
    kernels = Recorded()
    run(module, given, None, provider=kernels)
    # Parameters that lie side by side are one tensor to the kernel.
    assert all("b_ptrs" not in arguments for _, arguments in kernels.calls)
    for fc in (module[0], module[2]):
        for name, w in list(fc.named_parameters()):
            setattr(fc, name, torch.nn.Parameter(w.detach().clone()))
    kernels = Recorded()
    run(module, given, None, provider=kernels)
    products = [arguments for name, arguments in kernels.calls if "wgrad" not in name]
    assert [p["b_ptrs"].tolist() for p in products[:1]] == [
        [w.data_ptr() for w in module[0].weights()]
    ]
    assert all("b_tensor" not in p for p in products)


def rows_of(call):
    """The rows of all groups that a kernel sees."""
    name, arguments = call
    if "wgrad" not in name:
        return arguments["a_tensor"].shape[0]
    return arguments["b_tensor"].shape[0] * (2 if "input_order" in arguments else 1)


@each_recipe
def test_promised_alignment_spares_the_padding(recipe):
    rows, sizes = SPLITS["whole tiles"]
    # With rows of no group behind the groups.
    module, given = mlp(3), inputs(rows + 256, sizes)
    promised = mlp(3, split_alignment=256)
    promised.load_state_dict(module.state_dict())
    padded, aligned = Recorded(), Recorded()
    plain = run(module, given, recipe, provider=padded)
    ref.assert_equal(run(promised, given, recipe, provider=aligned), plain)
    assert {rows_of(call) for call in padded.calls} == {(rows + 256 + 3 * 255) // 256 * 256}
    assert {rows_of(call) for call in aligned.calls} == {rows + 256}
    assert plain[0][rows:].eq(0).all()
    assert plain[1][rows:].eq(0).all()


def test_a_broken_promise_is_refused():
    module = mlp(3, split_alignment=256)
    given = inputs(768, [256, 255, 257])
    with assume_target("sm100"), pytest.raises(ValueError, match="multiples of 256, as split_al"):
        module(*given)


@each_recipe
def test_scaled_bias(recipe, own_fusions):
    rows, sizes = SPLITS["ragged"]
    module, given = mlp(3, fc2={"scale_bias": True}), inputs(rows, sizes, BF16)
    row_scale = torch.rand(rows).requires_grad_()
    given = (*given, row_scale)
    fused = run(module, given, recipe)
    plain = unfused(own_fusions, module, given, recipe)
    for mine, theirs in zip(fused, plain, strict=True):
        assert mine.dtype == theirs.dtype
        assert distance(mine, theirs) <= DIFFERENCE[recipe]


def test_quantized_input_is_used_as_is():
    """A quantized dispatch: the very bytes, forward and backward."""
    rows, sizes = SPLITS["ragged"]
    module, (x, splits, scales, _) = mlp(3), inputs(rows, sizes)
    with torch.no_grad():
        x.normal_()
    quantizer = recipes.MXFP8Quantizer()
    xq = group_quantize(x.detach(), quantizer, 3, splits)
    # Bytes that no quantizer makes: twice the scale, half the values.
    for scale in (xq.scale_inv, xq.columnwise_scale_inv):
        bits = scale.view(torch.uint8)
        bits.add_((bits > 0).to(torch.uint8))
    twice = group_quantize(2 * x.detach(), quantizer, 3, splits)
    wanted = [scales, *module.parameters()]
    mine = run(module, (xq, splits, scales, splits), MXFP8, wanted=wanted)
    theirs = run(module, (twice, splits, scales, splits), MXFP8, wanted=wanted)
    plain = run(module, (2 * x.detach(), splits, scales, splits), MXFP8, wanted=wanted)
    assert module.plan.fired == ("grouped_mlp_sm100",)
    ref.assert_equal(mine, theirs)
    ref.assert_equal(mine, plain)


def test_input_quantized_as_a_whole_is_used_as_is_along_its_rows(own_fusions):
    """Its blocks along the columns cross groups: those are quantized again."""
    rows, sizes = SPLITS["ragged"]
    module, (x, splits, scales, _) = mlp(3), inputs(rows, sizes)
    randomize(module, (x, splits, scales))
    given = (recipes.MXFP8Quantizer()(x.detach()), splits, scales, splits)
    wanted = [scales, *module.parameters()]
    mine = run(module, given, MXFP8, wanted=wanted)
    plain = run(module, (x.detach(), *given[1:]), MXFP8, wanted=wanted)
    assert torch.equal(mine[0], plain[0])
    for a, b in zip(mine, plain, strict=True):
        assert distance(a, b) < 2**-4


@each_recipe
@pytest.mark.parametrize("frozen", ["input", "fc1", "fc2", "biases", "all but the input"])
def test_frozen_parts(recipe, frozen):
    rows, sizes = SPLITS["ragged"]
    module, given = mlp(3), inputs(rows, sizes)
    whole = dict(zip(["y", "x", "scales", *dict(module.named_parameters())],
                     run(module, given, recipe), strict=True))  # fmt: skip
    x, splits, scales, _ = given
    if frozen == "input":
        x, scales = x.detach(), scales.detach()
    elif frozen in ("fc1", "fc2"):
        module[2 * (frozen == "fc2")].requires_grad_(False)
    elif frozen == "biases":
        for fc in (module[0], module[2]):
            fc.bias.requires_grad_(False)
    else:
        module.requires_grad_(False)
    tensors = {"x": x, "scales": scales, **dict(module.named_parameters())}
    names = [name for name, t in tensors.items() if t.requires_grad]
    got = run(module, (x, splits, scales, splits), recipe)
    assert module.plan.fired == ("grouped_mlp_sm100",)
    ref.assert_equal(got, [whole[name] for name in ("y", *names)])


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("delay", [True, False])
def test_main_grads(recipe, dtype, single, delay):
    rows, sizes = SPLITS["ragged"]
    plain, given = mlp(3, single_grouped_weight=single), inputs(rows, sizes)
    expected = run(plain, given, recipe, wanted=list(plain.parameters()))
    module = mlp(
        3,
        single_grouped_weight=single,
        accumulate_into_main_grad=True,
        delay_wgrad_compute=delay,
    )
    module.load_state_dict(plain.state_dict())
    for p in module.parameters():
        p.main_grad = torch.ones_like(p, dtype=dtype)
    with assume_target("sm100"), under(recipe):
        y = module(*given)
        torch.manual_seed(1)
        y.backward(few_bits(*y.shape).to(BF16))
        for fc in (module[0], module[2]) if delay else ():
            fc.backward_dw()
    assert module.plan.fired == ("grouped_mlp_sm100",)
    grads = dict(zip(dict(plain.named_parameters()), expected[1:], strict=True))
    for name, p in module.named_parameters():
        if "bias" in name:
            assert torch.equal(p.grad, grads[name])
        else:
            ref_grad = grads[name].float() + 1
            torch.testing.assert_close(p.main_grad.float(), ref_grad, rtol=2**-7, atol=2**-7)
            assert p.grad is None


@each_recipe
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
def test_callers_buffers(recipe, alone, aligned):
    rows, sizes = SPLITS["whole tiles"]
    rows += 256
    options = {"split_alignment": 256 if aligned else 1}
    module, given = mlp(3, **options), inputs(rows, sizes)
    if alone:
        linear = fz.GroupedLinear(3, HIDDEN, OUT, dtype=BF16, **SINGLE, **options)
        module, given = filled(fz.Sequential(linear)), given[:2]
    y, dx, *_ = run(module, given, recipe)
    output, grad_input = (torch.full_like(t, float("nan")) for t in (y, dx))
    last = len(module) - 1
    kwargs = {0: {"grad_input": grad_input}, last: {"output": output}}
    if alone:
        kwargs = {0: {"grad_input": grad_input, "output": output}}
    with assume_target("sm100"), under(recipe):
        mine = module(*given, op_kwargs=kwargs)
        torch.manual_seed(1)
        (grad,) = torch.autograd.grad(mine, [given[0]], few_bits(*y.shape).to(BF16))
    assert mine.data_ptr() == output.data_ptr()
    assert grad.data_ptr() == grad_input.data_ptr()
    ref.assert_equal([output, grad_input], [y, dx])


@each_recipe
def test_inference(recipe):
    module, given = mlp(3), inputs(*SPLITS["ragged"])
    with assume_target("sm100"), under(recipe):
        y = module(*given)
        with torch.no_grad():
            assert torch.equal(module(*given), y)
        with torch.inference_mode():
            assert torch.equal(module(*given), y)


@pytest.mark.parametrize("recipe", [MXFP8, NVFP4])
def test_weights_are_laid_out_once_while_they_are_reused(recipe, monkeypatch):
    module, given = mlp(3), inputs(*SPLITS["ragged"])
    expected = run(module, given, recipe)
    made = []
    whole = sm100_kernels.quantize_weights_sm100
    monkeypatch.setattr(
        sm100_kernels, "quantize_weights_sm100", lambda *given: made.append(given) or whole(*given)
    )
    with fz.reuse_quantized_weights(module):
        for _ in range(2):
            ref.assert_equal(run(module, given, recipe), expected)
    assert len(made) == 2


@pytest.mark.parametrize("recipe", [None, MXFP8], ids=["bf16", "mxfp8"])
def test_compiled_in_one_graph(recipe, fresh_compiler):
    if recipe is not None and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("recipes are compiled from torch 2.13 on")
    module = mlp(3)
    compiled = torch.compile(module, fullgraph=True)
    for rows, sizes in (SPLITS["ragged"], SPLITS["around a tile"]):
        given = inputs(rows, sizes)
        expected = run(module, given, recipe)
        wanted = [t for t in (*given, *module.parameters()) if t.requires_grad]
        ref.assert_equal(run(compiled, given, recipe, wanted=wanted), expected)


@each_recipe
def test_autocast_of_fp32_parameters(recipe):
    module, (x, splits, scales, _) = mlp(3).float(), inputs(*SPLITS["ragged"])
    x = x.detach().float().requires_grad_()
    given = x.bfloat16(), splits, scales, splits
    plain = run(copy.deepcopy(module).bfloat16(), given, recipe, wanted=[scales])
    with torch.autocast("cpu", BF16):
        y, *grads = run(module, (x, splits, scales, splits), recipe)
    assert module.plan.fired == ("grouped_mlp_sm100",)
    ref.assert_equal([y, grads[1]], plain)
    assert [g.dtype for g in grads] == 6 * [torch.float32]


@pytest.mark.parametrize(("recipe", "bias"), [(MXFP8, False), (MXFP8, True), (None, False)])
def test_deterministic_gradients_of_scales_where_the_kernel_can(recipe, bias):
    module, given = mlp(3, bias=bias), inputs(*SPLITS["ragged"])
    for wanted in (True, False):
        kernels = Recorded()
        torch.use_deterministic_algorithms(wanted)
        try:
            run(module, given, recipe, provider=kernels)
        finally:
            torch.use_deterministic_algorithms(False)
        asked = [a.get("deterministic", False) for name, a in kernels.calls if "dglu" in name]
        assert asked == [wanted and recipe is not None and not bias]


# --- one grouped linear ---------------------------------------------------------------------------


@each_recipe
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("scale_bias", [True, False])
def test_grouped_linear_is_the_unfused_one(recipe, splits, scale_bias, own_fusions):
    """Both quantize the same values; sums are exact here."""
    rows, sizes = SPLITS[splits]
    linear = filled(
        fz.GroupedLinear(len(sizes), HIDDEN, OUT, dtype=BF16, scale_bias=scale_bias, **SINGLE)
    )
    x, splits, scales, _ = inputs(rows, sizes)
    given = (x, splits, *([scales] if scale_bias else []))
    fused = run(linear, given, recipe)
    assert linear.plan.kernels == ("sm100",)
    plain = unfused(own_fusions, linear, given, recipe)
    if recipe in (NVFP4, NV_RHT_2D) or (recipe is None and scale_bias):
        # NVFP4's factors are multiplied in another order; BF16 alone is rounded before the bias.
        torch.testing.assert_close(fused, plain, rtol=2**-7, atol=2**-7)
    else:
        ref.assert_equal(fused, plain)


# --- refusals -------------------------------------------------------------------------------------


@each_recipe
def test_explain_shows_it_firing_on_a_laptop(recipe):
    module, given = mlp(3), inputs(*SPLITS["ragged"])
    with under(recipe):
        explanation = fz.explain(module, *given, target="sm100")
    assert explanation.fired == ("grouped_mlp_sm100",)
    assert "GroupedMLP by grouped_mlp_sm100, forward and backward" in str(explanation)


def refusal(module, given, recipe, target="sm100"):
    with under(recipe):
        (plan,) = fz.explain(module, *given, target=target).plans
    (found,) = [r for r in plan.refusals if r.rule.name == "grouped_mlp_sm100"]
    return found.reasons


def test_reasons_tell_what_to_do():
    given = inputs(*SPLITS["ragged"])
    halves = mlp(3, fz.ScaledSwiGLU())
    assert refusal(halves, given, MXFP8) == (
        "act.glu_interleave_size must be 32 where act.gated is True, got None; store FC1's weight "
        "and bias by fusible.interleave_glu and pass glu_interleave_size=32",
    )
    hybrid = recipes.MXFP8BlockScaling(recipes.Format.HYBRID)
    assert refusal(mlp(3), given, hybrid) == (
        "reduction_blocks.grad must be equal to reduction_blocks.input (which is e4m3 with one "
        "e8m0_up scale per 32), got e5m2 with one e8m0_up scale per 32",
    )
    (reason,) = refusal(mlp(3), given, recipes.Float8CurrentScaling(recipes.Format.E4M3))
    assert reason.startswith(
        "reduction_blocks.input must be one of none, e4m3 with one e8m0_up scale per 32, e2m1 with "
        "one e4m3 scale per 16, got e4m3 with one fp32 scale per matrix"
    )
    for old, reason in (
        (
            fz.Target("cuda", 100, cudnn_frontend=Version(1, 31)),
            "cudnn_frontend must be at least 1.32, got 1.31; pip install "
            "'nvidia-cudnn-frontend>=1.32'",
        ),
        (
            fz.Target("cuda", 100, cutlass_dsl=None),
            "cutlass_dsl must be at least 4.8, got None; pip install "
            "'nvidia-cutlass-dsl[cu13]>=4.8'",
        ),
    ):
        assert refusal(mlp(3), given, MXFP8, old) == (reason,)
    for sm in (80, 107, 120):
        (reason,) = refusal(mlp(3), given, MXFP8, f"sm{sm}")
        assert reason == f"sm must be one of 100, 103, got {sm}"


def test_geglu_with_other_constants_in_bf16():
    """The front end's BF16 kernel has GPT-OSS' limit and slope baked in."""
    given = inputs(*SPLITS["ragged"])
    for constants in ({"limit": 2.0}, {"alpha": 1.0}):
        other = mlp(3, fz.ScaledClampedQGeGLU(glu_interleave_size=32, **constants))
        (reason,) = refusal(other, given, None)
        assert reason.startswith("act.clamp must be one of")
        with assume_target("sm100"), under(MXFP8):
            other(*given)
        assert other.plan.fired == ("grouped_mlp_sm100",)


# --- gate and linear halves to blocks of 32 -------------------------------------------------------


@pytest.mark.parametrize("size", [1, 32])
def test_interleaving_is_exact_both_ways(size):
    weight, bias = torch.randn(3, 128, 10), torch.randn(3, 128)
    w, b = fz.interleave_glu(weight, size, dim=-2), fz.interleave_glu(bias, size, dim=-1)
    assert torch.equal(fz.deinterleave_glu(w, size, dim=-2), weight)
    assert torch.equal(fz.deinterleave_glu(b, size, dim=-1), bias)
    x, splits = torch.randn(5, 10), torch.tensor([2, 0, 3])
    halves = fz.Sequential(fz.GroupedLinear(3, 10, 128, **SINGLE), fz.ScaledSwiGLU())
    blocks = fz.Sequential(
        fz.GroupedLinear(3, 10, 128, **SINGLE), fz.ScaledSwiGLU(glu_interleave_size=size)
    )
    halves.load_state_dict({"0.weight": weight, "0.bias": bias})
    blocks.load_state_dict({"0.weight": w, "0.bias": b})
    scales = torch.rand(5)
    torch.testing.assert_close(blocks(x, splits, scales), halves(x, splits, scales))


@pytest.mark.parametrize(("features", "size"), [(96, 32), (64, 0), (64, -1)])
def test_features_that_cannot_be_interleaved(features, size):
    for function in (fz.interleave_glu, fz.deinterleave_glu):
        with pytest.raises(ValueError, match=f"got {features} features in dimension -2"):
            function(torch.randn(features, 4), size, dim=-2)
