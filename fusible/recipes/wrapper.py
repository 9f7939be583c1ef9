"""How quantized and grouped tensors are stored, and what their values are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn import functional

from fusible.calls import capturing
from fusible.recipes import hadamard
from fusible.recipes.formats import NumberFormat
from fusible.recipes.matrix import QuantizedMatrix, as_bytes, shapes_of
from fusible.recipes.quantize_ops import dequantize_matrix, quantize_matrix
from fusible.versions import sources_digest

PIECES = (
    "rowwise_data",
    "scale_inv",
    "tensor_scale",
    "columnwise_data",
    "columnwise_scale_inv",
    "columnwise_tensor_scale",
)
_NAMES = (*PIECES, "ends")


class WrapperTensor(torch.Tensor):
    """Base of `QuantizedTensor` and `GroupedTensor`: plain tensors under names, seen as one tensor.

    ``rowwise_data``, ``scale_inv``, ``columnwise_data`` and ``columnwise_scale_inv`` are laid out
    as in ``QuantizedMatrix`` and None if the use is missing; in a format whose blocks have no
    direction both uses share the row-wise ones. ``ends`` and ``uniform`` are of `GroupedTensor`.
    """

    format: NumberFormat | None
    uniform: bool
    ends: Tensor | None
    rowwise_data: Tensor | None
    scale_inv: Tensor | None
    columnwise_data: Tensor | None
    columnwise_scale_inv: Tensor | None
    tensor_scale: Tensor | None
    columnwise_tensor_scale: Tensor | None

    @staticmethod
    def __new__(
        cls: type[Self],
        pieces: dict[str, Tensor],
        format: NumberFormat | None,
        shape: Sequence[int],
        dtype: torch.dtype,
        uniform: bool = False,
    ) -> Self:
        """Assemble from what ``pieces`` returned."""
        device = next(iter(pieces.values())).device
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        # What would read its memory, of which there is none, raises rather than reads address 0.
        torch._C._set_throw_on_mutable_data_ptr(self)
        self.format, self.uniform = format, uniform
        self.store(pieces)
        return self

    def store(self, pieces: dict[str, Tensor]) -> None:
        """Set the tensors it consists of; E8M0 scales, which may be given as bytes, also as bytes.

        torch.compile is handed the bytes.
        """
        for name in _NAMES:
            piece = memory = pieces.get(name)
            if name in ("scale_inv", "columnwise_scale_inv"):
                if piece is not None and piece.dtype == torch.uint8:
                    assert self.format is not None
                    piece = piece.view(self.format.scale_dtype)
                elif piece is not None:
                    memory = as_bytes(piece)
                setattr(self, f"{name}_bytes", memory)
            setattr(self, name, piece)

    @property
    def has_rowwise(self) -> bool:
        """Tell whether row-wise use is possible."""
        return self.rowwise_data is not None

    @property
    def has_columnwise(self) -> bool:
        """Tell whether column-wise use is possible."""
        shared = self.format is not None and not self.format.directional
        return shared or self.columnwise_data is not None

    def matrix(self, *, columnwise: bool = False) -> QuantizedMatrix:
        """Return the matrix for one use; ValueError if the tensor has not got it."""
        tensors = self.tensors_of(columnwise=columnwise)
        assert self.format is not None
        return QuantizedMatrix(
            *tensors, self.format, columnwise and self.format.directional, self.ends
        )

    def tensors_of(self, *, columnwise: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return data, scale and tensor scale for one use; ValueError if they are not there.

        Tensors only: all that torch.compile takes from a method of a tensor.
        """
        if self.format is None:
            raise ValueError(
                "a grouped tensor must be quantized to have scales, got one that is not; "
                "use group_quantize"
            )
        own = columnwise and self.format.directional
        data = self.columnwise_data if own else self.rowwise_data
        scale = self.columnwise_scale_inv if own else self.scale_inv
        if data is None or scale is None:
            use = "column-wise" if columnwise else "row-wise"
            raise ValueError(
                f"{use} use needs {use} data, which this {self.format.name} tensor was quantized "
                "without; set_usage of its quantizer before quantizing"
            )
        return data, scale, self.columnwise_tensor_scale if own else self.tensor_scale

    @property
    def format_constants(self) -> tuple[Any, ...] | None:
        """The format as constants, which compiled code reads of tensors that it has made itself.

        Their integers may be symbolic there.
        """
        return None if self.format is None else self.format.as_constants()

    def dequantize(
        self, dtype: torch.dtype | None = None, *, columnwise: bool | None = None
    ) -> Tensor:
        """Return the values as an ordinary tensor, by default of the nominal dtype.

        From the row-wise data if there are any, unless ``columnwise`` says which. Rows past the
        last group are zero. The gradient passes unchanged.
        """
        dtype = dtype or self.dtype
        if (torch.is_grad_enabled() and self.requires_grad) or forward_ad._current_level >= 0:
            return _Dequantize.apply(self, dtype, columnwise)
        return self.own_values(dtype, columnwise)

    def own_values(
        self, dtype: torch.dtype | None = None, columnwise: bool | None = None
    ) -> Tensor:
        """``dequantize`` below autograd: no gradient passes."""
        dtype = dtype or self.dtype
        if self.format is None:
            assert self.rowwise_data is not None
            return self.rowwise_data.to(dtype)
        if columnwise is None:
            columnwise = not self.has_rowwise
        matrix = self.matrix(columnwise=columnwise)
        if matrix.columnwise and self.format.hadamard:
            transformed = dequantize_matrix(matrix, torch.float32)
            ends = None if self.ends is None else self.ends.clamp(max=matrix.shape[0])
            values = hadamard.inverse(transformed, ends).to(dtype)
        else:
            values = dequantize_matrix(matrix, dtype)
        if self.format.element.per_byte > 1:  # what fills the last byte of a row is none of them
            columns = self.numel() // max(math.prod(values.shape[:-1]), 1)
            values = values[..., :columns].contiguous()
        return values.reshape(self.shape)

    def quantize_(self, values: Tensor) -> Self:
        """Replace the values, in the memory, the format, the uses and the groups there are."""
        if values.shape != self.shape:
            raise ValueError(
                f"values must have the tensor's shape {tuple(self.shape)}, "
                f"got {tuple(values.shape)}; nothing was written"
            )
        if not self.numel():
            return self
        values = values.detach().to(self.device, self.dtype)
        if self.format is None:
            new = {"rowwise_data": values}
        else:
            lead = next(iter(self.pieces().values())).shape[:-1]  # of the matrices it is stored as
            values = values.reshape(*lead, self.numel() // max(math.prod(lead), 1))
            rowwise, columnwise = self.has_rowwise, self.columnwise_data is not None
            new = quantized_pieces(
                values, self.format, rowwise=rowwise, columnwise=columnwise, ends=self.ends
            )
        for name, piece in new.items():
            overwrite(self, name, piece)
        return self

    def held_of(self, other: WrapperTensor) -> list[str]:
        """Name the pieces of ``other`` that can be stored here: all, ends of groups, or none."""
        own, new = self.pieces(), other.pieces()
        if type(self) is not type(other) or self.shape != other.shape:
            return []
        if self.uniform and not other.uniform:
            return []
        fit = [name for name in own if name in new and own[name].shape == new[name].shape]
        if self.format == other.format and len(fit) == len(own):
            return fit
        return [name for name in fit if name == "ends"]

    def pieces(self) -> dict[str, Tensor]:
        """Return the plain tensors it consists of, by attribute name."""
        return {name: piece for name in _NAMES if (piece := getattr(self, name)) is not None}

    def with_pieces(
        self,
        pieces: dict[str, Tensor],
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return a tensor of other ``pieces``, and of another shape and nominal dtype if given."""
        shape = self.shape if shape is None else shape
        return type(self)(pieces, self.format, shape, dtype or self.dtype, self.uniform)

    def map_pieces(
        self,
        function: Callable[[Tensor], Tensor],
        dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
    ) -> Self:
        """Return the tensor of ``function`` of every piece."""
        pieces = {name: function(piece) for name, piece in self.pieces().items()}
        return self.with_pieces(pieces, shape, dtype)

    def __coerce_tangent_metadata__(self) -> Tensor:
        """Return what AOTAutograd plans as the gradient of this output: an ordinary tensor."""
        gradient = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        # AOTAutograd takes what is returned for a subclass, and asks for the tensors inside.
        gradient.__tensor_flatten__ = lambda: ([], None)  # type: ignore[attr-defined]
        return gradient

    def __coerce_same_metadata_as_tangent__(
        self, metadata: Any, expected_type: type | None = None
    ) -> Tensor | None:
        """Return a quantized gradient as the ordinary tensor that compiled code has planned."""
        return self.dequantize() if expected_type is Tensor else None

    def data_ptr(self) -> int:
        """Return 0: there is no memory of the values, which copies ask in PyTorch."""
        return 0

    def share_memory_(self) -> Self:
        """Move the pieces to shared memory; PyTorch's own needs memory that there is not."""
        for piece in self.pieces().values():
            piece.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Tell whether all pieces are in shared memory."""
        return all(piece.is_shared() for piece in self.pieces().values())

    def __reduce_ex__(self, protocol: object) -> Any:
        """Be pickled as what it consists of, without history."""
        pieces = {
            # PyTorch loads no pickled tensors of eight-bit floats.
            name: (piece.detach().view(torch.uint8) if piece.itemsize == 1 else piece, piece.dtype)
            for name, piece in self.pieces().items()
        }
        arguments = pieces, self.format_constants, self.shape, self.dtype, (self.uniform,)
        options = isinstance(self, nn.Parameter), self.requires_grad, attributes_of(self)
        return unpickled, (type(self), *arguments, *options)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """Name the inner tensors, for torch.compile and FSDP: of E8M0 scales their bytes."""
        e8m0 = torch.float8_e8m0fnu
        names = [n if t.dtype != e8m0 else f"{n}_bytes" for n, t in self.pieces().items()]
        return names, (self.format, self.dtype, self.uniform)

    def _stable_hash_for_caching(self) -> str:
        """Say what compiled code depends on, by which PyTorch caches it in files.

        Among it these sources: such code calls library ops with the arguments that they take now.
        """
        names, meta = self.__tensor_flatten__()
        pieces = [(name, getattr(self, name)) for name in names]
        inner = [(name, piece.dtype, piece.shape, piece.stride()) for name, piece in pieces]
        kind = sources_digest(), type(self), self.shape, self.device, self.requires_grad
        return repr((*kind, meta, inner))

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Any, meta: Any, outer_size: Any, outer_stride: Any
    ) -> Self:
        fmt, dtype, uniform = meta
        pieces = {name.removesuffix("_bytes"): piece for name, piece in inner.items()}
        return cls(pieces, fmt, outer_size, dtype, uniform)


def kinds_of_pieces(
    fmt: NumberFormat, shape: Sequence[int]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and the shape of each piece that a tensor of ``shape`` can have."""
    dtypes = fmt.element.dtype, fmt.scale_dtype, torch.float32
    uses = (False, True) if fmt.directional else (False,)
    kinds = [kind for use in uses for kind in zip(dtypes, shapes_of(shape, fmt, use), strict=True)]
    named = zip(PIECES, kinds, strict=False)
    return {name: (dtype, size) for name, (dtype, size) in named if size is not None}


def quantized_pieces(
    x: Tensor, fmt: NumberFormat, *, rowwise: bool, columnwise: bool, ends: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the pieces that ``x`` is quantized to; what has no rows is one row.

    Blocks without direction serve both uses. Raises what ``quantization.quantize`` raises, but for
    columns that do not fill the bytes of packed elements: a zero is put after them.
    """
    if x.dim() < 2:
        x = x.reshape(1, -1)
    if unpacked := x.shape[-1] % fmt.element.per_byte:
        x = functional.pad(x, (0, fmt.element.per_byte - unpacked))
    uses = quantize_matrix(x, fmt, rowwise=rowwise, columnwise=columnwise, ends=ends)
    if not fmt.directional:
        uses = uses[0] or uses[1], None
    if not any(uses):
        raise ValueError(
            "a quantized tensor must have row-wise or column-wise data, got neither; "
            "ask the quantizer for a use: set_usage(rowwise=True)"
        )
    tensors = [t for use in uses for t in (use[:3] if use else (None,) * 3)]
    return {name: t for name, t in zip(PIECES, tensors, strict=True) if t is not None}


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: WrapperTensor, dtype: torch.dtype, columnwise: bool | None) -> Tensor:
        ctx.dtype, ctx.values_dtype = q.dtype, dtype
        return q.own_values(dtype, columnwise).detach()  # no view, so that it can be written to

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.to(ctx.values_dtype)


def attributes_of(t: Tensor) -> dict[str, Any]:
    """Return the attributes that others have set on ``t``, not a quantized tensor's own."""
    own: set[str] = set()
    if isinstance(t, WrapperTensor):
        bytes_ = (f"{name}_bytes" for name in _NAMES)
        own = {"format", "uniform", "_is_param", *_NAMES, *bytes_}
    return {name: value for name, value in vars(t).items() if name not in own}


def unpickled(
    kind: type[WrapperTensor],
    pieces: dict[str, tuple[Tensor, torch.dtype]],
    constants: tuple[Any, ...] | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    flags: Sequence[Any],
    is_parameter: bool,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> Tensor:
    """Undo ``__reduce_ex__``; ValueError for pieces that do not fit."""
    fmt = None if constants is None else NumberFormat.from_constants(*constants)
    typed = {name: piece.view(its_dtype) for name, (piece, its_dtype) in pieces.items()}
    quantized = kind(typed, fmt, shape, dtype, *flags)
    if fmt is not None:
        for columnwise in {not quantized.has_rowwise, quantized.columnwise_data is not None}:
            quantized.matrix(columnwise=columnwise).check_sizes()
    made: Tensor = quantized
    made = nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)
    vars(made).update(attributes)
    return made


class UnseenWrites:
    """Writes to pieces of quantized tensors that no version tells of, in this process."""

    gathers = 0
    """How many times FSDP2 has filled gathered ones."""
    captured = False
    """Whether a captured CUDA graph has written any: a replay may at any time."""


def overwrite(q: WrapperTensor, name: str, new: Tensor, non_blocking: bool = False) -> None:
    """Copy ``new`` into a piece of a quantized tensor, for autograd to see.

    Below ``__torch_dispatch__`` a copy does not count as a change of what a graph has saved.

    Raises RuntimeError inside ``allow_mutation_on_saved_tensors``, which sees no such copy.
    """
    if torch.autograd.graph._allow_mutation_on_saved_tensors_enabled:
        raise RuntimeError(
            "quantized tensors must be written outside of "
            "torch.autograd.graph.allow_mutation_on_saved_tensors, which would not keep what a "
            "backward reads of them; nothing was written"
        )
    piece = getattr(q, name)
    memory = getattr(q, f"{name}_bytes", piece)
    memory.copy_(as_bytes(new), non_blocking)
    if capturing():
        UnseenWrites.captured = True
    if not piece.is_inference():
        increment_version([piece] if memory is piece else [piece, memory])
