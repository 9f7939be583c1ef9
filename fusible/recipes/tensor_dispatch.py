"""ATen operations on quantized and grouped tensors: those that keep the format, and others.

``detach``, ``clone``, ``copy_``, ``to``, and views and slices of whole blocks keep the format. An
operation without special treatment runs on the values in the nominal dtype and returns ordinary
tensors, or views of the values. What it writes to a quantized tensor or to a view is quantized.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.autograd.profiler import record_function
from torch.utils import _pytree as pytree

from fusible.calls import capturing, depend_on_values, is_traced
from fusible.recipes import sharding
from fusible.recipes.matrix import as_bytes
from fusible.recipes.quantization import HIGH_PRECISION
from fusible.recipes.wrapper import WrapperTensor, kinds_of_pieces, overwrite


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that is not made of others."""
    if func._schema.name in _REFUSED:
        raise NotImplementedError(f"{func} {_REFUSED[func._schema.name]}")
    if args and isinstance(args[0], WrapperTensor):
        special = _OF_GROUPED if args[0].ends is not None else _OF_QUANTIZED
        if func in special and not (func in _PARTS and forward_ad._current_level >= 0):
            try:
                return special[func](*args, **kwargs)
            except sharding.NotStorableError:
                if _Implicit.forbidden and not _reads_shape_only(func.overloadpacket):
                    raise
        if _is_whole_view(func, args, kwargs):
            return args[0].map_pieces(lambda t: t)
        if torch.Tag.inplace_view in func.tags:
            shaped = torch.empty(args[0].shape, device="meta")
            func(shaped, *args[1:], **kwargs)
            if shaped.shape != args[0].shape:
                return _change_shape(func, args, kwargs, shaped)
    if func.overloadpacket in _REACH_MEMORY and isinstance(args[0], ValuesView):
        _check_reach(func, args, kwargs)
    if args and isinstance(args[0], DispatchedTensor) and _returns_view(func):
        return _view_of_values(func, args, kwargs)
    return _run_on_values(func, args, kwargs)


def _is_whole_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation returns a view of its first argument that is all of it, as it is.

    For instance ``squeeze`` where no dimension is 1, and ``expand`` to the same shape.
    """
    if not _returns_view(func) or func in _CONJUGATES:
        return False
    whole = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
    view = func(whole, *args[1:], **kwargs)
    if not isinstance(view, Tensor):
        return False
    place = view.shape, view.dtype, view.stride(), view.storage_offset()
    if depend_on_values(*view.shape, *view.stride(), view.storage_offset()):
        return False
    return place == (whole.shape, whole.dtype, whole.stride(), 0)


def _returns_view(func: Any) -> bool:
    """Tell whether an operation returns views of its first argument."""
    info = func._schema.arguments[0].alias_info
    return info is not None and not info.is_write and len(func._schema.returns) == 1


def _run_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values, and quantize again what it wrote."""
    shape_only = _reads_shape_only(func.overloadpacket)
    values: dict[tuple[Any, ...], Tensor] = {}  # by memory: aliases see each other's writes

    def value(x: Any) -> Any:
        if isinstance(x, ValuesView):
            x.shared.update(func)
            return x.plain
        if not isinstance(x, WrapperTensor):
            return x
        memory = _memory(x)
        if memory not in values:
            if shape_only and x is args[0]:
                values[memory] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            else:
                values[memory] = implicit_values(func, x)
        return values[memory]

    plain_args, plain_kwargs = pytree.tree_map(value, (args, kwargs))
    if func is _aten._sparse_mm_reduce_impl.default:
        # What its backward reads it returns only for arguments with gradients.
        csr, dense, how = plain_args
        plain_args = csr, dense.detach().requires_grad_(), how
    result = func(*plain_args, **plain_kwargs)
    names = [a.name for a in func._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    leaves = pytree.tree_leaves([arguments.get(name) for name in _written(func)])
    if func.namespace == "c10d" and any(isinstance(leaf, DispatchedTensor) for leaf in leaves):
        for leaf in pytree.tree_leaves(result):
            # NCCL gives none for what the current stream waits for; it must not be called then.
            if isinstance(leaf, torch.ScriptObject) and (work := dist.Work.unbox(leaf)) is not None:
                work.wait()
    if torch.Tag.inplace_view not in func.tags:
        _check_sizes(func, leaves, values)
    for shared in {leaf.shared for leaf in leaves if isinstance(leaf, ValuesView)}:
        shared.quantize()
    for leaf in leaves:
        if isinstance(leaf, WrapperTensor):
            leaf.quantize_(values[_memory(leaf)])
        # PyTorch leaves the versions of a list to the operations on its members.
        if func.__name__.startswith("_foreach") and isinstance(leaf, DispatchedTensor):
            increment_version([] if leaf.is_inference() else leaf)
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], ValuesView):
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)  # the shape of the view itself
    # An in-place operation returns the tensor that it wrote, not its values.
    of_values = {
        id(_values_of(leaf, values)): leaf for leaf in leaves if isinstance(leaf, DispatchedTensor)
    }
    return pytree.tree_map_only(Tensor, lambda t: of_values.get(id(t), t), result)


