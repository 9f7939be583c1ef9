"""Weights stored for inference alone, and those of a module that exists already."""

import copy

import pytest
import reference as ref
import torch
from number_formats import BLOCK, CURRENT, MX, NV, each_recipe
from torch import nn

import fusible as fz
from fusible import recipes
from fusible.recipes import QuantizedTensor


def experts(single=False):
    return fz.Sequential(
        fz.GroupedLinear(2, 256, 128, bias=False, single_grouped_weight=single),
        fz.GroupedLinear(2, 128, 256, bias=False, single_grouped_weight=single),
    )


def bytes_per_value(module):
    """Of all memory that the parameters hold, by their values."""
    tensors = [
        p.pieces().values() if isinstance(p, QuantizedTensor) else [p] for p in params(module)
    ]
    storages = {t.untyped_storage() for pieces in tensors for t in pieces}
    sizes = {s.data_ptr(): s.nbytes() for s in storages}
    return sum(sizes.values()) / sum(p.numel() for p in params(module))


def params(module):
    return list(module.parameters())


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    ("recipe", "limit", "both"), [(NV, 0.57, 1.13), (MX, 1.04, 2.07), (BLOCK, 1.01, 1.01)]
)
def test_bytes_per_value(recipe, limit, both, single):
    with fz.quantized_model_init(recipe=recipe, usage="inference"):
        small = experts(single)
    assert bytes_per_value(small) <= limit
    assert bytes_per_value(small.to(torch.bfloat16)) <= limit
    assert bytes_per_value(copy.deepcopy(small)) <= limit
    with fz.quantized_model_init(recipe=recipe):
        large = experts(single)
    assert limit - 0.01 < bytes_per_value(large) <= both
    plain = experts(single)
    assert bytes_per_value(plain) == 4
    assert bytes_per_value(fz.quantize_(plain, recipe)) == bytes_per_value(large)
    assert bytes_per_value(fz.quantize_(plain, recipe, usage="inference")) <= limit
    loaded = fz.quantize_(experts(single), recipe, usage="inference")
    loaded.load_state_dict(large.state_dict())
    assert bytes_per_value(loaded) <= limit
    for p, want in zip(params(loaded), params(large), strict=True):
        torch.testing.assert_close(p.dequantize(), want.dequantize(), rtol=0, atol=0)


@each_recipe
def test_values_are_those_of_weights_that_are_quantized_in_every_forward(recipe):
    op = fz.Sequential(fz.Linear(64, 128), fz.GELU(), fz.Linear(128, 32))
    stored = fz.quantize_(copy.deepcopy(op), recipe, usage="inference")
    x = torch.randn(48, 64)
    with fz.autocast(recipe=recipe), torch.no_grad():
        torch.testing.assert_close(stored(x), op(x), rtol=0, atol=0)


@each_recipe
def test_training_on_weights_for_inference_quantizes_their_values_once_more(recipe):
    op = fz.quantize_(fz.BasicLinear(64, 128), recipe, usage="inference")
    op.weight.requires_grad_(False)
    x, dy = torch.randn(48, 64, requires_grad=True), torch.randn(48, 128)
    with fz.autocast(recipe=recipe):
        assert ("stored for inference" in str(fz.explain(op, x))) == recipe.format(
            "weight"
        ).directional
        op(x).backward(dy)
    again = QuantizedTensor.quantize(
        op.weight.dequantize(), recipe.format("weight"), rowwise=True, columnwise=True
    )
    rows = recipes.quantize_operand(dy, recipe, "grad", recipes.Uses(row=True))
    dy_values = recipes.operand_values(rows)
    weight = again if recipe.format("weight").directional else op.weight
    torch.testing.assert_close(x.grad, dy_values @ weight.dequantize(columnwise=True))
    if recipe.format("weight").directional:
        assert op.weight.columnwise_data is None


