"""The SM100 fused ops on the emulator with options at random together, against the unfused ops."""

import copy
from contextlib import ExitStack

import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from number_formats import MX, NV

import fusible as fz
from fusible import recipes
from fusible.fuser.registry import registry
from fusible.recipes.grouped import group_quantize
from fusible.testing import assume_target

BF16, FP32 = torch.bfloat16, torch.float32
MXFP8, NVFP4 = MX, NV
BOUND = {None: 2**-6, MXFP8: 2**-3, NVFP4: 2**-3}  # for each group; see test_sm100_mlp.DIFFERENCE
FEATURES = (64, 128, 192)

CASES = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),  # a case says enough; making it smaller takes minutes
)
flags, seeds = st.booleans(), st.integers(0, 2**31 - 1)
sizes_of_groups = st.lists(st.sampled_from([0, 1, 30, 32, 255, 257]), min_size=1, max_size=4)
whole_tiles = st.lists(st.sampled_from([0, 256]), min_size=1, max_size=3)


@st.composite
def linear_options(draw, recipe):
    """Of one ``GroupedLinear``, and what is done to its weights."""
    bias = draw(flags)
    stored = recipe is not None and draw(flags)
    return {
        "bias": bias,
        "single_grouped_weight": draw(flags),
        "single_grouped_bias": draw(flags),
        "main_grad": draw(st.sampled_from([None, None, BF16, FP32])) if not stored else None,
        "overwrite": draw(flags),
        "delay_wgrad_compute": draw(flags),
        "stored": stored,
        "frozen": draw(st.sampled_from(["", "", "weight", "bias", "both"])),
        "features": draw(st.sampled_from(FEATURES)),
    }


@st.composite
def cases(draw):
    """A module's options, its input and how it is called."""
    recipe = draw(st.sampled_from([None, MXFP8, NVFP4]))
    aligned = draw(flags)
    sizes = draw(whole_tiles if aligned else sizes_of_groups)
    kinds = ["bf16", "bf16", *(["grouped", "whole"] if recipe else [])]
    first, second = draw(linear_options(recipe)), draw(linear_options(recipe))
    return {
        "recipe": recipe,
        "aligned": aligned,
        "sizes": sizes,
        "tail": draw(st.sampled_from([0, 256] if aligned else [0, 7, 270])),
        "input": draw(st.sampled_from(kinds)),
        "grad": draw(st.sampled_from(["bf16", "expanded", *(["grouped"] if recipe else [])])),
        "needs_dx": draw(flags),
        "needs_dscales": draw(flags),
        "scales": draw(st.sampled_from([BF16, FP32])),
        "scale_bias": second["bias"] and draw(flags),
        "splits": draw(st.sampled_from([torch.int32, torch.int64])),
        "buffers": draw(flags),
        "reuse": draw(flags),
        "steps": draw(st.sampled_from([1, 2])),
        "act": draw(st.sampled_from(["swiglu", "clamped", *(["srelu"] if recipe else [])])),
        "hidden": draw(st.sampled_from(FEATURES)),
        "linears": (first, second),
        "seed": draw(seeds),
    }


def linear_of(case, options, in_features, out_features, **more):
    names = (
        "bias", "single_grouped_weight", "single_grouped_bias", "delay_wgrad_compute",
    )  # fmt: skip
    stored = options["stored"]
    with fz.quantized_model_init(enabled=stored, recipe=case["recipe"]):
        linear = fz.GroupedLinear(
            len(case["sizes"]),
            in_features,
            out_features,
            dtype=BF16,
            split_alignment=256 if case["aligned"] else 1,
            accumulate_into_main_grad=options["main_grad"] is not None,
            **{name: options[name] for name in names},
            **more,
        )
    with torch.no_grad():
        for name, p in linear.named_parameters():
            p.copy_(torch.randn(p.shape) / (8 if name.startswith("weight") else 1))
            if options["frozen"] in ("both", name.rstrip("0123456789")):
                p.requires_grad_(False)
    return linear


def prepared(linear, options):
    """With gradient buffers, which copies of a module do not take along."""
    for name, p in linear.named_parameters():
        if name.startswith("weight") and options["main_grad"] is not None:
            p.main_grad = torch.full(p.shape, 3.0, dtype=options["main_grad"])
            p.overwrite_main_grad = options["overwrite"]


def as_grouped(t, case):
    splits = torch.tensor(case["sizes"])
    kind = recipes.MXFP8Quantizer if case["recipe"] == MXFP8 else recipes.NVFP4Quantizer
    return group_quantize(t, kind(), len(case["sizes"]), splits)