def _written(func: Any) -> list[str]:
    """Return the names of the arguments that an operation writes."""
    arguments = func._schema.arguments
    if func.namespace == "c10d":  # whose schemas do not say so; the first one, if any
        return [arguments[0].name] if func.overloadpacket.__name__.endswith("_") else []
    return [a.name for a in arguments if a.alias_info and a.alias_info.is_write]


def _memory(q: WrapperTensor) -> tuple[Any, ...]:
    """Return a key that tensors with the same stored tensors, shape and dtype share."""
    # A symbolic size has no hash, but a name.
    return (str(q.shape), q.dtype, *map(id, q.pieces().values()))


def _values_of(x: Any, values: dict[tuple[Any, ...], Tensor]) -> Tensor | None:
    """Return the values of an argument that this module works on, None for another one."""
    if isinstance(x, ValuesView):
        return x.plain
    return values[_memory(x)] if isinstance(x, WrapperTensor) else None


def _reads_shape_only(packet: Any) -> bool:
    """Tell whether operations read the shape of their first argument, not its values."""
    name = packet.__name__
    return name.endswith("_like") or name.startswith("new_") or packet in _FILLS


def _check_sizes(func: Any, written: Sequence[Any], values: dict[tuple[Any, ...], Tensor]) -> None:
    """Raise ValueError where an operation has resized what it was given as ``out=``."""
    for x in written:
        new = _values_of(x, values)
        if new is None or new.shape == x.shape:
            continue
        got = tuple(new.shape)
        if isinstance(x, ValuesView):  # as before
            new.as_strided_(x.shape, x.stride(), x.storage_offset())
            x.values.copy_(x.q.own_values())
        raise ValueError(
            f"out of {func} must have the shape of its result if it is quantized, {got}, got "
            f"{tuple(x.shape)}; nothing was written"
        )


# --- views ---------------------------------------------------------------------------------------


