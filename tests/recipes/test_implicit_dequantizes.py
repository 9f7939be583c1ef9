"""Nothing dequantizes by itself in what people train, under any recipe."""

import importlib.util
from pathlib import Path

import pytest
import reference as ref
import torch
from number_formats import RECIPES

import fusible as fz
from fusible import recipes
from fusible.testing import assume_target

EXAMPLES = Path(__file__).parents[2] / "examples"


def decoder_layer():
    spec = importlib.util.spec_from_file_location("decoder_layer", EXAMPLES / "decoder_layer.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.DecoderLayer(128, 4, 128)


MODELS = {
    "MoE block": lambda: ref.moe_block(128, 4, 128, 2),
    "MoE block with a shared expert": lambda: ref.moe_block(128, 4, 128, 2, shared=128),
    "MoE block, weighted": lambda: ref.moe_block(128, 4, 128, 2, weighted=True, recompute=True),
    "decoder layer": decoder_layer,
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