def outcome(module, case, target, x, extra, dy):
    """All that a step or two leave behind, by name."""
    fcs = [m for m in module if isinstance(m, fz.GroupedLinear)]
    for fc, options in zip(fcs, case["linears"], strict=False):
        prepared(fc, options)
    leaf = x.clone().requires_grad_(case["needs_dx"]) if case["input"] == "bf16" else x
    extra = [t.detach().clone().requires_grad_() if t.requires_grad else t for t in extra]
    found, kwargs = {}, {}
    with ExitStack() as stack:
        if target is not None:
            stack.enter_context(assume_target(target))
        if case["recipe"] is not None:
            stack.enter_context(fz.autocast(recipe=case["recipe"]))
        if case["reuse"]:
            stack.enter_context(fz.reuse_quantized_weights(module))
        for _ in range(case["steps"]):
            if case["buffers"]:
                output = torch.full((len(x), dy.shape[1]), float("nan"), dtype=BF16)
                kwargs[len(module) - 1] = {"output": output}
                if case["input"] == "bf16" and case["needs_dx"]:
                    kwargs.setdefault(0, {})["grad_input"] = torch.full_like(x, float("nan"))
            y = module(leaf, *extra, op_kwargs=kwargs)
            found["y"] = y.detach().clone()
            if y.requires_grad:
                y.backward(dy)
                for fc in fcs:
                    if fc.delay_wgrad_compute:
                        fc.backward_dw()
    found["x"] = leaf.grad if case["input"] == "bf16" else None
    found |= {f"extra {i}": t.grad for i, t in enumerate(extra)}
    found |= {f"{n}": p.grad for n, p in module.named_parameters()}
    found |= {f"main {n}": getattr(p, "main_grad", None) for n, p in module.named_parameters()}
    return {name: t for name, t in found.items() if t is not None}


def tensors_of(case, in_features, out_features):
    rows = sum(case["sizes"]) + case["tail"]
    x, dy = torch.randn(rows, in_features).to(BF16), torch.randn(rows, out_features).to(BF16)
    if case["grad"] == "expanded":
        dy = dy[:1].expand(rows, -1)
    elif case["grad"] == "grouped":
        dy = as_grouped(dy, case)
    if case["input"] == "grouped":
        x = as_grouped(x, case)
    elif case["input"] == "whole":
        kind = recipes.MXFP8Quantizer if case["recipe"] == MXFP8 else recipes.NVFP4Quantizer
        x = kind()(x)
    return x, dy, rows


def check(case, module, x, extra, dy, used):
    plain = copy.deepcopy(module)
    registry.rules, rules = (), registry.rules
    registry.version += 1
    try:
        wanted = outcome(plain, case, None, x, extra, dy)
    finally:
        registry.rules = rules
        registry.version += 1
    got = outcome(module, case, "sm100", x, extra, dy)
    assert set(module.plan.fired + module.plan.kernels) == {used}
    assert got.keys() == wanted.keys()
    for name, mine in got.items():
        theirs = wanted[name]
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        assert mine.isfinite().all(), name
        parts = ((mine, theirs),)
        if name in ("y", "x") or name.startswith("extra"):
            split = [*case["sizes"], case["tail"]]
            parts = zip(mine.split(split), theirs.split(split), strict=True)
        elif "weight" in name and mine.dim() == 3:
            parts = zip(mine, theirs, strict=True)
        for a, b in parts:
            error, size = (a.double() - b.double()).norm(), b.double().norm()
            # What was quantized as a whole has blocks along its columns that cross groups: the
            # unfused op takes them, the fused one makes its own.
            loose = case["input"] == "whole" or name.startswith("extra")
            if name.startswith("extra"):
                # A gradient of scales is a sum of either sign, and may be small by chance: the
                # error of some is measured by the size of all.
                share = len(b) / max(len(theirs), 1)
                size = max(size, share**0.5 * theirs.double().norm())
            limit = BOUND[case["recipe"]] * (4 if loose else 1) * size
            assert error <= limit, (name, error / size)


@CASES
@given(cases())
def test_the_grouped_mlp(case):
    torch.manual_seed(case["seed"])
    first, second = case["linears"]
    inner = second["features"]
    act = {
        "swiglu": fz.ScaledSwiGLU(glu_interleave_size=32),
        "clamped": fz.ScaledClampedQGeGLU(glu_interleave_size=32),
        "srelu": fz.ScaledSReLU(),
    }[case["act"]]
    fc1 = linear_of(case, first, case["hidden"], 2 * inner if act.gated else inner)
    fc2 = linear_of(case, second, inner, first["features"], scale_bias=case["scale_bias"])
    module = fz.Sequential(fc1, act, fc2)
    x, dy, rows = tensors_of(case, case["hidden"], first["features"])
    splits = torch.tensor(case["sizes"], dtype=case["splits"])
    scales = torch.rand(rows).to(case["scales"]).requires_grad_(case["needs_dscales"])
    extra = [splits, scales, splits]
    if case["scale_bias"]:
        extra.append(torch.rand(rows).requires_grad_())
    needs_dx = case["needs_dx"] and case["input"] == "bf16"
    # Ops of which only later ones have a backward run apart.
    assume(any(p.requires_grad for p in fc1.parameters()) or needs_dx)
    check(case, module, x, extra, dy, "grouped_mlp_sm100")


@CASES
@given(cases())
def test_the_grouped_linear(case):
    torch.manual_seed(case["seed"])
    options = case["linears"][1]
    linear = linear_of(
        case, options, case["hidden"], options["features"], scale_bias=case["scale_bias"]
    )
    x, dy, rows = tensors_of(case, case["hidden"], options["features"])
    extra = [torch.tensor(case["sizes"], dtype=case["splits"])]
    if case["scale_bias"]:
        extra.append(torch.rand(rows).to(case["scales"]).requires_grad_(case["needs_dscales"]))
    case = {**case, "linears": (options,)}
    check(case, fz.Sequential(linear), x, extra, dy, "sm100")
