"""Every call that the SM100 ops make of cuDNN's front end, as modules and inputs on any device."""

import copy
from contextlib import nullcontext
from itertools import product
from unittest import mock

import torch
from number_formats import MX, NV
from pairs import every_pair

import fusible as fz

BF16 = torch.bfloat16
MXFP8, NVFP4 = MX, NV
RECIPES = {"bf16": None, "mxfp8": MXFP8, "nvfp4": NVFP4}
SINGLE = {"single_grouped_weight": True, "single_grouped_bias": True, "dtype": BF16}
SWIGLU = fz.ScaledSwiGLU(glu_interleave_size=32)
GEGLU = fz.ScaledClampedQGeGLU(glu_interleave_size=32)
SITUGLU = fz.ScaledSiTUGLU(glu_interleave_size=32)
SRELU = fz.ScaledSReLU()
MLP_CALLS = ["glu", "quant", "dglu", "wgrad", "quant", "wgrad"]

# Arguments that change no kernel: compiled once for all of their values.
_FREE = {"n", "m_aligned", "descriptor_workspace", "linear_offset", "geglu_alpha", "glu_clamp_max",
         "glu_clamp_min"}  # fmt: skip


def configuration(name, arguments):
    """What a kernel is compiled for: the wrapper, its options, and which tensors it is given."""
    described = {
        key: str(value.dtype) if isinstance(value, torch.Tensor) else value
        for key, value in arguments.items()
        if key not in _FREE and value is not None
    }
    return name, tuple(sorted(described.items(), key=str))


def sums_in_order(wanted):
    """Where a kernel can; torch's own switch would import its compiler, which takes seconds."""
    return mock.patch.object(torch, "are_deterministic_algorithms_enabled", return_value=wanted)


def module_of(recipe, options, act, groups=3, scale_bias=None, device="cpu"):
    """A grouped MLP; of separate weights, each in a memory of its own, stored quantized if so."""
    pointers = not options["single_grouped_weight"]
    scale_bias = options["bias"] if scale_bias is None else scale_bias
    store = fz.quantized_model_init(recipe=recipe) if pointers and recipe else nullcontext()
    with store:
        module = fz.Sequential(
            fz.GroupedLinear(groups, 128, 256 if act.gated else 128, **options, device=device),
            copy.deepcopy(act),
            fz.GroupedLinear(groups, 128, 192, **options, scale_bias=scale_bias, device=device),
        )
    for fc in (module[0], module[2]) if pointers and not recipe else ():
        _replace_weights(fc, torch.clone)
    return module


def inputs_of(module, sizes=(20, 0, 300), rows=400, device="cpu"):
    """The module's input and extra inputs."""
    splits = torch.tensor(sizes, device=device)
    x = torch.randn(rows, 128, dtype=BF16, device=device, requires_grad=True)
    scales = torch.rand(rows, device=device, requires_grad=True)
    scale_bias = [torch.rand(rows, device=device)] if module[2].scale_bias else []
    return [x, splits, scales, splits, *scale_bias]


def linear_with_main_grad(recipe, single, dtype, overwrite, groups=3, device="cpu"):
    """A grouped linear whose weight gradients go to buffers of a dtype."""
    store = fz.quantized_model_init(recipe=recipe) if recipe and not single else nullcontext()
    options = {"bias": False, "dtype": BF16, "single_grouped_weight": single, "device": device}
    with store:
        linear = fz.GroupedLinear(groups, 128, 256, **options, accumulate_into_main_grad=True)
    if not single and recipe is None:
        _replace_weights(linear, torch.clone)
    for p in linear.parameters():
        p.main_grad = torch.zeros(p.shape, dtype=dtype, device=device)
        p.overwrite_main_grad = overwrite
    return linear


def _replace_weights(linear, change):
    for name, w in list(linear.named_parameters()):
        if name.startswith("weight"):
            setattr(linear, name, torch.nn.Parameter(change(w.detach())))


def at_odd_address(t):
    """A copy that begins one element after where allocations do."""
    copied = t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t.detach())
    return copied.requires_grad_(t.requires_grad)


def transposed(w):
    """A copy whose last two dimensions lie in memory the other way round."""
    return w.mT.contiguous().mT