class DispatchedTensor(torch.Tensor):
    """A tensor whose operations this module runs."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one ATen operation: keep the format, work on values, or refuse."""
        kwargs = kwargs or {}
        # Operations made of others (``to``, ``reshape``) arrive whole in inference mode, and where
        # PyTorch itself calls one below autograd. Where there is a kernel too (``silu_backward``),
        # it rounds once, and an ordinary tensor has it.
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if func not in _OF_QUANTIZED and not has_kernel(func.name(), "CPU"):
            made_of_others = func.decompose(*args, **kwargs)
            if made_of_others is not NotImplemented:
                return made_of_others
        if not torch.is_inference_mode_enabled():
            return _run(func, args, kwargs)
        # PyTorch wants a view of a tensor from outside the mode to be one from outside, too.
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        with torch.inference_mode(any(t.is_inference() for t in tensors)), torch.no_grad():
            return _run(func, args, kwargs)

    def copied_values(self) -> Tensor:
        """Return the values as any operation reads them, in memory of their own."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device).copy_(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array that must not be written to."""
        array = self.copied_values().numpy(force=force)
        array.flags.writeable = False
        return array

    def apply_(self, function: Callable[[Any], Any]) -> Tensor:
        """Write what ``function`` returns for each value, quantized."""
        return self.copy_(self.copied_values().apply_(function))

    def __dlpack__(self, *, copy: bool | None = None, **options: Any) -> Any:
        """Return a copy of the values; BufferError if it must be none."""
        if copy is False:
            raise BufferError(
                "copy must be None or True for a quantized tensor, whose values are no memory, got "
                f"False for {type(self).__name__}"
            )
        return self.copied_values().__dlpack__(**options)

    def __format__(self, spec: str) -> str:
        """Format one value as a number, as of an ordinary tensor."""
        return format(self.item() if spec and self.dim() == 0 else str(self), spec)

    def tolist(self) -> Any:
        """Return the values as numbers, in lists as deep as the tensor has dimensions."""
        return self.copied_values().tolist()


class _SharedValues:
    """The values of a quantized tensor, in memory that views share.

    A write to a view is quantized into the tensor. A write to the tensor is read by the views.
    """

    living: ClassVar[WeakValueDictionary[tuple[Any, ...], _SharedValues]] = WeakValueDictionary()
    """By identity of the stored tensors, so that all views see each other's writes."""

    def __init__(self, q: WrapperTensor, values: Tensor) -> None:
        self.q, self.values = q.with_pieces(q.pieces()), values
        self.graph_task, self.versions = torch._C._current_graph_task_id(), self._versions()

    @classmethod
    def of(cls, q: WrapperTensor, func: Any) -> _SharedValues:
        """Return those of ``q`` for ``func``."""
        data = q.columnwise_data if q.rowwise_data is None else q.rowwise_data
        # A symbolic size has no hash, but a name.
        shape = tuple(map(str, q.shape)) if is_traced() else q.shape
        key = id(data), shape, q.dtype, torch.is_inference_mode_enabled()
        found = cls.living.get(key)
        if found is None:
            values = implicit_values(func, q)
            # PyTorch traces no write to as_strided of a view.
            found = cls(q, values if type(values) is Tensor else values.clone())
            cls.living[key] = found
        else:
            _forbid_implicit(func, q)
            found.update(func)
        return found

    def _versions(self) -> list[int] | None:
        """Return None where versions do not tell: to read the tensor each time."""
        pieces = self.q.pieces().values()
        if capturing() or any([piece.is_inference() for piece in pieces]):
            return None
        return [piece._version for piece in pieces]

    def update(self, func: Any) -> None:
        """Read the tensor again if it was written to; RuntimeError if a graph has saved a view."""
        if self.versions is not None and self.versions == self._versions():
            return
        if torch._C._current_graph_task_id() not in (-1, self.graph_task):
            raise RuntimeError(
                f"{self.q!r} must not be written to before a backward that reads a view of it, got "
                f"another version for {func}; clone() the view, or write after the backward"
            )
        self.values.copy_(implicit_values(func, self.q))
        self.versions = self._versions()

    def quantize(self) -> None:
        """Write the values to the tensor, and read what it has then."""
        self.q.quantize_(self.values)
        self.values.copy_(self.q.own_values())
        self.versions = self._versions()


