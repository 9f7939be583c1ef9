"""Weight gradients: for autograd or into ``main_grad``, now or at ``backward_dw()``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.arguments import described
from fusible.formulas import cast
from fusible.fuser.backwards import Backward
from fusible.kernels import grouped
from fusible.kernels.quantize.k_major import ScaledMatrix, elements_and_scale
from fusible.kernels.stacking import write
from fusible.recipes.sharding import is_sharded, mean_over_ranks


class WeightGradient(NamedTuple):
    """The weight gradient of one backward, not computed yet.

    ``compute(out, accumulate)`` returns it in the weights' shape and layout, stacked; or writes it
    to ``out``, or adds it there: one tensor of that shape or one per group, of one floating dtype,
    in any layout. ``reads`` is all that it reads.
    """

    compute: Callable[[Sequence[Tensor] | None, bool], Any]
    reads: tuple[Tensor, ...]


class MainGrads(NamedTuple):
    """The buffers of a framework that some weights' gradients go to, and which are overwritten."""

    weights: Sequence[Tensor]
    buffers: Sequence[Tensor | None]
    """None for a weight that the backward has found frozen."""
    overwrite: Sequence[bool]

    def accumulate(self, gradient: WeightGradient) -> None:
        """Write or add the gradient, each buffer by its own flag; not of weights frozen by now."""
        pairs = zip(self.weights, self.buffers, strict=True)
        trained = [buffer if weight.requires_grad else None for weight, buffer in pairs]
        first = next((buffer for buffer in trained if buffer is not None), None)
        if first is None:
            return
        buffers = [torch.zeros_like(first) if b is None else b for b in trained]
        dtypes = {buffer.dtype for buffer in buffers}
        if len(dtypes) > 1:
            # One product in the widest dtype, which is then rounded once for each buffer.
            widest = reduce(torch.promote_types, dtypes)
            wide = first.new_empty((len(buffers), *first.shape), dtype=widest)
            gradient.compute([wide], False)
            for buffer, grad, fresh in zip(buffers, wide.split(1), self.overwrite, strict=True):
                write([buffer], grad, not fresh)
            return
        accumulate = not all(self.overwrite)
        for buffer, fresh in zip(buffers, self.overwrite, strict=True):
            if accumulate and fresh:
                buffer.zero_()
        gradient.compute(buffers, accumulate)


def grouped_gradient(
    dy: Tensor | ScaledMatrix, x: Tensor | ScaledMatrix, ends: Tensor, column_major: bool
) -> WeightGradient:
    """``dy[rows of e].T @ x[rows of e]`` for each group e, by the library's grouped product.

    The result is in the memory order of ``out``, or else of the weight: for a ``column_major`` one,
    a transposed row-major tensor, ``x.T @ dy`` is computed and transposed.
    """
    (dy, dy_scale), (x, x_scale) = elements_and_scale(dy), elements_and_scale(x)

    def gradient(out: Sequence[Tensor] | None, accumulate: bool) -> Tensor | None:
        a, b, *scales = dy, x, dy_scale, x_scale
        transposed = column_major if out is None else is_column_major(out[0])
        if transposed:
            a, b, *scales = x, dy, x_scale, dy_scale
        if out is None:
            dw = grouped.grouped_wgrad(a, b, ends, None, *scales)
            return dw.mT if transposed else dw
        outputs = [t.mT for t in out] if transposed else list(out)
        grouped.grouped_wgrad_(outputs, a, b, ends, accumulate, *scales)
        return None

    reads = dy, x, ends, dy_scale, x_scale
    return WeightGradient(gradient, tuple([t for t in reads if t is not None]))


def is_column_major(t: Tensor) -> bool:
    """Whether matrices are column-major."""
    return t.stride(-2) == 1 and t.stride(-1) > 1


