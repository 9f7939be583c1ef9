"""The table of ops: how each is drawn, what it does to shapes, and who computes it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import fusible as fz

from . import references as ref
from .cases import InvalidError
from .own_ops import Affine, HandWritten, Inner, Noisy

Shape = tuple[int, ...]
Options = dict[str, Any]


class Kind(NamedTuple):
    """One op."""

    op: Callable[[Shape, Options, torch.dtype], nn.Module]
    twin: Callable[[Shape, Options, torch.dtype], nn.Module]
    draw: Callable[[random.Random, Shape], Options] = lambda rng, shape: {}
    shape: Callable[[Shape, Options], Shape] = lambda shape, options: shape
    inputs: Callable[[Options], tuple[str, ...]] = lambda options: ()
    outputs: Callable[[Options], tuple[str, ...]] = lambda options: ()
    """Names of the extra outputs; an empty one feeds no op without a channel."""


def _require(holds: bool) -> None:
    if not holds:
        raise InvalidError


def _function(function: Callable[..., Any]) -> Callable[..., nn.Module]:
    return lambda shape, options, dtype: ref.Function(function)


# --- activations ----------------------------------------------------------------------------------


def _cached(rng: random.Random, shape: Shape) -> Options:
    return {}


def _interleave(rng: random.Random, shape: Shape) -> Options:
    fitting = [b for b in (1, 2, 4, 8, 32) if shape[-1] % (2 * b) == 0]
    return {"glu_interleave_size": rng.choice([None, None, *fitting])}


def _halved(shape: Shape, options: Options) -> Shape:
    block = options.get("glu_interleave_size")
    _require(shape[-1] % (2 if block is None else 2 * block) == 0)
    return (*shape[:-1], shape[-1] // 2)


def _unary(name: str) -> Kind:
    return Kind(lambda s, o, d: getattr(fz, name)(), _function(ref.UNARY[name]))


def _gate(name: str) -> Kind:
    unit = ref.GLU_UNITS[name]
    return Kind(
        lambda s, o, d: getattr(fz, name)(**o),
        lambda s, o, d: ref.Function(partial(unit, interleave=o.get("glu_interleave_size"))),
        _interleave,
        _halved,
    )


def _clamps(rng: random.Random, shape: Shape) -> Options:
    return {
        **_interleave(rng, shape),
        "limit": rng.choice([7.0, 0.7]),
        "alpha": rng.choice([1.702, 1.2]),
        "glu_linear_offset": rng.choice([1.0, 0.0, 0.25]),
    }


def _caps(rng: random.Random, shape: Shape) -> Options:
    betas = {"beta1": rng.choice([4.0, 0.8]), "beta2": rng.choice([25.0, 1.5])}
    return {**_interleave(rng, shape), **betas}


_RENAMED = {"glu_interleave_size": "interleave", "glu_linear_offset": "offset"}


def _renamed(options: Options) -> Options:
    return {_RENAMED.get(k, k): v for k, v in options.items()}


def _with_options(name: str, unit: Callable, draw: Callable) -> Kind:
    return Kind(
        lambda s, o, d: getattr(fz, name)(**o),
        lambda s, o, d: ref.Function(partial(unit, **_renamed(o))),
        draw,
        _halved,
    )


def _scaled(name: str, unit: Callable, draw: Callable, shape: Callable) -> Kind:
    return Kind(
        lambda s, o, d: getattr(fz, name)(**o),
        lambda s, o, d: ref.Function(partial(ref.scaled, unit=partial(unit, **_renamed(o)))),
        draw,
        shape,
        lambda o: ("scales",),
    )


# --- dense ----------------------------------------------------------------------------------------

WIDTHS = (1, 3, 4, 6, 8, 16)


def _features(rng: random.Random, shape: Shape) -> Options:
    wide = [32, 64, 128] if shape[-1] >= 32 else WIDTHS
    drawn = {"out": rng.choice([shape[-1], shape[-1], *wide])}
    return {**drawn, "accumulate_into_main_grad": True} if rng.random() < 0.1 else drawn


def _with_bias(rng: random.Random, shape: Shape) -> Options:
    return {**_features(rng, shape), "bias": rng.random() < 0.6}


def _to_out(shape: Shape, options: Options) -> Shape:
    return (*shape[:-1], options["out"])


def _main(options: Options) -> Options:
    return {k: v for k, v in options.items() if k == "accumulate_into_main_grad"}


def _norm(rng: random.Random, shape: Shape) -> Options:
    return {"zero_centered_gamma": rng.random() < 0.4, "eps": rng.choice([1e-5, 1e-2])}


def _norm_kind(name: str, bias: bool) -> Kind:
    return Kind(
        lambda s, o, d: getattr(fz, name)(s[-1], dtype=d, **o),
        lambda s, o, d: ref.Norm(s[-1], o["eps"], o["zero_centered_gamma"], bias),
        _norm,
    )


def _reshaped(shape: Shape, options: Options) -> Shape:
    total, to = math.prod(shape), tuple(options["to"])
    known = math.prod(size for size in to if size != -1)
    _require(known > 0 and total % known == 0)
    return tuple(total // known if size == -1 else size for size in to)


def _new_shape(rng: random.Random, shape: Shape) -> Options:
    last = shape[-1]
    forms = [(-1, last), (1, -1, last)]
    if last % 2 == 0:
        forms.append((-1, last // 2))
    if math.prod(shape[:-1]) % 2 == 0 and math.prod(shape) > 0:
        forms += [(-1, 2 * last), (2, -1, last)]
    return {"to": rng.choice(forms)}


# --- grouped --------------------------------------------------------------------------------------


def _grouped(rng: random.Random, shape: Shape) -> Options:
    bias = rng.random() < 0.5
    return {
        **_features(rng, shape),
        "num_groups": rng.choice([1, 2, 3, 4]),
        "bias": bias,
        "single_grouped_weight": rng.random() < 0.5,
        "single_grouped_bias": rng.random() < 0.5,
        "scale_bias": bias and rng.random() < 0.4,
        "delay_wgrad_compute": rng.random() < 0.2,
    }


def _grouped_op(shape: Shape, options: Options, dtype: torch.dtype) -> nn.Module:
    rest = {k: v for k, v in options.items() if k not in ("out", "num_groups")}
    return fz.GroupedLinear(options["num_groups"], shape[-1], options["out"], dtype=dtype, **rest)


def _grouped_twin(shape: Shape, options: Options, dtype: torch.dtype) -> nn.Module:
    names = "bias", "single_grouped_weight", "single_grouped_bias", "scale_bias"
    flags = [bool(options.get(name, name == "bias")) for name in names]
    return ref.GroupedLinear(options["num_groups"], shape[-1], options["out"], *flags)


def _router_inputs(options: Options) -> tuple[str, ...]:
    losses = [name for name in ("load_balancing_loss", "z_loss") if options.get(name)]
    return ("probs", "expert_ids", *losses)


def _dispatched(shape: Shape, options: Options) -> Shape:
    choices = math.prod(shape[:-1]) * options["top_k"]
    factor = options.get("capacity_factor")
    if factor is not None:
        experts = options["num_experts"]
        choices = min(choices, experts * math.ceil(round(factor * choices / experts, 9)))
    return (choices, shape[-1])


def _dispatch_outputs(options: Options) -> tuple[str, ...]:
    middle = () if options.get("scale_input") else ("scales",)
    return ("split_sizes", *middle, "row_map")


KINDS: dict[str, Kind] = {
    **{name: _unary(name) for name in ref.UNARY},
    **{name: _gate(name) for name in ref.GATES},
    "ClampedSwiGLU": _with_options("ClampedSwiGLU", ref.clamped, _clamps),
    "SiTUGLU": _with_options("SiTUGLU", ref.situ, _caps),
    "ScaledSwiGLU": _scaled("ScaledSwiGLU", ref.GLU_UNITS["SwiGLU"], _interleave, _halved),
    "ScaledClampedQGeGLU": _scaled("ScaledClampedQGeGLU", ref.clamped, _clamps, _halved),
    "ScaledSiTUGLU": _scaled("ScaledSiTUGLU", ref.situ, _caps, _halved),
    "ScaledSReLU": _scaled("ScaledSReLU", ref.srelu, _cached, lambda s, o: s),
    "Linear": Kind(
        lambda s, o, d: fz.Linear(s[-1], o["out"], bias=o["bias"], dtype=d, **_main(o)),
        lambda s, o, d: ref.Linear(s[-1], o["out"], o["bias"]),
        _with_bias,
        _to_out,
    ),
    "BasicLinear": Kind(
        lambda s, o, d: fz.BasicLinear(s[-1], o["out"], dtype=d, **_main(o)),
        lambda s, o, d: ref.Linear(s[-1], o["out"], False),
        _features,
        _to_out,
    ),
    "Bias": Kind(lambda s, o, d: fz.Bias(s[-1], dtype=d), lambda s, o, d: ref.Bias(s[-1])),
    "LayerNorm": _norm_kind("LayerNorm", True),
    "RMSNorm": _norm_kind("RMSNorm", False),
    "L2Normalization": Kind(
        lambda s, o, d: fz.L2Normalization(**o),
        lambda s, o, d: ref.Function(partial(ref.l2_normalize, **o)),
        lambda rng, s: {"eps": rng.choice([1e-6, 1e-2])},
    ),
    "Dropout": Kind(
        lambda s, o, d: fz.Dropout(o["p"]),
        lambda s, o, d: ref.Dropout(o["p"], d),
        lambda rng, s: {"p": rng.choice([0.0, 0.3, 0.5, 1.0])},
    ),
    "Identity": Kind(lambda s, o, d: fz.Identity(), _function(ref.identity)),
    "Quantize": Kind(
        lambda s, o, d: fz.Quantize(**o),
        _function(ref.quantize),
        inputs=lambda o: ("split_sizes",) if "num_groups" in o else (),
    ),
    "ConstantScale": Kind(
        lambda s, o, d: fz.ConstantScale(o["scale"]),
        lambda s, o, d: ref.Function(partial(ref.times, factor=o["scale"])),
        lambda rng, s: {"scale": rng.choice([0.5, -1.5, 0.0, 1.0])},
    ),
    "Reshape": Kind(
        lambda s, o, d: fz.Reshape(tuple(o["to"])),
        lambda s, o, d: ref.Function(partial(ref.reshape, to=tuple(o["to"]))),
        _new_shape,
        _reshaped,
    ),
    "AddExtraInput": Kind(
        lambda s, o, d: fz.AddExtraInput(**o),
        _function(ref.add),
        lambda rng, s: {"in_place": rng.random() < 0.4},
        inputs=lambda o: ("addend",),
    ),
    "MakeExtraOutput": Kind(
        lambda s, o, d: fz.MakeExtraOutput(**o),
        _function(ref.fork),
        lambda rng, s: {"in_place": rng.random() < 0.6},
        outputs=lambda o: ("",),
    ),
    "Swap": Kind(
        lambda s, o, d: fz.ops.Swap(),
        _function(ref.swap),
        inputs=lambda o: ("incoming",),
        outputs=lambda o: ("",),
    ),
    "Affine": Kind(lambda s, o, d: Affine(s[-1], d), lambda s, o, d: ref.Affine(s[-1])),
    "HandWritten": Kind(lambda s, o, d: HandWritten(s[-1], d), lambda s, o, d: ref.Affine(s[-1])),
    "Inner": Kind(lambda s, o, d: Inner(s[-1], d), lambda s, o, d: ref.Inner(s[-1])),
    "Noisy": Kind(lambda s, o, d: Noisy(s[-1], d), lambda s, o, d: ref.Noisy(s[-1])),
    "Tanh": Kind(lambda s, o, d: nn.Tanh(), _function(torch.tanh)),
    "GroupedLinear": Kind(
        _grouped_op,
        _grouped_twin,
        _grouped,
        _to_out,
        lambda o: ("split_sizes", "scales") if o.get("scale_bias") else ("split_sizes",),
    ),
    "TopKRouter": Kind(
        lambda s, o, d: fz.TopKRouter(s[-1], dtype=d, **o),
        lambda s, o, d: ref.TopKRouter(s[-1], o),
        outputs=_router_inputs,
    ),
    "Dispatch": Kind(
        lambda s, o, d: fz.Dispatch(**{k: v for k, v in o.items() if k != "top_k"}),
        lambda s, o, d: ref.Dispatch(o),
        shape=_dispatched,
        inputs=lambda o: ("probs", "expert_ids"),
        outputs=_dispatch_outputs,
    ),
    "Combine": Kind(
        lambda s, o, d: fz.Combine(o.get("weighted", False)),
        lambda s, o, d: ref.Combine(o.get("weighted", False)),
        inputs=lambda o: ("row_map", "scales") if o.get("weighted") else ("row_map",),
    ),
}
