"""Quantizers: a format, and the uses for which tensors are quantized to it."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.arguments import check_bools
from fusible.recipes.formats import (
    BLOCKS,
    E4M3,
    E5M2,
    Element,
    NumberFormat,
    fp8_block,
    fp8_tensor,
    mxfp8,
    nvfp4,
)
from fusible.recipes.tensor import QuantizedTensor, WrapperTensor
from fusible.recipes.tensor_dispatch import implicit_values


class Quantizer:
    """Quantizes tensors to ``format`` for row-wise use, column-wise use or both.

    With ``by_receiver``, the op that gets the tensor also reads its values: it gets those before
    quantization and quantizes them itself, to the same bits.
    """

    def __init__(
        self,
        format: NumberFormat,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        by_receiver: bool = False,
    ) -> None:
        check_bools(
            type(self).__name__, rowwise=rowwise, columnwise=columnwise, by_receiver=by_receiver
        )
        self.format = format
        self.by_receiver = by_receiver
        self.rowwise = rowwise
        self.columnwise = columnwise

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose the uses of what is quantized from now on; None leaves one as it is."""
        rowwise = self.rowwise if rowwise is None else rowwise
        columnwise = self.columnwise if columnwise is None else columnwise
        check_bools("set_usage", rowwise=rowwise, columnwise=columnwise)
        self.rowwise, self.columnwise = rowwise, columnwise

    def __call__(self, x: Tensor) -> QuantizedTensor:
        """Quantize ``x`` ``[..., rows, columns]``; errors as ``quantization.quantize``.

        A tensor that already is in this format, for these uses, is returned as it is. The values of
        any other quantized one are quantized, with the error of both formats.
        """
        if isinstance(x, QuantizedTensor):
            if self._holds(x):
                return x
            x = implicit_values("a quantizer of another format", x)
        return QuantizedTensor.quantize(
            x, self.format, rowwise=self.rowwise, columnwise=self.columnwise
        )

    def _holds(self, x: WrapperTensor) -> bool:
        """Return whether ``x`` is quantized as this quantizer would, for all of its uses."""
        columnwise = x.columnwise_data is not None or not self.format.directional
        return (
            x.format_constants == self.format.as_constants()
            and (x.has_rowwise or not self.rowwise)
            and (columnwise or not self.columnwise)
        )

    def __repr__(self) -> str:
        """Say format and uses."""
        uses = f"rowwise={self.rowwise}, columnwise={self.columnwise}"
        return f"{type(self).__name__}({self.format.name}, {uses})"


def _element(fp8_dtype: torch.dtype) -> Element:
    for element in (E4M3, E5M2):
        if element.dtype == fp8_dtype:
            return element
    raise ValueError(
        f"fp8_dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got {fp8_dtype!r}"
    )


class MXFP8Quantizer(Quantizer):
    """MXFP8, scales rounded up."""

    def __init__(
        self,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(mxfp8(_element(fp8_dtype)), rowwise=rowwise, columnwise=columnwise)


class Float8CurrentScalingQuantizer(Quantizer):
    """FP8 with one scale per tensor. ``device`` is taken from the tensors; it may be given."""

    def __init__(
        self,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        device: torch.device | str | None = None,
        rowwise: bool = True,
        columnwise: bool = True,
        *,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
        check_bools(type(self).__name__, force_pow_2_scales=force_pow_2_scales)
        fmt = fp8_tensor(_element(fp8_dtype), force_pow_2_scales, amax_epsilon)
        super().__init__(fmt, rowwise=rowwise, columnwise=columnwise)
        self.device = None if device is None else torch.device(device)

    def __call__(self, x: Tensor) -> QuantizedTensor:
        """Quantize ``x``, which must be on ``device`` if one was given."""
        if self.device is not None and x.device.type != self.device.type:
            raise ValueError(
                f"a tensor for this quantizer must be on {self.device}, got {x.device}; move it"
            )
        return super().__call__(x)


class Float8BlockQuantizer(Quantizer):
    """FP8 with FP32 scales per 128x128 (``block_scaling_dim=2``) or 1x128 (1)."""

    def __init__(
        self,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        rowwise: bool = True,
        columnwise: bool = True,
        *,
        force_pow_2_scales: bool = True,
        amax_epsilon: float = 0.0,
        block_scaling_dim: int = 2,
    ) -> None:
        check_bools(type(self).__name__, force_pow_2_scales=force_pow_2_scales)
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"block_scaling_dim must be 1 or 2, got {block_scaling_dim}")
        block = BLOCKS[block_scaling_dim - 1]
        fmt = fp8_block(_element(fp8_dtype), block, force_pow_2_scales, amax_epsilon)
        super().__init__(fmt, rowwise=rowwise, columnwise=columnwise)


class NVFP4Quantizer(Quantizer):
    """NVFP4, nearest rounding, scales per 1x16 or, with ``with_2d_quantization``, per 16x16."""

    def __init__(
        self,
        rowwise: bool = True,
        columnwise: bool = True,
        *,
        with_rht: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        with_random_sign_mask: bool = False,
    ) -> None:
        check_bools("NVFP4Quantizer", with_2d_quantization=with_2d_quantization)
        options = {
            "with_rht": with_rht,
            "stochastic_rounding": stochastic_rounding,
            "with_random_sign_mask": with_random_sign_mask,
        }
        check_bools("NVFP4Quantizer", **options)
        enabled = [name for name, on in options.items() if on]
        if enabled:
            raise ValueError(
                f"NVFP4Quantizer must have {' and '.join(enabled)} False, got True; only "
                "nearest rounding without a Hadamard transform is supported"
            )
        fmt = nvfp4((16, 16) if with_2d_quantization else (1, 16))
        super().__init__(fmt, rowwise=rowwise, columnwise=columnwise)
