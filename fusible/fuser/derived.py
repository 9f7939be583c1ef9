"""The dtypes that ops without ``output_dtypes`` give, found on fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusible.fuser.context import OperationContext
from fusible.fuser.fakes import restoring
from fusible.fuser.plan import GradNeeds
from fusible.fuser.te_ops import call_fuser_forward

logger = logging.getLogger(__name__)

_ROWS, _FEATURES = 4, 64  # of an input, where no parameter says them


def derived_dtypes(
    op: Any,
    input_dtype: torch.dtype | None,
    extra_dtypes: Sequence[torch.dtype | None],
    autocast: torch.dtype | None,
) -> tuple[torch.dtype | None, ...]:
    """The dtypes of the output and of the extra outputs of an op for inputs of these dtypes.

    Its forward runs on fake tensors of some shapes, as it would without gradients and outside of a
    recipe. All are None where that does not work, or where a tensor without
    dimensions would be promoted differently.
    """
    unknown = (None,) * (1 + op.num_extra_outputs)
    floats = {t for t in extra_dtypes if t is None or t.is_floating_point}
    if input_dtype is None or floats - {input_dtype}:
        return unknown
    stored = [*op.parameters(), *op.buffers()]
    sizes = [size for t in stored for size in reversed(t.shape)]
    device = stored[0].device if stored else torch.device("cpu")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for size, extra_dims in product(
        dict.fromkeys([*sizes, _FEATURES]), (2, 1)[: 1 + bool(extra_dtypes)]
    ):
        try:
            with restoring(op.modules(), mode, all_attributes=True), torch.no_grad():
                x, *extra = [
                    torch.empty((_ROWS, size)[:dims], dtype=dtype, device=device)
                    for dims, dtype in ((2, input_dtype), *[(extra_dims, t) for t in extra_dtypes])
                ]
                return _forward_dtypes(op, x, extra, autocast)
        except Exception as error:  # it wants another shape, or values
            logger.debug("%s does not run on fake tensors: %r", type(op).__name__, error)
    return unknown


def _forward_dtypes(
    op: Any, x: Tensor, extra: Sequence[Tensor], autocast: torch.dtype | None
) -> tuple[torch.dtype | None, ...]:
    """The dtypes of what the op's forward returns."""
    params = op.own_parameters()
    needs = GradNeeds(False, False, (False,) * len(params), (False,) * len(extra))
    ctx = OperationContext(needs, None, None if op.handles_autocast else autocast, params)
    with ctx.autocast(x.device.type):
        output, (outputs,) = call_fuser_forward(op, [ctx], x, [tuple(extra)])
    return (output.dtype, *[None if t is None else t.dtype for t in outputs])
