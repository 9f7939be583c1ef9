"""Dispatch, a grouped MLP and Combine in BF16, whose sizes are no multiples of a block."""

import torch

import fusible as fz

TOP_K, EXPERTS, HIDDEN, INNER = 3, 6, 144, 320


def experts(bias=False, scale_bias=False, act=None, stored=None, weighted=False, **dispatch):
    """With random parameters, of weights stored under a recipe or not."""
    options = {"dtype": torch.bfloat16, "single_grouped_weight": True, "single_grouped_bias": True}
    with fz.quantized_model_init(enabled=stored is not None, recipe=stored):
        module = fz.Sequential(
            fz.Dispatch(EXPERTS, **dispatch),
            fz.GroupedLinear(EXPERTS, HIDDEN, 2 * INNER, bias=bias, **options),
            act or fz.ScaledSwiGLU(),
            fz.GroupedLinear(EXPERTS, INNER, HIDDEN, bias=bias, scale_bias=scale_bias, **options),
            fz.Combine(weighted=weighted),
        )
    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) / 8)
    return module
