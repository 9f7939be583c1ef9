"""Nothing dequantizes by itself in what people train, under any recipe."""

import pytest
import reference as ref
import torch
from number_formats import RECIPES
from scripts import load

import fusible as fz
from fusible import recipes
from fusible.testing import assume_target

MODELS = {
    "MoE block": lambda: ref.moe_block(128, 4, 128, 2),
    "MoE block with a shared expert": lambda: ref.moe_block(128, 4, 128, 2, shared=128),
    "MoE block, weighted": lambda: ref.moe_block(128, 4, 128, 2, weighted=True, recompute=True),
    "decoder layer": lambda: load("decoder_layer").DecoderLayer(128, 4, 128),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("target", [None, "sm90"])
@pytest.mark.parametrize("name", MODELS)
def test_zero_in_training(name, recipe, stored, target):
    torch.manual_seed(0)
    with fz.quantized_model_init(enabled=stored, recipe=recipe):
        model = MODELS[name]()
    if target:
        model = model.bfloat16()
    dtype = next(model.parameters()).dtype
    x = torch.randn(2, 16, 128, dtype=dtype, requires_grad=True)
    before = recipes.implicit_dequantizes()
    machine = assume_target(target) if target else recipes.no_implicit_dequantize()
    with machine, recipes.no_implicit_dequantize(), fz.autocast(recipe=recipe):
        y = model(x)
        y = y[0] if isinstance(y, tuple) else y
        y.sum().backward()
    assert recipes.implicit_dequantizes() == before
    assert all(p.grad is not None for p in model.parameters())
    assert x.grad.isfinite().all()


NVFP4 = recipes.NVFP4Quantizer()(torch.ones(64, 64))
IMPLICIT = {
    "add_": lambda q: q.add_(1),
    "column": lambda q: q.__setitem__((slice(None), 3), 1.0),
    "fill_diagonal_": lambda q: q.fill_diagonal_(1.0),
    "copy_": lambda q: q.copy_(NVFP4),
    "numpy": lambda q: q.numpy(),
    "tolist": lambda q: q.tolist(),
    "float64": lambda q: q.to(torch.float64),
}


@pytest.mark.parametrize("name", IMPLICIT)
def test_each_is_counted_and_can_be_forbidden(name):
    q = recipes.MXFP8Quantizer()(torch.randn(64, 64))
    values, before = q.dequantize(), recipes.implicit_dequantizes()
    with recipes.no_implicit_dequantize(), pytest.raises(NotImplementedError, match="dequantize"):
        IMPLICIT[name](q)
    assert recipes.implicit_dequantizes() == before
    assert torch.equal(q.dequantize(), values)
    IMPLICIT[name](q)
    assert recipes.implicit_dequantizes() == before + 1


@pytest.mark.parametrize("part", [(slice(None, None, 2),), (slice(None), slice(3))])
def test_a_forbidden_slice_says_what_to_do(part):
    q = recipes.MXFP8Quantizer()(torch.randn(64, 64))
    with (
        recipes.no_implicit_dequantize(),
        pytest.raises(ValueError, match=r"call \.dequantize\(\)"),
    ):
        q[part]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_zero_in_transformers(family, recipe):
    pytest.importorskip("transformers")
    from hf_models import FAMILIES, forward_backward, make_model

    assert family in FAMILIES
    model = make_model(family)
    before = recipes.implicit_dequantizes()
    with recipes.no_implicit_dequantize(), fz.autocast(recipe=recipe):
        logits, grads = forward_backward(model, model)
    assert recipes.implicit_dequantizes() == before
    assert logits.isfinite().all()
    assert grads
