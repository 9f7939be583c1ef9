"""``QuantizedTensor``: a tensor stored in a number format.

It can be a parameter: autograd, optimizers, ``module.to`` and state dicts work. `tensor_dispatch`
runs the operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from fusible.recipes import sharding
from fusible.recipes.formats import NumberFormat
from fusible.recipes.tensor_dispatch import DispatchedTensor
from fusible.recipes.wrapper import (
    PIECES,
    UnseenWrites,
    WrapperTensor,
    overwrite,
    quantized_pieces,
    unpickled,
)


class QuantizedTensor(WrapperTensor, DispatchedTensor):
    """Values in ``format``, for row-wise use, column-wise use or both, of nominal ``dtype``.

    ``dtype`` is the one of gradients and of ``dequantize()``; ``fp8_dtype`` that of the elements.
    An output that an op quantizes for the next one is quantized as one matrix of all rows: its
    pieces are then of ``[rows, columns]`` whatever the shape.
    """

    format: NumberFormat
    _high_precision_init_val: Tensor | None = None

    @classmethod
    def quantize(
        cls, x: Tensor, fmt: NumberFormat, *, rowwise: bool = True, columnwise: bool = False
    ) -> Self:
        """Quantize ``x`` of any shape; errors as ``quantized_pieces``."""
        pieces = quantized_pieces(x, fmt, rowwise=rowwise, columnwise=columnwise)
        return cls(pieces, fmt, x.shape, x.dtype)

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The dtype of the stored elements (bytes of two for E2M1)."""
        return self.format.element.dtype

    @property
    def data(self) -> QuantizedTensor:
        """Return what is stored, without history."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        """Store ``new`` instead: in its own format, or quantized in this one if it has none.

        Raises TypeError for a dtype that cannot be quantized, before anything changes.
        """
        if new is self:
            return
        new = self.stored_alike(new)
        # This takes over shape, dtype and device; the pieces PyTorch knows nothing of.
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.format = new.format
        self.store(new.pieces())

    def stored_alike(self, x: Tensor) -> QuantizedTensor:
        """Return ``x`` in this format, for the uses this tensor has; or itself, if quantized."""
        if isinstance(x, QuantizedTensor):
            return x
        columnwise = self.columnwise_data is not None
        return self.quantize(x, self.format, rowwise=self.has_rowwise, columnwise=columnwise)

    def for_uses(self, *, columnwise: bool) -> QuantizedTensor:
        """Return this tensor for row-wise use and, if asked, column-wise use, without a copy.

        A missing column-wise form is quantized from the row-wise values. ValueError without those.
        """
        self.tensors_of(columnwise=False)  # raises
        pieces, both = self.pieces(), columnwise and self.format.directional
        wanted = PIECES if both else PIECES[:3]
        if both and self.columnwise_data is None:
            values, fmt = self.own_values(), self.format
            pieces |= quantized_pieces(values, fmt, rowwise=False, columnwise=True)
        return self.with_pieces({name: t for name, t in pieces.items() if name in wanted})

    def get_high_precision_init_val(self) -> Tensor | None:
        """Return the value before quantization, if ``quantized_model_init`` kept it."""
        return self._high_precision_init_val

    def keep_high_precision_init_val(self, value: Tensor) -> None:
        """Keep ``value``, before quantization, on the CPU, or on the meta device if it is there."""
        value = value.detach()
        self._high_precision_init_val = value.to("meta" if value.is_meta else "cpu", copy=True)

    def clear_high_precision_init_val(self) -> None:
        """Forget the value before quantization."""
        self._high_precision_init_val = None

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
        module: Any,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], None]:
        """Hand FSDP2 what is stored of this shard; ValueError if shards are uneven."""
        ranks, rows = mesh.size(), self.shape[0]
        if rows * ranks != outer_size[0] or self.shape[1:] != tuple(outer_size[1:]):
            raise ValueError(
                f"a quantized weight of shape {tuple(outer_size)} must be sharded evenly along its "
                f"first dimension over {ranks} ranks, got a shard of shape {tuple(self.shape)}; "
                "use as many groups as a multiple of the ranks"
            )
        return tuple([piece.view(torch.uint8) for piece in self.pieces().values()]), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: QuantizedTensor | None = None,
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
        """Put together what FSDP2 gathered; ``out`` is what an earlier call returned."""
        UnseenWrites.gathers += 1
        pieces, shape = self.pieces(), tuple(self.shape)
        # For one rank alone, torch (2.13) copies the first piece only: the shard is all there is.
        if len(all_gather_outputs) == len(pieces):
            gathered = zip(pieces.items(), all_gather_outputs, strict=True)
            pieces = {name: output.view(piece.dtype) for (name, piece), output in gathered}
            shape = next(iter(pieces.values())).shape[0], *shape[1:]
        whole = self.with_pieces(pieces, shape, param_dtype)
        if out is None:
            return whole, ()
        out = sharding.local(out)
        for name, new in whole.pieces().items():
            if getattr(out, name).data_ptr() != new.data_ptr():
                overwrite(out, name, new)
        return None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say shape, format, element dtype and nominal dtype, without reading the device."""
        return (
            f"QuantizedTensor({tuple(self.shape)}, {self.format.name}, elements={self.fp8_dtype}, "
            f"dtype={self.dtype}, device='{self.device}')"
        )


torch.serialization.add_safe_globals([unpickled, QuantizedTensor])  # torch.load reads both


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """Tell whether tensors have one shape, and are quantized alike or not at all."""

    def kind(t: Any) -> tuple[Any, ...]:
        part = sharding.local(t)
        return t.shape, (part.format, *part.pieces()) if isinstance(part, QuantizedTensor) else ()

    return len({kind(t) for t in tensors}) == 1


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape as one with a leading dimension; quantized if all of them are.

    Sharded ones are gathered. Raises ValueError if quantized ones differ in format or uses.
    """
    if sharding.is_sharded(tensors[0]):
        return stack([sharding.whole(t) for t in tensors])
    first, quantized = tensors[0], [t for t in tensors if isinstance(t, QuantizedTensor)]
    if not quantized:
        return torch.stack(tuple(tensors))
    if not isinstance(first, QuantizedTensor) or not are_alike(tensors):
        raise ValueError(
            f"tensors to stack must be all quantized alike or not at all, got {list(tensors)}; "
            "call .dequantize()"
        )
    pieces = {name: torch.stack([t.pieces()[name] for t in quantized]) for name in first.pieces()}
    return first.with_pieces(pieces, (len(tensors), *first.shape))


def unstack(t: Tensor) -> tuple[Tensor, ...]:
    """Undo ``stack``: views of the members along the first dimension, of all of a sharded one."""
    if sharding.is_sharded(t):
        return unstack(sharding.whole(t))
    if not isinstance(t, QuantizedTensor):
        return t.unbind(0)
    return tuple(
        t.map_pieces(lambda piece, member=member: piece[member], shape=t.shape[1:])  # type: ignore[misc]
        for member in range(t.shape[0])
    )
