"""Quantizers: a format, and the uses for which tensors are quantized to it."""

from __future__ import annotations

from typing import Any

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
from fusible.recipes.tensor import QuantizedTensor
from fusible.recipes.tensor_dispatch import implicit_values
from fusible.recipes.wrapper import WrapperTensor


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
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose the uses of what is quantized from now on; None leaves one as it is."""
        rowwise = self.rowwise_usage if rowwise is None else rowwise
        columnwise = self.columnwise_usage if columnwise is None else columnwise
        check_bools("set_usage", rowwise=rowwise, columnwise=columnwise)
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    def quantize(
        self,
        tensor: Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """Return ``tensor`` quantized; ``out``, if given, in its own format and for its own uses.

        ``dtype`` is the nominal one, by default that of ``tensor``.
        """
        tensor = tensor if dtype is None else tensor.to(dtype)
        return self(tensor) if out is None else out.quantize_(tensor)

    def update_quantized(self, src: Tensor, dst: QuantizedTensor) -> QuantizedTensor:
        """Write ``src`` into ``dst``, in the format and for the uses of ``dst``."""
        return dst.quantize_(src)

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
            x, self.format, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage
        )

    def _holds(self, x: WrapperTensor) -> bool:
        """Return whether ``x`` is quantized as this quantizer would, for all of its uses."""
        return (
            x.format_constants == self.format.as_constants()
            and (x.has_rowwise or not self.rowwise_usage)
            and (x.has_columnwise or not self.columnwise_usage)
        )

    def __repr__(self) -> str:
        uses = f"rowwise={self.rowwise_usage}, columnwise={self.columnwise_usage}"
        return f"{type(self).__name__}({self.format.name}, {uses})"


def _element(fp8_dtype: torch.dtype) -> Element:
    for element in (E4M3, E5M2):
        if element.dtype == fp8_dtype:
            return element
    raise ValueError(
        f"fp8_dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got {fp8_dtype!r}"
    )


def _check_off(kind: str, **options: bool) -> None:
    """Raise TypeError or ValueError unless these options of te.ops' quantizer are all False."""
    check_bools(kind, **options)
    if enabled := [name for name, on in options.items() if on]:
        raise ValueError(
            f"{kind} must have {' and '.join(enabled)} False, got True; other values are not "
            "supported"
        )


class MXFP8Quantizer(Quantizer):
    """MXFP8, scales rounded up."""

    def __init__(
        self,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        rowwise: bool = True,
        columnwise: bool = True,
        *,
        with_2d_quantization: bool = False,
    ) -> None:
        _check_off("MXFP8Quantizer", with_2d_quantization=with_2d_quantization)
        super().__init__(mxfp8(_element(fp8_dtype)), rowwise=rowwise, columnwise=columnwise)


class Float8CurrentScalingQuantizer(Quantizer):
    """FP8 with one scale per tensor, made on its device; ``device`` has no effect."""

    def __init__(
        self,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        device: torch.device | str | None = None,
        rowwise: bool = True,
        columnwise: bool = True,
        *,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
    ) -> None:
        check_bools(type(self).__name__, force_pow_2_scales=force_pow_2_scales)
        _check_off(type(self).__name__, with_amax_reduction=with_amax_reduction)
        fmt = fp8_tensor(_element(fp8_dtype), force_pow_2_scales, amax_epsilon)
        super().__init__(fmt, rowwise=rowwise, columnwise=columnwise)


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
    """NVFP4, scales per 1x16 or, with ``with_2d_quantization``, per 16x16.

    ``with_rht`` transforms the column-wise form (``recipes.hadamard``), always with the random
    signs and with scales of the transformed values; ``stochastic_rounding`` rounds at random.

    Options of a transform, of a reduction or of other scales have no effect where it is off, which
    it must be.
    """

    def __init__(  # noqa: PLR0913 - Transformer Engine's signature
        self,
        fp4_dtype: torch.dtype = torch.float4_e2m1fn_x2,
        rowwise: bool = True,
        columnwise: bool = True,
        *,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        if fp4_dtype != torch.float4_e2m1fn_x2:
            raise ValueError(f"fp4_dtype must be torch.float4_e2m1fn_x2, got {fp4_dtype!r}")
        check_bools(
            "NVFP4Quantizer",
            with_rht=with_rht,
            with_2d_quantization=with_2d_quantization,
            stochastic_rounding=stochastic_rounding,
            with_post_rht_amax=with_post_rht_amax,
            with_random_sign_mask=with_random_sign_mask,
        )
        _check_off(
            "NVFP4Quantizer",
            with_amax_reduction=with_amax_reduction,
            row_scaled_nvfp4=row_scaled_nvfp4,
            nvfp4_use_4over6=nvfp4_use_4over6,
        )
        if with_rht and not with_random_sign_mask:
            raise ValueError(
                "NVFP4Quantizer must have with_random_sign_mask True, got False; the transform "
                "has the random signs"
            )
        block = (16, 16) if with_2d_quantization else (1, 16)
        fmt = nvfp4(block, hadamard=with_rht, stochastic=stochastic_rounding)
        super().__init__(fmt, rowwise=rowwise, columnwise=columnwise)