def test_a_forward_without_gradients_makes_no_columnwise_form(monkeypatch):
    op = fz.quantize_(fz.Linear(64, 128), NV, usage="inference")
    x = torch.randn(48, 64)
    monkeypatch.setattr(QuantizedTensor, "own_values", lambda *_: pytest.fail("dequantized"))
    with fz.autocast(recipe=NV), torch.no_grad(), recipes.no_implicit_dequantize():
        op(x)


def test_quantize_in_place_keeps_what_parameters_have():
    first, second = fz.Linear(64, 64), fz.Linear(64, 64)
    second.weight = first.weight
    first.weight.tag = "kept"
    frozen = fz.GroupedLinear(2, 64, 64).requires_grad_(False)
    module = nn.ModuleList([first, second, frozen, nn.Linear(64, 64)])
    with fz.autocast(recipe=NV):
        first(torch.randn(16, 64))  # the plan of other parameters
    want = QuantizedTensor.quantize(first.weight.detach(), NV.format("weight"), columnwise=True)
    assert fz.quantize_(module, NV) is module
    assert first.weight is second.weight
    assert first.weight.tag == "kept"
    assert first.weight.requires_grad
    assert isinstance(first.weight, nn.Parameter)
    ref.assert_same_bits(first.weight.pieces(), want.pieces())
    assert first.weight.has_columnwise
    assert not frozen.weight0.requires_grad
    assert frozen.weight0.columnwise_data is None
    assert type(module[3].weight) is nn.Parameter
    x = torch.randn(16, 64)
    with fz.autocast(recipe=NV):
        torch.testing.assert_close(first(x) - first.bias, second(x) - second.bias)
        first(x).sum().backward()
    assert first.weight.grad.shape == (64, 64)


def test_quantizing_again_keeps_the_bits_of_the_format():
    op = fz.quantize_(fz.Linear(64, 64), NV)
    before = {name: piece.clone() for name, piece in op.weight.pieces().items()}
    rows = {name: piece for name, piece in before.items() if not name.startswith("column")}
    fz.quantize_(op, NV, usage="inference")
    ref.assert_same_bits(op.weight.pieces(), rows)
    fz.quantize_(op, NV, usage="training")
    after = op.weight.pieces()
    ref.assert_same_bits({name: after[name] for name in rows}, rows)
    columns = QuantizedTensor.quantize(
        op.weight.dequantize().detach(), NV.format("weight"), rowwise=False, columnwise=True
    )
    ref.assert_same_bits({n: after[n] for n in columns.pieces()}, columns.pieces())
    values = op.weight.dequantize().detach()
    fz.quantize_(op, CURRENT)
    want = QuantizedTensor.quantize(values, CURRENT.format("weight"))
    ref.assert_same_bits(op.weight.pieces(), want.pieces())


def test_what_cannot_be_stored_changes_nothing():
    module = nn.ModuleList([fz.Linear(64, 64), fz.Linear(63, 64)])
    with pytest.raises(ValueError, match="multiple of 2 for nvfp4"):
        fz.quantize_(module, NV)
    assert not any(isinstance(p, QuantizedTensor) for p in module.parameters())
    with pytest.raises(ValueError, match='"training" or "inference", got \'serving\''):
        fz.quantize_(module, MX, usage="serving")
    with pytest.raises(ValueError, match='"training" or "inference", got None'):
        fz.quantized_model_init(recipe=MX, usage=None)
    with pytest.raises(TypeError, match="MXFP8BlockScaling"):
        fz.quantize_(module, "mxfp8")
    with pytest.raises(ValueError, match="linears of fusible, got GELU"):
        fz.quantize_(nn.GELU(), MX)


def test_compiled_training_on_weights_for_inference():
    op = fz.quantize_(fz.BasicLinear(64, 128), MX, usage="inference")
    x, grads = torch.randn(32, 64), []
    for call in (op, torch.compile(op, backend="aot_eager", fullgraph=True)):
        given = x.clone().requires_grad_()
        with fz.autocast(recipe=MX):
            call(given).square().sum().backward()
        grads.append(given.grad)
    torch.testing.assert_close(*grads)
