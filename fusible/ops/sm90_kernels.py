"""The library ops of grouped products where our kernels for Hopper (SM90) run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.fuser.context import OperationContext
from fusible.fuser.target import Target
from fusible.kernels.sm90 import tiles
from fusible.kernels.sm90.spec import Tile
from fusible.ops.grouped_kernels import GroupedKernels
from fusible.ops.wgrad import is_column_major
from fusible.recipes.product import is_quantized


class Sm90Kernels(GroupedKernels):
    """`GroupedKernels`, whose tiles are known."""

    def describe_tiles(
        self,
        target: Target,
        op: Any,
        ctx: OperationContext,
        rows: int,
        act: Any = None,
        dact: Any = None,
    ) -> Sequence[Tile]:
        """See `GroupedKernels`; none of products that other kernels may run."""
        stored = ctx.quantizes or any([is_quantized(w) for w in ctx.parameters])
        if (
            not has_row_major_weights(op, ctx)
            or (stored and not ctx.requires_grad)  # `few_rows` may multiply by stored weights
            or getattr(ctx.recipe, "backward_override", None) is not None
        ):
            return ()
        return tiles.of_linear(op, rows, target.multiprocessors, act and act.glu, dact and dact.glu)


SM90 = Sm90Kernels()


def has_row_major_weights(op: Any, ctx: OperationContext) -> bool:
    """Whether a grouped linear has row-major weights and ``main_grad``."""
    buffers = [getattr(p, "main_grad", None) for p in op.parameters()]
    return not ctx.column_major and not any(
        [b is not None and b.dim() > 1 and is_column_major(b) for b in buffers]
    )
