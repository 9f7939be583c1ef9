"""Every op, most of them with the same in plain PyTorch: the table that tests go through."""

import math
from collections.abc import Callable
from typing import NamedTuple

import reference as ref
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusible as fz


class Case(NamedTuple):
    """An op of ``features`` features, and its function of input, extra inputs and parameters."""

    make: Callable[[int], fz.FusibleOperation]
    plain: Callable[..., Tensor]


def clamped(x, scales=None):
    return ref.clamped_qgeglu(x, scales, 2, 0.5, 1.3, 0.25)


ACTIVATIONS = {
    "GELU": Case(lambda f: fz.GELU(), lambda x: F.gelu(x, approximate="tanh")),
    "QGELU": Case(lambda f: fz.QGELU(), ref.qgelu),
    "ReLU": Case(lambda f: fz.ReLU(), F.relu),
    "SReLU": Case(lambda f: fz.SReLU(), ref.srelu),
    "SiLU": Case(lambda f: fz.SiLU(), F.silu),
    "GLU": Case(lambda f: fz.GLU(), ref.glu(ref.sigmoid)),
    "GEGLU": Case(lambda f: fz.GEGLU(), ref.glu(ref.gelu)),
    "QGEGLU": Case(lambda f: fz.QGEGLU(), ref.glu(ref.qgelu)),
    "ReGLU": Case(lambda f: fz.ReGLU(), ref.glu(ref.relu)),
    "SReGLU": Case(lambda f: fz.SReGLU(), ref.glu(ref.srelu)),
    "SReGLU, interleaved": Case(
        lambda f: fz.SReGLU(glu_interleave_size=2), lambda x: ref.glu(ref.srelu)(x, 2)
    ),
    "SwiGLU": Case(lambda f: fz.SwiGLU(), ref.swiglu),
    "SwiGLU, interleaved": Case(
        lambda f: fz.SwiGLU(glu_interleave_size=2), lambda x: ref.swiglu(x, interleave=2)
    ),
    "ClampedSwiGLU": Case(lambda f: fz.ClampedSwiGLU(), ref.clamped_qgeglu),
    "ClampedSwiGLU, interleaved": Case(
        lambda f: fz.ClampedSwiGLU(
            limit=0.5, alpha=1.3, glu_linear_offset=0.25, glu_interleave_size=2
        ),
        clamped,
    ),
    "SiTUGLU": Case(lambda f: fz.SiTUGLU(), ref.situglu),
    "SiTUGLU, interleaved": Case(
        lambda f: fz.SiTUGLU(beta1=0.7, beta2=1.5, glu_interleave_size=4),
        lambda x: ref.situglu(x, None, 4, 0.7, 1.5),
    ),
}
SCALED = {
    "ScaledSwiGLU": Case(lambda f: fz.ScaledSwiGLU(), ref.swiglu),
    "ScaledSwiGLU, interleaved": Case(
        lambda f: fz.ScaledSwiGLU(glu_interleave_size=4), lambda x, s: ref.swiglu(x, s, 4)
    ),
    "ScaledClampedQGeGLU": Case(lambda f: fz.ScaledClampedQGeGLU(), ref.clamped_qgeglu),
    "ScaledClampedQGeGLU, interleaved": Case(
        lambda f: fz.ScaledClampedQGeGLU(2, limit=0.5, alpha=1.3, glu_linear_offset=0.25), clamped
    ),
    "ScaledSiTUGLU": Case(
        lambda f: fz.ScaledSiTUGLU(2, beta1=0.7, beta2=1.5),
        lambda x, s: ref.situglu(x, s, 2, 0.7, 1.5),
    ),
    "ScaledSReLU": Case(lambda f: fz.ScaledSReLU(), ref.scaled_srelu),
}
NORMS = {
    "LayerNorm": Case(fz.LayerNorm, ref.layer_norm),
    "LayerNorm, zero-centered": Case(
        lambda f: fz.LayerNorm(f, eps=1e-2, zero_centered_gamma=True),
        lambda x, w, b: ref.layer_norm(x, 1 + w, b, 1e-2),
    ),
    "RMSNorm": Case(lambda f: fz.RMSNorm((f,)), ref.rms_norm),
    "RMSNorm, zero-centered": Case(
        lambda f: fz.RMSNorm(f, eps=1e-2, zero_centered_gamma=True),
        lambda x, w: ref.rms_norm(x, 1 + w, 1e-2),
    ),
    "L2Normalization": Case(lambda f: fz.L2Normalization(), ref.l2_normalize),
}
SMALL = {
    "Identity": Case(lambda f: fz.Identity(), lambda x: x * 1),
    "Quantize, without a recipe": Case(lambda f: fz.Quantize(), lambda x: x * 1),
    "ConstantScale": Case(lambda f: fz.ConstantScale(-1.5), lambda x: x * -1.5),
    "Reshape": Case(lambda f: fz.Reshape((-1, f // 2)), lambda x: x.reshape(-1, x.shape[-1] // 2)),
    "Dropout, in evaluation": Case(lambda f: fz.Dropout(0.5).eval(), lambda x: x * 1),
    "AddExtraInput": Case(lambda f: fz.AddExtraInput(), lambda x, e: x + e),
    "Bias": Case(fz.Bias, lambda x, b: x + b),
}
LINEARS = {
    "BasicLinear": Case(lambda f: fz.BasicLinear(f, 6), F.linear),
    "Linear": Case(lambda f: fz.Linear(f, 6), F.linear),
    "Linear, no bias": Case(lambda f: fz.Linear(f, 6, bias=False), F.linear),
}
OPS = {**ACTIVATIONS, **SCALED, **NORMS, **SMALL, **LINEARS}
# With extra outputs, groups or integers; what they compute has tests of its own.
MORE = {
    "MakeExtraOutput": lambda f: fz.MakeExtraOutput(),
    "Swap": lambda f: fz.Swap(),
    "AddExtraInput, in place": lambda f: fz.AddExtraInput(in_place=True),
    "TopKRouter": lambda f: fz.TopKRouter(f, 4, 2, load_balancing_loss=True, z_loss=True),
    "Dispatch": lambda f: fz.Dispatch(4),
    "Dispatch, scaled": lambda f: fz.Dispatch(4, scale_input=True),
    "Combine": lambda f: fz.Combine(),
    "Combine, weighted": lambda f: fz.Combine(weighted=True),
    "GroupedLinear": lambda f: fz.GroupedLinear(3, f, 8),
    "GroupedLinear, single": lambda f: fz.GroupedLinear(
        4, f, 6, single_grouped_weight=True, single_grouped_bias=True
    ),
    "GroupedLinear, scaled bias": lambda f: fz.GroupedLinear(4, f, 6, scale_bias=True),
}
MAKE = {**{name: case.make for name, case in OPS.items()}, **MORE}


def extra_inputs(
    op: fz.FusibleOperation, x: Tensor, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """What an op takes beside ``x``: of ``dtype``, or that of ``x``, where it is free."""
    *rows, features = x.shape

    def values(*shape: int) -> Tensor:
        made = torch.rand(shape, dtype=dtype or x.dtype)
        return made.requires_grad_(not getattr(op, "in_place", False))  # it writes to its addend

    def given(name: str) -> Tensor:
        if name == "split_sizes":  # one group is empty; of many rows, one is in no group
            half = rows[0] // 2
            return torch.tensor([half, *[0] * (op.num_groups - 2), rows[0] - half - (half > 4)])
        if name == "row_map":
            return torch.arange(math.prod(rows), dtype=torch.int32).view(*rows, 1)
        if name == "expert_ids":
            return torch.randint(4, (*rows, 2))
        return values(*rows, *{"scales": (), "probs": (2,)}.get(name, (features,)))

    return [given(op.extra_input_name(slot)) for slot in range(op.num_extra_inputs)]


def randomised(module: nn.Module, std: float | None = 1.0) -> nn.Module:
    """Random parameters: biases start at zero, which would hide them.

    Where ``std`` is None, of the standard deviation ``last dimension ** -0.5``.
    """
    with torch.no_grad():
        for p in module.parameters():
            scale = p.shape[-1] ** -0.5 if std is None else std
            p.copy_(torch.randn(p.shape, dtype=p.dtype) * scale)
    return module
