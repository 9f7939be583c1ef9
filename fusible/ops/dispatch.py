"""Tokens to the experts they were routed to, and the experts' rows back to the tokens."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from fusible.arguments import check_bools, check_numbers
from fusible.formulas import cast
from fusible.fuser.context import OperationContext
from fusible.fuser.flow import Dtypes, autocast_to
from fusible.kernels import moe
from fusible.ops.inputs import check_dtype, check_row_scales, check_sizes, described
from fusible.ops.matrices import GatheredRows
from fusible.ops.op import BasicOperation, OpGrads
from fusible.ops.top_k_router import TopKRouter
from fusible.recipes.product import values


class Dispatch(BasicOperation):
    """One row for each of a token's choices of experts, sorted by expert: ``[rows, H]``.

    The input is tokens ``[..., H]``. Extra inputs: ``probs`` ``[..., k]``, floating, and
    ``expert_ids`` ``[..., k]``, int64 or int32, as a :class:`TopKRouter` gives them. An id that is
    negative or at least ``num_experts`` (an expert of another rank) has no part in the output, and
    gives no gradient.

    Extra outputs, which later ops of the run find by name:

    - ``split_sizes``, int64 ``[num_experts]``: the rows of each expert. No host reads them.
    - ``scales`` ``[rows]``: the weight of each row, from ``probs``; not with ``scale_input``.
    - ``row_map``, int32 ``[..., k]``: the row of each choice. Where a choice is not computed,
      ``~r`` for a row r in the tail (:mod:`fusible.kernels.moe.definitions`), so test for ``>= 0``.

    There is a row for each choice, computed or not: ``rows`` is the number of choices, or at most
    ``num_experts`` times the capacity. Within an expert rows are in the order of the tokens; rows
    past the last expert's (the tail) are zero. The backward sums a token's rows in FP32, in the
    order of its choices, so it is deterministic. Under autocast rows have autocast's dtype.

    Saves ``(row_map,)``, and with ``scale_input`` ``(row_map, x, probs)``; ``ctx.dtype``, the dtype
    of the probabilities.

    Args:
        num_experts: number of experts.
        scale_input: multiply the rows by their weights (Llama-4), rather than give these out.
        recompute_rows: where a rule fuses the whole of the experts, keep the tokens for the
            backward and make their rows once more: less memory for one more launch.
        capacity_factor: an expert takes at most ``capacity_factor * choices / num_experts`` rows,
            rounded up; later choices are dropped (Switch Transformers, arXiv 2101.03961). None
            drops no choice.

    Raises:
        TypeError: the number of experts is no integer.
        ValueError: no expert, or a capacity factor that is not positive and finite; in a call,
            ``probs`` and ``expert_ids`` do not fit the tokens or each other, or the input has a
            dtype that ops do not compute in.
    """

    num_extra_inputs = 2
    extra_input_names = ("probs", "expert_ids")
    fact_names = ("num_experts", "scale_input", "recompute_rows", "capacity_factor")
    saves = "row map; with scale_input x, probs"

    def __init__(
        self,
        num_experts: int,
        *,
        scale_input: bool = False,
        recompute_rows: bool = False,
        capacity_factor: float | None = None,
    ) -> None:
        check_bools("Dispatch", scale_input=scale_input, recompute_rows=recompute_rows)
        self.extra_output_names = (
            ("split_sizes", "row_map") if scale_input else ("split_sizes", "scales", "row_map")
        )
        self.num_extra_outputs = len(self.extra_output_names)
        super().__init__()
        check_sizes("Dispatch", num_experts=num_experts)
        if capacity_factor is not None:
            check_numbers("Dispatch", capacity_factor=capacity_factor)
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ValueError(
                "capacity_factor of Dispatch must be positive and finite, or None for no limit, "
                f"got {capacity_factor}"
            )
        self.num_experts = num_experts
        self.scale_input = scale_input
        self.recompute_rows = recompute_rows
        self.capacity_factor = capacity_factor

    def check_producer(self, slot: int, producer: Any) -> None:
        """Refuse a router that chooses among more experts, whose tokens would be lost."""
        if isinstance(producer, TopKRouter) and producer.num_experts > self.num_experts:
            raise ValueError(
                f"num_experts of Dispatch must be at least the {producer.num_experts} experts of "
                f"the TopKRouter before it, got {self.num_experts}; the tokens of the others would "
                "be lost"
            )

    def capacity(self, choices: int) -> int | None:
        """The most rows an expert takes of so many choices; None without a capacity factor."""
        if self.capacity_factor is None:
            return None
        # In integers, which torch.compile keeps symbolic.
        parts = 1 << 16
        factor = Fraction(max(self.capacity_factor, 1 / parts)).limit_denominator(parts)
        factor = factor / self.num_experts  # torch 2.11 does not trace /=
        return -(-choices * factor.numerator // factor.denominator)

    def output_dtypes(self, given: Dtypes) -> tuple[torch.dtype | None, ...]:
        """Autocast's or the input's; sizes, the probabilities' and the row map's."""
        x = None if given.input is None else autocast_to(given.input, given.autocast)
        middle = () if self.scale_input else given.extra_inputs[:1]
        return (x, torch.int64, *middle, torch.int32)

    def forward_impl(
        self, ctx: OperationContext, input_: Tensor, probs: Tensor | None, expert_ids: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The row map, then the rows."""
        x, probs, row_map, split_sizes, rows = self._place(ctx, input_, probs, expert_ids)
        y, scales = moe.scatter_rows(x, row_map, probs, rows, self.scale_input)
        if self.scale_input:
            ctx.save_for_backward(row_map, x, probs)
        middle = () if self.scale_input else (scales,)
        return y, split_sizes, *middle, row_map.view(*input_.shape[:-1], row_map.shape[1])

    def forward_gathered(
        self, ctx: OperationContext, input_: Tensor, probs: Tensor | None, expert_ids: Tensor | None
    ) -> tuple[GatheredRows, Tensor, Tensor, Tensor]:
        """As the forward without ``scale_input``, but the rows are not written."""
        x, probs, row_map, split_sizes, rows = self._place(ctx, input_, probs, expert_ids)
        index, scales = moe.row_sources(row_map, probs, rows)
        gathered = GatheredRows(x, index, self.recompute_rows)
        row_map = row_map.view(*input_.shape[:-1], row_map.shape[1])
        return gathered, split_sizes, scales, row_map

    def _place(
        self, ctx: OperationContext, input_: Tensor, probs: Tensor | None, expert_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """Tokens, probabilities, row map, split sizes and the number of rows; saves the map."""
        x, probs, ids = self._operands(ctx, values(input_), probs, expert_ids)
        row_map, split_sizes, ends = moe.permutation(
            ids, self.num_experts, self.capacity(ids.numel())
        )
        rows = ids.numel()
        if (capacity := self.capacity(rows)) is not None:
            rows = min(rows, self.num_experts * capacity)
        ctx.memo[split_sizes] = rows, ends  # as the grouped ops that follow would compute them
        ctx.dtype = probs.dtype
        ctx.shape = input_.shape
        ctx.save_for_backward(row_map)
        return x, probs, row_map, split_sizes, rows

    def _operands(
        self, ctx: OperationContext, x: Tensor, probs: Tensor | None, ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Checked tokens ``[T, H]``, probabilities and ids ``[T, k]``."""
        check_dtype(x, "input", "Dispatch")
        integers = (torch.int64, torch.int32)
        tokens = x.shape[:-1]
        fits = ids is not None and ids.dtype in integers and ids.dim() == x.dim()
        if ids is None or not fits or ids.shape[:-1] != tokens or ids.shape[-1] == 0:
            sizes = "".join([f"{size}, " for size in tokens])
            raise ValueError(
                f"expert_ids of Dispatch must be int64 or int32 of shape ({sizes}k), for the "
                f"tokens of the input, got {described(ids)}"
            )
        if probs is None or not probs.is_floating_point() or probs.shape != ids.shape:
            raise ValueError(
                f"probs of Dispatch must be floating of the shape {tuple(ids.shape)} of "
                f"expert_ids, got {described(probs)}"
            )
        if not x.device == probs.device == ids.device:
            raise ValueError(
                f"input, probs and expert_ids of Dispatch must be on one device, got {x.device}, "
                f"{probs.device} and {ids.device}"
            )
        x = cast(x, autocast_to(x.dtype, ctx.autocast_dtype))
        k = ids.shape[-1]
        return x.reshape(-1, x.shape[-1]), probs.reshape(-1, k), ids.reshape(-1, k)

    def backward_impl(
        self, ctx: OperationContext, grad_output: Tensor, *grad_extra_outputs: Tensor | None
    ) -> OpGrads:
        """Each token's sum of its rows' gradients, and each choice's gradient of its weight."""
        row_map, *scaled = ctx.saved_tensors
        dy = grad_output
        dscales = None if self.scale_input else grad_extra_outputs[1]
        dprobs: Tensor | None
        dx, dprobs = moe.gather_sum(dy, row_map, scaled[1] if scaled else None, dscales)
        if scaled and ctx.needs.extra_inputs[0]:
            dprobs = cast(moe.row_dots(dy, scaled[0], row_map, False), ctx.dtype)
        elif dscales is None:
            dprobs = None
        if dprobs is not None:
            dprobs = dprobs.view(*ctx.shape[:-1], row_map.shape[1])
        return dx.view(ctx.shape), dprobs, None


class Combine(BasicOperation):
    """Each token's sum of its rows, ``[..., H]``, from rows ``[rows, H]`` and their row map.

    Extra inputs, which a :class:`Dispatch` of the run gives by name: ``row_map``, int32
    ``[..., k]``; with ``weighted`` also ``scales`` ``[rows]``, which multiply the rows. Sums are
    taken in FP32 in the order of a token's choices; a token without a row gets zeros. In the
    backward every row gets its token's gradient, rows of the tail zeros.

    Saves ``(row_map,)``, and if weighted ``(row_map, rows, scales)``.

    Args:
        weighted: multiply the rows by ``scales``. Leave it off where something before did, as
            :class:`ScaledSwiGLU` does.

    Raises:
        ValueError: in a call, the input is not ``[rows, H]`` with at most as many rows as choices,
            or ``row_map`` or ``scales`` are not what a :class:`Dispatch` gives.
    """

    num_extra_inputs = 1
    extra_input_names = ("row_map", "scales")
    fact_names = ("weighted",)
    saves = "row map; if weighted rows, scales"

    def __init__(self, weighted: bool = False) -> None:
        check_bools("Combine", weighted=weighted)
        self.num_extra_inputs = 2 if weighted else 1
        super().__init__()
        self.weighted = weighted

    def forward_impl(
        self,
        ctx: OperationContext,
        input_: Tensor,
        row_map: Tensor | None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """One sum over each token's choices."""
        rows = values(input_)
        row_map = self._check(rows, row_map)
        if self.weighted:
            check_row_scales(scales, rows, "Combine")
        flat = row_map.reshape(-1, row_map.shape[-1])
        ctx.num_rows = rows.shape[0]
        ctx.save_for_backward(flat, *((rows, scales) if self.weighted else ()))
        y, _ = moe.gather_sum(rows, flat, scales, None)
        return y.view(*row_map.shape[:-1], rows.shape[1])

    @staticmethod
    def _check(rows: Tensor, row_map: Tensor | None) -> Tensor:
        check_dtype(rows, "input", "Combine")
        if (
            row_map is None
            or row_map.dtype != torch.int32
            or row_map.dim() == 0
            or row_map.device != rows.device
        ):
            raise ValueError(
                f"row_map of Combine must be int32 of shape (..., k) on {rows.device}, as Dispatch "
                f"gives it, got {described(row_map)}"
            )
        if rows.dim() != 2 or rows.shape[0] > row_map.numel():
            raise ValueError(
                f"input of Combine must be rows of shape (rows, H), at most the {row_map.numel()} "
                f"choices of row_map, got {tuple(rows.shape)}"
            )
        return row_map

    def backward_impl(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        """Each row's gradient is its token's; that of its weight, a dot product."""
        row_map, *weighted = ctx.saved_tensors
        dy = grad_output.reshape(-1, grad_output.shape[-1])
        scales = weighted[1] if weighted else None
        drows = dscales = None
        if ctx.needs.input:
            drows, _ = moe.scatter_rows(dy, row_map, scales, ctx.num_rows, self.weighted)
        if scales is not None and ctx.needs.extra_inputs[1]:
            rows = weighted[0]
            dscales = moe.row_dots(rows, cast(dy, rows.dtype), row_map, True)
            dscales = cast(dscales, scales.dtype)
        return (drows, None, dscales) if self.weighted else (drows, None)
