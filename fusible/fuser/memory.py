"""Which memory tensors have in common, with each other and with what modules hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = Tensor, torch.nn.Parameter


def named(ops: Sequence[Any], i: int) -> str:
    """An op or module of several, for a sentence."""
    return f"op {i} ({type(ops[i]).__name__})"


def read_over(
    t: Tensor, reads: Iterable[tuple[str, Tensor]], modules: Sequence[Any]
) -> Iterator[str]:
    """What overlaps ``t`` of ``reads``, and of what modules hold.

    These are parameters, buffers, and what gradients are added to.
    """
    yield from (what for what, other in reads if overlap(t, other))
    is_apart = _quick_test(t)
    for i, module in enumerate(modules):
        for path, part in module.named_modules():
            for name, held in chain(part._parameters.items(), part._buffers.items()):
                if held is None:
                    continue
                grad = held.grad if held.is_leaf else None
                main_grad = getattr(held, "main_grad", None)
                for of, other in (("", held), ("grad of ", grad), ("main_grad of ", main_grad)):
                    if other is None or is_apart(other):
                        continue
                    if isinstance(other, Tensor) and overlap(t, other):
                        yield f"{of}{path and path + '.'}{name} of {named(modules, i)}"


def _quick_test(t: Tensor) -> Callable[[Any], bool]:
    """A quick test: True only of tensors that do not overlap ``t``, and of most of these."""
    if not (_has_address(t) and t.is_contiguous()):
        return lambda other: False
    start, stop = t.data_ptr(), t.data_ptr() + t.nbytes

    def is_apart(other: Any) -> bool:
        if type(other) not in _PLAIN:
            return False
        first = other.data_ptr()
        return first >= stop or (first + other.nbytes <= start and other.is_contiguous())

    return is_apart


def memory(t: Tensor) -> int:
    """An identifier of the storage of ``t``, also of an empty or a fake tensor."""
    return t.untyped_storage()._cdata


def repeats_elements(t: Tensor) -> bool:
    """Whether elements of ``t`` may share a place, as those of an expanded tensor do."""
    span = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += stride * (size - 1)
    return False


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have bytes in common; other columns of one matrix have none.

    True also for some other interleaved tensors that have none.
    """
    return any(_overlap(p, q) for p in _plain(a) for q in _plain(b))


def _plain(t: Tensor) -> list[Tensor]:
    """A tensor itself, or the tensors that a quantized or distributed one is made of."""
    if not is_traceable_wrapper_subclass(t):
        return [t]
    names, _ = t.__tensor_flatten__()
    return [part for name in names for part in _plain(getattr(t, name))]


def _overlap(a: Tensor, b: Tensor) -> bool:
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    if not (_has_address(a) and _has_address(b)):
        return memory(a) == memory(b)
    (start, stop, pitch, width), (first, last, other_pitch, other_width) = _rows(a), _rows(b)
    if first >= stop or last <= start:
        return False
    if pitch != other_pitch:
        return True
    shift = (first - start) % pitch
    return shift < width or shift + other_width > pitch


def _has_address(t: Tensor) -> bool:
    return type(t) in _PLAIN and not t.is_meta


def _rows(t: Tensor) -> tuple[int, int, int, int]:
    """Start and end address of the elements; pitch and width in bytes of the rows of them."""
    dims: list[tuple[int, int]] = []  # stride and size, from the innermost on, merged
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = dims[-1][0], dims[-1][1] * size
        elif size > 1 and stride > 0:
            dims.append((stride, size))
    *inner, (pitch, rows) = dims or [(1, 1)]
    width = 1 + sum(stride * (size - 1) for stride, size in inner)
    start, size = t.data_ptr(), t.element_size()
    stop = start + ((rows - 1) * pitch + width) * size
    return start, stop, max(pitch, width) * size, width * size
