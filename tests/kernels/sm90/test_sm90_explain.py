"""The tiles that explain names are those of the launches."""

import re

import pytest
import sm90_launches
import torch
from number_formats import BLOCK_FP8, CURRENT_FP8
from sm90_launches import NAMES, sm90_on_cpu

import fusible as fz
from fusible.extend import BasicOperation
from fusible.ops import grouped_kernels
from fusible.recipes import ByPass, Float8BlockScaling, MXFP8BlockScaling
from fusible.testing import assume_target

GROUPS, HIDDEN, INNER, BF16 = 8, 512, 384, torch.bfloat16
MXFP8 = MXFP8BlockScaling()
ROWS = 8, 320, 2200


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """What products are launched, which compute nothing: whether of rows, sizes and the tile."""
    made = []

    def run(spec, *arguments):
        k = dict(zip(NAMES, arguments, strict=True))
        made.append((spec.kind != "wgrad", k["columns"], k["depth"], str(spec.tile)))

    monkeypatch.setattr(sm90_launches, "run_product", run)
    # In which products of dequantized operands run on CUDA.
    monkeypatch.setattr(grouped_kernels, "compute_dtype", lambda _: BF16)
    return made


def linear(depth=HIDDEN, columns=2 * INNER, column_major=False, **options):
    options = {"bias": False, "dtype": BF16, "single_grouped_weight": True} | options
    made = fz.GroupedLinear(GROUPS, depth, columns, **options)
    if column_major:
        made.weight = torch.nn.Parameter(made.weight.detach().mT.contiguous().mT)
    return made


def mlp(act=None, **options):
    act = act or fz.SwiGLU()
    return fz.Sequential(
        linear(columns=(1 + act.gated) * INNER, **options), act, linear(INNER, HIDDEN, **options)
    )


def experts(**options):
    return fz.Sequential(fz.Dispatch(GROUPS), *mlp(fz.ScaledSwiGLU(), **options), fz.Combine())


