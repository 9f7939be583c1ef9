"""Pipelines as they are written for Transformer Engine: each runs here, near FP64 math.

Written from the documentation of ``te.ops`` and from what its tests cover: a table of pipelines and
of what is varied about them. The test takes a part of the cases of each group. The share that
runs, and why the rest does not: ``PYTHONPATH=tests python tests/support/porting.py``, with
``--all`` of all cases, with names of groups of these.

The bound of each result is derived by repeating the FP64 computation with every result on the way
changed at random within one rounding of the dtypes in use. Operands are quantized there as the
recipe says, so that a rounding may move one to the next number of its format. A result may differ
by ``FACTOR`` times what these changes move it, in root mean square.
"""

from __future__ import annotations

import copy
import io
import itertools
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from every_op import ACTIVATIONS, NORMS, SCALED, SMALL, extra_inputs
from fuzz import formats
from number_formats import KINDS
from pairs import every_pair
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusible as te

FACTOR, REPEATS = 6, 3
DTYPES = torch.float32, torch.bfloat16, torch.float16
SHAPES = (128,), (32, 128), (4, 8, 128), (2, 4, 4, 128)
RECIPES = list(KINDS)
QUANTIZING = RECIPES[1:]


# --- pipelines ------------------------------------------------------------------------------------


class Op(NamedTuple):
    """An op of some features, and its function of input, extra inputs and parameters in FP64."""

    make: Callable[[int], nn.Module]
    plain: Callable[..., Tensor]


class Math:
    """What FP64 math reads of the case at hand: its recipe, and how much each result is changed."""

    recipe: str | None = None
    rounding: float = 0.0


class Changed(torch.autograd.Function):
    """A value and its gradient, each changed at random within a rounding."""

    @staticmethod
    def forward(ctx, t):
        return changed(t)

    @staticmethod
    def backward(ctx, grad):
        return changed(grad)


def changed(t: Tensor) -> Tensor:
    return t * (1 + Math.rounding * (2 * torch.rand_like(t) - 1))


def product(x: Tensor, w: Tensor) -> Tensor:
    return formats.linear(x, w, Math.recipe)


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return product(x, w) if b is None else Changed.apply(product(x, w)) + b


def grouped(x: Tensor, sizes: Tensor, *params: Tensor, scales: Tensor | None = None) -> Tensor:
    """Of parameters of all groups in one, or of one group each."""
    single = params[0].dim() == 3
    weights, *biases = params if single else (params[: len(sizes)], *[params[len(sizes) :]])
    rows = x.reshape(-1, x.shape[-1])
    parts, start = [], 0
    for g, size in enumerate(sizes.tolist()):
        at = slice(start, start + size)
        y = product(rows[at], weights[g])
        if biases and len(biases[0]):
            y = y + (
                biases[0][g] if scales is None else scales.reshape(-1)[at, None] * biases[0][g]
            )
        parts.append(y)
        start += size
    tail = rows.new_zeros(len(rows) - start, weights[0].shape[0])
    return torch.cat([*parts, tail]).reshape(*x.shape[:-1], -1)


