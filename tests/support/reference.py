"""The math once more, independently of ``fusible.formulas``: what the tests compare with."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import other_cpu
import torch
from fuzz.references import (  # noqa: F401 (for who imports this module)
    clamped,
    gated,
    gelu,
    halves,
    l2_normalize,
    qgelu,
    relu,
    sigmoid,
    silu,
    situ,
    srelu,
)
from torch import Tensor

import fusible as fz
from fusible import recipes

LOW_PRECISION = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *LOW_PRECISION)
Tensors = Iterable[Tensor] | Mapping[str, Tensor]


# --- formulas -------------------------------------------------------------------------------------


def glu(gate: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The gated unit of ``gate``."""
    return partial(gated, gate=gate)


def situglu(x: Tensor, scales: Tensor | None = None, *options: float, **named: float) -> Tensor:
    return times(situ(x, *options, **named), scales)


def scaled_srelu(x: Tensor, scales: Tensor) -> Tensor:
    return times(srelu(x), scales)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    dims = tuple(range(x.dim() - weight.dim(), x.dim()))
    centered = x - x.mean(dims, keepdim=True)
    return centered / torch.sqrt((centered**2).mean(dims, keepdim=True) + eps) * weight + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    dims = tuple(range(x.dim() - weight.dim(), x.dim()))
    return x / torch.sqrt((x**2).mean(dims, keepdim=True) + eps) * weight


def swiglu(x: Tensor, scales: Tensor | None = None, interleave: int | None = None) -> Tensor:
    return times(gated(x, interleave, gate=silu), scales)


def clamped_qgeglu(
    x: Tensor, scales: Tensor | None = None, *options: float, **named: float
) -> Tensor:
    return times(clamped(x, *options, **named), scales)


def times(y: Tensor, scales: Tensor | None) -> Tensor:
    """``y`` times a scale of each row, if there are any."""
    return y if scales is None else y * scales[..., None]