class ValuesView(DispatchedTensor):
    """A view of a quantized tensor that its format cannot hold: of its values.

    What is written to it is quantized into the tensor. In other respects an ordinary tensor.
    """

    plain: Tensor
    shared: _SharedValues

    @staticmethod
    def __new__(cls: type[ValuesView], plain: Tensor, shared: _SharedValues) -> ValuesView:
        """Return a view of the tensor, given the same view of its values."""
        if type(plain) is Tensor:
            self = torch.Tensor._make_subclass(cls, plain)
        else:  # it stands for another one, while a graph is traced
            options: Any = {"dtype": plain.dtype, "device": plain.device}
            options |= {"strides": plain.stride(), "storage_offset": plain.storage_offset()}
            self = torch.Tensor._make_wrapper_subclass(cls, plain.shape, **options)
        self.plain, self.shared = plain, shared
        return self

    q = property(lambda self: self.shared.q)
    values = property(lambda self: self.shared.values)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Show the values, if there are any: not while a graph is traced."""
        if type(self.plain) is Tensor:
            return super().__repr__(**options)
        return f"ValuesView({self.plain!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._ordinary().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self._ordinary(), memo)

    def _ordinary(self) -> Tensor:
        """Return an ordinary tensor of the values; of a leaf one that is a leaf, or a parameter."""
        if not self.is_leaf:
            return self.copied_values()
        with torch.no_grad():
            values = self.copied_values().requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            return nn.Parameter(values, self.requires_grad)
        return values

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["q", "values"], (self.dtype, self.plain.storage_offset())

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, outer_size: Any, outer_stride: Any) -> Any:
        dtype, offset = meta
        plain = inner["values"].view(dtype).as_strided(outer_size, outer_stride, offset)
        return cls(plain, _SharedValues(inner["q"], inner["values"]))


def _check_reach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError where a view of a view would hold elements that the first one does not.

    Autograd goes through the views of a subclass one by one, where it takes those of an ordinary
    tensor from its memory: after a write it would miss the gradients of these elements.
    """
    plain = args[0].plain
    if is_traced() or not torch.is_grad_enabled() or type(plain) is not Tensor:
        return
    size = plain.untyped_storage().nbytes() // plain.element_size()
    inside = torch.zeros(size, dtype=torch.bool)
    own = inside.as_strided(plain.shape, plain.stride(), plain.storage_offset()).fill_(True)
    viewed = func(own, *args[1:], **kwargs)  # resizing makes new elements, of any value
    if viewed.untyped_storage().nbytes() > size or not viewed.all():
        raise RuntimeError(
            f"{func.overloadpacket.__name__} of a view of a quantized tensor must stay inside the "
            f"view while gradients are enabled, got {tuple(viewed.shape)} with strides "
            f"{viewed.stride()} of {tuple(plain.shape)}; call it on the quantized tensor itself"
        )


def _view_of_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return views that the format of ``args[0]`` cannot hold."""
    base = args[0]
    if isinstance(base, ValuesView):
        shared, plain = base.shared, base.plain
        shared.update(func)
    elif base.format is None:
        return func(base.rowwise_data, *args[1:], **kwargs)
    else:
        shared = _SharedValues.of(base, func)
        plain = shared.values
    result = func(plain, *args[1:], **kwargs)
    if func is _aten.detach.default and isinstance(result, FakeTensor):
        return result  # AOTAutograd takes a gradient to be what detach of the fake output is
    return pytree.tree_map_only(Tensor, lambda view: ValuesView(view, shared), result)


# --- implicit dequantizing -----------------------------------------------------------------------


class _Implicit:
    """State of the whole process, since a backward on CUDA runs on threads of its own."""

    count = 0
    forbidden = 0


def implicit_dequantizes() -> int:
    """Return how many times an operation has dequantized a tensor by itself, in this process.

    In a profile each is a range ``implicit_dequantize(...)`` with the name of the operation. Code
    that ``torch.compile`` runs counts when it is traced.
    """
    return _Implicit.count


@contextmanager
def no_implicit_dequantize() -> Iterator[None]:
    """Raise where an operation would dequantize a tensor by itself, on any thread.

    For finding such operations. ``dequantize()`` and what keeps the format work as ever. Code that
    ``torch.compile`` runs is checked when it is traced.
    """
    _Implicit.forbidden += 1
    try:
        yield
    finally:
        _Implicit.forbidden -= 1


def _forbid_implicit(func: Any, x: WrapperTensor) -> None:
    """Raise in ``no_implicit_dequantize``."""
    if _Implicit.forbidden:
        kind, instead = "quantized", ".dequantize() first"
        if x.ends is not None:
            kind = "grouped"
            instead = ".dequantize() for all rows or .split_into_quantized_tensors() for the groups"
        # No TypeError, which an operator like @ would turn into "unsupported operand".
        raise NotImplementedError(
            f"{func} is not defined for {kind} tensors; nothing was computed; call {instead}"
        )


def implicit_values(func: Any, x: WrapperTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values of ``x`` for ``func``, which may be a name, and count that."""
    if x.format is None:
        return x.own_values(dtype)
    _forbid_implicit(func, x)
    _Implicit.count += 1
    with nullcontext() if is_traced() else record_function(f"implicit_dequantize({func})"):
        return x.own_values(dtype)