class Straight(torch.autograd.Function):
    """Values quantized forward, gradients backward; either may stay as they are."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_to = backward
        return quantized(x, forward)

    @staticmethod
    def backward(ctx, grad):
        return quantized(grad, ctx.backward_to), None, None


def quantized(t: Tensor, role: str | None) -> Tensor:
    """Values in the recipe's format for row-wise use; where a neighbour does it, as they are.

    A linear next to ``Quantize`` reads both uses, made of the original; that is what the changed
    computation does, so that either is within the bound.
    """
    if role is None or Math.recipe is None or Math.rounding:
        return t * 1
    as_rows = t.reshape(-1, t.shape[-1])
    return getattr(formats.RECIPES[Math.recipe], role)(as_rows).reshape(t.shape)


def quantize(forward: bool, backward: bool) -> Op:
    roles = "input" if forward else None, "grad" if backward else None
    return Op(lambda f: te.Quantize(forward=forward, backward=backward),
              lambda x: Straight.apply(x, *roles))  # fmt: skip


def cached(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """An activation whose backward reads its input in E4M3 with one scale."""
    as_rows = x.detach().reshape(-1, x.shape[-1])
    saved = formats.fp8_scaled(as_rows, formats.E4M3, None, False).reshape(x.shape)
    y = activation(x - x.detach() + saved)
    return y + (activation(x) - y).detach()


def residual(x: Tensor, *params: Tensor) -> Tensor:
    """A pre-norm MLP with a residual connection, as in Transformer Engine's guide."""
    norm, shift, w1, b1, w2, b2 = params
    y = Changed.apply(NORMS["LayerNorm"].plain(x, norm, shift))
    y = Changed.apply(ACTIVATIONS["SwiGLU"].plain(Changed.apply(linear(y, w1, b1))))
    return x + Changed.apply(linear(y, w2, b2))