def grouped_linear(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    sizes: Sequence[int],
    biases: Tensor | Sequence[Tensor] | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Group by group; rows past the last group are zero."""
    parts, start = [], 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        y = torch.einsum("mk,nk->mn", x[rows], weights[group])
        if biases is not None:
            y = y + (biases[group] if scales is None else scales[rows, None] * biases[group])
        parts.append(y)
        start += size
    tail = x.new_zeros(x.shape[0] - start, weights[0].shape[0])
    return torch.cat([*parts, tail])


# --- comparing ------------------------------------------------------------------------------------


def assert_accurate(actual: Tensor, exact: Tensor, roundings: float = 4) -> None:
    """``actual`` is within some roundings of its own dtype of the FP64 values ``exact``.

    The error is measured against the largest value, since sums cancel.
    """
    assert exact.dtype == torch.float64
    assert actual.shape == exact.shape
    assert torch.isfinite(actual).all()
    if actual.numel():
        error = (actual.double() - exact).abs().max().item()
        bound = roundings * torch.finfo(actual.dtype).eps * max(exact.abs().max().item(), 1e-30)
        assert error <= bound, f"error {error:.3g} over {bound:.3g} for {actual.dtype}"


def assert_equal_but_for_rounding(
    got: Tensor, want: Tensor, roundings: float, dtype: torch.dtype | None = None
) -> None:
    """Two computations of one value differ by at most ``roundings`` roundings to ``dtype``, theirs.

    A CPU chooses how to sum a product by dtype, shape and layout, so equal bits are asserted only
    of the same operation on the same layout. Everywhere else: each result on the way to a value
    (a product, an activation, a sum) is rounded once in either computation, by at most eps / 2 of
    the largest value, so the two differ by eps; the linear steps after it pass that on at its
    size. ``roundings`` counts the results in a row. A product of K terms that are summed in its
    own dtype (FP32, FP64) counts sqrt(K), since the errors of its sums are independent; one of
    BF16 or FP16 terms, summed in FP32, counts one.
    """
    assert got.dtype == want.dtype
    ratio = torch.finfo(dtype or want.dtype).eps / torch.finfo(want.dtype).eps
    assert_accurate(got.detach(), want.detach().double(), roundings * ratio)


def assert_equal(got: Tensors, want: Tensors) -> None:
    """Pair by pair equal dtypes and values; of two mappings, under the same names."""
    for name, mine, theirs in _pairs(got, want):
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name


def assert_equal_elsewhere(got: Tensors, want: Tensors) -> None:
    """As `assert_equal`, of operations on the same values in other memory.

    ``--other-cpu`` rounds products by where operands lie; under it the two are near in norm.
    """
    if other_cpu.is_nearest():
        assert_equal(got, want)
    else:
        for _, mine, theirs in _pairs(got, want):
            assert_near(mine, theirs, 2**-2)


def assert_same_bits(got: Tensors, want: Tensors) -> None:
    """As `assert_equal`, of bits, so that NaN equals itself; either side may be on a GPU."""
    for name, mine, theirs in _pairs(got, want):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        wrong = (bits(mine) != bits(theirs)).nonzero()
        assert not len(wrong), (name, len(wrong), wrong[:3].flatten().tolist())


def bits(t: Tensor) -> Tensor:
    """The bytes of a tensor, in one dimension, on the host."""
    return t.detach().contiguous().view(-1).view(torch.uint8).cpu()


def _pairs(got: Tensors, want: Tensors) -> list[tuple[Any, Tensor, Tensor]]:
    if isinstance(want, Mapping):
        assert isinstance(got, Mapping)
        assert got.keys() == want.keys()
        return [(name, got[name], want[name]) for name in want]
    return [(i, *pair) for i, pair in enumerate(zip(got, want, strict=True))]


def assert_near(got: Tensor, want: Tensor, relative: float) -> None:
    """The difference is at most that much of ``want``, in norm over all values."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    error = (got.detach().double() - want.detach().double()).norm()
    assert error <= relative * want.detach().double().norm()


def double(t: Tensor) -> Tensor:
    """A leaf with the same values in FP64."""
    return t.detach().double().requires_grad_(t.requires_grad)


def gradients(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], dy: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The output of ``function`` and the gradients of ``tensors``, by autograd in FP64."""
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    y = function(*leaves)
    grads = torch.autograd.grad(y, leaves, dy.double(), allow_unused=True)
    return y.detach(), [
        torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True)
    ]


def take_grads(*tensors: Tensor) -> list[Tensor | None]:
    """The gradients, which are then forgotten."""
    grads = [t.grad for t in tensors]
    for t in tensors:
        t.grad = None
    return grads


def in_backward(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The identity, whose gradient is ``function`` of the output's."""

    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return function(dy)

    return Copied.apply


# --- a user's recipe and ops --------------------------------------------------------------------


@dataclass(frozen=True)
class Rows(recipes.Recipe):
    """A recipe that no rule knows, with one option."""

    name: ClassVar[str] = "rows"
    block: int = 32


class ScalesInOne(fz.FusedOperation):
    """Two constant scales in one pass."""

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        one, two = self.basic_ops
        return input_ * (one.scale * two.scale), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        one, two = self.basic_ops
        return grad_output * (one.scale * two.scale), [(), ()], [(), ()]


class MakeScale(fz.BasicOperation):
    """Hands on the mean square of its rows."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        basic_op_ctxs[0].save_for_backward(input_)
        return input_, [(input_.square().mean(-1),)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (x,) = basic_op_ctxs[0].saved_tensors
        dscale = basic_op_grad_extra_outputs[0][0]
        if dscale is None:
            return grad_output, [()], [()]
        return grad_output + dscale.unsqueeze(-1) * 2 * x / x.shape[-1], [()], [()]


# --- the grouped MLP ------------------------------------------------------------------------------


def grouped_mlp(
    groups: int = 4, hidden: int = 16, inner: int = 24, dtype: torch.dtype | None = None, **options
) -> fz.Sequential:
    """FC1, scaled SwiGLU, FC2."""
    options = {"bias": False, "single_grouped_weight": True, "dtype": dtype, **options}
    return fz.Sequential(
        fz.GroupedLinear(groups, hidden, 2 * inner, **options),
        fz.ScaledSwiGLU(),
        fz.GroupedLinear(groups, inner, hidden, **options),
    )


def grouped_mlp_inputs(
    sizes: Sequence[int] = (3, 0, 4, 1),
    rows: int = 10,
    hidden: int = 16,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x, splits, scales)``, of which x and scales need gradients; unused rows are at the end."""
    x = torch.randn(rows, hidden, dtype=dtype, requires_grad=True)
    return x, torch.tensor(sizes), torch.rand(rows, requires_grad=True)


def exact_grouped_mlp(
    mlp: fz.Sequential, x: Tensor, sizes: Sequence[int], scales: Tensor, dy: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Output, and gradients of x, scales and every parameter, in FP64."""
    fc1, fc2 = mlp[0], mlp[2]
    n1 = len(list(fc1.parameters()))

    def function(x: Tensor, scales: Tensor, *params: Tensor) -> Tensor:
        h = grouped_linear(x, *matrices(fc1, params[:n1], sizes))
        h = swiglu(h, scales, mlp[1].glu_interleave_size)
        return grouped_linear(h, *matrices(fc2, params[n1:], sizes))

    return gradients(function, [x, scales, *mlp.parameters()], dy)


def matrices(
    fc: fz.GroupedLinear, params: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[Sequence[Tensor], Sequence[int], Sequence[Tensor] | None]:
    """Weights, sizes and biases per group, from parameters of any form."""
    count = 1 if fc.single_grouped_weight else fc.num_groups
    weights, biases = params[:count], params[count:]
    weights = weights[0] if fc.single_grouped_weight else weights
    biases = biases[0] if fc.has_bias and fc.single_grouped_bias else biases
    return weights, sizes, biases if fc.has_bias else None


# --- a whole block --------------------------------------------------------------------------------


def moe_block(
    hidden, experts, inner, top_k, shared=0, *, weighted=False, recompute=False, **router
):
    """Router, experts, and if it has a size a ``shared`` expert beside them."""
    options = {"bias": False, "single_grouped_weight": True}
    ops = [
        fz.TopKRouter(hidden, experts, top_k, **router),
        fz.Dispatch(experts, recompute_rows=recompute),
        fz.GroupedLinear(experts, hidden, 2 * inner, **options),
        fz.SwiGLU() if weighted else fz.ScaledSwiGLU(),
        fz.GroupedLinear(experts, inner, hidden, **options),
        fz.Combine(weighted=weighted),
    ]
    if shared:
        ops = [
            fz.MakeExtraOutput().set_extra_output_channel(0, "tokens", output_to_caller=False),
            *ops,
            fz.Swap()
            .set_extra_input_channel(0, "tokens")
            .set_extra_output_channel(0, "routed", output_to_caller=False),
            fz.BasicLinear(hidden, 2 * shared),
            fz.SwiGLU(),
            fz.BasicLinear(shared, hidden),
            fz.AddExtraInput().set_extra_input_channel(0, "routed"),
        ]
    return fz.Sequential(*ops)


def in_fp8(x):
    """What is left of an input saved in FP8: E4M3, a power of two for each 128 features of a row.

    It is the smallest that brings the largest magnitude to 448 or less.
    """
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1, largest / 448).log2().ceil().exp2()
    values = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return values.flatten(-2)[..., : x.shape[-1]].to(x.dtype)