# --- operations with special treatment -----------------------------------------------------------


@contextmanager
def _shared_versions() -> Iterator[None]:
    """Give views of pieces the version of what they are views of, as outside of a dispatch."""
    key = "ADInplaceOrView"
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


_aten = torch.ops.aten
_RECEIVE = (
    "needs memory to receive into, which a quantized tensor has not; receive into an ordinary "
    "tensor and copy_ it"
)
_REFUSED = {
    "aten::set_": "needs a tensor with memory of its own, which a quantized one has not; use "
    "copy_, or assign to .data",
    "aten::erfinv_": "of a quantized tensor would be of values that were rounded, up to 1 and to "
    "infinity; initialize an ordinary tensor and copy_ it",
    # They may have to return before the sender sends.
    "c10d::recv_": _RECEIVE,
    "c10d::recv_any_source_": _RECEIVE,
}
_REACH_MEMORY = {_aten.as_strided, _aten.as_strided_, _aten.resize_, _aten.resize_as_}
"""They may give a view elements of the memory that it did not hold."""
_FILLS = {_aten.fill_, _aten.zero_, _aten.normal_, _aten.uniform_, _aten.random_}
_PARTS = {_aten.slice.Tensor, _aten.split.Tensor}
"""In forward mode they are views of the values, since a tangent lies in memory as its part does."""
_CONJUGATES = {_aten._conj.default, _aten._neg_view.default}
"""Views of the same shape and other values."""