def dense_gradient(dy: Tensor, x: Tensor | None, scale: float | None = None) -> WeightGradient:
    """``scale * dy.T @ x`` over all rows of dy ``[..., N]`` and x ``[..., K]``.

    ``x`` may be None, as it is saved, where the gradient will not be computed. (A number as the
    default of ``scale`` would be traced as an input with ``torch.compile(dynamic=True)``.)
    """
    alpha = 1.0 if scale is None else scale
    dy = dy.reshape(-1, dy.shape[-1])
    x = None if x is None else x.reshape(-1, x.shape[-1])

    def gradient(out: Sequence[Tensor] | None, accumulate: bool) -> Tensor | None:
        assert x is not None
        if out is None and scale is None:
            return dy.t() @ x
        if out is None:
            return torch.addmm(dy.new_empty(1), dy.t(), x, beta=0, alpha=alpha)
        (buffer,) = out
        dw = _product(dy.t(), x, torch.promote_types(buffer.dtype, dy.dtype))
        buffer.add_(dw, alpha=alpha) if accumulate else buffer.copy_(dw).mul_(alpha)
        return None

    return WeightGradient(gradient, (dy,) if x is None else (dy, x))


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` in ``dtype``, at least as wide as both, without intermediate rounding."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def main_grads(
    weights: Sequence[Tensor], op_name: str, backward: Backward | None = None
) -> MainGrads:
    """The ``main_grad`` of every weight that needs one, in its shape, and ``overwrite_main_grad``.

    A buffer is overwritten by the first gradient of its weight in ``backward``, and by every one if
    that is None. A weight of Megatron-FSDP (``__fsdp_param__``) is asked for its buffer anew.

    Raises:
        ValueError: a weight has no ``main_grad``, or one of another size, device, or of a dtype
            other than FP32, BF16 and the weight's own, or one that no view gives the weight's
            shape.
    """
    buffers = [_main_grad(weight, op_name) if weight.requires_grad else None for weight in weights]
    return MainGrads(weights, buffers, [_overwrites(weight, backward) for weight in weights])


def _overwrites(weight: Tensor, backward: Backward | None) -> bool:
    if not getattr(weight, "overwrite_main_grad", False):
        return False
    if backward is None:
        return True
    is_first = id(weight) not in backward.overwritten
    backward.overwritten.add(id(weight))
    return is_first


def _main_grad(weight: Tensor, op_name: str) -> Tensor:
    """The ``main_grad`` of a weight, checked, in its shape."""
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()  # type: ignore[attr-defined]
    main_grad: Any = getattr(weight, "main_grad", None)
    shape, own = weight.shape, weight.dtype
    if not isinstance(main_grad, Tensor):
        got = (
            f"{'none' if main_grad is None else repr(main_grad)}; set weight.main_grad, or give "
            "gradients to autograd under fully_shard, which reduces those alone"
        )
    else:
        same = main_grad.numel() == shape.numel() and main_grad.device == weight.device
        if same and main_grad.dtype in (torch.float32, torch.bfloat16, own):
            buffer = main_grad.detach()
            if buffer.shape == shape:
                return buffer
            with suppress(RuntimeError):  # no view has that shape
                return buffer.view(shape)
        got = f"{described(main_grad)} with strides {main_grad.stride()}"
    raise ValueError(
        f"main_grad of every weight of {op_name} must be a tensor of shape {tuple(shape)} in FP32, "
        f"BF16 or its own {own} on {weight.device}, since accumulate_into_main_grad=True, got {got}"
    )


def dummy_wgrad(weight: Tensor) -> Tensor | None:
    """The gradient that autograd gets for a weight with ``main_grad``.

    Frameworks hang their reductions on autograd's accumulation of the weight's gradient. A weight
    with the attribute ``grad_added_to_main_grad`` has it set, and gets a dummy gradient, of
    zeros if it also has ``zero_out_wgrad``; the others get None. A compiled backward sets no
    attribute, so there it is zeros, which do no harm if they are added. It is zeros in anomaly
    detection too, which looks for NaN.
    """
    if not (weight.requires_grad and hasattr(weight, "grad_added_to_main_grad")):
        return None
    compiling = torch.compiler.is_compiling()
    if not compiling:
        weight.grad_added_to_main_grad = True
    zeros = compiling or getattr(weight, "zero_out_wgrad", False) or torch.is_anomaly_enabled()
    make = torch.zeros if zeros else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)


class DelayedWgrad(NamedTuple):
    """A weight gradient that waits for ``backward_dw()``, and where it is to go."""

    gradient: WeightGradient
    versions: Sequence[int | None]
    """The `versions_of` the tensors that it reads, in the backward."""
    weights: Sequence[Tensor]
    """The weights that the forward used."""
    held: Sequence[bool]
    """For each, whether the module held it in the backward."""
    into: MainGrads | None
    backward: Backward | None
    """The one that it is of; None if autograd runs none."""

    def targets(self, held: Sequence[Tensor | None]) -> list[Tensor]:
        """The weights; for one that the module held, its shard if it is sharded now.

        ``fully_shard`` gathers them into other parameters for the time of a pass.
        """
        each = zip(self.weights, self.held, held, strict=True)
        return [h if same and is_sharded(h) else w for w, same, h in each]  # type: ignore[misc]

    def check(self, op_name: str) -> None:
        """Raise RuntimeError if a tensor that it reads was written to since the backward."""
        reads = self.gradient.reads
        for t, version, now in zip(reads, self.versions, versions_of(reads), strict=True):
            if now != version:
                raise RuntimeError(
                    f"backward_dw() of {op_name} must find the input and the output's gradient as "
                    f"backward() left them, got {t.dtype} of shape {tuple(t.shape)}, modified by "
                    f"an inplace operation since: version {now}, expected {version}; "
                    "call backward_dw() before the change, or change a copy"
                )


def versions_of(tensors: Sequence[Tensor]) -> list[int | None]:
    """The versions of the tensors' values, None where PyTorch counts none."""
    return [None if t.is_inference() else t._version for t in tensors]


def accumulate(weights: Sequence[Tensor], grads: Sequence[Any]) -> None:
    """Accumulate into ``.grad`` by autograd itself: in place, and with the weights' hooks.

    Skips frozen weights. If ``fully_shard`` has resharded a weight, accumulates the mean over its
    ranks, as ``fully_shard`` does in a backward: a collective, so all ranks must call this.
    """
    pairs = [(w, grad) for w, grad in zip(weights, grads, strict=True) if w.requires_grad]
    grads = [
        mean_over_ranks(grad, w) if is_sharded(w) else cast(grad, w.dtype) for w, grad in pairs
    ]
    torch.autograd.backward([w for w, _ in pairs], grads)
