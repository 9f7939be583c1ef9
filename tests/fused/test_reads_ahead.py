"""Where a product reads weights, or a sum its row map, before the kernel ahead has ended."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from moe_experts import EXPERTS, HIDDEN, TOP_K, experts
from number_formats import BLOCK_FP8
from sm90_launches import ops_only, sm90_on_cpu

import fusible as fz
from fusible.kernels import moe
from fusible.testing import assume_target

BF16, GROUPS, FEATURES, ROWS = torch.bfloat16, 4, 64, 8


def mlp(features=FEATURES, **options):
    options = {"bias": False, "dtype": BF16, "single_grouped_weight": True} | options
    return fz.Sequential(
        fz.GroupedLinear(GROUPS, features, 2 * features, **options),
        fz.SwiGLU(),
        fz.GroupedLinear(GROUPS, features, features, **options),
    )


def read_ahead(model, by_ops=False, recipe=None):
    """The kind of each product of a forward, and whether it reads ahead."""
    x, splits = torch.randn(ROWS, model[0].in_features), torch.full((GROUPS,), ROWS // GROUPS)
    x = x.to(BF16)
    path, scope = ops_only() if by_ops else nullcontext(), fz.autocast(bool(recipe), recipe=recipe)
    with sm90_on_cpu() as loaded, assume_target("sm90"), path, scope:
        model(x, splits, splits)
    assert model.plan.fired[0].startswith("grouped_mlp_sm90")
    return [(spec.kind, spec.reads_ahead) for spec in loaded]


@pytest.mark.parametrize("by_ops", [False, True], ids=["", "ops"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_second_product_of_a_grouped_mlp(by_ops, grad, bias):
    with torch.set_grad_enabled(grad):
        assert read_ahead(mlp(bias=bias), by_ops) == [("glu", False), ("store", True)]


def mixed():
    """One weight is cast in every forward."""
    model = mlp(single_grouped_weight=False)
    model[2].weight1 = torch.nn.Parameter(model[2].weight1.detach().float())
    return model


def separate():
    """Weights behind a table."""
    model = mlp(single_grouped_weight=False)
    for i, (name, p) in enumerate([*model[2].named_parameters()]):
        setattr(model[2], name, torch.nn.Parameter(moved(p.detach(), i)))
    return model


def moved(t, i):
    """A copy behind a gap, which is larger for each: not at equal distances."""
    memory = t.new_empty(i + 2, *t.shape)
    return memory[i + 1].copy_(t)


def strided():
    """Weights that TMA cannot read, and which are copied."""
    model = mlp()
    weight = model[2].weight.detach()
    model[2].weight = torch.nn.Parameter(torch.stack([weight, weight], -1)[..., 0])
    return model


def stored(**options):
    """Weights that every forward dequantizes, except with FP8 products."""
    with fz.quantized_model_init(recipe=BLOCK_FP8):
        return mlp(**options)


@pytest.mark.parametrize("build", [mixed, separate, strided, stored])
def test_not_of_weights_that_have_just_been_made(build):
    assert read_ahead(build()) == [("glu", False), ("store", False)]


by_ops = pytest.mark.parametrize("by_ops", [False, True], ids=["", "ops"])


@by_ops
@pytest.mark.parametrize("single", [True, False], ids=["single", "side by side"])
def test_of_stored_fp8_weights(single, by_ops):
    model = stored(features=512, single_grouped_weight=single)
    with torch.no_grad():
        assert read_ahead(model, by_ops, BLOCK_FP8) == [("glu", False), ("store", True)]


@by_ops
def test_not_of_fp8_weights_that_have_just_been_quantized(by_ops):
    """Nor of stored ones that are copied to lie side by side."""
    apart = stored(features=512, single_grouped_weight=False)
    for i, (name, p) in enumerate([*apart[2].named_parameters()]):
        pieces = p.detach().map_pieces(partial(moved, i=i))
        setattr(apart[2], name, torch.nn.Parameter(pieces))
    for model in (mlp(512), apart):
        with torch.no_grad():
            assert read_ahead(model, by_ops, BLOCK_FP8) == [("glu", False), ("store", False)]


def test_not_a_linear_by_itself():
    model = mlp()[0]
    splits = torch.full((GROUPS,), ROWS // GROUPS)
    with sm90_on_cpu() as loaded, assume_target("sm90"):
        model(torch.randn(ROWS, FEATURES).to(BF16), splits)
    assert [spec.reads_ahead for spec in loaded] == [False]


@pytest.fixture
def sums(monkeypatch):
    """Whether each sum over a token's rows reads its row map ahead."""
    found, gather_sum = [], moe.gather_sum

    def recorded(*given, reads_ahead=False):
        found.append(reads_ahead)
        return gather_sum(*given)

    monkeypatch.setattr(moe, "gather_sum", recorded)
    return found


@torch.no_grad()
def test_the_row_map_of_experts_in_one_op(sums):
    module = experts()
    x, ids = torch.randn(20, HIDDEN).to(BF16), torch.randint(0, EXPERTS, (20, TOP_K))
    given = x, torch.rand(20, TOP_K), ids
    with sm90_on_cpu(), assume_target("sm90"):
        module(*given)
        assert module.plan.fired[0].startswith("moe_experts_sm90")
        rows, _, _, row_map = module[0](*given)
        fz.Combine()(rows, row_map)
    assert sums == [True, False]


@torch.no_grad()
def test_not_the_row_map_of_another_dispatch(sums):
    """It may be copied after the products, to be contiguous."""
    parts = list(experts().children())
    outer = fz.Dispatch(EXPERTS)
    for op in (outer, parts[-1]):
        names = op.extra_output_names if op is outer else op.extra_input_names
        channel = op.set_extra_output_channel if op is outer else op.set_extra_input_channel
        channel(names.index("row_map"), "outer")
    module = fz.Sequential(outer, *parts)
    x, ids = torch.randn(20, HIDDEN).to(BF16), torch.randint(0, EXPERTS, (20, TOP_K))
    more = torch.rand(20 * TOP_K, 1), torch.randint(0, EXPERTS, (20 * TOP_K, 1))
    with sm90_on_cpu(), assume_target("sm90"):
        module(x, torch.rand(20, TOP_K), ids, *more)
        assert module.plan.fired[0].startswith("moe_experts_sm90")
    assert sums == [False]