def _to_copy(
    q: WrapperTensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> Tensor:
    """Keep the format for a dtype that can be nominal, else return values; keep groups."""
    dtype = dtype or q.dtype
    if q.format is not None and dtype not in HIGH_PRECISION:
        values = implicit_values(_aten._to_copy.default, q)
        return _aten._to_copy(values, dtype=dtype, device=device, **options)
    non_blocking = options.get("non_blocking", False)
    new = q.map_pieces(
        lambda t: as_bytes(t).to(device, non_blocking=non_blocking, copy=True).view(t.dtype),
        dtype=dtype,
    )
    if q.format is None and new.rowwise_data is not None:
        new.rowwise_data = new.rowwise_data.to(dtype)
    return new


def _copy_(
    target: WrapperTensor, source: Tensor | float, non_blocking: bool = False
) -> WrapperTensor:
    """Copy what is stored if both store alike, else quantize the values; the groups' sizes, too."""
    if isinstance(source, WrapperTensor):
        names, values = target.held_of(source), None
        if len(names) < len(target.pieces()):
            values = implicit_values(_aten.copy_.default, source, torch.float32)
        for name in names:
            overwrite(target, name, getattr(source, name), non_blocking)
        if values is None:
            return target
        source = values
    elif isinstance(source, ValuesView):
        source.shared.update(_aten.copy_.default)
        source = source.plain
    elif not isinstance(source, Tensor):  # a number, which PyTorch passes as such
        source = torch.full((), source, dtype=target.dtype, device=target.device)
    with suppress(RuntimeError):  # of other sizes, which quantize_ refuses
        source = source.expand(target.shape)
    return target.quantize_(source)


def _view(q: WrapperTensor, size: Sequence[int]) -> WrapperTensor:
    """Regroup the rows, in whole blocks; the columns stay. Below two dimensions: as stored."""
    shape = torch.empty(q.shape, device="meta").view(size).shape
    if len(shape) < 2 or q.dim() < 2 or shape == q.shape:
        return q.with_pieces(q.pieces(), shape)
    sharding.check_rows_kept(q)
    fmt = q.format
    assert fmt is not None  # only a grouped tensor has none
    rows, new_rows = q.shape[-2], shape[-2]
    across, along = fmt.block or (1, 1)
    along = along if q.columnwise_data is not None else across
    whole = rows == new_rows or (new_rows and rows % along == 0 and new_rows % along == 0)
    if shape[-1] != q.shape[-1] or not whole:
        must = f"keep its {q.shape[-1]} columns and whole blocks of {along} rows"
        raise sharding.NotStorableError(q, must, tuple(shape))
    if sharding.has_scale_of_matrix(fmt) and shape[:-2].numel() != q.shape[:-2].numel():
        must = "keep its matrices, each has its own scale"
        raise sharding.NotStorableError(q, must, tuple(shape))
    kinds = kinds_of_pieces(fmt, shape)
    return q.with_pieces({name: t.view(kinds[name][1]) for name, t in q.pieces().items()}, shape)


def _change_shape(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shaped: Tensor
) -> WrapperTensor:
    """Run an operation that changes the shape in place, to that of ``shaped``, where blocks stay.

    Raises ValueError where they would not.
    """
    q, name = args[0], func.overloadpacket.__name__
    pieces = None
    if q.ends is None and shaped.is_contiguous() and shaped.numel() == q.numel():
        with suppress(sharding.NotStorableError):
            pieces = _view(q, shaped.shape).pieces()
    if pieces is None:
        raise ValueError(
            f"{name} of a quantized or grouped tensor must keep what is stored: size, order of "
            f"rows and whole blocks, got {tuple(shaped.shape)} from {q!r}; nothing was changed; "
            "use an operation that returns another tensor, such as transpose, reshape or unsqueeze"
        )
    with torch._C._DisableTorchDispatch():
        func(*args, **kwargs)
    q.store(pieces)
    return q


def _empty_like(q: WrapperTensor, **options: Any) -> Tensor:
    """Keep the format where a device is named, as ``Module.to_empty`` does; else an ordinary one.

    An optimizer's state, for instance, is an ordinary one.
    """
    device, dtype = options.get("device"), options.get("dtype") or q.dtype
    if device is not None and dtype in HIGH_PRECISION:
        new = {
            name: t.to(device)
            if name == "ends" and not t.is_meta
            else torch.empty_like(t, device=device)
            for name, t in q.pieces().items()
        }
        return q.with_pieces(new, q.shape, dtype=dtype)
    return _aten.empty_like(torch.empty(q.shape, dtype=q.dtype, device=q.device), **options)


_OF_GROUPED: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: lambda q: q.map_pieces(lambda t: t),
    _aten.alias.default: lambda q: q.map_pieces(lambda t: t),
    _aten.clone.default: lambda q, **_: q.map_pieces(lambda t: as_bytes(t).clone().view(t.dtype)),
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy_,
    _aten.empty_like.default: _empty_like,
}
_OF_QUANTIZED: dict[Any, Callable[..., Any]] = _OF_GROUPED | {
    _aten.view.default: _shared_versions()(_view),
    _aten.slice.Tensor: _shared_versions()(sharding.slice_),
    _aten.split.Tensor: _shared_versions()(sharding.split),
    _aten.new_zeros.default: sharding.new_zeros,
}