def inputs(module, rows):
    """Of all the ops in the module; of experts for tokens with two choices."""
    x = torch.zeros(rows, HIDDEN, dtype=BF16, requires_grad=True)
    if isinstance(module[0], fz.Dispatch):
        tokens = rows // 2
        ids = torch.arange(rows).view(tokens, 2) % GROUPS
        return x.detach()[:tokens].requires_grad_(), torch.rand(tokens, 2), ids
    splits = torch.full((GROUPS,), rows // GROUPS)
    given = {fz.GroupedLinear: [splits], fz.ScaledSwiGLU: [torch.rand(rows)]}
    return x, *[t for op in module for t in given.get(type(op), [])]


def explained_tiles(module, *given):
    """What explain says of each product, as `launched`."""
    found = set()
    explained = fz.explain(module, *given, target="sm90")
    for planned in explained.planned:
        for at, notes in planned.call_notes.items():
            op = planned.plan.basic_ops[at]
            for names in re.findall(r"tiles for \d+ rows: (.*)", "\n".join(notes)):
                following = planned.plan.basic_ops[at + 1 : at + 2]
                fused = any(f.start <= at and at + 1 < f.stop for f in planned.plan.fusions)
                sides = 1 + (fused and getattr(following[0], "gated", False))
                sizes = op.out_features, op.in_features
                for name, tile in re.findall(r"(\w+(?: \w+)?) (\d+x\w+)", names):
                    columns, depth = sizes[::-1] if name == "data gradient" else sizes
                    columns //= sides if name == "forward" else 1
                    found.add((name != "weight gradient", columns, depth, tile))
    return found


def run(module, given, launched):
    """A step, or a forward."""
    launched.clear()
    with assume_target("sm90"), sm90_on_cpu():
        y = module(*given)
        if y.requires_grad:
            y.backward(torch.ones_like(y))
        for op in module:
            if getattr(op, "delay_wgrad_compute", False):
                op.backward_dw()
    return set(launched)


def assert_explained(module, launched, recipe=None, rows=ROWS):
    """Of each number of rows what is launched."""
    for given in [inputs(module, n) for n in rows]:
        with fz.autocast(enabled=recipe is not None, recipe=recipe):
            found = explained_tiles(module, *given)
            assert found == run(module, given, launched)
        assert found


MODULES = {
    "linear": lambda **options: fz.Sequential(linear(**options)),
    "linear, swiglu": lambda **options: fz.Sequential(linear(**options), fz.SwiGLU()),
    "mlp": mlp,
    "mlp, interleaved": lambda **options: mlp(fz.ScaledSwiGLU(32), **options),
    "mlp, geglu": lambda **options: mlp(fz.GEGLU(), **options),
    "mlp, silu": lambda **options: mlp(fz.SiLU(), **options),
    "experts": experts,
}
RECIPES = {
    "": None,
    "block": BLOCK_FP8,
    "current": CURRENT_FP8,
    "mxfp8": MXFP8,
    "mxfp8 products": MXFP8BlockScaling(fp8_products=True),
    "by pass": ByPass(MXFP8, BLOCK_FP8),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_tiles_of_a_step(launched, make, recipe):
    assert_explained(make(), launched, recipe)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("recipe", [None, BLOCK_FP8], ids=["", "block"])
def test_tiles_with_biases_and_separate_weights(launched, make, recipe):
    assert_explained(make(bias=True, single_grouped_weight=False), launched, recipe)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("recipe", [None, BLOCK_FP8], ids=["", "block"])
def test_tiles_without_gradients(launched, make, recipe):
    with torch.no_grad():
        assert_explained(make(), launched, recipe)


@pytest.mark.parametrize("name", ["accumulate_into_main_grad", "delay_wgrad_compute"])
@pytest.mark.parametrize("recipe", [None, BLOCK_FP8], ids=["", "block"])
def test_tiles_of_gradients_that_bypass_autograd(launched, name, recipe):
    module = mlp(**{name: True})
    for weight in module.parameters():
        weight.main_grad = torch.zeros(weight.shape)
    assert_explained(module, launched, recipe, [320])


@pytest.mark.parametrize("frozen", ["0.weight", "1.weight", "3.weight"])
@pytest.mark.parametrize("recipe", [None, BLOCK_FP8], ids=["", "block"])
def test_frozen_weights_have_no_tile_of_a_gradient(launched, frozen, recipe):
    module = fz.Sequential(linear(columns=HIDDEN), *mlp())
    module.get_parameter(frozen).requires_grad_(False)
    assert_explained(module, launched, recipe, [320])
    if frozen == "0.weight":
        x, *given = inputs(module, 320)
        text = str(fz.explain(module, x.detach(), *given, target="sm90"))
        assert re.search(r"rows: forward \w+\n", text)


def stored(recipe):
    with fz.quantized_model_init(recipe=recipe):
        module = mlp()
    return module.requires_grad_(False)


@pytest.mark.parametrize("recipe", [MXFP8, BLOCK_FP8], ids=["mxfp8", "block"])
def test_tiles_of_stored_weights(launched, recipe):
    assert_explained(stored(recipe), launched)
    assert_explained(stored(recipe), launched, recipe)


def override(kind):
    return Float8BlockScaling(backward_override=kind)


def column_major_main_grads():
    module = mlp(accumulate_into_main_grad=True)
    for p in module.parameters():
        p.main_grad = torch.zeros(p.shape).mT.contiguous().mT
    return module


@pytest.mark.parametrize(
    ("make", "recipe", "trains"),
    [
        # Without gradients, kernels of few rows may read weights as they are stored.
        (lambda: stored(MXFP8), None, False),
        (mlp, MXFP8, False),
        (mlp, override("high_precision"), True),
        (mlp, override("dequantized"), True),
        (lambda: mlp(dtype=torch.float32), None, True),
        (lambda: mlp(column_major=True), None, True),
        (lambda: mlp(column_major=True), BLOCK_FP8, True),
        (column_major_main_grads, None, True),
        (column_major_main_grads, BLOCK_FP8, True),
    ],
)
def test_nothing_is_said_of_other_launches(make, recipe, trains):
    module = make()
    with fz.autocast(enabled=recipe is not None, recipe=recipe), torch.set_grad_enabled(trains):
        x, *given = inputs(module, 320)
        text = str(fz.explain(module, x.to(module[0].weight.dtype), *given, target="sm90"))
    assert "tiles" not in text


@pytest.mark.parametrize("target", ["cpu", "sm80", "sm100", "rocm"])
def test_nothing_is_said_of_other_machines(target):
    assert "tiles" not in str(fz.explain(mlp(), *inputs(mlp(), 320), target=target))


def test_a_call_without_rows_has_no_tiles():
    assert "tiles" not in str(fz.explain(mlp(), *inputs(mlp(), 0), target="sm90"))


def test_a_linear_at_two_places_of_one_fusion_has_no_tiles():
    one = linear(columns=HIDDEN)
    module = fz.Sequential(one, fz.SiLU(), one)
    assert "tiles" not in str(fz.explain(module, *inputs(module, 320), target="sm90"))


class Double(BasicOperation):
    def formula(self, x):
        return torch.cat([x, x])


def test_a_linear_at_two_places_has_the_rows_of_each():
    one, splits = linear(columns=HIDDEN), torch.full((GROUPS,), 40)
    module = fz.Sequential(one, Double(), one)  # a run that the formula splits
    text = str(fz.explain(module, inputs(module, 320)[0], splits, 2 * splits, target="sm90"))
    assert re.findall(r"tiles for (\d+) rows", text) == ["320", "640"]


def test_a_subclass_runs_on_the_same_kernels():
    class Own(fz.GroupedLinear):
        pass

    module = fz.Sequential(Own(GROUPS, HIDDEN, HIDDEN, bias=False, dtype=BF16))
    splits = torch.full((GROUPS,), 40)
    x = torch.zeros(320, HIDDEN, dtype=BF16)
    old = fz.Target("cuda", 90, cutlass_dsl=None)
    for target, kernels in (("sm90", "sm90"), (old, "PyTorch's"), ("sm100", "PyTorch's")):
        explained = fz.explain(module, x, splits, target=target)
        assert explained.kernels == ()
        assert f"kernels: {kernels}\n" in str(explained)


def test_each_call_of_a_linear_has_its_own_rows():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear(columns=HIDDEN)

        def forward(self, x, few, many):
            return self.linear(x[:8], few), self.linear(x, many)

    module, splits = Twice(), torch.ones(GROUPS, dtype=torch.int64)
    x = torch.zeros(2000, HIDDEN, dtype=BF16)
    text = str(fz.explain(module, x, splits, 250 * splits, target="sm90"))
    assert re.findall(r"tiles for (\d+) rows", text) == ["8", "2000"]


def test_the_tiles_are_those_of_the_multiprocessors_of_the_target():
    module = fz.Sequential(linear())
    given = inputs(module, 2200)
    large, small = [
        str(fz.explain(module, *given, target=fz.Target("cuda", 90, multiprocessors=count)))
        for count in (132, 16)
    ]
    assert large != small
    assert large == str(fz.explain(module, *given, target="sm90"))
    assert fz.explain(module, *given, target=fz.Target("cuda", 90, multiprocessors=2)).kernels
    with pytest.raises(ValueError, match="multiprocessors of Target must be at least 2, got 1"):
        fz.Target("cuda", 90, multiprocessors=1)
    with pytest.raises(
        TypeError, match=r"multiprocessors of Target must be an integer, got 132\.0"
    ):
        fz.Target("cuda", 90, multiprocessors=132.0)