def every_configuration(recipe, single, groups, device="cpu", pairs=True):
    """Modules and inputs that call every kernel of a recipe, over all options that it knows.

    With ``single``, those of dense weights, else of pointers to them. Each comes with whether its
    sums shall have an order. Without ``pairs``, every option but not with every other one: those
    of each recipe and each kind of weights are others, and all pairs together.
    """
    sizes, kind = [20, *[0] * (groups - 2), 30], (recipe, single)
    # BF16 has kernels of its own.
    kinds = [of for of in product(RECIPES.values(), (True, False)) if bool(of[0]) == bool(recipe)]
    # Bias, whether sums shall have an order, activation: what is told apart by some kernel.
    biases = ("none", False), ("none", True), ("plain", False)
    acts = (SWIGLU, GEGLU) if recipe is None else (SWIGLU, GEGLU, SITUGLU)
    mlps = [*product(kinds, biases, acts)]
    mlps = [case for case in (mlps if pairs else every_pair(mlps)) if case[0] == kind]
    mlps.append((kind, ("scaled", False), SWIGLU))
    if recipe is not None:  # its kernels are others, and sum a bias in an order as well
        of_srelu = (*biases, ("plain", True)) if pairs else (("none", False), ("plain", True))
        mlps.extend((kind, bias, SRELU) for bias in of_srelu)
    for _, (bias, ordered), act in mlps:
        options = {**SINGLE, "single_grouped_weight": single, "bias": bias != "none"}
        module = module_of(recipe, options, act, groups, bias == "scaled", device)
        name = f"mlp, {bias} bias, {type(act).__name__}{', ordered' if ordered else ''}"
        yield name, module, inputs_of(module, sizes, 60, device), ordered
    grads = [*product(kinds, (torch.float32, BF16), (True, False))]
    grads = [case for case in (grads if pairs or single else every_pair(grads)) if case[0] == kind]
    for _, dtype, overwrite in grads:
        linear = linear_with_main_grad(recipe, single, dtype, overwrite, groups, device)
        x = torch.randn(60, 128, dtype=BF16, device=device)
        name = f"linear, {'written' if overwrite else 'added'} {dtype} main grad"
        yield name, linear, (x, torch.tensor(sizes, device=device)), False


def count_of(recipe, single):
    """How many kernels `every_configuration` calls."""
    acts = 2 if recipe is None else 4
    glu = 2 * acts  # with bias, without
    # With its sum, without, that in an order; of SReLU both in an order.
    dglu = acts * 2 if recipe is None else acts * 3 + 1
    # Bias, scaled or not (BF16's kernel takes a scale always), and the data gradient, whose weights
    # are k-major in NVFP4 as the forward's are.
    gemm = 4 if recipe == MXFP8 else 3
    wgrad = 2 * 2 + (not single)  # dtype, written or added to; and autograd's are dense
    return glu + dglu + gemm + wgrad


def every_layout(recipe, single, groups, device="cpu"):
    """Modules and inputs whose tensors lie otherwise, or of other sizes, than usual ones."""
    sizes = [20, *[0] * (groups - 2), 30]
    options = {**SINGLE, "single_grouped_weight": single, "bias": True}
    for name in ("odd addresses", "transposed weights", "odd and transposed"):
        module = module_of(recipe, options, SWIGLU, groups, False, device)
        given = inputs_of(module, sizes, 60, device)
        stored = recipe is not None and not single
        for fc in (module[0], module[2]) if not stored else ():
            if "transposed" in name:
                _replace_weights(fc, transposed)
            if "odd" in name:
                _replace_weights(fc, _odd_transposed if "transposed" in name else at_odd_address)
        if "odd" in name:
            given = [at_odd_address(t) if t.is_floating_point() else t for t in given]
            given[3] = given[1]
        yield name, module, given, False
    for name, count, rows, change in (
        ("one group", 1, 60, None),
        ("one group, transposed weights", 1, 60, transposed),
        ("no rows", groups, 0, None),
        ("only empty groups", groups, 60, None),
        ("whole tiles", groups, 512, None),
    ):
        module = module_of(recipe, options, SWIGLU, count, False, device)
        for fc in (module[0], module[2]) if change and not (recipe and not single) else ():
            _replace_weights(fc, change)
        split = [0] * count if name != "whole tiles" else [512, *[0] * (count - 1)]
        if name.startswith("one group"):
            split = [rows]
        yield name, module, inputs_of(module, split, rows, device), False
    linear = linear_with_main_grad(recipe, single, torch.float32, False, groups, device)
    for p in linear.parameters():
        p.main_grad = at_odd_address(p.main_grad)
    x = torch.randn(60, 128, dtype=BF16, device=device)
    yield "main grads at odd addresses", linear, (x, torch.tensor(sizes, device=device)), False


def _odd_transposed(w):
    return at_odd_address(w.mT.contiguous()).mT