def make_residual(f: int) -> te.Sequential:
    return te.Sequential(
        te.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        *(te.LayerNorm(f), te.Linear(f, 2 * f), te.SwiGLU(), te.Linear(f, f)),
        te.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


GROUPS = 3
LINEARS = {
    "BasicLinear": Op(lambda f: te.BasicLinear(f, f), linear),
    "Linear": Op(lambda f: te.Linear(f, f), linear),
    "Linear, no bias": Op(lambda f: te.Linear(f, f, bias=False), linear),
    "Linear, main_grad": Op(lambda f: te.Linear(f, f, accumulate_into_main_grad=True), linear),
}
GROUPED = {
    "GroupedLinear": Op(lambda f: te.GroupedLinear(GROUPS, f, f), grouped),
    "GroupedLinear, no bias": Op(lambda f: te.GroupedLinear(GROUPS, f, f, bias=False), grouped),
    "GroupedLinear, single": Op(
        lambda f: te.GroupedLinear(
            GROUPS, f, f, single_grouped_weight=True, single_grouped_bias=True
        ),
        grouped,
    ),
    "GroupedLinear, scaled bias": Op(
        lambda f: te.GroupedLinear(GROUPS, f, f, scale_bias=True),
        lambda x, sizes, scales, *params: grouped(x, sizes, *params, scales=scales),
    ),
    "GroupedLinear, main_grad": Op(
        lambda f: te.GroupedLinear(GROUPS, f, f, bias=False, accumulate_into_main_grad=True),
        grouped,
    ),
    "GroupedLinear, delayed": Op(
        lambda f: te.GroupedLinear(GROUPS, f, f, bias=False, delay_wgrad_compute=True), grouped
    ),
}
QUANTIZES = {
    "Quantize": quantize(True, False),
    "Quantize, backward": quantize(False, True),
    "Quantize, both": quantize(True, True),
    "Quantize, neither": quantize(False, False),
}
CACHED = {
    f"{name}, cached": Op(
        lambda f, name=name: getattr(te, name)(cache_quantized_input=True),
        lambda x, name=name: cached(x, ACTIVATIONS[name].plain),
    )
    for name in ("GELU", "SwiGLU")
}
ELEMENTWISE = {**ACTIVATIONS, **SCALED, **NORMS, **SMALL}
del ELEMENTWISE["Quantize, without a recipe"]


class LearnableScale(te.BasicOperation):
    """The own op of Transformer Engine's guide."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("scale", nn.Parameter(torch.ones(())))

    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(self.scale, input_)
        return self.scale * input_

    def op_backward(self, ctx, grad_output):
        scale, input_ = ctx.saved_tensors
        grad_scale = torch.inner(input_.reshape(-1), grad_output.reshape(-1)).reshape(())
        return scale * grad_output, (grad_scale,)


OPS: dict[str, Op] = {
    **{name: Op(*case) for name, case in ELEMENTWISE.items()},
    **LINEARS,
    **GROUPED,
    **QUANTIZES,
    **CACHED,
    "Residual MLP": Op(make_residual, residual),
    "LearnableScale": Op(lambda f: LearnableScale(), lambda x, scale: x * scale),
    "nn.Linear": Op(lambda f: nn.Linear(f, f), F.linear),
    "nn.Tanh": Op(lambda f: nn.Tanh(), torch.tanh),
    "nn.Identity": Op(lambda f: nn.Identity(), lambda x: x * 1),
}
HALVING = {n for n in OPS if "GLU" in n or n == "Reshape" or "QGeGLU" in n}


class Case(NamedTuple):
    """A pipeline, and what is done with it."""

    ops: tuple[str, ...]
    shape: tuple[int, ...] = (32, 128)
    recipe: str = "none"
    dtype: torch.dtype = torch.bfloat16
    given: str = ""
    """Which tensors are given quantized: input ("x"), row-wise alone ("r"), gradient ("g")."""
    way: str = "train"
    stored: bool = False
    computed: bool = True
    """Under the recipe; else it is that of stored weights and given tensors alone."""
    frozen: str = ""
    """No gradients of the input ("x"), of the parameters ("w"), of one group ("1")."""
    autocast: torch.dtype | None = None
    x_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        """The ops, and the fields that are not as by default."""
        fields = self._asdict().items()
        rest = [f"{k}={v}" for k, v in fields if v != self._field_defaults.get(k) and k != "ops"]
        return " ".join([" > ".join(self.ops), *rest]).replace("torch.", "")


# --- what is varied -------------------------------------------------------------------------------


def alone() -> Iterator[Case]:
    """Every op, of one to four dimensions, in training and inference."""
    for name, shape, dtype, recipe, way in itertools.product(
        OPS, SHAPES, DTYPES, RECIPES, ("train", "infer")
    ):
        if not (len(shape) == 1 and ("Grouped" in name or name == "Reshape")):
            yield Case((name,), shape, recipe, dtype, way=way)


def positions() -> Iterator[Case]:
    """Every op before, after and between linears, whose weights may be stored quantized."""
    for name, at, recipe, dtype, stored in itertools.product(
        OPS, ("_L", "L_", "L_L", "_G", "G_"), RECIPES, DTYPES, (False, True)
    ):
        if stored and recipe == "none":
            continue
        names = {"L": "Linear", "G": "GroupedLinear, no bias", "_": name}
        yield Case(tuple(names[c] for c in at), (32, 256), recipe, dtype, stored=stored)


def quantize_anywhere() -> Iterator[Case]:
    """``Quantize`` before and after every op; alone; between two linears' neighbours."""
    both = ("Quantize, both", "Quantize", "Quantize, backward")
    for name, recipe, (before, after), dtype in itertools.product(
        OPS, QUANTIZING, itertools.product((*both, None), repeat=2), DTYPES
    ):
        if before or after:
            ops = [op for op in (before, name, after) if op]
            yield Case(tuple(ops), (32, 256), recipe, dtype)


def given_quantized() -> Iterator[Case]:
    """Quantized inputs and gradients of every op, under the recipe and outside of it."""
    for name, recipe, given, computed, dtype in itertools.product(
        OPS, QUANTIZING, ("x", "r", "g", "xg"), (True, False), DTYPES
    ):
        yield Case((name,), (128, 256), recipe, dtype, given, computed=computed)


def basic_linear() -> Iterator[Case]:
    """A linear with each of its operands and results quantized or not."""
    flags = itertools.product((False, True), repeat=6)
    for (computed, x, w, y, dy, dx), recipe in itertools.product(flags, QUANTIZING):
        ops = QUANTIZE_NAMES[x, dx], "BasicLinear", QUANTIZE_NAMES[y, dy]
        given = "x" * x + "g" * dy
        yield Case(ops, (128, 128), recipe, given=given, stored=w, computed=computed)


QUANTIZE_NAMES = dict(
    zip(
        itertools.product((False, True), repeat=2),
        ("Quantize, neither", "Quantize, backward", "Quantize", "Quantize, both"),
        strict=True,
    )
)


def frozen() -> Iterator[Case]:
    """Which gradients are wanted of a linear, dense or grouped."""
    for name, recipe, computed, stored, which in itertools.product(
        (*LINEARS, *GROUPED), RECIPES, (False, True), (False, True), ("", "x", "w", "xw", "1")
    ):
        if recipe == "none" and (stored or computed):
            continue
        if which == "1" and ("single" in name or "Grouped" not in name):
            continue
        yield Case((name,), (128, 128), recipe, frozen=which, stored=stored, computed=computed)


def sizes() -> Iterator[Case]:
    """Sizes that are no multiples of a block; one that ends in half a block, as GPT-OSS's 2880."""
    for name, shape, recipe, stored in itertools.product(
        ("Linear", "GroupedLinear", "GELU", "RMSNorm", "Residual MLP", "Quantize, both"),
        ((1, 2), (5, 1, 6), (6, 16, 34), (7, 38), (3, 160)),
        RECIPES,
        (False, True),
    ):
        if stored <= (recipe != "none"):
            yield Case((name,), shape, recipe, stored=stored)
    for name in ("Linear", "SwiGLU", "Quantize, both"):
        yield Case((name,), (2, 576), "fp8_block")


def dtypes() -> Iterator[Case]:
    """Inputs and parameters of different dtypes, outside of ``torch.autocast`` and under it."""
    for name, dtype, x_dtype, autocast, recipe in itertools.product(
        ("Linear", "GroupedLinear", "LayerNorm", "RMSNorm", "Bias", "GELU", "Residual MLP"),
        DTYPES,
        DTYPES,
        (None, *DTYPES[1:]),
        RECIPES,
    ):
        yield Case((name,), recipe=recipe, dtype=dtype, x_dtype=x_dtype, autocast=autocast)


MLPS = {
    "LayerNorm MLP": ("LayerNorm", "Linear", "SwiGLU", "Linear"),
    "grouped MLP": ("GroupedLinear", "ScaledSwiGLU", "GroupedLinear, scaled bias"),
    "grouped MLP, SReLU": ("GroupedLinear, single", "ScaledSReLU", "GroupedLinear, single"),
    "linear + bias + activation": ("BasicLinear", "Bias", "GELU"),
    "linear + scale + add": ("BasicLinear", "ConstantScale", "AddExtraInput"),
    "linear + bias + add": ("Linear", "AddExtraInput"),
    "scale + linear": ("ConstantScale", "BasicLinear"),
    "residual": ("Residual MLP",),
    "norm, residual, norm": ("RMSNorm", "Residual MLP", "RMSNorm"),
    "an ordinary module inside": ("Linear", "nn.Tanh", "Linear"),
    "main_grad": ("Linear, main_grad", "SiLU", "GroupedLinear, main_grad"),
    "delayed": ("GroupedLinear, delayed", "ScaledClampedQGeGLU", "GroupedLinear, delayed"),
}
WAYS = "train", "infer", "eval", "checkpoint", "twice", "copy", "reload"


def ways() -> Iterator[Case]:
    """The pipelines that Transformer Engine fuses and its examples, in each way of running them."""
    for ops, way, recipe, dtype, stored in itertools.product(
        MLPS.values(), WAYS, RECIPES, DTYPES, (False, True)
    ):
        if not (stored and recipe == "none"):
            yield Case(ops, (32, 256), recipe, dtype, way=way, stored=stored)


def compiled() -> Iterator[Case]:
    """The same pipelines under ``torch.compile``."""
    for ops, recipe in itertools.product(MLPS.values(), RECIPES):
        if not any("delayed" in name for name in ops):
            yield Case(ops, (32, 256), recipe, way="compile")


GROUPS_OF_CASES: dict[str, tuple[Callable[[], Iterator[Case]], int]] = {
    "alone": (alone, 17),
    "positions": (positions, 71),
    "quantize": (quantize_anywhere, 29),
    "given quantized": (given_quantized, 29),
    "basic linear": (basic_linear, 0),
    "frozen": (frozen, 0),
    "sizes": (sizes, 0),
    "dtypes": (dtypes, 0),
    "ways": (ways, 23),
    "compiled": (compiled, 31),
}
"""Each group, and every how many-th case the test runs; none divides a number of choices.

0: those that have every pair of two fields' values.
"""


# --- running a case -------------------------------------------------------------------------------


class Side(NamedTuple):
    """A pipeline and its tensors."""

    module: te.Sequential
    x: Tensor
    extra: list[list[Tensor]]
    """Of each op."""
    dy: Tensor


def representable(t: Tensor, recipe: str, role: str) -> Tensor:
    """The nearest values of a recipe's format."""
    as_rows = t.detach().double().reshape(-1, t.shape[-1])
    return getattr(formats.RECIPES[recipe], role)(as_rows).reshape(t.shape).to(t.dtype)


def build(case: Case) -> Side:
    """The module and what it is called with; values of stored weights fit their format."""
    torch.manual_seed(sum(map(ord, str(case))))
    recipe, features, ops, extra = _name(case), case.shape[-1], [], []
    shape = torch.empty(case.shape, dtype=case.x_dtype or case.dtype)
    for name in case.ops:
        with te.quantized_model_init(enabled=case.stored, recipe=KINDS[case.recipe]):
            op = OPS[name].make(features).to(case.dtype)
        with torch.no_grad():
            for p in op.parameters():
                value = torch.randn(p.shape, dtype=torch.float32).to(case.dtype) * 0.5
                if p.dim() > 1:
                    value *= features**-0.5
                    value = representable(value, recipe, "weight") if recipe else value
                p.copy_(value)
        ops.append(op)
        extra.append([] if isinstance(op, te.Sequential) or not isinstance(
            op, te.FusibleOperation) else extra_inputs(op, shape))  # fmt: skip
        if name in HALVING:
            features //= 2
        shape = shape[..., :features]
    x, dy = torch.randn(case.shape).to(case.x_dtype or case.dtype), torch.randn(shape.shape)
    dy = dy.to(case.autocast or case.dtype)
    if case.ops[-1] == "Reshape" or "Reshape" in case.ops:
        dy = dy.repeat(2, *[1] * (dy.dim() - 1)).reshape(-1, features)
    if recipe:
        for t in (x, dy):  # so that a group's scale is that of all rows
            t[..., 0] = t.abs().max()
        x, dy = representable(x, recipe, "input"), representable(dy, recipe, "grad")
    for op in ops:
        for name, p in op.named_parameters():
            p.requires_grad_("w" not in case.frozen and not ("1" in case.frozen and "0" in name))
            if p.dim() > 1 and getattr(op, "accumulate_into_main_grad", "main" in str(case.ops)):
                p.main_grad = torch.full(p.shape, 0.5)
    return Side(te.Sequential(*ops), x.requires_grad_("x" not in case.frozen), extra, dy)


def _name(case: Case) -> str | None:
    """The recipe among the reference's."""
    return None if case.recipe == "none" else case.recipe.replace("_", " ")


def wanted(side: Side, way: str) -> dict[str, Tensor]:
    """The tensors whose gradients are compared."""
    if way in ("infer", "eval"):
        return {}
    named = {"x": side.x, **dict(side.module.named_parameters())}
    named |= {f"extra input {i}.{k}": t for i, e in enumerate(side.extra) for k, t in enumerate(e)}
    return {name: t for name, t in named.items() if t.requires_grad}


def exact(case: Case, side: Side, rounding: float = 0.0) -> dict[str, Tensor]:
    """Output and gradients in FP64; ``rounding`` changes each result on the way."""
    Math.recipe, Math.rounding = _name(case) if case.computed else None, rounding
    tensors = wanted(side, case.way)
    leaf = {id(t): Changed.apply(values(t).double()) for t in tensors.values()}
    leaf = {k: t.detach().requires_grad_() for k, t in leaf.items()}

    def value(t: Tensor) -> Tensor:
        t = leaf.get(id(t), t)
        return Changed.apply(values(t).double()) if t.is_floating_point() else t

    y = value(side.x)
    for op, extra, name in zip(side.module, side.extra, case.ops, strict=True):
        params = [value(p) for p in op.parameters()]
        y = Changed.apply(OPS[name].plain(y, *map(value, extra), *params))
    found = {"y": y.detach()}
    if leaf and y.requires_grad:
        grads = torch.autograd.grad(y, [*leaf.values()], side.dy.double(), allow_unused=True)
        for name, t, g in zip(tensors, leaf.values(), grads, strict=True):
            found[f"gradient of {name}"] = torch.zeros_like(t) if g is None else g
    return found


def values(t: Tensor) -> Tensor:
    return t.detach().dequantize() if isinstance(t, te.QuantizedTensor) else t.detach()


def quantizer(case: Case, role: str, rowwise_only: bool) -> te.recipes.Quantizer:
    return te.recipes.Quantizer(KINDS[case.recipe].format(role), columnwise=not rowwise_only)


def scopes(case: Case) -> ExitStack:
    """The recipe's scope, and that of ``torch.autocast``."""
    stack, recipe = ExitStack(), KINDS[case.recipe]
    stack.enter_context(te.autocast(enabled=recipe is not None and case.computed, recipe=recipe))
    if case.autocast is not None:
        stack.enter_context(torch.autocast("cpu", case.autocast))
    return stack


def run(case: Case, side: Side) -> dict[str, Tensor]:
    """Output and gradients of the package."""
    module, x, extra, dy = side
    flat = [t for each in extra for t in each]
    if set("xr") & set(case.given):
        given = quantizer(case, "input", "r" in case.given)(x.detach())
        x = given.requires_grad_(x.requires_grad)
    if "g" in case.given:
        dy = quantizer(case, "grad", False)(dy)
    if case.way in ("infer", "eval"):
        if case.way == "eval":
            module.eval()
        with torch.inference_mode() if case.way == "infer" else torch.no_grad(), scopes(case):
            return {"y": module(x, *flat)}
    call: Callable[..., Tensor] = module
    if case.way == "checkpoint":
        call = partial(checkpoint, module, use_reentrant=False)
    elif case.way == "compile":
        torch.compiler.reset()
        call = torch.compile(module, fullgraph=True, backend="aot_eager")
    elif case.way == "copy":
        call = module = copy.deepcopy(module)
    elif case.way == "reload":
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        module.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    with scopes(case):
        y = call(x, *flat)
    tensors = wanted(Side(module, x, extra, dy), case.way)
    if tensors:
        for _ in range(1 + (case.way == "twice")):
            y.backward(dy, retain_graph=case.way == "twice")
        for op in module:
            if getattr(op, "delay_wgrad_compute", False):
                op.backward_dw()
    return {"y": y, **{f"gradient of {n}": _gradient(t, case) for n, t in tensors.items()}}


def _gradient(t: Tensor, case: Case) -> Tensor:
    main = getattr(t, "main_grad", None)
    grad = t.grad if main is None else main - 0.5
    grad = torch.zeros_like(t) if grad is None else grad
    return grad / 2 if case.way == "twice" else grad


def check(case: Case) -> None:
    """Raises where the package refuses, or where a result is not the FP64 one."""
    side = build(case)
    narrow = [t for t in (case.dtype, case.x_dtype, case.autocast) if t is not None]
    rounding = max(torch.finfo(t).eps for t in narrow)
    rounding *= 1 if rounding > 1e-5 else 4  # sums in FP32
    want = exact(case, side)
    moved = [exact(case, side, rounding) for _ in range(REPEATS)]
    got = run(case, side)
    for name, t in want.items():
        found, size = values(got[name]).double(), rms(t)
        assert found.shape == t.shape, f"{name} has shape {found.shape}, must have {t.shape}"
        moved_by = FACTOR * max(rms(m[name] - t) for m in moved) + rounding * size
        bound = moved_by + flip(case) * size / max(t.numel(), 1) ** 0.5
        error = rms(found - t)
        assert error <= bound, f"{name}: error {error:.3g} over {bound:.3g} at {size:.3g}"
    check_kinds(case, got)


def flip(case: Case) -> float:
    """How much one operand may move where it is rounded to the next number of its format."""
    return {"none": 0.0, "nvfp4": 0.5}.get(case.recipe, 0.125)


def check_kinds(case: Case, got: dict[str, Tensor]) -> None:
    """``Quantize`` at either end gives quantized tensors; a linear gives its weight's dtype."""
    computed = case.recipe != "none" and case.computed
    first, last = case.ops[0], case.ops[-1]
    if last in QUANTIZES and case.way != "checkpoint":
        forward = computed and last in ("Quantize", "Quantize, both")
        assert isinstance(got["y"], te.QuantizedTensor) >= forward
    if first in QUANTIZES and "gradient of x" in got and "g" not in case.given:
        backward = computed and first in ("Quantize, backward", "Quantize, both")
        assert isinstance(got["gradient of x"], te.QuantizedTensor) >= backward
    if last in LINEARS or last in GROUPED:
        assert got["y"].dtype == (case.autocast or case.dtype)
    if "gradient of x" in got:
        assert got["gradient of x"].dtype == (case.x_dtype or case.dtype)


def rms(t: Tensor) -> float:
    return t.square().mean().sqrt().item() if t.numel() else 0.0


# --- the share that runs --------------------------------------------------------------------------


def outcomes(group: str, every: bool = False) -> Iterator[tuple[Case, str]]:
    """Each case of a group, or a part of them, and what is wrong with it, if anything is."""
    make, nth = GROUPS_OF_CASES[group]
    cases = [*make()]
    for case in cases if every else cases[::nth] if nth else every_pair(cases):
        try:
            check(case)
        except Exception as error:
            yield case, f"{type(error).__name__}: {error}".partition("\n")[0][:240]
        else:
            yield case, ""


def report(groups: Iterable[str], every: bool) -> None:
    """Write for each group how many of its cases run, and an example for each reason."""
    of_all: Counter[bool] = Counter()
    for group in groups:
        start, wrong, count = time.process_time(), defaultdict(list), Counter()
        for case, why in outcomes(group, every):
            count[not why] += 1
            if why:
                wrong[re.sub(r"[0-9.e+-]*[0-9][0-9.e+-]*", "#", why)[:110]].append((case, why))
        of_all += count
        seconds = time.process_time() - start
        lines = [f"{group}: {count[True]} of {count.total()} run ({seconds:.0f} s)"]
        for same in sorted(wrong.values(), key=len, reverse=True):
            lines.append(f"  {len(same)}, such as {same[0][0]}:\n    {same[0][1]}")
        sys.stdout.write("\n".join([*lines, ""]))
        sys.stdout.flush()
    share = of_all[True] / of_all.total()
    sys.stdout.write(f"all: {of_all[True]} of {of_all.total()} run, {share:.1%}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    named = [name for name in sys.argv[1:] if name != "--all"]
    report(named or GROUPS_OF_CASES, "--all" in sys.argv)
