"""What each ATen operation does with quantized tensors: keep the format, use values, or refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from fusible.recipes import sharding
from fusible.recipes.quantization import HIGH_PRECISION

if TYPE_CHECKING:
    from fusible.recipes.tensor import QuantizedTensor, WrapperTensor


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one ATen operation that has a quantized or a grouped tensor among its arguments."""
    if not torch.is_inference_mode_enabled():
        return _run(func, args, kwargs)
    # Operations made of others (``to``, ``reshape``) arrive whole in this mode.
    made_of_others = func.decompose(*args, **kwargs)
    if made_of_others is not NotImplemented:
        return made_of_others
    # PyTorch wants a view of a tensor from outside the mode to be one from outside, too.
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    with torch.inference_mode(any(t.is_inference() for t in tensors)), torch.no_grad():
        return _run(func, args, kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.overloadpacket in _REFUSED:
        raise NotImplementedError(f"{func} {_REFUSED[func.overloadpacket]}")
    if func in _OF_EVERY_FORM or (func in _KEEP and _is_quantized(args[0])):
        return _KEEP[func](*args, **kwargs)
    if any(getattr(t, "ends", None) is not None for t in pytree.tree_leaves((args, kwargs))):
        # No TypeError, which an operator like @ would turn into "unsupported operand".
        raise NotImplementedError(
            f"{func} is not defined for grouped tensors; nothing was computed; "
            "call .dequantize() for all rows or .split() for the groups"
        )
    if func._schema.is_mutable:
        return _write(func, args, kwargs)
    if _reads_values(func):
        return func(*_values_of(args), **_values_of(kwargs))
    _refuse_steps()
    raise NotImplementedError(
        f"{func} is not defined for quantized tensors; nothing was computed; "
        "call .dequantize() first"
    )


def overwrite(piece: Tensor, new: Tensor, non_blocking: bool = False) -> None:
    """Copy ``new`` into a piece of a quantized tensor, for autograd to see.

    Below ``__torch_dispatch__`` a copy does not count as a change of what a graph has saved.
    """
    piece.copy_(new, non_blocking)
    if not piece.is_inference():
        increment_version(piece)


def _is_quantized(x: Any) -> TypeGuard[QuantizedTensor]:
    from fusible.recipes.tensor import QuantizedTensor  # defined by means of this module

    return isinstance(x, QuantizedTensor)


_aten = torch.ops.aten
_REFUSED = {
    _aten.set_: "needs a tensor with memory of its own, which a quantized one has not; use copy_, "
    "or assign to .data",
    _aten.erfinv_: "of a quantized tensor would be of values that were rounded, up to 1 and to "
    "infinity; initialize an ordinary tensor and copy_ it",
}
_REDUCTIONS = {
    _aten.sum,
    _aten.mean,
    _aten.norm,
    _aten.linalg_vector_norm,
    _aten.amax,
    _aten.amin,
    _aten.max,
    _aten.min,
    _aten.all,
    _aten.any,
    _aten.equal,
}


_IN_STEPS = {"_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_"}


def _refuse_steps() -> None:
    """Refuse an initializer of ``torch.nn.init`` that writes, or reads what it wrote, in steps.

    It is found among the callers: its steps by themselves are ordinary operations.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in _IN_STEPS and frame.f_globals.get("__name__") == "torch.nn.init":
            raise NotImplementedError(
                f"{name.removeprefix('_no_grad_')} of a quantized tensor must write once, got an "
                "initializer whose steps would each be rounded; nothing was written; initialize "
                "an ordinary tensor and copy_ it, or give the op init_method="
            )
        frame = frame.f_back


def _reads_values(func: Any) -> bool:
    foreach = func._schema.name.startswith("aten::_foreach_")
    return torch.Tag.pointwise in func.tags or func.overloadpacket in _REDUCTIONS or foreach


def _values_of(tree: Any) -> Any:
    return pytree.tree_map(lambda x: _value(x) if _is_quantized(x) else x, tree)


def _value(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    return q._decoded(dtype or q.dtype, not q.has_rowwise)


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operation on the values and requantize what it wrote."""
    _refuse_steps()
    values: dict[int, Tensor] = {}

    def unwrap(x: Any) -> Any:
        return values.setdefault(id(x), _value(x)) if _is_quantized(x) else x

    plain_args, plain_kwargs = pytree.tree_map(unwrap, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = [
        given[a.name]
        for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in given
    ]
    for leaf in pytree.tree_leaves(written):
        if _is_quantized(leaf):
            leaf.requantize_(values[id(leaf)])
    # An in-place operation returns the tensor itself, not a copy of its values, and not None.
    return written[0] if len(func._schema.returns) == 1 else result


def _to_copy(
    q: WrapperTensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> Tensor:
    """Keep the format for a dtype that can be nominal, else return values; keep groups."""
    dtype = dtype or q.dtype
    if q.ends is None and dtype not in HIGH_PRECISION:
        values = q.dequantize(torch.float32)
        return torch.ops.aten._to_copy(values, dtype=dtype, device=device, **options)
    non_blocking = options.get("non_blocking", False)
    new = q.map_pieces(lambda t: t.to(device, non_blocking=non_blocking, copy=True), dtype=dtype)
    if q.format is None and new.rowwise_data is not None:
        new.rowwise_data = new.rowwise_data.to(dtype)
    return new


def _copy_(target: QuantizedTensor, source: Tensor, non_blocking: bool = False) -> QuantizedTensor:
    if _is_quantized(source):
        old, new = target.pieces(), source.pieces()
        if source.format == target.format and old.keys() <= new.keys():
            if source.shape != target.shape:
                raise ValueError(
                    f"copy_ needs the shape {tuple(target.shape)}, got {tuple(source.shape)}; "
                    "nothing was written"
                )
            if all(new[name].shape == piece.shape for name, piece in old.items()):
                for name, piece in old.items():
                    overwrite(piece, new[name], non_blocking)
                return target
        source = _value(source, torch.float32)
    with suppress(RuntimeError):  # of other sizes, which requantize_ refuses
        source = source.expand(target.shape)
    target.requantize_(source.to(target.dtype))
    return target


def _view(q: QuantizedTensor, size: Sequence[int]) -> QuantizedTensor:
    """Regroup the rows, in whole blocks; the columns stay. Or flatten, which keeps all pieces."""
    shape = torch.empty(q.shape, device="meta").view(size).shape
    if len(shape) == 1:
        return q.with_pieces(q.pieces(), shape)
    if q.dim() == 1:
        raise ValueError(
            f"a flat view of a quantized tensor must stay flat, got {tuple(shape)} from {q!r}; "
            "view the tensor that it is a view of"
        )
    rows, new_rows = q.shape[-2], shape[-2] if len(shape) > 1 else 0
    across = 1 if q.format.block is None else q.format.block[0]
    along = q.format.block[1] if q.columnwise_data is not None and q.format.block else across
    whole = new_rows and rows % along == 0 and new_rows % along == 0
    same_rows = rows == new_rows
    if not (len(shape) > 1 and shape[-1] == q.shape[-1] and (whole or same_rows)):
        raise ValueError(
            f"a view of a {q.format.name} tensor must keep its {q.shape[-1]} columns and whole "
            f"blocks of {along} rows, got {tuple(shape)} from {tuple(q.shape)}; call .dequantize()"
        )

    of_matrices = sharding.per_matrix(q.format)
    if of_matrices & q.pieces().keys() and shape[:-2].numel() != q.shape[:-2].numel():
        raise ValueError(
            f"a view of a {q.format.name} tensor must keep its matrices, each has its own scale, "
            f"got {tuple(shape)} from {tuple(q.shape)}; call .dequantize()"
        )

    per_entry = sharding.rows_per_entry(q.format)

    def regroup(name: str, piece: Tensor) -> Tensor:
        if name in of_matrices:
            return piece.view(*shape[:-2], 1)
        count = piece.shape[-2] if same_rows else new_rows // per_entry.get(name, 1)
        return piece.view(*shape[:-2], count, piece.shape[-1])

    pieces = {name: regroup(name, piece) for name, piece in q.pieces().items()}
    return q.with_pieces(pieces, shape)


def _as_strided(
    q: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> QuantizedTensor:
    """The tensor itself, which is all that its layout allows."""
    if q.shape != tuple(size) or q.stride() != tuple(stride) or offset:
        raise ValueError(
            f"as_strided of a quantized tensor must keep its shape and strides, got {tuple(size)} "
            f"and {tuple(stride)} from {q!r}; call .dequantize()"
        )
    return q.map_pieces(lambda t: t)


def _plain_like(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a tensor of the nominal dtype, for instance an optimizer's state."""

    def like(q: QuantizedTensor, *args: Any, **options: Any) -> Tensor:
        options = {k: v for k, v in options.items() if k != "memory_format" and v is not None}
        options = {"dtype": q.dtype, "device": q.device} | options
        return function(q.shape, *args, **options)

    return like


_KEEP: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: lambda q: q.map_pieces(lambda t: t),
    _aten.alias.default: lambda q: q.map_pieces(lambda t: t),
    _aten.clone.default: lambda q, **_: q.map_pieces(torch.clone),
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy_,
    _aten.view.default: _view,
    _aten.as_strided.default: _as_strided,
    _aten.slice.Tensor: sharding.slice_,
    _aten.split.Tensor: sharding.split,
    _aten.new_zeros.default: sharding.new_zeros,
    _aten.empty_like.default: _plain_like(torch.empty),
    _aten.zeros_like.default: _plain_like(torch.zeros),
    _aten.ones_like.default: _plain_like(torch.ones),
    _aten.full_like.default: _plain_like(torch.full),
    _aten.rand_like.default: _plain_like(torch.rand),
    _aten.randn_like.default: _plain_like(torch.randn),
}
_OF_EVERY_FORM = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten._to_copy.default,
}
"""Those that grouped tensors have, too."""
